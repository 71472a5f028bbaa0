"""Every tool that ships on training steps of a network."""

from __future__ import annotations

from functools import cache
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from every_tool import EDITING, TOOLS, checked
from mindspore import Tensor, nn, ops

import amanda

from .networks import numbers

X, TARGET = numbers(4, 2, 8, 8), Tensor([0, 1, 2, 3], ms.int32)
#: Tool -> why it does nothing here, as its result says.
UNSUPPORTED = {
    "effective_path": "there are no rules for its operators",
    "rewrite": "none of the rules is for mindspore",
    "rematerialize": "only what PyTorch's autograd saves in eager mode can be evicted",
}


class Net(nn.Cell):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, pad_mode="valid"), nn.BatchNorm2d(4)
        self.pool, self.first = nn.MaxPool2d(2, 2), nn.Dense(36, 4)
        self.middle, self.last = nn.LayerNorm((4,)), nn.Dense(4, 4)

    def construct(self, x: Any) -> Any:
        x = self.pool(ops.relu(self.norm(self.conv(x))))
        return self.last(self.middle(self.first(x.reshape(4, -1))))


def program() -> list[Any]:
    """Return the losses of two steps, and the parameters."""
    ms.set_seed(1)
    net = Net()
    net.set_train()
    optimizer = nn.SGD(net.trainable_params(), 0.1)

    def loss(x: Any) -> Any:
        return ops.cross_entropy(net(x), TARGET)

    run = ms.value_and_grad(loss, None, weights=net.trainable_params())
    losses = []
    for _ in range(2):
        value, gradients = run(X)
        optimizer(gradients)
        losses.append(value.asnumpy())
    return losses + [one.asnumpy() for one in net.get_parameters()]


@cache
def plain() -> list[Any]:
    return program()


@pytest.mark.parametrize("name", TOOLS | EDITING)
def test_the_program_runs_as_without_it(name: str) -> None:
    expected, tool = plain(), (TOOLS | EDITING)[name]()
    with amanda.apply(tool):
        found = program()
    checked(name, tool)
    for one, other in zip(found, expected, strict=True):
        # Kernels depend on where memory lies, by units in the last place.
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)
    reason = UNSUPPORTED.get(name.split()[0])
    if reason is not None:
        assert any(
            f"not supported on mindspore/{ms.__version__}" in note and reason in note
            for note in tool.result().notes
        )
    if name == "latency":
        assert all(op.calls and not op.unfinished for op in tool.result().ops)
