"""`quantize`: grids equal torch's, learned steps have the gradients of their papers.

Long, since it is a list of cases.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.ao.quantization as ao
import torch.nn.functional as F

import amanda
from amanda_core.errors import AmandaWarning, ResultError, ToolError
from amanda_tools.quantize import Quantize
from amanda_tools.quantize.formats import format_named
from amanda_tools.quantize.learned import Step
from amanda_tools.quantize.observers import Histogram, quantized, weight_grid


class Residual(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.second = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.last = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.first(x))
        h = h + F.relu(self.second(h))
        out: torch.Tensor = self.last(h.mean((2, 3)))
        return out


def functional(model: Residual, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(F.conv2d(x, model.first.weight, model.first.bias, padding=1))
    h = torch.add(h, F.relu(F.conv2d(h, model.second.weight, model.second.bias, padding=1)))
    return h.mean((2, 3)) @ model.last.weight.t() + model.last.bias


def example() -> tuple[Residual, torch.Tensor]:
    torch.manual_seed(0)
    return Residual().eval(), torch.randn(4, 3, 8, 8)


def by_torch(value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Fake quantization by torch's observer and kernel."""
    observer = ao.MinMaxObserver()
    observer(seen)
    scale, zero = observer.calculate_qparams()
    return torch.fake_quantize_per_tensor_affine(value, scale, zero, 0, 255)


