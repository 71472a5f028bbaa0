"""Loops and branches in both kinds of control flow, and the programs of the tests of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from amanda_core.testing.kit.tools import Edit

from .reference_programs import Ops, arrays, v1

VALUES = [value * 0.5 for value in arrays((3, 3), (3, 3))]
_MASK = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]], np.float32)
_CAPTURED = tf.constant(_MASK)


@contextmanager
def control_flow(new: bool) -> Iterator[None]:
    """Build graphs with control flow of TensorFlow 1 or 2."""
    was = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if new else v1.disable_control_flow_v2)()
    try:
        yield
    finally:
        (v1.enable_control_flow_v2 if was else v1.disable_control_flow_v2)()


def shifted(value: Any) -> Any:
    """Edit a value."""
    return value * 0.5 + 0.25


def masked(value: Any) -> Any:
    """Edit a value by a mask, which a tool's routine captures."""
    return value * (_CAPTURED if tf.executing_eagerly() else _MASK)


def captured(value: Any) -> Any:
    """Edit a value by a captured mask, in a staged routine."""
    return value * _CAPTURED


def named(edit: Edit) -> str:
    """Return the name of an edit for test ids."""
    return f"{edit.name}-{edit.kind}-{edit.position}{'-autodiff' if edit.autodiff else ''}"


def loop(ops: Ops, times: Any, step: Callable[[Any, Any], Any], h: Any, **how: Any) -> Any:
    """Repeat ``h = step(i, h)``; in the reference program, by a Python loop."""
    if ops.edits is not None:
        for turn in range(times):
            h = step(turn, h)
        return h
    return v1.while_loop(
        lambda i, _: i < times, lambda i, h: (i + 1, step(i, h)), (tf.constant(0), h), **how
    )[1]


def recurrent(times: int = 3, **how: Any) -> Callable[..., Any]:
    """Run a loop in which every op's gradient reads values of the op; `h` has many readers."""

    def program(ops: Ops, x: Any, w: Any) -> Any:
        def step(turn: Any, h: Any) -> Any:
            g = ops("Sigmoid", "gate", ops("MatMul", "inner", h, w))
            mixed = ops("Mul", "mixed", g, ops("Sin", "sin", h))
            scaled = ops("Mul", "scaled", mixed, tf.constant(1.5))
            return ops("AddV2", "sum", scaled, ops("Square", "square", g))

        return ops("Sum", "loss", ops("Square", "last", loop(ops, times, step, x, **how)))

    return program
