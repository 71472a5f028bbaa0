"""Sparsity profiler on PyTorch, compared with NumPy, SciPy and PyTorch's own counts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import amanda
from amanda_core.interface.facts import Arithmetic
from amanda_core.results import HasResult, Result
from amanda_tools.kit.tensors.arithmetic import numpy_arithmetic
from amanda_tools.sparsity import MeasuredTensor, Product, Sparsity, SparsityResult
from amanda_tools.sparsity.zeros import NUMBERS, Order, count, order_of_weight


def measure(program: Any, *inputs: Any, **options: Any) -> SparsityResult:
    """Measure one run, including gradients if requested."""
    tool = Sparsity(**options)
    with amanda.apply(tool):
        output = program(*inputs)
        if options.get("gradients"):
            output.sum().backward()
    return tool.result()


def one(result: SparsityResult, kind: str, type: str) -> MeasuredTensor:
    (found,) = (t for t in result.tensors if t.kind == kind and t.type == type)
    return found


def of_torch() -> Arithmetic:
    """Return the arithmetic of PyTorch's driver."""
    found: list[Arithmetic] = []

    def analyse(context: amanda.OpContext) -> None:
        assert context.facts is not None
        assert context.facts.arithmetic is not None
        found.append(context.facts.arithmetic)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        torch.zeros(1).relu()
    return found[-1]


