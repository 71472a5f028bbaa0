"""Rules of the rewriting tool: patterns and their replacements.

A replacement that needs a framework imports it when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core.interface.namespace import matches
from amanda_tools.rewriting.patterns import Input, Operator

__all__ = ["RULES", "Matched", "Rule", "Taken"]


@dataclass
class Taken:
    """One operator of a match, as it was called in one execution.

    Attributes:
        type: The common type, or the framework's if there is none.
        inputs: Inputs by position. The output of another operator of the match may be a
            placeholder.
        names: Names of the input positions.
        attrs: Attributes, which have no position.
        run: Runs the operator itself on inputs by position.
    """

    type: str
    inputs: Sequence[Any]
    names: Sequence[str]
    attrs: Mapping[str, Any]
    run: Callable[[Sequence[Any]], Any]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an input or attribute by its name."""
        if name in self.names:
            return self.inputs[self.names.index(name)]
        return self.attrs.get(name, default)


@dataclass
class Matched:
    """One execution of a match.

    Attributes:
        name: Readable name of its last operator.
        ops: Name in the pattern -> operator, without optional operators that are missing.
        inputs: Name of an input -> value.
        tell: Passes a named value to the listeners and returns it, or what a listener returns for
            it.
    """

    name: str
    ops: Mapping[str, Taken]
    inputs: Mapping[str, Any]
    tell: Callable[[str, Any], Any] = lambda name, value: value


@dataclass(frozen=True)
class Rule:
    """A pattern and its replacement.

    Attributes:
        name: Name of the rule.
        pattern: The operators.
        replacement: Returns what replaces the outputs of the last operator.
        guard: Returns why an execution must not be rewritten, or None.
        head: For graphs. Given the constant inputs and attributes of each operator by name, returns
            a function that computes the result from the inputs of the first operator, or the reason
            why it cannot. The other operators then pass on their first input. If `head` is None,
            the operators pass on their inputs and the last one computes `replacement`.
        framework: Namespaces of the rule, such as ``pytorch`` or ``*/*/eager``; None for any.
        saves_result: Whether gradients are computed with the result of `replacement`, as those of a
            softmax or of a fused attention are. Then matches whose value the program writes in
            place are refused.
    """

    name: str
    pattern: Operator
    replacement: Callable[[Matched], Any]
    guard: Callable[[Matched], str | None] = lambda match: None
    head: Callable[[Mapping[str, Mapping[str, Any]]], Callable[..., Any] | str] | None = None
    framework: str | None = None
    saves_result: bool = False

    def is_for(self, namespace: str) -> bool:
        """Return True if the rule applies in a namespace."""
        return self.framework is None or matches(self.framework, namespace)


# A convolution and the normalization after it.

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


def _conv_bn_guard(match: Matched) -> str | None:
    norm = match.ops["norm"]
    training = norm.get("training", norm.get("is_training", False))
    if training:
        return "the normalisation is in training"
    if "data_format" in norm.attrs and _text(norm.attrs["data_format"]) != "NHWC":
        return "the channels are not last"
    if norm.get("running_mean", norm.get("mean")) is None:
        return "the normalisation has no statistics"
    return None


def _conv_bn(match: Matched) -> Any:
    conv, norm = match.ops["conv"], match.ops["norm"]
    if "running_mean" in norm.names:
        return _torch_conv_bn(conv, norm)
    scale = norm.get("scale") / (norm.get("variance") + norm.get("epsilon")) ** 0.5
    x, weight = conv.inputs
    (output,) = conv.run([x, weight * scale])
    mean, variance = norm.get("mean"), norm.get("variance")
    return [output + (norm.get("offset") - mean * scale), mean, variance, mean, variance, mean[:0]]


def _torch_conv_bn(conv: Taken, norm: Taken) -> Any:
    import torch

    mean = norm.get("running_mean")
    scale = torch.rsqrt(norm.get("running_var") + norm.get("eps"))
    if norm.get("weight") is not None:
        scale = scale * norm.get("weight")
    inputs = list(conv.inputs)
    weight, bias = inputs[1], inputs[2]
    inputs[1] = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    shift = -mean if bias is None else bias - mean
    inputs[2] = shift * scale
    if norm.get("bias") is not None:
        inputs[2] = inputs[2] + norm.get("bias")
    return conv.run(inputs)


def _tensorflow_conv_bn(constants: Mapping[str, Mapping[str, Any]]) -> Callable[..., Any] | str:
    """Return the function for a convolution in a graph whose normalization is constant."""
    import tensorflow as tf

    norm, attrs = constants["norm"], constants["conv"]
    if norm.get("is_training"):
        return "the normalisation is in training"
    if _text(norm["data_format"]) != "NHWC":
        return "the channels are not last"
    if attrs.get("explicit_paddings"):
        return "its padding is explicit"
    scale = norm["scale"] / (norm["variance"] + norm["epsilon"]) ** 0.5
    shift = norm["offset"] - norm["mean"] * scale
    padding = _text(attrs["padding"])

    def folded(x: Any, weight: Any) -> Any:
        output = tf.nn.conv2d(
            x, weight * scale, attrs["strides"], padding, dilations=attrs["dilations"]
        )
        return output + shift

    return folded


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _one_norm(framework: str) -> Rule:
    """Return the rule for normalization in one operator."""
    weighted = Operator(
        _CONVOLUTIONS,
        {0: Input("x"), 1: Input("weight")},
        "conv",
        where=lambda op: op.type != "DepthwiseConv2dNative",
    )
    norm = Operator(("batch_norm",), {0: weighted}, "norm")
    return Rule("conv_bn", norm, _conv_bn, _conv_bn_guard, _tensorflow_conv_bn, framework)


