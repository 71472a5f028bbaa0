"""Calls of Keras: layers, which are scopes, and optimizers, which end steps.

Owns their replacements, also if Keras is imported later.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import (
    MODULE_INPUT,
    MODULE_OUTPUT,
    THREAD,
    Activation,
    ImportWatcher,
    Patches,
)
from amanda_driver_tf.execution.eager.layer_values import show_value
from amanda_driver_tf.identity.frames import BOUNDARY
from amanda_driver_tf.identity.namespaces import EAGER
from amanda_driver_tf.identity.places import Forward
from amanda_driver_tf.identity.rules import OPTIMIZER
from amanda_driver_tf.interception.replicas import Replica
from amanda_driver_tf.tensorflow_internals.modules import ops
from amanda_driver_tf.tensorflow_internals.tapes import executes_eagerly
from amanda_driver_tf.threads import STATE, joins

__all__ = ["replace"]


def replace(patches: Patches) -> None:
    """Replace the calls, now or once Keras is imported, until the patches are undone."""

    def imported(name: str) -> None:
        owner, method, make = _CALLS[name]
        kind = getattr(sys.modules[name], owner)
        patches.replace(kind, method, make(vars(kind)[method]))

    waiting = [name for name in _CALLS if name not in sys.modules]
    for name in _CALLS:
        if name not in waiting:
            imported(name)
    if waiting:
        watcher = ImportWatcher(waiting, imported)
        patches.afterwards(watcher.stop)
        watcher.start()


def _watching() -> Forward | None:
    """Return the place of this thread if it runs an instrumented forward program."""
    place = STATE.eager
    if place is None and joins(None):
        place = STATE.eager
    if (
        isinstance(place, Forward)
        and place.control.enabled
        and not STATE.quiet
        and not THREAD.control.routine_depth
        and executes_eagerly()
    ):
        return place
    return None


_Entered = tuple[Forward, Activation]


def _layer_call(original: Callable[..., Any]) -> Callable[..., Any]:
    # At every op TensorFlow determines the lines of all frames, and Python finds a line by scanning
    # the code from its start. So there is only little code before the call.
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        entered = _enter(self, args, kwargs)
        try:
            if entered is not None and entered[0].session.watches_values:
                args, kwargs = show_value(*entered, MODULE_INPUT, (args, kwargs))
                result = original(self, *args, **kwargs)
                result = show_value(*entered, MODULE_OUTPUT, result)
            else:
                result = original(self, *args, **kwargs)
            if entered is not None:
                entered[0].session.raise_pending()
            return result
        except BaseException as error:
            if entered is not None:
                _raised(entered, error)
            raise
        finally:
            if entered is not None:
                _leave(entered)

    BOUNDARY.add(__call__.__code__)
    return _left_alone(functools.update_wrapper(__call__, original))


def _enter(layer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Entered | None:
    """Enter the scope of a layer, if it is called in an instrumented forward program."""
    place = _watching()
    if place is None:
        return None
    for value in args:
        if type(value) not in _CONCRETE and _is_symbolic(value):
            return None
    for value in kwargs.values():
        if type(value) not in _CONCRETE and _is_symbolic(value):
            return None
    activations = place.activations
    activation = place.program.enter(layer, activations[-1])
    is_outermost = not activations[-1].scope.root
    activations.append(activation)
    entered, session = (place, activation), place.session
    if session.watches_scopes or session.watches_calls:
        try:
            if session.watches_calls and is_outermost:
                session.calls.enter(EAGER, activation.scope.root, args, kwargs)
            if session.watches_scopes:
                session.enter_scope(activation.scope.path)
        except BaseException as error:
            try:
                _raised(entered, error)
                raise
            finally:
                _leave(entered)
    return entered


def _raised(entered: _Entered, error: BaseException) -> None:
    # Python may have turned a routine's TypeError into "unsupported operand".
    session = entered[0].session
    session.raised(error)
    session.raise_pending()


def _leave(entered: _Entered) -> None:
    place, activation = entered
    if place.activations[-1] is activation:
        place.activations.pop()  # Unless the tools were removed inside the call.
    if place.session.watches_scopes:
        place.session.leave_scope(activation.scope.path)
    if place.session.watches_calls and not place.activations[-1].scope.root:
        place.session.calls.leave()


def _left_alone(function: Any) -> Callable[..., Any]:
    # AutoGraph would otherwise convert the function while another one is traced.
    function.autograph_info__ = {}
    return function  # type: ignore[no-any-return]


# Types of most arguments, which are never symbolic.
_CONCRETE = frozenset({ops.EagerTensor, bool, int, float, str, type(None)})


def _is_symbolic(value: Any) -> bool:
    """Return True if a model is being built from a symbolic tensor, without computing anything."""
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
        if type(place) is not Replica or place.is_last:
            place.program.session.end_step()
        return result

    return _left_alone(apply)


# Module -> class, method and wrapper; for Keras 3, and for tf_keras, which is Keras 2.
_CALLS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "keras.src.layers.layer": ("Layer", "__call__", _layer_call),
    "keras.src.optimizers.base_optimizer": ("BaseOptimizer", "apply", _apply),
    "tf_keras.src.engine.base_layer": ("Layer", "__call__", _layer_call),
    "tf_keras.src.optimizers.optimizer": ("Optimizer", "apply_gradients", _apply),
    "tf_keras.src.optimizers.legacy.optimizer_v2": ("OptimizerV2", "apply_gradients", _apply),
}
