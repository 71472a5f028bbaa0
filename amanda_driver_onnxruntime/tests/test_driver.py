"""Sessions, values, weights and models of ONNX Runtime, beyond the programs of the kit.

Long, since it is a list of cases.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import amanda
from amanda_core.driver_kit import OpContext
from amanda_core.runtime.threads import original
from amanda_core.testing.kit.tools import before
from amanda_driver_onnxruntime.onnxruntime_internals.sessions import Part
from amanda_driver_onnxruntime.onnxruntime_internals.values import array_of
from amanda_driver_onnxruntime.vocabulary import _RANKED, DECLARATIONS

from .models import MODELS, X, control_flow, conv_net, drawn, old_net
from .onnxruntime_backends import FLOAT, INT64, model_of, options, value, weight

FOLDED = ("normalized convolutions", 1)


class Looking(amanda.Tool):
    """Inserts a routine that returns None before and after each operator, and notes the types."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.executed: list[str] = []
        self.add_inst_for_op(self.look)

    def look(self, context: OpContext) -> None:
        self.seen.append(context.op_type)
        name = context.name

        def note(*values: Any) -> None:
            self.executed.append(name)

        context.insert_before_op(note)
        context.insert_after_op(lambda *values: None)


def session_of(model: onnx.ModelProto, level: int = 0) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), options(level))


def same(one: Any, other: Any) -> bool:
    """Compare bit for bit."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    kinds = one.dtype == other.dtype and one.shape == other.shape
    return bool(kinds and one.tobytes() == other.tobytes())


@pytest.mark.parametrize(
    ("name", "level"),
    # At the second level ONNX Runtime folds a BatchNormalization into the weights of a Conv.
    [(name, level) for name in MODELS for level in (0, 1) if (name, level) != FOLDED],
)
def test_watching_keeps_all_bits(name: str, level: int) -> None:
    session = session_of(MODELS[name](), level)
    plain = session.run(None, {"x": X})
    tool = Looking()
    with amanda.apply(tool):
        assert same(session.run(None, {"x": X}), plain)
        once = list(tool.executed)
        assert same(session.run(None, {"x": X}), plain)
    assert tool.executed == once * 2
    assert len(once) >= len(tool.seen) > 1
    assert same(session.run(None, {"x": X}), plain)


@pytest.mark.parametrize("name", MODELS)
def test_tools_see_the_optimized_graph_on_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(MODELS[name](), 99)
    plain = session.run(None, {"x": X})
    monkeypatch.setenv("AMANDA_ONNXRUNTIME_GRAPH", "optimized")
    tool = Looking()
    with amanda.apply(tool) as handle:
        for _ in range(2):
            assert same(session.run(None, {"x": X}), plain)
        gaps = [gap.what for gap in handle.coverage()["onnxruntime"]]
    assert not any("fusions" in gap for gap in gaps)
    assert "BatchNormalization" not in tool.seen
    assert "DequantizeLinear" not in tool.seen  # It is a part of MatMulNBits.


def test_operators_in_bodies_are_seen_each_time() -> None:
    session = session_of(control_flow())
    rows = session.run(["rows"], {"x": X})[0]
    turns = len(rows)
    tool = Looking()
    with amanda.apply(tool):
        session.run(None, {"x": X})
    counts = {name: tool.executed.count(name) for name in tool.executed}
    assert 1 < turns < 5  # The condition ended it.
    assert counts["ReduceMax"] == turns  # That of the body; the one outside is the second.
    assert counts["Exp"] == turns
    assert counts["ReduceMax#2"] == 1
    total = session.run(["y"], {"x": X})[0]
    assert ("Mul" in counts) != ("Neg#2" in counts)
    assert total.shape == X.shape


def test_an_edit_in_a_loop() -> None:
    session = session_of(control_flow())
    tool = before("Exp", lambda each: numpy.zeros_like(each))
    with amanda.apply(tool):
        found = session.run(["exps"], {"x": X})[0]
    assert found.size
    assert (found == 1).all()


class Observing(amanda.Tool):
    """Notes all values before and after each operator."""

    def __init__(self, types: Sequence[str] = (), *, observe: bool = True) -> None:
        super().__init__()
        self.values: list[tuple[str, list[Any]]] = []
        self.types, self.observe = types, observe
        self.add_inst_for_op(self.look)

    def look(self, context: OpContext) -> None:
        if not self.types or context.op_type in self.types:
            for at, insert in (
                ("before", context.insert_before_op),
                ("after", context.insert_after_op),
            ):
                insert(self.note, observe=self.observe, where=f"{context.name} {at}")

    def note(self, *values: Any, where: str) -> None:
        arrays = [numpy.array(v) if isinstance(v, numpy.ndarray) else type(v) for v in values]
        self.values.append((where, arrays))


class Counted:
    """How many sessions the driver runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        plain = Part.run

        def run(part: Part, *args: Any) -> Any:
            self.runs += 1
            return plain(part, *args)

        monkeypatch.setattr(Part, "run", run)

    def take(self) -> int:
        found, self.runs = self.runs, 0
        return found


