"""Fetches, feeds and targets in all forms that a session accepts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import after, before

from ..comparison import close, equal
from .reference_programs import all_ops, counting, double, new_session, v1


class Pair(NamedTuple):
    first: Any
    second: Any


class Small:
    """``mm = x @ w; act = tanh(mm); total = sum(act)``, with ``w`` doubled by a tool."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [2, 2], "x")
            self.w = v1.get_variable("w", initializer=np.eye(2, dtype=np.float32))
            self.mm = tf.matmul(self.x, self.w, name="mm")
            self.act = tf.tanh(self.mm, name="act")
            self.total = tf.reduce_sum(self.act, name="total")
            self.fallback = v1.placeholder_with_default(tf.ones([2, 2]), [2, 2], "fallback")
            self.added = tf.add(self.fallback, self.mm, name="added")
            self.grad = tf.gradients(self.total, self.w)[0]
            self.train = self.w.assign_add(self.grad * 0.0).op
            self.group = tf.group(self.train, self.total, name="everything")


GIVEN = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)


@pytest.fixture
def small() -> Small:
    return Small()


@pytest.fixture
def session(small: Small) -> Any:
    with new_session(small.graph) as session:
        session.run(small.w.initializer)
        yield session


def doubled() -> amanda.Tool:
    return before("mm", double, 1)


# Fetches.


def test_every_form_of_fetches(small: Small, session: Any) -> None:
    feed = {small.x: GIVEN}
    mm, act = 2 * GIVEN, np.tanh(2 * GIVEN)
    with amanda.apply(doubled()):
        close(session.run(small.mm, feed), mm)
        close(session.run([small.mm, small.act], feed), [mm, act])
        close(session.run((small.act,), feed)[0], act)
        found = session.run({"a": small.mm, "b": {"c": [small.act, small.total]}}, feed)
        close([found["a"], *found["b"]["c"]], [mm, act, act.sum()])
        close(list(session.run(Pair(small.mm, small.act), feed)), [mm, act])
        assert isinstance(session.run(Pair(small.mm, small.act), feed), Pair)
        close(session.run("mm:0", feed), mm)
        close(session.run(["mm:0", small.total], feed)[0], mm)
        assert session.run("everything", feed) is None
        assert session.run([], feed) == []
        assert session.run([small.mm.op, small.train], feed) == [None, None]
        close(session.run([small.mm, small.mm, small.mm], feed), [mm, mm, mm])
        equal(session.run(small.w), np.eye(2, dtype=np.float32))
        close(session.run(small.mm, {"x:0": GIVEN}), mm)
    close(session.run(small.mm, feed), GIVEN)


def test_slices_and_sparse_tensors() -> None:
    graph = tf.Graph()
    with graph.as_default():
        values = tf.negative(tf.constant([1.0, 2.0]), name="neg")
        slices = tf.IndexedSlices(values, tf.constant([0, 2]), tf.constant([3]))
        sparse = tf.SparseTensor([[0, 1], [1, 0]], values, [2, 2])
        ragged = tf.RaggedTensor.from_row_lengths(values, [1, 1])
        given = v1.sparse_placeholder(tf.float32, [2, 2], "given")
        total = tf.sparse.reduce_sum(tf.sparse.map_values(tf.math.multiply, given, values))
        whole = tf.sparse.to_dense(given)
    fed = v1.SparseTensorValue([[0, 0], [1, 1]], [3.0, 4.0], [2, 2])
    with new_session(graph) as session, amanda.apply(before("neg", double)):
        assert session.run(slices).values.tolist() == [-2.0, -4.0]
        assert session.run(slices).indices.tolist() == [0, 2]
        assert session.run(sparse).values.tolist() == [-2.0, -4.0]
        assert session.run(ragged).to_list() == [[-2.0], [-4.0]]
        assert session.run(total, {given: fed}) == -22.0
        assert session.run([total, whole], {given: fed})[1].tolist() == [[3, 0], [0, 4]]


