"""A driver of compiled functions of `toy`, from public names alone: tools are part of the trace.

It shows what eager drivers do not need: analysis on placeholders while a function is traced, plans
written into the program, a cache key that follows the tools, and errors that are raised later. What
is the same as in eager mode it has from the eager driver.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from amanda_core.driver_kit import (
    ForwardProgram,
    OpContext,
    OpRecord,
    Plan,
    Run,
    Session,
    Step,
    deferring,
    several,
)
from amanda_core.interface import CoverageGap
from amanda_core.testing.toy import driver as toy_driver, framework as toy
from amanda_core.testing.toy.driver import ToyAttachment, ToyDriver

from . import traced_functions as compiler

toy_driver.OWN.update({__name__, compiler.__name__})

CAPABILITIES = frozenset({"graph", "observers", "ordered", "replace", "staged"})
_calls = itertools.count()


class TracedAttachment(ToyAttachment):
    """Holds the framework for one session."""

    mode = "compiled"

    def __init__(self, driver: ToyDriver, session: Session) -> None:
        super().__init__(driver, session)
        self.changed()

    def detach(self) -> None:
        compiler.set_cache_key(None)
        super().detach()

    def coverage(self) -> Sequence[CoverageGap]:
        return [CoverageGap("operators that are not compiled", "only traced ones have a program")]

    def changed(self) -> None:
        """Use a cache key that tells apart what different tools make of a program."""
        # The framework reads it before the program's first operator.
        compiler.set_cache_key(self.key())

    def key(self) -> object:
        session = self.session
        if not session.enabled:
            return None  # As without tools.
        # Without the cache of analysis each execution is analysed, so each is traced.
        return (session.epoch, None if session.caching else next(_calls))

    def run(self, compute: Callable[[], Any]) -> Any:
        results = self.vanilla["run"](compute)
        if self.session.enabled:
            self.end_of_run()
        return results

    def end_of_run(self) -> None:
        if not self.session.caching:
            self.changed()
        self.session.raise_pending()

    def dispatch(self, op: toy.Op, arguments: list[Any]) -> tuple[Any, ...]:
        """Write an operator and the actions around it into the trace."""
        if not toy.is_tracing():
            return tuple(self.vanilla["dispatch"](op, arguments))
        return super().dispatch(op, arguments)

    def execute(self, record: OpRecord, op: toy.Op, arguments: list[Any]) -> tuple[Any, ...]:
        return tuple(TracedExecution(self, record, op).run(arguments))


class TracedDriver(ToyDriver):
    """The plugin."""

    attachment_type: type[TracedAttachment] = TracedAttachment
    replaced = (*ToyDriver.replaced, (compiler, "run"))

    def __init__(self) -> None:
        super().__init__(capabilities=CAPABILITIES)
        self.info = dataclasses.replace(self.info, namespaces=("toy/*/compiled",))


class TracedExecution(ForwardProgram):
    """One operator while a function is traced."""

    def __init__(self, attachment: TracedAttachment, record: OpRecord, op: toy.Op) -> None:
        super().__init__(
            attachment.session, record, op, input_names=op.inputs, constant=compiler.known
        )
        self.attachment = attachment

    def execute(self, plan: Plan, values: list[Any]) -> list[Any]:
        """Run a staged step now on placeholders, and write the others into the program."""
        new = list(values)
        for step in plan:
            if step.action.staged:
                for position, value in step(new):
                    new[position] = value
            elif step.action.observe:
                compiler.callback(partial(self.look, step), new, 0)
            else:
                new = compiler.callback(partial(self.edit, step), new, len(new))
        return new

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        if replacement is None:
            return list(self.attachment.vanilla["dispatch"](self.raw, values))
        if replacement.action.staged:
            return several(replacement.replace(values))
        outputs = compiler.outputs_of(self.raw)
        return compiler.callback(partial(self.instead, replacement), values, outputs)

    # While a program runs: nothing may be raised here.

    def look(self, step: Step, *values: Any) -> Sequence[Any]:
        self.deferred(step, values)
        return ()

    def edit(self, step: Step, *values: Any) -> Sequence[Any]:
        new = list(values)
        for position, value in self.deferred(step, values) or ():
            new[position] = value
        return new

    def instead(self, step: Step, *values: Any) -> Sequence[Any]:
        result = self.deferred(lambda given: several(step.replace(given)), values)
        return toy.execute(self.raw, list(values)) if result is None else result

    def deferred(self, run: Run, values: Sequence[Any]) -> Sequence[Any] | None:
        # What a routine itself runs is the program as it is without tools. `self.session` may be
        # closed: the core passes the error to the one that runs now.
        with compiler.cache_key(None):
            return deferring(self.session, run)(list(values))