@pytest.mark.parametrize(("name", "level"), [(name, level) for name in MODELS for level in (0, 1)])
def test_observers_see_the_same_in_one_session(
    name: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of routines that may edit, which cut the model, are what they must see."""
    session, counted = session_of(MODELS[name](), level), Counted(monkeypatch)
    plain = session.run(None, {"x": X})
    with amanda.apply(cut := Observing(observe=False)):
        session.run(None, {"x": X})
        expected = list(cut.values)
    with amanda.apply(tool := Observing()) as handle:
        for number in range(3):
            tool.values.clear()
            counted.take()
            found = session.run(None, {"x": X})
            assert same(found, plain) or (name, level) == FOLDED
            # The first run analyses, and bodies run operator by operator.
            assert (counted.take() == 1) == (number > 0 and name != "control flow"), number
        gaps = [gap.what for gap in handle.coverage()["onnxruntime"]]
    assert [where for where, _ in tool.values] == [where for where, _ in expected]
    for (_, found), (_, wanted) in zip(tool.values, expected, strict=True):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert same(one, other) if isinstance(one, numpy.ndarray) else one == other
    assert any("fusions" in gap for gap in gaps) == (level > 0)
    assert same(session.run(None, {"x": X}), plain)


def test_what_observers_do_not_reach_stays_one_session_with_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Edits, immediate tools, other epochs and inputs instead of weights cut the model."""
    session, counted = session_of(conv_net()), Counted(monkeypatch)
    immediate = Observing(["Gemm"])
    immediate.immediate = True
    tool = Observing(["Gemm", "Conv"])

    def runs() -> int:
        counted.take()
        session.run(None, {"x": X})
        return counted.take()

    with amanda.apply(tool):
        runs()
        assert runs() == 1
        with amanda.apply(immediate):
            runs()
            assert runs() == 6  # Two convolutions, the product, and what is between and after them.
        assert runs() > 1  # It may have to be analysed again.
        assert runs() == 1
        with amanda.apply(_doubling()):
            runs()
            assert runs() > 1
            assert close(session.run(None, {"x": X})[0])


@pytest.mark.parametrize("when", ["at the operator", "before it", "after it"])
def test_routines_that_an_observer_registers_act_from_there_on(when: str) -> None:
    """The model has run then, without them."""
    session = session_of(conv_net())
    watched = {"at the operator": "Gemm", "before it": "Relu", "after it": "Softmax"}[when]
    other, tool, armed = amanda.Tool(), amanda.Tool(), list[bool]()

    def double(context: OpContext) -> None:
        if context.op_type == "Gemm":
            context.insert_after_op(lambda h: 2 * h)

    def start(*values: Any) -> None:
        if armed:
            armed.clear()
            other.add_inst_for_op(double)

    tool.add_inst_for_op(
        lambda op: op.insert_before_op(start, observe=True) if op.op_type == watched else None
    )
    with amanda.apply(tool, other):
        for _ in range(2):
            plain = session.run(None, {"x": X})
        armed.append(True)
        found, last = (session.run(None, {"x": X}) for _ in range(2))
    assert close(found[0]) if when == "before it" else same(found, plain)
    assert close(last[0])


def test_observers_run_up_to_an_operator_that_fails() -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["a"], "neg"),
        helper.make_node("Reshape", ["a", "shape"], ["y"], "reshape"),
        helper.make_node("Abs", ["y"], ["z"], "abs"),
    ]
    inputs = [value("x"), value("shape", INT64)]
    session = session_of(model_of(helper.make_graph(nodes, "g", inputs, [value("z")])))
    x = numpy.ones(6, numpy.float32)
    with amanda.apply(tool := Observing()):
        for _ in range(2):
            session.run(None, {"x": x, "shape": numpy.array([2, 3])})
        tool.values.clear()
        with pytest.raises(Exception, match="Reshape"):
            session.run(None, {"x": x, "shape": numpy.array([4, 3])})
    assert [where for where, _ in tool.values] == ["Neg before", "Neg after", "Reshape before"]


