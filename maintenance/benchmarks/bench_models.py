"""Programs that are measured: models with random weights, in a forward pass and a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

__all__ = ["SUBJECTS", "Chain", "Program", "Subject", "small_program"]


class Program:
    """One run: a forward pass without gradients, or a whole training step.

    Args:
        model: Returns a tensor, or an object with tensors under the names in `outputs`.
        batch: Input of the model.
        training: Whether a run is a forward pass, a backward pass and a step of the optimizer.
    """

    outputs = ("last_hidden_state", "pooler_output")

    def __init__(self, model: torch.nn.Module, batch: torch.Tensor, training: bool) -> None:
        self.model = model.train(training)
        self.batch = batch
        self.training = training
        # A step does all its work but changes nothing, so that every run computes the same.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if training else None

    def __call__(self) -> None:
        """Run once."""
        if self.training:
            self.learn(self.model(self.batch))
        else:
            with torch.no_grad():
                self.model(self.batch)

    def learn(self, output: Any) -> None:
        """Do the rest of a training step after the forward pass."""
        assert self.optimizer is not None
        tensors = (
            [output]
            if isinstance(output, torch.Tensor)
            else [getattr(output, name) for name in self.outputs]
        )
        loss = torch.stack([tensor.square().mean() for tensor in tensors]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Attributes:
        name: Name in the results.
        counted: Operator type that the counting tools count.
        make: Returns the model and its input.
        quick: Whether it is measured in the quick mode as well.
    """

    name: str
    counted: str
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor]]
    quick: bool

    def program(self, training: bool) -> Program:
        """Return the program of one run, with the same weights each time."""
        torch.manual_seed(0)
        return Program(*self.make(), training)


def _narrow_bert() -> tuple[torch.nn.Module, torch.Tensor]:
    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=1000,
        max_position_embeddings=64,
    )
    return BertModel(config), torch.arange(8)[None]


def _bert_base() -> tuple[torch.nn.Module, torch.Tensor]:
    return BertModel(BertConfig()), torch.arange(128)[None]


def _resnet(side: int) -> Callable[[], tuple[torch.nn.Module, torch.Tensor]]:
    # The default configuration of transformers is that of ResNet-50.
    return lambda: (ResNetModel(ResNetConfig()), torch.randn(1, 3, side, side))


#: The launch-bound worst case first: 380 operators on tensors of a few hundred numbers.
SUBJECTS = [
    Subject("narrow BERT (12 layers, width 64, 8 tokens)", "linear", _narrow_bert, True),
    Subject("ResNet-50 at 64", "conv2d", _resnet(64), True),
    Subject("BERT-base at 128", "linear", _bert_base, False),
    Subject("ResNet-50 at 224", "conv2d", _resnet(224), False),
]


def small_program(training: bool) -> Program:
    """Return a network of five small operators, for measurements with very many runs."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)]
    return Program(torch.nn.Sequential(*layers), torch.randn(4, 16), training)


class Chain(torch.nn.Module):
    """A chain of operators, each with an identity of its own, in modules of a hundred."""

    class Part(torch.nn.Module):
        """Consecutive operators."""

        def __init__(self, length: int) -> None:
            super().__init__()
            self.length = length

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Run the operators."""
            for _ in range(self.length):
                x = torch.neg(x)
            return x

    def __init__(self, length: int) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(self.Part(100) for _ in range(length // 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the parts."""
        for part in self.parts:
            x = part(x)
        return x
