"""The common operator types, which all backends share.

Owns the names and their meaning: of operator types, of the keys that a driver sets in contexts, of
the roles of inputs, and of the axes in a layout. A driver's `DriverInfo.vocabulary` maps its own op
types to them, so that ``context["type"] == "conv2d"`` means the same everywhere. For an operator
without a common type, ``context["type"]`` is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["AXES", "CONTEXT_KEYS", "INPUT_ROLES", "OP_TYPES", "backward_type_of"]

_FIXED = " that give an output of fixed size"
#: Common operator type -> meaning. The names are those that frameworks, NumPy and ONNX have in
#: common. A type says what is computed, but not from which positions: ``input_roles`` of a context
#: has these if they matter.
OP_TYPES: Mapping[str, str] = MappingProxyType(
    {
        # Matrix products
        "linear": "x @ w.T + b with a weight of (out, in); bias optional",
        "matmul": "product of the last two axes, batched over the others; an addend optional",
        "grouped_matmul": "one matrix product for each group of rows (experts)",
        "outer": "all products of two vectors' elements",
        "bilinear": "x1 @ w @ x2 + b",
        "einsum": "contraction written in index notation",
        # Linear algebra
        "inverse": "matrix inverse",
        "solve": "solution of a system of linear equations",
        "det": "determinant",
        "cholesky": "Cholesky factor",
        "qr": "QR factors",
        "svd": "singular values and vectors",
        "eigh": "eigenvalues and vectors of a symmetric matrix",
        "fft": "discrete Fourier transform; those of real values and inverses, too",
        # Convolution
        "conv1d": "1-D convolution",
        "conv2d": "2-D convolution, grouped and depthwise included",
        "conv3d": "3-D convolution",
        **{f"conv_transpose{n}d": f"gradient of a {n}-D convolution as a layer" for n in (1, 2, 3)},
        "unfold": "sliding windows laid out along an axis of their own",
        "fold": "sliding windows added back into place",
        # Recurrence and attention, where the backend runs them as one operator
        "rnn": "plain recurrent network over a sequence, or one step of it",
        "lstm": "long short-term memory over a sequence, or one step of it",
        "gru": "gated recurrent unit over a sequence, or one step of it",
        "attention": "scaled dot-product attention",
        "embedding": "rows of a table picked by index",
        "embedding_bag": "sums or means of rows of a table picked by index",
        # Normalisation
        "batch_norm": "normalised over batch and space",
        "layer_norm": "normalised over trailing axes",
        "group_norm": "normalised over groups of channels",
        "instance_norm": "normalised over space",
        "rms_norm": "divided by the root of the mean square",
        "weight_norm": "a weight as direction times length",
        "dropout": "random zeros in training",
        # Activations
        "relu": "max(x, 0)",
        "relu6": "min(max(x, 0), 6)",
        "leaky_relu": "x where positive, a multiple of it elsewhere",
        "prelu": "leaky ReLU with a learned slope",
        "rrelu": "leaky ReLU with a random slope",
        "threshold": "x above a threshold, a constant elsewhere",
        "elu": "exponential linear unit",
        "celu": "continuously differentiable exponential linear unit",
        "selu": "scaled exponential linear unit",
        "gelu": "Gaussian error linear unit",
        "glu": "one half of the input times the sigmoid of the other",
        "silu": "x * sigmoid(x)",
        "mish": "x * tanh(softplus(x))",
        "hardtanh": "clipped to an interval",
        "hardswish": "x * relu6(x + 3) / 6",
        "hardsigmoid": "relu6(x + 3) / 6",
        "hardshrink": "zero where |x| is small",
        "softshrink": "moved towards zero by a constant",
        "sigmoid": "logistic function",
        "log_sigmoid": "logarithm of the logistic function",
        "softplus": "log(1 + exp(x))",
        "softmax": "exponentials divided by their sum along an axis",
        "log_softmax": "logarithm of the softmax",
        "tanh": "hyperbolic tangent",
        # Pooling
        **{f"max_pool{n}d": f"maximum over {n}-D windows" for n in (1, 2, 3)},
        **{f"avg_pool{n}d": f"mean over {n}-D windows" for n in (1, 2, 3)},
        **{f"adaptive_avg_pool{n}d": f"mean over {n}-D windows{_FIXED}" for n in (1, 2, 3)},
        **{f"adaptive_max_pool{n}d": f"maximum over {n}-D windows{_FIXED}" for n in (1, 2, 3)},
        # Arithmetic, element by element
        "add": "sum",
        "sub": "difference",
        "mul": "product",
        "div": "quotient",
        "floor_div": "quotient rounded down",
        "mod": "remainder",
        "neg": "negative",
        "abs": "absolute value",
        "sign": "-1, 0 or 1",
        "reciprocal": "1 / x",
        "square": "x * x",
        "pow": "power",
        "sqrt": "square root",
        "rsqrt": "reciprocal of the square root",
        "exp": "exponential",
        "expm1": "exp(x) - 1",
        "log": "natural logarithm",
        "log1p": "log(1 + x)",
        "log2": "logarithm to base 2",
        "log10": "logarithm to base 10",
        "erf": "error function",
        "erfc": "1 - erf(x)",
        "sin": "sine",
        "cos": "cosine",
        "tan": "tangent",
        "asin": "inverse sine",
        "acos": "inverse cosine",
        "atan": "inverse tangent",
        "atan2": "angle of a point",
        "sinh": "hyperbolic sine",
        "cosh": "hyperbolic cosine",
        "floor": "rounded down",
        "ceil": "rounded up",
        "round": "rounded to the nearest",
        "trunc": "rounded towards zero",
        "clip": "limited to an interval",
        "lerp": "between two values, by a weight",
        "maximum": "larger of two",
        "minimum": "smaller of two",
        "complex": "complex numbers of their real and imaginary parts",
        "real": "real part",
        "imag": "imaginary part",
        "conj": "complex conjugate",
        # Choice, comparison and logic, element by element
        "where": "one of two values by a condition",
        "masked_fill": "a constant where a mask holds",
        "equal": "whether two are equal",
        "not_equal": "whether two differ",
        "less": "whether the first is smaller",
        "less_equal": "whether the first is not larger",
        "greater": "whether the first is larger",
        "greater_equal": "whether the first is not smaller",
        "logical_and": "both",
        "logical_or": "either or both",
        "logical_xor": "one but not both",
        "logical_not": "not",
        "bitwise_and": "both, bit by bit; of truth values the same as logical_and",
        "bitwise_or": "either or both, bit by bit",
        "bitwise_xor": "one but not both, bit by bit",
        "bitwise_not": "not, bit by bit",
        "isnan": "whether it is not a number",
        "isinf": "whether it is infinite",
        "isfinite": "whether it is a finite number",
        # Reductions and searches along an axis
        "sum": "sum over axes",
        "mean": "mean over axes",
        "prod": "product over axes",
        "var": "variance over axes; the mean with it, too",
        "std": "standard deviation over axes; the mean with it, too",
        "max": "maximum over axes",
        "min": "minimum over axes",
        "argmax": "index of the maximum",
        "argmin": "index of the minimum",
        "any": "whether any holds",
        "all": "whether all hold",
        "logsumexp": "logarithm of the sum of exponentials",
        "norm": "vector or matrix norm",
        "cumsum": "running sum",
        "cumprod": "running product",
        "topk": "largest values and their indices",
        "sort": "values in order and their indices",
        "argsort": "indices that put values in order",
        "nonzero": "indices of what is not zero",
        "count_nonzero": "how many are not zero",
        "unique": "each value once",
        "segment_reduce": "sum, product, mean, maximum or minimum of groups given by an index",
        "histogram": "how many values fall into each bin",
        # Shape and movement
        "reshape": "same elements in another shape",
        "transpose": "axes in another order",
        "concat": "joined along an axis",
        "stack": "joined along a new axis",
        "split": "cut along an axis",
        "slice": "elements picked by indices, ranges or a mask",
        "assign_slice": "elements set by indices, ranges or a mask",
        "assign": "the values of one tensor written into another",
        "gather": "elements picked along an axis by an index of the same rank",
        "scatter": "elements set or added along an axis at places given by an index",
        "expand": "broadcast to a shape",
        "tile": "repeated as a whole",
        "repeat": "repeated element by element",
        "squeeze": "axes of size 1 removed",
        "unsqueeze": "axes of size 1 added",
        "flip": "in reverse order along axes",
        "roll": "shifted along axes, what falls out coming in again",
        "tril": "lower triangle",
        "triu": "upper triangle",
        "diag": "diagonal of a matrix, or a matrix of a diagonal",
        "pad": "extended at the borders",
        "cast": "same values in another type or on another device",
        "bitcast": "same bits read as another type",
        "identity": "a copy or alias",
        "upsample": "resized by interpolation",
        "grid_sample": "values at given places by interpolation",
        "affine_grid": "places for grid_sample by an affine map",
        "depth_to_space": "channels moved into space",
        "space_to_depth": "space moved into channels",
        "channel_shuffle": "channels of groups interleaved",
        "one_hot": "1 at an index, 0 elsewhere",
        # Creation of tensors
        "constant": "a tensor of given values",
        "full": "a tensor of one value",
        "empty": "a tensor without values yet",
        "range": "values at equal distances",
        "eye": "identity matrix",
        "meshgrid": "coordinates of a grid",
        "random": "drawn from a distribution",
        # Quantization
        "quantize": "real values as integers with a scale",
        "dequantize": "integers with a scale as real values",
        "fake_quantize": "quantized and dequantized at once",
        # Losses and distances
        "cross_entropy": "log-softmax and negative log-likelihood",
        "nll_loss": "negative log-likelihood",
        "binary_cross_entropy": "cross entropy of probabilities of two classes",
        "binary_cross_entropy_with_logits": "sigmoid and binary cross entropy",
        "mse_loss": "mean squared error",
        "l1_loss": "mean absolute error",
        "smooth_l1_loss": "squared near zero, absolute elsewhere, divided by the limit",
        "huber_loss": "squared near zero, absolute elsewhere",
        "kl_div": "Kullback-Leibler divergence",
        "ctc_loss": "connectionist temporal classification",
        "cosine_similarity": "cosine of the angle of two vectors",
        "cdist": "distances of all pairs of rows",
        # Communication between processes
        "all_reduce": "a reduction over processes, whose result all of them have",
        "all_gather": "the parts of all processes joined, in all of them",
        "reduce_scatter": "a reduction over processes, of which each has a part",
        "broadcast": "the value of one process, in all of them",
        "all_to_all": "a part of each process to each process",
        "send": "a value to another process",
        "recv": "a value of another process",
        "barrier": "processes that wait until all have come",
        # Backward only
        "accumulate_grad": "a gradient added to that of a leaf",
        "reduce_grad": "a parameter's gradient when it has been reduced over processes",
    }
)

#: Key that a driver sets in `amanda_prepare_context` -> its value. A driver leaves out the keys of
#: roles and layouts that do not exist. ``type`` and ``backward_type`` are always there, with None
#: if there is no common type.
CONTEXT_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "type": "common operator type of a forward operator, one of `OP_TYPES`",
        "backward_type": "common operator type of a backward operator, made by `backward_type_of`",
        "input_roles": "roles of the leading inputs in the order of their positions, a tuple",
        "layout": "axes of the input and output of a layer, such as NCHW",
        "weight_layout": "axes of the weight, such as OI or HWIO",
        "group": "processes that communicate, a tuple of their ranks",
        "rank": "number of this process, of a collective or of a parameter's gradient",
        "world_size": "number of processes that run the program; likewise",
        "micro_batch": "that for which a pipeline computes now; of a reduced gradient, backward "
        "passes since the last step before its own",
        "stage": "number of the stage of a pipeline that has the operator",
        "mesh": "number of processes along each axis over which a reduced gradient is split",
        "placements": "how it is split or replicated along each of them, a tuple of texts",
        "bytes": "size of what this process gives to a collective, or gets if that is more",
        "wait": "seconds that the program spent in a collective last, waiting included; or None",
        "parts_not_seen": "why the operators of which a fused operator consists are not seen",
        "in_kernels": "True if the compiler fuses the operator into kernels that tools are shown",
        "operators": "contexts of the operators that a kernel of compiled code computes, a tuple",
        "not_compiled": "True if the program compiles the caller, which tools make run eagerly",
    }
)

#: Role of an input -> meaning. Positions differ by framework, roles do not.
INPUT_ROLES: Mapping[str, str] = MappingProxyType(
    {
        "input": "the value that the operator transforms",
        "weight": "the learned factor, kernel, table or scale",
        "bias": "the learned addend",
        "mean": "running mean of a normalisation",
        "variance": "running variance of a normalisation",
        "normalized_shape": "the axes that are normalised over, by their sizes",
        "num_groups": "number of groups of channels",
        "left": "first operand of an operation that is not commutative",
        "right": "second operand of an operation that is not commutative",
        "addend": "the value to which a matrix product is added",
        "query": "queries of attention",
        "key": "keys of attention",
        "value": "values of attention",
        "mask": "the positions that attention may use",
        "indices": "rows that are picked from the weight",
        "offsets": "where each bag of indices begins",
        "segments": "the bag of each index",
        "target": "the value with which a loss compares the input",
        "paddings": "widths of a border that is added first",
        "size": "the size to which the input is resized first",
        "output_shape": "shape of the output, if the input does not determine it",
        "output_like": "a tensor of the output's shape",
    }
)

#: Letter of a layout -> axis.
AXES: Mapping[str, str] = MappingProxyType(
    {
        "N": "batch",
        "C": "channels",
        "D": "depth",
        "H": "height",
        "W": "width",
        "O": "output channels or features of a weight",
        "I": "input channels or features of a weight",
        "M": "outputs for each input channel of a depthwise weight",
        "G": "groups, such as experts or a batch: each index has a product of its own",
    }
)


def backward_type_of(common_type: str) -> str:
    """Return the common type of the backward operators of a common forward type.

    >>> backward_type_of("conv2d")
    'conv2d_backward'
    """
    return f"{common_type}_backward"
