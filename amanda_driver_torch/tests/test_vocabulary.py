"""PyTorch's operators in the common operator types: what contexts say of calls written by hand.

The right words stand here, call by call, which makes this file long; nothing is read from the
tables under test. `tests/programs/test_vocabulary_models.py` at the root measures how much of real
models has a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amanda
from amanda_core import OpContext
from amanda_core.interface.vocabulary import OP_TYPES as COMMON_TYPES, backward_type_of
from amanda_driver_torch.plugin import amanda_driver_info
from amanda_driver_torch.vocabulary import BACKWARD_TYPES, OP_TYPES

# Not all bindings are in torch's stubs.
T: Any = torch

Call = Callable[[], Any]


def values(*shape: int) -> Tensor:
    """Return a leaf that requires a gradient."""
    return torch.rand(*shape, requires_grad=True)


ROW, COLUMN, SQUARE = values(4), values(3), values(4, 4)
MATRIX, BATCH = values(3, 4), values(2, 3, 4)
SIGNAL, IMAGE, VOLUME = values(2, 4, 6), values(2, 4, 6, 6), values(1, 2, 4, 4, 4)
INDEX, LABELS = torch.tensor([0, 1]), torch.tensor([0, 1, 2])
TARGET, CHOICE = torch.rand(3, 4), torch.rand(3, 4) > 0.5


def words_of(call: Call) -> list[str | None]:
    """Return the common types of the operators of a call, in order."""
    seen: list[str | None] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context["type"]))
    with amanda.apply(tool):
        call()
    return seen


def only_context(call: Call) -> OpContext:
    """Return the context of a call's only operator."""
    seen: list[OpContext] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(seen.append)
    with amanda.apply(tool):
        call()
    (context,) = seen
    return context


def backward_types_of(call: Callable[[], Tensor]) -> dict[str, str | None]:
    """Map node to common type, for the backward ops of a call's last operator."""
    seen: dict[str, str | None] = {}
    operators: list[OpContext] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(operators.append)

    def note(context: OpContext) -> None:
        if context.forward is last:
            seen[context.get_backward_op().__name__] = context["backward_type"]

    tool.add_inst_for_op(note, backward=True)
    with amanda.apply(tool):
        result = call()
        last = operators[-1]
        # Not `sum`, which would be an operator, too.
        torch.autograd.backward(result, torch.ones_like(result))
    return seen


# Operator -> word.

