"""Tools for time and memory on a driver whose routines do not run together with their operator."""

from __future__ import annotations

from collections.abc import Sequence

import importlib_metadata
import pytest

import amanda
from amanda_core import CoverageGap, DriverInfo, IPoint, OpContext, Session, Site, hookimpl
from amanda_core.plugins import discovery
from amanda_core.results import HasResult
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory


class Unordered:
    """A driver without operators that is its own attachment; the tests open contexts themselves."""

    capabilities = frozenset({"graph", "gradients", "aligned_gradients"})

    @hookimpl
    def amanda_driver_info(self) -> DriverInfo:
        return DriverInfo("flow", ("flow",), ("flow/*/jit",), self.capabilities, api=3)

    @hookimpl
    def amanda_attach(self, session: Session) -> Unordered:
        self.session = session
        return self

    def detach(self) -> None: ...

    def coverage(self) -> Sequence[CoverageGap]:
        return []

    def open(self) -> OpContext:
        site = Site("add", "Add", "flow/1.0/jit", "add")
        return self.session.open(site, None, [1.0])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Unordered:
    monkeypatch.setattr(importlib_metadata, "entry_points", lambda *, group: [])
    monkeypatch.setattr(discovery, "registered", None)
    plugin = Unordered()
    discovery.register(plugin, "flow")
    return plugin


@pytest.mark.parametrize("kind", [Latency, Memory])
def test_what_cannot_be_measured_is_said_and_the_program_runs(
    driver: Unordered, kind: type[amanda.Tool]
) -> None:
    tool = kind()
    with amanda.apply(tool):
        context = driver.open()
        assert not context.trigger_callback(IPoint.BEFORE_FORWARD)
        assert not context.trigger_callback(IPoint.AFTER_FORWARD)
    assert isinstance(tool, HasResult)
    assert "not supported on flow/1.0/jit" in tool.result().to_json()
