"""`quantize` and `inject_faults`, eager and jitted, against the arithmetic of NumPy."""

# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import amanda
from amanda_core.errors import ToolError
from amanda_tools.faults import InjectFaults, run_campaign
from amanda_tools.gating import PruneChannels, PrunePositions
from amanda_tools.quantize import Quantize

MODES = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
X = jax.random.normal(jax.random.key(1), (2, 8, 8, 2))


class Net(nnx.Module):
    """A convolution, a mean and a linear layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 6, (3, 3), use_bias=False, rngs=rngs)
        self.out = nnx.Linear(6, 4, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(jax.nn.relu(self.conv(x)).mean((1, 2)))


def called(jitted: bool) -> Any:
    return nnx.jit(lambda model, x: model(x)) if jitted else lambda model, x: model(x)


def rounded(weight: Any, highest: float) -> Any:
    """Return a weight on a grid for each index of its last axis."""
    scale = abs(weight).max(tuple(range(weight.ndim - 1)), keepdims=True) / highest
    return np.round(weight / scale).clip(-highest, highest) * scale


@MODES
def test_weights_are_quantized_with_a_scale_for_each_channel(jitted: bool) -> None:
    model, run = Net(), called(jitted)
    plain = run(model, X)
    tool = Quantize(weights="int4", activations="none")
    with amanda.apply(tool):
        found = run(model, X)
    by_hand = Net()
    for layer in (by_hand.conv, by_hand.out):
        layer.kernel[...] = jnp.asarray(rounded(np.asarray(layer.kernel[...]), 7.0))
    np.testing.assert_allclose(found, run(by_hand, X), rtol=1e-4, atol=1e-5)
    assert np.abs(found - plain).max() > 1e-3
    assert [len(weight.scales) for weight in tool.result().weights] == [6, 4]
    np.testing.assert_array_equal(run(model, X), plain)


@MODES
def test_activations_are_quantized_after_their_calibration(jitted: bool) -> None:
    model, run = Net(), called(jitted)
    plain = run(model, X)
    tool = Quantize(weights="none", calibration=0)
    with amanda.apply(tool):
        calibrated = run(model, X)
        tool.freeze()
        quantized = run(model, X)
    np.testing.assert_allclose(calibrated, plain, rtol=1e-5, atol=1e-6)
    assert np.abs(quantized - plain).max() > 1e-5
    first = tool.result().activations[0]
    assert first.scale == pytest.approx(float(X.max() - X.min()) / 255, rel=1e-6)


@MODES
def test_each_sign_is_flipped(jitted: bool) -> None:
    function = jax.jit(jax.nn.relu) if jitted else jax.nn.relu
    wrapped = jax.jit(lambda x: jax.nn.relu(x) + 1) if jitted else lambda x: jax.nn.relu(x) + 1
    x = jnp.arange(-3.0, 5.0)
    with amanda.apply(InjectFaults(["relu"], bits="sign", mode="rate", rate=1.0)):
        found = wrapped(x)
    np.testing.assert_array_equal(found, 1 - np.maximum(x, 0))
    np.testing.assert_array_equal(function(x), np.maximum(x, 0))


@MODES
@pytest.mark.parametrize("site", ["output", "input", "weight"])
def test_one_fault_is_what_the_result_says(jitted: bool, site: Any) -> None:
    model, run = Net(), called(jitted)
    tool = InjectFaults(["matmul"], site=site, model="value", amount=3.0, mode="per_run", seed=5)
    with amanda.apply(tool):
        golden = run(model, X)  # Run 0 learns which operators there are.
        tool.begin_run(1)
        found = run(model, X)
    (fault,) = tool.result().faults
    np.testing.assert_allclose(golden, called(False)(model, X), rtol=1e-5, atol=1e-6)
    hidden = jax.nn.relu(model.conv(X)).mean((1, 2))
    values = {"output": golden, "input": hidden, "weight": model.out.kernel[...]}
    place = np.unravel_index(fault.index, values[site].shape)
    before, after = np.array([fault.before, fault.after], np.uint32).view(np.float32)
    np.testing.assert_allclose(values[site][place], before, rtol=1e-5)
    assert after == 3.0
    values[site] = values[site].at[place].set(3.0)
    by_hand = values["output"] if site == "output" else values["input"] @ values["weight"]
    np.testing.assert_allclose(found, by_hand, rtol=1e-5, atol=1e-5)


@MODES
@pytest.mark.parametrize("kind", [PruneChannels, PrunePositions])
def test_gates_are_refused_by_name(kind: Any, jitted: bool) -> None:
    model, run = Net(), called(jitted)
    plain = run(model, X)
    refusal = pytest.raises(ToolError, match=f"{kind.name} is not supported on .*: it needs gates")
    with refusal, amanda.apply(kind()):
        run(model, X)
    np.testing.assert_array_equal(run(model, X), plain)


@MODES
def test_a_campaign_counts_outcomes(jitted: bool) -> None:
    model, run = Net(), called(jitted)
    tool = InjectFaults(["matmul"], model="value", amount=1e9, mode="per_run")
    found = run_campaign(tool, lambda: run(model, X), 5)
    assert [trial.faults for trial in found.trials] == [1] * 5
    assert all(trial.outcome == "sdc" or trial.changed == 0 for trial in found.trials)
    assert all(trial.distance == pytest.approx(1e9) for trial in found.trials)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_present_scales_are_those_of_what_is_finite(value: float) -> None:
    x = np.asarray(X.mean((1, 2))).repeat(3, 1)
    weight = np.asarray(jax.random.normal(jax.random.key(2), (6, 4)))
    x[0, 0] = value
    with amanda.apply(Quantize("dynamic", weights="none")):
        found = jnp.matmul(jnp.asarray(x), jnp.asarray(weight))
    largest = abs(x[np.isfinite(x)]).max()
    row = np.round(x[1] * (1 / (largest / 127))) * (largest / 127)
    np.testing.assert_allclose(found[1], row @ rounded(weight, 127.0), rtol=0.05, atol=0.02)
    assert np.isfinite(found[1]).all()
