"""A sample of the ports to Flax and JAX: equal ones are equal, and a mistake is named."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

SAMPLE = ["perceptron in Linen", "residual network", "encoder"]


@pytest.fixture
def sweep() -> Any:
    pytest.importorskip("flax", reason="Flax is not installed beside PyTorch")
    return importlib.import_module("maintenance.sweeps.flax_ports")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("name", SAMPLE)
def test_the_layer_of_the_mistake_is_named(sweep: Any, name: str, mode: str) -> None:
    equal, planted = sweep.run(name, mode)
    assert (equal.named, equal.right) == (None, True), equal.conclusion
    assert planted.named == planted.layer, planted.conclusion


@pytest.mark.slow
def test_another_mistake_is_a_miss(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    port = sweep.PORTS["perceptron"]
    elsewhere = port.plant.__class__(port.plant.kind, "head")
    monkeypatch.setitem(sweep.PORTS, "perceptron", port._replace(plant=elsewhere))
    _, planted = sweep.run("perceptron", "jit")
    assert not planted.right


def test_the_page_has_each_port_twice() -> None:
    page = Path(__file__).parents[2] / "maintenance/sweeps/flax_ports.md"
    text = page.read_text("utf-8")
    assert "0 of 20 equal ports" in text
    assert "was named for 20 of 20" in text
