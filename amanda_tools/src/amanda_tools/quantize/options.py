"""The options of `quantize`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from amanda_core.weights.reads import Weight
from amanda_tools.quantize.formats import Format, format_named
from amanda_tools.quantize.learned import RULES_OF_STEPS
from amanda_tools.quantize.observers import OBSERVERS

__all__ = ["Method", "Options", "checked"]

Method = Literal["static", "dynamic", "lsq", "lsq+", "tqt"]


@dataclass(frozen=True)
class Options:
    """What the user wants; `Quantize` describes each option.

    Attributes:
        weights: Number format of weights; None if they are not quantized.
        activations: Number format of the other operands; likewise.
        mixed: Key of a parameter -> its number format, where that is another one.
    """

    method: str
    weights: Format | None
    activations: Format | None
    per: str
    per_token: bool
    observer: str
    percentile: float
    symmetric: bool | None
    calibration: int
    ema: float
    group: int = 0
    mixed: Mapping[str, Format] = field(default_factory=dict)

    @property
    def has_zeros(self) -> bool:
        """True if grids of weights have zero points."""
        return self.symmetric is False

    @property
    def learns(self) -> bool:
        """True if steps are learned."""
        return self.method in RULES_OF_STEPS

    def format_of(self, is_weight: bool) -> Format | None:
        """Return the number format of an operand."""
        return self.weights if is_weight else self.activations

    def format_for(self, weight: Weight) -> Format | None:
        """Return the number format of a weight."""
        return self.mixed.get(weight.owner, self.weights)

    def to_json(self) -> dict[str, Any]:
        """Return what a resumed tool must have as well; a calibration may be continued."""
        found = asdict(self)
        del found["calibration"], found["weights"], found["activations"], found["mixed"]
        # What an earlier version did not have is there only if it is used.
        found["symmetric"] = bool(self.symmetric)
        del found["group"]
        if self.has_zeros:
            found["has_zeros"] = True
        if self.group:
            found["group"] = self.group
        if self.mixed:
            found["mixed"] = {owner: form.name for owner, form in self.mixed.items()}
        return {**found, "formats": [f and f.name for f in (self.weights, self.activations)]}


def checked(
    weights: str, activations: str, per: str | None, bits: Mapping[str, int], **rest: Any
) -> Options:
    """Return the options of a user.

    Args:
        weights: The option of this name.
        activations: The option of this name.
        per: The option of this name.
        bits: Key of a parameter -> its bits, where these are chosen for each.
        **rest: The other options.

    Raises:
        ValueError: An option has none of its values, or options do not go together.
    """
    method = rest["method"]
    choices: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("method", method, get_args(Method)),
        ("observer", rest["observer"], OBSERVERS),
        ("per", per, ("channel", "tensor", None)),
    )
    for name, value, values in choices:
        if value not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(str, values))}: {value!r}")
    if rest["calibration"] < 0 or not 0 <= rest["ema"] < 1 or not 0 < rest["percentile"] <= 100:
        raise ValueError("calibration is from 0, ema from 0 to 1, percentile from 0 to 100")
    if (rest["per_token"] or rest["ema"]) and method != "dynamic":
        raise ValueError("per_token and ema are for the method dynamic")
    if method != "static" and (rest["group"] or rest["symmetric"] is False):
        raise ValueError(f"group and symmetric=False are for the method static, not for {method}")
    if rest["group"] < 0:
        raise ValueError(f"group is a positive number of neighbours, or 0, not {rest['group']}")
    if rest["group"] and per == "tensor":
        raise ValueError("group divides channels: leave out per=tensor, or the group")
    if rest["symmetric"] and method == "lsq+":
        raise ValueError("lsq+ learns an offset of activations; use lsq for symmetric grids")
    if rest["per_token"] and rest["ema"]:
        raise ValueError("per_token and ema do not go together: rows have no running mean")
    formats = format_named(weights), format_named(activations)
    if method in RULES_OF_STEPS and any(form is not None and form.float8 for form in formats):
        raise ValueError(f"{method} learns steps of integers, not of {weights}, {activations}")
    if rest["group"] and formats[0] is None:
        raise ValueError("group is for weights, which weights=none leaves out")
    integers = bits or any(form is not None and not form.float8 for form in formats)
    if rest["symmetric"] is False and not integers:
        raise ValueError("symmetric=False is for integers: grids of floats lie around 0")
    per = per or ("channel" if method == "static" else "tensor")
    if bits and formats[0] is None:
        raise ValueError("bits chooses the formats of weights, which weights=none leaves out")
    mixed = {owner: form for owner, n in bits.items() if (form := format_named(f"int{n}"))}
    return Options(weights=formats[0], activations=formats[1], per=per, mixed=mixed, **rest)