def test_eval_and_run_methods(small: Small) -> None:
    with new_session(small.graph) as session, session.as_default(), amanda.apply(doubled()):
        small.w.initializer.run()
        close(small.mm.eval({small.x: GIVEN}), 2 * GIVEN)
        small.train.run({small.x: GIVEN})
        close(small.w.eval(), np.eye(2, dtype=np.float32))


def test_an_interactive_session(small: Small) -> None:
    with small.graph.as_default():
        session = v1.InteractiveSession(graph=small.graph)
        try:
            small.w.initializer.run()
            with amanda.apply(doubled()):
                close(small.mm.eval({small.x: GIVEN}), 2 * GIVEN)
            close(small.mm.eval({small.x: GIVEN}), GIVEN)
        finally:
            session.close()


# Feeds.


def test_a_fed_tensor_is_neither_computed_nor_edited(small: Small, session: Any) -> None:
    seen, counted = counting("mm")
    with amanda.apply(doubled(), counted):
        close(session.run(small.act, {small.mm: GIVEN}), np.tanh(GIVEN))
        assert not seen
        close(session.run([small.mm, small.act], {small.mm: GIVEN})[0], GIVEN)
        assert not seen
        close(session.run(small.act, {small.x: GIVEN}), np.tanh(2 * GIVEN))
        assert seen == ["mm"]
        feed = {small.x: GIVEN, small.act: GIVEN * 7}
        found = session.run([small.mm, small.act, small.total], feed)
        close(found, [2 * GIVEN, GIVEN * 7, (GIVEN * 7).sum()])


def test_the_gradient_of_an_op_with_a_fed_input(small: Small, session: Any) -> None:
    with amanda.apply(before("act", double)):
        mm = GIVEN * 3
        found = session.run(small.grad, {small.x: GIVEN, small.mm: mm})
    close(found, GIVEN.T @ (1 - np.tanh(2 * mm) ** 2))


def test_the_gradient_of_an_edited_op_whose_output_is_fed(small: Small, session: Any) -> None:
    with amanda.apply(before("act", double)):
        # The formula reads the output of tanh; what is fed is what it is given.
        found = session.run(small.grad, {small.x: GIVEN, small.act: GIVEN})
    close(found, GIVEN.T @ (1 - GIVEN**2))


def test_feeding_what_is_fetched(small: Small, session: Any) -> None:
    with amanda.apply(doubled()):
        close(session.run(small.x, {small.x: GIVEN}), GIVEN)
        close(session.run([small.x, small.mm], {small.x: GIVEN}), [GIVEN, 2 * GIVEN])


def test_placeholders_with_a_default(small: Small, session: Any) -> None:
    with amanda.apply(before("added", double, 0), doubled()):
        close(session.run(small.added, {small.x: GIVEN}), 2 + 2 * GIVEN)
        feed = {small.x: GIVEN, small.fallback: GIVEN * 10}
        close(session.run(small.added, feed), 20 * GIVEN + 2 * GIVEN)


def test_the_input_of_an_edited_op_is_fed(small: Small, session: Any) -> None:
    with amanda.apply(doubled()):
        read = small.mm.op.inputs[1]
        close(session.run(small.mm, {small.x: GIVEN, read: GIVEN}), GIVEN @ (2 * GIVEN))


def test_a_missing_feed_is_tensorflows_error(small: Small, session: Any) -> None:
    with amanda.apply(doubled()):
        with pytest.raises(tf.errors.InvalidArgumentError, match="'x'"):
            session.run(small.mm)
        close(session.run(small.mm, {small.x: GIVEN}), 2 * GIVEN)


def test_fetches_of_another_graph_are_tensorflows_error(small: Small, session: Any) -> None:
    other = Small()
    with amanda.apply(doubled()), pytest.raises(TypeError, match="not an element of this graph"):
        session.run(other.mm, {other.x: GIVEN})


def test_shapes_are_checked_as_always(small: Small, session: Any) -> None:
    with amanda.apply(doubled()), pytest.raises(ValueError, match="Cannot feed value of shape"):
        session.run(small.mm, {small.x: GIVEN[0]})


# Callables.


