"""Parts that drivers share: zones, paths of modules, memory without strides, records of ops."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from amanda_core import Session, Site
from amanda_core.contiguous_memory import contiguous
from amanda_core.execution import OpRecord, deferring, spread
from amanda_core.module_paths import inside, modules_of
from amanda_core.path_sites import ModulePlace, PathSites, StructuralLabels
from amanda_core.sites import USER, Rules
from amanda_core.weights.geometry import Memory
from amanda_core.zones import zone_of


def _in_module(name: str, call: Any) -> Any:
    """Call a function from a module of this name."""
    module = ModuleType(name)
    exec("def run(call):\n    return call()", vars(module))
    return module.run(call)


def test_a_zone_is_that_of_the_innermost_module_that_has_one() -> None:
    zones = {"library.optimizers": "optimizer", "library.init": "init"}

    def zone() -> str:
        return zone_of(zones)

    assert zone() == "model"
    assert _in_module("library.optimizers.sgd", zone) == "optimizer"
    assert _in_module("library.optimizers", lambda: _in_module("library.init", zone)) == "init"


def test_a_zone_is_not_looked_for_beyond_a_boundary() -> None:
    def boundary() -> str:
        return zone_of({"library": "optimizer"}, boundary.__code__)

    assert _in_module("library", boundary) == "model"


def test_modules_are_found_once_with_their_paths() -> None:
    shared = SimpleNamespace(children={})
    block = SimpleNamespace(children={"a": shared, "b": shared, "gone": None})
    net = SimpleNamespace(children={"block": block, "last": SimpleNamespace(children={})})
    block.children["up"] = net

    found = dict(modules_of(net, lambda one: one.children))
    assert set(found) == {"", "block", "block.a", "last"}
    assert found["block.a"] is shared
    below = dict(modules_of(block, lambda one: one.children, "net.block"))
    assert set(below) == {"net.block", "net.block.a", "net.block.up", "net.block.up.last"}
    assert inside("", "weight") == "weight"


@pytest.mark.parametrize(("shape", "strides"), [((2, 3, 4), (12, 4, 1)), ((5,), (1,)), ((), ())])
def test_memory_without_gaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    count = 24 if len(shape) == 3 else 5 if shape else 1
    assert contiguous("cpu", 160, shape, 4 * count) == Memory("cpu", 40, shape, strides, 4)


def test_values_are_spread_over_positions() -> None:
    assert spread([2, 0], 4, ["x", "y"]) == ["y", None, "x", None]


def session(**state: Any) -> Any:
    return SimpleNamespace(**{"epoch": 3, "caching": True, **state})


def test_a_record_is_idle_in_the_epoch_in_which_no_tool_acted() -> None:
    record = OpRecord(Site("key", "relu", "toy/1/eager", "relu"))
    assert not record.is_idle(session())
    record.note(session(), 3, acts=True)
    assert not record.is_idle(session())
    record.note(session(), 2, acts=False)  # The epoch has changed in between.
    assert not record.is_idle(session())
    record.note(session(), 3, acts=False)
    assert record.is_idle(session())
    assert not record.is_idle(session(epoch=4))
    assert not record.is_idle(session(caching=False))


def test_an_exception_is_deferred() -> None:
    kept: list[BaseException] = []
    error = ValueError("wrong")

    def fail(values: list[Any]) -> list[Any]:
        raise error

    held: Session = SimpleNamespace(defer=kept.append)  # type: ignore[assignment]
    assert deferring(held, fail)([1]) is None
    assert deferring(held, list)([1]) == [1]
    assert kept == [error]


def test_ops_are_told_apart_by_path_line_and_occurrence() -> None:
    rules = Rules(lambda code, namespace: USER, lambda: "model")
    sites = PathSites(rules, "toy/1/eager")

    def call(path: str, part: object) -> OpRecord:
        return sites.locate("relu", sys._getframe(), ModulePlace("Net", path), part)

    def run() -> list[OpRecord]:
        part = Rules(lambda code, namespace: USER, lambda: "model")  # It can be held weakly.
        return [call(path, part) for path in ("a", "a", "b")]

    # Both from one line: callers are a part of the identity.
    (one, two, other), again = [run() for _ in range(2)]
    assert len({one, two, other}) == 3
    assert (one.site.module_path, other.site.module_path) == ("a", "b")
    assert again == [one, two, other]


def test_models_of_one_structure_share_a_label() -> None:
    labels = StructuralLabels()
    given = [("Net", [3]), ("Net", [4]), ("Net", [3]), ("Other", [4])]
    found = [labels.label(name, structure) for name, structure in given]
    assert found == ["Net", "Net#2", "Net", "Other"]


def test_callers_of_a_module_do_not_matter() -> None:
    rules = Rules(lambda code, namespace: USER, lambda: "model")
    sites = PathSites(rules, "toy/1/eager")

    def method(around: bool) -> OpRecord:
        frame = sys._getframe()
        return sites.locate("relu", frame, ModulePlace("Net", "a", frame if around else None))

    def callers(around: bool) -> set[OpRecord]:
        first = method(around)
        return {first, method(around)}

    assert len(callers(around=True)) == 1
    assert len(callers(around=False)) == 2
