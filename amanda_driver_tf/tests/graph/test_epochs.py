"""Analysis and clones are made once and used again; leaving tools leaves nothing in runs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import script_ops

import amanda
from amanda import OpContext, Tool
from amanda_core.testing.kit.tools import Edit, before, editing, tool
from amanda_driver_tf.execution.sessions.hiding import Hidden

from ..comparison import close, equal
from .reference_programs import all_ops, counting, double, new_session, v1


class Chain:
    """``total = sum(tanh(x @ w))`` and its gradient."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [2, 2], "x")
            self.w = v1.get_variable("w", initializer=np.eye(2, dtype=np.float32))
            self.mm = tf.matmul(self.x, self.w, name="mm")
            self.act = tf.tanh(self.mm, name="act")
            self.total = tf.reduce_sum(self.act, name="total")
            (self.grad,) = tf.gradients(self.total, [self.w])
        self.feed = {self.x: np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)}

    def open(self) -> Any:
        session = new_session(self.graph)
        session.run(self.w.initializer)
        return session

    def run(self, session: Any) -> list[Any]:
        return list(session.run([self.mm, self.total, self.grad], self.feed))


def expected(factor: float) -> list[Any]:
    x = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)
    mm = x * np.float32(factor)
    return [mm, np.tanh(mm).sum(), x.T @ (1 - np.tanh(mm) ** 2)]


def scaling(factor: float) -> Tool:
    return before("mm", lambda w: w * factor, 1)


def test_the_same_tools_are_analysed_once() -> None:
    chain, analysed = Chain(), []

    def analyse(context: OpContext) -> None:
        analysed.append(context.name)
        if context.name == "mm":
            context.insert_before_op(double, inputs=[1])

    mine = tool(analyse)
    with chain.open() as session:
        counts = []
        for _ in range(5):
            with amanda.apply(mine):
                for _ in range(3):
                    close(chain.run(session), expected(2.0))
            counts.append(all_ops(chain.graph))
            equal(chain.run(session), chain.run(session))
            close(chain.run(session), expected(1.0))
    assert len(analysed) == len(set(analysed))
    assert "mm" in analysed
    assert len(set(counts)) == 1


@pytest.mark.slow
def test_tools_of_the_same_structure_share_clones() -> None:
    chain = Chain()
    with chain.open() as session:
        with amanda.apply(scaling(2.0)):
            close(chain.run(session), expected(2.0))
        gc.collect()
        count = all_ops(chain.graph)
        for factor in (3.0, 0.5, 7.0):
            with amanda.apply(scaling(factor)):
                close(chain.run(session), expected(factor))
            gc.collect()
            assert all_ops(chain.graph) == count


@pytest.mark.slow
def test_fifty_extents_leave_a_bounded_number_of_ops() -> None:
    chain = Chain()
    with chain.open() as session:
        for number in range(50):
            with amanda.apply(scaling(float(number))):
                close(chain.run(session), expected(float(number)))
            if number % 5 == 4:
                gc.collect()
            if number == 9:
                count, hosts = all_ops(chain.graph), script_ops._py_funcs.size()
        gc.collect()
    assert all_ops(chain.graph) <= count + 20
    assert script_ops._py_funcs.size() <= hosts


def test_two_sets_of_tools_in_turn() -> None:
    chain = Chain()
    one, two = scaling(2.0), editing(Edit("act", "grad_out", double, 0))
    with chain.open() as session:
        counts = []
        for _ in range(4):
            with amanda.apply(one):
                close(chain.run(session), expected(2.0))
            with amanda.apply(two):
                mm, total, grad = expected(1.0)
                close(chain.run(session), [mm, total, 2 * grad])
            with amanda.apply(one, two):
                mm, total, grad = expected(2.0)
                close(chain.run(session), [mm, total, 2 * grad])
            counts.append(all_ops(chain.graph))
    assert counts[1:] == counts[1:2] * 3


def test_tools_of_the_same_structure_at_the_same_time_do_not_mix() -> None:
    chain = Chain()
    outer, inner = scaling(2.0), scaling(3.0)
    with chain.open() as session:
        with amanda.apply(outer):
            close(chain.run(session), expected(2.0))
            with amanda.apply(inner):
                close(chain.run(session), expected(6.0))
            close(chain.run(session), expected(2.0))
        with amanda.apply(inner):
            close(chain.run(session), expected(3.0))
        with amanda.apply(outer):
            close(chain.run(session), expected(2.0))


