"""Noise on weights.

Add normal noise that is a share of each weight and drawn again at each execution, as in analog
hardware, or to ask how flat a minimum is.
"""

import numpy as np

import amanda


class WeightNoise(amanda.Tool):
    def __init__(self, share=0.01, seed=0, words=("linear", "matmul", "conv2d")):
        super().__init__()
        self.share, self.words = share, words
        self.seed, self.places = seed, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        for position, role in enumerate(op.get("input_roles", ())):
            if op["type"] in self.words and role in ("weight", "right"):
                # In a graph, operators may run in another order each time.
                random = np.random.default_rng([self.seed, self.places])
                op.insert_before_op(
                    self.add_noise, inputs=[position], facts=op.facts, random=random
                )
                self.places += 1

    def add_noise(self, weight, facts, random):
        values = facts.values(weight)
        noise = 1 + self.share * random.standard_normal(values.shape)
        return facts.tensor((values * noise).astype(values.dtype), weight)
