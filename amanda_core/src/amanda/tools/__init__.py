"""The documented paths of the built-in tools, over the distribution amanda-tools: names only."""

from __future__ import annotations

from amanda_core.errors import MissingToolsError

try:
    import amanda_tools.kit.mapping  # noqa: F401  Presence is tested by a submodule.
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "amanda_tools":
        raise
    raise MissingToolsError(
        "The built-in tools are not installed", fix="Run: pip install amanda-tools"
    ) from error

from typing import TYPE_CHECKING

from amanda.tools import mapping

if TYPE_CHECKING:
    from amanda_tools.notebook import load_ipython_extension
    from amanda_tools.training import callback

__all__ = ["callback", "load_ipython_extension", "mapping"]


def __getattr__(name: str) -> object:
    # Imported late, because most programs need neither.
    if name == "callback":
        from amanda_tools.training import callback

        return callback
    if name == "load_ipython_extension":
        from amanda_tools.notebook import load_ipython_extension

        return load_ipython_extension
    raise AttributeError(f"module 'amanda.tools' has no attribute {name!r}")
