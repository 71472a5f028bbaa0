"""The driver's findings before tools are applied."""

from __future__ import annotations

import pytest

from amanda_driver_tf.plugin import amanda_preflight
from amanda_driver_tf.tensorflow_internals.versions import VERSIONS


def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(VERSIONS), "installed", lambda versions: None)
    (finding,) = amanda_preflight()
    assert (finding.severity, finding.message) == ("error", "TensorFlow is not installed")
    assert "pip install" in (finding.fix or "")
