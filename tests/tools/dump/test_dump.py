"""The dump on PyTorch, compared with what PyTorch's own hooks see."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda_core.errors import ResultError
from amanda_core.results import HasResult, Result
from amanda_tools.dump import Dump, DumpedTensor, DumpResult
from amanda_tools.dump.files import Dumped, Form, load_dump
from amanda_tools.kit.tensors.values import numbers

forms = pytest.mark.parametrize("form", ["npz", "safetensors"])
ALL: Any = ["inputs", "weights", "outputs", "gradients"]


def dump(program: Any, where: Any = None, **options: Any) -> DumpResult:
    tool = Dump(**options)
    with amanda.apply(tool.where(where)):
        program()
    return tool.result()


def named(dumped: Dumped, **wanted: Any) -> list[tuple[DumpedTensor, Any]]:
    """Return the tensors with these attributes, of their own or their operator's."""
    found = []
    for tensor in dumped.index.tensors:
        facts = vars(dumped.index.ops[tensor.op]) | vars(tensor)
        if all(facts[name] == value for name, value in wanted.items()):
            found.append((tensor, dumped.read(tensor).array))
    return found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


@forms
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # At the first layer.
def test_a_dump_is_what_hooks_see(form: Form, tmp_path: Path) -> None:
    model = network()
    seen: dict[tuple[str, str], list[Any]] = {}

    def see(name: str, what: str, value: Any) -> None:
        if value is not None:
            seen.setdefault((name, what), []).append(value.detach().clone().numpy())

    def forward(name: str, given: Any, made: Any) -> None:
        see(name, "input", given[0])
        see(name, "output", made)

    def backward(name: str, made: Any, given: Any) -> None:
        see(name, "grad_output", given[0])
        see(name, "grad_input", made[0])

    for name, layer in model.named_children():
        hooked: Any = layer
        hooked.register_forward_hook(lambda _, x, y, name=name: forward(name, x, y))
        hooked.register_full_backward_hook(lambda _, x, y, name=name: backward(name, x, y))
    # The sum of parameters' gradients is seen by hooks of theirs.
    for name, parameter in model.named_parameters():
        leaf: Any = parameter
        leaf.register_hook(lambda gradient, name=name: see(name, "grad", gradient))

    def program() -> None:
        for seed in range(2):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
            amanda.step()

    found = dump(program, values=ALL, form=form)
    found.write(tmp_path)
    read = load_dump(tmp_path)
    words = ["conv2d", "batch_norm", "tanh", "max_pool2d", "reshape", "linear"]
    compared = 0
    for (name, what), values in seen.items():
        if what == "grad":
            continue
        wanted = {"module": name, "word": words[int(name)], "what": what, "position": "0"}
        taken = named(read, **wanted)
        assert [tensor.step for tensor, _ in taken] == [0, 1]
        for (tensor, array), expected in zip(taken, values, strict=True):
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected), (name, what, tensor)
            compared += 1
    assert compared == 2 * (6 + 6 + 6 + 5)
    for name, parameter in model.named_parameters():
        module, _, own = name.partition(".")
        taken = named(read, module=module, what="weight", name=own)
        assert [np.array_equal(array, parameter.detach()) for _, array in taken] == [True] * 2
        taken = named(read, module=module, what="grad_input", name=own)
        for (_, array), gradient in zip(taken, seen[name, "grad"], strict=True):
            assert np.array_equal(array, gradient)


def test_inputs_are_those_before_an_operator_wrote_them() -> None:
    x = torch.tensor([-1.0, 2.0])
    read = dump(lambda: x.mul_(3).relu_(), values=["inputs", "outputs"]).open()
    values = [array.tolist() for _, array in named(read)]
    assert values == [[-1, 2], [-3, 6], [-3, 6], [0, 6]]


def test_inputs_that_are_not_always_there() -> None:
    def program() -> None:
        for bias in (None, torch.ones(2)):
            nn.functional.layer_norm(torch.arange(2.0), (2,), bias=bias)

    read = dump(program, values=["weights"]).open()
    assert [array.tolist() for _, array in named(read, type="layer_norm", name="bias")] == [[1, 1]]


#: dtype -> what is stored in an npz and in safetensors.
DTYPES = {
    torch.float64: ("float64", "float64"),
    torch.float16: ("float16", "float16"),
    torch.bfloat16: ("uint16", "uint16"),
    torch.float8_e4m3fn: ("uint8", "uint8"),
    torch.float8_e5m2: ("uint8", "uint8"),
    torch.float8_e4m3fnuz: ("uint8", "uint8"),
    torch.float8_e5m2fnuz: ("uint8", "uint8"),
    torch.int8: ("int8", "int8"),
    torch.int64: ("int64", "int64"),
    torch.uint8: ("uint8", "uint8"),
    torch.bool: ("bool", "bool"),
    torch.complex64: ("complex64", "complex64"),
    torch.complex128: ("complex128", "float64"),
}


