"""Parts that drivers share: zones, paths of modules, memory without strides, records of ops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from amanda_core import IPoint, Session, Site
from amanda_core.contiguous_memory import contiguous
from amanda_core.execution import ForwardProgram, OpRecord, deferring, spread
from amanda_core.module_paths import inside, modules_of
from amanda_core.path_modules import ModulePlace, PathModels
from amanda_core.path_sites import PathSites
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


class Toy:
    """A module: it holds others, and a parameter."""

    def __init__(self, size: int = 0, **inner: Toy) -> None:
        self.weight, self.inner = SimpleNamespace(shape=(size,)), inner

    def run(self, act: Callable[[], Any], *path: str) -> Any:
        return self.inner[path[0]].run(act, *path[1:]) if path else act()


class ToyModels(PathModels):
    def __init__(self) -> None:
        super().__init__(lambda value: value, lambda value: value, lambda code: True)

    def library_of(self, owner: Any, name: str) -> str:
        return "toys" if type(owner) is Toy and name == "run" else ""

    def contents_of(self, root: Any) -> tuple[dict[str, Any], dict[int, str]]:
        modules = dict(modules_of(root, lambda module: module.inner))
        weights = {inside(path, "weight"): module.weight for path, module in modules.items()}
        return weights, {id(module): path for path, module in modules.items()}


def test_where_modules_run_is_seen_by_their_methods() -> None:
    models = ToyModels()

    def place() -> Any:
        return models.place(sys._getframe())

    assert place() is None
    model = Toy(3, a=Toy(4, b=Toy(5)))
    assert model.run(place)[:2] == ("Toy", "")
    assert model.run(place, "a", "b")[:2] == ("Toy", "a.b")
    assert model.inner["a"].run(place, "b")[:2] == ("Toy#2", "b")
    # One that is made again has the same label.
    assert Toy(3, a=Toy(4, b=Toy(5))).run(place, "a")[:2] == ("Toy", "a")
    outside = Toy(6)
    assert model.run(lambda: outside.run(place)) == ("Toy", "<Toy>", None)


def test_parameters_are_found_by_identity() -> None:
    models, model = ToyModels(), Toy(3, a=Toy(4))

    class Context(SimpleNamespace):
        def __getitem__(self, key: str) -> str:
            return "matmul"

    inputs = [object(), model.inner["a"].weight]
    context: Any = Context(get=lambda key, default: default, get_inputs=lambda: inputs)
    reads = model.run(lambda: models(context), "a")
    assert [(place, weight.key) for place, weight in reads.items()] == [(1, "Toy:a.weight")]
    assert not models(context)


class Edit:
    """A plan that computes with each value."""

    replacement = None

    def __init__(self, edit: Callable[[int], int]) -> None:
        self.edit = edit

    def __call__(self, values: list[int]) -> list[int]:
        return [self.edit(value) for value in values]


def test_an_op_is_edited_before_and_after_it_is_computed() -> None:
    plans = {
        IPoint.BEFORE_FORWARD: Edit(lambda value: value + 10),
        IPoint.AFTER_FORWARD: Edit(lambda value: -value),
    }
    seen: list[Any] = []
    context = SimpleNamespace(
        trigger_callback=plans.get,
        fill=lambda outputs: seen.append(outputs),
        release=lambda: seen.append("released"),
    )
    session: Any = SimpleNamespace(epoch=1, caching=True, open=lambda *_, **given: context)

    class Sum(ForwardProgram):
        def compute(self, context: Any, replacement: Any, values: list[Any]) -> list[Any]:
            seen.append(values)
            return [sum(values)]

        def leaving(self, outputs: list[Any]) -> list[Any]:
            return [value * 2 for value in outputs]

    record = OpRecord(Site("key", "add", "toy/1/eager", "add"))
    assert Sum(session, record, "add").run([1, 2]) == [-46]
    assert seen == [[11, 12], [23], "released"]
    assert not record.is_idle(session)
