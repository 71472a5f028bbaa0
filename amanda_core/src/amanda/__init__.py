"""Amanda: instrumentation of neural networks, operator by operator.

The facade that users import: names only, no logic. `amanda.tools` comes with the distribution
amanda-tools and is imported when it is first used, and so are `amanda.callback` and what IPython
calls for ``%load_ext amanda``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from amanda import tool
from amanda_core import __version__, discovery
from amanda_core.action import IPoint, staged
from amanda_core.activation import (
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
)
from amanda_core.context import OpContext
from amanda_core.errors import AmandaError, AmandaWarning
from amanda_core.tool import Tool

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
    "disabled",
    "enabled",
    "select",
    "staged",
    "step",
    "tool",
]

# Some drivers must be notified before tools are applied. This does not import a framework.
discovery.announce()

if TYPE_CHECKING:
    from amanda import tools as tools
    from amanda.tools import callback as callback
    from amanda_core.selection import Selection, select
    from amanda_core.weights.state import WeightState
else:
    # This includes the names that are imported at their first use.
    __dir__ = partial(sorted, {*globals(), *__all__} - {"discovery", "partial"})
    del discovery, partial

    def __getattr__(name: str) -> object:
        # Imported late, because many tools need neither.
        if name in ("Selection", "select"):
            from amanda_core import selection

            return getattr(selection, name)
        if name == "WeightState":
            from amanda_core.weights import state

            return state.WeightState
        if name in ("callback", "load_ipython_extension"):
            # Of the distribution amanda-tools; `tools` says so if it is not installed.
            from amanda import tools

            return getattr(tools, name)
        if name == "tools":
            import importlib

            return importlib.import_module("amanda.tools")
        raise AttributeError(f"module 'amanda' has no attribute {name!r}")
