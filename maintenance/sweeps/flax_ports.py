"""Ports of networks from PyTorch to Flax and plain JAX, eager and jitted, and a mistake in each.

Equal ports must be equal for `amanda diff`, and it must name the layer of a planted mistake. Needs
an environment with both frameworks: `python -m maintenance.sweeps.flax_ports --page FILE`.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from amanda_tools.diff import compare

from .port_programs.planted import At, Plant, draw
from .ports import Found, dumped, layer_of

__all__ = ["MODES", "PORTS", "run"]

MODES = ("eager", "jit")


class Port(NamedTuple):
    """A network and its port.

    Attributes:
        original: Makes the network in PyTorch.
        ported: Makes the function that is the port, of its layers.
        plant: The mistake.
        input: What the network gets.
        moved: Whether the port has channels last.
    """

    original: Callable[[], nn.Module]
    ported: Callable[[Layers], Callable[[Any], Any]]
    plant: Plant
    input: np.ndarray[Any, Any]
    moved: bool = False


class Layers:
    """Layers of NNX with the weights of the original's, one of which may have a mistake."""

    def __init__(self, weights: Mapping[str, np.ndarray[Any, Any]], at: At) -> None:
        self.weights, self.at = weights, at

    def _bias(self, name: str) -> Any:
        bias = self.weights[f"{name}.bias"]
        return np.zeros_like(bias) if self.at("bias", name) else bias

    def linear(self, name: str) -> nnx.Linear:
        kernel = self.weights[f"{name}.weight"]
        kernel = kernel if self.at("transposed kernel", name) else kernel.T
        has_bias = f"{name}.bias" in self.weights
        return nnx.Linear(
            *kernel.shape,
            use_bias=has_bias,
            kernel_init=lambda *_: jnp.asarray(kernel),
            bias_init=lambda *_: jnp.asarray(self._bias(name)),
            rngs=nnx.Rngs(0),
        )

    def conv(self, name: str, stride: int = 1, groups: int = 1) -> nnx.Conv:
        kernel = self.weights[f"{name}.weight"].transpose(2, 3, 1, 0)
        padding = "SAME" if self.at("padding", name) else kernel.shape[0] // 2
        return nnx.Conv(
            kernel.shape[2] * groups,
            kernel.shape[3],
            kernel.shape[:2],
            stride,
            padding=padding,
            feature_group_count=groups,
            use_bias=f"{name}.bias" in self.weights,
            kernel_init=lambda *_: jnp.asarray(kernel),
            bias_init=lambda *_: jnp.asarray(self._bias(name)),
            rngs=nnx.Rngs(0),
        )

    def norm(self, name: str) -> nnx.LayerNorm:
        return nnx.LayerNorm(**self._norm(name, 1e-5))

    def batch_norm(self, name: str) -> nnx.BatchNorm:
        found = nnx.BatchNorm(use_running_average=True, **self._norm(name, 1e-5))
        found.mean.set_value(jnp.asarray(self.weights[f"{name}.running_mean"]))
        found.var.set_value(jnp.asarray(self.weights[f"{name}.running_var"]))
        return found

    def rms_norm(self, name: str) -> nnx.RMSNorm:
        options = self._norm(name, 1e-6)
        del options["bias_init"]
        return nnx.RMSNorm(**options)

    def _norm(self, name: str, epsilon: float) -> dict[str, Any]:
        scale = jnp.asarray(self.weights[f"{name}.weight"])
        return {
            "num_features": len(scale),
            "epsilon": 1e-2 if self.at("epsilon", name) else epsilon,
            "scale_init": lambda *_: scale,
            "bias_init": lambda *_: jnp.asarray(self.weights[f"{name}.bias"]),
            "rngs": nnx.Rngs(0),
        }

    def embed(self, name: str) -> nnx.Embed:
        table = jnp.asarray(self.weights[f"{name}.weight"])
        return nnx.Embed(*table.shape, embedding_init=lambda *_: table, rngs=nnx.Rngs(0))

    def gelu(self, name: str) -> Callable[[Any], Any]:
        tanh = self.at("tanh gelu", name)
        return lambda x: jax.nn.gelu(x, approximate=tanh)