def sparse(*shape: int, seed: int = 0, share: float = 0.7) -> torch.Tensor:
    """Return numbers with a share of zeros, some in blocks, and some small values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[torch.rand(shape, generator=generator) < share] = 0
    x[torch.rand(shape, generator=generator) < 0.1] = 1e-5
    x.flatten()[: x.numel() // 3] = 0
    return x


def test_elements_are_those_of_count_nonzero() -> None:
    weight, x = sparse(6, 10), sparse(5, 10, seed=1)
    layer = nn.Linear(10, 6, bias=False)
    layer.weight.data = weight
    found = measure(layer, x)
    for kind, tensor in (("weight", weight), ("input", x), ("output", F.linear(x, weight))):
        measured = one(found, kind, "linear")
        assert measured.elements - measured.zeros == int(torch.count_nonzero(tensor))
        assert measured.small == int(torch.count_nonzero(tensor.abs() < 1e-3))
        assert measured.shape == list(tensor.shape)
    rows = one(found, "weight", "linear")
    assert rows.zero_channels == int((weight == 0).all(dim=1).sum())
    assert rows.dead == (weight == 0).all(dim=1).nonzero().flatten().tolist()
    columns = one(found, "input", "linear")
    assert columns.channels == 10
    assert columns.dead == (x == 0).all(dim=0).nonzero().flatten().tolist()


@pytest.mark.parametrize("block", [1, 2, 4])
def test_blocks_are_those_of_scipy(block: int) -> None:
    weight = sparse(16, 4, 3, 2, share=0.9)
    found = measure(lambda: F.conv2d(sparse(1, 4, 6, 6), nn.Parameter(weight)), block=block)
    matrix = weight.reshape(16, -1).numpy()
    bsr = scipy.sparse.bsr_matrix(matrix, blocksize=(block, block))
    measured = one(found, "weight", "conv2d")
    assert measured.blocks == matrix.size // block**2
    assert measured.blocks - measured.zero_blocks == bsr.data.shape[0]


def test_all_operands_in_a_list_are_measured() -> None:
    left, right = sparse(5, 10), sparse(3, 10, seed=1)
    measured = one(measure(lambda: torch.einsum("ij,kj->ik", left, right)), "input", "einsum")
    assert measured.elements == left.numel() + right.numel()
    assert measured.zeros == sum(int((x == 0).sum()) for x in (left, right))


def test_blocks_at_the_edges() -> None:
    weight = torch.zeros(5, 7)
    weight[4, 6] = 1
    found = measure(F.linear, torch.ones(1, 7), nn.Parameter(weight), block=4)
    measured = one(found, "weight", "linear")
    assert (measured.blocks, measured.zero_blocks) == (4, 3)


def two_of_four(shape: tuple[int, ...], axis: int) -> torch.Tensor:
    """Select the two largest magnitudes of each four along an axis, without counting."""
    x = torch.randn(shape).movedim(axis, -1)
    groups = x.reshape(-1, 4)
    groups.scatter_(1, groups.abs().argsort(1)[:, :2], 0)
    return groups.reshape(x.shape).movedim(-1, axis).contiguous()


def test_two_of_four() -> None:
    weight = two_of_four((6, 16), 1)
    found = measure(F.linear, torch.ones(1, 16), nn.Parameter(weight))
    measured = one(found, "weight", "linear")
    assert (measured.groups, measured.compliant, measured.is_2_4) == (24, 24, True)
    weight[3, 4:8] = 1
    found = measure(F.linear, torch.ones(1, 16), nn.Parameter(weight))
    measured = one(found, "weight", "linear")
    assert (measured.groups, measured.compliant, measured.is_2_4) == (24, 23, False)
    # Of a convolution, along the input channels.
    kernel = nn.Parameter(two_of_four((8, 12, 3, 3), 1))
    assert one(measure(F.conv2d, torch.ones(1, 12, 4, 4), kernel), "weight", "conv2d").is_2_4
    kernel = nn.Parameter(two_of_four((8, 12, 4, 4), 3))
    assert not one(measure(F.conv2d, torch.ones(1, 12, 4, 4), kernel), "weight", "conv2d").is_2_4


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="torch.sparse.to_sparse_semi_structured takes CUDA tensors only",
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_what_pytorch_accepts_as_two_of_four() -> None:
    weight = two_of_four((128, 128), 1).half().cuda()
    dense = torch.ones(128, 128).half().cuda()
    for matrix in (weight, dense):
        found = measure(F.linear, dense, nn.Parameter(matrix))
        compressed: Any = torch.sparse.to_sparse_semi_structured(matrix)
        kept = torch.equal(compressed.to_dense(), matrix)
        assert one(found, "weight", "linear").is_2_4 == kept


def test_dead_channels_are_found() -> None:
    torch.manual_seed(0)
    planted: list[list[int]] = [[1, 4], [0], [7, 8, 9]]
    convolutions: list[Any] = [nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Conv2d(8, 12, 3)]
    linear = nn.Linear(12, 5)
    for layer, dead in zip(convolutions, planted, strict=True):
        # Large enough that every other channel is alive for some image.
        layer.bias.data.fill_(1.0)
        layer.bias.data[dead] = -1e9
    linear.bias.data.fill_(5.0)
    linear.bias.data[3] = -1e9
    pool: Any = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(
        *(part for layer in convolutions for part in (layer, nn.ReLU())), *pool, linear, nn.ReLU()
    )
    tool = Sparsity()
    with amanda.apply(tool):
        for _ in range(3):
            model(torch.randn(4, 3, 10, 10))
    found = tool.result()
    relus = [tensor for tensor in found.dead if tensor.type == "relu"]
    assert [tensor.dead for tensor in relus] == [*planted, [3]]
    assert [tensor.channels for tensor in relus] == [6, 8, 12, 5]
    assert {tensor.executions for tensor in relus} == {3}
    # In every one of three executions of these.
    assert [tensor.zero_channels for tensor in relus[:1]] == [3 * 2]
    assert not [tensor for tensor in found.dead if tensor.type == "conv2d"]
    rows: Any = [row for row in found.table("dead").rows if "relu" in str(row[0])]
    assert [row[3] for row in rows] == ["1 4", "0", "7 8 9", "3"]


def test_a_channel_that_lives_once_is_not_dead() -> None:
    tool = Sparsity()
    with amanda.apply(tool):
        for bias in ([-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]):
            F.relu(torch.tensor([bias]))
    (output,) = (tensor for tensor in tool.result().tensors if tensor.kind == "output")
    assert (output.dead, output.zero_channels, output.channels) == ([1], 4, 3)


# Effective multiply-accumulates.


def test_products_that_are_not_with_a_zero() -> None:
    x, weight = sparse(7, 10, seed=3, share=0.4), sparse(6, 10, seed=4, share=0.5)
    layer = nn.Linear(10, 6, bias=False)
    layer.weight.data = weight
    tool = Sparsity()
    with amanda.apply(tool):
        layer(x), layer(x[:3])
        x @ weight.t()
    linear, matmul = tool.result().products

    def products(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
        """One by one."""
        pairs = [
            (a[i, k] != 0, b[j, k] != 0)
            for i in range(a.shape[0])
            for j in range(b.shape[0])
            for k in range(a.shape[1])
        ]
        by_both = sum(bool(p and q) for p, q in pairs)
        return (len(pairs), sum(bool(q) for _, q in pairs), sum(bool(p) for p, _ in pairs), by_both)

    def numbers(found: Product) -> tuple[int, ...]:
        return (found.macs, found.by_weight, found.by_input, found.by_both)

    first, second = products(x, weight), products(x[:3], weight)
    assert numbers(linear) == tuple(a + b for a, b in zip(first, second, strict=True))
    assert numbers(matmul) == first
    assert linear.exact
    assert matmul.exact
    assert linear.executions == 2


@pytest.mark.parametrize("channels", ["auto", "first"])
def test_a_linear_layer_has_its_channels_last_however_many_axes_there_are(channels: str) -> None:
    # As many on the second axis as there are channels, so that one could be taken for the other.
    x, weight = sparse(2, 10, 5, 10, seed=3), sparse(6, 10, seed=4)
    x[..., 7] = 0
    found = measure(F.linear, x, nn.Parameter(weight), channels=channels)
    assert one(found, "input", "linear").dead == (x == 0).all(0).all(0).all(0).nonzero().tolist()[0]
    (product,) = found.products
    both = (x != 0).double() @ (weight != 0).double().T
    assert (product.by_both, product.exact) == (int(both.sum()), True)
    assert product.by_input == int((x != 0).sum()) * 6


def test_what_is_subtracted_is_no_weight() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    found = measure(lambda x: (x - parameter) / (parameter + 1), torch.ones(3, 4))
    assert [tensor.tensor for tensor in found.of("weight")] == []


def test_products_of_convolutions() -> None:
    x, weight = sparse(2, 4, 9, 9, share=0.5), sparse(8, 4, 3, 3, share=0.5)
    (found,) = measure(lambda: F.conv2d(x, nn.Parameter(weight))).products
    assert found.macs == 2 * 8 * 49 * 36
    assert found.by_weight == 2 * 49 * int(torch.count_nonzero(weight))
    assert not found.exact
    # A kernel of one place uses each element alike.
    point = weight[:, :, :1, :1].contiguous()
    (found,) = measure(lambda: F.conv2d(x, nn.Parameter(point))).products
    indicator = F.conv2d((x != 0).double(), (point != 0).double())
    assert found.by_both == int(indicator.sum())
    # Transposed, each element of the input meets the whole filter.
    turned = sparse(4, 3, 3, 3, share=0.5)
    (found,) = measure(lambda: F.conv_transpose2d(x, nn.Parameter(turned), stride=2)).products
    indicator = F.conv_transpose2d((x != 0).double(), (turned != 0).double(), stride=2)
    assert found.by_both == int(indicator.sum())
    assert found.exact


def test_whole_channels_that_are_zero_save_their_share() -> None:
    x, weight = torch.rand(1, 4, 5, 5) + 1, torch.rand(8, 4, 3, 3) + 1
    x[:, 1] = 0
    weight[:6] = 0
    (found,) = measure(lambda: F.conv2d(x, nn.Parameter(weight), padding=1)).products
    assert found.by_input == found.macs * 3 // 4
    assert found.by_weight == found.macs // 4
    assert found.by_both == found.macs * 3 // 16


# The counting itself.


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1e-5, -2.0, float("nan")]), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_numpy_and_pytorch_count_alike(numbers: list[float], block: int, width: int) -> None:
    numbers = numbers + [0.0] * (-len(numbers) % width)
    x = np.asarray(numbers, np.float32).reshape(-1, width)
    order = Order((0,), (1,), 1, (1,))
    results = []
    for arithmetic, tensor in ((numpy_arithmetic(), x), (of_torch(), torch.from_numpy(x))):
        found = count(arithmetic, tensor, order, block, 1e-3)
        by_channel = found.channels
        alike = isinstance(by_channel, int)
        by_channel = [by_channel] * found.width if alike else by_channel.tolist()
        assert by_channel == np.count_nonzero(x, axis=0).tolist()
        results.append((found.numbers, by_channel, found[4:]))
    assert results[0] == results[1]
    values = dict(zip(NUMBERS, results[0][0], strict=True))
    assert values["zeros"] == x.size - np.count_nonzero(x)
    assert values["small"] == int((np.abs(x) < 1e-3).sum())
    assert values["zero_channels"] == int((x == 0).all(axis=0).sum())
    corners = [(i, j) for i in range(0, len(x), block) for j in range(0, width, block)]
    blocks = [x[i : i + block, j : j + block] for i, j in corners]
    assert values["zero_blocks"] == sum(not np.count_nonzero(part) for part in blocks)
    groups = [row[i : i + 4] for row in x for i in range(0, width, 4)]
    assert values["compliant"] == sum(np.count_nonzero(group) <= 2 for group in groups)
    assert results[0][2] == (width, 0, x.size, len(blocks), len(groups))


def test_a_depthwise_weight_is_the_same_in_both_layouts() -> None:
    weight = sparse(6, 1, 3, 3)  # Two outputs for each of three inputs.
    other = weight.reshape(3, 2, 3, 3).permute(2, 3, 0, 1)
    arithmetic = of_torch()
    one = count(arithmetic, weight, order_of_weight("OIHW"), 2, 0)
    two = count(arithmetic, other, order_of_weight("HWIM"), 2, 0)
    assert one.channels.tolist() == two.channels.tolist()
    assert one.numbers[:4] == two.numbers[:4]


# What is measured.


def test_gradients() -> None:
    x = torch.tensor([[1.0, -1.0, -2.0]], requires_grad=True)
    found = measure(F.relu, x, gradients=True)
    assert (one(found, "gradient", "relu").zeros, one(found, "output", "relu").zeros) == (0, 2)
    assert not measure(F.relu, x).of("gradient")


def test_an_output_that_is_written_is_counted_again() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.sigmoid()
        found = [y.exp()]
        y[:, 0] = 0
        found.append(y.tanh())
        y.view(-1)[4:] = 0
        return [*found, y.sin(), y.cos()]

    result = measure(program, torch.randn(4, 8))
    zeros = {t.type: t.zeros for t in result.tensors if t.kind == "input"}
    names = ("sigmoid", "exp", "tanh", "sin", "cos")
    assert [zeros[name] for name in names] == [0, 0, 4, 32 - 3, 32 - 3]


def test_what_moves_values_is_left_out() -> None:
    found = measure(lambda x: F.relu(x.reshape(4).clone()), torch.ones(2, 2))
    assert {tensor.type for tensor in found.tensors} == {"relu"}
    integers = measure(lambda: torch.ones(3, dtype=torch.long) + 1)
    assert integers.tensors == []


@pytest.mark.filterwarnings("ignore:The fused inference path")
@pytest.mark.parametrize("whole", [True, False])
def test_the_weights_inside_a_fused_layer(whole: bool) -> None:
    """PyTorch runs an encoder layer without gradients as one operator."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        layer.linear1.weight[:4] = 0
    tool = Sparsity()
    tool.whole = whole
    with torch.no_grad(), amanda.apply(tool):
        layer(torch.randn(2, 3, 8))
    found = tool.result()
    matrices = [p for name, p in layer.named_parameters() if p.ndim == 2]
    weights = [t for t in found.of("weight") if len(t.shape) == 2]
    if whole:
        assert sum(t.elements for t in weights) == sum(p.numel() for p in matrices)
        assert sum(t.zeros for t in weights) == 4 * 8
    else:
        assert weights == []
        assert "no weights measured" in found.table().title
        assert "not seen inside" in found.table().title


