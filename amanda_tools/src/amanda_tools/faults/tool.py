"""`InjectFaults`: changes single elements of inputs, weights, outputs or gradients of operators.

Owns which elements are changed, and that the same seed changes the same ones in every process and
framework mode.
"""

from __future__ import annotations

import copy
import fnmatch
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from amanda_core import OpContext
from amanda_core.engine.action import staged
from amanda_core.errors import ResultError, ToolError, UnsupportedError
from amanda_core.interface.facts import Facts, Placement
from amanda_core.weights.reads import Weight
from amanda_tools.faults.models import Bits, Model, apply_model, bits_of, fields_of
from amanda_tools.faults.result import Fault, FaultSite, FaultsResult
from amanda_tools.kit.operators.tool import OperatorTool
from amanda_tools.kit.tensors.values import NotReadableError, facts_of, host, need_numpy
from amanda_tools.kit.weights.baking import Edit
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.kit.weights.coverage import UnreachedWeight, WeightCoverage
from amanda_tools.kit.weights.edited_reads import EditedReads

__all__ = ["InjectFaults"]

Site = Literal["input", "weight", "output", "gradient"]
Mode = Literal["rate", "per_layer", "per_sample", "per_run"]
_MODELS = get_args(Model)
#: Models that change one bit.
_OF_BITS = ("bit_flip", "stuck_at_0", "stuck_at_1")


