"""Twins: the instrumented functions that run instead of the originals, kept for an epoch.

Owns their lifetime. A twin is dropped with its original, or when newer epochs replace it; the
functions written for it are then removed from TensorFlow. Holds no graph.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import Any

from amanda_driver_tf.graphs.analysis import OpPlans
from amanda_driver_tf.graphs.function_graphs import GRAPHS
from amanda_driver_tf.insertion.function_def_writing import Written
from amanda_driver_tf.insertion.host_functions import HostFunction
from amanda_driver_tf.tensorflow_internals.modules import context

__all__ = ["UNKNOWN", "Gradients", "Twin", "Twins", "remove"]

#: Graph of a gradient function -> indices among the new results of its forward function.
Gradients = weakref.WeakKeyDictionary[Any, list[int]]

_NUMBERS = itertools.count(1)

#: Marks a function that was not analysed yet.
UNKNOWN: Any = object()

# How many epochs may keep a twin of the same function.
_EPOCHS_KEPT = 4


class Twin:
    """An instrumented function that runs instead of the original.

    Attributes:
        name: Name of the instrumented function.
        results: How many results it has beyond those of the original.
        gradients: Graph of a gradient function -> which of these results it takes.
        takes: Whether it takes results of the forward function's twin as arguments.
        watched: Whether routines will run when its gradient is computed.
        is_edited: Whether inserted routines may change a value, rather than only observe.
        is_aligned: Whether gradients of forward ops are edited.
        number: Identifies the twin.
        plans: The plans of its ops, for its gradients, before which tools may change.
        definition: FunctionDef of the original, which may be gone before its gradients.
    """

    def __init__(
        self,
        name: bytes,
        written: Written,
        results: int = 0,
        gradients: Gradients | None = None,
        takes: bool = False,
        watched: bool = False,
        is_edited: bool = False,
        is_aligned: bool = False,
        definition: Any = None,
        plans: dict[tuple[str, str], OpPlans] | None = None,
    ) -> None:
        self.number = next(_NUMBERS)
        self.name = name
        self.results = results
        self.gradients: Gradients = weakref.WeakKeyDictionary(gradients or {})
        self.takes, self.watched = takes, watched
        self.is_edited, self.is_aligned = is_edited, is_aligned
        self.definition = definition
        self.plans = plans or {}
        self._written = written
        finalizer = weakref.finalize(self, remove, tuple(written.names))
        finalizer.atexit = False

    def has_edited(self) -> bool:
        """Return True if a routine has edited a value so far, or may have since it is staged."""
        return self.is_edited and any(
            each.has_edited if isinstance(each, HostFunction) else True
            for each in self._written.alive
        )


def remove(names: tuple[str, ...]) -> None:
    """Remove written functions from TensorFlow's runtime."""
    for name in names:
        with contextlib.suppress(Exception):  # The runtime may have been reset meanwhile.
            context.context().remove_function(name)


class Twins:
    """The twins of one session; kept for sessions that resume it."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Any, Twin | None]] = {}

    def get(self, name: str, key: Any) -> Any:
        """Return the twin of a function under a key: None if it needs none, or `UNKNOWN`."""
        return self._found.get(name, _NOTHING).get(key, UNKNOWN)

    def put(self, name: str, key: Any, twin: Twin | None) -> None:
        """Keep the twin of a function."""
        kept = self._found.get(name)
        if kept is None:
            kept = self._found[name] = {}
            graph = GRAPHS.get(name)
            if graph is not None:
                # Weakly, so that neither keeps the other alive.
                weakref.finalize(graph, _drop, weakref.ref(self), name).atexit = False
        kept[key] = twin
        while len(kept) > _EPOCHS_KEPT:
            del kept[next(iter(kept))]


_NOTHING: dict[Any, Twin | None] = {}


def _drop(reference: weakref.ref[Twins], name: str) -> None:
    twins = reference()
    if twins is not None:
        twins._found.pop(name, None)
