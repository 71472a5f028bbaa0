"""Fingerprints of Keras' training, eager and in graphs, whose operators run in threads."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import tensorflow as tf

import amanda
from amanda_tools.diff import FingerprintDiff, compare_fingerprints
from amanda_tools.fingerprint import Fingerprint, load_fingerprint

pytestmark = pytest.mark.slow

TRAIN = """
import sys
import keras
import tensorflow as tf

keras.utils.set_random_seed(0)
epsilon = 1.1e-3 if "--changed" in sys.argv else 1e-3
normalization = keras.layers.LayerNormalization(epsilon=epsilon)
layers = [keras.layers.Dense(4), normalization, keras.layers.Dropout(0.5), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(optimizer="adam", loss="mse", run_eagerly="--eager" in sys.argv)
model.fit(tf.ones((8, 3)), tf.ones((8, 1)), epochs=2, verbose=0, batch_size=4)
"""


def run(folder: Path, name: str, *arguments: str) -> Path:
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "amanda", "run", "-q", "-t", "fingerprint", "-o", name]
    done = subprocess.run(
        [*command, "train.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / name


@pytest.mark.parametrize("mode", [[], ["--eager"]], ids=["graph", "eager"])
def test_training_with_another_epsilon_parts_at_the_normalization(
    mode: list[str], tmp_path: Path
) -> None:
    one, same = run(tmp_path, "one", *mode), run(tmp_path, "same", *mode)
    found: FingerprintDiff = compare_fingerprints(one, same)
    assert (found.same, found.complete) == (True, True), found.conclusion()
    found = compare_fingerprints(one, run(tmp_path, "changed", *mode, "--changed"))
    assert found.complete, found.conclusion()
    first = found.first
    assert first is not None
    # The epsilon is a constant that no operator makes.
    assert "layer_normalization" in first.module
    assert first.cause == "outside"


def test_a_graph_has_the_digests_of_the_same_values_in_eager_mode(tmp_path: Path) -> None:
    x = tf.constant([[1.0, -2.0], [0.5, 3.0]])
    w = tf.Variable([[0.25, 1.0, -1.0], [2.0, 0.5, 0.125]])

    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ w))
        return tape.gradient(loss, w)

    def warnings_of(name: str) -> AbstractContextManager[object]:
        if name != "xla":
            return nullcontext()
        # XLA cannot call what computes digests.
        return pytest.warns(amanda.AmandaWarning, match="runs without XLA")

    digests = []
    functions = {
        "eager": gradient,
        "graph": tf.function(gradient),
        "xla": tf.function(gradient, jit_compile=True),
    }
    for name, function in functions.items():
        tool = Fingerprint()
        with amanda.apply(tool), warnings_of(name):
            function()
        tool.result().write(tmp_path / name)
        found = load_fingerprint(tmp_path / name)
        kinds = [found.ops[number].type for number in found.rows["op"]]
        rows = zip(kinds, found.rows["what"].tolist(), found.rows["digest"].tolist(), strict=True)
        # Numbers such as an exponent, and what the compiler drops, are in one of the modes only.
        digests.append({row for row in rows if row[0] == "MatMul"})
    assert len(digests[0]) >= 5
    assert digests[0] == digests[1] == digests[2]
