"""Making tools by name: unknown, broken, blocked and refused ones, and what to do about each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import amanda
from amanda_core.config import Selecting, Setting, ToolSettings, factories, from_flags
from amanda_core.errors import (
    AmandaError,
    BrokenToolError,
    ConfigError,
    MissingExtraError,
    OptionError,
    SelectionError,
    UnknownToolError,
)
from amanda_core.plugins import discovery

from .conftest import Installed
from .making import Point

if TYPE_CHECKING:
    from fractions import Fraction


class Prune(amanda.Tool):
    """Prunes."""

    def __init__(  # type: ignore[no-untyped-def]
        self,
        sparsity: float,
        norm: str = "l1",
        rounds=3,
        hook: Callable[[], None] = print,
        ratio: Fraction | None = None,
        *values: int,
        tool: str = "",
        **more: int,
    ) -> None:
        if sparsity > 1:
            raise ValueError("sparsity is a fraction")
        if sparsity < 0:
            raise SelectionError("Nothing is left")
        self.given = (sparsity, norm, rounds)


class Plain(amanda.Tool):
    pass


def no_tool() -> int:
    return 7


@pytest.fixture(autouse=True)
def some(installed: Installed) -> None:
    def add(name: str, made: Any, distribution: str = "toy-tools") -> None:
        def load() -> Any:
            if isinstance(made, Exception):
                raise made
            return made

        origin = type("Origin", (), {"name": distribution, "version": "1.5"})()
        installed.points.append(Point(name, load, group=discovery.TOOL_GROUP, dist=origin))

    add("prune", Prune)
    add("plain", Plain)
    add("seven", no_tool)
    add("number", 7)
    add("broken", ImportError("libtools.so is missing"))
    add("double", Plain)
    add("double", Plain, "other-tools")


def made(text: str) -> amanda.Tool:
    (settings,) = from_flags([text]).tools.values()
    return factories.make(settings)


def test_options_reach_the_tool_in_its_types() -> None:
    tool = made("prune:sparsity=0.5,rounds=4")
    assert isinstance(tool, Prune)
    assert tool.given == (0.5, "l1", 4)
    assert type(made("plain")) is Plain


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "prone:x=1",
            UnknownToolError,
            r"No tool 'prone'.*-t.*Did you mean 'prune'\?.*pip install ",
        ),
        (
            "zzz",
            UnknownToolError,
            "What is installed: broken, .*other-tools/double.*pip install amanda-tools",
        ),
        ("prune", OptionError, r"needs the option 'sparsity'.*Give it: -t prune:sparsity=VALUE"),
        ("prune:sparsety=1", OptionError, "no option 'sparsety'.*Did you mean 'sparsity'"),
        ("prune:values=1", OptionError, "no option 'values'.*has: norm, rounds, sparsity"),
        ("prune:more=1", OptionError, "no option 'more'"),
        ("prune:hook=1", OptionError, "'hook' of tool 'prune' can be given in code only"),
        ("prune:ratio=1", OptionError, "'ratio' of tool 'prune' can be given in code only"),
        ("prune:tool=1", OptionError, "'tool' of tool 'prune' can be given in code only"),
        (
            "prune:sparsity=half",
            OptionError,
            "'sparsity' of tool 'prune' must be a number, not 'half'",
        ),
        (
            "prune:sparsity=2",
            OptionError,
            "refuses its options: ValueError: sparsity is a fraction",
        ),
        ("prune:sparsity=-1", SelectionError, "Nothing is left"),
        ("plain:x=1", OptionError, "has no option 'x'.*What it has: nothing"),
        (
            "seven",
            BrokenToolError,
            "'seven' does not make an amanda.Tool but int.*must be a Tool class",
        ),
        ("number", BrokenToolError, "'number' is not a class or function but int"),
        (
            "broken",
            BrokenToolError,
            r"'broken' of toy-tools 1\.5 cannot be loaded: ImportError: libt",
        ),
        ("double", BrokenToolError, "in several distributions: toy-tools 1.5 and other-tools 1.5"),
        ("nowhere.at_all:Tool", BrokenToolError, "ModuleNotFoundError: No module named 'nowhere'"),
        ("json:Tool", BrokenToolError, "has no attribute 'Tool'.*Write module:Class or path"),
        ("json:loads", OptionError, "has no option|needs the option 's'"),
        ("nowhere.py:Tool", UnknownToolError, "There is no file '.*nowhere.py'.*Check the path"),
    ],
)
def test_what_cannot_be_made_is_told(text: str, kind: type[AmandaError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        made(text)
    assert caught.value.where == "-t" or kind is SelectionError
    assert caught.value.fix or "must be" in str(caught.value) or kind is SelectionError


def test_each_tool_has_the_option_whole() -> None:
    assert made("plain").whole is None
    assert made("plain:whole=false").whole is False
    assert made("prune:sparsity=0.5,whole=true").whole is True
    with pytest.raises(OptionError, match="'whole' of tool 'plain' must be"):
        made("plain:whole=some")


def test_the_cause_is_chained() -> None:
    with pytest.raises(BrokenToolError) as caught:
        made("broken")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(OptionError) as refused:
        made("prune:sparsity=2")
    assert isinstance(refused.value.__cause__, ValueError)


def test_a_mistake_in_a_file_names_its_line() -> None:
    settings = ToolSettings("prune", "f.toml:3", options={"sparsity": Setting("x", "f.toml:4")})
    with pytest.raises(OptionError, match="must be a number, not 'x'") as caught:
        factories.make(settings)
    assert caught.value.where == "f.toml:4"


def test_what_a_tool_raises_itself_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Prune, sparsity: float) -> None:
        raise MissingExtraError("This needs that", fix="Run: pip install that")

    monkeypatch.setattr(Prune, "__init__", refuse)
    settings = ToolSettings("prune", "f.toml:3", options={"sparsity": Setting(1, "f.toml:4")})
    with pytest.raises(MissingExtraError, match="needs that") as caught:
        factories.make(settings)
    assert (caught.value.where, caught.value.fix) == (
        "the tool 'prune', f.toml:4",
        "Run: pip install that",
    )


@pytest.mark.parametrize("blocking", ["prune", "*", "a, toy-tools ,b"])
def test_a_blocked_tool_is_not_used(monkeypatch: pytest.MonkeyPatch, blocking: str) -> None:
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", blocking)
    message = "'prune' is blocked by AMANDA_DISABLE_PLUGINS.*Take it out"
    with pytest.raises(UnknownToolError, match=message):
        made("prune:sparsity=1")
    assert "prune" not in discovery.tools()


def test_one_of_two_distributions_can_be_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", "other-tools")
    assert type(made("double")) is Plain


def test_a_tool_of_ones_own_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("import json, amanda\nclass Mine(amanda.Tool):\n    loads = json.loads\n")
    tool = made(f"{path}:Mine")
    assert type(tool).__module__.startswith("amanda_tool_json_")
    assert type(made(f"{path}:Mine")) is type(tool)
    path.with_name("bad.py").write_text("1 / 0")
    with pytest.raises(BrokenToolError, match="ZeroDivisionError") as caught:
        made(f"{path.with_name('bad.py')}:Mine")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_selection_is_the_tools() -> None:
    settings = ToolSettings("plain", "f:1", select=Selecting(ops=("conv*",), where="f:2"))
    assert isinstance(factories.make(settings), Plain)
    wrong = ToolSettings("plain", "f:1", select=Selecting(namespace="a//b", where="f:2"))
    with pytest.raises(AmandaError, match="a//b") as caught:
        factories.make(wrong)
    assert caught.value.where == "f:2"


def test_all_of_it_is_an_error_of_configuration() -> None:
    assert issubclass(OptionError, ConfigError)
    assert issubclass(UnknownToolError, ConfigError)
