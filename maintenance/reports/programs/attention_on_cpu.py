"""FLOPs of attention on the CPU, where its kernel has another name.

Report: https://github.com/pytorch/pytorch/issues/195460
Command: amanda run -t flops attention_on_cpu.py
Right: flops["total"]["flops"] == 12_582_912
"""

import torch
from torch.nn import functional

query = torch.ones(1, 12, 64, 64, requires_grad=True)
functional.scaled_dot_product_attention(query, query, query)