def test_callables_made_before_and_inside(small: Small, session: Any) -> None:
    earlier = session.make_callable([small.mm, small.act], [small.x])
    bare = session.make_callable(small.w)
    op = session.make_callable(small.group, [small.x])
    seen, counted = counting("mm")
    with amanda.apply(doubled(), counted):
        inner = session.make_callable({"m": small.mm}, [small.x])
        close(earlier(GIVEN), [2 * GIVEN, np.tanh(2 * GIVEN)])
        close(inner(GIVEN)["m"], 2 * GIVEN)
        equal(bare(), np.eye(2, dtype=np.float32))
        assert op(GIVEN) is None
        assert len(seen) == 3
    close(earlier(GIVEN), [GIVEN, np.tanh(GIVEN)])
    close(inner(GIVEN)["m"], GIVEN)
    assert len(seen) == 3


def test_a_callable_that_feeds_an_edited_tensor(small: Small, session: Any) -> None:
    run = session.make_callable(small.act, [small.mm])
    with amanda.apply(doubled()):
        close(run(GIVEN), np.tanh(GIVEN))


def test_options_and_metadata(small: Small, session: Any) -> None:
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, timeout_in_ms=60000)
    metadata = v1.RunMetadata()
    with amanda.apply(doubled()):
        found = session.run(small.mm, {small.x: GIVEN}, options=options, run_metadata=metadata)
        close(found, 2 * GIVEN)
        accepting = session.make_callable(small.mm, [small.x], accept_options=True)
        close(accepting(GIVEN, options=options, run_metadata=metadata), 2 * GIVEN)
    assert metadata.step_stats.dev_stats


def test_partial_runs(small: Small, session: Any) -> None:
    """The second op is edited in the second part, and reads results of the first part."""
    with amanda.apply(doubled()):
        handle = session.partial_run_setup([small.mm, small.act], [small.x])
        close(session.partial_run(handle, small.mm, {small.x: GIVEN}), 2 * GIVEN)
        close(session.partial_run(handle, small.act), np.tanh(2 * GIVEN))
        close(session.run(small.mm, {small.x: GIVEN}), 2 * GIVEN)


@pytest.mark.parametrize("kind", ["empty", "watching", "none"])
def test_partial_runs_under_tools_that_change_nothing(
    kind: str, small: Small, session: Any
) -> None:
    def analyse(context: amanda.OpContext) -> None:
        if kind == "none":
            context.insert_after_op(lambda *values: None)

    tool = amanda.Tool()
    if kind != "empty":
        tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        handle = session.partial_run_setup([small.mm, small.act], [small.x])
        close(session.partial_run(handle, small.mm, {small.x: GIVEN}), GIVEN)
        close(session.partial_run(handle, small.act), np.tanh(GIVEN))


def test_partial_runs_call_each_routine_once(small: Small, session: Any) -> None:
    ran: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.insert_after_op(lambda *values: ran.append(c.op_type)), require_outputs=True
    )
    with amanda.apply(tool):
        handle = session.partial_run_setup([small.mm, small.act], [small.x])
        assert "MatMul" not in ran
        session.partial_run(handle, small.mm, {small.x: GIVEN})
        assert "MatMul" in ran
        session.partial_run(handle, small.act)
    assert len(ran) == len(set(ran)) > 2


def test_fetching_twice_in_a_partial_run_is_tensorflows_error(small: Small, session: Any) -> None:
    with amanda.apply(doubled()):
        handle = session.partial_run_setup([small.mm, small.act], [small.x])
        session.partial_run(handle, small.mm, {small.x: GIVEN})
        with pytest.raises(tf.errors.InvalidArgumentError, match="already been fetched"):
            session.partial_run(handle, small.mm)
        session.partial_run(handle, small.act)
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.partial_run(handle, small.act)


def test_error_of_a_routine_in_a_partial_run(small: Small, session: Any) -> None:
    with amanda.apply(after("MatMul", lambda value: 1 / 0, 0)):
        handle = session.partial_run_setup([small.mm, small.act], [small.x])
        with pytest.raises(ZeroDivisionError):
            session.partial_run(handle, small.mm, {small.x: GIVEN})


