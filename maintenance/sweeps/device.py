"""The device on which the parts of PyTorch make their tensors."""

from __future__ import annotations

from typing import Any

#: Type of the device; `--device` sets it.
name = "cpu"


def generators() -> list[Any]:
    """Return the random generators of the processor and of the device."""
    # Other frameworks have sweeps in environments without torch.
    import torch

    if name == "cpu":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
