"""What other libraries put between a program and PyTorch is named by the driver's preflight."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda_core import Finding
from amanda_driver_torch.plugin import amanda_preflight


class Library:
    """An object of another library."""

    def watch(self, *values: Any) -> None: ...


class Rewriting(TorchFunctionMode):
    __module__ = "other"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    __module__ = "other"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _nothing_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers adds it to all modules for as long as the process lives.
    monkeypatch.delattr(nn.Module, "smart_apply", raising=False)


# This file's package is the driver's.
Library.watch.__module__ = "other"


def found() -> list[tuple[str, str]]:
    # Others are of the installation.
    signs = ("is set", "is entered", "is replaced")
    findings: list[Finding] = [
        finding for finding in amanda_preflight() if any(sign in finding.message for sign in signs)
    ]
    assert all(finding.fix for finding in findings)
    return [(finding.severity, finding.message) for finding in findings]


def test_nothing_is_found_where_nothing_is() -> None:
    assert found() == []
    with amanda.apply(amanda.Tool()):
        torch.relu(torch.ones(1))
        assert found() == []  # The driver's own functions are not reported.


@pytest.mark.parametrize(
    ("register", "what"),
    [
        (nn.modules.module.register_module_forward_pre_hook, "forward pre-hook"),
        (nn.modules.module.register_module_forward_hook, "forward hook"),
        (nn.modules.module.register_module_full_backward_pre_hook, "backward pre-hook"),
        (nn.modules.module.register_module_full_backward_hook, "backward hook"),
    ],
)
def test_global_hooks_of_modules(register: Any, what: str) -> None:
    handle = register(functools.partial(Library().watch, 1))
    try:
        message = f"A global {what} of modules is set: other.Library.watch"
        assert found() == [("warning", message)]
    finally:
        handle.remove()
    assert found() == []


def test_modes() -> None:
    with Rewriting(), Dispatching():  # type: ignore[no-untyped-call]
        assert found() == [
            ("warning", "A torch function mode is entered: other.Rewriting"),
            ("warning", "A torch dispatch mode is entered: other.Dispatching"),
        ]
    assert found() == []


def test_replaced_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "linear", Library.watch)
    monkeypatch.setattr(nn.Module, "_call_impl", Library.watch)
    assert found() == [
        ("info", "torch.nn.functional.linear is replaced by other.Library.watch"),
        ("info", "Module._call_impl is replaced by other.Library.watch"),
    ]
