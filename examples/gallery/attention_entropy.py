"""Entropy of attention.

Measure the mean entropy of a softmax, in nats. It is 0 if each query looks at one position only,
and the logarithm of the number of positions if it looks at all alike. The weights inside a fused
attention operator are not seen.
"""

import numpy as np

import amanda


class AttentionEntropy(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.entropies = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] == "softmax":
            op.insert_after_op(self.look, outputs=[0], observe=True, name=op.name, facts=op.facts)

    def look(self, output, name, facts):
        weights = facts.values(output)
        entropy = -(weights * np.log(np.maximum(weights, 1e-30))).sum(-1)
        self.entropies.setdefault(name, []).append(float(entropy.mean()))
