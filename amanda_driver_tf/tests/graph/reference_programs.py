"""Programs that are built twice: as a graph that tools instrument, and with the edits written in.

`Ops` makes operators by their names. In the reference program, which runs without tools, it applies
to each op what the tools were requested to do there. An edited value replaces the original, and its
gradient passes straight through, by `tf.custom_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext, Tool
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, Routine, editing, tool

from ..comparison import close, dense, equal

v1 = tf.compat.v1

Program = Callable[..., Any]


def counting(op: str | None = None) -> tuple[list[str], Tool]:
    """Return a tool and its list of the forward ops that run, one entry per execution."""
    seen: list[str] = []

    def analyse(context: OpContext) -> None:
        name = context.name
        context.insert_after_op(lambda *values: seen.append(name))

    return seen, tool(analyse, op)


def analysing(visit: Callable[[OpContext], Any]) -> Tool:
    """Return a tool that analyses forward and backward ops alike."""
    made = Tool()
    made.add_inst_for_op(visit)
    made.add_inst_for_op(visit, backward=True)
    return made


def double(value: Any) -> Any:
    """Edit a value."""
    return value * 2.0


def staged(routine: Routine) -> Routine:
    """Return a staged copy of `routine`, which `amanda.staged` would mark in place."""

    @amanda.staged
    def run(*values: Any) -> Any:
        return routine(*values)

    return run


def straight(value: Any, routine: Routine) -> Any:
    """Return `routine(value)` with the gradient of `value`."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(tensor: Any) -> Any:
        new = routine(tensor)
        new = tf.identity(tensor) if new is None else tf.convert_to_tensor(new)
        return new, lambda gradient: gradient

    return run(value)


def at_gradient(value: Any, routine: Routine) -> Any:
    """Return `value` with a gradient changed by `routine`."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(tensor: Any) -> Any:
        def back(gradient: Any) -> Any:
            new = routine(gradient)
            return gradient if new is None else new

        return tf.identity(tensor), back

    return run(value) if value.dtype.is_floating else value


class Ops:
    """Makes operators; in the reference program, with `edits` written in."""

    def __init__(self, edits: Iterable[Edit] | None = None) -> None:
        self.edits = None if edits is None else list(edits)

    def __call__(self, op_type: str, name: str, *inputs: Any, **attrs: Any) -> Any:
        """Make an op with one output."""

        def run(*values: Any) -> Any:
            return _RUN[op_type](*values, name=name, **attrs)

        if self.edits is None:
            return run(*inputs)
        mine = [edit for edit in self.edits if edit.name in (op_type, name)]
        values = [tf.convert_to_tensor(value) for value in inputs]
        for edit in reversed([edit for edit in mine if edit.kind == "grad_in"]):
            for index in _positions(edit, values):
                values[index] = at_gradient(values[index], edit.routine)
        for edit in mine:
            if edit.kind == "before":
                for index in _positions(edit, values):
                    value = values[index]
                    values[index] = (
                        edit.routine(value) if edit.autodiff else straight(value, edit.routine)
                    )
        for edit in mine:
            if edit.kind == "replace":
                run = edit.routine
            if edit.kind == "backward":
                run = _with_backward(run, edit.routine)
        output = run(*values)
        for edit in mine:
            if edit.kind == "after":
                output = edit.routine(output) if edit.autodiff else straight(output, edit.routine)
        for edit in reversed([edit for edit in mine if edit.kind == "grad_out"]):
            output = at_gradient(output, edit.routine)
        return output


def _positions(edit: Edit, values: Sequence[Any]) -> Sequence[int]:
    return range(len(values)) if edit.position is None else [edit.position]


def _with_backward(run: Routine, routine: Routine) -> Routine:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def replaced(*values: Any) -> Any:
        return run(*values), lambda gradient: routine(gradient)

    return lambda *values: replaced(*values)


_RUN: dict[str, Callable[..., Any]] = {
    "MatMul": lambda x, y, name, **a: tf.raw_ops.MatMul(a=x, b=y, name=name, **a),
    "Mul": lambda x, y, name: tf.raw_ops.Mul(x=x, y=y, name=name),
    "AddV2": lambda x, y, name: tf.raw_ops.AddV2(x=x, y=y, name=name),
    "SelectV2": lambda c, x, y, name: tf.raw_ops.SelectV2(condition=c, t=x, e=y, name=name),
    "Sub": lambda x, y, name: tf.raw_ops.Sub(x=x, y=y, name=name),
    "RealDiv": lambda x, y, name: tf.raw_ops.RealDiv(x=x, y=y, name=name),
    "Maximum": lambda x, y, name: tf.raw_ops.Maximum(x=x, y=y, name=name),
    "BiasAdd": lambda x, y, name: tf.raw_ops.BiasAdd(value=x, bias=y, name=name),
    "Conv2D": lambda x, y, name: tf.raw_ops.Conv2D(
        input=x, filter=y, strides=[1, 1, 1, 1], padding="SAME", name=name
    ),
    "MaxPool": lambda x, name: tf.raw_ops.MaxPool(
        input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME", name=name
    ),
    "Tanh": tf.tanh,
    "Sigmoid": tf.sigmoid,
    "Exp": tf.exp,
    "Log": tf.math.log,
    "Relu": tf.nn.relu,
    "Softmax": tf.nn.softmax,
    "Softplus": tf.nn.softplus,
    "Square": tf.square,
    "Neg": tf.negative,
    "Identity": tf.identity,
    "Sum": tf.reduce_sum,
    "Mean": tf.reduce_mean,
    "Sin": tf.sin,
}


class Built(NamedTuple):
    """A program as a graph.

    Attributes:
        graph: The graph.
        fetches: The result, and its gradients with respect to the inputs.
        feeds: Values of placeholders.
        init: Initialises the variables.
    """

    graph: Any
    fetches: list[Any]
    feeds: dict[Any, Any]
    init: Any


def build(
    program: Program,
    values: Sequence[Any],
    edits: Sequence[Edit] | None = None,
    kind: str = "placeholder",
    **how: Any,
) -> Built:
    """Build a program and its gradients.

    Args:
        program: Takes `Ops` and tensors (or variables); its result is differentiated.
        values: Its inputs.
        edits: The edits to write in; None leaves the ops to tools.
        kind: Whether its inputs are ``placeholder``, ``resource`` or ``reference``.
        **how: Passed to `tf.compat.v1.gradients`.
    """
    graph = tf.Graph()
    with graph.as_default():
        inputs: list[Any] = []
        feeds: dict[Any, Any] = {}
        for index, value in enumerate(values):
            array = np.asarray(value)
            if kind == "placeholder" or not np.issubdtype(array.dtype, np.floating):
                inputs.append(v1.placeholder(array.dtype, array.shape, f"in{index}"))
                feeds[inputs[-1]] = array
            else:
                resource = kind == "resource"
                inputs.append(v1.Variable(array, name=f"in{index}", use_resource=resource))
        result = program(Ops(edits), *inputs)
        gradients = v1.gradients(result, inputs, **how)
        init = v1.global_variables_initializer()
    return Built(graph, [result, *gradients], feeds, init)


def new_session(graph: Any, optimised: bool = True, **how: Any) -> Any:
    """Return a session with few threads, with or without TensorFlow's graph optimizer."""
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimised
    return v1.Session(graph=graph, config=config, **how)


