"""Names of the leaves of autograd graphs, whose gradients are accumulated."""

from __future__ import annotations

from typing import Any

import torch

from amanda_core.driver_kit import Known, Labels, Scopes
from amanda_driver_torch.threads.state import STATE

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

    def key(self, tensor: torch.Tensor) -> tuple[Any, str]:
        """Return identity and readable name of a leaf that is used now."""
        found = self._key_of(tensor)
        if self._known.get(tensor) != found:
            self._known.set(tensor, found)
        return found

    def remembered_key(self, tensor: torch.Tensor) -> tuple[Any, str]:
        """Return the name that a leaf had when it was used; in a backward pass no module runs."""
        return self._known.get(tensor) or self._key_of(tensor)

    def _key_of(self, tensor: torch.Tensor) -> tuple[Any, str]:
        for scope in (a.scope for a in reversed(STATE.activations)):
            name = self._scopes.weight_name(scope, tensor)
            if name is not None:
                return ("parameter", scope.root, name), name
        _, number = self._labels.look_up(tensor)
        return ("leaf", number), f"leaf{number}"
