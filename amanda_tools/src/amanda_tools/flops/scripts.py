"""Costs of TorchScript, whose operators no tool sees: a script runs again on fake tensors.

Owns the counting of the operators that PyTorch's dispatcher gets there. Imports PyTorch only when
a script is counted.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.vocabulary import OP_TYPES
from amanda_tools.flops.formulas import (
    MATMUL,
    UNCOUNTED,
    Formula,
    packed_attention,
    packed_projections,
)
from amanda_tools.kit.tensors.types import Size

__all__ = ["scripted"]


def scripted(context: OpContext) -> Formula | None:
    """Return the formula of a scripted or traced function; None for any other operator."""
    script = context.get_op()
    if type(script).__name__ not in ("ScriptFunction", "ScriptMethod"):
        return None
    given = [_like(value) for value in context.get_inputs() or ()]
    names, held = context.input_names, weakref.ref(script)

    @functools.lru_cache(maxsize=64)
    def cost(inputs: tuple[Any, ...], backward: bool) -> int:
        found = held()
        if found is None:
            raise ValueError("the script is gone")
        makes = [_made(like, size) for like, size in zip(given, inputs, strict=True)]
        return _count(
            lambda: _copy(found)(*_arguments(found, names, [make() for make in makes])), backward
        )

    return Formula(
        "matmul",
        tuple(range(len(given))),
        lambda inputs, outputs: cost(tuple(inputs), False),
        None,
        whole=lambda inputs, outputs: cost(tuple(inputs), True),
    )


def _like(value: Any) -> Any:
    """Return the value with dtype, device and need of a gradient in the place of each tensor.

    A container other than a list, whose sizes are not known, becomes the name of its type.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    if isinstance(value, torch.Tensor):
        return _Like(dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_like, value))
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
        return _Unknown(type(value).__name__)
    return value


class _Like(dict[str, Any]):
    """Keyword arguments that make a tensor like another one."""


class _Unknown(str):
    """Name of a type whose tensors are not counted."""


def _made(like: Any, size: Any) -> Callable[[], Any]:
    """Return a function that makes an argument like another one.

    Args:
        like: What to make: the dtype and device of a tensor, a list or tuple of such, or a value,
            which is returned itself.
        size: The shape of the tensor, or a list of those of the items.

    Raises:
        ValueError: It is of a type whose shapes are not known.
    """
    import torch

    if isinstance(like, _Unknown):
        raise ValueError(f"the shapes in a {like} are not known")
    if isinstance(like, _Like):
        return lambda: torch.empty(tuple(size), **like)
    if isinstance(like, (list, tuple)):
        makes = [_made(one, part) for one, part in zip(like, size, strict=True)]
        return lambda: type(like)(make() for make in makes)
    return lambda: like


def _copy(script: Any) -> Callable[..., Any]:
    """Return the function of a script, without what PyTorch knows of its calls and optimizes by."""
    import torch

    graph = script.inlined_graph.copy()
    function = torch._C._create_function_from_graph(script.name, graph)
    return functools.partial(function, script.owner) if hasattr(script, "owner") else function


