"""Threads of a program: at once, after one another, and those that are not seen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn, ops

import amanda
from amanda_core.errors import AmandaWarning
from amanda_driver_mindspore.interception import ROUTES
from amanda_tools.trace import Trace

from .networks import numbers

ms.set_seed(1)
NET = nn.SequentialCell(nn.Dense(4, 3), nn.ReLU(), nn.Dense(3, 2))
X, IMAGE, KERNEL = numbers(2, 4), numbers(1, 2, 4, 4), numbers(1, 2, 2, 2)


def doubled() -> tuple[amanda.Tool, dict[int, set[str]]]:
    """Return a tool that doubles what products return, and the names by id that it fills."""
    names: dict[int, set[str]] = {}
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        names.setdefault(context.get_op_id(), set()).add(context.name)
        if context["type"] == "matmul":
            context.insert_after_op(lambda value: value * 2)

    tool.add_inst_for_op(analyse)
    return tool, names


def test_threads_at_once_get_the_edits_and_one_id_for_an_operator() -> None:
    tool, names = doubled()
    with amanda.apply(tool):
        expected = NET(X).asnumpy()
    assert not np.array_equal(expected, NET(X).asnumpy())
    together = threading.Barrier(3)

    def run(times: int) -> list[Any]:
        together.wait()
        return [NET(X).asnumpy() for _ in range(times)]

    tool, names = doubled()
    with amanda.apply(tool, threads="all"), ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, (1, 2, 3)))
    for outputs in found:
        for output in outputs:
            np.testing.assert_array_equal(output, expected)
    products = [one for one in names.values() if "MatMul" in str(one)]
    assert sorted(products, key=str) == [{"0/MatMul"}, {"2/MatMul"}]
    assert tool.not_seen() == []
    assert ROUTES.attached == {}


@ms.jit  # type: ignore[untyped-decorator]
def jitted(x: Any) -> Any:
    return ops.relu(x) * 2


def doubled_in_a_graph() -> Any:
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        return NET(X)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize(
    ("operator", "run"),
    [
        ("SequentialCell", doubled_in_a_graph),
        ("jitted", lambda: jitted(X)),
        ("relu", lambda: ops.relu(X)),
        ("Conv2D", lambda: ops.Conv2D(1, 2)(IMAGE, KERNEL)),
        ("Mul", lambda: mint.mul(X, X)),
        ("__add__", lambda: X + X),
    ],
)
def test_a_thread_without_tools_is_named(operator: str, run: Callable[[], Any]) -> None:
    tool = Trace()

    def start() -> None:
        thread = threading.Thread(target=lambda: run().asnumpy(), name="alone")
        thread.start()
        thread.join()

    with amanda.apply(tool), pytest.warns(AmandaWarning, match="thread 'alone' run without"):
        start()
    assert f"thread 'alone' (first {operator})" in tool.not_seen()[0]
