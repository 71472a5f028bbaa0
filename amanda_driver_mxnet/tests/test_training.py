"""A network of Gluon's model zoo, trained under the pruning tool and by hand; the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import amanda
from amanda_tools.prune import Prune

SPARSITY = 0.5
IMAGES = np.random.RandomState(0).standard_normal((4, 3, 32, 32)).astype("float32")
LABELS = np.array([0, 1, 2, 3], "float32")


def resnet() -> gluon.HybridBlock:
    mx.random.seed(1)
    net = gluon.model_zoo.vision.resnet18_v1(classes=4)
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(IMAGES))
    return net


def weights(net: gluon.Block) -> list[gluon.Parameter]:
    """Return the weights of the convolutions and of the linear layer."""
    parameters = net.collect_params().values()
    return [p for p in parameters if p.name.endswith("weight") and len(p.shape) > 1]


def mask_of(weight: Any) -> Any:
    """Return 0 for the smaller half of the magnitudes, and 1 elsewhere."""
    order = np.argsort(np.abs(weight), axis=None, kind="stable")
    mask = np.ones(weight.size, weight.dtype)
    mask[order[: round(SPARSITY * weight.size)]] = 0
    return mx.nd.array(mask.reshape(weight.shape))


def train(net: gluon.Block, steps: int, by_hand: bool = False) -> list[Any]:
    """Train; return the parameters. By hand, an op computes with a masked copy of its weight."""
    x, y = mx.nd.array(IMAGES), mx.nd.array(LABELS)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    masks = [(p, mask_of(p.data().asnumpy())) for p in weights(net)] if by_hand else []
    whole = {p.name: p.data().copy() for p, _ in masks}
    for _ in range(steps):
        for parameter, mask in masks:
            parameter.set_data(whole[parameter.name] * mask)
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        for parameter, mask in masks:
            parameter.grad()[:] = parameter.grad() * mask
            parameter.set_data(whole[parameter.name])
        trainer.step(len(LABELS))
        for parameter, _ in masks:
            whole[parameter.name] = parameter.data().copy()
    return [p.data().asnumpy() for p in net.collect_params().values()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "hybrid", "static"])
def test_a_network_of_the_model_zoo_is_trained_as_one_that_is_masked_by_hand(mode: str) -> None:
    expected = train(resnet(), 20, by_hand=True)
    net = resnet()
    if mode != "eager":
        net.hybridize(static_alloc=mode == "static", static_shape=mode == "static")
    with amanda.apply(prune := Prune(SPARSITY)):
        found = train(net, 20)
    assert len(prune.result().weights) == len(weights(net)) == 21
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


SCRIPT = """
import sys
import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.HybridSequential()
with net.name_scope():
    net.add(gluon.nn.Conv2D(4, 3, activation="relu"), gluon.nn.BatchNorm(), gluon.nn.Dense(10))
net.initialize()
if "hybrid" in sys.argv:
    net.hybridize()
x, y = mx.nd.random.normal(shape=(8, 1, 8, 8)), mx.nd.arange(8)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
for step in range(2):
    with autograd.record():
        loss = loss_of(net(x), y)
    loss.backward()
    trainer.step(8)
print("trained", loss.mean().asscalar())
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "hybrid"])
@pytest.mark.parametrize(
    ("tool", "said", "hybrid"),
    [
        ("flops", "forward", "forward"),
        ("graph", "conv2d", "mxnet/1.9.1/hybrid: its graphs cannot be read"),
        ("prune:sparsity=0.5", "50.0% of the weights pruned", "50.0% of the weights pruned"),
        ("nonfinite", "0 faults", "0 faults"),
        ("dump", "Convolution", "Convolution"),
    ],
)
def test_tools_run_on_a_training_script(
    tmp_path: Path, tool: str, said: str, hybrid: str, mode: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "amanda", "run", "-t", tool, "-o", "out"]
    done = subprocess.run(
        [*command, str(script), mode],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert (hybrid if mode == "hybrid" else said) in done.stdout + done.stderr
