"""`NonFinite`: find the operator that produces the first NaN or infinity, forward and backward.

Decides which operators are checked and which one is reported. `probe` checks tensors, `record`
holds what is needed meanwhile, and the result is in `result`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any, ClassVar, Literal

from amanda_core import OpContext
from amanda_core.engine.selection import select
from amanda_core.interface.vocabulary import backward_type_of
from amanda_core.runtime.threads import WeakGroup
from amanda_core.runtime.warning_locations import warn
from amanda_core.runtime.weak import Known, Witness, add_holder, strongly
from amanda_tools.kit.operators.entries import REARRANGING, key_of
from amanda_tools.kit.operators.tool import OperatorTool
from amanda_tools.kit.tensors.values import need_numpy
from amanda_tools.nonfinite.norms import GradientNorms
from amanda_tools.nonfinite.probe import INF, NAN, Pending, resolve
from amanda_tools.nonfinite.record import (
    Entered,
    Execution,
    Look,
    Made,
    Op,
    Running,
    describe_live,
    union,
    weak_reference,
)
from amanda_tools.nonfinite.result import Fault, NonFiniteResult, Origin

__all__ = ["NonFinite", "NonFiniteError"]

#: Backward types of operators whose gradients are only rearranged, not summed.
_MOVED = {
    backward_type_of(word)
    for word in REARRANGING - {"slice", "expand", "tile", "repeat", "split", "identity"}
}
#: Number of executions whose check may be pending on a device.
_WAITING = 4096


class NonFiniteError(FloatingPointError):
    """Raised if a value stops being finite.

    Attributes:
        fault: The fault.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fault,)