def _nnx(forward: Callable[..., Any], **layers: Any) -> Callable[[Any], Any]:
    """Return a module of these layers, which computes what `forward` does."""

    class Network(nnx.Module):
        def __init__(self) -> None:
            for name, layer in layers.items():
                setattr(self, name, layer)

        def __call__(self, x: Any) -> Any:
            return forward(self, x)

    return Network()


class Torch(nn.Module):
    """A network of named layers."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x: Any) -> Any:
        """Compute what the given function does."""
        return self._forward(self, x)


def _perceptron() -> nn.Module:
    return Torch(
        lambda s, x: s.head(s.act(s.norm(s.hidden(x)))),
        hidden=nn.Linear(8, 16),
        norm=nn.LayerNorm(16),
        act=nn.GELU(),
        head=nn.Linear(16, 4),
    )


def _perceptron_nnx(of: Layers) -> Callable[[Any], Any]:
    act = of.gelu("act")
    return _nnx(
        lambda s, x: s.head(act(s.norm(s.hidden(x)))),
        hidden=of.linear("hidden"),
        norm=of.norm("norm"),
        head=of.linear("head"),
    )


def _perceptron_linen(of: Layers) -> Callable[[Any], Any]:
    act = of.gelu("act")

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.LayerNorm(epsilon=1e-5, name="norm")(linen.Dense(16, name="hidden")(x))
            return linen.Dense(4, name="head")(act(x))

    w = of.weights
    params = {
        "norm": {"scale": w["norm.weight"], "bias": w["norm.bias"]},
        **{n: {"kernel": w[f"{n}.weight"].T, "bias": w[f"{n}.bias"]} for n in ("hidden", "head")},
    }
    return lambda x: Network().apply({"params": params}, x)


def _perceptron_plain(of: Layers) -> Callable[[Any], Any]:
    w, act = of.weights, of.gelu("act")
    bias = 0 if of.at("bias", "hidden") else w["hidden.bias"]

    def run(x: Any) -> Any:
        x = x @ w["hidden.weight"].T + bias
        x = jax.nn.standardize(x, epsilon=1e-5) * w["norm.weight"] + w["norm.bias"]
        return act(x) @ w["head.weight"].T + w["head.bias"]

    return run


def _residual() -> nn.Module:
    def forward(s: Any, x: Any) -> Any:
        x = torch.relu(s.norm1(s.conv1(x)))
        return s.head(torch.relu(x + s.norm2(s.conv2(x))).mean((2, 3)))

    return Torch(
        forward,
        conv1=nn.Conv2d(3, 8, 3, 2, padding=1, bias=False),
        norm1=nn.BatchNorm2d(8),
        conv2=nn.Conv2d(8, 8, 3, padding=1, bias=False),
        norm2=nn.BatchNorm2d(8),
        head=nn.Linear(8, 4),
    )


def _residual_nnx(of: Layers) -> Callable[[Any], Any]:
    def forward(s: Any, x: Any) -> Any:
        x = nnx.relu(s.norm1(s.conv1(x)))
        return s.head(nnx.relu(x + s.norm2(s.conv2(x))).mean((1, 2)))

    norms = {name: of.batch_norm(name) for name in ("norm1", "norm2")}
    convs = {"conv1": of.conv("conv1", 2), "conv2": of.conv("conv2")}
    return _nnx(forward, head=of.linear("head"), **convs, **norms)


def _separable() -> nn.Module:
    return Torch(
        lambda s, x: s.head(torch.nn.functional.silu(s.point(s.depth(x))).mean((2, 3))),
        depth=nn.Conv2d(6, 6, 3, padding=1, groups=6),
        point=nn.Conv2d(6, 10, 1),
        head=nn.Linear(10, 4),
    )


def _separable_nnx(of: Layers) -> Callable[[Any], Any]:
    return _nnx(
        lambda s, x: s.head(jax.nn.silu(s.point(s.depth(x))).mean((1, 2))),
        depth=of.conv("depth", groups=6),
        point=of.conv("point"),
        head=of.linear("head"),
    )


def _attention(s: Any, x: Any, softmax: Any, swap: Any, scale: float) -> Any:
    q, k, v = (swap(part(x).reshape(2, 5, 2, 8)) for part in (s.q, s.k, s.v))
    weights = softmax((q * scale) @ k.swapaxes(-1, -2))
    return s.o(swap(weights @ v).reshape(2, 5, 16))


def _encoder() -> nn.Module:
    def forward(s: Any, x: Any) -> Any:
        x = x + _attention(
            s, s.norm1(x), lambda y: y.softmax(-1), lambda y: y.transpose(1, 2), 8**-0.5
        )
        return x + s.down(torch.nn.functional.gelu(s.up(s.norm2(x))))

    linears = {name: nn.Linear(16, 16) for name in "qkvo"}
    norms = {"norm1": nn.LayerNorm(16), "norm2": nn.LayerNorm(16)}
    return Torch(forward, **linears, **norms, up=nn.Linear(16, 32), down=nn.Linear(32, 16))


def _encoder_nnx(of: Layers) -> Callable[[Any], Any]:
    def forward(s: Any, x: Any) -> Any:
        x = x + _attention(s, s.norm1(x), jax.nn.softmax, lambda y: y.swapaxes(1, 2), 8**-0.5)
        return x + s.down(jax.nn.gelu(s.up(s.norm2(x)), approximate=False))

    linears = {name: of.linear(name) for name in (*"qkvo", "up", "down")}
    return _nnx(forward, norm1=of.norm("norm1"), norm2=of.norm("norm2"), **linears)


def _words() -> nn.Module:
    return Torch(
        lambda s, x: s.head(torch.tanh(s.hidden(s.embed(x).mean(1)))),
        embed=nn.Embedding(12, 8),
        hidden=nn.Linear(8, 8),
        head=nn.Linear(8, 3),
    )


def _words_nnx(of: Layers) -> Callable[[Any], Any]:
    return _nnx(
        lambda s, x: s.head(jnp.tanh(s.hidden(s.embed(x).mean(1)))),
        embed=of.embed("embed"),
        hidden=of.linear("hidden"),
        head=of.linear("head"),
    )


def _gated() -> nn.Module:
    linears = {"gate": nn.Linear(16, 24, False), "up": nn.Linear(16, 24, False)}
    return Torch(
        lambda s, x: x + s.down(torch.nn.functional.silu(s.gate(s.norm(x))) * s.up(s.norm(x))),
        norm=nn.RMSNorm(16, eps=1e-6),
        down=nn.Linear(24, 16, False),
        **linears,
    )


def _gated_nnx(of: Layers) -> Callable[[Any], Any]:
    return _nnx(
        lambda s, x: x + s.down(jax.nn.silu(s.gate(s.norm(x))) * s.up(s.norm(x))),
        norm=of.rms_norm("norm"),
        **{name: of.linear(name) for name in ("gate", "up", "down")},
    )


def _mixer() -> nn.Module:
    return Torch(
        lambda s, x: s.channels(s.norm(x + s.tokens(x.transpose(1, 2)).transpose(1, 2))).relu(),
        tokens=nn.Linear(5, 5),
        norm=nn.LayerNorm(16),
        channels=nn.Linear(16, 16),
    )


def _mixer_nnx(of: Layers) -> Callable[[Any], Any]:
    return _nnx(
        lambda s, x: nnx.relu(s.channels(s.norm(x + s.tokens(x.swapaxes(1, 2)).swapaxes(1, 2)))),
        tokens=of.linear("tokens"),
        norm=of.norm("norm"),
        channels=of.linear("channels"),
    )


def _experts() -> nn.Module:
    return Torch(
        lambda s, x: (
            s.gate(x).softmax(-1).unsqueeze(-2)
            * torch.stack([s.one(x).sigmoid(), s.two(x).sigmoid()], -1)
        ).sum(-1),
        gate=nn.Linear(8, 2),
        one=nn.Linear(8, 8),
        two=nn.Linear(8, 8),
    )


def _experts_nnx(of: Layers) -> Callable[[Any], Any]:
    return _nnx(
        lambda s, x: (
            jax.nn.softmax(s.gate(x))[..., None, :]
            * jnp.stack([jax.nn.sigmoid(s.one(x)), jax.nn.sigmoid(s.two(x))], -1)
        ).sum(-1),
        **{name: of.linear(name) for name in ("gate", "one", "two")},
    )


_ROWS, _IMAGE, _WORDS = draw(4, 8), draw(2, 3, 16, 16), draw(2, 5, 16)
_IDS = np.arange(10).reshape(2, 5) % 12
PORTS: Mapping[str, Port] = {
    "perceptron": Port(_perceptron, _perceptron_nnx, Plant("tanh gelu", "act"), _ROWS),
    "perceptron in Linen": Port(_perceptron, _perceptron_linen, Plant("tanh gelu", "act"), _ROWS),
    "perceptron in plain JAX": Port(_perceptron, _perceptron_plain, Plant("bias", "hidden"), _ROWS),
    "residual network": Port(_residual, _residual_nnx, Plant("padding", "conv1"), _IMAGE, True),
    "separable convolutions": Port(
        _separable, _separable_nnx, Plant("bias", "point"), draw(2, 6, 8, 8), True
    ),
    "encoder": Port(_encoder, _encoder_nnx, Plant("epsilon", "norm2"), _WORDS),
    "bag of words": Port(_words, _words_nnx, Plant("transposed kernel", "hidden"), _IDS),
    "gated perceptron": Port(_gated, _gated_nnx, Plant("epsilon", "norm"), _WORDS),
    "mixer": Port(_mixer, _mixer_nnx, Plant("transposed kernel", "channels"), _WORDS),
    "mixture of experts": Port(_experts, _experts_nnx, Plant("bias", "two"), _ROWS),
}


def _original(port: Port) -> nn.Module:
    torch.manual_seed(0)
    model = port.original().eval()
    for one in model.modules():
        if isinstance(one, (nn.BatchNorm2d, nn.LayerNorm, nn.RMSNorm)):
            nn.init.normal_(one.weight, 1.0, 0.2)
        if isinstance(one, nn.BatchNorm2d):
            one.running_mean = torch.randn(one.num_features) / 4
            one.running_var = torch.rand(one.num_features) + 0.2
    return model


def run(name: str, mode: str) -> Iterator[Found]:
    """Compare an equal port, and one with a mistake, with the original.

    Args:
        name: A key of `PORTS`.
        mode: Whether the port is run eagerly or jitted.
    """
    port = PORTS[name]
    model = _original(port)
    with torch.no_grad():
        original = dumped(lambda: model(torch.tensor(port.input)))
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    given = np.moveaxis(port.input, 1, -1) if port.moved else port.input
    for plant in (None, port.plant):
        ported = port.ported(Layers(weights, At(plant)))
        called = jax.jit(lambda x, ported=ported: ported(x)) if mode == "jit" else ported
        result = compare(original, dumped(lambda called=called: called(jnp.asarray(given))))
        named = layer_of(result)
        kind, layer = ("", "") if plant is None else (plant.kind, plant.layer)
        right = named is None if plant is None else named == layer
        text = result.conclusion(3)
        yield Found(f"{name}, {mode}", kind, layer, named, right, result.likely, text)


def page(found: list[Found]) -> str:
    """Return the page that shows what was found."""
    equal, planted = (
        [one for one in found if bool(one.kind) is is_one] for is_one in (False, True)
    )
    lines = [
        "# Ports from PyTorch to Flax and JAX",
        "",
        "Written by `python -m maintenance.sweeps.flax_ports`. Each network is ported with its "
        "weights, eager and jitted, and compared by `amanda diff` without options.",
        "",
        f"{sum(not one.right for one in equal)} of {len(equal)} equal ports were said to differ. "
        f"The layer of the mistake was named for {sum(one.right for one in planted)} of "
        f"{len(planted)}.",
        "",
        "| port | mistake | planted in | named layer | likely |",
        "|---|---|---|---|---|",
    ]
    for one in planted:
        mark = "" if one.right else "**wrong** "
        named = f"{mark}`{one.named}`"
        lines.append(f"| {one.port} | {one.kind} | `{one.layer}` | {named} | {one.likely or ''} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all ports; return 1 if an equal one is said to differ or a layer is wrong."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.sweeps.flax_ports")
    parser.add_argument("--port", choices=PORTS, action="append")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    found = []
    for name in options.port or PORTS:
        for mode in MODES:
            for one in run(name, mode):
                found.append(one)
                if not one.right:
                    print(f"{one.port}: {one.kind or 'equal'} {one.layer}: {one.conclusion}")
    print(f"{sum(one.right for one in found)} of {len(found)} right")
    if options.page:
        options.page.write_text(page(found))
    return int(not all(one.right for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
