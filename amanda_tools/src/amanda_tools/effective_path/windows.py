"""Windows of convolutions and poolings, for effective paths: which elements an output covers.

Works on NumPy arrays, many outputs at once. NumPy is imported only when needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Covered", "Windows"]


@dataclass
class Covered:
    """Elements that the windows of some outputs cover.

    Attributes:
        values: Values of the elements, of shape (outputs, elements); 0 for padding.
        valid: Which of them exist, of the same shape; None for all.
        number: How many of them exist for each output; None for all.
        index: Returns the flat indices, in the tensor's memory layout, of the elements at these
            rows and columns of `values`.
    """

    values: Any
    valid: Any
    number: Any
    index: Callable[[Any, Any], Any]

    def of(self, rows: Any) -> Covered:
        """Return the elements of these outputs, which may repeat."""
        return Covered(
            self.values.take(rows, axis=0),
            None if self.valid is None else self.valid.take(rows, axis=0),
            None if self.number is None else self.number[rows],
            lambda own, columns: self.index(rows[own], columns),
        )


class Windows:
    """Elements that each output of a convolution or pooling covers.

    Args:
        x: The input, with axes N, C and space.
        steps: Distance of neighbours in the tensor's memory layout along each axis of `x`.
        extent: Spatial sizes of the output.
        kernel: Sizes of the window.
        stride: Steps between windows.
        before: Padding before each axis; the padding after it follows from the sizes.
        dilation: Steps between the elements of a window.
        adaptive: Whether the windows divide the space evenly, as in adaptive pooling; `kernel` is
            then the largest window.
    """

    def __init__(
        self,
        x: Any,
        steps: Sequence[int],
        extent: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        before: Sequence[int],
        dilation: Sequence[int],
        adaptive: bool = False,
    ) -> None:
        import numpy as np

        space = x.shape[2:]
        widths, self._starts, self._lengths = [], [], []
        for axis, size in enumerate(space):
            if adaptive:
                places = np.arange(extent[axis])
                starts = places * size // extent[axis]
                self._lengths.append(-(-(places + 1) * size // extent[axis]) - starts)
            else:
                starts = np.arange(extent[axis]) * stride[axis]
            self._starts.append(starts)
            reach = int(starts[-1]) + (kernel[axis] - 1) * dilation[axis] + 1
            widths.append((before[axis], max(0, reach - size - before[axis])))
        self._shape = [a + size + b for size, (a, b) in zip(space, widths, strict=True)]
        inside = tuple(slice(a, a + size) for size, (a, _) in zip(space, widths, strict=True))
        padded = np.zeros((*x.shape[:2], *self._shape), x.dtype)
        own: Any = (..., *inside)
        padded[own] = x
        self._values = padded.reshape(-1)
        #: Which places exist; None for all.
        self._exists: Any = None
        if list(space) != self._shape:
            exists = np.zeros(self._shape, bool)
            exists[inside] = True
            self._exists = exists.reshape(-1)
        self._layout, self._before = list(steps), [a for a, _ in widths]
        self._steps = [math.prod(padded.shape[axis + 1 :]) for axis in range(padded.ndim)]
        self._offsets = np.stack(
            np.meshgrid(*(np.arange(size) for size in kernel), indexing="ij"), axis=-1
        ).reshape(-1, len(kernel))
        self._reach = self._offsets @ (np.asarray(dilation, int) * np.asarray(self._steps[2:], int))

    def of(self, samples: Any, channels: Any, places: Sequence[Any], depth: int = 1) -> Covered:
        """Return what the windows at these places cover.

        Args:
            samples: Sample of each output.
            channels: First input channel that each output covers.
            places: Spatial position of each output, axis by axis.
            depth: Number of input channels that a window covers.
        """
        import numpy as np

        place = self._place(places)
        base = samples * self._steps[0] + channels * self._steps[1] + place
        reach = (np.arange(depth)[:, None] * self._steps[1] + self._reach[None, :]).reshape(-1)
        values: Any = self._values.take(base[:, None] + reach[None, :])
        valid: Any = None
        if self._exists is not None:
            valid = self._exists.take(place[:, None] + self._reach[None, :])
        if self._lengths:
            inside = np.ones((len(base), len(self._reach)), bool)
            for axis, position in enumerate(places):
                inside &= self._offsets[:, axis] < self._lengths[axis][position][:, None]
            valid = inside if valid is None else inside & valid
        number = None if valid is None else np.count_nonzero(valid, axis=1) * depth
        if valid is not None:
            valid = np.repeat(valid[:, None, :], depth, axis=1).reshape(values.shape)
        if self._lengths:
            values[~valid] = 0.0
        index = lambda rows, columns: self._index(base[rows] + reach[columns])  # noqa: E731
        return Covered(values, valid, number, index)

    def distinct(self, samples: Any, channels: Any, places: Sequence[Any]) -> tuple[Any, Any]:
        """Find windows that several outputs cover.

        Returns:
            For each distinct window, the number of an output that covers it; and for each output,
            the number of its window.
        """
        import numpy as np

        base = samples * self._steps[0] + channels * self._steps[1] + self._place(places)
        one = np.full(self._values.size, -1)
        one[base] = np.arange(len(base))
        starts = np.flatnonzero(one >= 0)
        owners = one[starts]
        one[starts] = np.arange(len(starts))
        return owners, one[base]

    def _place(self, places: Sequence[Any]) -> Any:
        place: Any = 0
        for axis, position in enumerate(places):
            place = place + self._starts[axis][position] * self._steps[axis + 2]
        return place

    def _index(self, where: Any) -> Any:
        """Return the indices in the tensor's memory layout of elements of the padded input."""
        found: Any = 0
        for axis, step in enumerate(self._steps):
            place, where = divmod(where, step)
            found = found + (place - ([0, 0, *self._before][axis])) * self._layout[axis]
        return found
