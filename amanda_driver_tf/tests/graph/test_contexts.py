"""The facts that a context gives about an op of a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.testing.kit.tools import tool

from ..comparison import equal
from .reference_programs import analysing, arrays, new_session, v1


class Layer:
    """A layer with a weight, a constant and an optimizer."""

    def __init__(self, resource: bool = True) -> None:
        self.graph = tf.Graph()
        self.weight = arrays((2, 3))[0]
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [4, 2], "x")
            with v1.variable_scope("layer"):
                self.w = v1.get_variable("w", initializer=self.weight, use_resource=resource)
                self.y = tf.matmul(self.x, self.w, name="mm")
            self.z = tf.raw_ops.Mul(x=self.y, y=tf.constant(2.0), name="scaled")
            self.sum = tf.reduce_sum(self.z, axis=[0, 1], name="sum")
            self.train = v1.train.AdamOptimizer(0.1).minimize(self.sum)
            self.init = v1.global_variables_initializer()
        self.feed = {self.x: np.ones((4, 2), np.float32)}


def seen_in(layer: Layer, session: Any, read: Any, fetches: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(context: OpContext) -> None:
        found[context.name] = read(context)

    with amanda.apply(analysing(visit)):
        session.run(layer.train if fetches is None else fetches, layer.feed)
    return found


@pytest.mark.parametrize("resource", [True, False])
def test_values_of_variables_and_constants(resource: bool) -> None:
    layer = Layer(resource)

    def values(context: OpContext) -> Any:
        if context.is_backward():
            return None
        return [context.value(i) for i in range(len(context.get_inputs()))]

    with new_session(layer.graph) as session:
        # Not initialised yet: nothing is known, and nothing fails but the run.
        found: dict[str, Any] = {}
        collect = analysing(lambda c: found.__setitem__(c.name, values(c)))
        with amanda.apply(collect), pytest.raises(tf.errors.FailedPreconditionError):
            session.run(layer.sum, layer.feed)
        assert found["layer/mm"] == [None, None]
        session.run(layer.init)
        found = seen_in(layer, session, values, layer.sum)
        assert found["layer/mm"][0] is None
        equal(np.asarray(found["layer/mm"][1]), layer.weight)
        assert found["scaled"][0] is None
        assert float(found["scaled"][1]) == 2.0
        assert np.asarray(found["sum"][1]).tolist() == [0, 1]


@pytest.mark.parametrize("resource", [True, False])
def test_reading_a_value_executes_nothing(resource: bool) -> None:
    """A read that waits for an assignment, or for what was not fed, has no value yet."""
    with tf.Graph().as_default() as graph, new_session(graph) as session:
        n = v1.get_variable("n", initializer=0.0, use_resource=resource)
        fed = v1.placeholder(tf.float32, [])

        def after(written: Any) -> Any:
            with tf.control_dependencies([written]):
                read = n.read_value() if resource else tf.identity(n)
            return tf.nn.relu(read * 2)

        counted, added = after(v1.assign_add(n, 1.0)), after(v1.assign_add(n, fed))
        session.run(n.initializer)
        values: dict[str, Any] = {}

        def visit(context: OpContext) -> None:
            count = len(context.get_inputs() or ())
            values[context.name] = [context.value(i) for i in range(count)]

        with amanda.apply(analysing(visit)):
            assert session.run(counted) == 2.0
            assert session.run(counted) == 4.0
            assert session.run(added, {fed: 5.0}) == 14.0
            assert session.run(n) == 7.0
    assert values["mul"][0] is None
    assert values["mul_1"][0] is None


def test_values_are_those_of_the_session_that_runs() -> None:
    layer = Layer()
    with new_session(layer.graph) as one, new_session(layer.graph) as two:
        for session, factor in ((one, 1.0), (two, 3.0)):
            session.run(layer.init)
            session.run(layer.w.initializer, {layer.w.initializer.inputs[1]: layer.weight * factor})
            found = seen_in(
                layer,
                session,
                lambda c: c.value(1) if c.name == "layer/mm" else None,
                layer.sum,
            )
            equal(np.asarray(found["layer/mm"]), layer.weight * np.float32(factor))


def test_a_mask_of_the_value() -> None:
    layer = Layer()

    def analyse(context: OpContext) -> None:
        mask = (np.abs(np.asarray(context.value(1))) > 0.3).astype(np.float32)
        context.insert_before_op(lambda w: w * mask, inputs=[1])

    with new_session(layer.graph) as session:
        session.run(layer.init)
        with amanda.apply(tool(analyse, "layer/mm")):
            found = session.run(layer.y, layer.feed)
    masked = layer.weight * (np.abs(layer.weight) > 0.3)
    np.testing.assert_allclose(found, np.ones((4, 2), np.float32) @ masked, rtol=1e-6)


def test_facts() -> None:
    layer = Layer()
    facts: dict[str, OpContext] = {}

    def visit(context: OpContext) -> None:
        facts[context.name] = context
        if context.name == "layer/mm":
            assert context.get_op() is layer.y.op
            assert context.get_inputs()[0] is layer.x
            assert context.get_inputs()[1].shape == [2, 3]
            assert context.input_names == ("a", "b")

    with new_session(layer.graph) as session, amanda.apply(analysing(visit)):
        session.run(layer.init)
        session.run(layer.train, layer.feed)
        session.run(layer.sum, layer.feed)
    mm = facts["layer/mm"]
    assert mm.op_type == "MatMul"
    assert mm.namespace == f"tensorflow/{tf.__version__}/graph"
    assert mm.module_path == "layer"
    assert mm.source is not None
    assert mm.source.startswith("test_contexts.py:")
    assert mm.zone == "model"
    assert mm["type"] == "linear" or mm["type"] is not None
    assert mm.attrs["transpose_a"] is False
    assert mm.is_forward()
    update = next(c for name, c in facts.items() if c.op_type == "ResourceApplyAdam")
    assert update.zone == "optimizer"
    gradient = facts["gradients/layer/mm_grad/MatMul_1"]
    assert gradient.is_backward()
    assert gradient.forward is mm
    assert gradient.zone == "model"
    assert gradient.get_op_id() == mm.get_op_id()
    assert gradient.get_backward_op_id() != mm.get_op_id()


def test_silent_ops_are_not_operators() -> None:
    layer = Layer()
    with new_session(layer.graph) as session:
        session.run(layer.init)
        found = seen_in(layer, session, lambda c: c.op_type)
    assert not {"Const", "Placeholder", "VarHandleOp", "NoOp"} & set(found.values())


def test_only_what_a_run_needs_is_analysed() -> None:
    layer = Layer()
    with new_session(layer.graph) as session:
        session.run(layer.init)
        assert set(seen_in(layer, session, lambda c: None, layer.y)) == {
            "layer/mm",
            "layer/mm/ReadVariableOp",
        }


def test_ids_are_the_same_in_every_run_session_and_graph_of_the_same_program() -> None:
    ids = []
    for _ in range(2):
        layer = Layer()
        with new_session(layer.graph) as session:
            session.run(layer.init)
            ids.append(seen_in(layer, session, lambda c: c.get_op_id(), layer.sum))
            ids.append(seen_in(layer, session, lambda c: c.get_op_id(), layer.sum))
    assert ids[0] == ids[1] == ids[2] == ids[3]
    assert len(set(ids[0].values())) == len(ids[0])


def test_keys_persist_and_tensors_do_not_outlive_the_call() -> None:
    layer = Layer()
    kept: list[OpContext] = []

    def visit(context: OpContext) -> None:
        if context.name == "layer/mm":
            context["mine"] = 7
            kept.append(context)

    mine = tool(visit)
    with new_session(layer.graph) as session:
        session.run(layer.init)
        with amanda.apply(mine):
            session.run(layer.sum, layer.feed)
        with amanda.apply(mine):
            session.run(layer.sum, layer.feed)
            mine.invalidate()
            session.run(layer.sum, layer.feed)
    assert len(kept) == 2
    assert kept[0] is kept[1]
    assert kept[0]["mine"] == 7


def test_outputs_are_known_after_the_op() -> None:
    layer = Layer()
    found: list[Any] = []
    after = tool(lambda c: found.append(c.get_outputs()), "layer/mm", require_outputs=True)
    with new_session(layer.graph) as session, amanda.apply(after):
        session.run(layer.init)
        session.run(layer.sum, layer.feed)
    assert len(found) == 1
    assert found[0] == [layer.y] or found[0][0] is layer.y


def test_what_cannot_be_seen_is_said() -> None:
    layer = Layer()
    with new_session(layer.graph) as session, amanda.apply(amanda.Tool()) as handle:
        session.run(layer.init)
        gaps = {each.what for each in handle.coverage()["tensorflow"]}
    assert any("partial runs" in what for what in gaps)
    assert any("thread" in what for what in gaps)
