"""`Quantize`: fake quantization of operands, after training or during it, on every backend.

Owns which grid an operand gets and when. `operands` chooses the operands, `formats` and `observers`
make the grids, `arithmetic` applies them, and `learned` has those that are trained. Over 400 lines,
since weights, activations and steps are resumed, removed and baked as one state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

from amanda_core import OpContext
from amanda_core.activation import autodiff_enabled
from amanda_core.errors import ToolError
from amanda_core.facts import Facts, NotReadableError
from amanda_core.weights.reads import Weight
from amanda_core.weights.state import WeightState
from amanda_tools.learned_parameters import join_optimizers
from amanda_tools.mapping import MappingTool
from amanda_tools.operators.clock import Clock
from amanda_tools.quantize.arithmetic import (
    ARITHMETIC,
    NOT_ARRAYS,
    RULES,
    Arithmetic,
    constants,
    fake_quantize,
    quantize_now,
)
from amanda_tools.quantize.formats import Format, Grid, format_named
from amanda_tools.quantize.learned import RULES_OF_STEPS, Step
from amanda_tools.quantize.observers import OBSERVERS, Histogram, Observer, weight_grid
from amanda_tools.quantize.operands import Operand, operands_of, scale_part, shared_axes
from amanda_tools.quantize.present import INT32, Activation, Plan, at_once, at_present, shown
from amanda_tools.quantize.result import (
    QuantizedWeight,
    QuantizeResult,
    decibels,
)
from amanda_tools.tensors.values import facts_of, host, need_numpy, numbers
from amanda_tools.weight_coverage import WeightCoverage
from amanda_tools.weight_tool import Edit, WeightTool
from amanda_tools.weight_writes import Watch

__all__ = ["Method", "Quantize"]

Method = Literal["static", "dynamic", "lsq", "lsq+", "tqt"]


class Quantize(WeightTool):
    """Quantizes the operands of products and residual additions, and computes with real numbers.

    Operands are those of linear layers, convolutions, matrix products, einsum, attention, additions
    of two activations, and the tables of embeddings. The program itself does not change: each
    operator gets values that lie on the grid of a number format. Gradients pass as if nothing had
    been rounded, unless steps are learned.

    ``static`` fixes the scales of weights at once, and those of other operands after a calibration.
    ``dynamic`` makes the scale of an operand from its present values, symmetric around 0 (Q8BERT).
    ``lsq``, ``lsq+`` and ``tqt`` learn steps along with the weights, on PyTorch: give `parameters`
    to an optimizer, or let the tool add them to the program's at its first step.

    Args:
        method: See above.
        weights: Number format of weights: ``int2`` to ``int8``, ``fp8_e4m3``, ``fp8_e5m2`` or
            ``none``.
        activations: Number format of the other operands; likewise.
        per: Whether a ``channel`` of a weight or a whole ``tensor`` has a scale. By default the
            first one if the method is ``static``. Matrices of experts never share a scale.
        per_token: Whether each row along the last axis of an activation has a scale; for
            ``dynamic``.
        observer: Of ``static``: ``minmax`` covers all values, ``percentile`` the given share of
            them, ``mse`` the range with the least squared error.
        percentile: The share in percent.
        symmetric: Whether grids of activations are symmetric around 0 also if ``static``.
        calibration: Of ``static``: in how many executions the range of an operand is observed
            before it is quantized; 0 until `freeze` is called.
        ema: Of ``dynamic``: the decay of a running mean of the largest magnitudes that is used in
            place of the present one and no longer changes after `freeze`, such as 0.9999; 0 for
            none.

    Attributes:
        grids: The scales of weights.

    Raises:
        ValueError: An option has none of its values, or options do not go together.
        ImportError: NumPy is not installed.

    >>> tool = Quantize(weights="int4", activations="none")
    """

    def __init__(
        self,
        method: Method = "static",
        weights: str = "int8",
        activations: str = "int8",
        per: Literal["channel", "tensor"] | None = None,
        per_token: bool = False,
        observer: Observer = "minmax",
        percentile: float = 99.99,
        symmetric: bool = False,
        calibration: int = 1,
        ema: float = 0.0,
    ) -> None:
        super().__init__()
        need_numpy()
        for name, value, values in (
            ("method", method, get_args(Method)),
            ("observer", observer, OBSERVERS),
            ("per", per, ("channel", "tensor", None)),
        ):
            if value not in values:
                raise ValueError(f"{name} must be one of {', '.join(map(str, values))}: {value!r}")
        if calibration < 0 or not 0 <= ema < 1 or not 0 < percentile <= 100:
            raise ValueError("calibration is from 0, ema from 0 to 1, percentile from 0 to 100")
        if (per_token or ema) and method != "dynamic":
            raise ValueError("per_token and ema are for the method dynamic")
        if per_token and ema:
            raise ValueError("per_token and ema do not go together: rows have no running mean")
        self.method = method
        self.learns = method in RULES_OF_STEPS
        self._formats = format_named(weights), format_named(activations)
        if self.learns and any(form is not None and form.float8 for form in self._formats):
            raise ValueError(f"{method} learns steps of integers, not of {weights}, {activations}")
        self.per = per or ("channel" if method == "static" else "tensor")
        self.per_token, self.observer, self.percentile = per_token, observer, percentile
        self.symmetric, self.calibration, self.ema = symmetric, calibration, ema
        self.frozen = False
        self.states = {"scale": WeightState()}
        self.grids = self.states["scale"]
        #: Owner -> the learned step of a weight.
        self._steps: dict[str, Step] = {}
        self._parameters: dict[str, Any] = {}
        self._activations: dict[str, Activation] = {}
        self._rows: dict[str, QuantizedWeight] = {}
        self._coverage = WeightCoverage()
        self._notes: dict[str, None] = {}
        self._clock = Clock()
        #: Whether the program takes the steps itself.
        self._taken = False
        self._leave: Any = None
        self.depends_on(Watch(self.grids), MappingTool(RULES))
        self.add_inst_for_op(self.analyse)

    # The base's questions.

    def options(self) -> dict[str, Any]:
        """Return the options that a resumed tool must have as well."""
        names = [form and form.name for form in self._formats]
        return {
            "method": self.method,
            "formats": names,
            "per": self.per,
            "per_token": self.per_token,
            "observer": self.observer,
            "percentile": self.percentile,
            "symmetric": self.symmetric,
            "ema": self.ema,
        }

    def progress(self) -> dict[str, Any]:
        """Return the ranges of activations, which change with the executions."""
        self._export()
        return {
            "frozen": self.frozen,
            "activations": {
                key: {**one.histogram.to_json(), "ready": one.grid is not None, "mean": one.mean}
                for key, one in self._activations.items()
            },
        }

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from the result of `progress`."""
        self.frozen = progress["frozen"]
        self._steps.clear()
        self._rows.clear()
        self._activations = {}
        for key, state in progress["activations"].items():
            op, _, role = key.rpartition("/")
            one = Activation(op, role, None, Histogram.from_json(state), mean=state["mean"])
            if state["ready"]:
                one.grid = self._grid_of(one)
            self._activations[key] = one

    def check_kept(self, name: str, kept: Any, shape: tuple[int, ...]) -> str:
        """Return why an array is not that of the scales of a parameter."""
        wanted = tuple(shape)
        fits = len(kept.shape) == len(wanted) and all(
            size in (1, whole) for size, whole in zip(kept.shape, wanted, strict=True)
        )
        return "" if fits else f"its shape {tuple(kept.shape)} is not one of scales for {wanted}"

    def baked(self, weight: Weight) -> Edit | None:
        """Return the function that quantizes a whole parameter."""
        form, row = self._formats[0], self._rows.get(weight.owner)
        if form is None or row is None:
            return None
        step = self._steps.get(weight.owner)
        if step is not None:
            return step.quantized
        arithmetic, facts = self._parameters[weight.owner]
        scale: Any = self.grids.get(weight, _unknown)
        if self.method == "dynamic":
            axes = tuple(axis for axis, size in enumerate(scale.shape) if size == 1)
            return lambda values: quantize_now(values, arithmetic=arithmetic, axes=axes, form=form)[
                0
            ]
        grid = _grid(scale, form)
        return lambda values: fake_quantize(
            values, arithmetic=arithmetic, **constants(facts, grid, values)
        )

    def remove(self) -> None:
        """Stop: from now on every operand is used as it is."""
        super().remove()
        self._activations.clear()
        self._steps.clear()
        self._rows.clear()
        if self._leave is not None:
            self._leave()
            self._leave = None

    # For users.

    def freeze(self) -> None:
        """End the calibration: ranges seen so far are final, and others stay unquantized."""
        self.frozen = True
        for one in self._activations.values():
            if one.grid is None and one.histogram.seen:
                one.grid = self._grid_of(one)
        self.invalidate()

    def parameters(self) -> list[Any]:
        """Return the learned tensors, for an optimizer; they exist after the model ran once.

        Afterwards the tool does not add them to an optimizer itself.

        Raises:
            ToolError: There are none, or none yet.
        """
        found = self._learned()
        if not found:
            why = "the model has not run yet" if self.learns else f"{self.method} learns nothing"
            raise ToolError(
                f"There are no learned steps: {why}",
                where=f"{self.tool_name}.parameters",
                fix="Run the model once under the tool, with the method lsq, lsq+ or tqt",
            )
        self._taken = True
        return found

    def analyse(self, context: OpContext) -> None:
        """Quantize the op's operands, if it is such an operator."""
        if not self.meets(context):
            return
        reads = context.weights
        self._coverage.add_parameters(reads, context.zone)
        facts = facts_of(context)
        operands = operands_of(context, facts) if context.zone == "model" else []
        arithmetic: Arithmetic = context[ARITHMETIC]
        if operands and self.learns and not arithmetic.learns:
            raise ToolError(
                f"{self.method} needs parameters that learn, which are PyTorch's",
                where=context.where,
                fix="Use the method static or dynamic here",
            )
        if operands and not arithmetic.suits(_value_at(context, operands[0])):
            self._notes[f"not supported on {context.namespace}: {NOT_ARRAYS}"] = None
            return
        known = {one.position: one.weight for one in operands if one.weight is not None}
        for weight in reads.values():
            if weight not in known.values():
                how = "added, not multiplied" if operands else f"read by {context.op_type}"
                self._coverage.add_unreached(weight, how)
        if self.method == "dynamic":
            self._quantize_dynamically(context, facts, operands)
            return
        for operand in operands:
            if operand.is_bias:
                continue
            if operand.weight is not None:
                self._quantize_weight(context, facts, operand, operand.weight)
            else:
                self._quantize_activation(context, facts, operand)

    # Weights.

    def _quantize_weight(
        self, context: OpContext, facts: Facts, operand: Operand, weight: Weight
    ) -> None:
        if self._formats[0] is None:
            self._coverage.add_unreached(weight, "weights are not to be quantized")
            return
        try:
            self._prepare(context, facts, operand, weight)
        except NotReadableError as error:
            self._coverage.add_unreached(weight, str(error))
            return
        routine = partial(
            self._weight_now,
            facts=facts,
            arithmetic=context[ARITHMETIC],
            operand=operand,
            context=context if weight.varies else None,
        )
        if self.learns:
            with autodiff_enabled():
                context.insert_before_op(routine, inputs=[operand.position])
        elif weight.varies or operand.item is not None:
            context.insert_before_op(routine, inputs=[operand.position])
        else:
            made = constants(facts, self._part(weight), _value_at(context, operand))
            arithmetic = context[ARITHMETIC]
            # Elsewhere a graph may contain the routine, and then nothing is to be kept.
            kept = self.grids.memoized(fake_quantize) if arithmetic.learns else fake_quantize
            context.insert_before_op(kept, inputs=[operand.position], arithmetic=arithmetic, **made)

    def _weight_now(
        self,
        value: Any,
        facts: Facts,
        arithmetic: Arithmetic,
        operand: Operand,
        context: OpContext | None,
    ) -> Any:
        """Quantize a weight whose grid learns, or that is another one in each execution."""
        place = operand.position if operand.item is None else (operand.position, operand.item)
        weight = operand.weight if context is None else context.weights.get(place)
        if weight is None:
            return None
        if context is not None and weight is not operand.weight:
            self._prepare(context, facts, operand, weight)
        whole = value
        value = value if operand.item is None else value[operand.item]
        if self.learns:
            step = self._steps[weight.owner]
            import numpy

            size = step.parameters[0]
            indices = numpy.arange(size.numel()).reshape(size.shape)
            new = step.quantized(value, scale_part(indices, weight))
        else:
            made = constants(facts, self._part(weight), value)
            new = fake_quantize(value, arithmetic=arithmetic, **made)
        if operand.item is None:
            return new
        return type(whole)(new if i == operand.item else one for i, one in enumerate(whole))

    def _part(self, weight: Weight) -> Grid:
        form = self._formats[0]
        assert form is not None
        return _grid(scale_part(self.grids.get(weight, _unknown), weight), form)

    def _prepare(self, context: OpContext, facts: Facts, operand: Operand, weight: Weight) -> None:
        """Make the scales of the whole parameter that a weight is part of, or its learned step."""
        form = self._formats[0]
        assert form is not None

        def make(parameter: Any) -> Any:
            loaded = self.claimed("scale", weight)
            with self._clock:
                whole = parameter
                # The handle of a variable has no values; the operator reads all of it.
                if not facts.is_tensor(whole) or facts.shape(whole) != tuple(weight.shape):
                    whole = _value_at(context, operand)
                if whole is None or facts.shape(whole) != tuple(weight.shape):
                    raise NotReadableError(f"read by {context.op_type} in another shape")
                tensor = host(facts, whole)
                values = numbers(tensor.array, tensor.dtype)
                axes = self._axes(context, operand, weight)
                grid = weight_grid(values, axes, form, self.observer, self.percentile)
                if loaded is not None:
                    grid = _grid(loaded, form)
                self._note_row(context, weight, values, grid)
                self._parameters[weight.owner] = context[ARITHMETIC], facts
                if self.learns and weight.owner not in self._steps:
                    self._steps[weight.owner] = self._step(
                        f"weight/{weight.owner}", form, whole, tuple(axes), True
                    )
            return grid.scale

        scale = self.grids.get(weight, make)
        if scale is None or scale_part(scale, weight) is None:
            raise NotReadableError(f"read by {context.op_type} as a part that has no indices")
        self._coverage.add_reached(weight)

    def _axes(self, context: OpContext, operand: Operand, weight: Weight) -> list[int]:
        """Return the parameter's axes whose elements share a scale."""
        shown = list(weight.axes)
        shared = shared_axes(context, operand, len(shown))
        if self.per == "tensor":
            layers = context.get("weight_layout") is not None
            shared = list(range(len(shown)) if layers else range(len(shown))[-2:])
        return [axis for one in shared if (axis := shown[one]) is not None]

    def _note_row(self, context: OpContext, weight: Weight, values: Any, grid: Grid) -> None:
        import numpy

        form = self._formats[0]
        assert form is not None
        sqnr = None
        if not grid.float8:
            rounded = numpy.clip(numpy.round(values / grid.scale), grid.lowest, grid.highest)
            noise = ((rounded * grid.scale - values).astype(float) ** 2).sum()
            sqnr = decibels(float((values.astype(float) ** 2).sum()), float(noise))
        scales = [float(one) for one in grid.scale.ravel()]
        name = "" if weight.name.startswith("#") else weight.name
        self._rows[weight.owner] = QuantizedWeight(
            name,
            context.name,
            context.source,
            list(weight.shape),
            form.name,
            scales,
            list(grid.scale.shape),
            sqnr,
        )

    # Activations.

    def _quantize_activation(self, context: OpContext, facts: Facts, operand: Operand) -> None:
        if self._formats[1] is None:
            return
        one = self._activation(context, operand)
        arithmetic: Arithmetic = context[ARITHMETIC]
        if self.learns:
            with autodiff_enabled():
                context.insert_before_op(
                    partial(self._learn, operand=operand, one=one), inputs=[operand.position]
                )
        elif one.grid is not None and operand.item is None:
            made = constants(facts, one.grid, _value_at(context, operand))
            context.insert_before_op(
                fake_quantize, inputs=[operand.position], arithmetic=arithmetic, **made
            )
        elif not self.frozen or operand.item is not None:
            context.insert_before_op(
                partial(
                    self._observe, facts=facts, arithmetic=arithmetic, operand=operand, one=one
                ),
                inputs=[operand.position],
            )

    def _activation(self, context: OpContext, operand: Operand) -> Activation:
        key = f"{context.name}/{operand.role}"
        one = self._activations.get(key)
        if one is None:
            one = self._activations[key] = Activation(context.name, operand.role, context.source)
        one.source = context.source
        return one

    def _observe(
        self, value: Any, facts: Facts, arithmetic: Arithmetic, operand: Operand, one: Activation
    ) -> Any:
        """Note the range of a value during the calibration, and quantize it afterwards."""
        whole = value
        value = value if operand.item is None else value[operand.item]
        if not arithmetic.is_real(value):
            return None
        if one.grid is None:
            if self.frozen:
                return None
            with self._clock:
                try:
                    tensor = host(facts, value)
                except NotReadableError as error:
                    self._notes[f"{one.op} is not quantized: {error}"] = None
                    return None
                values = numbers(tensor.array, tensor.dtype)
                one.histogram.add(values, self.observer != "minmax")
                if self.calibration and one.histogram.seen >= self.calibration:
                    one.grid = self._grid_of(one)
            return None
        if one.made is None:
            one.made = constants(facts, one.grid, value)
        new = fake_quantize(value, arithmetic=arithmetic, **one.made)
        if operand.item is None:
            return new
        return type(whole)(new if i == operand.item else item for i, item in enumerate(whole))

    def _grid_of(self, one: Activation) -> Grid:
        form = self._formats[1]
        assert form is not None
        return one.histogram.grid(form, self.observer, self.percentile, self.symmetric)

    # Learned steps.

    def _learn(self, value: Any, operand: Operand, one: Activation) -> Any:
        form = self._formats[1]
        assert form is not None
        whole = value
        value = value if operand.item is None else value[operand.item]
        if not value.numel() or value.is_complex():
            return None
        if one.step is None:
            axes = tuple(range(value.dim()))
            one.step = self._step(f"{one.op}/{one.role}", form, value, axes, False)
        new = one.step.quantized(value)
        one.histogram.seen += 1
        if operand.item is None:
            return new
        return type(whole)(new if i == operand.item else item for i, item in enumerate(whole))

    def _step(
        self, key: str, form: Format, values: Any, axes: tuple[int, ...], is_weight: bool
    ) -> Step:
        names = ("size", "offset", "facts")
        loaded = {n: self.by_op.pop(f"{key}#{n}") for n in names if f"{key}#{n}" in self.by_op}
        if self._leave is None:
            self._leave = join_optimizers(self._untaken, self._weights, self.tool_name)
        if loaded:
            return Step.of(self.method, loaded, values)
        return Step(self.method, form, values, axes, is_weight)

    def _learned(self) -> list[Any]:
        steps = [*self._steps.values(), *(a.step for a in self._activations.values() if a.step)]
        return [parameter for step in steps for parameter in step.parameters]

    def _untaken(self) -> list[Any]:
        return [] if self._taken else self._learned()

    def _weights(self) -> list[Any]:
        found = (weight.parameter for weight, _ in self._met.values())
        return [parameter for parameter in found if parameter is not None]

    def _export(self) -> None:
        """Write the learned steps to what is kept by operator."""
        steps = {f"weight/{owner}": step for owner, step in self._steps.items()}
        steps.update({k: one.step for k, one in self._activations.items() if one.step is not None})
        for key, step in steps.items():
            for name, array in step.arrays().items():
                self.by_op[f"{key}#{name}"] = array

    # Scales of the present values.

    def _quantize_dynamically(
        self, context: OpContext, facts: Facts, operands: list[Operand]
    ) -> None:
        plans: list[Plan] = []
        for operand in operands:
            form = self._formats[operand.weight is None]
            if operand.weight is not None and not operand.is_bias:
                if form is None:
                    self._coverage.add_unreached(operand.weight, "weights are not to be quantized")
                    continue
                try:
                    self._prepare(context, facts, operand, operand.weight)
                except NotReadableError as error:
                    self._coverage.add_unreached(operand.weight, str(error))
                    continue
                shape = facts.shape(_value_at(context, operand)) or ()
                shared = shared_axes(context, operand, len(shape))
                axes = tuple(shared if self.per == "channel" else range(len(shape)))
                plans.append(Plan(operand, form, axes))
            elif operand.is_bias:
                rank = len(facts.shape(_value_at(context, operand)) or ())
                if None not in self._formats and not self.per_token and rank == 1:
                    plans.append(Plan(operand, INT32, ()))
            elif form is not None:
                shape = facts.shape(_value_at(context, operand)) or ()
                axes = tuple(range(len(shape)))
                one = self._activation(context, operand)
                plans.append(Plan(operand, form, axes[-1:] if self.per_token else axes, one))
        # A bias is quantized by the scales of both factors.
        factors = [plan for plan in plans if not plan.operand.is_bias]
        plans = [*factors, *(p for p in plans if p.operand.is_bias and len(factors) == 2)]
        if not plans:
            return
        positions = sorted({plan.operand.position for plan in plans})
        arithmetic: Arithmetic = context[ARITHMETIC]
        given: dict[str, Any] = {"plans": plans, "arithmetic": arithmetic, "positions": positions}
        if self.ema:
            given["mean"] = partial(self._running, facts=facts)
        context.insert_before_op(at_once if self.ema else at_present, inputs=positions, **given)

    def _running(self, one: Activation, largest: Any, facts: Facts) -> Any:
        """Return the running mean of the largest magnitudes of an operand, as a tensor."""
        if one.mean is None or not self.frozen:
            now = float(host(facts, largest).array.reshape(()))
            one.mean = now if one.mean is None else one.mean - (1 - self.ema) * (one.mean - now)
            one.histogram.seen += 1
        return largest * 0.0 + one.mean

    # Results.

    def result(self) -> QuantizeResult:
        """Return what is quantized so far."""
        parameters, reached, unreached = self._coverage.figures()
        rows = []
        for owner, row in self._rows.items():
            if owner in self._steps:
                row.scales = [float(one) for one in self._steps[owner].scale().ravel()]
            rows.append(row)
        form = self._formats[1]
        others = [] if form is None else [shown(o, form) for o in self._activations.values()]
        named = [unread.name for unread in unreached if unread.reason == "not read"]
        if self.method == "static":
            named += [
                f"{one.op} ({one.role})"
                for one in self._activations.values()
                if not one.histogram.seen
            ]
        return QuantizeResult(
            self.method,
            rows,
            others,
            [*named, *self._coverage.unread_matrices()],
            parameters,
            reached,
            unreached,
            self._clock.spent / 1e9,
            list(self._notes),
        )


def _grid(scale: Any, form: Format) -> Grid:
    """Return the symmetric grid of scales."""
    return Grid(scale, 0 * scale, -form.highest, form.highest, form.float8)


def _value_at(context: OpContext, operand: Operand) -> Any:
    inputs: Any = context.get_inputs()
    value = inputs[operand.position]
    if (
        operand.weight is not None
        and (found := context.value(operand.position, operand.item)) is not None
    ):
        return found
    return value if operand.item is None else value[operand.item]


def _unknown(parameter: Any) -> Any:
    raise LookupError("the scales of a weight that was not analysed")