# Word -> calls of one operator each.
CALLS: dict[str, list[Call]] = {
    "linear": [lambda: F.linear(ROW, MATRIX), lambda: nn.functional.linear(BATCH, MATRIX, COLUMN)],
    "matmul": [
        lambda: MATRIX @ SQUARE,
        lambda: torch.mm(MATRIX, SQUARE),
        lambda: torch.bmm(BATCH, values(2, 4, 3)),
        lambda: torch.mv(MATRIX, ROW),
        lambda: torch.dot(ROW, ROW),
        lambda: torch.addmm(ROW, MATRIX, SQUARE),
        lambda: torch.linalg.matmul(MATRIX, SQUARE),
    ],
    "outer": [lambda: torch.outer(ROW, COLUMN)],
    "einsum": [lambda: torch.einsum("ij,kj->ik", MATRIX, MATRIX)],
    "bilinear": [lambda: F.bilinear(MATRIX, MATRIX, BATCH.new_ones(2, 4, 4))],
    "inverse": [lambda: torch.linalg.inv(SQUARE), lambda: SQUARE.inverse()],
    "svd": [lambda: torch.linalg.svd(MATRIX)],
    "fft": [lambda: torch.fft.fft(ROW), lambda: torch.fft.irfft2(MATRIX)],
    "conv1d": [lambda: F.conv1d(SIGNAL, values(5, 4, 2))],
    "conv2d": [
        lambda: F.conv2d(IMAGE, values(5, 4, 3, 3)),
        lambda: F.conv2d(IMAGE, values(4, 1, 3, 3), groups=4),
        lambda: torch.convolution(
            IMAGE, values(5, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        ),
    ],
    "conv3d": [lambda: F.conv3d(VOLUME, values(3, 2, 2, 2, 2))],
    "conv_transpose1d": [lambda: F.conv_transpose1d(SIGNAL, values(4, 5, 2))],
    "conv_transpose2d": [
        lambda: F.conv_transpose2d(IMAGE, values(4, 5, 3, 3)),
        lambda: torch.convolution(
            IMAGE, values(4, 5, 3, 3), None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1
        ),
    ],
    "unfold": [lambda: F.unfold(IMAGE, 2), lambda: ROW.unfold(0, 2, 1)],
    "attention": [lambda: F.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE)],
    "embedding": [lambda: F.embedding(INDEX, MATRIX)],
    "batch_norm": [lambda: F.batch_norm(IMAGE, None, None, training=True)],
    "layer_norm": [lambda: F.layer_norm(MATRIX, (4,))],
    "group_norm": [lambda: F.group_norm(IMAGE, 2)],
    "instance_norm": [lambda: F.instance_norm(IMAGE)],
    "rms_norm": [lambda: F.rms_norm(MATRIX, (4,))],
    "dropout": [lambda: F.dropout(MATRIX), lambda: F.dropout2d(IMAGE)],
    "relu": [lambda: torch.relu(ROW), lambda: F.relu(ROW), lambda: ROW.relu()],
    "leaky_relu": [lambda: F.leaky_relu(ROW)],
    "gelu": [lambda: F.gelu(ROW, approximate="tanh")],
    "log_sigmoid": [lambda: F.logsigmoid(ROW)],
    "softmax": [lambda: ROW.softmax(0), lambda: F.softmax(MATRIX, dim=1)],
    "max_pool1d": [lambda: F.max_pool1d(SIGNAL, 2)],
    "max_pool2d": [
        lambda: F.max_pool2d(IMAGE, 2),
        lambda: F.max_pool2d(IMAGE, 2, return_indices=True),
    ],
    "avg_pool2d": [lambda: F.avg_pool2d(IMAGE, 2)],
    "adaptive_avg_pool1d": [lambda: F.adaptive_avg_pool1d(SIGNAL, 2)],
    "adaptive_max_pool2d": [lambda: F.adaptive_max_pool2d(IMAGE, 2)],
    "add": [lambda: ROW + 1, lambda: 1 + ROW, lambda: torch.add(ROW, ROW, alpha=2)],
    "sub": [lambda: ROW - 1, lambda: 1 - ROW],
    "div": [lambda: ROW / 2, lambda: torch.true_divide(ROW, 2)],
    "floor_div": [lambda: LABELS // 2],
    "mod": [lambda: LABELS % 2, lambda: torch.fmod(ROW, 2)],
    "pow": [lambda: ROW**2, lambda: 2**ROW],
    "reciprocal": [lambda: torch.reciprocal(ROW)],
    "clip": [lambda: ROW.clamp(0, 1), lambda: torch.clip(ROW, min=0)],
    "maximum": [lambda: torch.maximum(ROW, ROW), lambda: torch.max(ROW, ROW)],
    "minimum": [lambda: torch.min(ROW, ROW)],
    "where": [lambda: torch.where(CHOICE, MATRIX, 0.0)],
    "masked_fill": [lambda: MATRIX.masked_fill(CHOICE, 0.0)],
    "equal": [lambda: LABELS == 1, lambda: torch.eq(LABELS, 1)],
    "less": [lambda: LABELS < 1, lambda: torch.less(LABELS, 1)],
    "greater_equal": [lambda: LABELS >= 1],
    "bitwise_and": [lambda: CHOICE & CHOICE],
    "bitwise_not": [lambda: ~CHOICE],
    "logical_and": [lambda: torch.logical_and(CHOICE, CHOICE)],
    "sum": [lambda: MATRIX.sum(), lambda: MATRIX.sum(0)],
    "max": [lambda: MATRIX.max(), lambda: MATRIX.max(0), lambda: MATRIX.amax(0)],
    "norm": [lambda: torch.linalg.vector_norm(ROW), lambda: torch.linalg.norm(MATRIX)],
    "topk": [lambda: ROW.topk(2)],
    "sort": [lambda: ROW.sort()],
    "reshape": [
        lambda: MATRIX.view(4, 3),
        lambda: MATRIX.reshape(-1),
        lambda: torch.flatten(MATRIX),
        lambda: ROW.view_as(ROW),
    ],
    "transpose": [
        lambda: MATRIX.T,
        lambda: MATRIX.mT,
        lambda: MATRIX.t(),
        lambda: MATRIX.transpose(0, 1),
        lambda: IMAGE.permute(0, 2, 3, 1),
    ],
    "concat": [lambda: torch.cat([ROW, ROW]), lambda: torch.concat([ROW, ROW])],
    "split": [lambda: T.split_with_sizes(ROW, [1, 3]), lambda: ROW.chunk(2), lambda: ROW.unbind()],
    "slice": [
        lambda: MATRIX[0],
        lambda: MATRIX[:, 1:],
        lambda: MATRIX[INDEX],
        lambda: MATRIX[CHOICE],
        lambda: MATRIX.select(0, 1),
        lambda: MATRIX.index_select(0, INDEX),
    ],
    "gather": [lambda: ROW.gather(0, INDEX), lambda: torch.take_along_dim(ROW, INDEX, 0)],
    "scatter": [lambda: ROW.scatter_add(0, INDEX, COLUMN), lambda: ROW.scatter(0, INDEX, 1.0)],
    "expand": [lambda: ROW.expand(3, 4), lambda: ROW.expand_as(MATRIX)],
    "tile": [lambda: ROW.repeat(2, 1), lambda: torch.tile(ROW, (2, 1))],
    "repeat": [lambda: ROW.repeat_interleave(2)],
    "pad": [lambda: F.pad(IMAGE, (1, 1)), lambda: F.pad(SIGNAL, (1, 1), mode="reflect")],
    "cast": [lambda: ROW.double(), lambda: ROW.to(torch.float64), lambda: ROW.type_as(LABELS)],
    "bitcast": [lambda: torch.view_as_complex(values(3, 2))],
    "identity": [lambda: ROW.clone(), lambda: ROW.detach(), lambda: MATRIX.contiguous()],
    "upsample": [
        lambda: F.interpolate(IMAGE, scale_factor=2),
        lambda: F.interpolate(IMAGE, size=(9, 9), mode="bilinear"),
    ],
    "depth_to_space": [lambda: F.pixel_shuffle(IMAGE, 2)],
    "constant": [lambda: torch.tensor([1.0]), lambda: LABELS.new_tensor([1])],
    "full": [
        lambda: torch.zeros(2),
        lambda: torch.full((2,), 3.0),
        lambda: torch.ones_like(ROW),
        lambda: ROW.new_zeros(2),
    ],
    "range": [lambda: torch.arange(3), lambda: torch.linspace(0, 1, 3)],
    "random": [lambda: torch.rand(2), lambda: torch.randint(3, (2,)), lambda: torch.randperm(3)],
    "cross_entropy": [lambda: F.cross_entropy(MATRIX, LABELS)],
    "nll_loss": [lambda: F.nll_loss(MATRIX, LABELS)],
    "mse_loss": [lambda: T._C._nn.mse_loss(MATRIX, TARGET)],
}


@pytest.mark.parametrize("word", CALLS)
def test_word_of_an_operator(word: str) -> None:
    for number, call in enumerate(CALLS[word]):
        words = words_of(call)
        # Some arguments are made in the call itself.
        assert words[-1] == word, f"{word}, call {number}: {words}"
        assert set(words[:-1]) <= {"random", "full"}, f"{word}, call {number}: {words}"


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: torch.zeros(2).add_(1), "add"),
        (lambda: F.relu(torch.zeros(2), inplace=True), "relu"),
        (lambda: torch.zeros(2).clamp_(0, 1), "clip"),
        (lambda: torch.zeros(2, 3).t_(), "transpose"),
        (lambda: torch.zeros(2).masked_fill_(torch.tensor([True, False]), 1.0), "masked_fill"),
        (lambda: torch.zeros(2).copy_(ROW.detach()[:2]), "assign"),
        (lambda: torch.zeros(2).fill_(1.0), "full"),
        (lambda: torch.zeros(2).zero_(), "full"),
        (lambda: torch.zeros(2).uniform_(), "random"),
        (lambda: torch.zeros(2).__setitem__(0, 1.0), "assign_slice"),
        (lambda: torch.zeros(2).index_put_((torch.tensor([0]),), torch.ones(1)), "assign_slice"),
    ],
)
def test_in_place_variants_go_by_the_same_word(call: Call, word: str) -> None:
    assert words_of(call)[-1] == word


