"""FLOPs of an `einsum`.

Report: https://github.com/Lyken17/pytorch-OpCounter/issues/174
Command: amanda run -t flops einsum_product.py
Right: flops["total"]["macs"] == 2 * 3 * 4 * 5
"""

import torch

torch.einsum("bij,bjk->bik", torch.ones(2, 3, 4), torch.ones(2, 4, 5))
