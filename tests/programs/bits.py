"""Values as bits, to compare the results of two runs byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .architectures import tensors_of

#: Dtype, shape and bytes; None for a gradient that is not there.
Bits = tuple[str, tuple[int, ...], bytes] | None


def bits_of(tensor: torch.Tensor | None) -> Bits:
    """Return the bits of a tensor, whatever its strides."""
    if tensor is None:
        return None
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), data


def state_of(
    model: torch.nn.Module, output: Any, loss: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Return loss, outputs, gradients, parameters, buffers and the random state by name."""
    yield "loss", loss
    yield from ((f"output {name}", t) for name, t in tensors_of(output))
    yield from ((f"gradient {name}", p.grad) for name, p in model.named_parameters())
    yield from ((f"parameter {name}", p) for name, p in model.named_parameters())
    yield from ((f"buffer {name}", b) for name, b in model.named_buffers())
    yield "random state", torch.get_rng_state()


def differences(first: dict[str, Bits], second: dict[str, Bits]) -> list[str]:
    """Return the names of what differs in bits; both must have the same names."""
    assert list(first) == list(second)
    return [name for name, bits in first.items() if bits != second[name]]
