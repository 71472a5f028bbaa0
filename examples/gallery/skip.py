"""Skip operators.

See how much operators matter that keep the shape of their input: activations, normalizations,
dropout. A replacement is differentiated as it is written, so that you can go on training.
"""

import amanda


class Skip(amanda.Tool):
    def __init__(self, *words):
        super().__init__()
        self.words = words
        self.skipped = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] in self.words:
            self.skipped.append(op.name)
            op.replace_op(lambda value: value, inputs=[0])
