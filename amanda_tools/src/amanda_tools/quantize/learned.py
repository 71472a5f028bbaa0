"""Learned steps: the grids of LSQ, LSQ+ and TQT as parameters of PyTorch.

Owns the three rules and their gradients. Rounding has the gradient of the identity.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from amanda_tools.quantize.formats import EPSILON, Format, Grid

__all__ = ["RULES_OF_STEPS", "Step", "StepRule", "can_learn"]

StepRule = Literal["lsq", "lsq+", "tqt"]
RULES_OF_STEPS: tuple[str, ...] = get_args(StepRule)


def can_learn(namespace: str) -> bool:
    """Return True if steps can be learned in a namespace."""
    return namespace.startswith("pytorch/")


class Step:
    """The learned grid of a weight or an activation.

    Sources: Esser et al. 2020 (LSQ), Bhalgat et al. 2020 (LSQ+), Jain et al. 2020 (TQT).

    Args:
        rule: ``lsq``, ``lsq+`` or ``tqt``.
        form: An integer format.
        values: The values of which the first step is made, a tensor.
        axes: The axes whose elements share a step.
        is_weight: Whether they are a weight's, whose grid is signed.

    Attributes:
        parameters: The tensors that learn: the step (of TQT the logarithm to base 2 of the
            threshold), and the offset of an activation under LSQ+.
        signed: Whether numbers are negative as well.
    """

    def __init__(
        self, rule: str, form: Format, values: Any, axes: tuple[int, ...], is_weight: bool
    ) -> None:
        import torch

        with torch.no_grad(), torch.inference_mode(False):
            values = values.detach().float().nan_to_num(0.0, 0.0, 0.0)
            if not values.numel():
                values = values.new_zeros([max(length, 1) for length in values.shape])
            self.signed = is_weight or (rule != "lsq+" and bool(values.min() < 0))
            self._rule, self._bits = rule, form.bits
            self._set_limits()
            size, offset = self._first(values, axes, is_weight)
            self.parameters = [torch.nn.Parameter(size.clone())]
            if offset is not None:
                self.parameters.append(torch.nn.Parameter(offset.clone()))
            # The number of elements that share a step, without the batch of an activation.
            count = values.numel() / max(size.numel(), 1)
            count = count if is_weight else count / max(values.shape[0], 1)
        self._gain = 1 / math.sqrt(max(count * self.highest, 1.0))

    def _set_limits(self) -> None:
        half = 2 ** (self._bits - 1)
        self.lowest = -float(half) if self.signed else 0.0
        self.highest = float(half - 1 if self.signed else 2 * half - 1)

    def _first(self, values: Any, axes: tuple[int, ...], is_weight: bool) -> tuple[Any, Any]:
        """Return the first step, or the threshold's logarithm, and the first offset."""
        import torch

        if self._rule == "tqt":
            return values.abs().amax(axes, keepdim=True).clamp(min=EPSILON).log2(), None
        if self._rule == "lsq":
            size = 2 * values.abs().mean(axes, keepdim=True) / math.sqrt(max(self.highest, 1.0))
            return size.clamp(min=EPSILON), None
        if is_weight:
            mean = values.mean(axes, keepdim=True)
            spread = 3 * values.std(axes, keepdim=True)
            size = torch.maximum((mean - spread).abs(), (mean + spread).abs()) / -self.lowest
            return size.clamp(min=EPSILON), None
        low, high = values.amin(axes, keepdim=True), values.amax(axes, keepdim=True)
        size = ((high - low) / (self.highest - self.lowest)).clamp(min=EPSILON)
        return size, low - self.lowest * size

    def quantized(self, value: Any, part: Any = None) -> Any:
        """Return a value after fake quantization; the step and the offset get gradients.

        Args:
            value: A tensor.
            part: Which of the steps are for it, an array of indices that broadcasts to it; None for
                all of them.
        """
        import torch

        size: Any
        size, *offsets = (
            one if part is None else one.reshape(-1)[torch.as_tensor(part)].to(value.device)
            for one in self.parameters
        )
        wide: Any = value.float()
        if self._rule == "tqt":
            size = _straight(size, torch.ceil(size)).exp2() / 2.0 ** (self._bits - self.signed)
            numbers = wide / size
            return (self._clipped(_rounded(numbers)) * size).to(value.dtype)
        with torch.no_grad():  # An optimizer may have made a step negative.
            self.parameters[0].clamp_(min=EPSILON)
        size = _gained(size, self._gain)
        offset = _gained(offsets[0], self._gain) if offsets else None
        if offset is not None:
            wide = wide - offset
        wide = _rounded(self._clipped(wide / size)) * size
        return (wide if offset is None else wide + offset).to(value.dtype)

    def _clipped(self, numbers: Any) -> Any:
        return numbers.clamp(self.lowest, self.highest)

    def arrays(self) -> dict[str, Any]:
        """Return what is needed to continue in another process."""
        import numpy

        names = ("size", "offset")
        found = dict(zip(names, (p.detach().cpu().numpy() for p in self.parameters), strict=False))
        return {**found, "facts": numpy.asarray([self._bits, self.signed, self._gain])}

    @classmethod
    def of(cls, rule: str, arrays: dict[str, Any], like: Any) -> Step:
        """Return the step of an `arrays`, on the device of a tensor."""
        import torch

        step = object.__new__(cls)
        bits, signed, gain = arrays["facts"].tolist()
        step._rule, step._bits, step.signed, step._gain = rule, int(bits), bool(signed), gain
        step._set_limits()
        step.parameters = [
            torch.nn.Parameter(torch.as_tensor(arrays[name]).clone().to(like.device))
            for name in ("size", "offset")
            if name in arrays
        ]
        return step

    def grid(self) -> tuple[Grid, Any]:
        """Return the present grid, and the offset that values have before it: an array, or None."""
        scale = self.scale()
        offset = self.parameters[1].detach().cpu().numpy().copy() if self.parameters[1:] else None
        return Grid(scale, 0 * scale, self.lowest, self.highest), offset

    def scale(self) -> Any:
        """Return the distance of neighbouring values, an array."""
        import torch

        with torch.no_grad():
            size: Any = self.parameters[0]
            if self._rule == "tqt":
                size = torch.ceil(size).exp2() / 2.0 ** (self._bits - self.signed)
            return size.detach().cpu().numpy().copy()


def _straight(value: Any, rounded: Any) -> Any:
    # Exact: the difference of a number and its neighbour needs no more bits than they do.
    return value + (rounded - value).detach()


def _rounded(numbers: Any) -> Any:
    return _straight(numbers, numbers.round())


def _gained(parameter: Any, gain: float) -> Any:
    """Return the parameter itself, whose gradient is multiplied by `gain`."""
    scaled = parameter * gain
    return parameter.detach() + (scaled - scaled.detach())
