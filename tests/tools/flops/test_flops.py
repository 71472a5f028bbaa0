"""The FLOPs profiler on PyTorch: closed forms, published figures, gradients and forms of output."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.results import HasResult, Result
from amanda_tools.flops import CountedOp, Flops, FlopsResult, operators

from ..classifiers import CLASSIFIERS, FusedBert, bert_base

Program = Callable[[], Any]


def count(program: Program, **options: Any) -> FlopsResult:
    """Return the cost of one run, including gradients if its result has any."""
    tool = Flops(**options)
    with amanda.apply(tool):
        output = program()
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor) and output.requires_grad:
            total: Any = output.sum()
            total.backward()
    return tool.result()


def p(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, requires_grad=True)


def c(*shape: int) -> torch.Tensor:
    return torch.rand(*shape)


def eye() -> torch.Tensor:
    return torch.eye(4).to_sparse()


Case = tuple[Program, int, int]
#: Name -> program, multiply-accumulates forward, and those of the gradients.
CLOSED: dict[str, Case] = {
    "mv": (lambda: torch.mv(p(4, 3), p(3)), 12, 24),
    "dot": (lambda: torch.dot(p(3), p(3)), 3, 6),
    "addmv": (lambda: torch.addmv(p(4), p(4, 3), p(3)), 12, 24),
    "addmm": (lambda: torch.addmm(p(5), p(4, 3), p(3, 5)), 60, 120),
    "bmm": (lambda: torch.bmm(p(2, 4, 3), c(2, 3, 5)), 120, 120),
    "baddbmm": (lambda: torch.baddbmm(p(2, 4, 5), p(2, 4, 3), p(2, 3, 5)), 120, 240),
    "addbmm": (lambda: torch.addbmm(p(4, 5), p(2, 4, 3), p(2, 3, 5)), 120, 240),
    "matmul of a vector": (lambda: p(3) @ p(2, 3, 5), 30, 60),
    "matmul, broadcast": (lambda: p(6, 1, 4, 3) @ p(2, 3, 5), 720, 1440),
    "inner": (lambda: torch.inner(p(2, 3), p(4, 3)), 24, 48),
    "outer": (lambda: torch.outer(p(3), p(4)), 12, 24),
    "tensordot": (lambda: torch.tensordot(p(2, 3, 4), p(3, 4, 5), 2), 120, 240),
    "linear of a vector": (lambda: F.linear(p(3), p(4, 3), p(4)), 12, 24),
    "linear": (lambda: F.linear(p(2, 3), p(4, 3), p(4)), 24, 48),
    "linear, 3-D": (lambda: F.linear(p(2, 5, 3), p(4, 3)), 120, 240),
    "linear of data": (lambda: F.linear(c(2, 3), p(4, 3), p(4)), 24, 24),
    "einsum": (lambda: torch.einsum("bij,bjk->bik", p(2, 3, 4), p(2, 4, 5)), 120, 240),
    "einsum of three": (lambda: torch.einsum("ij,jk,kl", p(2, 3), p(3, 4), p(4, 5)), 64, 128),
    "einsum of one": (lambda: torch.einsum("ij->ji", p(2, 3)), 0, 0),
    "einsum, ellipsis": (lambda: torch.einsum("...i,ij", p(2, 6, 3), p(3, 4)), 144, 288),
    "bilinear": (lambda: F.bilinear(p(3, 4), p(3, 5), p(6, 4, 5)), 3 * 6 * (20 + 5), 1350),
    "conv1d": (lambda: F.conv1d(p(2, 3, 9), p(4, 3, 3), stride=2), 2 * 4 * 4 * 9, 576),
    "conv2d": (lambda: F.conv2d(p(2, 3, 8, 8), p(4, 3, 3, 3), p(4)), 2 * 4 * 36 * 27, 15552),
    "conv2d of data": (lambda: F.conv2d(c(2, 3, 8, 8), p(4, 3, 3, 3)), 7776, 7776),
    "conv2d, no batch": (lambda: F.conv2d(p(3, 8, 8), p(4, 3, 3, 3)), 3888, 7776),
    "depthwise": (lambda: F.conv2d(p(2, 4, 8, 8), p(8, 1, 3, 3), groups=4), 2 * 8 * 36 * 9, 10368),
    "conv3d": (lambda: F.conv3d(p(1, 2, 4, 4, 4), p(3, 2, 2, 2, 2)), 3 * 27 * 16, 2592),
    "transposed": (
        lambda: F.conv_transpose2d(p(2, 4, 8, 8), p(4, 3, 3, 3), stride=2),
        2 * 4 * 64 * 27,
        27648,
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(p(2, 4, 8, 16), p(2, 4, 6, 16), p(2, 4, 6, 10)),
        2 * 4 * 8 * 6 * (16 + 10),
        19968,
    ),
    "attention, values alone": (
        lambda: F.scaled_dot_product_attention(c(1, 2, 4), c(1, 3, 4), p(1, 3, 5)),
        2 * 3 * 9,
        2 * 3 * 5,
    ),
    "attention, shared keys": (
        lambda: F.scaled_dot_product_attention(
            c(1, 4, 8, 16), c(1, 2, 6, 16), c(1, 2, 6, 16), enable_gqa=True
        ),
        4 * 8 * 6 * 32,
        0,
    ),
    "sparse by dense": (lambda: torch.sparse.mm(eye(), p(4, 3)), 12, 12),
    "sparse matmul": (lambda: eye() @ c(4, 3), 12, 0),
    "cell": (lambda: nn.LSTMCell(4, 5)(p(3, 4)), 3 * 20 * 9, 2 * 3 * 20 * 9),
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms(name: str) -> None:
    program, forward, backward = CLOSED[name]
    found = count(program)
    assert (found.macs, found.backward_macs) == (forward, backward)
    assert found.flops == 2 * forward
    assert found.unknown == []


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("learns", [True, False])
def test_recurrent_layers(kind: Any, learns: bool) -> None:
    layer: nn.Module = kind(4, 5, num_layers=2, bidirectional=True)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    first, second = gates * 5 * (4 + 5), gates * 5 * (10 + 5)
    forward = 3 * 7 * 2 * (first + second)
    with torch.set_grad_enabled(learns):
        found = count(lambda: layer(c(7, 3, 4)))
    assert found.macs == forward
    # Nobody asks for the gradient of the data.
    assert found.backward_macs == learns * (2 * forward - 3 * 7 * 2 * gates * 5 * 4)


def test_packed_sequences() -> None:
    sequences = nn.utils.rnn.pack_sequence([c(3, 4), c(2, 4)])
    assert count(lambda: nn.GRU(4, 5)(sequences)).macs == 5 * 15 * 9


ATTENTION = 4 * 2 * 6 * 8 * 8 + 2 * 2 * 6 * 6 * 8
FEED_FORWARD = 2 * 2 * 6 * 8 * 20


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_multi_head_attention(fused: bool, weights: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).train(not fused)
    x = c(2, 6, 8) if fused else p(2, 6, 8)
    with torch.set_grad_enabled(not fused):
        found = count(lambda: layer(x, x, x, need_weights=weights))
    assert found.macs == ATTENTION
    assert found.backward_macs == (0 if fused else 2 * ATTENTION)
    assert ("_native_multi_head_attention" in {op.type for op in found.ops}) == fused


@pytest.mark.parametrize("fused", [True, False])
def test_an_encoder_layer(fused: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 20, batch_first=True).train(not fused)
    with torch.set_grad_enabled(not fused):
        found = count(lambda: layer(c(2, 6, 8)))
    assert found.macs == ATTENTION + FEED_FORWARD
    assert ("_transformer_encoder_layer_fwd" in {op.type for op in found.ops}) == fused


# Published figures.

BERT = 12 * (4 * 128 * 768**2 + 2 * 128 * 768 * 3072 + 2 * 12 * 128**2 * 64) + 768**2


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa", "fused"])
def test_bert(attention: str) -> None:
    fused = attention == "fused"
    model = FusedBert().eval() if fused else bert_base(attention)
    x = c(1, 128, 768) if fused else torch.ones(1, 128, dtype=torch.long)
    with torch.no_grad():
        found = count(lambda: model(x))
    assert found.macs == BERT == 11_174_215_680
    assert found.unknown == []
    if not fused:
        modules = found.by_module()
        layer = 4 * 128 * 768**2 + 2 * 128 * 768 * 3072 + 2 * 12 * 128**2 * 64
        assert {modules[f"encoder.layer.{i}"].macs for i in range(12)} == {layer}
        assert modules["encoder"].macs == 12 * layer
        assert modules["pooler"].macs == 768**2
        assert modules["encoder.layer.7.attention.self.query"].macs == 128 * 768**2


@pytest.mark.parametrize(
    "name",
    [
        name if name == "ResNet-50" else pytest.param(name, marks=pytest.mark.slow)
        for name in CLASSIFIERS
    ],
)
def test_published_figures(name: str) -> None:
    build, side, published = CLASSIFIERS[name]
    model = build()
    with torch.no_grad():
        found = count(lambda: model(c(1, 3, side, side)))
    assert found.macs / 1e9 == pytest.approx(published, abs=0.001)
    assert found.unknown == []


# What is counted.


def network() -> nn.Sequential:
    inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
    outer = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), inner, nn.Flatten(), nn.Linear(144, 5))
    return nn.Sequential(*outer)


def test_kinds() -> None:
    model = network()
    everything = count(lambda: model(c(2, 3, 8, 8)), include=["matmul", "norm", "elementwise"])
    norm = count(lambda: model(c(2, 3, 8, 8)), include=["norm"])
    only = count(lambda: F.relu(p(7)), include=["elementwise"])
    elements = 2 * 4 * 36
    assert (norm.macs, norm.flops) == (elements, 2 * elements)
    relu = only.by_type()["relu"]
    assert (relu.macs, relu.flops, relu.backward_flops) == (0, 7, 7)
    products = 2 * 4 * 36 * (27 + 36) + 2 * 144 * 5
    assert everything.macs == products + elements
    types = everything.by_type()
    assert types["relu"].flops == elements
    assert types["sum"].flops == 10  # Of the outputs; in `count`.
    assert everything.flops == 2 * everything.macs + types["relu"].flops + 10 + types["add"].flops


def test_sums_over_the_module_tree() -> None:
    model = network()
    found = count(lambda: model(c(2, 3, 8, 8)))
    modules = found.by_module()
    assert modules[""].macs == sum(op.macs for op in found.ops) == found.macs
    assert modules["2"].macs == modules["2.0"].macs == 2 * 4 * 36 * 36
    top = [modules[path] for path in modules if path and "." not in path]
    assert sum(part.macs for part in top) == found.macs
    assert sum(part.backward_macs for part in top) == found.backward_macs
    assert sum(part.macs for part in found.by_type().values()) == found.macs
    assert modules["0"].backward_macs == modules["0"].macs  # Of the weight alone.
    assert modules["2"].backward_macs == 2 * modules["2"].macs


def test_each_execution_counts_with_its_own_shapes() -> None:
    layer = nn.Linear(3, 4)
    tool = Flops()
    with amanda.apply(tool):
        outputs: list[Any] = []
        for rows in (2, 5, 7):
            outputs = [layer(p(rows, 3)), *outputs]
        for output in outputs:
            output.sum().backward()
    found = tool.result()
    assert found.macs == 14 * 12
    assert found.backward_macs == 2 * 14 * 12
    assert sum(op.calls for op in found.ops) == 3


def test_a_causal_attention_by_half() -> None:
    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(p(2, 8, 4), p(2, 8, 4), p(2, 8, 4), is_causal=True)

    full, half = count(attend), count(attend, causal="half")
    assert full.macs == 2 * 8 * 8 * 8 == 2 * half.macs
    assert full.backward_macs == 2 * half.backward_macs
    assert count(lambda: p(2, 3) @ p(3, 4), causal="half").macs == 24


def test_what_a_checkpoint_runs_again_counts_again() -> None:
    layer = nn.Linear(3, 4)
    found = count(lambda: checkpoint(layer, p(2, 3), use_reentrant=True))
    assert found.macs == 2 * 24
    assert found.backward_macs == 2 * 24


def test_a_gradient_that_nobody_asks_for_is_not_computed() -> None:
    layer, x = nn.Linear(3, 4), p(2, 3)
    tool = Flops()
    with amanda.apply(tool):
        torch.autograd.grad(layer(x).sum(), x)
    assert tool.result().backward_macs == 24


def test_without_gradients() -> None:
    found = count(lambda: p(2, 3) @ p(3, 4), backward=False)
    assert (found.macs, found.backward_macs) == (24, 0)


def test_an_optimizer_is_not_the_model() -> None:
    def train() -> None:
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(c(2, 3)).sum().backward()
        optimizer.step()

    kinds = ["elementwise"]
    assert "add" not in count(train, include=kinds).by_type()
    assert count(train, include=kinds, everything=True).flops > count(train, include=kinds).flops


# What is not counted.


def test_what_is_unknown_is_listed() -> None:
    def program() -> torch.Tensor:
        x = torch.linalg.inv(torch.eye(3) + c(3, 3))
        x = torch.fft.fft(x).real @ c(3, 2)
        x = torch.linalg.multi_dot([x, c(2, 4), c(4, 5)])
        x.shape, x.argmax(), x.long(), x.is_contiguous()
        twice: torch.Tensor = torch.special.i0(torch.special.i0(x))
        return twice

    found = count(program)
    assert found.macs == 18
    unknown = {op.type: op for op in found.unknown}
    assert set(unknown) == {"linalg_inv", "fft_fft", "linalg_multi_dot", "special_i0"}
    assert unknown["fft_fft"].problem == "no formula for fft"
    assert unknown["fft_fft"].calls == 1
    assert "order is not known" in str(unknown["linalg_multi_dot"].problem)
    assert found.total.unknown == len(found.unknown) == 5
    assert f"NOT counted: {len(found.unknown)} operators" in found.table().title
    assert len(found.table("unknown").rows) == 5
    assert "linalg_multi_dot" in found._repr_html_()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_shape_that_nobody_knows_is_listed() -> None:
    parts = torch.nested.nested_tensor([c(2, 3), c(4, 3)])
    found = count(lambda: F.linear(parts, c(5, 3)))
    assert [op.problem for op in found.unknown] == ["a shape is not known"]


# Options and forms.


def test_options() -> None:
    wrong: Any = "flops"
    with pytest.raises(ValueError, match="include must be of matmul, norm and elementwise"):
        Flops(include=[wrong])
    with pytest.raises(ValueError, match="causal must be full or half"):
        Flops(causal=wrong)


def test_the_result_has_all_forms() -> None:
    tool = Flops()
    assert isinstance(tool, HasResult)
    assert tool.result().table().rows == [("(all)", 0, 0, 0, 0, 0, 0, 0)]
    model = network()
    with amanda.apply(tool):
        model(c(2, 3, 8, 8)).sum().backward()
    found = tool.result()
    assert isinstance(found, Result)
    read = json.loads(found.to_json())
    assert read["format"] == "amanda.flops/1"
    assert read["total"]["macs"] == found.macs
    assert [CountedOp(**op) for op in read["ops"]] == found.ops
    assert read["by_module"]["2"]["macs"] == found.by_module()["2"].macs
    rows: dict[Any, Any] = {row[0]: row for row in found.table(depth=1).rows}
    assert list(rows) == ["(all)", "0", "1", "2", "4", "(no module)"]
    whole = rows.pop("(all)")
    assert [sum(row[n] for row in rows.values()) for n in range(1, 8)] == list(whole[1:])
    assert [row[0] for row in found.table(depth=None).rows][4] == "2.0"
    assert [row[0] for row in found.table("type").rows] == ["conv2d", "linear"]
    assert len(found.table("op").rows) == 3
    assert "1 MAC = 2 FLOPs; counted: matmul" in found.table().title
    assert "<td>2.0</td>" in found._repr_html_()
    assert 0 < found.tool_seconds < found.wall_seconds
    assert math.isclose(read["tool_seconds"], found.tool_seconds)
    wrong: Any = "module path"
    with pytest.raises(ValueError, match="by must be"):
        found.table(wrong)


@pytest.mark.slow
def test_as_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = count(lambda: p(2, 3) @ p(3, 4)).to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["macs"].sum() == 24


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model, x = network(), p(2, 3, 8, 8)
    plain = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    with amanda.apply(Flops(include=["matmul", "norm", "elementwise"])):
        counted = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))


@torch.library.custom_op("amanda_flops::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor, factor: int) -> torch.Tensor:
    return (x @ w) * factor


@torch.library.custom_op("amanda_flops::other", mutates_args=())
def other(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def test_operators_of_a_library_have_the_formulas_of_pytorch_s_registry() -> None:
    packet = torch.ops.amanda_flops.scaled

    @flop_counter.register_flop_formula(packet)
    def formula(x: Any, w: Any, factor: int, out_shape: Any = None, **named: Any) -> int:
        assert tuple(out_shape) == (3, 5)
        return 2 * int(x[0] * x[1] * w[1] * factor)

    x, w = torch.randn(3, 4), torch.randn(4, 5)
    counter = flop_counter.FlopCounterMode(display=False)
    try:
        with amanda.apply(tool := Flops()), counter:
            packet(x, w, 3)
            torch.ops.amanda_flops.other(x, w)
    finally:
        del flop_counter.flop_registry[packet]
    result = tool.result()
    assert sum(op.flops for op in result.ops) == counter.get_total_flops() == 360
    assert "NOT counted: 1 operator" in str(result.table())


def test_a_user_and_an_installed_library_have_formulas_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Point:
        def load(self) -> Any:
            return {
                "amanda_flops::other": lambda inputs, outputs: 7,
                "amanda_flops::scaled": lambda inputs, outputs: outputs[0].elements,
            }

    monkeypatch.setattr(operators, "entry_points", lambda group: [Point()] * (group != ""))
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    mine = {
        "amanda_flops::other": lambda inputs, outputs: outputs[0].elements * inputs[0][-1],
        "linear": lambda inputs, outputs: 1000 + (inputs[2] is None),
    }
    with amanda.apply(tool := Flops(formulas=mine)):
        torch.ops.amanda_flops.other(x, w)
        torch.ops.amanda_flops.scaled(x, w, 2)
        torch.nn.functional.linear(x, w.T)
    assert [op.macs for op in tool.result().ops] == [60, 15, 1001]
    assert tool.result().ops[0].flops == 120


def test_flex_attention_counts_as_other_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 2, length, width) for length, width in ((6, 8), (10, 8), (10, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with amanda.apply(tool := Flops()):
            flex_attention(q, k, v)
        with amanda.apply(plain := Flops()):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
    (flex,) = [op for op in tool.result().ops if op.macs]
    (known,) = plain.result().ops
    assert flex.macs == known.macs == 2 * 6 * 10 * (8 + 4)


# Of a pass, a sample and a step.


def test_a_pass_a_sample_and_a_step() -> None:
    """In all three: closed forms; `flop_counter` of PyTorch agrees on a step."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), c(8, 3)
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss()
    one = 3 * 4 + 4 * 2
    tool = Flops()
    with amanda.apply(tool):
        for _ in range(3):
            loss(model(x), c(8, 2)).backward()
            optimizer.step()
        with torch.no_grad():
            model(x)  # A pass that no step contains.
    found = tool.result()
    (of_pass,), step = found.passes, found.step
    assert step is not None
    assert (of_pass.module, of_pass.times, of_pass.samples) == ("Sequential", 4, 8)
    assert (of_pass.macs, of_pass.flops, of_pass.backward_macs) == (8 * one, 16 * one, 0)
    # The gradient of the data is not computed.
    assert (step.times, step.macs, step.backward_macs) == (3, 8 * one, 8 * (2 * one - 12))
    with flop_counter.FlopCounterMode(display=False) as counter:
        loss(model(x), c(8, 2)).backward()
    assert counter.get_total_flops() == step.flops + step.backward_flops
    assert found.macs == 4 * 8 * one
    assert found.figures()["step"] == step.flops + step.backward_flops
    assert (found.figures()["pass"], found.figures()["sample"]) == (16 * one, 2 * one)
    assert "a forward pass of Sequential (each of 4): 160 MACs for a batch of 8, 20 MACs for " in (
        found.table().title
    )
    assert "; a step (each of 3): 160 MACs forward and 224 MACs backward" in found.table().title


