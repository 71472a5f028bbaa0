"""A ranking of `sensitivity` in the hands of `quantize` and `prune`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.config import factories, from_flags
from amanda_tools.kit.weights.ranking import Kept, Ranked, Ranking
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize
from amanda_tools.sensitivity import Sensitivity


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    )
    with torch.no_grad():
        model.get_parameter("2.weight")[0, 0] = (
            40.0  # Its grid is coarse for all others of its row.
        )
    return model


X = torch.linspace(-1, 1, 30).reshape(5, 6)


@pytest.fixture
def ranked(tmp_path: Path) -> tuple[Path, list[Any]]:
    """Return the file of a run of its own, and its rows."""
    tool = Sensitivity("int4", "none")
    model = network()
    with amanda.apply(tool):
        for row in X:
            (model(row[None]) * torch.ones(1, 3)).sum().backward()
    found = tool.result()
    (tmp_path / "sensitivity.json").write_text(found.to_json())
    return tmp_path / "sensitivity.json", found.ops


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize each row of a weight by hand."""
    highest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / highest
    new: torch.Tensor = (weight / scale).round().clamp(-highest, highest) * scale
    return new


def by_hand(change: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    model = network()
    with torch.no_grad():
        for name, layer in model.named_children():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(change(name, layer.weight))
        output: torch.Tensor = model(X)
    return output


def run(tool: amanda.Tool, model: nn.Module | None = None) -> torch.Tensor:
    model = network() if model is None else model
    with amanda.apply(tool), torch.no_grad():
        output: torch.Tensor = model(X)
    return output


def test_the_file_has_what_the_ranking_needs(ranked: tuple[Path, list[Any]]) -> None:
    path, rows = ranked
    ranking = Ranking.read(path)
    assert [op.name for op in ranking.ops] == [row.name for row in rows]
    sizes = {n: p.numel() for n, p in network().named_parameters() if n.endswith("weight")}
    weights = [item for op in ranking.ops for item in op.weights.items()]
    found = {owner.partition(":")[2]: size for owner, size in weights}
    assert (found, ranking.format) == (sizes, "int4")


def test_the_most_sensitive_operators_are_not_quantized(ranked: tuple[Path, list[Any]]) -> None:
    path, rows = ranked
    kept = rows[0].name.partition("/")[0]
    tool = Quantize(weights="int4", activations="none", from_=str(path), keep=1)
    expected = by_hand(lambda name, weight: weight if name == kept else rounded(weight, 4))
    torch.testing.assert_close(run(tool), expected)
    everything = by_hand(lambda name, weight: rounded(weight, 4))
    assert not torch.allclose(run(Quantize(weights="int4", activations="none")), expected)
    torch.testing.assert_close(run(Quantize("dynamic", "int4", "none", "channel")), everything)
    dynamic = Quantize("dynamic", "int4", "none", "channel", from_=str(path), keep=1)
    torch.testing.assert_close(run(dynamic), expected)
    result = tool.result()
    assert [one.name for one in result.weights] == [
        f"{name}.weight" for name in ("0", "2", "4") if name != kept
    ]
    (unreached,) = result.unreached
    assert (unreached.name, unreached.reason) == (
        *(f"{kept}.weight", "kept, as one of the 1 most sensitive"),
    )


def test_the_most_sensitive_operators_are_not_pruned(ranked: tuple[Path, list[Any]]) -> None:
    path, rows = ranked
    kept = {row.name.partition("/")[0] for row in rows[:2]}

    def pruned(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name in kept:
            return weight
        least = weight.abs().flatten().kthvalue(weight.numel() // 2).values
        return weight * (weight.abs() > least)

    tool = Prune(0.5, from_=str(path), keep=2)
    torch.testing.assert_close(run(tool), by_hand(pruned))
    assert len(tool.result().weights) == 1
    assert {one.reason for one in tool.result().unreached} == {
        "kept, as one of the 2 most sensitive"
    }


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_weights_have_the_bits_of_a_budget(method: Any, ranked: tuple[Path, list[Any]]) -> None:
    path, _ = ranked
    bits = {
        owner.partition(":")[2]: number
        for owner, number in Ranking.read(path).bits_within(4.5).items()
    }
    sizes = {n: p.numel() for n, p in network().named_parameters() if n in bits}
    assert len(set(bits.values())) > 1
    mean = sum(bits[name] * size for name, size in sizes.items()) / sum(sizes.values())
    assert 4 < mean <= 4.5
    tool = Quantize(method, activations="none", per="channel", from_=str(path), bits=4.5)
    expected = by_hand(lambda name, weight: rounded(weight, bits[f"{name}.weight"]))
    model = network()
    torch.testing.assert_close(run(tool, model), expected)
    result = tool.result()
    assert {one.name: one.format for one in result.weights} == {
        name: f"int{number}" for name, number in bits.items()
    }
    assert f"weights have {mean:.2f} bits in the mean, by from and bits" in result.notes
    tool.bake()
    with torch.no_grad():
        torch.testing.assert_close(model(X), expected)


def test_a_budget_does_the_least_damage_of_all_assignments() -> None:
    damages = [3.0, 0.02, 0.5, 11.0]
    ops = [Ranked(n, str(n), damage, {f"w{n}": 10}) for n, damage in enumerate(damages)]
    for budget in (2, 3.25, 5, 6.75, 8):
        found = Ranking("", ops, "int4").bits_within(budget)
        possible = [
            sum(d * 4.0 ** (4 - b) for d, b in zip(damages, bits, strict=True))
            for bits in itertools.product(range(2, 9), repeat=4)
            if sum(bits) <= 4 * budget
        ]
        own = sum(d * 4.0 ** (4 - found[f"w{n}"]) for n, d in enumerate(damages))
        assert own == pytest.approx(min(possible))


def test_what_shares_a_weight_or_was_not_measured() -> None:
    ops = [
        Ranked(1, "a", 5.0, {"tied": 10}),
        Ranked(2, "b", 1.0, {"own": 10}),
        Ranked(3, "c", 5.0, {"tied": 10}),
        Ranked(4, "d", None, {"frozen": 10}),
    ]
    ranking = Ranking("", ops, "int8")
    found = ranking.bits_within(6)
    assert found["frozen"] == 8
    assert found["tied"] > found["own"]
    assert sum(found.values()) <= 18
    assert ranking.bits_within(6, {"tied"}).keys() == {"own", "frozen"}
    with pytest.raises(ValueError, match="bits=2 cannot be met: too many weights have no known"):
        ranking.bits_within(2)
    assert ranking.most_sensitive(2) == Kept(2, frozenset({1, 2}), frozenset({"tied", "own"}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 1}, "keep and bits need a ranking: from=sensitivity.json"),
        ({"bits": 4.0}, "keep and bits need a ranking"),
        ({"from_": "FILE"}, "from needs keep or bits"),
        ({"from_": "FILE", "keep": 4}, "keep must be from 0 to 3"),
        ({"from_": "FILE", "bits": 9.0}, "bits must be from 2 to 8, but is 9"),
        ({"from_": "FILE", "bits": 4.0, "weights": "none"}, "which weights=none leaves out"),
        ({"from_": "absent.json", "keep": 1}, "from=absent.json cannot be read"),
        ({"from_": "OTHER", "keep": 1}, "is not a result of the tool sensitivity"),
    ],
)
def test_options_that_do_not_fit(
    options: dict[str, Any], said: str, ranked: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "other.json").write_text('{"format": "amanda.flops/1"}')
    names = {"FILE": str(ranked[0]), "OTHER": str(tmp_path / "other.json")}
    given = {key: names.get(value, value) for key, value in options.items()}
    with pytest.raises(ValueError, match=said):
        Quantize(**given)


def test_a_ranking_of_pruning_has_no_bits(tmp_path: Path) -> None:
    tool, model = Sensitivity(sparsity=0.5), network()
    with amanda.apply(tool):
        model(X).sum().backward()
    (tmp_path / "s.json").write_text(tool.result().to_json())
    assert json.loads(tool.result().to_json())["weights"] == ""
    with pytest.raises(ValueError, match="bits needs a ranking of integers"):
        Quantize(from_=str(tmp_path / "s.json"), bits=4.0)
    assert len(Prune(0.5, from_=str(tmp_path / "s.json"), keep=1).kept.ids) == 1


def test_a_ranking_of_another_program_is_said(ranked: tuple[Path, list[Any]]) -> None:
    other, x = nn.Conv1d(6, 4, 1), torch.ones(2, 6, 3)
    keeping = Quantize(from_=str(ranked[0]), keep=2), Prune(0.5, from_=str(ranked[0]), keep=2)
    for tool in keeping:
        with amanda.apply(tool), torch.no_grad():
            other(x).tanh()
    for tool in keeping:
        assert "2 of the 2 operators to be kept did not run here" in tool.result().notes
    mixed = Quantize(from_=str(ranked[0]), bits=4.0)
    with amanda.apply(mixed), torch.no_grad():
        other(x)
    assert "3 weights of the ranking not read here" in mixed.result().notes


def test_the_option_is_called_from_on_the_command_line(ranked: tuple[Path, list[Any]]) -> None:
    text = f"quantize:from={ranked[0]},keep=2,weights=int4"
    (settings,) = from_flags([text]).tools.values()
    tool: Any = factories.make(settings)
    with amanda.apply(tool):
        torch.ones(2) + 1
    assert "2 of the 2 operators to be kept did not run here" in tool.result().notes
    named = {option.name: option.parameter for option in factories.options(Quantize)}
    assert (named["from"], named["keep"]) == ("from_", "keep")
