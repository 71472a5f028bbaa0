"""Second derivatives, and gradients that are computed inside other gradients, under edits."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, Everywhere, editing

from ..comparison import close
from .differentiation import TWICE, WAYS, check
from .handwritten_programs import W, X, half
from .reference_programs import Ops


def wave(value: Any) -> Any:
    return tf.sin(value) * 2 + 0.1


def layer(o: Ops, x: Any, w: Any) -> Any:
    return o("Tanh", "t1", o("MatMul", "m1", x, w))


def called(o: Ops, x: Any, w: Any) -> Any:
    return o("Sum", "s1", o.call(lambda x, w: layer(o, x, w), x, w))


# What is edited straight through, also a gradient, is passed at every order.


@pytest.mark.parametrize("way", TWICE)
@pytest.mark.parametrize("program", [layer, pytest.param(called, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "edits",
    [
        [Edit("m1", "grad_out", wave)],
        [Edit("t1", "grad_in", wave, 0)],
        [Edit("m1", "before", half, 1), Edit("m1", "grad_out", wave)],
        [Edit("t1", "after", half, 0), Edit("t1", "grad_in", wave, 0)],
    ],
    ids=lambda edits: " ".join(f"{edit.name} {edit.kind}" for edit in edits),
)
def test_edited_gradients_are_differentiated(program: Any, edits: list[Edit], way: str) -> None:
    check(program, [X, W], edits, way)


def copied(*values: Any) -> list[Any]:
    """Return copies of the values."""
    return [
        tf.identity(value) if tf.is_tensor(value) and value.dtype.is_floating else value
        for value in values
    ]


@pytest.mark.parametrize("way", TWICE)
@pytest.mark.parametrize("routine", [lambda *values: None, copied], ids=["none", "copied"])
def test_edits_at_backward_ops_are_what_the_second_derivative_reads(routine: Any, way: str) -> None:
    """The first derivative is part of the function whose gradient is the second one."""
    wanted = TWICE[way](layer, Ops([]), [X, W], False)
    with amanda.apply(Everywhere(routine, aligned=False)):
        close(TWICE[way](layer, Ops(), [X, W], True), wanted)


ANEW = [
    Edit("m1", "before", wave, 1, autodiff=True),
    Edit("t1", "after", wave, 0, autodiff=True),
    Edit("t1", "replace", lambda a: tf.cos(a) * a),
    Edit("t1", "backward", lambda g: wave(g)),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", TWICE)
@pytest.mark.parametrize("program", [layer, called])
@pytest.mark.parametrize("edit", ANEW, ids=lambda edit: edit.kind)
def test_gradients_that_are_computed_anew_are_not_differentiated(
    program: Any, edit: Edit, way: str
) -> None:
    with pytest.raises(UnsupportedError, match="differentiated once more"):
        check(program, [X, W], [edit], way)


@pytest.mark.parametrize("way", TWICE)
@pytest.mark.parametrize("op_type", ["Mul", "MatMul"])
@pytest.mark.parametrize("in_a_call", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_tensor_at_two_positions(in_a_call: bool, op_type: str, way: str) -> None:
    def program(o: Ops, x: Any) -> Any:
        def product(x: Any) -> Any:
            return o(op_type, "p1", x, x)

        return o("Tanh", "t1", o.call(product, x) if in_a_call else product(x))

    edits = [Edit("p1", "before", half, 0), Edit("p1", "before", wave, 1)]
    with pytest.raises(UnsupportedError, match="differentiated once more"):
        check(program, [W], edits, way)


@pytest.mark.parametrize("edit", ANEW, ids=lambda edit: edit.kind)
def test_first_derivatives_of_a_persistent_tape_need_no_second_ones(edit: Edit) -> None:
    def run(o: Ops, program: Any) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([X, W])
            y = program(o, X, W)
            z = program(o, y, W)
        return [y, z, *tape.gradient(z, [X, W]), *tape.gradient(y, [X, W])]

    wanted = run(Ops([edit]), layer)
    with amanda.apply(editing(edit)):
        close(run(Ops(), tf.function(layer, autograph=False)), wanted)


# Gradient functions that differentiate themselves.


def recomputing(o: Ops, x: Any, w: Any) -> Any:
    block = tf.recompute_grad(lambda x, w: layer(o, x, w))
    return block(block(x, w), w) * x


def differentiating(o: Ops, x: Any, w: Any) -> Any:
    """Return a custom gradient that reruns the layer and scales the result of its own tape."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(x: Any, w: Any) -> Any:
        def back(gradient: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                y = layer(o, x, w)
            dx, dw = tape.gradient(y, [x, w], output_gradients=gradient)
            return dx * 2.0, dw * 0.5

        return layer(o, x, w), back

    return run(x, w) * x


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [recomputing, differentiating])
@pytest.mark.parametrize(
    "edit",
    [
        Edit("MatMul", "before", half, 1),
        Edit("MatMul", "before", wave, 1, autodiff=True),
        Edit("Tanh", "after", wave, 0, autodiff=True),
        Edit("Tanh", "replace", lambda a: tf.cos(a) * a),
        Edit("MatMul", "grad_out", wave),
        Edit("MatMul", "grad_in", wave, 0),
        Edit("MatMul", "grad_in", wave, 1),
    ],
    ids=lambda edit: f"{edit.kind}{edit.position or ''}",
)
def test_gradients_inside_of_gradients(program: Any, edit: Edit, way: str) -> None:
    check(program, [X, W], [edit], way)


# Gradients of functions that are put into a graph of their own.


@pytest.mark.parametrize("pfor", [True, False])
@pytest.mark.parametrize(
    "edit",
    [*ANEW, Edit("t1", "after", wave, 0), Edit("t1", "grad_in", wave, 0)],
    ids=lambda edit: edit.kind + " autodiff" * edit.autodiff,
)
def test_jacobians_around_a_function(edit: Edit, pfor: bool) -> None:
    def jacobian(o: Ops, program: Any, pfor: bool) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([X, W])
            y = program(o, X, W)
        return [y, *tape.jacobian(y, [X, W], experimental_use_pfor=pfor)]

    function = tf.function(layer, autograph=False)
    wanted = jacobian(Ops([edit]), layer, False)
    with amanda.apply(editing(edit)):
        close(jacobian(Ops(), function, pfor), wanted)


@pytest.mark.parametrize("edit", [*ANEW, Edit("m1", "grad_out", wave)], ids=lambda e: e.kind)
def test_a_function_around_the_gradient_alone(edit: Edit) -> None:
    def run(o: Ops, function: bool) -> list[Any]:
        program = tf.function(layer, autograph=False) if function else layer
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            y = program(o, X, W)
        differentiate: Any = lambda: tape.gradient(y, [X, W])  # noqa: E731
        return [y, *(tf.function(differentiate) if function else differentiate)()]

    wanted = run(Ops([edit]), False)
    with amanda.apply(editing(edit)):
        if edit.kind in ("grad_out", "backward"):  # They need no value of the forward pass.
            close(run(Ops(), True), wanted)
        else:
            with pytest.raises(UnsupportedError, match="builds a graph"):
                run(Ops(), True)
