"""Small programs, reference programs with the edits written in by hand, and edits for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import before

from ..comparison import close
from .reference_programs import outside, values

X, W = values((2, 3), (3, 3))
IDS = tf.constant([0, 2, 2])


def half(value: Any) -> Any:
    return value * 0.5 + 0.3


def triple(value: Any) -> Any:
    return value * 3


EDITED = before("MatMul", half, 1)


def layer(x: Any, w: Any) -> Any:
    return tf.tanh(tf.matmul(x, w))


def compare(
    tools: amanda.Tool | list[amanda.Tool],
    program: Callable[..., Any],
    reference: Callable[..., Any],
    *given: Any,
) -> None:
    """Compare the program as a function, differentiated outside and inside, with its reference."""
    given = given or (X, W)
    wanted = outside(reference, *given)
    with amanda.apply(*(tools if isinstance(tools, list) else [tools])):
        close(outside(tf.function(program), *given), wanted)
        close(tf.function(lambda *v: outside(program, *v))(*given), wanted)