def test_what_is_not_dense_is_named() -> None:
    found = measure(lambda x: torch.sparse.mm(x, torch.ones(4, 2)), torch.eye(4).to_sparse())
    assert any("that is not dense: sparse" in note for note in found.notes)
    assert found.products == []


def test_halves_and_doubles() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        found = measure(F.relu, torch.tensor([[1, 0, -1]], dtype=dtype))
        assert [(t.kind, t.zeros) for t in found.tensors] == [("input", 1), ("output", 2)]


def test_executions_of_one_operator_in_several_dtypes_are_added() -> None:
    tool, rows = Sparsity(), [[1.0, 0.0, 0.0], [2.0, 0.0, 3.0]]
    with amanda.apply(tool):
        for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.bfloat16):
            F.relu(torch.tensor(rows, dtype=dtype))
    output = one(tool.result(), "output", "relu")
    assert (output.executions, output.zeros, output.dead) == (4, 12, [1])


def test_options() -> None:
    wrong: Any = "middle"
    with pytest.raises(ValueError, match="limit must not be negative"):
        Sparsity(limit=-1)
    with pytest.raises(ValueError, match="block must be at least 1"):
        Sparsity(block=0)
    with pytest.raises(ValueError, match="channels must be auto, first or last"):
        Sparsity(channels=wrong)
    x = torch.zeros(2, 3, 5)
    assert one(measure(F.relu, x), "output", "relu").channels == 5
    assert one(measure(F.relu, x, channels="first"), "output", "relu").channels == 3