# The same in TensorFlow and Keras, where normalization in evaluation is a factor and a term.


def _written_norm(kind: str) -> Rule:
    """Return the rule for one kind of TensorFlow convolution."""
    convolution = Operator((kind,), {0: Input("x"), 1: Input("weight")}, "conv")
    biased = Operator(("BiasAdd",), {0: convolution, 1: Input("bias")}, "biased", optional=True)
    scaled = Operator(("Mul",), {0: biased, 1: Input("scale")}, "scaled")
    norm = Operator(("Add", "AddV2"), {0: scaled, 1: Input("shift")}, "norm")

    def replacement(match: Matched) -> Any:
        x, weight, scale = (match.inputs[name] for name in ("x", "weight", "scale"))
        # The last two axes of a depthwise weight together index the output channels.
        factor = _reshaped(scale, [-1] if kind == "Conv2D" else weight.shape[-2:])
        (output,) = match.ops["conv"].run([x, weight * factor])
        bias = match.inputs.get("bias")
        shift = match.inputs["shift"]
        return [output + (shift if bias is None else shift + bias * scale)]

    def guard(match: Matched) -> str | None:
        if _text(match.ops["conv"].attrs["data_format"]) != "NHWC":
            return "the channels are not last"
        *_, depth, width = match.inputs["weight"].shape
        channels = width if kind == "Conv2D" or None in (depth, width) else depth * width
        *others, factors = match.inputs["scale"].shape or [None]
        if factors is None or factors != channels or any(size != 1 for size in others):
            return "its factor is not one for each channel"
        return None

    return Rule("conv_bn", norm, replacement, guard, framework="tensorflow")


def _reshaped(vector: Any, shape: Any) -> Any:
    import tensorflow as tf

    return tf.reshape(vector, shape)


# Attention: softmax(Q K^T * scale + mask) V, and the operator that computes it in one.


def _attention_pattern() -> Operator:
    scores = Operator(("matmul",), {0: Input("query"), 1: Input("key")}, "scores")
    scaled = Operator(("mul", "div"), {0: scores, 1: Input("scale")}, "scaled", optional=True)
    masked = Operator(("add",), {0: scaled, 1: Input("mask")}, "masked", True, optional=True)
    softmax = Operator(("softmax",), {0: masked}, "softmax")
    cast = Operator(("cast",), {0: softmax}, "cast", optional=True)
    dropout = Operator(("dropout",), {0: cast}, "dropout", optional=True)
    return Operator(("matmul",), {0: dropout, 1: Input("value")}, "attention")


def _attention_guard(match: Matched) -> str | None:
    dropout = match.ops.get("dropout")
    if dropout is not None and dropout.get("train") and dropout.get("p"):
        return "its dropout is random"
    query, axis = match.inputs["query"], match.ops["softmax"].get("dim")
    if axis not in (-1, query.dim() - 1):
        return "the softmax is not over the last axis"
    if query.dim() < 3 or match.inputs["key"].dim() != query.dim():
        return "it is not a batch of heads"
    if isinstance(match.inputs.get("scale"), bool) or match.ops["scores"].names[0] != "input":
        return "it is called in another way"
    return None


def _fused_attention(match: Matched) -> Any:
    import torch

    query, key, value = (match.inputs[name] for name in ("query", "key", "value"))
    factor: Any = match.inputs.get("scale", 1.0)
    scaled = match.ops.get("scaled")
    if scaled is not None and scaled.type == "div":
        factor = 1.0 / factor
    if isinstance(factor, torch.Tensor):
        query, factor = query * factor, 1.0
    mask = match.inputs.get("mask")
    if mask is not None and match.ops["masked"].get("alpha", 1) != 1:
        mask = mask * match.ops["masked"].get("alpha")
    return torch.nn.functional.scaled_dot_product_attention(
        query, key.transpose(-1, -2), value, attn_mask=mask, scale=float(factor)
    )


def _softmax_guard(match: Matched) -> str | None:
    return "its dropout is random" if match.ops["attention"].get("dropout_p") else None


def _softmax_attention(match: Matched) -> Any:
    import torch

    given = match.ops["attention"].get
    query, key, value = given("query"), given("key"), given("value")
    if given("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(repeats, -3)
        value = value.repeat_interleave(repeats, -3)
    scale = given("scale")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = given("attn_mask")
    if given("is_causal"):
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = ones.tril()
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    probabilities = match.tell("probabilities", torch.softmax(scores, -1))
    return probabilities @ value


SDPA = Rule(
    "sdpa",
    _attention_pattern(),
    _fused_attention,
    _attention_guard,
    framework="pytorch",
    saves_result=True,
)
SOFTMAX = Rule(
    "softmax",
    Operator(("scaled_dot_product_attention",), {0: Input("query")}, "attention"),
    _softmax_attention,
    _softmax_guard,
    framework="pytorch",
)
#: Name -> the rules with this name, one for each form of it in the frameworks.
RULES: Mapping[str, Sequence[Rule]] = {
    "conv_bn": (
        *(_one_norm(framework) for framework in ("pytorch", "tensorflow")),
        *(_written_norm(kind) for kind in ("Conv2D", "DepthwiseConv2dNative")),
    ),
    "sdpa": (SDPA,),
    "softmax": (SOFTMAX,),
}
