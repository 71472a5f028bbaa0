"""Steers a small language model: one prompt is answered as if it were another one.

The model is a tiny Llama with random weights, so that nothing has to be downloaded. `capture` takes
the output of the last layer at the last position of two prompts. `steer` adds the difference of the
two while the model reads the second prompt.

    python examples/steering/steer_a_language_model.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import amanda
from amanda_tools.capture import Capture
from amanda_tools.steer import Steer

LAYERS = 4


@dataclass
class Steering:
    """The outcome of steering.

    Attributes:
        layer: The layer that is steered.
        before: Distance of the answers to the two prompts: half the sum of the differences of the
            probabilities of the next token.
        after: The same with the second prompt steered.
    """

    layer: int
    before: float
    after: float


def small_model() -> Any:
    """Return a model with weights that are drawn at random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.3,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def state_of(model: Any, prompt: torch.Tensor, layer: int) -> Any:
    """Return the output of a layer at the last position of a prompt."""
    tool = Capture(modules=[f"model.layers.{layer}"], positions="-1")
    with amanda.apply(tool), torch.no_grad():
        model(prompt)
    return tool.result().sequence(f"model.layers.{layer}").array[0, 0]


def next_token(model: Any, prompt: torch.Tensor, *tools: amanda.Tool) -> torch.Tensor:
    """Return the probabilities of the next token."""
    with amanda.apply(*tools), torch.no_grad():
        logits: torch.Tensor = model(prompt).logits
    return logits[0, -1].softmax(-1)


def steer(layer: int) -> Steering:
    """Steer one prompt towards the answer of another one, in one layer."""
    model = small_model()
    first, second = torch.tensor([[5, 9, 2, 44]]), torch.tensor([[17, 3, 30]])
    vector = state_of(model, first, layer) - state_of(model, second, layer)
    tool = Steer("add", vector=vector, modules=[f"model.layers.{layer}"], positions="-1")
    wanted = next_token(model, first)
    plain, steered = next_token(model, second), next_token(model, second, tool)
    before, after = ((wanted - found).abs().sum().item() / 2 for found in (plain, steered))
    return Steering(layer, before, after)


if __name__ == "__main__":
    for number in range(LAYERS):
        found = steer(number)
        print(f"layer {found.layer}: distance {found.before:.3f}, steered {found.after:.3f}")
