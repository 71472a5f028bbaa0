"""The table [tool.amanda]: each mistake is reported with file, line and what would be right."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from amanda_core.config import (
    Config,
    Layer,
    document,
    from_environment,
    from_file,
    from_flags,
    load,
)
from amanda_core.config.settings import Selecting
from amanda_core.errors import ConfigError


def write(folder: Path, text: str, name: str = "pyproject.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def loaded(folder: Path, *flags: str, output: str | None = None, **environment: str) -> Config:
    return load(folder, from_flags(flags, output), environment=environment)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "[tool.amanda]\noutputs = 'x'",
            2,
            r"Unknown key 'outputs'.*Did you mean 'output'\? What it",
        ),
        (
            "[tool.amanda]\nzzz = 1",
            2,
            "Unknown key 'zzz' .*What it has: disable_plugins, drivers, output, select, tools",
        ),
        ("[tool.amanda]\n\n\n'a b'.c = 1", 4, "Unknown key 'a b'"),
        ("tool.amanda = 3", 1, "tool.amanda must be a table, not 3"),
        ("[tool.amanda]\noutput = 3", 2, "tool.amanda.output must be a text, not 3"),
        ("[tool.amanda]\noutput = ''", 2, "tool.amanda.output must be a text, not ''"),
        ('[tool.amanda]\noutput = "a\\u0000b"', 2, "must be a text"),
        ("[tool.amanda]\ndrivers = 3", 2, "must be a text or a list of texts, not 3"),
        ("[tool.amanda]\ndrivers = [\n'a',\n1]", 2, "must be a text or a list of texts"),
        (
            "[tool.amanda]\ndrivers = ['a', 'a']",
            2,
            "'a' is twice in tool.amanda.drivers. .*Name it once",
        ),
        ("[tool.amanda]\ntools = ['trace']", 2, "tool.amanda.tools must be a table"),
        ("[tool.amanda.tools]\ntrace = 1", 2, "tool.amanda.tools.trace must be a table, not 1"),
        ("[tool.amanda.tools.'../x']", 1, r"'\.\./x' cannot be the name of a tool.*at most 64"),
        (f"[tool.amanda.tools.{'x' * 70}]", 1, "cannot be the name of a tool"),
        ("[tool.amanda.tools.trace]\nenable = 1", 2, "trace.enable must be true or false, not 1"),
        ("[tool.amanda.tools.x]\ntool = 3", 2, "x.tool must be a text, not 3"),
        (
            "[tool.amanda.tools.x]\ntool = 'os:system'",
            2,
            "'os:system' is not the name of an installed tool.*-t module:Class",
        ),
        ("[tool.amanda.tools.x]\ntool = './x.py:T'", 2, "is not the name of an installed tool"),
        (
            "[tool.amanda.tools.x]\nselect = {op = 'a'}",
            2,
            r"Unknown key 'op' in \[tool.amanda.tools.x.select\].*Did you mean 'ops'",
        ),
        (
            "[tool.amanda.select]\nops = []\nmodules = 1",
            3,
            "modules must be a text or a list of texts",
        ),
        ("[tool.amanda.select]\nnamespace = 1", 2, "namespace must be a text"),
        ("[tool.amanda.select]\nsteps = -1", 2, "-1 is not a range of steps.*Write '10:20'"),
        ("[tool.amanda.select]\nsteps = '1:2:0'", 2, "not a range of steps"),
        ("[tool.amanda.select]\nsteps = [1, true]", 2, "not a range of steps"),
        ("[tool.amanda.select]\nsteps = '9999999999999999999'", 2, "not a range of steps"),
    ],
)
def test_each_mistake_in_a_file_names_file_and_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        from_file(tmp_path)
    assert caught.value.where == f"{path}:{line}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[tool.amanda\n", r"Not valid TOML: .*line 1"),
        (b"[tool.amanda]\noutput='a'\noutput='b'\n", r"Not valid TOML: .*overwrite.*line 3"),
        (b"[tool.amanda]\n[tool.amanda]\n", "Not valid TOML: .*twice.*line 2"),
        (b"a = '\xff'\n", r"Not UTF-8, as TOML must be.*pyproject.toml:1"),
        (b"x = 1\n" * 200_000, "Larger than 1048576 bytes"),
        (b"a=" + b"[" * 100_000, "Not valid TOML"),
        (b"\x00", "Not valid TOML"),
    ],
)
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        from_file(tmp_path)
    assert str(path) in caught.value.where


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Not a file.*Name a TOML file"):
        from_file(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="Not a file"):
        from_file(tmp_path, tmp_path / "absent.toml")
    os.mkfifo(tmp_path / "pyproject.toml")
    with pytest.raises(ConfigError, match="Not a file"):
        from_file(tmp_path)


def test_the_nearest_file_with_the_table_is_read(tmp_path: Path) -> None:
    write(tmp_path, "[tool.amanda]\noutput = 'far'")
    write(tmp_path, "[tool.ruff]\nline-length = 100", "near/pyproject.toml")
    (tmp_path / "near/deep").mkdir()
    assert loaded(tmp_path / "near/deep").output == tmp_path / "far"
    write(tmp_path, "[tool.amanda]\noutput = 'here'", "near/pyproject.toml")
    assert loaded(tmp_path / "near/deep").output == tmp_path / "near/here"
    assert load(tmp_path, Layer(), use_file=False, environment={}).output is None
    write(tmp_path, "[tool.amanda]\noutput = 'asked'", "other.toml")
    asked = load(tmp_path, Layer(), file=tmp_path / "other.toml", environment={})
    assert asked.output == tmp_path / "asked"


def test_an_error_in_a_file_without_the_table_is_told_too(tmp_path: Path) -> None:
    write(tmp_path, "[tool.amanda]\noutput = 'far'")
    write(tmp_path, "[tool", "near/pyproject.toml")
    with pytest.raises(ConfigError, match=r"Not valid TOML.*ignore it with --no-config"):
        from_file(tmp_path / "near")


def test_the_line_of_a_key_however_it_is_written(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '''
        # tool.amanda.output = "x"
        text = """
        [tool.amanda]
        output = 3
        """
        [tool]
        amanda.tools.a = { b = [
            1,
            2,
        ], c = 3 }
        amanda.tools."d.e".f = 4
        [tool.amanda.tools.g]
        h = 5
        ''',
    )
    found = document.Document(path)
    lines = {
        ("tool", "amanda", "tools", "a"): 8,
        ("tool", "amanda", "tools", "a", "c"): 8,
        ("tool", "amanda", "tools", "d.e", "f"): 12,
        ("tool", "amanda", "tools", "g", "h"): 14,
        ("text",): 3,
    }
    for keys, line in lines.items():
        assert found.where(*keys) == f"{path}:{line}"
    assert found.where("absent") == str(path)


def test_precedence_key_by_key(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        [tool.amanda]
        output = "file"
        drivers = "a"
        select = { modules = "net.*", steps = 3 }
        tools.one = { x = 1, y = 1, z = 1, select = { ops = "conv*" } }
        tools.two.enable = false
        tools.three = {}
        """,
    )
    config = loaded(tmp_path)
    assert [tool.name for tool in config.tools] == ["one", "three"]
    assert config.output == tmp_path / "file"
    assert config.drivers == ("a",)
    one = config.tools[0]
    assert one.select == Selecting(("conv*",), ("net.*",), None, (3,), None, one.select.where)

    environment = {"AMANDA_TOOLS": "one:y=2,z=2;two", "AMANDA_OUTPUT": "/env"}
    config = loaded(tmp_path, **environment)
    assert [tool.name for tool in config.tools] == ["one", "two"]
    assert config.output == Path("/env")

    flags = Layer(tools=from_flags(["one:z=3"]).tools, select=Selecting(("relu",), where="--ops"))
    config = load(tmp_path, flags, environment=environment)
    (one,) = config.tools
    assert {name: setting.value for name, setting in one.options.items()} == {
        "x": 1,
        "y": "2",
        "z": "3",
    }
    assert one.select == Selecting(("relu",), ("net.*",), None, (3,), None, "--ops")
    assert loaded(tmp_path, output="flag").output == Path.cwd() / "flag"


