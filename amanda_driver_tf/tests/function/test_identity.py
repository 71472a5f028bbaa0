"""Ids, contexts, names and facts of the ops in functions."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.testing.kit.tools import analysed, before, tool

from ..comparison import close
from .reference_programs import values

X, W = values((2, 3), (3, 3))


def layer(x: Any, w: Any) -> Any:
    return tf.tanh(tf.matmul(x, w))


def running() -> tuple[list[tuple[str, int]], amanda.Tool]:
    """Return names and ids of the ops that run."""
    seen: list[tuple[str, int]] = []

    def analyse(context: OpContext) -> None:
        pair = (context.name, context.get_op_id())
        context.insert_before_op(lambda *v: seen.append(pair))

    return seen, tool(analyse)


def test_the_same_op_has_the_same_id_in_every_shape() -> None:
    function = tf.function(layer)
    shapes = [X, X[:1], tf.concat([X, X], 0)]
    seen, watch = running()
    runs = []
    with amanda.apply(watch):
        for x in shapes:
            function(x, W)
            runs.append(sorted(seen))
            seen.clear()
    assert runs[0] == runs[1] == runs[2]
    assert len({number for _, number in runs[0]}) == len(runs[0])


def test_forward_inference_and_traced_gradients_share_their_ops() -> None:
    function = tf.function(layer)
    seen, watch = running()
    with amanda.apply(watch):
        function(X, W)
        plain = sorted(seen)
        seen.clear()
        with tf.GradientTape() as tape:
            tape.watch(W)
            y = function(X, W)
        taped = sorted(seen)
        tape.gradient(y, W)
    assert plain == taped


def test_equal_ops_at_other_places_have_other_ids() -> None:
    function = tf.function(lambda x: tf.tanh(tf.tanh(tf.tanh(x))))
    seen, watch = running()
    with amanda.apply(watch):
        function(X)
    tanhs = [number for name, number in seen if "Tanh" in name]
    assert len(set(tanhs)) == 3


PROGRAM = """
    import os
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf
    import amanda

    if {disturb}:
        for _ in range(5):
            tf.function(lambda x: tf.tanh(x))(tf.ones(2))
    w = tf.Variable(tf.ones((3, 3)))
    inner = tf.function(lambda x: tf.tanh(tf.matmul(x, w)))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(inner(inner(x)))
            for _ in tf.range(2):
                y += tf.reduce_sum(inner(x))
        return tape.gradient(y, w)

    tool, seen = amanda.Tool(), []
    tool.add_inst_for_op(lambda c: seen.append((c.op_type, c.get_op_id())))
    tool.add_inst_for_op(lambda c: seen.append((c.op_type, c.get_backward_op_id())), backward=True)
    with amanda.apply(tool):
        step(tf.constant([[1.0, 2.0, 3.0]]))
    print(sorted(seen))
