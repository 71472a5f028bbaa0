"""A tool that is invalidated when a step ends has its jitted programs traced again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import amanda
from amanda_core import OpContext


class Powers(amanda.Tool):
    """Multiplies products by a factor that is ten times as large after each step."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_step(end=self.end_step)

    def analyse(self, context: OpContext) -> None:
        if context["type"] == "mul":
            context.insert_after_op(self.multiply, factor=self.factor)

    def multiply(self, value: Any, factor: float) -> Any:
        return value * factor

    def end_step(self, step: int) -> None:
        self.factor *= 10
        self.invalidate()


@pytest.mark.parametrize("first", [2.0, 5.0])
@pytest.mark.parametrize("ran", [False, True], ids=["new", "ran plain"])
def test_each_step_has_its_own_program(first: float, ran: bool) -> None:
    function = jax.jit(lambda x: x * 3.0)
    if ran:  # C++ has the plain program, and would not ask again.
        function(jnp.ones(()))
    for _ in range(2):  # The second session must not run a program of the first.
        with amanda.apply(Powers(first)):
            found = [float(function(jnp.ones(()))) for _ in range(3)]
        assert found == [3 * first, 30 * first, 300 * first]
    assert float(function(jnp.ones(()))) == 3.0
