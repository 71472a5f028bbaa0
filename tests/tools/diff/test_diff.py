"""Comparison of runs on PyTorch: a planted change is found where it was planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import exit_status
from torch import nn

import amanda
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


def test_an_operator_of_another_type_is_named() -> None:
    def program(activation: Any) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), activation, nn.Linear(4, 2)
        nn.Sequential(*layers)(torch.randn(3, 4))

    found = compare(*both(lambda: program(nn.ReLU()), lambda: program(nn.LeakyReLU())))
    first = found.first
    assert first is not None
    assert first.a.name == "4/linear"
    assert [op.name for op in found.suspects] == ["3/relu"]
    assert "Only in A, just before it: op '3/relu', at " in found.conclusion()
    assert json.loads(found.to_json())["suspects"][0]["name"] == "3/relu"
    same = compare(*both(lambda: program(nn.ReLU()), lambda: program(nn.ReLU())))
    assert same.suspects == []


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


def test_an_operator_of_a_module_that_one_run_has_shifts_no_name() -> None:
    class Layer(nn.Module):
        more = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.square() + 1
            if self.more:
                x = x.abs().square() + 1
            x = x.square().mean(0)
            result: torch.Tensor = x.square() + 1
            return result

    layer, x = Layer(), torch.ones(2, 3)

    def changed() -> None:
        layer.more = True
        layer(x)

    one, other = both(lambda: layer(x), changed)
    found = compare(one, other)
    pairs = {(pair.a.name, pair.b.name) for pair in found.compared if pair.what == "output"}
    assert pairs == {
        ("square", "square"),
        ("add", "add"),
        ("square#2", "square#3"),
        ("mean", "mean"),
        ("square#3", "square#4"),
        ("add#2", "add#3"),
    }
    assert [op.name for op in found.unmatched_b] == ["abs", "square#2", "add#2"]


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
    assert exit_status("diff", one, same) == 0
    assert "No difference in 2 tensors: all are equal bit for bit." in capsys.readouterr().out
    assert exit_status("diff", one, other) == 1
    said = capsys.readouterr().out
    assert "First: output 0 of op 'full'" in said
    assert "2 of 2 beyond the tolerance, the first at [0]: 1 and 2" in said
    assert exit_status("diff", one, other, "--atol", 1) == 0
    capsys.readouterr()
    assert exit_status("diff", one, other, "--json") == 1
    read = json.loads(capsys.readouterr().out)
    assert (read["format"], read["same"]) == ("amanda.diff/1", False)
    assert read["first"]["difference"]["max_abs"] == 1
    assert exit_status("diff", one, same, "--all") == 0
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
        assert exit_status("diff", *pair) == 2
        said = capsys.readouterr().out
        assert "No difference" not in said
        what = {
            2: f"Only in {more}: Linear#3:linear, Linear#4:linear",
            4: "output 0 of op 'linear', step 1",
            6: "output 0 of op 'Linear#3:linear', step 1",
        }[at]
        assert what in said
        assert f"Only in {more}" in said or f"first in {more}: " in said
        assert exit_status("diff", *pair, "--json") == 2
        assert json.loads(capsys.readouterr().out)["complete"] is False


def test_mistakes(dumps: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").mkdir()
    assert exit_status("diff", dumps[0], tmp_path / "none") == 2
    for arguments in ([dumps[0]], [dumps[0], tmp_path / "nowhere"], [*dumps[:2], "--rtol", -1]):
        assert exit_status("diff", *arguments) == 3
    assert "rtol must not be negative" in capsys.readouterr().err


def test_of_a_result_without_files() -> None:
    one = dump(lambda: torch.relu(torch.ones(2)), stats=True)
    other = dump(lambda: torch.relu(torch.ones(2)))
    found: DiffResult = compare(one, other)
    assert found.same


class Modules(nn.Module):
    """A block of a transformer, written with modules."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc, self.proj = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*qkv)
        x = x + self.c_proj(found.transpose(1, 2).reshape(batch, length, 16))
        result: torch.Tensor = x + self.proj(nn.functional.gelu(self.fc(self.ln_2(x))))
        return result


