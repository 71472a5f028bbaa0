"""`amanda diff` of folders of arrays that other programs wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import amanda
from amanda_core.cli import main
from amanda_core.errors import ResultError
from amanda_tools.diff import compare
from amanda_tools.dump import Dump, Dumped


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught:
        main(["diff", *map(str, arguments)])
    read = capsys.readouterr()
    return caught.value.code, read.out + read.err


def arrays(folder: Path, **values: Any) -> Path:
    folder.mkdir()
    for name, value in values.items():
        np.save(folder / f"{name}.npy", np.asarray(value))
    return folder


def test_the_first_array_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {f"layer{n}": np.full((2, 3), n, "float32") for n in range(12)}
    a = arrays(tmp_path / "a", **rows)
    rows["layer2"][0, 1] += 0.5
    rows["layer10"][1, 1] += 2
    b = arrays(tmp_path / "b", **rows)
    assert diff(capsys, a, a)[0] == 0
    status, text = diff(capsys, a, b)
    assert status == 1
    # Numbers count as numbers: layer10 comes after layer2.
    assert "First: output 0 of op 'layer2'" in text
    assert "max abs 0.5" in text
    found = json.loads(diff(capsys, a, b, "--json")[1])
    assert [one["a"]["name"] for one in found["compared"]] == [f"layer{n}" for n in range(12)]
    assert found["first"]["difference"]["first"] == [0, 1]
    assert diff(capsys, a, b, "--atol", 3, "--rtol", 0)[0] == 0


def test_other_releases_may_round_otherwise(tmp_path: Path) -> None:
    a = arrays(tmp_path / "a", x=np.array([1, 2], "float32"))
    b = arrays(tmp_path / "b", x=np.nextafter(np.array([1, 2], "float32"), np.float32(3)))
    found = compare(a, b)
    assert found.same
    assert found.compared[0].difference is not None
    assert found.compared[0].difference.ulp == 1
    assert not compare(a, b, rtol=0, atol=0).same


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e5m2", "int64"])
def test_safetensors(tmp_path: Path, dtype: str) -> None:
    values = torch.tensor([[1.0, -2.0, 4.0]]).to(getattr(torch, dtype))
    folders = []
    for name, weight in (("a", 1), ("b", 2)):
        folder = tmp_path / name
        folder.mkdir()
        wrong = (values.float() * weight).to(values.dtype)
        parts = {"x": values, "y": wrong, "empty": values[:0]}
        safetensors.torch.save_file(parts, folder / "all.safetensors", {"format": "pt"})
        folders.append(folder)
    found = compare(folders[0], folders[1])
    assert [(one.a.name, one.same) for one in found.compared] == [
        ("empty", True),
        ("x", True),
        ("y", False),
    ]
    assert found.compared[1].dtypes[0].startswith(dtype)
    assert found.first is not None
    assert found.first.difference is not None
    assert found.first.difference.max_abs == 4.0


def test_both_kinds_of_files_hold_the_same(tmp_path: Path) -> None:
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    a = arrays(tmp_path / "a", x=np.asfortranarray(x))
    b = tmp_path / "b"
    b.mkdir()
    safetensors.torch.save_file(
        {"x": torch.arange(6, dtype=torch.float32).reshape(2, 3)}, b / "one.safetensors"
    )
    found = compare(a, b, rtol=0, atol=0)
    assert (found.same, found.complete, len(found.compared)) == (True, True, 1)


def test_a_key_of_several_files_is_named_by_its_file(tmp_path: Path) -> None:
    for name in ("first", "second"):
        safetensors.torch.save_file({"data": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    found = compare(tmp_path, tmp_path)
    assert [one.a.name for one in found.compared] == ["first.data", "second.data"]


def as_csv(rows: list[dict[str, str]]) -> str:
    return "\n".join(["file,name,type", *(",".join(row.values()) for row in rows)])


@pytest.mark.parametrize(("file", "write"), [("names.json", json.dumps), ("names.csv", as_csv)])
def test_a_table_names_and_orders_files(
    tmp_path: Path, file: str, write: Callable[[Any], str]
) -> None:
    a = arrays(tmp_path / "a", z=[1.0], y=[2.0], x=[3.0])
    b = arrays(tmp_path / "b", out=[1.0], mid=[2.5], x=[3.0])
    for folder, names in ((a, ("z", "y")), (b, ("out", "mid"))):
        rows = [
            {"file": f"{name}.npy", "name": one, "type": ""}
            for name, one in zip(names, ("embed", "layer"), strict=True)
        ]
        (folder / file).write_text(write(rows))
    found = compare(a, b)
    assert [one.a.name for one in found.compared] == ["embed", "layer", "x"]
    assert found.first is not None
    assert found.first.a.name == "layer"


def test_files_of_one_name_are_executions(tmp_path: Path) -> None:
    a = arrays(tmp_path / "a", first=[1.0], second=[2.0])
    b = arrays(tmp_path / "b", first=[1.0], second=[3.0])
    for folder in (a, b):
        (folder / "names.csv").write_text("file,name\nfirst.npy,x\nsecond.npy,x\n")
    first = compare(a, b).first
    assert first is not None
    assert (first.a.name, first.execution) == ("x", 1)


def test_what_has_no_counterpart_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = arrays(tmp_path / "a", x=[1.0], y=[2.0], w=[0.0], v=[0.0])
    b = arrays(tmp_path / "b", x=[1.0], z=[2.0], s=[0.0], t=[0.0])
    status, text = diff(capsys, a, b)
    assert status == 2
    assert "Only in A: v, w, y" in text
    assert "Only in B: s, t, z" in text


BROKEN: dict[str, bytes] = {
    "text.npy": b"not an array",
    "short.npy": b"\x93NUMPY\x01\x00",
    "short.safetensors": b"\xff\x00",
    "long.safetensors": (1 << 40).to_bytes(8, "little") + b"{}",
    "list.safetensors": (2).to_bytes(8, "little") + b"[]",
    "bare.safetensors": (8).to_bytes(8, "little") + b'{"x":{}}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    a, b = (arrays(tmp_path / one, x=[1.0]) for one in "ab")
    (b / name).write_bytes(BROKEN[name])
    status, text = diff(capsys, a, b)
    assert status == 2
    assert f"Not read: {b / name}: " in text
    assert "The 1 tensor that could be read" in text
    assert json.loads(diff(capsys, a, b, "--json")[1])["complete"] is False


def test_objects_and_cut_files_are_not_read(tmp_path: Path) -> None:
    a = arrays(tmp_path / "a", x=[1.0])
    np.save(a / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.save(a / "cut.npy", np.zeros(1 << 16))
    (a / "cut.npy").write_bytes((a / "cut.npy").read_bytes()[:1000])
    np.save(a / "text.npy", np.array(["a"]))
    safetensors.torch.save_file({"x": torch.ones(9)}, a / "cut.safetensors")
    (a / "cut.safetensors").write_bytes((a / "cut.safetensors").read_bytes()[:-1])
    unread = compare(a, a).unread
    names = [Path(text.partition(": ")[0]).name for text in unread]
    assert names == ["cut.npy", "cut.safetensors", "objects.npy", "text.npy"] * 2


def test_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = arrays(tmp_path / "a", x=[1.0]), arrays(tmp_path / "b", y=[1.0])
    status, text = diff(capsys, a, b)
    assert status == 2
    assert "no tensor in common" in text
    assert "names.json or names.csv" in text


@pytest.mark.parametrize(
    "text", ["[{}]", "[1]", "3", '[{"file": "x.npy", "name": 3}]', "{", '{"file": "x.npy"}']
)
def test_a_malformed_table(tmp_path: Path, text: str) -> None:
    a = arrays(tmp_path / "a", x=[1.0])
    (a / "names.json").write_text(text)
    with pytest.raises(ResultError, match=r"names\.json"):
        compare(a, a)


def test_a_table_that_names_no_file(tmp_path: Path) -> None:
    a = arrays(tmp_path / "a", x=[1.0])
    (a / "names.csv").write_text("file,name\ngone.npy,y\n")
    assert compare(a, a).unread[0] == f"{a / 'gone.npy'}: it is in the table of names only"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.down = nn.Sequential(nn.GELU(), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.norm(self.up(x)))
        return result


def recorded(folder: Path, epsilon: float, types: bool = False) -> tuple[Path, Dumped]:
    """Write what hooks see of a network, and dump one with another epsilon."""
    torch.manual_seed(0)
    network, seen = Network(), dict[str, torch.Tensor]()
    x = torch.randn(3, 4)
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out}))
        for name, module in network.named_modules()
        if name in ("up", "norm", "down.0", "down.1")
    ]
    network(x)
    for hook in hooks:
        hook.remove()
    values = {name: one.detach().numpy() for name, one in seen.items()}
    if not types:
        arrays(folder, **values)
    else:
        words = ("linear", "layer_norm", "gelu", "linear")
        arrays(folder, **{f"n{n}": value for n, value in enumerate(values.values())})
        rows = [{"file": f"n{n}.npy", "name": f"n{n}", "type": w} for n, w in enumerate(words)]
        (folder / "names.json").write_text(json.dumps(rows))
    network.norm.eps = epsilon
    tool = Dump()
    with amanda.apply(tool):
        network(x)
    return folder, tool.result().open()


@pytest.mark.parametrize("types", [False, True])
def test_modules_of_a_dump(tmp_path: Path, types: bool) -> None:
    folder, dumped = recorded(tmp_path / "same", 1e-5, types)
    for found in (compare(folder, dumped), compare(dumped, folder)):
        assert found.same
        assert len(found.compared) == 4
        assert (found.unmatched_a, found.unmatched_b) == ([], [])
    folder, dumped = recorded(tmp_path / "other", 0.1, types)
    first = compare(dumped, folder).first
    assert first is not None
    assert (first.a.word, first.b.name) == ("layer_norm", "n1" if types else "norm")
    first = compare(folder, dumped).first
    assert first is not None
    assert first.b.module == "norm"
