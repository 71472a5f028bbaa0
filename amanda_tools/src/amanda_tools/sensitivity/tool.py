"""`Sensitivity`: which operators suffer most if their operands are quantized or pruned.

Owns the estimate. Nothing that the program computes is changed: the noise of each operand is
measured where it is used, and multiplied by the gradient there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.facts import Facts, NotReadableError
from amanda_tools.mapping import MappingTool
from amanda_tools.operators.clock import Clock
from amanda_tools.quantize.fake import quantize_now
from amanda_tools.quantize.formats import Format, format_named
from amanda_tools.quantize.operands import Operand, operands_of, shared_axes
from amanda_tools.quantize.result import decibels
from amanda_tools.sensitivity.result import SensitiveOp, SensitivityResult
from amanda_tools.tensors.arithmetic import ARITHMETIC, NOT_ARRAYS, RULES, Arithmetic
from amanda_tools.tensors.values import facts_of, host, need_numpy, numbers

__all__ = ["Sensitivity"]

#: How many executions of an operator may await their backward pass.
_AWAITED = 64


@dataclass
class _Op:
    """One operator, and sums over its executions."""

    row: SensitiveOp
    facts: Facts
    #: Position -> sums of squares of the values and of their noise.
    signal: dict[int, float] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    #: Position -> noise of executions whose backward pass has not come, the last one at the end.
    awaited: dict[int, list[Any]] = field(default_factory=dict)
    #: The change to first order in this backward pass; None if it did not reach the operator.
    change: float | None = None
    squares: float = 0.0

    def settle(self) -> None:
        """End a backward pass."""
        if self.change is not None:
            self.squares += self.change * self.change  # A power would raise if it overflows.
            self.row.passes += 1
            self.change = None


class Sensitivity(Tool):
    """Ranks operators by the damage that quantizing (or pruning) the operands of each would do.

    One run is enough, forward and backward. Forward, the noise of the operands is measured.
    Backward, it is multiplied by their gradients: this is the change, to first order, of what the
    backward pass begins with. Half the mean of its square is the damage. If each pass begins with
    the log-likelihood of a label that is drawn from the model's own probabilities, that estimates
    the Kullback-Leibler divergence of the outputs; if it begins with the outputs times random
    numbers, half their squared error. Use one sample a pass.

    Args:
        weights: Number format of weights: ``int2`` to ``int8``, ``fp8_e4m3``, ``fp8_e5m2`` or
            ``none``. Each channel has a scale.
        activations: Number format of the other operands; likewise. Each tensor has a scale.
        sparsity: If given, this fraction of each weight is set to zero instead, by magnitude, and
            the formats do not count.

    Raises:
        ValueError: The format does not exist, or `sparsity` is not between 0 and 1.
        ImportError: NumPy is not installed.

    >>> tool = Sensitivity(weights="int4", activations="none")
    """

    def __init__(
        self, weights: str = "int8", activations: str = "int8", sparsity: float | None = None
    ) -> None:
        super().__init__()
        need_numpy()
        if sparsity is not None and not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must be from 0 to 1, but is {sparsity}")
        self._formats = format_named(weights), format_named(activations)
        self.sparsity = sparsity
        self._change = (
            f"weights in {weights}, other operands in {activations}"
            if sparsity is None
            else f"weights with {sparsity:.0%} of zeros"
        )
        self._ops: dict[tuple[str, int], _Op] = {}
        self._notes: dict[str, None] = {}
        self._clock = Clock()
        self.depends_on(MappingTool(RULES))
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Measure the noise of the op's operands, if it is an operator that would be quantized."""
        if context.zone != "model":
            return
        facts = facts_of(context)
        operands = [one for one in operands_of(context, facts) if self._changes(one)]
        if not operands:
            return
        key = context.namespace, context.get_op_id()
        if key not in self._ops:
            row = SensitiveOp(
                context.name, key[1], key[0], context.source, len(operands), 0, None, 0, None
            )
            self._ops[key] = _Op(row, facts)
        op = self._ops[key]
        backward = context.supports("aligned_gradients")
        if not backward:
            self._notes[f"no gradients on {context.namespace}"] = None
        for operand in operands:
            value: Any = context.get_inputs()
            shape = facts.shape(value[operand.position]) or ()
            shared = tuple(shared_axes(context, operand, len(shape)))
            axes = None if operand.weight is None else shared
            context.insert_before_op(
                partial(self._measure, op=op, operand=operand, axes=axes, first=operands[0]),
                inputs=[operand.position],
                observe=True,
                arithmetic=context[ARITHMETIC],
            )
            if backward:
                context.insert_after_backward_op(
                    partial(self._weigh, op=op, position=operand.position),
                    grad_inputs=[operand.position],
                    observe=True,
                )

    def _changes(self, operand: Operand) -> bool:
        if operand.is_bias or operand.item is not None:
            return False
        if self.sparsity is not None:
            return operand.weight is not None
        return self._formats[operand.weight is None] is not None

    def _measure(
        self,
        value: Any,
        op: _Op,
        operand: Operand,
        axes: tuple[int, ...] | None,
        first: Operand,
        arithmetic: Arithmetic,
    ) -> None:
        import numpy

        with self._clock:
            if operand is first:
                op.settle()
                op.row.executions += 1
            try:
                noise, signal = self._noise(op.facts, value, operand, axes, arithmetic)
            except NotReadableError as error:
                self._notes[f"{op.row.name} was not measured: {error}"] = None
                return
            position = operand.position
            op.signal[position] = op.signal.get(position, 0.0) + signal
            with numpy.errstate(all="ignore"):
                squares = float((noise**2).sum())
            op.noise[position] = op.noise.get(position, 0.0) + squares
            awaited = op.awaited.setdefault(position, [])
            awaited.append(noise)
            del awaited[:-_AWAITED]

    def _noise(
        self,
        facts: Facts,
        value: Any,
        operand: Operand,
        axes: tuple[int, ...] | None,
        arithmetic: Arithmetic,
    ) -> tuple[Any, float]:
        """Return what the change adds to an operand, and the sum of its squares."""
        import numpy

        if not arithmetic.is_floating(value):
            raise NotReadableError("a value is no tensor of real floating-point numbers")
        tensor = host(facts, value)
        real = numbers(tensor.array, tensor.dtype).astype(numpy.float64)
        if self.sparsity is not None:
            order = numpy.argsort(abs(real), axis=None, kind="stable")
            noise = numpy.zeros(real.size)
            pruned = order[: round(self.sparsity * real.size)]
            noise[pruned] = -real.ravel()[pruned]
            noise = noise.reshape(real.shape)
        else:
            if not arithmetic.suits(value):
                raise NotReadableError(NOT_ARRAYS)
            form = self._formats[operand.weight is None]
            assert isinstance(form, Format)
            new = quantize_now(value, arithmetic=arithmetic, axes=axes, form=form)[0]
            changed = host(facts, new)
            noise = numbers(changed.array, changed.dtype).astype(numpy.float64) - real
        with numpy.errstate(all="ignore"):
            return noise, float((real**2).sum())

    def _weigh(self, gradient: Any, op: _Op, position: int) -> None:
        """Add the product of the noise and the gradient of one operand."""
        import numpy

        awaited = op.awaited.get(position)
        if gradient is None or not awaited:
            return
        with self._clock:
            noise = awaited.pop()
            try:
                tensor = host(op.facts, gradient)
            except NotReadableError as error:
                self._notes[f"{op.row.name} has gradients that were not measured: {error}"] = None
                return
            values = numbers(tensor.array, tensor.dtype)
            if values.shape == noise.shape:
                # What is not finite has no damage.
                with numpy.errstate(all="ignore"):
                    op.change = (op.change or 0.0) + float((values * noise).sum())

    def result(self) -> SensitivityResult:
        """Return the operators so far, the most sensitive first."""
        rows = []
        for op in self._ops.values():
            op.settle()
            row = op.row
            ratios = [decibels(op.signal[at], op.noise[at]) for at in op.signal]
            row.sqnr = min((one for one in ratios if one is not None), default=None)
            if row.passes and math.isfinite(op.squares):
                row.damage = op.squares / row.passes / 2
            rows.append(row)
        rows.sort(
            key=lambda row: (
                -1.0 if row.damage is None else -row.damage,
                math.inf if row.sqnr is None else row.sqnr,
            )
        )
        return SensitivityResult(self._change, rows, self._clock.spent / 1e9, list(self._notes))
