"""Functions of JAX with the edits of tools, as programs that `jax.export` makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amanda
from amanda_core import OpContext
from amanda_core.errors import UnsupportedError
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

jax = pytest.importorskip("jax")


def model(parameters: Any, x: Any) -> Any:
    for kernel in parameters:
        x = jax.nn.relu(x @ kernel)
    return {"rows": x}


@pytest.fixture
def given() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    kernels = [jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (16, 4))]
    return kernels, jax.random.normal(keys[2], (3, 8))


@pytest.mark.parametrize(
    "make", [lambda: Prune(0.5), lambda: Quantize("dynamic")], ids=["prune", "quantize"]
)
def test_a_program_gives_what_the_instrumented_function_gives(given: Any, make: Any) -> None:
    tool, jitted = make(), jax.jit(model)
    with amanda.apply(tool):
        expected = jitted(*given)["rows"]
    program = amanda.exported(jitted, tool, *given)
    again = jax.export.deserialize(program.serialize())
    np.testing.assert_allclose(again.call(*given)["rows"], expected, rtol=1e-6, atol=1e-6)
    assert not np.array_equal(jitted(*given)["rows"], expected)
    # A function that is not jitted, in a list of tools.
    program = amanda.exported(model, [make()], *given)
    np.testing.assert_allclose(program.call(*given)["rows"], expected, rtol=1e-6, atol=1e-6)
    # And without tools it is the plain one, in a session or not.
    plain = jax.export.export(jitted)(*given)
    assert np.array_equal(plain.call(*given)["rows"], jitted(*given)["rows"])


def test_what_only_the_host_can_run_is_refused_by_name(given: Any) -> None:
    def double(value: Any) -> Any:
        return value * 2

    def analyse(context: OpContext) -> None:
        if context["type"] == "matmul":
            context.insert_before_op(seen.append, inputs=[0], observe=True)
            if edits:
                context.insert_before_op(double, inputs=[0])

    seen: list[Any] = []
    edits = False
    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    program = amanda.exported(model, tool, *given)
    assert np.array_equal(program.call(*given)["rows"], model(*given)["rows"])
    assert not seen
    edits = True
    with pytest.raises(UnsupportedError, match=r"double.*amanda\.staged"):
        amanda.exported(model, tool, *given)
    assert np.array_equal(model(*given)["rows"], jax.jit(model)(*given)["rows"])
