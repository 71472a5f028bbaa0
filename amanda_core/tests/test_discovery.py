"""Finding drivers: missing ones, broken ones, those of another interface, late imports."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amanda
from amanda_core import (
    DRIVER_API,
    Action,
    ActionKind,
    DriverInfo,
    DriverStatus,
    Finding,
    OpContext,
    Session,
    hookimpl,
)
from amanda_core.errors import AmandaWarning, DriverError, MissingDriverError, UnsupportedError
from amanda_core.interface import hookspecs
from amanda_core.plugins import discovery
from amanda_core.plugins.framework_imports import announce
from amanda_core.plugins.preflight import preflight, status as status_of
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver

from .conftest import Installed
from .making import DISTRIBUTION, Point, tool


def broken() -> Any:
    raise ImportError("libtoy.so is missing")


def test_no_drivers_at_all() -> None:
    assert discovery.drivers() == ()
    with pytest.raises(MissingDriverError, match=r"No working driver.*pip install amanda-driver-"):
        amanda.attach(amanda.Tool())
    with pytest.raises(MissingDriverError, match="No driver 'toy' is installed; there are: none"):
        discovery.driver("toy")


def test_an_installed_driver_is_found_and_named_with_its_distribution(
    installed: Installed,
) -> None:
    plugin = ToyDriver()
    installed.points.append(Point("toy", lambda: plugin, dist=DISTRIBUTION))
    (found,) = discovery.drivers()
    assert found.plugin is plugin
    assert found.info.name == "toy"
    assert found.distribution == "amanda-driver-toy 0.4"
    assert discovery.driver("toy") is found
    with pytest.raises(MissingDriverError, match="there are: toy"):
        discovery.driver("other")
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: toy.Value(1.5)))):
        assert toy.relu(toy.Value(0.0)).data == 1.5


def test_a_broken_driver_found_by_discovery_is_warned_about_once_and_skipped(
    installed: Installed,
) -> None:
    point = Point("broken", broken, dist=DISTRIBUTION)
    installed.points += [point, Point("toy", ToyDriver)]
    with pytest.warns(AmandaWarning, match=r"'broken' of amanda-driver-toy 0\.4.*libtoy") as warned:
        assert [driver.info.name for driver in discovery.drivers()] == ["toy"]
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with amanda.apply(amanda.Tool()):
                toy.relu(toy.Value(0.0))
    assert point.loads == 1


def test_a_broken_driver_asked_for_by_name_raises_with_its_cause(installed: Installed) -> None:
    installed.points.append(Point("broken", broken))
    with pytest.warns(AmandaWarning):
        discovery.drivers()
    for _ in range(2):
        with pytest.raises(DriverError, match=r"libtoy\.so is missing") as caught:
            discovery.driver("broken")
        assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(MissingDriverError, match=r"libtoy\.so"):
        amanda.attach(amanda.Tool())


def test_a_driver_of_another_interface_is_refused(installed: Installed) -> None:
    future = DRIVER_API + 1
    with pytest.raises(DriverError, match=rf"has driver API {future}.*core has {DRIVER_API}"):
        discovery.register(ToyDriver(api=future), "future")
    assert discovery.drivers() == ()
    installed.points.append(Point("future", lambda: ToyDriver(api=future)))
    discovery.registered = None
    with pytest.warns(AmandaWarning, match="driver API"):
        assert discovery.drivers() == ()


def test_a_driver_that_does_not_describe_itself_is_refused() -> None:
    with pytest.raises(DriverError, match="does not describe itself"):
        discovery.register(ModuleType("empty"), "empty")


class Misspelt(ToyDriver):
    @hookimpl
    def amanda_atach(self, session: Session) -> None: ...


class Surplus(ToyDriver):
    @hookimpl
    def amanda_trigger_callback(self, context: Any, i_point: Any, more: Any) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "message"), [(Misspelt, "amanda_atach"), (Surplus, "more")], ids=["name", "argument"]
)
def test_a_driver_that_does_not_fit_the_hooks_is_refused_at_registration(
    plugin: type[ToyDriver], message: str
) -> None:
    with pytest.raises(DriverError, match=message):
        discovery.register(plugin(), "wrong")
    assert discovery.drivers() == ()
    discovery.register(ToyDriver(), "wrong")  # The name is free again.


def test_two_drivers_of_one_name_or_one_framework_are_refused() -> None:
    first = discovery.register(ToyDriver(), "toy")
    with pytest.raises(DriverError, match="Two drivers are called 'toy'"):
        discovery.register(ToyDriver("other"), "toy")
    with pytest.raises(DriverError, match="'toy' and 'again' are both for 'toy'"):
        discovery.register(ToyDriver(), "again")
    assert discovery.drivers() == (first,)
    with amanda.apply(amanda.Tool()):
        toy.relu(toy.Value(1.0))
    discovery.unregister("toy")
    assert discovery.drivers() == ()


def test_a_driver_that_fails_to_attach_raises_with_its_cause() -> None:
    class Failing(ToyDriver):
        @hookimpl
        def amanda_attach(self, session: Session) -> Any:
            raise OSError("no such symbol")

    discovery.register(ToyDriver(), "toy")
    discovery.register(Failing("other"), "other")
    found = toy.dispatch
    with pytest.raises(DriverError, match=r"'other'.*failed to attach.*no such symbol") as caught:
        amanda.attach(amanda.Tool())
    assert isinstance(caught.value.__cause__, OSError)
    assert toy.dispatch is found


def test_a_driver_whose_framework_is_not_loaded_does_not_attach() -> None:
    plugin = ToyDriver()
    plugin.loaded = False
    discovery.register(plugin, "toy")
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: toy.Value(9.0)))) as handle:
        assert toy.relu(toy.Value(1.0)).data == 1.0
        assert handle.coverage() == {}
    assert plugin.detached == 0


def test_each_driver_is_asked_for_its_own_preflight() -> None:
    discovery.register(ToyDriver("one"), "one")
    discovery.register(ToyDriver("two"), "two")
    found = [preflight(driver) for driver in discovery.drivers()]
    assert [finding.severity for findings in found for finding in findings] == ["info", "info"]


def test_a_plugin_may_wrap_the_analysis() -> None:
    log: list[str] = []

    class Wrapping(ToyDriver):
        @hookimpl(wrapper=True)
        def amanda_trigger_callback(self, context: Any, i_point: Any) -> Any:
            log.append("before")
            result = yield
            log.append("after")
            return result

    discovery.register(Wrapping(), "toy")
    with amanda.apply(tool(lambda c: log.append("analysis"))):
        for _ in range(2):
            toy.relu(toy.Value(1.0))
            toy.relu(toy.Value(1.0))
    assert log == ["before", "analysis", "after"] * 2


HOOKS = [name for name in vars(hookspecs) if name.startswith("amanda_")]
#: Those that any plugin may implement.
OF_ALL = ("amanda_prepare_context", "amanda_trigger_callback", "amanda_action_recorded")


class Everything(ToyDriver):
    """A driver with every hook, under names of its own."""

    @hookimpl(specname="amanda_framework_imported")
    def imported(self) -> None:
        self.prepared.append("imported")

    @hookimpl(specname="amanda_driver_status")
    def status(self) -> DriverStatus:
        return DriverStatus("1.2.3", "toy", "There is one")

    @hookimpl(specname="amanda_preflight")
    def look(self) -> list[Finding]:
        return [Finding("info", f"Of {self.info.name}")]


def wrapping(log: list[str], hooks: Sequence[str] = HOOKS) -> Any:
    """Return a plugin that is not a driver and wraps hooks."""

    def wrapper(name: str) -> Any:
        # pluggy looks at the names of the parameters: none is the least.
        def wrap(self: Any) -> Any:
            log.append(name)
            return (yield)

        return hookimpl(wrapper=True)(wrap)

    return type("Wrapping", (), {name: wrapper(name) for name in hooks})()


def use_every_hook(name: str) -> None:
    """Call every hook of a driver."""
    announce()
    found = discovery.driver(name)
    assert [finding.message for finding in preflight(found)] == [f"Of {found.info.name}"]
    status = status_of(found.call("amanda_driver_status"))
    assert status is not None
    assert status.version == "1.2.3"
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: None))):
        toy.relu(toy.Value(1.0))
    with pytest.raises(UnsupportedError):  # This driver does not export.
        amanda.exported(toy.relu, tool(lambda c: None), toy.Value(1.0))
    assert discovery.plugin_manager().hook.amanda_model_file(path="model.toy") is None


def test_a_plugin_that_is_no_driver_may_wrap_every_hook(installed: Installed) -> None:
    log: list[str] = []
    plugin = wrapping(log)
    driver = Everything(modules=("json",))
    installed.points += [
        Point("all", lambda: plugin, group=discovery.PLUGIN_GROUP),
        Point("toy", lambda: driver),
    ]
    use_every_hook("toy")
    assert set(log) == set(HOOKS)
    assert driver.prepared == ["imported", "relu"]


def test_hooks_of_one_driver_are_not_called_on_the_others() -> None:
    drivers = [Everything(name, modules=("json",)) for name in ("toy", "other")]
    drivers[1].loaded = False
    for driver in drivers:
        discovery.register(driver, driver.info.name)
    log: list[str] = []
    discovery.register_plugin(wrapping(log), "all")
    with pytest.warns(AmandaWarning, match="its driver 'other' does not attach"):
        use_every_hook("toy")
    assert drivers[0].prepared == ["imported", "relu"]
    assert drivers[1].prepared == ["imported"]
    assert log.count("amanda_attach") == 4  # `apply` twice, and each time both drivers.
    discovery.unregister_plugin("all")
    log.clear()
    with pytest.warns(AmandaWarning, match="its driver 'other' does not attach"):
        use_every_hook("toy")
    assert log == []


def test_what_a_wrapper_returns_stands_for_the_drivers_answer(installed: Installed) -> None:
    class Louder:
        @hookimpl(wrapper=True)
        def amanda_preflight(self) -> Any:
            return [*(yield), Finding("warning", "Also this")]

    discovery.register(Everything(), "toy")
    discovery.register_plugin(Louder(), "louder")
    found = preflight(discovery.driver("toy"))
    assert [finding.message for finding in found] == ["Of toy", "Also this"]


@pytest.mark.parametrize("hook", [name for name in HOOKS if name not in OF_ALL])
def test_a_plugin_that_is_no_driver_does_not_answer_for_one(hook: str) -> None:
    plugin = type("Wrong", (), {hook: hookimpl(lambda self: None)})()
    with pytest.raises(DriverError, match=f"implements {hook}, which only a driver can"):
        discovery.register_plugin(plugin, "wrong")
    discovery.register_plugin(wrapping([]), "wrong")  # The name is free again.
    with pytest.raises(DriverError, match="Two plugins are called 'wrong'"):
        discovery.register_plugin(wrapping([]), "wrong")


def test_a_broken_plugin_is_warned_about_once_and_skipped(installed: Installed) -> None:
    installed.points += [
        Point("toy", broken, group=discovery.PLUGIN_GROUP, dist=DISTRIBUTION),
        Point("toy", ToyDriver, dist=DISTRIBUTION),
    ]
    with pytest.warns(AmandaWarning, match=r"Plugin 'toy' of .*libtoy") as warned:
        assert [driver.info.name for driver in discovery.drivers()] == ["toy"]
    assert len(warned) == 1
    assert list(discovery.plugins().broken_plugins) == ["toy"]


def test_a_blocked_plugin_is_not_loaded(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = Point("words", broken, group=discovery.PLUGIN_GROUP, dist=DISTRIBUTION)
    installed.points.append(point)
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", "words")
    assert discovery.drivers() == ()
    assert point.loads == 0


def test_plugins_are_shown_each_action_and_may_refuse_it(driver: ToyDriver) -> None:
    seen: list[tuple[str, str]] = []

    class Watching:
        @hookimpl
        def amanda_action_recorded(self, context: OpContext, action: Action) -> None:
            seen.append((context.op_type, action.kind.value))
            if action.kind is ActionKind.REPLACE_OP:
                raise UnsupportedError("Nothing is replaced here")

    discovery.register_plugin(Watching(), "watching")

    def analyse(context: OpContext) -> None:
        context.insert_after_op(lambda y: toy.Value(5.0))
        with pytest.raises(UnsupportedError, match="Nothing is replaced"):
            context.replace_op(lambda *_: toy.Value(7.0))

    with amanda.apply(tool(analyse)):
        assert [toy.relu(toy.Value(1.0)).data for _ in range(3)] == [5.0] * 3
    assert seen == [("relu", "insert_after_op"), ("relu", "replace_op")]


def test_a_vocabulary_comes_as_a_plugin(driver: ToyDriver) -> None:
    class Words:
        @hookimpl
        def amanda_prepare_context(self, context: OpContext) -> None:
            context["word"] = context.op_type.upper()

    discovery.register_plugin(Words(), "words")
    seen: list[str] = []
    with amanda.apply(tool(lambda c: seen.append(c["word"]))):
        toy.relu(toy.Value(1.0))
    assert seen == ["RELU"]


def test_a_planned_op_never_goes_through_the_hooks(driver: ToyDriver) -> None:
    log: list[str] = []
    discovery.register_plugin(wrapping(log), "all")
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: None))):
        for index in range(5):
            toy.relu(toy.Value(1.0))
            if index == 0:
                log.clear()
    assert log == []


def test_a_driver_that_does_not_say_for_which_interface_it_is_is_refused() -> None:
    class Old:
        @hookimpl
        def amanda_driver_info(self) -> DriverInfo:
            return DriverInfo("old", ("old",), ("old/*/eager",))  # type: ignore[call-arg]

    with pytest.raises(DriverError, match=r"fails to describe itself.*'api'.*belong together"):
        discovery.register(Old(), "old")
    assert discovery.drivers() == ()


def test_a_hook_that_is_not_marked_is_refused_instead_of_ignored() -> None:
    class Unmarked(ToyDriver):
        def amanda_attach(self, session: Session) -> Any:
            raise AssertionError

    for register in (discovery.register, discovery.register_plugin):
        with pytest.raises(DriverError, match="amanda_attach, which is not marked"):
            register(Unmarked(), "toy")


def test_a_plugin_that_cannot_stand_in_a_set_is_refused() -> None:
    class Unhashable(ToyDriver):
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(DriverError, match="unhashable"):
        discovery.register(Unhashable(), "toy")


def test_listing_tools_imports_none_of_them(installed: Installed) -> None:
    point = Point("mapping", broken, group=discovery.TOOL_GROUP)
    installed.points += [point, Point("toy", ToyDriver)]
    assert discovery.tools() == {"mapping": point}
    assert point.loads == 0


class Early(ToyDriver):
    """A driver that asks to know of its framework before tools are applied."""

    def __init__(self, module: str) -> None:
        super().__init__(modules=(module,))
        self.told = 0

    @hookimpl
    def amanda_framework_imported(self) -> None:
        self.told += 1


def test_a_driver_is_told_of_its_framework_that_is_loaded_already(installed: Installed) -> None:
    plugin = Early("json")
    discovery.register(plugin, "early")
    announce()
    assert plugin.told == 1


def test_a_driver_is_told_of_its_framework_when_it_is_imported(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_framework.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    plugin = Early("late_framework")
    discovery.register(plugin, "early")
    announce()
    assert plugin.told == 0
    importlib.import_module("late_framework")
    assert plugin.told == 1
    assert sys.meta_path == finders


def test_a_driver_that_fails_to_prepare_itself_is_warned_about(installed: Installed) -> None:
    class Failing(Early):
        @hookimpl
        def amanda_framework_imported(self) -> None:
            raise RuntimeError("no symbol")

    discovery.register(Failing("json"), "early")
    with pytest.warns(AmandaWarning, match=r"toy.*could not prepare itself.*no symbol"):
        announce()


def test_drivers_that_do_not_want_to_know_leave_nothing_behind(driver: ToyDriver) -> None:
    finders = list(sys.meta_path)
    announce()
    assert sys.meta_path == finders
