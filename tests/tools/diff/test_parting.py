"""Two implementations of one network, one of small operators: where a mistake is said to be, and of
which kind it is said to be.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amanda
from amanda_tools.diff import DiffResult, compare
from amanda_tools.dump import Dump, Dumped

pytestmark = pytest.mark.one_interceptor

WIDTH, HEADS = 8, 2
INPUT = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(3))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.down(self.act(self.up(x)))
        return changed


class Small(nn.Module):
    """The same with its weights, of small operators and without modules."""

    def __init__(self, model: Fused, wrong: str) -> None:
        super().__init__()
        self.weights = {name: value.detach() for name, value in model.state_dict().items()}
        self.wrong = wrong

    def linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"].T
        if self.wrong == f"kernel {name}":
            weight = weight.T
        if self.wrong == f"dtype {name}":
            x = (x.bfloat16() @ weight.bfloat16()).float()
        else:
            x = x @ weight
        return x if self.wrong == f"bias {name}" else x + self.weights[f"{name}.bias"]

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        epsilon = 1e-2 if self.wrong == "epsilon" else 1e-5
        y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + epsilon)
        y = y * self.weights["norm.weight"] + self.weights["norm.bias"]
        parts = self.linear(y, "qkv").chunk(3, -1)
        q, k, v = (part.reshape(2, 5, HEADS, -1).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2)
        if self.wrong != "scale":
            scores = scores / math.sqrt(WIDTH / HEADS)
        if self.wrong != "mask":
            scores = scores + torch.full((5, 5), -math.inf).triu(1)
        mixed = (scores.exp() / scores.exp().sum(-1, keepdim=True)) @ v
        x = x + self.linear(mixed.transpose(1, 2).flatten(2), "out")
        y = self.linear(x, "up")
        if self.wrong == "gelu":
            y = y / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        else:
            y = y / 2 * (1 + torch.erf(y / math.sqrt(2)))
        return x + self.linear(y, "down")


def dumped(model: nn.Module) -> Dumped:
    tool = Dump(values=["inputs", "weights", "outputs"])
    with amanda.apply(tool), torch.no_grad():
        model(INPUT)
    return tool.result().open()


def found(wrong: str) -> DiffResult:
    torch.manual_seed(0)
    model = Fused()
    return compare(dumped(model), dumped(Small(model, wrong)))


def test_an_equal_implementation_is_equal() -> None:
    result = found("")
    assert result.across
    assert result.same, str(result.first)
    assert (result.suspects, result.suspects_b, result.likely) == ([], [], None)


@pytest.mark.parametrize(
    ("wrong", "module", "kind"),
    [
        ("epsilon", "norm", "epsilon: "),
        ("bias qkv", "qkv", "bias: "),
        ("scale", "", None),
        ("mask", "", "mask: "),
        ("kernel out", "out", "kernel: "),
        ("gelu", "act", "activation: B computes the tanh approximation of gelu"),
        ("dtype down", "down", "dtype: A computes in float32, and B in bfloat16"),
    ],
)
def test_a_mistake_is_named(wrong: str, module: str, kind: str | None) -> None:
    result = found(wrong)
    assert result.first is not None
    named = result.suspects[0] if result.suspects else result.first.a
    assert named.module == module
    if not module:
        assert named.word == "attention"
    assert (result.likely or "").startswith(kind or "")
    assert (result.likely is None) == (kind is None)
    if kind is not None:
        assert f"Likely {kind}" in result.conclusion()


def test_without_inputs_less_is_said() -> None:
    torch.manual_seed(0)
    model = Fused()
    dumps = []
    for one in (model, Small(model, "gelu")):
        tool = Dump()
        with amanda.apply(tool), torch.no_grad():
            one(INPUT)
        dumps.append(tool.result().open())
    result = compare(dumps[0], dumps[1])
    assert not result.same
    assert (result.suspects_b, result.likely) == ([], None)


def test_a_wrong_epsilon_of_small_operators_is_named_by_the_sum() -> None:
    torch.manual_seed(0)
    model = Fused()
    dumps = [dumped(Small(model, wrong)) for wrong in ("", "epsilon")]
    result = compare(dumps[0], dumps[1], align="values")
    assert result.suspects_b[0].word == "add"
    result = compare(dumps[0], dumps[1], align="names")
    assert result.first is not None
    assert result.first.a.word == "add"
