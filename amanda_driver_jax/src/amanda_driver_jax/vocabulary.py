"""Common operator types of JAX's operators: primitives, and functions that JAX itself jitted."""

from __future__ import annotations

from typing import Any

from amanda_core import OpContext
from amanda_core.vocabulary import backward_type_of

__all__ = ["OP_TYPES", "describe"]

#: Common type and the operators that have another name.
_OTHER_NAMES = """
    abs=fabs acos=arccos all=_reduce_all,reduce_and any=_reduce_any,reduce_or argmax=_argmax
    argmin=_argmin asin=arcsin assign_slice=dynamic_update_slice atan=arctan atan2=arctan2
    bitcast=bitcast_convert_type bitwise_and=and bitwise_not=invert,not bitwise_or=or
    bitwise_xor=xor cast=convert_element_type,astype clip=clamp concat=concatenate conj=conjugate
    diag=_diag,diagonal div=divide,true_divide einsum=_einsum equal=eq
    expand=broadcast,broadcast_in_dim flip=_flip,rev floor_div=floor_divide
    gather=_take,take_along_axis greater=gt greater_equal=ge hardsigmoid=hard_sigmoid
    hardswish=hard_silu hardtanh=hard_tanh
    identity=copy,copy_p,stop_gradient,positive,optimization_barrier inverse=inv
    isfinite=is_finite less=lt less_equal=le matmul=dot,dot_general,inner,vdot
    max=_reduce_max,reduce_max maximum=max mean=_mean min=_reduce_min,reduce_min minimum=min
    mod=remainder,rem,fmod mul=multiply neg=negative not_equal=ne one_hot=_one_hot pad=_pad
    pow=_power,integer_pow,power,float_power prod=_reduce_prod,reduce_prod
    random=_bernoulli,_categorical,_gumbel,_normal,_randint,_truncated_normal,_uniform range=iota
    reshape=ravel roll=_roll_static,_roll_dynamic round=rint
    scatter=scatter-add,scatter_add,scatter_mul,scatter_max,scatter_min sigmoid=logistic
    slice=dynamic_slice squeeze=_squeeze std=_std sub=subtract sum=_reduce_sum,reduce_sum
    topk=top_k transpose=_moveaxis,swapaxes var=_var where=_where,select,select_n
"""
#: Operators that are named like their type. ``max`` and ``min`` are JAX's names of ``maximum`` and
#: ``minimum``.
_SAME_NAME = """
    abs add argsort ceil celu cholesky clip complex cos cosh count_nonzero cumprod cumsum det div
    eigh elu erf erfc exp expm1 fft floor gather gelu glu greater greater_equal histogram imag
    isfinite isinf isnan leaky_relu less less_equal log log10 log1p log2 log_sigmoid log_softmax
    logical_and logical_not logical_or logical_xor logsumexp matmul maximum minimum mish mul neg
    norm not_equal outer pow qr real reciprocal relu relu6 reshape round rsqrt scatter selu
    sigmoid sign silu sin sinh slice softmax softplus sort split sqrt square squeeze stack sub svd
    tan tanh tile transpose tril triu trunc
"""

#: Operator -> common type, which tools read as ``context["type"]``.
OP_TYPES = {
    **{name: name for name in _SAME_NAME.split()},
    **{
        name: common_type
        for common_type, _, names in (entry.partition("=") for entry in _OTHER_NAMES.split())
        for name in names.split(",")
    },
}
_CONVOLUTION = "conv_general_dilated"
_SPACE = "DHW"


def describe(context: OpContext) -> None:
    """Add the common types, roles and layouts to the context of an op or backward op."""
    if not context.is_forward():
        common_type = None if context.forward is None else context.forward["type"]
        context["backward_type"] = None if common_type is None else backward_type_of(common_type)
        return
    context["type"] = OP_TYPES.get(context.op_type)
    if context.op_type == _CONVOLUTION:
        _describe_convolution(context)
    elif context["type"] == "matmul":
        _describe_product(context)
    elif context["type"] in ("sub", "div", "pow", "atan2", "mod", "floor_div"):
        context["input_roles"] = ("left", "right")


def _describe_convolution(context: OpContext) -> None:
    attrs = context.attrs
    numbers = attrs["dimension_numbers"]
    rank = len(numbers.rhs_spec) - 2
    if not 1 <= rank <= len(_SPACE):
        return
    # Inputs with holes are how a transposed convolution is written.
    transposed = any(length != 1 for length in attrs["lhs_dilation"])
    context["type"] = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
    context["input_roles"] = ("input", "weight")
    context["layout"] = _layout(numbers.lhs_spec, "NC" + _SPACE[-rank:])
    context["weight_layout"] = _layout(numbers.rhs_spec, "OI" + _SPACE[-rank:])


def _layout(axes: Any, letters: str) -> str:
    """Return the letters in the order of a tensor's axes."""
    found = [""] * len(letters)
    for axis, letter in zip(axes, letters, strict=True):
        found[axis] = letter
    return "".join(found)


def _describe_product(context: OpContext) -> None:
    context["input_roles"] = ("left", "right")
    ranks = [getattr(value, "ndim", 0) for value in context.get_inputs() or ()]
    numbers = context.attrs.get("dimension_numbers")
    contracted = numbers[0] if numbers is not None else ((ranks[0] - 1,), (max(ranks[1] - 2, 0),))
    reads = context.weights
    # `weight @ x`, as in Equinox.
    side = 0 if 0 in reads and 1 not in reads else 1
    if side == 0:
        context["input_roles"] = ("weight", "input")
    if ranks[side] == 2 and len(contracted[side]) == 1:
        context["weight_layout"] = "IO" if contracted[side][0] == 0 else "OI"
