"""Magnitude of keys and values.

Measure keys and values by position, where attention is one operator: means over the batch, the
heads and their width. They show which tokens a smaller cache would keep.
"""

import numpy as np

import amanda


class KVMagnitude(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.keys, self.values = {}, {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] == "attention":
            for position, found in ((1, self.keys), (2, self.values)):
                op.insert_before_op(
                    self.look,
                    inputs=[position],
                    observe=True,
                    name=op.name,
                    facts=op.facts,
                    found=found,
                )

    def look(self, tensor, name, facts, found):
        size = np.abs(facts.values(tensor))  # batch, heads, positions, width
        found[name] = size.mean((0, 1, 3))
