"""`HookManager`: pluggy's manager, with calls for hooks that run at the first execution of each op.

Pluggy takes ten calls for one of a hook. Where it would only pass the call on, `direct` calls the
implementations themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pluggy

__all__ = ["DirectHooks", "HookManager"]


class DirectHooks:
    """Calls of hooks whose results nobody reads; an attribute for each, which is kept."""

    def __init__(self, manager: HookManager) -> None:
        self._manager = manager

    def __getattr__(self, hook: str) -> Callable[..., object]:
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        found = caller.get_hookimpls()[::-1]  # The last one registered is called first.
        expected = caller.spec.argnames if caller.spec is not None else None
        call: Callable[..., object] = caller
        if not self._manager.monitors and not any(
            one.wrapper or one.hookwrapper or tuple(one.argnames) != expected for one in found
        ):
            functions = [one.function for one in found]
            call = functions[0] if len(functions) == 1 else _calling(functions)
        setattr(self, hook, call)
        return call


def _calling(functions: list[Callable[..., object]]) -> Callable[..., None]:
    def call(**arguments: Any) -> None:
        for function in functions:
            function(**arguments)

    return call


class HookManager(pluggy.PluginManager):
    """A plugin manager.

    Attributes:
        direct: Its hooks, called without pluggy where no plugin wraps and nothing monitors them.
        monitors: How many monitors of calls there are.
    """

    def __init__(self, project_name: str) -> None:
        super().__init__(project_name)
        self.monitors, self.direct = 0, DirectHooks(self)

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        """Register a plugin, as pluggy does."""
        try:
            return super().register(plugin, name)
        finally:
            self.direct = DirectHooks(self)  # A new one: another thread may be filling the old.

    def unregister(self, plugin: Any = None, name: str | None = None) -> Any:
        """Unregister a plugin, as pluggy does."""
        try:
            return super().unregister(plugin, name)
        finally:
            self.direct = DirectHooks(self)

    def add_hookcall_monitoring(self, *monitor: Any, **named: Any) -> Callable[[], None]:
        """Call functions before and after each call of a hook, as pluggy does."""
        undo = super().add_hookcall_monitoring(*monitor, **named)
        self.monitors += 1
        self.direct = DirectHooks(self)

        def undone() -> None:
            undo()
            self.monitors -= 1
            self.direct = DirectHooks(self)

        return undone
