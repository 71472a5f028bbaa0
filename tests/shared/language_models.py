"""Tiny language models of transformers, their layers, and what hooks see of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "LanguageModel", "edited_by_hooks", "generate", "seen_by_hooks"]

VOCABULARY, WIDTH = 60, 16


@dataclass(frozen=True)
class LanguageModel:
    """How to build one model.

    Attributes:
        name: Name in test ids.
        build: Makes the model.
        layers: Paths of its layers, those of the decoder.
        has_encoder: Whether it has an encoder.
        gain: Factor of the weights, such that the next token depends on the layers.
    """

    name: str
    build: Callable[[], Any]
    layers: tuple[str, ...]
    has_encoder: bool = False
    gain: float = 4.0

    def __str__(self) -> str:
        return self.name

    def made(self) -> Any:
        """Return the model, with the same weights each time."""
        torch.manual_seed(0)
        model = self.build().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(self.gain)
        return model


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_positions": 640}
    return GPT2LMHeadModel(GPT2Config(**size, n_layer=2, n_head=2))


_SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZE))


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**_SIZE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    )


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    size: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 4, "d_ff": 24}
    rest: dict[str, Any] = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**size, **rest, num_layers=2, num_heads=4))


MODELS = (
    LanguageModel("gpt2", _gpt2, ("transformer.h.0", "transformer.h.1")),
    LanguageModel("llama", _llama, ("model.layers.0", "model.layers.1")),
    LanguageModel("mixtral", _mixtral, ("model.layers.0", "model.layers.1")),
    LanguageModel("t5", _t5, ("decoder.block.0", "decoder.block.1"), True, 0.5),
)


def generate(model: Any, prompt: torch.Tensor, tokens: int, **options: Any) -> Any:
    """Return what `generate` gives; it ends after so many tokens and not before."""
    mask = options.pop("attention_mask", torch.ones_like(prompt))
    return model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
        eos_token_id=VOCABULARY - 1,
        return_dict_in_generate=True,
        **{"do_sample": False, **options},
    )


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


@contextmanager
def seen_by_hooks(model: nn.Module, paths: tuple[str, ...]) -> Iterator[dict[str, torch.Tensor]]:
    """Keep the first tensor that each module returns, by a hook."""
    seen: dict[str, torch.Tensor] = {}

    def keep(path: str) -> Any:
        return lambda module, inputs, output: seen.__setitem__(path, _first(output).detach())

    handles = [model.get_submodule(p).register_forward_hook(keep(p)) for p in paths]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def edited_by_hooks(
    model: nn.Module, paths: tuple[str, ...], edit: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[list[str]]:
    """Change the first tensor that each module returns, by a hook; yields what ran, in order."""
    ran: list[str] = []

    def hook(path: str) -> Any:
        def change(module: nn.Module, inputs: Any, output: Any) -> Any:
            ran.append(path)
            new = edit(_first(output))
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return change

    handles = [model.get_submodule(p).register_forward_hook(hook(p)) for p in paths]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()
