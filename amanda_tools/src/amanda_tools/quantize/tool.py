"""`Quantize`: fake quantization of operands, after training or during it, on every backend.

Owns the choice of what is inserted at an operator, and what the whole tool can be asked. `weights`,
`activations` and `present` insert it; `options`, `formats` and `observers` say which grids there
are, and `learned` has those that are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from amanda_core import OpContext
from amanda_core.engine.activation import disabled
from amanda_core.errors import ToolError, UnsupportedError
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.interface.groups import Group
from amanda_core.weights.reads import Weight
from amanda_tools.kit.operators.clock import Clock
from amanda_tools.kit.output.rendering import format_count
from amanda_tools.kit.tensors.arithmetic import arithmetic_of
from amanda_tools.kit.tensors.types import is_real
from amanda_tools.kit.tensors.values import facts_of, need_numpy
from amanda_tools.kit.weights.baking import BakedModel
from amanda_tools.kit.weights.copies import COPYING, Copies
from amanda_tools.kit.weights.coverage import UnreachedWeight, WeightCoverage
from amanda_tools.kit.weights.ranking import chosen
from amanda_tools.kit.weights.tool import Edit, WeightTool
from amanda_tools.kit.weights.writes import Watch
from amanda_tools.quantize.activations import Activations
from amanda_tools.quantize.experts import Experts
from amanda_tools.quantize.formats import Grid
from amanda_tools.quantize.integers import has_integers, write_integers
from amanda_tools.quantize.learned import can_learn
from amanda_tools.quantize.observers import Observer
from amanda_tools.quantize.operands import (
    PRODUCTS,
    Operand,
    operands_of,
    value_at,
    why_not,
    why_unreached,
)
from amanda_tools.quantize.options import Method, checked
from amanda_tools.quantize.present import insert_present
from amanda_tools.quantize.result import QuantizeResult
from amanda_tools.quantize.rounds import Rounds
from amanda_tools.quantize.steps import Steps
from amanda_tools.quantize.weights import Weights

__all__ = ["Method", "Quantize"]


class Quantize(WeightTool):
    """Quantizes the operands of products and residual additions, and computes with real numbers.

    Operands are those of linear and recurrent layers, convolutions, matrix products, einsum,
    attention, additions of two activations, and the tables of embeddings. The program itself does
    not change: each operator gets values that lie on the grid of a number format. Gradients pass as
    if nothing had been rounded, unless steps are learned.

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
        symmetric: Of ``static``: whether grids are symmetric around 0. If it is left out, those of
            weights are, and those of activations have a zero point. Grids of floats always are.
        calibration: Of ``static``: in how many runs of the program the range of an operand is
            observed before it is quantized; 0 until `freeze` is called. A run is a call of the
            outermost module, or a step; outside of both, an execution of the operator.
        ema: Of ``dynamic``: the decay of a running mean of the largest magnitudes that is used in
            place of the present one and no longer changes after `freeze`, such as 0.9999; 0 for
            none.
        group: Of ``static``: how many neighbours of a channel of a weight share a scale, such as
            128; 0 for all of them. Weights of products that sum over several axes, as convolutions
            do, or over an axis that does not hold such groups, are left out.
        from_: File of a result of `sensitivity`, whose ranking `keep` and `bits` use; the option
            ``from`` on the command line.
        keep: How many of the most sensitive operators stay as they are.
        bits: Mean number of bits of the ranked weights that are quantized: each gets from 2 to 8 of
            them, more where that avoids more damage. It takes the place of `weights` there.

    Attributes:
        grids: The scales of weights.

    Raises:
        ValueError: An option has none of its values, or options do not go together.
        ImportError: NumPy is not installed.

    >>> tool = Quantize(weights="int4", activations="none")
    """

    words = ("quantized", "unquantized")
    by_example = True  # Axes of operands are those of one.

    def __init__(
        self,
        method: Method = "static",
        weights: str = "int8",
        activations: str = "int8",
        per: Literal["channel", "tensor"] | None = None,
        per_token: bool = False,
        observer: Observer = "minmax",
        percentile: float = 99.99,
        symmetric: bool | None = None,
        calibration: int = 1,
        ema: float = 0.0,
        group: int = 0,
        from_: str | None = None,
        keep: int | None = None,
        bits: float | None = None,
    ) -> None:
        super().__init__()
        need_numpy()
        self._kept, chosen_bits = chosen(from_, keep, bits)
        self._options = checked(
            weights,
            activations,
            per,
            chosen_bits,
            method=method,
            per_token=per_token,
            observer=observer,
            percentile=percentile,
            symmetric=symmetric,
            calibration=calibration,
            ema=ema,
            group=group,
        )
        self.method = method
        self._coverage = WeightCoverage(self)
        self._notes: dict[str, None] = {}
        self._clock = Clock()
        self._copies = Copies()
        #: Owner -> a weight that is copied, and by which operator.
        self._copied: dict[str, tuple[Weight, str]] = {}
        self._steps = Steps(method, self.by_op, self, self._parameters)
        self._weights = Weights(
            self._options,
            self._steps,
            self._coverage,
            self._clock,
            self.claimed,
        )
        self._activations = Activations(
            self._options, self._steps, Rounds(self), self._clock, self._notes
        )
        self._experts = Experts()
        self.grids = self._weights.grids
        self.states = {"scale": self.grids}
        if self._options.has_zeros:
            self.states["zero"] = self._weights.zeros
        self.depends_on(self._copies, Watch(self.grids))
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_step(end=self._activations.end_step)

    # The base's questions.

    def options(self) -> dict[str, Any]:
        """Return the options that a resumed tool must have as well."""
        return self._options.to_json()

    def progress(self) -> dict[str, Any]:
        """Return the ranges of activations, which change with the executions."""
        self._steps.export()
        return self._activations.progress()

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from the result of `progress`."""
        self._steps.clear()
        self._weights.rows.clear()
        self._activations.resume(progress)

    def check_kept(self, name: str, kept: Any, shape: tuple[int, ...]) -> str:
        """Return why an array is not that of the scales of a parameter."""
        wanted = tuple(shape)
        fits = len(kept.shape) == len(wanted) and all(
            size and whole % size == 0 for size, whole in zip(kept.shape, wanted, strict=True)
        )
        return "" if fits else f"its shape {tuple(kept.shape)} is not one of scales for {wanted}"

    def baked(self, weight: Weight) -> Edit | None:
        """Return the function that quantizes a whole parameter."""
        return self._weights.baked(weight)

    def read_otherwise(self) -> list[UnreachedWeight]:
        """Return the weights that are quantized where they are read, but not everywhere."""
        return self._coverage.read_otherwise()

    def remove(self) -> None:
        """Stop: from now on every operand is used as it is."""
        super().remove()
        self._activations.clear()
        self._steps.clear()
        self._steps.optimizers.end()
        self._weights.rows.clear()

    # For users.

    @property
    def frozen(self) -> bool:
        """True if `freeze` was called."""
        return self._activations.frozen

    def freeze(self) -> None:
        """End the calibration: ranges seen so far are final, and others stay unquantized."""
        self._activations.freeze()
        self.invalidate()

    def before_export(self) -> None:
        """End the calibration, as `freeze` does.

        Raises:
            ToolError: No model ran, so that no ranges are known.
        """
        needs = self._options.activations and (self.method != "dynamic" or self._options.ema)
        if needs and not self._met:
            raise ToolError(
                "There are no ranges of activations to be exported",
                where=f"{self.tool_name}.before_export",
                fix="Run the model under the tool before, with inputs to calibrate by; "
                "`amanda export` gets them by --inputs FILE.npz",
            )
        if needs and not self.frozen:
            self.freeze()
        self._activations.begin_export()

    def check_stage(self, model: Any, facts: Facts) -> None:
        """Refuse a stage if steps are learned.

        Raises:
            ToolError: They are, and there are several processes.
        """
        self._check_processes(facts, "a stage of a pipeline")

    def save_baked(self, folder: Path | str) -> list[Path]:
        """Write the weights as operators read them; also as integers, in the folder ``integers``.

        See `BakingTool.save_baked` and `save_integers`. The second folder is left out if there are
        no integers, or several models.
        """
        files = super().save_baked(folder)
        roots = {weight.root for weight, _ in self._met.values() if self.baked(weight) is not None}
        if len(roots) == 1 and self._scales():
            files += self.save_integers(Path(folder) / "integers")
        return files

    def save_integers(self, folder: Path | str) -> list[Path]:
        """Write the quantized weights as integers and scales, and return the files.

        ``model.safetensors`` and ``config.json`` are those of compressed-tensors. Of weights that
        its formats do not have, such as those of convolutions, the quantized numbers are written.

        Args:
            folder: The folder, which is made if there is none.

        Raises:
            ToolError: Several models ran, or none; no weight is a matrix of integers with scales
                for each row or one for all; or see `save_baked`.
        """
        weights = self._baked("save_integers")
        roots = {one.weight.root for one in weights if one.edit is not None}
        scales = self._scales()
        if len(roots) != 1 or not scales:
            raise ToolError(
                "The tool did not see one model with matrices that have a scale for each row or "
                "one for all",
                where=f"{self.tool_name}.save_integers",
                fix="Run one model under the tool before, with the method static or dynamic and "
                "weights of int2 to int8; or use save_baked, which writes all weights",
            )
        (root,) = roots
        weights = [one for one in weights if one.weight.root == root]
        with disabled():
            model = BakedModel(root, self._model(root), weights)
        return write_integers(Path(folder), model, scales)

    def _scales(self) -> dict[str, tuple[Grid, int]]:
        """Return the grids and bits of the weights that files of integers have, by their names."""
        found = {}
        for weight, facts in self._met.values() if not self._options.learns else ():
            grid = self._weights.grid(weight, facts)
            form = self._options.format_for(weight)
            if form is None or form.float8 or grid is None:
                continue
            if has_integers(weight, grid, form.bits):
                found[weight.name] = grid, form.bits
        return found

    def parameters(self) -> list[Any]:
        """Return the learned tensors, for an optimizer; they exist after the model ran once.

        Afterwards the tool does not add them to an optimizer itself.

        Raises:
            ToolError: There are none, or none yet.
        """
        found = self._steps.parameters()
        if not found:
            learns = self._options.learns
            why = "the model has not run yet" if learns else f"{self.method} learns nothing"
            raise ToolError(
                f"There are no learned steps: {why}",
                where=f"{self.tool_name}.parameters",
                fix="Run the model once under the tool, with the method lsq, lsq+ or tqt",
            )
        self._steps.optimizers.taken = True
        return found

    def analyse(self, context: OpContext) -> None:
        """Quantize the op's operands, if it is such an operator."""
        if not self.meets(context):
            return
        reads = context.weights
        self._coverage.add_parameters(reads, context.zone, context.name)
        if context.zone != "model":
            return
        if self._kept.has(context):
            for weight in reads.values():
                self._coverage.add_unreached(weight, self._kept.reason)
            self._notes[f"{context.name}: {self._kept.reason}"] = None
            return
        facts = facts_of(context)
        operands = self._operands(context, facts)
        if operands and self._options.learns and not can_learn(context.namespace):
            raise ToolError(
                f"{self.method} needs parameters that learn, which are PyTorch's",
                where=context.where,
                fix="Use the method static or dynamic here",
            )
        if operands and not self._can_compute(context, facts, operands[0]):
            return
        self._note_unreached(context, facts, operands)
        if operands and facts.processes() > 1:
            self._meet_processes(context, facts)
        taken = {one.position for one in operands}
        for position, one in enumerate(context.get_inputs() or ()):
            left = context["type"] in PRODUCTS | {"add"} and position not in taken
            for value in (one if isinstance(one, (list, tuple)) else [one]) if left else ():
                if is_real(facts, value) and (how := why_not(facts, value)):
                    self._notes[f"{context.name} has operands that are {how}: they stay"] = None
        if self.method == "dynamic":
            self._insert_present(context, facts, operands)
            return
        factors = [one for one in operands if not one.is_bias]
        if not self._options.learns:
            self._insert_present(context, facts, [one for one in factors if one.copied])
            factors = [one for one in factors if not one.copied]
        for operand in factors:
            if operand.weight is not None:
                self._weights.insert(context, facts, operand, operand.weight, self.is_exported)
                if context["type"] == "grouped_matmul" and self.method == "static":
                    rows = self._activations.get(context, factors[0])
                    self._experts.insert(context, facts, operand.weight, rows)
            else:
                self._activations.insert(context, facts, operand, self.is_exported)

    def result(self) -> QuantizeResult:
        """Return what is quantized so far."""
        for weight, how in self._copied.values():
            if not self._coverage.read(weight.owner):
                self._coverage.add_unreached(weight, how)
        parameters, reached, unreached = self._coverage.figures()
        experts = [*self._coverage.unread_matrices(), *self._experts.without_rows()]
        named = [
            unread.name
            for unread in unreached
            if unread.reason == "not read"
            and not any(expert.startswith(f"{unread.name}[") for expert in experts)
        ]
        if self.method == "static":
            named += self._activations.uncalibrated()
        notes = [*self._notes, *self._kept.notes()]
        unread = self._options.mixed.keys() - self._weights.rows.keys()
        if unread:
            notes.append(f"{format_count(len(unread), 'weight')} of the ranking not read here")
        mean = self._weights.mean_bits()
        if mean is not None:
            notes.append(f"weights have {mean:.2f} bits in the mean, by from and bits")
        return QuantizeResult(
            self.method,
            self._weights.result(),
            self._activations.result(),
            [*named, *experts],
            parameters,
            reached,
            unreached,
            self._clock.spent / 1e9,
            notes,
        )

    def _operands(self, context: OpContext, facts: Facts) -> list[Operand]:
        """Return the operands of an op that are quantized, with copies of weights marked."""
        found = operands_of(context, facts)
        if not found or context["type"] == "add":
            return found
        copies = self._copies.reads(context)
        for one in found:
            if one.weight is None and not one.is_bias:
                for weight in copies.get(one.place, ()):
                    self._coverage.add_reached(weight)
                    self._weights.note_copied(context, weight)
        return [
            one._replace(copied=one.weight is None and not one.is_bias and one.place in copies)
            for one in found
        ]

    def _can_compute(self, context: OpContext, facts: Facts, operand: Operand) -> bool:
        """Return False, and note it, if there is no arithmetic for an operand."""
        try:
            arithmetic_of(facts, value_at(context, operand))
        except NotReadableError as error:
            self._notes[f"not supported on {context.namespace}: {error}"] = None
            return False
        return True

    def _check_processes(self, facts: Facts, where: str) -> None:
        if self._options.learns and (count := facts.processes()) > 1:
            raise ToolError(
                f"{self.method} would learn other steps in each of {count} processes",
                where=where,
                fix="Use the method static or dynamic here",
            )

    def _meet_processes(self, context: OpContext, facts: Facts) -> None:
        """Find out which processes decide with this one, or note that none does."""
        self._check_processes(facts, context.where)
        root = context.weights.root
        if root in self._activations.groups:
            return
        model, group = context.weights.model(root), None
        with suppress(UnsupportedError):
            group = facts.group(model)
        self._activations.groups[root] = facts.holders(model), group or Group()
        alone = group is None or (self.method == "dynamic" and group.size > 1)
        if alone and self._options.activations is not None:
            self._notes[
                f"ranges of activations are of the data of this process, one of {facts.processes()}"
            ] = None

    def _insert_present(self, context: OpContext, facts: Facts, operands: list[Operand]) -> None:
        insert_present(
            context,
            facts,
            operands,
            self._options,
            self._weights,
            self._activations,
            self.is_exported,
        )

    def _note_unreached(self, context: OpContext, facts: Facts, operands: list[Operand]) -> None:
        """Note which of the weights that the op reads it does not get quantized, and why."""
        reads = context.weights
        if not reads.consumed:
            return
        known = {one.place for one in operands if one.weight is not None}
        for place, weight in reads.items():
            if context["type"] in COPYING:
                self._copied.setdefault(weight.owner, (weight, f"copied by {context.op_type}"))
                if self.method == "static":
                    self._experts.insert_gather(context, facts, weight)
            elif place not in known:
                at = place if isinstance(place, int) else place[0]
                why = why_unreached(context, facts, operands, at)
                self._coverage.add_unreached(weight, why)
        if any(one.role == "weight" and one.item is not None for one in operands):
            self._notes[f"{context.name} multiplies inner states that are not quantized"] = None

    def _parameters(self) -> list[Any]:
        found = (weight.parameter for weight, _ in self._met.values())
        return [parameter for parameter in found if parameter is not None]
