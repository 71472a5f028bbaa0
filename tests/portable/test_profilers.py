"""Profilers over PyTorch and TensorFlow's modes: the program's bits, and the same figures."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tests.tools.profiling import MS, FakeClock, checked_trace, latency_by

import amanda
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.prune import Prune, numpy_mask
from amanda_tools.sparsity import Sparsity, SparsityResult

from .models import DENSE, STEPS, WEIGHTS, assert_same_bits
from .test_builtin_tools import reference
from .test_portable_tools import PRODUCTS, backends, built_mostly_before, few_backends, instrumented


def sleeping(clock: FakeClock) -> Any:
    """Return a program with one operator that takes 100 ms."""

    def body(x: Any) -> Any:
        clock.sleep(100 * MS)
        return x

    return tf.reduce_sum(2.0 * tf.ensure_shape(tf.py_function(body, [tf.ones(3)], tf.float32), [3]))


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_a_sleep_reads_what_it_sleeps(mode: str) -> None:
    """Whoever waits for it has not begun."""
    clock = FakeClock()
    tool = latency_by(clock)
    if mode == "session":
        with tf.Graph().as_default() as graph:
            output = sleeping(clock)
        with amanda.apply(tool), tf.compat.v1.Session(graph=graph) as session:
            assert session.run(output) == 6
    else:
        program = tf.function(sleeping) if mode == "function" else sleeping
        with amanda.apply(tool):
            assert float(program(clock)) == 6
    found = tool.result()
    times = {op.type: op.total for op in found.ops}
    assert times.pop("EagerPyFunc") == 100 * MS
    assert set(times.values()) == {0}
    assert (found.graph_busy == 100 * MS) == (mode != "eager")
    assert sum(step.ops for step in found.steps) == 100 * MS
    rows: dict[Any, Any] = {row[0]: row[1] for row in found.table().rows}
    whole = rows.pop("(all)")
    assert sum(rows.values()) == pytest.approx(whole) == sum(s.wall for s in found.steps) / 1e6
    assert any("operators of graphs" in note for note in found.notes) == (mode != "eager")


@built_mostly_before
@backends
def test_latency(backend: str, inside: bool, tmp_path: Path) -> None:
    tool = Latency(warmup=0)
    record = instrumented(backend, inside, tool)
    assert_same_bits(record, reference(backend, False))
    found = tool.result()
    words = ("conv2d", "relu", "max_pool2d", "cross_entropy", *PRODUCTS)
    forward = [op for op in found.ops if op.phase == "forward" and op.word in words]
    assert len(forward) == 9
    assert {op.calls for op in forward} == {STEPS}
    assert all(0 < op.shortest <= op.longest <= op.total for op in forward)
    for op in forward:
        own = [other for other in found.ops if other.forward == op.name and other.calls]
        assert own, op.name
        assert {other.phase for other in own} == {"backward"}
    (path,) = found.write(tmp_path)
    spans = [event for event in checked_trace(path) if event["ph"] == "X"]
    assert len(spans) == sum(op.calls for op in found.ops)


#: Bytes of the tensors below.
N = 4 * 1000


def test_a_chain_of_tensorflow_by_hand() -> None:
    x, one = tf.ones(1000), tf.constant(1.0)
    variable = tf.Variable(tf.ones(1000))

    def chain() -> object:
        y = x * one
        z = y + one
        del y
        w = tf.reshape(z, (10, 100))  # The same buffer.
        variable.read_value()  # The variable's own.
        return tf.reduce_sum(w)

    tool = Memory()
    with amanda.apply(tool):
        kept = chain()
    found = tool.result()
    assert (found.peak, found.peak_op) == (2 * N, "AddV2")
    assert (found.allocated, found.live) == (2 * N + 4, 4)
    rows = {op.type: op for op in found.ops}
    assert [rows[name].allocated for name in ("Mul", "AddV2", "Reshape", "Sum")] == [N, N, 0, 4]
    assert rows["ReadVariableOp"].allocated == 0
    assert found.notes == []
    del kept
    assert tool.result().live == 0


def test_what_a_tape_keeps_is_alive() -> None:
    x = tf.ones(1000)
    tool = Memory()
    with amanda.apply(tool):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.exp(tf.exp(x)))
        # The exponentials, which their gradients need, and the sum.
        assert tool.result().live == 2 * N + 4
        gradient = tape.gradient(y, x)
        del tape, y
    # The gradient, and the few numbers that describe its shape.
    assert N <= tool.result().live < N + 100
    del gradient


@built_mostly_before
@backends
def test_memory(backend: str, inside: bool) -> None:
    tool = Memory()
    record = instrumented(backend, inside, tool)
    assert_same_bits(record, reference(backend, False))
    found = tool.result()
    conv = next(op for op in found.ops if op.word == "conv2d" and op.phase == "forward")
    eager = backend in ("pytorch", "tensorflow eager")
    # 6 channels of 8 x 8 for each of 4 images, at 4 bytes.
    assert (conv.allocated if eager else conv.output) == STEPS * 4 * 6 * 64 * 4
    assert (conv.live_after > 0) == eager
    assert bool(found.notes) == (not eager)
    unknown = "peak, allocated and live memory are not known" in found.table().title
    assert unknown == (not found.is_known) == (not eager)
    assert (found.figures() == {}) == (not eager)  # No figure of something else.
    assert (found.table().rows[0][2] == "not known") == (not eager)
    if not eager:
        assert sum(step.output for step in found.steps) == sum(op.output for op in found.ops)
        assert json.loads(found.to_json())["peak"] is None
    rows = {row[0]: row for row in found.table("type").rows}
    assert ("not known" in rows["conv2d"]) == (not eager)
    if not eager:
        assert all("only the size of outputs is counted" in note for note in found.notes)


def test_the_optimizer_in_a_graph_of_a_whole_step_is_counted() -> None:
    layer, optimizer = tf.keras.layers.Dense(3), tf.keras.optimizers.Adam()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return loss

    tool = Memory()
    with amanda.apply(tool):
        tf.function(step)(tf.ones((2, 4)))
    found = tool.result()
    assert sum(op.output for op in found.ops if op.zone == "optimizer") > 0
    assert not any("optimizers" in note for note in found.notes)


def test_the_allocator_of_a_device_is_asked_where_graphs_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"current": 5, "peak": 7_000_000}
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind] * 2)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: given)
    tool = Memory()
    with amanda.apply(tool):
        tf.function(lambda x: tf.exp(x) * 2)(tf.ones(3))
    found = tool.result()
    assert found.allocators == {"GPU:0": given, "GPU:1": given}
    assert found.figures() == {"peak": 14_000_000}
    assert "the allocator of GPU:1 reports a peak of 7.000 MB" in found.table().title
    monkeypatch.undo()
    assert tool.result().allocators == {}  # Of the CPU there is none.


def weights_and_activations(result: SparsityResult) -> list[dict[str, object]]:
    """Return the counts of the layers without identifying names."""
    words = (*PRODUCTS, "conv2d", "relu", "max_pool2d")
    numbers = ["kind", "executions", "elements", "zeros", "channels", "zero_channels", "dead"]
    numbers += ["blocks", "zero_blocks", "groups", "compliant"]
    # A bias is added by an operator of its own in TensorFlow.
    chosen = [t for t in result.tensors if t.word in words and t.tensor != "bias"]
    return [
        {name: getattr(tensor, name) for name in numbers}
        for tensor in chosen
        if tensor.kind == "weight" or tensor.word in ("relu", "max_pool2d")
    ]


@functools.cache
def pruned(backend: str, inside: bool) -> SparsityResult:
    tool = Sparsity(block=2, gradients=True)
    instrumented(backend, inside, Prune(0.8), tool)
    return tool.result()


@built_mostly_before
@few_backends
def test_sparsity_is_the_same_everywhere(backend: str, inside: bool) -> None:
    found = pruned(backend, inside)
    assert weights_and_activations(found) == weights_and_activations(pruned("pytorch", False))
    weights = [tensor for tensor in found.of("weight") if len(tensor.shape) > 1]
    for tensor, name in zip(weights, DENSE, strict=True):
        weight = WEIGHTS[name]
        pruned_away = round(0.8 * weight.size)
        mask = numpy_mask(weight, list(range(weight.ndim)), pruned_away)
        assert tensor.zeros == STEPS * pruned_away
        matrix = mask.reshape(len(mask), -1)
        matrix = np.pad(matrix, [(0, length % 2) for length in matrix.shape])
        blocks = matrix.reshape(len(matrix) // 2, 2, -1, 2).sum((1, 3))
        assert tensor.zero_blocks == STEPS * int((blocks == 0).sum())
    products = [product for product in found.products if product.word in (*PRODUCTS, "conv2d")]
    assert [product.by_weight for product in products] == [
        round(product.macs * (tensor.elements - tensor.zeros) / tensor.elements)
        for product, tensor in zip(products, weights, strict=True)
    ]


@pytest.mark.slow
@backends
def test_all_profilers_together(backend: str) -> None:
    tools = (Flops(), Latency(), Memory(), Sparsity())
    record = instrumented(backend, False, *tools)
    assert_same_bits(record, reference(backend, False))
    alone = Flops()
    instrumented(backend, False, alone)
    assert tools[0].result().macs == alone.result().macs
    assert tools[0].result().backward_macs == alone.result().backward_macs


def test_what_waits_for_no_value_is_named() -> None:
    """A read of a variable waits for the write before it, and its handle is there always."""
    clock = FakeClock()
    # Nothing but the sleep is ready when the program begins: a graph runs it beside the others.
    variable, ones = tf.Variable(tf.zeros(3)), tf.ones(3)

    @tf.function  # type: ignore[untyped-decorator]
    def program() -> Any:
        variable.assign(sleeping(clock) * ones)
        return variable.read_value() + 1.0

    tool = latency_by(clock)
    with amanda.apply(tool):
        assert program().numpy().tolist() == [7.0] * 3
    found = tool.result()
    assert "ReadVariableOp" not in {op.type for op in found.ops}
    assert {op.type: op.total for op in found.ops if op.total} == {"EagerPyFunc": 100 * MS}
    assert any("1 operator of graphs not timed" in note for note in found.notes)