def weight_by_torch(weight: torch.Tensor) -> torch.Tensor:
    observer = ao.PerChannelMinMaxObserver(
        0, torch.qint8, torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    observer(weight)
    scale, zero = observer.calculate_qparams()
    return torch.fake_quantize_per_channel_affine(weight, scale, zero.int(), 0, -127, 127)


def test_the_result_shows_the_scale_of_the_running_mean() -> None:
    x, net = torch.linspace(-2, 2, 40).view(10, 4), torch.nn.Linear(4, 2)
    tool, mean = Quantize("dynamic", ema=0.9), 2.0
    with torch.no_grad(), amanda.apply(tool):
        for factor in (1.0, 3.0, 0.5):
            net(x * factor)
            mean = 0.9 * mean + 0.1 * 2 * factor
    (shown,) = tool.result().activations
    assert shown.scale == pytest.approx(mean / 127)
    again = Quantize("dynamic", ema=0.9)
    again.load_state_dict(tool.state_dict())
    assert again.result().activations[0].scale == pytest.approx(mean / 127)
    plain = Quantize("dynamic")
    with torch.no_grad(), amanda.apply(plain):
        net(x)
    # Each execution has a scale of its own.
    assert plain.result().activations[0].scale is None


def test_a_quantized_model_computes_what_torchs_fake_quantization_gives() -> None:
    model, x = example()
    seen, other = x, torch.randn(4, 3, 8, 8)
    tool = Quantize()
    with amanda.apply(tool), torch.no_grad():
        real = model(seen)
        found = model(other)
    assert torch.allclose(real, quantized_residual(model, seen, seen, False), atol=1e-5)
    torch.testing.assert_close(found, quantized_residual(model, seen, other, True), rtol=0, atol=0)


def quantized_residual(model: Residual, seen: Any, x: Any, activations: bool) -> torch.Tensor:
    def both(seen: Any, x: Any) -> tuple[Any, Any]:
        return seen, by_torch(x, seen) if activations else x

    def conv(layer: torch.nn.Conv2d, value: Any) -> Any:
        return F.relu(F.conv2d(value, weight_by_torch(layer.weight), layer.bias, padding=1))

    with torch.no_grad():
        seen, x = both(seen, x)
        seen_h, h = conv(model.first, seen), conv(model.first, x)
        seen_g, g = conv(model.second, seen_h), conv(model.second, both(seen_h, h)[1])
        h, g = both(seen_h, h)[1], both(seen_g, g)[1]
        seen_m, m = (seen_h + seen_g).mean((2, 3)), (h + g).mean((2, 3))
        last = weight_by_torch(model.last.weight)
        return F.linear(both(seen_m, m)[1], last, model.last.bias)


def test_a_functional_model_has_the_scales_of_its_module_twin() -> None:
    model, x = example()
    tools = Quantize(), Quantize()
    with amanda.apply(tools[0]), torch.no_grad():
        model(x)
    with amanda.apply(tools[1]), torch.no_grad():
        functional(model, x)
    scales = [
        sorted(tuple(numpy.ravel(one)) for one in tool.grids.saved().values()) for tool in tools
    ]
    assert scales[0] == scales[1]
    assert len(scales[0]) == 3
    ranges = [[(a.low, a.high) for a in tool.result().activations] for tool in tools]
    assert ranges[0] == ranges[1]
    assert len(ranges[0]) == 5


@pytest.mark.parametrize(("group", "per"), [(0, "channel"), (0, "tensor"), (4, "channel")])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_and_groups_are_those_of_torch(bits: int, group: int, per: Any) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(12, 6, bias=False), torch.eye(12)
    with torch.no_grad():
        layer.weight[0].abs_()  # Its range is extended to 0.
        layer.weight[1] -= 1.0
    last = 2**bits - 1
    rows = layer.weight.detach().reshape(-1, 72 if per == "tensor" else group or 12)
    observer = ao.PerChannelMinMaxObserver(
        0, torch.quint8, torch.per_channel_affine, quant_min=0, quant_max=last
    )
    observer(rows)
    scale, zero = observer.calculate_qparams()
    rows = torch.fake_quantize_per_channel_affine(rows, scale, zero.int(), 0, 0, last)
    tool = Quantize(weights=f"int{bits}", activations="none", symmetric=False, group=group, per=per)
    with amanda.apply(tool), torch.no_grad():
        found = layer(x)
    assert torch.equal(found, F.linear(x, rows.reshape(6, 12)))
    (row,) = tool.result().weights
    assert math.prod(row.scales_shape) == len(row.scales)
    assert row.scales == scale.tolist()
    assert row.zeros == zero.tolist()
    # Another process has the same grids, of other weights.
    again = Quantize(
        weights=f"int{bits}", activations="none", symmetric=False, group=group, per=per
    )
    again.load_state_dict(tool.state_dict())
    with torch.no_grad():
        layer.weight *= 2
        with amanda.apply(again):
            layer(x)
    for name, state in tool.states.items():
        (one,), (other,) = state.saved().values(), again.states[name].saved().values()
        assert numpy.array_equal(one, other), name


def test_groups_of_a_part_and_of_a_transposed_weight_are_those_of_the_parameter() -> None:
    torch.manual_seed(0)
    x, weight = torch.eye(8), torch.nn.Parameter(torch.randn(8, 6))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Any) -> Any:
            return x @ weight, F.linear(x, weight.t()), x @ weight[:, 2:5]

    net, tool = Net(), Quantize(weights="int4", activations="none", symmetric=False, group=4)
    with amanda.apply(tool), torch.no_grad():
        whole, turned, part = net(x)
    assert torch.equal(whole, turned)
    assert torch.equal(whole[:, 2:5], part)
    assert tool.bake() == ["weight"]
    assert torch.equal(weight.detach(), whole)


