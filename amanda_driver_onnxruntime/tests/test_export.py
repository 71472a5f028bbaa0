"""`amanda export` and `amanda.exported`: models of ONNX with the edits of tools.

Long, since it is a list of cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import amanda
from amanda_core.cli import app
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import before
from amanda_driver_onnxruntime.execution.parts import Parts
from amanda_driver_onnxruntime.model_files import _difference
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

from .models import X, control_flow, conv_net, drawn
from .onnxruntime_backends import model_of, options, value, weight


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), options(0))


def run(model: onnx.ModelProto, **given: Any) -> list[Any]:
    found: list[Any] = session_of(model).run(None, given or {"x": X})
    return found


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Compare bit for bit."""
    pairs = [(numpy.asarray(a), numpy.asarray(b)) for a, b in zip(one, other, strict=True)]
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def weights_of(model: onnx.ModelProto) -> dict[str, Any]:
    return {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}


def with_ranks(model: onnx.ModelProto, **shapes: Sequence[int | None]) -> onnx.ModelProto:
    """Return a model whose inputs and outputs have the ranks that onnx.checker needs."""
    for one in (*model.graph.input, *model.graph.output):
        for length in shapes[one.name]:
            dimension = one.type.tensor_type.shape.dim.add()
            if length is not None:
                dimension.dim_value = length
    return model


