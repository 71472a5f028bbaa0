"""The hooks of a driver that declares itself in its table, ``driver.toml``.

Owns what such hooks do: the description, the check of the framework's version, the refusal to
attach where results would be wrong, and the keys of the driver's own contexts. It is for drivers
that have one interceptor; `amanda_core.driver_kit.interceptors` is for those that have two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from amanda_core.driver_kit.declarations import Declarations
from amanda_core.driver_kit.framework_versions import FrameworkVersions
from amanda_core.engine.context import OpContext
from amanda_core.engine.session import Session
from amanda_core.errors import DriverError
from amanda_core.interface.driver import Attachment, DriverInfo, DriverStatus, Finding
from amanda_core.interface.hookspecs import hookimpl

__all__ = ["DeclaredHooks"]


#: The name of the interceptor, for messages and for the environment variable.
_PYTHON = "python"


def _no_problems() -> list[Finding]:
    return []


class DeclaredHooks:
    """The hooks of a driver; its plugin is this, or a module with these methods as functions.

    Attributes:
        versions: The versions of the framework that the driver works with.

    Args:
        declarations: The table of the driver, with a part ``framework``.
        describe: Sets the common keys of the context of an op of this driver.
        attachment: Imports what needs the framework, and returns the class of attachments.
        problems: Returns what else of this environment would make results wrong.
    """

    def __init__(
        self,
        declarations: Declarations,
        describe: Callable[[OpContext], object],
        attachment: Callable[[], Callable[[Session], Attachment]],
        problems: Callable[[], list[Finding]] = _no_problems,
    ) -> None:
        framework, self._info = declarations.framework, declarations.info
        # Like a module's: warnings point to the program, past the frames of this package.
        self.__name__ = declarations.package
        self._describe, self._attachment, self._problems = describe, attachment, problems
        self._complete, self._interception = framework["complete"], framework["interception"]
        self.versions = FrameworkVersions(
            framework=framework["name"],
            module=self._info.modules[0],
            distributions=tuple(framework.get("distributions", "").split()) or self._info.modules,
            oldest=framework["oldest"],
            newest=framework["newest"],
            driver=declarations.package.replace("_", "-"),
            variable=f"AMANDA_{self._info.name.upper()}_INTERCEPTOR",
            self_test=framework.get("self_test", ""),
            first=framework.get("first", ""),
        )

    def is_loaded(self) -> bool:
        """Return True if the import of the framework is done."""
        return hasattr(sys.modules.get(self.versions.module), self._complete)

    @hookimpl
    def amanda_driver_info(self) -> DriverInfo:
        """Describe the driver."""
        return self._info

    @hookimpl
    def amanda_preflight(self) -> Sequence[Finding]:
        """Look for problems of this environment that would make results wrong."""
        return self._findings(self.versions.failure)

    @hookimpl
    def amanda_driver_status(self) -> DriverStatus:
        """Report which version is installed, and whether tools can be applied.

        It does not run a self-test.
        """
        problem = _error(self._findings(self.versions.kept_failure))
        version = self.versions.installed()
        if problem is not None and version is not None:
            return DriverStatus(version, "", "", problem.message)
        note = self.versions.note(_PYTHON) if self.versions.self_test else ""
        why = f"{self._interception}. {note}" if note else self._interception
        return self.versions.status(_PYTHON, why)

    @hookimpl
    def amanda_attach(self, session: Session) -> Attachment | None:
        """Start intercepting in the calling thread; return None if the framework is not loaded."""
        if not self.is_loaded():
            return None
        problem = _error(self._findings(self.versions.failure))
        if problem is not None:
            raise DriverError(problem.message, where=self.versions.driver, fix=problem.fix)
        with self.versions.refusing_unknown():
            make = self._attachment()
        return make(session)

    @hookimpl
    def amanda_prepare_context(self, context: OpContext) -> None:
        """Set the common keys of the context of an op of this driver."""
        if context.namespace.startswith(f"{self._info.name}/"):
            self._describe(context)

    def _findings(self, outcome: Callable[[str], str | None]) -> list[Finding]:
        """Return the findings of a preflight; `outcome` returns what the self-test said."""
        tested = [(_PYTHON, outcome(_PYTHON))] if self.versions.self_test else []
        found = self.versions.describe(tested)
        # Of an environment without a usable framework nothing else can be said.
        return found if _error(found) else [*found, *self._problems()]


def _error(findings: Sequence[Finding]) -> Finding | None:
    return next((one for one in findings if one.severity == "error"), None)
