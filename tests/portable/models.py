"""One small network as numbers: weights, data, and the effects of tools on reference programs.

`models_torch` and `models_tf` implement it in PyTorch and in TensorFlow's modes, plain and with
each effect of `tools` written by hand. Weights are kept in one layout here: OIHW and OI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from .tools import Array, magnitude_mask

__all__ = [
    "DENSE",
    "IMAGES",
    "LABELS",
    "RATE",
    "STEPS",
    "WEIGHTS",
    "Effect",
    "Program",
    "Record",
    "assert_same",
    "assert_same_bits",
    "layout_of",
    "masks_of",
    "run",
]

STEPS = 3
RATE = 0.1

_random = np.random.default_rng(3)


def _draw(*shape: int) -> Array:
    fan_in = int(np.prod(shape[1:]))
    return _random.normal(0, np.sqrt(2 / fan_in), shape).astype(np.float32)


#: Two convolutions, the second with a stride, on images of 8 x 8; then two dense layers.
WEIGHTS: dict[str, Array] = {
    "conv1.weight": _draw(6, 3, 3, 3),
    "conv1.bias": _draw(6, 100),
    "conv2.weight": _draw(8, 6, 3, 3),
    "conv2.bias": _draw(8, 100),
    "dense1.weight": _draw(16, 32),
    "dense1.bias": _draw(16, 100),
    "dense2.weight": _draw(5, 16),
    "dense2.bias": _draw(5, 100),
}
WEIGHTS = {n: w[:, 0].copy() if n.endswith("bias") else w for n, w in WEIGHTS.items()}
#: A batch for each step, NCHW.
IMAGES = _random.normal(0, 1, (STEPS, 4, 3, 8, 8)).astype(np.float32)
LABELS = _random.integers(0, 5, (STEPS, 4)).astype(np.int64)
#: Names of the weights proper, in the order in which the network uses them.
DENSE = [name for name in WEIGHTS if name.endswith("weight")]


def layout_of(name: str) -> str:
    """Return the layout in which a weight is kept here."""
    return {4: "OIHW", 2: "OI"}.get(WEIGHTS[name].ndim, "O")


def masks_of(sparsity: float) -> dict[str, Array]:
    """Return the mask that prunes each weight."""
    return {name: magnitude_mask(WEIGHTS[name], layout_of(name), sparsity) for name in DENSE}


@dataclasses.dataclass(frozen=True)
class Effect:
    """Effect of a tool that a reference program implements by hand.

    Attributes:
        masks: Factors of the weights; the gradients pass straight through.
        mask_gradients: Also multiply the gradients by the masks.
        relu_gradient: Factor of the gradient that arrives at each ReLU's output.
        swish: Use ``x * sigmoid(x)`` instead of each ReLU.
    """

    masks: Mapping[str, Array] | None = None
    mask_gradients: bool = True
    relu_gradient: float | None = None
    swish: bool = False


@dataclasses.dataclass
class Record:
    """Results of a training run: one entry per step, then the weights."""

    losses: list[float] = dataclasses.field(default_factory=list)
    logits: list[Array] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, Array]] = dataclasses.field(default_factory=list)
    weights: dict[str, Array] = dataclasses.field(default_factory=dict)

    def values(self) -> dict[str, Array]:
        """Return all numbers by name."""
        found: dict[str, Array] = {}
        for step, (loss, logits) in enumerate(zip(self.losses, self.logits, strict=True)):
            found[f"{step} loss"] = np.asarray(loss)
            found[f"{step} logits"] = logits
            for name, gradient in self.gradients[step].items():
                found[f"{step} gradient {name}"] = gradient
        return found | {f"trained {name}": weight for name, weight in self.weights.items()}


class Program(Protocol):
    """The network in one framework and mode."""

    record: Record

    def __init__(self, effect: Effect) -> None:
        """Create nothing of the framework yet."""

    def build(self) -> None:
        """Create the variables, and trace or build the graphs."""

    def step(self, number: int) -> None:
        """Perform one step of gradient descent and record it."""

    def finish(self) -> None:
        """Record the weights and release everything."""


def run(program: Program, build: bool = True) -> Record:
    """Train for `STEPS` steps."""
    if build:
        program.build()
    for number in range(STEPS):
        program.step(number)
    program.finish()
    return program.record


def assert_same(one: Record, other: Record, tolerance: float = 1e-5) -> None:
    """Check that two records differ only by rounding."""
    expected = other.values()
    found = one.values()
    assert list(found) == list(expected)
    for name, value in found.items():
        assert np.isfinite(value).all(), name
        np.testing.assert_allclose(
            value, expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def assert_same_bits(one: Record, other: Record) -> None:
    """Check that two records are equal bit for bit."""
    expected = other.values()
    differing = [n for n, value in one.values().items() if not np.array_equal(value, expected[n])]
    assert differing == []
