"""What this driver does beyond the conformance kit: Gluon, states, threads, limits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
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
from amanda_tools.nonfinite import NonFinite


def tool(analyse: Callable[[OpContext], Any], **where: bool) -> amanda.Tool:
    made = amanda.Tool()
    made.add_inst_for_op(analyse, **where)
    return made


def network() -> gluon.nn.HybridSequential:
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
    return net


def images() -> Any:
    return mx.nd.array(np.random.RandomState(0).standard_normal((2, 2, 6, 6)))


def gradients(net: gluon.Block, x: Any) -> list[Any]:
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    parameters = net.collect_params().values()
    return [p.grad().asnumpy().copy() for p in parameters if p.grad_req != "null"]


def test_operators_of_blocks_have_their_paths_types_and_weights() -> None:
    net, found = network(), {}

    def look(context: OpContext) -> None:
        weights = {place: weight.name for place, weight in context.weights.items()}
        found[context.name] = (context["type"], context.module_path, weights, context.source)

    with amanda.apply(tool(look)):
        net(images())
    assert {name: entry[:3] for name, entry in found.items()} == {
        "0/Convolution": ("conv2d", "0", {1: "0.weight", 2: "0.bias"}),
        "0.act/Activation": ("relu", "0.act", {}),
        "1/BatchNorm": (
            "batch_norm",
            "1",
            {1: "1.gamma", 2: "1.beta", 3: "1.running_mean", 4: "1.running_var"},
        ),
        "2/FullyConnected": ("linear", "2", {1: "2.weight", 2: "2.bias"}),
    }
    assert all(str(entry[3]).startswith("test_driver.py:") for entry in found.values())


def test_parameters_that_blocks_get_at_their_first_call_are_known() -> None:
    net, names = gluon.nn.Dense(3), []
    net.initialize()

    def look(context: OpContext) -> None:
        if context.zone == "model":
            names.append([weight.name for weight in context.weights.values()])

    x = mx.nd.ones((2, 5))
    with amanda.apply(tool(look)):
        net(x)
    assert names == [["weight", "bias"]]


def test_what_the_program_marks_and_what_metrics_and_trainers_run_is_not_the_model() -> None:
    net = gluon.nn.Dense(3, in_units=5)
    net.initialize()
    found: dict[str, set[str]] = {}
    x = mx.nd.ones((2, 5))

    def look(context: OpContext) -> None:
        found.setdefault(context.zone, set()).add(context.name)

    with amanda.apply(tool(look)):
        net(x)
        with amanda.zone("metrics"):
            mx.nd.relu(net(x))
        mx.nd.sqrt(x)
        mx.metric.MSE().update(x, x)
    assert {"FullyConnected", "sqrt"} <= found["model"]
    assert {"FullyConnected#2", "relu"} <= found["metrics"]
    assert found["model"].isdisjoint(found["metrics"])


def test_states_that_operators_write_are_observed_and_not_edited() -> None:
    net, seen = network(), []

    def observe(context: OpContext) -> None:
        if context["type"] == "batch_norm":
            context.insert_before_op(lambda *values: seen.append(values[3].asnumpy()), observe=True)

    def edit(context: OpContext) -> None:
        if context["type"] == "batch_norm":
            context.insert_before_op(lambda mean: mean + 1, inputs=[3])

    plain = network()
    expected = gradients(plain, images())
    with amanda.apply(tool(observe)):
        found = gradients(net, images())
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert np.array_equal(seen[0], np.zeros(4))
    means = [one[1].running_mean.data().asnumpy() for one in (net, plain)]
    assert np.array_equal(*means)
    with amanda.apply(tool(edit)), pytest.raises(UnsupportedError, match="in place"):
        net(images())


@pytest.mark.parametrize("steps", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_gradients_are_the_same_in_all_steps_and_computed_on_other_threads(steps: int) -> None:
    net, x = network(), images()
    expected = gradients(net, x)
    threads: set[str] = set()

    def ask(context: OpContext) -> None:
        if context.zone == "model":
            context.insert_before_backward_op(note)
            context.insert_after_backward_op(note)

    def note(*values: Any) -> None:
        threads.add(threading.current_thread().name)

    with amanda.apply(tool(ask), tool(lambda context: None, backward=True)):
        for _ in range(steps):
            found = gradients(net, x)
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert threads
    # MXNet's workers for functions of one's own; Python did not start them.
    assert all(name.startswith("Dummy-") for name in threads)


def test_gradients_that_are_added_to_others() -> None:
    w = mx.nd.array([2.0, 3.0])
    w.attach_grad(grad_req="add")
    ask = tool(lambda context: context.insert_after_backward_op(lambda g: 10 * g, grad_inputs=[0]))
    with amanda.apply(ask):
        for _ in range(3):
            with autograd.record():
                y = mx.nd.square(w)
            y.backward()
    assert w.grad.asnumpy().tolist() == [120.0, 180.0]


def test_gradients_of_some_inputs_only() -> None:
    x, y = mx.nd.array([2.0]), mx.nd.array([5.0])
    for leaf in (x, y):
        leaf.attach_grad()
    ask = tool(lambda context: context.insert_after_backward_op(lambda *g: [2 * one for one in g]))
    with amanda.apply(ask):
        with autograd.record():
            z = x * y
        (found,) = autograd.grad(z, [y])
    assert found.asscalar() == 4.0


def test_the_indices_of_an_embedding_get_no_gradient() -> None:
    table = mx.nd.array([[1.0], [2.0]])
    table.attach_grad()
    seen: list[Any] = []
    ask = tool(lambda context: context.insert_after_backward_op(lambda *g: seen.append(g)))
    with amanda.apply(ask):
        with autograd.record():
            rows = mx.nd.Embedding(mx.nd.array([1, 1]), table, input_dim=2, output_dim=1)
        rows.backward()
    assert [value is None for value in seen[0]] == [True, False]
    assert table.grad.asnumpy().tolist() == [[0.0], [2.0]]


def test_edits_of_gradients_of_an_op_that_writes_to_its_caller_are_refused() -> None:
    x, target = mx.nd.ones((2,)), mx.nd.zeros((2,))
    x.attach_grad()
    double = tool(lambda context: context.insert_before_backward_op(lambda g: 2 * g))
    with amanda.apply(double), autograd.record(), pytest.raises(UnsupportedError, match="out="):
        mx.nd.square(x, out=target)


def test_an_edited_output_is_in_the_array_of_the_caller() -> None:
    target = mx.nd.zeros((2,))
    with amanda.apply(tool(lambda context: context.insert_after_op(lambda y: y + 1))):
        found = mx.nd.square(mx.nd.array([2.0, 3.0]), out=target)
    assert found is target
    assert target.asnumpy().tolist() == [5.0, 10.0]


def test_views_and_functions_that_call_the_library_themselves_are_operators() -> None:
    x, a = mx.nd.arange(6), mx.np.ones((2, 2))
    seen: list[str] = []
    with amanda.apply(tool(lambda context: seen.append(context.op_type))):
        x.reshape((2, 3))[1][0:2]
        mx.np.tensordot(a, a)
    assert seen == ["reshape", "at", "slice", "tensordot"]


def test_what_an_optimizer_runs_has_a_zone_of_its_own() -> None:
    net = network()
    zones: dict[str, set[str]] = {}
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})

    def look(context: OpContext) -> None:
        zones.setdefault(context.zone, set()).add(context.op_type)

    with amanda.apply(tool(look)):
        gradients(net, images())
        trainer.step(1)
    assert {"Convolution", "FullyConnected"} <= zones["model"]
    assert any(name.endswith("_update") for name in zones["optimizer"])


def test_backward_after_apply_is_plain_and_warns() -> None:
    x = mx.nd.ones((2,))
    x.attach_grad()
    seen: list[Any] = []
    ask = tool(lambda context: context.insert_before_backward_op(lambda g: seen.append(g)))
    with amanda.apply(ask), autograd.record():
        y = mx.nd.square(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y.backward()
        mx.nd.waitall()
    assert [one.category for one in caught] == [amanda.AmandaWarning]
    assert (seen, x.grad.asnumpy().tolist()) == ([], [2.0, 2.0])


APPLY = """
import warnings
warnings.simplefilter("ignore")
import mxnet, amanda
with amanda.apply(amanda.Tool()):
    print("applied")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "wrong gradients"), ({"MXNET_ENGINE_TYPE": "NaiveEngine"}, "applied")],
    ids=["default", "naive engine"],
)
def test_configurations_with_wrong_gradients_are_refused(
    settings: dict[str, str], expected: str
) -> None:
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("MXNET_")}
    done = subprocess.run(
        [sys.executable, "-c", APPLY],
        env={**inherited, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert expected in done.stdout + done.stderr
    assert done.returncode == (0 if settings else 1)
    if not settings:
        assert "MXNET_ENGINE_TYPE=NaiveEngine" in done.stderr


PROGRAM = """
import mxnet as mx
net = mx.gluon.rnn.LSTM(5)
net.initialize()
with mx.autograd.record():
    loss = (net(mx.nd.ones((4, 3, 6))) ** 2).sum()
loss.backward()
print(loss.asnumpy().shape)
"""
COMMAND = "import sys; from amanda_core.cli import main; sys.exit(main())"


@pytest.mark.slow
def test_the_command_chooses_an_engine_whose_gradients_are_right(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("MXNET_")}
    for settings, expected in (
        ({}, "(1,)"),
        ({"MXNET_ENGINE_TYPE": "ThreadedEnginePerDevice"}, "the framework's driver refused"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "run", "-t", "trace", "--force", "train.py"],
            env={**inherited, **settings},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        said = done.stdout + done.stderr
        assert expected in said
        assert "loaded no framework" not in said
        assert done.returncode == (1 if settings else 0)


@pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybrid"])
def test_nonfinite_checks_backward_operators_that_end_on_another_thread(hybrid: bool) -> None:
    net = network()
    if hybrid:
        net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    tool = NonFinite()
    with amanda.apply(tool):
        for _ in range(10):
            gradients(net, images())
            trainer.step(1)
    result = tool.result()
    assert (result.faults, result.unchecked) == ([], {})
    assert result.checked >= 10 * 2 * 5
