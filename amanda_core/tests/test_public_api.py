"""The public names and signatures as committed in public_api.txt, and those of the paper."""

from __future__ import annotations

import dataclasses
import inspect
import os
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda_core import OpContext, Tool
from amanda_core.interface import driver, hookspecs
from amanda_core.results import tables as results

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def signature(function: Any) -> str:
    """Return a signature with its annotations as written.

    `str(inspect.signature)` differs between versions of Python.
    """
    parts: list[str] = []
    starred = False
    found = inspect.signature(function)
    for parameter in found.parameters.values():
        kind = parameter.kind
        if kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = "*" if kind is parameter.VAR_POSITIONAL else ""
        stars = "**" if kind is parameter.VAR_KEYWORD else stars
        annotated = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}{annotated}{default}")
    returns = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    return f"({', '.join(parts)}){returns}"


def describe(name: str, value: Any) -> list[str]:
    """Return a line for a name, and one for each public member of a class."""
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        lines = [f"class {name}({bases})"]
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
                lines.append(f"    {field.name}: {field.type}{default}")
        elif issubclass(value, Enum):
            lines += [f"    {member.name} = {member.value!r}" for member in value]
        for member, found in sorted(vars(value).items()):
            if member.startswith("_"):
                continue
            if isinstance(found, property):
                lines.append(f"    {member}: property")
            elif isinstance(found, (classmethod, staticmethod)):
                lines.append(f"    {member}{signature(found.__func__)}")
            elif inspect.isfunction(found):
                lines.append(f"    {member}{signature(found)}")
        return lines
    if inspect.isfunction(value):
        return [f"def {name}{signature(value)}"]
    if inspect.ismodule(value):
        return [f"module {name}"]
    if name == "__version__":
        return [name]
    return [f"{name} = {value!r}" if isinstance(value, int) else f"{name}: {type(value).__name__}"]


def public_api() -> str:
    lines: list[str] = []
    hooks = {name: found for name, found in vars(hookspecs).items() if name.startswith("amanda_")}
    for title, names in (
        ("amanda", {name: getattr(amanda, name) for name in amanda.__all__}),
        (
            "amanda_core.interface.hookspecs",
            {n: getattr(hookspecs, n) for n in hookspecs.__all__} | hooks,
        ),
        ("amanda_core.interface.driver", {name: getattr(driver, name) for name in driver.__all__}),
        # What authors of tools use; the rest of it is the command line's.
        ("amanda_core.results", {n: getattr(results, n) for n in ("HasResult", "Result", "Table")}),
    ):
        lines += [f"[{title}]", *(x for n in sorted(names) for x in describe(n, names[n])), ""]
    return "\n".join(lines)


def test_public_names_and_signatures_are_as_committed() -> None:
    """After an intended change, run with AMANDA_WRITE_SNAPSHOT=1 and commit the file."""
    if os.environ.get("AMANDA_WRITE_SNAPSHOT"):
        SNAPSHOT.write_text(public_api())
    assert public_api() == SNAPSHOT.read_text()


# The paper's listings, written down from the paper.


def parameters(function: Any) -> dict[str, Any]:
    return {
        name: p.default
        for name, p in inspect.signature(function).parameters.items()
        if name != "self"
    }


def test_listing_2_registration() -> None:
    assert parameters(Tool.add_inst_for_op) == {
        "callback": inspect.Parameter.empty,
        "backward": False,
        "require_outputs": False,
    }
    (tools,) = inspect.signature(Tool().depends_on).parameters.values()
    assert tools.kind is tools.VAR_POSITIONAL


@pytest.mark.parametrize(
    ("method", "second"),
    [
        ("insert_before_op", "inputs"),
        ("insert_after_op", "outputs"),
        ("insert_before_backward_op", "grad_out"),
        ("insert_after_backward_op", "grad_in"),
        ("replace_op", "inputs"),
        ("replace_backward_op", "grad_out"),
    ],
)
def test_listing_3_instrumentation(method: str, second: str) -> None:
    found = inspect.signature(getattr(OpContext, method))
    names = list(found.parameters)
    assert names[:2] == ["self", "func"]
    assert second in names
    assert found.parameters[names[2]].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert found.parameters[names[-1]].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize(
    "method",
    [
        "get_op",
        "get_op_id",
        "get_inputs",
        "get_outputs",
        "get_backward_op",
        "get_backward_op_id",
        "get_grad_outputs",
        "get_grad_inputs",
        "is_forward",
        "is_backward",
    ],
)
def test_listing_4_inspection(method: str) -> None:
    assert parameters(getattr(OpContext, method)) == {}
    assert issubclass(OpContext, dict)


def test_listing_5_control() -> None:
    tools, *added = inspect.signature(amanda.apply).parameters.values()
    assert tools.kind is tools.VAR_POSITIONAL
    # What the paper does not have is by keyword, and may be left out.
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added)
    for name in ("disabled", "enabled", "cache_disabled", "cache_enabled"):
        assert parameters(getattr(amanda, name)) == {}


def test_the_tutorials_spelling_of_apply() -> None:
    assert amanda.tool.apply is amanda.apply
    assert amanda.tool.Tool is amanda.Tool
    assert amanda.OpContext is OpContext


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'amanda' has no attribute 'Nope'"):
        getattr(amanda, "Nope")  # noqa: B009  mypy must not see it.
    assert not hasattr(amanda, "Nope")


def test_every_public_name_exists_and_is_documented() -> None:
    for module in (amanda, hookspecs, driver):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                assert found.__doc__, name
