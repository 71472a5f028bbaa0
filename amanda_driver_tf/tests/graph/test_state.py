"""Ops with state advance once for each run, in the order in which the graph has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function as function_module

import amanda
from amanda_core.testing.kit.tools import Edit, after, before, editing, tool

from ..comparison import close, equal
from .reference_programs import counting, double, new_session, v1

# Iterators, queues, tables.


@pytest.mark.parametrize("op", ["IteratorGetNext", "neg"])
def test_an_iterator_advances_once(op: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        data = tf.data.Dataset.range(100).map(lambda i: tf.cast(i, tf.float32) + 1.0)
        iterator = v1.data.make_initializable_iterator(data)
        item = iterator.get_next()
        neg = tf.negative(item, name="neg")
    with new_session(graph) as session:
        session.run(iterator.initializer)
        assert session.run([item, neg]) == [1.0, -1.0]
        with amanda.apply(after(op, double, 0)):
            for index in range(2, 6):
                found = session.run([item, neg])
                factor = 2 if op == "IteratorGetNext" else 1
                assert found == [factor * index, -2 * index]
            assert session.run(neg) == -12.0
            assert session.run(item) == (14.0 if op == "IteratorGetNext" else 7.0)
        assert session.run([item, neg]) == [8.0, -8.0]


def test_the_end_of_an_iterator_is_tensorflows_error() -> None:
    graph = tf.Graph()
    with graph.as_default():
        iterator = v1.data.make_one_shot_iterator(tf.data.Dataset.range(2))
        item = tf.negative(iterator.get_next(), name="neg")
    with new_session(graph) as session, amanda.apply(after("neg", lambda v: v * 2, 0)):
        assert [session.run(item), session.run(item)] == [0, -2]
        for _ in range(2):
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(item)


def test_queues() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [])
        queue = v1.FIFOQueue(10, [tf.float32], [[]])
        put = queue.enqueue(tf.negative(x, name="neg"))
        got = queue.dequeue()
        size = queue.size()
        several = queue.dequeue_many(2)
    with new_session(graph) as session, amanda.apply(after("neg", double, 0)):
        for value in range(4):
            session.run(put, {x: value})
        assert session.run(size) == 4
        assert session.run(got) == 0.0
        assert session.run(several).tolist() == [-2.0, -4.0]
        with amanda.disabled():
            session.run(put, {x: 7})
        assert session.run(size) == 2
        assert session.run(got) == -6.0
        assert session.run(got) == -7.0


def test_queue_runners_and_batches() -> None:
    graph = tf.Graph()
    with graph.as_default():
        numbers = v1.train.range_input_producer(4, num_epochs=2, shuffle=False).dequeue()
        doubled_ = tf.multiply(numbers, 2, name="mul")
        batch = v1.train.batch([doubled_], batch_size=2)
        init = [v1.local_variables_initializer(), v1.global_variables_initializer()]
        with new_session(graph) as session:
            session.run(init)
            coordinator = v1.train.Coordinator()
            threads = v1.train.start_queue_runners(session, coordinator)
            found = []
            with amanda.apply(editing(Edit("batch", "after", lambda v: v + 1, 0))):
                try:
                    while True:
                        found += session.run(batch).tolist()
                except tf.errors.OutOfRangeError:
                    pass
            coordinator.request_stop()
            coordinator.join(threads)
    # The runners are threads of their own, and run vanilla.
    assert found == [1, 3, 5, 7, 1, 3, 5, 7]


def test_tables() -> None:
    graph = tf.Graph()
    with graph.as_default():
        init = tf.lookup.KeyValueTensorInitializer(["a", "b"], [10, 20])
        table = tf.lookup.StaticHashTable(init, -1)
        found = table.lookup(tf.constant(["b", "c"]), name="looked")
        mutable = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, -9, -2)
        counted = mutable.insert(tf.negative(tf.constant([-3], tf.int64), name="neg"), [5])
        size = mutable.size()
        start = v1.tables_initializer()
    with new_session(graph) as session:
        session.run(start)
        with amanda.apply(
            after("LookupTableFindV2", lambda v: v + 1, 0), after("neg", lambda v: v * 2, 0)
        ):
            assert session.run(found).tolist() == [21, 0]
            session.run(counted)
            session.run(counted)
            assert session.run(size) == 1
        assert session.run(found).tolist() == [20, -1]


# Random numbers.


def test_random_numbers_are_those_of_plain_runs() -> None:
    def drawn(*tools: amanda.Tool) -> list[Any]:
        graph = tf.Graph()
        with graph.as_default():
            v1.set_random_seed(3)
            numbers = v1.random_normal([3], seed=1)
            dropped = tf.nn.dropout(tf.ones([8]) + 0.0 * numbers[0], rate=0.5, seed=2)
            stateless = tf.random.stateless_uniform([2], [1, 2])
            neg = tf.negative(numbers, name="neg")
            fetches = [neg, dropped, stateless, numbers]
        with new_session(graph) as session:
            found = session.run(fetches)
            with amanda.apply(*tools):
                found += session.run(fetches)
                found += session.run(fetches)
        return list(found)

    plain = drawn()
    equal(drawn(counting()[1]), plain)
    equal(drawn(tool(lambda context: None)), plain)


def test_an_edit_behind_random_numbers_keeps_them() -> None:
    graph = tf.Graph()
    with graph.as_default():
        numbers = v1.random_normal([3], seed=1)
        neg = tf.negative(numbers, name="neg")
    with new_session(graph) as session, amanda.apply(after("neg", double, 0)):
        found = [session.run([numbers, neg]) for _ in range(3)]
    for drawn, edited in found:
        equal(edited, -2 * drawn)
    with new_session(graph) as session:
        for drawn, _ in found:
            equal(session.run(neg), -drawn)


def test_seeds_of_ops_built_later_are_what_they_would_have_been() -> None:
    def later(applied: bool) -> Any:
        graph = tf.Graph()
        with graph.as_default():
            v1.set_random_seed(3)
            neg = tf.negative(tf.constant(1.0), name="neg")
            with new_session(graph) as session:
                if applied:
                    with amanda.apply(before("neg", double)):
                        session.run(neg)
                return session.run(v1.random_uniform([4]))

    equal(later(True), later(False))


# Order.


@pytest.mark.parametrize("resource", [True, False])
@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([after("mul", lambda v: v * 5, 0)], [10.0, 20.0]),
        ([before("first", double)], [4.0, 12.0]),
        ([before("second", double)], [2.0, 24.0]),
        ([counting()[1]], [2.0, 12.0]),
        ([after("mul", lambda v: v * 5, 0), before("second", double)], [10.0, 40.0]),
    ],
)
def test_control_dependencies_order_updates(
    resource: bool, tools: list[amanda.Tool], expected: list[float]
) -> None:
    graph = tf.Graph()
    with graph.as_default():
        w = v1.get_variable("w", initializer=1.0, use_resource=resource)
        with tf.control_dependencies([w.assign(tf.multiply(w, 2.0, name="mul"))]):
            # Added to something: what is read of a reference is the variable's own memory.
            first = tf.identity(w.read_value() + 0.0, name="first")
        with tf.control_dependencies([first]), tf.control_dependencies([w.assign_add(10.0)]):
            second = tf.identity(w.read_value() + 0.0, name="second")
    with new_session(graph) as session:
        for _ in range(2):
            session.run(w.initializer)
            with amanda.apply(*tools):
                assert session.run([first, second]) == expected
            assert session.run(w) == (20.0 if expected[0] == 10.0 else 12.0)
        session.run(w.initializer)
        assert session.run([first, second]) == [2.0, 12.0]


def test_an_edited_value_is_what_is_assigned() -> None:
    for resource in (True, False):
        graph = tf.Graph()
        with graph.as_default():
            w = v1.get_variable("w", [2], initializer=v1.ones_initializer(), use_resource=resource)
            x = v1.placeholder(tf.float32, [2])
            assign = v1.assign(w, tf.negative(x, name="neg"))
            add = v1.assign_add(w, x, name="adding")
        op_type = "AssignAddVariableOp" if resource else "AssignAdd"
        with new_session(graph) as session:
            session.run(w.initializer)
            with amanda.apply(after("neg", double, 0), before(op_type, double, 1)):
                session.run(assign, {x: [1.0, 2.0]})
                equal(session.run(w), np.array([-2, -4], np.float32))
                session.run(add, {x: [1.0, 2.0]})
                equal(session.run(w), np.array([0, 0], np.float32))
                close(session.run(add, {x: [1.0, 2.0]}), np.array([2, 4], np.float32))
            equal(session.run(w), np.array([2, 4], np.float32))


# Other ops.


def test_assertions_fail_with_their_message_on_edited_values() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.negative(tf.constant(-1.0), name="neg")
        with tf.control_dependencies([v1.assert_less(x, 2.0, message="too much")]):
            y = tf.identity(x)
    with new_session(graph) as session:
        assert session.run(y) == 1.0
        with (
            amanda.apply(after("neg", lambda v: v * 5, 0)),
            pytest.raises(tf.errors.InvalidArgumentError, match="too much"),
        ):
            session.run(y)
        assert session.run(y) == 1.0


@pytest.mark.parametrize("make", [v1.py_func, tf.py_function, tf.numpy_function])
def test_python_functions_of_the_user(make: Callable[..., Any]) -> None:
    calls: list[float] = []

    def user(value: Any) -> Any:
        calls.append(float(value))
        return value * np.float32(3)

    graph = tf.Graph()
    with graph.as_default():
        x = tf.negative(tf.constant(1.0), name="neg")
        y = tf.exp(make(user, [x], tf.float32), name="exp")
    with new_session(graph) as session:
        with amanda.apply(after("neg", double, 0), before("exp", lambda v: v + 1.0)):
            close(session.run(y), np.exp(np.float32(-5)))
        assert calls == [-2.0]
        close(session.run(y), np.exp(np.float32(-3)))
    assert calls == [-2.0, -1.0]


@pytest.mark.parametrize("edit", [
    Edit("inner", "before", lambda v: v * 0.5 + 1, 0),
    Edit("inner", "after", double, 0),
    Edit("outer", "before", double, 0),
    Edit("inner", "grad_in", double, 0),
    Edit("inner", "replace", tf.nn.softplus),
    Edit("inner", "before", tf.sin, 0, True),
])  # fmt: skip
def test_functions_in_graphs(edit: Edit) -> None:
    def fetches(edits: list[Edit] | None) -> tuple[Any, list[Any]]:
        from .reference_programs import Ops

        ops, graph = Ops(edits), tf.Graph()
        with graph.as_default():
            x = tf.constant([0.3, 0.7])

            def body(value: Any) -> Any:
                return ops("Square", "inner", value) * 2.0

            run = body if edits is not None else tf.function(body, autograph=False)
            y = ops("Exp", "outer", run(x))
            return graph, [y, *tf.gradients(y, x)]

    graph, wanted = fetches([edit])
    with new_session(graph) as session:
        expected = session.run(wanted)
    graph, found = fetches(None)
    with new_session(graph) as session:
        plain = session.run(found)
        with amanda.apply(editing(edit)):
            close(session.run(found), expected)
            close(session.run(found[1]), expected[1])
        equal(session.run(found), plain)


def test_old_function_definitions() -> None:
    @function_module.Defun(tf.float32)  # type: ignore[untyped-decorator]
    def old(value: Any) -> Any:
        return tf.negative(value, name="inner")

    graph = tf.Graph()
    with graph.as_default():
        x = tf.constant([1.0, 2.0])
        y = tf.exp(old(x), name="outer")
        grads = tf.gradients(y, x)
    seen, watching = counting()
    with new_session(graph) as session:
        plain = session.run([y, *grads])
        with amanda.apply(watching) as handle:
            equal(session.run([y, *grads]), plain)
        assert "outer" in seen
        with amanda.apply(before("outer", double)) as handle:
            y_ = np.exp(2 * -np.array([1, 2], np.float32))
            close(session.run([y, *grads]), [y_, -y_])
            gaps = [each for listed in handle.coverage().values() for each in listed]
        if "inner" not in seen:
            assert any("function" in str(each) for each in gaps)


# What an op waits for.


@pytest.mark.parametrize("op", ["Relu", "ReadVariableOp"])
def test_a_routine_before_an_op_runs_after_what_the_op_waits_for(op: str) -> None:
    order: list[str] = []

    def compute() -> Any:
        order.append("waited for")
        return np.float32(7.0)

    graph = tf.Graph()
    with graph.as_default():
        variable = v1.get_variable("v", initializer=0.0, use_resource=True)
        computed = tf.numpy_function(compute, [], tf.float32)
        with tf.control_dependencies([variable.assign(computed)]):
            result = tf.nn.relu(tf.ones(2)) if op == "Relu" else variable.read_value()
    with new_session(graph) as session:
        session.run(variable.initializer)
        with amanda.apply(before(op, lambda *values: order.append("routine"))):
            for _ in range(3):
                order.clear()
                session.run(result)
                assert order[:2] == ["waited for", "routine"]


# Attributes that were taken from ops.


@pytest.mark.parametrize("kind", ["before", "after"])
def test_ops_from_which_attributes_were_cleared(kind: str) -> None:
    """Attributes with a default may be cleared, for instance by `tf.compat.v1.graph_util`."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.get_variable("x", initializer=[2.0, 1.0], use_resource=True)
        y = tf.multiply(tf.reshape(x, [2, 1]), 3.0, name="y")
        with tf.control_dependencies([y]):
            total = tf.matmul(y, y, transpose_a=True)
        gradient = v1.gradients(total, x)[0]
    for op in graph.get_operations():
        for attribute in op.op_def.attr:
            needed = attribute.type == "type" or attribute.name.startswith("transpose")
            if attribute.HasField("default_value") and not needed:
                op._clear_attr(attribute.name)
    with new_session(graph) as session:
        session.run(x.initializer)
        wanted = session.run([total, gradient])
        for edit in (lambda value: value, lambda value: None):
            with amanda.apply(editing(Edit("Mul", kind, edit, 0))):
                close(session.run([total, gradient]), wanted)
        with amanda.apply(amanda.Tool()):
            close(session.run([total, gradient]), wanted)


def test_resource_from_which_its_name_was_cleared() -> None:
    graph = tf.Graph()
    with graph.as_default():
        queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.float32], shared_name="mine")
        put = tf.raw_ops.QueueEnqueueV2(handle=queue, components=[tf.constant(2.0)])
        size = tf.raw_ops.QueueSizeV2(handle=queue)
    queue.op._clear_attr("shared_name")
    with new_session(graph) as session:
        for mine in (amanda.Tool(), editing(Edit("QueueSizeV2", "after", lambda v: v + 1, 0))):
            with amanda.apply(mine):
                session.run(put)
                assert session.run(size) >= 1
        assert session.run(size) == 2
