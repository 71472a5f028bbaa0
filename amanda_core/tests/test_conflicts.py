"""Several tools that change one value: their order, and the report of the conflict."""

from __future__ import annotations

import pytest

import amanda
from amanda import Tool
from amanda_core import OpContext
from amanda_core.errors import ReplacementConflictError
from amanda_core.testing.toy import framework as toy

pytestmark = pytest.mark.usefixtures("driver")


class Adding(Tool):
    """Adds to one input of relu."""

    def __init__(self, amount: float) -> None:
        self.amount = amount
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context.op_type == "relu":
            context.insert_before_op(lambda x: toy.Value(x.data + self.amount))


class Doubling(Tool):
    """Doubles the input of relu."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context.op_type == "relu":
            context.insert_before_op(lambda x: toy.Value(x.data * 2))


class Watching(Tool):
    """Looks at the input of relu without changing it."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_before_op(lambda *values: None))


def model() -> float:
    return toy.relu(toy.Value(3.0)).data


def test_order_is_that_of_apply_and_is_reported() -> None:
    with amanda.apply(Adding(1.0), Doubling()) as handle:
        assert handle.conflicts() == []
        assert model() == 8.0
        (found,) = handle.conflicts()
    assert (found.op, found.kind, found.position) == ("relu", "insert_before_op", 0)
    assert found.tools == ("Adding", "Doubling")
    assert "insert_before_op of Adding, then of Doubling, changed value 0" in str(found)
    assert found.source is not None
    assert found.source in str(found)
    with amanda.apply(Doubling(), Adding(1.0)) as handle:
        assert model() == 7.0
        assert [each.tools for each in handle.conflicts()] == [("Doubling", "Adding")]


def test_order_is_that_of_dependencies_first() -> None:
    adding, doubling = Adding(1.0), Doubling()
    adding.depends_on(doubling)
    with amanda.apply(adding, doubling) as handle:
        assert model() == 7.0
        assert [each.tools for each in handle.conflicts()] == [("Doubling", "Adding")]


def test_the_report_stays_after_the_tools_are_removed() -> None:
    handle = amanda.attach(Adding(1.0), Doubling())
    model()
    handle.remove()
    assert [each.tools for each in handle.conflicts()] == [("Adding", "Doubling")]


def test_nested_tools_conflict_with_outer_ones() -> None:
    outer = amanda.attach(Adding(1.0))
    inner = amanda.attach(Doubling())
    model()
    assert len(inner.conflicts()) == len(outer.conflicts()) == 1
    inner.remove()
    outer.remove()
    assert len(inner.conflicts()) == 1


def test_tools_that_change_nothing_are_in_nobodys_way() -> None:
    with amanda.apply(Watching(), Adding(1.0), Watching()) as handle:
        model()
        assert handle.conflicts() == []


def test_one_tool_that_changes_a_value_twice_is_no_conflict() -> None:
    twice = Adding(1.0)
    twice.add_inst_for_op(twice.analyse)
    with amanda.apply(twice) as handle:
        assert model() == 5.0
        assert handle.conflicts() == []


def test_different_values_are_no_conflict() -> None:
    class After(Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(
                lambda context: context.insert_after_op(lambda y: toy.Value(y.data + 1))
            )

    with amanda.apply(Adding(1.0), After()) as handle:
        assert model() == 5.0
        assert handle.conflicts() == []


def test_two_replacements_are_an_error_that_names_both() -> None:
    class Replacing(Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(lambda context: context.replace_op(lambda x: x))

    class Bypassing(Replacing):
        pass

    both = pytest.raises(ReplacementConflictError, match=r"Replacing.* and .*Bypassing")
    with amanda.apply(Replacing(), Bypassing()), both:
        model()
