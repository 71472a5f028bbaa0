"""Threads of a program that have no tools: they are named, and run as they were."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import amanda
from amanda_core.engine.context import OpContext
from amanda_core.testing.kit.tools import tool

X = jnp.ones((2, 2))
TRACED: list[int] = []


@jax.jit  # type: ignore[untyped-decorator]
def jitted(x: jax.Array) -> jax.Array:
    TRACED.append(1)
    return jnp.cos(jnp.exp(x))


def by_operator() -> Any:
    return jnp.sin(X).block_until_ready()


def by_function() -> Any:
    return jitted(X).block_until_ready()


def by_gradient() -> Any:
    return jax.grad(lambda x: jnp.tanh(x).sum())(X)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_pool(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda _: work(), range(2)))


def in_executor(work: Callable[[], object]) -> None:
    asyncio.run(asyncio.to_thread(work))


@pytest.mark.parametrize("work", [by_operator, by_function, by_gradient])
@pytest.mark.parametrize("start", [in_thread, in_pool, in_executor])
@pytest.mark.parametrize("threads", ["own", "all"])
def test_a_thread_without_tools_is_named_although_its_program_was_compiled(
    start: Callable[..., None], work: Callable[[], object], threads: Any
) -> None:
    work()  # C++ has the program now, and Python is not asked.
    seen: list[str] = []
    look = tool(lambda context: seen.append(context.op_type))
    with (
        pytest.warns(amanda.AmandaWarning, match="run without tools"),
        amanda.apply(look, threads=threads),
    ):
        start(work)
    assert seen == []
    assert any("thread" in sentence for sentence in look.not_seen())


def test_a_thread_without_tools_compiles_nothing_again() -> None:
    by_function(), by_operator()
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "compile" in event or "trace" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        TRACED.clear()
        look = tool(lambda context: None)
        with pytest.warns(amanda.AmandaWarning, match="run without tools"), amanda.apply(look):
            in_thread(lambda: (by_function(), by_operator()))
        assert (TRACED, compiled) == ([], [])
    finally:
        jax.monitoring.clear_event_listeners()
    by_function(), by_operator()
    assert TRACED == []


@pytest.mark.parametrize("callback", ["pure", "debug"])
def test_functions_that_a_program_calls_back_are_seen(callback: str) -> None:
    seen: set[str] = set()

    def host(x: Any) -> Any:
        return jnp.sinh(jnp.asarray(x))

    @jax.jit  # type: ignore[untyped-decorator]
    def program(x: jax.Array) -> jax.Array:
        if callback == "debug":
            jax.debug.callback(host, x)
            return x
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def look(context: OpContext) -> None:
        context.insert_before_op(lambda *_: seen.add(context.op_type), observe=True)

    with amanda.apply(tool(look)):
        program(X).block_until_ready()
        jax.effects_barrier()
    assert "sinh" in seen
