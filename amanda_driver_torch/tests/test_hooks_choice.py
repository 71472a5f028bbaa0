"""Who registers hooks on backward nodes: the extension in graphs of tried releases, else Python."""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import amanda
import amanda_driver_torch
from amanda_core.errors import ConfigError
from amanda_driver_torch import plugin
from amanda_driver_torch.interception import native_interceptor
from amanda_driver_torch.torch_internals import extension
from amanda_driver_torch.torch_internals.internals import BUILD
from amanda_driver_torch.torch_internals.versions import (
    HOOKS_TRIED,
    HOOKS_VARIABLE,
    VARIABLE,
    are_hooks_tried,
    why_hooked_by_python,
)

from .repeated_executions import TIMES
from .tensors import leaf

native = extension.native
pytestmark = [
    pytest.mark.skipif(native is None, reason=extension.missing),
    pytest.mark.one_interceptor,
]
tried_here = pytest.mark.skipif(not are_hooks_tried(BUILD), reason="this build was not tried")


@pytest.fixture(autouse=True)
def _natively(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "native")
    monkeypatch.delenv(HOOKS_VARIABLE, raising=False)
    yield
    native.forget_graphs()  # The next session finds them again.


def test_the_releases_are_those_that_the_matrix_has_run() -> None:
    results = Path(__file__).parents[2] / "maintenance/matrix/results.json"
    rows = json.loads(results.read_text("utf-8"))
    run = {
        row["version"]
        for row in rows
        if row["framework"] == "torch" and row["interceptor"] == "native" and not row["failures"]
    }
    assert run == set(HOOKS_TRIED)


@pytest.mark.parametrize(
    ("build", "tried"),
    [
        ("2.13.0", True),
        ("2.13.0+cpu", True),
        ("2.13.0+cpu.cxx11.abi", True),
        ("2.11.0+cu130", True),
        ("2.12.1+rocm7.1", True),
        ("2.13.1", False),
        ("2.13", False),
        ("2.16.0", False),
        ("2.15.0.dev20261101+cpu", False),
        ("2.15.0rc1", False),
        ("2.15.0a0+git1234567", False),
        ("2.15.0+git1234567", False),
    ],
)
def test_only_builds_of_those_releases_count(build: str, tried: bool) -> None:
    assert are_hooks_tried(build) == tried
    assert bool(why_hooked_by_python(build)) != tried


def gradients() -> list[float]:
    """Return what a tool sees of the gradients of an operator in several executions."""
    x, seen = leaf(2), list[float]()
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_backward_op(lambda grad: seen.append(float(grad[0])))
    )
    with amanda.apply(tool):
        for _ in range(TIMES):
            torch.relu(x).backward(torch.full((2,), 3.0))
    return seen


@tried_here
def test_the_extension_places_hooks_in_graphs_of_a_tried_release() -> None:
    assert gradients() == [3.0] * TIMES
    assert native.knows_graphs()
    assert "the extension places them" in amanda_driver_torch.interceptor().hooks
    messages = [finding.message for finding in plugin.amanda_preflight()]
    assert "Hooks on backward nodes are registered by the extension, in PyTorch's graphs." in (
        messages
    )


@pytest.fixture(params=["variable", "another build"])
def why(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return why Python registers all hooks."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the layout of an unknown build is not looked for")

    if are_hooks_tried(BUILD):  # A session before may have found the layout.
        gradients()
    monkeypatch.setattr(native, "learn_graphs", refuse)
    if request.param == "variable":
        monkeypatch.setenv(HOOKS_VARIABLE, "0")
        return f"{HOOKS_VARIABLE}=0 is set"
    monkeypatch.setattr(native_interceptor, "BUILD", "2.15.0.dev20261101")
    return "graphs of PyTorch 2.15.0.dev20261101 were not tried"


def test_python_registers_all_hooks_otherwise(why: str) -> None:
    assert gradients() == [3.0] * TIMES
    assert not native.knows_graphs()
    diagnosis = amanda_driver_torch.interceptor()
    assert f"Python registers them ({why}" in diagnosis.hooks
    assert f"hooks: {diagnosis.hooks}" in str(diagnosis)


def test_graphs_that_are_laid_out_in_another_way_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native.forget_graphs()
    monkeypatch.setattr(native_interceptor, "BUILD", HOOKS_TRIED[-1])
    monkeypatch.setattr(native, "learn_graphs", lambda *_: False)
    assert gradients() == [3.0] * TIMES
    assert "not laid out in memory as expected" in amanda_driver_torch.interceptor().hooks


def test_another_value_of_the_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOOKS_VARIABLE, "never")
    with pytest.raises(ConfigError, match=f"{HOOKS_VARIABLE} must be 0 or 1, but is 'never'"):
        gradients()
    errors = [finding for finding in plugin.amanda_preflight() if finding.severity == "error"]
    assert HOOKS_VARIABLE in errors[0].message


def test_amanda_doctor_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOOKS_VARIABLE, "0")
    messages = [finding.message for finding in plugin.amanda_preflight()]
    assert f"Hooks on backward nodes are registered by Python: {HOOKS_VARIABLE}=0 is set." in (
        messages
    )


def test_with_the_other_interceptor_python_registers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "function_mode")
    assert "as always with the function_mode" in amanda_driver_torch.interceptor().hooks
    assert not [f for f in plugin.amanda_preflight() if "Hooks on backward nodes" in f.message]
