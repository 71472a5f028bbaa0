"""Write others.md beside this file, and its summary docs/others.md, from the results."""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from maintenance.figures.summaries import LOGS, others
from maintenance.sweeps.results import versions
from maintenance.sweeps.shipped import LOOKING, LOOKING_FORWARD

from .comparing import BAD, FORWARD, TOOLS, Failure, FileResult, read
from .exceptions import DEFECT, EAGER, EAGER_FRAME, EXCEPTED, reason
from .suites import SUITES

LOG, PAGE = LOGS["others"]
SOURCES = "sources.json"
SHOWN = (*TOOLS, *FORWARD)


def note_source(folder: Path, suite: str, commit: str) -> None:
    """Record the commit of a suite's tests, and the versions that they ran with."""
    path = folder / SOURCES
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    found[suite] = {"commit": commit, **versions()}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def explanation(result: FileResult, tool: str, failure: Failure) -> str:
    """Return why a test may fail under a tool, or an empty string."""
    if failure.eager and tool in TOOLS:
        return EAGER
    if failure.eager and not any(why.startswith(DEFECT) for why in failure.eager_frames):
        # Without the operator.
        reasons = {re.sub(r" \([^)]*\)$", "", why): None for why in failure.eager_frames}
        return EAGER_FRAME + "; ".join(reasons)
    return reason(result.suite, failure.test, tool)


def unexplained(result: FileResult, tool: str) -> list[Failure]:
    """Return the failures under a tool that no exception explains."""
    return [
        failure for failure in result.tools[tool].failures if not explanation(result, tool, failure)
    ]


def line(result: FileResult) -> str:
    """Return a summary of a file in one line."""
    parts = [f"{result.path} (every {result.every}): {result.plain} in {result.seconds:.0f} s"]
    for tool, compared in result.tools.items():
        part = f"{tool}: {compared.passed} pass, {len(compared.failures)} fail"
        if compared.unstable:
            part += f", {len(compared.unstable)} unstable"
        if compared.other:
            part += f", {compared.other}"
        if compared.incomplete:
            part += f", {compared.incomplete}"
        parts.append(f"{part} in {compared.seconds:.0f} s")
    if result.incomplete:
        parts.append(f"incomplete: {result.incomplete}")
    if result.not_collected:
        parts.append(f"not collected: {next(iter(result.not_collected.values()))[:200]}")
    return "; ".join(parts)


def results(folder: Path) -> list[FileResult]:
    """Return all results in a folder, sorted by suite and file."""
    paths = (path for path in folder.glob("*.json") if path.name != SOURCES)
    return sorted(map(read, paths), key=lambda found: (found.suite, found.path))


def write(folder: Path) -> int:
    """Write the page; return 1 if a failure is unexplained."""
    found = results(folder)
    sources = json.loads((folder / SOURCES).read_text())
    left = [
        (result, tool, failure)
        for result in found
        for tool in result.tools
        for failure in unexplained(result, tool)
    ]
    lines = [
        "# Other people's tests",
        "",
        "The tests that the authors of frameworks and libraries wrote for their own code, run "
        "under tools that change nothing. `watch` has the four analysis routines and inserts "
        "nothing. `none` runs a routine that returns `None` before and after every operator, "
        f"forward and backward. `shipped` is {len(LOOKING)} tools of amanda-tools at once, those "
        "that only look; after each test they make their results in all forms. Under these, "
        "callables of `torch.compile` run eagerly. Those whose name ends with `-forward` have the "
        "routines of the forward program alone, so that what is compiled stays compiled; for "
        f"`shipped-forward` these are {len(LOOKING_FORWARD)} tools. A tool is applied around each "
        "test, from before its setup until after its teardown, and in processes that it spawns. A "
        "test that passes without Amanda and fails under a tool, twice, is a failure. The tests "
        "are not part of this repository.",
        "",
        "This page is written by `nox -s others -- report` from the results of "
        "`nox -s others -- SUITE --from FOLDER`; do not edit it. The result of a file is kept "
        "until it is run again, so results may be older than the sources of this repository.",
        "",
        *_summary(found, sources),
        *_exceptions(found),
        *_left(left),
        *_files(found),
        *_not_run(found),
    ]
    LOG.write_text("\n".join(lines).rstrip() + "\n")
    PAGE.write_text(others(LOG.read_text()))
    print(f"{len(found)} files; {len(left)} failures without a reason; {LOG}, {PAGE}")
    return 1 if left else 0


def _summary(found: list[FileResult], sources: dict[str, dict[str, str]]) -> Iterable[str]:
    yield "## Results"
    yield ""
    columns = " | ".join(f"pass under `{tool}`" for tool in SHOWN)
    yield f"| suite | files | pass plain | {columns} | fail for a known reason | fail |"
    yield "|---" * (5 + len(SHOWN)) + "|"
    for suite in dict.fromkeys(result.suite for result in found):
        mine = [result for result in found if result.suite == suite]
        cells = [_passed(mine, tool) for tool in SHOWN]
        failed = sum(len(c.failures) for result in mine for c in result.tools.values())
        unknown = sum(len(unexplained(result, tool)) for result in mine for tool in result.tools)
        plain = sum(result.plain.get("passed", 0) for result in mine)
        files = len({result.path for result in mine})
        yield (
            f"| {suite} | {files} | {plain} | {' | '.join(cells)} | "
            f"{failed - unknown} | {unknown} |"
        )
    yield ""
    yield "Not every file was run under every tool."
    yield ""
    for suite, source in sources.items():
        about = ", ".join(f"{name} {value}" for name, value in source.items() if name != "commit")
        commit = f"commit `{source['commit']}`, " if source["commit"] else ""
        which = f"{SUITES[suite].about}, " if SUITES[suite].about else ""
        yield f"- {suite}: {which}{commit}{about}"
    yield ""


