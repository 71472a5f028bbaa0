"""FLOPs of products that are no modules: `@`, `mm`, `matmul`, `baddbmm`.

Report: https://github.com/deepspeedai/DeepSpeed/issues/1467
Command: amanda run -t flops products_outside_modules.py
Right: flops["total"]["macs"] == 5 * (3 * 4 * 5)
"""

import torch

left, right = torch.ones(3, 4), torch.ones(4, 5)
left @ right
torch.mm(left, right)
torch.matmul(left, right)
left.matmul(right)
torch.baddbmm(torch.zeros(1, 3, 5), left[None], right[None])
