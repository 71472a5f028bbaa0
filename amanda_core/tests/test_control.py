"""Applying and leaving tools, the switches, threads, steps and scopes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import amanda
from amanda_core import OpContext, discovery
from amanda_core.activation import Switch
from amanda_core.errors import MissingDriverError, ReentryError, ThreadError, ToolError

from . import toy
from .making import Named, session_of, tool
from .toy_driver import ToyDriver

pytestmark = pytest.mark.usefixtures("driver")


def model() -> float:
    return toy.relu(toy.Value(3.0)).data


def editing(value: float) -> amanda.Tool:
    return tool(lambda c: c.insert_after_op(lambda y: toy.Value(y.data * 10 + value)))


# Apply and attach.


def test_outside_of_apply_nothing_is_instrumented() -> None:
    edit = editing(1)
    assert model() == 3.0
    with amanda.apply(edit):
        assert model() == 31.0
    assert model() == 3.0


def test_apply_decorates_functions_at_every_call() -> None:
    @amanda.apply(editing(1))
    def run(x: float, *, y: float = 0.0) -> float:
        return model() + x + y

    assert run.__name__ == "run"
    assert [run(1.0), run(1.0, y=1.0)] == [32.0, 33.0]
    assert model() == 3.0


def test_a_decorated_function_may_call_itself() -> None:
    @amanda.apply(editing(1))
    def run(depth: int) -> float:
        return run(depth - 1) if depth else model()

    assert run(2) == 31.0
    assert model() == 3.0


def test_what_apply_returns_is_usable_any_number_of_times() -> None:
    applied = amanda.apply(editing(1))
    for _ in range(2):
        with applied:
            assert model() == 31.0
            with applied:
                assert model() == 31.0
            assert model() == 31.0
        assert model() == 3.0


def test_apply_without_tools_changes_nothing() -> None:
    with amanda.apply():
        assert model() == 3.0


def test_generator_and_coroutine_functions_are_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    async def asynchronous() -> AsyncIterator[int]:
        yield 1

    functions: list[Callable[[], Any]] = [generator, coroutine, asynchronous]
    for function in functions:
        with pytest.raises(ToolError, match=r"with amanda\.apply"):
            amanda.apply(amanda.Tool())(function)


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ("tool", "Pass instances of amanda.Tool"),
        (None, "Pass instances of amanda.Tool"),
        (Named, r"Pass an instance: Named\(\)"),
        ([amanda.Tool()], r"amanda\.(apply|attach)\(\*tools\)"),
    ],
)
def test_something_else_than_a_tool_is_refused_with_what_to_write(wrong: Any, fix: str) -> None:
    for function in (amanda.apply, amanda.attach):
        with pytest.raises(ToolError, match=fix):
            function(wrong)
    with pytest.raises(TypeError):  # It is one, too.
        amanda.apply(wrong)


def test_attach_is_apply_with_a_handle_whose_remove_is_idempotent(driver: ToyDriver) -> None:
    handle = amanda.attach(editing(1))
    assert model() == 31.0
    assert not session_of(handle).closed
    handle.remove()
    assert handle.session is None
    assert model() == 3.0
    handle.remove()
    assert driver.detached == 1


def test_handles_may_be_removed_out_of_order(driver: ToyDriver) -> None:
    first, second, third = (amanda.attach(editing(n)) for n in (1, 2, 3))
    assert model() == 3123.0
    second.remove()
    assert model() == 313.0
    first.remove()
    assert model() == 33.0
    first.remove()
    assert driver.detached == 0
    third.remove()
    assert model() == 3.0
    assert driver.detached == 1


def test_apply_and_attach_nest_in_one_session() -> None:
    with amanda.apply(editing(1)) as outer:
        handle = amanda.attach(editing(2))
        assert handle.session is outer.session
        with amanda.apply(editing(3)):
            assert model() == 3123.0
        assert model() == 312.0
    # What was attached inside outlives the `with`.
    assert model() == 32.0
    handle.remove()
    assert model() == 3.0


def test_a_handle_removed_inside_its_with_is_left_quietly() -> None:
    with amanda.apply(editing(1)) as handle:
        handle.remove()
        assert model() == 3.0


def test_apply_inside_a_routine_is_an_error() -> None:
    def analyse(context: OpContext) -> None:
        with amanda.apply(amanda.Tool()):
            pass

    with (
        amanda.apply(tool(analyse)),
        pytest.raises(ReentryError, match="inside a routine"),
    ):
        model()

    def routine(value: toy.Value) -> None:
        amanda.attach(amanda.Tool())

    with amanda.apply(tool(lambda c: c.insert_before_op(routine))), pytest.raises(ReentryError):
        model()
    assert model() == 3.0


# Drivers.


def test_coverage_says_what_each_driver_cannot_see() -> None:
    with amanda.apply() as handle:
        (blind,) = handle.coverage()["toy"]
        assert blind.what == "Value.data"
        assert blind.why
    assert handle.coverage() == {}


def test_apply_needs_a_driver() -> None:
    discovery.unregister("toy")
    with pytest.raises(MissingDriverError, match=r"pip install amanda-driver"):
        amanda.apply(amanda.Tool()).__enter__()
    with pytest.raises(MissingDriverError):
        amanda.attach(amanda.Tool())


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_every_way_out_detaches(driver: ToyDriver, kind: type[BaseException]) -> None:
    found = toy.dispatch
    with pytest.raises(kind), amanda.apply(editing(1)) as handle:  # noqa: PT012
        session = session_of(handle)
        assert toy.dispatch is not found
        raise kind
    assert toy.dispatch is found
    assert driver.detached == 1
    assert session.closed
    assert amanda.apply(editing(1)).__enter__().remove() is None  # type: ignore[func-returns-value]


def test_return_and_break_detach(driver: ToyDriver) -> None:
    def leave() -> str:
        for _ in range(2):
            with amanda.apply(editing(1)):
                break
        with amanda.apply(editing(1)):
            return "left"

    assert leave() == "left"
    assert driver.detached == 2


class Sulking(ToyDriver):
    """Of another framework; its attachment fails to detach, after counting it."""

    def __init__(self, name: str, failure: BaseException, log: list[str]) -> None:
        super().__init__(name, (name,))
        self.failure, self.log = failure, log

    def amanda_attach(self, session: Any) -> Any:
        return self

    def detach(self) -> None:
        self.log.append(self.info.name)
        raise self.failure

    def coverage(self) -> list[Any]:
        return []


def test_a_driver_that_fails_to_detach_does_not_keep_the_others_attached(
    driver: ToyDriver,
) -> None:
    log: list[str] = []
    discovery.register(Sulking("one", KeyboardInterrupt("one"), log), "one")
    discovery.register(Sulking("two", RuntimeError("two"), log), "two")
    found = toy.dispatch
    with pytest.raises(RuntimeError, match="two") as caught, amanda.apply(editing(1)):
        pass
    assert log == ["two", "one"]
    assert caught.value.__notes__ == ["Another driver failed to detach: KeyboardInterrupt('one')"]
    assert driver.detached == 1
    assert toy.dispatch is found
    assert model() == 3.0


def test_neither_a_deferred_exception_nor_a_failure_to_detach_is_lost() -> None:
    discovery.register(Sulking("one", RuntimeError("detach"), []), "one")
    with pytest.raises(KeyError, match="routine") as caught, amanda.apply() as handle:
        session_of(handle).defer(KeyError("routine"))
    assert isinstance(caught.value.__context__, RuntimeError)


def test_a_failure_while_entering_detaches_what_was_attached(driver: ToyDriver) -> None:
    def fail(number: int) -> None:
        raise ValueError("listener")

    failing = amanda.Tool()
    failing.add_inst_for_step(begin=fail)
    with pytest.raises(ValueError, match="listener"):
        amanda.attach(failing)
    assert driver.detached == 1
    assert model() == 3.0
    with amanda.apply(editing(1)):
        assert model() == 31.0


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
    """Result of `function` in another thread, or its exception, raised here."""
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


def test_switches_belong_to_their_thread() -> None:
    def other() -> float:
        with amanda.apply(editing(2)):
            return model()

    with amanda.apply(editing(1)), amanda.disabled():
        assert in_thread(other) == 32.0


def test_one_decorated_function_may_run_in_several_threads() -> None:
    inside = threading.Barrier(2, timeout=10)

    @amanda.apply(editing(1))
    def run() -> float:
        inside.wait()
        result = model()
        inside.wait()
        return result

    results: list[float] = []
    threads = [threading.Thread(target=lambda: results.append(run())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
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
