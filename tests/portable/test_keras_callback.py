"""Tools applied around Keras' `fit` by the callback."""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import amanda

pytestmark = pytest.mark.slow

#: MACs of a batch of four through a layer of 3 by 2.
FORWARD = 4 * 3 * 2


def model() -> Any:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


def fit(callback: Any, *more: Any) -> None:
    x, y = np.ones((12, 3), np.float32), np.ones((12, 2), np.float32)
    model().fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback, *more])


def test_tools_are_applied_around_fit(capsys: pytest.CaptureFixture[str]) -> None:
    callback = amanda.callback("keras", "flops")
    fit(callback)
    total = callback.results["flops"].total.macs
    assert total == 6 * FORWARD  # Two epochs of three steps.
    step = callback.results["flops"].step
    assert (step.times, step.macs, step.backward_macs) == (6, FORWARD, FORWARD)
    assert "flops:\n" in capsys.readouterr().out
    model()(np.ones((4, 3), np.float32))
    assert callback.run.tools["flops"].result().total.macs == total


def test_scalars_have_the_step_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Log:
        def __init__(self, target: str) -> None:
            assert target == "target"

        def log(self, found: Any, step: int) -> None:
            logged.append(step)

        def close(self) -> None:
            pass

    logged: list[int] = []
    monkeypatch.setattr("amanda_tools.training.run.ScalarLog", Log)
    made = model()
    x, y = np.ones((12, 3), np.float32), np.ones((12, 2), np.float32)
    for _ in range(2):  # The second call continues.
        callback = amanda.callback("keras", "flops", scalars="target", show=False)
        made.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    assert logged == [3, 6, 9, 12]
    assert int(made.optimizer.iterations) == 12


def test_nothing_stays_applied_after_an_exception() -> None:
    class Failing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise RuntimeError("planted")

    callback = amanda.callback("keras", "flops", show=False)
    with pytest.raises(RuntimeError, match="planted"), callback:
        fit(callback, Failing())
    assert callback.results["flops"].total.macs == FORWARD
    model()(np.ones((4, 3), np.float32))
    assert callback.run.tools["flops"].result().total.macs == FORWARD
