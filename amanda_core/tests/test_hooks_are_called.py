"""Hooks are called through pluggy, so that its monitors and wrappers see each call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import amanda
from amanda_core import DriverInfo, hookimpl
from amanda_core.errors import DriverError
from amanda_core.plugins import discovery
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver


def watched(program: Any) -> Counter[str]:
    """Return how often each hook is called while a program runs."""
    calls: Counter[str] = Counter()
    undo = discovery.plugin_manager().add_hookcall_monitoring(
        lambda name, implementations, arguments: calls.update([name]),
        lambda result, name, implementations, arguments: None,
    )
    try:
        program()
    finally:
        undo()
    return calls


def test_a_monitor_sees_every_call_of_a_hook(driver: ToyDriver) -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(lambda *values: None))

    def program() -> None:
        with amanda.apply(tool):
            for _ in range(3):
                toy.relu(toy.Value(1.0))

    assert watched(program) == {
        "amanda_attach": 1,
        # Once, at the operator's first execution; after that nothing goes through pluggy.
        "amanda_prepare_context": 1,
        "amanda_trigger_callback": 1,
        "amanda_action_recorded": 1,
    }


def test_tracing_shows_the_core_s_own_implementation(driver: ToyDriver) -> None:
    lines: list[str] = []
    manager = discovery.plugin_manager()
    manager.trace.root.setwriter(lines.append)
    undo = manager.enable_tracing()
    try:
        tool = amanda.Tool()
        tool.add_inst_for_op(lambda context: None)
        with amanda.apply(tool):
            toy.relu(toy.Value(1.0))
    finally:
        undo()
        manager.trace.root.setwriter(None)
    assert any("amanda_trigger_callback" in line for line in lines)


class Misnamed:
    """A driver whose contexts are in the namespaces of another one."""

    @hookimpl
    def amanda_driver_info(self) -> DriverInfo:
        return DriverInfo("toy2", ("toy2",), ("toy2/*/jit", "toy/*/eager"), api=3)

    @hookimpl
    def amanda_attach(self, session: Any) -> None:
        return None


def test_a_driver_in_namespaces_of_another_name_is_refused() -> None:
    with pytest.raises(DriverError, match=r"namespace 'toy/\*/eager', not namespaces that begin"):
        discovery.register(Misnamed(), "misnamed")
    assert "misnamed" not in [found.info.name for found in discovery.drivers()]
