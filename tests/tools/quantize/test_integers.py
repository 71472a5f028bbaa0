"""Quantized weights as integers and scales, read without the tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import amanda
from amanda_core.errors import ToolError
from amanda_tools.quantize import Quantize

load_file = pytest.importorskip("safetensors.torch").load_file


def ran(tool: Quantize, model: Any, x: Any) -> Any:
    with amanda.apply(tool), torch.no_grad():
        return model(x)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integers_and_scales_give_what_the_tool_gave(weights: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x, tool = torch.rand(2, 8), Quantize(weights=weights, activations="none")
    expected = ran(tool, model, x)
    tool.save_integers(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == {*model.state_dict(), "0.weight_scale", "2.weight_scale"}
    for name in ("0.weight", "2.weight"):
        scale = saved.pop(f"{name}_scale")
        assert saved[name].dtype is torch.int8
        assert scale.shape == (len(saved[name]), 1)
        saved[name] = saved[name] * scale
    assert not torch.equal(model(x), expected)
    model.load_state_dict(saved)
    assert torch.equal(model(x), expected)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (config["format"], group["targets"]) == ("int-quantized", ["0", "2"])
    assert group["weights"]["num_bits"] == int(weights[3:])


def test_what_has_no_integers_with_a_scale_for_each_row_is_refused(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(4, 4), torch.rand(2, 4)
    for tool, why in (
        (Quantize(weights="fp8_e4m3", activations="none"), "one integer format"),
        (Quantize("lsq"), "one integer format"),
        (Quantize(per="tensor", activations="none"), "one scale for each row"),
    ):
        with pytest.raises(ToolError, match="one integer format"):
            tool.save_integers(tmp_path)
        ran(tool, model, x)
        with pytest.raises(ToolError, match=why):
            tool.save_integers(tmp_path)
    assert not list(tmp_path.iterdir())
