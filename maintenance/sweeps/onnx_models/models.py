"""The models: exports of `transformers` and `keras` from configurations, and graphs made by hand.

Owns how each is made and what it gets. Weights are random, from a seed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import onnx

__all__ = ["MODELS", "Case", "exported", "made"]

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Case:
    """A model and its inputs.

    Attributes:
        model: The model.
        inputs: Its inputs, by name.
        module: The module of PyTorch that it was exported from, and its arguments; or None.
    """

    model: onnx.ModelProto
    inputs: dict[str, Any]
    module: tuple[Any, tuple[Any, ...]] | None = None


def exported(module: Any, *args: Any) -> Case:
    """Return a module of PyTorch as its exporter writes it."""
    import torch

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), args, dynamo=True, verbose=False)
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    names = [one.name for one in model.graph.input]
    return Case(model, {n: a.numpy() for n, a in zip(names, args, strict=True)}, (module, args))


class _First:
    """Calls a model of `transformers`, and returns the first of its outputs."""

    @staticmethod
    def of(model: Any, name: str) -> Any:
        import torch

        class First(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Any) -> Any:
                options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
                return self.model(**{name: x}, return_dict=False, **options)[0]

        return First()


def _transformer(name: str, vocabulary: int = 64, **options: Any) -> Callable[[], Case]:
    """Return the function that exports a model of texts from its configuration."""

    def make() -> Case:
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(vocab_size=vocabulary, **options)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{name}Model")(config)
        if name == "T5":
            model = model.encoder
        return exported(_First.of(model, "input_ids"), torch.randint(0, vocabulary, (2, 7)))

    return make


def _of_images(name: str, size: int, **options: Any) -> Any:
    """Return the function that exports a model of images from its configuration."""

    def make() -> Case:
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**options)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{name}Model")(config)
        return exported(_First.of(model, "pixel_values"), torch.randn(1, 3, size, size))

    return make


def _keras(name: str, size: int, **options: Any) -> Callable[[], Case]:
    """Return the function that exports one of Keras' applications, which runs on PyTorch."""

    def make() -> Case:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import keras
        import torch

        keras.utils.set_random_seed(0)
        shape = (size, size, 3)
        model = getattr(keras.applications, name)(weights=None, input_shape=shape, **options)
        return exported(model, torch.randn(1, *shape))

    return make


def _by_hand(name: str) -> Callable[[], Case]:
    def make() -> Case:
        sys.path.insert(0, str(ROOT / "amanda_driver_onnxruntime"))
        try:
            from tests import models  # type: ignore[attr-defined,unused-ignore]
        finally:
            sys.path.pop(0)
        return Case(models.MODELS[name](), {"x": models.X})

    return make


_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {**_SMALL, "intermediate_size": 32}
_LLAMA = {**_BERT, "num_key_value_heads": 1}
MODELS: Mapping[str, Callable[[], Case]] = {
    "BERT": _transformer("Bert", **_BERT),
    "RoBERTa": _transformer("Roberta", **_BERT),
    "ALBERT": _transformer("Albert", **_BERT, embedding_size=8),
    "ELECTRA": _transformer("Electra", **_BERT, embedding_size=8),
    "DistilBERT": _transformer("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=32),
    "GPT-2": _transformer("GPT2", n_embd=16, n_layer=2, n_head=2),
    "OPT": _transformer("OPT", **_SMALL, ffn_dim=32, word_embed_proj_dim=16),
    "T5 encoder": _transformer("T5", d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
    "Llama": _transformer("Llama", **_LLAMA),
    "Qwen2": _transformer("Qwen2", **_LLAMA),
    "Gemma": _transformer("Gemma", **_LLAMA, head_dim=8),
    "ViT": _of_images("ViT", 32, **_BERT, image_size=32, patch_size=8),
    "ConvNeXt": _of_images("ConvNext", 32, depths=[1, 1, 1, 1], hidden_sizes=[4, 8, 8, 8]),
    "ResNet": _of_images(
        "ResNet", 32, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"
    ),
    "EfficientNet": _keras("EfficientNetB0", 32),
    "MobileNetV2": _keras("MobileNetV2", 32, alpha=0.35),
    "If, Loop and Scan": _by_hand("control flow"),
    "quantized": _by_hand("quantized"),
    "local functions": _by_hand("functions"),
    "own operators of ONNX Runtime": _by_hand("contrib"),
    "sequences and optionals": _by_hand("sequences"),
    "normalized convolutions": _by_hand("normalized convolutions"),
}


def made(name: str) -> Case:
    """Return a model and its inputs."""
    found = MODELS[name]()
    for one, value in found.inputs.items():
        found.inputs[one] = numpy.ascontiguousarray(value)
    return found
