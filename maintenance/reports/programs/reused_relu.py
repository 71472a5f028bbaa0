"""One `nn.ReLU` for several layers: each call is seen, in its place.

Report: https://github.com/openai/CLIP/pull/239
Command: amanda run -t trace reused_relu.py
Right: [trace["ops"][index]["type"] for index in trace["sequence"]][1:] == ["linear", "relu"] * 2
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.relu(self.first(values))
        return self.relu(self.second(values))


Net()(torch.ones(1, 4))
