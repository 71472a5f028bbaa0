"""Facts, limits and errors of this driver, which the conformance kit cannot know."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import amanda
import tinytape
from amanda_core.errors import UnsupportedError


def model(x: Any, w: Any) -> Any:
    return tinytape.total(tinytape.relu(tinytape.matmul(x, w)))


X = [[1.0, -2.0]]
W = [[3.0, 0.5], [1.0, -1.0]]


def looking(contexts: list[amanda.OpContext]) -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(contexts.append)
    return tool


def test_facts_of_an_op() -> None:
    contexts: list[amanda.OpContext] = []
    with amanda.apply(looking(contexts)):
        model(tinytape.Tensor(X), tinytape.parameter(W, "w"))
    assert [context.name for context in contexts] == ["w/matmul", "relu", "total"]
    assert [context["type"] for context in contexts] == ["matmul", "relu", "sum"]
    assert {context.namespace for context in contexts} == {"tinytape/0.1.0/eager"}
    assert all((context.source or "").startswith("test_driver.py:") for context in contexts)


def test_layers_called_by_one_line_are_ops_of_their_own() -> None:
    contexts: list[amanda.OpContext] = []
    layers = [tinytape.parameter(np.eye(2), name) for name in ("first", "second")]
    with amanda.apply(looking(contexts)):
        for _ in range(3):
            value = tinytape.Tensor(X)
            for layer in layers:
                value = tinytape.matmul(value, layer)
    assert [context.name for context in contexts] == ["first/matmul", "second/matmul"]


def test_gradients_are_those_of_numpy() -> None:
    weight = tinytape.parameter(W, "w")
    tool = amanda.Tool()

    def double(context: amanda.OpContext) -> None:
        if context["type"] == "relu":
            context.insert_after_backward_op(lambda g: 2 * g, grad_inputs=[0])

    tool.add_inst_for_op(double)
    with amanda.apply(tool):
        tinytape.backward([model(tinytape.Tensor(X), weight)], [1.0])
    product = np.asarray(X) @ np.asarray(W)
    assert weight.grad is not None
    np.testing.assert_array_equal(weight.grad, 2 * np.asarray(X).T @ (product > 0))


def test_gradients_of_a_replaced_op_are_an_error() -> None:
    tool = amanda.Tool()

    def ask(context: amanda.OpContext) -> None:
        if context["type"] == "relu":
            context.replace_op(tinytape.tanh, inputs=[0])
            context.insert_before_backward_op(lambda g: None, grad_outputs=[0])

    tool.add_inst_for_op(ask)
    with amanda.apply(tool) as handle:
        with pytest.raises(UnsupportedError, match="replaced"):
            model(tinytape.Tensor(X), tinytape.parameter(W))
        gaps = handle.coverage()["tinytape"]
    assert any("replaced" in one.what for one in gaps)


def test_backward_behind_the_tools_is_vanilla_and_says_so() -> None:
    weight = tinytape.parameter(W)
    seen: list[object] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_backward_op(seen.append, grad_outputs=[0])
    )
    with amanda.apply(tool):
        output = model(tinytape.Tensor(X), weight)
    with pytest.warns(amanda.AmandaWarning, match="after `apply` has ended") as caught:
        tinytape.backward([output], [1.0])
    assert caught[0].filename == __file__
    assert seen == []
    assert weight.grad is not None


def test_another_thread_may_apply_tools_of_its_own() -> None:
    found: dict[str, list[amanda.OpContext]] = {"here": [], "there": []}

    def work(name: str) -> None:
        with amanda.apply(looking(found[name])):
            model(tinytape.Tensor(X), tinytape.parameter(W))

    with amanda.apply(looking(found["here"])):
        thread = threading.Thread(target=work, args=["there"])
        thread.start()
        thread.join()
        model(tinytape.Tensor(X), tinytape.parameter(W))
    assert [context["type"] for context in found["here"]] == ["matmul", "relu", "sum"]
    assert [context["type"] for context in found["there"]] == ["matmul", "relu", "sum"]


def test_a_framework_imported_under_tools_is_instrumented() -> None:
    program = """
import sys, amanda
seen = []
tool = amanda.Tool()
tool.add_inst_for_op(lambda context: seen.append(context["type"]))
with amanda.apply(tool):
    assert "tinytape" not in sys.modules and "numpy" not in sys.modules
    import tinytape
    tinytape.relu(tinytape.Tensor([1.0]))
assert seen == ["relu"], seen
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
