"""Amanda: instrumentation of neural networks, operator by operator.

The facade that users import: names only, no logic. `amanda.tools` comes with the distribution
amanda-tools and is imported when it is first used, and so is what IPython calls for
``%load_ext amanda``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from amanda import tool
from amanda_core import __version__
from amanda_core.engine.action import IPoint, staged
from amanda_core.engine.activation import (
    Handle,
    apply,
    attach,
    autodiff_disabled,
    autodiff_enabled,
    cache_disabled,
    cache_enabled,
    disabled,
    enabled,
    step,
    zone,
)
from amanda_core.engine.context import OpContext
from amanda_core.engine.tool import Tool
from amanda_core.errors import AmandaError, AmandaWarning
from amanda_core.plugins.framework_imports import announce

__all__ = [
    "AmandaError",
    "AmandaWarning",
    "Handle",
    "IPoint",
    "OpContext",
    "Selection",
    "Tool",
    "WeightState",
    "__version__",
    "apply",
    "attach",
    "autodiff_disabled",
    "autodiff_enabled",
    "cache_disabled",
    "cache_enabled",
    "callback",
    "disabled",
    "edit",
    "enabled",
    "exported",
    "look",
    "on",
    "select",
    "staged",
    "step",
    "tool",
    "zone",
]

# Some drivers must be notified before tools are applied. This does not import a framework.
announce()

if TYPE_CHECKING:
    from amanda import tools as tools
    from amanda_core.engine.selection import Selection, select
    from amanda_core.shorthands.exporting import exported
    from amanda_core.shorthands.function_tools import edit, look, on
    from amanda_core.shorthands.training_callbacks import callback
    from amanda_core.weights.state import WeightState
else:
    # This includes the names that are imported at their first use.
    __dir__ = partial(sorted, {*globals(), *__all__} - {"announce", "partial"})
    del announce, partial

    def __getattr__(name: str) -> object:
        # Imported late, because many programs need none of them.
        if name in ("edit", "look", "on"):
            from amanda_core.shorthands import function_tools

            return getattr(function_tools, name)
        if name == "exported":
            from amanda_core.shorthands import exporting

            return exporting.exported
        if name in ("Selection", "select"):
            from amanda_core.engine import selection

            return getattr(selection, name)
        if name == "WeightState":
            from amanda_core.weights import state

            return state.WeightState
        if name == "callback":
            from amanda_core.shorthands import training_callbacks

            return training_callbacks.callback
        if name == "load_ipython_extension":
            # Of the distribution amanda-tools; `tools` says so if it is not installed.
            from amanda import tools

            return tools.load_ipython_extension
        if name == "tools":
            import importlib

            return importlib.import_module("amanda.tools")
        raise AttributeError(f"module 'amanda' has no attribute {name!r}")