#: Operators of ONNX without a common operator type.
UNTYPED = """
    Acosh Asinh Atanh BitShift BlackmanWindow CausalConvWithState CenterCropPad
    ConcatFromSequence DeformConv GlobalLpPool HammingWindow HannWindow Hardmax If ImageDecoder
    LRN Loop LpNormalization LpPool MaxRoiPool MaxUnpool MeanVarianceNormalization
    MelWeightMatrix NonMaxSuppression Optional OptionalGetElement OptionalHasElement
    ReduceLogSum ReduceSumSquare RegexFullMatch ReverseSequence RoiAlign RotaryEmbedding Scan
    SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength
    SequenceMap Shape Shrink Size Softsign SplitToSequence StringConcat StringNormalizer
    StringSplit SwiGLU TfIdfVectorizer Trilu
"""


def test_operators_without_a_common_type_are_known() -> None:
    """A version of ONNX with operators that the vocabulary does not have fails here."""
    names = {one.name for one in onnx.defs.get_all_schemas() if not one.domain}
    untyped = {name for name in names - _RANKED.keys() if DECLARATIONS.get(name) is None}
    assert untyped == set(UNTYPED.split())


@pytest.mark.parametrize("opset", range(7, 13))
@pytest.mark.parametrize("ir_version", [3, 8])  # In the older one each weight is an input, too.
def test_old_versions_of_operators(opset: int, ir_version: int) -> None:
    """Axes that were attributes in earlier opsets are inputs now."""
    session = session_of(old_net(opset, ir_version))
    plain = session.run(None, {"x": X})
    for tool in (Looking(), Observing()):
        with amanda.apply(tool):
            for _ in range(2):
                assert same(session.run(None, {"x": X}), plain)
    types: dict[str, Any] = {}
    typing = amanda.Tool()
    typing.add_inst_for_op(lambda context: types.update({context.op_type: context.get("type")}))
    with amanda.apply(typing):
        session.run(None, {"x": X})
    larger = "Upsample" if opset < 10 else "Resize"
    names = {"BatchNormalization": "batch_norm", "ReduceSum": "sum", "Conv": "conv2d"}
    lower = ("Dropout", "Pad", "Slice", "Clip", "Split", "Concat", "TopK", "Softmax")
    assert types == names | {larger: "upsample"} | {name: name.lower() for name in lower} | {
        "AveragePool": "avg_pool2d",
        "Concat": "concat",
    }


@pytest.mark.parametrize("rank", [1, 2])
def test_sparse_weights(rank: int) -> None:
    """Show them as they are: ONNX Runtime makes them dense, too."""
    dense = numpy.zeros((3, 3), numpy.float32)
    dense[0, 1], dense[1, 2] = 3, 4
    places = numpy.array([1, 5] if rank == 1 else [[0, 1], [1, 2]])
    numbers = helper.make_tensor("w", FLOAT, [2], [3.0, 4.0])
    sparse = helper.make_sparse_tensor(numbers, weight("", places, numpy.int64), [3, 3])
    nodes = [
        helper.make_node("Constant", [], ["v"], sparse_value=sparse),
        helper.make_node("MatMul", ["x", "w"], ["h"], "product"),
        helper.make_node("MatMul", ["h", "v"], ["y"], "other"),
    ]
    graph = helper.make_graph(
        nodes, "sparse", [value("x")], [value("y")], sparse_initializer=[sparse]
    )
    session, x = session_of(model_of(graph)), drawn(2, 3)
    plain = session.run(None, {"x": x})
    numpy.testing.assert_allclose(plain[0], x @ dense @ dense, rtol=1e-5)
    for tool in (Observing(observe=False), Observing()):
        with amanda.apply(tool):
            for _ in range(2):
                assert same(session.run(None, {"x": x}), plain)
        shown = [values[1] for where, values in tool.values if where.endswith("before")]
        assert len(shown) == 4
        assert all(map(same, shown, [dense] * 4))
    with amanda.apply(before("MatMul", lambda w: 2 * w, [1])):
        for _ in range(2):
            assert same(session.run(None, {"x": x}), [4 * plain[0]])


