"""`amanda diff` of what SGLang's dumper, msProbe and ExecuTorch recorded.

`records/writing.py` made the files by these programs.
"""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import amanda
from amanda_core.cli import main
from amanda_core.errors import ResultError
from amanda_tools.diff import DiffResult, compare, save_arrays, save_inspected
from amanda_tools.dump import Dump

pytestmark = pytest.mark.one_interceptor

RECORDS = Path(__file__).parent / "records"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("writing", RECORDS / "writing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writing = _load()


def record(kind: str, folder: Path) -> Path:
    """Return the record of a program, with the right epsilon."""
    return unpacked(RECORDS / f"{kind}.zip", folder)


def unpacked(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


def named(found: DiffResult) -> str:
    """Return the name of the operator that is said to make the difference."""
    if found.created:
        return found.created[0].op.name
    assert found.first is not None
    return found.first.a.name


def dumped(folder: Path, epsilon: float, steps: int = 1, training: bool = False) -> Path:
    """Return our dump of the same network."""
    tool = Dump(values=["inputs", "weights", "outputs", "gradients"])
    network = writing.Network(epsilon).train(training)
    with amanda.apply(tool):
        for step in range(steps):
            out = network(writing.X + step)
            if training:
                out.square().mean().backward()
    tool.result().write(folder)
    return folder


NAMES = {"up", "norm", "down.0", "down.1"}


@pytest.mark.parametrize("kind", ["sglang", "msprobe"])
def test_a_record_and_a_dump_of_the_same_network(tmp_path: Path, kind: str) -> None:
    steps, training = (2, False) if kind == "sglang" else (1, True)
    theirs = record(kind, tmp_path / "a")
    found = compare(theirs, dumped(tmp_path / "b", 1e-5, steps, training))
    assert found.same, found.conclusion()
    assert found.unread == []
    paired = [one.a.name for one in found.compared if one.a.name in NAMES]
    assert (set(paired), len(paired)) == (NAMES, 4 * steps)
    first = compare(theirs, dumped(tmp_path / "c", 0.1, steps, training)).first
    assert first is not None
    assert (first.a.name, first.b.name) == ("norm", "norm/layer_norm")


@pytest.mark.parametrize("kind", ["sglang", "msprobe", "msprobe_statistics"])
def test_two_records(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (record(kind, tmp_path / name) for name in "ab")
    assert compare(a, b).same
    changed = _changed(kind, b)
    found = compare(a, b)
    assert not found.same
    assert named(found) == changed
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(a), str(b)])
    assert caught.value.code == 1
    assert f"of op '{changed}'" in capsys.readouterr().out


def _changed(kind: str, folder: Path) -> str:
    """Change what the normalization returned, and return its name."""
    if kind == "msprobe_statistics":
        (table,) = folder.rglob("dump.json")
        content = json.loads(table.read_text())
        content["data"]["Module.norm.LayerNorm.forward.0"]["output"][0]["Max"] += 0.5
        table.write_text(json.dumps(content))
        return "norm"
    pattern = "*step=0*norm.output*" if kind == "sglang" else "Module.norm.*.forward.0.output.0.pt"
    (file,) = folder.rglob(pattern)
    saved = torch.load(file, weights_only=True)
    (saved["value"] if kind == "sglang" else saved).add_(0.5)
    torch.save(saved, file)
    return "norm"


def test_what_msprobe_records_of_gradients_and_functions(tmp_path: Path) -> None:
    a = record("msprobe", tmp_path)
    tensors = {(one.a.name, one.what, one.position): one.a.word for one in compare(a, a).compared}
    assert tensors["Functional.layer_norm.0", "output", "0"] == "layer_norm"
    assert ("up", "weight", "weight") in tensors
    assert ("down.1", "grad_output", "0") in tensors
    assert ("norm", "grad_input", "weight.0") in tensors


def test_ranks_and_tags_of_sglang(tmp_path: Path) -> None:
    for rank in range(2):
        for index in range(2):
            name = f"step={index}___rank={rank}___dump_index={index}___name=hidden___layer_id=3.pt"
            value = {"value": torch.ones(2) * index, "meta": {"name": "hidden", "world_size": 2}}
            torch.save(value, tmp_path / name)
    found = compare(tmp_path, tmp_path).compared
    assert [(one.a.name, one.step, one.execution) for one in found] == [
        *(("hidden layer_id=3", step, step) for step in range(2)),
        *(("hidden layer_id=3 rank=1", step, step) for step in range(2)),
    ]
    (tmp_path / "step=0___rank=0___dump_index=x___name=a.pt").touch()
    with pytest.raises(ResultError, match="no number"):
        compare(tmp_path, tmp_path)


def test_several_records_of_sglang_are_refused(tmp_path: Path) -> None:
    record("sglang", tmp_path / "one")
    record("sglang", tmp_path / "other")
    with pytest.raises(ResultError, match="2 records of SGLang"):
        compare(tmp_path, tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"data": {"a": {}}}', '{"data": 3}', "{}"])
def test_malformed_tables_of_msprobe_are_refused(tmp_path: Path, content: str) -> None:
    a = record("msprobe", tmp_path)
    (table,) = a.rglob("dump.json")
    table.write_text(content)
    with pytest.raises(ResultError, match=r"dump\.json"):
        compare(a, a)


def test_a_file_that_msprobe_lost_is_named(tmp_path: Path) -> None:
    a, b = (record("msprobe", tmp_path / name) for name in "ab")
    (file,) = b.rglob("Module.norm.*.forward.0.output.0.pt")
    file.unlink()
    found = compare(a, b)
    assert (found.same, found.complete) == (True, False)
    assert any(file.name in one for one in found.unread)


class Event(types.SimpleNamespace):
    """An event as `Inspector` has them."""


def inspector(path: Path = RECORDS / "executorch.json", factor: float = 1.0) -> Any:
    """Return what `Inspector` had, with the result of the normalization multiplied."""
    events = json.loads(path.read_text())
    for event in events:
        event["debug_data"] = [torch.tensor(values) for values in event["debug_data"]]
        if "native_layer_norm" in event["name"]:
            event["debug_data"][0] *= factor
    return types.SimpleNamespace(
        event_blocks=[types.SimpleNamespace(events=[Event(**event) for event in events])]
    )


def test_an_etdump_and_a_dump(tmp_path: Path) -> None:
    ours = dumped(tmp_path / "ours", 1e-5)
    save_inspected(inspector(), tmp_path / "device")
    found = compare(tmp_path / "device", ours)
    assert found.same, found.conclusion()
    assert {one.a.name for one in found.compared} == NAMES
    save_inspected(inspector(factor=0.9), tmp_path / "wrong")
    for a, b in ((tmp_path / "wrong", ours), (ours, tmp_path / "wrong")):
        first = compare(a, b).first
        assert first is not None
        assert {first.a.name, first.b.name} == {"norm", "norm/layer_norm"}
    with pytest.raises(ResultError, match="not empty"):
        save_inspected(inspector(), tmp_path / "wrong")
    with pytest.raises(ResultError, match="No event"):
        save_inspected(types.SimpleNamespace(event_blocks=[]), tmp_path / "none")


def test_an_etdump_needs_its_inspector(tmp_path: Path) -> None:
    (tmp_path / "run.etdp").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "run.etdp"):
        with pytest.raises(ResultError, match=r"save_inspected\(Inspector"):
            compare(path, path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sglang", "executorch", "tensor", "statistics"])
def test_the_programs_themselves(tmp_path: Path, kind: str) -> None:
    module = kind if kind in ("sglang", "executorch") else "msprobe"
    pytest.importorskip(module, reason=f"{module} is not installed")
    paths = []
    for name, epsilon in (("a", 1e-5), ("b", 1e-5), ("c", 0.1)):
        command = [RECORDS / "writing.py", kind, tmp_path / name, epsilon]
        subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
        paths.append(tmp_path / name)
        if kind == "executorch":
            save_inspected(inspector(paths[-1].with_suffix(".json")), paths[-1])
        else:
            unpacked(paths[-1].with_suffix(".zip"), paths[-1])
    assert compare(paths[0], paths[1]).same
    assert named(compare(paths[0], paths[2])) == "norm"


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


TENSORS: dict[str, torch.Tensor] = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8),
        *(torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
        *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    )},
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "part": torch.arange(24.0).reshape(4, 6)[1:3, ::2],
    "expanded": torch.arange(3.0).expand(2, 3),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_torch_save(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    a = saved(tensor, tmp_path / "x.pt")
    save_arrays({"x": tensor.contiguous()}, tmp_path / "b")
    found = compare(a, tmp_path / "b", rtol=0, atol=0)
    assert (found.same, found.complete, len(found.compared)) == (True, True, 1)
    assert found.compared[0].shapes == [list(tensor.shape)] * 2


def test_a_state_and_lists_of_torch_save(tmp_path: Path) -> None:
    network = writing.Network()
    value = {"model": network.state_dict(), "seen": [torch.ones(2), (torch.zeros(1), 3, "text")]}
    found = compare(saved(value, tmp_path / "x.pth"), tmp_path / "x.pth")
    names = [one.a.name for one in found.compared]
    assert names[0] == "model.up.weight"
    assert names[-2:] == ["seen.0", "seen.1.0"]
    assert found.same


class Evil:
    """Would write a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def archive(path: Path, content: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", content)
        for name, data in members.items():
            file.writestr(f"x/{name}", data)
    return path


def test_nothing_of_a_pickle_is_executed(tmp_path: Path) -> None:
    evil = saved({"x": torch.ones(1), "y": Evil(tmp_path / "touched")}, tmp_path / "evil.pt")
    with pytest.raises(ResultError, match=r"an object of .*, which is not read"):
        compare(evil, evil)
    assert not (tmp_path / "touched").exists()


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "text": b"text",
    "no end": b"\x80\x02]",
    "stack": b"\x80\x02a.",
    "memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "allocation": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "storage": b"\x80\x02(K\x01K\x02tQ.",
    "attribute": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "nested": b"\x80\x02" + b"]" * 99_999 + b"a" * 99_998 + b".",
    "laughs": b"\x80\x02]q\x00" + b"".join(
        b"(" + b"h" + bytes([n]) + (b"h" + bytes([n])) * 9 + b"lq" + bytes([n + 1])
        for n in range(12)
    ) + b".",
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pickles_are_named(tmp_path: Path, name: str) -> None:
    a = archive(tmp_path / "a.pt", MALFORMED[name])
    with pytest.raises(ResultError, match=r"no tensor in common; not read: .*a\.pt: "):
        compare(a, a)


def test_a_tensor_beyond_its_storage_is_named(tmp_path: Path) -> None:
    path = saved(torch.ones(100), tmp_path / "x.pt")
    with zipfile.ZipFile(path) as file:
        (name,) = (one for one in file.namelist() if one.endswith("data.pkl"))
        content = file.read(name)
    size = b"Kd\x85"  # The tuple of 100.
    assert size in content
    for other in (b"M\xff\x7f\x85", b"J\xff\xff\xff\xff\x85", b"J\xff\xff\xff\x7f\x85"):
        changed = content.replace(size, other)
        a = archive(tmp_path / "a.pt", changed, **{"data/0": b"\0" * 400})
        with pytest.raises(ResultError, match=r"not read"):
            compare(a, a)


def test_files_cut_anywhere_are_named(tmp_path: Path) -> None:
    whole = saved({"x": torch.ones(5), "y": torch.ones(3)}, tmp_path / "x.pt").read_bytes()
    np.savez(tmp_path / "y.npz", x=np.ones(5), y=np.ones(3))
    for path, content in (
        (tmp_path / "x.pt", whole),
        (tmp_path / "y.npz", (tmp_path / "y.npz").read_bytes()),
    ):
        for cut in range(0, len(content) - 1, max(len(content) // 100, 1)):
            path.write_bytes(content[:cut])
            with pytest.raises(ResultError, match="not read"):
                compare(path, path)


def test_archives_of_numpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, Any] = {"up": np.arange(6, dtype="float32").reshape(2, 3), "norm": np.ones(2)}
    np.savez(tmp_path / "a.npz", **values)
    values["norm"] = values["norm"] + 1
    np.savez_compressed(tmp_path / "b.npz", **{**values, "up": np.asfortranarray(values["up"])})
    found = compare(tmp_path / "a.npz", tmp_path / "b.npz")
    assert [(one.a.name, one.same) for one in found.compared] == [("up", True), ("norm", False)]
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(tmp_path / "a.npz"), str(tmp_path / "b.npz")])
    assert caught.value.code == 1
    assert "First: output 0 of op 'norm'" in capsys.readouterr().out
    content = io.BytesIO()
    np.save(content, np.array([{}], object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as file:
        file.writestr("x.npy", content.getvalue())
    with pytest.raises(ResultError, match="dtype object cannot be compared"):
        compare(tmp_path / "c.npz", tmp_path / "c.npz")


def test_arrays_of_a_program_are_executions(tmp_path: Path) -> None:
    values = {"relu": [np.zeros(2), np.ones(2)], "linear": torch.ones(3, dtype=torch.bfloat16)}
    save_arrays(values, tmp_path / "a")
    save_arrays({**values, "relu": [np.zeros(2), np.zeros(2)]}, tmp_path / "b")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [one.a.name for one in found.compared] == ["relu", "relu", "linear"]
    assert found.first is not None
    assert (found.first.a.name, found.first.execution) == ("relu", 1)


@pytest.mark.slow
def test_what_qdq_loss_debug_collects(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    quantization = pytest.importorskip("onnxruntime.quantization")
    debug = pytest.importorskip("onnxruntime.quantization.qdq_loss_debug")
    helper, numbers = onnx.helper, onnx.numpy_helper
    made = np.random.default_rng(0)
    weights = [
        numbers.from_array(made.normal(size=(8, 8)).astype("float32"), name) for name in ("v", "w")
    ]
    ends = [helper.make_tensor_value_info(name, 1, [4, 8]) for name in ("x", "y")]
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h"], "first"),
        helper.make_node("Sigmoid", ["h"], ["s"], "between"),
        helper.make_node("MatMul", ["s", "w"], ["y"], "second"),
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "float.onnx")
    inputs = made.normal(size=(2, 4, 8)).astype("float32")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.left = iter([{"x": one} for one in inputs])

        def get_next(self) -> Any:
            return next(self.left, None)

    quantization.quantize_static(
        str(tmp_path / "float.onnx"), str(tmp_path / "int8.onnx"), Reader()
    )
    for name in ("float", "int8"):
        model_path = str(tmp_path / f"{name}.onnx")
        debug.modify_model_output_intermediate_tensors(model_path, f"{model_path}.more")
        collected = debug.collect_activations(f"{model_path}.more", Reader())
        save_arrays(collected, tmp_path / name)
    found = compare(tmp_path / "float", tmp_path / "int8")
    assert {one.a.name for one in found.compared} >= {"h", "s", "y"}
    assert {one.execution for one in found.compared} == {0, 1}
    assert not found.same
    assert compare(tmp_path / "float", tmp_path / "int8", rtol=0.1, atol=1.0).same


def test_the_record_of_another_pickle_is_not_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ResultError, match=r"format of torch\.save before 1\.6"):
        compare(path, path)
    torch.save(torch.ones(2), path, _use_new_zipfile_serialization=False)
    with pytest.raises(ResultError, match=r"format of torch\.save before 1\.6"):
        compare(path, path)


def test_reading_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(torch.ones(2), tmp_path / "x.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert compare(path, path).same
