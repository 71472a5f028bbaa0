"""Transformed programs under a tool give the values and the calls of one that is edited by hand."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import amanda

from .programs import NAMES, programs

#: Those that run in the short form of the session.
SAMPLE = {"jit(grad)", "grad(jit)", "scan", "jit(remat)", "vmap(jit)", "eager"}
MARKED = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


class Doubling(amanda.Tool):
    """Doubles the input of `sin`, of which the derivative is left out."""

    def __init__(self, *, staged: bool) -> None:
        super().__init__()
        self.calls = 0
        self.routine = amanda.staged(self._staged) if staged else self.double
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context["type"] == "sin":
            context.insert_before_op(self.routine, inputs=[0])

    def double(self, x: Any) -> Any:
        self.calls += 1
        return x * 2

    @property
    def _staged(self) -> Any:
        def double(x: Any) -> Any:
            self.calls += 1
            return x * 2

        return double


class ByHand:
    """The same edit, written into the program."""

    def __init__(self) -> None:
        self.calls = 0

    def sin(self, x: Any) -> Any:
        return jnp.sin(self._doubled()(x))

    def _doubled(self) -> Any:
        def double(x: Any) -> Any:
            self.calls += 1
            return np.asarray(x * 2)

        @jax.custom_jvp
        def doubled(x: Any) -> Any:
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(double, shape, x, vmap_method="sequential")

        doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0]))
        return doubled


def _same(found: Any, expected: Any) -> bool:
    return bool(np.allclose(found, expected, rtol=1e-5, atol=1e-6))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", MARKED)
def test_a_routine_on_the_host(name: str, warm: bool) -> None:
    reference, by_hand = programs(ByHand.sin.__get__(hand := ByHand())), hand
    reference[name]()
    by_hand.calls = 0
    expected = reference[name]()
    _check(name, warm, expected, by_hand.calls, Doubling(staged=False))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", MARKED)
def test_a_staged_routine(name: str, warm: bool) -> None:
    expected = programs(ByHand().sin)[name]()
    _check(name, warm, expected, None, Doubling(staged=True))


def _check(name: str, warm: bool, expected: Any, calls: int | None, tool: Doubling) -> None:
    run = programs(jnp.sin)[name]
    plain = programs(jnp.sin)[name]()
    assert not _same(plain, expected)
    if warm:
        run()
    with amanda.apply(tool):
        for active in (True, True, False, True):
            tool.calls = 0
            if active:
                assert _same(run(), expected)
                assert calls is None or tool.calls == calls
            else:
                with amanda.disabled():
                    assert np.array_equal(run(), plain)
                assert tool.calls == 0
    tool.calls = 0
    assert np.array_equal(run(), plain)
    assert tool.calls == 0
