"""Values and gradients of another shape than a function, and its gradients, were traced for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, editing, tool

from ..comparison import close
from .reference_programs import values

X, W = values((4, 3), (3, 2))


def cropped(value: Any) -> Any:
    return value[:2]


def layer(x: Any, w: Any) -> Any:
    return tf.reduce_sum(tf.square(tf.tanh(tf.matmul(x, w, name="mm"), name="act")))


def outside(program: Callable[..., Any]) -> list[Any]:
    """Differentiate with a tape around the call."""
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        result = program(X, W)
    zero = tf.UnconnectedGradients.ZERO
    return [result, *tape.gradient(result, [X, W], unconnected_gradients=zero)]


def within(program: Callable[..., Any]) -> Callable[..., Any]:
    """Run the program with a tape inside."""

    def run(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            result = program(x, w)
        zero = tf.UnconnectedGradients.ZERO
        return result, tape.gradient(result, [x, w], unconnected_gradients=zero)

    return run


def traced(program: Callable[..., Any], rows: int | None) -> Any:
    specs = [tf.TensorSpec([rows, 3], X.dtype), tf.TensorSpec([3, 2], X.dtype)]
    return tf.function(program, input_signature=specs)


def in_branch(x: Any, w: Any) -> Any:
    return tf.cond(tf.reduce_sum(w) > -1e6, lambda: layer(x, w), lambda: tf.zeros([], X.dtype))


def in_loop(x: Any, w: Any) -> Any:
    step = lambda i, total: (i + 1, total + layer(x, w))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, step, (0, tf.zeros([], X.dtype)))[1]


@pytest.mark.parametrize("own_tape", [False, True], ids=["tape outside", "tape inside"])
@pytest.mark.parametrize(
    ("kind", "autodiff"),
    [
        ("before", True),
        ("after", True),
        ("before", False),
        ("replace", False),
        ("backward", False),
        ("grad_out", False),
        ("grad_in", False),
    ],
)
def test_another_shape_is_refused(kind: str, autodiff: bool, own_tape: bool) -> None:
    position = None if kind in ("replace", "backward") else 0
    function = traced(within(layer) if own_tape else layer, 4)
    run: Callable[[], Any] = lambda: function(X, W) if own_tape else outside(function)  # noqa: E731
    plain = run()
    edit = Edit("act", kind, cropped, position, autodiff)
    with amanda.apply(editing(edit)), pytest.raises(UnsupportedError) as caught:
        run()
    for said in ("shape (2, 2)", "(4, 2)", "act'", "by tool Tool(", "of the same shape"):
        assert said in str(caught.value)
    close(tf.nest.flatten(run()), tf.nest.flatten(plain))


@pytest.mark.parametrize("program", [in_branch, in_loop, tf.function(layer)])
def test_another_shape_is_refused_in_what_a_function_runs(program: Callable[..., Any]) -> None:
    function = traced(program, 4)
    with (
        amanda.apply(editing(Edit("act", "before", cropped, 0, True))),
        pytest.raises(UnsupportedError, match=r"shape \(2, 2\).*act'.*of the same shape"),
    ):
        outside(function)


def test_also_behind_what_another_step_put_there() -> None:
    edits = [Edit("mm", "after", lambda v: v * 1.0, 0), Edit("act", "before", cropped, 0, True)]
    with (
        amanda.apply(editing(*edits)),
        pytest.raises(UnsupportedError, match=r"shape \(2, 2\).*op 'act'"),
    ):
        outside(traced(layer, 4))


def elementwise(x: Any, w: Any) -> Any:
    """Run ops that accept any shape, and whose gradients read no value."""
    return tf.negative(tf.negative(x, name="act"))


def bent(x: Any, w: Any) -> Any:
    return tf.exp(tf.tanh(x, name="act"))


@pytest.mark.slow
@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("rows", [4, None])
@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("own_tape", [False, True], ids=["tape outside", "tape inside"])
@pytest.mark.parametrize("program", [layer, elementwise, bent])
def test_a_gradient_that_is_passed_straight_through_has_one_shape(
    program: Callable[..., Any], own_tape: bool, kind: str, rows: int | None, staging: bool
) -> None:
    routine = amanda.staged(lambda value: value[:1]) if staging else lambda value: value[:1]
    function = traced(within(program) if own_tape else program, rows)
    with (
        amanda.apply(editing(Edit("act", kind, routine, 0))),
        pytest.raises(UnsupportedError, match=r"by tool Tool\(.*<lambda>, op '.*act'"),
    ):
        function(X, W) if own_tape else outside(function)


@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("where", ["insert_before_backward_op", "insert_after_backward_op"])
@pytest.mark.parametrize("own_tape", [False, True], ids=["tape outside", "tape inside"])
def test_raw_gradients_keep_their_shape(own_tape: bool, where: str, staging: bool) -> None:
    routine = amanda.staged(cropped) if staging else cropped

    def analyse(context: amanda.OpContext) -> None:
        if context.forward is not None and context.forward.name.endswith("act"):
            getattr(context, where)(routine)

    function = traced(within(elementwise) if own_tape else elementwise, None)
    with (
        amanda.apply(tool(analyse, backward=True)),
        pytest.raises(UnsupportedError, match=rf"{where} by tool .*of the same shape"),
    ):
        function(X, W) if own_tape else outside(function)


@pytest.mark.parametrize("program", [in_branch, in_loop, tf.function(elementwise)])
@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
def test_also_in_what_a_function_runs(program: Callable[..., Any], staging: bool) -> None:
    routine = amanda.staged(cropped) if staging else cropped
    with (
        amanda.apply(editing(Edit("act", "after", routine, 0))),
        pytest.raises(UnsupportedError, match=r"act'.*autodiff_enabled\(\)"),
    ):
        outside(traced(program, None))


def test_also_where_xla_compiles() -> None:
    specs = [tf.TensorSpec([None, 3], X.dtype), tf.TensorSpec([3, 2], X.dtype)]
    function = tf.function(elementwise, input_signature=specs, jit_compile=True)
    with amanda.apply(editing(Edit("act", "after", amanda.staged(lambda v: v * 2.0), 0))):
        close(outside(function), [2.0 * X, tf.ones_like(X), tf.zeros_like(W)])
    with (
        amanda.apply(editing(Edit("act", "after", amanda.staged(cropped), 0))),
        pytest.raises(UnsupportedError, match="op 'act'"),
    ):
        outside(function)


@pytest.mark.parametrize("own_tape", [False, True], ids=["tape outside", "tape inside"])
def test_another_shape_is_differentiated_where_none_was_built_in(own_tape: bool) -> None:
    wanted = outside(lambda x, w: tf.reduce_sum(tf.square(tf.tanh(tf.matmul(x, w))[:2])))
    function = traced(within(layer) if own_tape else layer, None)
    with amanda.apply(editing(Edit("act", "after", cropped, 0, True))):
        found = tf.nest.flatten(function(X, W)) if own_tape else outside(function)
    close(found, wanted)


def halved(a: Any, b: Any) -> Any:
    return tf.matmul(a, b)[:1]


def tripled(value: Any) -> Any:
    return tf.concat([tf.tanh(value)] * 4, 0)


HANDED_ON = [Edit("mm", "replace", halved), Edit("act", "replace", tripled)]


def both(x: Any, w: Any) -> tuple[Any, Any]:
    product = tf.matmul(x, w, name="mm")
    return product, tf.tanh(product, name="act")


@pytest.mark.parametrize("own_tape", [False, True], ids=["tape outside", "tape inside"])
def test_replaced_ops_hand_on_another_shape(own_tape: bool) -> None:
    wanted = outside(lambda x, w: tf.reduce_sum(tf.square(tripled(halved(x, w)))))
    function = traced(within(layer) if own_tape else layer, 4)
    with amanda.apply(editing(*HANDED_ON)):
        found = tf.nest.flatten(function(X, W)) if own_tape else outside(function)
    close(found, wanted)


@pytest.mark.parametrize("rows", [4, None])
def test_what_replaced_ops_hand_on_may_be_returned_where_no_gradient_is_built_for_it(
    rows: int | None,
) -> None:
    with amanda.apply(editing(*HANDED_ON)):
        close(traced(both, rows)(X, W), [halved(X, W), tripled(halved(X, W))])


def losses(product: Any, result: Any) -> dict[str, Any]:
    return {
        "of what was handed on": tf.reduce_mean(tf.square(product)),
        "of both": tf.reduce_mean(product) + tf.reduce_sum(tf.square(result)),
    }


@pytest.mark.parametrize("of", losses(X, X))
@pytest.mark.parametrize("where", ["tape outside", "tape inside", "tape around the caller"])
@pytest.mark.parametrize("returned", ["as a copy", "as it is"])
def test_what_is_returned_has_one_shape(returned: str, where: str, of: str) -> None:
    """Its gradient comes from the caller, and has the traced shape."""
    specs = [tf.TensorSpec([4, 3], X.dtype), tf.TensorSpec([3, 2], X.dtype)]
    # Functions of today return an `Identity` of what the user's returns.
    wrap = tf.compat.v1.wrap_function
    function = wrap(both, specs) if returned == "as it is" else traced(both, 4)
    caller: Callable[..., Any] = lambda x, w: losses(*function(x, w))[of]  # noqa: E731
    if where == "tape inside":
        caller = traced(within(caller), 4)
    elif where == "tape around the caller":
        caller = traced(caller, 4)
    with (
        amanda.apply(editing(*HANDED_ON)),
        pytest.raises(UnsupportedError, match=r"shape \(1, 2\).*replace_op by tool .*mm'"),
    ):
        caller(X, W) if where == "tape inside" else outside(caller)


def test_what_is_differentiated_itself_has_one_shape() -> None:
    def program(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            product, result = both(x, w)
        return tape.gradient([product, result], x)

    with (
        amanda.apply(editing(*HANDED_ON)),
        pytest.raises(UnsupportedError, match=r"shape \(1, 2\).*op 'mm'"),
    ):
        traced(program, 4)(X, W)
