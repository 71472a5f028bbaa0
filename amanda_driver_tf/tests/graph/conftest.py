"""Each test leaves the methods of sessions and graphs as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def original_methods() -> dict[str, Any]:
    """Return the methods before any tool is applied."""
    return _methods()


@pytest.fixture(autouse=True)
def _methods_restored(original_methods: dict[str, Any]) -> Iterator[None]:
    yield
    found = _methods()
    assert {name for name in found if found[name] is not original_methods.get(name)} == set()


@pytest.fixture
def old_control_flow() -> Iterator[None]:
    """Use the loops and branches of TensorFlow 1, made of switches and merges."""
    from .loop_programs import control_flow

    with control_flow(False):
        yield


def _methods() -> dict[str, Any]:
    import tensorflow as tf  # Here, since its import takes ten seconds: see the folder above.
    from tensorflow.python.client import session

    owners = (session.BaseSession, session.Session, tf.Graph)
    return {name: value for owner in owners for name, value in vars(owner).items()}
