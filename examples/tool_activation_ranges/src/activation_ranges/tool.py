"""The tool: inserts a routine after each op and keeps a record of its outputs.

Defines the options and what happens while a model runs. The tool never disturbs a model: a value
that cannot be read is left out, and the result says so.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

import amanda
from activation_ranges.arrays import Array, NotNumbersError, as_array, leaves
from activation_ranges.result import Range, Ranges
from activation_ranges.sketch import Sketch
from amanda_core.interface.vocabulary import OP_TYPES

__all__ = ["ActivationRanges"]


#: These do not compute activations, and `empty` returns uninitialized memory.
_OF_NOTHING = frozenset({"constant", "empty", "eye", "full", "random", "range"})


class ActivationRanges(amanda.Tool):
    """Minimum, maximum, percentiles and a histogram of the outputs of each op.

    Args:
        types: Common types of the operators to watch, such as ``conv2d``. The default is all
            operators with a common type, except those that create tensors.
        by: One range for each output of each ``op``, or one for each ``module``.
        percentiles: The percentiles, from 0 to 100.
        bins: Number of bins of each histogram.
        sample: Maximum number of elements of one output, drawn at random, that are used for the
            percentiles and the histogram. Extremes, NaN and infinities cover all elements.
        charts: Number of histograms to draw.

    Raises:
        ValueError: An option is invalid; the message says which one.
    """

    def __init__(
        self,
        types: Sequence[str] = (),
        by: Literal["op", "module"] = "op",
        percentiles: Sequence[float] = (0.1, 1.0, 50.0, 99.0, 99.9),
        bins: int = 100,
        sample: int = 100_000,
        charts: int = 24,
    ) -> None:
        super().__init__()
        unknown = sorted(set(types) - set(OP_TYPES))
        if unknown:
            raise ValueError(f"types: no such operators: {', '.join(unknown)}")
        if by not in ("op", "module"):
            raise ValueError(f"by: {by!r} is neither op nor module")
        if not all(0 <= percentile <= 100 for percentile in percentiles):
            raise ValueError("percentiles: they go from 0 to 100")
        for name, value in (("bins", bins), ("sample", sample)):
            if value < 1:
                raise ValueError(f"{name}: {value} is less than 1")
        self.types = frozenset(types)
        self.by = by
        self.percentiles = tuple(sorted(set(percentiles)))
        self.bins, self.sample, self.charts = bins, sample, charts
        self._records: dict[tuple[str | int, int], _Record] = {}
        self._left_out: dict[str, str] = {}
        # Graph frameworks call routines on several threads of their own.
        self._lock = threading.Lock()
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: amanda.OpContext) -> None:
        word = context["type"]
        wanted = word in self.types if self.types else word not in _OF_NOTHING
        if word is None or not wanted or context.zone != "model":
            return
        context.insert_after_op(self._record, context=context)

    def _record(self, *outputs: Any, context: amanda.OpContext) -> None:
        if context.recomputed:
            return  # A checkpoint computes the same values again.
        for place, value in enumerate(leaves(outputs)):
            try:
                array = as_array(value)
            except NotNumbersError as error:
                self._left_out.setdefault(context.name, str(error))
                continue
            with self._lock:
                self._record_of(context, place).add(array, self.sample)

    def _record_of(self, context: amanda.OpContext, place: int) -> _Record:
        key: tuple[str | int, int] = (context.get_op_id(), place)
        if self.by == "module":
            key = (context.module_path, 0)
        if key not in self._records:
            self._records[key] = _Record(context, place, self.by)
        return self._records[key]

    def result(self) -> Ranges:
        """Return what has been recorded so far, in the order of first execution."""
        with self._lock:
            ranges = [
                record.range(self.percentiles, self.bins) for record in self._records.values()
            ]
            return Ranges(ranges, dict(self._left_out), self.by, self.charts)


class _Record:
    """Record of one output of one op, or of all outputs of one module."""

    def __init__(self, context: amanda.OpContext, place: int, by: str) -> None:
        whole = by == "module"
        self.name = (context.module_path or "(outside modules)") if whole else context.name
        self.word = "" if whole else str(context["type"])
        self.source = "" if whole else context.source or ""
        self.module = context.module_path
        self.namespace = context.namespace
        self.place = place
        self.dtypes: dict[str, None] = {}
        self.executions = self.elements = 0
        self.nan = self.above = self.below = 0
        self.lowest: int | float | None = None
        self.highest: int | float | None = None
        self.mean = 0.0
        self.sketch = Sketch()

    def add(self, array: Array, sample: int) -> None:
        """Add one output."""
        self.executions += 1
        self.elements += array.size
        self.dtypes[str(array.dtype)] = None
        if not array.size:
            return
        # The extremes also reveal NaN and infinities, without another array.
        lowest, highest = array.min(), array.max()
        if not (np.isfinite(lowest) and np.isfinite(highest)):
            array = self._finite(array)
            if not array.size:
                return
            lowest, highest = array.min(), array.max()
        # As Python numbers, so that 64-bit integers stay exact.
        self.lowest = lowest.item() if self.lowest is None else min(self.lowest, lowest.item())
        self.highest = highest.item() if self.highest is None else max(self.highest, highest.item())
        if array.size > sample:
            # A separate generator does not change the program's random numbers. Every n-th element
            # might all be of one channel, so the sample is random.
            chosen = np.random.default_rng(self.executions).integers(array.size, size=sample)
            if array.flags.c_contiguous:
                array = array.reshape(-1)[chosen]
            else:
                # Flattening would copy the whole array.
                array = array[np.unravel_index(chosen, array.shape)]
        values = array.astype(np.float64)
        before = self.sketch.total
        self.sketch.add(values)
        # Weighted like this, so that no sum can overflow.
        self.mean *= before / self.sketch.total
        self.mean += float((values / self.sketch.total).sum())

    def _finite(self, array: Array) -> Array:
        """Count the elements that are not finite, and return the others."""
        nan = np.isnan(array)
        self.nan += int(nan.sum())
        self.above += int(np.isposinf(array).sum())
        self.below += int(np.isneginf(array).sum())
        return array[np.isfinite(array)]

    def range(self, percentiles: Sequence[float], bins: int) -> Range:
        """Return the record as plain numbers."""
        known: dict[str, Any] = {}
        if self.lowest is not None and self.highest is not None:
            ends = float(self.lowest), float(self.highest)
            found = self.sketch.percentiles(percentiles, *ends)
            edges, counts = self.sketch.histogram(bins, *ends)
            known = {
                "lowest": self.lowest,
                "highest": self.highest,
                "mean": self.mean,
                "zeros": self.sketch.zeros / self.sketch.total,
                "percentiles": dict(zip(percentiles, found, strict=True)),
                "edges": tuple(edges.tolist()),
                "counts": tuple(counts.tolist()),
            }
        return Range(
            name=self.name,
            word=self.word,
            module=self.module,
            source=self.source,
            namespace=self.namespace,
            output=self.place,
            dtypes=tuple(self.dtypes),
            executions=self.executions,
            elements=self.elements,
            nan=self.nan,
            infinite=(self.below, self.above),
            **known,
        )
