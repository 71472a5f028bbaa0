"""Names of the leaves of autograd graphs, whose gradients are accumulated."""

from __future__ import annotations

from typing import Any

import torch

from amanda_core.driver_kit import Known, Labels, Scope, Scopes
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.distributed import flattened

__all__ = ["Leaves"]


class Leaves:
    """The leaves that have been used.

    Args:
        scopes: Names the parameters of modules.
        labels: Numbers all others.
    """

    def __init__(self, scopes: Scopes, labels: Labels) -> None:
        self._scopes, self._labels = scopes, labels
        #: Identity and readable name of leaves, as when they were last used.
        self._known: Known[tuple[Any, str]] = Known()

    def key(self, tensor: torch.Tensor, *inner: Scope) -> tuple[Any, str]:
        """Return identity and readable name of a leaf that is used now.

        Args:
            tensor: The leaf.
            inner: The scope in which it is used, if a compiled program runs in it.
        """
        found = self._key_of(tensor, *inner)
        if self._known.get(tensor) != found:
            self._known.set(tensor, found)
        return found

    def remembered_key(self, tensor: torch.Tensor) -> tuple[Any, str]:
        """Return the name that a leaf had when it was used; in a backward pass no module runs."""
        return self._known.get(tensor) or self._key_of(tensor)

    def parts(self, leaf: torch.Tensor) -> list[tuple[Any, str, int, tuple[int, ...]]]:
        """Return identity and readable name of the parameters that a leaf of FSDP1 consists of,
        with the place at which each begins, and its shape; nothing for other leaves.
        """
        found = []
        around = STATE.activations[-1].scope if STATE.activations else None
        for name, owner, start, shape in flattened(leaf):
            scope = self._scopes.known(owner, around)
            if scope is not None:
                path = f"{scope.path}.{name}" if scope.path else name
                found.append((("parameter", scope.root, path), path, start, shape))
        return found

    def _key_of(self, tensor: torch.Tensor, *inner: Scope) -> tuple[Any, str]:
        for scope in (*inner, *(a.scope for a in reversed(STATE.activations))):
            name = self._scopes.weight_name(scope, tensor)
            if name is not None:
                return ("parameter", scope.root, name), name
        if parts := self.parts(tensor):
            _, path, _, _ = parts[0]
            return ("flat", *parts[0][0][1:]), path
        _, number = self._labels.look_up(tensor)
        return ("leaf", number), f"leaf{number}"
