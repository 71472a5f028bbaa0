"""Parts that drivers share: zones, paths of modules, memory without strides, records of ops."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from amanda_core import IPoint, Plan, Session, Site
from amanda_core.driver_kit.execution import ForwardProgram, OpRecord, deferring, spread
from amanda_core.driver_kit.frame_locals import methods_around
from amanda_core.driver_kit.module_values import arrays_in, replace_first
from amanda_core.driver_kit.patching import Routes
from amanda_core.driver_kit.zones import zone_of
from amanda_core.modules.module_paths import inside, modules_of
from amanda_core.weights.geometry import Memory, contiguous


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


def plan(edit: Callable[[int], int], autodiff: bool = False) -> Plan:
    """Return a plan of one step, which computes with each value."""

    class Edit:
        action = SimpleNamespace(autodiff=autodiff)

        def __call__(self, values: list[int]) -> list[tuple[int, int]]:
            return [(place, edit(value)) for place, value in enumerate(values)]

    step: Any = Edit()
    return Plan([step])


def test_an_op_is_edited_before_and_after_it_is_computed() -> None:
    plans = {
        IPoint.BEFORE_FORWARD: plan(lambda value: value + 10),
        IPoint.AFTER_FORWARD: plan(lambda value: -value),
    }
    seen: list[Any] = []
    context = SimpleNamespace(
        trigger_callback=plans.get,
        execution=SimpleNamespace(update=lambda outputs, **_: seen.append(outputs)),
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


def test_only_what_is_not_differentiated_runs_unrecorded_and_lets_gradients_through() -> None:
    log: list[Any] = []

    class Recorded(ForwardProgram):
        def unrecorded(self) -> AbstractContextManager[object]:
            log.append("unrecorded")
            return nullcontext()

        def edited(self, old: Any, new: Any) -> Any:
            log.append((old, new))
            return new

    op = Recorded(session(), OpRecord(Site("key", "add", "toy/1/eager", "add")), "add")
    assert op.execute(plan(lambda value: value + 1, autodiff=True), [1]) == [2]
    assert log == []
    assert op.execute(plan(lambda value: value + 1), [1]) == [2]
    assert log == ["unrecorded", (1, 2)]


def test_a_routed_function_is_the_attachments_of_the_thread_that_calls_it() -> None:
    framework: Any = SimpleNamespace(call=lambda value: value)
    original = framework.call

    class Interception(Routes):
        def install(self) -> None:
            self.route(framework, "call", lambda factor, call, value: factor * call(value))

    def elsewhere() -> None:
        found.append(framework.call(2))
        routes.attach(30)
        found.append(framework.call(2))
        routes.detach(30)

    routes, found = Interception(), list[int]()
    routes.attach(10)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [2, 60]
    assert framework.call(2) == 20
    routes.detach(10)
    routes.detach(10)
    assert framework.call is original
    assert routes.attached == {}


class Named:
    """Its methods name their object as they like, and one captures it in a closure."""

    def first(layer, then: Callable[[], list[object]]) -> list[object]:
        return then()

    def second(me, then: Callable[[], list[object]]) -> list[object]:
        def inside() -> list[object]:
            return me.first(then)

        return inside()


def test_running_methods_are_found_whatever_their_object_is_called() -> None:
    def found() -> list[object]:
        around = methods_around(sys._getframe(1), lambda code: code.co_filename == __file__)
        return [owner for owner, _ in around]

    def function(value: object) -> list[object]:
        return one.second(found)

    one = Named()
    assert function("an argument") == [one, one]


class _Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        [None, 1.0],
        ("text", (1.0, 2.0)),
        _Pair(None, 1.0),
        {"a": None, "b": [1.0, 2.0]},
        OrderedDict(b=1.0, a=2.0),
        # Its class does not take a mapping alone.
        defaultdict(float, a=1.0),
        UserDict(a=1.0),
        MappingProxyType({"a": 1.0}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_first_array_of_a_modules_value_is_replaced(value: Any) -> None:
    before = repr(value)
    found = replace_first(value, (float,), lambda array: array + 9.0)
    assert type(found) is type(value)
    assert repr(found) == before.replace("1.0", "10.0", 1)
    assert repr(value) == before, "the program's own value is left"
    assert arrays_in(found, (float,)) == [10.0, *arrays_in(value, (float,))[1:]]


@pytest.mark.parametrize("value", [None, "text", [], {"a": set()}, [1.0]])
def test_a_value_in_which_nothing_changes_is_the_same(value: Any) -> None:
    assert replace_first(value, (float,), lambda array: array) is value
