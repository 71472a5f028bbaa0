"""Prunes a small mixture of experts, and shows which experts the prompts have reached.

The model is a tiny Mixtral with random weights, so that nothing has to be downloaded. Each expert
of a layer is a matrix of one parameter. `prune` prunes each of them by itself, keeps the masks by
the names of the parameters, and names the experts to which no token was sent.

    python examples/pruning/prune_a_mixture_of_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import amanda
from amanda_tools.prune import Prune, PruneResult


@dataclass
class Pruning:
    """The outcome of pruning.

    Attributes:
        result: Which weights were pruned, and which were not reached.
        distance: How far the answer is from that of the dense model: half the sum of the
            differences of the probabilities of the next token.
        loaded: The same for another copy of the model, with the same masks.
    """

    result: PruneResult
    distance: float
    loaded: float


def small_model() -> Any:
    """Return a model with weights that are drawn at random."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    model: Any = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # Experts are run one by one.
    return model.eval()


def next_token(model: Any, prompt: torch.Tensor, *tools: amanda.Tool) -> torch.Tensor:
    """Return the probabilities of the next token."""
    with amanda.apply(*tools), torch.no_grad():
        logits: torch.Tensor = model(prompt).logits
    return logits[0, -1].softmax(-1)


def prune(sparsity: float) -> Pruning:
    """Prune the model, and a copy of it by the same masks."""
    prompt = torch.tensor([[5, 9, 2]])
    model = small_model()
    dense = next_token(model, prompt)
    tool, again = Prune(sparsity), Prune(sparsity)
    pruned = next_token(model, prompt, tool)
    again.masks.load(tool.masks.saved())
    loaded = next_token(small_model(), prompt, again)
    distances = [(dense - found).abs().sum().item() / 2 for found in (pruned, loaded)]
    return Pruning(tool.result(), *distances)


if __name__ == "__main__":
    for share in (0.25, 0.5, 0.75):
        found = prune(share)
        print(f"{share:.0%} pruned: distance {found.distance:.3f}")
    for weight in found.result.unreached:
        print(f"not reached: {weight.elements} elements of {weight.name}, {weight.reason}")
