"""Faults of two kinds in one inference.

Report: https://github.com/pytorchfi/pytorchfi/issues/56
Command: amanda run -t weights=inject_faults:site=weight,mode=per_layer -t outputs=inject_faults:model=zero,mode=per_layer,ops=linear two_models_of_faults.py
Right: len(weights["faults"]) == len(outputs["faults"]) == 1
"""

import torch
from torch import nn

nn.Linear(8, 4)(torch.ones(1, 8))
