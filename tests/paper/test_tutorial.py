"""The tutorial's PyTorch programs, in its order, and the numbers that it prints.

The programs are as printed except for annotations and for what `docs/paper.md` lists. Where the
tutorial downloads a model, the same architecture is built from its configuration. Its TensorFlow
programs are tested with that driver. Long because it is one document from beginning to end.
"""

from __future__ import annotations

import collections
import copy
import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.tools.mapping import MappingTool

# It ships no types.
prune_torch: Any = importlib.import_module("torch.nn.utils.prune")


class Pooled(nn.Module):
    """A network of transformers whose only result is its pooled output."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.network(x).pooler_output
        assert isinstance(pooled, torch.Tensor)
        return pooled


def transformers() -> Any:
    # Nothing here is downloaded.
    os.environ["HF_HUB_OFFLINE"] = "1"
    return importlib.import_module("transformers")


def resnet50() -> nn.Module:
    """Return ResNet-50 as in torchvision, without its classifier."""
    library = transformers()
    return Pooled(library.ResNetModel(library.ResNetConfig()))


def bert_base() -> nn.Module:
    """Return BERT-base, uncased, with random weights."""
    library = transformers()
    # `from_pretrained` gives a model in evaluation mode.
    network = library.BertModel(library.BertConfig()).eval()
    assert isinstance(network, nn.Module)
    return network


def nodes_of(output: torch.Tensor) -> collections.Counter[str]:
    """Return the names of all nodes of a backward graph, found without Amanda."""
    counts: collections.Counter[str] = collections.Counter()
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        counts[type(node).__name__] += 1
        waiting.extend(function for function, _ in node.next_functions)
    return counts


# Prepare a CNN model.


class ConvNeuralNet(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv_layer1 = nn.Conv2d(in_channels=3, out_channels=32, kernel_size=3)
        self.conv_layer2 = nn.Conv2d(in_channels=32, out_channels=32, kernel_size=3)
        self.max_pool1 = nn.MaxPool2d(kernel_size=2, stride=2)

        self.conv_layer3 = nn.Conv2d(in_channels=32, out_channels=64, kernel_size=3)
        self.conv_layer4 = nn.Conv2d(in_channels=64, out_channels=64, kernel_size=3)
        self.max_pool2 = nn.MaxPool2d(kernel_size=2, stride=2)

        self.fc1 = nn.Linear(1600, 128)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        out = self.conv_layer1(x)
        out = self.conv_layer2(out)
        out = self.max_pool1(out)

        out = self.conv_layer3(out)
        out = self.conv_layer4(out)
        out = self.max_pool2(out)

        out = out.reshape(out.size(0), -1)

        out = self.fc1(out)
        out = self.activation(out)
        out = self.fc2(out)
        return out

    def activation(self, out: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.relu1(out)
        return activated


class FunctionalConvNeuralNet(ConvNeuralNet):
    """The tutorial's second network: ReLU as a function instead of a module."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        del self.relu1

    def activation(self, out: torch.Tensor) -> torch.Tensor:
        return torch.relu(out)


# Convolution operator counting tool.


class CountForwardTool(amanda.Tool):
    def __init__(self, op_name: str) -> None:
        super().__init__()
        self.counter = 0
        self.op_name = op_name
        self.add_inst_for_op(self.callback)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext) -> None:
        op = context.get_op()
        if self.op_name in op.__name__:
            context.insert_before_op(self.counter_op)

    # instrumentation routine: op for counting
    def counter_op(self, *inputs: Any) -> Any:
        self.counter += 1
        return inputs


def test_counting_convolutions() -> None:
    x = torch.rand((1, 3, 32, 32))
    model = ConvNeuralNet(num_classes=10)
    expected = model(x)

    tool = CountForwardTool("conv2d")

    with amanda.apply(tool):
        y = model(x)
    assert tool.counter == 4
    assert torch.equal(y, expected)
    model(x)
    assert tool.counter == 4


