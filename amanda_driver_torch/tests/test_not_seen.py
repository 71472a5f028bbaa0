"""Results name operators that ran without tools: in transforms, scripts and fused inference."""

# mypy: allow-untyped-calls
# torch leaves much of torch.func untyped.

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import amanda
from amanda_core.testing.kit.tools import watching
from amanda_driver_torch.torch_internals.extension import native

X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)))


def per_sample(net: Net) -> Any:
    parameters = dict(net.named_parameters())

    def loss(own: Any, x: torch.Tensor) -> Any:
        return functional_call(net, own, (x,)).sum()

    return vmap(grad(loss), (None, 0))(parameters, X)


def ensemble(net: Net) -> Any:
    stacked = {name: torch.stack([p, p]) for name, p in net.named_parameters()}
    return vmap(lambda own: functional_call(net, own, (X,)))(stacked)


#: A transform, and how often it calls each of the model's operators without tools.
TRANSFORMS: dict[str, Callable[[Net], Any]] = {
    "vmap": lambda net: vmap(net)(X),
    "functional_call": lambda net: vmap(
        lambda x: functional_call(net, dict(net.named_parameters()), (x,))
    )(X),
    "per-sample gradients": per_sample,
    "jvp": lambda net: jvp(net, (X,), (X,)),
    "jacrev": lambda net: jacrev(net)(X[0]),
    "ensemble": ensemble,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:Operators inside torch.func")
def test_calls_inside_transforms_are_counted(name: str) -> None:
    net = Net()
    seen, watch = watching()
    with amanda.apply(watch):
        net(X)
        seen.clear()
        TRANSFORMS[name](net)
    (line,) = watch.not_seen()
    assert "operators not seen inside torch.func transforms: " in line
    for op in ("a/linear", "tanh", "b/linear"):
        assert f"{op} (1 call)" in line
        assert op not in seen


@pytest.mark.filterwarnings("ignore:Operators inside torch.func")
def test_weights_that_transforms_read_are_named() -> None:
    net = Net()
    _, watch = watching()
    with amanda.apply(watch):
        vmap(net)(X)
        vmap(net)(X)
    assert watch.not_seen() == [
        "3 of 3 operators not seen inside torch.func transforms: a/linear (2 calls), tanh (2 "
        "calls), b/linear (2 calls)"
    ]
    read = {name: shape for name, (shape, _) in watch.weights_not_seen().items()}
    assert read == {f"Net:{name}": tuple(p.shape) for name, p in net.named_parameters()}


def test_a_call_without_transform_is_seen() -> None:
    net = Net()
    _, watch = watching()
    with amanda.apply(watch):
        functional_call(net, dict(net.named_parameters()), (X,))
    assert watch.not_seen() == []


@pytest.mark.filterwarnings("ignore:Operators inside torch.func", "ignore:Compiled callables run")
def test_a_transform_inside_a_compiled_callable() -> None:
    net = Net()
    seen, watch = watching()
    compiled = torch.compile(lambda x: vmap(net)(x) + x.sum(), backend="eager")
    with torch.no_grad(), amanda.apply(watch):
        compiled(X)
    assert "sum" in seen
    assert "tanh" not in seen
    (line,) = watch.not_seen()
    assert "torch.func transforms" in line


def test_what_is_inside_a_script_is_not_seen() -> None:
    scripted = torch.jit.script(Net())
    _, watch = watching()
    with amanda.apply(watch):
        scripted(X)
    assert watch.not_seen() == ["operators not seen inside forward (TorchScript)"]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)).eval()


def attention() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.attention(x, x, x)[0]

    return Own().eval()


def slow(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


#: Function modes keep torch from fusing.
fuses = pytest.mark.skipif(
    os.environ.get("AMANDA_TORCH_INTERCEPTOR") == "function_mode" or native is None,
    reason="with function modes, torch runs the operators one by one",
)
FUSED = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
TOKENS = torch.randn(2, 5, 16)


def whole() -> tuple[list[str], amanda.Tool]:
    seen, tool = watching()
    tool.whole = True
    return seen, tool


@pytest.mark.parametrize("make", [encoder, attention])
def test_a_tool_that_looks_inside_gets_the_parts_of_fused_operators(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    expected = slow(model, TOKENS)
    seen, tool = whole()
    outputs = []

    def run() -> None:
        with torch.no_grad(), amanda.apply(tool):
            outputs.extend([model(TOKENS), model(TOKENS)])

    with pytest.warns(amanda.AmandaWarning) as told:
        run()
    assert all(torch.equal(output, expected) for output in outputs)
    assert len(told) == 1
    assert "The fused inference path" in str(told[0].message)
    assert not FUSED & set(seen)
    assert "linear" in seen
    assert tool.not_seen() == []
    assert torch.backends.mha.get_fastpath_enabled()


@fuses
@pytest.mark.parametrize("make", [encoder, attention])
def test_another_tool_leaves_it_and_says_so(make: Callable[[], nn.Module]) -> None:
    model = make()
    with torch.no_grad():
        expected = model(TOKENS)
    seen, tool = watching()
    with torch.no_grad(), amanda.apply(tool):
        assert torch.equal(model(TOKENS), expected)
    assert FUSED & set(seen)
    assert tool.not_seen()[0].startswith("operators not seen inside ")


@fuses
@pytest.mark.filterwarnings("ignore:The fused inference path")
def test_a_selection_by_module_looks_inside_unless_the_tool_says_no() -> None:
    model = encoder()
    for choice, fused in ((None, False), (False, True)):
        seen, tool = watching()
        tool.whole = choice
        tool.where(amanda.select(module="0.layers.*"))
        with torch.no_grad(), amanda.apply(tool):
            model(TOKENS)
        assert bool(FUSED & set(seen)) == fused


@fuses
@pytest.mark.filterwarnings("ignore:The fused inference path")
def test_the_path_is_off_only_while_such_a_tool_is_applied() -> None:
    model = encoder()
    with torch.no_grad():
        fast = model(TOKENS)
    expected = slow(model, TOKENS)
    assert not torch.equal(fast, expected)
    plain, tool = watching()[1], whole()[1]
    with torch.no_grad(), amanda.apply(plain):
        assert torch.equal(model(TOKENS), fast)
        with amanda.apply(tool):
            assert torch.equal(model(TOKENS), expected)
            with amanda.disabled():
                assert torch.equal(model(TOKENS), fast)
        assert torch.equal(model(TOKENS), fast)
        with pytest.raises(IndexError), amanda.apply(tool):
            model(torch.tensor(0.0))
        assert torch.equal(model(TOKENS), fast)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), fast)


def test_no_warning_where_nothing_would_be_fused() -> None:
    _, tool = whole()
    with amanda.apply(tool):
        encoder()(TOKENS)  # Gradients are recorded.
        with torch.no_grad():
            encoder().train()(TOKENS)
            nn.Linear(16, 3)(TOKENS)
