"""Dumps from untrusted sources: a malformed or hostile one raises an error that says so."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from amanda_core.errors import ResultError
from amanda_tools.dump.files import Form, Writer, load_dump
from amanda_tools.dump.index import INDEX, DumpedOp, DumpedTensor, DumpIndex
from amanda_tools.kit.tensors.values import HostTensor

forms = pytest.mark.parametrize("form", ["npz", "safetensors"])


def write(folder: Path, form: Form = "npz") -> dict[str, Any]:
    """Write a dump of one tensor and return its index."""
    op = DumpedOp(1, "relu", "relu", "relu", "", None, "toy/1/eager", [], [], None, None, 1)
    tensor = DumpedTensor(0, 0, 0, "output", "0", "", "float32", [2])
    writer = Writer(folder, form, 9)
    writer.add(tensor, HostTensor(np.asarray([1, 2], np.float32), "float32"), "relu")
    writer.flush()
    index = DumpIndex([op], [tensor])
    (folder / INDEX).write_text(index.to_json())
    read: dict[str, Any] = json.loads(index.to_json())
    return read


def read(folder: Path) -> Any:
    dumped = load_dump(folder)
    return [dumped.read(tensor).array.tolist() for tensor in dumped.index.tensors]


@forms
def test_there_and_back(form: Form, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    write(folder, form)
    # As `amanda run` has it: the index beside the folder as well.
    (tmp_path / "dump.json").write_text((folder / INDEX).read_text())
    for path in (folder, folder / INDEX, tmp_path / "dump.json", tmp_path):
        assert read(path) == [[1, 2]]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.data())
def test_any_change_of_an_index_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "dump"
    if not folder.exists():
        write(folder)
        (tmp_path / "index").write_text((folder / INDEX).read_text())
    index = json.loads((tmp_path / "index").read_text())
    holder: Any = index
    while True:
        key = data.draw(
            st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
        )
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        holder = inner
    holder[key] = data.draw(json_values)
    (folder / INDEX).write_text(json.dumps(index))
    with contextlib.suppress(ResultError):
        read(folder)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / INDEX).write_bytes(content)
        with pytest.raises(ResultError):
            load_dump(Path(name))


@forms
@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
@example(place=0.09765625, byte=1, cut=False)  # zipfile says so with an EOFError
def test_any_change_of_a_file_is_read_or_refused(
    form: Form, tmp_path: Path, place: float, byte: int, cut: bool
) -> None:
    folder = tmp_path / "dump"
    kept = tmp_path / "kept"
    if not kept.exists():
        write(folder, form)
        kept.write_bytes((folder / f"00000.{form}").read_bytes())
    content = bytearray(kept.read_bytes())
    at = int(place * len(content))
    content[at] = byte
    (folder / f"00000.{form}").write_bytes(content[:at] if cut else content)
    with contextlib.suppress(ResultError):
        assert [len(values) for values in read(folder)] == [2]


@pytest.mark.parametrize(
    "name", ["../secret.npz", "/etc/passwd", "a/b.npz", "..", ".hidden", "", "a\0b", "x" * 300]
)
def test_a_file_lies_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "dump"
    index = write(folder)
    (tmp_path / "secret.npz").write_bytes((folder / "00000.npz").read_bytes())
    index["tensors"][0]["file"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ResultError, match="'file' of tensors"):
        read(folder)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    write(folder)
    (folder / "00000.npz").rename(tmp_path / "other.npz")
    (folder / "00000.npz").symlink_to(tmp_path / "other.npz")
    with pytest.raises(ResultError, match="is not a file"):
        read(folder)


def test_sizes_are_known_before_there_is_memory_for_them(tmp_path: Path) -> None:
    index = write(tmp_path)
    index["tensors"][0]["shape"] = [1 << 40]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ResultError, match=r"it is float32\[2\], but the index says"):
        read(tmp_path)
    index["tensors"][0]["shape"] = [1 << 60]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ResultError, match="'shape' of tensors"):
        read(tmp_path)


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    index = write(tmp_path)
    key = index["tensors"][0]["key"]
    with (tmp_path / "00000.npz").open("wb") as file:
        arrays: Any = {key: np.asarray([{}, {}], object)}
        np.savez(file, **arrays)
    index["tensors"][0]["stored"] = "object"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ResultError, match="are not numbers"):
        read(tmp_path)


def test_no_dump(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="Cannot be read"):
        load_dump(tmp_path)
    (tmp_path / INDEX).write_text('{"format": "amanda.trace/1"}')
    with pytest.raises(ResultError, match=r"its format is 'amanda.trace/1'"):
        load_dump(tmp_path)


def test_nothing_is_replaced(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / "00000.npz").read_bytes()
    tensor = DumpedTensor(0, 0, 0, "output", "0", "", "float32", [2])
    writer = Writer(tmp_path, "npz", 9)
    writer.add(tensor, HostTensor(np.asarray([3, 4], np.float32), "float32"), "relu")
    writer.flush()
    assert (tmp_path / "00000.npz").read_bytes() == before
    assert writer.lost is not None
    assert (writer.lost.reason, tensor.file) == (
        "could not be written: 00000.npz is there already",
        None,
    )


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        ("numpy", "dump.Dump()"),
        ("numpy", "nonfinite.NonFinite()"),
        ("numpy", "diff.compare('a', 'b')"),
        ("safetensors", "dump.Dump(form='safetensors')"),
    ],
)
def test_what_is_not_installed_is_named_before_a_program_runs(missing: str, call: str) -> None:
    # The modules themselves need neither.
    start = f"import sys; sys.modules[{missing!r}] = None\n"
    modules = "from amanda_tools import diff, dump, nonfinite\n"
    done = subprocess.run(
        [sys.executable, "-c", start + modules + call], capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    # A command that works from a checkout as well, where no index has amanda-tools.
    command = last.partition(": pip install ")[2]
    assert missing in command
    assert "amanda" not in command


@forms
def test_what_is_large_is_written_at_once(form: Form, tmp_path: Path) -> None:
    writer = Writer(tmp_path, form, 9, part=16)
    tensors = [
        DumpedTensor(step, 0, 0, "output", "0", "", "float32", [size])
        for step, size in enumerate([2, 2, 8, 1])
    ]
    for tensor in tensors:
        values = np.zeros(tensor.shape, np.float32)
        writer.add(tensor, HostTensor(values, "float32"), "relu")
    assert [tensor.file for tensor in tensors] == [
        f"{number:05d}.{form}" for number in (0, 0, 1, 2)
    ]
    assert writer.written == [f"00000.{form}", f"00001.{form}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == writer.written
