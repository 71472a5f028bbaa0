"""The tree of errors: slugs, messages, and docs/errors.md, which explains each."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

from amanda_core import errors
from amanda_core.cli.explain import explanations
from amanda_core.errors import AmandaError, PositionError

from .test_cli import call

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"


def tree(root: type[AmandaError] = AmandaError) -> list[type[AmandaError]]:
    return [root, *(error for child in root.__subclasses__() for error in tree(child))]


ERRORS = [error for error in tree() if error.__module__ == "amanda_core.errors"]


def documented() -> dict[str, str]:
    """Return for each slug its section of the document."""
    parts = re.split(r"^## `([a-z-]+)`.*$", DOCUMENT.read_text(), flags=re.MULTILINE)
    slugs = parts[1::2]
    assert len(slugs) == len(set(slugs))
    return dict(zip(slugs, parts[2::2], strict=True))


def test_the_command_line_has_the_document() -> None:
    assert {slug: text.strip() for slug, text in documented().items()} == explanations()


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("bad-position", "[bad-position]"):
        assert call("explain", given) == 0
        said = capsys.readouterr().out
        assert said.startswith("bad-position\n\n`PositionError`")
        assert "**What to do.**" in said
    assert call("explain", "bad-positio") == 2
    assert "Did you mean 'bad-position'?" in capsys.readouterr().err
    assert call("explain") == 0
    assert capsys.readouterr().out.split() == [*documented()]
    assert call("explain", "bad-tool", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slug"] == "bad-tool"
    assert "ToolError" in found["explanation"]


def test_every_slug_is_explained_and_nothing_else() -> None:
    assert set(documented()) == {error.slug for error in ERRORS}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.slug)
def test_each_section_says_what_why_and_how_to_mend_with_an_example(
    error: type[AmandaError],
) -> None:
    section = documented()[error.slug]
    assert f"`{error.__name__}`" in section
    for part in ("**What happened.**", "**Why.**", "**What to do.**"):
        assert part in section
    assert "```" in section


def test_slugs_are_unique_and_stable_in_form() -> None:
    slugs = [error.slug for error in ERRORS]
    assert len(slugs) == len(set(slugs))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", slug) for slug in slugs)
    assert all("slug" in vars(error) for error in ERRORS)


def test_every_error_is_public_in_its_module_and_documented() -> None:
    assert {error.__name__ for error in ERRORS} <= set(errors.__all__)
    assert all(error.__doc__ for error in ERRORS)


def test_a_message_says_what_where_and_what_to_do() -> None:
    error = AmandaError("It failed.", where="tool T, op 'x'", fix="Do this")
    assert str(error) == "It failed. Where: tool T, op 'x'. Do this. [amanda]"
    assert (error.what, error.where, error.fix) == ("It failed.", "tool T, op 'x'", "Do this")
    assert str(AmandaError("It failed")) == "It failed. [amanda]"


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ToolError", TypeError),
        ("PositionError", IndexError),
        ("UnsupportedError", NotImplementedError),
        ("NamespaceError", ValueError),
        ("MissingToolsError", ImportError),
        ("ReentryError", RuntimeError),
        ("ThreadError", RuntimeError),
    ],
)
def test_errors_are_also_what_python_calls_them(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, builtin)
    assert issubclass(error, AmandaError)


def test_errors_can_be_pickled() -> None:
    error = PositionError("No such input", where="tool T", fix="Count from 0")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is PositionError
    assert str(again) == str(error)
