"""Editing tools, imperative and hybridized, against the arithmetic of NumPy."""

# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import amanda
from amanda_core.errors import ToolError
from amanda_tools.faults import InjectFaults, run_campaign
from amanda_tools.gating import PruneChannels, PrunePositions
from amanda_tools.quantize import Quantize
from amanda_tools.steer import Steer

MODES = pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybrid"])
X = np.random.RandomState(0).standard_normal((2, 2, 8, 8)).astype("float32")


def network(hybrid: bool) -> gluon.HybridBlock:
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(6, 3, use_bias=False, activation="relu"),
        gluon.nn.GlobalAvgPool2D(),
        gluon.nn.Dense(4, use_bias=False),
    )
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(X))
    if hybrid:
        net.hybridize()
    return net


def rounded(weight: Any, highest: float) -> Any:
    """Return a weight on a grid for each index of its first axis."""
    scale = abs(weight).max(tuple(range(1, weight.ndim)), keepdims=True) / highest
    return np.round(weight / scale).clip(-highest, highest) * scale


def run(net: gluon.Block) -> Any:
    return net(mx.nd.array(X)).asnumpy()


@MODES
def test_weights_are_quantized_with_a_scale_for_each_channel(hybrid: bool) -> None:
    net, by_hand = network(hybrid), network(False)
    plain = run(net)
    tool = Quantize(weights="int4", activations="none")
    with amanda.apply(tool):
        found = run(net)
    for layer in (by_hand[0], by_hand[2]):
        layer.weight.set_data(mx.nd.array(rounded(layer.weight.data().asnumpy(), 7.0)))
    np.testing.assert_allclose(found, run(by_hand), rtol=1e-4, atol=1e-5)
    assert np.abs(found - plain).max() > 1e-3
    assert [len(weight.scales) for weight in tool.result().weights] == [6, 4]
    np.testing.assert_array_equal(run(net), plain)


@MODES
def test_activations_are_quantized_after_their_calibration(hybrid: bool) -> None:
    net = network(hybrid)
    plain = run(net)
    tool = Quantize(weights="none", calibration=0)
    with amanda.apply(tool):
        calibrated = run(net)
        tool.freeze()
        quantized = run(net)
    np.testing.assert_allclose(calibrated, plain, rtol=1e-5, atol=1e-6)
    assert np.abs(quantized - plain).max() > 1e-5
    first = tool.result().activations[0]
    assert first.scale == pytest.approx(float(X.max() - X.min()) / 255, rel=1e-6)


@MODES
@pytest.mark.parametrize("edit", ["add", "replace", "project", "ablate"])
def test_outputs_are_steered(hybrid: bool, edit: Any) -> None:
    net, vector = network(hybrid), np.array([1.0, 2.0, 0.0, -1.0], "float32")
    plain = run(net)
    along = (plain @ vector)[:, None] * vector / (vector @ vector)
    expected = {
        "add": plain + 0.5 * vector,
        "replace": np.broadcast_to(vector, plain.shape),
        "project": plain - 0.5 * along,
        "ablate": plain * [1, 0, 1, 1],
    }
    given = {"neurons": [1]} if edit == "ablate" else {"vector": vector, "factor": 0.5}
    with amanda.apply(Steer(edit, ops=["linear"], **given)):
        found = run(net)
    np.testing.assert_allclose(found, expected[edit], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run(net), plain)


class Relu(gluon.HybridBlock):
    """One more than the positive part."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return F.relu(x) + 1


@MODES
def test_each_sign_is_flipped(hybrid: bool) -> None:
    block, x = Relu(), mx.nd.arange(-3, 5)
    block.hybridize(hybrid)
    with amanda.apply(InjectFaults(["relu"], bits="sign", mode="rate", rate=1.0)):
        found = block(x).asnumpy()
    np.testing.assert_array_equal(found, 1 - np.maximum(x.asnumpy(), 0))
    np.testing.assert_array_equal(block(x).asnumpy(), 1 + np.maximum(x.asnumpy(), 0))


@MODES
@pytest.mark.parametrize("site", ["output", "input", "weight"])
def test_one_fault_is_what_the_result_says(hybrid: bool, site: Any) -> None:
    net = network(hybrid)
    tool = InjectFaults(["linear"], site=site, model="value", amount=3.0, mode="per_run", seed=5)
    with amanda.apply(tool):
        golden = run(net)  # Run 0 learns which operators there are.
        tool.begin_run(1)
        found = run(net)
    (fault,) = tool.result().faults
    np.testing.assert_array_equal(golden, run(net))
    hidden = net[1](net[0](mx.nd.array(X))).asnumpy()
    values = {"output": golden, "input": hidden, "weight": net[2].weight.data().asnumpy()}
    before, after = np.array([fault.before, fault.after], np.uint32).view(np.float32)
    assert after == 3.0
    np.testing.assert_allclose(values[site].flat[fault.index], before, rtol=1e-5)
    values[site].flat[fault.index] = 3.0
    inputs, weight = values["input"].reshape(2, 6), values["weight"]
    by_hand = values["output"] if site == "output" else inputs @ weight.T
    np.testing.assert_allclose(found, by_hand, rtol=1e-5, atol=1e-5)


@MODES
@pytest.mark.parametrize("kind", [PruneChannels, PrunePositions])
def test_gates_are_refused_by_name(kind: Any, hybrid: bool) -> None:
    net = network(hybrid)
    refusal = pytest.raises(ToolError, match=f"{kind.name} is not supported on .*: it needs gates")
    with refusal, amanda.apply(kind()):
        run(net)


@MODES
def test_a_campaign_counts_outcomes(hybrid: bool) -> None:
    net = network(hybrid)
    tool = InjectFaults(["linear"], model="value", amount=1e9, mode="per_run")
    found = run_campaign(tool, lambda: net(mx.nd.array(X)), 5)
    assert [trial.faults for trial in found.trials] == [1] * 5
    assert all(trial.distance == pytest.approx(1e9) for trial in found.trials)
