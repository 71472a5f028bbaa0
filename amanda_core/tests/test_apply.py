"""Applying tools as a context manager, a decorator or a handle, and every way out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import amanda
from amanda_core import OpContext, hookimpl
from amanda_core.errors import MissingDriverError, ReentryError, ToolError
from amanda_core.plugins import discovery
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver

from .making import Named, session_of, tool

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
        (gap,) = handle.coverage()["toy"]
        assert gap.what == "Value.data"
        assert gap.why
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


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would end the test run if it got out."""


class Sulking(ToyDriver):
    """Drives another framework; its attachment counts detaching, then fails."""

    def __init__(self, name: str, failure: BaseException, log: list[str]) -> None:
        super().__init__(name, (name,))
        self.failure, self.log = failure, log

    @hookimpl
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
    discovery.register(Sulking("one", Interrupted("one"), log), "one")
    discovery.register(Sulking("two", RuntimeError("two"), log), "two")
    found = toy.dispatch
    with pytest.raises(RuntimeError, match="two") as caught, amanda.apply(editing(1)):
        pass
    assert log == ["two", "one"]
    (note,) = caught.value.__notes__
    assert note.startswith("Another driver failed to detach: ")
    assert "Driver 'one' failed to detach: Interrupted: one" in note.replace("\\'", "'")
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


def test_a_tool_is_notified_once_it_is_no_longer_applied(driver: ToyDriver) -> None:
    log: list[tuple[str, int]] = []

    def ending(name: str) -> amanda.Tool:
        tool = editing(1)
        tool.add_inst_for_end(lambda: log.append((name, driver.detached)))
        return tool

    inner, outer, dependency = ending("inner"), ending("outer"), ending("dependency")
    outer.depends_on(dependency)
    with amanda.apply(outer):
        with amanda.apply(inner, dependency):
            assert log == []
        assert log == [("inner", 0)]
    assert log == [("inner", 0), ("dependency", 1), ("outer", 1)]
    with pytest.raises(KeyError), amanda.apply(inner):
        raise KeyError
    assert log[3:] == [("inner", 2)]


def test_every_tool_ends_though_one_fails_to(driver: ToyDriver) -> None:
    log: list[str] = []
    first, second = editing(1), editing(1)

    def fail() -> None:
        raise RuntimeError("first")

    first.add_inst_for_end(fail)
    second.add_inst_for_end(lambda: log.append("second"))
    found = toy.dispatch
    with pytest.raises(RuntimeError, match="first"), amanda.apply(first, second):
        pass
    assert log == ["second"]
    assert toy.dispatch is found
