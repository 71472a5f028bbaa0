"""Warnings point to a line of the program, whatever lies between it and Amanda."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from amanda_core.errors import AmandaWarning, VaryingWeightWarning
from amanda_core.plugins import discovery
from amanda_core.runtime.warning_locations import warn
from amanda_core.testing.toy.driver import ToyDriver

from .site import Site, distribution


def broken(folder: Path) -> Site:
    """Return an installation with a driver that cannot be imported."""
    site = Site(folder)
    points = "[amanda.drivers]\nbroken = brokenland:plugin\n"
    distribution(site.path, "amanda-driver-broken", "1.0", points)
    (site.path / "brokenland.py").write_text("raise ImportError('libtoy.so is missing')")
    return site


@pytest.mark.parametrize(
    "statement", ["import amanda", "from amanda import Tool", "import amanda.tools.mapping"]
)
def test_a_driver_that_is_skipped_points_to_the_import(tmp_path: Path, statement: str) -> None:
    site = broken(tmp_path)
    site.write("train.py", f"import sys\n\n{statement}\n")
    done = site.python("train.py")
    assert done.returncode == 0, done.stderr
    assert "train.py:3: AmandaWarning: Skipped: " in done.stderr
    assert "libtoy.so is missing" in done.stderr
    assert done.stderr.count("AmandaWarning") == 1


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function of a package, which calls Amanda for the program."""
    (tmp_path / "frame").mkdir()
    (tmp_path / "frame/__init__.py").write_text("from frame.inner import call\n")
    (tmp_path / "frame/inner.py").write_text("def call(function):\n    return function()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("frame").call
    for name in ("frame", "frame.inner"):
        sys.modules.pop(name)


def test_a_warning_points_beyond_the_packages_in_between(library: Callable[..., Any]) -> None:
    # The framework of a driver is among them, and other libraries can be.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library(partial(warn, "look"))
        library(partial(warn, "look again", ["frame", "not_loaded"]))
        warn("look here", category=VaryingWeightWarning)
        discovery.register(ToyDriver(modules=("frame",)), "frame")
        library(partial(warn, "look once more"))
    places = [Path(str(one.filename)).name for one in caught]
    assert places == ["inner.py", *[Path(__file__).name] * 3]
    assert caught[2].category is VaryingWeightWarning


def test_code_without_a_module_is_passed_over() -> None:
    """Python would drop the warning there: a compiler's own code has no name."""
    generated: dict[str, Any] = {"warn": warn, "__name__": None}
    exec("def call(): warn('it runs')", generated)
    with pytest.warns(AmandaWarning, match="it runs") as caught:
        generated["call"]()
    assert caught[0].filename == __file__
