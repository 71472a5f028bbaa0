"""Helpers that most tests need: tools with one routine, and sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from amanda_core import OpContext, Session, Site, Tool
from amanda_core.driver_kit.framework_versions import FrameworkVersions
from amanda_core.engine.activation import Handle
from amanda_core.plugins import discovery
from amanda_core.testing.toy import framework as toy

#: A distribution that is there wherever the tests run, in place of a framework.
PLUGGY = FrameworkVersions(
    framework="Pluggy",
    module="pluggy",
    distributions=("pluggy",),
    oldest="1.0",
    newest="99.0",
    driver="amanda-core",
    variable="AMANDA_PLUGGY_INTERCEPTOR",
    self_test="self_test_of_pluggy",
)


def tool(
    *routines: Callable[[OpContext], Any], backward: bool = False, require_outputs: bool = False
) -> Tool:
    """Return a plain tool with analysis routines at one point."""
    made = Tool()
    for routine in routines:
        made.add_inst_for_op(routine, backward, require_outputs)
    return made


class Named(Tool):
    """A tool that does nothing, with a name for messages and a routine at every point."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(self.analyse, backward, require_outputs)

    def analyse(self, context: OpContext) -> None:
        self.log.append(self.name)


def site(key: Any = "op", *, namespace: str = "toy/1.2.3/eager", **facts: Any) -> Site:
    """Return a site for tests that play the part of the driver."""
    facts = {"op_type": "linear", "name": f"layer/{key}", **facts}
    return Site(key=key, namespace=namespace, **facts)


def session_of(handle: Handle) -> Session:
    """Return the session of a handle whose tools are applied."""
    assert handle.session is not None
    return handle.session


class Pruner(Tool):
    """A tool with names to look for in messages."""

    def __init__(self, result: Any, ask: str = "insert_before_op", **positions: Any) -> None:
        self.result, self.ask, self.positions = result, ask, positions
        self.add_inst_for_op(self.analyse, require_outputs=ask == "insert_after_op")

    def analyse(self, context: OpContext) -> None:
        getattr(context, self.ask)(self.mask_weight, **self.positions)

    def mask_weight(self, *values: Any) -> Any:
        return self.result


def linear_model() -> toy.Value:
    """Run one linear op in a scope: 2 * 3 + 1."""
    with toy.scope("encoder"):
        return toy.linear(toy.Value(2.0), toy.Value(3.0), toy.Value(1.0))


@dataclass
class Point:
    """An entry point like those of importlib_metadata."""

    name: str
    factory: Callable[[], Any]
    group: str = discovery.DRIVER_GROUP
    dist: Any = None
    loads: int = 0

    def load(self) -> Any:
        self.loads += 1
        return self.factory()


DISTRIBUTION = SimpleNamespace(name="amanda-driver-toy", version="0.4")


def model() -> float:
    """Run operators of two modules and one outside them, forward and backward."""
    x = toy.parameter(2.0)
    with toy.scope("encoder"), toy.scope("first"):
        y = toy.linear(x, toy.Value(3.0), toy.Value(1.0))
    with toy.scope("decoder"):
        y = toy.relu(y)
    y = toy.add(y, y)
    toy.backward(y)
    return y.data
