"""Short ways to make what nearly every test needs: tools of one action on one op type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from amanda_core import OpContext, Tool

Routine = Callable[..., Any]
Positions = Sequence[int] | None


def tool(
    analyse: Callable[[OpContext], Any],
    op_type: str | None = None,
    *,
    backward: bool = False,
    require_outputs: bool = False,
) -> Tool:
    """A tool with one analysis routine, for one type of (backward) op or for all."""

    def chosen(context: OpContext) -> None:
        if op_type in (None, context.op_type):
            analyse(context)

    made = Tool()
    made.add_inst_for_op(chosen, backward, require_outputs)
    return made


def before(op_type: str, routine: Routine, inputs: Positions = None) -> Tool:
    """A tool that inserts `routine` before every op of a type."""
    return tool(lambda context: context.insert_before_op(routine, inputs=inputs), op_type)


def after(op_type: str, routine: Routine, outputs: Positions = None) -> Tool:
    """A tool that inserts `routine` after every op of a type."""
    return tool(lambda context: context.insert_after_op(routine, outputs=outputs), op_type)


def replacing(op_type: str, routine: Routine, inputs: Positions = None) -> Tool:
    """A tool that replaces every op of a type."""
    return tool(lambda context: context.replace_op(routine, inputs=inputs), op_type)


def replacing_backward(op_type: str, routine: Routine) -> Tool:
    """A tool that replaces the whole backward of every op of a type (aligned)."""
    return tool(lambda context: context.replace_backward_op(routine), op_type)


def at_outputs(
    op_type: str, routine: Routine, grad_outputs: Positions = None, *, late: bool = False
) -> Tool:
    """A tool that inserts at the gradients of outputs (aligned), asked before or after the op."""
    return tool(
        lambda c: c.insert_before_backward_op(routine, grad_outputs=grad_outputs),
        op_type,
        require_outputs=late,
    )


def at_inputs(
    op_type: str, routine: Routine, grad_inputs: Positions = None, *, late: bool = False
) -> Tool:
    """A tool that inserts at the gradients of inputs (aligned), asked before or after the op."""
    return tool(
        lambda c: c.insert_after_backward_op(routine, grad_inputs=grad_inputs),
        op_type,
        require_outputs=late,
    )


def watching() -> tuple[list[str], Tool]:
    """The types of the ops that run, in order, and the tool that writes them down."""
    seen: list[str] = []

    def analyse(context: OpContext) -> None:
        op_type = context.op_type
        context.insert_before_op(lambda *values: seen.append(op_type))

    return seen, tool(analyse)


def watching_backward() -> tuple[list[tuple[str, str | None]], Tool]:
    """The backward ops that run, each with the type of its forward op, and the tool."""
    seen: list[tuple[str, str | None]] = []

    def analyse(context: OpContext) -> None:
        forward = context.forward.op_type if context.forward is not None else None
        pair = (context.op_type, forward)
        context.insert_before_backward_op(lambda *grads: seen.append(pair))

    return seen, tool(analyse, backward=True)


def noting(into: list[Any], routine: Routine) -> Routine:
    """A routine of one value that also keeps what it gets."""

    def noted(value: Any) -> Any:
        into.append(value)
        return routine(value)

    return noted


def idle() -> Tool:
    """A tool that analyses at all four points and inserts nothing."""
    made = Tool()
    for backward in (False, True):
        for require_outputs in (False, True):
            made.add_inst_for_op(lambda context: None, backward, require_outputs)
    return made


def normal(*shape: int, seed: int = 0) -> tf.Tensor:
    """A random tensor, made by no op."""
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return tf.constant(values)


def variable(*shape: int, seed: int = 0) -> tf.Variable:
    """A random variable."""
    return tf.Variable(normal(*shape, seed=seed))


def numpy(value: Any) -> Any:
    """A tensor, or slices of one, as an array."""
    return tf.convert_to_tensor(value).numpy()


def equal(actual: Any, expected: Any) -> None:
    """Compare values, shapes and dtypes of tensors bit by bit; None equals None."""
    tf.nest.map_structure(_equal, actual, expected)


def _equal(actual: Any, expected: Any) -> None:
    if expected is None or actual is None:
        assert actual is expected
        return
    left, right = numpy(actual), numpy(expected)
    assert left.dtype == right.dtype
    np.testing.assert_array_equal(left, right)


def close(actual: Any, expected: Any) -> None:
    """Compare tensors whose sums may have another order."""
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=1e-5, atol=1e-6)
