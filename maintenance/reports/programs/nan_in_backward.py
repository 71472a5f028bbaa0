"""A NaN that only the gradient has, although the value is masked.

Report: https://github.com/dftd4/tad-dftd4/issues/21
Command: amanda run -t nonfinite nan_in_backward.py
Right: [(fault["type"], fault["origin"]) for fault in nonfinite["faults"]] == [("sqrt", "gradient")]
"""

import torch

values = torch.zeros(2, requires_grad=True)
torch.where(values > 0, values.sqrt(), torch.zeros(2)).sum().backward()