def test_sums_in_place_by_an_operator_sign() -> None:
    def call() -> None:
        x = torch.zeros(2)
        x += 1
        x -= 1
        x *= 2
        x /= 2

    assert words_of(call) == ["full", "add", "sub", "mul", "div"]


def test_operator_without_a_word_has_none() -> None:
    context = only_context(lambda: torch.digamma(ROW))
    assert context["type"] is None
    assert "input_roles" not in context
    assert "layout" not in context


def test_operator_of_a_library_is_not_taken_for_atens() -> None:
    with torch.library._scoped_library("amanda_vocabulary", "DEF") as library:
        library.define("conv2d(Tensor x) -> Tensor")
        library.impl("conv2d", lambda x: x + 1, "CompositeImplicitAutograd")
        context = only_context(lambda: T.ops.amanda_vocabulary.conv2d(TARGET))
    assert context.op_type == "amanda_vocabulary::conv2d"
    assert context["type"] is None


def test_functional_collectives_have_words() -> None:
    dist = T.distributed
    ops = T.ops._c10d_functional
    results: list[Tensor] = []

    def kept(call: Call) -> Call:
        return lambda: results.append(call())

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, x = dist.group.WORLD.group_name, TARGET
        calls: dict[str, Call] = {
            "all_reduce": lambda: ops.all_reduce(x, "sum", group),
            "all_gather": lambda: ops.all_gather_into_tensor(x, 1, group),
            "reduce_scatter": lambda: ops.reduce_scatter_tensor(x, "sum", 1, group),
            "broadcast": lambda: ops.broadcast(x, 0, group),
        }
        for word, call in calls.items():
            assert words_of(kept(call)) == [word]
            assert torch.equal(ops.wait_tensor(results[-1]), x)
    finally:
        dist.destroy_process_group()