def test_the_pass_of_several_is_the_median_one() -> None:
    layer, tool = nn.Linear(3, 4), Flops()
    with amanda.apply(tool):
        for rows in (7, 1, 1, 2, 300):
            layer(input=c(rows, 3)) if rows == 2 else layer(c(rows, 3))
    (found,) = tool.result().passes
    assert (found.times, found.distinct, found.samples, found.macs) == (5, 4, 2, 24)
    assert tool.result().step is None
    # The layer takes its axes in another order than the batch's.
    tool = Flops(batch=5)
    with amanda.apply(tool):
        nn.LSTM(3, 4)(c(2, 5, 3))
    (found,) = tool.result().passes
    assert (found.samples, found.macs) == (5, 2 * 5 * 4 * (3 + 4) * 4)
    with pytest.raises(ValueError, match="batch must be at least 1"):
        Flops(batch=0)


def test_a_recomputed_pass_is_part_of_a_step_only() -> None:
    layer, tool = nn.Linear(3, 4), Flops()
    with amanda.apply(tool):
        checkpoint(layer, p(2, 3), use_reentrant=True).sum().backward()
        amanda.step()
    found = tool.result()
    assert found.step is not None
    assert (found.step.macs, found.macs) == (48, 48)
    assert {cost.macs for cost in found.passes} == {24}


def test_many_different_passes_are_kept_in_bounds() -> None:
    layer, tool = nn.Linear(1, 1), Flops()
    with amanda.apply(tool), torch.no_grad():
        for rows in range(1, 602):
            layer(c(rows, 1))
    (found,) = tool.result().passes
    assert (found.times, found.distinct) == (601, 256)


class Tied(nn.Module):
    """A head that shares the weight of an embedding, which costs nothing, and a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)))
        self.shift = nn.Parameter(torch.zeros(4))
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(self.words(x)) + self.shift)


def test_parameters_by_module_count_once() -> None:
    model = Tied()
    result = count(lambda: model(torch.tensor([1, 2])))
    found = result.by_module()
    expected = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
    }
    expected["head"] = None  # The weight counts at the embedding.
    assert {name: found[name].parameters for name in expected} == expected
    assert result.total.parameters == sum(p.numel() for p in model.parameters())
    # A module is followed by those inside it.
    names = [name for name in found if name.startswith("body")]
    assert names == ["body", "body.0", "body.1", "body.2", "body.2.0"]
    rows = {row[0]: row[1] for row in result.table().rows}
    assert rows["(all)"] == result.total.parameters
    assert rows["(no module)"] == model.shift.numel()
