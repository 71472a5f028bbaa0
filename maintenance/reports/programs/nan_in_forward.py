"""The operator that makes the first NaN of a forward pass.

Report: https://github.com/pytorch/pytorch/issues/160016
Command: amanda run -t nonfinite nan_in_forward.py
Right: [fault["type"] for fault in nonfinite["faults"]] == ["log"]
"""

import torch

values = torch.tensor([1.0, -1.0])
(values.log() * 2).sum()
