"""Comparison of the outcomes of a file's tests under tools with those of a plain run.

A test that passes plain and fails under a tool is run again both ways. It counts as a failure if it
passes plain again and fails under the tool again; otherwise it is unstable.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from maintenance.sweeps.shipped import LOOKING, LOOKING_FORWARD

from .running import Limits, Outcome, Ran, TestFile, run

#: Tools under which callables of `torch.compile` run eagerly.
TOOLS = ("watch", "none", "shipped")
#: Those under which they stay compiled.
FORWARD = ("watch-forward", "none-forward", "shipped-forward")
#: Those that are several tools -> the names of these.
ALONE = {"shipped": LOOKING, "shipped-forward": LOOKING_FORWARD}
BAD = ("failed", "crashed", "hung")
#: Addresses of objects, which differ between runs.
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


@dataclasses.dataclass
class Failure:
    """A test that passes plain and fails under a tool.

    Attributes:
        test: Id of the test.
        outcome: ``failed``, ``crashed`` or ``hung``.
        error: The lines of the exception.
        where: Last place in the traceback, without its folders.
        printed: End of pytest's output.
        eager: Whether it also fails without Amanda if torch compiles nothing. It is only run so if
            callables of `torch.compile` or frames of them run eagerly under the tool.
        eager_frames: Why frames of callables that stay compiled ran eagerly under the tool.
        alone: Of the tools that are applied together, those under which alone it fails.
    """

    test: str
    outcome: str
    error: str
    where: str
    printed: str
    eager: bool = False
    eager_frames: list[str] = dataclasses.field(default_factory=list)
    alone: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Compared:
    """Results of one file under one tool.

    Attributes:
        passed: Number of tests that pass plain and under the tool.
        failures: Tests that pass plain and fail under the tool.
        unstable: Ids of tests that failed under the tool in only one of two runs, or failed plain.
        other: Other outcome, such as ``skipped`` -> number of tests that pass plain.
        eager_frames: Why frames of callables that stay compiled ran eagerly -> number of tests.
        incomplete: Why not all tests were compared; empty if they were.
        seconds: Duration.
    """

    passed: int = 0
    failures: list[Failure] = dataclasses.field(default_factory=list)
    unstable: list[str] = dataclasses.field(default_factory=list)
    other: dict[str, int] = dataclasses.field(default_factory=dict)
    eager_frames: dict[str, int] = dataclasses.field(default_factory=dict)
    incomplete: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class FileResult:
    """Results of one file.

    Attributes:
        suite: Name of the suite.
        path: The file.
        every: Only each n-th of its tests was run.
        interceptor: PyTorch's interceptor, if one was requested.
        plain: Outcome of the plain run -> number of tests.
        not_collected: What could not be imported, and why.
        incomplete: Why not all tests ran plain.
        tools: Name of the tool -> results.
        seconds: Duration of the plain run.
        when: Start, in seconds since the epoch.
    """

    suite: str
    path: str
    every: int
    interceptor: str
    plain: dict[str, int]
    not_collected: dict[str, str]
    incomplete: str
    tools: dict[str, Compared] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    when: float = dataclasses.field(default_factory=time.time)


def compare(
    suite: str, file: TestFile, tools: tuple[str, ...], limits: Limits, interceptor: str = ""
) -> FileResult:
    """Run a file plain and under each tool."""
    began = time.monotonic()
    plain = run(file, "plain", limits)
    result = FileResult(
        suite,
        file.path,
        file.every,
        interceptor,
        dict(Counter(outcome.outcome for outcome in plain.outcomes.values())),
        {name: _error(why) or why[-300:] for name, why in plain.not_collected.items()},
        plain.incomplete or ("" if plain.outcomes or plain.not_collected else plain.printed[-300:]),
        seconds=time.monotonic() - began,
    )
    good = [name for name, outcome in plain.outcomes.items() if outcome.outcome == "passed"]
    for tool in tools:
        result.tools[tool] = _under(tool, file, limits, good)
    return result


def _under(tool: str, file: TestFile, limits: Limits, good: list[str]) -> Compared:
    began = time.monotonic()
    ran = run(file, tool, limits, good)
    suspect = _bad(ran)
    plain_again = run(file, "plain", limits, suspect)
    tool_again = run(file, tool, limits, suspect)
    compared = Compared(incomplete=ran.incomplete)
    others = Counter(outcome.outcome for outcome in ran.outcomes.values())
    compared.passed = others.pop("passed", 0)
    if missing := len(good) - len(ran.outcomes):
        others["not run"] = missing
    for name in suspect:
        if name in _bad(tool_again) and name not in _bad(plain_again):
            compared.failures.append(_failure(name, ran.outcomes[name]))
        else:
            compared.unstable.append(name)
    tests = [failure.test for failure in compared.failures]
    for name in ALONE.get(tool, ()):
        failed = _bad(run(file, tool.replace("shipped", name), limits, tests))
        for failure in compared.failures:
            if failure.test in failed:
                failure.alone.append(name)
    if file.compiles:
        eagerly = [f.test for f in compared.failures if tool in TOOLS or f.eager_frames]
        eager = _bad(run(file, "eager", limits, eagerly))
        for failure in compared.failures:
            failure.eager = failure.test in eager
    compared.eager_frames = dict(
        Counter(why for outcome in ran.outcomes.values() for why in outcome.eager_frames)
    )
    compared.other = {name: n for name, n in others.items() if name not in BAD}
    compared.seconds = time.monotonic() - began
    return compared


def _bad(ran: Ran) -> list[str]:
    return [name for name, outcome in ran.outcomes.items() if outcome.outcome in BAD]


def _failure(name: str, outcome: Outcome) -> Failure:
    why = _ADDRESS.sub("0x…", outcome.why)
    places = re.findall(r"^(\S+?):(\d+): ", why, re.MULTILINE)
    where = ""
    if places:
        path, line = places[-1]
        where = "/".join(path.split("/")[-2:]) + f":{line}"
    error = _error(why) or why.strip().splitlines()[0]
    return Failure(
        name, outcome.outcome, error, where, why, eager_frames=list(outcome.eager_frames)
    )


def _error(why: str) -> str:
    """Return the lines of the last exception, which pytest marks."""
    lines = why.splitlines()
    marked = [number for number, line in enumerate(lines) if line.startswith("E  ")]
    if not marked:
        return ""
    first = last = marked[-1]
    while first - 1 in marked:
        first -= 1
    return "\n".join(line[1:].strip() for line in lines[first : min(last, first + 12) + 1])


def path_of(folder: Path, suite: str, path: str, every: int, interceptor: str) -> Path:
    """Return the path of a file's result."""
    name = re.sub(r"\W+", "-", f"{suite}-{path}-{every}-{interceptor}").strip("-")
    return folder / f"{name}.json"


def write(result: FileResult, folder: Path) -> Path:
    """Write a result as JSON; of an earlier one of the same tests keep the other tools."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, result.suite, result.path, result.every, result.interceptor)
    if path.exists():
        result.tools = {**read(path).tools, **result.tools}
    path.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    return path


def read(path: Path) -> FileResult:
    """Read a result that `write` wrote."""
    found: dict[str, Any] = json.loads(path.read_text())
    for tool, compared in found["tools"].items():
        compared["failures"] = [Failure(**failure) for failure in compared["failures"]]
        found["tools"][tool] = Compared(**compared)
    return FileResult(**found)
