"""Each test of the eager mode runs with both interceptors, where both are there."""

from __future__ import annotations

import pytest

from amanda_driver_tf.interceptor_choice import INTERCEPTORS
from amanda_driver_tf.tensorflow_internals import extension
from amanda_driver_tf.tensorflow_internals.versions import VARIABLE


@pytest.fixture(autouse=True, params=INTERCEPTORS.names)
def interceptor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "native" and extension.native is None:
        pytest.skip(f"no native interceptor: {extension.missing}")
    monkeypatch.setenv(VARIABLE, name)
    return name
