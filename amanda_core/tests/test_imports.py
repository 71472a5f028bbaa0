"""A framework that is imported while tools are applied, and what the import watcher leaves."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amanda
from amanda_core import Session, hookimpl
from amanda_core.engine.activation import Handle
from amanda_core.errors import AmandaWarning
from amanda_core.plugins import discovery
from amanda_core.plugins.imports import EndOfImport, ImportWatcher, running_imports
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver

from .making import tool

FRAMEWORK = "toy_framework_imported_later"


class LateDriver(ToyDriver):
    """Attaches once its framework is imported."""

    def __init__(self, name: str = "late") -> None:
        super().__init__(name, (FRAMEWORK,))
        self.asked = 0

    @hookimpl
    def amanda_attach(self, session: Session) -> Any:
        self.asked += 1
        self.loaded = FRAMEWORK in sys.modules
        return super().amanda_attach(session)


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a package that can be imported and is not imported yet."""
    package = tmp_path / FRAMEWORK
    package.mkdir()
    (package / "__init__.py").write_text("LOADER = __loader__\nSPEC = __spec__.loader\n")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == FRAMEWORK]:
        del sys.modules[name]


def is_clean(module: ModuleType) -> bool:
    """Return True if nothing of Amanda is left on a module."""
    assert type(module.__spec__) is ModuleSpec
    ours = "amanda_core."
    loaders = (module.__loader__, module.__spec__.loader)
    return not any(type(loader).__module__.startswith(ours) for loader in loaders)


def halving() -> amanda.Tool:
    return tool(lambda c: c.insert_after_op(lambda y: toy.Value(y.data / 2)))


@pytest.mark.usefixtures("framework")
def test_driver_of_a_framework_imported_later_attaches() -> None:
    driver = LateDriver()
    discovery.register(driver, "late")
    finders = list(sys.meta_path)
    with amanda.apply(halving()) as handle:
        assert toy.relu(toy.Value(4.0)).data == 4.0
        importlib.import_module(FRAMEWORK)
        assert driver.asked == 2
        assert toy.relu(toy.Value(4.0)).data == 2.0
        assert list(handle.coverage()) == ["late"]
        importlib.import_module(f"{FRAMEWORK}.part")
    assert toy.relu(toy.Value(4.0)).data == 4.0
    assert (driver.asked, driver.detached) == (2, 1)
    assert sys.meta_path == finders


@pytest.mark.usefixtures("framework")
def test_the_import_watcher_leaves_loaders_clean() -> None:
    discovery.register(LateDriver(), "late")
    with amanda.apply(amanda.Tool()):
        module = importlib.import_module(FRAMEWORK)
    # Also while the module was being executed.
    assert is_clean(module)
    assert module.LOADER is module.SPEC is module.__loader__
    assert importlib.reload(module) is module


@pytest.mark.usefixtures("framework")
def test_a_reload_under_the_watcher_leaves_loaders_clean() -> None:
    driver = LateDriver()
    discovery.register(driver, "late")
    discovery.register(ToyDriver("never", ("toy_framework_never_imported",)), "never")
    discovery.driver("never").plugin.loaded = False
    module = importlib.import_module(FRAMEWORK)
    with amanda.apply(amanda.Tool()):
        importlib.reload(module)
        assert is_clean(module)
    assert driver.detached == 1


@pytest.mark.usefixtures("framework")
def test_looking_for_the_framework_does_not_attach() -> None:
    driver = LateDriver()
    discovery.register(driver, "late")
    with amanda.apply(amanda.Tool()):
        spec = importlib.util.find_spec(FRAMEWORK)
        assert spec is not None
        assert FRAMEWORK not in sys.modules
        assert importlib.util.find_spec("toy_framework_never_imported") is None
    assert driver.asked == 1


def test_a_framework_that_fails_to_import_fails_as_without_tools(framework: Path) -> None:
    (framework / "__init__.py").write_text("raise RuntimeError('no GPU')\n")
    driver = LateDriver()
    discovery.register(driver, "late")
    finders = list(sys.meta_path)
    with amanda.apply(amanda.Tool()):
        with pytest.raises(RuntimeError, match="no GPU"):
            importlib.import_module(FRAMEWORK)
        assert FRAMEWORK not in sys.modules
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{FRAMEWORK}_of_another_name")
    assert driver.asked == 1
    assert sys.meta_path == finders


@pytest.mark.usefixtures("framework")
def test_the_watcher_is_gone_after_an_exception() -> None:
    discovery.register(LateDriver(), "late")
    finders = list(sys.meta_path)
    with pytest.raises(KeyboardInterrupt), amanda.apply(amanda.Tool()):  # noqa: PT012
        assert sys.meta_path != finders
        raise KeyboardInterrupt
    assert sys.meta_path == finders


@pytest.mark.usefixtures("framework")
def test_nobody_watches_where_all_frameworks_are_loaded() -> None:
    discovery.register(ToyDriver(), "toy")
    finders = list(sys.meta_path)
    with amanda.apply(amanda.Tool()):
        assert sys.meta_path == finders


