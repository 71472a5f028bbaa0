"""Graphs whose gradients were built before the recorder was installed, or read from a file."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, editing, tool

from ..comparison import close, equal
from .reference_programs import Ops, arrays, build, double, new_session, run, staged, v1

VALUES = arrays((3, 3), (3, 3))


def program(ops: Ops, x: Any, w: Any) -> Any:
    h = ops("Tanh", "act", ops("MatMul", "mm", x, w))
    return ops("Sum", "loss", ops("Square", "square", ops("AddV2", "sum", h, x)))


class Imported:
    """The program, imported from a GraphDef or MetaGraphDef."""

    def __init__(self, prefix: str = "", meta: bool = False) -> None:
        built = build(program, VALUES)
        names = [fetch.name for fetch in built.fetches]
        feeds = {given.name: value for given, value in built.feeds.items()}
        with built.graph.as_default():
            content = v1.train.export_meta_graph() if meta else built.graph.as_graph_def()
        self.graph = tf.Graph()
        with self.graph.as_default():
            if meta:
                v1.train.import_meta_graph(content)
            else:
                v1.import_graph_def(content, name=prefix)
        before = f"{prefix}/" if prefix else ""
        self.fetches = [f"{before}{name}" for name in names]
        self.feeds = {f"{before}{name}": value for name, value in feeds.items()}


@pytest.fixture(params=["graph", "below", "meta"])
def imported(request: pytest.FixtureRequest) -> Imported:
    return Imported("below" if request.param == "below" else "", request.param == "meta")


def test_backward_ops_have_their_forward_op(imported: Imported) -> None:
    pairs: dict[str, str] = {}

    def analyse(context: OpContext) -> None:
        forward = context.forward
        pairs[context.name] = forward.name if forward is not None else ""

    with new_session(imported.graph) as session, amanda.apply(tool(analyse, backward=True)):
        session.run(imported.fetches, imported.feeds)
    below = "below/" if "below/loss:0" in imported.fetches else ""
    assert pairs[f"{below}gradients/mm_grad/MatMul"] == f"{below}mm"
    assert pairs[f"{below}gradients/mm_grad/MatMul_1"] == f"{below}mm"
    assert pairs[f"{below}gradients/act_grad/TanhGrad"] == f"{below}act"
    assert f"{below}mm" not in pairs


@pytest.mark.parametrize(
    "edit",
    [
        Edit("mm", "before", double, 1),
        Edit("mm", "before", double, 0),
        Edit("mm", "after", double, 0),
        Edit("act", "before", double, 0),
        Edit("act", "after", double, 0),
        Edit("square", "before", double, 0),
        Edit("sum", "before", double, 0),
    ],
    ids=lambda e: f"{e.name}-{e.kind}-{e.position}",
)
def test_edits_are_right_or_refused(imported: Imported, edit: Edit) -> None:
    wanted = run(build(program, VALUES, [edit]))
    with new_session(imported.graph) as session, amanda.apply(editing(edit)):
        close(session.run(imported.fetches, imported.feeds), wanted)
        close(session.run(imported.fetches[1:], imported.feeds), wanted[1:])


@pytest.mark.parametrize(
    "edit",
    [
        Edit("mm", "grad_out", double, 0),
        Edit("mm", "grad_in", double, 1),
        Edit("act", "backward", double),
        Edit("act", "replace", tf.nn.softplus),
        Edit("act", "before", double, 0, True),
    ],
    ids=lambda e: f"{e.name}-{e.kind}-{e.autodiff}",
)
def test_what_needs_the_gradient_is_refused_with_the_reason(imported: Imported, edit: Edit) -> None:
    with new_session(imported.graph) as session:
        plain = session.run(imported.fetches, imported.feeds)
        with (
            amanda.apply(editing(edit)),
            pytest.raises(UnsupportedError, match="Import amanda before") as caught,
        ):
            session.run(imported.fetches, imported.feeds)
        assert edit.name in str(caught.value)
        equal(session.run(imported.fetches, imported.feeds), plain)


@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("kind", ["before", "after"])
def test_no_edit_of_another_shape_goes_straight_through(kind: str, staging: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3], "x")
        (gradient,) = v1.gradients(tf.negative(tf.negative(x, name="act")), [x])
    imported = tf.Graph()
    with imported.as_default():
        tf.import_graph_def(graph.as_graph_def(), name="")
    routine = staged(lambda value: value[:1]) if staging else lambda value: value[:1]
    with (
        new_session(imported) as session,
        amanda.apply(editing(Edit("act", kind, routine, 0))),
        pytest.raises(UnsupportedError, match=r"op 'act'.*autodiff_enabled\(\)"),
    ):
        session.run(gradient.name, {"x:0": VALUES[0]})


def test_a_run_without_gradients_needs_none_of_them(imported: Imported) -> None:
    edit = Edit("act", "replace", tf.nn.softplus)
    wanted = run(build(program, VALUES, [edit]))
    with new_session(imported.graph) as session, amanda.apply(editing(edit)):
        close(session.run(imported.fetches[0], imported.feeds), wanted[0])


def test_raw_edits_need_no_more(imported: Imported) -> None:
    def analyse(context: OpContext) -> None:
        if context.name.endswith("mm_grad/MatMul_1"):
            context.insert_after_backward_op(lambda g: g * 3.0)

    with new_session(imported.graph) as session:
        plain = session.run(imported.fetches, imported.feeds)
        with amanda.apply(tool(analyse, backward=True)):
            found = session.run(imported.fetches, imported.feeds)
    close(found, [*plain[:2], 3 * plain[2]])


def test_gradients_built_on_an_imported_graph_are_known() -> None:
    imported = Imported()
    wanted = run(build(program, VALUES, [Edit("mm", "grad_in", double, 1)]))
    with imported.graph.as_default():
        get = imported.graph.get_tensor_by_name
        again = tf.gradients(get("loss:0"), [get("in0:0"), get("in1:0")])
    with (
        new_session(imported.graph) as session,
        amanda.apply(editing(Edit("mm", "grad_in", double, 1))),
    ):
        try:
            found = session.run(again, imported.feeds)
        except UnsupportedError:
            pytest.fail("only the new gradients are run, and these are known")
    close(found, wanted[1:])


SCRIPT = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
import tensorflow as tf
v1 = tf.compat.v1

def build(factor, resource):
    graph = tf.Graph()
    with graph.as_default():
        x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
        start = np.eye(2, dtype=np.float32) + 0.5
        w = v1.get_variable("w", initializer=start, use_resource=resource)
        read = tf.convert_to_tensor(w)
        edited = read + tf.stop_gradient(read * (factor - 1.0)) if factor != 1.0 else w
        h = tf.tanh(tf.matmul(x, edited, name="mm"), name="act")
        loss = tf.reduce_sum(tf.square(tf.matmul(h, w, name="mm2")))
        optimizer = v1.train.MomentumOptimizer(0.001, 0.9)
        train = optimizer.minimize(loss, gate_gradients=optimizer.GATE_GRAPH)
        init = v1.global_variables_initializer()
    return graph, w, loss, train, init

def trained(graph, w, loss, train, init):
    with v1.Session(graph=graph) as session:
        session.run(init)
        return [session.run([loss, train])[0] for _ in range(4)] + [session.run(w)]

before_import = [
    (resource, build(1.0, resource), trained(*build(2.0, resource))) for resource in (True, False)
]
import amanda

for resource, earlier, wanted in before_import:
    tool = amanda.Tool()
    pairs = {}

    def analyse(context):
        if context.name == "mm":
            context.insert_before_op(lambda w: w * 2.0, inputs=[1])

    def analyse_backward(context):
        pairs[context.name] = context.forward.name if context.forward else None

    tool.add_inst_for_op(analyse)
    tool.add_inst_for_op(analyse_backward, backward=True)
    with amanda.apply(tool):
        found = trained(*earlier)
    for one, other in zip(found, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert pairs["gradients/mm_grad/MatMul_1"] == "mm", pairs
    assert pairs["gradients/mm2_grad/MatMul"] == "mm2", pairs
    later = build(1.0, resource)
    with amanda.apply(tool):
        trained(*later)
"""


