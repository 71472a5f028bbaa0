"""A fault in each operator, of whatever kind.

Report: https://github.com/pytorchfi/pytorchfi/issues/65
Command: amanda run -t inject_faults:ops=[*],mode=per_layer,count=1 faults_in_all_kinds_of_layers.py
Right: {site["op"].split("/")[-1] for site in inject_faults["sites"]} >= {"conv2d", "linear", "relu", "softmax"}
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(1, 2, 3), nn.Linear(8, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.convolution(values).relu().flatten(1)
        return self.linear(values).softmax(-1)


Net()(torch.ones(1, 1, 4, 4))
