"""Formulas for operators without a common type, by framework.

Defines the mapping rules that write `FORMULA` into contexts. Imports no framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.vocabulary import OP_TYPES
from amanda_tools.flops.formulas import (
    Count,
    Formula,
    attention_gradients,
    attention_parts,
    elementwise,
    formula_of,
    packed_attention,
    packed_projections,
)
from amanda_tools.flops.scripts import scripted
from amanda_tools.kit.mapping import MappingTool
from amanda_tools.kit.operators.entries import words

__all__ = ["APART", "FORMULA", "formula_for", "library_formulas", "rules"]

#: Key of a context: the `Formula` of an operator, or None if it costs nothing.
FORMULA = "flops.formula"
#: Key of a context: whether each gradient has a backward operator of its own, which is counted
#: instead. In a graph, requesting a gradient would cause it to be computed.
APART = "flops.apart"


def library_formulas() -> dict[str, Count]:
    """Return the formulas that installed libraries have by the entry point ``amanda.flops``.

    Each entry point is a mapping from types of operators to functions.
    """
    found: dict[str, Count] = {}
    for point in entry_points(group="amanda.flops"):
        found.update(point.load())
    return found


def formula_for(context: OpContext, own: Mapping[str, Count]) -> Formula | str | None:
    """Return the formula of an operator, None if it costs nothing, or the reason why it has none.

    Args:
        context: Context of the operator, with its inputs and after the `rules`.
        own: Formulas of the user and of libraries, which come before others.
    """
    word = context["type"]
    count = next((own[name] for name in (context.op_type, word) if name in own), None)
    if count is not None:
        return Formula("matmul", tuple(range(len(context.get_inputs() or ()))), count, None)
    if FORMULA in context:
        found: Formula | str | None = context[FORMULA]
        return found
    return formula_of(word, context) if word in OP_TYPES else "no formula"


def rules() -> MappingTool:
    """Return the mapping rules for PyTorch and TensorFlow."""
    return MappingTool([["pytorch", _torch], ["tensorflow", _tensorflow]])


def _torch(context: OpContext) -> None:
    if context.is_backward():
        return
    name = context.op_type
    if name in _TORCH_FREE:
        context[FORMULA] = None
    elif name.removesuffix("_") in _TORCH_ELEMENTWISE:
        context[FORMULA] = elementwise()
    elif name in _TORCH:
        context[FORMULA] = _TORCH[name](context)
    elif "::" in name and (registered := _registered(name, context)) is not None:
        context[FORMULA] = registered
    elif (script := scripted(context)) is not None:
        context[FORMULA] = script


def _tensorflow(context: OpContext) -> None:
    if context.is_backward():
        return
    name = context.op_type
    context[APART] = not context.namespace.endswith("/eager")
    if name in _TENSORFLOW_FREE:
        context[FORMULA] = None
    elif name in _TENSORFLOW_ELEMENTWISE:
        context[FORMULA] = elementwise()
    elif name in _TENSORFLOW:
        context[FORMULA] = _TENSORFLOW[name](context)


# PyTorch.


def _registered(name: str, context: OpContext) -> Formula | None:
    """Return the formula that PyTorch's own registry has for an operator of `torch.library`.

    Such a function takes shapes in the place of tensors, and returns two FLOPs for each
    multiply-accumulate.
    """
    import torch
    from torch.utils.flop_counter import flop_registry

    namespace, _, plain = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), plain.partition(".")[0], None)
    formula = flop_registry.get(packet)
    if formula is None:
        return None
    given = list(context.get_inputs() or ())

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        values = [one if size is None else size for one, size in zip(given, inputs, strict=True)]
        return int(formula(*values, out_val=outputs[0] if len(outputs) == 1 else outputs)) // 2

    tensors = [None if _has_tensor(context, one) else one for one in given]
    given[:] = tensors  # No tensor is kept.
    return Formula("matmul", tuple(range(len(given))), count, None)


def _has_tensor(context: OpContext, value: Any) -> bool:
    facts, items = context.facts, value if isinstance(value, (list, tuple)) else [value]
    return facts is not None and any(map(facts.is_tensor, items))


# Views of a tensor, its attributes, and how its elements are stored.
_TORCH_FREE = words(
    "data grad requires_grad_ retain_grad as_strided as_strided_scatter select_scatter "
    "slice_scatter diagonal_scatter resolve_conj resolve_neg rot90 rename set_ resize_ resize_as_ "
    "pin_memory share_memory_ pad_sequence unpad_sequence _pack_padded_sequence "
    "_pad_packed_sequence block_diag column_stack row_stack atleast_1d atleast_2d atleast_3d "
    "swapaxes_ values indices crow_indices col_indices coalesce to_dense to_sparse to_sparse_csr "
    "to_sparse_csc to_sparse_coo to_sparse_bsr to_sparse_bsc sparse_coo_tensor sparse_csr_tensor "
    "sparse_compressed_tensor sparse_mask _nested_tensor_from_mask to_padded_tensor "
    "native_channel_shuffle view_as_real_copy nan_to_num combinations cartesian_prod "
    "tril_indices triu_indices searchsorted bucketize kthvalue median mode"
)
_TORCH_ELEMENTWISE = words(
    "addcmul addcdiv asinh acosh atanh arcsinh arccosh arctanh copysign deg2rad rad2deg digamma "
    "lgamma erfinv exp2 special_exp2 float_power frac heaviside hypot i0 ldexp logaddexp "
    "logaddexp2 logit special_logit sinc xlogy special_xlogy nextafter softsign tanhshrink angle "
    "polar"
)


def _fused_attention(context: OpContext) -> Formula:
    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        query, key, value, into, out = inputs
        return packed_attention(query, key, value) + packed_projections(
            query, key, value, into, out
        )

    return Formula("matmul", (0, 1, 2, 5, 7), count, (0, 1, 2, 5, 7))


def _flex_attention(context: OpContext) -> Formula:
    # As for other attention, what a mask hides counts.
    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return sum(attention_parts(inputs, outputs))

    return Formula("matmul", (0, 1, 2), count, (0, 1, 2), attention_gradients)


def _encoder_layer(context: OpContext) -> Formula:
    names = context.input_names
    positions = (0, 3, 5, names.index("ffn_weight_1"), names.index("ffn_weight_2"))

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        x, into, out, first, second = inputs
        rows = math.prod(x[:-1])
        feed_forward = rows * (first.elements + second.elements)
        return int(
            packed_attention(x, x, x) + packed_projections(x, x, x, into, out) + feed_forward
        )

    return Formula("matmul", positions, count, positions)


def _tensordot(context: OpContext) -> Formula:
    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        # Each summed axis is in both inputs, each other axis in one input and the output.
        return math.isqrt(inputs[0].elements * inputs[1].elements * outputs[0].elements)

    return Formula("matmul", (0, 1), count, (0, 1))


def _sparse_product(context: OpContext) -> Formula:
    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        sparse, dense = inputs
        return int((sparse.elements if sparse.stored is None else sparse.stored) * dense[-1])

    return Formula("matmul", (0, 1), count, (0, 1))


def _sparse_addmm(context: OpContext) -> Formula:
    product = _sparse_product(context)
    return Formula("matmul", (1, 2), product.count, (1, 2))


_TORCH: Mapping[str, Callable[[OpContext], Formula]] = {
    "_native_multi_head_attention": _fused_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "flex_attention": _flex_attention,
    "tensordot": _tensordot,
    "_sparse_mm": _sparse_product,
    "sparse_mm": _sparse_product,
    "_sparse_addmm": _sparse_addmm,
    "sspaddmm": _sparse_addmm,
}

# TensorFlow.

# Variables, arguments, and control flow, whose bodies consist of operators that are counted.
_TENSORFLOW_FREE = words(
    "ReadVariableOp Variable VariableV2 TemporaryVariable Placeholder PlaceholderV2 _Arg _Retval "
    "Switch RefSwitch Merge RefMerge Enter RefEnter Exit RefExit NextIteration RefNextIteration "
    "RefSelect While StatelessWhile If StatelessIf Case StatelessCase PartitionedCall "
    "StatefulPartitionedCall IteratorGetNext IteratorGetNextSync TensorListGetItem TensorListStack "
    "TensorListConcat TensorListConcatV2 TensorListGather TensorListPopBack TensorArrayReadV3 "
    "TensorArrayGatherV3 TensorArrayConcatV3 TensorArrayV3 TensorArrayWriteV3 TensorArrayScatterV3 "
    "TensorArraySplitV3 StackPop StackPopV2 FIFOQueueV2 QueueDequeueV2 QueueDequeueManyV2 "
    "DecodeRaw RestoreV2 ParseExampleV2"
)
_TENSORFLOW_ELEMENTWISE = words(
    "SquaredDifference Softsign Xlogy Xlog1py Lgamma Digamma Erfinv Ndtri Asinh Acosh Atanh "
    "NextAfter LogicalXor"
)


def _recurrent_block(*positions: int) -> Callable[[OpContext], Formula]:
    """Return the formula factory for a recurrent layer, given the positions of its input and
    weights.
    """

    def formula(context: OpContext) -> Formula:
        def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            rows = math.prod(inputs[0][:-1])
            return int(rows * sum(weight.elements for weight in inputs[1:]))

        def backward(
            inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]
        ) -> int:
            # One operator computes the gradients of states and input; the weights' follow from it.
            return 2 * count(inputs, outputs) * any(gradient is not None for gradient in gradients)

        return Formula("matmul", positions, count, positions, backward, each=2)

    return formula


def _sparse_times_dense(context: OpContext) -> Formula:
    turned = bool(context.attrs.get("adjoint_b"))

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        indices, dense = inputs
        return int(indices[0] * dense[-2 if turned else -1])

    return Formula("matmul", (0, 3), count, (1, 3))


_TENSORFLOW: Mapping[str, Callable[[OpContext], Formula]] = {
    "BlockLSTM": _recurrent_block(1, 4),
    "BlockLSTMV2": _recurrent_block(1, 4),
    "LSTMBlockCell": _recurrent_block(0, 3),
    "GRUBlockCell": _recurrent_block(0, 2, 3),
    "SparseTensorDenseMatMul": _sparse_times_dense,
}
