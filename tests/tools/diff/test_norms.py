"""Fingerprints with norms: which operator makes an error where precisions or modes differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.cli import main
from amanda_tools.diff import FingerprintDiff, compare, compare_fingerprints
from amanda_tools.dump import Dump
from amanda_tools.fingerprint import Fingerprint, load_fingerprint
from amanda_tools.fingerprint.files import OUTPUT

pytestmark = pytest.mark.one_interceptor


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        for _ in range(4)
    )
    return nn.Sequential(*blocks, nn.LayerNorm(32), nn.Linear(32, 8))


def training(change: Callable[[nn.Sequential], object], dtype: torch.dtype) -> None:
    model = network()
    change(model)
    model = model.to(dtype)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(16, 32).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def nothing(model: nn.Sequential) -> None:
    """Change nothing."""


def recorded(program: Callable[[], object], folder: Path, norms: bool = True) -> Path:
    tool = Fingerprint(folder=folder, norms=norms)
    with amanda.apply(tool):
        program()
    tool.result()
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(partial(training, nothing, torch.float32), tmp_path_factory.mktemp("a") / "a")


def found(single: Path, folder: Path, *arguments: Any) -> FingerprintDiff:
    return compare_fingerprints(single, recorded(partial(training, *arguments), folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rounding_is_no_error(
    single: Path, tmp_path: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    result = found(single, tmp_path / "b", nothing, dtype)
    assert result.same, result.conclusion()
    assert result.created[0].ratio < 2
    # Norms do not show that values are equal, and the program says so.
    assert not result.complete
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(single), str(tmp_path / "b")])
    assert caught.value.code == 2
    out = capsys.readouterr().out
    assert "No operator makes more error than its inputs and rounding explain." in out
    assert "They do not show one that keeps the norm" in out


@pytest.mark.parametrize("block", range(4))
def test_a_wrong_epsilon_is_named(single: Path, tmp_path: Path, block: int) -> None:
    def change(model: nn.Sequential) -> None:
        model[block][0].eps = 0.3  # type: ignore[index]

    result = found(single, tmp_path / "b", change, torch.bfloat16)
    largest = result.created[0]
    assert not result.same
    assert (largest.op.name, largest.what) == (f"{block}.0/layer_norm", "output 0")
    assert result.spread[0].module == f"{block}.0"
    assert "steps=" in result.again
    assert "dump:values=[inputs,weights,outputs" in result.again


def test_a_weight_that_differs_comes_from_outside(single: Path, tmp_path: Path) -> None:
    def change(model: nn.Sequential) -> None:
        with torch.no_grad():
            model[2][1].weight.mul_(1.1)  # type: ignore[index]

    largest = found(single, tmp_path / "b", change, torch.bfloat16).created[0]
    # The first operator that reads it makes it coarser.
    assert (largest.op.type, largest.outside, largest.what) == ("to", True, "input 0 (input)")
    assert largest.is_beyond


def test_the_error_is_never_larger_than_that_of_the_values(tmp_path: Path) -> None:
    """What norms show is a lower bound of what a dump measures."""

    def program(dtype: torch.dtype) -> None:
        with torch.no_grad():
            network().to(dtype)(torch.linspace(-3, 3, 16 * 32).reshape(16, 32).to(dtype))

    dumps = []
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        tool = Dump(values=["inputs", "weights", "outputs"])
        fingerprint = Fingerprint(folder=tmp_path / name, norms=True)
        with amanda.apply(tool, fingerprint):
            program(dtype)
        dumps.append(tool.result().open())
        fingerprint.result()
    by_norms = compare_fingerprints(tmp_path / "a", tmp_path / "b").created
    exact = {(one.op.name, one.what): one.error for one in compare(dumps[0], dumps[1]).created}
    shared = [one for one in by_norms if (one.op.name, one.what) in exact]
    assert len(shared) > 10
    for one in shared:
        assert one.error <= exact[one.op.name, one.what] * (1 + 1e-5), one


def test_a_permutation_shows_at_the_next_operator(tmp_path: Path) -> None:
    def program(dtype: torch.dtype, wrong: bool) -> None:
        x = torch.linspace(-3, 3, 64).reshape(8, 8).to(dtype)
        x = x.roll(1, 0) if wrong else x.roll(0, 0)
        torch.matmul(torch.arange(8.0).to(dtype) ** 2, x)

    recorded(partial(program, torch.float32, False), tmp_path / "a")
    recorded(partial(program, torch.bfloat16, True), tmp_path / "b")
    result = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert (result.same, result.created[0].op.name) == (False, "matmul")
    rows = [load_fingerprint(tmp_path / name).rows for name in "ab"]
    wrote = [one[one["what"] == OUTPUT]["norm"] for one in rows]
    # The operator that is wrong keeps the norm.
    assert wrote[0][2] == pytest.approx(wrote[1][2], rel=1e-2)


def test_masks_say_nothing(tmp_path: Path) -> None:
    def program(dtype: torch.dtype) -> None:
        scores = torch.linspace(-1, 1, 64).reshape(8, 8).to(dtype)
        upper = torch.ones(8, 8, dtype=torch.bool).triu(1)
        for low in (float("-inf"), torch.finfo(dtype).min):
            torch.softmax(scores.masked_fill(upper, low), -1)

    for name, dtype in (("a", torch.float32), ("b", torch.float16)):
        recorded(partial(program, dtype), tmp_path / name)
    result = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert result.same, result.conclusion()
    assert result.not_judged > 0
    assert result.to_json()


def test_without_norms_they_are_asked_for(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        recorded(partial(torch.relu, torch.ones(3, dtype=dtype)), tmp_path / name, norms=False)
    result = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert (result.same, result.created) == (False, [])
    assert "record norms, with fingerprint:norms=true" in result.conclusion()


def test_equal_precisions_are_compared_bit_for_bit(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0 + 2**-22)):
        recorded(partial(torch.relu, torch.full((3,), value)), tmp_path / name)
    result = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert (result.same, result.created, result.different) == (False, [], 2)


@pytest.mark.slow
def test_a_compiled_run_is_judged_against_an_eager_one(tmp_path: Path) -> None:
    def program(compiled: bool, change: Callable[[nn.Sequential], object]) -> None:
        model = network()
        change(model)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        with torch.no_grad():
            run(torch.linspace(-3, 3, 16 * 32).reshape(16, 32))

    def wrong(model: nn.Sequential) -> None:
        model[2][0].eps = 0.3  # type: ignore[index]

    runs = {"eager": (False, nothing), "compiled": (True, nothing), "wrong": (True, wrong)}
    for name, arguments in runs.items():
        torch._dynamo.reset()
        recorded(partial(program, *arguments), tmp_path / name)
    result = compare_fingerprints(tmp_path / "eager", tmp_path / "compiled")
    assert result.same, result.conclusion()
    assert any("compiled in B" in note for note in result.notes)
    result = compare_fingerprints(tmp_path / "eager", tmp_path / "wrong")
    assert (result.same, result.created[0].op.name) == (False, "2.0/layer_norm")
