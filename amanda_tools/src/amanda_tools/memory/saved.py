"""What PyTorch's autograd keeps for backward, which no operator gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["kept", "sequence"]


def sequence() -> int:
    """The number that the next node of PyTorch's autograd will have."""
    import torch

    found: int = torch._C._autograd._get_sequence_nr()
    return found


def kept(outputs: Any, start: int) -> list[Any]:
    """Return what autograd of PyTorch keeps for the backward of an operator that has just run.

    That of hooks, as those of a checkpoint are, is not asked for: they would compute it.

    Args:
        outputs: What the operator gave.
        start: `sequence` before it ran.
    """
    import torch

    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return []
    found: list[Any] = []
    nodes = [_node(tensor) for tensor in _tensors(outputs, torch.Tensor)]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen or node.name().endswith("AccumulateGrad") or node._sequence_nr() < start:
            continue
        seen.add(node)
        nodes += (following for following, _ in node.next_functions)
        for name in dir(type(node)):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    found.append(getattr(node, name))
                except RuntimeError:
                    continue  # Written since, or freed: nothing that autograd still keeps.
    return found


def _node(tensor: Any) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None  # A view that was made and written without gradients: it has no node to ask.


def _tensors(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, kind)
