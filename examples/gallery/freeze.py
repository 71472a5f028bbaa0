"""Freeze the first layers.

Give the weights of the first layers gradients of zeros. The gradients of their inputs are as
before.
"""

import amanda


class Freeze(amanda.Tool):
    def __init__(self, layers, words=("linear", "matmul", "conv2d")):
        super().__init__()
        self.layers, self.words = layers, words
        self.frozen = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        for position, role in enumerate(op.get("input_roles", ())):
            if op["type"] in self.words and role in ("weight", "right", "bias"):
                if role != "bias" and len(self.frozen) < self.layers:
                    self.frozen.append(op.name)
                if op.name in self.frozen:
                    op.insert_after_backward_op(lambda g: g * 0, grad_inputs=[position])