# Instrument the backward process.


class CountOPTool(amanda.Tool):
    def __init__(self, op_name: str, backward_op_name: str) -> None:
        super().__init__()
        self.counter = 0
        self.backward_counter = 0
        self.op_name = op_name
        self.backward_op_name = backward_op_name
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext) -> None:
        op = context.get_op()
        if self.op_name in op.__name__:
            context.insert_before_op(self.counter_op)

    # analysis routine, filter conv2d operators
    def backward_callback(self, context: amanda.OpContext) -> None:
        op = context.get_backward_op()
        if self.backward_op_name in op.__name__:
            context.insert_after_backward_op(self.counter_backward_op)

    # instrumentation routine: op for counting
    def counter_op(self, *inputs: Any) -> Any:
        self.counter += 1
        return inputs

    def counter_backward_op(self, *inputs: Any) -> Any:
        self.backward_counter += 1
        return inputs


def test_counting_convolutions_backward() -> None:
    tool = CountOPTool(op_name="conv2d", backward_op_name="Conv")
    x = torch.rand((1, 3, 32, 32))
    model = ConvNeuralNet(10)

    with amanda.tool.apply(tool):
        y = model(x)
        y.backward(torch.rand_like(y))

        assert (tool.counter, tool.backward_counter) == (4, 4)


def test_counting_changes_nothing() -> None:
    x = torch.rand((1, 3, 32, 32))
    model = ConvNeuralNet(10)
    reference = copy.deepcopy(model)
    gradient = torch.rand((1, 10))
    with amanda.tool.apply(CountOPTool(op_name="conv2d", backward_op_name="Conv")):
        model(x).backward(gradient)
    reference(x).backward(gradient)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


# One tool for all models.


def test_counting_in_resnet50() -> None:
    x = torch.rand((1, 3, 227, 227))
    model = resnet50()

    tool = CountOPTool(op_name="conv2d", backward_op_name="Conv")

    with amanda.tool.apply(tool):
        y = model(x)
        y.backward(torch.rand_like(y))

    assert (tool.counter, tool.backward_counter) == (53, 53)
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 53


# The tutorial's "Mm" matched the MmBackward that a linear layer on three axes had then; it is
# AddmmBackward0 now. 72 and not 73: the pooler's gradient is not requested.
@pytest.mark.parametrize(("backward_op_name", "expected"), [("Addmm", 72), ("Mm", 0)])
def test_counting_in_bert(backward_op_name: str, expected: int) -> None:
    x = torch.randint(0, 10, (1, 8))
    model = bert_base()

    tool = CountOPTool(op_name="linear", backward_op_name=backward_op_name)

    with amanda.tool.apply(tool):
        y = model(x)
        y[0].backward(torch.rand_like(y[0]))

    assert (tool.counter, tool.backward_counter) == (73, expected)

    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(layers) == 73
    assert [name for name, m in layers.items() if m.weight.grad is None] == ["pooler.dense"]
    plain = nodes_of(model(x)[0])
    assert plain["AddmmBackward0"] == 72
    assert plain["MmBackward0"] == 0


# Context mapping tool.


def torch_op_name_rule(context: amanda.OpContext) -> None:
    context["op_name"] = context.get_op().__name__
    context["backward_op_name"] = (
        context.get_backward_op().__name__ if context.get_backward_op() is not None else None
    )


def tf_op_name_rule(context: amanda.OpContext) -> None:
    context["op_name"] = context.get_op().name if context.get_op() is not None else None
    context["backward_op_name"] = (
        context.get_backward_op().name if context.get_backward_op() is not None else None
    )


mapping_tool = MappingTool(
    rules=[
        ["pytorch", torch_op_name_rule],
        ["tensorflow", tf_op_name_rule],
    ]
)


