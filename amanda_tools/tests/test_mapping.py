"""Mapping tool: rules by namespace, before and after the analysis of its dependents."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from typing import Any

import importlib_metadata
import pytest

import amanda
from amanda_core import CoverageGap, DriverInfo, IPoint, OpContext, Session, Site, hookimpl
from amanda_core.errors import MappingRuleError, NamespaceError
from amanda_core.plugins import discovery
from amanda_tools.kit import mapping
from amanda_tools.kit.mapping import MappingTool


class Quiet:
    """A driver that intercepts nothing and is its own attachment; the tests open contexts
    themselves.
    """

    @hookimpl
    def amanda_driver_info(self) -> DriverInfo:
        return DriverInfo("flow", ("flow",), ("flow/*/*",), frozenset({"gradients"}), api=3)

    @hookimpl
    def amanda_attach(self, session: Session) -> Quiet:
        return self

    def detach(self) -> None: ...

    def coverage(self) -> Sequence[CoverageGap]:
        return []


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib_metadata, "entry_points", lambda *, group: [])
    monkeypatch.setattr(discovery, "registered", None)
    discovery.register(Quiet(), "flow")


GRAPH, EAGER, LITE = "flow/2.21.0/graph", "flow/2.21.0/eager", "flow.lite/1.0/graph"


def run(handle: amanda.Handle, namespace: str = GRAPH, name: str = "conv") -> OpContext:
    """Execute an op once, as a driver would."""
    assert handle.session is not None
    context = handle.session.open(Site((namespace, name), "Conv2D", namespace, name), None, [1.0])
    context.trigger_callback(IPoint.BEFORE_FORWARD)
    context.fill(outputs=[2.0])
    context.trigger_callback(IPoint.AFTER_FORWARD)
    context.release()
    return context


class Logged:
    """A rule or routine that logs its name."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def __call__(self, context: OpContext) -> None:
        self.log.append(self.name)


def dependent(routine: Any, *rules: Sequence[Any], require_outputs: bool = False) -> amanda.Tool:
    tool = amanda.Tool()
    tool.depends_on(MappingTool(rules=list(rules)))
    tool.add_inst_for_op(routine, require_outputs=require_outputs)
    return tool


def test_a_rule_runs_before_the_analysis_of_the_dependents() -> None:
    def rule(context: OpContext) -> None:
        context["type"] = context.op_type.lower()

    seen: list[Any] = []
    with amanda.apply(dependent(lambda c: seen.append(c["type"]), ["flow", rule])) as handle:
        run(handle)
    assert seen == ["conv2d"]


@pytest.mark.parametrize("require_outputs", [False, True])
def test_rules_stand_before_and_after_analysis_at_each_point(require_outputs: bool) -> None:
    log: list[str] = []
    before, after, analysis = (Logged(log, name) for name in ("before", "after", "analysis"))
    tool = dependent(analysis, ["flow", before, after], require_outputs=require_outputs)
    with amanda.apply(tool) as handle:
        for _ in range(2):
            run(handle)
    assert log == ["before", "analysis", "after"]


def test_rules_nest_like_tools() -> None:
    log: list[str] = []
    rules: list[list[Any]] = [
        ["flow", Logged(log, f"{n} before"), Logged(log, f"{n} after")] for n in (1, 2)
    ]
    with amanda.apply(dependent(Logged(log, "analysis"), *rules)) as handle:
        run(handle)
    assert log == ["1 before", "2 before", "analysis", "2 after", "1 after"]


def test_rules_of_two_mappings_nest_in_tool_order() -> None:
    log: list[str] = []
    outer, inner = (
        MappingTool(rules=[["flow", Logged(log, f"{n} before"), Logged(log, f"{n} after")]])
        for n in ("outer", "inner")
    )
    inner.depends_on(outer)
    tool = dependent(Logged(log, "analysis"))
    tool.depends_on(inner)
    with amanda.apply(tool) as handle:
        run(handle)
    assert log == ["outer before", "inner before", "analysis", "inner after", "outer after"]


def test_either_function_may_be_left_out() -> None:
    log: list[str] = []
    rules: list[list[Any]] = [
        ["flow", None, Logged(log, "after")],
        ["flow", Logged(log, "before"), None],
    ]
    with amanda.apply(dependent(Logged(log, "analysis"), *rules)) as handle:
        run(handle)
    assert log == ["before", "analysis", "after"]


