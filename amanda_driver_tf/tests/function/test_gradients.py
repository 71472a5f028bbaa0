"""Routines at gradients, aligned and raw; replacements; gradients that TensorFlow makes in other ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda import OpContext

from .making import (
    Edit,
    after,
    at_gradient,
    at_inputs,
    at_outputs,
    before,
    close,
    editing,
    equal,
    straight,
    tool,
    values,
)

X, W = values((2, 3), (3, 3))
IDS = tf.constant([0, 2, 2])


def half(value: Any) -> Any:
    return value * 0.5 + 0.3


def triple(value: Any) -> Any:
    return value * 3


EDITED = before("MatMul", half, 1)


def outside(program: Callable[..., Any], *given: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(given)
        result = program(*given)
    return [result, *tape.gradient(result, given)]


def compare(
    tools: amanda.Tool | list[amanda.Tool],
    program: Callable[..., Any],
    twin: Callable[..., Any],
    *given: Any,
) -> None:
    """The program as a function, differentiated outside and inside, against the twin."""
    given = given or (X, W)
    wanted = outside(twin, *given)
    with amanda.apply(*(tools if isinstance(tools, list) else [tools])):
        close(outside(tf.function(program), *given), wanted)
        close(tf.function(lambda *v: outside(program, *v))(*given), wanted)


# The aligned view.


def test_gradients_pass_through_sums_and_identities_to_the_right_one() -> None:
    def program(x: Any, w: Any) -> Any:
        h = tf.matmul(x, w)
        return tf.reduce_sum(tf.sin(tf.raw_ops.AddV2(x=h, y=tf.identity(x), name="a1") + h))

    def twin(position: int) -> Callable[..., Any]:
        def run(x: Any, w: Any) -> Any:
            h = tf.matmul(x, w)
            given = [h, tf.identity(x)]
            given[position] = at_gradient(given[position], triple)
            return tf.reduce_sum(tf.sin(given[0] + given[1] + h))

        return run

    for position in (0, 1):
        compare(at_inputs("a1", triple, position), program, twin(position))


def test_the_same_tensor_twice() -> None:
    def program(make: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        return lambda x: tf.reduce_sum(tf.sin(make(x, x)))

    for op_type in ("Mul", "AddV2", "Sub", "Maximum", "SquaredDifference"):
        op = getattr(tf.raw_ops, op_type)
        plain = program(lambda a, b, op=op: op(x=a, y=b))
        for position in (0, 1):

            def edited(a: Any, b: Any, op: Any = op, position: int = position) -> Any:
                pair = [a, b]
                pair[position] = at_gradient(pair[position], triple)
                return op(x=pair[0], y=pair[1])

            compare(at_inputs(op_type, triple, position), plain, program(edited), X)


@pytest.mark.parametrize("position", [0, 1])
def test_one_of_two_equal_inputs_edited(position: int) -> None:
    def twin(x: Any) -> Any:
        pair = [x, x]
        pair[position] = straight(x, half)
        return tf.reduce_sum(tf.sin(pair[0] * pair[1]))

    compare(
        before("Mul", half, position),
        lambda x: tf.reduce_sum(tf.sin(tf.raw_ops.Mul(x=x, y=x))),
        twin,
        X,
    )


def test_broadcast_inputs_get_the_gradient_that_is_summed_for_them() -> None:
    shapes: list[Any] = []

    def see(gradient: Any) -> Any:
        shapes.append(tuple(gradient.shape))
        return gradient * 3

    compare(
        at_inputs("AddV2", see, 1),
        lambda x, w: tf.reduce_sum(tf.sin(x + w[0])),
        lambda x, w: tf.reduce_sum(tf.sin(x + at_gradient(w[0], triple))),
    )
    assert set(shapes) == {(3,)}


def test_the_gradient_arriving_is_the_sum_over_all_users() -> None:
    got: list[Any] = []
    with amanda.apply(at_outputs("Exp", lambda g: got.append(g.numpy()))):
        outside(tf.function(lambda x: (lambda h: tf.reduce_sum(h * h + 2 * h))(tf.exp(x))), X)
    close(got, [2 * tf.exp(X) + 2])


def test_what_an_op_contributes_is_told_before_others_are_added() -> None:
    got: list[Any] = []
    with amanda.apply(at_inputs("Exp", lambda g: got.append(g.numpy()))):
        close(
            outside(tf.function(lambda x: tf.reduce_sum(tf.exp(x) + tf.sin(x))), X)[1],
            (tf.exp(X) + tf.cos(X)).numpy(),
        )
    close(got, [tf.exp(X)])


def test_an_input_without_a_gradient_is_not_asked_about() -> None:
    got: list[Any] = []
    with amanda.apply(
        at_inputs("GatherV2", lambda g: got.append(g), 1), at_outputs("ArgMax", got.append)
    ):
        outside(tf.function(lambda x: tf.reduce_sum(tf.gather(x, tf.argmax(x, 1)[0], axis=1))), X)
    assert got == []


def test_gradients_fold_in_the_order_of_tools() -> None:
    tools = [at_outputs("Neg", lambda g: g + 1), at_outputs("Neg", lambda g: g * 10)]
    with amanda.apply(*tools):
        close(
            outside(tf.function(lambda x: tf.reduce_sum(-x)), X)[1],
            tf.fill(X.shape, -20.0 + X[0, 0] * 0),
        )


def test_replaced_backward() -> None:
    compare(
        editing(Edit("Relu", "backward", lambda g: g * 0.5)),
        lambda x, w: tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)) ** 2),
        lambda x, w: tf.reduce_sum(
            tf.custom_gradient(lambda h: (tf.nn.relu(h), lambda g: g * 0.5))(tf.matmul(x, w)) ** 2
        ),
    )


def test_replaced_backward_of_two_inputs() -> None:
    compare(
        editing(Edit("MatMul", "backward", lambda g: (tf.ones_like(X), tf.ones_like(W)))),
        lambda x, w: tf.reduce_sum(tf.sin(tf.matmul(x, w))),
        lambda x, w: tf.reduce_sum(
            tf.sin(
                tf.custom_gradient(
                    lambda a, b: (tf.matmul(a, b), lambda g: (tf.ones_like(a), tf.ones_like(b)))
                )(x, w)
            )
        ),
    )


@pytest.mark.parametrize("staged", [False, True])
def test_replaced_op_is_differentiated_as_written(staged: bool) -> None:
    def gelu(x: Any) -> Any:
        return x * tf.sigmoid(1.7 * x)

    compare(
        editing(Edit("Relu", "replace", amanda.staged(gelu) if staged else gelu)),
        lambda x, w: tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)) ** 2),
        lambda x, w: tf.reduce_sum(gelu(tf.matmul(x, w)) ** 2),
    )


def test_replacement_that_takes_one_of_the_inputs() -> None:
    compare(
        editing(Edit("MatMul", "replace", lambda x: x * 2, 0)),
        lambda x, w: tf.reduce_sum(tf.matmul(x, w) ** 2) + tf.reduce_sum(w),
        lambda x, w: tf.reduce_sum((x * 2) ** 2) + tf.reduce_sum(w),
    )


@pytest.mark.parametrize("autodiff", [False, True])
def test_a_value_of_another_shape_is_right_or_refused(autodiff: bool) -> None:
    # The mean of doubled rows is the same; its gradient has the number of rows built in.
    def program(x: Any, w: Any) -> Any:
        return tf.reduce_mean(tf.tanh(tf.matmul(x, w)) ** 2)

    wanted = outside(program, X, W)
    doubled = Edit("Tanh", "after", lambda y: tf.concat([y, y], 0), None, autodiff)
    try:
        with amanda.apply(editing(doubled)):
            found = outside(tf.function(program), X, W)
    except (amanda.AmandaError, tf.errors.InvalidArgumentError):
        pass
    else:
        close(found, wanted)


# The raw view.


def raw(op_type: str, method: str, routine: Callable[..., Any]) -> amanda.Tool:
    return tool(lambda c: getattr(c, method)(routine), op_type, backward=True)


def tanh_twin(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def edited(h: Any) -> Any:
        y = tf.tanh(h)
        return y, lambda g: change(y, g)

    return lambda x, w: tf.reduce_sum(edited(tf.matmul(x, w)) ** 2)


@pytest.mark.parametrize(
    ("method", "routine", "change"),
    [
        ("insert_before_backward_op", lambda y, g: (y * 0.5, g), lambda y, g: g * (1 - y * y / 4)),
        ("insert_after_backward_op", lambda g: g * 3, lambda y, g: 3 * g * (1 - y * y)),
        ("replace_backward_op", lambda y, g: y + g, lambda y, g: y + g),
    ],
)
def test_edits_of_a_backward_op(method: str, routine: Any, change: Any) -> None:
    compare(
        raw("TanhGrad", method, routine),
        lambda x, w: tf.reduce_sum(tf.tanh(tf.matmul(x, w)) ** 2),
        tanh_twin(change),
    )


def test_contexts_of_backward_ops() -> None:
    found: list[tuple[Any, ...]] = []

    def analyse(context: OpContext) -> None:
        forward = context.forward
        if forward is not None:
            assert context.is_backward()
            assert context.get_op() is forward.get_op()
            assert context.get_op().type == forward.op_type
            assert context.get_backward_op().type == context.op_type
            found.append((forward.op_type, context.op_type, context.get_backward_op_id()))

    with amanda.apply(tool(analyse, backward=True)):
        outside(tf.function(lambda x, w: tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)))), X, W)
    pairs = [(forward, backward) for forward, backward, _ in found]
    assert pairs.count(("MatMul", "MatMul")) == 2
    assert ("Relu", "ReluGrad") in pairs
    assert len({number for *_, number in found}) == len(found)


def test_sums_of_gradients_are_backward_ops_without_a_forward_op() -> None:
    found: list[Any] = []

    def analyse(context: OpContext) -> None:
        found.append(context.forward)
        context.insert_after_backward_op(triple)

    with amanda.apply(tool(analyse, "AddN", backward=True)):
        close(
            outside(tf.function(lambda x: tf.reduce_sum(tf.exp(x) + tf.sin(x))), X)[1],
            (3 * (tf.exp(X) + tf.cos(X))).numpy(),
        )
    assert found == [None]


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


def test_embedding_beside_a_matmul_of_the_same_table() -> None:
    def program(lookup: Any, table: Any) -> Any:
        return tf.reduce_sum(tf.matmul(tf.gather(lookup, IDS), table, transpose_b=True) ** 2)

    compare(
        EDITED,
        lambda w: program(w, w),
        lambda w: program(w, straight(w, half)),
        W,
    )


# Gradients of one's own, recomputed ones, several tapes.


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
    def twin(x: Any) -> Any:
        y = tf.exp(half(x))
        return y, lambda g: tf.clip_by_value(g, -0.1, 0.1) * y

    compare(before("Exp", half), lambda x: clipped(x) * 2, lambda x: twin(x) * 2, X)


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

    def twin(x: Any) -> Any:
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

    wanted = run(twin, False)
    with amanda.apply(EDITED, tool(note, "MatMul")):
        close(run(program, True), wanted)
    assert len(flags) >= 2


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


@pytest.mark.parametrize("pfor", [False, True])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_jacobians_are_right_or_refused(where: str, pfor: bool) -> None:
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
        try:
            with amanda.apply(before("MatMul", routine, 1)):
                found = made(X, W)
        except amanda.AmandaError as error:
            # Their gradients are computed in loops, or by other ops than those that were recorded.
            assert (where, pfor) != ("around", False), error  # noqa: PT017
        else:
            close(found, wanted)


@pytest.mark.parametrize("place", ["branch", "loop", "function"])
def test_a_gradient_taken_in_a_place_inside_that_of_its_forward_ops(place: str) -> None:
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

    wanted = outside(lambda x, w: tf.tanh(tf.matmul(x, straight(w, half))), X, W)[1:]
    try:
        with amanda.apply(EDITED):
            found = tf.function(program(lambda x, w: tf.tanh(tf.matmul(x, w))))(X, W)
    except amanda.AmandaError:
        return
    close(found, wanted)


def test_forward_mode_is_right_or_refused() -> None:
    def jvp(program: Any) -> list[Any]:
        with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as accumulator:
            y = program(X, W)
        return [y, accumulator.jvp(y)]

    wanted = jvp(lambda x, w: tf.tanh(tf.matmul(x, half(w))))
    function = tf.function(lambda x, w: tf.tanh(tf.matmul(x, w)))
    plain = jvp(function)
    try:
        with amanda.apply(EDITED):
            found = jvp(function)
    except amanda.AmandaError:
        pass
    else:
        close(found, wanted)
    with amanda.apply(amanda.Tool()):
        equal(jvp(function), plain)


def test_several_targets_and_given_gradients() -> None:
    def run(program: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            y, z = program(X, W)
        return list(tape.gradient([y, z], [X, W], output_gradients=[X * 0 + 2, z * 3]))

    def program(x: Any, w: Any) -> Any:
        h = tf.matmul(x, w)
        return tf.tanh(h), h * h

    def twin(x: Any, w: Any) -> Any:
        return program(x, straight(w, half))

    wanted = run(twin)
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


def test_stop_gradient_on_the_way() -> None:
    def program(x: Any, w: Any) -> Any:
        return tf.reduce_sum(tf.stop_gradient(tf.matmul(x, w)) * tf.matmul(x, w))

    compare(EDITED, program, lambda x, w: program(x, straight(w, half)))