def run(built: Built) -> list[Any]:
    """Run a program without tools."""
    with new_session(built.graph) as session:
        session.run(built.init)
        return results(session, built)


def results(session: Any, built: Built) -> list[Any]:
    """Return a program's results in a session, with None for missing gradients."""
    there = [fetch for fetch in built.fetches if fetch is not None]
    found = iter(session.run(there, built.feeds))
    return [None if fetch is None else next(found) for fetch in built.fetches]


def check(
    program: Program,
    values: Sequence[Any],
    edits: Sequence[Edit],
    kind: str = "placeholder",
    tools: Sequence[Tool] | None = None,
    **how: Any,
) -> list[Any]:
    """Compare a program under tools with the reference program that has the edits written in.

    Also check that the edits change the result, that a second run gives the same, and that nothing
    is visible in the graph or stays in the session after the tools are removed.
    """
    wanted = run(build(program, values, edits, kind, **how))
    built = build(program, values, None, kind, **how)
    shown = serialised(built.graph)
    with new_session(built.graph) as session:
        session.run(built.init)
        plain = results(session, built)
        with amanda.apply(*(tools if tools is not None else [editing(*edits)])):
            found = results(session, built)
            again = results(session, built)
        later = results(session, built)
    close(found, wanted)
    equal(again, found)
    equal(later, plain)
    assert_same_graph(serialised(built.graph), shown)
    assert _differ(plain, wanted), "the edits change nothing: a test of nothing"
    return found


def check_refused(
    program: Program, values: Sequence[Any], edit: Edit, match: str, staging: bool = False
) -> None:
    """Check that an edit is refused by name, and that the program is unchanged.

    A routine that only observes at the same place runs, and the program continues.
    """
    built = build(program, values, None)
    shown = serialised(built.graph)
    calls: list[int] = []
    looking = Edit(edit.name, "before", lambda *values: calls.append(1), 0)
    tools = editing(edit._replace(routine=staged(edit.routine)) if staging else edit)
    with new_session(built.graph) as session:
        session.run(built.init)
        plain = results(session, built)
        with amanda.apply(editing(looking)):
            equal(results(session, built), plain)
        assert calls
        with amanda.apply(tools), pytest.raises(UnsupportedError, match=match) as caught:
            results(session, built)
        # Of what is differentiated as written in a function that is called there, the call.
        assert any(f"{name}'" in str(caught.value) for name in (edit.name, "PartitionedCall"))
        equal(results(session, built), plain)
    assert_same_graph(serialised(built.graph), shown)


def serialised(graph: Any) -> bytes:
    """Return the graph as its owner sees it, in bytes."""
    return bytes(graph.as_graph_def(add_shapes=True).SerializeToString(deterministic=True))


def assert_same_graph(found: bytes, shown: bytes) -> None:
    """Compare serialised graphs, without printing them."""
    same = found == shown
    assert same, "the graph shows what tools did"


def all_ops(graph: Any) -> int:
    """Return the number of ops in a graph, including hidden ones."""
    return len(tf.Graph.get_operations(graph))


def _differ(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return any(
        (a is None) != (b is None) or (a is not None and not np.array_equal(dense(a), dense(b)))
        for a, b in zip(these, those, strict=True)
    )


def arrays(*shapes: Sequence[int], seed: int = 0) -> list[Any]:
    """Return random arrays, the same for the same shapes."""
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]
