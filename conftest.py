"""Set-up of all tests: import paths, TensorFlow's environment, which files run, and their order.

The root folders are named like the packages inside them. pytest's importlib mode imports each
parent of a test module's dotted name by its folder: for `amanda_core/tests/test_x.py` it would
register the folder `amanda_core` as an empty namespace package, and so hide the real one. A package
that is already imported is not affected.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

# What TensorFlow reads when it is first imported. oneDNN fuses operators of functions and not those
# of eager mode; unfused, all round alike.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

for _member in Path(__file__).parent.glob("amanda_*"):
    # Whoever works on one member alone need not install the others.
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_member.name)

# Generated examples are the same in each run, and a busy machine does not make a test fail.
with contextlib.suppress(ModuleNotFoundError):
    _hypothesis = importlib.import_module("hypothesis")
    _hypothesis.settings.register_profile(
        "repeatable",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[
            _hypothesis.HealthCheck.too_slow,
            _hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
    _hypothesis.settings.load_profile("repeatable")

# What a shell starts in the background ignores Ctrl-C, and so would the programs that the tests
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: The folders of tests that load TensorFlow. A process that has loaded it must not fork.
WITH_TENSORFLOW = ("amanda_driver_tf/tests", "tests/portable")
#: CPU seconds of each test function by file; maintenance/tiers/durations.py says more.
DURATIONS = Path(__file__).parent / "maintenance/tiers/durations.json"
_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that noxfile.py uses."""
    group = parser.getgroup("amanda")
    group.addoption(
        "--tensorflow",
        choices=["without", "only"],
        help="collect the tests that need no TensorFlow, or those that do",
    )
    group.addoption(
        "--record-contexts",
        action="store_true",
        help="have coverage.py, where it measures, note the test function that runs a line",
    )
    group.addoption(
        "--record-durations",
        metavar="FOLDER",
        type=Path,
        help="write the CPU seconds of each test function, child processes included, to a new file",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files that `--tensorflow` excludes, and sources that are named like tests."""
    ruled_out = collection_path.is_file() and _is_ruled_out(collection_path, config)
    # None, not False: other reasons to ignore a path stand.
    return collection_path.name == "src" or ruled_out or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the files that take longest first under xdist, so that all processes end together."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    known = json.loads(DURATIONS.read_text())
    seconds = {file: sum(map(max, functions.values())) for file, functions in known.items()}
    # A file that was never measured may take long.
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 60.0))


def pytest_collection_finish() -> None:
    """Freeze the objects that all imports made: tests run the collector, which would visit them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start measuring before any fixture runs; skip tests that coverage.py would make fail."""
    item.stash[_STARTED] = _busy()
    if item.config.getoption("--record-contexts"):
        _record_context(item)
    if sys.gettrace() is not None and item.get_closest_marker("untraced") is not None:
        pytest.skip("it notices the tracer of coverage.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Attach the time of a test, including fixtures, where pytest-xdist passes it on."""
    if call.when == "teardown":
        item.user_properties.append(("cpu_seconds", _busy() - item.stash[_STARTED]))


class Durations:
    """Writes a file of durations at the end of a session."""

    def __init__(self, folder: Path) -> None:
        """Start without results."""
        # In the order of the runs.
        self.path = folder / f"{time.time_ns()}.json"
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the times of a test function's cases."""
        for name, value in report.user_properties:
            if name == "cpu_seconds" and report.when == "teardown":
                function = _function(report.nodeid).split("::", 1)[1]
                self.seconds[_file(report.nodeid)][function] += float(str(value))

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self.path.write_text(json.dumps(self.seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Exclude files that are given by name, too; record durations if requested."""
    config.args[:] = [
        arg for arg in config.args if not _is_ruled_out(Path(arg.split("::")[0]).absolute(), config)
    ]
    # In the process that hears of all tests.
    folder = config.getoption("--record-durations")
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(folder.absolute()))


def _is_ruled_out(path: Path, config: pytest.Config) -> bool:
    """Return True if the choice between tests with and without TensorFlow excludes this path."""
    chosen: str | None = config.getoption("--tensorflow")
    folders = [config.rootpath / folder for folder in WITH_TENSORFLOW]
    if chosen == "only":
        # A folder above both has both.
        return not any(path.is_relative_to(f) or f.is_relative_to(path) for f in folders)
    return chosen == "without" and any(path.is_relative_to(folder) for folder in folders)


def _record_context(item: pytest.Item) -> None:
    """Start the coverage context of a test function; one per case would take many gigabytes."""
    coverage = importlib.import_module("coverage")
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(_function(item.nodeid))


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


def _function(nodeid: str) -> str:
    """Return the id without the parameters of the case."""
    return nodeid.split("[")[0]


def _busy() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times: Any = os.times()
    return float(times.user + times.system + times.children_user + times.children_system)
