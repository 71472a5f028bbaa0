"""Tools that change nothing, and the comparison of a program under them with the plain one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import amanda
from amanda_core.testing.kit.tools import Everywhere, idle

__all__ = ["CHANGING_NOTHING", "outcome", "same", "same_under", "unlike_plain"]


def _nothing(*values: Any) -> None:
    """Return None."""


class _Late(amanda.Tool):
    """Asks for every point of every op after the op has run."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(_nothing)
        context.insert_before_backward_op(_nothing)


#: An empty tool, one with analysis routines at all four points that insert nothing, and routines
#: that return None: at all points, at all but the gradients of forward ops, asked for late.
CHANGING_NOTHING: dict[str, Callable[[], amanda.Tool]] = {
    "empty": amanda.Tool,
    "watching": idle,
    "returning None": lambda: Everywhere(_nothing),
    "returning None, raw": lambda: Everywhere(_nothing, aligned=False),
    "returning None, late": _Late,
}


def outcome(program: Callable[[], Any]) -> Any:
    """Return a program's result, with plain tensors, or the exception that it raises."""
    torch.manual_seed(0)
    try:
        return _plain(program())
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def same_under(tool: str, program: Callable[[], Any], times: int = 3) -> None:
    """Compare a program without tools with several runs under a tool that changes nothing."""
    expected = outcome(program)
    with amanda.apply(CHANGING_NOTHING[tool]()):
        found = [outcome(program) for _ in range(times)]
    for one in found:
        same(one, expected)


def unlike_plain(
    tool: str, programs: Mapping[str, Callable[[], Any]], or_both_raise: bool = False
) -> list[str]:
    """Return the programs that behave differently under a tool that changes nothing.

    Args:
        tool: Name of the tool in `CHANGING_NOTHING`.
        programs: The programs by the names of their cases.
        or_both_raise: Whether any two exceptions count as equal.
    """
    expected = {name: outcome(program) for name, program in programs.items()}
    with amanda.apply(CHANGING_NOTHING[tool]()):
        found = {name: (outcome(run), outcome(run)) for name, run in programs.items()}
    differences = []
    for name, one in expected.items():
        for run in found[name]:
            if or_both_raise and isinstance(one, str) and isinstance(run, str):
                continue
            try:
                same(run, one)
            except AssertionError:
                differences.append(f"{name}: {run}, plain {one}")
    return differences


def same(found: Any, expected: Any) -> None:
    """Compare two outcomes, tensors bit by bit."""
    if isinstance(expected, list):
        assert isinstance(found, list), found
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), found
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == expected


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.layout not in (torch.strided, torch.jagged):
        return value.to_dense()
    if value.is_nested:
        return [part.clone() for part in value.unbind()]
    return value.clone()
