"""FLOPs of elementwise operators, where they are asked for.

Report: https://github.com/facebookresearch/fvcore/issues/143
Command: amanda run -t flops:include=[elementwise] elementwise.py
Right: flops["total"]["flops"] == 2 * 5
"""

import torch

values = torch.ones(5)
values * values + values
