"""Operands that are not weights: their ranges, and the quantization by what is known of them.

Owns the calibration. Grids of present values belong to `present`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from amanda_core import OpContext
from amanda_core.engine.activation import autodiff_enabled
from amanda_core.errors import ToolError
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.interface.groups import Group
from amanda_tools.kit.operators.clock import Clock
from amanda_tools.kit.operators.tool import runs_in_order
from amanda_tools.kit.tensors.types import is_real
from amanda_tools.kit.tensors.values import host, numbers
from amanda_tools.quantize.fake import constants, fake_quantize, quantize_item
from amanda_tools.quantize.formats import EPSILON, Format, Grid
from amanda_tools.quantize.observers import Histogram
from amanda_tools.quantize.operands import Operand, value_at, with_item
from amanda_tools.quantize.options import Options
from amanda_tools.quantize.result import QuantizedActivation
from amanda_tools.quantize.rounds import Rounds
from amanda_tools.quantize.steps import Steps

__all__ = ["Activation", "Activations"]

#: No activation is as large. What a program adds that is lower hides elements from a softmax.
_HIDDEN = -1e30


@dataclass
class Activation:
    """An operand that is not a weight.

    Attributes:
        op: Readable name of its operator.
        role: Its role there, or the number of its position.
        source: ``file:line`` of the operator's call, or None.
        histogram: Its values so far.
        grid: Its grid; None before the end of the calibration.
        run: The last run in which it was observed.
        mean: Running mean of the largest magnitudes; None if there is none.
        made: The arguments of `fake_quantize`, made from the grid when first needed.
        copied: Whether it is a copy of a weight.
        groups: The processes whose values decide: those that have parts of a value, then those that
            have other data.
        ops: Ids of the operators of this name and role that ran.
        exported: Ids of those in a program that is exported.
    """

    op: str
    role: str
    source: str | None
    histogram: Histogram = field(default_factory=Histogram)
    grid: Grid | None = None
    run: int = -1
    mean: float | None = None
    made: dict[str, Any] | None = None
    copied: bool = False
    groups: Sequence[Group] = ()
    ops: set[int] = field(default_factory=set)
    exported: set[int] = field(default_factory=set)

    @property
    def key(self) -> str:
        """The name under which it is saved."""
        return f"{self.op}/{self.role}"


class Activations:
    """The activations that a tool quantizes.

    Args:
        options: The user's options.
        steps: The learned steps.
        rounds: The runs of the program.
        clock: Measures the time that ranges take.
        notes: Where it is noted what cannot be quantized.

    Attributes:
        frozen: Whether the calibration has ended.
        groups: Label of a model -> the processes that hold parts of its values, and those that
            train it with data of their own.
    """

    def __init__(
        self,
        options: Options,
        steps: Steps,
        rounds: Rounds,
        clock: Clock,
        notes: dict[str, None],
    ) -> None:
        self._options, self._steps, self._rounds = options, steps, rounds
        self._clock, self._notes = clock, notes
        self._known: dict[str, Activation] = {}
        #: Names of additions that hide elements, and of those that do so in this process.
        self._masks: set[str] = set()
        self._hiding: set[str] = set()
        self.groups: dict[str, tuple[Group, Group]] = {}
        self.frozen = False

    def get(self, context: OpContext, operand: Operand, exported: bool = False) -> Activation:
        """Return what is known of an operand.

        Args:
            context: The operator's context.
            operand: The operand.
            exported: Whether it is that of a program.

        Raises:
            ToolError: Its range is not known, since operators of a program share its name.
        """
        key = f"{context.name}/{operand.role}"
        one = self._known.get(key)
        if one is None:
            one = self._known[key] = Activation(context.name, operand.role, context.source)
        one.source, one.copied = context.source, operand.copied
        groups = self.groups.get(context.weights.root, ())
        one.groups = [group for group in groups if group.size > 1]
        (one.exported if exported else one.ops).add(context.get_op_id())
        # They share a range. A running mean depends on their order besides.
        allowed = len(one.ops) if one.mean is None else 1
        if one.ops and len(one.exported) > allowed:
            raise ToolError(
                f"Several operators are called {context.name}, so the range of each is not known",
                where=context.where,
                fix="Give them names of their own, as a layer or a scope of names does",
            )
        return one

    def begin_export(self) -> None:
        """Forget the operators of an earlier program."""
        for one in self._known.values():
            one.exported.clear()

    def insert(
        self, context: OpContext, facts: Facts, operand: Operand, exported: bool = False
    ) -> None:
        """Insert the observation of an operand, and its quantization by a grid or a step.

        Args:
            context: The operator's context.
            facts: The driver's facts about tensors.
            operand: The operand.
            exported: Whether for a program, in which nothing is observed or learned.
        """
        form = self._options.format_of(operand.copied)
        if form is None:
            return
        one, positions = self.get(context, operand, exported), [operand.position]
        if exported:
            self._insert_final(context, facts, operand, one)
        elif self._options.learns:
            with autodiff_enabled():
                learn = partial(self._learn, facts=facts, operand=operand, one=one, form=form)
                context.insert_before_op(learn, inputs=positions)
        elif one.grid is not None and operand.item is None:
            made = constants(facts, one.grid, value_at(context, operand))
            context.insert_before_op(fake_quantize, inputs=positions, facts=facts, **made)
        elif not self.frozen or operand.item is not None:
            context.insert_before_op(
                partial(
                    self._observe,
                    facts=facts,
                    operand=operand,
                    one=one,
                    alone=runs_in_order(context.namespace),
                    adds=context["type"] == "add",
                ),
                inputs=positions,
            )

    def _insert_final(
        self, context: OpContext, facts: Facts, operand: Operand, one: Activation
    ) -> None:
        """Insert the quantization of an operand by what is known of it now."""
        step, offset, grid = self._steps.get(one.key), None, one.grid
        if step is not None:
            grid, offset = step.grid()
        if grid is None:
            if one.op in self._masks:
                return
            raise ToolError(
                f"The range of the {one.role} of {one.op} is not known",
                where=context.where,
                fix="Run the model as it is exported under the tool before",
            )
        like = value_at(context, operand)
        made = constants(facts, grid, like)
        if offset is not None:
            made["offset"] = facts.tensor(offset, like)
        context.insert_before_op(
            quantize_item, inputs=[operand.position], item=operand.item, facts=facts, **made
        )

    def freeze(self) -> None:
        """End the calibration."""
        self.frozen = True
        for one in self._known.values():
            if one.grid is None and one.histogram.seen and one.op not in self._masks:
                self._decide(one)

    def end_step(self, step: int) -> None:
        """Decide with the other processes, all of which come to the end of a step.

        The next run may be an evaluation, which only one of them has.
        """
        for one in self._known.values():
            if one.groups and one.grid is None and not self.frozen and self._ready(one):
                self._decide(one)

    def clear(self) -> None:
        """Forget all ranges."""
        self._known.clear()

    def running(self, one: Activation, largest: Any, facts: Facts) -> Any:
        """Return the running mean of the largest magnitudes of an operand, as a tensor."""
        if one.mean is None or not self.frozen:
            now = float(host(facts, largest).array.reshape(()))
            # The first values of a state are often zeros.
            one.mean = one.mean - (1 - self._options.ema) * (one.mean - now) if one.mean else now
            one.histogram.seen += 1
        return largest * 0.0 + one.mean

    def progress(self) -> dict[str, Any]:
        """Return the ranges so far, as JSON."""
        return {
            "frozen": self.frozen,
            "activations": {
                key: {**one.histogram.to_json(), "ready": self._decided(one), "mean": one.mean}
                for key, one in self._known.items()
            },
        }

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from the result of `progress`."""
        self.frozen = progress["frozen"]
        self._known = {}
        for key, state in progress["activations"].items():
            op, _, role = key.rpartition("/")
            one = Activation(op, role, None, Histogram.from_json(state), mean=state["mean"])
            if state["ready"]:
                one.grid = self._grid_of(one)
            self._known[key] = one

    def result(self) -> list[QuantizedActivation]:
        """Return what is known of each operand."""
        found = []
        for one in self._known.values():
            form = self._options.format_of(one.copied)
            if form is not None and one.op not in self._masks:
                found.append(self._shown(one, form))
        return found

    def uncalibrated(self) -> list[str]:
        """Return the operands without an observed range."""
        if self._options.activations is None:
            return []
        return [
            f"{one.op} ({one.role})"
            for one in self._known.values()
            if not one.histogram.seen and not one.copied and one.op not in self._masks
        ]

    def _observe(
        self,
        value: Any,
        facts: Facts,
        operand: Operand,
        one: Activation,
        alone: bool,
        adds: bool,
    ) -> Any:
        """Note the range of a value during the calibration, and quantize it afterwards."""
        part = value if operand.item is None else value[operand.item]
        if not is_real(facts, part):
            return None
        if one.grid is None:
            if self.frozen or one.op in self._masks:
                return None
            run = self._rounds.present(alone)
            if self._ready(one) and run != one.run:
                self._decide(one)
        if one.grid is None:
            with self._clock:
                self._note_range(facts, part, one, run, adds)
            return None
        if one.made is None:
            one.made = constants(facts, one.grid, part)
        new = fake_quantize(part, facts=facts, **one.made)
        return with_item(value, operand.item, new)

    def _note_range(self, facts: Facts, value: Any, one: Activation, run: int, adds: bool) -> None:
        try:
            tensor = host(facts, value)
        except NotReadableError as error:
            self._notes[f"{one.op} is not quantized: {error}"] = None
            return
        values = numbers(tensor.array, tensor.dtype)
        if adds and values.size and values.min() < _HIDDEN:
            self._hiding.add(one.op)
            if not one.groups:
                self._note_mask(one)
                return
        told = one.histogram.add(values, self._options.observer != "minmax")
        # What one process has may tell nothing, and all of them decide in the same run.
        if (told or one.groups) and run != one.run:
            one.histogram.seen += 1
            one.run = run

    def _note_mask(self, one: Activation) -> None:
        self._masks.add(one.op)
        self._notes[f"{one.op} adds a mask and is not quantized"] = None

    def _learn(
        self, value: Any, facts: Facts, operand: Operand, one: Activation, form: Format
    ) -> Any:
        part = value if operand.item is None else value[operand.item]
        step = self._steps.get(one.key)
        if not is_real(facts, part):
            return None
        if step is None:
            # Nothing can be learned from a first state of zeros.
            if not part.detach().nan_to_num(0.0, 0.0, 0.0).any():
                return None
            step = self._steps.make(one.key, form, part, tuple(range(part.dim())), False)
        one.histogram.seen += 1
        # The step has as many axes as the first value had.
        return with_item(value, operand.item, step.quantized(part).reshape(part.shape))

    def _ready(self, one: Activation) -> bool:
        needed = self._options.calibration
        if one.op in self._masks:
            return False
        return one.grid is not None or bool(needed and one.histogram.seen >= needed)

    def _decided(self, one: Activation) -> bool:
        """Return True if the range is final, which other processes have a part in."""
        return self._ready(one) and (one.grid is not None or not one.groups)

    def _decide(self, one: Activation) -> None:
        """Make the grid of the values that all processes have seen, if these tell a range."""
        counting, hides = self._options.observer != "minmax", one.op in self._hiding
        for group in one.groups:
            hides = one.histogram.share(group, f"range of {one.key}", counting, hides)
        if hides:
            self._note_mask(one)
        elif one.groups and not one.histogram.tells:
            one.histogram.seen = 0
        else:
            one.grid = self._grid_of(one)

    def _grid_of(self, one: Activation) -> Grid:
        form, options = self._options.format_of(one.copied), self._options
        assert form is not None
        return one.histogram.grid(
            form, options.observer, options.percentile, bool(options.symmetric)
        )

    def _shown(self, one: Activation, form: Format) -> QuantizedActivation:
        grid = self._grid_of(one) if self._decided(one) else None
        step = self._steps.get(one.key)
        scale = None if grid is None else float(grid.scale.reshape(()))
        zero = 0.0 if grid is None else float(grid.zero.reshape(()))
        if one.mean is not None:  # The grid is that of the running mean, not of a histogram.
            scale, zero = max(one.mean / form.highest, EPSILON), 0.0
        known = one.histogram.low <= one.histogram.high
        return QuantizedActivation(
            one.op,
            one.role,
            one.source,
            form.name,
            one.histogram.seen,
            one.histogram.low if known else None,
            one.histogram.high if known else None,
            float(step.scale().reshape(())) if step is not None else scale,
            zero,
        )