# Keys that go with the word.


@pytest.mark.parametrize(
    ("call", "roles"),
    [
        (lambda: F.linear(MATRIX, MATRIX), ("input", "weight", "bias")),
        (lambda: F.conv1d(SIGNAL, SIGNAL), ("input", "weight", "bias")),
        (lambda: F.conv_transpose2d(IMAGE, values(4, 5, 3, 3)), ("input", "weight", "bias")),
        (lambda: F.embedding(INDEX, MATRIX), ("weight", "indices")),
        (
            lambda: F.layer_norm(MATRIX, (4,), ROW, ROW),
            ("input", "normalized_shape", "weight", "bias"),
        ),
        (lambda: F.batch_norm(MATRIX, None, None, ROW, ROW, True), ("input", "weight", "bias")),
        (lambda: MATRIX @ SQUARE, ("left", "right")),
        (lambda: torch.addmm(ROW, MATRIX, SQUARE), ("addend", "left", "right")),
        (lambda: ROW - COLUMN[0], ("left", "right")),
        (lambda: 1 - ROW, ("right", "left")),
        (lambda: F.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE), None),
    ],
)
def test_input_roles_say_what_stands_where(call: Call, roles: tuple[str, ...] | None) -> None:
    seen: list[OpContext] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(seen.append)
    with amanda.apply(tool):
        call()
    if roles is None:
        roles = ("query", "key", "value", "mask")
    assert seen[-1]["input_roles"] == roles


def test_the_roles_find_the_weight() -> None:
    found: dict[str, Tensor] = {}

    def keep(context: OpContext) -> None:
        roles = context.get("input_roles", ())
        if "weight" in roles:
            found[context["type"]] = context.get_inputs()[roles.index("weight")]

    layers = {
        "conv2d": nn.Conv2d(3, 4, 1),
        "batch_norm": nn.BatchNorm2d(4),
        "prelu": nn.PReLU(),
        "group_norm": nn.GroupNorm(2, 4),
        "linear": nn.Linear(5, 6),
        "layer_norm": nn.LayerNorm(6),
        "rms_norm": nn.RMSNorm(6),
    }
    tool = amanda.Tool()
    tool.add_inst_for_op(keep)
    with amanda.apply(tool):
        nn.Sequential(*layers.values())(torch.rand(2, 3, 5, 5))
    assert set(found) == set(layers)
    for word, layer in layers.items():
        assert found[word] is layer.weight, word


