"""Values of any framework's tensors on the host, as NumPy arrays.

Owns the way there and back to numbers. NumPy has no bfloat16 and no 8-bit floating point; arrays of
these hold the bits as unsigned integers, and `numbers` decodes them. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_tools.common.sizes import dtype_name, is_tensor

__all__ = [
    "HostTensor",
    "NotReadableError",
    "host",
    "numbers",
    "tensors_in",
]

#: dtype -> bits of exponent and mantissa, bias, and whether it has infinities.
_SMALL = {
    "bfloat16": (8, 7, 127, True),
    "float8_e4m3fn": (4, 3, 7, False),
    "float8_e4m3fnuz": (4, 3, 8, False),
    "float8_e5m2": (5, 2, 15, True),
    "float8_e5m2fnuz": (5, 2, 16, False),
}

#: What TensorFlow calls a dtype and is none of numbers.
_NO_NUMBERS = ("resource", "string", "variant")


class NotReadableError(Exception):
    """A tensor whose values cannot be had as one array; the message says why."""


@dataclass(frozen=True)
class HostTensor:
    """The values of a tensor.

    Attributes:
        array: A copy of them, in C order; the bits as unsigned integers where NumPy lacks the
            dtype.
        dtype: Name of the tensor's dtype, such as ``bfloat16``.
    """

    array: Any
    dtype: str


def need_numpy() -> None:
    """Make sure that there is NumPy before a program runs, rather than in the middle of it.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import numpy  # noqa: F401  Whether it is there.
    except ImportError as error:
        raise ImportError("This needs NumPy: pip install 'amanda-tools[numpy]'") from error


def tensors_in(values: Sequence[Any] | None) -> Iterator[tuple[str, Any]]:
    """The tensors at positions, each with its position; ``2.0`` is the first of a list at 2.

    >>> list(tensors_in([1.5, None]))
    []
    """
    for position, value in enumerate(values or ()):
        if is_tensor(value):
            yield str(position), value
        elif isinstance(value, (list, tuple)):
            for inner, tensor in tensors_in(value):
                yield f"{position}.{inner}", tensor


def host(tensor: Any) -> HostTensor:
    """A copy of a tensor's values.

    Raises:
        NotReadableError: It has no values in one array: sparse, quantized, of strings, symbolic.
    """
    import numpy

    name = dtype_name(tensor)
    if hasattr(tensor, "detach"):
        return _of_torch(tensor, name)
    if name in _NO_NUMBERS:
        raise NotReadableError(f"dtype {name}")
    try:
        array = numpy.array(numpy.asarray(tensor), order="C")
    except Exception as error:  # Frameworks raise what they like for what has no values.
        raise NotReadableError(f"no values: {type(error).__name__}") from error
    if name in _SMALL:
        array = array.view(f"u{array.dtype.itemsize}")
    elif array.dtype.kind not in "biufc":
        raise NotReadableError(f"dtype {name}")
    return HostTensor(array, name)


def numbers(array: Any, dtype: str) -> Any:
    """The numbers of an array of `HostTensor`: as they are, or decoded as float32."""
    import numpy

    if dtype not in _SMALL:
        return array
    if dtype == "bfloat16":
        return (array.astype(numpy.uint32) << 16).view(numpy.float32)
    codes = [_decoded(code, dtype) for code in range(256)]
    return numpy.asarray(codes, numpy.float32)[array]


def _of_torch(tensor: Any, name: str) -> HostTensor:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        raise NotReadableError(f"a {kind} tensor")
    if tensor.device.type == "meta":
        raise NotReadableError("a tensor without values")
    try:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if name in _SMALL:
            plain = plain.view(torch.uint8 if plain.itemsize == 1 else torch.uint16)
        elif name == "complex32":
            # Each number exactly as it is; NumPy has no complex type of 16-bit parts.
            plain, name = plain.to(torch.complex64), "complex64"
        # A copy first: PyTorch lets nobody resize a storage that NumPy has seen.
        return HostTensor(plain.clone().numpy(), name)
    except (RuntimeError, TypeError) as error:
        raise NotReadableError(f"dtype {name}") from error


def _decoded(code: int, dtype: str) -> float:
    exponents, mantissas, bias, infinities = _SMALL[dtype]
    sign = -1.0 if code >> (exponents + mantissas) else 1.0
    exponent = code >> mantissas & (1 << exponents) - 1
    mantissa = code & (1 << mantissas) - 1
    last = (1 << exponents) - 1
    if dtype.endswith("uz"):
        if code == 0x80:
            return float("nan")
    elif infinities and exponent == last:
        return float("nan") if mantissa else sign * float("inf")
    elif exponent == last and mantissa == (1 << mantissas) - 1:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissas)
    return sign * (1 + mantissa / (1 << mantissas)) * 2.0 ** (exponent - bias)
