"""Tools that look at every value, or put back what they were given, change no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import Tool
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, Everywhere, around, editing

from ..comparison import close, equal
from .loop_programs import control_flow
from .reference_programs import new_session, staged, v1

Made = tuple[Any, list[Any]]


def queue() -> Made:
    made = v1.FIFOQueue(10, [tf.float32], [[]])
    with tf.control_dependencies([made.enqueue(tf.constant(1.0))]):
        return None, [made.size()]


def queue_behind_an_op() -> Made:
    x = tf.negative(tf.constant(1.0))
    with tf.control_dependencies([x]):
        made = v1.FIFOQueue(10, [tf.float32], [[]])
    with tf.control_dependencies([made.enqueue(x)]):
        return None, [x, made.size()]


def table() -> Made:
    made = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    size = made.size()
    with tf.control_dependencies([size]):
        put = made.insert(size[None], size[None] * 2)
    with tf.control_dependencies([put]):
        return None, [made.lookup(tf.constant([0, 1, 2], tf.int64)), made.size()]


def iterator() -> Made:
    made = v1.data.make_initializable_iterator(tf.data.Dataset.range(50).batch(2))
    return made.initializer, [made.get_next()]


def one_shot_iterator() -> Made:
    return None, [v1.data.make_one_shot_iterator(tf.data.Dataset.range(50)).get_next()]


def accumulator() -> Made:
    made = v1.ConditionalAccumulator(tf.float32, shape=[])
    with tf.control_dependencies([made.apply_grad(tf.constant(2.0), local_step=0)]):
        return None, [made.num_accumulated()]


def random_numbers() -> Made:
    v1.set_random_seed(1)
    return None, [v1.random_uniform([2], seed=3), tf.nn.dropout(tf.ones([6]), rate=0.5, seed=2)]


def random_numbers_behind_an_op() -> Made:
    v1.set_random_seed(1)
    shape = tf.constant([2])
    with tf.control_dependencies([tf.negative(tf.constant(1.0))]):
        return None, [tf.raw_ops.RandomUniform(shape=shape, dtype=tf.float32, seed=3, seed2=5)]


def array() -> Made:
    made = v1.TensorArray(tf.float32, 3).write(0, [1.0, 2.0]).write(1, [3.0, 4.0])
    made = made.write(2, [5.0, 6.0])
    return None, [made.stack(), made.gather([0, 2])]


def references() -> Made:
    w = v1.get_variable("w", [3, 2], initializer=v1.ones_initializer(), use_resource=False)
    with tf.control_dependencies([v1.scatter_add(w, [0, 0], [[1.0, 1.0], [2.0, 2.0]])]):
        return w.initializer, [w.read_value() + 0.0]


def embedding(resource: bool) -> Made:
    w = v1.get_variable("w", [4, 2], initializer=v1.ones_initializer(), use_resource=resource)
    rows = v1.nn.embedding_lookup(w, [0, 1, 1])
    loss = tf.reduce_sum(tf.square(rows))
    train = v1.train.AdamOptimizer(0.1).minimize(loss, gate_gradients=2)
    return v1.global_variables_initializer(), [loss, train]


def normalisation() -> Made:
    x = tf.random.stateless_normal([4, 3, 3, 2], [1, 2])
    scale = v1.get_variable("scale", [2], initializer=v1.ones_initializer())
    moving = v1.get_variable("moving", [2], initializer=v1.zeros_initializer(), trainable=False)
    y, mean, _ = v1.nn.fused_batch_norm(x, scale, tf.zeros([2]))
    with tf.control_dependencies([moving.assign(moving * 0.9 + mean * 0.1)]):
        loss = tf.reduce_sum(tf.square(y) * tf.range(2.0))
    train = v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss, gate_gradients=2)
    init = v1.global_variables_initializer()
    with tf.control_dependencies([train]):
        return init, [loss, moving.read_value() + 0.0]


def mapped() -> Made:
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    y = tf.map_fn(lambda v: tf.tanh(v) * 2, x)
    z = tf.scan(lambda a, v: a * v + 1, x)
    return None, [y, z, *tf.gradients([y, z], x)]


def hessian() -> Made:
    x = tf.constant([1.0, 2.0])
    return None, list(v1.hessians(tf.reduce_sum(tf.exp(x) * tf.sin(x)), x))


def sparse() -> Made:
    values = tf.constant([1.0, 2.0])
    s = tf.SparseTensor([[0, 0], [1, 2]], values, [2, 3])
    d = tf.constant(np.ones((3, 2), np.float32))
    y = tf.sparse.sparse_dense_matmul(s, d)
    return None, [y, *tf.gradients(y, [values, d])]


def strings() -> Made:
    x = tf.constant(["a b", "c"])
    found = tf.strings.regex_replace(x, "a", "z")
    return None, [tf.strings.length(found), v1.summary.histogram("h", tf.range(3.0))]


def own_gradients() -> Made:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def own(value: Any) -> Any:
        return tf.square(value), lambda g: g * 7

    x = tf.constant([1.0, 2.0])
    again = tf.recompute_grad(lambda v: tf.sin(tf.exp(v)))
    y = own(x) + again(x)
    return None, [y, *tf.gradients(y, x)]


def shapes() -> Made:
    x = tf.constant(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    padded = tf.pad(x, [[1, 1], [0, 0]])
    sliced = tf.strided_slice(padded, [0, 0], [3, 2])
    stacked = tf.stack(tf.unstack(x)[::-1])
    top = tf.math.top_k(x, 2)
    parts = [sliced, stacked, tf.transpose(x), top.values]
    return None, [*parts, top.indices, *tf.gradients(parts, x)]


def matrices() -> Made:
    x = tf.constant([[2.0, 1.0], [1.0, 3.0]])
    inverse = tf.linalg.inv(x)
    return None, [tf.linalg.cholesky(x), inverse, *tf.gradients(tf.reduce_sum(inverse), x)]


def function() -> Made:
    w = v1.get_variable("w", initializer=[1.0, 2.0])
    y = tf.function(lambda v: tf.square(v) * w, autograph=False)(tf.constant([3.0, 4.0]))
    return w.initializer, [y, *tf.gradients(y, w)]


def branches() -> Made:
    x = tf.constant([1.0, 2.0])
    y = v1.cond(tf.reduce_sum(x) > 1, lambda: tf.exp(x), lambda: tf.sin(x))
    z = v1.case([(y[0] > 1, lambda: y * 2)], lambda: y)
    return None, [y, z, *tf.gradients(z, x)]


def loop() -> Made:
    x = tf.constant([1.0, 2.0])
    _, y = v1.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.sin(h) * x), [0, x])
    return None, [y, *tf.gradients(y, x)]


PROGRAMS: list[Callable[[], Made]] = [
    queue, queue_behind_an_op, table, iterator, one_shot_iterator, accumulator, random_numbers,
    random_numbers_behind_an_op, array, references, lambda: embedding(True),
    lambda: embedding(False), normalisation, mapped, hessian, sparse, strings, own_gradients,
    shapes, matrices, function, branches, loop,
]  # fmt: skip
NAMES = [
    program.__name__ if program.__name__ != "<lambda>" else f"embedding{index}"
    for index, program in enumerate(PROGRAMS)
]


def results(program: Callable[[], Made], tools: list[Tool]) -> list[Any]:
    graph = tf.Graph()
    with graph.as_default():
        init, fetches = program()
    found = []
    with new_session(graph) as session:
        if init is not None:
            session.run(init)
        found += session.run(fetches)
        with amanda.apply(*tools):
            for _ in range(2):
                found += session.run(fetches)
        found += session.run(fetches)
    return [value for value in found if value is not None and not isinstance(value, bytes)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "new"),
    [
        *(pytest.param(each, True, id=name) for each, name in zip(PROGRAMS, NAMES, strict=True)),
        *(
            pytest.param(each, False, id=f"{each.__name__}-old")
            for each in (loop, branches, mapped, hessian)
        ),
    ],
)
def test_watching_changes_nothing(program: Callable[[], Made], new: bool) -> None:
    calls: list[int] = []
    # A Hessian's gradients are computed in a loop after their ops, which only has raw views.
    aligned = program is not hessian
    watch = Everywhere(lambda *values: calls.append(1), aligned)
    same = Everywhere(lambda *values: list(values) or None, aligned)
    with control_flow(new):
        plain = results(program, [])
        close(results(program, [watch]), plain)
        assert calls
        close(results(program, [same]), plain)


@pytest.mark.parametrize("asked", ["value", "op", "group", "control", "gradient"])
def test_routines_after_an_op_run_whatever_it_runs_for(asked: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [2])
        y = tf.nn.relu(tf.sin(x))
        total = tf.reduce_sum(y)
        with tf.control_dependencies([y]):
            other = tf.negative(tf.constant(1.0))
        wanted = {
            "value": y,
            "op": y.op,
            "group": tf.group(y),
            "control": other,
            "gradient": v1.gradients(total, [x])[0],  # It reads the original.
        }[asked]
    counts, counting = around()
    with new_session(graph) as session:
        plain = session.run(wanted, {x: [1.0, 2.0]})
        with amanda.apply(counting):
            for _ in range(2):
                found = session.run(wanted, {x: [1.0, 2.0]})
                if plain is not None:
                    equal([found], [plain])
    assert counts["Relu", "before"] == counts["Relu", "after"] == 2
    assert ("Sum", "after") not in counts


@pytest.mark.parametrize("native", [False, True], ids=["host", "staged"])
def test_compiled_functions(native: bool) -> None:
    x = np.array([0.1, 0.2], np.float32)
    graph = tf.Graph()
    with graph.as_default():
        given = v1.placeholder(tf.float32, [2])
        run = tf.function(lambda v: tf.exp(tf.sin(v, name="sin")), jit_compile=True)
        y = run(given)
        (grad,) = tf.gradients(y, given)

    def routine(value: Any) -> Any:
        return value * 2.0

    edit = Edit("sin", "before", staged(routine) if native else routine, 0)
    with new_session(graph) as session:
        plain = session.run([y, grad], {given: x})
        if native:
            with amanda.apply(editing(edit)):
                found = session.run([y, grad], {given: x})
        else:
            with amanda.apply(editing(edit)), pytest.warns(amanda.AmandaWarning):
                found = session.run([y, grad], {given: x})
        equal(session.run([y, grad], {given: x}), plain)
    wanted = np.exp(np.sin(2 * x))
    close(found, [wanted, wanted * np.cos(2 * x)])


def random_of(shape: Any) -> Any:
    v1.set_random_seed(1)
    return v1.random_uniform(shape, seed=3, name="random")


def test_edited_shapes_of_random_numbers_are_refused() -> None:
    graph = tf.Graph()
    with graph.as_default():
        made = random_of(tf.constant([2]))
    edit = Edit("RandomUniform", "before", lambda shape: shape + 1, 0)
    with new_session(graph) as session:
        plain = [session.run(made) for _ in range(2)]
    with new_session(graph) as session:
        equal([session.run(made)], plain[:1])
        with amanda.apply(editing(edit)), pytest.raises(UnsupportedError, match="RandomUniform"):
            session.run(made)


def test_a_second_random_sequence_is_named() -> None:
    graph = tf.Graph()
    with graph.as_default():
        shape = v1.placeholder(tf.int32, [1])
        made = random_of(tf.add(shape, 0, name="shape"))
    feed = {shape: [2]}
    with new_session(graph) as session:
        plain = [session.run(made, feed) for _ in range(2)]
    tools = editing(Edit("shape", "after", lambda value: value, 0))
    for _ in range(2):  # Named where clones are used again, too.
        with new_session(graph) as session, amanda.apply(tools) as handle:
            equal([session.run(made, feed) for _ in range(2)], plain)
            assert any("random sequence" in gap.what for gap in handle.coverage()["tensorflow"])


class Behind:
    """A queue that is made after an assignment of a value that may be edited."""

    def __init__(self, shared_name: str) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            weight = v1.get_variable("w", initializer=1.0, use_resource=True)
            changed = weight.assign_add(tf.negative(2.0, name="neg"), read_value=False)
            with tf.control_dependencies([changed]):
                queue = tf.raw_ops.FIFOQueueV2(
                    component_types=[tf.float32], shared_name=shared_name, name="queue"
                )
            self.put = tf.raw_ops.QueueEnqueueV2(handle=queue, components=[3.0])
            self.size = tf.raw_ops.QueueSizeV2(handle=queue)
            self.read = weight.read_value()
            self.start = v1.global_variables_initializer()
        self.tools = editing(Edit("neg", "after", lambda value: value * 2.0, 0))


def test_a_second_resource_is_refused() -> None:
    behind = Behind("")
    with new_session(behind.graph) as session:
        session.run(behind.start)
        with amanda.apply(behind.tools), pytest.raises(UnsupportedError, match="shared_name"):
            session.run(behind.put)
        assert session.run(behind.read) == 1.0


def test_shared_resources_may_stand_behind_edits() -> None:
    behind = Behind("shared")
    with new_session(behind.graph) as session:
        session.run(behind.start)
        with amanda.apply(behind.tools):
            session.run(behind.put)
        assert session.run(behind.read) == -3.0
        assert session.run(behind.size) == 1


def test_observers_ahead_of_a_resource_that_stays_are_called() -> None:
    """The queue is the session's own, so the ops before it are not cloned with it."""
    behind = Behind("")
    seen: list[Any] = []
    observer = amanda.Tool()
    observer.add_inst_for_op(
        lambda c: c.insert_after_op(seen.append, observe=True) if c.op_type == "Neg" else None
    )
    with new_session(behind.graph) as session:
        session.run(behind.start)
        with amanda.apply(observer):
            session.run(behind.put)
        assert session.run(behind.read) == -1.0
        assert session.run(behind.size) == 1
    assert len(seen) == 1


def test_edits_of_what_is_differentiated_in_a_loop_are_refused() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.constant([1.0, 2.0])
        (hessian,) = v1.hessians(tf.reduce_sum(tf.exp(x, name="exp")), x)
    edit = Edit("exp", "before", lambda value: value * 2.0, 0)
    with (
        new_session(graph) as session,
        amanda.apply(editing(edit)),
        pytest.raises(UnsupportedError, match="inside the graph of the op"),
    ):
        session.run(hessian)
