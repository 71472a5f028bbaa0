"""A module of which only `forward` is called is captured.

Report: https://github.com/numenta/nupic.torch/pull/51
Command: amanda run -t capture:modules=inner forward_called_directly.py
Right: len(values("capture")) == 1
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(values)


Net()(torch.ones(1, 4))
