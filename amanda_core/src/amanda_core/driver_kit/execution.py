"""Parts of the execution of one op that drivers of different frameworks share.

Owns the order in which an op is analysed, edited and computed, raw backward ops, the backward
program of frameworks in which each op has a single backward op, the record of an op, and how
results and selected values become lists. Drivers import it; the engine does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from amanda_core.engine.action import IPoint
from amanda_core.engine.context import OpContext
from amanda_core.engine.plan import EMPTY, Plan, Step
from amanda_core.engine.session import Session
from amanda_core.interface.driver import Site

__all__ = [
    "BackwardOp",
    "BackwardProgram",
    "ForwardProgram",
    "OpRecord",
    "Run",
    "at",
    "backward_plans",
    "deferring",
    "several",
    "spread",
    "wants_gradients",
]

#: A function of values by position, which returns new ones.
Run = Callable[[list[Any]], Sequence[Any]]


def several(result: Any) -> list[Any]:
    """Return the result of an operator or a routine as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def spread(places: Sequence[int], count: int, values: Sequence[Any]) -> list[Any]:
    """Return a list of `count` values with these ones at `places`, and None elsewhere."""
    found: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return found


def at(places: Sequence[int], count: int, run: Run) -> Run:
    """Return `run` as a function of the values at `places` alone; it gets None for the others.

    Args:
        places: The positions that the new function gets and returns.
        count: How many values `run` gets.
        run: Returns at least as many values as the largest of `places` needs.
    """

    def selected(values: Sequence[Any]) -> list[Any]:
        results = run(spread(places, count, values))
        return [results[place] for place in places]

    return selected


def backward_plans(forward: OpContext) -> tuple[Plan, Plan]:
    """Return the plans before and after the backward program of an op."""
    return forward.plan(IPoint.BEFORE_BACKWARD), forward.plan(IPoint.AFTER_BACKWARD)


def wants_gradients(session: Session, context: OpContext) -> bool:
    """Return True if a tool may want the gradients of an op that has run."""
    late = session.due(context, IPoint.AFTER_FORWARD)
    return any(backward_plans(context)) or session.wants_backward or late


class _Program:
    """How a driver executes the plans of an op. A subclass says what its framework needs."""

    def execute(self, plan: Plan, values: list[Any]) -> list[Any]:
        """Return values, such as gradients, as the steps of a plan edit them."""
        new = list(values)
        # One by one, because each step decides for itself whether it is differentiated.
        for step in plan:
            autodiff = step.action.autodiff
            with nullcontext() if autodiff else self.unrecorded():
                changes = step(new)
            for position, value in changes:
                new[position] = value if autodiff else self.edited(new[position], value)
        return new

    def unrecorded(self) -> AbstractContextManager[object]:
        """Return a context manager in which the framework records nothing to differentiate."""
        return nullcontext()

    def edited(self, old: Any, new: Any) -> Any:
        """Return the value `new` in place of `old`, with its gradient passed straight to `old`."""
        return new

    def shown(self, values: list[Any]) -> list[Any]:
        """Return values as contexts show them."""
        return values

    def analysed(self, context: OpContext, point: IPoint) -> Plan:
        """Return the plan of an op at a point, after its analysis if it is new."""
        with self.unrecorded():
            return context.trigger_callback(point)


