"""Slices: the frameworks' ways of slicing, converted to NumPy indices.

Defines the layer rules of slices, which `layers` lists. Indexing by lists, tensors and masks is not
supported, except by an index for each sample. NumPy is imported only when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

from amanda_core import OpContext
from amanda_tools.effective_path.model import LayerRule, Unsuited

__all__ = ["per_head", "repeated", "tensorflow_slice", "torch_slice"]


def torch_slice(context: OpContext) -> LayerRule | None:
    """Return the rule of a PyTorch operator that slices; None for other operators."""
    return _rule(context.op_type, _TORCH)


def tensorflow_slice(context: OpContext) -> LayerRule | None:
    """Return the rule of a TensorFlow operator that slices; None for other operators."""
    return _rule(context.op_type, _TENSORFLOW)


def _rule(name: str, known: Mapping[str, Callable[[Mapping[str, Any]], Any]]) -> LayerRule | None:
    if name not in known:
        return None

    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        return {"places": _places(known[name](given), operands[0], output)}

    return LayerRule("slice", (0,), arguments)


# Functions from the inputs by name to a NumPy index.


def _getitem(given: Mapping[str, Any]) -> Any:
    indices = given["indices"]
    items = indices if isinstance(indices, tuple) else (indices,)
    plain = (int, slice, EllipsisType, type(None))
    # A token of each sample: `x[range(samples), last]`.
    picked = len(items) > 1 and all(getattr(item, "ndim", 0) == 1 for item in items)
    if not picked and not all(isinstance(item, plain) for item in items):
        raise Unsuited("it is indexed by something other than numbers and ranges")
    return items


def _select(given: Mapping[str, Any]) -> Any:
    return _along(given["dim"], given["index"])


def _narrow(given: Mapping[str, Any]) -> Any:
    start, length = int(given["start"]), int(given["length"])
    # A range that starts at -1 with length 1 ends at the end, not at 0.
    return _along(given["dim"], slice(start, start + length or None))


def _along(axis: int, index: Any) -> Any:
    whole = (slice(None),)
    return (whole * axis + (index,)) if axis >= 0 else (..., index, *(whole * (-axis - 1)))


def _begin_and_size(given: Mapping[str, Any]) -> Any:
    pairs = zip(given["begin"].tolist(), given["size"].tolist(), strict=True)
    return tuple(slice(start, None if size < 0 else start + size) for start, size in pairs)


def _strided(given: Mapping[str, Any]) -> Any:
    bounds = (given[bound].tolist() for bound in ("begin", "end", "strides"))
    items: list[Any] = []
    for place, (begin, end, stride) in enumerate(zip(*bounds, strict=True)):

        def has(mask: str, bit: int = 1 << place) -> bool:
            return bool(given[mask] & bit)

        if has("ellipsis_mask"):
            items.append(...)
        elif has("new_axis_mask"):
            items.append(None)
        elif has("shrink_axis_mask"):
            items.append(begin)
        else:
            first, last = has("begin_mask"), has("end_mask")
            items.append(slice(None if first else begin, None if last else end, stride))
    return tuple(items)


_TORCH = {"__getitem__": _getitem, "select": _select, "narrow": _narrow}
_TENSORFLOW = {"Slice": _begin_and_size, "StridedSlice": _strided}


def _places(index: Any, x: Any, output: Any) -> Any:
    """Return the indices of the output's elements in the flattened input."""
    import numpy as np

    return _with_samples(np.arange(x.size).reshape(x.shape)[index], x, output)


def repeated(x: Any, output: Any) -> Any:
    """Return, for each element of the output, the index of the element that it repeats."""
    import numpy as np

    places = np.arange(x.size).reshape(x.shape)
    return _with_samples(np.broadcast_to(places, output.shape), x, output)


def per_head(array: Any, query: Any) -> Any:
    """Repeat keys or values that groups of heads share, so that there is one for each query."""
    import numpy as np

    groups, rest = divmod(query.shape[-3], max(1, array.shape[-3]))
    return array if rest or groups < 2 else np.repeat(array, groups, axis=-3)


def _with_samples(found: Any, x: Any, output: Any) -> Any:
    import numpy as np

    if not (x.ndim and found.ndim) or found.shape != output.shape:
        raise Unsuited("it changes the axis of samples")
    samples = np.arange(len(found)).reshape(-1, *[1] * (found.ndim - 1))
    if (found // max(1, x[:1].size) != samples).any():
        raise Unsuited("it changes the axis of samples")
    return found
