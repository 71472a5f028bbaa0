"""Effective paths on PyTorch: the published algorithm in plain loops is the oracle.

Long: one subject, the sets of one tool, with the networks that they are of.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda_core.results import HasResult, Result, load
from amanda_tools.effective_path import EffectivePath, EffectivePathResult, PathSets
from amanda_tools.effective_path.contributions import cumulative

from .path_oracle import Network, Selection, kept, networks, path_of

COUNT = 24


class Listed(nn.Module):
    """A network of the oracle as a module; keeps the values of its last run."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.values: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.values = self.network.run(x)
        return self.values[-1]


def extracted(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> EffectivePathResult:
    tool = EffectivePath(**{"cost": None, **options})
    with amanda.apply(tool):
        for x in inputs:
            model(x)
    return tool.result()


def places(indices: Any, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    return set(map(tuple, np.stack(np.unravel_index(indices, shape), axis=-1).tolist()))


class Language(nn.Module):
    """A model of tokens, with a small two-dimensional value before or after the logits."""

    def __init__(self, before: bool = False, after: bool = False) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.before, self.after = before, after

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.hidden(self.embed(tokens))
        if self.before:
            h = h / self.out.weight.norm(dim=0)[None].relu()
        logits: torch.Tensor = self.out(h)
        if self.after:
            self.out.weight.norm(dim=0)[None].relu()
        return logits


@pytest.mark.parametrize("start", [-1, 0, 2])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_paths_of_a_sequence_start_at_one_token(start: int, before: bool, after: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Language(before, after), torch.arange(10).view(2, 5)
    tool = EffectivePath(start=start, cost=None)
    with torch.no_grad(), amanda.apply(tool):
        logits = model(tokens)
    result = tool.result()
    expected = logits[:, start].argmax(-1).tolist()
    assert [path.predicted for path in result.paths] == expected
    for path, token in zip(result.paths, expected, strict=True):
        assert path.points["out/linear"].tolist() == [start % 5 * 20 + token]
        # Only what this token reads is in the path.
        assert {n // 8 for n in path.points["hidden/linear"].tolist()} == {start % 5}
    (end,) = result.ends
    assert (end.type, end.reason) == ("embedding", "there is no rule for embedding")


def test_a_run_whose_output_is_no_scores_says_why_it_has_no_path() -> None:
    images, small = torch.rand(1, 3, 6, 6), EffectivePath(cost=None)
    with torch.no_grad(), amanda.apply(small):
        nn.Sequential(nn.Linear(6, 6), nn.Conv2d(3, 2, 3))(images)
    assert small.result().paths == []
    assert "1/conv2d is the last operator, but its output has the shape (1, 2, 4, 4)" in str(
        small.result().table()
    )
    for tool, why in (
        (EffectivePath(start=7, cost=None), "start is 7, but 5 tokens came out"),
        (EffectivePath(output="head", cost=None), "no operator that is followed is named 'head'"),
    ):
        with torch.no_grad(), amanda.apply(tool):
            Language()(torch.arange(5)[None])
        assert (tool.result().paths, tool.result().empty) == ([], 1)
        assert why in str(tool.result().table())


@pytest.mark.parametrize("count", [16, pytest.param(COUNT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", ["cumulative", "BwCU", "BwAB", "FwAB"])
def test_sets_are_the_oracle_s(variant: Any, count: int) -> None:
    compared = 0
    for number, (network, x) in enumerate(networks(count)):
        model = Listed(network)
        how = Selection(0.2 + 0.7 * (number % 7) / 7, variant, 0.8, 0.2)
        found = extracted(
            model, x, theta=how.theta, variant=variant, output_threshold=0.8, term_threshold=0.2
        )
        assert found.ends == []
        # The operators ran in the order of the layers, so the names come in their order, too.
        names = [layer.name for layer in found.layers]
        for sample in range(2):
            values = [value[sample].numpy() for value in model.values]
            oracle = path_of(network, values, how)
            assert len(names) == len(oracle.points)
            path = found.paths[sample]
            for name, value in zip(names, sorted(oracle.points), strict=True):
                shape = values[value].shape
                assert places(path.points[name], shape) == oracle.points[value], (number, name)
                compared += 1
                if value == 0 or value - 1 not in oracle.edges:
                    continue
                edges = oracle.edges[value - 1]
                assert len(path.edges[name]) == len(edges)
                kind, inputs, arguments = network.layers[value - 1]
                sizes = [values[i].size for i in inputs]
                shapes = [values[i].shape for i in inputs]
                codes = {
                    (sum(sizes[:i]) + int(np.ravel_multi_index(a, shapes[i]))) * values[value].size
                    + int(np.ravel_multi_index(b, shape))
                    for i, a, b in edges
                }
                assert set(path.edges[name].tolist()) == codes
                if kind in ("conv", "linear"):
                    weights = oracle.weights.get(value - 1, set())
                    assert places(path.weights[name], arguments["weight"].shape) == weights
    assert compared > 100


def chosen(rows: Any, valid: Any, theta: float) -> Any:
    mask = np.zeros(rows.shape, bool)
    mask.reshape(-1)[cumulative(rows, valid, theta)[0]] = True
    return mask


def test_the_prefix_by_hand() -> None:
    # Half of 10 is 5: 4 is too little, 4 and 3 are enough.
    rows = np.array([[1.0, 4.0, 3.0, 2.0], [-1.0, -4.0, -3.0, -2.0], [5.0, -1.0, -2.0, 3.0]])
    assert chosen(rows, None, 0.5).tolist() == [
        [False, True, True, False],
        [True, False, False, False],  # No positive sum: the largest alone.
        [True, False, False, False],
    ]
    # A quarter of the number is a quarter: one is enough whatever it is.
    assert chosen(rows, None, 0.25).sum(axis=1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("theta", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("width", [1, 3, 9, 40])
@pytest.mark.parametrize("values", ["normal", "few", "skewed"])
def test_prefixes_are_the_oracle_s(values: str, width: int, theta: float) -> None:
    """Also with equal terms, rows of one sign, and terms that do not exist, which are 0."""
    random = np.random.default_rng(width)
    rows = {
        "normal": random.normal(size=(120, width)),
        "few": random.integers(-2, 4, (120, width)) * 0.5,
        "skewed": random.normal(size=(120, width)) ** 7 - (np.arange(120) % 3)[:, None],
    }[values]
    there = random.random(rows.shape) < 0.7
    there[:, -1] = True
    for valid in (None, there):
        own = rows if valid is None else np.where(valid, rows, 0.0)
        for row, mask, found in zip(own, there, chosen(own, valid, theta), strict=True):
            exists = np.ones(width, bool) if valid is None else mask
            terms: dict[tuple[int, ...], float] = {
                (int(i),): row[i] for i in np.flatnonzero(exists)
            }
            total = math.fsum(terms.values())
            # Whether a sum that equals the share up to rounding is enough is not defined.
            sums = np.cumsum(np.sort(list(terms.values()))[::-1])
            if np.any(np.isclose(sums, theta * total, rtol=1e-12, atol=1e-12)) and theta != 0.5:
                continue
            assert {i for (i,) in kept(terms, theta)} == set(np.flatnonzero(found).tolist())


class Block(nn.Module):
    """A residual block that runs one module twice, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding="same")
        self.norm, self.relu = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> Any:
        before = self.relu(self.norm(self.first(x)))
        after = self.relu(self.second(before) + before)
        return self.head(nn.functional.adaptive_avg_pool2d(after, 1).flatten(1))


def test_modules_that_run_twice_and_in_place() -> None:
    torch.manual_seed(0)
    model, x = Block().double().eval(), torch.randn(3, 3, 6, 6).double()
    network = Network()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    norm = {
        "running_mean": model.norm.running_mean,
        "running_var": model.norm.running_var,
        "weight": model.norm.weight,
        "bias": model.norm.bias,
    }
    value = network.add("conv", 0, weight=model.first.weight, bias=model.first.bias, padding=1)
    value = network.add("batch_norm", value, **norm)
    before = value = network.add("relu", value)
    value = network.add(
        "conv", value, weight=model.second.weight, bias=model.second.bias, padding=1
    )
    value = network.add("relu", network.add("add", value, before))
    network.add(
        "linear", network.add("mean", value), weight=model.head.weight, bias=model.head.bias
    )
    values = network.run(x)
    found = extracted(model, x, theta=0.6)
    assert [layer.name for layer in found.layers][3:6] == ["relu/relu_", "second/conv2d", "add"]
    names = ["input", "first/conv2d", "norm/batch_norm", "relu/relu_", "second/conv2d", "add"]
    for sample in range(3):
        arrays = [array[sample].numpy() for array in values]
        oracle = path_of(network, arrays, Selection(0.6))
        for number, name in enumerate([*names, "relu/relu_#2"]):
            shape = arrays[number].shape
            got = places(found.paths[sample].points[name], shape)
            assert got == oracle.points.get(number, set()), name


def test_paths_of_a_batch_are_those_of_its_samples() -> None:
    torch.manual_seed(0)
    model, x = Block().eval().double(), torch.randn(4, 3, 6, 6).double()
    whole = extracted(model, x)
    single = extracted(model, *x.split(1))
    assert len(whole.paths) == len(single.paths) == 4
    for one, other in zip(whole.paths, single.paths, strict=True):
        assert one.predicted == other.predicted
        for part in ("points", "edges", "weights"):
            first, second = getattr(one, part), getattr(other, part)
            assert first.keys() == second.keys()
            assert all(np.array_equal(first[name], second[name]) for name in first)
    assert [path.predicted for path in whole.paths] == model(x).argmax(1).tolist()


def path(**points: list[int]) -> PathSets:
    return PathSets({name: np.array(found) for name, found in points.items()}, predicted=0)


def test_class_paths_and_similarity_by_hand() -> None:
    first, second = path(a=[0, 1], b=[5]), path(a=[1, 2], b=[6])
    second.predicted = 1
    third = path(a=[0, 3], b=[7])
    result = EffectivePathResult("cumulative", 0.5, [first, second, third])
    classes = result.class_paths()
    assert {name: found.tolist() for name, found in classes[0].points.items()} == {
        "a": [0, 1, 3],
        "b": [5, 7],
    }
    assert classes[0].samples == 2
    # The second is predicted as 1 and is 0: it counts for neither.
    assert list(result.class_paths([0, 0, 0])) == [0]
    probe = path(a=[0, 2], b=[5], c=[])
    assert probe.similarities(classes[0]) == {"a": 0.5, "b": 1.0}
    assert probe.similarity(classes[0]) == pytest.approx(2 / 3)
    shares = result.similarities({0: classes[0]})
    assert shares[0] == {"": 1.0, "a": 1.0, "b": 1.0}
    assert shares[1] == {"": 0.0, "a": 0.0, "b": 0.0}
    with pytest.raises(ValueError, match="3 samples with a path and 1 labels"):
        result.class_paths([0])


def test_where_paths_end(caplog: pytest.LogCaptureFixture) -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.first(x)
            return self.head(hidden / hidden.sigmoid())

    model, tool = Divided(), EffectivePath(cost=None)
    with amanda.apply(tool):
        for _ in range(2):
            model(torch.randn(2, 4))
            # It is said during the first run, and only once.
            assert [record.message[:46] for record in caplog.records] == [
                "Effective paths may end at div (div: it divide"
            ]
    found = tool.result()
    (end,) = found.ends
    assert (end.name, end.type, end.runs, end.lost) == ("div", "div", 2, True)
    assert end.reason == "it divides by what depends on the network's input"
    assert [(layer.name, layer.kind) for layer in found.layers] == [
        ("div", "end"),
        ("head/linear", "linear"),
    ]
    assert "paths END at 1 operator: div (div: it" in found.table().title
    assert found.table("end").rows == [("div", "div", 2, end.reason, end.consequence)]
    assert json.loads(found.to_json())["ends"][0]["consequence"] == end.consequence
    with pytest.raises(ValueError, match="by must be op or end"):
        found.table("layer")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x[:, 0],
        lambda x: x[:, -1:, ::2],
        lambda x: x[..., None, 1:3],
        lambda x: x.select(1, 1),
        lambda x: x.select(-1, -2),
        lambda x: x.narrow(2, 1, 2),
        lambda x: x.narrow(-2, -1, 1),
    ],
)
def test_slices_hand_on_what_they_picked(pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    places = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    size = pick(places)[0].numel()
    first, head = nn.Linear(4, 4), nn.Linear(size, 3)

    class Sliced(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return head(pick(first(x)).flatten(1))

    found = extracted(Sliced(), torch.randn(2, 3, 4), theta=0.9)
    assert found.ends == []
    before, slice_ = (
        next(x.name for x in found.layers if x.kind == k) for k in ("linear", "slice")
    )
    for sample, path in enumerate(found.paths):
        picked = path.points[slice_]
        assert len(picked)
        # Where PyTorch itself takes them from.
        expected = pick(places)[sample].flatten()[picked] - sample * 12
        assert sorted(path.points[before].tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize(
    ("pick", "reason"),
    [
        (lambda x: x[:, [0, 2]], "it is indexed by something other than numbers and ranges"),
        (lambda x: x[[1, 0]], "it is indexed by something other than numbers and ranges"),
        (lambda x: x[1:], "it changes the axis of samples"),
        (lambda x: x[:1], "one of its inputs has other samples than its output"),
        (lambda x: x.index_select(1, torch.tensor([2])), "there is no rule for slice"),
    ],
)
def test_what_picks_otherwise_ends_paths(pick: Any, reason: str) -> None:
    first = nn.Linear(4, 6)
    head = nn.Linear(pick(torch.zeros(2, 6)).shape[-1], 3)

    class Picked(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return head(pick(first(x)))

    (end,) = extracted(Picked(), torch.randn(2, 4)).ends
    assert (end.type, end.reason, end.lost) == ("slice", reason, True)


def test_of_several_outputs_the_first_is_followed() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Conv1d(1, 2, 3), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            values, indices = nn.MaxPool1d(3, return_indices=True)(self.first(x))
            return self.head(values.flatten(1)), indices

    found = extracted(Pooled(), torch.randn(2, 1, 8))
    assert found.ends == []
    assert [layer.kind for layer in found.layers][1:] == ["conv", "max_pool", "reshape", "linear"]


def test_paths_end_at_any_output() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 6), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            _, second = self.first(x).unflatten(1, (3, 2)).aminmax(dim=2)
            return self.head(second)

    model = Halves()
    found = extracted(model, *torch.randn(3, 2, 4))
    (end,) = found.ends
    assert (end.name, end.runs, end.lost) == ("aminmax", 3, True)
    # In front of the first layer nothing is lost, and it is said all the same.
    model.first = nn.Identity()  # type: ignore[assignment]
    found = extracted(model, torch.randn(2, 6))
    (end,) = found.ends
    assert (end.name, end.lost) == ("aminmax", False)
    assert "END" not in found.table().title
    assert [layer.kind for layer in found.layers] == ["input", "linear"]


class Written(nn.Module):
    """A layer that sets its first output to 7 in one of several ways, and one that adds
    everything.
    """

    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.write = nn.Linear(3, 3, bias=False), nn.Linear(3, 2), write
        with torch.no_grad():
            self.first.weight.copy_(torch.diag(torch.tensor([0.0, 2.0, 1.0])))
            self.head.weight.copy_(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
            self.head.bias.zero_()

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.write(self.first(x)))


def at_index(hidden: torch.Tensor) -> torch.Tensor:
    hidden[:, 0] = torch.full((len(hidden),), 7.0)
    return hidden


def through_a_view(hidden: torch.Tensor) -> torch.Tensor:
    hidden[:, 0].add_(7.0)
    return hidden


def behind_a_view(hidden: torch.Tensor) -> torch.Tensor:
    view = hidden.view(-1, 3)
    hidden.add_(torch.tensor([7.0, 0.0, 0.0]))
    return view


SHARED = "it wrote into memory that others share, which is not followed"


@pytest.mark.parametrize(
    ("write", "kind", "reason"),
    [
        (at_index, "assign_slice", "there is no rule for assign_slice"),
        (through_a_view, "add", SHARED),
        (behind_a_view, "add", SHARED),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_paths_end_where_memory_was_written(write: Any, kind: str, reason: str, grad: bool) -> None:
    """The terms are 7, 2 and 1: the first is half of their sum. Before it was written it was 0."""
    with torch.set_grad_enabled(grad):
        found = extracted(Written(write), torch.ones(2, 3), torch.ones(1, 3))
    (end,) = found.ends
    assert (end.type, end.reason, end.runs, end.lost) == (kind, reason, 2, True)
    for path in found.paths:
        assert [sorted(points) for points in path.points.values()] == [[0], [0]]
    assert "paths END at 1 operator" in found.table().title


def test_nothing_is_kept_of_an_operator_that_fails() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.ones(1, 3)
    kept, tool = weakref.ref(x), EffectivePath()
    with amanda.apply(tool):
        with pytest.raises(RuntimeError):
            model(x)
        del x
        gc.collect()
        assert kept() is None


def test_paths_go_on_where_an_operator_returns_what_it_wrote() -> None:
    """The terms are 0 + 1, 2 + 1 and 1 + 1: the second is half of their sum."""
    found = extracted(Written(lambda hidden: hidden.add_(1.0)), torch.ones(2, 3))
    assert found.ends == []
    for path in found.paths:
        assert {name: sorted(points) for name, points in path.points.items()} == {
            "input": [1],
            "first/linear": [1],
            "head/linear": [0],
        }


def test_where_paths_begin_and_how_many_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = torch.randn(5, 4).double()
    found = extracted(model, x, output="0/linear", limit=3)
    assert (len(found.paths), found.left_out) == (3, 2)
    assert [path.predicted for path in found.paths] == model[0](x)[:3].argmax(1).tolist()
    assert [layer.name for layer in found.layers] == ["input", "0/linear"]
    # Functions alone, without a module around them: a step is a run.
    tool = EffectivePath(cost=None, until="step")
    weight = torch.randn(3, 4)
    with amanda.apply(tool):
        for _ in range(2):
            nn.functional.linear(torch.randn(2, 4), weight)
            amanda.step()
    assert len(tool.result().paths) == 4


def test_thresholds_of_an_earlier_result(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x = torch.randn(1, 6).double()
    first = extracted(model, x, theta=0.7)
    file = tmp_path / "paths.json"
    file.write_text(first.to_json())
    second = extracted(model, x, variant="BwAB", thresholds=file)
    with torch.no_grad():
        predicted = first.paths[0].predicted
        hidden, logit = model[:2](x), model(x)[0, predicted]
        terms = (model[2].weight * hidden)[predicted] * logit.sign()
    chosen = first.paths[0].points["1/relu"]
    threshold = first.thresholds["2/linear"]
    assert threshold.term == pytest.approx(float(terms[chosen].min()))
    assert threshold.output == pytest.approx(float(model(x).detach().abs().max()))
    # None is above the largest, so the prediction is where it begins; then all such terms.
    expected = np.flatnonzero(terms.numpy() >= threshold.term)
    assert second.paths[0].points["1/relu"].tolist() == expected.tolist()
    file.write_text("{}")
    with pytest.raises(ValueError, match="not a result of effective paths"):
        EffectivePath(thresholds=file)


@pytest.mark.parametrize(
    "options",
    [{"theta": 0}, {"theta": 1.5}, {"variant": "x"}, {"until": "x"}, {"limit": -1}],
)
def test_options_without_sense(options: Any) -> None:
    with pytest.raises(ValueError, match="must"):
        EffectivePath(**options)


def test_what_stands_in_front_of_the_first_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    x = torch.randn(2, 3, 4)
    found = extracted(model, x)
    assert [layer.name for layer in found.layers] == ["input", "0/flatten", "1/linear"]
    noisy = extracted(nn.Sequential(Noisy(), model), x)
    assert [layer.name for layer in noisy.layers][-2:] == ["1.0/flatten", "1.1/linear"]
    for path, other in zip(found.paths, noisy.paths, strict=True):
        assert path.points["input"].tolist() == other.points["input"].tolist()


class Noisy(nn.Module):
    """Adds the same number and row to all samples, which must not choose among the inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return x + torch.zeros(()) + torch.rand(4) * 0


def test_the_forms_of_the_result(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tool = EffectivePath()
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with amanda.apply(tool):
        model(torch.randn(2, 4))
    assert isinstance(tool, HasResult)
    result = tool.result()
    assert isinstance(result, Result)
    (tmp_path / "r.json").write_text(result.to_json())
    data = load(tmp_path / "r.json")
    assert data["format"] == "amanda.effective_path/1"
    assert [layer["elements"] for layer in data["layers"]] == [4, 6, 6, 3]
    assert json.dumps(data["thresholds"])
    last = result.layers[-1]
    assert last.points == 1
    assert last.edge_density == pytest.approx((last.edges or 0) / 18)
    assert math.isclose(result.density, sum(x.points for x in result.layers) / 19)
    (file,) = result.write(tmp_path)
    with np.load(file, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["1/points/input"], result.paths[1].points["input"])
    assert "2/linear" in str(result.table())
    assert "<table>" in result._repr_html_()
    assert 0 < result.tool_seconds <= result.wall_seconds


@pytest.mark.slow
def test_as_a_data_frame() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    result = extracted(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), torch.randn(2, 4))
    assert list(result.to_dataframe()["elements"]) == [layer.elements for layer in result.layers]


@pytest.mark.parametrize("x", ["leaf", "normalised", "made inside"])
def test_what_the_input_may_be(x: str) -> None:
    torch.manual_seed(0)
    model, values = Block().eval().double(), torch.randn(2, 3, 6, 6).double()
    expected = extracted(model, values - 0.75 if x == "normalised" else values)
    tool = EffectivePath()
    with amanda.apply(tool):
        if x == "leaf":  # As for an attack.
            model(values.clone().requires_grad_()).sum().backward()
        elif x == "normalised":
            model((values.clone().requires_grad_() * 2 - 1.5) / 2)
        else:
            model(torch.from_numpy(values.numpy()))
    found = tool.result()
    assert found.ends == []
    assert len(found.paths) == 2
    for one, other in zip(found.paths, expected.paths, strict=True):
        assert one.points.keys() >= other.points.keys()
        for name in other.points.keys() - {"input"}:
            assert np.array_equal(one.points[name], other.points[name])


def test_the_program_is_not_changed() -> None:
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(2, 3, 6, 6)
    expected = model(x)
    with amanda.apply(EffectivePath()):
        assert torch.equal(model(x), expected)
