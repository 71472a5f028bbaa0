"""No operator that reaches MindSpore's dispatcher lies outside of one that the driver sees.

The oracle is the driver's own, which `AMANDA_MINDSPORE_ORACLE` asks for: MindSpore's dispatcher is
below autograd, and sees what the doors lead to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import MsDispatchMode, nn, ops

import amanda
from amanda_core.errors import ConfigError
from amanda_driver_mindspore import oracle as oracles
from amanda_driver_mindspore.interception import ROUTES
from amanda_driver_mindspore.mindspore_internals import dispatch
from amanda_tools.trace import Trace

from .networks import EXPRESSIONS, NETWORKS, flat, numbers, step

#: Expressions whose operators pass through each form of a door.
SAMPLE = ("indices", "in place", "unary", "products", "joins", "lstm", "convolutions", "numpy")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(oracles.VARIABLE, "1")


def oracle() -> oracles.Oracle:
    """Return the oracle of the tools that are applied in this thread."""
    (attachment,) = ROUTES.attached.values()
    return attachment.oracle  # type: ignore[no-any-return]


def watched() -> tuple[amanda.Tool, list[str]]:
    """Return a tool that acts at each operator, and the list of types that it fills."""
    seen: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(lambda *values: seen.append(context.op_type), observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return tool, seen


def checked(run: Callable[[], Any]) -> list[str]:
    """Check that no operator is missed in a program; return the types that a tool saw."""
    tool, seen = watched()
    with amanda.apply(tool):
        found = flat(run())
        assert oracle().outside == {}
        assert oracle().inside > 0
    assert found
    for tensor in found:
        tensor.asnumpy()
    return seen


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.exhaustive)
        for name in EXPRESSIONS
    ],
)
def test_an_expression_has_no_operator_outside(name: str) -> None:
    run = EXPRESSIONS[name]
    ms.set_seed(1)
    try:
        for tensor in flat(run()):
            tensor.asnumpy()
    except RuntimeError as error:  # MindSpore's own, at the first look at a value.
        pytest.skip(f"MindSpore has no kernel for it here: {str(error).splitlines()[0]}")
    assert checked(run)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_no_operator_outside(name: str) -> None:
    make, x = NETWORKS[name]
    network = make()
    assert len(checked(lambda: network(x))) > 1


def test_training_under_the_oracle_is_plain_and_has_no_operator_outside() -> None:
    make, x = NETWORKS["encoder"]
    network = make()
    plain = step(network, x)
    tool, _ = watched()
    with amanda.apply(tool):
        found = step(network, x)
        nn.Momentum(network.trainable_params(), 0.0, 0.9)(tuple(network.trainable_params()))
        assert oracle().outside == {}
    assert all(map(np.array_equal, found, plain))


def test_an_operator_outside_is_in_results_and_in_the_coverage() -> None:
    x = numbers(3)
    relu = ops.ReLU()
    hidden = ms._c_expression.pyboost_relu  # No door: the modules that use it have bound it.
    tool = Trace()
    with amanda.apply(tool) as handle:
        ops.abs(x)
        hidden(relu, [x])
        gaps = {gap.what: gap.why for gap in handle.coverage()["mindspore"]}
    assert "MindSpore's dispatcher" in gaps["ReLU (called 1x)"]
    assert any("ReLU (1 call)" in line and "dispatcher" in line for line in tool.result().notes)


def test_the_oracle_ends_with_the_tools() -> None:
    x = numbers(3)
    tool, seen = watched()
    with ThreadPoolExecutor(1) as pool:
        with amanda.apply(tool, threads="all"):
            ops.abs(x)
            pool.submit(ops.abs, x).result()
            assert dispatch.place()[1] == 1
            mode = MsDispatchMode()
            mode.__enter__()  # It is still entered when the tools are removed.
        assert dispatch.place()[1] == 2
        mode.__exit__(None, None, None)
        ops.abs(x)
        pool.submit(ops.abs, x).result()
        assert [dispatch.place()[1], pool.submit(dispatch.place).result()[1]] == [0, 0]
    assert len(seen) == 2


def test_it_is_not_there_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(oracles.VARIABLE, "0")
    with amanda.apply(watched()[0]) as handle:
        ops.abs(numbers(3))
        assert dispatch.place()[1] == 0
        assert not any("oracle" in gap.what for gap in handle.coverage()["mindspore"])


def test_a_release_without_such_modes_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "HAS_MODES", False)
    with pytest.raises(ConfigError, match="no MsDispatchMode"), amanda.apply(watched()[0]):
        ops.abs(numbers(3))


@pytest.mark.slow
def test_doctor_says_what_the_oracle_found(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from amanda_core.cli import main; main()", "doctor", "--json"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no operator in MindSpore's dispatcher that tools do not see" in done.stdout, done
