"""TorchScript in the FLOPs profiler: the figures of the same module in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import amanda
from amanda_tools.flops import CountedOp, Flops, FlopsResult
from amanda_tools.summary import Summary

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.down = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.turned, self.act = nn.ConvTranspose2d(4, 2, 2, groups=2), nn.GELU()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(2, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.turned(self.down(self.norm(self.conv(x)))))
        y = self.head(self.drop(y.mean([2, 3])))
        if y.shape[0] > 2:  # Another path, with another product.
            y = y @ y.t()
        return torch.softmax(y, -1)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(9, 8), nn.LSTM(8, 6, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.rnn(self.words(x))[0]
        return output


IMAGES = torch.rand(2, 3, 10, 10)
WORDS = torch.arange(15).reshape(3, 5) % 9
#: Name -> a form of TorchScript that runs a module or function.
FORMS: dict[str, Callable[..., Any]] = {
    "script": lambda model, *inputs: torch.jit.script(model),
    "trace": lambda model, *inputs: torch.jit.trace(  # type: ignore[no-untyped-call]
        model, inputs, check_trace=False
    ),
}


def count(run: Callable[[], Any], backward: bool = True, **options: Any) -> FlopsResult:
    tool = Flops(**options)
    with amanda.apply(tool), torch.set_grad_enabled(backward):
        output = run()
        if backward:
            output.sum().backward()
    return tool.result()


def by_torch(run: Callable[[], Any]) -> tuple[int, int]:
    """Return the multiply-accumulates that PyTorch's own counter finds, forward and backward."""
    with FlopCounterMode(display=False) as forward:
        output = run()
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return forward.get_total_flops() // 2, backward.get_total_flops() // 2


def the(result: FlopsResult) -> CountedOp:
    (op,) = result.ops
    return op


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [2, 3])
def test_a_script_costs_what_the_module_costs(form: str, batch: int) -> None:
    model = Vision()
    images = torch.rand(batch, 3, 10, 10)
    script = FORMS[form](model, images)
    expected = by_torch(lambda: model(images))
    result = count(lambda: script(images))
    assert (result.macs, result.backward_macs) == expected
    assert result.unknown == []
    assert any("TorchScript" in note for note in result.notes)
    normed = count(lambda: script(images), include=["matmul", "norm"])
    assert "inside TorchScript only products are counted" in normed.notes


def test_calls_after_the_first_and_other_shapes() -> None:
    """PyTorch optimizes a script after its first calls; each shape has a cost of its own."""
    model = Vision()
    script = torch.jit.script(model)
    inputs = [IMAGES, IMAGES, IMAGES, torch.rand(3, 3, 8, 8), IMAGES]
    expected = [by_torch(lambda x=x: model(x)) for x in inputs]  # type: ignore[misc]

    def run() -> Any:
        return sum(script(x).sum() for x in inputs)

    result = count(run)
    assert (result.macs, result.backward_macs) == tuple(map(sum, zip(*expected, strict=True)))
    assert the(result).calls == the(result).backward_calls == len(inputs)


@pytest.mark.parametrize("form", FORMS)
def test_a_script_in_a_module(form: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = FORMS[form](Vision(), IMAGES), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(self.inner(x))

    model = Outer()
    result = count(lambda: model(IMAGES))
    inner, out = (result.by_module()[name] for name in ("inner", "out"))
    assert (inner.macs, inner.backward_macs) == by_torch(lambda: Vision()(IMAGES))
    assert (out.macs, out.backward_macs) == (2 * 5 * 2, 2 * 2 * 5 * 2)


def test_recurrent_layers() -> None:
    script = torch.jit.script(Sequence())
    each = 3 * 5 * 4 * 6  # Rows times the width of the four gates.
    forward = each * (8 + 6) + each * (6 + 6)
    result = count(lambda: script(WORDS))
    assert (result.macs, result.backward_macs) == (forward, 2 * forward)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "model",
    [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.TransformerDecoderLayer(8, 2, 16)],
)
def test_attention(model: nn.Module, train: bool) -> None:
    """In evaluation without gradients the encoder is one operator."""
    model.train(train)
    x = torch.rand(3, 5, 8)
    inputs = (x, x) if isinstance(model, nn.TransformerDecoderLayer) else (x,)
    script = torch.jit.script(model)
    expected = count(lambda: model(*inputs), train)
    result = count(lambda: script(*inputs), train)
    assert result.unknown == []
    assert result.macs == expected.macs > 0


def test_products_of_vectors_keywords_and_defaults() -> None:
    @torch.jit.script
    def function(x: torch.Tensor, y: list[torch.Tensor], times: int = 2, scale: float = 1.0) -> Any:
        for _ in range(times):
            x = torch.mv(y[0], x) * scale
        return torch.dot(x, torch.addmv(x, y[1], x)) + torch.addr(y[1], x, x).sum()

    x = torch.rand(4, requires_grad=True)
    pair = [torch.rand(4, 4), torch.rand(4, 4)]
    for macs, run in (
        (16 * 2 + 16 + 4 + 16, lambda: function(x, pair)),
        (16 * 3 + 16 + 4 + 16, lambda: function(x, pair, 3)),
        (16 * 5 + 16 + 4 + 16, lambda: function(y=pair, scale=2.0, x=x, times=5)),
    ):
        result = count(run, backward=False)
        assert (result.macs, result.unknown) == (macs, [])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch.linalg.inv(x).sum(), "no formula for aten.linalg_inv_ex.default"),
        (lambda x: (x @ x if bool(x.sum() > 0) else x).sum(), "it does not run without values"),
    ],
)
def test_what_cannot_be_counted_is_listed(function: Callable[..., Any], why: str) -> None:
    x = torch.eye(3, requires_grad=True)
    if why.startswith("no"):
        script: Any = torch.jit.trace(function, x)  # type: ignore[no-untyped-call]
    else:
        script = torch.jit.script(_depends_on_values)
    result = count(lambda: script(x))
    assert why in (the(result).problem or "")
    assert result.unknown == [the(result)]


def _depends_on_values(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        x = x @ x
    return x.sum()


def test_the_program_is_what_it_is_without_the_tool() -> None:
    def run(tool: amanda.Tool | None) -> list[Any]:
        torch.manual_seed(0)
        model = Vision()
        script: Any = torch.jit.script(model)
        found = []
        with amanda.apply(*[] if tool is None else [tool]):
            for _ in range(4):
                script(IMAGES).square().sum().backward()
                plan = str(script.graph_for(IMAGES))
                found.append(
                    [plan, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                )
            found.append([torch.rand(3), *(b.clone() for b in model.buffers())])
        return found

    for plain, with_tool in zip(run(None), run(Flops()), strict=True):
        assert len(plain) == len(with_tool) > 1
        for one, other in zip(plain, with_tool, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_summary_has_the_cost_of_a_script() -> None:
    tool = Summary()
    script: Any = torch.jit.script(Vision())
    with amanda.apply(tool), torch.no_grad():
        script(IMAGES)
    assert tool.result().macs == by_torch(lambda: Vision()(IMAGES))[0]
