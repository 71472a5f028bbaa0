"""Weights: the grid of each parameter, and the quantization of the parts that operators read.

Owns the scales, which are those of whole parameters, so that all readers share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from amanda_core import OpContext
from amanda_core.engine.activation import autodiff_enabled
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.weights.reads import Weight
from amanda_core.weights.state import WeightState
from amanda_tools.kit.operators.clock import Clock
from amanda_tools.kit.tensors.values import host, numbers
from amanda_tools.kit.weights.baking import values_of
from amanda_tools.kit.weights.coverage import WeightCoverage
from amanda_tools.quantize.fake import constants, fake_quantize, quantize_item, quantize_now
from amanda_tools.quantize.formats import EPSILON, Format, Grid
from amanda_tools.quantize.learned import can_learn
from amanda_tools.quantize.observers import quantized, weight_grid
from amanda_tools.quantize.operands import (
    Operand,
    scale_part,
    shared,
    shared_axes,
    value_at,
    with_item,
)
from amanda_tools.quantize.options import Options
from amanda_tools.quantize.result import QuantizedWeight, decibels
from amanda_tools.quantize.steps import Steps

__all__ = ["Weights"]


class Weights:
    """The weights that a tool quantizes.

    Args:
        options: The user's options.
        steps: The learned steps.
        coverage: Where it is noted which weights are reached.
        clock: Measures the time that grids take.
        claimed: Returns what is loaded for a weight under a name, or None.

    Attributes:
        grids: The scales of each parameter: NumPy arrays of its rank, with size 1 along the axes
            whose elements share a scale. An axis of groups has their number.
        zeros: The zero points, of the same shapes, if grids have some.
        rows: Owner -> what the result says of a parameter.
    """

    def __init__(
        self,
        options: Options,
        steps: Steps,
        coverage: WeightCoverage,
        clock: Clock,
        claimed: Callable[[str, Weight], Any],
    ) -> None:
        self._options, self._steps, self._coverage = options, steps, coverage
        self._clock, self._claimed = clock, claimed
        self.grids: WeightState[Any] = WeightState()
        self.zeros: WeightState[Any] = WeightState()
        self.rows: dict[str, QuantizedWeight] = {}
        #: The same of parameters of which only copies are quantized, by their present values.
        self._copied: dict[str, QuantizedWeight] = {}
        #: Owner -> the facts of its framework.
        self._facts: dict[str, Facts] = {}

    def insert(
        self,
        context: OpContext,
        facts: Facts,
        operand: Operand,
        weight: Weight,
        exported: bool = False,
    ) -> None:
        """Insert the quantization of a weight with scales that do not depend on the execution.

        Args:
            context: The operator's context.
            facts: The driver's facts about tensors.
            operand: The operand.
            weight: The weight that it is.
            exported: Whether for a program, in which nothing is learned or kept.
        """
        if not self.prepare(context, facts, operand, weight):
            return
        routine = partial(
            self._quantized,
            facts=facts,
            operand=operand,
            context=context if weight.varies else None,
        )
        if exported and not weight.varies:
            made = constants(facts, self._part(weight), value_at(context, operand))
            context.insert_before_op(
                quantize_item, inputs=[operand.position], item=operand.item, facts=facts, **made
            )
            return
        if self._options.learns:
            with autodiff_enabled():
                context.insert_before_op(routine, inputs=[operand.position])
        elif weight.varies or operand.item is not None:
            context.insert_before_op(routine, inputs=[operand.position])
        else:
            made = constants(facts, self._part(weight), value_at(context, operand))
            # Elsewhere a graph may contain the routine, and then nothing is to be kept.
            keeps = can_learn(context.namespace)
            kept = self.grids.memoized(fake_quantize) if keeps else fake_quantize
            context.insert_before_op(kept, inputs=[operand.position], facts=facts, **made)

    def prepare(self, context: OpContext, facts: Facts, operand: Operand, weight: Weight) -> bool:
        """Make the scales of a weight; return False if it cannot be quantized, which is noted."""
        form = self._options.format_for(weight)
        if form is None:
            self._coverage.add_unreached(weight, "weights are not to be quantized")
            return False
        try:
            self._make(context, facts, operand, weight, form)
        except NotReadableError as error:
            self._coverage.add_unreached(weight, str(error))
            return False
        return True

    def note_copied(self, context: OpContext, weight: Weight) -> None:
        """Note that a copy of a weight is quantized, such as one in another dtype.

        Its scales are those of its values in each execution, which nobody keeps.
        """
        form = self._options.format_of(True)
        if form is not None:
            name = "" if weight.name.startswith("#") else weight.name
            row = QuantizedWeight(
                name, context.name, context.source, list(weight.shape), form.name, [], [], None, []
            )
            self._copied.setdefault(weight.owner, row)

    def baked(self, weight: Weight) -> Callable[[Any], Any] | None:
        """Return the function that quantizes a whole parameter; None if it is not quantized."""
        form, owner = self._options.format_for(weight), weight.owner
        if form is None or owner not in self.rows:
            return None
        step = self._steps.get(f"weight/{owner}")
        if step is not None:
            return step.quantized
        facts = self._facts[owner]
        grid = self._whole(weight, form)
        if self._options.method == "dynamic":
            axes = tuple(axis for axis, size in enumerate(grid.scale.shape) if size == 1)
            return lambda values: quantize_now(values, facts=facts, axes=axes, form=form)[0]
        grid = _in_blocks(grid, weight.shape)
        return lambda values: fake_quantize(values, facts=facts, **constants(facts, grid, values))

    def grid(self, weight: Weight, facts: Facts) -> Grid | None:
        """Return the grid of a whole parameter at present; None if it has none."""
        import numpy

        form, parameter = self._options.format_for(weight), weight.parameter
        if form is None or parameter is None or weight.owner not in self.rows:
            return None
        grid = self._whole(weight, form)
        if self._options.method == "dynamic":  # They follow the values.
            tensor = values_of(facts, parameter)
            axes = tuple(axis for axis, size in enumerate(grid.scale.shape) if size == 1)
            largest = abs(numbers(tensor.array, tensor.dtype)).max(axis=axes, keepdims=True)
            largest = largest.astype(numpy.result_type(largest, numpy.float32))
            scale = numpy.maximum(largest / form.highest, EPSILON)  # As `quantize_now` does.
            grid = replace(grid, scale=scale, zero=0 * scale)
        return grid

    def result(self) -> list[QuantizedWeight]:
        """Return what is known of each quantized parameter."""
        for owner, row in self.rows.items():
            step = self._steps.get(f"weight/{owner}")
            if step is not None:
                row.scales = [float(one) for one in step.scale().ravel()]
        return list({**self._copied, **self.rows}.values())

    def mean_bits(self) -> float | None:
        """Return the mean number of bits of the weights whose formats are chosen one by one."""
        found = [
            (math.prod(row.shape), form.bits)
            for owner, row in self.rows.items()
            if (form := self._options.mixed.get(owner)) is not None
        ]
        elements = sum(size for size, _ in found)
        return sum(size * bits for size, bits in found) / elements if elements else None

    def _quantized(
        self,
        value: Any,
        facts: Facts,
        operand: Operand,
        context: OpContext | None,
    ) -> Any:
        """Quantize a weight whose grid learns, or that is another one in each execution."""
        place = operand.position if operand.item is None else (operand.position, operand.item)
        weight = operand.weight if context is None else context.weights.get(place)
        if weight is None:
            return None
        if context is not None and weight is not operand.weight:
            self.prepare(context, facts, operand, weight)
        one = value if operand.item is None else value[operand.item]
        step = self._steps.get(f"weight/{weight.owner}")
        if step is not None:
            import numpy

            size = step.parameters[0]
            indices = numpy.arange(size.numel()).reshape(size.shape)
            new = step.quantized(one, scale_part(indices, weight))
        else:
            new = fake_quantize(one, facts=facts, **constants(facts, self._part(weight), one))
        return with_item(value, operand.item, new)

    def _part(self, weight: Weight) -> Grid:
        form, step = self._options.format_for(weight), self._steps.get(f"weight/{weight.owner}")
        assert form is not None
        if step is not None:
            grid, _ = step.grid()
            scale = scale_part(grid.scale, weight)
            return replace(grid, scale=scale, zero=0 * scale)
        grid = self._whole(weight, form)
        is_whole = weight.exact and not weight.region
        is_whole = is_whole and not _in_parts(self._facts[weight.owner], weight)
        if is_whole and weight.axes == (*range(len(weight.shape)),):
            return _in_blocks(grid, weight.shape)
        grid = _spread(grid, weight.shape)
        scale, zero = scale_part(grid.scale, weight), scale_part(grid.zero, weight)
        return replace(grid, scale=scale, zero=zero)

    def _whole(self, weight: Weight, form: Format) -> Grid:
        """Return the grid of a whole parameter, whose groups are not apart."""
        scale: Any = self.grids.get(weight, _unknown)
        if not self._options.has_zeros or form.float8:
            return _grid(scale, form)
        return Grid(scale, self.zeros.get(weight, _unknown), 0.0, 2.0**form.bits - 1)

    def _make(
        self, context: OpContext, facts: Facts, operand: Operand, weight: Weight, form: Format
    ) -> None:
        """Make the scales of the whole parameter that a weight is part of, or its learned step."""
        zeros: list[Any] = []

        def make(parameter: Any) -> Any:
            loaded = [self._claimed(name, weight) for name in ("scale", "zero")]
            with self._clock:
                if parameter is weight.parameter:
                    # Its optimizer may update one with more digits.
                    whole = facts.master(parameter, context.weights.model(weight.root))
                else:
                    whole = facts.whole(parameter)
                # The handle of a variable has no values; the operator reads all of it.
                if not facts.is_tensor(whole) or facts.shape(whole) != tuple(weight.shape):
                    whole = facts.whole(value_at(context, operand))
                if whole is None or facts.shape(whole) != tuple(weight.shape):
                    raise NotReadableError(f"read by {context.op_type} in another shape")
                tensor = host(facts, whole)
                values = numbers(tensor.array, tensor.dtype)
                axes = self._axes(context, operand, weight)
                options = self._options
                shown = values
                if options.group:
                    shown, axes = _grouped(values, axes, options.group)
                how = form, options.observer, options.percentile, options.has_zeros
                grid = weight_grid(shown, axes, *how)
                if options.group:
                    scale, zero = (one.squeeze(axes[0]) for one in (grid.scale, grid.zero))
                    grid = replace(grid, scale=scale, zero=zero)
                if loaded[0] is not None:
                    zero = 0 * loaded[0] if loaded[1] is None else loaded[1]
                    grid = replace(grid, scale=loaded[0], zero=zero)
                zeros.append(grid.zero)
                self._facts[weight.owner] = facts
                self.rows[weight.owner] = _row(context, weight, values, grid, form)
                if options.learns:
                    key = f"weight/{weight.owner}"
                    self._steps.make(key, form, whole, tuple(axes), True)
            return grid.scale

        scale = self.grids.get(weight, make)
        if self._options.has_zeros and scale is not None:
            self.zeros.get(weight, lambda parameter: zeros[0])
        if scale is None or scale_part(_repeated(scale, weight.shape), weight) is None:
            raise NotReadableError(f"read by {context.op_type} as a part that has no indices")
        self._coverage.add_reached(weight)

    def _axes(self, context: OpContext, operand: Operand, weight: Weight) -> list[int]:
        """Return the parameter's axes whose elements share a scale."""
        if "." not in weight.letters:
            return shared(weight.letters, self._options.per)
        shown = list(weight.axes)
        found = shared_axes(context, operand, len(shown), self._options.per)
        return [axis for one in found if (axis := shown[one]) is not None]


