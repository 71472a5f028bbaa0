"""Sessions of all kinds: monitored, supervised, several on one graph, with a server."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import before

from ..comparison import close, equal
from .reference_programs import all_ops, counting, double, new_session, serialised, v1


class Trained:
    """Ten numbers that are trained towards zero."""

    def __init__(self, resource: bool = True) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.step = v1.train.get_or_create_global_step()
            self.w = v1.get_variable(
                "w", [2, 2], initializer=v1.ones_initializer(), use_resource=resource
            )
            self.mm = tf.matmul(tf.ones([2, 2]), self.w, name="mm")
            self.loss = tf.reduce_sum(tf.square(self.mm), name="loss")
            v1.summary.scalar("loss", self.loss)
            optimizer = v1.train.GradientDescentOptimizer(0.001)
            self.train = optimizer.minimize(
                self.loss, global_step=self.step, gate_gradients=optimizer.GATE_GRAPH
            )


def reached(steps: int) -> Any:
    """Compute by hand the weight after so many steps with ``w`` doubled at ``mm``."""
    w = np.ones((2, 2))
    for _ in range(steps):
        w = w - 0.001 * np.ones((2, 2)).T @ (2 * np.ones((2, 2)) @ (2 * w))
    return w.astype(np.float32)


def doubled() -> amanda.Tool:
    return before("mm", double, 1)


class _Losses(v1.train.SessionRunHook):  # type: ignore[misc]
    def __init__(self, fetch: Any) -> None:
        self.fetch = fetch
        self.seen: list[Any] = []

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(self.fetch)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.seen.append(run_values.results)


@pytest.mark.filterwarnings("ignore:.* writes the model without the changes")
def test_a_monitored_training_session(tmp_path: pathlib.Path) -> None:
    model = Trained()
    with model.graph.as_default():
        losses = _Losses(model.loss)
        hooks = [
            v1.train.StopAtStepHook(last_step=6),
            v1.train.LoggingTensorHook({"loss": model.loss}, every_n_iter=2),
            v1.train.NanTensorHook(model.loss),
            v1.train.StepCounterHook(every_n_steps=2, output_dir=str(tmp_path)),
            v1.train.SummarySaverHook(
                save_steps=2, output_dir=str(tmp_path), summary_op=v1.summary.merge_all()
            ),
            losses,
        ]
        steps = 0
        with (
            amanda.apply(doubled()),
            v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), hooks=hooks, save_checkpoint_steps=3
            ) as session,
        ):
            while not session.should_stop():
                session.run(model.train)
                steps += 1
            shown = serialised(model.graph)
            assert model.graph.finalized
            assert all_ops(model.graph) > model.graph.num_operations()
    assert steps == 6
    assert len(losses.seen) == 6
    assert losses.seen[0] == 64.0
    assert b"amanda" not in shown
    checkpoint = tf.train.latest_checkpoint(str(tmp_path))
    close(tf.train.load_variable(checkpoint, "w"), reached(6))
    for path in tmp_path.iterdir():
        content = path.read_bytes().lower()
        assert b"amanda_" not in content, path
        assert b"pyfunc" not in content, path


def test_tools_applied_inside_a_monitored_session() -> None:
    model = Trained()
    with model.graph.as_default(), v1.train.MonitoredSession() as session:
        session.run(model.train)
        with amanda.apply(doubled()):
            session.run(model.train)
            raw = session.run_step_fn(lambda step_context: step_context.session.run(model.mm))
            via = session.run(model.mm)
        close(raw, via)
        close(session.run(model.mm) * 2, via)


def test_hooks_that_feed_run_and_end() -> None:
    model = Trained()
    with model.graph.as_default():
        factor = v1.placeholder_with_default(1.0, [], "factor")
        scaled = tf.multiply(model.mm, factor, name="scaled")
    seen: dict[str, Any] = {"evaluated": []}

    class Mine(v1.train.SessionRunHook):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            seen["created"] = session.run(model.mm)

        def before_run(self, run_context: Any) -> Any:
            return v1.train.SessionRunArgs({"scaled": scaled}, {factor: 10.0})

        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen["run"] = run_values.results["scaled"]
            seen["evaluated"].append(run_context.session.run(scaled))

        def end(self, session: Any) -> None:
            seen["end"] = session.run(model.mm)

    with model.graph.as_default():
        final = v1.train.FinalOpsHook([model.mm, model.step])
        creator = v1.train.ChiefSessionCreator()
        calls, counted = counting("scaled")
        with (
            amanda.apply(doubled(), counted),
            v1.train.MonitoredSession(creator, [Mine(), final]) as session,
        ):
            fetched = session.run(model.mm)
    mm = np.full((2, 2), 4, np.float32)
    equal([fetched, seen["created"], seen["end"], final.final_ops_values[0]], [mm] * 4)
    equal([seen["run"], *seen["evaluated"]], [10 * mm, mm])
    assert len(calls) == 2


def test_a_routine_that_raises_in_a_monitored_session() -> None:
    model, fails = Trained(), [True]

    class Own(Exception):
        pass

    def failing(value: Any) -> None:
        if fails[0]:
            raise Own("mine")

    with (
        model.graph.as_default(),
        amanda.apply(before("mm", failing, 1), doubled()),
        v1.train.MonitoredTrainingSession() as session,
    ):
        for _ in range(2):
            with pytest.raises(Own, match="mine") as caught:
                session.run(model.train)
            assert "'mm'" in caught.value.__notes__[0]
        fails[0] = False
        session.run(model.train)
        close(session.run(model.w), reached(1))


@pytest.mark.filterwarnings("ignore:.* writes the model without the changes")
def test_a_monitored_session_that_recovers(tmp_path: pathlib.Path) -> None:
    model = Trained()

    class Aborts(v1.train.SessionRunHook):  # type: ignore[misc]
        runs = sessions = 0

        def after_create_session(self, session: Any, coord: Any) -> None:
            self.sessions += 1

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.runs += 1
            if self.runs == 4:
                raise tf.errors.AbortedError(None, None, "the worker has gone")

    hook = Aborts()
    with (
        model.graph.as_default(),
        amanda.apply(doubled()),
        v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), hooks=[hook], save_checkpoint_steps=2
        ) as session,
    ):
        for _ in range(4):
            session.run(model.train)
        # The new session continues from the last checkpoint.
        step, w = session.run([model.step, model.w])
        close(w, reached(int(step)))
        assert step > 2
    assert hook.sessions == 2


def test_a_supervisor() -> None:
    # A supervisor knows no resource variables, the global step's included.
    was = v1.resource_variables_enabled()
    v1.disable_resource_variables()
    try:
        model = Trained(resource=False)
    finally:
        if was:
            v1.enable_resource_variables()
    with model.graph.as_default():
        # With a folder of its own, today's TensorFlow fails: it takes the thread for an eager one.
        supervisor = v1.train.Supervisor(logdir=None, summary_op=None, global_step=model.step)
        with amanda.apply(doubled()), supervisor.managed_session() as session:
            for _ in range(3):
                session.run(model.train)
            close(session.run(model.w), reached(3))


def test_a_scaffold_and_a_session_creator() -> None:
    model = Trained()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold(init_fn=lambda scaffold, session: session.run(model.mm))
        creator = v1.train.ChiefSessionCreator(scaffold)
        with amanda.apply(doubled()), v1.train.MonitoredSession(creator) as session:
            session.run(model.train)
            close(session.run(model.w), reached(1))


def test_two_sessions_on_one_graph() -> None:
    model = Trained()
    with model.graph.as_default():
        init = v1.global_variables_initializer()
    with new_session(model.graph) as one, new_session(model.graph) as two:
        one.run(init)
        two.run(init)
        with amanda.apply(doubled()):
            one.run(model.train)
            one.run(model.train)
            two.run(model.train)
        close(one.run(model.w), reached(2))
        close(two.run(model.w), reached(1))
        assert one.run(model.step) == 2
        with new_session(model.graph) as three, amanda.apply(doubled()):
            three.run(init)
            three.run(model.train)
            close(three.run(model.w), reached(1))


def test_a_session_that_is_opened_after_the_clones_were_made() -> None:
    model = Trained()
    with model.graph.as_default():
        init = v1.global_variables_initializer()
    with new_session(model.graph) as session, amanda.apply(doubled()):
        session.run(init)
        session.run(model.train)
    with new_session(model.graph) as session:
        session.run(init)
        session.run(model.train)
        w = np.ones((2, 2)) - 0.001 * np.ones((2, 2)) @ (2 * np.ones((2, 2)) @ np.ones((2, 2)))
        close(session.run(model.w), w.astype(np.float32))


def test_a_closed_session_is_tensorflows_error() -> None:
    model = Trained()
    session = new_session(model.graph)
    with amanda.apply(doubled()):
        session.run(model.w.initializer)
        session.close()
        with pytest.raises(RuntimeError, match="closed"):
            session.run(model.mm)


@pytest.mark.parametrize("resource", [True, False])
def test_a_server_in_the_process(resource: bool) -> None:
    server = v1.train.Server.create_local_server()
    model = Trained(resource)
    with v1.Session(server.target, graph=model.graph) as session:
        with model.graph.as_default():
            session.run(v1.global_variables_initializer())
        plain = session.run(model.mm)
        seen, watching = counting("mm")
        with amanda.apply(doubled(), watching):
            close(session.run(model.mm), 2 * plain)
            session.run(model.train)
            close(session.run(model.w), reached(1))
        assert seen == ["mm", "mm"]
        session.run(model.mm)
    with v1.Session(server.target, graph=model.graph) as other:
        close(other.run(model.w), reached(1))


def test_steps_end_once_for_each_run() -> None:
    model = Trained()
    ended: list[int] = []
    begun: list[int] = []
    counter = amanda.Tool()
    counter.add_inst_for_step(begun.append, ended.append)
    nested: list[int] = []

    def user(value: Any) -> Any:
        nested.append(1)
        return value

    with model.graph.as_default():
        inner = tf.py_function(user, [model.loss], tf.float32)
    with new_session(model.graph) as session:
        session.run([model.w.initializer, model.step.initializer])
        with amanda.apply(counter, doubled()):
            for _ in range(3):
                session.run(model.train)
            assert len(ended) == 3
            session.run(inner)
            assert len(ended) == 4
            with amanda.disabled():
                session.run(model.train)
            assert len(ended) == 4
            run = session.make_callable(model.loss)
            run()
            assert len(ended) == 5
        session.run(model.train)
    assert len(ended) == 5
    assert nested == [1]
    assert ended == [0, 1, 2, 3, 4]
    assert begun == [0, 1, 2, 3, 4, 5]


# Threads.


def test_one_thread_with_tools_and_one_without_on_one_session() -> None:
    model = Trained()
    found: dict[str, list[Any]] = {"tools": [], "plain": []}
    with new_session(model.graph) as session:
        session.run(model.w.initializer)
        start = threading.Barrier(2)

        def plain() -> None:
            start.wait()
            for _ in range(30):
                found["plain"].append(session.run(model.mm))

        thread = threading.Thread(target=plain)
        thread.start()
        with amanda.apply(doubled()):
            start.wait()
            for _ in range(30):
                found["tools"].append(session.run(model.mm))
        thread.join()
    for value in found["plain"]:
        equal(value, np.full((2, 2), 2, np.float32))
    for value in found["tools"]:
        equal(value, np.full((2, 2), 4, np.float32))
    assert len(found["plain"]) == len(found["tools"]) == 30


@pytest.mark.parametrize("shared", [True, False])
def test_threads_with_tools_of_their_own(shared: bool) -> None:
    models = [Trained() for _ in range(4)]
    if shared:
        models = [models[0]] * 4
    errors: list[BaseException] = []
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        try:
            model = models[number]
            with new_session(model.graph) as session:
                session.run([model.w.initializer, model.step.initializer])
                tool = before("mm", lambda w: w * float(number), 1)
                with amanda.apply(tool):
                    found[number] = [session.run(model.mm) for _ in range(10)]
                found[number].append(session.run(model.mm))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number, values in found.items():
        equal(
            values,
            [np.full((2, 2), 2.0 * number, np.float32)] * 10 + [np.full((2, 2), 2, np.float32)],
        )
