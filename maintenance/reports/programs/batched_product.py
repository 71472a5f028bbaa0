"""FLOPs of `bmm`, which attention calls.

Report: https://github.com/facebookresearch/fvcore/issues/49
Command: amanda run -t flops batched_product.py
Right: flops["total"]["macs"] == 2 * 3 * 4 * 5
"""

import torch

torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
