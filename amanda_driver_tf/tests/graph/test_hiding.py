"""Hidden clones: the graph shows what its owner built, and goes on growing as it would have."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import amanda
import amanda_driver_tf
from amanda_core.testing.kit.tools import before
from amanda_driver_tf.execution.sessions import hiding
from amanda_driver_tf.identity.frames import LAYERS

from ..comparison import close
from .reference_programs import all_ops, double, new_session, serialised, v1


class Small:
    """A graph with a while loop of functions, a collection and gradients."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [2, 2], "x")
            self.w = v1.get_variable("w", initializer=np.eye(2, dtype=np.float32))
            self.mm = tf.matmul(self.x, self.w, name="mm")
            with v1.name_scope("scope"):
                self.act = tf.tanh(self.mm, name="act")
            self.total = tf.reduce_sum(self.act, name="total")
            self.grads = tf.gradients(self.total, [self.x, self.w])
            v1.add_to_collection("mine", self.act)
            v1.summary.scalar("sum", self.total)

    def grow(self) -> list[str]:
        """Add ops to the graph and return their names."""
        with self.graph.as_default():
            added = [
                tf.matmul(self.x, self.w, name="mm"),
                tf.tanh(self.mm, name="scope/act"),
                tf.constant(1.0),
                *tf.gradients(self.total, [self.x, self.w]),
                *tf.gradients(self.act, [self.mm]),
                tf.add(1.0, 2.0, name="amanda_1"),
            ]
            v1.train.AdamOptimizer().minimize(self.total)
            v1.train.Saver(name="amanda")
        return [tensor.name for tensor in added] + [op.name for op in self.graph.get_operations()]


GIVEN = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)


def run_under_tools(small: Small, session: Any) -> None:
    session.run(small.w.initializer)
    with amanda.apply(before("mm", double, 1)):
        close(session.run([small.mm, *small.grads], {small.x: GIVEN})[0], 2 * GIVEN)


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "graph_def": serialised,
    "from version": lambda g: g.as_graph_def(from_version=3).SerializeToString(deterministic=True),
    "operations": lambda g: [op.name for op in g.get_operations()],
    "num_operations": lambda g: g.num_operations(),
    "version": lambda g: g.version,
    "versions": lambda g: str(g.graph_def_versions),
    "collections": lambda g: {k: list(map(str, g.get_collection(k))) for k in g.collections},
    "names": lambda g: dict(g._names_in_use),
    "functions": lambda g: sorted(g._functions),
    "class": lambda g: (type(g).__name__, type(g).__module__, isinstance(g, tf.Graph)),
    "unique": lambda g: g.unique_name("amanda", mark_as_used=False),
    "finalized": lambda g: g.finalized,
    "seed": lambda g: g.seed,
    "readers": lambda g: {
        t.name: [op.name for op in t.consumers()] for op in g.get_operations() for t in op.outputs
    },
    "meta graph": lambda g: v1.train.export_meta_graph(
        graph=g, clear_devices=False
    ).SerializeToString(deterministic=True),
    "control inputs": lambda g: {
        op.name: [c.name for c in op.control_inputs] for op in g.get_operations()
    },
    "stats": lambda g: str(v1.profiler.profile(g, cmd="scope", options=_silent())),
}


def _silent() -> Any:
    builder = v1.profiler.ProfileOptionBuilder
    return builder(builder.trainable_variables_parameter()).with_empty_output().build()


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_of_the_graph_stays_what_it_was(what: str) -> None:
    small, ask = Small(), ANSWERS[what]
    with new_session(small.graph) as session:
        expected = ask(small.graph)
        run_under_tools(small, session)
        assert all_ops(small.graph) > small.graph.num_operations()
        assert ask(small.graph) == expected
        with amanda.apply(before("mm", double, 1)):
            session.run(small.mm, {small.x: GIVEN})
            assert ask(small.graph) == expected


@pytest.mark.parametrize("looks", [False, True])
def test_attributes_are_written_and_removed_under_tools(looks: bool) -> None:
    """An op may lose attributes that its definition has."""
    tool = amanda.Tool()
    if looks:
        tool.add_inst_for_op(lambda c: c.insert_after_op(lambda *values: None, observe=True))
    with tf.Graph().as_default() as graph, new_session(graph) as session, amanda.apply(tool):
        variable = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="a").op
        result = tf.nn.relu(tf.constant([-1.0, 2.0]))
        assert session.run(result).tolist() == [0.0, 2.0]
        variable._clear_attr("shared_name")
        with pytest.raises(ValueError, match="no attr named 'shared_name'"):
            variable.get_attr("shared_name")
        result.op._set_attr("_mine", v1.AttrValue(i=3))
        assert result.op.get_attr("_mine") == 3
        result.op._clear_attr("_mine")
        assert session.run(result).tolist() == [0.0, 2.0]


