"""A framework that is imported while tools are applied, and what the watcher leaves behind."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amanda
from amanda_core import Session, discovery, hookimpl
from amanda_core.imports import ImportWatcher

from . import toy
from .making import tool
from .toy_driver import ToyDriver

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
    """A package that can be imported and is not yet."""
    package = tmp_path / FRAMEWORK
    package.mkdir()
    (package / "__init__.py").write_text("LOADER = __loader__\nSPEC = __spec__.loader\n")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == FRAMEWORK]:
        del sys.modules[name]


def is_clean(module: ModuleType) -> bool:
    """Whether nothing of ours is left at a module."""
    assert module.__spec__ is not None
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
