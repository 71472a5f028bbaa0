"""The backend interface: the hooks that drivers and other plugins implement.

Owns the signatures of the hooks, without logic. Drivers are found through the entry-point group
``amanda.drivers``, other plugins through ``amanda.plugins``. Both mark their functions with
`hookimpl`. Every hook is called as pluggy does, so a plugin may wrap each. Executions of ops do not
call hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from amanda_core.interface.driver import (
    Attachment,
    DriverInfo,
    DriverStatus,
    Finding,
    IPoint,
    RecordedAction,
    WatchedContext,
    WatchedSession,
)

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("amanda")
hookimpl = pluggy.HookimplMarker("amanda")


@hookspec(firstresult=True)
def amanda_driver_info() -> DriverInfo:  # type: ignore[empty-body]
    """Describe the driver.

    This is called once for each driver, when it is discovered. It must not import the framework.
    Every driver implements it.
    """


@hookspec(firstresult=True)
def amanda_preflight() -> Sequence[Finding]:  # type: ignore[empty-body]
    """Check the environment and return what would make results wrong.

    This is called on request, for each driver. It must not change anything.
    """


@hookspec(firstresult=True)
def amanda_driver_status() -> DriverStatus:  # type: ignore[empty-body]
    """Return the installed version of the framework and the interceptor that would be used.

    `amanda drivers` calls this. It must be fast and must not import the framework. A driver that
    has only one interceptor may leave it out.
    """


@hookspec
def amanda_framework_imported() -> None:
    """Prepare for programs that are built before any tool is applied.

    This is called once for each driver that implements it, when one of `DriverInfo.modules` is
    loaded and `amanda` is imported, whichever comes later. It is meant for drivers that must record
    something while a program is built, because they cannot find it out when the program runs. It
    must not change anything that a user can see.
    """


@hookspec(firstresult=True)
def amanda_attach(session: WatchedSession) -> Attachment | None:
    """Start intercepting operators for `session` in the calling thread.

    This is called for each driver when the session opens, and again after the import of one of
    `DriverInfo.modules`. A driver that declines during an import is called again when the import is
    complete. If it still declines, there is a warning.

    Returns:
        The attachment, whose `detach` is called when the session closes; None to decline, because
        the framework is not loaded.
    """


@hookspec(firstresult=True)
def amanda_exported(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a model with the staged edits of the applied tools, as a program of its framework.

    This is called by `amanda.exported` while the tools are applied, for each driver with the
    capability ``export`` until one returns a program. The driver leaves out routines that only look
    and raises `UnsupportedError` for others that would have to run on the host.

    Args:
        model: A model or a function.
        args: Example inputs.
        kwargs: Others that are given by name.

    Returns:
        The program; None if the model is another framework's.
    """


@hookspec(firstresult=True)
def amanda_model_file(path: str) -> Any:
    """Return a model that stands in a file, for commands such as `amanda export`.

    This is called for each driver with the capability ``export`` until one returns a model. It may
    import the framework, if the name of the file is one of its own.

    Args:
        path: The file.

    Returns:
        A `amanda_core.driver_kit.ModelFile`; None if the file is another framework's.

    Raises:
        ConfigError: The file should be this framework's, and cannot be read.
    """


@hookspec
def amanda_prepare_context(context: WatchedContext) -> None:
    """Add keys to a context that was opened for the first time in its store.

    This is called for every plugin, before any analysis routine. `context.namespace` tells to which
    driver the context belongs.
    """


@hookspec
def amanda_trigger_callback(context: WatchedContext, i_point: IPoint) -> None:
    """Run the analysis of `context` at `i_point`.

    This is called only if the analysis of a tool is due. The core's own implementation runs the
    applied tools in order; a plugin may wrap it.
    """


@hookspec
def amanda_action_recorded(context: WatchedContext, action: RecordedAction) -> None:
    """Observe or refuse an action that an analysis routine requests.

    This is called for every plugin, after the request was checked and before it joins the plan. To
    refuse the action, raise an exception: it propagates to the analysis routine that requested it.
    The core's own implementation refuses a second replacement of an op.
    """
