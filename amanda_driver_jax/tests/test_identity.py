"""Identity of ops and parameters in programs that make their modules again at each call."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

from amanda_core.driver_kit.execution import OpRecord
from amanda_core.identity.sites import USER, Rules
from amanda_core.modules.module_paths import inside, modules_of
from amanda_driver_jax.arrays import Shown
from amanda_driver_jax.identity.path_modules import ModulePlace, PathModels
from amanda_driver_jax.identity.path_sites import PathSites


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


def test_occurrences_are_counted_in_the_call_of_the_model_that_runs() -> None:
    sites = PathSites(Rules(lambda code, namespace: USER, lambda: "model"), "toy/1/eager")
    found: list[OpRecord] = []

    def inner(frame: FrameType) -> None:
        found.append(sites.locate("relu", frame, ModulePlace("Net", "a", frame, frame)))

    def model(times: int, *others: Callable[[], Any]) -> None:
        for _ in range(times):
            inner(sys._getframe())
            for other in others:
                other()

    model(3)
    model(2)
    assert found[:3] == [*found[3:], found[2]]
    assert len(set(found)) == 3
    found.clear()
    # A model that another one calls counts for itself.
    model(2, lambda: model(1))
    assert [found.index(record) for record in found] == [0, 0, 2, 0]
    held = Held()

    def holding(held: Held) -> None:
        model(1)
        inner(sys._getframe())

    alive = weakref.ref(held)
    holding(held)
    del held
    assert alive() is not None
    sites.leave_calls()
    assert alive() is None


class Held:
    """An object to which there are weak references."""


class Toy:
    """A module: it holds others, and a parameter."""

    def __init__(self, size: int = 0, **inner: Toy) -> None:
        self.weight, self.inner = SimpleNamespace(shape=(size,)), inner

    def run(self, act: Callable[[], Any], *path: str) -> Any:
        return self.inner[path[0]].run(act, *path[1:]) if path else act()


class ToyModels(PathModels):
    def __init__(self) -> None:
        super().__init__(
            lambda value: Shown(value, (0,), (range(value.shape[0]),)),
            lambda code: True,
        )

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
    assert model.run(lambda: outside.run(place))[:3] == ("Toy", "<Toy>", None)


def test_parameters_are_found_by_identity() -> None:
    models, model = ToyModels(), Toy(3, a=Toy(4))

    class Context(SimpleNamespace):
        def __getitem__(self, key: str) -> str:
            return "matmul"

    inputs = [Toy(5).weight, model.inner["a"].weight]
    context: Any = Context(get=lambda key, default: default, get_inputs=lambda: inputs)
    reads = model.run(lambda: models(context), "a")
    assert [(place, weight.key) for place, weight in reads.items()] == [(1, "Toy:a.weight")]
    assert not models(context)
