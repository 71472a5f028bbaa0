"""Gradients that TensorFlow does not compute although the wiring of a graph requests them.

`tf.gradients` gathers the gradients of an op by control edges. Nothing may read one of them, such
as that of an image, and then TensorFlow's optimizer drops it. A routine there would be the reason
that it is computed. Other ops that only control edges request are what a program asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from amanda_driver_tf.graphs.body import Body, Node
from amanda_driver_tf.tensorflow_internals.names import GATHERED_GRADIENTS
from amanda_driver_tf.tensorflow_internals.objects import control_flow_context, is_reference

__all__ = ["find_dropped", "reached_without_dropped"]


def find_dropped(body: Body, roots: Sequence[Any]) -> None:
    """Set `running` and `dropped` of a body that runs for `roots`."""
    body.running = reached_without_dropped(body, roots)
    body.dropped = body.reached(roots) - body.running


def reached_without_dropped(body: Body, roots: Iterable[Any]) -> set[int]:
    """Return the ids of the nodes that run for `roots`, without gradients that nothing reads and
    that have no effects.
    """
    by_name = {node.name: node for node in body.nodes}
    running: set[int] = set()
    awaited: set[int] = set()
    waiting = [(root, True) for root in roots]
    while waiting:
        node, runs = waiting.pop()
        if node is None or id(node) in running:
            continue
        runs = runs or not isinstance(node, Node) or _has_effects(node.op)
        if not runs and id(node) in awaited:
            continue
        (running if runs else awaited).add(id(node))
        waiting += [(value.node, runs) for value in node.inputs]
        controls = (by_name.get(c) if isinstance(c, str) else c for c in node.controls)
        runs = runs and not _gathers_gradients(node)
        waiting += [(control, runs) for control in controls]
    return running


def _gathers_gradients(node: Any) -> bool:
    return isinstance(node, Node) and node.op_type == "NoOp" and GATHERED_GRADIENTS in node.name


def _has_effects(op: Any) -> bool:
    # An op that writes to a reference is not marked as stateful.
    if op.op_def.is_stateful or control_flow_context(op) is not None:
        return True
    return any(map(is_reference, op.inputs))
