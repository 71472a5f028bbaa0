"""Hybridized blocks: names, weights, twins, limits, and a network trained under tools."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import amanda
from amanda_core import OpContext
from amanda_core.errors import UnsupportedError

STATIC = pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])


def tool(analyse: Callable[[OpContext], Any], **where: bool) -> amanda.Tool:
    made = amanda.Tool()
    made.add_inst_for_op(analyse, **where)
    return made


def network(static: bool = False) -> gluon.nn.HybridSequential:
    mx.random.seed(0)
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        net.add(
            gluon.nn.Conv2D(4, 3, in_channels=2, activation="relu"),
            gluon.nn.BatchNorm(in_channels=4),
            gluon.nn.Dense(3),
        )
    net.initialize(mx.init.Xavier())
    net(images())
    net.hybridize(static_alloc=static, static_shape=static)
    return net


def images() -> Any:
    return mx.nd.array(np.random.RandomState(0).standard_normal((2, 2, 6, 6)))


def gradients(net: gluon.Block, x: Any) -> list[Any]:
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    parameters = net.collect_params().values()
    return [p.grad().asnumpy().copy() for p in parameters if p.grad_req != "null"]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_operators_of_graphs_have_paths_types_and_weights() -> None:
    net = network()
    found: dict[str, Any] = {}

    def look(context: OpContext) -> None:
        weights = {place: weight.name for place, weight in context.weights.items()}
        found[context.name] = (context["type"], context.module_path, weights)
        assert context.namespace.endswith("/hybrid")

    with amanda.apply(tool(look)):
        net(images())
    assert found == {
        "0/Convolution": ("conv2d", "0", {1: "0.weight", 2: "0.bias"}),
        "0.act/Activation": ("relu", "0.act", {}),
        "1/BatchNorm": (
            "batch_norm",
            "1",
            {1: "1.gamma", 2: "1.beta", 3: "1.running_mean", 4: "1.running_var"},
        ),
        "2/FullyConnected": ("linear", "2", {1: "2.weight", 2: "2.bias"}),
    }


def test_a_hybridized_block_inside_another_block_has_its_path() -> None:
    class Outer(gluon.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = gluon.nn.Dense(2, in_units=3)

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    net = Outer()
    net.initialize()
    net.hybridize()
    names: list[str] = []
    with amanda.apply(tool(lambda context: names.append(context.name))):
        net(mx.nd.ones((1, 3)))
    assert names[-1] == "inner/FullyConnected"


@STATIC
@pytest.mark.parametrize("steps", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_gradients_are_the_same_in_all_steps(static: bool, steps: int) -> None:
    net, x = network(static), images()
    expected = gradients(network(static), x)
    threads: set[str] = set()

    def note(*values: Any) -> None:
        threads.add(threading.current_thread().name)

    def ask(context: OpContext) -> None:
        for insert in (context.insert_before_op, context.insert_after_op):
            insert(note, observe=True)
        context.insert_before_backward_op(note)
        context.insert_after_backward_op(note)

    with amanda.apply(tool(ask), tool(lambda context: None, backward=True)):
        for _ in range(steps):
            assert same(gradients(net, x), expected)
    # Eager operators of the program run in its thread.
    assert any(name.startswith("Dummy-") for name in threads)
    assert threads <= {"MainThread", *(name for name in threads if name.startswith("Dummy-"))}


def test_the_plain_program_runs_afterwards_and_twins_are_found_again() -> None:
    net, x, count = network(), images(), [0]
    plain = net(x).asnumpy()

    def analyse(context: OpContext) -> None:
        count[0] += 1
        if context["type"] == "linear":
            context.insert_after_op(lambda y: y + 1)

    adding = tool(analyse)
    for _ in range(2):
        with amanda.apply(adding):
            assert np.array_equal(net(x).asnumpy(), plain + 1)
            with amanda.disabled():
                assert np.array_equal(net(x).asnumpy(), plain)
        assert np.array_equal(net(x).asnumpy(), plain)
    assert count == [4]


def test_a_block_that_is_hybridized_anew_has_a_new_twin() -> None:
    net, x = network(), images()
    with amanda.apply(tool(lambda context: context.insert_after_op(lambda y: 2 * y))):
        net(x)
        net.add(gluon.nn.Dense(2))
        net[3].initialize()
        assert net(x).shape == (2, 2)


def test_states_are_observed_and_not_edited() -> None:
    seen: list[Any] = []

    def observe(context: OpContext) -> None:
        if context["type"] == "batch_norm":
            context.insert_before_op(lambda *values: seen.append(values[3].asnumpy()), observe=True)

    def edit(context: OpContext) -> None:
        if context["type"] == "batch_norm":
            context.insert_before_op(lambda mean: mean + 1, inputs=[3])

    net, plain = network(), network()
    expected = gradients(plain, images())
    with amanda.apply(tool(observe)):
        assert same(gradients(net, images()), expected)
    assert np.array_equal(seen[0], np.zeros(4))
    means = [one[1].running_mean.data().asnumpy() for one in (net, plain)]
    assert np.array_equal(*means)
    with amanda.apply(tool(edit)), pytest.raises(UnsupportedError, match="in place"):
        net(images())


def test_an_operator_without_inputs_has_routines() -> None:
    class Noisy(gluon.HybridBlock):  # type: ignore[misc]
        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return x + F.ones((2,))

    block = Noisy()
    block.hybridize()
    seen: list[Any] = []

    def analyse(context: OpContext) -> None:
        if context["type"] == "full":
            context.insert_before_op(lambda *values: seen.append(values))
            context.insert_after_op(lambda y: 2 * y)

    x = mx.nd.zeros((2,))
    with amanda.apply(tool(analyse)):
        assert block(x).asnumpy().tolist() == [2.0, 2.0]
    assert seen == [()]


def test_a_value_may_get_another_shape() -> None:
    net = network()
    whole = net(images()).asnumpy()
    first, *others = net
    part = first(images())[:1]
    for layer in others:
        part = layer(part)

    def analyse(context: OpContext) -> None:
        if context["type"] == "relu":
            context.insert_after_op(lambda y: y[:1])

    with amanda.apply(tool(analyse)):
        # Not the first row of `whole`: how a product is rounded may depend on how many there are.
        assert np.array_equal(net(images()).asnumpy(), part.asnumpy())
    assert np.array_equal(net(images()).asnumpy(), whole)


def test_the_program_of_a_block_runs_as_a_whole_where_no_tool_acts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, expected = network(), gradients(network(), images())
    called: list[Any] = []
    whole = mx.nd.CachedOp.__call__

    def run(program: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(program)
        return whole(program, *args, **kwargs)

    monkeypatch.setattr(mx.nd.CachedOp, "__call__", run)
    with amanda.apply(tool(lambda context: None)):
        assert same(gradients(net, images()), expected)
        assert called == []  # Each operator was analysed, one by one.
        assert same(gradients(net, images()), expected)
        assert len(called) == 1


def test_a_rounding_operator_gets_a_gradient_by_replacement() -> None:
    class Rounded(gluon.HybridBlock):  # type: ignore[misc]
        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return F.round(x)

    def analyse(context: OpContext) -> None:
        if context["type"] == "round":
            context.replace_backward_op(lambda gradient: gradient, grad_outputs=[0])

    block, x = Rounded(), mx.nd.array([0.4, 1.6])
    block.hybridize()
    x.attach_grad()
    straight = tool(analyse)
    for _ in range(2):
        with amanda.apply(straight):
            with autograd.record():
                y = block(x)
            y.backward(mx.nd.array([3.0, 5.0]))
        assert (y.asnumpy().tolist(), x.grad.asnumpy().tolist()) == ([0.0, 2.0], [3.0, 5.0])
        block.hybridize(False)  # The second time imperatively.


@pytest.mark.filterwarnings("ignore:Cannot decide type")  # MXNet's own, and without consequence.
def test_an_imported_symbol_is_instrumented(tmp_path: Path) -> None:
    net, x = network(), images()
    expected = net(x).asnumpy()
    net.export(str(tmp_path / "model"))
    block = gluon.SymbolBlock.imports(
        str(tmp_path / "model-symbol.json"), ["data"], str(tmp_path / "model-0000.params")
    )
    types: list[str] = []
    with amanda.apply(tool(lambda context: types.append(context.op_type))):
        assert np.allclose(block(x).asnumpy(), expected, rtol=1e-6)
    assert [name for name in types if name != "reshape"] == [
        *("Convolution", "Activation", "BatchNorm", "FullyConnected")
    ]


def test_a_body_of_foreach_is_one_operator_and_in_the_coverage() -> None:
    class Loop(gluon.HybridBlock):  # type: ignore[misc]
        def hybrid_forward(self, F: Any, x: Any, start: Any) -> Any:
            return F.contrib.foreach(lambda one, sum: (one + sum, one + sum), x, start)[0]

    block, x = Loop(), mx.nd.array([[1.0], [2.0]])
    block.hybridize()
    seen: list[str] = []
    with amanda.apply(tool(lambda context: seen.append(context.op_type))) as handle:
        assert block(x, mx.nd.zeros((1,))).asnumpy().tolist() == [[1.0], [3.0]]
        assert any("foreach" in gap.what for gap in handle.coverage()["mxnet"])
    assert "_foreach" in seen


RECURRENT = """
import mxnet as mx, numpy as np, amanda
from mxnet import autograd, gluon

called = []
tool = amanda.Tool()
tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *_: called.append(1)))
x = mx.nd.array(np.random.RandomState(0).standard_normal((5, 3, 6)))

def step(net):
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    return [loss.asnumpy()] + [p.grad().asnumpy() for p in net.collect_params().values()]

for kind in (gluon.rnn.RNN, gluon.rnn.GRU, gluon.rnn.LSTM):
    net = gluon.nn.HybridSequential()
    net.add(kind(4, num_layers=2, bidirectional=True), gluon.nn.Dense(2))
    net.initialize()
    net.hybridize()
    expected = step(net)
    with amanda.apply(tool):
        found = step(net)
    assert len(called) > 4
    called.clear()
    for one, other in zip(found, expected):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5)
"""


def test_recurrent_layers_inside_a_block() -> None:
    """The block does not know the batch of their first states.

    Without oneDNN, MXNet itself cannot run such a block.
    """
    environment = {name: value for name, value in os.environ.items() if "MKLDNN" not in name}
    environment["MXNET_ENGINE_TYPE"] = "NaiveEngine"
    found = subprocess.run(
        [sys.executable, "-c", RECURRENT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
