"""Effective paths through transformers: attention, normalizations, gates and views.

Two oracles: the paths of one attention in plain loops, and models that compute their attention in
one operator or in several, whose paths must be the same.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda_tools.effective_path import EffectivePath, EffectivePathResult, contributions

from .path_oracle import kept

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES: dict[str, Any] = {"vocab_size": 50, "initializer_range": 0.6, "pad_token_id": 0}


def model_of(kind: str, attention: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a small model with weights at which paths branch, and its inputs."""
    torch.manual_seed(0)
    how = {**SIZES, "attn_implementation": attention}
    inputs = {"input_ids": torch.randint(1, 50, (2, 7))}
    if kind == "bert":
        width = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
        config = transformers.BertConfig(**how, **width, num_hidden_layers=2)
        return transformers.BertForSequenceClassification(config).double().eval(), inputs
    if kind == "gpt2":
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        config = transformers.GPT2Config(**how, **ends, n_embd=8, n_layer=2, n_head=2)
        return transformers.GPT2ForSequenceClassification(config).double().eval(), inputs
    if kind == "llama":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**how, **heads, hidden_size=8, intermediate_size=12)
        return transformers.LlamaForSequenceClassification(config).double().eval(), inputs
    width = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    image = {"image_size": 8, "patch_size": 4, "initializer_range": 0.6}
    config = transformers.ViTConfig(
        **width, **image, num_hidden_layers=2, attn_implementation=attention
    )
    model = transformers.ViTForImageClassification(config).double().eval()
    return model, {"pixel_values": torch.randn(2, 3, 8, 8).double()}


def extracted(model: Any, *runs: dict[str, torch.Tensor], **options: Any) -> EffectivePathResult:
    tool = EffectivePath(**{"cost": None, **options})
    with amanda.apply(tool), torch.no_grad():
        for inputs in runs:
            model(**inputs)
    return tool.result()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) for kind in ("bert", "vit", "gpt2", "llama")],
)
def test_one_attention_operator_has_the_paths_of_its_parts(kind: str) -> None:
    """The fused operator has a rule of its own; the parts have those of products and softmax."""
    results = []
    for attention in ("sdpa", "eager"):
        model, inputs = model_of(kind, attention)
        results.append(extracted(model, inputs, theta=0.9))
    fused, parts = results
    assert [end for found in results for end in found.ends if end.lost] == []
    compared = 0
    # Masks are an input of their own where the parts add them.
    for one, other in zip(fused.paths, parts.paths, strict=True):
        common = [n for n in one.points if n in other.points and not n.startswith("input")]
        for name in common:
            if name.partition("/")[2].partition("#")[0] in ("transpose", "reshape", "contiguous"):
                continue  # The parts transpose more, so the numbers differ.
            assert np.array_equal(one.points[name], other.points[name]), name
            compared += len(one.points[name]) > 0
    assert compared > 40
    # Paths go through queries and keys, not through values alone.
    (query,) = [n for n in fused.paths[0].points if "0" in n and _is_query(n)]
    assert len(fused.paths[0].points[query])


def test_the_size_of_chunks_changes_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where terms of one output are in several chunks, as the scores of an attention are."""
    model, inputs = model_of("gpt2", "sdpa")
    whole = extracted(model, inputs, theta=0.9)
    monkeypatch.setattr(contributions, "TERMS_AT_ONCE", 20)
    pieces = extracted(model, inputs, theta=0.9)
    for one, other in zip(whole.paths, pieces.paths, strict=True):
        for part in ("points", "edges", "weights"):
            for name, found in getattr(one, part).items():
                assert np.array_equal(found, getattr(other, part)[name]), name
                assert len(np.unique(found)) == len(found)


def _is_query(name: str) -> bool:
    return any(part in name for part in ("query/linear", "q_proj/linear", "c_attn/addmm"))


class Attention(nn.Module):
    """One head, whose values are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(3, 4, bias=False) for _ in range(3))
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        self.q, self.k, self.v = self.query(x), self.key(x), self.value(x)
        self.weights = (self.q @ self.k.transpose(1, 2)).softmax(-1)
        self.hidden = self.weights @ self.v
        return self.head(self.hidden[:, 0])


