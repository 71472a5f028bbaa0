"""Compare quantization, pruning and faults with torchao, Brevitas, ModelOpt and PyTorchFI.

`nox -s references` runs it in an environment of its own. Values are those that an operator gets
under the tool, and those that the other library computes of the same weight.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import amanda
from amanda_tools.faults import InjectFaults
from amanda_tools.faults.result import Fault
from amanda_tools.prune import PruneNM
from amanda_tools.quantize import Quantize

#: What is compared, our values, and theirs.
Row = tuple[str, torch.Tensor, torch.Tensor]


def linear() -> Any:
    """Return a layer with the same weight each time."""
    torch.manual_seed(0)
    return nn.Linear(64, 32)


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def operands(tool: amanda.Tool) -> list[torch.Tensor]:
    """Return the input and the weight that the second execution of the layer gets."""
    seen: list[list[torch.Tensor]] = []
    spy = amanda.Tool()
    spy.depends_on(tool)

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "linear":
            context.insert_before_op(
                lambda *values: seen.append([value.detach().clone() for value in values]),
                inputs=[0, 1],
                observe=True,
            )

    spy.add_inst_for_op(analyse)
    layer = linear()
    with torch.no_grad(), amanda.apply(tool, spy):
        layer(X)
        layer(X)
    return seen[-1]


def of_torchao() -> Iterator[Row]:
    """Compare symmetric grids of weights, and of each token."""
    ao: Any = importlib.import_module("torchao.quantization.quant_primitives")
    symmetric, weight = ao.MappingType.SYMMETRIC, linear().weight.detach()

    def theirs(values: torch.Tensor, highest: int) -> Any:
        given = (1, values.shape[1]), torch.int8, -highest, highest
        scale, zero = ao.choose_qparams_affine(values, symmetric, *given, eps=1e-9)
        return ao._fake_quantize_affine(values, given[0], scale, zero, *given[1:])

    for name, highest in (("int8", 127), ("int4", 7)):
        ours = operands(Quantize(weights=name, activations="none"))[1]
        yield f"{name} weight per channel", ours, theirs(weight, highest)
    yield "int8 input per token", operands(Quantize("dynamic", per_token=True))[0], theirs(X, 127)


def of_brevitas() -> Iterator[Row]:
    """Compare weights per channel and per tensor."""
    layers: Any = importlib.import_module("brevitas.nn")
    rules: Any = importlib.import_module("brevitas.quant")
    for per, rule in (
        ("channel", rules.Int8WeightPerChannelFloat),
        ("tensor", rules.Int8WeightPerTensorFloat),
    ):
        layer = layers.QuantLinear(64, 32, bias=True, weight_quant=rule)
        layer.weight.data.copy_(linear().weight.data)
        tool = Quantize(weights="int8", activations="none", per=per)  # type: ignore[arg-type]
        yield f"int8 weight per {per}", operands(tool)[1], layer.quant_weight().value.detach()


def of_modelopt() -> Iterator[Row]:
    """Compare weights in three formats, and two of four."""
    quantizers: Any = importlib.import_module("modelopt.torch.quantization.nn")
    configs: Any = importlib.import_module("modelopt.torch.quantization.config")
    sparsity: Any = importlib.import_module("modelopt.torch.sparsity")
    weight = linear().weight.detach()
    for name, bits, axis in (("int8", 8, 0), ("int4", 4, 0), ("fp8_e4m3", (4, 3), None)):
        config = configs.QuantizerAttributeConfig(num_bits=bits, axis=axis)
        quantizer = quantizers.TensorQuantizer(config)
        quantizer.amax = weight.abs().max() if axis is None else weight.abs().amax(1, keepdim=True)
        per: Any = "tensor" if axis is None else "channel"
        ours = operands(Quantize(weights=name, activations="none", per=per))[1]
        yield f"{name} weight per {per}", ours, quantizer(weight)
    model = sparsity.sparsify(nn.Sequential(linear()), "sparse_magnitude")
    sparsity.export(model)
    yield "2:4 weight", operands(PruneNM(2, 4))[1], model[0].weight.detach()


def of_pytorchfi() -> Iterator[Row]:
    """Compare the output of a network, one activation of which is replaced by a value."""
    core: Any = importlib.import_module("pytorchfi.core")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    x = torch.randn(2, 3, 6, 6)
    injection = core.fault_injection(model, 2, input_shape=[3, 6, 6], use_cuda=False)
    place = {"batch": [1], "layer_num": [0], "dim1": [2], "dim2": [1], "dim3": [3]}
    theirs = injection.declare_neuron_fi(**place, value=[7.5])(x).detach()
    ids: list[int] = []
    look = amanda.Tool()
    look.add_inst_for_op(
        lambda context: ids.append(context.get_op_id()) if context["type"] == "conv2d" else None
    )
    with torch.no_grad(), amanda.apply(look):
        plain = model[0](x)
        ids.clear()
        model(x)
    index = ((1 * 4 + 2) * 4 + 1) * 4 + 3
    bits = torch.stack([plain.flatten()[index], torch.tensor(7.5)]).view(torch.int32).tolist()
    before, after = (number & 0xFFFFFFFF for number in bits)
    fault = Fault(0, ids[-1], 0, 0, index, before, after)
    with torch.no_grad(), amanda.apply(InjectFaults(replay=[fault])):
        ours = model(x)
    yield "output after 7.5 at one activation", ours, theirs


LIBRARIES = {
    "torchao": of_torchao,
    "brevitas": of_brevitas,
    "nvidia-modelopt": of_modelopt,
    "pytorchfi": of_pytorchfi,
}


def main() -> None:
    """Print a table in Markdown; fail if values differ by more than rounding."""
    warnings.simplefilter("ignore")
    wrong = []
    print("| library | version | what | equal | largest difference |\n|---|---|---|---|---|")
    for library, compare in LIBRARIES.items():
        version = importlib.metadata.version(library)
        for what, ours, theirs in compare():
            difference = float((ours - theirs).abs().max())
            same = "every bit" if torch.equal(ours, theirs) else "no"
            print(f"| {library} | {version} | {what} | {same} | {difference:.2g} |")
            if difference > 1e-6:
                wrong.append(what)
    if wrong:
        raise SystemExit(f"Different: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