@pytest.mark.slow
def test_a_graph_built_before_amanda_was_imported(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["amanda", "tensorflow"])
def test_the_order_of_imports_makes_no_difference(tmp_path: pathlib.Path, first: str) -> None:
    second = "tensorflow" if first == "amanda" else "amanda"
    path = tmp_path / "script.py"
    path.write_text(
        f"import {first}\nimport {second}\n"
        "import amanda, tensorflow as tf\n"
        "v1 = tf.compat.v1\n"
        "graph = tf.Graph()\n"
        "with graph.as_default():\n"
        "    x = tf.constant([1.0, 2.0])\n"
        "    y = tf.exp(x, name='exp')\n"
        "    (g,) = tf.gradients(y, x)\n"
        "tool = amanda.Tool()\n"
        "def analyse(c):\n"
        "    if c.name == 'exp': c.insert_after_backward_op(lambda v: v * 0.0, grad_inputs=[0])\n"
        "tool.add_inst_for_op(analyse)\n"
        "with v1.Session(graph=graph) as s, amanda.apply(tool):\n"
        "    assert s.run(g).tolist() == [0.0, 0.0]\n"
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_names_that_only_look_like_gradients() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.constant(np.ones(2, np.float32))
        with v1.name_scope("gradients"), v1.name_scope("x_grad"):
            y = tf.negative(x, name="neg")
    contexts: list[OpContext] = []
    with (
        new_session(graph) as session,
        amanda.apply(tool(contexts.append), tool(contexts.append, backward=True)),
    ):
        session.run(y)
    assert [context.name for context in contexts] == ["gradients/x_grad/neg"]