class InjectFaults(OperatorTool["_Op"], BakingTool):
    """Injects faults into operators, as soft errors of hardware would.

    Which elements are hit depends on the seed, the run, the operator and its execution only. A
    fault in a weight is there in all executions of a run. The program's own tensors are not
    changed: operators get changed copies.

    Args:
        ops: Patterns of common types or names of operators.
        site: Where the faults are: in the `input` or the `weight` of an operator, its `output`, or
            the `gradient` that arrives at its output.
        model: `bit_flip`, `stuck_at_0` and `stuck_at_1` change a bit, `zero` all bits. `random`
            draws a number from ``-amount`` to ``amount``, `noise` adds one with the standard
            deviation `amount`, `scale` multiplies by it, and `value` replaces by it.
        bits: `any`, `sign`, `exponent`, `mantissa`, or numbers of bits from the least significant.
        mode: `rate`: each element with the probability `rate`. `per_layer`: `count` elements in
            each execution of each operator. `per_sample`: `count` elements of each index of the
            first axis. `per_run`: `count` elements in all of the run. Which operators there are is
            learned in run 0, which has no faults. If `begin_run` is never called, all of the
            program is one run: it is learned in the first step, or call of a model, and the faults
            are in the second.
        rate: The probability for the mode `rate`.
        count: How many elements for the other modes.
        amount: The number that some models use.
        seed: Seed of the random numbers.
        replay: Faults of an earlier result, or its file, to be injected again in place of others.

    Attributes:
        run: Number of the present run. Set it by `begin_run`.
        faults: The faults so far.

    Raises:
        ValueError: An option is not in its range.

    >>> tool = InjectFaults(rate=1e-6, bits="exponent")
    """

    whole = True
    words: ClassVar[tuple[str, str]] = ("faulty", "original")
    otherwise: ClassVar[str] = "Not all operators can read these weights with the same faults"

    def __init__(
        self,
        ops: list[str] | None = None,
        site: Site = "output",
        model: Model = "bit_flip",
        bits: Bits | list[int] = "any",
        mode: Mode = "rate",
        rate: float | None = None,
        count: int = 1,
        amount: float = 1.0,
        seed: int = 0,
        replay: Path | str | Sequence[Fault] | None = None,
    ) -> None:
        for name, value, choices in (
            ("site", site, get_args(Site)),
            ("model", model, _MODELS),
            ("mode", mode, get_args(Mode)),
            ("bits", bits if isinstance(bits, str) else "any", get_args(Bits)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be of {', '.join(choices)}, not {value!r}")
        self._no_rate = rate is None and mode == "rate" and replay is None
        self.changes_values = False if self._no_rate else None
        rate = rate or 0.0
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be from 0 to 1, but is {rate}")
        if count < 0:
            raise ValueError(f"count must not be negative, but is {count}")
        super().__init__()
        need_numpy()
        self.ops = ops or ["conv*", "linear", "matmul"]
        self.site, self.model, self.mode = site, model, mode
        self.bits, self.rate, self.count, self.amount, self.seed = bits, rate, count, amount, seed
        self.run = 0
        self.faults: list[Fault] = []
        self._runs: set[int] = {0}
        #: Sizes of the values in the executions of run 0, in order, for one fault per run.
        self._profile: list[tuple[_Op, int, int]] = []
        self._planned: dict[tuple[int, int], list[int]] = {}
        self._coverage = WeightCoverage(self)
        self._reads = EditedReads()
        if site != "weight":
            self.refuse_baking(f"changes activations, as site={site} says")
            del self.saves_to
        #: Whether runs begin by `begin_run`; otherwise whether the first part has ended.
        self._counted, self._parts = False, 0
        faults = _read(Path(replay)) if isinstance(replay, (Path, str)) else replay
        self._replay: dict[tuple[int, int, int], list[Fault]] | None = None
        if faults is not None:
            self._replay = {}
            for fault in faults:
                key = fault.run, fault.op_id, fault.call
                self._replay.setdefault(key, []).append(fault)
        self.add_inst_for_op(self.analyse)
        if mode == "per_run":
            self.add_inst_for_step(end=lambda number: self._end_part())
            self.add_inst_for_call(begin=lambda call: self._end_part(call.number))

    def begin_run(self, run: int) -> None:
        """Begin a run: executions are counted from 0 again, and other elements are hit."""
        with self._lock:
            self._counted = True
            self.run = run
            self._runs.add(run)
            for op in self._ops.values():
                op.call, op.noted, op.wrong = 0, False, None
            self._planned.clear()
            if self.mode == "per_run" and run and self._profile:
                self._plan()

    def _plan(self) -> None:
        """Choose the elements of a run among those that the profile has."""
        import numpy as np

        ends = np.cumsum([size for _, _, size in self._profile])
        random, total = np.random.default_rng([self.seed, self.run]), int(ends[-1])
        for chosen in random.choice(total, min(self.count, total), replace=False):
            number = int(np.searchsorted(ends, chosen, side="right"))
            op, call, size = self._profile[number]
            place = int(chosen - (ends[number] - size))
            # Outside of counted runs, the executions that were learned come before.
            when = call if self._counted or call < 0 else call + op.call
            self._planned.setdefault((op.id, when), []).append(place)

    def _end_part(self, calls: int = 1) -> None:
        """Plan the faults of a program that is one run, if its first step or call has ended."""
        with self._lock:
            if self._profile and not self._counted and not self._parts and calls:
                self._parts = 1
                self._plan()

    def analyse(self, context: OpContext) -> None:
        """Insert the routine that changes elements, if the op is one of those chosen."""
        if not self.cannot_bake:
            self.note_weights(context)
            self._reads.add(context)
        names = (context["type"] or "", context.op_type)
        chosen = any(fnmatch.fnmatch(name, p) for name in names for p in self.ops)
        if not chosen or not self.is_wanted(context):
            return
        roles = context.get("input_roles", ())
        if self.site == "weight":
            known = [place for place in context.weights if isinstance(place, int)]
            matrices = [p for p in known if len(context.weights[p].shape) > 1]
            named = [roles.index(role) for role in ("weight", "right") if role in roles]
            positions = matrices[:1] or named[:1]
        else:
            positions = [roles.index("input") if "input" in roles else 0]
        if not positions:
            return
        position = positions[0] if self.site in ("input", "weight") else 0
        if self.site == "weight" and position in context.weights:
            self._coverage.add_parameters(context.weights, context.zone, context.name)
            self._coverage.add_reached(context.weights[position])
        if self.is_exported:
            op = self._executed(context, position)
        else:
            op = self.account_of(context, lambda: _Op(context, f"{self.site} {position}"))
            op.reads.add(_read_of(context, position))
        if self.site == "weight" and position in context.weights:
            self._reads.add(context, position, op.edit, op.id)
        elif self.site == "weight":
            self.refuse_baking(f"changes input {position} of {context.name}")
        if self.is_exported:
            wrong = self._exported(context, op, position)
            if wrong is not None:
                context.insert_before_op(replaced, inputs=[position], wrong=wrong)
            return
        arguments: dict[str, Any] = {"op": op, "position": position}
        if self.site in ("input", "weight"):
            context.insert_before_op(self.change, inputs=[position], **arguments)
        elif self.site == "output":
            context.insert_after_op(self.change, outputs=[0], **arguments)
        else:
            context.insert_before_backward_op(self.change, grad_outputs=[0], **arguments)

    def before_export(self) -> None:
        """Refuse faults that are others in each execution.

        Raises:
            ToolError: They are not in weights.
        """
        if self.site != "weight":
            raise ToolError(
                f"Faults with site={self.site} are others in each execution, and a program has the "
                "same in all",
                where=f"{self.tool_name}.before_export",
                fix="Use site='weight'",
            )

    def _executed(self, context: OpContext, position: int) -> _Op:
        """Return the operator of the model that has the faults of an operator of a program.

        Modes of a framework may give an operator different ids. Then it is known by its weight.

        Raises:
            ToolError: It has not been executed, or several read its weight with other faults.
        """
        executed = [op for op in self._ops.values() if op.site.calls]
        read = _read_of(context, position)
        found = [op for op in executed if op.id == context.get_op_id()]
        found = found or [op for op in executed if read is not None and read in op.reads]
        if len(found) == 1:
            return found[0]
        raise ToolError(
            f"{len(found)} operators have been executed that read its weight, each with its own "
            "faults"
            if found
            else "It has not been executed under the tool, so the faults of its weight are not "
            "known",
            where=context.where,
            fix="Run the model under the tool before, as it is exported: in a function or jitted "
            "if the program is",
        )

    def _exported(self, context: OpContext, op: _Op, position: int) -> Any:
        """Return a weight with the faults of this run, for a program; None if it has none."""
        value = context.value(position)
        if value is None:
            raise ToolError(
                "The values of this weight are not known while a program is made",
                where=context.where,
                fix="Leave this operator out by `ops`, or export a model that bake() has written",
            )
        if not op.call:  # It has not run in this run.
            self.change(value, op, position)
        edit = op.edit()
        return None if edit is None else edit(value)

    def change(self, value: Any, op: _Op, position: int) -> Any:
        """Return the value with some elements changed; None if no element is hit."""
        with self._lock, self._clock:
            call, op.call = op.call, op.call + 1
            try:
                return self._changed(value, op, position, call)
            except NotReadableError as error:
                self._notes.setdefault(f"{op.site.op} is not changed: {error}")
                return None

    def _changed(self, value: Any, op: _Op, position: int, call: int) -> Any:
        import numpy as np

        facts = op.facts
        placement = facts.placement(value)
        if placement is not None and (placement.partial or placement.parts is None):
            raise NotReadableError("processes hold it as parts that are not blocks")
        known = facts.shape(value) if placement is None else placement.shape
        shape = [int(length or 0) for length in known or ()]
        size = int(np.prod(shape))
        op.site.calls, op.site.elements = op.site.calls + 1, op.site.elements + size
        op.site.dtype = facts.dtype(value)
        when = -1 if self.site == "weight" else call
        if self._replay is not None:
            return self._replayed(value, op, position, when)
        # Processes that have other samples are hit elsewhere, and those that have the same are not.
        samples = [op.rank] if op.rank and self.site != "weight" else []
        random = np.random.default_rng([self.seed, self.run, op.id, when + 1, *samples])
        places = np.asarray(self._places(random, op, call, when, shape, size))
        if not len(places):
            return None
        here, own = places, np.ones(len(places), bool)
        if placement is not None:
            here, own = _here(places, placement)
        tensor = host(facts, value)
        flat = tensor.array.reshape(-1)
        fields = [0]
        if self.model in _OF_BITS:
            fields = fields_of(tensor.dtype, flat.dtype.itemsize, self.bits)
        bits = np.asarray(fields)[random.integers(0, len(fields), len(places))]
        before, drawn = bits_of(flat)[here[own]], copy.deepcopy(random)
        apply_model(self.model, flat, tensor.dtype, here, bits, self.amount, random, own)
        if when >= 0 or not op.noted:  # A fault of a weight is the same in each execution.
            op.noted = True
            if when < 0:  # Also the faults of the parts that other processes hold.
                op.wrong = lambda flat, dtype: apply_model(
                    self.model, flat, dtype, places, bits, self.amount, copy.deepcopy(drawn)
                )
            after = bits_of(flat)[here[own]]
            for index, old, new in zip(here[own], before, after, strict=True):
                fault = Fault(self.run, op.id, when, position, int(index), int(old), int(new))
                self.faults.append(fault)
            op.site.faults += int(own.sum())
        return facts.restore(flat.reshape(tensor.array.shape), value) if own.any() else None

    def _places(
        self, random: Any, op: _Op, call: int, when: int, shape: list[int], size: int
    ) -> Any:
        import numpy as np

        if self.mode == "rate":
            number = int(random.binomial(size, self.rate))
            return random.choice(size, number, replace=False, shuffle=False)
        if self.mode == "per_layer":
            return random.choice(size, min(self.count, size), replace=False, shuffle=False)
        if self.mode == "per_sample":
            each = size // max(shape[0], 1) if shape else size
            rows = range(shape[0] if shape else 1)
            if not each or not rows:
                return ()
            chosen = [random.choice(each, min(self.count, each), replace=False) for _ in rows]
            return np.concatenate([row * each + c for row, c in zip(rows, chosen, strict=True)])
        if self.run == 0 and not self._parts:
            if when >= 0 or call == 0:
                self._profile.append((op, when, size))
            return ()
        return np.asarray(self._planned.get((op.id, when), ()), int)

    def _replayed(self, value: Any, op: _Op, position: int, when: int) -> Any:
        import numpy as np

        faults = (self._replay or {}).get((self.run, op.id, when), ())
        faults = [fault for fault in faults if fault.position == position]
        if not faults:
            return None
        tensor = host(op.facts, value)
        flat = tensor.array.reshape(-1)
        raw = bits_of(flat)
        new = np.asarray([f.after for f in faults], raw.dtype)
        raw[[f.index for f in faults]] = new
        if when < 0 and op.facts.placement(value) is not None:
            self.refuse_baking("replays faults of the part that this process holds")
        elif when < 0:
            op.wrong = lambda flat, dtype: bits_of(flat).put([f.index for f in faults], new)
        self.faults += faults
        op.site.faults += len(faults)
        return op.facts.restore(flat.reshape(tensor.array.shape), value)

    def baked(self, weight: Weight) -> Edit | None:
        """Return the function that puts the faults of this run into a parameter."""
        return self._reads.edit_of(weight)

    def read_otherwise(self) -> list[UnreachedWeight]:
        """Return the weights that operators read with different faults."""
        return self._reads.read_otherwise()

    def facts(self) -> list[Facts]:
        """Return the facts of the frameworks whose operators the tool has seen."""
        return list({id(op.facts): op.facts for op in self._ops.values()}.values())

    def result(self) -> FaultsResult:
        """Return the faults so far."""
        with self._lock:
            sites = [op.site for op in self._ops.values()]
            figures = self._coverage.figures("not chosen")
            notes = [*self._notes, *self._missing()]
            return FaultsResult(sites, list(self.faults), len(self._runs), notes, *figures)

    def _missing(self) -> list[str]:
        """Return why there are no faults, or not all of those of a file."""
        if self._no_rate:
            return ["No rate was given, so nothing was injected: give one as `rate`"]
        if self._replay is not None:
            asked = sum(map(len, self._replay.values()))
            if len(self.faults) < asked:
                left = f"{asked - len(self.faults)} of the {asked} faults to replay met"
                return [f"{left} no execution of run {self.run}"]
        elif self.mode == "per_run" and self._ops and not self._counted and not self._parts:
            return ["NO faults: the program had one step or call, in which operators are learned"]
        return []


class _Op:
    """An operator at which faults are injected."""

    def __init__(self, context: OpContext, value: str) -> None:
        self.facts: Facts = facts_of(context)
        self.id = context.get_op_id()
        self.rank = 0
        if self.facts.processes() > 1:
            with suppress(UnsupportedError):
                self.rank = self.facts.group(context.weights.model(context.weights.root)).rank
        self.site = FaultSite(context.name, context.source, value)
        self.call = 0
        #: Its weight as it reads it: the key, and the axes.
        self.reads: set[object] = set()
        #: Whether the faults of its weight in this run were noted.
        self.noted = False
        #: Puts the faults of its weight in this run into a flat array of its bits, of a dtype.
        self.wrong: Callable[[Any, str], None] | None = None

    def edit(self) -> Edit | None:
        """Return the function that puts the faults of this run into its weight."""
        wrong = self.wrong
        if wrong is None:
            return None

        def edited(seen: Any) -> Any:
            tensor = host(self.facts, seen)
            flat = tensor.array.reshape(-1)
            wrong(flat, tensor.dtype)
            return self.facts.restore(flat.reshape(tensor.array.shape), seen)

        return edited


def _read_of(context: OpContext, position: int) -> object:
    """Return what tells the weight at a position, and how it is read; None if it is not known."""
    weight = context.weights.get(position)
    return None if weight is None else (weight.key, weight.axes)


@staged
def replaced(value: Any, *, wrong: Any) -> Any:
    """Return a constant in place of a value."""
    return wrong


def _here(places: Any, placement: Placement) -> tuple[Any, Any]:
    """Return numbers of elements of a value as they are in this process, and which of them are."""
    import numpy as np

    index = np.unravel_index(places, placement.shape)
    parts = placement.parts or ()
    begin, end = ([getattr(one, name) for one in parts] for name in ("start", "stop"))
    ends = list(zip(index, begin, end, strict=True))
    own = np.logical_and.reduce([(first <= at) & (at < last) for at, first, last in ends])
    lengths = [last - first for _, first, last in ends]
    moved = [np.clip(at - first, 0, max(last - first - 1, 0)) for at, first, last in ends]
    if 0 in lengths:
        return places, np.zeros(len(places), bool)
    return np.ravel_multi_index(moved, lengths), own


def _read(path: Path) -> list[Fault]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != "amanda.inject_faults/1":
            raise ValueError(found["format"])
        return [Fault(**fault) for fault in found["faults"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(
            f"{path} is not a result of inject_faults: {error}",
            fix="Give the inject_faults.json of an earlier run",
        ) from error
