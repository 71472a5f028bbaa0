"""Layer rules: how paths go through the operators of each framework.

Defines the mapping rules that write a `LayerRule` into contexts. Imports no framework; NumPy is
imported only when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core import OpContext
from amanda_tools.effective_path.model import LayerRule, Unsuited
from amanda_tools.effective_path.slices import per_head, repeated, tensorflow_slice, torch_slice
from amanda_tools.kit.mapping import MappingTool
from amanda_tools.kit.operators.entries import words

__all__ = ["BACKENDS", "LAYER", "rules"]

#: Key of a context: the `LayerRule` of an operator through which paths go.
LAYER = "effective_path.layer"


#: The first parts of the namespaces that have rules.
BACKENDS = ("pytorch", "tensorflow")


def rules() -> MappingTool:
    """Return the mapping rules for each of `BACKENDS`."""
    return MappingTool(
        [
            [backend, _by(known)]
            for backend, known in zip(BACKENDS, (_TORCH, _TENSORFLOW), strict=True)
        ]
    )


def _by(known: Mapping[str, Callable[[OpContext], LayerRule | None]]) -> Callable[..., None]:
    def note(context: OpContext) -> None:
        word = context["type"]
        if context.is_backward() or not isinstance(word, str):
            return
        rule = known[word](context) if word in known else _common(word, context)
        if rule is not None:
            context[LAYER] = rule

    return note


#: Elementwise functions of one input, including those that do not change values.
_PASSING = words(
    "relu relu6 leaky_relu prelu rrelu threshold elu celu selu gelu silu mish hardtanh hardswish "
    "hardsigmoid hardshrink softshrink sigmoid log_sigmoid softplus tanh clip dropout identity "
    "cast softmax log_softmax"
)
_RESHAPING = words("reshape squeeze unsqueeze")
#: Normalizations in one operator; their statistics are taken as given.
_NORMALIZING = words("batch_norm layer_norm group_norm instance_norm rms_norm")
#: Elementwise functions of one input that may turn its sign.
_TURNING = words("neg pow square sqrt rsqrt reciprocal exp log abs")
_REDUCING = words("mean sum")
_SHIFTING = words("add sub")
_SCALING = words("mul div")


def _common(word: str, context: OpContext) -> LayerRule | None:
    """Return the rule for an operator that is the same in every framework."""
    if word in _PASSING:
        return LayerRule("reshape", arguments=_same_shape)
    if word in _RESHAPING:
        return LayerRule("reshape", arguments=_same_samples, is_view=True)
    if word in _NORMALIZING:
        return LayerRule("batch_norm", arguments=_same_shape)
    if word in _TURNING:
        return LayerRule("scale")
    if word in _SHIFTING:
        roles = context.get("input_roles", ())
        swapped = roles[:2] == ("right", "left")
        sign = -1.0 if word == "sub" else 1.0

        def factors(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> Any:
            second = sign * given.get("alpha", 1)
            return {"factors": [second, 1.0] if swapped else [1.0, second]}

        return LayerRule("add", (0, 1), factors)
    if word in _SCALING:
        return LayerRule("scale", (0, 1))
    return None


def _same_shape(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
    if operands[0].shape != output.shape:
        raise Unsuited("its output has another shape than its input")
    return {}


def _same_samples(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
    if operands[0].shape[:1] != output.shape[:1]:
        raise Unsuited("it changes the axis of samples")
    return {}


def _not_samples(axes: Sequence[int]) -> None:
    if 0 in axes:
        raise Unsuited("it works along the axis of samples")


# PyTorch.


def _torch_product(context: OpContext) -> LayerRule | None:
    roles = context.get("input_roles", ())
    layout = context.get("weight_layout", "IO")
    if "weight" in roles:
        operand, weight = roles.index("input"), roles.index("weight")
    elif "right" in roles:
        operand, weight = roles.index("left"), roles.index("right")
    else:
        return None
    return LayerRule(
        "linear", (operand,), lambda given, operands, output: {"layout": layout}, weight
    )


def _torch_conv(context: OpContext) -> LayerRule:
    layout, axes = context["layout"], context["weight_layout"]

    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        rank = _rank_of(operands[0], layout)
        stride, dilation = _each(given["stride"], rank), _each(given["dilation"], rank)
        padding = given["padding"]
        if padding == "same":
            kernel = [given["weight"].shape[axes.index(axis)] for axis in layout[2:]]
            before = [(length - 1) * by // 2 for length, by in zip(kernel, dilation, strict=True)]
        else:
            before = _each(0 if padding == "valid" else padding, rank)
        return {
            "layout": layout,
            "weight_layout": axes,
            "stride": stride,
            "before": before,
            "dilation": dilation,
        }

    return LayerRule("conv", (0,), arguments, 1)


def _torch_pool(context: OpContext) -> LayerRule:
    layout = context["layout"]
    kind = "max_pool" if "max" in context["type"] else "avg_pool"

    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        rank = _rank_of(operands[0], layout)
        if "output_size" in given:
            return _adaptive(layout, operands[0], output)
        kernel = _each(given["kernel_size"], rank)
        return {
            "layout": layout,
            "kernel": kernel,
            "stride": _each(given["stride"], rank) if given["stride"] else kernel,
            "before": _each(given["padding"], rank),
            "dilation": _each(given.get("dilation", 1), rank),
        }

    return LayerRule(kind, (0,), arguments)


def _adaptive(layout: str, x: Any, output: Any) -> dict[str, Any]:
    kernel = []
    for size, places in zip(x.shape[2:], output.shape[2:], strict=True):
        ends = [-(-(place + 1) * size // places) for place in range(places)]
        kernel.append(max(end - place * size // places for place, end in enumerate(ends)))
    return {"layout": layout, "kernel": kernel, "adaptive": True}


def _torch_reduction(context: OpContext) -> LayerRule:
    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        axes = given.get("dim")
        return _reduced(range(operands[0].ndim) if axes is None else axes, operands[0])

    return LayerRule("mean", (0,), arguments)


def _reduced(axes: Any, x: Any) -> dict[str, Any]:
    axes = [axes] if isinstance(axes, int) else list(axes) or range(x.ndim)
    found = [int(axis) % x.ndim for axis in axes]
    _not_samples(found)
    return {"axes": found}


def _torch_expand(context: OpContext) -> LayerRule | None:
    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        return {"places": repeated(operands[0], output)}

    return LayerRule("slice", (0,), arguments) if context.op_type in _EXPANDING else None


#: Functions of PyTorch that repeat elements along axes of length 1, and that split a value.
_EXPANDING = words("expand expand_as broadcast_to")
_SPLITTING = words("split chunk tensor_split unbind unsafe_split split_with_sizes")


def _torch_split(context: OpContext) -> LayerRule | None:
    unbinds = context.op_type == "unbind"

    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        axis = int(given.get("dim") or 0) % operands[0].ndim
        _not_samples([axis])
        return {"axis": axis, "unbinds": unbinds}

    return LayerRule("split", (0,), arguments) if context.op_type in _SPLITTING else None


def _torch_attention(context: OpContext) -> LayerRule | None:
    if context.op_type != "scaled_dot_product_attention":
        return None
    return LayerRule("attention", (0, 1, 2), _attention_weights)


def _attention_weights(
    given: Mapping[str, Any], operands: Sequence[Any], output: Any
) -> dict[str, Any]:
    import numpy as np

    if len(operands) != 3 or len({id(operand) for operand in operands}) != 3:
        raise Unsuited("its query, key or value does not depend on the network's input")
    query, key, value = (np.asarray(operand, float) for operand in operands)
    if query.ndim < 3 or key.shape[:-2] != value.shape[:-2]:
        raise Unsuited("its keys and values have different heads")
    key, value = (per_head(array, query) for array in (key, value))
    if query.shape[:-2] != key.shape[:-2]:
        raise Unsuited("its queries and keys have different samples or heads")
    scale = given.get("scale")
    scores = query @ key.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = np.tri(*scores.shape[-2:], dtype=bool)
    if isinstance(mask, np.ndarray):
        with np.errstate(over="ignore"):
            scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = np.nan_to_num(weights / weights.sum(axis=-1, keepdims=True))
    # Dropout, among others, cannot be computed again.
    if not np.allclose(weights @ value, output, rtol=1e-2, atol=1e-3 * np.abs(value).max()):
        raise Unsuited("its attention weights cannot be computed again, as with dropout")
    return {"weights": weights}


def _concat(types: frozenset[str], name: str) -> Callable[[OpContext], LayerRule | None]:
    """Return the rule for concatenations of these types whose axis has this name."""

    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        axis = int(given[name]) % output.ndim
        _not_samples([axis])
        return {"axis": axis}

    rule = LayerRule("concat", (0,), arguments)
    return lambda context: rule if context.op_type in types else None


def _torch_pad(context: OpContext) -> LayerRule:
    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        x, widths = operands[0], list(given["pad"])
        before = [0] * x.ndim
        for place in range(len(widths) // 2):
            before[x.ndim - 1 - place] = int(widths[2 * place])
        return _padded(before, x, output)

    return LayerRule("pad", (0,), arguments)


def _padded(before: Sequence[int], x: Any, output: Any) -> dict[str, Any]:
    sizes = zip(before, x.shape, output.shape, strict=True)
    if any(width < 0 or width + size > whole for width, size, whole in sizes):
        raise Unsuited("it cuts its input")
    _not_samples([axis for axis, width in enumerate(before) if width])
    return {"before": list(before)}


def _torch_transpose(context: OpContext) -> LayerRule:
    name = context.op_type

    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        axes = list(range(output.ndim))
        if "dims" in given:
            axes = [int(axis) % output.ndim for axis in given["dims"]]
        elif "dim0" in given or "axis0" in given or name == "mT":
            first = int(given.get("dim0", given.get("axis0", -2))) % output.ndim
            second = int(given.get("dim1", given.get("axis1", -1))) % output.ndim
            axes[first], axes[second] = axes[second], axes[first]
        else:
            raise Unsuited(f"{name} is not followed")
        if axes[0] != 0:
            raise Unsuited("it moves the axis of samples")
        return {"axes": axes}

    return LayerRule("transpose", (0,), arguments)


def _rank_of(x: Any, layout: str) -> int:
    if x.ndim != len(layout):
        raise Unsuited("its input has no axis of samples")
    return len(layout) - 2


def _each(value: Any, rank: int) -> list[int]:
    """Return one number for each axis, from a single number or a list."""
    given = [value] * rank if isinstance(value, int) else list(value)
    return [int(item) for item in (given * rank if len(given) == 1 else given)]


_RANKS = ("1d", "2d", "3d")
_POOLS = [
    f"{kind}{rank}"
    for kind in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
    for rank in _RANKS
]
_TORCH: Mapping[str, Callable[[OpContext], LayerRule | None]] = {
    "linear": _torch_product,
    "matmul": _torch_product,
    **dict.fromkeys([f"conv{rank}" for rank in _RANKS], _torch_conv),
    **dict.fromkeys(_POOLS, _torch_pool),
    **dict.fromkeys(_REDUCING, _torch_reduction),
    "concat": _concat(words("cat concat concatenate"), "dim"),
    "pad": _torch_pad,
    "slice": torch_slice,
    "expand": _torch_expand,
    "split": _torch_split,
    "unbind": _torch_split,
    "attention": _torch_attention,
    "transpose": _torch_transpose,
}


# TensorFlow.


def _tensorflow_product(context: OpContext) -> LayerRule | None:
    layout = context.get("weight_layout")
    if layout is None or context.op_type != "MatMul" or context.attrs.get("transpose_a"):
        return None
    return LayerRule("linear", (0,), lambda given, operands, output: {"layout": layout}, 1)


def _tensorflow_conv(context: OpContext) -> LayerRule | None:
    if context.get("input_roles") != ("input", "weight"):
        return None
    layout, axes = context["layout"], context["weight_layout"]

    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        sizes = dict(zip(axes, given["filter"].shape, strict=True))
        kernel = [sizes[axis] for axis in layout if axis not in "NC"]
        return {"weight_layout": axes, **_windows(layout, kernel, given, operands[0], output)}

    return LayerRule("conv", (0,), arguments, 1)


def _tensorflow_pool(context: OpContext) -> LayerRule | None:
    if "ksize" not in context.attrs:
        return None
    layout = context["layout"]
    kind = "max_pool" if "max" in context["type"] else "avg_pool"

    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        kernel = _of_space(given["ksize"], layout)
        return {"kernel": kernel, **_windows(layout, kernel, given, operands[0], output)}

    return LayerRule(kind, (0,), arguments)


def _windows(
    layout: str, kernel: Sequence[int], given: Mapping[str, Any], x: Any, output: Any
) -> dict[str, Any]:
    stride = _of_space(given["strides"], layout)
    dilation = _of_space(given.get("dilations") or [1] * len(layout), layout)
    padding = given["padding"]
    padding = padding.decode() if isinstance(padding, bytes) else str(padding)
    before = [0] * len(kernel)
    if padding == "EXPLICIT":
        before = _of_space(list(given["explicit_paddings"])[::2], layout)
    elif padding == "SAME":
        sizes, places = _of_space(x.shape, layout), _of_space(output.shape, layout)
        for axis, size in enumerate(sizes):
            reach = (places[axis] - 1) * stride[axis] + (kernel[axis] - 1) * dilation[axis] + 1
            before[axis] = max(0, reach - size) // 2
    return {"layout": layout, "stride": stride, "before": before, "dilation": dilation}


def _of_space(values: Sequence[Any], layout: str) -> list[int]:
    return [int(value) for axis, value in zip(layout, values, strict=True) if axis not in "NC"]


def _tensorflow_reduction(context: OpContext) -> LayerRule:
    return LayerRule(
        "mean",
        (0,),
        lambda given, operands, output: _reduced(
            given["reduction_indices"].reshape(-1).tolist(), operands[0]
        ),
    )


def _tensorflow_pad(context: OpContext) -> LayerRule:
    return LayerRule(
        "pad",
        (0,),
        lambda given, operands, output: _padded(
            [int(width) for width in given["paddings"][:, 0]], operands[0], output
        ),
    )


def _tensorflow_transpose(context: OpContext) -> LayerRule:
    def arguments(given: Mapping[str, Any], operands: Sequence[Any], output: Any) -> dict[str, Any]:
        axes = [int(axis) for axis in given["perm"]]
        if axes[0] != 0:
            raise Unsuited("it moves the axis of samples")
        return {"axes": axes}

    return LayerRule("transpose", (0,), arguments)


def _tensorflow_add(context: OpContext) -> LayerRule | None:
    if context.op_type == "AddN":
        return LayerRule("add", (0,))
    return None if "Assign" in context.op_type else _common("add", context)


_TENSORFLOW: Mapping[str, Callable[[OpContext], LayerRule | None]] = {
    "matmul": _tensorflow_product,
    **dict.fromkeys([f"conv{rank}" for rank in _RANKS], _tensorflow_conv),
    **dict.fromkeys(_POOLS, _tensorflow_pool),
    **dict.fromkeys(_REDUCING, _tensorflow_reduction),
    "concat": _concat(words("ConcatV2"), "axis"),
    "pad": _tensorflow_pad,
    "slice": tensorflow_slice,
    "transpose": _tensorflow_transpose,
    "add": _tensorflow_add,
}