@pytest.mark.slow
def test_staged_constants_of_other_tools_are_not_taken() -> None:
    chain = Chain()

    def masked(mask: Any) -> Tool:
        return before("mm", amanda.staged(lambda w: w * mask), 1)

    with chain.open() as session:
        for factor in (2.0, 3.0, 2.0):
            with amanda.apply(masked(np.full((2, 2), factor, np.float32))):
                close(chain.run(session), expected(factor))
            gc.collect()
        with amanda.apply(before("mm", amanda.staged(lambda w: w * 5.0), 1)):
            close(chain.run(session), expected(5.0))
        gc.collect()
        with amanda.apply(before("mm", amanda.staged(lambda w: w * 4.0), 1)):
            close(chain.run(session), expected(4.0))


def test_switched_off_and_on() -> None:
    chain = Chain()
    with chain.open() as session, amanda.apply(scaling(2.0)):
        with amanda.disabled():
            close(chain.run(session), expected(1.0))
            with amanda.enabled():
                close(chain.run(session), expected(2.0))
        close(chain.run(session), expected(2.0))
        count = all_ops(chain.graph)
        with amanda.disabled():
            close(chain.run(session), expected(1.0))
        close(chain.run(session), expected(2.0))
        assert all_ops(chain.graph) == count


def test_without_cache_every_run_is_analysed() -> None:
    chain = Chain()
    analysed: list[int] = []

    def analyse(context: OpContext) -> None:
        if context.name == "mm":
            analysed.append(len(analysed) + 1)
            factor = float(len(analysed))
            context.insert_before_op(lambda w: w * factor, inputs=[1])

    with chain.open() as session, amanda.apply(tool(analyse)):
        with amanda.cache_disabled():
            for factor in (1.0, 2.0, 3.0):
                close(chain.run(session), expected(factor))
            gc.collect()
            count = all_ops(chain.graph)
            for factor in (4.0, 5.0):
                close(chain.run(session), expected(factor))
                gc.collect()
            assert all_ops(chain.graph) == count
        assert analysed == [1, 2, 3, 4, 5]


def test_invalidated_tools_are_analysed_again() -> None:
    chain, factors = Chain(), [2.0, 3.0, 4.0, 5.0]

    def analyse(context: OpContext) -> None:
        if context.name == "mm":
            factor = factors.pop(0)
            context.insert_before_op(lambda w: w * factor, inputs=[1])

    mine = tool(analyse)
    with chain.open() as session, amanda.apply(mine):
        close(chain.run(session), expected(2.0))
        mine.invalidate()
        close(chain.run(session), expected(3.0))
        close(chain.run(session), expected(3.0))
        mine.invalidate()
        close(chain.run(session), expected(4.0))
    assert factors == [5.0]


def test_a_tool_may_invalidate_itself_in_a_routine() -> None:
    chain, factors = Chain(), [2.0, 3.0, 4.0]
    mine = Tool()

    def analyse(context: OpContext) -> None:
        if context.name == "mm":
            factor = factors.pop(0)

            def routine(w: Any) -> Any:
                mine.invalidate()
                return w * factor

            context.insert_before_op(routine, inputs=[1])

    mine.add_inst_for_op(analyse)
    with chain.open() as session, amanda.apply(mine):
        for factor in (2.0, 3.0, 4.0):
            close(chain.run(session), expected(factor))


def test_nested_tools_run_after_outer_ones() -> None:
    chain = Chain()
    adding = before("mm", lambda w: w + 1.0, 1)
    with chain.open() as session, amanda.apply(scaling(2.0)):
        with amanda.apply(adding):
            x = chain.feed[chain.x]
            close(chain.run(session)[0], x @ (2 * np.eye(2, dtype=np.float32) + 1))
        close(chain.run(session), expected(2.0))


def test_later_runs_are_what_they_were_bit_by_bit() -> None:
    chain = Chain()
    with chain.open() as session:
        plain = chain.run(session)
        for _ in range(3):
            with amanda.apply(scaling(2.0)):
                chain.run(session)
            equal(chain.run(session), plain)
        seen, watching = counting()
        with amanda.apply(watching):
            equal(chain.run(session), plain)
        count = len(seen)
        chain.run(session)
        assert len(seen) == count


