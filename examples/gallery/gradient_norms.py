"""Gradient norms.

Record the norm of the gradient at each operator's output, also where no module has that output and
no hook can be registered.
"""

import numpy as np

import amanda

WORDS = ("linear", "matmul", "conv2d", "relu", "gelu", "softmax", "layer_norm", "batch_norm")


class GradientNorms(amanda.Tool):
    def __init__(self, words=WORDS):
        super().__init__()
        self.words = words
        self.norms = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] in self.words and op.supports("aligned_gradients"):
            op.insert_before_backward_op(
                self.look, grad_outputs=[0], observe=True, name=op.name, facts=op.facts
            )

    def look(self, gradient, name, facts):
        self.norms[name] = float(np.linalg.norm(facts.values(gradient)))
