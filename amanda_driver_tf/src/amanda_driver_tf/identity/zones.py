"""Zones: which part of a program on TensorFlow runs that is not the model.

Owns the names of the functions that decide it, for frames of the interpreter and for those that a
graph keeps of each op.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from amanda_core.driver_kit import STOP, local_of, named_zone
from amanda_driver_tf.identity.frames import LAYERS, kind_of
from amanda_driver_tf.tensorflow_internals.modules import context, ops
from amanda_driver_tf.tensorflow_internals.names import (
    INITIALIZES_VARIABLES,
    MODULES_OF_GRADIENTS,
    ZONES_OF_TENSORFLOW,
)

__all__ = ["mark_nodes", "zone_of", "zone_of_node"]

#: What the dotted name of a function begins with -> the zone of all that it calls, classes of
#: users that are called by it included.
_ZONES = {
    "keras.src.optimizers.": "optimizer",
    "keras.src.backend.tensorflow.optimizer": "optimizer",
    "keras.src.callbacks.swap_ema_weights.": "optimizer",
    "keras.src.initializers.": "init",
    "keras.src.metrics.": "metrics",
    "keras.src.trainers.compile_utils.update_state": "metrics",
    "keras.src.trainers.compile_utils.result": "metrics",
    "keras.src.trainers.compile_utils.reset_state": "metrics",
    "keras.src.trainers.trainer.compute_metrics": "metrics",
    "tf_keras.src.optimizers.": "optimizer",
    # They call the loss that was passed as a function.
    "tf_keras.src.optimizers.optimizer.compute_gradients": "model",
    "tf_keras.src.initializers.": "init",
    "tf_keras.src.metrics.": "metrics",
    "tf_keras.src.engine.training.compute_metrics": "metrics",
    "tf_keras.src.engine.compile_utils.update_state": "metrics",
    **ZONES_OF_TENSORFLOW,
    "keras.src.trainers.data_adapters.": "data",
    "tf_keras.src.engine.data_adapter.": "data",
    # Gradients belong to the model, even if an optimizer requests them.
    **dict.fromkeys(MODULES_OF_GRADIENTS, "model"),
}
_METHODS_OF_METRICS = frozenset({"update_state", "result", "reset_state"})
_UPDATES = re.compile(r"(Resource)?(Sparse)?Apply[A-Z]|ResourceSparseApply")


#: Graph -> name of an op -> the zone that the program had marked when it was made.
_MARKED: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def mark_nodes(zone: str) -> Callable[[], None]:
    """Let the ops that are now added to a graph belong to a zone; return a function that ends this.

    It may be called again. An inner zone has ended before, so what it marked stays.
    """
    if context.executing_eagerly():
        return lambda: None
    graph = ops.get_default_graph()
    known = weakref.ref(graph), graph.num_operations()

    def leave() -> None:
        nonlocal known
        graph = known[0]()
        if graph is not None:
            marked = _MARKED.setdefault(graph, {})
            for op in graph.get_operations()[known[1] :]:
                marked.setdefault(op.name, zone)
            known = known[0], graph.num_operations()

    return leave


def zone_of() -> str:
    """Return the zone that runs, by the frames from the call up to that of a layer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and kind_of(frame.f_code, frame.f_globals) != STOP:
        name = frame.f_code.co_name
        if zone := _zone_of(str(frame.f_globals.get("__name__", "")), name):
            return zone
        if name in ("build", "__init__") and _is_a("Layer", LAYERS, frame):
            return "init"
        if name in _METHODS_OF_METRICS and _is_a("Metric", _METRICS, frame):
            return "metrics"
        frame = frame.f_back
    return "model"


def zone_of_node(op: Any, functions: Iterable[tuple[str, str]]) -> str:
    """Return the zone of an op of a graph, such as ``optimizer``; ``model`` if it has no other.

    Args:
        op: The op.
        functions: Module and name of each function that was running when it was made, innermost
            first; the module is an empty string for files of the user.
    """
    if (marked := _MARKED.get(op.graph)) and op.name in marked:
        return marked[op.name]
    for module, name in functions:
        if module in LAYERS and name == "__call__":
            break
        if zone := _zone_of(module, name):
            return zone
    return "optimizer" if _UPDATES.match(op.type) else "model"


def _zone_of(module: str, name: str) -> str:
    return "init" if name == INITIALIZES_VARIABLES else named_zone(_ZONES, module, name)


_METRICS = ("keras.src.metrics.metric", "tf_keras.src.metrics.base_metric")


def _is_a(base: str, modules: tuple[str, ...], frame: FrameType) -> bool:
    """Return True if the first argument of a running function is an instance of a class."""
    code = frame.f_code
    owner: Any = local_of(frame, code.co_varnames[0]) if code.co_argcount else None
    loaded = [sys.modules[name] for name in modules if name in sys.modules]
    return any(isinstance(owner, getattr(module, base)) for module in loaded)