"""


@pytest.mark.slow
def test_ids_are_the_same_in_another_process(tmp_path: Path) -> None:
    outputs = []
    for disturb in (False, True):
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(PROGRAM.format(disturb=disturb)))
        ran = subprocess.run(
            [sys.executable, str(program)], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        outputs.append(ran.stdout)
    assert "MatMul" in outputs[0]
    assert outputs[0] == outputs[1]


def test_functions_of_one_name_over_other_variables_are_other_ops() -> None:
    def make(seed: int) -> Any:
        variable = tf.Variable(W + seed)
        return variable, tf.function(lambda x: tf.matmul(x, variable))

    models = [make(seed) for seed in range(3)]
    masks: dict[int, Any] = {}

    def analyse(context: OpContext) -> None:
        mask = tf.cast(context.value(1) > 0.5, tf.float64)
        masks[context.get_op_id()] = mask
        context.insert_before_op(lambda w: w * mask, inputs=[1])

    wanted = [tf.matmul(X, v * tf.cast(v > 0.5, tf.float64)).numpy() for v, _ in models]
    with amanda.apply(tool(analyse, "MatMul")):
        for (_, function), expected in zip(models, wanted, strict=True):
            close(function(X), expected)
    assert len(masks) == 3


@pytest.mark.slow
def test_a_new_model_is_not_taken_for_one_that_is_gone() -> None:
    def analyse(context: OpContext) -> None:
        mask = tf.cast(context.value(1) > 0, tf.float64)
        context.insert_before_op(lambda w: w * mask, inputs=[1])

    masking = tool(analyse, "MatMul")
    random = np.random.default_rng(0)
    counts = []
    for _ in range(8):
        weight = random.normal(size=(3, 3))
        variable = tf.Variable(weight)
        function = tf.function(lambda x, variable=variable: tf.matmul(x, variable))
        with amanda.apply(masking) as handle:
            found = function(X)
            assert handle.session is not None
            counts.append(len(list(handle.session.contexts())))
        close(found, X.numpy() @ (weight * (weight > 0)))
        del function, variable
        gc.collect()
    # Data of models that are gone is dropped.
    assert counts[-1] <= counts[1] + 3


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True], ids=["lambda", "def"])
def test_contexts_do_not_grow_with_retracing(named: bool) -> None:
    contexts, watch = analysed()
    variable = tf.Variable(W)

    def product(x: Any) -> Any:
        return layer(x, variable)

    inner = tf.function(product if named else lambda x: product(x))

    @tf.function(reduce_retracing=False)  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = inner(x)
        return tape.gradient(y, variable)

    def call(rows: int) -> None:
        x = tf.constant(np.zeros((rows, 3)))
        with tf.GradientTape() as tape:
            y = inner(x)
        tape.gradient(y, variable)
        step(x)

    counts: list[int] = []
    with amanda.apply(watch, tool(lambda c: None, backward=True)) as handle:
        assert handle.session is not None
        for rows in range(1, 16):
            call(rows)
            functions = [c for c in handle.session.contexts() if "/function" in c.namespace]
            counts.append(len(functions))
    assert len(set(counts)) == 1, counts
    assert len([c for c in contexts if c.op_type == "MatMul"]) == 1


# Facts.


def test_facts_of_an_op() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def program(x: Any, w: Any) -> Any:
        with tf.name_scope("block"):
            return tf.matmul(x, w, transpose_b=True, name="product")

    facts: list[Any] = []

    def analyse(context: OpContext) -> None:
        a, b = context.get_inputs()
        facts.append(
            (
                context.namespace.split("/")[::2],
                context.name,
                context.module_path,
                context.zone,
                (context.source or "").partition(":")[0],
                context["type"],
                context.get_op().type,
                context.attrs["transpose_b"],
                tuple(a.shape),
                tuple(b.shape),
                context.is_forward(),
            )
        )
        # A symbolic tensor has no value.
        assert not isinstance(a, tf.__internal__.EagerTensor)

    with amanda.apply(tool(analyse, "MatMul")):
        program(X, W)
    (found,) = facts
    assert found == (
        ["tensorflow", "function"],
        "block/product",
        "block",
        "model",
        "test_identity.py",
        "matmul",
        "MatMul",
        True,
        (2, 3),
        (3, 3),
        True,
    )


def test_values_of_variables_and_constants_wherever_they_are_read() -> None:
    variable, constant = tf.Variable(W), tf.constant(W + 1)
    inner = tf.function(lambda x: tf.matmul(tf.matmul(x, variable, name="v"), constant, name="c"))
    programs = [
        inner,
        tf.function(lambda x: inner(x)),
        tf.function(lambda x: tf.function(lambda x: inner(x))(x)),
        tf.function(
            lambda x: tf.while_loop(lambda i, _: i < 1, lambda i, x: (i + 1, inner(x)), (0, x))[1]
        ),
        tf.function(lambda x: tf.cond(tf.reduce_sum(x) < 1e9, lambda: inner(x), lambda: x)),
    ]
    for program in programs:
        found: dict[str, list[Any]] = {}

        def analyse(context: OpContext, found: dict[str, list[Any]] = found) -> None:
            found[context.name.rpartition("/")[2]] = [context.value(0), context.value(1)]

        with amanda.apply(tool(analyse, "MatMul")):
            program(X)
        assert found["v"][0] is None
        assert found["c"][0] is None
        close(found["v"][1], W)
        close(found["c"][1], W + 1)


def test_value_of_a_variable_that_is_an_argument() -> None:
    variable, found = tf.Variable(W), list[Any]()
    function = tf.function(lambda x, w: tf.matmul(x, w))
    with amanda.apply(tool(lambda c: found.append(c.value(1)), "MatMul")):
        function(X, variable)
    close(found[0], W)


def test_value_in_a_step_that_also_updates_the_variable() -> None:
    variable, found = tf.Variable(W), list[Any]()

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.matmul(x, variable))
        variable.assign_sub(tape.gradient(y, variable))

    with amanda.apply(tool(lambda c: found.append(c.value(1).numpy()), "MatMul")):
        step(X)
        step(X)
    close(found, [W.numpy()])


def read_after_assignments() -> dict[str, Callable[[Any, Any], Any]]:
    """Return programs that read a variable, write it, and read it again as the op "again"."""
    read: Any = tf.function(lambda x, v: tf.matmul(x, v, name="again"))

    def captured(v: Any) -> Any:
        return tf.function(lambda x: tf.matmul(x, v, name="again"))

    def twice(x: Any, v: Any, again: Callable[[], Any]) -> Any:
        first = tf.matmul(x, v, name="first")
        v.assign_add(v)
        return first + again()

    return {
        "in the same function": lambda x, v: twice(x, v, lambda: tf.matmul(x, v, name="again")),
        "in a function": lambda x, v: twice(x, v, lambda: captured(v)(x)),
        "in a function of a function": lambda x, v: twice(
            x, v, lambda: tf.function(lambda x: captured(v)(x))(x)
        ),
        "in a branch": lambda x, v: twice(
            x, v, lambda: tf.cond(x[0, 0] < 1e9, lambda: tf.matmul(x, v, name="again"), lambda: x)
        ),
        "in a loop": lambda x, v: twice(
            x,
            v,
            lambda: tf.while_loop(
                lambda i, _: i < 2, lambda i, x: (i + 1, tf.matmul(x, v, name="again")), (0, x)
            )[1],
        ),
        "as an argument": lambda x, v: twice(x, v, lambda: read(x, v)),
        "written by a function": lambda x, v: (
            tf.matmul(x, v, name="first"),
            tf.function(lambda: v.assign_add(v))(),
            tf.matmul(x, v, name="again"),
        )[2],
    }


@pytest.mark.parametrize("name", read_after_assignments())
def test_a_variable_that_the_call_has_written_has_no_known_value(name: str) -> None:
    variable, found = tf.Variable(W), dict[str, Any]()
    function = tf.function(read_after_assignments()[name], autograph=False)

    def analyse(context: OpContext) -> None:
        found[context.name.rpartition("/")[2]] = context.value(1)

    with amanda.apply(tool(analyse, "MatMul")):
        function(X, variable)
    close(found["first"], W)
    assert found["again"] is None
    close(variable, 2 * W)


def test_values_are_not_kept_alive() -> None:
    kept: list[OpContext] = []
    with amanda.apply(tool(kept.append, "MatMul"), before("MatMul", lambda *v: None)):
        tf.function(layer)(X, W)
    try:
        kept[0].get_inputs()
    except amanda.AmandaError as error:
        assert "stale-context" in str(error)  # noqa: PT017
    else:
        raise AssertionError("symbolic tensors were kept")


def test_gradients_of_ops_are_paired_in_a_whole_step() -> None:
    variable = tf.Variable(W)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.nn.relu(tf.matmul(x, variable)))
        variable.assign_sub(0.1 * tape.gradient(y, variable))
        return y

    pairs: list[tuple[str, str | None]] = []

    def analyse(context: OpContext) -> None:
        pairs.append((context.op_type, context.forward.op_type if context.forward else None))

    with amanda.apply(tool(analyse, backward=True)):
        step(X)
    assert ("ReluGrad", "Relu") in pairs
    assert [pair for pair in pairs if pair[1] == "MatMul"] == [("MatMul", "MatMul")]
    assert not [pair for pair in pairs if "Assign" in pair[0]]
