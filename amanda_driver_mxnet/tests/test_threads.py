"""Threads of a program: pools, threads after one another and at once, and what is not seen."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import amanda
from amanda_core.errors import AmandaWarning
from amanda_driver_mxnet import interception
from amanda_tools.trace import Trace

X = np.random.RandomState(0).standard_normal((2, 4)).astype("float32")


def network(hybrid: bool) -> gluon.HybridBlock:
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(3, activation="relu"), gluon.nn.Dense(2))
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(X))
    if hybrid:
        net.hybridize()
        net(mx.nd.array(X))
    return net


def at_once(function: Any, *arguments: Any) -> list[Any]:
    """Return what a function returns in as many threads, which begin together."""
    together = threading.Barrier(len(arguments))

    def run(argument: Any) -> Any:
        together.wait()
        return function(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments))


class Doubled(amanda.Tool):
    """Doubles what the products return, and the gradients that arrive there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, set[str]] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.names.setdefault(context.get_op_id(), set()).add(context.name)
        if context["type"] == "linear":
            context.insert_after_op(lambda value: value * 2, outputs=[0])


@pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybrid"])
def test_threads_at_once_get_the_edits_and_one_id_for_an_operator(hybrid: bool) -> None:
    net = network(hybrid)
    weights = [one.data().asnumpy() for one in net.collect_params().values()]
    first, second = (2 * x for x in (weights[0], weights[2]))
    expected = np.maximum(X @ first.T, 0) @ second.T
    tool = Doubled()
    with amanda.apply(tool, threads="all"):
        found = at_once(lambda k: [net(mx.nd.array(X)).asnumpy() for _ in range(k)], 1, 2, 3)
    for outputs in found:
        for output in outputs:
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    linear = [names for names in tool.names.values() if "FullyConnected" in str(names)]
    assert sorted(linear, key=str) == [{"0/FullyConnected"}, {"1/FullyConnected"}]
    assert tool.not_seen() == []
    assert interception.ATTACHED == {}


def test_gradients_in_threads_are_those_of_the_program() -> None:
    nets = [network(hybrid=False) for _ in range(3)]

    def train(number: int) -> Any:
        net, x = nets[number], mx.nd.array(X + number)
        with autograd.record():
            loss = net(x).square().sum()
        loss.backward()
        return [one.grad().asnumpy() for one in net.collect_params().values()]

    plain = [train(number) for number in range(3)]
    seen: list[int] = []
    tool = amanda.Tool()

    def look(*gradients: Any) -> None:
        seen.append(len(gradients))

    tool.add_inst_for_op(
        lambda context: context.insert_after_backward_op(look, observe=True), backward=True
    )
    with amanda.apply(tool, threads="all"):
        found = at_once(train, 0, 1, 2)
    assert seen
    for one, other in zip(plain, found, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_thread_without_tools_is_named() -> None:
    tool = Trace()

    def start() -> None:
        thread = threading.Thread(target=lambda: mx.nd.relu(mx.nd.array(X)), name="alone")
        thread.start()
        thread.join()

    with amanda.apply(tool), pytest.warns(AmandaWarning, match="thread 'alone' run without"):
        start()
    assert "thread 'alone' (first " in tool.not_seen()[0]
