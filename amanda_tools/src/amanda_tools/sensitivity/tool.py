"""`Sensitivity`: which operators suffer most if their operands are quantized or pruned.

Owns the estimate. Nothing that the program computes is changed: the noise of each operand is
measured where it is used, and multiplied by the gradient there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_tools.kit.operators.clock import Clock
from amanda_tools.kit.operators.entries import program_key_of
from amanda_tools.kit.operators.tool import runs_in_order
from amanda_tools.kit.tensors.values import facts_of, host, need_numpy, numbers
from amanda_tools.quantize.operands import Operand
from amanda_tools.quantize.result import decibels
from amanda_tools.sensitivity.change import Axes, Change
from amanda_tools.sensitivity.divergence import divergence
from amanda_tools.sensitivity.result import SensitiveOp, SensitivityResult

__all__ = ["Sensitivity"]

#: How many executions of an operator may await their backward pass.
_AWAITED = 64
#: In how many executions the outputs of an operator are compared, which costs two more of them.
_COMPARED = 8


@dataclass
class _Op:
    """One operator, and sums over its executions."""

    row: SensitiveOp
    facts: Facts
    #: Position -> sums of squares of the values and of their noise.
    signal: dict[int, float] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    #: The same of the first output.
    output_signal: float = 0.0
    output_noise: float = 0.0
    #: Sum of the divergences of the output, and how many were added.
    divergence: float = 0.0
    compared: int = 0
    #: Position -> noise of executions whose backward pass has not come, the last one at the end.
    awaited: dict[int, list[Any]] = field(default_factory=dict)
    #: The change to first order in this backward pass; None if it did not reach the operator.
    change: float | None = None
    squares: float = 0.0
    #: Position -> role of each operand, and the positions whose gradients were seen.
    roles: dict[int, str] = field(default_factory=dict)
    weighed: set[int] = field(default_factory=set)

    def unmeasured(self) -> str:
        """Return why the damage, or a part of it, was not measured; empty if all of it was."""
        if not self.signal:
            return "its noise was not measured"
        if not self.row.passes:
            return "no backward pass reached it, as if what it reads is frozen"
        if not math.isfinite(self.squares):
            return "the damage is not finite"
        missing = [role for at, role in self.roles.items() if at not in self.weighed]
        return f"without that of its {', '.join(missing)}, which has no gradient" * bool(missing)

    def settle(self) -> None:
        """End a backward pass."""
        if self.change is not None:
            self.squares += self.change * self.change  # A power would raise if it overflows.
            self.row.passes += 1
            self.change = None


class Sensitivity(Tool):
    """Ranks operators by the damage that quantizing (or pruning) the operands of each would do.

    One run is enough, forward and backward. Forward, the noise of the operands is measured; in an
    eager mode of PyTorch each operator is also executed with the changed operands, and its outputs
    are compared. Backward, the noise is multiplied by the gradients of the operands: this is the
    change, to first order, of what the backward pass begins with. Half the mean of its square is
    the damage. If each pass begins with the log-likelihood of a label that is drawn from the
    model's own probabilities, that estimates the Kullback-Leibler divergence of the outputs; if it
    begins with the outputs times random numbers, half their squared error. Use one sample a pass.

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

    whole = True
    by_example = True  # It computes operators again, which know one.

    def __init__(
        self, weights: str = "int8", activations: str = "int8", sparsity: float | None = None
    ) -> None:
        super().__init__()
        need_numpy()
        self.result_is_final = True  # It ends the forward pass that is being measured.
        self._change = Change(weights, activations, sparsity)
        self._format = "" if sparsity is not None else weights
        self._ops: dict[tuple[object, ...], _Op] = {}
        self._notes: dict[str, None] = {}
        self._clock = Clock()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Measure the noise of the op's operands, if it is an operator that would be changed."""
        facts = facts_of(context)
        chosen = self._change.operands(context, facts)
        inputs: Any = context.get_inputs()
        if any(facts.placement(inputs[one.position]) is not None for one, _ in chosen):
            self._notes[f"{context.name} is not measured: processes hold parts of it"] = None
            return
        if not chosen:
            return
        key = program_key_of(context)
        if key not in self._ops:
            row = SensitiveOp(
                context.name,
                context.get_op_id(),
                context.namespace,
                context.source,
                len(chosen),
            )
            self._ops[key] = _Op(row, facts)
        op = self._ops[key]
        if (processes := facts.processes()) > 1:
            note = f"figures are of the data of this process, one of {processes}"
            self._notes[note] = None
        backward = context.supports("aligned_gradients")
        if not backward:
            self._notes[f"no gradients on {context.namespace}"] = None
        for operand, axes in chosen:
            op.roles.setdefault(operand.position, operand.role)
            if operand.weight is not None:
                op.row.weights[operand.weight.key] = math.prod(operand.weight.size)
            context.insert_before_op(
                partial(self._measure, op=op, operand=operand, axes=axes, first=chosen[0][0]),
                inputs=[operand.position],
                observe=True,
            )
            if backward:
                context.insert_after_backward_op(
                    partial(self._weigh, op=op, position=operand.position),
                    grad_inputs=[operand.position],
                    observe=True,
                )
        # Additions have methods for both operands, of which some take a factor as well.
        called = _add if context["type"] == "add" else context.get_op()
        if callable(called) and runs_in_order(context.namespace) and _is_repeatable(context):
            layout = context.get("layout", "")
            context.insert_before_op(
                partial(self._compare, op=op, chosen=chosen, called=called),
                observe=True,
                axis=layout.index("C") if "C" in layout else -1,
            )

    def _measure(
        self,
        value: Any,
        op: _Op,
        operand: Operand,
        axes: Axes,
        first: Operand,
    ) -> None:
        import numpy

        with self._clock:
            if operand is first:
                op.settle()
                op.row.executions += 1
            try:
                changed = self._change.applied(op.facts, value, operand, axes)
                real, noise = _difference(op.facts, value, changed)
            except NotReadableError as error:
                self._notes[f"{op.row.name} was not measured: {error}"] = None
                return
            if not numpy.isfinite(real).all():
                self._notes[f"{op.row.name} has operands that are not finite"] = None
            position = operand.position
            with numpy.errstate(all="ignore"):
                op.signal[position] = op.signal.get(position, 0.0) + float((real**2).sum())
                op.noise[position] = op.noise.get(position, 0.0) + float((noise**2).sum())
            awaited = op.awaited.setdefault(position, [])
            awaited.append(noise)
            del awaited[:-_AWAITED]

    def _compare(
        self,
        *values: Any,
        op: _Op,
        chosen: Sequence[tuple[Operand, Axes]],
        called: Callable[..., Any],
        axis: int,
    ) -> None:
        """Execute an operator as it is and with its operands changed, and compare its outputs."""
        import numpy

        if op.compared >= _COMPARED:
            return
        with self._clock:
            inputs = list(values)
            try:
                for operand, axes in chosen:
                    at = operand.position
                    inputs[at] = self._change.applied(op.facts, values[at], operand, axes)
                outputs = called(*values), called(*inputs)
                if not all(map(op.facts.is_tensor, outputs)):
                    return
                real, noise = _difference(op.facts, *outputs)
            except (NotReadableError, TypeError, RuntimeError):
                return  # It cannot be called by positions, or has no plain output.
            with numpy.errstate(all="ignore"):
                op.output_signal += float((real**2).sum())
                op.output_noise += float((noise**2).sum())
                if real.size and real.ndim:
                    op.divergence += divergence(real, real + noise, axis)
                    op.compared += 1

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
                op.weighed.add(position)
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
            row.output_sqnr = decibels(op.output_signal, op.output_noise)
            if op.compared and math.isfinite(op.divergence):
                row.output_divergence = op.divergence / op.compared
            if row.passes and math.isfinite(op.squares):
                row.damage = op.squares / row.passes / 2
            rows.append(row)
        estimated = any(row.damage is not None for row in rows)
        for op in self._ops.values():
            op.row.unmeasured = op.unmeasured() if estimated else ""
        rows.sort(
            key=lambda row: (
                row.damage is None,
                -(row.damage or 0.0),
                math.inf if row.sqnr is None else row.sqnr,
            )
        )
        return SensitivityResult(
            str(self._change), rows, self._clock.spent / 1e9, list(self._notes), self._format
        )


def _is_repeatable(context: OpContext) -> bool:
    """Return False if an operator writes into an input, or draws random numbers."""
    name, inputs = context.op_type, context.get_inputs() or ()
    if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
        return False
    given = dict(zip(context.input_names, inputs, strict=False))
    scaled = given.get("alpha") not in (None, 1)
    # Attention's `dropout_p`, and the `dropout` of recurrent layers, which have `train`, too.
    rates = [rate for name, rate in given.items() if name.startswith("dropout")]
    drops = any(isinstance(rate, (int, float)) and rate for rate in rates)
    draws = drops and given.get("train", True)
    return given.get("out") is None and not draws and not scaled


def _add(first: Any, second: Any, *rest: Any) -> Any:
    return first + second


def _difference(facts: Facts, value: Any, changed: Any) -> tuple[Any, Any]:
    """Return the numbers of a tensor, and what a changed one has more than them."""
    import numpy

    real, other = (
        numbers(one.array, one.dtype).astype(numpy.float64)
        for one in (host(facts, value), host(facts, changed))
    )
    with numpy.errstate(invalid="ignore"):
        return real, other - real