@pytest.mark.parametrize(
    ("call", "weight", "activations"),
    [
        (lambda: nn.Linear(3, 4)(torch.rand(2, 3)), "OI", None),
        (lambda: nn.Conv1d(3, 4, 5)(torch.rand(2, 3, 6)), "OIW", "NCW"),
        (lambda: nn.Conv2d(3, 4, (5, 6))(torch.rand(2, 3, 7, 8)), "OIHW", "NCHW"),
        (lambda: nn.Conv3d(3, 4, (5, 6, 7))(torch.rand(1, 3, 7, 8, 9)), "OIDHW", "NCDHW"),
        (lambda: nn.ConvTranspose2d(3, 4, (5, 6))(torch.rand(2, 3, 7, 8)), "IOHW", "NCHW"),
    ],
)
def test_weight_layout_names_the_axes(call: Call, weight: str, activations: str | None) -> None:
    shapes: list[tuple[OpContext, torch.Size]] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: (
            shapes.append((context, context.get_inputs()[1].shape))
            if "weight_layout" in context
            else None
        )
    )
    with amanda.apply(tool):
        call()
    ((context, shape),) = shapes
    assert context["weight_layout"] == weight
    assert context.get("layout") == activations
    # The layers above have 3 channels in, 4 out, and a kernel of 5, (5, 6) or (5, 6, 7).
    axes = dict(zip(weight, shape, strict=True))
    assert (axes["I"], axes["O"]) == (3, 4)
    assert [axes[a] for a in "DHW" if a in axes] == [5, 6, 7][: len(shape) - 2]


def test_layout_of_pooling() -> None:
    assert only_context(lambda: F.avg_pool3d(VOLUME, 2))["layout"] == "NCDHW"
    assert "layout" not in only_context(lambda: torch.relu(IMAGE))


# Backward.


@pytest.mark.parametrize(
    ("call", "node", "word"),
    [
        # Matrix products go by the word of the forward op.
        (lambda: F.linear(MATRIX, values(2, 4), values(2)), "AddmmBackward0", "linear"),
        (lambda: F.linear(MATRIX, values(2, 4)), "MmBackward0", "linear"),
        (lambda: F.linear(BATCH, values(2, 4), values(2)), "AddmmBackward0", "linear"),
        (lambda: F.linear(BATCH, values(2, 4)), "MmBackward0", "linear"),
        (lambda: MATRIX @ SQUARE, "MmBackward0", "matmul"),
        (lambda: torch.addmm(ROW, MATRIX, SQUARE), "AddmmBackward0", "matmul"),
        (lambda: BATCH @ SQUARE, "MmBackward0", "matmul"),
        (lambda: torch.bmm(BATCH, BATCH.mT.detach()), "BmmBackward0", "matmul"),
        (lambda: torch.einsum("bij,bkj->bik", BATCH, BATCH), "BmmBackward0", "einsum"),
        # One node for convolutions of every kind.
        (lambda: F.conv1d(SIGNAL, values(5, 4, 2)), "ConvolutionBackward0", "conv1d"),
        (lambda: F.conv2d(IMAGE, values(5, 4, 3, 3)), "ConvolutionBackward0", "conv2d"),
        (lambda: F.conv3d(VOLUME, values(3, 2, 2, 2, 2)), "ConvolutionBackward0", "conv3d"),
        (
            lambda: F.conv_transpose2d(IMAGE, values(4, 5, 3, 3)),
            "ConvolutionBackward0",
            "conv_transpose2d",
        ),
        # A node that is called after another operator.
        (lambda: F.instance_norm(IMAGE), "NativeBatchNormBackward0", "instance_norm"),
        (lambda: F.batch_norm(IMAGE, None, None, training=True), None, "batch_norm"),
        (lambda: F.dropout(MATRIX), "MulBackward0", "dropout"),
        (lambda: F.relu6(MATRIX), "HardtanhBackward0", "relu6"),
        (lambda: F.avg_pool1d(SIGNAL, 2), "AvgPool2DBackward0", "avg_pool1d"),
        (lambda: F.adaptive_avg_pool2d(IMAGE, 1), "MeanBackward1", "adaptive_avg_pool2d"),
        (lambda: F.adaptive_avg_pool2d(IMAGE, 2), None, "adaptive_avg_pool2d"),
        (lambda: torch.max(ROW, ROW.detach()), "MaximumBackward0", "maximum"),
        # Parts of a composite operator go by what they are.
        (lambda: F.linear(BATCH, values(2, 4), values(2)), "TBackward0", "transpose"),
        (lambda: F.linear(BATCH, values(2, 4), values(2)), "ViewBackward0", "reshape"),
        (lambda: F.cross_entropy(MATRIX, LABELS), "NllLossBackward0", "nll_loss"),
        (lambda: F.cross_entropy(MATRIX, LABELS), "LogSoftmaxBackward0", "log_softmax"),
        (
            lambda: F.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE, dropout_p=0.1),
            "BmmBackward0",
            "matmul",
        ),
        # All others.
        (lambda: F.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE), None, "attention"),
        (lambda: F.layer_norm(MATRIX, (4,)), "NativeLayerNormBackward0", "layer_norm"),
        (lambda: F.group_norm(IMAGE, 2), "NativeGroupNormBackward0", "group_norm"),
        (lambda: F.max_pool2d(IMAGE, 2), "MaxPool2DWithIndicesBackward0", "max_pool2d"),
        (lambda: F.embedding(INDEX, MATRIX), "EmbeddingBackward0", "embedding"),
        (lambda: F.interpolate(IMAGE, scale_factor=2), "UpsampleNearest2DBackward0", "upsample"),
        (lambda: F.pad(IMAGE, (1, 1)), "ConstantPadNdBackward0", "pad"),
        (lambda: 1 - ROW, "RsubBackward1", "sub"),
        (lambda: ROW * 2, "MulBackward0", "mul"),
        (lambda: torch.sigmoid(ROW), "SigmoidBackward0", "sigmoid"),
        (lambda: MATRIX.T, "PermuteBackward0", "transpose"),
        (lambda: MATRIX.t(), "TBackward0", "transpose"),
        (lambda: ROW.double(), "ToCopyBackward0", "cast"),
        (lambda: torch.fft.irfft(ROW, norm="ortho"), None, "fft"),
        (lambda: torch.linalg.inv(SQUARE), "LinalgInvExBackward0", "inverse"),
        (lambda: T.diagonal_copy(SQUARE), "DiagonalBackward0_copy", "diag"),
    ],
)
def test_word_of_a_backward_operator(call: Call, node: str | None, word: str) -> None:
    words = backward_types_of(call)
    if node is None:
        assert f"{word}_backward" in words.values(), words
    else:
        assert words[node] == f"{word}_backward", words


