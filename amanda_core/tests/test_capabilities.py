"""Capabilities: a request that a driver does not declare for a mode is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

import amanda
from amanda_core import DriverInfo, IPoint, OpContext
from amanda_core.errors import LateActionError, UnsupportedError
from amanda_core.testing.toy.driver import CAPABILITIES, ToyDriver

from .making import session_of, site, tool

pytestmark = pytest.mark.usefixtures("driver")

MODE = "flow/1.0/graph"
Ask = Callable[[OpContext], object]


def with_autodiff(context: OpContext) -> None:
    with amanda.autodiff_enabled():
        context.insert_before_op(abs)


#: Capability -> the action that needs it, and the analysis that requests the action.
NEEDS: list[tuple[str, Ask, IPoint]] = [
    ("replace", lambda c: c.replace_op(abs), IPoint.BEFORE_FORWARD),
    ("autodiff", with_autodiff, IPoint.BEFORE_FORWARD),
    ("aligned_gradients", lambda c: c.insert_before_backward_op(abs), IPoint.BEFORE_FORWARD),
    ("aligned_gradients", lambda c: c.insert_after_backward_op(abs), IPoint.BEFORE_FORWARD),
    ("aligned_gradients", lambda c: c.replace_backward_op(abs), IPoint.BEFORE_FORWARD),
    ("replace_backward", lambda c: c.replace_backward_op(abs), IPoint.BEFORE_FORWARD),
    ("gradients", lambda c: c.insert_before_backward_op(abs), IPoint.BEFORE_BACKWARD),
    ("gradients", lambda c: c.insert_after_backward_op(abs), IPoint.AFTER_BACKWARD),
    ("replace_backward", lambda c: c.replace_backward_op(abs), IPoint.BEFORE_BACKWARD),
    ("late_gradients", lambda c: c.insert_before_backward_op(abs), IPoint.AFTER_FORWARD),
    ("late_gradients", lambda c: c.replace_backward_op(abs), IPoint.AFTER_FORWARD),
]


def ask(capabilities: frozenset[str], action: Ask, point: IPoint, mode: str = MODE) -> None:
    """Ask for an action on an op of a driver that has these capabilities in its graphs."""
    after = point in (IPoint.AFTER_FORWARD, IPoint.AFTER_BACKWARD)
    asked = tool(action, backward=point.is_backward, require_outputs=after)
    everywhere = {"graph": capabilities, "eager": CAPABILITIES}
    with amanda.apply(asked) as handle:
        session = session_of(handle)
        session.declare(DriverInfo("flow", ("flow",), ("flow/*/*",), everywhere, api=3))
        place = site(namespace=mode)
        context = session.open(place, None, None if point.is_backward else [1.0])
        if point.is_backward:
            context = session.open(place, None, forward=context, backward=True)
        context.trigger_callback(point)


def test_a_selection_by_calls_names_a_mode_that_tells_of_none() -> None:
    selected = tool(lambda context: None).where(amanda.select(calls=[0]))
    with amanda.apply(selected) as handle:
        session = session_of(handle)
        everywhere = {"graph": frozenset[str](), "eager": CAPABILITIES}
        session.declare(DriverInfo("flow", ("flow",), ("flow/*/*",), everywhere, api=3))
        session.open(site(namespace="flow/1.0/eager"), None, [1.0]).trigger_callback(
            IPoint.BEFORE_FORWARD
        )
        with pytest.warns(amanda.AmandaWarning, match=r"selects nothing in flow/1\.0/graph"):
            session.open(site(namespace=MODE), None, [1.0]).trigger_callback(IPoint.BEFORE_FORWARD)


@pytest.mark.parametrize(("capability", "action", "point"), NEEDS)
def test_what_is_not_declared_for_a_mode_is_refused_when_it_is_asked_for(
    capability: str, action: Ask, point: IPoint
) -> None:
    late = capability == "late_gradients"
    with pytest.raises(LateActionError if late else UnsupportedError) as caught:
        ask(CAPABILITIES - {capability}, action, point)
    message = str(caught.value)
    assert "driver 'flow'" in message
    assert f"no {capability!r} in mode 'graph'" in message
    assert "tool Tool" in message
    # In the mode that has it, and where it is declared.
    ask(CAPABILITIES - {capability}, action, point, "flow/1.0/eager")
    ask(CAPABILITIES, action, point)


def test_looking_needs_no_capability() -> None:
    def analyse(context: OpContext) -> None:
        with amanda.autodiff_enabled():
            context.insert_before_op(lambda *_: None, observe=True)

    ask(frozenset(), analyse, IPoint.BEFORE_FORWARD)
    ask(frozenset(), lambda c: c.insert_before_op(amanda.staged(abs_of)), IPoint.BEFORE_FORWARD)


def abs_of(value: float) -> float:
    return abs(value)


def test_a_mode_that_is_not_listed_has_no_capability() -> None:
    with pytest.raises(UnsupportedError, match="in mode 'compiled'"):
        ask(CAPABILITIES, lambda c: c.replace_op(abs), IPoint.BEFORE_FORWARD, "flow/1.0/compiled")


def test_a_tool_may_ask_what_is_supported_where_an_op_runs() -> None:
    found: dict[str, bool] = {}

    def analyse(context: OpContext) -> None:
        found[context.namespace] = context.supports("ordered")

    for mode in ("flow/1.0/eager", "flow/1.0/graph"):
        ask(frozenset(), analyse, IPoint.BEFORE_FORWARD, mode)
    assert found == {"flow/1.0/eager": True, "flow/1.0/graph": False}


def test_capabilities_of_all_modes_are_those_of_any() -> None:
    by_mode = {"eager": frozenset({"replace"}), "graph": frozenset({"staged"})}
    info = ToyDriver(capabilities=by_mode).info
    assert info.capabilities_in("") == {"replace", "staged"}
    assert info.capabilities_in("graph") == {"staged"}
    assert ToyDriver(capabilities=frozenset({"staged"})).info.capabilities_in("any") == {"staged"}


def test_a_request_that_was_refused_leaves_no_plan() -> None:
    def analyse(context: OpContext) -> None:
        with contextlib.suppress(UnsupportedError):
            context.replace_op(abs)
        assert not context.plan(IPoint.BEFORE_FORWARD)

    ask(frozenset(), analyse, IPoint.BEFORE_FORWARD)