@pytest.mark.parametrize(
    ("pattern", "namespaces"),
    [
        ("flow", [GRAPH, EAGER]),
        ("flow.lite", [LITE]),
        ("flow/2.21", [GRAPH, EAGER]),
        ("flow/2.2", []),
        ("flow/2.21.0/graph", [GRAPH]),
        ("flow/*/eager", [EAGER]),
        ("*/*/graph", [GRAPH, LITE]),
        ("*", [GRAPH, EAGER, LITE]),
        ("fl", []),
        ("flow/2.21.0/gr", []),
    ],
)
def test_rules_hold_in_the_namespaces_that_their_pattern_matches(
    pattern: str, namespaces: list[str]
) -> None:
    seen: list[str] = []
    rule: list[Any] = [pattern, lambda c: seen.append(c.namespace)]
    with amanda.apply(dependent(lambda c: None, rule)) as handle:
        for namespace in (GRAPH, EAGER, LITE):
            run(handle, namespace)
    assert seen == namespaces


def test_one_tool_in_two_namespaces_through_rules() -> None:
    def graph_type(context: OpContext) -> None:
        context["type"] = "conv2d" if context.op_type == "Conv2D" else None

    def eager_type(context: OpContext) -> None:
        context["type"] = "convolution"

    seen: list[Any] = []
    tool = dependent(
        lambda c: seen.append(c["type"]), ["*/*/graph", graph_type], ["*/*/eager", eager_type]
    )
    with amanda.apply(tool) as handle:
        run(handle, GRAPH)
        run(handle, EAGER)
    assert seen == ["conv2d", "convolution"]


def test_a_mapping_alone_transforms_contexts_at_every_point() -> None:
    # No tool analyses, so the rules themselves are what was applied.
    log: list[str] = []
    with amanda.apply(MappingTool(rules=[["flow", Logged(log, "rule")]])) as handle:
        for _ in range(2):
            run(handle)
    assert log == ["rule"] * 2  # Before and after the op, each once.


def test_a_rule_may_be_added_later() -> None:
    log: list[str] = []
    tool = MappingTool()
    with amanda.apply(tool) as handle:
        run(handle)
        tool.add_rule("flow", Logged(log, "before"), Logged(log, "after"))
        run(handle)
    assert log == ["before", "after"] * 2


def test_rules_write_locally_into_backward_contexts() -> None:
    def rule(context: OpContext) -> None:
        if context.is_backward():
            context["backward_type"] = "conv2d_backward"

    tool = dependent(lambda c: None, ["flow", rule])
    tool.add_inst_for_op(lambda c: None, backward=True)
    with amanda.apply(tool) as handle:
        forward = run(handle)
        assert handle.session is not None
        site = Site("grad", "Conv2DGrad", GRAPH, "grad")
        backward = handle.session.open(site, None, forward=forward, backward=True)
        backward.trigger_callback(IPoint.BEFORE_BACKWARD)
        assert backward["backward_type"] == "conv2d_backward"
        assert forward["backward_type"] is None


def test_an_exception_of_a_rule_names_it() -> None:
    def rule(context: OpContext) -> None:
        raise KeyError("layout")

    with (
        amanda.apply(dependent(lambda c: None, ["flow", rule])) as handle,
        pytest.raises(KeyError, match="layout") as caught,
    ):
        run(handle)
    assert "tool MappingTool" in caught.value.__notes__[0]
    assert "op 'conv'" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "wrong",
    [
        "flow",
        [],
        ["flow"],
        ["flow", None, None, None],
        ["flow", "rule"],
        ["flow", len, "rule"],
        [len, "flow"],
        [None, len],
        None,
        {"flow": len},
    ],
)
def test_something_else_than_a_rule_is_refused(wrong: Any) -> None:
    with pytest.raises(MappingRuleError, match=r"\[namespace, before\]"):
        MappingTool(rules=[wrong])
    with pytest.raises(TypeError):
        MappingTool(rules=[wrong])


@pytest.mark.parametrize("pattern", ["", "flow//graph", "flow/1/graph/more"])
def test_a_malformed_namespace_is_refused_when_the_tool_is_made(pattern: str) -> None:
    with pytest.raises(NamespaceError):
        MappingTool(rules=[[pattern, len]])
    with pytest.raises(NamespaceError):
        MappingTool().add_rule(pattern, None)


def test_the_papers_path_leads_to_the_same_class() -> None:
    assert amanda.tools.mapping.MappingTool is MappingTool


def test_the_examples_of_the_documentation_run() -> None:
    result = doctest.testmod(mapping)
    assert result.attempted > 0
    assert result.failed == 0
