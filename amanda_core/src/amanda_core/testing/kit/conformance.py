"""Running the suite: as a class among a driver's own tests, or by a call.

Owns the list of the suite's modules, and hands them to pytest.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from amanda_core.testing.kit.backend import Backend
from amanda_core.testing.kit.capabilities import CORE, needs_of
from amanda_core.testing.kit.fixtures import rig_of
from amanda_core.testing.kit.rig import Rig

__all__ = ["SUITE", "conformance", "core_tests", "run", "suite_tests"]

#: The package whose modules are the suite.
SUITE = "amanda_core.testing.suite"


def suite_tests() -> dict[str, Callable[..., None]]:
    """Return the tests of the suite: name -> function."""
    found: dict[str, Callable[..., None]] = {}
    package = importlib.import_module(SUITE)
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("test_"):
            continue
        for name, value in vars(importlib.import_module(f"{SUITE}.{module.name}")).items():
            if name.startswith("test_") and callable(value):
                if name in found:
                    raise ValueError(f"Two tests of the suite are called {name}")
                found[name] = value
    return found


def core_tests() -> tuple[str, ...]:
    """Return the names of the tests that every driver has to pass."""
    return tuple(name for name, test in suite_tests().items() if needs_of(test).group == CORE)


def conformance(
    backend: type[Backend] | Backend, marks: Mapping[str, pytest.MarkDecorator] | None = None
) -> type:
    """Return a test class with the suite over one backend.

    Assign it to a name that begins with ``Test`` in a test module::

        TestConformance = conformance(MyBackend)

    Args:
        backend: The backend, or its class, which is then created once for all tests.
        marks: Name of a test of the suite -> a pytest mark of your own, such as for slow tests.
    """
    made: list[Backend] = [backend] if isinstance(backend, Backend) else []

    def get() -> Backend:
        if not made:
            assert isinstance(backend, type)
            made.append(backend())
        return made[0]

    @pytest.fixture
    def rig(self: object, request: pytest.FixtureRequest) -> Iterator[Rig]:
        yield from rig_of(get(), request)

    tests = suite_tests()
    for name, mark in (marks or {}).items():
        tests[name] = mark(_copy(tests[name]))
    members: dict[str, Any] = {name: staticmethod(test) for name, test in tests.items()}
    members["rig"] = rig
    members["__doc__"] = "The suite over one backend."
    return type("TestConformance", (), members)


def _copy(test: Callable[..., None]) -> Callable[..., None]:
    # A mark would stay on the suite's own function, for all backends.
    @functools.wraps(test)
    def copy(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    return copy


def run(backend: str, *arguments: str, report: Path | None = None) -> int:
    """Run the suite in this process.

    Args:
        backend: ``module:attribute`` of a `Backend` or its class.
        *arguments: For pytest, such as ``-k`` and a name.
        report: Where to write the summary.

    Returns:
        pytest's exit code; 0 if the driver conforms.
    """
    words: Sequence[str] = ["--pyargs", SUITE, "-p", "amanda_core.testing.plugin"]
    options = [f"--amanda-backend={backend}"]
    if report is not None:
        options.append(f"--amanda-report={report}")
    return int(pytest.main([*words, *options, *arguments]))