@forms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, form: Form) -> None:
    x = torch.tensor([[0.0, 1.5], [-2.0, 200.0]])
    if dtype.is_complex:
        x = torch.complex(x, -x)
    x = (x > 0 if dtype == torch.bool else x.abs() if dtype == torch.uint8 else x).to(dtype)
    read = dump(lambda: x.t(), form=form).open()
    (tensor,) = read.index.tensors
    assert tensor.dtype == str(dtype).removeprefix("torch.")
    assert tensor.stored == DTYPES[dtype][form == "safetensors"]
    assert tensor.shape == [2, 2]
    values = read.read(tensor)
    expected = x.t()
    if values.array.dtype.name != tensor.dtype:
        assert np.array_equal(
            numbers(values.array, values.dtype), expected.float().numpy(), equal_nan=True
        )
    else:
        assert np.array_equal(values.array, expected.numpy())


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 1 and d.is_floating_point])
def test_every_code_of_8_bit_floating_point(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = numbers(codes.numpy(), str(dtype).removeprefix("torch."))
    assert np.array_equal(found, codes.view(dtype).float().numpy(), equal_nan=True)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_shapes_without_elements_and_without_axes(dtype: torch.dtype, form: Form) -> None:
    def program() -> None:
        torch.zeros(0, 3, dtype=dtype).t()
        torch.tensor(2.5, dtype=dtype)

    arrays = [array for _, array in named(dump(program, form=form).open())]
    assert [a.shape for a in arrays] == [(0, 3), (3, 0), ()]
    assert arrays[2] == 2.5


def test_what_cannot_be_read_is_named() -> None:
    read = dump(lambda: torch.eye(2).to_sparse())
    (left,) = read.index.left_out
    assert (left.reason, left.first, left.tensors) == ("a sparse tensor", "to_sparse", 1)
    assert "left out: 1 (a sparse tensor)" in read.title


def test_figures() -> None:
    x = torch.tensor([0.0, 1.0, -3.0, float("nan"), float("inf")])
    found = dump(lambda: x * 2, values=["inputs"], stats=True, bins=4)
    assert found.files == []
    (tensor,) = found.index.tensors
    figures = tensor.statistics
    assert figures is not None
    assert (figures.count, figures.nan, figures.inf, figures.zeros) == (5, 1, 1, 1)
    finite = np.asarray([0, 1, -3], np.float64)
    assert (figures.min, figures.max) == (-3, 1)
    assert figures.mean == pytest.approx(finite.mean())
    assert figures.std == pytest.approx(finite.std())
    assert figures.norm == pytest.approx(np.linalg.norm(finite))
    assert figures.histogram == np.histogram(finite, 4)[0].tolist()
    json.loads(found.to_json(), parse_constant=pytest.fail)
    with pytest.raises(ResultError, match="only its figures"):
        found.open().read(tensor)


def test_selection_steps_and_first_executions() -> None:
    def program() -> None:
        for _ in range(4):
            for _ in range(2):
                torch.relu(torch.tensor([1.0]))
            amanda.step()

    only = amanda.select(op="relu")
    found = dump(program, only, steps=[1, 3])
    assert [(t.step, t.execution) for t in found.index.tensors] == [(1, 2), (1, 3), (3, 6), (3, 7)]
    found = dump(program, only, first=3)
    assert [(t.step, t.execution) for t in found.index.tensors] == [(0, 0), (0, 1), (1, 2)]
    assert found.index.ops[0].calls == 8


def test_the_last_steps() -> None:
    steps = []

    def program() -> None:
        for step in range(6):
            steps.append(step)
            torch.relu(torch.full((1,), float(step)))
            if step == 5:
                raise KeyError(step)
            amanda.step()

    tool = Dump(last=2).where(amanda.select(op="relu"))
    with pytest.raises(KeyError), amanda.apply(tool):
        program()
    read = tool.result().open()
    assert [(t.step, array.tolist()) for t, array in named(read)] == [(4, [4]), (5, [5])]


def test_limits() -> None:
    def program() -> None:
        for _ in range(10):
            torch.relu(torch.ones(100))

    only = amanda.select(op="relu")
    found = dump(program, only, max_bytes=1000)
    assert len(found.index.tensors) == 2
    (left,) = found.index.left_out
    assert (left.reason, left.tensors, left.bytes) == ("more than 1000 bytes", 8, 3200)
    found = dump(program, only, max_files=0)
    assert [left.reason for left in found.index.left_out] == ["more than 0 files"]
    # In memory, steps that went make room.

    def steps() -> None:
        for _ in range(10):
            torch.relu(torch.ones(100))
            amanda.step()

    found = dump(steps, only, max_bytes=1000, last=2)
    assert ([t.step for t in found.index.tensors], found.index.left_out) == ([8, 9], [])
    found = dump(steps, only, max_bytes=100, last=2)
    assert (found.index.tensors, found.index.left_out[0].tensors) == ([], 10)


@forms
def test_names_lead_nowhere(form: Form, tmp_path: Path) -> None:
    model: Any = nn.Module()
    layers = {name: nn.Linear(1, 1) for name in ("a/../../b", "\x1b[31m", "con\n", "..", "ü" * 300)}
    for name, layer in layers.items():
        if "." not in name:
            model.add_module(name, layer)
        model._modules[name] = layer
    model.forward = lambda x: [layer(x) for layer in layers.values()]
    folder = tmp_path / "inside" / "dump"
    found = dump(lambda: model(torch.ones(1, 1)), form=form)
    found.write(folder)
    assert {p.name for p in tmp_path.rglob("*")} == {
        "inside",
        "dump",
        "index.json",
        f"00000.{form}",
    }
    read = load_dump(folder)
    assert len(named(read, type="linear")) == 5
    keys = [tensor.key or "" for tensor in read.index.tensors]
    assert len(set(keys)) == len(keys)
    assert all(key.isascii() and "/" not in key and len(key) < 150 for key in keys)


def test_a_folder_is_of_one_dump(tmp_path: Path) -> None:
    first = Dump(folder=tmp_path / "dump")
    with pytest.raises(ValueError, match="folder must not be in use, but another run writes to"):
        Dump(folder=tmp_path / "dump")
    del first
    gc.collect()
    # Files without an index are of a run that was killed.
    (tmp_path / "dump/00000.npz").write_bytes(b"")
    with pytest.raises(ValueError, match="folder must have no dump yet"):
        Dump(folder=tmp_path / "dump")


def test_a_full_disk_does_not_end_the_program_and_is_a_problem(tmp_path: Path) -> None:
    tool = Dump(folder=tmp_path / "dump")
    tool._writer.part = 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with amanda.apply(tool):
        torch.relu(torch.ones(2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            torch.relu(torch.ones(1 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        torch.relu(torch.ones(3))
    result = tool.result()
    assert result.problems == ["4 tensors could not be written: File too large"]
    assert "left out: 4 (could not be written: File too large, 8.389 MB)" in result.title
    found = load_dump(tmp_path / "dump")
    assert [found.read(t).array.tolist() for t in found.index.tensors] == [[1, 1]] * 2
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == [
        *(".amanda-run", "00000.npz", "00001.npz", "index.json")
    ]


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    tool = Dump(folder=tmp_path / "dump")
    with amanda.apply(tool):
        torch.relu(torch.ones(2))
    result = tool.result()
    assert result.write(tmp_path / "other") == []
    assert named(load_dump(tmp_path / "dump"), type="relu")[0][1].tolist() == [1, 1]
    with pytest.raises(ValueError, match="folder must have no dump yet"):
        Dump(folder=tmp_path / "dump")


def test_an_error_that_ends_the_program_leaves_a_dump(tmp_path: Path) -> None:
    program = f"""
import pathlib, torch, amanda
from amanda_tools.dump import Dump
amanda.attach(Dump(last=1, folder=pathlib.Path({str(tmp_path / "dump")!r})))
for step in range(3):
    torch.relu(torch.full((1,), float(step)))
    1 / (2 - step)
    amanda.step()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ZeroDivisionError" in done.stderr
    read = load_dump(tmp_path / "dump")
    assert [(t.step, array.tolist()) for t, array in named(read, type="relu")] == [(2, [2])]


def test_forms_of_the_result() -> None:
    tool = Dump()
    assert isinstance(tool, HasResult)
    with amanda.apply(tool):
        torch.relu(torch.ones(2))
    found = tool.result()
    assert isinstance(found, Result)
    assert json.loads(found.to_json())["format"] == "amanda.dump/1"
    assert found.table().rows[-1][:4] == ("relu", "output 0", "float32[2]", 1)
    assert "<table>" in found._repr_html_()


@pytest.mark.parametrize(
    ("option", "value"), [("values", ["all"]), ("form", "zip"), ("last", -1), ("max_bytes", -1)]
)
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must"):
        Dump(**{option: value})