def test_products_in_plain_loops() -> None:
    torch.manual_seed(1)
    model, x, theta = Attention().double(), torch.randn(2, 5, 3).double(), 0.8
    found = extracted(model, {"x": x}, theta=theta)
    for sample, path in enumerate(found.paths):
        q, k, v = (value[sample].detach().numpy() for value in (model.q, model.k, model.v))
        weights, hidden = model.weights[sample].detach().numpy(), model.hidden[sample].detach()
        head = model.head.weight.detach().numpy()
        logits = head @ hidden[0].numpy()
        values, keys, queries, taken = set(), set(), set(), set()
        terms: dict[tuple[int, ...], float]
        terms = {(i,): head[logits.argmax(), i] * float(hidden[0, i]) for i in range(4)}
        if logits.max() < 0:
            terms = {at: -term for at, term in terms.items()}
        for (column,) in kept(terms, theta):
            sign = 1 if hidden[0, column] >= 0 else -1
            terms = {(s,): sign * weights[0, s] * v[s, column] for s in range(5)}
            for (place,) in kept(terms, theta):
                taken.add(place)
                values.add(place * 4 + column)
        for place in taken:
            sign = 1 if q[0] @ k[place] >= 0 else -1
            for (i,) in kept({(i,): sign * q[0, i] * k[place, i] for i in range(4)}, theta):
                queries.add(i)
                keys.add(place * 4 + i)
        for name, expected in (("value", values), ("key", keys), ("query", queries)):
            assert set(path.points[f"{name}/linear"].tolist()) == expected, name


def test_merged_samples_are_split_again() -> None:
    class Merged(nn.Module):
        merges = True

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(12, 2)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.first(x)
            if self.merges:
                hidden = self.second(hidden.view(-1, 5)).view(len(x), 3, 4)
            else:
                hidden = self.second(hidden)
            return self.head(hidden.flatten(1))

    torch.manual_seed(0)
    model, x = Merged(), torch.randn(2, 3, 4)
    paths = []
    for merges in (True, False):
        model.merges = merges
        found = extracted(model, {"x": x}, theta=0.9)
        assert found.ends == []
        paths.append(found.paths)
    for one, other in zip(*paths, strict=True):
        for name in ("first/linear", "second/linear", "input"):
            assert np.array_equal(one.points[name], other.points[name])
            if name != "input":
                assert np.array_equal(one.weights[name], other.weights[name])


def test_gates_and_splits() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 6), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            value, gate = self.first(x).chunk(2, dim=1)
            return self.head(value * gate.sigmoid())

    found = extracted(Gated(), {"x": torch.randn(3, 4)}, theta=0.9)
    assert found.ends == []
    for path in found.paths:
        taken = path.points["mul"]
        assert len(taken)
        # Both factors, at their places before the split.
        expected = sorted([*taken.tolist(), *(taken + 3).tolist()])
        assert path.points["first/linear"].tolist() == expected


def test_what_an_attention_cannot_compute_again_ends_paths() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            q, k, v = self.first(x), 2 * self.first(x), self.first(-x)
            attend = nn.functional.scaled_dot_product_attention
            return self.head(attend(q, k, v, dropout_p=0.5)[:, 0])

    torch.manual_seed(0)
    (end,) = extracted(Dropped(), {"x": torch.randn(2, 6, 4)}).ends
    assert end.reason == "its attention weights cannot be computed again, as with dropout"
    assert (end.type, end.lost) == ("attention", True)


def test_the_cost_is_limited_by_leaving_out_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: the program takes 1 per run, and the tool 30."""
    now = 0

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            nonlocal now
            now += 1
            return super().forward(x)

    class Costly(EffectivePath):
        def _extract(self, run: Any) -> None:
            nonlocal now
            super()._extract(run)
            now += 30

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    tool, model, x = Costly(cost=4.0), Slow(3, 2), torch.randn(1, 3)
    with amanda.apply(tool):
        for _ in range(40):
            model(x)
    result = tool.result()
    # The first does not count. Two are measured. Then as many are left out as it takes until all
    # others and the next, which takes 31, are at most 4 on average: 16, and later 1 of 10 is not.
    assert [path.run for path in result.paths] == [0, 3, 20, 30]
    assert result.skipped == 36
    assert result.cost == (3 * 31 + 36) / 39 <= 4
    assert "36 runs left out to limit the cost" in result.table().title
    with pytest.raises(ValueError, match="4 samples with a path and 40 labels, because 36 runs"):
        result.class_paths([0] * 40)
    tool = Costly(cost=None)
    with amanda.apply(tool):
        for _ in range(5):
            model(x)
    assert [path.run for path in tool.result().paths] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="cost must be above 1"):
        EffectivePath(cost=1)
