"""Finding drivers: missing, broken, of another interface, imported later."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amanda
from amanda_core import DRIVER_API, Session, discovery, hookimpl
from amanda_core.errors import AmandaWarning, DriverError, MissingDriverError

from . import toy
from .conftest import Installed
from .making import DISTRIBUTION, Point, tool
from .toy_driver import ToyDriver


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
    with pytest.raises(DriverError, match=rf"speaks driver API {future}.*speaks {DRIVER_API}"):
        discovery.register(ToyDriver(api=future), "future")
    assert discovery.drivers() == ()
    installed.points.append(Point("future", lambda: ToyDriver(api=future)))
    discovery._manager = None
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
    with pytest.raises(DriverError, match="'toy' and 'again' are both of 'toy'"):
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


def test_preflight_findings_of_all_drivers_are_joined() -> None:
    discovery.register(ToyDriver("one"), "one")
    discovery.register(ToyDriver("two"), "two")
    found = discovery.plugin_manager().hook.amanda_preflight()
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


def test_listing_tools_imports_none_of_them(installed: Installed) -> None:
    point = Point("mapping", broken, group=discovery.TOOL_GROUP)
    installed.points += [point, Point("toy", ToyDriver)]
    assert discovery.tools() == {"mapping": point}
    assert point.loads == 0


class Early(ToyDriver):
    """A driver that wants to know of its framework before tools are applied."""

    def __init__(self, module: str) -> None:
        super().__init__(modules=(module,))
        self.told = 0

    @hookimpl
    def amanda_framework_imported(self) -> None:
        self.told += 1


def test_a_driver_is_told_of_its_framework_that_is_loaded_already(installed: Installed) -> None:
    plugin = Early("json")
    discovery.register(plugin, "early")
    discovery.announce()
    assert plugin.told == 1


def test_a_driver_is_told_of_its_framework_when_it_is_imported(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_framework.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    plugin = Early("late_framework")
    discovery.register(plugin, "early")
    discovery.announce()
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
        discovery.announce()


def test_drivers_that_do_not_want_to_know_leave_nothing_behind(driver: ToyDriver) -> None:
    finders = list(sys.meta_path)
    discovery.announce()
    assert sys.meta_path == finders
