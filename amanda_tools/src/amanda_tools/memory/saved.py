"""Tensors that PyTorch's autograd saves for backward, which no operator returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any

__all__ = ["saved_tensors", "sequence_numbers"]


def sequence_numbers() -> Callable[[], int]:
    """Return a function that returns the sequence number of PyTorch's next autograd node."""
    return _autograd()[0]


def saved_tensors(outputs: Any, start: int) -> list[Any]:
    """Return the tensors that autograd saved for the backward of an operator that has just run.

    Tensors that saved-tensor hooks replace, such as a checkpoint's, are not read, because reading
    would compute them.

    Args:
        outputs: Outputs of the operator.
        start: What the function of `sequence_numbers` returned before it ran.
    """
    sequence_number, hooks, tensor_type = _autograd()
    made = sequence_number() - start
    if not made or hooks(True) is not None:
        return []
    found: list[Any] = []
    nodes: list[Any] = []
    are_plain = {tensor_type}.issuperset(map(type, outputs))
    for tensor in outputs if are_plain else _tensors(outputs, tensor_type):
        try:
            nodes.append(tensor.grad_fn)
        except RuntimeError:
            continue  # A view that was created and written without gradients has no node.
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        kind: Any = type(node)
        names = _names(kind)
        if names is None or (number := node._sequence_nr()) < start:
            continue
        seen.add(node)
        # A single node has none of the operator's own after it.
        if made != 1 or number != start:
            nodes.extend(map(_NODE, node.next_functions))
        for name in tuple(names):
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue  # Freed, or written since: autograd no longer keeps it.
            if isinstance(value, _NEVER_TENSORS):
                names.remove(name)
            elif value is not None:
                found.append(value)
    return found


#: The node of an edge.
_NODE = itemgetter(0)
#: A node that saves one of these saves it in each execution.
_NEVER_TENSORS = (bool, int, float, str)


@lru_cache(maxsize=1024)
def _names(kind: Any) -> list[str] | None:
    """Return the names of what nodes of a class save; None if they accumulate gradients."""
    if kind.__name__.endswith("AccumulateGrad"):
        return None
    return [name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"]


@cache
def _autograd() -> tuple[Callable[[], int], Callable[[bool], Any], type]:
    import torch

    autograd = torch._C._autograd
    return autograd._get_sequence_nr, autograd._top_saved_tensors_default_hooks, torch.Tensor


def _tensors(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, kind)