class MappedCountOPTool(amanda.Tool):
    def __init__(self, op_name: str, backward_op_name: str) -> None:
        super().__init__()

        # specify tool dependencies
        self.depends_on(mapping_tool)

        self.counter = 0
        self.backward_counter = 0
        self.op_name = op_name
        self.backward_op_name = backward_op_name
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext) -> None:
        if self.op_name in context["op_name"]:
            context.insert_before_op(self.counter_op)

    # analysis routine, filter conv2d operators
    def backward_callback(self, context: amanda.OpContext) -> None:
        if self.backward_op_name in context["backward_op_name"]:
            context.insert_after_backward_op(self.counter_backward_op)

    # instrumentation routine: op for counting
    def counter_op(self, *inputs: Any) -> Any:
        self.counter += 1
        return inputs

    def counter_backward_op(self, *inputs: Any) -> Any:
        self.backward_counter += 1
        return inputs


def test_counting_with_the_mapping_tool() -> None:
    x = torch.rand((1, 3, 227, 227))
    model = resnet50()

    tool = MappedCountOPTool(op_name="conv2d", backward_op_name="Conv")

    with amanda.tool.apply(tool):
        y = model(x)
        y.backward(torch.rand_like(y))
        assert (tool.counter, tool.backward_counter) == (53, 53)


# Extend to complex task: DNN pruning.


def compute_mask(tensor: torch.Tensor, sparsity: float) -> torch.Tensor:
    """Return the tutorial's mask, corrected as in docs/paper.md."""
    with torch.no_grad():
        flattened_tensor = tensor.view(-1)

        num_elements_to_prune = int(len(flattened_tensor) * sparsity)

        _, indices = torch.topk(flattened_tensor.abs(), num_elements_to_prune, largest=False)

        mask = torch.ones_like(flattened_tensor)
        mask[indices] = 0

        return mask.view(tensor.size())


SPARSITY = 0.75


