"""The named reasons why Python executes an op's plan, and not the extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda
import amanda_driver_torch
from amanda_driver_torch.execution import execute, native_plans
from amanda_driver_torch.execution.native_plans import REFUSALS
from amanda_driver_torch.torch_internals.extension import native

from .tensors import leaf

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.skipif(native is None, reason="the extension is not built"),
]


def same(*values: Any) -> Any:
    return values[0]


def replaced(context: amanda.OpContext) -> None:
    context.replace_op(same)


def edited(context: amanda.OpContext) -> None:
    context.insert_before_op(same, inputs=[0])


def differentiated(context: amanda.OpContext) -> None:
    with amanda.autodiff_enabled():
        context.insert_before_op(same, inputs=[0])


def with_gradients(context: amanda.OpContext) -> None:
    context.insert_before_backward_op(same, grad_outputs=[0])


def program(op: str) -> Callable[[torch.Tensor], object]:
    return {
        "exp": torch.exp,
        "squeeze_": lambda x: (x * 1).squeeze_(),
    }[op]


@pytest.mark.parametrize(
    ("op", "plan", "name"),
    [
        ("exp", edited, None),
        ("exp", with_gradients, None),
        ("exp", replaced, "replaces"),
        ("exp", differentiated, "differentiates"),
        ("squeeze_", with_gradients, "writes_in_part"),
    ],
)
def test_a_plan_is_refused_by_name(
    op: str, plan: Callable[..., None], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    compiled = native_plans.compiled

    def named(call: Any, taps: Any, nodes: int) -> object:
        facts = native_plans.PlanFacts(call, taps)
        applying = [refusal.name for refusal in REFUSALS if refusal.applies(facts)]
        made = compiled(call, taps, nodes)
        found.append((next(iter(applying), None), made is None))
        return made

    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    monkeypatch.setattr(execute, "compiled", named)
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: plan(context) if context.op_type == op else None)
    x = leaf(1, 3)
    with amanda.apply(tool):
        program(op)(x)
    assert found == [(name, name is not None)]


def test_the_reasons_have_sentences() -> None:
    assert len({refusal.name for refusal in REFUSALS}) == len(REFUSALS)
    assert all(refusal.why.endswith(".") for refusal in REFUSALS)


def test_the_diagnosis_lists_why_python_executes_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    shown = str(amanda_driver_torch.interceptor()).splitlines()
    assert [f"in Python: {refusal.why}" for refusal in REFUSALS] == [
        line for line in shown if line.startswith("in Python")
    ]
