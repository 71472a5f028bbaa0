"""FLOPs of `scaled_dot_product_attention`.

Report: https://github.com/deepspeedai/DeepSpeed/issues/4723
Command: amanda run -t flops attention.py
Right: flops["total"]["macs"] == 2 * 12 * 64 * 64 * 64
"""

import torch
from torch.nn import functional

query = torch.ones(1, 12, 64, 64)
functional.scaled_dot_product_attention(query, query, query)
