"""`sensitivity`: its estimates equal those of gradients by hand, and rank as measuring does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_tools.sensitivity import (
    MeasuredOp,
    MeasuredResult,
    SensitiveOp,
    Sensitivity,
    SensitivityResult,
    measure_damage,
)


def quantized(value: Any, axes: Any) -> Any:
    scale = value.abs().amax(axes, keepdim=True) / 7
    return (value / scale).round().clamp(-7, 7) * scale


def quantized3(value: Any, axes: Any = 1) -> Any:
    scale = value.abs().amax(axes, keepdim=True) / 3
    return (value / scale).round().clamp(-3, 3) * scale


def test_damage_and_noise_are_those_computed_by_hand() -> None:
    torch.manual_seed(0)
    layer, tool, squares = torch.nn.Linear(6, 4), Sensitivity("int4", "int4"), []
    for _ in range(3):
        x = torch.randn(1, 6, requires_grad=True)
        with amanda.apply(tool):
            layer(x).square().sum().backward()
        w = layer.weight.detach().clone().requires_grad_()
        torch.autograd.backward(F.linear(x.detach(), w, layer.bias.detach()).square().sum())
        assert w.grad is not None
        assert x.grad is not None
        noise = quantized(w.detach(), 1) - w.detach(), quantized(x.detach(), (0, 1)) - x.detach()
        squares.append(float((noise[0] * w.grad).sum() + (noise[1] * x.grad).sum()) ** 2)
    (row,) = tool.result().ops
    assert row.damage == pytest.approx(sum(squares) / 6, rel=1e-4)
    assert (row.operands, row.executions, row.passes) == (2, 3, 3)
    signal = layer.weight.detach().square().sum()
    ratio = 10 * math.log10(float(signal / (quantized(w.detach(), 1) - w.detach()).square().sum()))
    assert row.sqnr is not None
    assert row.sqnr <= ratio + 1e-3


class Mixed(torch.nn.Module):
    """A frozen table, a layer whose noise is large, and a branch that no backward pass reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.a, self.b = (
            torch.nn.Embedding(20, 16).requires_grad_(False),
            torch.nn.Linear(16, 16),
            torch.nn.Linear(16, 4),
        )
        self.aside = torch.nn.Linear(16, 4)
        with torch.no_grad():
            self.a.weight[0, 0] = 60.0

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(self.emb(i)))
        self.aside(h.detach())
        result: torch.Tensor = self.b(h)
        return result


def test_what_was_not_measured_is_the_last_with_its_reason() -> None:
    torch.manual_seed(0)
    model, tool = Mixed(), Sensitivity()
    with amanda.apply(tool):
        for _ in range(3):
            (model(torch.randint(0, 20, (1, 6))).sum()).backward()
    ops = tool.result().ops
    # They are ordered by damage, and those without by noise.
    assert {op.name for op in ops[:2]} == {"a/linear", "b/linear"}
    assert ops[0].damage >= ops[1].damage  # type: ignore[operator]
    assert {op.name for op in ops[2:]} == {"emb/embedding", "aside/linear"}
    assert all(op.damage is None and "no backward pass" in op.unmeasured for op in ops[2:])
    reasons = {op.name: op.unmeasured for op in ops}
    # The table is frozen, so that what the first layer reads has no gradient.
    assert reasons["a/linear"] == "without that of its input, which has no gradient"
    assert reasons["b/linear"] == ""
    rows = [row[5] for row in tool.result().table().rows]
    assert rows[2:] == ["not measured", "not measured"]


def test_without_a_backward_pass_nothing_is_missing() -> None:
    tool = Sensitivity()
    with amanda.apply(tool), torch.no_grad():
        Mixed()(torch.arange(6)[None])
    assert not any(op.unmeasured for op in tool.result().ops)


def test_an_operator_that_was_not_changed_was_not_measured() -> None:
    model, runs = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)), []

    def program() -> Any:
        runs.append(1)
        h = model[0](torch.ones(2, 4))
        return model[1](h) if len(runs) == 1 else torch.nn.functional.linear(h, torch.eye(4)[:3])

    found = measure_damage(program, "int3", "none").ops
    first, last = found
    assert first.unmeasured == ""
    assert (last.divergence, last.error) == (None, None)
    assert last.unmeasured == "it was not executed again"


def test_pruning_is_ranked_by_the_weights_that_it_sets_to_zero() -> None:
    torch.manual_seed(0)
    layer, tool = torch.nn.Linear(6, 4), Sensitivity(sparsity=0.5)
    with amanda.apply(tool):
        layer(torch.ones(1, 6)).sum().backward()
    w = layer.weight.detach()
    smallest = w.flatten()[w.abs().flatten().argsort()[:12]].sum()
    (row,) = tool.result().ops
    assert row.damage == pytest.approx(float(smallest) ** 2 / 2, rel=1e-4)


