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


class Net(torch.nn.Module):
    """Has weights of shapes that the formats do not have, and widths that fill no word."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(2, 3, 1), torch.nn.LayerNorm(5)
        self.first, self.last = torch.nn.Linear(12, 37), torch.nn.Linear(37, 5)

    def forward(self, x: Any) -> Any:
        return self.norm(self.last(torch.relu(self.first(self.conv(x).flatten(1)))))


def unpacked(saved: dict[str, Any], module: str, bits: int) -> Any:
    """Return integers of few bits: each row is one long number, the first element lowest."""
    rows, columns = saved[f"{module}.weight_shape"].tolist()
    found = []
    for words in saved[f"{module}.weight_packed"].tolist():
        number = sum((word & 0xFFFFFFFF) << 32 * at for at, word in enumerate(words))
        found.append([(number >> bits * i) % 2**bits - 2 ** (bits - 1) for i in range(columns)])
    assert len(found) == rows
    return torch.tensor(found)


@pytest.mark.parametrize("per", ["channel", "tensor"])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_integers_and_scales_give_what_the_tool_gave(bits: int, per: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.rand(2, 2, 2, 2)
    tool = Quantize(weights=f"int{bits}", activations="none", per=per)
    expected = ran(tool, model, x)
    tool.save_integers(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name in ("first", "last"):
        scale = saved.pop(f"{name}.weight_scale")
        rows = len(getattr(model, name).weight)
        assert scale.shape == ((rows, 1) if per == "channel" else (1,))
        integers = saved[f"{name}.weight"] if bits == 8 else unpacked(saved, name, bits)
        assert bits != 8 or integers.dtype is torch.int8
        assert int(integers.abs().max()) == 2 ** (bits - 1) - 1
        saved[f"{name}.weight"] = integers * scale
    saved = {name: saved[name] for name in model.state_dict()}
    assert not torch.equal(model(x), expected)
    model.load_state_dict(saved)
    assert torch.equal(model(x), expected)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    form = "int-quantized" if bits == 8 else "pack-quantized"
    assert config["format"] == group["format"] == form
    assert group["targets"] == ["first", "last"]
    assert (group["weights"]["num_bits"], group["weights"]["strategy"]) == (bits, per)


def test_saving_writes_integers_too(tmp_path: Path) -> None:
    """Those of a dynamic tool follow the weights."""
    model, x, tool = Net().eval(), torch.rand(2, 2, 2, 2), Quantize("dynamic", activations="none")
    ran(tool, model, x)
    with torch.no_grad():
        model.first.weight *= 1.7
    files = [file.relative_to(tmp_path).as_posix() for file in tool.save_baked(tmp_path)]
    assert files[-2:] == ["integers/model.safetensors", "integers/config.json"]
    saved = load_file(tmp_path / "integers/model.safetensors")
    baked = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(saved["first.weight"] * saved["first.weight_scale"], baked["first.weight"])
    # Of a static one they are those of the first weights.
    static = Quantize(activations="none")
    ran(static, model, x)
    with torch.no_grad():
        model.first.weight *= 1.7
    static.save_integers(tmp_path / "static")
    saved = load_file(tmp_path / "static/model.safetensors")
    assert int(saved["first.weight"].abs().max()) == 127
    static.bake(model)
    again = saved["first.weight"] * saved["first.weight_scale"]
    assert torch.equal(again, model.first.weight)


@pytest.mark.parametrize("method", ["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_scales_have_the_digits_of_the_weights(method: Any, dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net().to(dtype).eval(), torch.rand(2, 2, 2, 2).to(dtype)
    tool = Quantize(method, weights="int8", activations="none")
    expected = ran(tool, model, x)
    tool.save_integers(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name in ("first", "last"):
        scale = saved.pop(f"{name}.weight_scale")
        assert scale.dtype is torch.promote_types(dtype, torch.float32)
        saved[f"{name}.weight"] = (saved[f"{name}.weight"] * scale).to(dtype)
    model.load_state_dict({name: saved[name] for name in model.state_dict()})
    assert torch.equal(model(x), expected)


class Transposed(torch.nn.Module):
    """Has a table, and a weight of inputs times outputs, as transformers' `Conv1D`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = torch.nn.Embedding(6, 8), torch.nn.Linear(8, 8)
        self.turned = torch.nn.Module()
        self.turned.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, indices: Any) -> Any:
        return self.last(torch.relu(self.table(indices) @ self.turned.weight))


