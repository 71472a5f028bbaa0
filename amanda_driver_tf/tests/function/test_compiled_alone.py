"""Ops that a CPU runs only where XLA compiles them, in functions in which routines run."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import after, before

from ..comparison import close
from .reference_programs import outside

pytestmark = pytest.mark.filterwarnings("ignore:A function that XLA should compile")


def values(*sizes: tuple[int, ...]) -> list[Any]:
    random = np.random.default_rng(0)
    return [tf.constant(random.normal(size=size).astype(np.float32)) for size in sizes]


def looking() -> Any:
    """Return a tool that observes before and after every op, forward and backward."""
    tool = amanda.Tool()

    def look(*values: Any) -> None:
        return None

    tool.add_inst_for_op(lambda c: c.insert_before_op(look))
    tool.add_inst_for_op(lambda c: c.insert_after_op(look), require_outputs=True)
    tool.add_inst_for_op(lambda c: c.insert_before_backward_op(look), backward=True)
    tool.add_inst_for_op(
        lambda c: c.insert_after_backward_op(look), backward=True, require_outputs=True
    )
    return tool


X2, W2, GROUPED2 = values((2, 8, 8, 4), (3, 3, 4, 6), (3, 3, 2, 6))
X3, W3, GROUPED3 = values((1, 4, 4, 4, 4), (2, 2, 2, 4, 6), (2, 2, 2, 2, 6))
FIRST2 = tf.transpose(X2, [0, 3, 1, 2])
nn = tf.nn

# Those of the first half lack a kernel with oneDNN, too; the others do without it.
PROGRAMS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "grouped, 3-D": (lambda x, w: nn.conv3d(x, w, [1] * 5, "SAME"), [X3, GROUPED3]),
    "depth to space": (lambda x: nn.depth_to_space(x, 2, data_format="NCHW"), [FIRST2]),
    "space to depth": (lambda x: nn.space_to_depth(x, 2, data_format="NCHW"), [FIRST2]),
    "max-pooled, channels first": (
        lambda x: nn.max_pool2d(x, 2, 2, "SAME", data_format="NCHW"),
        [FIRST2],
    ),
    "grouped": (lambda x, w: nn.conv2d(x, w, 2, "SAME"), [X2, GROUPED2]),
    "channels first": (
        lambda x, w: nn.conv2d(x, w, 1, "SAME", data_format="NCHW"),
        [FIRST2, W2],
    ),
    "dilated": (lambda x, w: nn.conv2d(x, w, 1, "SAME", dilations=2), [X2, W2]),
    # There is a kernel for the largest values, but not for the smallest.
    "smallest": (lambda x: nn.approx_min_k(x, 2).values, values((4, 16))),
    "channels first, 3-D": (
        lambda x, w: nn.conv3d(x, w, [1] * 5, "SAME", data_format="NCDHW"),
        [X3, W3],
    ),
    "transposed": (
        lambda x, w: nn.conv2d_transpose(x, w, (2, 4, 10, 10), 1, "VALID", data_format="NCHW"),
        [tf.transpose(values((2, 8, 8, 6))[0], [0, 3, 1, 2]), W2],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("tape", ["inside", "outside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_op_is_seen_in_what_only_xla_runs(name: str, tape: str) -> None:
    program, given = PROGRAMS[name]
    if tape == "inside":
        run = tf.function(lambda *args: outside(program, *args), jit_compile=True)
    else:
        compiled = tf.function(program, jit_compile=True)
        run = lambda *args: outside(compiled, *args)  # noqa: E731
    wanted = run(*given)
    with amanda.apply(looking()):
        found = run(*given)
        close(run(*given), found)
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    close(run(*given), wanted)


def in_branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 1e9, lambda: x * 2, lambda: shuffled(x))


def in_loop(x: Any) -> Any:
    def turn(i: Any, x: Any) -> Any:
        return i + 1, shuffled(x)

    return tf.while_loop(lambda i, _: i < 2, turn, (0, x), maximum_iterations=2)[1]


def in_function(x: Any) -> Any:
    return tf.function(shuffled)(x)


def shuffled(x: Any) -> Any:
    """Permute values by ops for which a CPU has no kernel."""
    deep = nn.space_to_depth(tf.tanh(x), 2, data_format="NCHW")
    return nn.depth_to_space(deep, 2, data_format="NCHW")


@pytest.mark.slow
@pytest.mark.parametrize("op_type", ["Exp", "Tanh"], ids=["beside", "inside"])
@pytest.mark.parametrize("inner", [in_branch, in_loop, in_function], ids=lambda f: f.__name__)
def test_what_is_nested_in_a_compiled_function(inner: Callable[..., Any], op_type: str) -> None:
    """The routine is in the function that only XLA runs, or beside its call."""

    def layer(x: Any) -> Any:
        return inner(tf.exp(x))

    run = tf.function(lambda x: outside(layer, x), jit_compile=True)
    wanted = run(FIRST2)
    ran = []
    with amanda.apply(after(op_type, lambda value: ran.append(1))):
        found = run(FIRST2)
    assert ran
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_compiled_function_that_is_called_beside_a_routine_stays_compiled() -> None:
    compiled = tf.function(shuffled, jit_compile=True)
    run = tf.function(lambda x: compiled(tf.exp(x)))
    wanted = run(FIRST2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amanda.apply(after("Exp", lambda value: None)):
            close(run(FIRST2), wanted)


def test_edits_in_what_only_xla_runs() -> None:
    def layer(x: Any, w: Any) -> Any:
        return nn.conv3d(tf.tanh(x), w, [1] * 5, "SAME")

    compiled = tf.function(layer, jit_compile=True)
    wanted = outside(compiled, X3, GROUPED3 * 2)
    with amanda.apply(before("Conv3D", lambda w: w * 2, 1)):
        found = outside(compiled, X3, GROUPED3)
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_pools_whose_gradient_runs_beside_them_alone() -> None:
    """A routine in between separates them, in a function without XLA, too."""
    program, given = PROGRAMS["max-pooled, channels first"]
    run = tf.function(lambda *args: outside(program, *args))
    try:
        wanted = run(*given)
    except tf.errors.InvalidArgumentError:
        pytest.skip("this TensorFlow has no such kernel on a CPU")
    with amanda.apply(looking()):
        close(run(*given), wanted)


@pytest.mark.slow
def test_keras_layers_that_keras_compiles() -> None:
    def losses(eager: bool = False) -> Any:
        keras.utils.set_random_seed(0)
        convolution = keras.layers.Conv3D(6, 2, groups=2, data_format="channels_first")
        model = keras.Sequential([convolution])
        model.compile("sgd", "mse", run_eagerly=eager)
        x, y = np.ones((4, 4, 4, 4, 4), np.float32), np.ones((4, 6, 3, 3, 3), np.float32)
        return model.fit(x, y, epochs=2, verbose=0).history["loss"]

    wanted = losses()
    for eager in (False, True):
        with amanda.apply(looking()):
            found = losses(eager)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
