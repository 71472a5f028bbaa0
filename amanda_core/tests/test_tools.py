"""Tools: their order, their dependencies, and what can be registered."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

import amanda
from amanda_core import IPoint, OpContext, Tool
from amanda_core.errors import DependencyCycleError, ToolError
from amanda_core.testing.toy import framework as toy

from .making import Named, session_of, tool

pytestmark = pytest.mark.usefixtures("driver")


def model() -> float:
    return toy.relu(toy.Value(3.0)).data


# Order and dependencies.


def test_depends_on_puts_dependencies_first_at_every_point() -> None:
    log: list[str] = []
    a, b, c = (Named(log, name) for name in "abc")
    a.depends_on(b)
    b.depends_on(c)
    with amanda.apply(a):
        y = toy.relu(toy.Value(1.0, (toy.Node("", lambda g: (), ()), 0)))
        assert log == ["c", "b", "a"] * 2
        toy.backward(y)
    assert log == ["c", "b", "a"] * 4


def test_tools_run_in_the_order_given() -> None:
    log: list[str] = []
    with amanda.apply(*(Named(log, name) for name in "bac")):
        model()
    assert log == [*"bac"] * 2


def test_a_shared_dependency_is_applied_once() -> None:
    log: list[str] = []
    a, b, shared = (Named(log, name) for name in ("a", "b", "shared"))
    a.depends_on(shared)
    b.depends_on(shared)
    with amanda.apply(a, b, shared, a):
        model()
    assert log == ["shared", "a", "b"] * 2


def test_nested_tools_run_after_outer_ones() -> None:
    log: list[str] = []
    inner, outer = Named(log, "inner"), Named(log, "outer")
    with amanda.apply(outer), amanda.apply(inner):
        model()
    assert log == ["outer", "inner"] * 2


def test_a_tool_reached_twice_runs_once_at_its_outermost_place() -> None:
    log: list[str] = []
    first, second, inner = (Named(log, name) for name in ("first", "second", "inner"))
    inner.depends_on(second)
    with amanda.apply(first, second), amanda.apply(inner, first):
        model()
    assert log == ["first", "second", "inner"] * 2


def test_cycle_error_prints_the_cycle() -> None:
    class A(Tool):
        pass

    class B(Tool):
        pass

    class C(Tool):
        pass

    start, a, b, c = Tool(), A(), B(), C()
    start.depends_on(a)
    a.depends_on(b)
    b.depends_on(c)
    c.depends_on(a)
    with pytest.raises(DependencyCycleError) as caught:
        amanda.apply(start)
    names = f"{A.__qualname__} -> {B.__qualname__} -> {C.__qualname__} -> {A.__qualname__}"
    assert names in str(caught.value)
    assert "Tool ->" not in str(caught.value)
    with pytest.raises(DependencyCycleError):
        amanda.attach(start)


def test_a_tool_that_depends_on_itself_is_a_cycle() -> None:
    alone = Tool()
    alone.depends_on(alone)
    with pytest.raises(DependencyCycleError, match="Tool -> Tool"):
        amanda.apply(alone)


def test_tools_are_told_apart_by_identity_not_by_equality() -> None:
    @dataclass
    class Threshold(Tool):  # Equal by fields, and without a hash.
        limit: float
        seen: list[str] = field(default_factory=list, compare=False)

        def __post_init__(self) -> None:
            self.add_inst_for_op(lambda context: self.seen.append(context.op_type))

    one, other = Threshold(1.0), Threshold(1.0)
    one.depends_on(other)
    with amanda.apply(one, other):
        model()
    assert (one.seen, other.seen) == (["relu"], ["relu"])


# Registration.


def test_subclass_without_super_init_works() -> None:
    class Counter(Tool):
        def __init__(self, start: int) -> None:
            self.count = start
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: OpContext) -> None:
            self.count += 1

    class Bare(Tool):
        def __init__(self) -> None:
            pass

    counter = Counter(10)
    counter.depends_on(Bare())
    with amanda.apply(counter):
        model()
    assert counter.count == 11


def test_plain_tool_instance() -> None:
    seen: list[str] = []
    plain = amanda.Tool()
    plain.add_inst_for_op(lambda context: seen.append(context.op_type))
    with amanda.apply(plain):
        model()
    assert seen == ["relu"]


@pytest.mark.parametrize(
    ("flags", "point"),
    [
        ({}, IPoint.BEFORE_FORWARD),
        ({"require_outputs": True}, IPoint.AFTER_FORWARD),
        ({"backward": True}, IPoint.BEFORE_BACKWARD),
        ({"backward": True, "require_outputs": True}, IPoint.AFTER_BACKWARD),
    ],
)
def test_two_flags_name_the_four_points(flags: dict[str, bool], point: IPoint) -> None:
    made = tool(lambda context: None, **flags)
    with amanda.apply(made) as handle:
        assert [p for p in IPoint if session_of(handle).wants(p)] == [point]
        assert session_of(handle).wants_backward is point.is_backward


@pytest.mark.parametrize("wrong", [None, "routine", 3])
def test_a_routine_that_cannot_be_called_is_refused_at_registration(wrong: Any) -> None:
    with pytest.raises(ToolError, match="cannot be called"):
        Tool().add_inst_for_op(wrong)
    with pytest.raises(ToolError, match="is not a tool"):
        Tool().depends_on(wrong)


def test_a_routine_registered_later_meets_the_ops_analysed_before() -> None:
    seen: list[str] = []
    growing = tool(lambda context: seen.append("first"))
    with amanda.apply(growing):
        for count in range(3):
            if count == 1:
                growing.add_inst_for_op(lambda context: seen.append("second"))
            model()
    assert seen == ["first", "first", "second"]


def test_a_copied_tool_starts_without_sessions() -> None:
    class Counter(Tool):
        def __init__(self) -> None:
            self.count = 0
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: OpContext) -> None:
            self.count += 1

    original = Counter()
    with amanda.apply(original):
        model()
        copied = copy.deepcopy(original)
        with amanda.apply(copied):
            model()
    assert (original.count, copied.count) == (1, 2)


def test_a_dependency_declared_while_applied_comes_along() -> None:
    log: list[str] = []
    first, second = Named(log, "first"), Named(log, "second")
    with amanda.apply(second):
        second.depends_on(first)
        toy.relu(toy.Value(1.0))
        assert log[:2] == ["first", "second"]
        with pytest.raises(DependencyCycleError):
            first.depends_on(second)
        log.clear()
        with amanda.cache_disabled():
            toy.relu(toy.Value(1.0))
        assert log[:2] == ["first", "second"]
