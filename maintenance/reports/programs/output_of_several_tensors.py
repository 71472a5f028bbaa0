"""The output of a module that returns several tensors.

Report: https://github.com/meta-pytorch/captum/issues/1215
Command: amanda run -t capture:modules=layer output_of_several_tensors.py
Right: values("capture")[0].tolist() == [[3.0, 3.0]]
"""

import torch
from torch import nn


class Layer(nn.Module):
    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        return values + 2, None, values * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden, _, other = self.layer(values)
        return hidden + other


Net()(torch.ones(1, 2))
