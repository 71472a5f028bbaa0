"""Parts of the execution of one op that drivers of different frameworks share.

Owns the backward program of frameworks in which each op has a single backward op, and how results
and selected values become lists. Drivers import it; the engine does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from amanda_core.action import IPoint
from amanda_core.context import OpContext
from amanda_core.driver import Site
from amanda_core.plan import Plan, Step
from amanda_core.session import Session

__all__ = ["BackwardProgram", "Run", "at", "backward_plans", "several"]

#: A function of values by position, which returns new ones.
Run = Callable[[list[Any]], Sequence[Any]]


def several(result: Any) -> list[Any]:
    """Return the result of an operator or a routine as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def at(places: Sequence[int], count: int, run: Run) -> Run:
    """Return `run` as a function of the values at `places` alone; it gets None for the others.

    Args:
        places: The positions that the new function gets and returns.
        count: How many values `run` gets.
        run: Returns at least as many values as the largest of `places` needs.
    """

    def selected(values: Sequence[Any]) -> list[Any]:
        given: list[Any] = [None] * count
        for place, value in zip(places, values, strict=True):
            given[place] = value
        results = run(given)
        return [results[place] for place in places]

    return selected


def backward_plans(forward: OpContext) -> tuple[Plan, Plan]:
    """Return the plans before and after the backward program of an op."""
    return forward.plan(IPoint.BEFORE_BACKWARD), forward.plan(IPoint.AFTER_BACKWARD)


class BackwardProgram:
    """One execution of the backward program of an op, which is a single backward op.

    The aligned view, planned on the forward context, directly surrounds the raw backward op. A
    driver calls `enter`, computes what it returned, or calls `replacement`, and calls `leave`. A
    subclass may say how plans are executed.

    Attributes:
        session: The session that runs now.
        forward: The context of the forward op.
        replacement: What runs instead of the backward program, after `enter`; or None.

    Args:
        session: The session.
        forward: The context.
        op_type: The framework's name of the backward op.
        raw: The raw backward operator, if there is an object.
    """

    def __init__(self, session: Session, forward: OpContext, op_type: str, raw: Any = None) -> None:
        self.session, self.forward, self._op_type = session, forward, op_type
        self._raw = op_type if raw is None else raw
        self.replacement: Step | None = None
        #: The gradients that the raw backward op gets; None if it is not opened.
        self._arriving: list[Any] | None = None

    @property
    def is_active(self) -> bool:
        """True while routines run. Warn if the tools were removed since the forward program."""
        if self.session.closed:
            self.session.warn_once("backward runs after `apply` has ended, so routines do not run")
        return self.session.enabled

    def enter(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of the outputs, edited by the plans before the backward program."""
        aligned = self.forward.plan(IPoint.BEFORE_BACKWARD)
        arriving = self.execute(aligned, list(gradients))
        self.replacement = aligned.replacement
        if self.replacement is not None or not self.session.wants_backward:
            return arriving
        context = self._open(grad_outputs=self.shown(arriving))
        try:
            plan = self._analysed(context, IPoint.BEFORE_BACKWARD)
            self.replacement = plan.replacement
            self._arriving = self.execute(plan, arriving)
            return self._arriving
        finally:
            # The same op may run again before `leave`, in a loop or in another thread.
            context.release()

    def leave(self, contributions: Sequence[Any]) -> list[Any]:
        """Return the gradients of the inputs, edited by the plans after the backward program."""
        leaving, arriving = list(contributions), self._arriving
        if arriving is not None:
            self._arriving = None
            context = self._open(grad_outputs=self.shown(arriving), grad_inputs=self.shown(leaving))
            try:
                leaving = self.execute(self._analysed(context, IPoint.AFTER_BACKWARD), leaving)
            finally:
                context.release()
        return self.execute(self.forward.plan(IPoint.AFTER_BACKWARD), leaving)

    # For subclasses.

    def execute(self, plan: Plan, gradients: list[Any]) -> list[Any]:
        """Return gradients as the steps of a plan edit them."""
        return plan(gradients) if plan else gradients

    def shown(self, gradients: list[Any]) -> list[Any]:
        """Return gradients as contexts show them."""
        return gradients

    def isolated(self) -> AbstractContextManager[object]:
        """Return a context manager for analysis routines."""
        return nullcontext()

    def _analysed(self, context: OpContext, point: IPoint) -> Plan:
        with self.isolated():
            return context.trigger_callback(point)

    def _open(self, **values: Any) -> OpContext:
        forward, name = self.forward, self._op_type
        site = Site(name, name, forward.namespace, f"{forward.name}/{name}", forward.module_path)
        context = self.session.open(site, self._raw, forward=forward, backward=True)
        context.fill(**values)
        return context
