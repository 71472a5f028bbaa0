"""Gradients that are slices, custom, recomputed, forward-mode; several tapes; odd places."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import (
    after,
    at_inputs,
    at_outputs,
    before,
    replacing,
    replacing_backward,
    tool,
)

from ..comparison import close, equal
from .handwritten_programs import EDITED, IDS, W, X, compare, half
from .reference_programs import outside, straight

# Slices.


def test_slices_as_gradients() -> None:
    table = tf.Variable(W)
    lookup = tf.function(lambda: tf.reduce_sum(tf.tanh(tf.gather(table, IDS))))
    edited = half(tf.gather(W, IDS))
    with amanda.apply(after("ResourceGather", half)), tf.GradientTape() as tape:
        y = lookup()
    gradient = tape.gradient(y, table)
    assert isinstance(gradient, tf.IndexedSlices)
    wanted = tf.math.unsorted_segment_sum(1 - tf.tanh(edited) ** 2, IDS, 3)
    close([y, gradient], [tf.reduce_sum(tf.tanh(edited)), wanted])


@pytest.mark.parametrize("form", ["outside", "inside"])
@pytest.mark.parametrize("dense", [False, True], ids=["slices", "dense"])
def test_edited_slices(form: str, dense: bool) -> None:
    table = tf.Variable(W)

    def lookup() -> Any:
        return tf.reduce_sum(tf.tanh(tf.gather(table, IDS)))

    def differentiate(program: Any) -> Any:
        with tf.GradientTape() as tape:
            y = program()
        return tf.convert_to_tensor(tape.gradient(y, table))

    def routine(gradient: Any) -> Any:
        assert isinstance(gradient, tf.IndexedSlices)
        if dense:
            return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, 3) * 3
        return tf.IndexedSlices(gradient.values * 3, gradient.indices)

    wanted = 3 * differentiate(lookup)
    tools = at_inputs("ResourceGather", routine, 0)

    def run() -> Any:
        if form == "outside":
            return differentiate(tf.function(lookup))
        return tf.function(lambda: differentiate(lookup))()

    with amanda.apply(tools):
        if dense:
            with pytest.raises(amanda.AmandaError, match="IndexedSlices"):
                run()
        else:
            close(run(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("replaced", [False, True], ids=["edited", "replaced"])
@pytest.mark.parametrize("rows", ["same", "others", "fewer"])
@pytest.mark.parametrize("form", ["outside", "inside"])
def test_slices_of_other_rows_are_refused(
    form: str, rows: str, replaced: bool, staged: bool
) -> None:
    """The ops that add slices up read the row indices that the graph was built with."""
    table = tf.Variable(W)
    chosen = {"same": IDS, "others": tf.reverse(IDS, [0]), "fewer": IDS[:1]}[rows]

    def lookup() -> Any:
        return tf.reduce_sum(tf.tanh(tf.gather(table, IDS)))

    def differentiate(program: Any) -> Any:
        with tf.GradientTape() as tape:
            y = program()
        return tf.convert_to_tensor(tape.gradient(y, table))

    def routine(gradient: Any) -> Any:
        values = gradient if replaced else gradient.values
        return tf.IndexedSlices(values[: len(chosen)] * 3, chosen, tf.constant([3, 3]))

    wanted = 3 * differentiate(lookup)
    where = form == "outside"
    run = tf.function(lookup) if where else tf.function(lambda: differentiate(lookup))
    if staged:
        routine = amanda.staged(routine)
    gather = "ResourceGather"
    tools = replacing_backward(gather, routine) if replaced else at_inputs(gather, routine, 0)
    with amanda.apply(tools):
        if rows == "same":
            close(differentiate(run) if where else run(), wanted)
        else:
            with pytest.raises(UnsupportedError, match="of other rows"):
                differentiate(run) if where else run()


@pytest.mark.parametrize("form", ["outside", "inside"])
def test_the_gradient_of_a_replaced_op_is_no_slices(form: str) -> None:
    """Its rows would be taken for those that the op reads."""
    take = tf.constant([1, 1, 0])

    def lookup(x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(tf.gather(x, take)))

    def differentiate(program: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(W)
            y = program(W)
        return tf.convert_to_tensor(tape.gradient(y, W))

    def other(x: Any, ids: Any, axis: Any) -> Any:
        return tf.sin(x)

    called = tf.function(lookup) if form == "outside" else lookup
    run: Any = lambda: differentiate(called)  # noqa: E731
    if form == "inside":
        run = tf.function(run)
    tools = replacing("GatherV2", other)
    with amanda.apply(tools), pytest.raises(UnsupportedError, match="IndexedSlices"):
        run()


def test_embedding_beside_a_matmul_of_the_same_table() -> None:
    def program(lookup: Any, table: Any) -> Any:
        return tf.reduce_sum(tf.matmul(tf.gather(lookup, IDS), table, transpose_b=True) ** 2)

    compare(
        EDITED,
        lambda w: program(w, w),
        lambda w: program(w, straight(w, half)),
        W,
    )


# Custom gradients, recomputed ones, several tapes.


def test_custom_gradients() -> None:
    compare(
        EDITED,
        lambda x, w: tf.nn.silu(tf.matmul(x, w)),
        lambda x, w: tf.nn.silu(tf.matmul(x, straight(w, half))),
    )


def test_an_edit_inside_a_custom_gradient() -> None:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def clipped(x: Any) -> Any:
        y = tf.exp(x)
        return y, lambda g: tf.clip_by_value(g, -0.1, 0.1) * y

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reference(x: Any) -> Any:
        y = tf.exp(half(x))
        return y, lambda g: tf.clip_by_value(g, -0.1, 0.1) * y

    compare(before("Exp", half), lambda x: clipped(x) * 2, lambda x: reference(x) * 2, X)


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("form", ["outside", "inside"])
def test_recomputed_ops_are_edited_again(variable: bool, form: str) -> None:
    weight = tf.Variable(W) if variable else W
    flags: list[bool] = []

    def note(context: OpContext) -> None:
        context.insert_before_op(lambda *v: flags.append(context.recomputed))

    def program(x: Any) -> Any:
        block = tf.recompute_grad(lambda x: tf.tanh(tf.matmul(x, weight)))
        return tf.reduce_sum(block(x) * x)

    def reference(x: Any) -> Any:
        edited = straight(tf.convert_to_tensor(weight), half)
        return tf.reduce_sum(tf.tanh(tf.matmul(x, edited)) * x)

    def run(program: Any, function: bool) -> list[Any]:
        def differentiate(x: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                tape.watch([x, *([] if variable else [weight])])
                y = called(x)
            return [y, *tape.gradient(y, [x, *([weight] if variable else [])])]

        inside = form == "inside"
        called = tf.function(program) if function and not inside else program
        return list((tf.function(differentiate) if function and inside else differentiate)(X))

    wanted = run(reference, False)
    with amanda.apply(EDITED, tool(note, "MatMul")):
        close(run(program, True), wanted)
    assert sorted(flags) == [False, True]


def test_persistent_tapes() -> None:
    def run(function: Any) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([X, W])
            y = function(X, W)
            z = function(y, W)
        return [tape.gradient(of, [X, W]) for of in (y, z, y)]

    wanted = run(lambda x, w: tf.tanh(tf.matmul(x, straight(w, half))))
    with amanda.apply(EDITED):
        found = run(tf.function(lambda x, w: tf.tanh(tf.matmul(x, w))))
    close(found, wanted)


@pytest.mark.parametrize(
    ("where", "pfor", "reason"),
    [
        ("around", False, None),
        ("around", True, "by pfor"),  # The products that pfor makes are edited as well.
        ("inside", False, "inside the graph of the op"),
        ("inside", True, "by pfor"),
    ],
)
def test_jacobians_are_right_or_refused(where: str, pfor: bool, reason: str | None) -> None:
    def jacobian(program: Any) -> Any:
        def run(x: Any, w: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([x, w])
                y = program(x, w)
            return tape.jacobian(y, [x, w], experimental_use_pfor=pfor)

        return run

    def layer(x: Any, w: Any) -> Any:
        return tf.tanh(tf.matmul(x, w))

    wanted = jacobian(lambda x, w: layer(x, straight(w, half)))(X, W)
    made = jacobian(tf.function(layer)) if where == "around" else tf.function(jacobian(layer))
    for routine in (half, amanda.staged(lambda value: half(value))):
        refused: Any = contextlib.nullcontext()
        if reason is not None:
            # Their gradients are computed in loops, or by other ops than those that were recorded.
            refused = pytest.raises(amanda.AmandaError, match=reason)
        with refused, amanda.apply(before("MatMul", routine, 1)):
            close(made(X, W), wanted)


@pytest.mark.parametrize("place", ["branch", "loop", "function"])
def test_a_gradient_taken_inside_the_place_of_its_forward_ops_is_refused(place: str) -> None:
    def program(layer: Any) -> Any:
        def run(x: Any, w: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([x, w])
                y = layer(x, w)

            def gradients() -> Any:
                return tape.gradient(y, [x, w])

            if place == "function":
                return tf.function(gradients, autograph=False)()
            if place == "branch":
                return tf.cond(tf.reduce_sum(x) < 1e9, gradients, lambda: [x, w])
            body = lambda i, *_: (i + 1, *gradients())  # noqa: E731
            return tf.while_loop(lambda i, *_: i < 2, body, (0, x, w))[1:]

        return run

    run = tf.function(program(lambda x, w: tf.tanh(tf.matmul(x, w))))
    refused = pytest.raises(amanda.AmandaError, match=r"inside the graph of the op.*'MatMul'")
    with refused, amanda.apply(EDITED):
        run(X, W)
    close(run(X, W), outside(lambda x, w: tf.tanh(tf.matmul(x, w)), X, W)[1:])


def test_edits_are_refused_in_forward_mode() -> None:
    def jvp(program: Any) -> list[Any]:
        with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as accumulator:
            y = program(X, W)
        return [y, accumulator.jvp(y)]

    function = tf.function(lambda x, w: tf.tanh(tf.matmul(x, w)))
    plain = jvp(function)
    refused = pytest.raises(amanda.AmandaError, match="ForwardAccumulator")
    with refused, amanda.apply(EDITED):
        jvp(function)
    with amanda.apply(amanda.Tool()):
        equal(jvp(function), plain)


def test_forward_mode_inside_a_function_is_refused() -> None:
    def jvp(x: Any, w: Any) -> list[Any]:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = tf.tanh(tf.matmul(x, w))
        return [y, accumulator.jvp(y)]

    function = tf.function(jvp)
    plain = function(X, W)
    with amanda.apply(EDITED), pytest.raises(UnsupportedError, match="ForwardAccumulator"):
        function(X, W)
    with amanda.apply(before("MatMul", lambda *values: None)):
        equal(function(X, W), plain)


def test_forward_mode_is_over_where_the_accumulator_is() -> None:
    def layer(x: Any, w: Any) -> Any:
        return tf.tanh(tf.matmul(x, w))

    function, other = tf.function(layer), tf.function(lambda x, w: tf.sin(layer(x, w)))
    wanted = tf.sin(layer(X, half(W)))
    with amanda.apply(EDITED):
        with (
            pytest.raises(UnsupportedError, match="ForwardAccumulator"),
            tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)),
        ):
            function(X, W)
        close(other(X, W), wanted)


def test_several_targets_and_given_gradients() -> None:
    def run(program: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            y, z = program(X, W)
        return list(tape.gradient([y, z], [X, W], output_gradients=[X * 0 + 2, z * 3]))

    def program(x: Any, w: Any) -> Any:
        h = tf.matmul(x, w)
        return tf.tanh(h), h * h

    def reference(x: Any, w: Any) -> Any:
        return program(x, straight(w, half))

    wanted = run(reference)
    with amanda.apply(EDITED):
        close(run(tf.function(program)), wanted)


def test_unconnected_gradients_stay_unconnected() -> None:
    with amanda.apply(EDITED):
        _, dx, dw = outside(tf.function(lambda x, w: tf.reduce_sum(tf.matmul(w, w))), X, W)
    assert dx is None
    ones = tf.ones((3, 3), tf.float64)
    # Both positions contribute, each computed with what the op saw at the other one.
    close(
        dw,
        tf.matmul(ones, half(W), transpose_b=True) + tf.matmul(W, ones, transpose_a=True),
    )


def test_there_is_no_gradient_to_be_edited_where_none_arrives() -> None:
    """Only one of three outputs is used, so two have no gradient."""
    program = tf.function(lambda x: tf.unstack(x, axis=0)[1] * 2)

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(W)
            y = program(W)
        return tape.gradient(y, W)

    plain = gradient()
    with amanda.apply(at_outputs("Unpack", lambda *gs: [None if g is None else g * 3 for g in gs])):
        equal(gradient(), plain * 3)
    everywhere = at_outputs("Unpack", lambda *gs: [tf.ones(3, tf.float64) for _ in gs])
    with amanda.apply(everywhere), pytest.raises(UnsupportedError, match="has no value"):
        gradient()


def test_stop_gradient_on_the_way() -> None:
    def program(x: Any, w: Any) -> Any:
        return tf.reduce_sum(tf.stop_gradient(tf.matmul(x, w)) * tf.matmul(x, w))

    compare(EDITED, program, lambda x, w: program(x, straight(w, half)))
