"""Small models of many architectures, each with an input, for tests that need real programs.

Importing this module imports only torch; other packages are imported when a model is built. Long,
since it is a list.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Feed = Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model and its input.

    Attributes:
        name: Name in test ids.
        build: Returns the model; its weights come from torch's global generator.
        feed: Returns the keyword arguments of one call, from the same generator.
    """

    name: str
    build: Callable[[], nn.Module]
    feed: Feed

    def __str__(self) -> str:
        return self.name


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a model's output with their paths, in mappings, sequences and caches."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{path}[{index}]")
    elif type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__"):
        # Key/value caches and the like.
        for key, item in vars(value).items():
            yield from tensors_of(item, f"{path}.{key}")


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's own loss, or the mean over its floating-point outputs."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [t.square().mean() for _, t in tensors_of(output) if t.requires_grad]
    if not parts:
        parts = [t.square().mean() for _, t in tensors_of(output) if t.is_floating_point()]
    return torch.stack(parts).sum()


def _ids(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, shape)


def _from_transformers(model: str, config: str, **settings: Any) -> nn.Module:
    # Nothing here is downloaded.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    made = getattr(transformers, config)(**settings)
    network = getattr(transformers, model)(made)
    assert isinstance(network, nn.Module)
    return network


# Networks of transformers.


def bert(**settings: Any) -> nn.Module:
    return _from_transformers(
        "BertForMaskedLM",
        "BertConfig",
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        **settings,
    )


def gpt2(**settings: Any) -> nn.Module:
    return _from_transformers(
        "GPT2LMHeadModel",
        "GPT2Config",
        **{
            "vocab_size": 60,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            **settings,
        },
    )


def t5() -> nn.Module:
    return _from_transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=60,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )


def vit() -> nn.Module:
    return _from_transformers(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation="eager",
    )


def resnet() -> nn.Module:
    network = _from_transformers(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
    )
    return nn.Sequential(network, _Logits(), nn.Dropout(0.2))


class _Logits(nn.Module):
    def forward(self, output: Any) -> torch.Tensor:
        logits = output.logits
        assert isinstance(logits, torch.Tensor)
        return logits


def mixtral() -> nn.Module:
    return _from_transformers(
        "MixtralForCausalLM",
        "MixtralConfig",
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
        router_jitter_noise=0.1,
        output_router_logits=True,
    )


def mamba() -> nn.Module:
    return _from_transformers(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=60,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        time_step_rank=4,
        use_mambapy=False,
    )