class ForwardProgram(_Program):
    """One execution of an op: its analysis, the plans around it, and the op or its replacement.

    A subclass implements `compute`, and may say how plans are executed.

    Attributes:
        session: The session that runs now.
        record: What the op is.
        raw: The framework's operator.

    Args:
        session: The session.
        record: The record. It notes whether a tool acts at the op.
        raw: The operator.
        opened: Further arguments of `Session.open`, but for the inputs.
    """

    def __init__(self, session: Session, record: OpRecord, raw: Any, **opened: Any) -> None:
        self.session, self.record, self.raw, self._opened = session, record, raw, opened

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Execute the op on its inputs as planned, and return its outputs."""
        session, epoch = self.session, self.session.epoch
        given = list(values)
        opened = self._opened
        context = session.open(self.record.site, self.raw, inputs=self.shown(given), **opened)
        try:
            before = self.analysed(context, IPoint.BEFORE_FORWARD)
            new = given if before is EMPTY else self.execute(before, given)
            outputs = self.compute(context, before.replacement, new)
            # Faster than `fill`, and each execution comes by here.
            context.execution.update(open=True, outputs=self.shown(outputs))
            after = self.analysed(context, IPoint.AFTER_FORWARD)
            outputs = self.leaving(outputs)
            outputs = outputs if after is EMPTY else self.execute(after, outputs)
            acts = not (before is after is EMPTY) or any(backward_plans(context))
        finally:
            context.release()
        self.record.note(session, epoch, acts)
        return outputs

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        """Return the outputs of the op, or of its replacement."""
        raise NotImplementedError

    def leaving(self, outputs: list[Any]) -> list[Any]:
        """Return the outputs as the plan after the op gets them."""
        return outputs


class BackwardOp(_Program):
    """One execution of a raw backward op.

    A driver calls `enter`, computes what it returned, or calls `replacement`, and calls `leave`. A
    subclass may say how plans are executed.

    Attributes:
        session: The session that runs now.
        forward: The context of the forward op; None if there is none.
        replacement: What runs instead of the backward op, after `enter`; or None.

    Args:
        session: The session.
        site: What the backward op is.
        raw: The framework's backward operator.
        forward: The context.
    """

    def __init__(
        self, session: Session, site: Site, raw: Any, forward: OpContext | None = None
    ) -> None:
        self.session, self.forward, self._site, self._raw = session, forward, site, raw
        self.replacement: Step | None = None
        #: The gradients that the raw backward op gets; None if it is not opened.
        self._arriving: list[Any] | None = None

    @property
    def is_active(self) -> bool:
        """True if routines are to run. Warn if `apply` has ended since the forward program."""
        if self.session.closed:
            self.session.warn_once("backward runs after `apply` has ended, so routines do not run")
        return self.session.enabled

    def enter(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the arriving gradients, edited by the plan before the backward op."""
        arriving = list(gradients)
        context = self._open(grad_outputs=self.shown(arriving))
        try:
            plan = self.analysed(context, IPoint.BEFORE_BACKWARD)
            self.replacement = plan.replacement
            self._arriving = self.execute(plan, arriving) if plan else arriving
            return self._arriving
        finally:
            # The same op may run again before `leave`, in a loop or in another thread.
            context.release()

    def leave(self, contributions: Sequence[Any]) -> list[Any]:
        """Return the computed gradients, edited by the plan after the backward op."""
        leaving, arriving = list(contributions), self._arriving
        if arriving is None:
            return leaving
        self._arriving = None
        context = self._open(grad_outputs=self.shown(arriving), grad_inputs=self.shown(leaving))
        try:
            plan = self.analysed(context, IPoint.AFTER_BACKWARD)
            return self.execute(plan, leaving) if plan else leaving
        finally:
            context.release()

    def _open(self, **values: Any) -> OpContext:
        context = self.session.open(self._site, self._raw, forward=self.forward, backward=True)
        context.fill(**values)
        return context


class BackwardProgram(BackwardOp):
    """One execution of the backward program of an op, which is a single backward op.

    The aligned view, planned on the forward context, directly surrounds the raw backward op.

    Args:
        session: The session.
        forward: The context.
        op_type: The framework's name of the backward op.
        raw: The raw backward operator, if there is an object.
    """

    def __init__(self, session: Session, forward: OpContext, op_type: str, raw: Any = None) -> None:
        name = f"{forward.name}/{op_type}"
        site = Site(op_type, op_type, forward.namespace, name, forward.module_path)
        super().__init__(session, site, op_type if raw is None else raw, forward)
        self._aligned = forward

    def enter(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of the outputs, edited by the plans before the backward program."""
        aligned = self._aligned.plan(IPoint.BEFORE_BACKWARD)
        arriving = self.execute(aligned, list(gradients))
        self.replacement = aligned.replacement
        if self.replacement is not None or not self.session.wants_backward:
            return arriving
        return super().enter(arriving)

    def leave(self, contributions: Sequence[Any]) -> list[Any]:
        """Return the gradients of the inputs, edited by the plans after the backward program."""
        leaving = super().leave(contributions)
        return self.execute(self._aligned.plan(IPoint.AFTER_BACKWARD), leaving)


class OpRecord:
    """A driver's record of one op: what it is, and whether a tool acts there.

    Attributes:
        site: Its facts.
        kept: What the driver keeps of it for a fast path.
    """

    __slots__ = ("_idle", "kept", "site")

    def __init__(self, site: Site) -> None:
        self.site, self._idle = site, 0
        self.kept: Any = None

    def is_idle(self, session: Session) -> bool:
        """Return True if it was analysed with the tools of now, and none acts there."""
        return self._idle == session.epoch and session.caching

    def note(self, session: Session, epoch: int, acts: bool) -> None:
        """Note after an execution whether a tool acts there.

        Args:
            session: The session.
            epoch: Its epoch before the execution.
            acts: Whether the op has a plan.
        """
        if not acts and session.caching and session.epoch == epoch:
            self._idle = epoch


def deferring(session: Session, run: Run) -> Callable[[list[Any]], Sequence[Any] | None]:
    """Return `run` for a thread that no exception may leave: it is kept for the program's thread.

    The function returns None if `run` raises. The driver calls `Session.raise_pending` later.
    """

    def guarded(values: list[Any]) -> Sequence[Any] | None:
        try:
            return run(values)
        except BaseException as error:
            session.defer(error)
            return None

    return guarded
