"""Comparison of runs on PyTorch: a planted change is found where it was planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda_core.cli import main
from amanda_core.errors import ResultError
from amanda_core.results import Result
from amanda_tools.diff import DiffResult, compare
from amanda_tools.diff.numbers import Tolerance
from amanda_tools.dump import Dump, Dumped

ALL: Any = ["inputs", "weights", "outputs", "gradients"]


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 5),
    )


def train(model: nn.Module, steps: int = 2) -> None:
    dtype = next(model.parameters()).dtype
    for seed in range(steps):
        # Numbers that all dtypes have.
        x = torch.randint(-4, 5, (2, 3, 8, 8), generator=torch.Generator().manual_seed(seed))
        model(x.to(dtype)).square().sum().backward()
        amanda.step()


def both(*programs: Callable[[], Any], **options: Any) -> tuple[Dumped, Dumped]:
    one, other = (dump(program, **options) for program in programs)
    return one, other


def dump(program: Callable[[], Any], **options: Any) -> Dumped:
    tool = Dump(**{"values": ALL} | options)
    with amanda.apply(tool):
        program()
    return tool.result().open()


def test_identical_runs_are_equal_bit_for_bit() -> None:
    found = compare(*both(*[lambda: train(network())] * 2), rtol=0, atol=0)
    assert found.same
    assert found.first is None
    assert all(one.difference is not None and one.difference.equal for one in found.compared)
    assert len(found.compared) > 100
    assert (found.unmatched_a, found.unmatched_b, found.alone) == ([], [], 0)
    assert isinstance(found, Result)
    assert json.loads(found.to_json())["format"] == "amanda.diff/1"
    assert found.table().rows == []
    assert len(found.table(everything=True).rows) == len(found.compared)


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("values", [ALL, ["outputs"]])
@pytest.mark.parametrize("layer", ["0", "1", "4", "6", "7", "8"])
def test_a_changed_weight_is_named(layer: str, values: Any, stats: bool) -> None:
    changed: Any = network()
    with torch.no_grad():
        changed.get_submodule(layer).weight.view(-1)[1] += 0.25
    plain = network()
    found = compare(*both(lambda: train(plain), lambda: train(changed), values=values, stats=stats))
    first = found.first
    assert first is not None
    assert first.a.module == layer
    assert first.a.source is not None
    assert first.what == ("weight" if values is ALL else "output")
    assert first.step == 0
    if values is ALL:
        output = next(o for o in found.compared if o.what == "output" and not o.same)
        assert output.a.module == layer
        assert output.inputs_agree is False  # The weight.
        if not stats:
            assert first.difference is not None
            assert first.difference.max_abs == pytest.approx(0.25)
            assert first.difference.beyond == 1
            assert first.difference.first is not None
            weight = changed.get_submodule(layer).weight
            assert np.ravel_multi_index(first.difference.first, weight.shape) == 1
    else:
        assert first.inputs_agree is None


def test_dropout_of_another_seed_is_named() -> None:
    def program(seed: int) -> None:
        model = network(dropout=0.5)
        torch.manual_seed(seed)
        train(model, 1)

    found = compare(*both(lambda: program(1), lambda: program(2)))
    first = found.first
    assert first is not None
    assert (first.a.word, first.what, first.inputs_agree) == ("dropout", "output", True)
    assert "its inputs agreed" in str(first)


def test_float32_and_bfloat16() -> None:
    plain, small = network(), network().to(torch.bfloat16)
    one, other = both(lambda: train(plain, 1), lambda: train(small, 1), values=["outputs"])
    assert compare(one, other, rtol=0.5, atol=0.1).same
    found = compare(one, other, rtol=1e-5, atol=1e-6)
    first = found.first
    assert first is not None
    assert (first.a.word, first.a.module) == ("conv2d", "0")
    assert first.difference is not None
    assert first.difference.cosine == pytest.approx(1, abs=1e-4)


def test_an_operator_that_only_one_run_has() -> None:
    one = dump(lambda: torch.relu(torch.ones(2)))
    other = dump(lambda: torch.relu(torch.ones(2)).exp())
    found = compare(one, other)
    assert found.same
    assert [op.type for op in found.unmatched_b] == ["exp"]
    assert compare(other, one).unmatched_a == found.unmatched_b
    assert not found.complete
    longer = dump(lambda: [torch.relu(torch.ones(2)) for _ in range(2)])
    with pytest.raises(ResultError, match="no tensor in common"):
        compare(one, dump(lambda: torch.tanh(torch.zeros(3))))
    assert compare(longer, longer).same


def test_shapes_that_do_not_fit() -> None:
    found = compare(*both(lambda: torch.relu(torch.ones(2)), lambda: torch.relu(torch.ones(3))))
    assert found.first is not None
    assert found.first.difference is None
    assert "shapes [2] and [3]" in str(found.first)


# Measures.


def test_tolerances_are_those_of_pytorch() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        relative, absolute = Tolerance().of(name, name)
        x = torch.tensor([1.0], dtype=torch.float64)
        torch.testing.assert_close(
            (x + relative).to(dtype), x.to(dtype), rtol=relative, atol=absolute
        )
        with pytest.raises(AssertionError, match=f"up to {relative}"):
            torch.testing.assert_close((x * 3).to(dtype), x.to(dtype))
    assert Tolerance().of("float32", "bfloat16") == Tolerance().of("bfloat16")
    assert Tolerance().of("int64", "bool") == (0, 0)
    assert Tolerance(relative=0.5).of("float32") == (0.5, 1e-5)


# The command.


def amanda_diff(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["diff", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def dumps(tmp_path: Path) -> list[Path]:
    found = []
    for number, value in enumerate((1.0, 1.0, 2.0)):
        tool = Dump()
        with amanda.apply(tool):
            torch.relu(torch.full((2,), value))
        tool.result().write(tmp_path / str(number))
        found.append(tmp_path / str(number))
    return found


def test_the_command(dumps: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = dumps
    assert amanda_diff(one, same) == 0
    assert "No difference." in capsys.readouterr().out
    assert amanda_diff(one, other) == 1
    said = capsys.readouterr().out
    assert "First: output 0 of op 'full'" in said
    assert "2 of 2 beyond the tolerance, the first at [0]: 1 and 2" in said
    assert amanda_diff(one, other, "--atol", 1) == 0
    capsys.readouterr()
    assert amanda_diff(one, other, "--json") == 1
    read = json.loads(capsys.readouterr().out)
    assert (read["format"], read["same"]) == ("amanda.diff/1", False)
    assert read["first"]["difference"]["max_abs"] == 1
    assert amanda_diff(one, same, "--all") == 0
    assert "relu" in capsys.readouterr().out


def crashed(at: int, folder: Path) -> Path:
    """Write a dump of a run of two steps of four layers that ends after this many of them."""
    layers = network_of(4)
    tool = Dump()
    with amanda.apply(tool):
        x = torch.ones(2, 2)
        for number in range(at):
            x = layers[number % 4](x)
            if number == 3:
                amanda.step()
    tool.result().write(folder)
    return folder


def network_of(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])


@pytest.mark.parametrize("at", [2, 4, 6])
def test_a_crashed_run_is_not_without_difference(
    at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = crashed(8, tmp_path / "a"), crashed(at, tmp_path / "b")
    for pair, more in (((whole, part), "A"), ((part, whole), "B")):
        assert amanda_diff(*pair) == 3
        said = capsys.readouterr().out
        assert "No difference" not in said
        what = {
            2: "op 'Linear#3:linear'",
            4: "output 0 of op 'linear', step 1",
            6: "output 0 of op 'Linear#3:linear', step 1",
        }[at]
        assert f"but one has more: the first that only {more} has is {what}" in said
        assert amanda_diff(*pair, "--json") == 3
        assert json.loads(capsys.readouterr().out)["complete"] is False


def test_mistakes(dumps: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").mkdir()
    for arguments in ([dumps[0]], [dumps[0], tmp_path / "nowhere"], [dumps[0], tmp_path / "none"]):
        assert amanda_diff(*arguments) == 2
    assert amanda_diff(dumps[0], dumps[1], "--rtol", -1) == 2
    assert "rtol must not be negative" in capsys.readouterr().err


def test_of_a_result_without_files() -> None:
    one = dump(lambda: torch.relu(torch.ones(2)), stats=True)
    other = dump(lambda: torch.relu(torch.ones(2)))
    found: DiffResult = compare(one, other)
    assert found.same
