"""Histograms of activations.

Count each operator's outputs over all executions, in bins of equal width. The outermost bins have
no end.
"""

import numpy as np

import amanda


class Histograms(amanda.Tool):
    def __init__(self, low=-2.0, high=2.0, bins=8, words=("linear", "matmul", "relu", "gelu")):
        super().__init__()
        self.edges = np.linspace(low, high, bins + 1)
        self.words = words
        self.counts = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] in self.words:
            op.insert_after_op(self.look, outputs=[0], observe=True, name=op.name, facts=op.facts)

    def look(self, output, name, facts):
        values = np.clip(facts.values(output), self.edges[0], self.edges[-1])
        counts, _ = np.histogram(values, self.edges)
        self.counts[name] = self.counts.get(name, 0) + counts
