"""The options of `quantize`, checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

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
    """

    method: str
    weights: Format | None
    activations: Format | None
    per: str
    per_token: bool
    observer: str
    percentile: float
    symmetric: bool
    calibration: int
    ema: float

    @property
    def learns(self) -> bool:
        """Whether steps are learned."""
        return self.method in RULES_OF_STEPS

    def format_of(self, is_weight: bool) -> Format | None:
        """Return the number format of an operand."""
        return self.weights if is_weight else self.activations

    def to_json(self) -> dict[str, Any]:
        """Return what a resumed tool must have as well; a calibration may be continued."""
        found = asdict(self)
        del found["calibration"], found["weights"], found["activations"]
        return {**found, "formats": [f and f.name for f in (self.weights, self.activations)]}


def checked(weights: str, activations: str, per: str | None, **rest: Any) -> Options:
    """Return the options of a user.

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
    if rest["per_token"] and rest["ema"]:
        raise ValueError("per_token and ema do not go together: rows have no running mean")
    formats = format_named(weights), format_named(activations)
    if method in RULES_OF_STEPS and any(form is not None and form.float8 for form in formats):
        raise ValueError(f"{method} learns steps of integers, not of {weights}, {activations}")
    per = per or ("channel" if method == "static" else "tensor")
    return Options(weights=formats[0], activations=formats[1], per=per, **rest)
