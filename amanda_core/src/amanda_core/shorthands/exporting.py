"""`exported`: a model with the edits of tools, as a program of its framework.

Owns which tools are asked, and which driver. What a program is, the driver of the model decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amanda_core.engine.activation import apply
from amanda_core.engine.tool import Tool, check_tool, in_dependency_order
from amanda_core.errors import UnsupportedError
from amanda_core.plugins.discovery import plugin_manager

__all__ = ["exported"]


def exported(model: Any, tool: Tool | Sequence[Tool], /, *args: Any, **kwargs: Any) -> Any:
    """Return a model with the edits of tools, as a program that its framework exports.

    The program computes what the model computes while the tools are applied, and needs no Amanda:
    a ``torch.export.ExportedProgram``, a concrete function of TensorFlow, or what ``jax.export``
    returns. The model itself does not change. Routines that only look are left out.

    Args:
        model: A module or a function.
        tool: The tool, or a list of tools, with what they know: run the model under them first if
            they must see values, as to calibrate.
        *args: Example inputs of the model. The program takes such inputs.
        **kwargs: Others that are given by name.

    Raises:
        UnsupportedError: No installed driver exports such a model, or a tool has a routine that
            cannot become a part of it: one that is not marked with `amanda.staged`. Or a tool that
            edits is restricted to some steps or calls.
    """
    tools: list[Any] = list(tool) if isinstance(tool, (list, tuple)) else [tool]
    for one in tools:
        check_tool(one, "exported")
    with _exporting(in_dependency_order(tools)), apply(*tools):
        program = plugin_manager().hook.amanda_exported(model=model, args=args, kwargs=kwargs)
    if program is None:
        raise UnsupportedError(
            f"No driver exports a {type(model).__name__}",
            where="amanda.exported",
            fix="Give a model or a function of a framework with an installed driver that exports; "
            "`amanda drivers` lists which do",
        )
    return program


@contextmanager
def _exporting(tools: Sequence[Tool]) -> Iterator[None]:
    """Let tools analyse operators again for the export, and once more afterwards."""
    for one in tools:
        one.before_export()
    for one in tools:
        selection = one._amanda.selection
        if selection is not None and selection.phase(0) and one.changes_values is not False:
            raise UnsupportedError(
                f"{one.tool_name} acts in some steps or calls only, and a program has neither",
                where="amanda.exported",
                fix="Remove that restriction with where(None)",
            )
    try:
        for one in tools:
            one.is_exported = True
            one.invalidate()
        yield
    finally:
        for one in tools:
            one.is_exported = False
            one.invalidate()
