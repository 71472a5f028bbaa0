"""Parameters that a program reads.

Count the parameters that operators read. Experts that get no token do not count, and tied
parameters count once. [`summary`](tools/summary.md) lists those that modules hold.
"""

import math

import amanda


class ParametersTouched(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.elements = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op.weights.consumed:  # A view is not read yet.
            for weight in op.weights.values():
                self.elements[weight.key] = math.prod(weight.size)

    def total(self):
        return sum(self.elements.values())
