"""The common words for operator types, shared by all backends.

Owns the words and their meaning. A driver's `DriverInfo.vocabulary` translates its own op types
into them, so that ``context["type"] == "conv2d"`` means the same everywhere. A backend's operator
that has no word here keeps ``context["type"]`` at None.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["OP_TYPES", "backward_word"]

#: Word -> meaning. Names follow the ONNX operator list in lower case where there is one entry.
OP_TYPES: Mapping[str, str] = MappingProxyType(
    {
        # Matrix products
        "linear": "x @ w.T + b with a weight of (out, in); bias optional",
        "matmul": "product of the last two axes, batched over the others",
        "bilinear": "x1 @ w @ x2 + b",
        "einsum": "contraction written in index notation",
        # Convolution
        "conv1d": "1-D convolution",
        "conv2d": "2-D convolution, grouped and depthwise included",
        "conv3d": "3-D convolution",
        "conv_transpose1d": "gradient of a 1-D convolution as a layer",
        "conv_transpose2d": "gradient of a 2-D convolution as a layer",
        "conv_transpose3d": "gradient of a 3-D convolution as a layer",
        # Recurrence and attention, where the backend runs them as one operator
        "rnn": "plain recurrent network over a sequence",
        "lstm": "long short-term memory over a sequence",
        "gru": "gated recurrent unit over a sequence",
        "attention": "scaled dot-product attention",
        "embedding": "rows of a table picked by index",
        # Normalisation
        "batch_norm": "normalised over batch and space",
        "layer_norm": "normalised over trailing axes",
        "group_norm": "normalised over groups of channels",
        "instance_norm": "normalised over space",
        "rms_norm": "divided by the root of the mean square",
        "dropout": "random zeros in training",
        # Activations
        "relu": "max(x, 0)",
        "relu6": "min(max(x, 0), 6)",
        "leaky_relu": "x where positive, a multiple of it elsewhere",
        "prelu": "leaky ReLU with a learned slope",
        "elu": "exponential linear unit",
        "selu": "scaled exponential linear unit",
        "gelu": "Gaussian error linear unit",
        "silu": "x * sigmoid(x)",
        "mish": "x * tanh(softplus(x))",
        "hardtanh": "clipped to an interval",
        "hardswish": "x * relu6(x + 3) / 6",
        "hardsigmoid": "relu6(x + 3) / 6",
        "sigmoid": "logistic function",
        "softplus": "log(1 + exp(x))",
        "softmax": "exponentials divided by their sum along an axis",
        "log_softmax": "logarithm of the softmax",
        "tanh": "hyperbolic tangent",
        # Pooling
        "max_pool1d": "maximum over 1-D windows",
        "max_pool2d": "maximum over 2-D windows",
        "max_pool3d": "maximum over 3-D windows",
        "avg_pool1d": "mean over 1-D windows",
        "avg_pool2d": "mean over 2-D windows",
        "avg_pool3d": "mean over 3-D windows",
        "adaptive_avg_pool2d": "mean over windows that give an output of fixed size",
        "adaptive_max_pool2d": "maximum over windows that give an output of fixed size",
        # Arithmetic, element by element
        "add": "sum",
        "sub": "difference",
        "mul": "product",
        "div": "quotient",
        "neg": "negative",
        "pow": "power",
        "exp": "exponential",
        "log": "natural logarithm",
        "sqrt": "square root",
        "rsqrt": "reciprocal of the square root",
        "abs": "absolute value",
        "clip": "limited to an interval",
        "where": "one of two values by a condition",
        "erf": "error function",
        "sin": "sine",
        "cos": "cosine",
        "maximum": "larger of two",
        "minimum": "smaller of two",
        # Reductions
        "sum": "sum over axes",
        "mean": "mean over axes",
        "max": "maximum over axes",
        "min": "minimum over axes",
        "argmax": "index of the maximum",
        "argmin": "index of the minimum",
        "topk": "largest values and their indices",
        "norm": "vector or matrix norm",
        "cumsum": "running sum",
        # Shape and movement
        "reshape": "same elements in another shape",
        "transpose": "axes in another order",
        "concat": "joined along an axis",
        "stack": "joined along a new axis",
        "split": "cut along an axis",
        "slice": "elements picked by indices or ranges",
        "assign_slice": "elements set by indices or ranges",
        "gather": "elements picked along an axis by an index of the same rank",
        "scatter": "elements set along an axis by an index of the same rank",
        "expand": "broadcast to a shape",
        "squeeze": "axes of size 1 removed",
        "unsqueeze": "axes of size 1 added",
        "pad": "extended at the borders",
        "cast": "same values in another type",
        "identity": "a copy or alias",
        "upsample": "resized by interpolation",
        # Losses
        "cross_entropy": "log-softmax and negative log-likelihood",
        "nll_loss": "negative log-likelihood",
        "mse_loss": "mean squared error",
        # Backward only
        "accumulate_grad": "a gradient added to that of a leaf",
    }
)


def backward_word(word: str) -> str:
    """The word for a backward operator of the forward operator type `word`.

    >>> backward_word("conv2d")
    'conv2d_backward'
    """
    return f"{word}_backward"