class PruningTool(amanda.Tool):
    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.callback)

    # analysis routine
    def callback(self, context: amanda.OpContext) -> None:
        op = context.get_op()
        if op.__name__ not in ["conv2d", "linear"]:
            return
        weight = context.get_inputs()[1]
        mask = compute_mask(weight, SPARSITY)
        context["mask"] = mask
        context.insert_before_op(self.prune_weight, inputs=[1], mask=mask)

    # instrumentation routine
    def prune_weight(self, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.mul(weight, mask)


def prunable(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]


def pruned_by_torch(model: nn.Module) -> nn.Module:
    """Return a copy whose weights are masked by PyTorch's own pruning."""
    reference = copy.deepcopy(model)
    for module in prunable(reference):
        count = int(module.get_parameter("weight").numel() * SPARSITY)
        prune_torch.l1_unstructured(module, "weight", amount=count)
    return reference


def test_pruning_prunes_what_torch_prunes() -> None:
    model = ConvNeuralNet(10)
    reference = pruned_by_torch(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tool = PruningTool()
    x = torch.rand((2, 3, 32, 32))
    dense = model(x)
    with amanda.apply(tool):
        first, second = model(x), model(x)
    assert torch.equal(first, reference(x))
    assert torch.equal(second, first)
    assert not torch.equal(first, dense)
    assert torch.equal(model(x), dense)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_gradients_of_a_pruned_model() -> None:
    model = ConvNeuralNet(10)
    pruned = pruned_by_torch(model)
    # The default keeps the backward program: the reference's weights were masked in place.
    masked = copy.deepcopy(model)
    for ours, theirs in zip(prunable(masked), prunable(pruned), strict=True):
        with torch.no_grad():
            ours.get_parameter("weight").mul_(theirs.get_buffer("weight_mask"))
    x, gradient = torch.rand((2, 3, 32, 32)), torch.rand((2, 10))
    with amanda.apply(PruningTool()):
        model(x).backward(gradient)
    masked(x).backward(gradient)
    for one, other in zip(model.parameters(), masked.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)

    # Differentiated, the mask is part of the network, as it is in PyTorch's own pruning.
    model.zero_grad()
    with amanda.apply(PruningTool()), amanda.autodiff_enabled():
        model(x).backward(gradient)
    pruned(x).backward(gradient)
    for ours, theirs in zip(prunable(model), prunable(pruned), strict=True):
        grad = ours.get_parameter("weight").grad
        expected = theirs.get_parameter("weight_orig").grad
        assert grad is not None
        assert expected is not None
        assert torch.equal(grad, expected)
        assert (grad == 0).sum() >= int(grad.numel() * SPARSITY)


# Problems with PyTorch module hook.


def add_module_hooks(model: nn.Module, op_name: str, hook: Callable[..., None]) -> None:
    if model.__class__.__name__ == op_name:
        model.register_forward_hook(hook)

    if isinstance(model, nn.Module):
        for _child_name, child in model.named_children():
            add_module_hooks(child, op_name, hook)


@pytest.mark.parametrize(
    ("network", "hooked"),
    [(ConvNeuralNet, "hooking relu\n"), (FunctionalConvNeuralNet, "")],
)
def test_a_tool_finds_what_a_module_hook_misses(
    network: type[ConvNeuralNet], hooked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.rand((1, 3, 32, 32))
    model = network(num_classes=10)

    add_module_hooks(model, "ReLU", lambda m, i, o: print("hooking relu"))

    model(x)
    assert capsys.readouterr().out == hooked

    model = network(num_classes=10)
    tool = CountOPTool(op_name="relu", backward_op_name="Relu")

    with amanda.tool.apply(tool):
        y = model(x)
        y.backward(torch.rand_like(y))
    assert (tool.counter, tool.backward_counter) == (1, 1)


# Forward and backward graph mapping.


# The tutorial's "mul" is in "AccumulateGrad": 4 parameters of each of 4 layers.
@pytest.mark.parametrize(("backward_op_name", "expected"), [("mul", 16), ("Tanh", 64)])
def test_one_forward_operator_has_many_backward_ones(backward_op_name: str, expected: int) -> None:
    x = torch.rand(16, 2, 128)
    model = torch.nn.RNN(input_size=128, hidden_size=128, num_layers=4, batch_first=False)

    tool = CountOPTool(op_name="rnn", backward_op_name=backward_op_name)

    with amanda.tool.apply(tool):
        y = model(x)
        y[0].backward(torch.rand_like(y[0]))
    assert (tool.counter, tool.backward_counter) == (1, expected)

    plain = nodes_of(model(x)[0])
    assert sum(n for name, n in plain.items() if backward_op_name in name) == expected


def test_all_backward_operators_of_an_rnn_are_mapped_to_it() -> None:
    x = torch.rand(16, 2, 128)
    model = torch.nn.RNN(input_size=128, hidden_size=128, num_layers=4, batch_first=False)
    forward: dict[str, int] = {}
    mapped: dict[Any, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def note(context: amanda.OpContext) -> None:
        forward[context.get_op().__name__] = context.get_op_id()

    def note_backward(context: amanda.OpContext) -> None:
        op, name = context.get_op(), context.get_backward_op().__name__
        if context.forward is None:
            # A backward operator of no forward one is its own operator.
            assert op is context.get_backward_op()
            mapped[None][name] += 1
        else:
            mapped[op.__name__][name] += 1
            assert context.get_op_id() == forward[op.__name__]

    tool = amanda.Tool()
    tool.add_inst_for_op(note)
    tool.add_inst_for_op(note_backward, backward=True)
    with amanda.apply(tool):
        y = model(x)[0]
        y.backward(torch.ones(y.shape))
    expected = nodes_of(model(x)[0])
    accumulations = expected.pop("AccumulateGrad")
    assert expected["TanhBackward0"] == 64
    assert accumulations == 16
    assert mapped == {"rnn_tanh": expected, None: {"AccumulateGrad": accumulations}}
