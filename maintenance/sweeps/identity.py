"""Tools that see every operator, forward and backward, and change nothing.

There are three ways to change nothing: to return None, to return the same objects, and to return
new copies. Amanda cannot know that a copy changes nothing, so it is processed like an edit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

import amanda
from amanda_core.testing.kit.tools import Everywhere

Routine = Callable[..., Any]


def nothing(*values: Any) -> None:
    """Return None."""


def same(*values: Any) -> Any:
    """Return the same objects."""
    return values


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return True if a tensor contains other tensors, as those of torch.distributed do."""
    # The stubs lack this method.
    keys: Any = torch._C._dispatch_keys(tensor)
    return bool(keys.has(torch._C.DispatchKey.Python))


def movable(tensor: torch.Tensor) -> bool:
    """Return True if another tensor can be created over a copy of its storage."""
    return (
        tensor.layout == torch.strided
        and not _is_wrapper(tensor)
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def exact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides and alignment, also of views with gaps or overlaps.

    `clone` would make such views dense. torch has other kernels for dense tensors, which round
    differently.
    """
    if not movable(tensor):
        return tensor.detach().clone()
    storage: Any = tensor.untyped_storage()
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.detach().new_empty(0).set_(storage.clone(), *place)


def copied(value: Any) -> Any:
    """Copy a tensor, or the tensors in a list; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        try:
            return exact_copy(value)
        except NotImplementedError:
            return value  # Of a class that defines no copies.
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return value


def clones(*values: Any) -> Any:
    """Return copies with the same layout."""
    return tuple(copied(value) for value in values)


ROUTINES: dict[str, Routine] = {"none": nothing, "same": same, "clones": clones}


#: In-place ops that change the shape of their own input. Editing their result is a documented
#: error; the other five points are edited.
RESHAPE_THEMSELVES = frozenset(
    {
        *("squeeze_", "unsqueeze_", "as_strided_", "transpose_", "t_"),
        *("swapaxes_", "swapdims_", "resize_", "resize_as_"),
    }
)


class Identity(Everywhere):
    """Calls `routine` at all six points: forward, aligned backward and raw backward.

    Attributes:
        called: Number of calls.
    """

    def __init__(
        self,
        routine: Routine,
        refused: Collection[tuple[str, str]] = (),
        left_alone: Collection[str] = (),
    ) -> None:
        """Create the tool.

        Args:
            routine: Function that is called.
            refused: Gradients to leave out: (type of op, "inputs" or "outputs").
            left_alone: Types of ops whose values are returned as they are instead of copied.
        """
        super().__init__(self.run)
        self.chosen, self.refused, self.left_alone = routine, refused, left_alone
        self.called = 0

    def forward(self, context: amanda.OpContext) -> None:
        """Insert routines at the points of a forward op."""
        copies = self.chosen is clones
        kept = copies and context.op_type in self.left_alone
        reshapes = copies and context.op_type in RESHAPE_THEMSELVES
        context.insert_before_op(same if kept else self.run)
        context.insert_after_op(same if kept or reshapes else self.run)
        if (context.op_type, "outputs") not in self.refused:
            context.insert_before_backward_op(self.run)
        if (context.op_type, "inputs") not in self.refused:
            context.insert_after_backward_op(self.run)

    def run(self, *values: Any) -> Any:
        """Call the routine and count the call."""
        self.called += 1
        return self.chosen(*values)