def test_operators_that_no_driver_sees_into_are_said() -> None:
    """Scan of the first version, and operators that are functions of a graph, run whole."""
    node = helper.make_node
    step = helper.make_graph(
        [node("Add", ["state", "x"], ["next"]), node("Identity", ["next"], ["row"])],
        "step",
        [value("state", shape=[4]), value("x", shape=[4])],
        [value("next", shape=[4]), value("row", shape=[4])],
    )
    scan = node("Scan", ["", "state", "x"], ["last", "y"], "scan", body=step, num_scan_inputs=1)
    inputs = [value("state", shape=[2, 4]), value("x", shape=[2, 3, 4])]
    graph = helper.make_graph([scan], "old", inputs, [value("y")])
    scanning = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3)
    double = helper.make_graph(
        [node("Add", ["one", "one"], ["two"])], "each", [value("one")], [value("two")]
    )
    nodes = [
        node("SplitToSequence", ["x"], ["parts"], "split", axis=1),
        node("SequenceMap", ["parts"], ["mapped"], "map", body=double),
        node("ConcatFromSequence", ["mapped"], ["y"], "join", axis=1),
    ]
    mapping = model_of(helper.make_graph(nodes, "mapping", [value("x")], [value("y")]))
    x = drawn(2, 3, 4)
    given = {"state": drawn(2, 4), "x": x}
    for model, feeds, name, fix in (
        (scanning, given, "Scan", "version 9"),
        (mapping, {"x": x}, "SequenceMap", ""),
    ):
        session = session_of(model)
        plain = session.run(None, feeds)
        with amanda.apply(tool := Looking(), selecting := _Selecting()) as handle:
            for _ in range(2):
                assert same(session.run(None, feeds), plain)
            gaps = {gap.what: gap.why for gap in handle.coverage()["onnxruntime"]}
        assert "Add" not in tool.seen
        assert fix in gaps[f"operators inside {name}"]
        assert any(f"inside {name}" in line for line in tool.not_seen())
        with amanda.apply(selecting := _Selecting()):
            for _ in range(2):
                session.run(None, feeds)
        assert selecting.count == len(model.graph.node)