def _passed(found: list[FileResult], tool: str) -> str:
    """Return how many tests of the files that were run under a tool pass, out of how many."""
    mine = [result for result in found if tool in result.tools]
    passed = sum(result.tools[tool].passed for result in mine)
    return f"{passed} of {sum(r.plain.get('passed', 0) for r in mine)}" if mine else ""


def _exceptions(found: list[FileResult]) -> Iterable[str]:
    tests: dict[str, set[str]] = defaultdict(set)
    for result in found:
        for tool, compared in result.tools.items():
            for failure in compared.failures:
                if why := explanation(result, tool, failure):
                    tests[why].add(f"{result.suite}: `{failure.test}`")
    yield "## Tests that fail for a known reason"
    yield ""
    for why, names in tests.items():
        yield f"- {why}"
        yield from (f"  - {name}" for name in sorted(names))
    if not tests:
        yield "None."
    suites = {result.suite for result in found}
    stale = [
        excepted
        for excepted in EXCEPTED
        if excepted.reason not in tests and fnmatch.filter(suites, excepted.suite)
    ]
    if stale:
        yield ""
        yield "Reasons that no test of these runs needs: " + "; ".join(
            f"`{excepted.test}`" for excepted in stale
        )
    yield ""


def _left(left: list[tuple[FileResult, str, Failure]]) -> Iterable[str]:
    yield "## Tests that fail without a reason"
    yield ""
    kinds: dict[str, list[str]] = defaultdict(list)
    for result, tool, failure in left:
        alone = f" ({', '.join(failure.alone)})" if failure.alone else ""
        kinds[_kind(failure)].append(f"{tool}{alone}, {result.suite}: `{failure.test}`")
    for kind, names in sorted(kinds.items(), key=lambda item: -len(item[1])):
        yield f"- `{kind}`: {len(names)}"
        yield from (f"  - {name}" for name in names[:5])
        if len(names) > 5:
            yield f"  - and {len(names) - 5} more"
    if not left:
        yield "None."
    yield ""


def _kind(failure: Failure) -> str:
    return failure.error.splitlines()[0][:160].replace("`", "'")


def _files(found: list[FileResult]) -> Iterable[str]:
    yield "## Files"
    yield ""
    yield 'Where "each n-th test" is not 1, only each n-th test of the file was run.'
    yield ""
    yield "The columns of the tools have the numbers of tests that pass, fail and are unstable."
    yield ""
    columns = " | ".join(f"`{tool}`" for tool in SHOWN)
    yield f"| suite | file | each n-th test | pass plain | {columns} | notes |"
    yield "|---" * (5 + len(SHOWN)) + "|"
    for result in found:
        cells = []
        notes = [result.incomplete]
        if failing := sum(result.plain.get(outcome, 0) for outcome in BAD):
            notes.append(f"{failing} fail plain")
        for tool in SHOWN:
            compared = result.tools.get(tool)
            if compared is None:
                cells.append("")
                continue
            failed, unstable = len(compared.failures), len(compared.unstable)
            cells.append(f"{compared.passed}, {failed}, {unstable}")
            notes.append(compared.incomplete)
        # Without the place of the installation.
        reasons = [re.sub(r" \(/[^)]*\)?", "", why) for why in result.not_collected.values()]
        notes += [f"not collected: {why}" for why in reasons]
        note = "; ".join(dict.fromkeys(filter(None, notes))).replace("|", "/").replace("\n", " ")
        interceptor = f" ({result.interceptor})" if result.interceptor else ""
        yield (
            f"| {result.suite} | {result.path}{interceptor} | {result.every} | "
            f"{result.plain.get('passed', 0)} | {' | '.join(cells)} | {note[:200]} |"
        )


def _not_run(found: list[FileResult]) -> Iterable[str]:
    yield ""
    yield "## Not run"
    yield ""
    for name, suite in SUITES.items():
        paths = [result.path for result in found if result.suite == name]
        missing = [
            f"`{pattern}`"
            for pattern in suite.files
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths)
        ]
        if missing:
            yield f"- {name}: " + (", ".join(missing) if paths else "none of its files was run")


def failures(folder: Path) -> str:
    """Return all failures without a reason, grouped by their error, as Markdown."""
    kinds: dict[str, list[tuple[str, str, Failure]]] = defaultdict(list)
    for result in results(folder):
        for tool in result.tools:
            for failure in unexplained(result, tool):
                kinds[_kind(failure)].append((result.suite, tool, failure))
    lines = []
    for kind, members in sorted(kinds.items(), key=lambda item: -len(item[1])):
        tools = Counter((tool, *failure.alone) for _, tool, failure in members)
        places = Counter(failure.where for _, _, failure in members).most_common(3)
        lines += [f"## {len(members)}: {kind}", f"{dict(tools)}; at {places}", ""]
        lines += [f"- {tool}: {failure.test}" for _, tool, failure in members[:12]]
        lines += ["", "```", members[0][2].printed[-1500:], "```", ""]
    return "\n".join(lines)
