"""A fault in the weight of a convolution and in that of a linear layer, drawn from all positions.

Report: https://github.com/pytorchfi/pytorchfi/issues/85
Command: amanda run -t inject_faults:site=weight,mode=per_layer faults_in_weights_of_all_ranks.py
Right: len({fault["op_id"] for fault in inject_faults["faults"]}) == 2
"""

import torch
from torch import nn

nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4))(torch.ones(1, 1, 4, 4))
