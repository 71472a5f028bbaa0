"""Share of the ops of real models that have a common type, forward and backward."""

from __future__ import annotations

import collections

import pytest
import torch

import amanda
from amanda_core import OpContext

from .architectures import ARCHITECTURES, Architecture, loss_of

#: Of the ops of each model, and of its backward ops.
SHARE = 0.95


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_the_operators_of_models_have_words(architecture: Architecture) -> None:
    forward: collections.Counter[tuple[str, str | None]] = collections.Counter()
    backward: collections.Counter[tuple[str, str | None]] = collections.Counter()

    def count(context: OpContext) -> None:
        forward[context.op_type, context["type"]] += 1

    def count_backward(context: OpContext) -> None:
        backward[context.op_type, context["backward_type"]] += 1

    tool = amanda.Tool()
    tool.add_inst_for_op(count)
    tool.add_inst_for_op(count_backward, backward=True)
    torch.manual_seed(0)
    network, feed = architecture.build().train(), architecture.feed()
    with amanda.apply(tool):
        loss = loss_of(network(**feed))
        torch.autograd.backward(loss)
    for ops in (forward, backward):
        assert ops.total() >= 10
        missing = {op: n for (op, word), n in ops.items() if word is None}
        assert 1 - sum(missing.values()) / ops.total() >= SHARE, missing


def test_backward_words_follow_the_layers() -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 8, bias=False),
        torch.nn.Dropout(),
        torch.nn.Linear(8, 2),
    )
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context["backward_type"]), backward=True)
    with amanda.apply(tool):
        y = network(torch.rand(2, 3, 6, 6))
        torch.autograd.backward(y, torch.ones_like(y))
    layers = [word for word in seen if word not in ("accumulate_grad", "transpose_backward")]
    assert layers == [
        "linear_backward",
        "dropout_backward",
        "linear_backward",
        "reshape_backward",
        "relu_backward",
        "batch_norm_backward",
        "conv2d_backward",
    ]
