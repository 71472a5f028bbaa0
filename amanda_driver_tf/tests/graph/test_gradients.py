"""Edits of gradients: aligned ones, at the op as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, editing, tool

from ..comparison import close, dense, equal
from .reference_programs import Ops, arrays, build, check, double, new_session, results, staged, v1

KINDS = ("placeholder", "resource", "reference")


def program(ops: Ops, x: Any, w: Any) -> Any:
    h = ops("Tanh", "act", ops("MatMul", "mm", x, w))
    return ops("Sum", "loss", ops("Square", "square", ops("AddV2", "sum", h, x)))


def shifted(gradient: Any) -> Any:
    return gradient * 0.5 + 0.25


VALUES = arrays((3, 3), (3, 3))


# Aligned.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "edit",
    [
        Edit("mm", "grad_out", shifted, 0),
        Edit("mm", "grad_in", shifted, 0),
        Edit("mm", "grad_in", shifted, 1),
        Edit("act", "grad_out", shifted, 0),
        Edit("act", "grad_in", shifted, 0),
        Edit("sum", "grad_in", shifted, 0),
        Edit("sum", "grad_in", shifted, 1),
        Edit("sum", "grad_out", shifted, 0),
        Edit("loss", "grad_out", shifted, 0),
    ],
    ids=lambda edit: f"{edit.name}-{edit.kind}-{edit.position}",
)
def test_aligned(kind: str, edit: Edit) -> None:
    check(program, VALUES, [edit], kind)


@pytest.mark.parametrize("gate", [False, True])
def test_aligned_and_forward_edits_together(gate: bool) -> None:
    edits = [
        Edit("mm", "before", double, 1),
        Edit("mm", "after", shifted, 0),
        Edit("mm", "grad_out", shifted, 0),
        Edit("mm", "grad_in", double, 1),
        Edit("act", "before", shifted, 0),
        Edit("act", "grad_in", double, 0),
        Edit("sum", "grad_in", shifted, 1),
    ]
    check(program, VALUES, edits, "resource", gate_gradients=gate)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("op_type", ["AddV2", "Mul", "Sub"])
def test_aligned_at_one_of_two_equal_inputs(op_type: str, position: int) -> None:
    def twice(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        return ops("Sum", "loss", ops("Square", "square", ops(op_type, "twice", y, y)))

    check(twice, arrays((3, 4)), [Edit("twice", "grad_in", shifted, position)])


def test_aligned_contribution_of_one_reader_of_a_weight() -> None:
    def shared(ops: Ops, x: Any, w: Any) -> Any:
        h = ops("Tanh", "act", ops("MatMul", "mm1", x, w))
        return ops("Sum", "loss", ops("MatMul", "mm2", h, w))

    for name in ("mm1", "mm2"):
        check(shared, VALUES, [Edit(name, "grad_in", shifted, 1)], "resource")
    check(shared, VALUES, [Edit("mm1", "grad_in", shifted, 1), Edit("mm2", "grad_in", double, 1)])


def test_aligned_whole_gradient_of_a_tensor_with_several_readers() -> None:
    def several(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        sums = ops("AddV2", "add", ops("Sin", "sin", y), ops("Square", "square", y))
        return ops("Sum", "loss", ops("Mul", "mul", sums, y))

    check(several, arrays((3, 4)), [Edit("exp", "grad_out", tf.square, 0)])


@pytest.mark.parametrize(
    "method",
    sorted(
        v1.AggregationMethod.__dict__.keys()
        & {"ADD_N", "EXPERIMENTAL_TREE", "EXPERIMENTAL_ACCUMULATE_N"}
    ),
)
def test_aggregation_methods(method: str) -> None:
    def several(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        parts = [ops("Mul", f"mul{i}", y, y) for i in range(3)] + [ops("Sin", "sin", y)]
        return ops("Sum", "loss", tf.add_n(parts))

    how = getattr(v1.AggregationMethod, method)
    for edit in (
        Edit("mul1", "grad_in", shifted, 0),
        Edit("exp", "grad_out", tf.square, 0),
        Edit("sin", "before", double, 0),
    ):
        check(several, arrays((3, 4)), [edit], aggregation_method=how)


def test_aligned_replacement_of_the_backward() -> None:
    edit = Edit("act", "backward", lambda gradient: gradient * 7.0)
    check(program, VALUES, [edit], "resource")
    check(
        program,
        VALUES,
        [edit, Edit("act", "grad_in", shifted, 0), Edit("act", "grad_out", double, 0)],
    )


def test_aligned_replacement_for_all_inputs() -> None:
    def analyse(context: OpContext) -> None:
        context.replace_backward_op(lambda g: [g * 2.0, g * 3.0])

    built = build(program, VALUES)
    with new_session(built.graph) as session:
        plain = results(session, built)
        with amanda.apply(tool(analyse, "sum")):
            found = results(session, built)
    x, w = VALUES
    h = np.tanh(x @ w)
    arriving = 2 * (h + x)
    inner = 2 * arriving * (1 - h * h)
    close(found, [plain[0], 3 * arriving + inner @ w.T, x.T @ inner])


@pytest.mark.parametrize("kind", ["grad_out", "grad_in"])
def test_staged_gives_what_host_gives(kind: str) -> None:
    host = check(program, VALUES, [Edit("mm", kind, shifted, 0)])
    routine = staged(lambda g: g * 0.5 + 0.25)
    equal(check(program, VALUES, [Edit("mm", kind, routine, 0)]), host)


def test_a_gradient_that_is_not_there_calls_nothing() -> None:
    called: list[str] = []
    graph = tf.Graph()
    with graph.as_default():
        table = tf.constant([[1.0], [2.0]])
        rows = tf.raw_ops.GatherV2(params=table, indices=[1, 1], axis=0, name="rows")
        grads = tf.gradients(tf.reduce_sum(rows), table)

    def analyse(context: OpContext) -> None:
        context.insert_after_backward_op(lambda g: called.append("indices"), grad_inputs=[1])
        context.insert_after_backward_op(lambda *g: called.append(str(len(g))))

    with new_session(graph) as session, amanda.apply(tool(analyse, "rows")):
        session.run(grads)
    assert called == ["3"]


# Slices.


@pytest.mark.parametrize("kind", ["resource", "reference"])
def test_slices_are_scaled(kind: str) -> None:
    (table,) = arrays((5, 2))

    def lookup(ops: Ops, table: Any) -> Any:
        rows = v1.nn.embedding_lookup(table, [0, 3, 3], name="rows")
        return tf.reduce_sum(tf.square(rows))

    def analyse(context: OpContext) -> None:
        context.insert_after_backward_op(
            lambda g: tf.IndexedSlices(g.values * 3.0, g.indices, g.dense_shape), grad_inputs=[0]
        )

    built = build(lookup, [table], None, kind)
    op_type = "ResourceGather" if kind == "resource" else "GatherV2"
    with new_session(built.graph) as session:
        session.run(built.init)
        plain = results(session, built)
        with amanda.apply(tool(analyse, op_type)):
            found = results(session, built)
    wanted = np.zeros((5, 2), np.float32)
    np.add.at(wanted, [0, 3, 3], 2 * table[[0, 3, 3]])
    close(dense(plain[1]), wanted)
    close(dense(found[1]), 3 * wanted)


def test_a_dense_gradient_in_the_place_of_slices_is_refused() -> None:
    def lookup(ops: Ops, table: Any) -> Any:
        return tf.reduce_sum(v1.nn.embedding_lookup(table, [0, 3, 3], name="rows"))

    built = build(lookup, arrays((5, 2)), None, "resource")
    edit = Edit("ResourceGather", "grad_in", lambda g: g.values + 1.0, 0)
    with new_session(built.graph) as session:
        session.run(built.init)
        with (
            amanda.apply(editing(edit)),
            pytest.raises(UnsupportedError, match="IndexedSlices"),
        ):
            results(session, built)


# Ways to differentiate.


@pytest.mark.parametrize(
    "edit",
    [
        Edit("mm", "before", double, 1),
        Edit("mm", "after", shifted, 0),
        Edit("mm", "grad_out", shifted, 0),
        Edit("act", "replace", tf.nn.softplus),
        Edit("act", "before", tf.sin, 0, True),
    ],
    ids=lambda edit: f"{edit.name}-{edit.kind}",
)
def test_two_losses_and_given_gradients(edit: Edit) -> None:
    def both(edits: list[Edit] | None) -> Any:
        graph = tf.Graph()
        with graph.as_default():
            ops = Ops(edits)
            x, w = tf.constant(VALUES[0]), tf.constant(VALUES[1])
            h = ops("Tanh", "act", ops("MatMul", "mm", x, w))
            first = ops("Sum", "loss", h)
            second = ops("Square", "square", h)
            fetches = [
                *v1.gradients(first, [x, w]),
                *v1.gradients(second, [x, h], grad_ys=[tf.ones_like(second) * 0.3]),
                *v1.gradients([first, second], w, name="named"),
                *v1.gradients(second, [x, w], stop_gradients=[h], unconnected_gradients="zero"),
            ]
        return graph, fetches

    graph, fetches = both([edit])
    with new_session(graph) as session:
        wanted = session.run(fetches)
    graph, fetches = both(None)
    with new_session(graph) as session, amanda.apply(editing(edit)):
        close(session.run(fetches), wanted)


@pytest.mark.parametrize(
    "edit",
    [
        Edit("mm", "before", double, 1),
        Edit("act", "before", shifted, 0),
        Edit("act", "after", shifted, 0),
        Edit("square", "before", shifted, 0),
    ],
    ids=lambda edit: f"{edit.name}-{edit.kind}",
)
@pytest.mark.parametrize("with_value", [True, False])
def test_second_derivatives(edit: Edit, with_value: bool) -> None:
    check(lambda ops, x, w: twice(ops, x, w, with_value), VALUES, [edit])


def twice(ops: Ops, x: Any, w: Any, with_value: bool = False) -> Any:
    h = ops("Sin", "act", ops("MatMul", "mm", x, w))
    loss = ops("Sum", "loss", ops("Square", "square", h))
    (first,) = v1.gradients(loss, [x])
    return tf.reduce_sum(tf.square(first)) + (loss if with_value else 0.0)


@pytest.mark.parametrize(
    "edit",
    [
        Edit("mm", "before", tf.sin, 1, autodiff=True),
        Edit("act", "after", tf.sin, 0, autodiff=True),
        Edit("act", "replace", lambda a: tf.cos(a) * a),
        Edit("act", "backward", shifted),
    ],
    ids=lambda edit: edit.kind,
)
def test_second_derivatives_of_gradients_that_are_computed_anew_are_refused(edit: Edit) -> None:
    with pytest.raises(UnsupportedError, match="differentiated once more"):
        check(twice, VALUES, [edit])


@pytest.mark.parametrize(
    "edit",
    [
        Edit("MatMul", "before", shifted, 1),
        Edit("MatMul", "before", tf.sin, 1, autodiff=True),
        Edit("MatMul", "grad_in", shifted, 0),
        Edit("Tanh", "replace", lambda a: tf.cos(a) * a),
    ],
    ids=lambda edit: f"{edit.kind}{' autodiff' * edit.autodiff}",
)
def test_recomputation(edit: Edit) -> None:
    def recomputing(ops: Ops, x: Any, w: Any) -> Any:
        block = tf.recompute_grad(lambda x, w: ops("Tanh", "act", ops("MatMul", "mm", x, w)))
        return ops("Sum", "loss", block(x, w) * tf.reduce_sum(x))

    check(recomputing, VALUES, [edit])


def test_custom_gradients_of_the_user() -> None:
    def custom(ops: Ops, x: Any, w: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def clipped(value: Any) -> Any:
            return ops("Exp", "exp", value), lambda g: tf.clip_by_value(g, -0.5, 0.5)

        return ops("Sum", "loss", clipped(ops("MatMul", "mm", x, w)))

    for edit in (
        Edit("mm", "before", shifted, 1),
        Edit("exp", "before", shifted, 0),
        Edit("mm", "grad_out", double, 0),
    ):
        check(custom, VALUES, [edit])


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (Edit("product", "grad_out", tf.sin, 0), np.sin(0.7) * 0.5),
        (Edit("product", "grad_in", tf.sin, 0), np.sin(0.7 * 0.5)),
        (Edit("product", "after", tf.sin, 0, autodiff=True), np.cos(0.5) * 0.7 * 0.5),
        (Edit("product", "backward", lambda g: (g * 3, g)), 2.1),
    ],
    ids=lambda value: value.kind if isinstance(value, Edit) else "",
)
@pytest.mark.parametrize("by_tape", [False, True])
def test_a_gradient_that_is_fed(edit: Edit, wanted: float, by_tape: bool) -> None:
    graph = tf.Graph()
    with graph.as_default(), tf.GradientTape() as tape:
        x, w, arriving = (v1.placeholder(tf.float32, [2]) for _ in range(3))
        tape.watch(x)
        product = tf.multiply(x, w, name="product")
        if by_tape:
            gradient = tape.gradient(product, x, arriving)
        else:
            (gradient,) = tf.gradients(product, [x], grad_ys=arriving)
    fed = {x: [1.0, 1.0], w: [0.5, 0.5], arriving: [0.7, 0.7]}
    with new_session(graph) as session, amanda.apply(editing(edit)):
        close(session.run(gradient, fed), np.full(2, wanted, np.float32))
