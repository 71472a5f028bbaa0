"""The documented paths of the built-in tools, over the distribution amanda-tools: names only."""

from __future__ import annotations

from amanda_core.errors import MissingToolsError

try:
    import amanda_tools.mapping  # noqa: F401  Presence is tested by a submodule.
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "amanda_tools":
        raise
    raise MissingToolsError(
        "The built-in tools are not installed", fix="Run: pip install amanda-tools"
    ) from error

from amanda.tools import mapping

__all__ = ["mapping"]
