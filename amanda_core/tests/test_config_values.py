"""Text of flags and variables, converted by the annotations of a tool's parameters."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, strategies as st

from amanda_core.config.convert import MismatchError, convert, expected
from amanda_core.config.settings import Setting
from amanda_core.config.text import NAME, parse_list, parse_steps, parse_tool, parse_tools, split
from amanda_core.errors import ConfigError


class Norm(enum.Enum):
    L1 = "one"
    L2 = 2


@pytest.mark.parametrize(
    ("text", "name", "reference", "options"),
    [
        ("trace", "trace", "trace", {}),
        ("trace:", "trace", "trace", {}),
        ("prune:sparsity=0.5", "prune", "prune", {"sparsity": "0.5"}),
        ("p=prune:sparsity=0.5,b=c", "p", "prune", {"sparsity": "0.5", "b": "c"}),
        ("prune:layers=[1,2],x=", "prune", "prune", {"layers": "[1,2]", "x": ""}),
        ("prune:x='a,b',y=c=d", "prune", "prune", {"x": "'a,b'", "y": "c=d"}),
        ("prune: x = it's , y = 2", "prune", "prune", {"x": "it's", "y": "2"}),
        ("pack.mod:Class", "Class", "pack.mod:Class", {}),
        ("pack.mod:Class:x=1", "Class", "pack.mod:Class", {"x": "1"}),
        ("./a b/t.py:Outer.make:x=1", "Outer.make", "./a b/t.py:Outer.make", {"x": "1"}),
        ("own=../t.py:T", "own", "../t.py:T", {}),
    ],
)
def test_how_a_tool_is_written(
    text: str, name: str, reference: str, options: dict[str, str]
) -> None:
    found = parse_tool(text, "-t")
    assert (found.name, found.reference) == (name, reference)
    assert {key: setting.value for key, setting in found.options.items()} == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not the name of a tool. Where: -t. Write -t TOOL"),
        ("a b", "'a b' is not the name of a tool"),
        ("../x", "'../x' is not the name of a tool"),
        ("x=:a=1", "'' is not the name of a tool"),
        ("a/b=trace", "'a/b' cannot be the name of a tool"),
        ("..=trace", "'..' cannot be the name of a tool"),
        ("x" * 80, "is not the name of a tool"),
        ("prune:0.5", "'prune:0.5' does not name a tool"),
        ("mod:Class:5", "'5' is not of the form key=value"),
        ("prune:a=1,b", "'b' is not of the form key=value"),
        ("prune:a b=1", "'a b=1' is not of the form key=value"),
        ("prune:a=1,a=2", "The option 'a' is given twice"),
        ("prune:a=[1", "']' is missing in"),
        ("prune:a='1", '"\'" is missing in'),
    ],
)
def test_how_a_tool_is_not_written(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tool(text, "-t")
    assert message.replace("']' is", "] is").replace('"\'" is', "' is") in str(caught.value)
    assert caught.value.where == "-t"


def test_a_tool_named_twice_needs_a_second_name() -> None:
    with pytest.raises(ConfigError, match=r"'prune' is named twice.*prune2=prune"):
        parse_tools(["prune:a=1", "prune:a=2"], "-t")
    assert list(parse_tools(["prune:a=1", "prune2=prune:a=2"], "-t")) == ["prune", "prune2"]


@given(st.text(alphabet="ab=:,;[](){}'\"./~\0\n -", max_size=30))
def test_any_text_is_a_tool_of_a_harmless_name_or_an_error_of_ours(text: str) -> None:
    try:
        found = parse_tools(split(text, ";", "-t"), "-t")
    except ConfigError:
        return
    for name in found:
        assert NAME.fullmatch(name)
        assert name not in (".", "..")
        assert not set(name) & set("/\\\0\n ")


@given(st.one_of(st.text(alphabet="0123456789:-", max_size=25), st.lists(st.integers())))
def test_any_steps_are_steps_or_an_error_of_ours(value: Any) -> None:
    try:
        steps = parse_steps(value, "--steps")
    except ConfigError:
        return
    assert isinstance(steps, (slice, tuple))


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (bool, "Yes", True),
        (bool, "0", False),
        (int, "-3", -3),
        (float, "1e-3", 0.001),
        (float, "3", 3.0),
        (str, "0.5", "0.5"),
        (str, "' a,b'", " a,b"),
        (str, "", ""),
        (Path, "x/y", Path("x/y")),
        (Literal["l1", 2], "2", 2),
        (Literal["l1", 2], "l1", "l1"),
        (Norm, "L2", Norm.L2),
        (Norm, "one", Norm.L1),
        (Norm, "2", Norm.L2),
        (Optional[int], "none", None),  # noqa: UP045  The older form is another object.
        (int | None, "5", 5),
        (int | str, "5", 5),
        (int | str, "five", "five"),
        (str | None, "none", None),
        (list[int], "[1, 2]", [1, 2]),
        (list[int], "7", [7]),
        (list[int], "[0,10:13]", [0, 10, 11, 12]),
        (list[int] | None, "2:4", [2, 3]),
        (list[str], "2:4", ["2:4"]),
        (list[str], "[a,'b,c']", ["a", "b,c"]),
        (list[str], "[]", []),
        (tuple[float, ...], "[1]", (1.0,)),
        (Sequence[str], "a", ["a"]),
        (list, "[1,x]", [1, "x"]),
        (Any, "true", True),
        (Any, "1.5", 1.5),
        (Any, "'1'", "1"),
    ],
)
def test_values_written_as_text(annotation: Any, text: str, value: Any) -> None:
    found = convert(Setting(text, "-t", text=True), annotation)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "written", "value"),
    [
        (bool, True, True),
        (int, 3, 3),
        (float, 3, 3.0),
        (str, "0.5", "0.5"),
        (Path, "x", Path("/base/x")),
        (Path, "/x", Path("/x")),
        (Norm, "L1", Norm.L1),
        (Norm, 2, Norm.L2),
        (list[int], [1, 2], [1, 2]),
        (list[int], "2:4", [2, 3]),
        (list[int], [1, "2:4"], [1, 2, 3]),
        (list[list[int]], [[1], []], [[1], []]),
        (Any, {"a": 1}, {"a": 1}),
    ],
)
def test_values_written_in_toml(annotation: Any, written: Any, value: Any) -> None:
    found = convert(Setting(written, "f:1", base=Path("/base")), annotation)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "words"),
    [
        (bool, "maybe", "true or false"),
        (int, "1.5", "a whole number"),
        (int, "1" * 5000, "a whole number"),
        (float, "half", "a number"),
        (Path, "", "a path"),
        (Literal["l1", "l2"], "l3", "one of 'l1', 'l2'"),
        (Norm, "L3", "one of 'L1', 'L2'"),
        (int | None, "x", "a whole number or none"),
        (list[int], "[1,x]", "a whole number"),
        (list[int], "4:4", "a list of values, each a whole number, or ranges such as 10:20"),
        (list[int], "0:9999999", "a list of values, each a whole number, or ranges such as 10:20"),
        (dict[str, int], "x", ""),
    ],
)
def test_text_of_another_type(annotation: Any, text: str, words: str) -> None:
    with pytest.raises(MismatchError) as caught:
        convert(Setting(text, "-t", text=True), annotation)
    assert str(caught.value) == words
    assert words in expected(annotation)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, True),
        (int, 1.0),
        (int, "1"),
        (float, "1"),
        (bool, 1),
        (bool, "true"),
        (str, 1),
        (list[int], 1),
        (list[int], ["1"]),
        (list[int], "1"),
        (Literal[1], True),
        (Path, 1),
        (Path, "a\0"),
        (type(None), "none"),
    ],
)
def test_toml_of_another_type_is_not_converted(annotation: Any, value: Any) -> None:
    with pytest.raises(MismatchError):
        convert(Setting(value, "f:1"), annotation)


@given(st.text(max_size=20))
def test_lists_of_any_text(text: str) -> None:
    try:
        assert all(isinstance(part, str) for part in parse_list(text, "-t"))
    except ConfigError:
        assert text.startswith("[")
