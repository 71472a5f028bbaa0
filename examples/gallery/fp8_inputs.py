"""Inputs in 8 bits of floating point.

Round the inputs of products to e4m3, and compute with real numbers. Each tensor is scaled so that
its largest value is the largest of the format. [`quantize`](tools/quantize.md) has other formats,
ranges and granularities.
"""

import numpy as np

import amanda


def to_e4m3(values):
    """Return the nearest numbers with four significant bits, no finer than 2**-9, at most 448."""
    _, exponent = np.frexp(values)
    unit = np.ldexp(1.0, np.maximum(exponent, -5) - 4)
    return np.clip(np.round(values / unit) * unit, -448, 448)


class FP8Inputs(amanda.Tool):
    def __init__(self, words=("linear", "matmul", "conv2d")):
        super().__init__()
        self.words = words
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] in self.words:
            op.insert_before_op(self.cast, inputs=[0], facts=op.facts)

    def cast(self, tensor, facts):
        values = facts.values(tensor)
        scale = np.abs(values).max() / 448 or 1.0
        return facts.tensor((to_e4m3(values / scale) * scale).astype(values.dtype), tensor)
