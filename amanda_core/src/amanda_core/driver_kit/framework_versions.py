"""The versions of its framework that a driver was tested with, and the self-test of others.

Owns the comparison of versions, when a version that is newer than all tested ones is self-tested,
and the file that keeps the result. The test itself is a module of the driver.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

import importlib_metadata

from amanda_core.errors import DriverError
from amanda_core.interface.driver import DriverStatus, Finding

__all__ = ["FrameworkVersions", "cache_folder"]

#: Framework that is imported -> its version. Reading it takes longer than all else of `apply`.
_LOADED: WeakKeyDictionary[ModuleType, str] = WeakKeyDictionary()
_FORM = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(.*)")


@dataclass(frozen=True)
class FrameworkVersions:
    """The versions of a framework that a driver works with.

    Attributes:
        framework: Its name as users write it.
        module: Its top-level module.
        distributions: Distributions that may hold it.
        oldest: The oldest release that is supported, such as ``2.10``.
        newest: The newest release that was tried.
        driver: Name of the driver's distribution.
        variable: Environment variable that requests an interceptor by name, if there are several.
        self_test: Module that exits with 0 if the requested interceptor works here; empty if there
            is none.
        first: The oldest release that was tried, where older ones are supported if their self-test
            passes; empty if all supported ones were tried.
    """

    framework: str
    module: str
    distributions: tuple[str, ...]
    oldest: str
    newest: str
    driver: str
    variable: str = ""
    self_test: str = ""
    first: str = ""

    def installed(self) -> str | None:
        """Return the installed version without importing it; None if there is none."""
        module = sys.modules.get(self.module)
        if isinstance(module, ModuleType) and module in _LOADED:
            return _LOADED[module]
        for name in self.distributions:
            try:
                version = importlib_metadata.version(name)
            except importlib_metadata.PackageNotFoundError:
                continue
            if isinstance(module, ModuleType):
                _LOADED[module] = version
            return version
        found = getattr(module, "__version__", None)
        return None if found is None else str(found)

    def refusal(self) -> DriverError | None:
        """Return the error that refuses the installed version as too old; None if it is not."""
        version = self.installed()
        if version is None or _order(version) >= _order(self.oldest):
            return None
        return DriverError(
            f"{self.framework} {version} is older than {self.oldest}, the oldest release that "
            f"{self.driver} supports",
            where=self.driver,
            fix=f"pip install -U '{self.distributions[0]}>={self.oldest}'",
        )

    def status(self, interceptor: str, why: str) -> DriverStatus:
        """Return the status of a driver that has one interceptor."""
        if self.installed() is None:
            return DriverStatus(None, "", f"{self.framework} is not installed")
        return DriverStatus(self.installed(), interceptor, why)

    @contextmanager
    def refusing_unknown(self) -> Iterator[None]:
        """Refuse the installed version if what a driver imports inside ``with`` is not in it."""
        try:
            yield
        except (AttributeError, ImportError) as error:
            raise DriverError(
                f"{self.framework} {self.installed()} is not known: {error}",
                where=self.driver,
                fix=self.install_tried,
            ) from error

    def is_tried(self) -> bool:
        """Return True if the installed version lies between the first and the newest tried."""
        version = self.installed()
        if version is None:
            return True
        return _is_between(version, self.first or self.oldest, self.newest)

    def failure(self, interceptor: str) -> str:
        """Return why an interceptor must not be used with the installed version, or "".

        A version that was tried is not tested, nor is an interceptor that the user requests by
        name. Others are tested once.
        """
        asked = os.environ.get(self.variable) == interceptor
        if asked or self.is_tried() or self.refusal() is not None:
            return ""
        return self.tested(interceptor)

    def tested(self, interceptor: str) -> str:
        """Return why the self-test fails, or "".

        It is run once, and the result is kept in `cache_folder`.
        """
        kept = self.kept_failure(interceptor)
        if kept is not None:
            return kept
        # It starts a process, which few programs need.
        from amanda_core.driver_kit import self_tests

        failure, is_final = self_tests.run(self.self_test, {self.variable: interceptor})
        if is_final:
            kept = json.dumps({"failure": failure}) + "\n"
            self_tests.write_quietly(self.kept_in(interceptor), kept)
        return failure

    def kept_failure(self, interceptor: str) -> str | None:
        """Return the kept result of the self-test: "" if it passed; None if it has not been run."""
        try:
            failure = json.loads(self.kept_in(interceptor).read_text("utf-8"))["failure"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return failure if isinstance(failure, str) else None

    def kept_in(self, interceptor: str) -> Path:
        """Return the file that keeps the result of a self-test."""
        driver = importlib_metadata.version(self.driver)
        parts = (self.module, self.installed(), "python", sys.version.split()[0], "driver")
        name = "-".join((*map(str, parts), driver, interceptor))
        return cache_folder() / "self-tests" / f"{re.sub(r'[^A-Za-z0-9.+_-]', '_', name)}.json"

    def describe(self, outcomes: Sequence[tuple[str, str | None]] = ()) -> list[Finding]:
        """Return the findings about the installed version.

        Args:
            outcomes: Interceptors in the order of preference, each with what `failure` or
                `kept_failure` returned for it.
        """
        if self.installed() is None:
            fix = f"pip install {self.distributions[0]}"
            return [Finding("error", f"{self.framework} is not installed", fix)]
        refusal = self.refusal()
        if refusal is not None:
            return [Finding("error", refusal.what, refusal.fix)]
        if self.is_tried():
            return []
        untried = f"{self.framework} {self.installed()} has not been tried with {self.driver}"
        newest = f"pip install '{self.distributions[0]}<={self.newest}'"
        if not self.self_test:
            return [Finding("warning", f"{untried} (tried are {self._tried})", newest)]
        results = "; ".join(f"{name}: {_said(failure)}" for name, failure in outcomes)
        usable = any(failure == "" or failure is None for _, failure in outcomes)
        return [
            Finding(
                "warning" if usable else "error",
                f"{untried} (tried are {self._tried}). Self-test: {results}",
                f"Delete {cache_folder() / 'self-tests'} to run the self-test again"
                if usable
                else newest,
            )
        ]

    @property
    def install_tried(self) -> str:
        """The command that installs a release that was tried."""
        return f"pip install '{self.distributions[0]}>={self.first or self.oldest},<={self.newest}'"

    @property
    def _tried(self) -> str:
        return f"{self.first or self.oldest} to {self.newest}"

    def note(self, interceptor: str) -> str:
        """Return a sentence about the installed version if it was not tried, else ""."""
        if self.is_tried():
            return ""
        return (
            f"{self.framework} {self.installed()} has not been tried; the self-test: "
            f"{_said(self.kept_failure(interceptor))}"
        )

    def untried_refusal(self, failures: Sequence[tuple[str, str]]) -> DriverError:
        """Return the error that refuses a version with which no interceptor works."""
        said = "; ".join(f"with the {name} interceptor: {failure}" for name, failure in failures)
        return DriverError(
            f"{self.framework} {self.installed()} has not been tried with {self.driver}, and its "
            f"self-test failed ({said})",
            where=self.driver,
            fix=f"pip install -U {self.driver}, or pip install "
            f"'{self.distributions[0]}<={self.newest}'",
        )


def cache_folder() -> Path:
    """Return this user's folder for files that can be made again at any time."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser(r"~\AppData\Local")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "amanda")


@functools.cache
def _is_between(version: str, first: str, last: str) -> bool:
    found = _FORM.match(version)
    if found is None or re.match(r"\.?(a|b|rc|dev)", found.group(4)):
        return False
    return _order(first) <= _order(version) <= _order(last)


def _order(version: str) -> tuple[int, int, int]:
    found = _FORM.match(version)
    if found is None:
        return (sys.maxsize, 0, 0)  # An unknown form counts as newer than all.
    return (int(found.group(1)), int(found.group(2)), int(found.group(3) or 0))


def _said(failure: str | None) -> str:
    if failure is None:
        return "it runs at the first `apply`"
    return f"failed ({failure})" if failure else "passed"
