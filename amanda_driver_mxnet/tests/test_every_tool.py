"""Every tool that ships on a training step of a Gluon network, imperative and hybridized."""

from __future__ import annotations

from functools import cache
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from every_tool import EDITING, TOOLS, checked
from mxnet import autograd, gluon

import amanda

X = np.random.RandomState(0).standard_normal((4, 2, 8, 8)).astype("float32")
#: Tool -> why it does nothing here, as its result says.
UNSUPPORTED = {
    "effective_path": "there are no rules for its operators",
    "rewrite": "none of the rules is for mxnet",
    "rematerialize": "only what PyTorch's autograd saves in eager mode can be evicted",
}


@cache
def plain(hybrid: bool) -> list[np.ndarray[Any, Any]]:
    return program(hybrid)


def program(hybrid: bool) -> list[np.ndarray[Any, Any]]:
    """Return the losses of two steps, and the parameters."""
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(4, 3, in_channels=2),
        gluon.nn.BatchNorm(in_channels=4),
        gluon.nn.Activation("relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(4, in_units=36),
        gluon.nn.LayerNorm(in_channels=4),
        gluon.nn.Dense(4, in_units=4),
    )
    net.initialize(mx.init.Xavier())
    if hybrid:
        net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    measure, losses = gluon.loss.SoftmaxCrossEntropyLoss(), []
    for _ in range(2):
        with autograd.record():
            loss = measure(net(mx.nd.array(X)), mx.nd.arange(4))
        loss.backward()
        trainer.step(4)
        losses.append(loss.asnumpy())
    return losses + [p.data().asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybrid"])
@pytest.mark.parametrize("name", TOOLS | EDITING)
def test_the_program_runs_as_without_it(name: str, hybrid: bool) -> None:
    expected, tool = plain(hybrid), (TOOLS | EDITING)[name]()
    with amanda.apply(tool):
        found = program(hybrid)
    checked(name, tool)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    reason = UNSUPPORTED.get(name.split()[0])
    if reason is not None:
        assert any(
            f"not supported on mxnet/{mx.__version__}" in note and reason in note
            for note in tool.result().notes
        )
    if name == "latency":
        assert all(op.calls and not op.unfinished for op in tool.result().ops)
