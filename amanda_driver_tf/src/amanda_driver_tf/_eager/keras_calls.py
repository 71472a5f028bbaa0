"""The calls of Keras that matter: layers, which are scopes, and optimizers, which end steps.

Owns their replacements, also where Keras is imported later. What a scope is, `scopes` says.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.imports import ImportWatcher
from amanda_core.threads import THREAD
from amanda_driver_tf._eager.frames import BOUNDARY
from amanda_driver_tf._eager.patches import Patch
from amanda_driver_tf._eager.places import Forward
from amanda_driver_tf._eager.scopes import OPTIMIZER, Activation
from amanda_driver_tf._eager.symbols import executes_eagerly, ops
from amanda_driver_tf._state import STATE

__all__ = ["install"]

_LAYER = "keras.src.layers.layer"
_OPTIMIZER = "keras.src.optimizers.base_optimizer"


def install() -> Sequence[Callable[[], None]]:
    """Replace the calls, now or once Keras is imported; gives what undoes it."""
    undo: list[Callable[[], None]] = []
    patches: dict[str, Callable[[Any], Patch]] = {
        _LAYER: lambda module: Patch(
            module.Layer, "__call__", _layer_call(vars(module.Layer)["__call__"])
        ),
        _OPTIMIZER: lambda module: Patch(
            module.BaseOptimizer, "apply", _apply(vars(module.BaseOptimizer)["apply"])
        ),
    }

    def imported(name: str) -> None:
        undo.append(patches[name](sys.modules[name]).undo)

    waiting = [name for name in patches if name not in sys.modules]
    for name in patches:
        if name not in waiting:
            imported(name)
    if waiting:
        watcher = ImportWatcher(waiting, imported)
        watcher.start()
        undo.append(watcher.stop)

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return [undo_all]


def _watching() -> Forward | None:
    """The place of this thread, if it runs the forward program of a session."""
    place = STATE.eager
    if (
        isinstance(place, Forward)
        and place.control.enabled
        and not STATE.quiet
        and not THREAD.routine_depth
        and executes_eagerly()
    ):
        return place
    return None


def _layer_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = _watching()
        if place is None:
            return original(self, *args, **kwargs)
        for value in args:
            if type(value) not in _CONCRETE and _is_symbolic(value):
                return original(self, *args, **kwargs)
        for value in kwargs.values():
            if type(value) not in _CONCRETE and _is_symbolic(value):
                return original(self, *args, **kwargs)
        session, activations = place.session, place.activations
        activation = place.mode.enter(self, activations[-1])
        activations.append(activation)
        try:
            if session.watches_scopes:
                session.enter_scope(activation.scope.path)
            result = original(self, *args, **kwargs)
            session.raise_pending()
            return result
        except BaseException as error:
            # A routine's TypeError that became "unsupported operand" on its way comes out again.
            session.raised(error)
            session.raise_pending()
            raise
        finally:
            if activations[-1] is activation:
                activations.pop()  # Unless the tools were taken back inside the call.
            if session.watches_scopes:
                session.leave_scope(activation.scope.path)

    BOUNDARY.add(__call__.__code__)
    return _left_alone(functools.update_wrapper(__call__, original))


def _left_alone(function: Any) -> Callable[..., Any]:
    # AutoGraph would convert what is called while a function is traced.
    function.autograph_info__ = {}
    return function  # type: ignore[no-any-return]


# What is in most calls, and stands for nothing symbolic.
_CONCRETE = frozenset({ops.EagerTensor, bool, int, float, str, type(None)})


def _is_symbolic(value: Any) -> bool:
    """Whether a model is being put together, and nothing computed."""
    if type(value) in _CONCRETE:
        return False
    if isinstance(value, (list, tuple)):
        return any(_is_symbolic(item) for item in value)
    if isinstance(value, dict):
        return any(_is_symbolic(item) for item in value.values())
    return type(value).__name__ == "KerasTensor"


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = _watching()
        if place is None or place.activations[-1].scope is OPTIMIZER:
            return original(self, *args, **kwargs)
        activations, activation = place.activations, Activation(OPTIMIZER)
        activations.append(activation)
        try:
            result = original(self, *args, **kwargs)
        finally:
            if activations[-1] is activation:
                activations.pop()
        place.mode.session.end_step()
        return result

    return _left_alone(apply)