SHAPES = {"x": (None, 3, 8, 8), "y": (None, None)}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Return the file of a network of convolutions, beside inputs for it."""
    onnx.save_model(with_ranks(conv_net(normalized=False), **SHAPES), tmp_path / "net.onnx")
    numpy.savez(tmp_path / "x.npz", x=X)
    return tmp_path / "net.onnx"


def call(net: Path, *arguments: str, output: str = "new.onnx") -> tuple[int, Path]:
    new = net.parent / output
    outcome = app.parse(["export", str(net), *arguments, "-o", str(new)])
    assert isinstance(outcome, int)
    return outcome, new


def test_pruned_weights_are_weights(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, new = call(net, "-t", "prune:sparsity=0.5")
    assert status == 0
    said = capsys.readouterr().out
    assert "with prune; checked, and equal bit for bit to the model under tools" in said
    model, old = onnx.load_model(new), onnx.load_model(net)
    assert [node.op_type for node in model.graph.node] == [n.op_type for n in old.graph.node]
    by_hand = weights_of(old)
    for name in ("stem.weight", "deep.weight", "fc.weight"):
        mask = numpy.ones_like(by_hand[name])
        order = numpy.argsort(abs(by_hand[name]), axis=None, kind="stable")
        mask.reshape(-1)[order[: mask.size // 2]] = 0
        by_hand[name] = by_hand[name] * mask
    assert all(same([found], [by_hand[n]]) for n, found in weights_of(model).items())
    for one in old.graph.initializer:
        one.CopyFrom(numpy_helper.from_array(by_hand[one.name], one.name))
    assert same(run(model), run(old))


def test_quantized_numbers_are_those_of_onnx(net: Path) -> None:
    status, new = call(net, "-t", "quantize", "--inputs", str(net.parent / "x.npz"))
    assert status == 0
    model, old = onnx.load_model(new), weights_of(onnx.load_model(net))
    types = [node.op_type for node in model.graph.node]
    assert types.count("QuantizeLinear") == 3
    assert types.count("DequantizeLinear") == 6
    assert not {"Mul", "Div", "Round"} & {*types}
    # Of each weight there are integers with a scale for each channel.
    weights = weights_of(model)
    rows = next(node for node in model.graph.node if node.op_type == "Gemm").input[1]
    one = next(node for node in model.graph.node if rows in node.output)
    integers, scale = weights[one.input[0]], weights[one.input[1]]
    expected = abs(old["fc.weight"]).max(1) / 127
    numpy.testing.assert_allclose(scale, expected, rtol=1e-6)
    assert integers.dtype == numpy.int8
    numpy.testing.assert_array_equal(integers, numpy.round(old["fc.weight"] / scale[:, None]))


def test_weights_of_four_bits(net: Path) -> None:
    model = onnx.load_model(net)
    model.opset_import[0].version, model.ir_version = 21, 10
    onnx.save_model(model, net)
    status, new = call(net, "-t", "quantize:weights=int4,activations=none,calibration=0")
    assert status == 0
    kinds = [one.data_type for one in onnx.load_model(new).graph.initializer]
    assert kinds.count(TensorProto.INT4) == 6  # Numbers and zero points of three weights.


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_and_groups_of_weights(net: Path, opset: int, group: int, bits: int) -> None:
    model = onnx.load_model(net)
    old = weights_of(model)["fc.weight"]
    model.opset_import[0].version, model.ir_version = opset, 10
    onnx.save_model(model, net)
    options = f"weights=int{bits},activations=none,symmetric=false,group={group}"
    status, new = call(net, "-t", f"quantize:{options}")  # It compares both, bit for bit.
    assert status == 0
    model = onnx.load_model(new)
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    if group and opset < 21:  # There are no blocks, so the weights are real numbers.
        assert not nodes
        return
    values = {one.name: one for one in model.graph.initializer}
    integers, scale, zero = (numpy_helper.to_array(values[n]) for n in nodes[-1].input)
    attributes = {one.name: one.i for one in nodes[-1].attribute}
    assert attributes.get("block_size", 0) == group
    rows = old.reshape(-1, group or 4)
    low, high = rows.min(1).clip(max=0), rows.max(1).clip(min=0)
    numpy.testing.assert_allclose(scale.ravel(), (high - low) / (2**bits - 1), rtol=1e-6)
    expected = numpy.round(-low / scale.ravel())
    numpy.testing.assert_array_equal(zero.astype(int).ravel(), expected)
    numbers = numpy.round(rows / scale.reshape(-1, 1)) + expected[:, None]
    found = integers.astype(int).reshape(rows.shape)
    numpy.testing.assert_array_equal(found, numbers.clip(0, 2**bits - 1))


def test_the_api_takes_a_session() -> None:
    model, tool = conv_net(), Quantize(calibration=1)
    session = session_of(model)
    with amanda.apply(tool):
        session.run(None, {"x": X})
        simulated = session.run(None, {"x": X})
    new = amanda.exported(session, tool, {"x": X})
    assert same(run(new), simulated)
    assert not same(run(model), simulated)
    assert same(session.run(None, {"x": X}), run(model))


@amanda.staged
def swish(x: Any) -> Any:
    return x / (1 + numpy.exp(-x))


@amanda.staged
def replaced(x: Any) -> Any:
    return numpy.clip(x, 0, 1.5)


def staged() -> Any:
    tool = amanda.Tool()

    def analyse(context: Any) -> None:
        if context["type"] == "relu":
            context.replace_op(replaced, inputs=[0])
        if context["type"] == "conv2d":
            context.insert_after_op(swish, outputs=[0])
            context.insert_before_op(amanda.staged(lambda x: x * 2 + 1), inputs=[0])

    tool.add_inst_for_op(analyse)
    return tool


def test_staged_routines_are_nodes() -> None:
    session, tool = session_of(conv_net(normalized=False)), staged()
    with amanda.apply(tool):
        first = session.run(None, {"x": X})
        second = session.run(None, {"x": X})
    assert same(first, second)
    new = amanda.exported(session, tool, {"x": X})
    types = [node.op_type for node in new.graph.node]
    assert "Relu" not in types
    assert types.count("Exp") == 2
    assert same(run(new), second)

    def by_hand(x: Any) -> Any:
        return x / (1 + numpy.exp(-x))

    # The same on the host, by routines that are not nodes.
    host = amanda.Tool()

    def analyse(context: Any) -> None:
        if context["type"] == "relu":
            context.replace_op(lambda x: numpy.clip(x, 0, numpy.float32(1.5)), inputs=[0])
        if context["type"] == "conv2d":
            context.insert_after_op(by_hand, outputs=[0])
            context.insert_before_op(lambda x: x * 2 + 1, inputs=[0])

    host.add_inst_for_op(analyse)
    with amanda.apply(host):
        numpy.testing.assert_allclose(session.run(None, {"x": X})[0], second[0], rtol=1e-5)


def test_a_model_whose_edits_are_all_nodes_runs_as_one_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, made = session_of(conv_net()), list[Any]()
    original = Parts.run_node
    monkeypatch.setattr(Parts, "run_node", lambda *args: made.append(1) or original(*args))  # type: ignore[func-returns-value]
    with amanda.apply(Prune(0.5), staged()):
        session.run(None, {"x": X})
        assert made
        made.clear()
        for _ in range(3):
            session.run(None, {"x": X})
    assert made == []


def test_a_routine_that_reads_shapes_gets_those_of_each_run() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "one", [value("x")], [value("y")]
    )
    tool = amanda.Tool()
    add = amanda.staged(lambda x: x * float(x.shape[0]))
    tool.add_inst_for_op(lambda context: context.insert_after_op(add, outputs=[0]))
    session = session_of(model_of(graph))
    with amanda.apply(tool):
        for rows in (2, 2, 3, 3, 2):
            (found,) = session.run(None, {"x": numpy.ones((rows, 1), numpy.float32)})
            assert (found == rows).all()


def test_a_routine_on_the_host_is_refused_by_name(
    net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (net.parent / "tools.py").write_text(
        "import amanda\n\n\ndef on_the_host(x):\n    return x.copy()\n\n\n"
        "class Editing(amanda.Tool):\n    def __init__(self):\n        super().__init__()\n"
        "        self.add_inst_for_op(lambda op: op.insert_after_op(on_the_host, outputs=[0]))\n"
    )
    status, new = call(net, "-t", f"{net.parent}/tools.py:Editing")
    said = capsys.readouterr().err
    assert status == 2
    assert "on_the_host" in said
    assert "'stem/Conv'" in said
    assert not new.exists()


def test_a_routine_on_the_host_may_edit_weights() -> None:
    model = conv_net(normalized=False)
    session, tool = session_of(model), before("Gemm", lambda w: numpy.sqrt(abs(w)), inputs=[1])
    new = weights_of(amanda.exported(session, tool, {"x": X}))
    assert same([new["fc.weight"]], [numpy.sqrt(abs(weights_of(model)["fc.weight"]))])


def test_a_weight_with_two_readers_of_which_one_is_edited() -> None:
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "/first/MatMul"),
        node("MatMul", ["a", "w"], ["y"], "/second/MatMul"),
    ]
    graph = helper.make_graph(nodes, "tied", [value("x")], [value("y")], [weight("w", drawn(4, 4))])
    session = session_of(model_of(graph))
    tool = amanda.Tool()
    zeros = amanda.staged(lambda w: w * numpy.float32(0.5))

    def analyse(context: Any) -> None:
        if context.name.startswith("second"):
            context.insert_before_op(zeros, inputs=[1])

    tool.add_inst_for_op(analyse)
    x = drawn(2, 4, seed=3)
    new = amanda.exported(session, tool, {"x": x})
    weights = weights_of(new)
    assert same([weights["w"]], [drawn(4, 4)])
    assert len(weights) == 2
    numpy.testing.assert_allclose(
        run(new, x=x)[0], (x @ drawn(4, 4)) @ (drawn(4, 4) * 0.5), rtol=1e-5
    )


def test_weights_inside_branches_are_edited() -> None:
    node, shape = helper.make_node, [None, 4]
    w, v, k = drawn(4, 4), drawn(4, 4, seed=1), drawn(4, 4, seed=2)
    # Only one branch edits `w`, which the graph around reads, too.
    then = helper.make_graph(
        [node("MatMul", ["h", "w"], ["t"], "/then")], "then", [], [value("t", shape=shape)]
    )
    other = helper.make_graph(
        [
            node("Constant", [], ["k"], value=numpy_helper.from_array(k)),
            node("MatMul", ["h", "v"], ["m"], "/other"),
            node("MatMul", ["m", "k"], ["o"], "/constant"),
        ],
        "other",
        [],
        [value("o", shape=shape)],
        [weight("v", v)],
    )
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "/around"),
        node("If", ["c"], ["y"], "branch", then_branch=then, else_branch=other),
    ]
    given = [value("x"), helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    model = model_of(helper.make_graph(nodes, "if", given, [value("y")], [weight("w", w)]))
    tool = amanda.Tool()

    def analyse(context: Any) -> None:
        if context.get_op().node in ("/then", "/other", "/constant"):
            context.insert_before_op(lambda values: values * 0.5, inputs=[1])

    tool.add_inst_for_op(analyse)
    x = drawn(2, 4, seed=3)
    runs = [{"x": x, "c": numpy.array(one)} for one in (True, False)]
    new = amanda.exported(session_of(model), tool, *runs)
    halves = [(x @ w) @ (w * 0.5), (x @ w) @ (v * 0.5) @ (k * 0.5)]
    for one, wanted in zip(runs, halves, strict=True):
        numpy.testing.assert_allclose(run(new, **one)[0], wanted, rtol=1e-5, atol=1e-6)
    (branch,) = [one for one in new.graph.node if one.op_type == "If"]
    for body in (one.g for one in branch.attribute):
        assert not body.initializer
        assert {one.op_type for one in body.node} == {"MatMul"}


def test_branches_have_values_of_the_same_names() -> None:
    def branch(number: int) -> onnx.GraphProto:
        node = helper.make_node("MatMul", ["x", "w"], ["t"], f"/{number}")
        w = weight("w", drawn(4, 4, seed=number))
        return helper.make_graph([node], f"b{number}", [], [value("t", shape=[None, 4])], [w])

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch(2), else_branch=branch(3))
    given = [value("x"), helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    session = session_of(model_of(helper.make_graph([node], "if", given, [value("y")])))
    tool = amanda.Tool()

    def analyse(context: Any) -> None:
        name = context.get_op().node
        if name in ("/2", "/3"):
            factor = numpy.float32(name[1:])
            context.insert_before_op(amanda.staged(lambda x: x * factor), inputs=[0])
            context.insert_before_op(amanda.staged(lambda w: w + factor), inputs=[1])

    tool.add_inst_for_op(analyse)
    x = drawn(2, 4, seed=1)
    runs = {n: {"x": x, "c": numpy.array(n == 2)} for n in (2, 3)}
    new = amanda.exported(session, tool, *runs.values())
    wanted = {n: (x * n) @ (drawn(4, 4, seed=n) + n) for n in runs}
    for n, one in runs.items():
        numpy.testing.assert_allclose(run(new, **one)[0], wanted[n], rtol=1e-5, atol=1e-5)
    with amanda.apply(tool):
        for n in (2, 3, 2, 3):
            found = session.run(None, runs[n])[0]
            numpy.testing.assert_allclose(found, wanted[n], rtol=1e-5, atol=1e-5)


def test_an_exported_model_is_exported_again() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "/first"),
        helper.make_node("MatMul", ["a", "w"], ["y"], "/second"),
    ]
    graph = helper.make_graph(nodes, "tied", [value("x")], [value("y")], [weight("w", drawn(4, 4))])
    x, model = drawn(2, 4, seed=3), model_of(graph)
    tool = amanda.Tool()
    third, half = (amanda.staged(lambda v, n=n: v * numpy.float32(n)) for n in (3, 0.5))

    def analyse(context: Any) -> None:
        if context.get_op().node in ("/first", "/second"):
            context.insert_before_op(third, inputs=[0])
            context.insert_after_op(half, outputs=[0])
        if context.get_op().node == "/first":
            context.insert_before_op(half, inputs=[1])

    tool.add_inst_for_op(analyse)
    for times in (1, 2, 3):
        model = amanda.exported(session_of(model), tool, {"x": x})
        wanted = x @ drawn(4, 4) @ drawn(4, 4) * 1.5 ** (2 * times) * 0.5**times
        numpy.testing.assert_allclose(run(model, x=x)[0], wanted, rtol=1e-5, atol=1e-6)
    names = [one.name for one in model.graph.initializer]
    assert len({*names}) == len(names)


def branches() -> onnx.ModelProto:
    node = helper.make_node
    then = helper.make_graph(
        [node("MatMul", ["x", "w"], ["t"], "/then")], "then", [], [value("t", shape=[None, None])]
    )
    other = helper.make_graph(
        [node("MatMul", ["x", "v"], ["o"], "/other")], "o", [], [value("o", shape=[None, None])]
    )
    nodes = [
        node("ReduceMax", ["x"], ["top"], "top", keepdims=0),
        node("Greater", ["top", "zero"], ["positive"], "positive"),
        node("If", ["positive"], ["y"], "branch", then_branch=then, else_branch=other),
    ]
    weights = [
        weight("w", drawn(4, 4)),
        weight("v", drawn(4, 4, seed=1)),
        weight("zero", 0),
    ]
    return model_of(helper.make_graph(nodes, "if", [value("x")], [value("y")], weights))


def test_operators_in_branches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = with_ranks(branches(), x=(None, 4), y=(None, 4))
    onnx.save_model(model, tmp_path / "if.onnx")
    up, down = abs(drawn(2, 4)), -abs(drawn(2, 4))
    for name, array in (("up", up), ("down", down)):
        numpy.save(tmp_path / f"{name}.npy", array)
    files = [str(tmp_path / f"{name}.npy") for name in ("up", "down")]
    status, new = call(tmp_path / "if.onnx", "-t", "prune:sparsity=0.5", "--inputs", files[0])
    assert status == 2
    assert "has not run on the example inputs" in capsys.readouterr().err
    assert not new.exists()
    given = ["--inputs", files[0], "--inputs", files[1]]
    status, new = call(tmp_path / "if.onnx", "-t", "prune:sparsity=0.5", *given)
    assert status == 0
    found = onnx.load_model(new)
    zeros = {name: int((w == 0).sum()) for name, w in weights_of(found).items()}
    assert zeros == {"w": 8, "v": 8, "zero": 1}
    with amanda.apply(Prune(0.5)):
        session = session_of(model)
        for x in (up, down):
            assert same(run(found, x=x), session.run(None, {"x": x}))


def test_a_routine_in_a_loop() -> None:
    session = session_of(control_flow())
    tool = amanda.Tool()
    double = amanda.staged(lambda value: value * 2)

    def analyse(context: Any) -> None:
        if context.op_type == "Exp":
            context.insert_after_op(double, outputs=[0])

    tool.add_inst_for_op(analyse)
    plain = session.run(["exps"], {"x": X})[0]
    with amanda.apply(tool):
        found = session.run(["exps"], {"x": X})[0]
    numpy.testing.assert_array_equal(found, plain * 2)
    with pytest.raises(UnsupportedError, match=r"has not run .*Neg#2"):
        amanda.exported(session, tool, {"x": X})  # It is in the other branch.


def test_weights_in_other_files(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "/product")],
        "large",
        [value("x", shape=[None, 32])],
        [value("y", shape=[None, 64])],
        [weight("w", drawn(32, 64))],
    )
    path = tmp_path / "net.onnx"
    onnx.save_model(model_of(graph), path, save_as_external_data=True, location="weights.bin")
    status, new = call(path, "-t", "prune:sparsity=0.5")
    assert status == 0
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["net.onnx", "new.onnx", "new.onnx.data", "weights.bin"]
    assert int((weights_of(onnx.load_model(new))["w"] == 0).sum()) == 32 * 64 / 2
    assert (weights_of(onnx.load_model(path))["w"] == drawn(32, 64)).all()


def test_files_of_weights_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], ["c"], value=weight("c", drawn(1, 32))),
            helper.make_node("MatMul", ["x", "w"], ["h"], "/product"),
            helper.make_node("Add", ["h", "c"], ["y"], "/sum"),
        ],
        "large",
        [value("x", shape=[None, 32])],
        [value("y", shape=[None, 32])],
        [weight("w", drawn(32, 32))],
    )
    (tmp_path / "there").mkdir()
    (tmp_path / "new").mkdir()
    path = tmp_path / "there" / "net.onnx"
    onnx.save_model(
        model_of(graph),
        path,
        save_as_external_data=True,
        location="first.onnx.data",
        size_threshold=0,
        convert_attribute=True,
    )
    weights = (path.parent / "first.onnx.data").read_bytes()
    tool = ("-t", "prune:sparsity=0.5")
    for output in ("first.onnx", "first.onnx.data"):
        status, _ = call(path, *tool, "--force", output=output)
        assert status == 2
        assert "has the weights of the model" in capsys.readouterr().err
    (path.parent / "second.onnx.data").write_text("mine")
    status, _ = call(path, *tool, output="second.onnx")
    assert status == 2
    assert "second.onnx.data', the file for the weights, is there" in capsys.readouterr().err
    assert (path.parent / "second.onnx.data").read_text() == "mine"
    assert (path.parent / "first.onnx.data").read_bytes() == weights
    assert not (path.parent / "second.onnx").exists()

    monkeypatch.chdir(tmp_path / "new")  # Its constant is in a file of another folder, too.
    for force in ((), ("--force",)):
        status, new = call(path, *tool, *force, output="../new/net.onnx")
        assert status == 0
    x = drawn(2, 32)
    program = amanda.exported(onnxruntime.InferenceSession(path, options(0)), Prune(0.5), {"x": x})
    assert same(
        onnxruntime.InferenceSession(new, options(0)).run(None, {"x": x}), run(program, x=x)
    )


def test_rounding_of_sixteen_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = TensorProto.FLOAT16
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "/first"),
        helper.make_node("MatMul", ["a", "w"], ["y"], "/second"),
    ]
    values = [helper.make_tensor_value_info(name, half, [None, 32]) for name in "xy"]
    weights = [numpy_helper.from_array(drawn(32, 32).astype(numpy.float16), "w")]
    graph = helper.make_graph(nodes, "halves", values[:1], values[1:], weights)
    onnx.save_model(model_of(graph), tmp_path / "net.onnx")
    status, new = call(tmp_path / "net.onnx", "-t", "prune:sparsity=0.5")
    assert status == 0
    assert "of the largest value, since ONNX Runtime rounds otherwise" in capsys.readouterr().out
    assert int((weights_of(onnx.load_model(new))["w"] == 0).sum()) == 32 * 32 / 2


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (numpy.array([1, 4], numpy.float32), numpy.array([1, 4], numpy.float32), 0.0),
        (numpy.array([1, 3], numpy.float32), numpy.array([1, 4], numpy.float32), 0.25),
        (
            numpy.array([numpy.nan, 3], numpy.float32),
            numpy.array([numpy.nan, 4], numpy.float32),
            0.25,
        ),
        (numpy.array([numpy.nan], numpy.float32), numpy.array([4], numpy.float32), float("inf")),
        (
            numpy.array([numpy.inf], numpy.float32),
            numpy.array([-numpy.inf], numpy.float32),
            float("inf"),
        ),
        (numpy.array([1], numpy.float32), numpy.array([0], numpy.float32), float("inf")),
        (numpy.array([1], numpy.float32), numpy.array([1], numpy.float64), float("inf")),
        (numpy.array([100], numpy.int64), numpy.array([101], numpy.int64), float("inf")),
        ([numpy.array([2], numpy.float32)], [numpy.array([1], numpy.float32)], 1.0),
        ([numpy.array([2], numpy.float32)], [], float("inf")),
        (
            {"a": numpy.array([2], numpy.float32)},
            {"b": numpy.array([2], numpy.float32)},
            float("inf"),
        ),
    ],
)
def test_what_differs_by_how_much(one: Any, other: Any, expected: float) -> None:
    assert _difference(one, other) == expected
    assert (
        _difference(numpy.array([0.0], numpy.float32), numpy.array([-0.0], numpy.float32)) > 0
    )  # They are other bits.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-t", "trace"], "trace changes nothing in"),
        (["-t", "prune:sparsity=0.5", "--ops", "nothing*"], "prune changes nothing in"),
        (["-t", "quantize"], "There are no ranges of activations"),
        (["-t", "prune:sparsity=0.5", "--inputs", "x.npz"], "cannot be read"),
        (["-t", "prune:sparsity=0.5", "--inputs", "cut.npz"], "cannot be read"),
        (["-t", "prune:sparsity=0.5", "--inputs", "objects.npz"], "cannot be read"),
        (["-t", "prune:sparsity=0.5", "--inputs", "other.npz"], "has y, and the model has x"),
        (["-t", "prune:sparsity=0.5", "--inputs", "double.npy"], "has float64 for the input 'x'"),
        (["-t", "prune:sparsity=0.5", "--inputs", "small.npy"], "The model does not run"),
        (["-t", "nosuchtool"], "nosuchtool"),
    ],
)
def test_what_is_refused(
    net: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(net.parent)
    Path("x.npz").write_text("not arrays")
    numpy.savez("other.npz", y=X)
    numpy.savez("objects.npz", x=numpy.array([None]))
    Path("cut.npz").write_bytes(Path("other.npz").read_bytes()[:100])
    numpy.save("double.npy", X.astype(numpy.float64))
    numpy.save("small.npy", X[0])
    status, new = call(net, *arguments)
    assert status == 2
    assert said in capsys.readouterr().err
    assert not new.exists()


def test_wrong_files(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = ("-t", "prune:sparsity=0.5")

    def refused(path: Path, *arguments: str, output: str = "new.onnx") -> str:
        status, _ = call(path, *tool, *arguments, output=output)
        assert status == 2
        return capsys.readouterr().err

    assert "none.onnx' does not exist" in refused(net.parent / "none.onnx")
    broken = net.parent / "broken.onnx"
    broken.write_text("not a model")
    assert "ONNX Runtime cannot read" in refused(broken)
    other = net.parent / "model.bin"
    other.write_text("anything")
    assert "No installed driver reads" in refused(other)
    assert "is there already" in refused(net, output="broken.onnx")
    assert "the model itself" in refused(net, "--force", output="net.onnx")
    assert "The folder" in refused(net, output="none/new.onnx")
    status, new = call(net, *tool, "--force", output="broken.onnx")
    assert status == 0
    assert onnx.load_model(new).graph.node


#: What routines may compute, of float32 of shape (2, 3, 4), on which NumPy is the reference.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: (2 - x) * x / (x * x + 1) - abs(-x),
    "powers": lambda x: numpy.sqrt(abs(x)) + numpy.square(x) + (abs(x) + 1) ** 1.5,
    "functions": lambda x: numpy.tanh(x) + numpy.exp(x) + numpy.log(abs(x) + 1) + numpy.sign(x),
    "rounding": lambda x: numpy.round(x * 4) + numpy.floor(x) - numpy.ceil(x) + numpy.rint(x),
    "limits": lambda x: numpy.clip(x, -0.5, 0.5) + numpy.maximum(x, 0) + numpy.minimum(0, x),
    "choice": lambda x: numpy.where(x > 0.1, x, numpy.zeros_like(x)) + numpy.ones_like(x),
    "logic": lambda x: numpy.where((x > 0) & ~(x >= 1) | (x != x) | (x == 0), x, -x),
    "finite": lambda x: numpy.where(numpy.isfinite(1 / (x - x[0, 0, 0])), x, 0),
    "sums": lambda x: x - x.mean(-1, keepdims=True) + x.sum(axis=(0, 2), keepdims=True) + x.sum(),
    "extremes": lambda x: x.max(axis=1, keepdims=True) - x.min() + numpy.amax(x, axis=0),
    "initial": lambda x: x * numpy.max(abs(x), axis=None, keepdims=True, initial=0),
    "shapes": lambda x: x.reshape(3, 8).T.reshape(x.shape).transpose(0, 1, 2).swapaxes(0, 1),
    "parts": lambda x: x[:, 1:, ::2] * x[0, None, -1, :1] + x[..., 1:, 0:1][1] + x[-1, 2, 3],
    "axes": lambda x: numpy.squeeze(numpy.expand_dims(x, (0, 2)), 0).ravel(),
    "joined": lambda x: numpy.concatenate([x, 2 * x], axis=1)[:, ::-1],
    "padded": lambda x: numpy.pad(x, ((0, 0), (0, 1), (0, 2))),
    "counts": lambda x: x * numpy.count_nonzero(x > 0, axis=-1)[..., None].astype(x.dtype),
    "any": lambda x: x * numpy.any(x > 1, axis=0).astype("float32") * (x < 9).all().astype("f4"),
    "product": lambda x: x @ numpy.ones((4, 2), numpy.float32),
    "types": lambda x: (x.astype("float64") * 0.1).astype("float32") + x.astype("int32") * 1.0,
    "scalars": lambda x: x * numpy.float32(0.3) + 1 - True,
    "constants": lambda x: x * numpy.asarray([1, 2, 3, 4], numpy.float32)[::-1],
}


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_routines_may_compute(name: str, opset: int) -> None:
    function, calls = FUNCTIONS[name], list[Any]()
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "one", [value("x")], [value("y")]
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset < 21 else 10
    )

    def counted(x: Any) -> Any:
        calls.append(type(x))
        return function(x).astype("float32")

    tool = amanda.Tool()
    routine = amanda.staged(counted)
    tool.add_inst_for_op(lambda context: context.insert_after_op(routine, outputs=[0]))
    session, x = session_of(model), drawn(2, 3, 4)
    with amanda.apply(tool):
        for _ in range(3):
            (found,) = session.run(None, {"x": x})
    with numpy.errstate(all="ignore"):
        expected = function(x).astype("float32")
    numpy.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
    assert found.shape == expected.shape
    assert len(calls) == 1  # It is a part of the model.
    (found,) = run(amanda.exported(session, tool, {"x": x}), x=x)
    numpy.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("routine", "why"),
    [
        (lambda x: x if x.sum() > 0 else -x, "reads values"),
        (lambda x: numpy.sort(x), "numpy.sort has no nodes"),
        (lambda x: numpy.spacing(x), "numpy.spacing has no node"),
        (lambda x: x.sum(axis=()), "reduces along no axis"),
        (lambda x: x * (x[x > 0].size > 9), "picks elements by an array"),
        (lambda x: numpy.add(x, x, casting="same_kind"), "with options"),
    ],
)
def test_what_routines_may_not_compute(routine: Any, why: str) -> None:
    session, tool = session_of(conv_net()), amanda.Tool()
    marked = amanda.staged(routine)
    tool.add_inst_for_op(lambda op: op.insert_before_op(marked, inputs=[0]))
    with pytest.raises(UnsupportedError, match=why):
        amanda.exported(session, tool, {"x": X})
    with amanda.apply(tool):  # It runs on the host.
        session.run(None, {"x": X})


def test_limits_beyond_those_of_the_type() -> None:
    kind = TensorProto.UINT8
    values = [helper.make_tensor_value_info(name, kind, [None]) for name in "xy"]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    session = session_of(model_of(helper.make_graph(nodes, "g", values[:1], values[1:])))
    tool = amanda.Tool()
    limits = amanda.staged(lambda y: numpy.clip(y, -1, 300) + numpy.clip(y, -300, 2))
    tool.add_inst_for_op(lambda op: op.insert_after_op(limits, outputs=[0]))
    x = numpy.array([0, 1, 2, 3, 100], numpy.uint8)
    new = amanda.exported(session, tool, {"x": x})
    assert run(new, x=x)[0].tolist() == [0, 2, 4, 5, 102]


def test_dropout_that_is_not_in_training_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [
        helper.make_node("Dropout", ["x"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    values = [value(name, shape=[None, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight("w", drawn(4, 4))])
    onnx.save_model(model_of(graph), tmp_path / "net.onnx")
    status, _ = call(tmp_path / "net.onnx", "-t", "prune:sparsity=0.5")
    assert status == 0
    assert "equal bit for bit" in capsys.readouterr().out


def test_an_error_in_a_staged_routine_is_the_user_s() -> None:
    @amanda.staged
    def wrong(x: Any) -> Any:
        raise ZeroDivisionError("mine")

    session, tool = session_of(conv_net()), amanda.Tool()
    tool.add_inst_for_op(lambda op: op.insert_before_op(wrong, inputs=[0]))
    with amanda.apply(tool), pytest.raises(ZeroDivisionError, match="mine"):
        session.run(None, {"x": X})