def test_hidden_ops_cannot_be_had_by_name() -> None:
    small = Small()
    with new_session(small.graph) as session:
        run_under_tools(small, session)
        shown = {op.name for op in small.graph.get_operations()}
        hidden = [op.name for op in tf.Graph.get_operations(small.graph) if op.name not in shown]
        assert hidden
        asking: list[Callable[[str], Any]] = [
            small.graph.get_operation_by_name,
            lambda name: small.graph.get_tensor_by_name(f"{name}:0"),
            small.graph.as_graph_element,
            lambda name: small.graph.as_graph_element(f"{name}:0"),
            session.run,
            lambda name: session.run(f"{name}:0"),
        ]
        for name in hidden:
            for ask in asking:
                with pytest.raises((KeyError, ValueError)) as caught:
                    ask(name)
                with pytest.raises(type(caught.value)) as unknown:
                    ask("unknown")
                assert str(caught.value).replace(name, "unknown") == str(unknown.value)


def test_the_graph_grows_as_it_would_have() -> None:
    other, small = Small(), Small()
    expected = other.grow()
    with new_session(small.graph) as session:
        run_under_tools(small, session)
        assert small.grow() == expected
        assert serialised(small.graph) == serialised(other.graph)


def test_ops_built_later_are_run_and_differentiated() -> None:
    small = Small()
    with new_session(small.graph) as session:
        run_under_tools(small, session)
        with small.graph.as_default():
            second = tf.reduce_sum(tf.square(small.mm, name="square"))
            later = tf.gradients(second, [small.x, small.w])
        with amanda.apply(before("mm", double, 1)):
            found = session.run([second, *later], {small.x: GIVEN})
            with small.graph.as_default():
                third = tf.gradients(tf.reduce_sum(later[0]), [small.w])
            session.run(third, {small.x: GIVEN})
        plain = session.run([second, *later], {small.x: GIVEN})
    close(found, [(4 * GIVEN**2).sum(), 8 * GIVEN, 4 * GIVEN.T @ GIVEN])
    close(plain, [(GIVEN**2).sum(), 2 * GIVEN, 2 * GIVEN.T @ GIVEN])


def test_a_finalized_graph_stays_finalized() -> None:
    small = Small()
    small.graph.finalize()
    with new_session(small.graph) as session:
        run_under_tools(small, session)
    assert small.graph.finalized
    assert all_ops(small.graph) > small.graph.num_operations()
    with small.graph.as_default(), pytest.raises(RuntimeError, match="finalized"):
        tf.constant(1.0)


def test_the_default_graph_is_hidden_from_as_well() -> None:
    with tf.Graph().as_default() as graph:
        a = v1.placeholder(tf.float32, [], "a")
        b = tf.negative(a, name="neg")
        shown = serialised(graph)
        with (
            v1.Session() as session,
            tf.device("/cpu:0"),
            tf.name_scope("open"),
            tf.control_dependencies([b]),
            amanda.apply(before("neg", double)),
        ):
            assert session.run(b, {a: 1.0}) == -2.0
            assert v1.get_default_graph() is graph
            c = tf.identity(a, "c")
            assert c.op.name == "open/c"
            assert [op.name for op in c.op.control_inputs] == ["neg"]
        assert serialised(graph) != shown
        assert not any("amanda" in op.name for op in graph.get_operations())


def test_walking_the_graph_meets_no_hidden_op() -> None:
    small = Small()
    with new_session(small.graph) as session:
        run_under_tools(small, session)
    seen: set[Any] = set()
    waiting = [small.x.op, small.total.op]
    while waiting:
        op = waiting.pop()
        if op in seen:
            continue
        seen.add(op)
        waiting += [reader for tensor in op.outputs for reader in tensor.consumers()]
        waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    shown = set(small.graph.get_operations())
    assert seen <= shown


