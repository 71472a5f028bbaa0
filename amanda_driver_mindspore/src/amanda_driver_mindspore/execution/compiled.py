"""Compiled programs: cells in graph mode, and functions of `mindspore.jit`.

MindSpore runs a compiled program in C++. While a tool acts in one, its Python function runs
instead, so that its operators are those of PyNative mode. Where no tool acts, the compiled program
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from mindspore import Tensor, nn

from amanda_core.driver_kit import Known
from amanda_driver_mindspore.execution.eager import PyNativeProgram
from amanda_driver_mindspore.mindspore_internals.programs import SWITCHES

__all__ = ["CompiledPrograms"]


class CompiledPrograms:
    """The compiled programs of one thread.

    Args:
        eager: Executes single operators.
    """

    def __init__(self, eager: PyNativeProgram) -> None:
        self._eager = eager
        #: Program -> its kind of call -> the epoch in which no tool acted there.
        self._idle: Known[dict[Hashable, int]] = Known()

    def run(
        self,
        program: Any,
        as_python: Callable[[], Any],
        compiled: Callable[[], Any],
        arguments: tuple[Any, ...],
    ) -> Any:
        """Run a program, as Python unless it is known that no tool acts there.

        Args:
            program: The cell or function that MindSpore compiles.
            as_python: Runs it as Python.
            compiled: Runs what MindSpore compiled.
            arguments: Its arguments. MindSpore compiles a program for each kind of them.
        """
        eager, session = self._eager, self._eager.session
        epochs = self._idle.get(program)
        if epochs is None:
            self._idle.set(program, epochs := {})
        kind, epoch = _kind(program, arguments), session.epoch
        # A function outside of cells may call outermost ones.
        wants_all = session.wants_backward or session.watches_scopes
        wants_all = wants_all or (session.watches_calls and eager.scope is None)
        if not wants_all and session.caching and epochs.get(kind) == epoch:
            return compiled()
        eager.has_acted, before = False, eager.has_acted
        eager.compiled += 1
        try:
            with SWITCHES.as_python():
                result = as_python()
        finally:
            eager.compiled -= 1
            has_acted, eager.has_acted = eager.has_acted, eager.has_acted or before
        if not has_acted and session.epoch == epoch:
            epochs[kind] = epoch
        return result


def _kind(program: Any, arguments: tuple[Any, ...]) -> Hashable:
    """Return what MindSpore tells compiled programs apart by, where operators depend on it."""
    cells = [one for one in (program, *arguments[:1]) if isinstance(one, nn.Cell)]
    return (*[cell.training for cell in cells], *map(_signature, arguments))


def _signature(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_signature, value))
    if isinstance(value, (bool, int, float, str, type(None))):
        return type(value), value
    return type(value).__qualname__
