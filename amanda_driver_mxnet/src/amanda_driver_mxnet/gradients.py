"""Gradients of ops: gates on MXNet's tape, between which an op's backward program runs.

Owns what is put on the tape, and the execution of the plans of gradients. MXNet shows no backward
op, so the one between the two gates of an op is its whole backward program. Gates run on worker
threads of MXNet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core import IPoint, OpContext, Plan, Session, Site
from amanda_driver_mxnet._mxnet_internals.arrays import BACKWARD, needs_gradient, record_function

__all__ = ["Run", "Watch", "at", "several"]

#: A function of values by position, which returns new ones.
Run = Callable[[list[Any]], Sequence[Any]]

_LEFT = (
    "A gradient was computed after `apply` ended: edits made in the forward program stay, "
    "backward routines do not run. Compute it inside `apply`."
)
#: Backward ops of one op may run at the same time, and share a context.
_LOCK = threading.RLock()


def several(result: Any) -> list[Any]:
    """Return results as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def at(places: Sequence[int], count: int, run: Run) -> Run:
    """Return `run` as a function of the values at `places` alone; it gets None for the others."""

    def selected(values: Sequence[Any]) -> Sequence[Any]:
        new: list[Any] = [None] * count
        for place, value in zip(places, values, strict=True):
            new[place] = value
        new = list(run(new))
        return [new[place] for place in places]

    return selected


class Watch:
    """The plans of the gradients of one op.

    Args:
        session: Returns the session that runs now.
        context: That of the op.
        places: Positions of the inputs with a gradient.
        count: How many inputs there are.
    """

    def __init__(
        self, session: Callable[[], Session], context: OpContext, places: Sequence[int], count: int
    ) -> None:
        self._session, self._context, self._count = session, context, count
        self.places = places
        self._raw: list[Any] | None = None
        self._replaced: list[Any] = []

    # On the tape of imperative programs.

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs after a gate, which gets the op's contributions to their gradients."""
        return self._gated(values, self.places, self.leave)

    def exit(self, outputs: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Return the outputs after a gate, which gets their gradients first.

        Args:
            outputs: The outputs.
            sources: The inputs after their gate.
        """
        places = [place for place, value in enumerate(outputs) if needs_gradient(value)]
        if not self.is_replaced:
            return self._gated(outputs, places, self.arrive)
        given = [sources[place] for place in self.places]
        new = [value.detach() for value in outputs]
        record_function(given, new, self.replaced, self._session().defer)
        return new

    def _gated(self, values: Sequence[Any], places: Sequence[int], run: Run) -> list[Any]:
        new = list(values)
        if places:
            old = [values[place] for place in places]
            gated = [value.detach() for value in old]
            record_function(old, gated, at(places, len(values), run), self._session().defer)
            for place, value in zip(places, gated, strict=True):
                new[place] = value
        return new

    # On MXNet's threads.

    @property
    def is_replaced(self) -> bool:
        """Whether a routine runs instead of the op's backward program."""
        return self._context.plan(IPoint.BEFORE_BACKWARD).replacement is not None

    def arrive(self, gradients: list[Any]) -> list[Any]:
        """Execute the plans before the op's backward program on the gradients of its outputs."""
        with _LOCK:
            if not self._is_active():
                return gradients
            gradients = self._guarded(self._context.plan(IPoint.BEFORE_BACKWARD), gradients)
            return self._before_raw(gradients) if self._session().wants_backward else gradients

    def replaced(self, gradients: list[Any]) -> list[Any]:
        """Execute the replacement of the backward program; return the gradients at `places`."""
        plan = self._context.plan(IPoint.BEFORE_BACKWARD)
        assert plan.replacement is not None
        found = several(plan.replacement.replace(self._guarded(plan, gradients)))
        if len(found) == 1 == len(self.places):
            return found
        found += [None] * (self._count - len(found))
        return [found[place] for place in self.places]

    def leave(self, contributions: list[Any]) -> list[Any]:
        """Execute the plans after the backward program on the gradients of the inputs."""
        with _LOCK:
            if not self._is_active():
                return contributions
            if self._raw is not None:
                contributions = self._after_raw(contributions)
            return self._guarded(self._context.plan(IPoint.AFTER_BACKWARD), contributions)

    def _before_raw(self, gradients: list[Any]) -> list[Any]:
        context = self._open(grad_outputs=gradients)
        try:
            plan = self._analysed(context, IPoint.BEFORE_BACKWARD)
            self._raw = self._guarded(plan, gradients)
            if plan.replacement is not None:
                # The original runs as well; nothing can keep it from running.
                self._replaced = several(plan.replacement.replace(self._raw))
            return self._raw
        finally:
            context.release()

    def _after_raw(self, contributions: list[Any]) -> list[Any]:
        if self._replaced:
            contributions = [*self._replaced, *contributions[len(self._replaced) :]]
        context = self._open(grad_outputs=self._raw, grad_inputs=contributions)
        try:
            return self._guarded(self._analysed(context, IPoint.AFTER_BACKWARD), contributions)
        finally:
            context.release()
            self._raw, self._replaced = None, []

    def _open(self, **values: Any) -> OpContext:
        forward = self._context
        name = f"{BACKWARD}{forward.op_type}"
        site = Site(name, name, forward.namespace, f"{forward.name}/{name}", forward.module_path)
        context = self._session().open(site, name, forward=forward, backward=True)
        context.fill(**values)
        return context

    def _is_active(self) -> bool:
        session = self._session()
        if session.closed:
            session.warn_once(_LEFT)
        return session.enabled

    def _analysed(self, context: OpContext, point: IPoint) -> Plan:
        plan: Plan = self._deferring(lambda: context.trigger_callback(point), Plan())
        return plan

    def _guarded(self, plan: Plan, values: list[Any]) -> list[Any]:
        found: list[Any] = self._deferring(lambda: plan(values), values) if plan else values
        return found

    def _deferring(self, run: Callable[[], Any], default: Any) -> Any:
        try:
            return run()
        except BaseException as error:
            self._session().defer(error)
            return default
