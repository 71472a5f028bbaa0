"""The backend interface: the hooks that drivers and other plugins implement.

One signature a hook and no logic. A driver is found through the entry-point group
``amanda.drivers``, any other plugin through ``amanda.plugins``; both mark their functions with
`hookimpl`. Every hook is called through pluggy, so a plugin may wrap each. No hook is called per
execution of an op: a planned op never goes through pluggy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amanda_core.action import Action, IPoint
    from amanda_core.context import OpContext
    from amanda_core.driver import Attachment, DriverInfo, DriverStatus, Finding
    from amanda_core.session import Session

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("amanda")
hookimpl = pluggy.HookimplMarker("amanda")


@hookspec(firstresult=True)
def amanda_driver_info() -> DriverInfo:  # type: ignore[empty-body]
    """Describe the driver.

    Called once for each driver, when it is discovered; must not import the framework. Every driver
    implements it.
    """


@hookspec(firstresult=True)
def amanda_preflight() -> Sequence[Finding]:  # type: ignore[empty-body]
    """Look at the environment and say what in it would make results wrong.

    Called on request, for each driver, and must not change anything.
    """


@hookspec(firstresult=True)
def amanda_driver_status() -> DriverStatus:  # type: ignore[empty-body]
    """Say which version of the framework is installed, and by which interceptor it is seen.

    Called on request, by `amanda drivers`; must not import the framework, nor take longer than a
    moment. A driver that has only one interceptor may leave it out.
    """


@hookspec
def amanda_framework_imported() -> None:
    """Prepare for programs that are built before any tool is applied.

    Called once for each driver that has it, when one of `DriverInfo.modules` is loaded and
    `amanda` is imported, whichever comes later. For a driver that must note, while a program is
    built, what it cannot find out when the program runs; others leave it out. It must change
    nothing that a user can see.
    """


@hookspec(firstresult=True)
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting operators for `session` in the calling thread.

    Called for each driver when the session opens, and again after the import of one of
    `DriverInfo.modules`. Who declines during an import is asked again when that is complete; that
    it still declines is a warning.

    Returns:
        The attachment, whose `detach` is called when the session closes; None where the framework
        is not loaded.
    """


@hookspec
def amanda_prepare_context(context: OpContext) -> None:
    """Add keys to a context that was opened for the first time in its store.

    Called for every plugin, before any analysis routine. `context.namespace` tells whose it is.
    """


@hookspec
def amanda_trigger_callback(context: OpContext, i_point: IPoint) -> None:
    """Run the analysis of `context` at `i_point`.

    The core's own implementation runs the applied tools in order; a plugin may wrap it. Called
    only when some tool's analysis is due.
    """


@hookspec
def amanda_action_recorded(context: OpContext, action: Action) -> None:
    """Look at what an analysis routine asks for.

    Called for every plugin, after the request itself was checked and before it joins the plan. An
    exception refuses it, and leaves the analysis routine where it asked. The core's own
    implementation refuses a second replacement of an op.
    """
