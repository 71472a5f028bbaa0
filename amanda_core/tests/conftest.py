"""Hide installed drivers from all tests, which so import no framework and register their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import importlib_metadata
import pytest

from amanda_core.plugins import discovery, installed as installation
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import REPLACED, ToyDriver


class Installed:
    """Entry points in place of those of the installed distributions."""

    def __init__(self) -> None:
        self.points: list[Any] = []

    def entry_points(self) -> Installed:
        return self

    def select(self, *, group: str) -> list[Any]:
        return [point for point in self.points if point.group == group]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Return the entry points that are installed: none until a test appends to `points`."""
    nothing = Installed()
    monkeypatch.setattr(importlib_metadata, "entry_points", nothing.entry_points)
    monkeypatch.setattr(discovery, "registered", None)
    monkeypatch.setattr(installation, "blocked", {})
    return nothing


@pytest.fixture
def driver(installed: Installed) -> Iterator[ToyDriver]:
    """Register the toy driver, and check afterwards that the framework is restored."""
    found = {name: getattr(toy, name) for name in REPLACED}
    plugin = ToyDriver()
    discovery.register(plugin, "toy")
    yield plugin
    assert {name: getattr(toy, name) for name in REPLACED} == found
    assert not plugin.interception.attached
