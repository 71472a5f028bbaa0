"""Saliency.

Multiply the output of each activation function by its gradient, and sum over the examples. At first
order and with the opposite sign, this is the change of the loss if the unit were zero.
"""

import amanda


class Saliency(amanda.Tool):
    def __init__(self, words=("relu", "gelu", "silu")):
        super().__init__()
        self.words = words
        self.pending, self.salient = {}, {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] in self.words and op.supports("aligned_gradients"):
            named = {"observe": True, "name": op.name, "facts": op.facts}
            op.insert_after_op(self.look, outputs=[0], **named)
            op.insert_before_backward_op(self.look, grad_outputs=[0], **named)

    def look(self, tensor, name, facts):  # In a graph, either of the two may come first.
        values = facts.values(tensor).copy()
        if name not in self.pending:
            self.pending[name] = values
        else:
            product = self.pending.pop(name) * values
            self.salient[name] = product.reshape(-1, product.shape[-1]).sum(0)