def _in_parts(facts: Facts, weight: Weight) -> bool:
    """Return True if operators read a weight of which several processes hold parts."""
    parameter = weight.parameter
    return facts.is_tensor(parameter) and facts.placement(parameter) is not None


def _row(
    context: OpContext, weight: Weight, values: Any, grid: Grid, form: Format
) -> QuantizedWeight:
    import numpy

    sqnr = None
    if not grid.float8:
        known = numpy.where(numpy.isfinite(values), values, 0).astype(float)
        noise = ((quantized(known, _spread(grid, weight.shape)) - known) ** 2).sum()
        sqnr = decibels(float((known**2).sum()), float(noise))
    return QuantizedWeight(
        "" if weight.name.startswith("#") else weight.name,
        context.name,
        context.source,
        list(weight.shape),
        form.name,
        [float(one) for one in grid.scale.ravel()],
        list(grid.scale.shape),
        sqnr,
        # Integers from 0 on, as those of an unsigned grid are.
        [float(one) for one in grid.zero.ravel()] if grid.lowest == 0 else [],
    )


def _grouped(values: Any, axes: Sequence[int], group: int) -> tuple[Any, list[int]]:
    """Return values with an axis of groups before the one along which a group has a scale."""
    if len(axes) != 1:
        raise NotReadableError(f"groups lie along one axis, and it sums over {len(axes)}")
    (axis,), shape = axes, values.shape
    if shape[axis] % group:
        raise NotReadableError(f"its axis of {shape[axis]} does not hold groups of {group}")
    new = (*shape[:axis], shape[axis] // group, group, *shape[axis + 1 :])
    return values.reshape(new), [axis + 1]


def _in_blocks(grid: Grid, shape: Sequence[int]) -> Grid:
    """Return a grid that broadcasts to the blocks of values of a shape."""
    blocks: list[int] = []
    inner: list[int] = []
    for size, groups in zip(shape, grid.scale.shape, strict=True):
        is_grouped = groups not in (1, size)
        blocks += [groups, size // groups] if is_grouped else [size]
        inner += [groups, 1] if is_grouped else [groups]
    if len(blocks) == len(shape):
        return grid
    scale, zero = grid.scale.reshape(inner), grid.zero.reshape(inner)
    return replace(grid, scale=scale, zero=zero, blocks=(*blocks,))


def _spread(grid: Grid, shape: Sequence[int]) -> Grid:
    """Return a grid that has a scale for each index of an axis of groups."""
    scale, zero = _repeated(grid.scale, shape), _repeated(grid.zero, shape)
    return replace(grid, scale=scale, zero=zero)


def _repeated(array: Any, shape: Sequence[int]) -> Any:
    for axis, (size, groups) in enumerate(zip(shape, array.shape, strict=True)):
        if groups not in (1, size):
            array = array.repeat(size // groups, axis)
    return array


def _grid(scale: Any, form: Format) -> Grid:
    """Return the symmetric grid of scales."""
    return Grid(scale, 0 * scale, -form.highest, form.highest, form.float8)


def _unknown(parameter: Any) -> Any:
    raise LookupError("the scales of a weight that was not analysed")
