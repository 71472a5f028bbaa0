"""Switches, threads, steps and scopes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import amanda
from amanda_core.engine.activation import Switch
from amanda_core.errors import ThreadError, ToolError
from amanda_core.runtime.threads import WeakGroup
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver

from .making import session_of, tool

pytestmark = pytest.mark.usefixtures("driver")


def model() -> float:
    return toy.relu(toy.Value(3.0)).data


def editing(value: float) -> amanda.Tool:
    return tool(lambda c: c.insert_after_op(lambda y: toy.Value(y.data * 10 + value)))


# Switches.


def test_disabled_and_enabled_nest() -> None:
    with amanda.apply(editing(1)):
        with amanda.disabled():
            assert model() == 3.0
            with amanda.enabled():
                assert model() == 31.0
                with amanda.disabled():
                    assert model() == 3.0
                assert model() == 31.0
            assert model() == 3.0
        assert model() == 31.0


def test_a_switch_refuses_generator_and_coroutine_functions() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    functions: list[Callable[[], Any]] = [generator, coroutine]
    for function in functions:
        with pytest.raises(ToolError, match=r"Write `with amanda\.cache_disabled\(\):` inside"):
            amanda.cache_disabled()(function)


def test_switches_left_in_another_order_take_back_their_own() -> None:
    first, second, third = amanda.disabled(), amanda.enabled(), amanda.disabled()
    first.__enter__()
    second.__enter__()
    third.__enter__()
    with amanda.apply(editing(1)):
        assert model() == 3.0
        first.__exit__(None, None, None)
        assert model() == 3.0
        third.__exit__(None, None, None)
        assert model() == 31.0
        second.__exit__(None, None, None)
        assert model() == 31.0


def test_one_switch_object_can_be_entered_twice() -> None:
    off = amanda.disabled()
    with amanda.apply(editing(1)):
        with off, off:
            assert model() == 3.0
        assert model() == 31.0


def test_switches_hold_also_around_apply() -> None:
    with amanda.disabled(), amanda.apply(editing(1)):
        assert model() == 3.0
        with amanda.enabled():
            assert model() == 31.0


def test_a_switch_is_turned_back_by_an_exception() -> None:
    with amanda.apply(editing(1)):
        with pytest.raises(ValueError, match="x"), amanda.disabled():
            raise ValueError("x")
        assert model() == 31.0


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("disabled", "enabled", False),
        ("enabled", "enabled", True),
        ("cache_disabled", "caching", False),
        ("cache_enabled", "caching", True),
        ("autodiff_enabled", "autodiff", True),
        ("autodiff_disabled", "autodiff", False),
    ],
)
def test_each_switch_is_a_context_manager_and_a_decorator(
    name: str, attribute: str, value: bool
) -> None:
    switch: Callable[[], Switch] = getattr(amanda, name)
    opposite = {
        "disabled": "enabled",
        "enabled": "disabled",
        "cache_disabled": "cache_enabled",
        "cache_enabled": "cache_disabled",
        "autodiff_enabled": "autodiff_disabled",
        "autodiff_disabled": "autodiff_enabled",
    }[name]
    with amanda.apply() as handle:
        control = session_of(handle).control

        @switch()
        def read() -> object:
            return getattr(control, attribute)

        default = getattr(control, attribute)
        assert default is (attribute != "autodiff")
        for _ in range(2):
            with getattr(amanda, opposite)():
                assert read() is value
                with switch():
                    assert getattr(control, attribute) is value
                assert getattr(control, attribute) is not value
        assert getattr(control, attribute) is default


# Threads.


def in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of `function` in another thread, or raise its exception here."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((function(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((value, error),) = result
    if error is not None:
        raise error
    return value


def test_other_threads_run_vanilla() -> None:
    with amanda.apply(editing(1)):
        assert in_thread(model) == 3.0


def test_each_thread_has_its_own_tools(driver: ToyDriver) -> None:
    def other() -> float:
        with amanda.apply(editing(2)):
            return model()

    with amanda.apply(editing(1)):
        assert in_thread(other) == 32.0
        assert model() == 31.0
    assert driver.detached == 2


@pytest.mark.parametrize("held", [True, False])
def test_what_a_thread_leaves_applied_is_taken_back_when_it_ends(
    driver: ToyDriver, held: bool
) -> None:
    handles: list[amanda.Handle] = []

    def other() -> float:
        outer, inner = amanda.attach(editing(1)), amanda.attach(editing(2))
        if held:
            handles.extend((outer, inner))
        return model()

    assert in_thread(other) == 312.0
    assert driver.detached == 1
    for handle in handles:
        assert handle.session is None
        handle.remove()
    with amanda.apply(editing(3)):
        assert model() == 33.0
    assert driver.detached == 2


def test_switches_belong_to_their_thread() -> None:
    def other() -> float:
        with amanda.apply(editing(2)):
            return model()

    with amanda.apply(editing(1)), amanda.disabled():
        assert in_thread(other) == 32.0


def test_one_decorated_function_may_run_in_several_threads() -> None:
    # The one that entered first leaves first, while the other is inside.
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    @amanda.apply(editing(1))
    def run(entered: threading.Event, leave: threading.Event) -> float:
        entered.set()
        assert leave.wait(10)
        return model()

    results: list[float] = []

    def first() -> None:
        results.append(run(first_in, second_in))
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(10)
    results.append(run(second_in, first_out))
    thread.join()
    assert results == [31.0, 31.0]


def test_apply_left_in_another_thread_is_an_error_and_the_right_thread_can_still_leave() -> None:
    applied = amanda.apply(editing(1))
    applied.__enter__()
    with pytest.raises(ThreadError, match="in the thread that entered it"):
        in_thread(lambda: applied.__exit__(None, None, None))
    assert model() == 31.0
    applied.__exit__(None, None, None)
    assert model() == 3.0

    handle = amanda.attach(editing(1))
    with pytest.raises(ThreadError):
        in_thread(handle.remove)
    assert model() == 31.0
    handle.remove()
    assert model() == 3.0


# Steps and scopes.


def recorder() -> tuple[amanda.Tool, list[tuple[str, Any]]]:
    log: list[tuple[str, Any]] = []
    made = amanda.Tool()
    made.add_inst_for_step(
        begin=lambda number: log.append(("begin", number)),
        end=lambda number: log.append(("end", number)),
    )
    made.add_inst_for_scope(
        enter=lambda path: log.append(("enter", path)),
        leave=lambda path: log.append(("leave", path)),
    )
    return made, log


def test_steps_end_with_the_frameworks_update_and_with_amanda_step() -> None:
    made, log = recorder()
    with amanda.apply(made):
        toy.update([], 0.1)
        amanda.step()
    assert log == [
        ("begin", 0),
        ("end", 0),
        ("begin", 1),
        ("end", 1),
        ("begin", 2),
    ]


def test_step_outside_of_apply_does_nothing() -> None:
    amanda.step()


def test_a_step_may_be_watched_at_one_end_only() -> None:
    log: list[int] = []
    made = amanda.Tool()
    made.add_inst_for_step(end=log.append)
    with amanda.apply(made):
        amanda.step()
        with amanda.disabled():
            amanda.step()
        amanda.step()
    assert log == [0, 2]


def test_scopes_are_told_in_order_of_nesting() -> None:
    made, log = recorder()
    with amanda.apply(made), toy.scope("encoder"), toy.scope("query"):
        model()
    assert log == [
        ("begin", 0),
        ("enter", "encoder"),
        ("enter", "encoder.query"),
        ("leave", "encoder.query"),
        ("leave", "encoder"),
    ]


def test_a_driver_learns_whether_scopes_are_watched() -> None:
    made, _ = recorder()
    with amanda.apply() as handle:
        session = session_of(handle)
        watched = [session.watches_scopes]
        with amanda.apply(made):
            watched.append(session.watches_scopes)
        watched.append(session.watches_scopes)
    assert watched == [False, True, False]


def test_operators_inside_a_listener_are_not_instrumented() -> None:
    seen: list[str] = []
    made = tool(lambda c: seen.append(c.op_type))
    made.add_inst_for_step(end=lambda number: seen.append(str(model())))
    with amanda.apply(made):
        amanda.step()
    assert seen == ["3.0"]


def test_a_weak_group_may_change_while_one_goes_over_it() -> None:
    first, second, third, late = (tool(print) for _ in range(4))
    group = WeakGroup[amanda.Tool]((first, second, third))
    seen = []
    for member in group:
        group.add(late)
        seen.append(member)
    assert {*map(id, seen)} == {id(first), id(second), id(third)}
    assert late in group
    del seen, member, third
    gc.collect()
    assert {*map(id, group)} == {id(first), id(second), id(late)}
