"""`HookManager`: pluggy's manager, with cheaper calls of hooks.

Pluggy takes ten calls for one of a hook, some of which run at the first execution of each op. Where
it would only pass the call on, `direct` calls the implementations themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pluggy

__all__ = ["DirectHooks", "HookManager"]


class DirectHooks:
    """Calls of the hooks of a manager, while its plugins and monitors stay the same.

    Each hook is an attribute, which returns None or what all implementations have returned.

    Attributes:
        of_drivers: (plugin, hook) -> what calls the hook of this driver, and what wraps it.
    """

    def __init__(self, manager: HookManager) -> None:
        self._manager = manager
        self.of_drivers: dict[tuple[Any, str], Callable[..., Any]] = {}

    def __getattr__(self, hook: str) -> Callable[..., Any]:
        call = self.call_of(getattr(self._manager.hook, hook))
        setattr(self, hook, call)
        return call

    def call_of(self, caller: pluggy.HookCaller) -> Callable[..., Any]:
        """Return what calls a hook: its only implementation, all of them, or pluggy."""
        found = caller.get_hookimpls()[::-1]  # The last one registered is called first.
        expected = caller.spec.argnames if caller.spec is not None else None
        if self._manager.monitors or any(
            one.wrapper or one.hookwrapper or tuple(one.argnames) != expected for one in found
        ):
            return caller
        functions = [one.function for one in found]
        if len(functions) == 1:
            return functions[0]
        is_first = caller.spec is not None and caller.spec.opts.get("firstresult")
        return caller if is_first else _calling(functions)


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