def whisper() -> nn.Module:
    return _from_transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=60,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        dropout=0.1,
        encoder_layerdrop=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def clip() -> nn.Module:
    layers = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "attention_dropout": 0.1,
    }
    return _from_transformers(
        "CLIPModel",
        "CLIPConfig",
        text_config={
            **layers,
            "vocab_size": 60,
            "max_position_embeddings": 16,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config={**layers, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )


def detr() -> nn.Module:
    import transformers

    backbone: dict[str, Any] = {
        "embedding_size": 8,
        "hidden_sizes": [8, 8],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    }
    return _from_transformers(
        "DetrForObjectDetection",
        "DetrConfig",
        backbone_config=transformers.ResNetConfig(**backbone),
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=16,
        num_queries=4,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        dropout=0.1,
        num_labels=3,
        auxiliary_loss=False,
    )


# Networks of other packages and of this file.


def efficientnet() -> nn.Module:
    """Return EfficientNet-Lite0 as the package builds it, with its dropout and drop-connect."""
    import efficientnet_lite_pytorch

    network = efficientnet_lite_pytorch.EfficientNet.from_name("efficientnet-lite0")
    assert isinstance(network, nn.Module)
    return network


class Recurrent(nn.Module):
    """Embedding, a two-layer bidirectional LSTM with dropout, a GRU cell loop, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.cell = nn.GRUCell(12, 10)
        self.head = nn.Linear(10, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        sequence, _ = self.lstm(self.embed(ids))
        state = sequence.new_zeros(ids.shape[0], 10)
        for item in sequence.unbind(1):
            state = self.cell(item, state)
        logits = self.head(state)
        assert isinstance(logits, torch.Tensor)
        return logits


class Block(nn.Module):
    """Twice convolution, norm and a ReLU in place."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(2, outputs),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        assert isinstance(y, torch.Tensor)
        return y


class UNet(nn.Module):
    """Encoder and decoder with skip connections by `cat` and by `+=`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(3, 8), Block(8, 12), Block(12, 12)
        self.up2, self.up1 = nn.ConvTranspose2d(12, 12, 2, stride=2), nn.Conv2d(12, 8, 1)
        self.join2, self.join1 = Block(24, 12), Block(8, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        functional = nn.functional
        first = self.first(image)
        second = self.second(functional.max_pool2d(first, 2))
        third = self.third(functional.avg_pool2d(second, 2))
        y = self.join2(torch.cat([self.up2(third), second], dim=1))
        y = self.up1(functional.interpolate(y, scale_factor=2, mode="bilinear"))
        y += first
        y = self.join1(y) + first
        # A view written in place, and an index written.
        y[:, :2].mul_(0.5)
        y[:, 2, 0] = 0.0
        logits = self.head(y)
        assert isinstance(logits, torch.Tensor)
        return logits


class Encoder(nn.Module):
    """Embeddings and two of torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, dim_feedforward=24, dropout=0.1, batch_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits = self.head(self.encoder(self.embed(ids), mask=mask))
        assert isinstance(logits, torch.Tensor)
        return logits


class Shared(nn.Module):
    """One value used many times, also by one op: the sums of its gradients depend on their
    order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.layer.weight, self.layer.bias)
        y = torch.addcmul(x, x.exp(), x) + torch.lerp(x, x.sin(), x)
        y = y + torch.einsum("bi,bj,bk->bi", x, x, x) + torch.cat([x, x.tanh()], dim=1)[:, 3:9]
        y = y + nn.functional.dropout(x, 0.1, self.training) * x + self_attention(x)
        return torch.addmm(x, x, self.layer.weight) * y + x


def self_attention(x: torch.Tensor) -> torch.Tensor:
    """Attention of a value to itself."""
    value = x[None, None]
    return nn.functional.scaled_dot_product_attention(value, value, value)[0, 0]


def _text(**more: Any) -> Feed:
    def feed() -> dict[str, Any]:
        ids = _ids(60, 2, 8)
        return {"input_ids": ids, "labels": ids.roll(1, dims=1), **more}

    return feed


def _image(name: str, side: int, channels: int = 3, **more: int) -> Feed:
    def feed() -> dict[str, Any]:
        labels = {key: _ids(top, 2) for key, top in more.items()}
        return {name: torch.randn(2, channels, side, side), **labels}

    return feed


def _objects() -> dict[str, Any]:
    labels = [
        {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.3 + 0.3}
        for _ in range(2)
    ]
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels}


ARCHITECTURES = (
    Architecture("bert", bert, _text()),
    Architecture("gpt2", gpt2, _text(use_cache=False)),
    Architecture("t5", t5, _text()),
    Architecture("vit", vit, _image("pixel_values", 16, labels=2)),
    Architecture("resnet", resnet, _image("input", 32)),
    Architecture("mixtral", mixtral, _text(use_cache=False)),
    Architecture("mamba", mamba, _text(use_cache=False)),
    Architecture(
        "whisper",
        whisper,
        lambda: {"input_features": torch.randn(2, 8, 20), "labels": _ids(60, 2, 6)},
    ),
    Architecture(
        "clip",
        clip,
        lambda: {
            "input_ids": _ids(60, 2, 8),
            "pixel_values": torch.randn(2, 3, 16, 16),
            "return_loss": True,
        },
    ),
    Architecture("detr", detr, _objects),
    Architecture("efficientnet", efficientnet, _image("inputs", 32)),
    Architecture("lstm", Recurrent, lambda: {"ids": _ids(30, 2, 5)}),
    Architecture("unet", UNet, _image("image", 16)),
    Architecture("encoder", Encoder, lambda: {"ids": _ids(30, 2, 6)}),
    Architecture("shared", Shared, lambda: {"x": torch.randn(4, 6, requires_grad=True)}),
)
