"""Running a program under tools: applying them, handling its end, and writing results.

Owns one run, from the program's first line to the exit status. It does not know the flags.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amanda_core.cli.conditions import EXIT_STATUS, Condition
from amanda_core.cli.drawing import show
from amanda_core.cli.overview import LINES, Overview
from amanda_core.cli.program import Program, report
from amanda_core.cli.progress import FIRST, Progress, interval_for, told_if_slow
from amanda_core.cli.reports import ReportPage
from amanda_core.cli.saving import Saving
from amanda_core.cli.termination import Termination
from amanda_core.engine import turns
from amanda_core.engine.tool import Tool
from amanda_core.errors import AmandaError
from amanda_core.plugins import discovery
from amanda_core.plugins.preflight import preflight
from amanda_core.processes.launched import Process
from amanda_core.results import ChangesWeights, HasResult, Result, Table, printable, share
from amanda_core.results.output import Output
from amanda_core.results.run_state import RunState
from amanda_core.runtime.containment import contain, described

__all__ = ["Run"]

#: Rows of a table that are shown when a run ends; the file has all of them.
_ROWS = 20
#: How many values that several tools changed are named.
_CONFLICTS = 5
#: How many operators are named if none was selected.
_NAMED = 5
#: Seconds to wait for routines that run while results are written.
_PATIENCE = 2.0


@dataclass
class Run:
    """One run of a program.

    Attributes:
        program: The program.
        tools: The tools by the names that their results get.
        output: Where results are written, which is reserved for this run.
        process: Which process of the run this is.
        page: The page that all results are written to as well, or None.
        quiet: Whether to print only errors.
        brief: Whether to omit tables, as all but one of several processes do.
        keep_going: Whether to skip operators at which a driver itself fails.
        limits: Conditions under which the run fails although all else went well.
        overview: What says the results in a few lines, in place of their tables; None for tables.
    """

    program: Program
    tools: dict[str, Tool]
    output: Output
    process: Process = field(default_factory=lambda: Process(None, "", 0))
    page: ReportPage | None = None
    quiet: bool = False
    brief: bool = False
    keep_going: bool = False
    overview: Overview | None = None
    limits: Sequence[Condition] = ()
    _handle: Any = field(default=None, init=False)
    _finished: bool = field(default=False, init=False)
    #: Whether something is not written that was asked for.
    _failed: bool = field(default=False, init=False)
    _state: RunState = field(init=False)
    _files: list[Path] = field(default_factory=list, init=False)
    _pid: int = field(default_factory=os.getpid, init=False)
    _termination: Termination = field(init=False)
    _saving: Saving = field(init=False)
    #: Held while results are written.
    _writing: threading.RLock = field(default_factory=threading.RLock, init=False)
    #: Whether results of an earlier run were removed, and whether saving has failed.
    _cleared: bool = field(default=False, init=False)
    _told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._termination = Termination(self)
        self._saving = Saving(self._save)
        name = os.path.basename(self.program.target)
        self._state = RunState(name, self._pid, self.process.rank, self.process.processes)

    def __call__(self) -> int:
        """Run it; return the exit status, or raise what the interpreter must end with."""
        import amanda  # Drivers that must record from the program's start are notified now.

        try:
            told = not (self.quiet or self.brief)
            interval = interval_for(sys.stderr)
            first = min(interval, FIRST) if interval < interval_for(None) else interval
            telling = [Progress(self._say, interval, first)] if told else []
            self._handle = amanda.attach(
                *self.tools.values(),
                *telling,
                on_driver_error="skip" if self.keep_going else "raise",
                threads="all",
            )
        except AmandaError as error:
            self.output.release()
            self._say(f"error: {error}")
            return 2
        if not self.quiet:
            self._say(f"running {self.program.target} under {', '.join(self.tools)}")
        turns.share(self.tools.values())
        self._note()
        self._saving.start()
        with self._termination.handled():
            ended = self._execute()
            # The results of a fork are its parent's.
            status = self.finish(_problem(ended)) if os.getpid() == self._pid else 0
        return self._end(ended, status)

    def _execute(self) -> BaseException | None:
        uncaught: BaseException | None = None
        try:
            self.program.execute()
        except BaseException as error:
            uncaught = error
        # Out here no exception is being handled, as where the interpreter shows one: it would be
        # the context of what the program's own sys.excepthook raises.
        if uncaught is not None and not isinstance(uncaught, SystemExit):
            try:
                report(uncaught)
            except SystemExit as asked:
                return asked
        return uncaught

    def _end(self, error: BaseException | None, status: int) -> int:
        if error is None:
            return status
        if isinstance(error, KeyboardInterrupt):
            # If this leaves the outermost frame, the interpreter ends itself by SIGINT. The
            # traceback has been shown.
            sys.excepthook = lambda *_: None
            raise error
        if isinstance(error, SystemExit):
            if not error.code and status:
                return status
            raise error.with_traceback(None)
        return 1

    def finish(self, problem: str, *, unwound: bool = True) -> int:
        """Remove the tools and write results; return the exit status if the program's is 0."""
        with self._writing:
            if self._finished:
                return 0
            self._finished = True
        # It waits for the lock above, and for what the main thread holds.
        self._saving.stop(None if unwound else _PATIENCE)
        with self._writing, self._termination.deferred():
            self._state.problem, self._state.ended = problem, True
            try:
                return self._write_results(unwound)
            finally:
                self._state.saved = time.time()
                kept = problem or self.process.rank is not None or self._failed
                self._note(kept=bool(kept))
                self.output.release()

    def interrupted(self, place: str) -> None:
        """Write the results so far, and say where the main thread waits."""
        self._state.waits = place
        self._save()
        self._say(f"interrupted, but {place}; the results until now are in {self.output.folder}")

    def _save(self) -> None:
        """Write the results so far; after an error, say it once and go on."""
        if not any(tool._amanda.analysed for tool in self.tools.values()):
            return
        found: dict[str, str] = {}
        with turns.held(self.tools.values(), _PATIENCE) as held:
            if not held:
                return
            for name, tool in self.tools.items():
                # What does not work in the middle of an iteration works at its end.
                with suppress(Exception):
                    if isinstance(tool, HasResult) and callable(tool.result):
                        found[name] = tool.result().to_json()
        with self._writing:
            if self._finished:
                return
            try:
                if not self._cleared:
                    self.output.clear(self.process.replaced)
                    self._cleared = True
                for name, text in found.items():
                    self.output.save(name, text)
                self._state.saved = time.time()
                self.output.note(self._state)
            except Exception as error:
                if not self._told:
                    self._say(
                        f"error: results until now are not written: {error}; the program goes on"
                    )
                self._told = True

    def _note(self, *, kept: bool = True) -> None:
        with self._reported("the state of the run is not written", AmandaError):
            self.output.note(self._state if kept else None)

    def _write_results(self, unwound: bool) -> int:
        idle: list[str] = []
        if unwound:
            idle = self._before_the_end()
            try:
                self._handle.remove()
            except BaseException as error:  # An exception that was deferred.
                report(error)
                self._failed = True
        if not self.quiet:
            self._warn(idle)
        results: dict[str, Result] = {}
        try:
            results = self._results()
            with self._reported("an earlier result is not removed", AmandaError):
                if not self._cleared:
                    self.output.clear(self.process.replaced)
            for name, result in results.items():
                self._write(name, result)
            if self.overview is not None and not (self.quiet or self.brief):
                self._say_overview(self.overview, results)
            for name, tool in self.tools.items():
                self._save_weights(name, tool)
            if self.page is not None and not self._failed:
                self._write_page(self.page)
        except KeyboardInterrupt:
            self._say("interrupted while results were written; some are missing")
            self._failed = True
        return int(self._failed) or self._limits_status(results)

    def _limits_status(self, results: Mapping[str, Result]) -> int:
        """Say which limits the results exceed; return the exit status for that."""
        problems = [text for limit in self.limits if (text := limit.problem(results))]
        for text in problems:
            self._say(f"error: {text}")
        return EXIT_STATUS if problems else 0

    @contextmanager
    def _reported(self, what: str, kind: type[BaseException] = BaseException) -> Iterator[None]:
        """Say what an exception of this block prevents, and fail when the run ends."""
        try:
            yield
        except kind as error:
            contain(error)
            text = str(error) if isinstance(error, AmandaError) else described(error)
            self._fail(f"{what}: {text}")

    def _fail(self, text: str) -> None:
        self._failed = True
        self._say(f"error: {text}")

    def _before_the_end(self) -> list[str]:
        """Return what is available only while the tools are applied."""
        try:
            return [*self._idle(), *self._skipped()]
        except BaseException as error:
            contain(error)
            return [f"what a driver did not see is not known: {described(error)}"]

    def _idle(self) -> Iterator[str]:
        """Describe the tools that got no operator, and what to do; called before the end."""
        for name, tool in self.tools.items():
            known = tool._amanda
            if known.analysed or not any(known.routines.values()):
                continue
            session, frameworks = self._handle.session, [*self._handle.coverage()]
            forward = [c for c in session.contexts() if not c._backward] if session else []
            # Operators of initialisation come first, and are rarely wanted.
            ran = [c.name for c in sorted(forward, key=lambda c: c.zone != "model")]
            declined = [
                f"{driver.loaded[0]} (driver {driver.info.name})"
                for driver in discovery.drivers()
                if driver.loaded and driver.info.name not in frameworks
            ]
            if not frameworks and declined:
                why = (
                    f"{', '.join(declined)} was loaded, but its driver did not attach. `amanda "
                    "doctor` may say why"
                )
            elif discovery.plugins().without_drivers:
                why = f"{discovery.plugins().without_drivers} lets no driver attach"
            elif not frameworks:
                why = "the program loaded no framework of those that `amanda drivers` lists"
            elif known.selection is None or not ran:
                why = (
                    f"the program ran none of {', '.join(frameworks)} in the threads that are "
                    "instrumented"
                )
            else:
                some = ", ".join([*ran[:_NAMED], *(["..."] if len(ran) > _NAMED else [])])
                why = (
                    f"{known.selection} has none of those that ran ({some}). Widen --ops, "
                    "--modules, --steps, --calls or `select`"
                )
            yield f"{name} was given no operator: {why}"

    def _skipped(self) -> Iterator[str]:
        """Describe the operators that were skipped after a driver failed there; called before the
        end.
        """
        session = self._handle.session
        for framework in self._handle.coverage():
            for left_out in session.failures.coverage(framework):
                yield f"{left_out.what} was left out: {left_out.why}"

    def _warn(self, idle: Sequence[str]) -> None:
        """Warn of what makes results empty or wrong.

        These are tools without operators, values that several tools changed, and imports that the
        program made before its framework.
        """
        for text in idle:
            self._say(f"warning: {text}")
        conflicts = self._handle.conflicts()
        for conflict in conflicts[:_CONFLICTS]:
            self._say(f"warning: {conflict}")
        if len(conflicts) > _CONFLICTS:
            self._say(
                f"warning: {len(conflicts) - _CONFLICTS} more values that several tools changed"
            )
        for driver in discovery.drivers():
            if any(module in sys.modules for module in driver.info.modules):
                for finding in preflight(driver):
                    if finding.severity != "info":
                        fix = f". {finding.fix}" if finding.fix else ""
                        self._say(f"{finding.severity}: {finding.message}{fix}")

    def _results(self) -> dict[str, Result]:
        """Return the results, with other tools' figures."""
        found: dict[str, Result] = {}
        for name, tool in self.tools.items():
            with self._reported(f"the result of {name!r} is not written"):
                # The tool may have another attribute of that name.
                if isinstance(tool, HasResult) and callable(tool.result):
                    with told_if_slow(self._tell, f"collecting the result of {name}"):
                        found[name] = tool.result()
        try:
            share(found)
        except BaseException as error:
            contain(error)
            self._fail(f"results do not show the figures of others: {described(error)}")
        return found

    def _write(self, name: str, result: Result) -> None:
        files: Sequence[Path] = ()
        with self._reported(f"the result of {name!r} is not written"):
            with told_if_slow(self._tell, f"writing the result of {name}"):
                files = self.output.write(name, result)
            self._files.append(files[0])
        if not files:
            return
        if not self.quiet:
            try:
                self._summarise(name, result, [str(file) for file in files])
            except BaseException as error:
                contain(error)
                self._say(f"the result of {name!r} is written and has no table: {described(error)}")
        for problem in getattr(result, "problems", ()):
            self._fail(f"{name}: {problem}")

    def _save_weights(self, name: str, tool: Tool) -> None:
        """Save the weights that a tool has changed, if it is to, and say where they are."""
        if not isinstance(tool, ChangesWeights):
            return
        changed, own = tool.words
        said = f"a checkpoint that your program saved has the {own} weights"
        if tool.saves_to is None:
            if not (self.quiet or self.brief) and tool.has_baked:
                self._say(f"{name}: {said}; the option save=FOLDER writes the {changed} ones")
            return
        with self._reported(f"the {changed} weights of {name!r} are not saved"):
            tool.save_baked(tool.saves_to)
            if not self.quiet:
                self._say(f"{name}: {said}; the {changed} ones are in {tool.saves_to}")

    def _write_page(self, page: ReportPage) -> None:
        program = self.program
        lines = [" ".join([program.target, *program.arguments])] if program.arguments else []
        # Not the whole path, since people pass pages on.
        lines.append(f"results in {self.output.folder.name}")
        with self._reported("the report is not written", AmandaError):
            page.write(
                self._files, os.path.basename(program.target), lines, _sentence(self._state.problem)
            )
            if not (self.quiet and self.overview is not None):
                self._say(f"report: {page.path}")

    def _say_overview(self, overview: Overview, results: Mapping[str, Result]) -> None:
        try:
            lines = [*overview.lines(results)][:LINES]
        except BaseException as error:
            contain(error)
            self._fail(f"the overview cannot be made: {described(error)}")
            return
        for line in lines:
            self._say(line)

    def _summarise(self, name: str, result: Result, files: Sequence[str]) -> None:
        if self.overview is not None:
            return
        if not self.brief:
            table = result.table()
            show(_titled(table.first(_ROWS), name), sys.stderr)
            if len(table.rows) > _ROWS:
                more = len(table.rows) - _ROWS
                self._say(f"{more} more row{'s' if more > 1 else ''} in {files[0]}")
        self._say(f"{name}: {', '.join(files)}")

    def _tell(self, text: str) -> None:
        if not (self.quiet or self.brief):
            self._say(text)

    @staticmethod
    def _say(text: str) -> None:
        # The program may have closed or replaced it.
        with suppress(AttributeError, OSError, ValueError):
            print(f"amanda: {printable(text)}", file=sys.stderr, flush=True)


def _problem(ended: BaseException | None) -> str:
    """Describe an end that is not the program's regular one, or return an empty text."""
    if isinstance(ended, SystemExit):
        return f"ended with status {printable(ended.code)}" if ended.code else ""
    return "" if ended is None else f"ended by {described(ended)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _titled(table: Table, name: str) -> Table:
    return table if table.title else Table(name, table.columns, table.rows)