@pytest.mark.parametrize("where", ["inside", "before"])
def test_partial_runs_under_a_tool_that_inserts_nothing(
    small: Small, session: Any, where: str
) -> None:
    fetches = [small.mm, small.act]
    handle = session.partial_run_setup(fetches, [small.x])
    with amanda.apply(amanda.Tool()):
        if where == "inside":
            handle = session.partial_run_setup(fetches, [small.x])
        close(session.partial_run(handle, small.mm, {small.x: GIVEN}), GIVEN)
    close(session.partial_run(handle, small.act), np.tanh(GIVEN))


def test_partial_run_that_was_set_up_without_what_would_be_inserted(
    small: Small, session: Any
) -> None:
    handle = session.partial_run_setup([small.mm, small.act], [small.x])
    with amanda.apply(doubled()):
        with pytest.raises(NotImplementedError, match="partial run"):
            session.partial_run(handle, small.mm, {small.x: GIVEN})
        close(session.run(small.mm, {small.x: GIVEN}), 2 * GIVEN)
        with amanda.disabled():
            close(session.partial_run(handle, small.mm, {small.x: GIVEN}), GIVEN)


def test_partial_run_that_was_set_up_before_observers(small: Small, session: Any) -> None:
    """Observers do not see it, as the coverage says, and the program runs."""
    handle = session.partial_run_setup([small.mm, small.act], [small.x])
    seen: list[Any] = []
    observer = amanda.Tool()
    observer.add_inst_for_op(lambda c: c.insert_after_op(seen.append, outputs=[0], observe=True))
    with amanda.apply(observer) as applied:
        close(session.partial_run(handle, small.mm, {small.x: GIVEN}), GIVEN)
        close(session.partial_run(handle, small.act), np.tanh(GIVEN))
        assert not seen
        close(session.run(small.mm, {small.x: GIVEN}), GIVEN)
        assert seen
        gaps = {each.what for each in applied.coverage()["tensorflow"]}
    assert any("partial runs" in what for what in gaps)


def test_handles_of_tensors_that_stay_in_the_session(small: Small, session: Any) -> None:
    with small.graph.as_default():
        kept = v1.get_session_handle(small.mm)
    with amanda.apply(doubled()):
        handle = session.run(kept, {small.x: GIVEN})
        close(handle.eval(), 2 * GIVEN)
        with small.graph.as_default():
            holder, value = v1.get_session_tensor(handle.handle, tf.float32)
            twice = tf.add(value, value)
        close(session.run(twice, {holder: handle.handle}), 4 * GIVEN)


def test_every_combination_is_translated_on_its_own(small: Small, session: Any) -> None:
    feed = {small.x: GIVEN}
    combinations = [
        [small.mm], [small.act], [small.total], [small.mm, small.total], [small.grad],
        [small.added], [small.train], [small.group], [small.added, small.grad],
    ]  # fmt: skip
    with amanda.apply(doubled()):
        first = [session.run(fetches, feed) for fetches in combinations]
        count = all_ops(small.graph)
        for _ in range(3):
            again = [session.run(fetches, feed) for fetches in combinations]
            for one, other in zip(first, again, strict=True):
                equal([v for v in one if v is not None], [v for v in other if v is not None])
        assert all_ops(small.graph) == count


def test_constants_whose_values_a_tool_reads_may_be_fed() -> None:
    values = list[Any]()
    graph = tf.Graph()
    with graph.as_default(), new_session(graph) as session:
        a = tf.constant(1.0, shape=[1, 2])
        b = tf.reshape(a, tf.stack([2, 1]))
        reading = amanda.Tool()
        reading.add_inst_for_op(lambda context: values.extend(map(context.value, range(2))))
        with amanda.apply(reading):
            session.run(b)
            fed = session.run(b, {a.name: [[4.0, 5.0]]})
    equal(fed, np.array([[4.0], [5.0]], np.float32))
    assert any(np.array_equal(value, [[1.0, 1.0]]) for value in values if value is not None)
