"""Training loops of sessions: the oracle is a reference whose weights are edited in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.testing.kit.tools import Edit, editing, tool

from ..comparison import close, equal
from .reference_programs import all_ops, arrays, counting, new_session, serialised, straight, v1

RATE = 1e-3
MASK = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1]], np.float32)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "descent": lambda: v1.train.GradientDescentOptimizer(RATE),
    "momentum": lambda: v1.train.MomentumOptimizer(RATE, 0.9),
    "nesterov": lambda: v1.train.MomentumOptimizer(RATE, 0.9, use_nesterov=True),
    "adam": lambda: v1.train.AdamOptimizer(RATE),
    "rms": lambda: v1.train.RMSPropOptimizer(RATE),
    "adagrad": lambda: v1.train.AdagradOptimizer(RATE),
}


class Model:
    """Two layers, a loss and a train op; in the reference program, the first weight is masked in
    place.
    """

    def __init__(
        self, optimizer: str, resource: bool, gate: int, masked: bool, scaled: float = 1.0
    ) -> None:
        first, second, bias = arrays((4, 3), (3, 2), (3,))
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [None, 4], "x")
            self.w = v1.get_variable("w", initializer=first, use_resource=resource)
            self.b = v1.get_variable("b", initializer=bias, use_resource=resource)
            self.v = v1.get_variable("v", initializer=second, use_resource=resource)
            w = straight(tf.convert_to_tensor(self.w), lambda t: t * MASK) if masked else self.w
            h = tf.nn.relu(tf.nn.bias_add(tf.matmul(self.x, w, name="mm1"), self.b), name="act")
            self.y = tf.matmul(h, self.v, name="mm2")
            self.loss = tf.reduce_mean(tf.square(self.y), name="loss")
            self.step = v1.train.get_or_create_global_step()
            chosen = OPTIMIZERS[optimizer]()
            pairs = chosen.compute_gradients(self.loss, gate_gradients=gate)
            if masked and scaled != 1.0:
                pairs = [(g * scaled if v is self.v else g, v) for g, v in pairs]
            self.train = chosen.apply_gradients(pairs, global_step=self.step)
            self.variables = v1.global_variables()
            self.init = v1.global_variables_initializer()


def batch(index: int) -> Any:
    return np.random.default_rng(index).normal(size=(5, 4)).astype(np.float32)


def loop(model: Model, session: Any, steps: int = 6) -> list[Any]:
    found = []
    for index in range(steps):
        loss, _ = session.run([model.loss, model.train], {model.x: batch(index)})
        found.append(loss)
    found += session.run(model.variables)
    assert all(np.isfinite(value).all() for value in found)
    return found


def masking(mask: Any = MASK) -> amanda.Tool:
    return editing(Edit("mm1", "before", lambda w: w * mask, 1))


# Not references with gate 0: plain TensorFlow diverges, reads and updates are not ordered.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("resource", "gate"), [(True, 0), (True, 1), (True, 2), (False, 1), (False, 2)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_masked_weight(optimizer: str, resource: bool, gate: int) -> None:
    reference = Model(optimizer, resource, gate, masked=True, scaled=2.0)
    with new_session(reference.graph) as session:
        session.run(reference.init)
        wanted = loop(reference, session)
    model = Model(optimizer, resource, gate, masked=False)
    shown = serialised(model.graph)

    def scaling(context: OpContext) -> None:
        context.insert_after_backward_op(lambda g: g * 2.0, grad_inputs=[1])

    with new_session(model.graph) as session:
        session.run(model.init)
        with amanda.apply(masking(), tool(scaling, "mm2")):
            close(loop(model, session), wanted)
    assert serialised(model.graph) == shown


def test_only_the_train_op_is_run() -> None:
    reference = Model("momentum", True, 1, masked=True)
    with new_session(reference.graph) as session:
        session.run(reference.init)
        for index in range(4):
            session.run(reference.train, {reference.x: batch(index)})
        wanted = session.run(reference.variables)
    model = Model("momentum", True, 1, masked=False)
    with new_session(model.graph) as session:
        session.run(model.init)
        with amanda.apply(masking()):
            for index in range(4):
                assert session.run(model.train, {model.x: batch(index)}) is None
        close(session.run(model.variables), wanted)


def test_only_the_train_op_of_a_last_layer() -> None:
    def trained(masked: bool) -> Any:
        graph = tf.Graph()
        with graph.as_default():
            w = v1.get_variable("w", initializer=MASK + 1.0, use_resource=True)
            read = straight(tf.convert_to_tensor(w), lambda t: t * MASK) if masked else w
            # Neither sum nor product are needed for the gradient.
            loss = tf.reduce_sum(tf.matmul(tf.sin(w), read, transpose_a=True, name="mm1"))
            train = v1.train.GradientDescentOptimizer(0.01).minimize(loss)
        with new_session(graph) as session:
            session.run(w.initializer)
            if masked:
                session.run(train)
            else:
                with amanda.apply(masking()):
                    session.run(train)
            return session.run(w)

    close(trained(False), trained(True))


def test_variables_are_updated_once_for_each_run() -> None:
    model = Model("adam", True, 1, masked=False)
    seen, counted = counting("mm1")
    with new_session(model.graph) as session:
        session.run(model.init)
        with amanda.apply(counted, masking()):
            for index in range(5):
                session.run([model.train, model.loss, model.w], {model.x: batch(index)})
        assert session.run(model.step) == 5
    assert len(seen) == 5


def test_several_train_ops_and_fetches_share_variables() -> None:
    model = Model("momentum", True, 1, masked=False)
    reference = Model("momentum", True, 1, masked=True)

    def visit(model: Model, session: Any) -> list[Any]:
        feed = {model.x: batch(0)}
        found = [session.run(model.loss, feed)]
        session.run(model.train, feed)
        found += session.run([model.y, model.w], feed)
        session.run([model.train, model.loss], feed)
        found += session.run([model.loss, model.y, model.v], feed)
        found.append(session.run(model.w))
        return found

    with new_session(reference.graph) as session:
        session.run(reference.init)
        wanted = visit(reference, session)
    with new_session(model.graph) as session:
        session.run(model.init)
        with amanda.apply(masking()):
            found = visit(model, session)
        close(found, wanted)
        equal(session.run(model.w), found[-1])


def test_initialisation_and_assignment_under_tools() -> None:
    model = Model("momentum", True, 1, masked=False)
    every, counted = counting()
    with new_session(model.graph) as session, amanda.apply(masking(), counted):
        session.run(model.init)
        equal(session.run(model.w), arrays((4, 3), (3, 2), (3,))[0])
        with model.graph.as_default():
            update = model.w.assign(model.w + MASK)
        close(session.run(update), arrays((4, 3), (3, 2), (3,))[0] + MASK)
    assert every


def test_an_edited_initial_value_is_what_the_variable_gets() -> None:
    for resource in (True, False):
        graph = tf.Graph()
        with graph.as_default():
            w = v1.get_variable(
                "w", [2, 2], initializer=v1.ones_initializer(), use_resource=resource
            )
            v = v1.get_variable("v", initializer=tf.negative(tf.ones([2]), name="neg"))
        with new_session(graph) as session:
            with amanda.apply(editing(Edit("neg", "after", lambda value: value * 5, 0))):
                session.run([w.initializer, v.initializer])
            assert session.run(w).tolist() == [[1, 1], [1, 1]]
            assert session.run(v).tolist() == [-5, -5]


def test_an_update_can_be_watched_and_its_gradient_edited() -> None:
    model = Model("descent", True, 1, masked=False)
    gradients: list[Any] = []

    def analyse(context: OpContext) -> None:
        if context.op_type == "ResourceApplyGradientDescent":
            assert context.zone == "optimizer"
            context.insert_before_op(lambda g: gradients.append(g.numpy()), inputs=[2])
            context.insert_before_op(lambda g: g * 0.0, inputs=[2])

    with new_session(model.graph) as session:
        session.run(model.init)
        kept = session.run(model.w)
        with amanda.apply(tool(analyse)):
            session.run(model.train, {model.x: batch(0)})
        equal(session.run(model.w), kept)
    assert len(gradients) == 3


def test_hidden_ops_are_few_and_do_not_grow() -> None:
    model = Model("adam", True, 1, masked=False)
    with new_session(model.graph) as session, amanda.apply(masking()):
        session.run(model.init)
        session.run([model.loss, model.train], {model.x: batch(0)})
        hidden = all_ops(model.graph)
        for index in range(5):
            session.run([model.loss, model.train], {model.x: batch(index)})
        assert all_ops(model.graph) == hidden
    shown = {op.name for op in model.graph.get_operations()}
    assert hidden < 2 * len(shown)
    # Variables are the session's own: clones read and write them, and none is cloned.
    cloned = {op.type for op in tf.Graph.get_operations(model.graph) if op.name not in shown}
    assert "ResourceApplyAdam" in cloned
    assert not {"VarHandleOp", "VariableV2", "RandomUniform"} & cloned