class Functions(nn.Module):
    """The same block with other names and operators, and other planted constants."""

    def __init__(self, block: Modules, eps: float = 1e-5, scale: float = 8**-0.5) -> None:
        super().__init__()
        names = {name.replace(".", "_"): p.detach() for name, p in block.named_parameters()}
        self.p, self.eps, self.scale = nn.ParameterDict(names), eps, scale

    def dense(self, x: torch.Tensor, name: str) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        found = torch.addmm(self.p[f"{name}_bias"], rows, self.p[f"{name}_weight"].T)
        return found.view(*x.shape[:-1], -1)

    def norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        weights = self.p[f"{name}_weight"], self.p[f"{name}_bias"]
        return nn.functional.layer_norm(x, (16,), *weights, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.dense(self.norm(x, "ln_1", 1e-5), "c_attn").chunk(3, 2)
        q, k, v = (part.view(batch, length, 2, 8).transpose(1, 2) for part in parts)
        found = torch.softmax(q @ k.mT * self.scale, -1) @ v
        x = x + self.dense(found.transpose(1, 2).reshape(batch, length, 16), "c_proj")
        hidden = nn.functional.gelu(self.dense(self.norm(x, "ln_2", self.eps), "fc"))
        return x + self.dense(hidden, "proj")


def implementations(**planted: float) -> tuple[Dumped, Dumped]:
    torch.manual_seed(0)
    block, x = Modules(), torch.randn(2, 5, 16)
    other = Functions(block, **planted)
    with torch.no_grad():
        return both(lambda: block(x), lambda: other(x), values=["inputs", "outputs"])


@pytest.mark.parametrize("planted", ["", "eps", "scale"])
def test_two_implementations_part_where_they_differ(planted: str) -> None:
    dumps = implementations(**({planted: 0.01} if planted else {}))
    found = compare(*dumps, rtol=1e-3, atol=1e-5)
    names = {(one.a.name, one.b.name) for one in found.compared}
    assert {("ln_2/layer_norm", "layer_norm#2"), ("proj/linear", "addmm#4")} <= names
    if not planted:
        assert found.same
        return
    assert found.first is not None
    where = {"eps": "ln_2/layer_norm", "scale": "scaled_dot_product_attention"}
    assert (found.first.a.name, found.first.what) == (where[planted], "output")
    if planted == "eps":
        assert found.first.inputs_agree


def test_the_caller_says_how_operators_are_aligned(tmp_path: Path) -> None:
    dumps = implementations()
    pairs = {
        way: {(one.a.name, one.b.name) for one in compare(*dumps, align=way).compared}
        for way in ("auto", "names", "values", "order")
    }
    assert pairs["auto"] == pairs["values"]
    # Numbers tell operators of one module apart, and may be shifted.
    assert all(a.split("#")[0] == b.split("#")[0] for a, b in pairs["names"])
    assert pairs["order"] not in (pairs["names"], pairs["values"])
    # The orders of types that both have are those of the first layer norm and of the end.
    assert ("ln_1/layer_norm", "layer_norm") in pairs["order"]
    with pytest.raises(ValueError, match="align must be of auto, names, values, order"):
        compare(*dumps, align="types")  # type: ignore[arg-type]
    folders = [tmp_path / name for name in "ab"]
    block, x = Modules(), torch.randn(2, 5, 16)
    for folder, model in zip(folders, (block, Functions(block)), strict=True):
        with torch.no_grad(), amanda.apply(tool := Dump(values=["outputs"])):
            model(x)
        tool.result().write(folder)
    assert exit_status("diff", *folders, "--align", "names") == 1
    assert (
        exit_status("diff", *folders, "--align", "values", "--rtol", "1e-3", "--atol", "1e-5") == 0
    )


def test_renamed_modules_of_the_same_operators_are_aligned() -> None:
    def program(names: str, factor: float = 1.0) -> Callable[[], Any]:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 3)]
        model = nn.Sequential()
        for name, layer in zip(names, layers, strict=True):
            model.add_module(name, layer)
        with torch.no_grad():
            layers[2].weight.mul_(factor)  # type: ignore[operator]
        return lambda: model(torch.linspace(-1, 1, 12).view(2, 6))

    values = {"values": ["outputs"]}
    assert compare(*both(program("abcde"), program("vwxyz"), **values)).same
    first = compare(*both(program("abcde"), program("vwxyz", 1.1), **values)).first
    assert first is not None
    assert (first.a.name, first.b.name) == ("c/linear", "x/linear")


def test_memory_that_nothing_has_written_is_not_compared() -> None:
    def program(number: float) -> Callable[[], Any]:
        def run() -> None:
            torch.manual_seed(0)
            x = torch.ones(4)
            # What `empty` returns is drawn here, so that the runs certainly differ.
            for made in (torch.empty(4), torch.empty_like(x), x.new_empty(4)):
                made.data.fill_(number)
                made.uniform_()
                torch.relu(made)

        return run

    found = compare(*both(program(1.0), program(2.0), values=["inputs", "outputs"]))
    kinds = {one.a.type for one in found.compared if not one.same}
    assert not {kind for kind in kinds if "empty" in kind or kind == "uniform_"}
    assert found.uninitialized >= 6
    assert "without values yet" in found.title
