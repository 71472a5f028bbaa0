"""The self-test of a release that was not tried passes here, and says what is wrong elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from amanda_core.driver_kit import OpContext
from amanda_driver_jax import attachment, self_test

pytestmark = pytest.mark.slow


def test_it_passes_here() -> None:
    self_test.main()


def test_operators_that_are_not_seen_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "is_user_call", lambda _: False)
    with pytest.raises(SystemExit, match="operators were not seen: add"):
        self_test.main()


def test_backward_operators_that_are_not_seen_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amanda_driver_jax.execution.arrays.is_differentiable", lambda _: False)
    with pytest.raises(SystemExit, match="backward operators were not seen"):
        self_test.main()


def test_results_that_watching_changes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amanda_core.driver_kit.OpContext.insert_after_op", _editing)
    with pytest.raises(SystemExit, match="watching changed a result"):
        self_test.main()


_insert = OpContext.insert_after_op


def _editing(self: OpContext, routine: Any, **options: Any) -> Any:
    return _insert(self, lambda value: value * 2, outputs=[0])