def test_another_tool_of_the_same_name_takes_nothing_from_a_lower_layer(tmp_path: Path) -> None:
    write(tmp_path, "[tool.amanda.tools.one]\nx = 1")
    (one,) = loaded(tmp_path, "one=other:y=2").tools
    assert (one.reference, list(one.options)) == ("other", ["y"])
    (one,) = loaded(tmp_path, "one=one:y=2").tools
    assert (one.reference, list(one.options)) == ("one", ["x", "y"])


def test_names_that_differ_in_case_alone_would_be_one_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'trace' and 'Trace' differ only in case.*rename one"):
        loaded(tmp_path, "trace", "Trace=trace")


@pytest.mark.parametrize("home", ["~nobody-of-this-name/x", "~/x"])
def test_a_home_folder(tmp_path: Path, home: str) -> None:
    config = loaded(tmp_path, output=home)
    assert config.output is not None
    assert config.output.is_absolute()
    write(tmp_path, f"[tool.amanda]\noutput = {home!r}")
    assert loaded(tmp_path).output is not None


@pytest.mark.parametrize(
    ("environment", "where", "message"),
    [
        ({"AMANDA_TOOLS": "a;a"}, "AMANDA_TOOLS", "'a' is named twice.*another name: a2=a"),
        ({"AMANDA_TOOLS": "a:x=[1"}, "AMANDA_TOOLS", r"\] is missing in .*Close it"),
        ({"AMANDA_OUTPUT": " "}, "AMANDA_OUTPUT", "' ' is not a folder"),
        ({"AMANDA_DRIVERS": ","}, "AMANDA_DRIVERS", "does not name a driver, or names one"),
        ({"AMANDA_DRIVERS": "a,a"}, "AMANDA_DRIVERS", "does not name a driver, or names one twice"),
    ],
)
def test_each_mistake_in_a_variable_names_it(
    environment: dict[str, str], where: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_environment(environment)
    assert caught.value.where == where


def test_empty_variables_say_nothing() -> None:
    empty = {"AMANDA_TOOLS": "", "AMANDA_OUTPUT": "", "AMANDA_DRIVERS": ""}
    assert from_environment(empty) == Layer()


# Nothing but ConfigError comes out, whatever a file holds.

KEYS = st.sampled_from(
    [
        *("tool", "amanda", "tools", "output", "drivers", "disable_plugins", "select", "ops"),
        *("steps", "enable", "a", "'.'"),
    ]
)
VALUES = st.recursive(
    st.one_of(
        st.integers(-3, 10).map(str),
        st.sampled_from(["true", "'x'", "''", "1.5", "nan", "1979-05-27", "'1:2'", '"\\u0000"']),
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | st.lists(st.tuples(KEYS, inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{key} = {value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=6,
)
LINES = st.one_of(
    st.lists(KEYS, min_size=1, max_size=5).map(lambda keys: f"[{'.'.join(keys)}]"),
    st.tuples(st.lists(KEYS, min_size=1, max_size=3), VALUES).map(
        lambda pair: f"{'.'.join(pair[0])} = {pair[1]}"
    ),
)
FILES = st.one_of(
    st.lists(LINES, max_size=6).map(lambda lines: "\n".join(["[tool.amanda]", *lines]).encode()),
    st.binary(max_size=200),
    st.text(max_size=100).map(lambda text: f"[tool.amanda]\n{text}".encode(errors="replace")),
)


@settings(max_examples=300)
@given(content=FILES)
def test_whatever_a_file_holds_is_a_configuration_or_an_error_of_ours(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_bytes(content)
    config = None
    try:
        config = loaded(tmp_path)
    except ConfigError as caught:
        told = caught
    if config is None:
        assert str(path) in told.where
        assert len(str(told)) < 2000 + len(str(path))
    else:
        assert all(re.fullmatch(r"[\w.-]+", tool.name) for tool in config.tools)