def test_backward_words_of_writing() -> None:
    seen: dict[str, str | None] = {}
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: seen.__setitem__(context.op_type, context["backward_type"]), backward=True
    )
    with amanda.apply(tool):
        x = ROW * 2
        x[1:] = 0.0
        y = torch.zeros(4).copy_(x)
        torch.autograd.backward(y, torch.ones(4))
    assert seen["CopySlices"] == "assign_slice_backward"
    assert seen["CopyBackwards"] == "assign_backward"
    assert seen["AccumulateGrad"] == "accumulate_grad"


def test_lstm_is_one_backward_operator() -> None:
    lstm = nn.LSTM(4, 3)

    def output() -> Tensor:
        y, _ = lstm(values(2, 1, 4))
        assert isinstance(y, Tensor)
        return y

    words = backward_types_of(output)
    if not torch._C._has_mkldnn:
        pytest.skip("this build of torch runs an LSTM as many operators")
    assert words == {"MkldnnRnnLayerBackward0": "lstm_backward"}


def test_backward_operator_without_a_word_has_none() -> None:
    assert backward_types_of(lambda: torch.digamma(ROW)) == {"DigammaBackward0": None}


# Overriding.


def test_a_mapping_rule_overrides_the_word() -> None:
    seen: list[tuple[str, str | None]] = []

    def rename(context: OpContext) -> None:
        if context.is_forward() and context["type"] == "conv2d":
            context["type"] = "my_convolution"
        if context.is_backward() and context["backward_type"] == "conv2d_backward":
            context["backward_type"] = "my_convolution_backward"

    mapping = amanda.Tool()
    mapping.add_context_rule(before=rename)
    tool = amanda.Tool()
    tool.depends_on(mapping)
    tool.add_inst_for_op(lambda context: seen.append(("forward", context["type"])))
    tool.add_inst_for_op(
        lambda context: seen.append(("backward", context["backward_type"])), backward=True
    )
    convolution = nn.Conv2d(4, 2, 1)
    with amanda.apply(tool), amanda.cache_disabled():
        for _ in range(2):
            y = convolution(IMAGE.detach())
            torch.autograd.backward(y, torch.ones_like(y))
    # In the second iteration the context is there already; its word is still the rule's.
    named = [pair for pair in seen if "my_" in str(pair[1])]
    assert named == [
        ("forward", "my_convolution"),
        ("backward", "my_convolution_backward"),
        ("forward", "my_convolution"),
        ("backward", "my_convolution_backward"),
    ]
    assert not [word for _, word in seen if word in ("conv2d", "conv2d_backward")]