def test_functions_of_graphs_stay_what_they_were() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [2], "x")
        double_it = tf.function(lambda v: tf.negative(v, name="neg") * 2.0, autograph=False)
        y = double_it(x)
        grads = tf.gradients(y, x)
    shown, functions = serialised(graph), dict(graph._functions)
    shaped = graph.as_graph_def(add_shapes=True)
    with new_session(graph) as session, amanda.apply(before("neg", double)):
        assert session.run(y, {x: [1.0, 2.0]}).tolist() == [-4.0, -8.0]
        assert dict(graph._functions) == functions
        session.run(grads, {x: [1.0, 2.0]})
        assert graph.as_graph_def(add_shapes=True) == shaped
    assert serialised(graph) == shown
    assert dict(graph._functions) == functions
    hidden = hiding.Hidden.of(graph)
    assert hidden is not None
    assert hidden.functions
    assert not any(graph._is_function(name) for name in hidden.functions)
    with graph.as_default():
        z = double_it(y)
    with new_session(graph) as session:
        assert session.run(z, {x: [1.0, 2.0]}).tolist() == [4.0, 8.0]


def test_copies_of_the_graph_have_no_clones() -> None:
    small = Small()
    with new_session(small.graph) as session:
        run_under_tools(small, session)
        frozen = v1.graph_util.convert_variables_to_constants(
            session, small.graph.as_graph_def(), ["total"]
        )
    assert not any("amanda" in node.name for node in frozen.node)
    copied = tf.Graph()
    with copied.as_default():
        v1.import_graph_def(small.graph.as_graph_def(), name="copy")
    assert len(copied.get_operations()) == small.graph.num_operations()
    assert type(copied) is ops.Graph


def test_gradients_of_the_same_tensors_do_not_walk_clones() -> None:
    small = Small()
    with new_session(small.graph) as session:
        run_under_tools(small, session)
        count = all_ops(small.graph)
        with small.graph.as_default():
            (grad,) = tf.gradients(small.total, [small.w])
        added = all_ops(small.graph) - count
        assert grad.name == "gradients_1/mm_grad/MatMul_1:0"
        other = Small()
        count = all_ops(other.graph)
        with other.graph.as_default():
            tf.gradients(other.total, [other.w])
        assert added == all_ops(other.graph) - count


@pytest.mark.slow
def test_other_threads_meet_no_op_that_is_being_hidden() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = y = v1.placeholder(tf.float32, [2, 2], "x")
        for number in range(40):
            y = tf.tanh(tf.matmul(y, tf.eye(2), name=f"mm{number}"))
    asking = {name: ANSWERS[name] for name in _QUICK}
    asking["readers of one"] = lambda _: [op.name for op in x.consumers()]
    expected = {name: ask(graph) for name, ask in asking.items()}
    # A thread that has looked a method up before the first rewriting, and calls it after that, is
    # answered by the graph's own class.
    hiding.prepare(graph)
    wrong: list[Any] = []
    asked, done = threading.Semaphore(0), threading.Event()

    def ask_all() -> None:
        while not done.is_set():
            for name, ask in asking.items():
                if ask(graph) != expected[name]:
                    wrong.append(name)
            asked.release()

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=ask_all)
    sys.setswitchinterval(1e-4)
    try:
        with new_session(graph) as session:
            thread.start()
            for number in range(0, 40, 4):
                assert asked.acquire(timeout=60)
                with amanda.apply(before(f"mm{number}", double, 1)):
                    session.run(y, {x: GIVEN})
    finally:
        done.set()
        thread.join(60)
        sys.setswitchinterval(interval)
    assert all_ops(graph) > graph.num_operations() + 200
    assert wrong == []


_QUICK = {"graph_def", "operations", "num_operations", "version", "functions"}


def test_what_stays_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Graphs of other tests may die meanwhile.
    monkeypatch.setattr(hiding, "_GRAPHS", weakref.WeakSet())

    def listed() -> dict[str, int]:
        return {remnant.what: remnant.number for remnant in amanda_driver_tf.remnants()}

    wrappers = "wrappers that record gradients while graphs are built"
    clones = "hidden clones of ops in graphs of sessions"
    layers = "wrappers that record calls of layers while graphs are built"
    small = Small()
    always = {wrappers: 9}
    if number := sum(name in sys.modules for name in LAYERS):
        always[layers] = number
    assert listed() == always
    with new_session(small.graph) as session:
        run_under_tools(small, session)
    hidden = all_ops(small.graph) - len(small.graph.get_operations())
    assert hidden > 0
    assert listed() == {**always, clones: hidden}
    del small, session
    gc.collect()
    assert listed() == always
