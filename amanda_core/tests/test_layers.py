"""`amanda_core.testing.checks.layers`: finds each form of import, and reports upward ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from amanda_core.testing.checks.layers import Import, Layers, core

#: Ways to import `p.upper.one` from `p.lower.two`.
FORMS = {
    "plain": "import p.upper.one",
    "renamed": "import p.upper.one as one",
    "from its package": "from p.upper import one",
    "a name of it": "from p.upper.one import x",
    "relative": "from ..upper import one",
    "a name, relative": "from ..upper.one import x",
    "for annotations": "import typing\nif typing.TYPE_CHECKING:\n    import p.upper.one",
    "in a function": "def f():\n    from p.upper.one import x",
    "in a method": "class A:\n    def f(self):\n        from p.upper.one import x",
    "in a branch": "try:\n    import p.upper.one\nexcept ImportError:\n    pass",
    "by a function": "import importlib\nimportlib.import_module('p.upper.one')",
}
LAYERS = ["plugin", "upper", "lower", "__init__"]


def package(folder: Path, **sources: str) -> Path:
    """Write a package `p` of a few modules; double underscores in names mean folders."""
    everything = {
        "__init__": "",
        "plugin": "import p.upper.one, p.lower.two",
        "upper/__init__": "",
        "upper/one": "from p.lower import two\nx = 1",
        "lower/__init__": "",
        "lower/two": "import p, os, collections.abc",
        **{name.replace("__", "/"): source for name, source in sources.items()},
    }
    for name, source in everything.items():
        path = folder / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder / "p"


def test_imports_that_go_down_are_no_problem(tmp_path: Path) -> None:
    layers = Layers(package(tmp_path), LAYERS)
    assert layers.problems() == []
    assert set(layers.imports) == {
        Import("plugin", "upper.one", 1),
        Import("plugin", "lower.two", 1),
        Import("upper.one", "lower.two", 1),
        Import("lower.two", "__init__", 1),
    }


@pytest.mark.parametrize("form", FORMS)
def test_an_import_that_goes_up_is_found_in_each_form(tmp_path: Path, form: str) -> None:
    layers = Layers(package(tmp_path, lower__three=FORMS[form]), LAYERS)
    line = 1 + max(n for n, text in enumerate(FORMS[form].splitlines()) if "one" in text)
    assert layers.upward() == [Import("lower.three", "upper.one", line)]
    assert layers.circles() == []


def test_modules_side_by_side_do_not_know_one_another(tmp_path: Path) -> None:
    folder = package(tmp_path)
    assert Layers(folder, ["plugin", ("upper", "lower"), "__init__"]).upward() == [
        Import("upper.one", "lower.two", 1)
    ]


def test_a_circle_inside_one_layer_is_found(tmp_path: Path) -> None:
    sources = {"lower__two": "from p.lower import three", "lower__three": "import p.lower.four"}
    layers = Layers(package(tmp_path, **sources, lower__four="from . import two"), LAYERS)
    assert layers.circles() == [["lower.four", "lower.three", "lower.two"]]
    assert layers.upward() == []


def test_two_circles_that_touch_nowhere_are_two(tmp_path: Path) -> None:
    lower = {"lower__two": "import p.lower.three", "lower__three": "import p.lower.two"}
    upper = {"upper__one": "import p.upper.five", "upper__five": "from p.upper.one import x"}
    assert len(Layers(package(tmp_path, **lower, **upper), LAYERS).circles()) == 2


def test_what_has_no_place_and_what_is_not_there_are_problems(tmp_path: Path) -> None:
    problems = Layers(package(tmp_path, other=""), [*LAYERS, "gone"]).problems()
    assert problems == [
        "other is in no layer",
        "gone is listed, but there is no such module",
    ]


def test_a_module_may_stand_above_its_own_package(tmp_path: Path) -> None:
    folder = package(tmp_path, lower__entry="import p.upper.one")
    assert Layers(folder, LAYERS).upward() == [Import("lower.entry", "upper.one", 1)]
    assert Layers(folder, ["plugin", "lower.entry", "upper", "lower", "__init__"]).problems() == []


def test_a_circle_inside_a_concept_is_none(tmp_path: Path) -> None:
    sources = {"lower__two": "from p.lower import three", "lower__three": "import p.lower.two"}
    folder = package(tmp_path, **sources)
    assert len(Layers(folder, LAYERS).circles()) == 1
    assert Layers(folder, LAYERS, concepts=["lower"]).circles() == []
    assert len(Layers(folder, LAYERS, concepts=["upper"]).circles()) == 1


def test_a_table_counts_the_imports_between_layers(tmp_path: Path) -> None:
    text = Layers(package(tmp_path), LAYERS).table()
    head, *rows, last = [line.split() for line in text.splitlines()]
    assert head == ["imports", "files", *LAYERS]
    assert rows[0] == ["plugin", "1", ".", "1", "1", "."]
    assert rows[2] == ["lower", "2", ".", ".", ".", "1"]
    assert " ".join(last) == "upward imports: 0; circles: 0"


def test_imports_of_the_core_itself_go_down() -> None:
    layers = core()
    assert len(layers.imports) > 300
    assert layers.problems() == []