def test_nothing_changes_and_without_gradients_noise_ranks() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x, tool = torch.randn(2, 6), Sensitivity("int3", "int8")
    with torch.no_grad():
        wanted = model(x)
        with amanda.apply(tool):
            assert torch.equal(model(x), wanted)
    found = tool.result()
    ratios = [row.sqnr for row in found.ops]
    assert len(ratios) == 2
    assert None not in ratios
    assert ratios == sorted(ratios, key=lambda ratio: ratio or 0.0)
    assert "by noise of operands of weights in int3" in found.table().title
    assert json.loads(found.to_json())["format"] == "amanda.sensitivity/1"


def classifier() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def kl(scores: Any, others: Any) -> float:
    """Return the divergence as PyTorch computes it."""
    logs = scores.log_softmax(-1), others.log_softmax(-1)
    return float(F.kl_div(logs[1], logs[0], reduction="batchmean", log_target=True))


def test_outputs_are_those_of_the_operator_with_changed_operands() -> None:
    model: Any = classifier()
    x, tool = torch.randn(5, 6), Sensitivity("int3", "int3")
    with amanda.apply(tool), torch.no_grad():
        model(x)
    with torch.no_grad():
        for index, value in ((0, x), (2, model[1](model[0](x)))):
            layer: Any = model[index]
            real = layer(value)
            other = F.linear(quantized3(value, (0, 1)), quantized3(layer.weight), layer.bias)
            (row,) = [one for one in tool.result().ops if one.name.startswith(f"{index}/")]
            ratio = 10 * math.log10(float(real.square().sum() / (other - real).square().sum()))
            assert row.output_sqnr == pytest.approx(ratio, rel=1e-3)
            assert row.output_divergence == pytest.approx(kl(real, other), rel=1e-3)


def test_measured_damage_is_that_of_one_changed_operator() -> None:
    model, x = classifier(), torch.randn(5, 6)
    found = measure_damage(lambda: model(x), "int3", "none")
    damages = [op.divergence or 0.0 for op in found.ops]
    assert damages == sorted(damages, reverse=True)
    real = model(x).detach()
    for index in (0, 2):
        other: Any = classifier()
        with torch.no_grad():
            other[index].weight.copy_(quantized3(other[index].weight))
            changed = other(x)
        (row,) = [op for op in found.ops if op.name.startswith(f"{index}/")]
        assert row.divergence == pytest.approx(kl(real, changed), rel=1e-4)
        squares = (changed - real).square().sum(1).mean()
        assert row.error == pytest.approx(float(squares) / 2, rel=1e-4)
    pruned = measure_damage(lambda: model(x), sparsity=0.5)
    assert len(pruned.ops) == 2
    assert pruned.change == "weights with 50% of zeros"
    assert "2 operators by the measured damage of weights" in str(pruned.table())


def test_agreement_is_spearmans_rank_correlation() -> None:
    scipy = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, 6, (2, 20), generator=generator).tolist()
    truth = MeasuredResult("", [MeasuredOp("", n, float(v), 0.0) for n, v in enumerate(first)])
    rows = [SensitiveOp("", n, "", None, 1, damage=float(v)) for n, v in enumerate(second)]
    wanted = scipy.spearmanr(first, second).statistic
    assert truth.agreement(SensitivityResult("", rows)) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="0 operators have the figure sqnr"):
        truth.agreement(SensitivityResult("", rows), "sqnr")


def test_operators_that_write_or_draw_are_not_executed_again() -> None:
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    q = torch.randn(1, 1, 4, 8)
    with amanda.apply(Sensitivity()):
        x += y
        torch.manual_seed(0)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        state = torch.get_rng_state()
        out = torch.empty(3, 3)
        torch.mm(x, y.t(), out=out)
    assert x.eq(2).all()
    torch.manual_seed(0)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_of_recurrent_layers_draws_as_without_the_tool(kind: Any, packed: bool) -> None:
    torch.manual_seed(0)
    layer, x = kind(3, 4, 2, dropout=0.5), torch.randn(5, 2, 3)
    given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3])) if packed else x

    def values() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [layer(given)[0][0], layer(given)[0][0], torch.get_rng_state()]

    plain = values()
    with amanda.apply(Sensitivity()):
        assert all(map(torch.equal, values(), plain))
    tool = Sensitivity()
    with amanda.apply(tool), torch.no_grad():
        layer.eval()(given)  # It has no dropout, so it is measured.
    assert tool.result().ops


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("sparsity", [None, 0.5])
def test_odd_values_rank_without_errors(value: float, sparsity: float | None) -> None:
    model: Any = classifier()
    x, tool = torch.randn(2, 6), Sensitivity(sparsity=sparsity)
    with torch.no_grad():
        model[0].weight.fill_(value)
    with amanda.apply(tool):
        model(x).sum().backward()
        model(x[:0]).sum().backward()
    found = tool.result()
    json.loads(found.to_json())
    odd = any("operands that are not finite" in note for note in found.notes)
    assert odd is not math.isfinite(value)


@pytest.mark.parametrize("options", [{"weights": "int1"}, {"sparsity": 2.0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"int1|sparsity"):
        Sensitivity(**options)
