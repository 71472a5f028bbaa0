"""FLOPs of an `autograd.Function` are not known, and that is said.

Report: https://github.com/facebookresearch/Mask2Former/issues/117
Command: amanda run -t flops custom_function.py
Right: flops["total"]["unknown"] == 1
"""

import torch


class Product(torch.autograd.Function):
    @staticmethod
    def forward(context, left, right):  # type: ignore[no-untyped-def]
        return left @ right


Product.apply(torch.ones(3, 4, requires_grad=True), torch.ones(4, 5))
