"""No function keeps the results of another test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from amanda_driver_tf.threads import STATE


@pytest.fixture(autouse=True)
def _no_results_left() -> Iterator[None]:
    yield
    assert STATE.saved_results is None
    assert STATE.passed_results is None
