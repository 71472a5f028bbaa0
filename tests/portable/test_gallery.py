"""The short tools of `examples/gallery` on each framework, compared with NumPy, and their page.

The network is the perceptron of `maintenance.backends.one_tool`: two products and a ReLU, on
numbers of NumPy, with its gradients written out there.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import amanda

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `maintenance` lies in the root, which `-P` hides.

from maintenance.backends.one_tool import (  # noqa: E402
    BACKENDS,
    FIRST,
    SECOND,
    SEED,
    Run,
    X,
    expected,
)
from maintenance.site import gallery  # noqa: E402

pytestmark = pytest.mark.one_interceptor

Array = npt.NDArray[Any]
HIDDEN = X @ FIRST
OUTPUTS = [HIDDEN, np.maximum(HIDDEN, 0), np.maximum(HIDDEN, 0) @ SECOND]
#: The gradients that arrive at these three.
GRADIENTS = [SEED @ SECOND.T * (HIDDEN > 0), SEED @ SECOND.T, SEED]
MODES = {
    "PyTorch": "torch",
    "TensorFlow, eager": "tensorflow",
    "TensorFlow, tf.function": "tensorflow",
    "TensorFlow, session": "tensorflow",
    "ONNX Runtime": "onnxruntime",
}


@functools.cache
def programs(module: str) -> dict[str, Run]:
    return dict(BACKENDS[module]())


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(mode: str) -> Callable[[], list[Array]]:
    program = programs(MODES[mode])[mode]
    program(X, FIRST, SECOND)  # Graphs are built, and variables have their values.
    return lambda: list(program(X, FIRST, SECOND))


@pytest.fixture(autouse=True)
def import_from_the_gallery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(gallery.FOLDER))


def tool(file: str, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(file), name)(*arguments, **options)


def same(found: Any, wanted: Any) -> bool:
    return all(
        np.allclose(f, w, rtol=1e-4, atol=1e-5)
        for f, w in zip(found, wanted, strict=len(wanted) != 3)  # Some only infer.
    )


def by_size(values: Any) -> list[float]:
    return sorted(float(value) for value in values)


def gradients(mode: str, found: dict[str, Any]) -> bool:
    """Return True if a driver with gradients gives some; one without must give none."""
    assert bool(found) == (mode != "ONNX Runtime")
    return bool(found)


def test_gradient_norms(mode: str, run: Any) -> None:
    with amanda.apply(used := tool("gradient_norms", "GradientNorms")):
        run()
    if gradients(mode, used.norms):
        wanted = by_size(map(np.linalg.norm, GRADIENTS))
        assert np.allclose(by_size(used.norms.values()), wanted, rtol=1e-5)


def test_histograms(mode: str, run: Any) -> None:
    with amanda.apply(used := tool("histograms", "Histograms", -2, 2, 4)):
        run(), run()
    by_hand = [
        [
            int(((low <= o) & (o < high)).sum())
            for low, high in ((-99, -1), (-1, 0), (0, 1), (1, 99))
        ]
        for o in OUTPUTS
    ]
    assert sorted(c.tolist() for c in used.counts.values()) == sorted(
        [2 * n for n in counts] for counts in by_hand
    )


def test_dead_relus(mode: str, run: Any) -> None:
    with amanda.apply(used := tool("dead_relus", "DeadReLUs")):
        run()
    (dead,) = used.dead.values()
    assert dead.tolist() == [bool((HIDDEN[:, unit] <= 0).all()) for unit in range(8)]
    assert list(used.count().values()) == [sum(dead)]


def test_saliency(mode: str, run: Any) -> None:
    with amanda.apply(used := tool("saliency", "Saliency")):
        run()
    if gradients(mode, used.salient):
        (found,) = used.salient.values()
        loss = [(OUTPUTS[1] * (np.arange(8) != unit) @ SECOND * SEED).sum() for unit in range(8)]
        # The network is linear behind the ReLU, so the first order is all.
        assert np.allclose(found, (OUTPUTS[2] * SEED).sum() - loss, rtol=1e-3, atol=1e-4)


def test_timing(mode: str, run: Any) -> None:
    ticks = itertools.count()
    with amanda.apply(used := tool("timing", "Timing", lambda: next(ticks))):
        run(), run()
    products = {n: c for n, c in used.calls.items() if "mul" in n.lower() or "linear" in n}
    relus = {n: c for n, c in used.calls.items() if n.lower() == "relu"}
    assert list(relus.values()) == [2]
    assert [c for n, c in products.items() if c == 2][:2] == [2, 2]
    assert all(used.seconds[name] >= calls for name, calls in used.calls.items())


def test_nan_trap(mode: str, run: Any) -> None:
    used = tool("nan_trap", "NaNTrap")
    with amanda.apply(used):
        run()
    program, large = programs(MODES[mode])[mode], (X * 1e30 * 1e8).astype(np.float32)
    assert np.isfinite(large).all()
    with np.errstate(over="ignore", invalid="ignore"):
        assert not np.isfinite(large @ FIRST).all()
    wanted = r"^(linear|MatMul) at .* gives -?inf"
    with pytest.raises(FloatingPointError, match=wanted), amanda.apply(used):
        program(large, FIRST, SECOND)


def test_parameters_touched(mode: str, run: Any) -> None:
    with amanda.apply(used := tool("parameters_touched", "ParametersTouched")):
        run(), run()
    assert by_size(used.elements.values()) == [24, 48]
    assert used.total() == FIRST.size + SECOND.size


def test_activation_cache(mode: str, run: Any, tmp_path: Path) -> None:
    with amanda.apply(used := tool("activation_cache", "ActivationCache", tmp_path / "a")):
        run(), run()
    assert len(used.files) == 2 == len(list((tmp_path / "a").iterdir()))
    assert all(same([np.load(file)], [OUTPUTS[1]]) for file in used.files)


def test_low_rank_update(mode: str, run: Any) -> None:
    plain = run()
    with amanda.apply(used := tool("low_rank_update", "LowRankUpdate", 2)):
        found = run()
    first, second = (update.T if mode == "PyTorch" else update for update in used.updates.values())
    assert [np.linalg.matrix_rank(update) for update in (first, second)] == [2, 2]
    wanted = expected((FIRST + first).astype(np.float32), (SECOND + second).astype(np.float32))
    assert same(found, wanted)
    assert not same(found, plain)
    assert all(map(np.array_equal, run(), plain))


def test_weight_noise(mode: str, run: Any) -> None:
    with amanda.apply(tool("weight_noise", "WeightNoise", 0.1, 5)):
        found = [run(), run()]
    draws = [np.random.default_rng([5, place]) for place in range(2)]
    for one in found:
        weights = []
        for random, weight in zip(draws, (FIRST, SECOND), strict=True):
            held = weight.T if mode == "PyTorch" else weight
            noisy = (held * (1 + 0.1 * random.standard_normal(held.shape))).astype(np.float32)
            weights.append(noisy.T if mode == "PyTorch" else noisy)
        assert same(one, expected(weights[0], weights[1]))
    assert not same(found[0], found[1])


def test_fp8_inputs(mode: str, run: Any) -> None:
    with amanda.apply(tool("fp8_inputs", "FP8Inputs")):
        (output, *_) = run()

    def cast(values: Array) -> Array:  # As the framework's own type rounds.
        tensor = torch.tensor(values)
        scale = tensor.abs().max() / 448
        rounded: Array = ((tensor / scale).to(torch.float8_e4m3fn).float() * scale).numpy()
        return rounded

    wanted = cast(np.maximum(cast(X) @ FIRST, 0)) @ SECOND
    assert np.allclose(output, wanted, rtol=1e-3, atol=1e-3)
    assert not np.allclose(output, OUTPUTS[2], rtol=1e-3, atol=1e-3)


def test_every_number_of_8_bits_stays_as_it_is() -> None:
    to_e4m3 = importlib.import_module("fp8_inputs").to_e4m3
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()]
    between = torch.linspace(-448, 448, 9999).double()
    for values in (every.double(), between, between / 2**14):
        wanted = values.float().to(torch.float8_e4m3fn).double()
        assert np.array_equal(to_e4m3(values.numpy()), wanted.numpy())


def test_skip(mode: str, run: Any) -> None:
    with amanda.apply(used := tool("skip", "Skip", "relu")):
        found = run()
    assert len(used.skipped) == 1
    assert same(found, expected(activation=lambda h: (h, np.ones_like(h))))


def test_freeze(mode: str, run: Any) -> None:
    plain = run()
    used = tool("freeze", "Freeze", 1)
    if mode == "ONNX Runtime":
        with pytest.raises(amanda.AmandaError, match="aligned_gradients"), amanda.apply(used):
            run()
        return
    with amanda.apply(used):
        output, first, second = run()
    assert same([output, second], [plain[0], plain[2]])
    assert not first.any()
    assert plain[1].any()


def test_attention_entropy() -> None:
    scores = np.random.default_rng(1).standard_normal((2, 5, 5))
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = [[np.mean(-(weights * np.log(weights)).sum(-1))], [np.log(5)]]
    import tensorflow as tf

    softmax = tf.function(lambda x: tf.nn.softmax(x))
    for framework in (
        lambda x: torch.tensor(x).softmax(-1),
        lambda x: tf.nn.softmax(tf.constant(x)),
        lambda x: softmax(tf.constant(x)),
    ):
        for values, entropy in zip((scores, 0 * scores), wanted, strict=True):
            with amanda.apply(used := tool("attention_entropy", "AttentionEntropy")):
                framework(values)
            assert np.allclose(list(used.entropies.values()), [entropy])


def test_magnitudes_of_keys_and_values() -> None:
    random = np.random.default_rng(2)
    q, k, v = (random.standard_normal((2, 3, 4, 5)).astype(np.float32) for _ in range(3))
    with amanda.apply(used := tool("kv_magnitude", "KVMagnitude")):
        attention: Any = torch.nn.functional.scaled_dot_product_attention
        attention(*map(torch.tensor, (q, k, v)))
    for found, values in ((used.keys, k), (used.values, v)):
        (sizes,) = found.values()
        wanted = [
            float(np.mean([abs(values[b, h, p]) for b in (0, 1) for h in (0, 1, 2)]))
            for p in range(4)
        ]
        assert np.allclose(sizes, wanted)


def test_there_are_fifteen_of_under_forty_lines_and_all_are_tested() -> None:
    assert set(gallery.tools()) == set(gallery.FOLDER.glob("*.py"))
    assert len(gallery.tools()) == 15
    text = Path(__file__).read_text("utf-8")
    for file in gallery.tools():
        assert len(file.read_text("utf-8").splitlines()) < 40, file
        assert f'tool("{file.stem}"' in text


def test_the_page_shows_the_tools_and_what_they_print() -> None:
    assert gallery.PAGE.read_text("utf-8") == gallery.page(), "python -m maintenance.site.gallery"