@pytest.mark.parametrize(("bits", "modules"), [(8, ["table", "last"]), (4, ["last"])])
def test_modules_that_have_integers(bits: int, modules: list[str], tmp_path: Path) -> None:
    tool = Quantize(weights=f"int{bits}", activations="none", per="tensor")
    model, indices = Transposed(), torch.arange(6)
    expected = ran(tool, model, indices)
    tool.save_integers(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = text["config_groups"].values()
    assert group["targets"] == modules
    saved = load_file(tmp_path / "model.safetensors")
    others = {"table", "turned", "last"} - {*modules}
    with torch.no_grad():
        for name in others:  # They have the numbers.
            getattr(model, name).weight.copy_(saved[f"{name}.weight"])
        for name in modules:
            integers = saved[f"{name}.weight"] if bits == 8 else unpacked(saved, name, bits)
            getattr(model, name).weight.copy_(integers * saved[f"{name}.weight_scale"])
        assert torch.equal(model(indices), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "int4"},
        {"weights": "int3"},
        {"per": "tensor"},
        {"weights": "int4", "per": "tensor"},
        {"method": "dynamic", "weights": "int5"},
        {"symmetric": False},
        {"symmetric": False, "per": "tensor"},
        {"symmetric": False, "weights": "int4"},
        {"symmetric": False, "weights": "int3", "per": "tensor"},
        {"group": 4},
        {"group": 2, "weights": "int4"},
        {"group": 4, "symmetric": False},
        {"group": 3, "weights": "int4", "symmetric": False},
    ],
    ids=str,
)
def test_compressed_tensors_reads_the_files(options: Any, dtype: Any, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    torch.manual_seed(0)
    model, x = Net().to(dtype).eval(), torch.rand(2, 2, 2, 2).to(dtype)
    tool = Quantize(activations="none", **options)
    expected = ran(tool, model, x)
    tool.save_integers(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(text)
    other = Net().eval()  # In half precision, the library rounds the scales to it.
    apply_quantization_config(other, config)
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(other)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    compressor.decompress_model(other)
    with torch.no_grad():
        assert torch.equal(other.to(dtype)(x), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_zero_points_and_groups_give_what_the_tool_gave(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(12, 32)).eval()
    x = torch.rand(2, 12)
    tool = Quantize(weights=f"int{bits}", activations="none", symmetric=False, group=4)
    expected = ran(tool, model, x)
    tool.save_integers(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    scale, zero = saved["0.weight_scale"], saved["0.weight_zero_point"]
    assert scale.shape == (32, 3)
    if bits == 8:
        integers = saved["0.weight"]
        assert zero.dtype is torch.int8
    else:
        integers = unpacked(saved, "0", bits)
        columns = {"z.weight_packed": zero.T, "z.weight_shape": torch.tensor([3, 32])}
        zero = unpacked(columns, "z", bits).T
    parts = (integers.reshape(32, 3, 4) - zero[..., None].float()) * scale[..., None]
    with torch.no_grad():
        model[0].weight.copy_(parts.reshape(32, 12))
        assert torch.equal(model(x), expected)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (one,) = config["config_groups"].values()
    found = one["weights"]
    assert [found[key] for key in ("symmetric", "strategy", "group_size")] == [False, "group", 4]


@pytest.mark.slow
@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_torchao_has_the_same_numbers(per: Any, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model, x = Net().eval(), torch.rand(2, 2, 2, 2)
    tool = Quantize(activations="none", per=per)
    ran(tool, model, x)
    tool.save_integers(tmp_path)
    tool.bake(model)
    saved = load_file(tmp_path / "model.safetensors")
    integers, scale = saved["first.weight"], saved["first.weight_scale"].reshape(-1, 1)
    block = [1 if per == "channel" else 37, 12]
    tensor = quantization.Int8Tensor(integers, scale, block, torch.float32)
    assert torch.equal(tensor.dequantize(), model.first.weight)


def test_what_has_no_integers_is_refused(tmp_path: Path) -> None:
    linear, conv = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Conv2d(4, 4, 1)
    x, image = torch.rand(2, 4), torch.rand(2, 4, 3, 3)
    for tool, model, given in (
        (Quantize(weights="fp8_e4m3", activations="none"), linear, x),
        (Quantize("lsq"), linear, x),
        (Quantize(activations="none"), conv, image),
    ):
        for _ in range(2):  # Before a model ran, and afterwards.
            with pytest.raises(ToolError, match="matrices that have a scale for each row"):
                tool.save_integers(tmp_path / "integers")
            ran(tool, model, given)
        tool.save_baked(tmp_path)
    assert not (tmp_path / "integers").exists()
