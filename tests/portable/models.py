"""One small network, as numbers: its weights and data, and what its reference programs can do.

`models_torch` and `models_tf` have it in PyTorch and in TensorFlow's modes, plain and with each
effect of `tools` written in by hand. Weights are kept in one layout here: OIHW and OI.
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
    """The layout in which a weight is kept here."""
    return {4: "OIHW", 2: "OI"}.get(WEIGHTS[name].ndim, "O")


def masks_of(sparsity: float) -> dict[str, Array]:
    """Weight -> the mask that prunes it."""
    return {name: magnitude_mask(WEIGHTS[name], layout_of(name), sparsity) for name in DENSE}


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a reference program has written in by hand.

    Attributes:
        masks: Weights are multiplied by these; their gradients pass straight through.
        mask_gradients: The gradients are multiplied by the masks, too.
        relu_gradient: The gradient that arrives at each ReLU's output is multiplied by this.
        swish: ``x * sigmoid(x)`` stands in the place of each ReLU.
    """

    masks: Mapping[str, Array] | None = None
    mask_gradients: bool = True
    relu_gradient: float | None = None
    swish: bool = False


@dataclasses.dataclass
class Record:
    """What a training run left: one entry a step, then the weights."""

    losses: list[float] = dataclasses.field(default_factory=list)
    logits: list[Array] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, Array]] = dataclasses.field(default_factory=list)
    weights: dict[str, Array] = dataclasses.field(default_factory=dict)

    def values(self) -> dict[str, Array]:
        """Every number of it, with a name."""
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
        """Nothing of the framework is made here."""

    def build(self) -> None:
        """Make the variables, and trace or build what graphs there are."""

    def step(self, number: int) -> None:
        """One step of gradient descent, recorded."""

    def finish(self) -> None:
        """Record the weights and let everything go."""


def run(program: Program, build: bool = True) -> Record:
    """Train for `STEPS` steps."""
    if build:
        program.build()
    for number in range(STEPS):
        program.step(number)
    program.finish()
    return program.record


def assert_same(one: Record, other: Record, tolerance: float = 1e-5) -> None:
    """The two differ by no more than rounding."""
    expected = other.values()
    found = one.values()
    assert list(found) == list(expected)
    for name, value in found.items():
        assert np.isfinite(value).all(), name
        np.testing.assert_allclose(
            value, expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def assert_same_bits(one: Record, other: Record) -> None:
    """The two are the same bit for bit."""
    expected = other.values()
    differing = [n for n, value in one.values().items() if not np.array_equal(value, expected[n])]
    assert differing == []
