"""A driver of a framework that compiles, from public names alone: tools are part of the trace.

It shows what eager drivers do not need: analysis on placeholders while a function is traced, plans
written into the program, a cache key that follows the tools, and errors that are raised later.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from amanda_core import (
    CoverageGap,
    DriverInfo,
    IPoint,
    OpContext,
    Plan,
    Session,
    Site,
    Step,
    hookimpl,
)
from amanda_core.patching import Patches

from . import traced_framework as framework

NAMESPACE = f"traced/{framework.__version__}/compiled"
VOCABULARY = {"add": "add", "mul": "mul", "relu": "relu", "split": "split"}

_attachments: dict[int, TracedAttachment] = {}
_calls = itertools.count()


class _Interception(Patches):
    bind: Callable[..., Any]
    run: Callable[..., Any]

    def install(self) -> None:
        self.bind, self.run = framework.bind, framework.run
        self.replace(framework, "bind", _bind)
        self.replace(framework, "run", _run)


_interception = _Interception()


def _bind(op: framework.Op, values: Sequence[Any]) -> Any:
    attachment = _attachments.get(threading.get_ident())
    if attachment is None or not attachment.session.enabled or not framework.is_tracing():
        return _interception.bind(op, values)
    return attachment.trace(op, values)


def _run(compute: Callable[[], Any]) -> Any:
    results = _interception.run(compute)
    attachment = _attachments.get(threading.get_ident())
    if attachment is not None:
        attachment.end_of_run()
    return results


class TracedDriver:
    """The plugin."""

    attachment_type: type[TracedAttachment]

    @hookimpl
    def amanda_driver_info(self) -> DriverInfo:
        return DriverInfo(
            api=2,
            name="traced",
            modules=(framework.__name__,),
            namespaces=("traced/*/compiled",),
            capabilities=frozenset({"graph", "observers", "ordered", "replace", "staged"}),
            vocabulary=VOCABULARY,
        )

    @hookimpl
    def amanda_attach(self, session: Session) -> TracedAttachment:
        return self.attachment_type(session)

    @hookimpl
    def amanda_prepare_context(self, context: OpContext) -> None:
        if context.namespace.startswith("traced/"):
            context["type"] = VOCABULARY[context.op_type]


class TracedAttachment:
    """Holds the framework for one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.thread = threading.get_ident()
        _interception.acquire()
        _attachments[self.thread] = self
        self.changed()

    def detach(self) -> None:
        framework.set_cache_key(None)
        del _attachments[self.thread]
        _interception.release()

    def coverage(self) -> Sequence[CoverageGap]:
        return [
            CoverageGap("operators outside compiled functions", "only what is traced has a program")
        ]

    def changed(self) -> None:
        """Use a cache key that tells apart what different tools make of a program."""
        # The framework reads it before the program's first operator.
        framework.set_cache_key(self.key())

    def key(self) -> object:
        session = self.session
        if not session.enabled:
            return None  # As without tools.
        # Without the cache of analysis each execution is analysed, so each is traced.
        return (session.epoch, None if session.caching else next(_calls))

    def end_of_run(self) -> None:
        if not self.session.enabled:
            return
        if not self.session.caching:
            self.changed()
        self.session.raise_pending()

    # While a function is traced.

    def trace(self, op: framework.Op, values: Sequence[Any]) -> list[Any]:
        """Write an operator and the actions around it into the trace."""
        key, source = _place()
        site = Site((op.name, *key), op.name, NAMESPACE, op.name, source=source)
        context = self.session.open(
            site, op, list(values), input_names=op.inputs, constant=lambda value: value.known
        )
        try:
            before = context.trigger_callback(IPoint.BEFORE_FORWARD)
            given = self.write(before, values)
            if before.replacement is None:
                results = _interception.bind(op, given)
            else:
                results = self.write_replacement(op, before.replacement, given)
            context.fill(outputs=results)
            return self.write(context.trigger_callback(IPoint.AFTER_FORWARD), results)
        finally:
            context.release()

    def write(self, plan: Plan, values: Sequence[Any]) -> list[Any]:
        """Walk the steps: run a staged one now on placeholders, and write the others into the
        program.
        """
        new = list(values)
        for step in plan:
            if step.action.staged:
                for position, value in step(new):
                    new[position] = value
            elif step.action.observe:
                framework.callback(partial(self.look, step), new, 0)
            else:
                new = framework.callback(partial(self.edit, step), new, len(new))
        return new

    def write_replacement(self, op: framework.Op, step: Step, values: list[Any]) -> list[Any]:
        if step.action.staged:
            return _as_list(step.replace(values))
        results = len(op.compute(*(1.0 for _ in op.inputs)))
        return framework.callback(partial(self.instead, op, step), values, results)

    # While a program runs: nothing may be raised here.

    def look(self, step: Step, *values: Any) -> Sequence[Any]:
        self.guarded(lambda: step(values), None)
        return ()

    def edit(self, step: Step, *values: Any) -> Sequence[Any]:
        new = list(values)
        for position, value in self.guarded(lambda: step(values), []):
            new[position] = value
        return new

    def instead(self, op: framework.Op, step: Step, *values: Any) -> Sequence[Any]:
        result = self.guarded(lambda: step.replace(values), None)
        return _interception.bind(op, values) if result is None else _as_list(result)

    def guarded(self, call: Callable[[], Any], otherwise: Any) -> Any:
        # What a routine itself runs is the program as it is without tools.
        with framework.cache_key(None):
            try:
                return call()
            except BaseException as error:
                # `self.session` may be closed: the core passes the error to the one that runs now.
                self.session.defer(error)
                return otherwise


TracedDriver.attachment_type = TracedAttachment


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _place() -> tuple[tuple[str, int], str]:
    """Return function and offset of the call outside the framework, and ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in (__name__, framework.__name__):
        assert frame.f_back is not None
        frame = frame.f_back
    file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return (frame.f_code.co_name, frame.f_lasti), f"{file}:{frame.f_lineno}"
