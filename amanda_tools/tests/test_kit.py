"""The kit for authors of tools: what it names, its examples, and what an import of it costs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

from amanda_tools import kit

MODULES = [name for _, name, _ in pkgutil.walk_packages(kit.__path__, f"{kit.__name__}.")]


@pytest.mark.parametrize("name", kit.__all__)
def test_each_public_name_is_documented_with_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(kit, name)) or ""
    assert ">>> " in text or "::\n\n" in text


@pytest.mark.parametrize("name", [kit.__name__, *MODULES])
def test_the_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_all_names_are_listed_and_no_others_are_there() -> None:
    assert set(kit.__all__) <= set(dir(kit))
    assert len(set(kit.__all__)) == len(kit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'utils'"):
        kit.utils  # type: ignore[attr-defined]  # noqa: B018


def test_a_name_loads_only_its_own_module() -> None:
    code = "import sys; from amanda_tools.kit import MappingTool; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("amanda_tools")}
    assert loaded == {"amanda_tools", "amanda_tools.kit", "amanda_tools.kit.mapping"}