def test_the_least_error_of_a_grid_with_a_zero_point_is_that_of_the_best_share() -> None:
    weight = numpy.random.default_rng(0).standard_normal((3, 200)).astype(numpy.float32) + 1
    form = format_named("int3")
    assert form is not None
    best = weight_grid(weight, [1], form, "mse", 0, True)
    error = ((quantized(weight, best) - weight) ** 2).sum(1)
    full = weight_grid(weight, [1], form, "minmax", 0, True)
    assert (error < ((quantized(weight, full) - weight) ** 2).sum(1)).all()
    known = torch.from_numpy(weight)
    for row in range(3):
        low, high = min(float(known[row].min()), 0.0), float(known[row].max())
        for share in range(1, 101):
            scale = (high - low) * share / 100 / 7
            zero = min(max(round(-low * share / 100 / scale), 0), 7)
            new = torch.fake_quantize_per_tensor_affine(known[row], scale, zero, 0, 7)
            assert error[row] <= float(((new - known[row]) ** 2).sum()) * (1 + 1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_weights_grid_of_the_least_error_is_the_best_of_those_tried(bits: int) -> None:
    weight = numpy.random.default_rng(0).standard_normal((3, 200)).astype(numpy.float32)
    form = format_named(f"int{bits}")
    assert form is not None
    best = weight_grid(weight, [1], form, "mse", 0)
    error = ((quantized(weight, best) - weight) ** 2).sum(1)
    for row in range(3):
        for share in range(1, 101):
            scale = abs(weight[row]).max() * share / 100 / form.highest
            numbers = (weight[row] / scale).round().clip(-form.highest, form.highest)
            assert error[row] <= ((numbers * scale - weight[row]) ** 2).sum() * (1 + 1e-4)


def test_percentiles_of_a_histogram_are_those_of_the_values() -> None:
    values = numpy.random.default_rng(0).standard_normal(20_000).astype(numpy.float32)
    histogram, form = Histogram(), format_named("int8")
    assert form is not None
    for part in numpy.split(values, 10):
        histogram.add(part, True)
    again = Histogram.from_json(json.loads(json.dumps(histogram.to_json())))
    grid = again.grid(form, "percentile", 99.0, False)
    low, high = numpy.percentile(values, [0.5, 99.5])
    assert float(grid.scale) == pytest.approx((high - low) / 255, rel=5e-3)
    shrunk = again.grid(form, "mse", 0, True)
    assert float(shrunk.scale) <= abs(values).max() / 127


@pytest.mark.parametrize(("form", "highest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_eight_bit_floats_are_those_of_torch(form: str, highest: float) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(6, 4, bias=False), torch.randn(3, 6)
    tool = Quantize(weights=form, activations="none")
    with amanda.apply(tool), torch.no_grad():
        found = layer(x)
    dtype = torch.float8_e4m3fn if form.endswith("e4m3") else torch.float8_e5m2
    scale = layer.weight.detach().abs().amax(1, keepdim=True) / highest
    weight = (layer.weight.detach() * (1 / scale)).to(dtype).float() * scale
    torch.testing.assert_close(found, F.linear(x, weight))


@pytest.mark.parametrize("per_token", [False, True])
def test_dynamic_scales_are_those_of_q8bert(per_token: bool) -> None:
    torch.manual_seed(0)
    layer, tool = torch.nn.Linear(6, 4), Quantize("dynamic", per_token=per_token)
    for _ in range(2):
        x = torch.randn(3, 6)
        with amanda.apply(tool), torch.no_grad():
            found = layer(x)

    def symmetric(value: Any, largest: Any) -> tuple[Any, Any]:
        scale = largest / 127
        return (value / scale).round().clamp(-127, 127) * scale, scale

    weight, of_weight = symmetric(layer.weight.detach(), layer.weight.detach().abs().max())
    largest = x.abs().amax(1, keepdim=True) if per_token else x.abs().max()
    x, of_x = symmetric(x, largest)
    bias = layer.bias.detach()
    bias = bias if per_token else (bias / (of_x * of_weight)).round() * of_x * of_weight
    torch.testing.assert_close(found, F.linear(x, weight, bias))


def test_q8bert_quantizes_tables_leaves_normalizations_and_passes_gradients() -> None:
    def symmetric(value: torch.Tensor) -> torch.Tensor:
        scale = value.detach().abs().max() / 127
        rounded = (value.detach() / scale).round() * scale
        return value + (rounded - value).detach()

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(9, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4), torch.nn.GELU()
    )
    modules: Any = model
    table, norm, layer, _ = modules
    indices, tool = torch.tensor([[1, 4, 4]]), Quantize("dynamic")
    with amanda.apply(tool):
        found = model(indices)
    hidden = norm(F.embedding(indices, symmetric(table.weight)))
    scale = hidden.detach().abs().max() / 127 * layer.weight.detach().abs().max() / 127
    bias = layer.bias + ((layer.bias / scale).round() * scale - layer.bias).detach()
    wanted = F.gelu(F.linear(symmetric(hidden), symmetric(layer.weight), bias))
    torch.testing.assert_close(found, wanted)
    gradients = [
        torch.autograd.grad(one.square().sum(), list(model.parameters())) for one in (found, wanted)
    ]
    torch.testing.assert_close(*gradients)
    assert [one.op for one in tool.result().activations] == ["2/linear"]


def test_a_running_mean_of_ranges_follows_the_training_until_it_is_frozen() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    tool, mean = Quantize("dynamic", ema=0.9), None
    for largest in (1.0, 3.0, 2.0):
        mean = largest if mean is None else 0.9 * mean + 0.1 * largest
        with amanda.apply(tool):
            layer(torch.tensor([[largest, 0.0]]))
    again = Quantize("dynamic", ema=0.9)
    again.load_state_dict(
        json.loads(json.dumps(tool.state_dict()["progress"])) and tool.state_dict()
    )
    for one in (tool, again):
        one.freeze()
        with amanda.apply(one):
            layer(torch.tensor([[100.0, 0.0]]))
        (kept,) = one.progress()["activations"].values()
        assert kept["mean"] == pytest.approx(mean)


class Lsq(torch.autograd.Function):
    """The rule of the paper, written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Any, s: Any, low: float, high: float, gain: float) -> Any:
        ctx.save_for_backward(x, s)
        ctx.rest = low, high, gain
        return (x / s).clamp(low, high).round() * s

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x, s), (low, high, gain) = grads, ctx.saved_tensors, ctx.rest
        v = x / s
        inside = (v >= low) & (v <= high)
        of_step = torch.where(v < low, low, torch.where(v > high, high, v.round() - v))
        return grad * inside, (grad * of_step).sum().reshape(s.shape) * gain, None, None, None


def test_gradients_of_lsq_equal_those_written_by_hand() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(20, 10, bias=False), torch.randn(8, 20, requires_grad=True)
    tool = Quantize("lsq", "int3", "int3")
    with amanda.apply(tool):
        found = layer(x)
        found.square().sum().backward()
    of_weight, of_x = tool.parameters()
    gains = 1 / math.sqrt(200 * 3), 1 / math.sqrt(20 * 3)
    for step, value in ((of_weight, layer.weight), (of_x, x)):
        assert step.item() == pytest.approx(2 * value.abs().mean().item() / math.sqrt(3))
    w, y = (t.detach().clone().requires_grad_() for t in (layer.weight, x))
    s, r = (t.detach().clone().requires_grad_() for t in (of_weight, of_x))
    rule: Any = Lsq.apply
    wanted = F.linear(rule(y, r, -4, 3, gains[1]), rule(w, s, -4, 3, gains[0]))
    torch.autograd.backward(wanted.square().sum())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for one, other in ((layer.weight, w), (x, y), (of_weight, s), (of_x, r)):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_gradients_of_tqt_and_lsq_plus_equal_the_closed_forms() -> None:
    torch.manual_seed(0)
    form, x = format_named("int3"), torch.randn(50)
    assert form is not None
    step = Step("tqt", form, x / 2, (0,), True)
    value = x.clone().requires_grad_()
    step.quantized(value).sum().backward()
    s = 2 ** math.ceil(step.parameters[0].item()) / 4
    r = (x / s).round()
    part = torch.where(r < -4, -4.0, torch.where(r > 3, 3.0, r - x / s))
    assert step.parameters[0].grad is not None
    assert value.grad is not None
    assert step.parameters[0].grad.item() == pytest.approx(float((s * math.log(2) * part).sum()))
    assert torch.equal(value.grad, ((r >= -4) & (r <= 3)).float())
    # torch's learnable kernel rounds before it clips, as TQT does.
    scale, zero = torch.tensor([s], requires_grad=True), torch.zeros(1)
    kernel: Any = torch._fake_quantize_learnable_per_tensor_affine
    kernel(x, scale, zero, -4, 3, 1.0).sum().backward()
    assert scale.grad is not None
    assert scale.grad.item() * s * math.log(2) == pytest.approx(step.parameters[0].grad.item())
    plus = Step("lsq+", form, x[None] / 2, (0, 1), False)
    plus.quantized(x[None]).sum().backward()
    size, offset = (one.item() for one in plus.parameters)
    outside = ((x - offset) / size < 0) | ((x - offset) / size > 7)
    assert plus.parameters[1].grad is not None
    assert plus.parameters[1].grad.item() == pytest.approx(outside.sum().item() / math.sqrt(50 * 7))


def train(model: Any, optimizer: Any, tool: Quantize, steps: range) -> None:
    with amanda.apply(tool):
        for step in steps:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()


def small() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def test_steps_join_the_programs_optimizer_with_a_notice_unless_it_takes_them() -> None:
    model, tool = small(), Quantize("lsq", "int4", "int4")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.warns(AmandaWarning, match="4 learned tensors were added to the first group"):
        train(model, optimizer, tool, range(1))
    before = [one.item() for one in tool.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, tool, range(1, 3))
    assert all(a != b.item() for a, b in zip(before, tool.parameters(), strict=True))
    taken, other = Quantize("lsq", "int4", "int4"), small()
    with amanda.apply(taken):
        other(torch.randn(4, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD([*other.parameters(), *taken.parameters()], 0.01)
        train(other, optimizer, taken, range(2))
    with pytest.raises(ToolError, match="the model has not run yet"):
        Quantize("tqt").parameters()


@pytest.mark.parametrize("method", ["lsq", "lsq+", "tqt"])
def test_training_resumes_to_the_bit(method: Any, tmp_path: Path) -> None:
    def begin(state: Path | None) -> tuple[Any, Quantize, Any]:
        model, tool = small(), Quantize(method, "int4", "int4")
        if state is not None:
            model.load_state_dict(torch.load(tmp_path / "model.pt"))
            tool.load(state)
        with amanda.apply(tool), torch.no_grad():
            model(torch.ones(4, 6))
        return model, tool, torch.optim.SGD([*model.parameters(), *tool.parameters()], 0.01)

    model, tool, optimizer = begin(None)
    train(model, optimizer, tool, range(2))
    path = tool.save(tmp_path / "tool.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    train(model, optimizer, tool, range(2, 4))
    again, loaded, other = begin(path)
    train(again, other, loaded, range(2, 4))
    ours = [*model.parameters(), *tool.parameters()]
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours, [*again.parameters(), *loaded.parameters()], strict=True)
    )
    with pytest.raises(ResultError):
        Quantize(method, "int2", "int4").load(path)


def test_scales_are_saved_loaded_and_baked(tmp_path: Path) -> None:
    model, x = example()
    tool, again = Quantize(), Quantize()
    with amanda.apply(tool), torch.no_grad():
        model(x)
        wanted = model(x)
    again.load(tool.save(tmp_path / "scales.safetensors"))
    with amanda.apply(again), torch.no_grad():
        assert torch.equal(model(x), wanted)
    found = json.loads(tool.result().to_json())
    assert [len(w["scales"]) for w in found["weights"]] == [8, 8, 5]
    only = Quantize(activations="none")
    with amanda.apply(only), torch.no_grad():
        wanted = model(x)
    original = model.first.weight.detach().clone()
    assert sorted(only.bake()) == ["first.weight", "last.weight", "second.weight"]
    assert torch.equal(model(x), wanted)
    assert torch.equal(model.first.weight, weight_by_torch(original))


def test_experts_have_scales_of_their_own_and_those_without_tokens_are_named() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 5, 6))

        def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
            return torch.stack([F.linear(x, self.weight[i]) for i in chosen]).sum(0)

    torch.manual_seed(0)
    model, tool = Experts(), Quantize(per="tensor")
    with amanda.apply(tool), torch.no_grad():
        model(torch.randn(3, 6), [0, 2])
    found = tool.result()
    wanted = model.weight.detach().abs().amax((1, 2)) / 127
    assert found.weights[0].scales == pytest.approx(wanted.tolist())
    assert found.uncalibrated == ["weight[1]", "weight[3]"]
    tool.freeze()
    with amanda.apply(tool), torch.no_grad():
        model(torch.randn(3, 6), [1])
    assert any("linear" in name for name in tool.result().uncalibrated)


def test_experts_of_one_grouped_product_without_rows_are_named() -> None:
    torch.manual_seed(0)
    rows, ends = torch.randn(6, 16).bfloat16(), torch.tensor([3, 3, 6, 6], dtype=torch.int32)
    weight, tool = torch.nn.Parameter(torch.randn(4, 16, 8).bfloat16()), Quantize()
    for _ in range(2):
        with amanda.apply(tool), torch.no_grad():
            found = torch._grouped_mm(rows, weight, offs=ends)
    assert tool.result().uncalibrated == ["_grouped_mm[1]", "_grouped_mm[3]"]
    by_hand = torch.stack([weight_by_torch(one.t().float()).t() for one in weight.detach()])
    seen = rows.float()
    wanted = torch._grouped_mm(by_torch(seen, seen).bfloat16(), by_hand.bfloat16(), offs=ends)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_in_a_loop_gathered_and_grouped_get_the_same_grids(name: str) -> None:
    pytest.importorskip("transformers")
    from ..mixtures import IMPLEMENTATIONS, build, output_of, prompts

    outputs, named = [], []
    for implementation in IMPLEMENTATIONS:
        model, tool = build(name, implementation).eval(), Quantize(activations="none")
        with amanda.apply(tool):
            outputs.append(output_of(model, prompts(model)[0]))
        named.append(tool.result().uncalibrated)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-4, atol=1e-5)
    assert named[0]
    assert sorted(named[1]) == sorted(named[2]) == sorted(named[0])


def test_recurrent_layers_multiply_quantized_inputs_and_matrices() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(6, 4, 2, bidirectional=True), torch.randn(5, 2, 6)
    twin = torch.nn.LSTM(6, 4, 2, bidirectional=True)
    twin.load_state_dict(layer.state_dict())
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() == 2:
                parameter.copy_(weight_by_torch(parameter))
    for value in (x, torch.nn.utils.rnn.pack_sequence([x[:, 0], x[:3, 1]])):
        tool = Quantize()
        with amanda.apply(tool):
            layer(value)
            found = layer(value)[0]
        data = value if isinstance(value, torch.Tensor) else value.data
        quantized: Any = by_torch(data, data)
        if not isinstance(value, torch.Tensor):
            quantized = value._replace(data=quantized)
            found, wanted = found.data, twin(quantized)[0].data
        else:
            wanted = twin(quantized)[0]
        torch.testing.assert_close(found, wanted)
        gradients = [
            torch.autograd.grad(one.square().sum(), list(model.parameters()))
            for one, model in ((found, layer), (wanted, twin))
        ]
        torch.testing.assert_close(*gradients)
        result = tool.result()
        assert result.parameters == result.reached > 0
        assert "inner states that are not quantized" in str(result.table())


def test_a_range_is_that_of_all_executions_of_a_run() -> None:
    class Loop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.states = torch.nn.GRUCell(6, 4), list[torch.Tensor]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.zeros(2, 4)
            for one in x:
                self.states.append(h)
                h = self.cell(one, h)
            return h

    torch.manual_seed(0)
    model, tool = Loop(), Quantize()
    with amanda.apply(tool), torch.no_grad():
        model(torch.randn(5, 2, 6))
        states = torch.stack(model.states)
        row = next(one for one in tool.result().activations if one.operand == "state")
        assert (row.low, row.high) == (states.min().item(), states.max().item())
        assert row.seen == 1
        model(100 * torch.randn(5, 2, 6))
    assert row in tool.result().activations


@pytest.mark.parametrize(
    "first", [torch.zeros(0, 6), torch.zeros(2, 6), torch.full((2, 6), math.nan)]
)
@pytest.mark.parametrize("method", ["static", "lsq"])
def test_values_that_tell_no_range_calibrate_nothing(first: torch.Tensor, method: Any) -> None:
    torch.manual_seed(0)
    layer, x, tool = torch.nn.Linear(6, 3), torch.randn(4, 6), Quantize(method)
    with amanda.apply(tool), torch.no_grad():
        layer(first)
        layer(x)
        found = layer(x)
    torch.testing.assert_close(found, layer(x), rtol=0.1, atol=0.1)
    json.loads(tool.result().to_json())


@pytest.mark.parametrize("method", ["static", "dynamic", "lsq", "lsq+", "tqt"])
def test_what_is_not_finite_makes_no_scale(method: Any) -> None:
    torch.manual_seed(0)
    layer, x, tool = torch.nn.Linear(6, 3), torch.randn(4, 6), Quantize(method)
    with torch.no_grad():
        layer.weight[0, 0], x[1, 2] = math.inf, math.nan
    for _ in range(2):
        with amanda.apply(tool), torch.no_grad():
            found = layer(x)
    wanted = layer(x)
    torch.testing.assert_close(found[[0, 2, 3], 1:], wanted[[0, 2, 3], 1:], rtol=0.1, atol=0.1)
    assert all(math.isfinite(scale) for one in tool.result().weights for scale in one.scales)
    json.loads(tool.result().to_json())


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min])
def test_what_hides_elements_from_a_softmax_is_added_as_it_is(hidden: float) -> None:
    torch.manual_seed(0)
    scores, mask, tool = torch.randn(3, 4, 4), torch.zeros(3, 4, 4), Quantize()
    mask[:, 0, 1:] = hidden
    for _ in range(2):
        with amanda.apply(tool):
            found = scores + mask
    assert torch.equal(found, scores + mask)
    assert "add adds a mask and is not quantized" in tool.result().notes


def test_keys_of_a_cache_are_quantized_as_they_are_read() -> None:
    torch.manual_seed(0)
    tool, keys = Quantize("dynamic"), torch.zeros(1, 2, 0, 8)
    for _ in range(3):
        q, k = torch.randn(2, 1, 2, 1, 8).unbind()
        keys = torch.cat([keys, k], 2)
        with amanda.apply(tool), torch.no_grad():
            found = F.scaled_dot_product_attention(q, keys, keys)

    def symmetric(value: torch.Tensor) -> torch.Tensor:
        scale = value.abs().max() / 127
        return (value / scale).round() * scale

    wanted = F.scaled_dot_product_attention(symmetric(q), symmetric(keys), symmetric(keys))
    torch.testing.assert_close(found, wanted)


def test_weights_that_are_also_read_unquantized_are_not_baked() -> None:
    layer, tool = torch.nn.Linear(6, 3), Quantize(activations="none")
    with amanda.apply(tool), torch.no_grad():
        layer(torch.ones(1, 6)) + layer.weight.square().sum()
    with pytest.raises(ToolError, match=r"weight \(18, read by square\)"):
        tool.bake()


def test_an_optimizers_state_is_no_parameter_that_was_missed() -> None:
    model, tool = small(), Quantize(activations="none")
    train(model, torch.optim.Adam(model.parameters()), tool, range(2))
    result = tool.result()
    assert (result.parameters, result.reached, result.unreached) == (72, 72, [])


def test_attention_and_its_keys_and_values_are_quantized() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    tool = Quantize()
    for _ in range(2):
        with amanda.apply(tool), torch.no_grad():
            found = F.scaled_dot_product_attention(q, k, v)
    wanted = F.scaled_dot_product_attention(by_torch(q, q), by_torch(k, k), by_torch(v, v))
    torch.testing.assert_close(found, wanted)
    assert [one.operand for one in tool.result().activations] == ["query", "key", "value"]


def test_a_removed_tool_changes_nothing() -> None:
    model, x = example()
    tool = Quantize()
    with amanda.apply(tool), torch.no_grad():
        model(x)
        tool.remove()
        assert torch.equal(model(x), model(x))
    with torch.no_grad():
        wanted = model(x)
    with amanda.apply(tool), torch.no_grad():
        assert torch.equal(model(x), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int9"}, "int9"),
        ({"method": "other"}, "method must be one of"),
        ({"per_token": True}, "for the method dynamic"),
        ({"method": "lsq", "weights": "fp8_e4m3"}, "learns steps of integers"),
        ({"calibration": -1}, "calibration is from 0"),
        ({"method": "dynamic", "group": 4}, "for the method static"),
        ({"method": "lsq", "symmetric": False}, "for the method static"),
        ({"group": 4, "per": "tensor"}, "leave out per=tensor"),
        ({"group": -4}, "positive number of neighbours, or 0, not -4"),
        ({"group": 4, "weights": "none"}, "which weights=none leaves out"),
        ({"method": "lsq+", "symmetric": True}, "use lsq"),
        ({"weights": "fp8_e4m3", "activations": "none", "symmetric": False}, "floats lie around 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantize(**options)


def test_optimizers_are_watched_while_the_tool_is_applied() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    model, tool = torch.nn.Linear(4, 4), Quantize("lsq")
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for optimizer in (first, second):
        with amanda.apply(tool):
            model(torch.randn(2, 4)).sum().backward()
            with pytest.warns(AmandaWarning, match="were added"):
                optimizer.step()
        assert not hooks
        assert len(optimizer.param_groups[0]["params"]) > 2
    with amanda.apply(tool):
        assert len(hooks) == 2  # PyTorch's driver has one, too.
        tool.remove()
        assert len(hooks) == 1


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_copies_of_parameters_outside_of_modules(method: Any) -> None:
    model = torch.nn.Linear(4, 4)
    places, tool = torch.nn.Parameter(torch.ones(2, 4)), Quantize(method)
    with amanda.apply(tool):
        (torch.cat([torch.zeros(1, 4), places]).sum() + model(torch.ones(1, 4)).sum()).backward()
    assert "copied by cat" in {unread.reason for unread in tool.result().unreached}


def test_rows_of_a_parameter_are_quantized() -> None:
    """Attention to other tokens multiplies by the first rows of a parameter, and by the others."""
    attention, tool = torch.nn.MultiheadAttention(4, 2), Quantize()
    query, memory = torch.rand(3, 1, 4), torch.rand(5, 1, 4)
    with amanda.apply(tool):
        attention(query, memory, memory)
    names = {weight.name for weight in tool.result().weights}
    assert names == {"in_proj_weight", "out_proj.weight"}


def test_the_chart_of_weights_begins_with_the_noisiest() -> None:
    tool = Quantize()
    with amanda.apply(tool):
        torch.nn.Linear(4, 4)(torch.randn(3, 4))
    _, chart = json.loads(tool.result().to_json())["charts"]
    assert chart["title"] == "Signal-to-noise ratio of weights"
    assert chart["measures"] == [
        {"label": "SQNR", "values": ["sqnr"], "unit": "dB", "lowest": True}
    ]