def test_a_graph_and_its_sessions_can_be_freed() -> None:
    mine = scaling(2.0)
    chain = Chain()
    graph = weakref.ref(chain.graph)
    session = chain.open()
    with amanda.apply(mine):
        chain.run(session)
    session.close()
    del chain, session
    gc.collect()
    assert graph() is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nothing", "before", "grad_in", "grad_out"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_graph_is_freed_while_its_tools_stay(differentiated: bool, kind: str) -> None:
    """It has ops that are run and not fetched, some of which no tool observes."""

    def freed() -> Any:
        graph = tf.Graph()
        with graph.as_default(), new_session(graph) as session:
            x = v1.get_variable("x", initializer=2.0, use_resource=True)
            y = x * x * 3.0
            fetched = v1.gradients(y, x) if differentiated else [y]
            session.run(v1.global_variables_initializer())
            session.run([*fetched, v1.assign(x, 1.0)])
        return weakref.ref(graph)

    mine = amanda.Tool() if kind == "nothing" else editing(Edit("Mul", kind, lambda v: v * 2, 0))
    with amanda.apply(mine):
        graph = freed()
        gc.collect()
        assert graph() is None


@pytest.mark.parametrize("traced", ["routine", "gradient"])
def test_a_graph_is_freed_though_functions_were_traced_in_it(traced: str) -> None:
    """These are a staged routine, and the gradient of an op that reads a tensor in two versions."""

    def freed() -> Any:
        with tf.Graph().as_default() as graph, new_session(graph) as session:
            x = tf.constant(2.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            session.run(tape.gradient(y, x))
        return weakref.ref(graph)

    routine = amanda.staged(lambda v: v * 2.0) if traced == "routine" else lambda v: v * 2.0
    with amanda.apply(editing(Edit("Mul", "before", routine, 0))):
        graph = freed()
        gc.collect()
        assert graph() is None


def test_tools_can_be_freed() -> None:
    chain = Chain()
    masks: list[Any] = []

    class Mask(np.ndarray):
        pass

    def use(session: Any) -> None:
        mask = np.full((2, 2), 2, np.float32).view(Mask)
        masks.append(weakref.ref(mask))
        with amanda.apply(before("mm", lambda w: w * np.asarray(mask), 1)):
            chain.run(session)

    with chain.open() as session:
        for _ in range(3):
            use(session)
            gc.collect()
        assert [mask() is None for mask in masks] == [True] * 3


def test_memory_is_flat_over_many_runs() -> None:
    chain = Chain()
    with chain.open() as session, amanda.apply(scaling(2.0)):
        for _ in range(50):
            chain.run(session)
        gc.collect()
        objects, ops_ = len(gc.get_objects()), all_ops(chain.graph)
        for _ in range(450):
            chain.run(session)
        gc.collect()
        assert len(gc.get_objects()) < objects + 200
        assert all_ops(chain.graph) == ops_


def graphs_alive() -> int:
    # By type and not by isinstance, which reads __class__ of foreign lazy and deprecated objects.
    return sum(issubclass(type(each), tf.Graph) for each in gc.get_objects())


@pytest.mark.slow
def test_many_graphs_leave_nothing_behind() -> None:
    mine = scaling(2.0)

    def one() -> None:
        chain = Chain()
        with chain.open() as session, amanda.apply(mine):
            close(chain.run(session), expected(2.0))

    for _ in range(3):
        one()
    gc.collect()
    graphs = graphs_alive()
    for _ in range(6):
        one()
    gc.collect()
    assert graphs_alive() <= graphs + 1


@pytest.mark.slow
def test_functions_of_clones_are_reused() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [2])
        y = tf.function(lambda v: tf.negative(v, name="neg"), autograph=False)(x)
    with new_session(graph) as session:
        counts = []
        for number in range(8):
            tools = before("neg", lambda v, factor=float(number): v * factor)
            with amanda.apply(tools):
                assert session.run(y, {x: [1.0, 2.0]}).tolist() == [-number, -2 * number]
            gc.collect()
            hidden = Hidden.of(graph)
            assert hidden is not None
            counts.append((all_ops(graph), len(hidden.functions)))
    assert counts[-1] == counts[2]
