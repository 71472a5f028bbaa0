"""The choice between the interceptors of a driver.

Owns the rules for a driver that has an optional native interceptor and one in Python: which of the
two is used and why, when a version of the framework is refused, and the messages about both.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from amanda_core.driver_kit.framework_versions import FrameworkVersions
from amanda_core.errors import AmandaError, DriverError, UnsupportedError
from amanda_core.interface.driver import DriverStatus, Finding

__all__ = ["NATIVE", "Choice", "Extension", "Interceptors", "load_extension"]

#: Name of the native interceptor, which is used if it is built.
NATIVE = "native"


class Choice(NamedTuple):
    """The interceptor that is used.

    Attributes:
        name: Its name.
        why: A sentence that says why this one is used.
    """

    name: str
    why: str


class Extension(NamedTuple):
    """The state of a driver's native extension.

    Attributes:
        missing: Why it cannot be used; None if it can.
        built: A sentence about it, if it can be used.
    """

    missing: str | None
    built: str


def load_extension(name: str) -> tuple[Any, str]:
    """Import a driver's native extension; return it, or None and why it cannot be used.

    A free-threaded Python gets none, whatever was built: the extensions change what threads share
    under the interpreter's lock.
    """
    if "free-threading build" in sys.version:
        return None, "the extension relies on the GIL, which this free-threaded Python lacks"
    try:
        return importlib.import_module(name), ""
    except ImportError as error:
        return None, f"the extension was not built, or does not fit this Python ({error})"


class _Attachable(Protocol):
    def attach(self) -> None: ...

    def detach(self) -> None: ...


_A = TypeVar("_A", bound=_Attachable)


@dataclass(frozen=True, eq=False)  # Its hash is taken whenever tools are applied.
class Interceptors:
    """The two interceptors of a driver.

    Attributes:
        versions: The versions of the framework that the driver works with.
        python: Name of the interceptor in Python, which is always available.
        extension: Returns the state of the native one. It is called late, because it may run a
            self-test.
        operators: The operators that pass through them, as the subject of a sentence.
    """

    versions: FrameworkVersions
    python: str
    extension: Callable[[], Extension]
    operators: str

    @property
    def names(self) -> tuple[str, str]:
        """The names of both, the preferred one first."""
        return (NATIVE, self.python)

    def choice(self) -> Choice:
        """Return the interceptor that a session would use now, and why.

        Raises:
            UnsupportedError: The one that the environment variable requests is not available.
        """
        chosen = self._choose()
        note = self.versions.note(chosen.name)
        return chosen._replace(why=f"{chosen.why}. {note}") if note else chosen

    def require_supported(self) -> None:
        """Refuse a framework that is too old, or one with which no interceptor works.

        Raises:
            DriverError: Names the version, what failed, and what to do.
            UnsupportedError: The one that the environment variable requests is not available.
        """
        refusal = self.versions.refusal()
        if refusal is not None:
            raise refusal
        chosen = self.choice()
        failure = "" if chosen.name == NATIVE else self.versions.failure(chosen.name)
        if failure:
            raise self._neither(failure)

    def attach(self, make: Callable[[], _A]) -> _A:
        """Make and attach an attachment; if that fails, restore everything.

        Args:
            make: Makes the attachment.

        Raises:
            AmandaError: The framework is not supported, or the attachment refused.
        """
        _require_supported(self)
        try:
            attachment = make()
            try:
                attachment.attach()
            except BaseException:
                attachment.detach()
                raise
        except AmandaError:
            raise
        except Exception as error:
            if self.versions.is_tried():
                raise
            failure = f"{type(error).__name__}: {error}"
            raise self.versions.untried_refusal([(self.choice().name, failure)]) from error
        return attachment

    def status(self) -> DriverStatus:
        """Return the status that `amanda drivers` shows, without running a self-test."""
        versions = self.versions
        version, refusal = versions.installed(), versions.refusal()
        if version is None:
            return DriverStatus(None, "", f"{versions.framework} is not installed")
        if refusal is not None:
            return DriverStatus(version, "", "", refusal.what)
        if not versions.is_tried() and versions.kept_failure(NATIVE) is None:
            return DriverStatus(version, "", versions.note(NATIVE))
        try:
            chosen = self.choice()
        except UnsupportedError as error:
            return DriverStatus(version, "", "", error.what)
        failure = versions.kept_failure(chosen.name) if chosen.name != NATIVE else ""
        if failure and os.environ.get(versions.variable) != chosen.name:
            return DriverStatus(version, "", "", self._neither(failure).what)
        return DriverStatus(version, chosen.name, chosen.why)

    def findings(self) -> list[Finding]:
        """Return what a preflight says of the installed version and of the interceptor.

        The self-tests of a version that was not tried are run. An error means that nothing can be
        applied here.
        """
        versions = self.versions
        outcomes: list[tuple[str, str | None]] = []
        for name in self.names:
            outcomes.append((name, versions.failure(name)))
            if not outcomes[-1][1]:
                break
        findings = versions.describe(outcomes)
        if any(finding.severity == "error" for finding in findings):
            return findings
        try:
            name, why = self.choice()
        except UnsupportedError as error:
            return [*findings, Finding("error", error.what, error.fix)]
        said = f"{self.operators} pass through the {name} interceptor. {why}"
        return [Finding("info", said), *findings]

    def _neither(self, failure: str) -> DriverError:
        """Return the error where no interceptor works, given the failure of that in Python."""
        missing = self.extension().missing or ""
        return self.versions.untried_refusal([(NATIVE, missing), (self.python, failure)])

    def _choose(self) -> Choice:
        variable, driver = self.versions.variable, self.versions.driver
        asked = os.environ.get(variable)
        if asked and asked not in self.names:
            raise UnsupportedError(
                f"{variable}={asked} is not the name of an interceptor",
                where=driver,
                fix=f"Use one of: {', '.join(self.names)}",
            )
        missing, built = self.extension()
        if asked == NATIVE and missing is not None:
            raise UnsupportedError(
                f"{variable}={NATIVE}, but {missing}",
                where=driver,
                fix=f"Install a compiler and reinstall {driver}, or unset the variable",
            )
        if asked:
            return Choice(asked, f"{variable} asks for it")
        if missing is not None:
            return Choice(self.python, f"The native interceptor cannot be used: {missing}")
        return Choice(NATIVE, built)


@functools.cache  # An error is not cached: it is raised again at the next `apply`.
def _require_supported(interceptors: Interceptors) -> None:
    interceptors.require_supported()
