"""Zones: which part of a program on JAX runs that is not the model.

Owns the names of the libraries' functions, and which of them call the model again.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import CodeType, FrameType
from typing import Any

from amanda_core.driver_kit import THREAD, local_of, named_zone, zone_of
from amanda_driver_jax import jax_internals as internals

__all__ = ["zone_of_call"]

#: What the dotted name of a function begins with -> the zone of all that it calls.
_ZONES = {
    "optax.": "optimizer",
    # These compute a loss, or call a function that does.
    "optax.losses.": "model",
    "optax.microbatching.": "model",
    "optax.perturbations.": "model",
    "optax.second_order.": "model",
    "jax.example_libraries.optimizers.": "optimizer",
    "keras.src.optimizers.": "optimizer",
    "keras.src.backend.jax.optimizer.": "optimizer",
    "keras.src.callbacks.swap_ema_weights.": "optimizer",
    "keras.src.initializers.": "init",
    "keras.src.metrics.": "metrics",
    "keras.src.trainers.compile_utils.update_state": "metrics",
    "keras.src.trainers.compile_utils.result": "metrics",
    "keras.src.trainers.trainer.compute_metrics": "metrics",
    "flax.nnx.training.metrics.": "metrics",
    "flax.nnx.training.optimizer.": "optimizer",
    "flax.nnx.training.ema.": "optimizer",
    "flax.training.dynamic_scale.": "optimizer",
    "clu.metrics.": "metrics",
    **internals.ZONES,
}
#: Parameters of the optimizers' functions that take a function which runs the model.
_RUN_THE_MODEL = frozenset({"value_fn", "grad_fn", "fun"})


def zone_of_call() -> str:
    """Return which part of a program runs, by the frames around the caller."""
    zone = zone_of(_ZONES)
    return "model" if zone == "optimizer" and not THREAD.zones and _is_closure() else zone


def _is_closure() -> bool:
    """Return True inside a function of the model's that an optimizer calls."""
    frame: FrameType | None = sys._getframe(1)
    passed: set[CodeType] = set()
    while frame is not None:
        code = frame.f_code
        if named_zone(_ZONES, str(frame.f_globals.get("__name__", "")), code.co_name):
            names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
            given = names.intersection(_RUN_THE_MODEL)
            if any(_code_of(local_of(frame, name)) in passed for name in given):
                return True
        else:
            passed.add(code)
        frame = frame.f_back
    return False


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else None
    return getattr(getattr(function, "__func__", function), "__code__", None)