class _Selecting(amanda.Tool):
    """Asks for nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.add_inst_for_op(self.look)

    def look(self, context: OpContext) -> None:
        self.count += 1


def test_the_program_runs_its_own_session_if_no_tool_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(conv_net())
    used: list[Any] = []
    plain = onnxruntime.InferenceSession.run

    def spying(self: Any, *args: Any) -> Any:
        used.append(self)
        return plain(self, *args)

    owner = onnxruntime.capi.onnxruntime_inference_collection.Session
    monkeypatch.setattr(owner, "run", spying)
    tool = _Selecting()
    with amanda.apply(tool):
        session.run(None, {"x": X})
        assert used == []  # It is analysed.
        session.run(None, {"x": X})
        session.run(None, {"x": X})
    assert used == [session, session]
    assert tool.count == 9


def test_pruning_is_that_of_a_pruned_model() -> None:
    model = conv_net()
    mask = (RANDOM_MASK > 0).astype(numpy.float32)
    pruned = onnx.ModelProto()
    pruned.CopyFrom(model)
    (given,) = [one for one in pruned.graph.initializer if one.name == "stem.weight"]
    given.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(given) * mask, "stem.weight"))
    expected = session_of(pruned).run(None, {"x": X})[0]
    session = session_of(model)

    def prune(context: OpContext) -> None:
        if 1 in context.weights and context.weights[1].name == "stem.weight":
            context.insert_before_op(lambda w: w * mask, inputs=[1])

    tool = amanda.Tool()
    tool.add_inst_for_op(prune)
    with amanda.apply(tool):
        for _ in range(3):
            assert same(session.run(None, {"x": X}), [expected])
        mask *= 0  # What a tool writes later counts.
        assert not same(session.run(None, {"x": X}), [expected])
    assert not same(session.run(None, {"x": X}), [expected])


RANDOM_MASK = drawn(4, 3, 3, 3, seed=2)


#: Whether this release tells what is bound; before 1.30, runs on bindings are plain.
TELLS_WHAT_IS_BOUND = hasattr(session_of(conv_net()).io_binding(), "_bound_inputs")


def _doubling() -> amanda.Tool:
    return before("Softmax", lambda x: 2 * x, [0])


def _expected() -> Any:
    model = conv_net()
    model.graph.output.append(value("h"))
    h = session_of(model).run(["h"], {"x": X})[0].astype(numpy.float64)
    exps = numpy.exp(2 * h - (2 * h).max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def close(found: Any) -> bool:
    return bool(numpy.allclose(found, _expected(), rtol=1e-5))


def test_all_ways_to_run() -> None:
    session = session_of(conv_net())
    plain = session.run(None, {"x": X})[0]
    assert not numpy.allclose(plain, _expected())
    given = onnxruntime.OrtValue.ortvalue_from_numpy(X)
    room = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros_like(plain))
    bound, into, early = (session.io_binding() for _ in range(3))
    for binding in (bound, early):
        binding.bind_cpu_input("x", X)
    early.bind_output("y")
    into.bind_ortvalue_input("x", given)
    into.bind_ortvalue_output("y", room)
    cpu = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
    vector = onnxruntime.capi.onnxruntime_pybind11_state.OrtValueVector
    with amanda.apply(_doubling()) as handle:
        bound.bind_output("y")
        session.run_with_iobinding(early)
        assert same(early.copy_outputs_to_cpu(), [plain])
        assert any("before apply" in gap.what for gap in handle.coverage()["onnxruntime"])
        expected = close if TELLS_WHAT_IS_BOUND else lambda found: same([found], [plain])
        for _ in range(2):
            assert close(session.run(["y"], {"x": X})[0])
            assert close(session.run(None, {"x": X.tolist()})[0])
            assert close(session.run_with_ort_values(["y"], {"x": given})[0].numpy())
            session.run_with_iobinding(bound)
            assert expected(bound.copy_outputs_to_cpu()[0])
            session.run_with_iobinding(into)
            assert expected(room.numpy())
            feeds, fetches = vector(), vector()
            feeds.push_back(given._ortvalue)
            session.run_with_ortvaluevector(None, ["x"], feeds, ["y"], fetches, [cpu])
            assert close(fetches[0].numpy())
    session.run_with_iobinding(bound)
    assert same(bound.copy_outputs_to_cpu(), [plain])
    session.run_with_iobinding(into)
    assert same([room.numpy()], [plain])


def test_an_asynchronous_run_is_plain_and_in_the_coverage() -> None:
    given = options(0)
    given.intra_op_num_threads = 2  # It needs one of its own.
    session = onnxruntime.InferenceSession(conv_net().SerializeToString(), given)
    plain, done, found = session.run(None, {"x": X}), threading.Event(), list[Any]()

    def callback(results: Any, _: Any, error: str) -> None:
        found.append(results)
        done.set()

    with amanda.apply(_doubling()) as handle:
        session.run_async(None, {"x": X}, callback, None)
        assert done.wait(60)
        gaps = [gap.what for gap in handle.coverage()["onnxruntime"]]
    assert same(found[0], plain)
    assert "run_async" in gaps


def test_the_options_of_the_program_stay_as_they_are(tmp_path: Path) -> None:
    given = options(0)
    given.add_session_config_entry("session.set_denormal_as_zero", "1")
    given.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    names = [name for name in dir(given) if not name.startswith("_")]
    plain = {n: getattr(given, n) for n in names if not callable(getattr(given, n))}
    session = onnxruntime.InferenceSession(conv_net().SerializeToString(), given)
    (tmp_path / "optimized.onnx").unlink()
    with amanda.apply(_doubling()):
        assert close(session.run(None, {"x": X})[0])
    assert {name: getattr(given, name) for name in plain} == plain
    assert given.get_session_config_entry("session.set_denormal_as_zero") == "1"
    with pytest.raises(RuntimeError, match="does not have"):
        given.get_session_config_entry("session.intra_op.allow_spinning")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["path", "bytes"])
def test_weights_in_files_of_their_own(tmp_path: Path, how: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(
        conv_net(), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    given = options(0)
    source: Any = str(path)
    if how == "bytes":
        key = "session.model_external_initializers_file_folder_path"
        given.add_session_config_entry(key, str(tmp_path))
        source = path.read_bytes()
    session = onnxruntime.InferenceSession(source, given)
    plain = session.run(None, {"x": X})
    with amanda.apply(Looking()):
        assert same(session.run(None, {"x": X}), plain)


@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT8E4M3FN", "INT4", "UINT4", "STRING", "FLOAT16"])
def test_types_that_numpy_does_not_have(kind: str) -> None:
    number = onnx.TensorProto.DataType.Value(kind)
    values: Any = numpy.array([[1, 2, 3]], numpy.float32)
    cast = [
        helper.make_node("Cast", ["x"], ["low"], "down", to=number),
        helper.make_node("Cast", ["low"], ["y"], "up", to=onnx.TensorProto.FLOAT),
    ]
    graph = helper.make_graph(cast, "types", [value("x")], [value("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = session_of(model)
    plain = session.run(None, {"x": values})
    seen: list[str] = []
    dtypes: list[str] = []

    def look(context: OpContext) -> None:
        def twice(low: Any) -> Any:
            seen.append(low.dtype.name)
            return low[:, ::-1]

        if context.name == "Cast#2":
            assert context.facts is not None
            dtypes.append(context.facts.dtype(context.get_inputs()[0]))
            context.insert_before_op(twice, inputs=[0])

    tool = amanda.Tool()
    tool.add_inst_for_op(look)
    for watching in (Looking(), observing := Observing()):
        with amanda.apply(watching):
            for _ in range(2):
                assert same(session.run(None, {"x": values}), plain)
    half = len(observing.values) // 2
    assert str(observing.values[:half]) == str(observing.values[half:])
    with amanda.apply(tool):
        found = session.run(None, {"x": values})[0]
    assert (found == values[:, ::-1]).all()
    assert len(seen) == 1
    names = {"FLOAT8E4M3FN": "float8_e4m3fn"}
    assert dtypes == [names.get(kind, kind.lower())]


@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4"])
def test_outputs_of_types_without_arrays(kind: str) -> None:
    node, element = helper.make_node, onnx.TensorProto.DataType.Value(kind)
    nodes = [node("Cast", ["x"], ["low"], to=element), node("Cast", ["low"], ["y"], to=FLOAT)]
    weights = []
    if "INT" in kind:
        nodes = [
            node("QuantizeLinear", ["x", "scale", "zero"], ["low"]),
            node("DequantizeLinear", ["low", "scale", "zero"], ["y"]),
        ]
        weights = [weight("scale", 0.25), helper.make_tensor("zero", element, [], [0])]
    graph = helper.make_graph(
        nodes, "low", [value("x")], [value("low", element), value("y")], weights
    )
    opsets = [helper.make_opsetid("", 21)]
    session = session_of(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    given = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(drawn(3, 5))}
    plain = session.run_with_ort_values(None, given)
    edits: list[Any] = []

    def edit(low: Any) -> Any:
        edits.append(low.dtype.name)
        return (low.astype(numpy.float32) * 0).astype(low.dtype)

    editing = amanda.Tool()
    low = [nodes[0].op_type]
    editing.add_inst_for_op(
        lambda op: op.insert_after_op(edit, outputs=[0]) if op.name in low else None
    )
    with amanda.apply(Observing()):
        for _ in range(2):
            found = session.run_with_ort_values(None, given)
    with amanda.apply(Looking()):
        seen = session.run_with_ort_values(None, given)
    assert all(map(same, map(array_of, found), map(array_of, seen)))
    with amanda.apply(editing):
        edited = session.run_with_ort_values(None, given)
    for one, other in zip(found, plain, strict=True):
        assert one.data_type() == other.data_type()
        assert same(array_of(one), array_of(other))
    assert edited[0].data_type() == plain[0].data_type()
    assert (edited[1].numpy() == 0).all()
    assert len(edits) == 1


def test_two_models_that_differ_in_their_weights_have_their_own_operators() -> None:
    one, other = conv_net(), conv_net(seed=1)
    sessions = [session_of(model) for model in (one, other, one)]
    ids: list[int] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: ids.append(context.get_op_id()))
    roots: list[str] = []
    tool.add_inst_for_op(lambda c: roots.extend(w.root for w in c.weights.values()))
    with amanda.apply(tool):
        for session in sessions:
            session.run(None, {"x": X})
    assert len(ids) == len(set(ids)) == 18
    assert set(roots) == {"convs", "convs#2"}


def test_an_edit_of_another_type_is_refused() -> None:
    session = session_of(conv_net())
    tool = before("Softmax", lambda x: x.astype(numpy.float64))
    with amanda.apply(tool), pytest.raises(amanda.AmandaError, match=r"astype\('float32'\)"):
        session.run(None, {"x": X})
    assert session.run(None, {"x": X})


@pytest.mark.parametrize("level", [0, 1, 99])
def test_fusions_are_said_once(level: int) -> None:
    session = session_of(conv_net(), level)
    plain = session.run(None, {"x": X})[0]
    with amanda.apply(Looking()) as handle:
        for _ in range(2):
            numpy.testing.assert_allclose(session.run(None, {"x": X})[0], plain, rtol=1e-4)
        gaps = [gap.what for gap in handle.coverage()["onnxruntime"]]
    assert sum("fusions" in gap for gap in gaps) == (level > 0)


def test_a_model_that_cannot_be_read_runs_plain(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(conv_net().SerializeToString())
    session = onnxruntime.InferenceSession(str(path), options())
    plain = session.run(None, {"x": X})
    path.unlink()
    with amanda.apply(Looking()) as handle:
        assert same(session.run(None, {"x": X}), plain)
        gaps = [gap.what for gap in handle.coverage()["onnxruntime"]]
    assert any("cannot be read again" in gap for gap in gaps)


def test_wrong_inputs_are_refused_as_without_tools() -> None:
    session = session_of(conv_net())
    for feed in ({}, {"x": X, "z": X}, {"x": X.astype(numpy.float64)}):
        with pytest.raises(Exception) as plain:  # noqa: PT011  Which one is ONNX Runtime's choice.
            session.run(None, feed)
        with amanda.apply(Looking()), pytest.raises(type(plain.value)) as found:
            session.run(None, feed)
        assert str(found.value) == str(plain.value)


def test_a_default_input_may_be_given(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"], "mul")],
        "default",
        [value("x"), value("w")],
        [value("y")],
        [weight("w", [2.0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    one = numpy.ones(1, numpy.float32)
    for tool in (Looking(), Observing(), amanda.Tool()):
        session = session_of(model)  # It is compared with its model in its first run under tools.
        with amanda.apply(tool) as handle:
            for _ in range(3):
                assert session.run(None, {"x": one, "w": 5 * one})[0] == 5
                assert session.run(None, {"x": one})[0] == 2
            assert not any("sessions" in gap.what for gap in handle.coverage()["onnxruntime"])


def test_a_tool_that_acts_nowhere_leaves_the_roundings_of_a_session() -> None:
    nodes, last = list[onnx.NodeProto](), "x"
    for number in range(4):
        nodes += [
            helper.make_node("MatMul", [last, "w"], [f"m{number}"]),
            helper.make_node("Relu", [f"m{number}"], [f"r{number}"]),
        ]
        last = f"r{number}"
    half = numpy.float16
    weights = [weight("w", drawn(16, 16) / 4, half)]
    kind = onnx.TensorProto.FLOAT16
    graph = helper.make_graph(nodes, "half", [value("x", kind)], [value(last, kind)], weights)
    session, x = session_of(model_of(graph)), drawn(2, 16, seed=1).astype(half)
    plain = session.run(None, {"x": x})[0]
    tool, seen = amanda.Tool(), list[str]()
    tool.add_inst_for_op(lambda context: seen.append(context.op_type))
    with amanda.apply(tool):
        found = [session.run(None, {"x": x})[0] for _ in range(2)]
    assert seen == ["MatMul", "Relu"] * 4
    assert [one.tobytes() for one in found] == [plain.tobytes()] * 2


def test_maps_of_classifiers() -> None:
    kind = helper.make_tensor_type_proto(FLOAT, None)
    probabilities = helper.make_map_type_proto(onnx.TensorProto.STRING, kind)
    learned: Any = "ai.onnx.ml"
    nodes = [
        helper.make_node(
            "DictVectorizer", ["words"], ["v"], domain=learned, string_vocabulary=["a", "b", "c"]
        ),
        helper.make_node(
            "LinearClassifier",
            ["v"],
            ["label", "scores"],
            domain=learned,
            classlabels_strings=["no", "yes"],
            post_transform="SOFTMAX",
            coefficients=[1.0, -2.0, 0.5, -1.0, 2.0, 0.25],
            intercepts=[0.1, 0.2],
        ),
        helper.make_node(
            "ZipMap", ["scores"], ["z"], domain=learned, classlabels_strings=["no", "yes"]
        ),
    ]
    outputs = [
        value("label", onnx.TensorProto.STRING),
        helper.make_value_info("z", helper.make_sequence_type_proto(probabilities)),
    ]
    inputs = [helper.make_value_info("words", probabilities)]
    model = model_of(helper.make_graph(nodes, "classifier", inputs, outputs))
    model.opset_import.append(helper.make_opsetid(learned, 1))
    session = session_of(model, 0)
    given = {"words": {"a": 1.0, "c": 3.0}}
    label, maps = session.run(None, given)
    for tool in (Looking(), Observing(), amanda.Tool()):
        with amanda.apply(tool):
            for _ in range(2):
                found = session.run(None, given)
                assert found[0].tolist() == label.tolist()
                assert found[1] == maps


def test_a_replacement_may_run_the_operator() -> None:
    session = session_of(conv_net())

    def replace(*inputs: Any) -> Any:
        op = original()
        assert op is not None
        return op([2 * inputs[0]])

    tool = amanda.Tool()

    def analyse(context: OpContext) -> None:
        if context.op_type == "Softmax":
            context.replace_op(replace)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        assert close(session.run(None, {"x": X})[0])


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_loop_without_a_turn(times: int) -> None:
    model = control_flow(times)
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    loop = onnx.NodeProto.FromString(loop.SerializeToString())
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.append(loop)
    model.graph.output.extend([value("last"), value("rows")])
    session = session_of(model)
    plain = session.run(None, {"x": X})
    with amanda.apply(Looking()):
        assert same(session.run(None, {"x": X}), plain)
        assert same(session.run(None, {"x": X}), plain)


def test_constants_of_all_forms() -> None:
    constants: dict[str, Any] = {
        "value_float": 1.5,
        "value_floats": [1.0, 2.0],
        "value_int": 3,
        "value_ints": [4, 5],
        "value_string": "text",
        "value_strings": ["a", "b"],
        "value": numpy_helper.from_array(numpy.ones((2, 2), numpy.float16)),
    }
    nodes = [
        node
        for name, given in constants.items()
        for node in (
            helper.make_node("Constant", [], [name], **{name: given}),
            helper.make_node("Identity", [name], [f"{name}.out"]),
        )
    ]
    kinds = {"value_int": INT64, "value_ints": INT64, "value": onnx.TensorProto.FLOAT16}
    kinds |= dict.fromkeys(("value_string", "value_strings"), onnx.TensorProto.STRING)
    outputs = [value(f"{name}.out", kinds.get(name, FLOAT)) for name in constants]
    graph = helper.make_graph(nodes, "constants", [], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = session_of(model)
    plain = session.run(None, {})
    tool = Looking()
    values: list[Any] = []
    tool.add_inst_for_op(lambda context: values.append(context.value(0)))
    with amanda.apply(tool):
        found = session.run(None, {})
    assert [one.tolist() for one in found] == [one.tolist() for one in plain]
    assert [one.tolist() for one in values] == [one.tolist() for one in plain]


def test_the_letters_of_weights() -> None:
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "columns"], ["a"], "product"),
        node("Gemm", ["a", "rows"], ["b"], "turned", transB=1),
        node("Einsum", ["b", "summed"], ["y"], "sum", equation="ni,oi->no"),
    ]
    weights = [weight("columns", drawn(4, 3)), weight("rows", drawn(5, 3))]
    weights.append(weight("summed", drawn(2, 5)))
    graph = helper.make_graph(nodes, "products", [value("x")], [value("y")], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    letters: dict[str, Any] = {}
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: letters.update((w.name, w.layout) for w in context.weights.values())
    )
    with amanda.apply(tool):
        session_of(model).run(None, {"x": drawn(6, 4)})
    assert letters == {"columns": "IO", "rows": "OI", "summed": "OI"}


def test_a_tool_of_gradients_warns_at_the_first_operator() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: None, backward=True)
    tool.add_inst_for_op(lambda context: None)
    session = session_of(conv_net())
    with amanda.apply(tool):
        pass  # Nothing runs here, as in a program of another framework.
    with amanda.apply(tool), pytest.warns(amanda.AmandaWarning, match="has no gradients"):
        session.run(None, {"x": X})


class Keeping(amanda.Tool):
    """Adds 1 to the outputs of an operator, and keeps the arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.add_inst_for_op(lambda context: context.insert_after_op(self.edit))

    def edit(self, value: Any) -> Any:
        self.kept.append(value + 1)
        return self.kept[-1]


