"""Activations on disk.

Write a file for each execution, to train a probe or an autoencoder on.
[`capture`](tools/capture.md) chooses rows and positions, and writes one file.
"""

from pathlib import Path

import numpy as np

import amanda


class ActivationCache(amanda.Tool):
    def __init__(self, folder, words=("relu", "gelu", "silu")):
        super().__init__()
        self.folder, self.words = Path(folder), words
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        if op["type"] in self.words:
            op.insert_after_op(self.save, outputs=[0], observe=True, name=op.name, facts=op.facts)

    def save(self, output, name, facts):
        file = self.folder / f"{name.replace('/', '.')}-{len(self.files)}.npy"
        np.save(file, facts.values(output))
        self.files.append(file)