@pytest.mark.parametrize("other", ["my_word", None, 7, ["conv2d"]])
@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda x: F.conv2d(x, IMAGE.detach()), "conv2d"),
        # In place: `dropout_`.
        (lambda x: F.dropout(x, inplace=True), "dropout"),
    ],
)
def test_backward_words_do_not_depend_on_what_a_rule_wrote(
    call: Callable[[Tensor], Tensor], word: str, other: object
) -> None:
    seen: list[str | None] = []
    mapping = amanda.Tool()

    def overwrite(context: OpContext) -> None:
        if context.is_forward():
            context["type"] = other

    mapping.add_context_rule(before=overwrite)
    tool = amanda.Tool()
    tool.depends_on(mapping)
    tool.add_inst_for_op(lambda context: None)
    tool.add_inst_for_op(lambda context: seen.append(context["backward_type"]), backward=True)
    x = values(2, 4, 6, 6) * 1
    with amanda.apply(tool):
        y = call(x)
        torch.autograd.backward(y, torch.ones_like(y))
    assert seen == [f"{word}_backward"]


# The tables.


#: Words of gradients of leaves, which no forward operator has.
OF_LEAVES = {"accumulate_grad", "reduce_grad"}
#: Names that came with later releases than the oldest one.
LATER = {
    "_c10d_functional::_wrap_tensor_autograd",
    "_c10d_functional::irecv",
    "_c10d_functional::isend",
    "_c10d_functional_autograd::irecv",
    "_c10d_functional_autograd::isend",
}


def test_every_word_used_is_a_common_word() -> None:
    assert set(OP_TYPES.values()) <= set(COMMON_TYPES)
    backward = {word for word in BACKWARD_TYPES.values() if word not in OF_LEAVES}
    assert all(word.endswith("_backward") for word in backward)
    assert {word.removesuffix("_backward") for word in backward} <= set(COMMON_TYPES)


def test_every_word_is_used() -> None:
    assert set(COMMON_TYPES) - set(OP_TYPES.values()) == OF_LEAVES


def test_every_name_is_torchs() -> None:
    from torch.distributed.tensor import _api as distributed

    places = (torch.ops.aten, torch.ops._c10d_functional, torch.Tensor, torch, F, distributed)
    functions = {name.removeprefix("c10d::") for name in OP_TYPES if name.startswith("c10d::")}
    # Programs and FSDP reach these by methods of process groups.
    assert {name for name in functions if not hasattr(torch.distributed, name)} == {
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
    }
    missing = {
        name
        for name in OP_TYPES
        if not name.startswith("c10d::")
        and not any(
            hasattr(place, n.rpartition("::")[2]) for place in places for n in (name, f"{name}_")
        )
    }
    # Earlier releases have none of these, and later ones have all.
    assert missing in (set(), LATER)


def test_words_are_described() -> None:
    for word, meaning in COMMON_TYPES.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", word), word
        assert meaning
        assert meaning != word
        assert not word.endswith("_backward")


def test_words_belong_to_no_framework() -> None:
    # Names that PyTorch alone uses have a common operator type instead.
    for name in ("mm", "addmm", "view", "cat", "eq", "clamp", "__getitem__", "pixel_shuffle"):
        assert name in OP_TYPES
        assert name not in COMMON_TYPES


def test_the_driver_tells_its_vocabulary() -> None:
    vocabulary = amanda_driver_info().vocabulary
    assert vocabulary["conv2d"] == "conv2d"
    assert vocabulary["T"] == vocabulary["permute"] == "transpose"
    assert vocabulary["AddmmBackward"] == backward_type_of("linear")
    assert vocabulary["AccumulateGrad"] == "accumulate_grad"