def _arguments(script: Any, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """Return the values in the order of the parameters, with the defaults of those left out."""
    parameters = script.schema.arguments[1 if hasattr(script, "owner") else 0 :]
    known = {parameter.name for parameter in parameters}
    given = dict(zip(names, values, strict=True))
    named = {name: value for name, value in given.items() if name in known}
    others = iter([value for name, value in given.items() if name not in known])
    return [
        named[one.name] if one.name in named else next(others, one.default_value)
        for one in parameters
    ]


def _count(run: Callable[[], Any], backward: bool) -> int:
    """Return the multiply-accumulates of what runs, or those of its gradients.

    Nothing is computed: parameters, statistics and random numbers stay as they are.

    Raises:
        ValueError: An operator has no formula, or the script depends on values.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    fake = FakeTensorMode()

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        # Also for operators that read no argument of the script: they would run, and write.
        return tensor if isinstance(tensor, FakeTensor) else fake.from_tensor(tensor)

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        macs, problem = 0, ""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            args, kwargs = tree_map_only(torch.Tensor, faked, (args, kwargs or {}))
            result = func(*args, **kwargs)
            number = _macs_of(func, args, kwargs, result)
            if isinstance(number, str):
                self.problem = self.problem or number
            else:
                self.macs += number
            return result

    counting = Counting()  # type: ignore[no-untyped-call]
    try:
        with (
            torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
            torch.set_grad_enabled(backward),
            fake,
            counting,
        ):
            outputs = [
                leaf
                for leaf in tree_leaves(run())
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            leaves = list(_leaves(outputs))
            if backward:
                counting.macs = 0
            if backward and leaves:
                torch.autograd.grad(outputs, leaves, [torch.empty_like(one) for one in outputs])
    except Exception as error:
        raise ValueError(f"it does not run without values: {type(error).__name__}") from error
    if counting.problem:
        raise ValueError(counting.problem)
    return counting.macs


def _leaves(outputs: Sequence[Any]) -> Iterator[Any]:
    """Yield the leaves of the autograd graph behind tensors."""
    queue, seen = [one.grad_fn for one in outputs], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        queue.extend(following for following, _ in node.next_functions)


def _macs_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int | str:
    """Return the multiply-accumulates of an operator of the dispatcher, or why they are unknown."""
    import torch
    from torch.utils.flop_counter import flop_registry

    packet = func.overloadpacket
    name = packet.__name__
    product, formula = _PRODUCTS.get(name), flop_registry.get(packet)
    if name.startswith("_scaled_dot_product_") and not name.endswith("_math"):
        product = _attention_gradients if _GRADIENT.search(name) else _attention
    if product is not None:
        return product(*(Size(x.shape) if isinstance(x, torch.Tensor) else x for x in args))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result)) // 2
    common = _GRADIENT.sub("", name.strip("_").removeprefix("native_"))
    known = common in OP_TYPES and common not in MATMUL | UNCOUNTED
    is_small = func.is_view or func.namespace == "prim" or torch.Tag.pointwise in func.tags
    if known or is_small or _WITHOUT_PRODUCTS.match(common):
        return 0
    return f"no formula for {func}"


def _recurrent_layer(x: Size, into: Size, inside: Size, *others: Any) -> int:
    return x[0] * x[1] * (into.elements + inside.elements)


def _encoder_layer(x: Size, *others: Any) -> int:
    into, out, first, second = (others[place] for place in (2, 4, 13, 15))
    feed_forward = x[0] * x[1] * (first.elements + second.elements)
    own = packed_attention(x, x, x) + packed_projections(x, x, x, into, out)
    return own + int(feed_forward)


def _attention(query: Size, key: Size, value: Size, *others: Any) -> int:
    return query.elements // query[-1] * key[-2] * (query[-1] + value[-1])


def _attention_gradients(gradient: Size, query: Size, key: Size, value: Size, *others: Any) -> int:
    # What a kernel computes again is not counted.
    return 2 * _attention(query, key, value)


def _multi_head_attention(query: Size, key: Size, value: Size, *others: Any) -> int:
    into, out = others[2], others[4]
    projections = packed_projections(query, key, value, into, out)
    return packed_attention(query, key, value) + projections


#: Products for which PyTorch's own registry has no formula, given the sizes of their arguments.
_PRODUCTS: Mapping[str, Callable[..., int]] = {
    "mv": lambda matrix, vector: matrix.elements,
    "addmv": lambda vector, matrix, *others: matrix.elements,
    "dot": lambda left, right: left.elements,
    "vdot": lambda left, right: left.elements,
    "addr": lambda matrix, left, right: left.elements * right.elements,
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": lambda *sizes: 2 * _recurrent_layer(*sizes),
    "_native_multi_head_attention": _multi_head_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
_GRADIENT = re.compile("_backward$")
#: Beginnings of names of operators that PyTorch does not mark as elementwise or as views, and that
#: contain no product.
_WITHOUT_PRODUCTS = re.compile(
    "new_|empty|zeros|ones|full|rand|arange|scalar_tensor|bernoulli|copy|clone|lift|fill|cat$|"
    "(reflection|replication|constant)_pad|upsample_|pixel_|max_pool|avg_pool|adaptive_|select|"
    "(log_|safe_)?softmax|prelu|embedding|unsafe_|stack|index|slice|fused_dropout|nll_loss"
)