def test_the_result_has_all_forms() -> None:
    tool = Sparsity()
    assert isinstance(tool, HasResult)
    assert tool.result().table().rows == []
    layer = nn.Linear(3, 4)
    with amanda.apply(tool):
        layer(torch.ones(2, 3))
    found = tool.result()
    assert isinstance(found, Result)
    read = json.loads(found.to_json())
    assert read["format"] == "amanda.sparsity/1"
    assert [MeasuredTensor(**tensor) for tensor in read["tensors"]] == found.tensors
    assert [Product(**product) for product in read["products"]] == found.products
    assert len(found.table().rows) == len(found.tensors) == 4
    assert [row[1] for row in found.table("weight").rows] == ["Linear:weight"]
    assert [row[2] for row in found.table("product").rows] == [24]
    assert "measuring took" in found.table().title
    assert "<td>linear</td>" in found._repr_html_()
    wrong: Any = "place"
    with pytest.raises(ValueError, match="by must be"):
        found.table(wrong)


@pytest.mark.slow
def test_as_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = measure(F.relu, torch.tensor([[1.0, -1.0]])).to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["zeros"]) == [0, 1]


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
    x = torch.rand(3, 4, requires_grad=True)
    plain = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    with amanda.apply(Sparsity(gradients=True)):
        seen = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))
