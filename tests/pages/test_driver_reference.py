"""docs/guides/driver-reference.md is generated from public names, which drivers must keep to."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import amanda_driver_tf.vocabulary
import amanda_driver_torch.vocabulary
from amanda_core import driver_kit, interface
from amanda_core.interface import AXES, CONTEXT_KEYS, INPUT_ROLES
from amanda_core.testing.checks.public_names import PUBLIC_MODULES, private_uses

pytestmark = pytest.mark.one_interceptor

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/driver-reference.md"
HEAD = """\
# What a driver may call

Authors of drivers import from two places: `amanda_core.interface` is what a driver is, and
`amanda_core.driver_kit` what it may inherit. What is not listed here may change in any release.
What is listed changes with a new [`DRIVER_API`](driver-api.md) only. The [hooks](hooks.md) and the
[errors](../errors.md) have pages of their own.

`amanda_core.testing.checks.public_names.private_uses` finds other names in the sources of a driver.
The tests that `amanda new driver` makes call it.

This page is made of the docstrings, by
`AMANDA_WRITE_SNAPSHOT=1 pytest tests/pages/test_driver_reference.py`.

"""
#: Methods of public classes that only the core calls.
CORES = {
    "Session": {
        "set_tools",
        "set_policy",
        "tools_changed",
        "close",
        "declare",
        "run_analysis",
        "recorded",
    },
}
#: Values that have no docstring of their own.
VALUES = {
    "hookimpl": "Marks a function as a hook.",
    "FRAMEWORK": "A frame of the framework: the innermost one counts if it calls the operator.",
    "OUTSIDE": "The scope of what runs outside of any module.",
    "OWN": "A frame of the driver or the core, which does not count.",
    "QUIET": "A frame that does not count.",
    "STOP": "A frame at which a call site ends.",
    "USER": "A frame of the user's program.",
    "THREAD": "The state of the calling thread, a `Control` and the session among it.",
}
KEYS = """\
## Keys of a context

A driver sets these in `amanda_prepare_context`. Their values are those of
`amanda_core.interface.vocabulary`.

"""


def summary(value: Any) -> str:
    """Return the first sentence of a docstring on one line."""
    text = inspect.cleandoc(inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.!?]) (?=[A-Z])", text)[0].replace("``", "`").replace("|", "\\|")


def table(head: tuple[str, str], rows: Mapping[str, str]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in rows.items())
    yield ""


def arguments(function: Any) -> str:
    """Return the names of the arguments, without annotations, for which a page has no room."""
    parameters = inspect.signature(function).parameters.values()
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    return ", ".join(
        f"{stars.get(p.kind, '')}{p.name}{'' if p.default is p.empty else '=...'}"
        for p in parameters
        if p.name != "self"
    )


def members(kind: type) -> dict[str, str]:
    """Return the public methods, properties and fields that a class itself defines."""
    found = {}
    for name, value in vars(kind).items():
        if name.startswith("_") or name in CORES.get(kind.__name__, ()):
            continue
        if isinstance(value, property):
            found[name] = summary(value)
        elif inspect.isfunction(value):
            found[f"{name}({arguments(value)})"] = summary(value)
        elif isinstance(value, (classmethod, staticmethod)):
            found[f"{name}({arguments(value.__func__)})"] = summary(value.__func__)
    return found


def described(place: Any, names: Iterable[str]) -> Iterator[str]:
    """Describe names of a place, and what belongs to them."""
    rows = {}
    for name in sorted(names):
        value = getattr(place, name)
        if inspect.isfunction(value):
            rows[f"{name}({arguments(value)})"] = summary(value)
        elif inspect.isclass(value):
            rows[name] = summary(value)
            if dataclasses.is_dataclass(value):
                fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(value))
                rows[name] += f" Fields: {fields}."
            if not issubclass(value, (Enum, BaseException)):
                rows |= {f"{name}.{member}": told for member, told in members(value).items()}
        else:
            shown = f"`{value!r}`" if isinstance(value, (int, str)) else type(value).__name__
            rows[name] = VALUES.get(name, shown)
    yield from table(("name", "what it is"), rows)


def parts() -> Iterator[str]:
    """Describe the two places, the second one by the modules that its names come from."""
    for place in (interface, driver_kit):
        meaning = PUBLIC_MODULES[place.__name__]
        yield from (f"## `{place.__name__}`", "", f"{meaning[0].upper()}{meaning[1:]}.", "")
        if place is interface:
            yield from described(place, place.__all__)
            continue
        for module, names in driver_kit.NAMES.items():
            yield from (f"### From `{module}`", "")
            yield from described(place, names)


def page() -> str:
    keys = [
        *table(("key", "value"), CONTEXT_KEYS),
        *table(("role of an input", "meaning"), INPUT_ROLES),
        *table(("letter of a layout", "axis"), AXES),
    ]
    return HEAD + KEYS + "\n".join([*keys, *parts()]).rstrip() + "\n"


def test_the_page_is_that_of_the_sources() -> None:
    if os.environ.get("AMANDA_WRITE_SNAPSHOT"):
        PAGE.write_text(page())
    made = page()
    assert PAGE.read_text() == made, "make it again: set AMANDA_WRITE_SNAPSHOT=1, run this test"


def test_every_public_name_says_what_it_is() -> None:
    silent = re.findall(r"^\| `([^`]+)` \|  \|$", page(), re.MULTILINE)
    assert silent == []


@pytest.mark.parametrize(
    "driver",
    [
        "amanda_driver_jax",
        "amanda_driver_mindspore",
        "amanda_driver_mxnet",
        "amanda_driver_onnxruntime",
        "amanda_driver_tf",
        "amanda_driver_torch",
        "examples/driver_numpy",
    ],
)
def test_drivers_import_public_names_alone(driver: str) -> None:
    # Their underscored names are of frameworks, which tests of their own look for.
    uses = private_uses(ROOT / driver / "src")
    assert [use for use in uses if ": amanda_core" in use] == []


@pytest.mark.parametrize("words", [amanda_driver_tf.vocabulary, amanda_driver_torch.vocabulary])
def test_drivers_know_the_words_of_roles_and_axes(words: Any) -> None:
    roles = {
        role
        for pair in words.ROLES.items()
        for some in pair
        if isinstance(some, tuple)
        for role in some
    }
    assert roles
    assert roles <= set(INPUT_ROLES)
    layouts = "".join([*words.LAYOUTS.values(), *words.WEIGHT_LAYOUTS.values()])
    assert set(layouts) <= set(AXES)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from amanda_core import Site, CoverageGap, hookimpl", []),
        ("from amanda_core.driver_kit import Patches", []),
        ("from amanda_core.interface import OP_TYPES", []),
        ("import amanda_core", []),
        (
            "from amanda_core.driver_kit.patching import Patches",
            ["1: amanda_core.driver_kit.patching.Patches"],
        ),
        ("from amanda_core.engine.store import Store", ["1: amanda_core.engine.store.Store"]),
        ("import amanda_core.engine.store", ["1: amanda_core.engine.store"]),
        ("from amanda_core.driver_kit import Any", ["1: amanda_core.driver_kit.Any"]),
        ("from amanda_core import session", ["1: amanda_core.session"]),
        ("def f(context):\n    return context._session", ["2: …._session"]),
    ],
)
def test_what_is_not_public_is_found(tmp_path: Path, source: str, found: list[str]) -> None:
    path = tmp_path / "driver.py"
    path.write_text(source)
    assert private_uses(tmp_path) == [f"{path}:{use}" for use in found]
