"""Running a program under tools: applying them, handling its end, and writing results.

Owns one run, from the program's first line to the exit status. It does not know the flags.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from amanda_core.cli import findings, turns
from amanda_core.cli.conditions import EXIT_STATUS, Condition
from amanda_core.cli.drawing import show, wrapped
from amanda_core.cli.overview import LINES, Overview
from amanda_core.cli.program import Program, report
from amanda_core.cli.progress import FIRST, Progress, interval_for, told_if_slow
from amanda_core.cli.ranks import merged
from amanda_core.cli.reports import ReportPage
from amanda_core.cli.saving import Saving, results_so_far
from amanda_core.cli.termination import Termination
from amanda_core.engine.tool import Tool
from amanda_core.errors import AmandaError, ConfigError, DriverError
from amanda_core.plugins.preflight import set_environment
from amanda_core.processes.index import packed
from amanda_core.processes.launched import Process
from amanda_core.results import ChangesWeights, HasResult, Result, Table, load, printable, share
from amanda_core.results.output import Output, processes_in
from amanda_core.results.records import drop_records, records_of
from amanda_core.results.run_state import RunState
from amanda_core.runtime.containment import contain, described
from amanda_core.runtime.parting import before_parting

__all__ = ["Run"]

#: Rows of a table that are shown when a run ends; the file has all of them.
_ROWS = 20
#: How many processes are named.
_NAMED = 5
#: Seconds to wait for routines that run while results are written.
_PATIENCE = 2.0
#: Bytes of a result from which on one of many processes has an index.
_LARGE = 100_000


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
        number: Identifies the run in all of its processes.
        children: Lets programs that the program starts run under the tools, too; None if not.
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
    number: str = field(default_factory=lambda: os.urandom(8).hex())
    children: Callable[[Run], AbstractContextManager[None]] | None = None
    _handle: Any = field(default=None, init=False)
    _finished: bool = field(default=False, init=False)
    #: Whether something is not written that was asked for.
    _failed: bool = field(default=False, init=False)
    _state: RunState = field(init=False)
    _files: list[Path] = field(default_factory=list, init=False)
    #: What the program ended by, and whether that has been shown.
    _ended: BaseException | None = field(default=None, init=False)
    _is_reported: bool = field(default=False, init=False)
    _pid: int = field(default_factory=os.getpid, init=False)
    _termination: Termination = field(init=False)
    _saving: Saving = field(init=False)
    #: Held while results are written.
    _writing: threading.RLock = field(default_factory=threading.RLock, init=False)
    #: Whether results of an earlier run were removed, and whether saving has failed.
    _cleared: bool = field(default=False, init=False)
    _told: bool = field(default=False, init=False)
    #: Whether a child has a folder.
    _opened: bool = field(default=False, init=False)
    #: Name of a tool -> the files of its weights that are saved already.
    _saved: dict[str, object] = field(default_factory=dict, init=False)
    #: Which process it was when it started, if it was one of several.
    _started_as: Process = field(default=Process(None, "", None), init=False)
    #: Ends the wait for the moment to save them.
    _stay: Callable[[], object] = field(default=bool, init=False)

    def __post_init__(self) -> None:
        self._termination = Termination(self)
        self._started_as = _one_of_several()
        self._saving = Saving(self._save)
        name = os.path.basename(self.program.target)
        self._state = RunState(
            name, self._pid, self.number, self.process.rank, self.process.processes
        )

    def __call__(self) -> int:
        """Run it; return the exit status, or raise what the interpreter must end with."""
        try:
            self.attach()
        except AmandaError as error:
            drop_records()
            self.output.release()
            self._say(f"error: {error}")
            return 2
        if not self.quiet:
            self._say(f"running {self.program.target} under {', '.join(self.tools)}")
        self._note()
        self._saving.start()
        with ExitStack() as stack:
            if self.children is not None:
                stack.enter_context(self.children(self))
            stack.enter_context(self._termination.handled())
            self._ended = self._execute()
            # The results of a fork are its parent's.
            own = os.getpid() == self._pid
            status = self.finish(_problem(self._ended)) if own else 0
            self._report()
        return self._end(self._ended, status)

    def attach(self) -> None:
        """Apply the tools.

        Raises:
            AmandaError: They cannot be applied.
        """
        import amanda  # Drivers that must record from the program's start are notified now.

        set_environment()
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
        turns.share(self.tools.values())
        self._stay = before_parting(self._save_parts)

    def _execute(self) -> BaseException | None:
        try:
            self.program.execute()
        except BaseException as error:
            return error
        return None

    def _report(self) -> None:
        """Show the program's uncaught exception; called where no other one is being handled, which
        would be the context of what the program's own `sys.excepthook` raises.
        """
        uncaught = None if self._is_reported else self._ended
        self._is_reported = True
        if uncaught is None or isinstance(uncaught, SystemExit):
            return
        try:
            report(uncaught)
        except SystemExit as asked:
            self._ended = asked

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
        self._stay()
        # It waits for the lock above, and for what the main thread holds.
        self._saving.stop(None if unwound else _PATIENCE)
        with self._writing, self._termination.deferred():
            if not self._is_open():
                return self._without_results(unwound)
            self._state.problem, self._state.ended = problem, True
            try:
                status = self._write_results(unwound)
                if not self._failed:
                    drop_records()
            finally:
                self._state.saved = time.time()
                kept = problem or self.output.part or self._failed
                self._note(kept=bool(kept))
                self.output.release()
            # Last, so that it is not far above. A signal that waits would end the process before.
            if unwound:
                self._report()
            return status

    def interrupted(self, place: str) -> None:
        """Write the results so far, and say where the main thread waits."""
        self._state.waits = place
        self._save()
        self._say(f"interrupted, but {place}; the results until now are in {self.output.folder}")

    def _save(self) -> None:
        """Write the results so far; after an error, say it once and go on."""
        if not self._has_operators():
            return
        found = results_so_far(self.tools, _PATIENCE)
        with self._writing:
            if self._finished or not self._is_open():
                return
            try:
                if not self._cleared:
                    self.output.clear(self.process.replaced, self.number)
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

    def _has_operators(self) -> bool:
        return any(tool._amanda.analysed for tool in self.tools.values())

    def _parts(self) -> list[Path]:
        """Return the folders of the processes that the program started."""
        return [path for path in processes_in(self.output.folder) if self._is_part(path)]

    def _is_part(self, folder: Path) -> bool:
        state = RunState.read(folder)
        return state is not None and state.run == self.number

    def _is_open(self) -> bool:
        """Return True if there is a folder for the results.

        Those of a launcher are in the folders of its processes, of which it may be one itself.
        """
        if self.children is None or self.process.rank is not None:
            return True
        parts, process = self._parts(), _one_of_several()
        # A library that starts others sets what it was started without.
        if not parts and process == self._started_as:
            return True
        if not self._has_operators():
            return not parts
        if process.part and process.part not in [path.name for path in parts]:
            output = Output(self.output.folder, [*self.tools], part=process.part, force=True)
            if output.reserve():
                self.output.discard()
                self.output, self.process = output, process
                self._state.rank, self._state.processes = process.rank, process.processes
        return True

    def _without_results(self, unwound: bool) -> int:
        """Remove the tools where others have the results."""
        if unwound:
            with self._reported("the tools are not removed"):
                self._handle.remove()
        if parts := self._parts():
            named = ", ".join(path.name for path in parts[:_NAMED])
            more = ", ..." if len(parts) > _NAMED else ""
            folder = self.output.folder
            count = f"{len(parts)} processes" if len(parts) > 1 else "1 process"
            self._say(f"results of {count}: {folder} ({named}{more})")
            if self.page is not None:
                self._write_page(self.page, merged(parts))
            drop_records()
            self.output.discard()
        return int(self._failed) or self._limits_status({})

    def _note(self, *, kept: bool = True) -> None:
        self._state.records = records_of(self.tools, self.output.folder)
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
            for text in chain((f"warning: {one}" for one in idle), findings.of(self._handle)):
                self._say(text)
        results: dict[str, Result] = {}
        try:
            results = self._results()
            with self._reported("an earlier result is not removed", AmandaError):
                if not self._cleared:
                    self.output.clear(self.process.replaced, self.number)
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
            is_refused = isinstance(self._ended, DriverError)
            idle = findings.idle(self.tools, self._handle, is_refused)
            return [*idle, *findings.skipped(self._handle)]
        except BaseException as error:
            contain(error)
            return [f"what a driver did not see is not known: {described(error)}"]

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
        size = files[0].stat().st_size
        if self.output.part and size > _LARGE:
            with self._reported(f"the index of {name!r} is not written"):
                self.output.write_index(name, packed(load(files[0]), size))
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
            if name not in self._saved:
                self._saved[name] = tool.save_baked(tool.saves_to)
            if self._saved[name] and not self.quiet:  # Of several processes one writes.
                self._say(f"{name}: {said}; the {changed} ones are in {tool.saves_to}")

    def _save_parts(self) -> None:
        """Save the weights of which processes hold parts, while these can communicate."""
        for name, tool in self.tools.items() if os.getpid() == self._pid else ():
            if isinstance(tool, ChangesWeights) and tool.saves_to is not None and tool.in_parts:
                with self._reported(f"the {tool.words[0]} weights of {name!r} are not saved"):
                    self._saved[name] = ()
                    self._saved[name] = tool.save_baked(tool.saves_to)

    def _write_page(self, page: ReportPage, contents: Mapping[str, Any] | None = None) -> None:
        program = self.program
        lines = [" ".join([program.target, *program.arguments])] if program.arguments else []
        # Not the whole path, since people pass pages on.
        lines.append(f"results in {self.output.folder.name}")
        with self._reported("the report is not written", AmandaError):
            title, problem = os.path.basename(program.target), _sentence(self._state.problem)
            if contents is not None:
                page.write_contents(contents, title, lines, problem)
            else:
                page.write(self._files, title, lines, problem)
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
        table = result.table()
        if self._state.problem and _is_empty(table):
            self._say(f"{name}: nothing of it ran: {', '.join(files)}")
            return
        if not self.brief:
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
            line = wrapped(f"amanda: {printable(text)}", sys.stderr)
            print(line, file=sys.stderr, flush=True)


def _problem(ended: BaseException | None) -> str:
    """Describe an end that is not the program's regular one, or return an empty text."""
    if isinstance(ended, SystemExit):
        return f"ended with status {printable(ended.code)}" if ended.code else ""
    return "" if ended is None else f"ended by {described(ended)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_empty(table: Table) -> bool:
    """Return True if a table has no rows, or nothing but zeros after the names of its rows."""
    return not any(cell not in (0, "", None) for row in table.rows for cell in row[1:])


def _titled(table: Table, name: str) -> Table:
    return table if table.title else Table(name, table.columns, table.rows)


def _one_of_several() -> Process:
    """Return this process as one of several, though the variables may be of no launcher."""
    try:
        return Process.of_environment(several=True)
    except ConfigError:  # A program that runs alone may use such a name for something else.
        return Process(None, "", None)
