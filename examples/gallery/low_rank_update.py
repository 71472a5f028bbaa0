"""A low-rank update of weights.

Compute with `weight + left @ right`, as LoRA does. Gradients are those of that weight. To train the
two factors, make them parameters and insert the routine inside `amanda.autodiff_enabled()`.
"""

import numpy as np

import amanda


class LowRankUpdate(amanda.Tool):
    def __init__(self, rank, scale=0.1, words=("linear", "matmul")):
        super().__init__()
        self.rank, self.scale, self.words = rank, scale, words
        self.random = np.random.default_rng(0)
        self.updates = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        roles = op.get("input_roles", ())
        for position, role in enumerate(roles):
            if op["type"] in self.words and role in ("weight", "right"):
                weight = op.value(position)
                if weight is not None:  # Else it is the product of two activations.
                    update = self.draw(op.name, op.facts.shape(weight)).astype(np.float32)
                    op.insert_before_op(
                        lambda w, update: w + update,
                        inputs=[position],
                        update=op.facts.tensor(update, weight),
                    )

    def draw(self, name, shape):
        left, right = (self.random.standard_normal((size, self.rank)) for size in shape)
        self.updates[name] = self.scale * left @ right.T
        return self.updates[name]
