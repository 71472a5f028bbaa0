"""Gradients of ops: gates on MXNet's tape, between which an op's backward program runs.

Owns what is put on the tape, and the execution of the plans of gradients. MXNet shows no backward
op, so the one between the two gates of an op is its whole backward program. Gates run on worker
threads of MXNet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mxnet

from amanda_core import IPoint, OpContext, Plan, Session, Site
from amanda_core.threads import inside_routine
from amanda_driver_mxnet._mxnet_internals import BACKWARD, NDArray, needs_gradient, record_function

__all__ = ["Watch", "edited", "several"]

_LEFT = (
    "A gradient was computed after `apply` ended: edits made in the forward program stay, "
    "backward routines do not run. Compute it inside `apply`."
)
#: Backward ops of one op may run at the same time, and share a context.
_LOCK = threading.RLock()


def several(result: Any) -> list[Any]:
    """Return results as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def edited(session: Session, old: Any, new: Any) -> Any:
    """Return a new value at the place of the old one on the tape: gradients go straight through."""
    if not isinstance(old, NDArray):
        return new
    with inside_routine():  # The driver's own operators.
        if not isinstance(new, NDArray):
            array = mxnet.np.array if isinstance(old, mxnet.np.ndarray) else mxnet.nd.array
            new = array(new, dtype=old.dtype, ctx=old.ctx)
        # MXNet's operators refuse arrays of several dtypes.
        new = new.detach() if new.dtype == old.dtype else new.astype(old.dtype)
        if mxnet.autograd.is_recording() and needs_gradient(old):
            record_function([old], [new], lambda gradients: gradients, session.defer)
    return new


class Watch:
    """The gates of one execution of an op.

    Args:
        session: The session.
        context: That of the op.
        values: The op's inputs.
    """

    def __init__(self, session: Session, context: OpContext, values: Sequence[Any]) -> None:
        self._session, self._context = session, context
        self._count = len(values)
        self._places = [
            place
            for place, value in enumerate(values)
            if isinstance(value, NDArray) and needs_gradient(value)
        ]
        self._sources: list[NDArray] = []
        self._raw: Sequence[Any] | None = None
        self._replaced: list[Any] | None = None

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs behind a gate through which the op's contributions leave."""
        new = list(values)
        if self._places:
            old = [values[place] for place in self._places]
            self._sources = [value.detach() for value in old]
            record_function(old, self._sources, self._leave, self._session.defer)
            for place, value in zip(self._places, self._sources, strict=True):
                new[place] = value
        return new

    def exit(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs behind a gate through which their gradients arrive."""
        new = list(outputs)
        places = [place for place, value in enumerate(outputs) if needs_gradient(value)]
        if not self._places or not places:
            return new
        gated = [outputs[place].detach() for place in places]
        replacement = self._context.plan(IPoint.BEFORE_BACKWARD).replacement
        sources = [outputs[place] for place in places]

        def arrive(gradients: list[NDArray]) -> Sequence[Any]:
            spread: list[Any] = [None] * len(outputs)
            for place, gradient in zip(places, gradients, strict=True):
                spread[place] = gradient
            found = self._arrive(spread)
            return found if replacement is not None else [found[place] for place in places]

        record_function(
            self._sources if replacement is not None else sources,
            gated,
            arrive,
            self._session.defer,
        )
        self._sources = []  # The tape has them.
        for place, value in zip(places, gated, strict=True):
            new[place] = value
        return new

    # On MXNet's threads.

    def _arrive(self, gradients: list[Any]) -> list[Any]:
        """Execute what comes before the op's backward program.

        Returns:
            The gradients of the outputs; if it is replaced, those of the inputs on the tape.
        """
        plan = self._context.plan(IPoint.BEFORE_BACKWARD)
        with _LOCK:
            if self._is_active():
                gradients = self._guarded(plan, gradients)
                if plan.replacement is None:
                    return self._before_raw(gradients)
            if plan.replacement is None:
                return gradients
            found = several(plan.replacement.replace(gradients))
            if len(found) == 1 == len(self._places):
                return found
            found += [None] * (self._count - len(found))
            return [found[place] for place in self._places]

    def _leave(self, contributions: list[Any]) -> Sequence[Any]:
        """Execute what comes after the op's backward program."""
        with _LOCK:
            if not self._is_active():
                return contributions
            spread: list[Any] = [None] * self._count
            for place, gradient in zip(self._places, contributions, strict=True):
                spread[place] = gradient
            if self._raw is not None:
                spread = self._after_raw(spread)
            spread = self._guarded(self._context.plan(IPoint.AFTER_BACKWARD), spread)
            return [spread[place] for place in self._places]

    def _before_raw(self, gradients: list[Any]) -> list[Any]:
        if not self._session.wants_backward:
            return gradients
        context = self._open(grad_outputs=gradients)
        try:
            gradients = self._guarded(self._analysed(context, IPoint.BEFORE_BACKWARD), gradients)
            self._raw = gradients
            replacement = context.plan(IPoint.BEFORE_BACKWARD).replacement
            if replacement is not None:
                # The original runs as well; nothing can keep it from running.
                self._replaced = several(replacement.replace(gradients))
            return gradients
        finally:
            context.release()

    def _after_raw(self, contributions: list[Any]) -> list[Any]:
        if self._replaced is not None:
            given = self._replaced
            contributions = [
                given[place] if place < len(given) else None for place in range(self._count)
            ]
        context = self._open(grad_outputs=self._raw, grad_inputs=contributions)
        try:
            plan = self._analysed(context, IPoint.AFTER_BACKWARD)
            return self._guarded(plan, contributions)
        finally:
            context.release()
            self._raw = self._replaced = None

    def _open(self, **values: Any) -> OpContext:
        forward = self._context
        name = f"{BACKWARD}{forward.op_type}"
        site = Site(name, name, forward.namespace, f"{forward.name}/{name}", forward.module_path)
        context = self._session.open(site, name, forward=forward, backward=True)
        context.fill(**values)
        return context

    def _is_active(self) -> bool:
        if self._session.closed:
            self._session.warn_once(_LEFT)
            return False
        return self._session.enabled

    def _analysed(self, context: OpContext, point: IPoint) -> Plan:
        plan: Plan = self._deferring(lambda: context.trigger_callback(point), Plan())
        return plan

    def _guarded(self, plan: Plan, values: list[Any]) -> list[Any]:
        return self._deferring(lambda: plan(values), values) if plan else values

    def _deferring(self, run: Callable[[], Any], default: Any) -> Any:
        try:
            return run()
        except BaseException as error:
            self._session.defer(error)
            return default
