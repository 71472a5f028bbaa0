"""A trap for the first NaN.

Stop at the first NaN or infinity, with an error that names the operator and its line.
[`nonfinite`](tools/nonfinite.md) goes on, and says where each one comes from.
"""

import numpy as np

import amanda


class NaNTrap(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        place = f"{op.name} at {op.source}"
        op.insert_after_op(self.look, observe=True, place=place, facts=op.facts)

    def look(self, *outputs, place, facts):
        for values in map(facts.values, filter(facts.is_tensor, outputs)):
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise FloatingPointError(f"{place} gives {values[~np.isfinite(values)][0]}")
