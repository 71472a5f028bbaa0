"""Dead ReLUs.

Find the units that were zero for every example so far. [`sparsity`](tools/sparsity.md) measures the
zeros of all operators.
"""

import amanda


class DeadReLUs(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.dead = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] == "relu":
            op.insert_after_op(self.look, outputs=[0], observe=True, name=op.name, facts=op.facts)

    def look(self, output, name, facts):
        values = facts.values(output)
        zero = (values == 0).reshape(-1, values.shape[-1]).all(0)
        self.dead[name] = zero & self.dead.get(name, True)

    def count(self):
        return {name: int(dead.sum()) for name, dead in self.dead.items()}
