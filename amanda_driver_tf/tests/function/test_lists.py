"""Positions that are lists of tensors: edits of single ones, and results that do not fit them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import ActionError, RoutineResultError
from amanda_core.testing.kit.tools import at_inputs, before, replacing, replacing_backward

from ..comparison import close
from .handwritten_programs import W, X, half
from .reference_programs import at_gradient, straight

Joined = Callable[..., Any]


def join(a: Any, b: Any, c: Any) -> Any:
    return tf.concat([a, b, c], 0)


def gradients(join: Joined, form: str) -> list[Any]:
    """Return the program's result and gradients, for one way to run it."""

    def program(x: Any, w: Any) -> Any:
        return tf.reduce_sum(tf.sin(join(x, w, tf.matmul(x, w))))

    def differentiate(program: Any, x: Any, w: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = program(x, w)
        return [y, *tape.gradient(y, [x, w])]

    if form == "outside":
        return differentiate(tf.function(program), X, W)
    if form == "inside":
        return list(tf.function(lambda x, w: differentiate(program, x, w))(X, W))
    return differentiate(program, X, W)


FORMS = ["eager", "outside", "inside"]
EDITS: dict[str, tuple[Any, Joined]] = {
    "one of them": (
        lambda mark: before("ConcatV2", mark(lambda v: [v[0], half(v[1]), v[2]]), 0),
        lambda a, b, c: join(a, straight(b, half), c),
    ),
    "in a tuple": (
        lambda mark: before("ConcatV2", mark(lambda v, axis: ([v[0], v[1], half(v[2])], axis))),
        lambda a, b, c: join(a, b, straight(c, half)),
    ),
    "gradients": (
        lambda mark: at_inputs("ConcatV2", mark(lambda v: [v[0] * 2, v[1], half(v[2])]), 0),
        lambda a, b, c: join(at_gradient(a, lambda g: g * 2), b, at_gradient(c, half)),
    ),
    "replaced": (
        lambda mark: replacing(
            "ConcatV2", mark(lambda v, axis: tf.concat([v[0], v[2] * 2, v[1]], 0))
        ),
        lambda a, b, c: join(a, c * 2, b),
    ),
    "backward": (
        lambda mark: replacing_backward(
            "ConcatV2", mark(lambda g: ([g[:2] * 3, g[2:5], g[5:] * 0.5],))
        ),
        lambda a, b, c: join(at_gradient(a, lambda g: g * 3), b, at_gradient(c, lambda g: g * 0.5)),
    ),
}


@pytest.mark.parametrize(
    "mark",
    [lambda f: f, pytest.param(amanda.staged, marks=pytest.mark.slow)],
    ids=["host", "staged"],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EDITS)
def test_lists_are_edited(name: str, form: str, mark: Any) -> None:
    make, reference = EDITS[name]
    wanted = gradients(reference, "eager")
    with amanda.apply(make(mark)):
        close(gradients(join, form), wanted)


@pytest.mark.parametrize("mark", [lambda f: f, amanda.staged], ids=["host", "staged"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [before, at_inputs])
def test_a_list_of_another_length_is_an_error(kind: Any, form: str, mark: Any) -> None:
    with (
        amanda.apply(kind("ConcatV2", mark(lambda v: [v[0]]), 0)),
        pytest.raises(ActionError, match=r"[Ll]ist of"),
    ):
        gradients(join, form)


@pytest.mark.parametrize("mark", [lambda f: f, amanda.staged], ids=["host", "staged"])
@pytest.mark.parametrize("form", ["outside", "inside"])
@pytest.mark.parametrize(
    "tools",
    [
        lambda mark: before("ConcatV2", mark(lambda v: [v[0] * 2, None, None]), 0),
        lambda mark: before("MatMul", mark(lambda a, b: [a * 2, None])),
        lambda mark: at_inputs("ConcatV2", mark(lambda v: [v[0] * 2, None, None]), 0),
        lambda mark: at_inputs("MatMul", mark(lambda a, b: [a * 2, None])),
    ],
    ids=["list", "inputs", "gradients of a list", "gradients"],
)
def test_none_for_one_of_several_is_an_error_and_no_old_value(
    tools: Any, form: str, mark: Any
) -> None:
    """In eager mode a gradient may be None; a graph needs a tensor."""
    with (
        amanda.apply(tools(mark)),
        pytest.raises(RoutineResultError, match="None for one of several"),
    ):
        gradients(join, form)
