"""Forward edits pass straight through; the oracle is a reference graph that has them written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import Edit, editing

from ..comparison import equal
from .reference_programs import Ops, arrays, check, double, staged

KINDS = ("placeholder", "resource", "reference")


def dense(ops: Ops, x: Any, w: Any) -> Any:
    return ops("Sum", "loss", ops("Square", "square", ops("MatMul", "mm", x, w)))


def shifted(value: Any) -> Any:
    return value * 0.5 + 0.25


# Single ops.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 1, None])
def test_inputs(kind: str, position: int | None) -> None:
    routine: Callable[..., Any] = shifted
    if position is None:

        def routine(*values: Any) -> Any:
            return [shifted(v) for v in values] if len(values) > 1 else shifted(values[0])

    check(dense, arrays((4, 3), (3, 2)), [Edit("mm", "before", routine, position)], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs(kind: str) -> None:
    check(dense, arrays((4, 3), (3, 2)), [Edit("mm", "after", shifted, 0)], kind)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_gradients(kind: str, gate: bool) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        h = ops("Tanh", "act", ops("MatMul", "mm", x, w))
        return ops("Sum", "loss", ops("AddV2", "sum", h, ops("MatMul", "mm2", h, w)))

    for edit in (Edit("mm", "before", double, 1), Edit("mm", "after", shifted, 0)):
        check(program, arrays((3, 3), (3, 3)), [edit], kind, gate_gradients=gate)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_edited_in_one_of_its_readers(kind: str) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        h = ops("Tanh", "act", ops("MatMul", "mm1", x, w))
        return ops("Sum", "loss", ops("MatMul", "mm2", h, w))

    check(program, arrays((4, 3), (3, 3)), [Edit("mm2", "before", shifted, 1)], kind)


def test_a_value_read_by_the_edited_op_and_by_others() -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        h = ops("Sigmoid", "act", ops("MatMul", "mm", x, w))
        left, right = ops("Exp", "exp", h), ops("Square", "square", h)
        return ops("Sum", "loss", ops("Mul", "mul", left, right))

    for edit in (
        Edit("exp", "before", shifted, 0),
        Edit("square", "before", shifted, 0),
        Edit("act", "after", shifted, 0),
        Edit("mul", "before", shifted, 1),
        Edit("exp", "after", double, 0),
    ):
        check(program, arrays((4, 3), (3, 3)), [edit])


# One tensor several times.


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("op_type", ["AddV2", "Mul", "Sub", "RealDiv", "Maximum"])
def test_a_tensor_twice_with_one_position_edited(op_type: str, position: int) -> None:
    def program(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        return ops("Sum", "loss", ops("Square", "square", ops(op_type, "twice", y, y)))

    check(program, arrays((3, 4)), [Edit("twice", "before", shifted, position)])


@pytest.mark.parametrize("op_type", ["AddV2", "Mul"])
def test_a_tensor_twice_with_both_positions_edited_differently(op_type: str) -> None:
    def program(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        return ops("Sum", "loss", ops("Square", "square", ops(op_type, "twice", y, y)))

    edits = [Edit("twice", "before", shifted, 0), Edit("twice", "before", double, 1)]
    check(program, arrays((3, 4)), edits)


def test_a_product_with_itself_as_matrix() -> None:
    def program(ops: Ops, x: Any) -> Any:
        return ops("Sum", "loss", ops("Sin", "sin", ops("MatMul", "mm", x, x)))

    check(program, arrays((3, 3)), [Edit("mm", "before", shifted, 1)])


@pytest.mark.parametrize(
    "edit",
    [
        Edit("sum1", "before", shifted, 0),
        Edit("sum1", "before", shifted, 1),
        Edit("sum2", "before", shifted, 0),
        Edit("mm2", "before", shifted, 0),
        Edit("sum1", "after", shifted, 0),
        Edit("act1", "after", shifted, 0),
    ],
    ids=lambda edit: f"{edit.name}-{edit.kind}-{edit.position}",
)
def test_residual_sums(edit: Edit) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        h1 = ops("AddV2", "sum1", x, ops("Tanh", "act1", ops("MatMul", "mm1", x, w)))
        h2 = ops("AddV2", "sum2", h1, ops("Tanh", "act2", ops("MatMul", "mm2", h1, w)))
        return ops("Sum", "loss", ops("Square", "square", h2))

    check(program, arrays((4, 3), (3, 3)), [edit], "resource")


# Chains and several edits.


def test_every_op_of_a_chain() -> None:
    def program(ops: Ops, x: Any) -> Any:
        for index in range(6):
            x = ops("Tanh", f"act{index}", x)
        return ops("Sum", "loss", x)

    check(program, arrays((3, 4)), [Edit("Tanh", "before", shifted, 0)])
    check(program, arrays((3, 4)), [Edit("Tanh", "after", shifted, 0)])


def test_edits_before_and_after_in_order() -> None:
    edits = [
        Edit("mm", "before", shifted, 1),
        Edit("mm", "before", lambda v: v + 1.0, 1),
        Edit("mm", "before", double, 0),
        Edit("mm", "after", double, 0),
        Edit("mm", "after", lambda v: v - 1.0, 0),
        Edit("square", "before", shifted, 0),
    ]
    check(dense, arrays((4, 3), (3, 2)), edits, "resource")


def test_tools_in_order() -> None:
    edits = [Edit("mm", "before", shifted, 1), Edit("mm", "before", double, 1)]
    check(dense, arrays((4, 3), (3, 2)), edits, tools=[editing(edits[0]), editing(edits[1])])


def test_a_staged_and_a_host_routine_at_one_point() -> None:
    edits = [
        Edit("mm", "before", shifted, 1),
        Edit("mm", "before", staged(double), 1),
        Edit("mm", "before", lambda v: v + 1.0, 1),
    ]
    check(dense, arrays((4, 3), (3, 2)), edits, "resource")


@pytest.mark.parametrize("kind", ["before", "after"])
def test_staged_routines_give_what_host_routines_give(kind: str) -> None:
    position = 1 if kind == "before" else 0
    values = arrays((4, 3), (3, 2))
    host = check(dense, values, [Edit("mm", kind, shifted, position)])
    native = check(dense, values, [Edit("mm", kind, staged(lambda v: v * 0.5 + 0.25), position)])
    equal(native, host)


def test_a_staged_routine_reads_its_mask() -> None:
    mask = np.array([[1, 0], [0, 1], [1, 1]], np.float32)

    @amanda.staged
    def masked(value: Any) -> Any:
        return value * mask

    check(dense, arrays((4, 3), (3, 2)), [Edit("mm", "before", masked, 1)], "resource")


# Differentiated edits and replacements.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "edit",
    [
        Edit("mm", "before", tf.square, 1, True),
        Edit("mm", "after", tf.sin, 0, True),
        Edit("act", "before", tf.square, 0, True),
    ],
    ids=lambda edit: f"{edit.name}-{edit.kind}",
)
def test_differentiated_edits(kind: str, edit: Edit) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        return ops("Sum", "loss", ops("Tanh", "act", ops("MatMul", "mm", x, w)))

    check(program, arrays((4, 3), (3, 2)), [edit], kind)


def test_differentiated_edit_of_one_of_two_equal_inputs() -> None:
    def program(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        return ops("Sum", "loss", ops("Mul", "twice", y, y))

    check(program, arrays((3, 4)), [Edit("twice", "before", tf.sin, 1, True)])


def test_differentiated_and_straight_edits_together() -> None:
    edits = [
        Edit("mm", "before", tf.sin, 1, True),
        Edit("mm", "before", shifted, 1),
        Edit("mm", "after", tf.square, 0, True),
        Edit("mm", "after", double, 0),
    ]
    check(dense, arrays((4, 3), (3, 2)), edits)


@pytest.mark.parametrize(
    ("name", "routine"),
    [
        ("act", tf.nn.softplus),
        ("act", tf.identity),
        ("mm", lambda x, w: tf.matmul(x, w * w) + 1.0),
        ("mm", staged(lambda x, w: tf.matmul(tf.sin(x), w))),
    ],
)
def test_replacements(name: str, routine: Any) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        return ops("Sum", "loss", ops("Tanh", "act", ops("MatMul", "mm", x, w)))

    check(program, arrays((4, 3), (3, 2)), [Edit(name, "replace", routine)], "resource")


def test_a_replacement_between_edits() -> None:
    edits = [
        Edit("act", "before", shifted, 0),
        Edit("act", "replace", tf.nn.softplus),
        Edit("act", "after", double, 0),
        Edit("act", "grad_out", lambda g: g * 3.0, 0),
        Edit("act", "grad_in", lambda g: g + 1.0, 0),
    ]

    def program(ops: Ops, x: Any, w: Any) -> Any:
        return ops("Sum", "loss", ops("Tanh", "act", ops("MatMul", "mm", x, w)))

    check(program, arrays((4, 3), (3, 2)), edits)
