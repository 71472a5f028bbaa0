"""A weight that `functional.linear` gets is pruned.

Report: https://github.com/VainF/Torch-Pruning/issues/47
Command: amanda run -t prune:sparsity=0.5 weight_without_module.py
Right: (prune["achieved"], prune["effective_macs"]) == (0.5, prune["macs"] // 2)
"""

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mine = nn.Parameter(torch.randn(16, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(values, self.mine)


Net()(torch.ones(1, 8))