@pytest.mark.usefixtures("framework")
def test_two_watchers_of_one_module_are_both_told() -> None:
    told: list[str] = []
    watchers = [ImportWatcher([FRAMEWORK], lambda name, n=n: told.append(n)) for n in "ab"]  # type: ignore[misc]
    for watcher in watchers:
        watcher.start()
    try:
        module = importlib.import_module(FRAMEWORK)
    finally:
        for watcher in watchers:
            watcher.stop()
            watcher.stop()
    assert sorted(told) == ["a", "b"]
    assert is_clean(module)


# A driver that declines while its framework is being imported.


class WholeDriver(LateDriver):
    """Is notified of a part of its framework, and attaches only to all of it."""

    def __init__(self, name: str = "late") -> None:
        super().__init__(name)
        self.info = dataclasses.replace(self.info, modules=(f"{FRAMEWORK}.part",))

    @hookimpl
    def amanda_attach(self, session: Session) -> Any:
        self.asked += 1
        self.loaded = hasattr(sys.modules.get(FRAMEWORK), "READY")
        return ToyDriver.amanda_attach(self, session)


WHOLE = f"from {FRAMEWORK} import part\nREADY = True\n"


def test_a_driver_that_declines_is_asked_again_once_the_import_is_complete(
    framework: Path,
) -> None:
    (framework / "__init__.py").write_text(WHOLE)
    driver = WholeDriver()
    discovery.register(driver, "late")
    with amanda.apply(halving()) as handle:
        module = importlib.import_module(FRAMEWORK)
        assert driver.asked == 3  # At the begin, after the part, and after the whole.
        assert toy.relu(toy.Value(4.0)).data == 2.0
        assert list(handle.coverage()) == ["late"]
        assert is_clean(module)
        assert is_clean(module.part)
    assert (driver.asked, driver.detached) == (3, 1)


def test_a_driver_that_still_declines_is_warned_about(framework: Path) -> None:
    (framework / "__init__.py").write_text(WHOLE.replace("READY", "OTHER"))
    discovery.register(WholeDriver(), "late")
    with amanda.apply(halving()) as handle:
        with pytest.warns(AmandaWarning, match=r"part is loaded, but its driver 'late' does not"):
            module = importlib.import_module(FRAMEWORK)
        assert handle.coverage() == {}
        assert is_clean(module)


@pytest.mark.usefixtures("framework")
def test_a_driver_that_declines_though_its_framework_is_loaded_is_warned_about() -> None:
    importlib.import_module(f"{FRAMEWORK}.part")
    discovery.register(WholeDriver(), "late")
    with pytest.warns(AmandaWarning, match="does not attach to it") as caught:
        amanda.attach(amanda.Tool()).remove()
    assert [warning.filename for warning in caught] == [__file__]


def during_import(framework: Path, action: Callable[[], object], after: str = "") -> Any:
    """Import the framework, which calls `action` in the middle of it."""
    (framework / "__init__.py").write_text(
        f"from {FRAMEWORK} import part\nimport {__name__} as test\ntest.ACTION[0]()\n{after}"
    )
    ACTION[:] = [action]
    return importlib.import_module(FRAMEWORK)


ACTION: list[Callable[[], object]] = []


def test_tools_that_a_framework_applies_while_it_is_imported_see_it_afterwards(
    framework: Path,
) -> None:
    discovery.register(WholeDriver(), "late")
    handles: list[Handle] = []

    def enter() -> None:
        handles.append(amanda.attach(halving()))
        assert toy.relu(toy.Value(4.0)).data == 4.0

    module = during_import(framework, enter, "READY = True\n")
    assert toy.relu(toy.Value(4.0)).data == 2.0
    handles[0].remove()
    assert is_clean(module)


def test_tools_that_are_left_before_the_import_is_complete_leave_nothing(framework: Path) -> None:
    driver = WholeDriver()
    discovery.register(driver, "late")
    specs: list[ModuleSpec] = []

    def enter_and_leave() -> None:
        specs.extend(running_imports())
        with amanda.apply(halving()):
            pass
        assert [type(spec) for spec in specs] == [ModuleSpec] * len(specs)

    module = during_import(framework, enter_and_leave, "READY = True\n")
    assert driver.asked == 1
    assert is_clean(module)


def test_an_import_that_fails_is_no_reason_to_warn(framework: Path) -> None:
    (framework / "__init__.py").write_text(f"from {FRAMEWORK} import part\nraise OSError\n")
    discovery.register(WholeDriver(), "late")
    with amanda.apply(halving()), pytest.raises(OSError):  # noqa: PT011
        del sys.modules[importlib.import_module(FRAMEWORK).__name__]
    for name in (FRAMEWORK, f"{FRAMEWORK}.part"):
        sys.modules.pop(name, None)


def test_the_end_of_an_import_is_heard_by_all_that_wait(framework: Path) -> None:
    told: list[str] = []

    def wait() -> None:
        spec = running_imports()[-1]
        assert spec.name == FRAMEWORK
        ends = [EndOfImport(spec, lambda n=n: told.append(n)) for n in "abc"]  # type: ignore[misc]
        ends[1].cancel()
        ends[1].cancel()

    assert is_clean(during_import(framework, wait))
    assert told == ["a", "c"]
    assert running_imports() == []