class NonFinite(OperatorTool[Op]):
    """Finds the operators whose results are not finite although their inputs are.

    Args:
        what: What counts: ``nan``, ``inf`` or ``both``.
        action: ``report`` in the result; ``warn`` as well, once for each operator; or ``raise``
            `NonFiniteError` at once.
        allow_ops: Patterns of operators that may produce such values, by type, common type or name.
        allow_modules: Patterns of module paths whose operators may produce such values.
        backward: Check gradients as well.
        every: Check only every n-th step.
        wait: When to read results from a device: after each ``op``, which stops the device each
            time, or once per ``step``. ``auto`` means once per step, unless `action` is ``raise``.
        everything: Include operators outside the model, such as those of an optimizer.
        norms: Measure the norms of the gradients of weights in each step that is checked. This
            reads each gradient from its device.

    Raises:
        ValueError: An option has an invalid value.
        ImportError: NumPy is not installed.

    >>> tool = NonFinite(what="nan", action="raise")
    """

    figures: ClassVar[Mapping[str, str]] = {"count": "", "checked": ""}

    def __init__(
        self,
        what: Literal["both", "nan", "inf"] = "both",
        action: Literal["report", "warn", "raise"] = "report",
        allow_ops: list[str] | None = None,
        allow_modules: list[str] | None = None,
        backward: bool = True,
        every: int = 1,
        wait: Literal["auto", "op", "step"] = "auto",
        everything: bool = False,
        norms: bool = False,
    ) -> None:
        super().__init__(everything)
        if what not in ("both", "nan", "inf"):
            raise ValueError(f"what must be both, nan or inf, but is {what!r}")
        if action not in ("report", "warn", "raise"):
            raise ValueError(f"action must be report, warn or raise, but is {action!r}")
        if wait not in ("auto", "op", "step"):
            raise ValueError(f"wait must be auto, op or step, but is {wait!r}")
        if every < 1:
            raise ValueError(f"every must be 1 or more, but is {every}")
        need_numpy()
        self.what = what
        self.action = action
        self.every = every
        self.wait = wait
        #: Whether even checks in main memory stay pending until the end of the step.
        self._defers = wait == "step"
        self._counts = {"both": NAN | INF, "nan": NAN, "inf": INF}[what]
        self._allowed = [select(op=allow_ops)] if allow_ops else []
        self._allowed += [select(module=allow_modules)] if allow_modules else []
        self._result = NonFiniteResult()
        self._faults: dict[tuple[object, ...], Fault] = {}
        self._waiting: list[Execution] = []
        #: Executions of eager operators in progress.
        self._running: Running = {}
        #: Tensors that an operator produced and that may be non-finite.
        self._made: Known[Made] = Known()
        add_holder(self)
        self._live: WeakGroup[Op] = WeakGroup()
        self._forward: weakref.WeakValueDictionary[tuple[object, ...], Op] = (
            weakref.WeakValueDictionary()
        )
        self._norms = GradientNorms() if norms else None
        self._step = 0
        self._looks = True
        #: The last step in which a forward operator had a fault.
        self._faulted = -1
        #: The last step in which a gradient was not finite.
        self._spoiled = -1
        #: Whether there was a NaN earlier in this step.
        self._seen = False
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_step(self.begin, self.end)
        self._is_backward = backward
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: OpContext) -> None:
        """Insert routines that check the outputs of an operator."""
        if not self.is_wanted(context):
            return
        if self._norms is not None:
            self._norms.watch(context)
        if not context.supports("ordered"):
            self._notes.setdefault(
                f"on {context.namespace} checks run in any order: the first fault of a step is the "
                "first that was found, not the first of the program"
            )
        if self._is_backward and not context.supports("gradients"):
            self._notes.setdefault(
                f"gradients are not checked on {context.namespace}, which does not show them"
            )
        if context["type"] in REARRANGING:
            return  # These operators only move values.
        op = Op(context, self._running)
        self._live.add(op)
        self._forward[op.key] = op
        # Uninitialized memory may contain anything.
        op.allowed = context["type"] == "empty" or any(test(context) for test in self._allowed)
        context.insert_before_op(self.enter, observe=True, op=op)
        context.insert_after_op(self.leave, observe=True, op=op)

    def analyse_backward(self, context: OpContext) -> None:
        """Insert routines that check the gradients of a backward operator."""
        if not self.is_wanted(context):
            return
        if context["backward_type"] in ("accumulate_grad", *_MOVED):
            return
        op = Op(context, self._running, of=context.op_type)
        self._live.add(op)
        holder = context if context.forward is None else context.forward
        op.is_reduction = context["backward_type"] == "reduce_grad"
        op.forward = self._forward.get(key_of(holder))
        op.allowed = any(test(holder) for test in self._allowed)
        context.insert_before_backward_op(self.enter, observe=True, op=op)
        context.insert_after_backward_op(self.leave, observe=True, op=op)

    def begin(self, step: int) -> None:
        """Record the number of the step."""
        with self._lock:
            self._step, self._seen = step, False
            self._looks = step % self.every == 0
            if self._norms is not None:
                self._norms.begin(step if self._looks else None)
            for op in self._live:
                if op.unmatched:
                    self._unchecked(_unmatched(op), op.unmatched)
                op.forget()

    def end(self, step: int) -> None:
        """Resolve the pending checks."""
        with self._clock:
            self._look()

    def enter(self, *inputs: Any, op: Op) -> None:
        """Keep the inputs of one execution until it has ended."""
        if not self._looks:
            return
        begin = perf_counter_ns()
        waits = op.probe.are_pending(inputs, self._defers)
        # The inputs of an op that writes them must be checked before it runs.
        looks = self._probed(inputs, op, waits) if op.writes or waits else None
        with self._lock:
            outputs = op.enter(Entered(op, op.held(inputs) if looks is None else (), looks, waits))
            self._clock.add(begin, perf_counter_ns())
        if outputs is not None:
            self.leave(*outputs, op=op)

    def leave(self, *outputs: Any, op: Op) -> None:
        """Check the outputs of one execution."""
        if not self._looks:
            return
        with self._lock:
            begin = perf_counter_ns()
            try:
                self._check(outputs, op)
            finally:
                self._clock.add(begin, perf_counter_ns())

    def _check(self, outputs: Sequence[Any], op: Op) -> None:
        entered = op.leave()
        if entered is None:
            if not op.keep(outputs):
                self._unchecked(_unmatched(op))
            return
        self._result.checked += 1
        if entered.waits or self._defers or not op.probe.are_finite(outputs):
            waits = op.probe.are_pending(outputs, self._defers)
            found = (self._bits(value, op) for value in op.probe.floating(outputs))
            if waits or entered.waits or any(found):
                self._suspect(outputs, op, entered, waits)
                return
        if self._seen and not op.of and entered.looks is None:
            # A mask may have hidden a NaN, which backward reads again.
            given = op.probe.floating(strongly(entered.inputs))
            op.spoiled |= NAN if any(self._bits(v, op) & NAN for v in given) else 0

    def _suspect(self, outputs: Sequence[Any], op: Op, entered: Entered, waits: bool) -> None:
        """Judge outputs that are not finite; later, if those or the inputs are on a device."""
        if entered.looks is None:
            entered.looks = self._probed(strongly(entered.inputs), op, False)
        looks = self._probed(outputs, op, waits)
        execution = Execution(op, self._step, entered.looks, looks)
        self._note(looks, op)
        if not waits and not entered.waits:
            self._judge(execution)
            return
        self._waiting.append(execution)
        if len(self._waiting) >= _WAITING or self._at_once:
            self._look()

    def result(self) -> NonFiniteResult:
        """Return what has been found so far."""
        with self._lock:
            self._look(raises=False)
            found = NonFiniteResult(**vars(self._result))
            found.unchecked = dict(found.unchecked)
            for op in self._live:
                if op.unmatched:
                    before = found.unchecked.get(_unmatched(op), 0)
                    found.unchecked[_unmatched(op)] = before + op.unmatched
            found.notes = list(self._notes)
            if self._norms is not None:
                found.gradient_steps, found.gradients = self._norms.result()
            found.faults = [Fault(**vars(fault)) for fault in self._faults.values()]
            found.tool_seconds = self._clock.spent / 1e9
            found.wall_seconds = self._clock.wall / 1e9
            return found

    @property
    def _at_once(self) -> bool:
        return self.wait == "op" or (self.wait == "auto" and self.action == "raise")

    def _bits(self, value: Any, op: Op) -> int:
        """Return the bits of a value, limited to the kinds that count."""
        try:
            return op.probe.bits_of(value, self.what == "inf") & self._counts
        except Exception as error:  # Tensor subclasses of users may raise anything.
            self._unchecked(f"{type(error).__name__} at {op.facts.type}")
            return 0

    def _unchecked(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self._result.unchecked[reason] = self._result.unchecked.get(reason, 0) + count

    def _probed(self, values: Sequence[Any], op: Op, waits: bool) -> list[Look]:
        looks = []
        for position, value in op.probe.candidates(values):
            made = self._made.get(value)
            known = made is not None and made.is_still(op.probe.facts.version(value))
            found: int | Pending
            if not waits:
                found = self._bits(value, op)
            elif made is not None and known:
                found = made.found
            else:
                try:
                    found = op.probe.pending(value)
                except Exception as error:
                    self._unchecked(f"{type(error).__name__} at {op.facts.type}")
                    continue
            looks.append(Look(position, found, self._origin(value, op), weak_reference(value)))
        return looks

    def _origin(self, value: Any, op: Op) -> Origin | None:
        """Return the origin of a value, or None if an operator produced it."""
        if isinstance(value, float):
            return "constant"
        made = self._made.get(value)
        if made is not None:
            return None
        return "parameter" if op.probe.facts.wants_gradient(value) else "data"

    def _note(self, looks: Sequence[Look], op: Op) -> None:
        """Record that an operator produced these values."""
        for look in looks:
            value = look.tensor()
            if value is not None:
                self._made.set(value, Made(op.probe.facts.version(value), look.found))

    def let_go(self, kind: type, witness: Witness) -> None:
        """Drop references to parameters and data while no tool is applied.

        See `amanda_core.runtime.weak`.
        """
        with self._lock:
            for execution in self._waiting:
                for look in execution.inputs:
                    if look.origin is not None and isinstance(look.tensor(), kind):
                        look.tensor = weak_reference(0.0)

    def _look(self, raises: bool = True) -> None:
        """Resolve and judge the pending executions."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            looks = [look for one in waiting for look in (*one.inputs, *one.outputs)]
            unknown = [(look, look.found) for look in looks if isinstance(look.found, tuple)]
            if unknown:
                found = resolve([numbers for _, numbers in unknown])
                for (look, _), bits in zip(unknown, found, strict=True):
                    look.found = bits & self._counts
            for execution in waiting:
                if union(execution.outputs):
                    self._judge(execution, raises)

    def _judge(self, execution: Execution, raises: bool = True) -> None:
        """Decide which operator or input to report for non-finite outputs."""
        op = execution.op
        before, after = union(execution.inputs), union(execution.outputs)
        spoiled = self._spoiled == execution.step
        self._spoiled = execution.step if op.of else self._spoiled
        seen, self._seen = self._seen, self._seen or bool((before | after) & NAN)
        if not op.of:
            # Infinities are usually masks, unless one has been reported in this step.
            counts = NAN | INF if self._faulted == execution.step else NAN
            op.spoiled |= (before | after) & counts
        if op.allowed:
            self._result.allowed += 1
            return
        if op.is_reduction and not spoiled:
            self._fault(execution, "reduction", after, op.facts.name.rpartition(":")[0], raises)
            return
        # In steps after a fault, parameters are non-finite because of it.
        sound = not any(fault.step < execution.step for fault in self._faults.values())
        new = after & NAN & ~before or (after & INF if not before else 0)
        if new and op.forward is not None and op.forward.spoiled:
            self._result.passed_on += 1
            return
        if new and not op.reads_variable:
            origin: Origin = "gradient" if op.of else "operator"
            self._fault(execution, origin, new, op.of, raises)
            return
        if new and sound:
            self._fault(execution, "parameter", new, op.facts.name, raises)
            return
        for look in execution.inputs:
            bits = look.found
            assert isinstance(bits, int)
            # Infinities in the data are usually masks. A NaN after an earlier one may look new only
            # because an operator moved or hid it on the way.
            blamed = sound if look.origin == "parameter" else bits & NAN and not seen
            if bits and blamed and look.origin is not None:
                self._fault(execution, look.origin, bits, op.name_of(look.position), raises)
                return
        self._result.passed_on += 1

    def _fault(
        self, execution: Execution, origin: Origin, bits: int, what: str, raises: bool
    ) -> None:
        op = execution.op
        if not op.of:
            self._faulted = execution.step
            op.spoiled |= bits
        kind: Literal["nan", "inf"] = "nan" if bits & NAN else "inf"
        key = (*op.key, origin, kind, what)
        fault = self._faults.get(key)
        new = fault is None
        if fault is None:
            fault = self._faults[key] = Fault(
                **vars(op.facts), origin=origin, kind=kind, what=what, step=execution.step
            )
        fault.calls += 1
        if not fault.outputs:
            fault.outputs = describe_live(op.probe.facts, execution.outputs)
            fault.inputs = describe_live(op.probe.facts, execution.inputs)
        if raises and self.action == "raise":
            raise NonFiniteError(fault)
        if new and self.action == "warn":
            warn(str(fault), ["amanda_tools"])


def _unmatched(op: Op) -> str:
    return f"{op.facts.type} began in another step"
