"""`callback`: tools in the training loop of a library, made by the distribution amanda-tools.

Here only so that its name and its signature are there without that distribution.
"""

from __future__ import annotations

import importlib
from typing import Any

from amanda_core.engine.tool import Tool

__all__ = ["callback"]


def callback(
    library: str,
    *tools: Tool | str,
    scalars: str | None = None,
    every: int | None = None,
    show: bool = True,
) -> Any:
    """Return a callback that applies tools while a library trains a model.

    Use the callback in a ``with`` statement around the training, so that the tools are removed even
    if an exception leaves it.

    Args:
        library: Name of the library; docs/guides/training-loops.md lists them.
        *tools: Tools, or their names as on the command line, such as ``latency:warmup=2``.
        scalars: Where to log the numbers of the results, by the trainer's global step; None for
            nowhere.
        every: Log them after every so many steps; None for the end of each epoch.
        show: Print the results when a training ends.

    Raises:
        MissingToolsError: amanda-tools is not installed.
        ConfigError: There is no such library, or a tool's name or the target is unknown.
        MissingExtraError: The library, or what logs scalars, is not installed.
    """
    make = importlib.import_module("amanda.tools").callback
    return make(library, *tools, scalars=scalars, every=every, show=show)
