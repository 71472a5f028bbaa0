"""Namespaces match whole parts, and versions match by dotted prefix; `*` is any part."""

from __future__ import annotations

import pytest

from amanda_core.errors import NamespaceError
from amanda_core.interface.namespace import Namespace, matches

HAVE = "flow/2.21.0/graph"


@pytest.mark.parametrize(
    "pattern",
    [
        "flow",
        "flow/",
        "flow/2",
        "flow/2.21",
        "flow/2.21.0",
        "flow/2.21/graph",
        "flow/2.21.0/graph",
        "*",
        "*/*/graph",
        "*/2.21",
        "flow/*/graph",
        "*/*/*",
    ],
)
def test_patterns_that_match(pattern: str) -> None:
    assert matches(pattern, HAVE)


@pytest.mark.parametrize(
    "pattern",
    [
        "flo",
        "flow2",
        "Flow",
        "flow/2.2",
        "flow/21",
        "flow/2.21.0.1",
        "flow/2.21.",
        "flow/2.21.0/eager",
        "flow/2.21.0/gr",
        "flow/graph",
        "*/*/eager",
        "flo*",
        "flow/2.*",
    ],
)
def test_patterns_that_do_not_match(pattern: str) -> None:
    assert not matches(pattern, HAVE)


def test_a_prefix_of_a_framework_or_mode_is_not_a_prefix() -> None:
    # Only the version is a dotted number.
    assert not matches("flow", "flow.lite/1/graph")
    assert not matches("flow/1/graph", "flow/1/graph.v2")
    assert matches("flow/1", "flow/1.5/graph")


@pytest.mark.parametrize("pattern", ["", "/", "flow//graph", "flow/1/graph/more"])
def test_malformed_patterns_are_errors(pattern: str) -> None:
    with pytest.raises(NamespaceError, match="not a namespace pattern"):
        matches(pattern, HAVE)


def test_a_namespace_has_three_parts() -> None:
    parsed = Namespace.parse(HAVE)
    assert (parsed.framework, parsed.version, parsed.mode) == ("flow", "2.21.0", "graph")
    assert str(parsed) == HAVE
    for wrong in ("", "flow", "flow/2.21.0", "flow//graph", "flow/1/graph/more", "/1/graph"):
        with pytest.raises(NamespaceError, match="framework/version/mode"):
            Namespace.parse(wrong)
