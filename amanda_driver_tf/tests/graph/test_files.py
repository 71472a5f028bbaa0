"""Files that are written under tools have nothing of them, and load without them."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import before

from ..comparison import close, equal
from .reference_programs import double, new_session, serialised, v1

#: What is written under tools has none of their changes, and they say so.
pytestmark = pytest.mark.filterwarnings("ignore:.*without the changes of:amanda.AmandaWarning")

GIVEN = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)


class Model:
    """One trained layer."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [2, 2], "x")
            self.w = v1.get_variable("w", initializer=np.eye(2, dtype=np.float32))
            self.mm = tf.matmul(self.x, self.w, name="mm")
            self.loss = tf.reduce_sum(tf.square(self.mm), name="loss")
            self.train = v1.train.MomentumOptimizer(0.01, 0.9).minimize(self.loss)
            v1.add_to_collection("train", self.train)
            v1.summary.scalar("loss", self.loss)
            self.summaries = v1.summary.merge_all()
            self.init = v1.global_variables_initializer()


def tools() -> amanda.Tool:
    return before("mm", double, 1)


def steps(session: Any, model: Any, count: int = 2) -> None:
    for _ in range(count):
        session.run([model.loss, model.train], {model.x: GIVEN})


def no_trace(folder: pathlib.Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes().lower()
        assert b"amanda" not in content.replace(str(folder).lower().encode(), b""), path
        assert b"eagerpyfunc" not in content, path


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "out"
    made.mkdir()
    return made


@pytest.mark.parametrize("inside", [True, False])
def test_checkpoints(folder: pathlib.Path, inside: bool) -> None:
    model = Model()
    with model.graph.as_default():
        saver = None if inside else v1.train.Saver()
        with new_session(model.graph) as session:
            session.run(model.init)
            with amanda.apply(tools()):
                steps(session, model)
                saver = saver or v1.train.Saver()
                path = saver.save(session, str(folder / "model"), global_step=2)
                kept = session.run(model.w)
                steps(session, model)
                saver.restore(session, path)
                equal(session.run(model.w), kept)
    no_trace(folder)
    assert {name for name, _ in tf.train.list_variables(path)} == {"w", "w/Momentum"}
    fresh = Model()
    with fresh.graph.as_default(), new_session(fresh.graph) as session:
        v1.train.Saver().restore(session, path)
        equal(session.run(fresh.w), kept)


def test_files_equal_those_written_without_tools(folder: pathlib.Path) -> None:
    written = []
    for name, applied in (("plain", False), ("tools", True)):
        model = Model()
        with model.graph.as_default(), new_session(model.graph) as session:
            session.run(model.init)
            if applied:
                with amanda.apply(tools()):
                    session.run(model.loss, {model.x: GIVEN})
                    v1.train.export_meta_graph(str(folder / f"{name}.meta"))
                    tf.io.write_graph(model.graph, str(folder), f"{name}.pbtxt")
                    tf.io.write_graph(model.graph.as_graph_def(), str(folder), f"{name}.pb", False)
            else:
                v1.train.export_meta_graph(str(folder / f"{name}.meta"))
                tf.io.write_graph(model.graph, str(folder), f"{name}.pbtxt")
                tf.io.write_graph(model.graph.as_graph_def(), str(folder), f"{name}.pb", False)
        written.append(
            [(folder / f"{name}{suffix}").read_bytes() for suffix in (".meta", ".pbtxt", ".pb")]
        )
    assert written[0][1:] == written[1][1:]
    metas = [v1.MetaGraphDef.FromString(content[0]) for content in written]
    assert metas[0] == metas[1]


def test_event_files(folder: pathlib.Path) -> None:
    model = Model()
    with model.graph.as_default(), new_session(model.graph) as session:
        session.run(model.init)
        with amanda.apply(tools()):
            steps(session, model)
            writer = v1.summary.FileWriter(str(folder), session.graph)
            writer.add_summary(session.run(model.summaries, {model.x: GIVEN}), 1)
            metadata = v1.RunMetadata()
            writer.add_meta_graph(v1.train.export_meta_graph())
            writer.close()
    no_trace(folder)
    del metadata
    shown = serialised(model.graph)
    (path,) = folder.iterdir()
    found = [event.graph_def for event in v1.train.summary_iterator(str(path))]
    graphs = [v1.GraphDef.FromString(each) for each in found if each]
    assert graphs[0] == v1.GraphDef.FromString(shown)


def test_a_meta_graph_is_imported_and_trained_under_tools(folder: pathlib.Path) -> None:
    model = Model()
    with model.graph.as_default(), new_session(model.graph) as session:
        session.run(model.init)
        with amanda.apply(tools()):
            steps(session, model)
            v1.train.Saver().save(session, str(folder / "model"))
            steps(session, model)
            wanted = session.run(model.w)
    no_trace(folder)
    graph = tf.Graph()
    with graph.as_default(), new_session(graph) as session:
        saver = v1.train.import_meta_graph(str(folder / "model.meta"))
        saver.restore(session, str(folder / "model"))
        (train,) = v1.get_collection("train")
        with amanda.apply(tools()):
            for _ in range(2):
                session.run(["loss:0", train], {"x:0": GIVEN})
        close(session.run("w/Read/ReadVariableOp:0"), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("simple", [True, False])
def test_saved_models(folder: pathlib.Path, simple: bool) -> None:
    model, target = Model(), str(folder / "saved")
    with model.graph.as_default(), new_session(model.graph) as session:
        session.run(model.init)
        with amanda.apply(tools()):
            steps(session, model)
            if simple:
                v1.saved_model.simple_save(session, target, {"x": model.x}, {"y": model.mm})
            else:
                builder = v1.saved_model.Builder(target)
                signature = v1.saved_model.predict_signature_def({"x": model.x}, {"y": model.mm})
                builder.add_meta_graph_and_variables(
                    session, ["serve"], signature_def_map={"serving_default": signature}
                )
                builder.save()
        plain = session.run(model.mm, {model.x: GIVEN})
    no_trace(folder)
    script = (
        "import sys, tensorflow as tf, numpy as np\n"
        "assert 'amanda' not in sys.modules\n"
        "v1 = tf.compat.v1\n"
        "with v1.Session(graph=tf.Graph()) as s:\n"
        "    v1.saved_model.load(s, ['serve'], sys.argv[1])\n"
        "    print(s.run('mm:0', {'x:0': [[0.1, 0.2], [0.3, 0.4]]}).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    close(np.array(eval(done.stdout), np.float32), plain)
    with new_session(tf.Graph()) as session:
        v1.saved_model.load(session, ["serve"], target)
        with amanda.apply(tools()):
            close(session.run("mm:0", {"x:0": GIVEN}), 2 * plain)
    loaded = tf.saved_model.load(target).signatures["serving_default"]
    with amanda.apply(tools()):
        close(loaded(x=tf.constant(GIVEN))["y"].numpy(), 2 * plain)
