"""Plugin of pytest that runs each test under a tool and writes its outcome at once.

It is loaded into processes that run others' tests (`pytest -p applied_tools`), where the root of
this repository is not on the path: folders of the tests may have the names of those there.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.context
import sys
import time
import unittest
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import pytest

import amanda


def watch(*backward: bool) -> amanda.Tool:
    """Return a tool with both analysis routines for each direction; they insert nothing."""
    tool = amanda.Tool()
    for direction in backward:
        for require_outputs in (False, True):
            tool.add_inst_for_op(lambda context: None, direction, require_outputs)
    return tool


def none(*backward: bool) -> amanda.Tool:
    """Return a tool whose routine runs before and after every op and returns None."""

    def nothing(*values: Any) -> None:
        pass

    def of_forward(context: amanda.OpContext) -> None:
        context.insert_before_op(nothing)
        context.insert_after_op(nothing)

    def of_backward(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(nothing)
        context.insert_after_backward_op(nothing)

    tool = amanda.Tool()
    for direction in backward:
        tool.add_inst_for_op(of_backward if direction else of_forward, direction)
    return tool


#: Those that are defined here; the others are shipped ones.
TOOLS = {
    "watch": lambda: watch(False, True),
    "none": lambda: none(False, True),
    # Under these, what torch compiles stays compiled.
    "watch-forward": lambda: watch(False),
    "none-forward": lambda: none(False),
}


def made(applied: str) -> contextlib.AbstractContextManager[list[amanda.Tool]]:
    """Make the tools of a name, and in the end their results, if they have any.

    Args:
        applied: A key of `TOOLS`; ``shipped``, or the name of a shipped tool that only looks; or
            either with ``-forward``.
    """
    if applied in TOOLS:
        return contextlib.nullcontext([TOOLS[applied]()])
    root = str(Path(__file__).parents[4])
    sys.path.insert(0, root)
    try:
        from maintenance.sweeps import shipped
    finally:
        sys.path.remove(root)
    name = applied.removesuffix("-forward")
    makers = shipped.LOOKING if name == applied else shipped.LOOKING_FORWARD
    return shipped.rendered(makers if name == "shipped" else {name: makers[name]})


#: Under which nothing is applied.
UNCHANGED = ("plain", "eager")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the parent process passes."""
    group = parser.getgroup("applied tools")
    group.addoption("--applied", default="plain", help="plain, eager or as of `made`")
    group.addoption("--outcomes", type=Path, help="where outcomes are appended, one JSON a line")
    group.addoption("--every", type=int, default=1, help="n: only each n-th test")
    group.addoption("--leave-out", type=Path, help="a file of ids, one a line")
    group.addoption("--only-ids", type=Path, help="a file of ids, one a line")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that applies the tool and writes the outcomes."""
    applied = config.getoption("--applied")
    if applied == "eager":
        compile_nothing()
    if applied not in UNCHANGED:
        # Processes that are forked have the tool already.
        Spawned.applied = applied
        multiprocessing.context.SpawnContext.Process = Spawned
    config.pluginmanager.register(Applied(config))


class Spawned(multiprocessing.context.SpawnProcess):
    """A process that a test spawns: it runs under the tool, too."""

    #: Name of the tool; set in the process of the tests, and passed on to each spawned one.
    applied = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tool = self.applied

    def run(self) -> None:
        """Run what the test gave the process."""
        with made(self.tool) as tools, amanda.apply(*tools):
            super().run()


def compile_nothing() -> None:
    """Let plain PyTorch run what tests compile eagerly, as it runs under tools."""
    import torch

    # Not earlier, since what a test does before it resets this.
    original: Any = unittest.TestCase._callTestMethod  # type: ignore[attr-defined]

    def call(case: unittest.TestCase, method: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return original(case, method)

    unittest.TestCase._callTestMethod = call  # type: ignore[attr-defined]


class Applied:
    """Applies a new tool around each test, from before its setup until after its teardown."""

    def __init__(self, config: pytest.Config) -> None:
        self.applied = config.getoption("--applied")
        self.every = config.getoption("--every")
        self.left_out = _ids(config.getoption("--leave-out"))
        self.only = _ids(config.getoption("--only-ids"))
        self.file: TextIO = config.getoption("--outcomes").open("a")
        self.handle: amanda.Handle | None = None
        self.made = contextlib.ExitStack()
        self.reports: list[pytest.TestReport] = []
        self.eager: list[str] = []
        self.began = 0.0

    def note(self, **what: object) -> None:
        """Write a line immediately, because the process may crash in the next test."""
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Select the tests."""
        chosen = items[:: self.every]
        if self.only:
            chosen = [item for item in items if item.nodeid in self.only]
        items[:] = [item for item in chosen if item.nodeid not in self.left_out]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write down what could not be imported."""
        if report.outcome != "passed":
            self.note(id=report.nodeid, outcome="not collected", why=_why(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write down the next test, in case the process ends in it."""
        self.note(id=nodeid, outcome="started")
        self.reports, self.eager = [], []
        self.began = time.perf_counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Apply the tool."""
        if "absl.flags" in sys.modules:
            # `absl.testing.absltest.main` does this, but pytest does not call it.
            sys.modules["absl.flags"].FLAGS.mark_as_parsed()
        if self.applied not in UNCHANGED:
            self.handle = amanda.attach(*self.made.enter_context(made(self.applied)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        """Remove the tool."""
        try:
            return (yield)
        finally:
            if self.handle is not None:
                handle, self.handle = self.handle, None
                self.eager = _run_eagerly(handle)
                handle.remove()
                self.made.close()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of one phase of a test."""
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write down the outcome of a test: the worst of its phases."""
        worst = max(self.reports, key=lambda report: _RANK[_outcome(report)])
        why = "" if worst.outcome == "passed" else _why(worst)
        seconds = round(time.perf_counter() - self.began, 2)
        self.note(
            id=nodeid, outcome=_outcome(worst), why=why, seconds=seconds, eager_frames=self.eager
        )


_RANK = {"passed": 0, "skipped": 1, "expected": 1, "failed": 2}


def _outcome(report: pytest.TestReport) -> str:
    if report.outcome == "skipped" and hasattr(report, "wasxfail"):
        return "expected"
    return report.outcome


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the last lines of what pytest would print."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return report.longreprtext[-3000:]


def _run_eagerly(handle: amanda.Handle) -> list[str]:
    """Return why frames of compiled callables ran eagerly, as the coverage says."""
    begin = "it runs eagerly: "
    gaps = [gap for gaps in handle.coverage().values() for gap in gaps]
    return sorted({gap.why.removeprefix(begin) for gap in gaps if gap.why.startswith(begin)})


def _ids(path: Path | None) -> set[str]:
    return set() if path is None else set(path.read_text().splitlines())
