"""Findings that make the results of a run empty or wrong, as sentences."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from amanda_core.engine.activation import Handle
from amanda_core.engine.tool import Tool
from amanda_core.plugins import discovery
from amanda_core.plugins.preflight import preflight

__all__ = ["idle", "of", "skipped"]

#: How many values that several tools changed are named.
_CONFLICTS = 5
#: How many operators are named if none was selected.
_NAMED = 5


def idle(tools: Mapping[str, Tool], handle: Handle, is_refused: bool = False) -> Iterator[str]:
    """Describe the tools that got no operator, and what to do; called before the end.

    Args:
        tools: The tools by name.
        handle: Where they are applied.
        is_refused: Whether a driver refused to attach, which ended the program.
    """
    for name, tool in tools.items():
        known = tool._amanda
        if known.analysed or not any(known.routines.values()):
            continue
        session, frameworks = handle.session, [*handle.coverage()]
        forward = [c for c in session.contexts() if not c._backward] if session else []
        # Operators of initialisation come first, and are rarely wanted.
        ran = [c.name for c in sorted(forward, key=lambda c: c.zone != "model")]
        declined = [
            f"{driver.loaded[0]} (driver {driver.info.name})"
            for driver in discovery.drivers()
            if driver.loaded and driver.info.name not in frameworks
        ]
        if not frameworks and declined:
            why = (
                f"{', '.join(declined)} was loaded, but its driver did not attach. `amanda "
                "doctor` may say why"
            )
        elif discovery.plugins().without_drivers:
            why = f"{discovery.plugins().without_drivers} lets no driver attach"
        elif not frameworks and is_refused:
            why = "the framework's driver refused to attach, as the error below says"
        elif not frameworks:
            why = "the program loaded no framework of those that `amanda drivers` lists"
        elif known.selection is None or not ran:
            why = (
                f"the program ran none of {', '.join(frameworks)} in the threads that are "
                "instrumented"
            )
            if known.unseen.forks:
                why += ", and processes that it forked run without tools: start them by 'spawn'"
        else:
            some = ", ".join([*ran[:_NAMED], *(["..."] if len(ran) > _NAMED else [])])
            why = (
                f"{known.selection} has none of those that ran ({some}). Widen --ops, "
                "--modules, --steps, --calls or `select`"
            )
        yield f"{name} was given no operator: {why}"


def skipped(handle: Handle) -> Iterator[str]:
    """Describe the operators that were skipped after a driver failed there; called before the
    end.
    """
    session = handle.session
    for framework in handle.coverage() if session is not None else ():
        assert session is not None
        for left_out in session.failures.coverage(framework):
            yield f"{left_out.what} was left out: {left_out.why}"


def of(handle: Handle) -> Iterator[str]:
    """Yield what else makes results wrong: values that several tools changed, and imports that the
    program made before its framework.
    """
    conflicts = handle.conflicts()
    for conflict in conflicts[:_CONFLICTS]:
        yield f"warning: {conflict}"
    if len(conflicts) > _CONFLICTS:
        yield f"warning: {len(conflicts) - _CONFLICTS} more values that several tools changed"
    for driver in discovery.drivers():
        if any(module in sys.modules for module in driver.info.modules):
            for finding in preflight(driver):
                if finding.severity != "info":
                    fix = f". {finding.fix}" if finding.fix else ""
                    yield f"{finding.severity}: {finding.message}{fix}"
