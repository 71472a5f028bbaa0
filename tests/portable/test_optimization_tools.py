"""Tools that change what is computed, in Keras' training loop, against models changed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimization_tools import TOOLS

import amanda
from amanda_core.errors import ToolError
from amanda_tools.gating import PruneChannels, PrunePositions
from amanda_tools.prune import Prune, PruneTiles, tile_masks
from amanda_tools.rematerialize import Rematerialize

pytestmark = pytest.mark.slow

_random = np.random.default_rng(0)
X = _random.normal(size=(48, 16)).astype(np.float32)
Y = _random.integers(0, 3, 48)


def by_magnitude(kernel: Any) -> Any:
    """Return a mask without the smallest 60% of a kernel."""
    mask = np.ones(kernel.size, np.float32)
    mask[np.abs(kernel).ravel().argsort()[: round(0.6 * kernel.size)]] = 0
    return mask.reshape(kernel.shape)


def two_of_four(kernel: Any) -> Any:
    """Return a mask without the two smallest of each four inputs of an output."""
    mask = np.ones(kernel.shape, np.float32)
    for column in range(kernel.shape[1]):
        for first in range(0, kernel.shape[0], 4):
            smallest = np.abs(kernel[first : first + 4, column]).argsort()[:2]
            mask[first + smallest, column] = 0
    return mask


def rounded(kernel: Any) -> Any:
    """Return a kernel on the grid of four bits, with the gradient of the kernel itself."""
    ops = keras.ops
    step = ops.max(ops.abs(kernel)) / 7
    return kernel + ops.stop_gradient(ops.round(kernel / step) * step - kernel)


class Changed(keras.layers.Dense):  # type: ignore[misc]  # Keras has no types.
    """A layer whose kernel or output is changed by hand."""

    edit: Callable[[Any], Any] | None = None
    broken = False

    def call(self, x: Any) -> Any:
        kernel = self.kernel if self.edit is None else self.edit(self.kernel)
        out = self.activation(keras.ops.matmul(x, kernel) + self.bias)
        return out - keras.ops.stop_gradient(out) if self.broken else out


def network(dense: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((16,)), dense(8, activation="relu"), dense(3)]
    return keras.Sequential(layers)


def change(model: Any, name: str) -> None:
    first, last = model.layers
    if name == "inject_faults":
        first.broken = True
    for layer in (first, last):
        kernel = np.asarray(layer.kernel)
        masks = {"prune": by_magnitude, "prune_nm": two_of_four}
        if name in masks:
            mask = masks[name](kernel)
            layer.edit = lambda value, mask=mask: value * mask
        elif name == "quantize":
            layer.edit = rounded


def fit(model: Any, eagerly: bool) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, run_eagerly=eagerly)
    history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"]


@pytest.mark.parametrize("eagerly", [False, True], ids=["function", "eagerly"])
@pytest.mark.parametrize("name", TOOLS)
def test_fit(name: str, eagerly: bool) -> None:
    reference, model = network(Changed), network(keras.layers.Dense)
    change(reference, name)
    expected = fit(reference, eagerly)
    with amanda.apply(TOOLS[name]()):
        found = fit(model, eagerly)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not np.allclose(found, fit(network(keras.layers.Dense), eagerly), rtol=1e-3)


@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.parametrize("kind", [PruneChannels, PrunePositions])
def test_gates_are_refused_by_name(kind: Any, eagerly: bool) -> None:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8, 8, 2)), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=eagerly)
    refusal = pytest.raises(ToolError, match=f"{kind.name} is not supported on .*: it needs gates")
    with refusal, amanda.apply(kind()):
        model.fit(np.ones((4, 8, 8, 2), np.float32), np.zeros(4), verbose=0)


def test_rematerialize_says_where_it_is_not_supported() -> None:
    model = network(keras.layers.Dense)
    with amanda.apply(tool := Rematerialize(10**9)):
        fit(model, True)
    assert "only what PyTorch's autograd saves in eager mode" in tool.result().table().title


def over_all(scores: list[Any]) -> list[Any]:
    """Return masks without the smallest half of all scores."""
    limit = np.sort(np.concatenate([score.ravel() for score in scores]))
    return [score > limit[len(limit) // 2 - 1] for score in scores]


def in_tiles(scores: list[Any]) -> list[Any]:
    return tile_masks([np.abs(score) for score in scores], 50, 4)


@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.parametrize("score", ["magnitude", "taylor"])
@pytest.mark.parametrize(
    ("make", "rule"),
    [(lambda score: Prune(0.5, scope="global", score=score), over_all),
     (lambda score: PruneTiles(0.5, 4, score=score), in_tiles)],
    ids=["global", "tiles"],
)  # fmt: skip
def test_masks_of_the_whole_model_in_fit(make: Any, rule: Any, score: str, eagerly: bool) -> None:
    model, twin = network(keras.layers.Dense), network(keras.layers.Dense)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss, run_eagerly=eagerly)
    kernels = [layer.kernel for layer in twin.layers]
    with tf.GradientTape() as tape:
        value = loss(Y, twin(X))
    gradients = tape.gradient(value, [kernel.value for kernel in kernels])
    arrays = [np.abs(np.asarray(kernel)) for kernel in kernels]
    if score == "taylor":
        pairs = zip(arrays, gradients, strict=True)
        arrays = [(array * np.asarray(gradient)) ** 2 for array, gradient in pairs]
    for kernel, mask in zip(kernels, rule(arrays), strict=True):
        kernel.assign(np.asarray(kernel) * mask)
    with amanda.apply(tool := make(score)):
        model.fit(X, Y, batch_size=48, shuffle=False, epochs=2, verbose=0)
        found = model.predict(X, verbose=0)
    np.testing.assert_allclose(found, np.asarray(twin(X)), rtol=1e-5, atol=1e-6)
    zeros = sum(int((np.asarray(kernel) == 0).sum()) for kernel in kernels)
    assert sum(one.pruned for one in tool.result().weights) == zeros > 0
