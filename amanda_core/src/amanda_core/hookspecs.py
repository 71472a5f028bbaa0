"""The backend interface: the hooks that a driver, a pluggy plugin, implements.

One signature a hook and no logic. A plugin is found through the entry-point group
``amanda.drivers`` and marks its functions with `hookimpl`. No hook is called per execution of an
op: a planned op never goes through pluggy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amanda_core.action import IPoint
    from amanda_core.context import OpContext
    from amanda_core.driver import Attachment, DriverInfo, Finding
    from amanda_core.session import Session

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("amanda")
hookimpl = pluggy.HookimplMarker("amanda")


@hookspec
def amanda_driver_info() -> DriverInfo:  # type: ignore[empty-body]
    """Describe the driver.

    Called once when the plugin is discovered; must not import the framework. Every driver
    implements it.
    """


@hookspec
def amanda_preflight() -> Sequence[Finding]:  # type: ignore[empty-body]
    """Look at the environment and say what in it would make results wrong.

    Called on request, and must not change anything. The lists of all drivers are joined.
    """


@hookspec
def amanda_framework_imported() -> None:
    """Prepare for programs that are built before any tool is applied.

    Called once, when one of `DriverInfo.modules` is loaded and `amanda` is imported, whichever
    comes later. For a driver that must note, while a program is built, what it cannot find out
    when the program runs; others leave it out. It must change nothing that a user can see.
    """


@hookspec
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting operators for `session` in the calling thread.

    Called when the session opens, and again after the import of one of `DriverInfo.modules`.

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