def test_results_have_memory_of_their_own() -> None:
    """An `OrtValue` that is made from an array does not keep the array alive."""
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    model = model_of(helper.make_graph(nodes, "g", [value("x")], [value("y")]))
    session, x = session_of(model), numpy.arange(4, dtype=numpy.float32)
    given = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    with amanda.apply(tool := Keeping()):
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", given)
        binding.bind_output("y")
        found = session.run_with_ort_values(None, {"x": given})[0].numpy()
        session.run_with_iobinding(binding)
        bound = binding.get_outputs()[0].numpy()
    for array in tool.kept:
        array.fill(7)
    assert found.tolist() == (1 - x).tolist()
    assert bound.tolist() == (1 - x if TELLS_WHAT_IS_BOUND else -x).tolist()


def test_texts_are_values_of_onnx_runtime() -> None:
    nodes, texts = [helper.make_node("Identity", ["w"], ["y"])], weight("w", ["a", "b"], object)
    outputs = [value("y", onnx.TensorProto.STRING)]
    session = session_of(model_of(helper.make_graph(nodes, "g", [], outputs, [texts])))
    with amanda.apply(tool := Looking()):
        (found,) = session.run_with_ort_values(None, {})
        assert found.numpy().tolist() == ["a", "b"]
    assert tool.executed


def test_a_session_with_other_weights_than_its_model_runs_without_tools() -> None:
    nodes, ones = [helper.make_node("Add", ["x", "w"], ["y"])], weight("w", [1, 1])
    model = model_of(helper.make_graph(nodes, "g", [value("x")], [value("y")], [ones]))
    given, x = options(0), numpy.zeros(2, numpy.float32)
    other = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.full(2, 5, numpy.float32))
    given.add_initializer("w", other)
    session = onnxruntime.InferenceSession(model.SerializeToString(), given)
    with amanda.apply(tool := Looking()) as handle:
        for _ in range(2):
            assert session.run(None, {"x": x})[0].tolist() == [5, 5]
        gaps = [gap.what for gap in handle.coverage()["onnxruntime"]]
    assert not tool.executed
    assert any("compute something else" in gap for gap in gaps)
