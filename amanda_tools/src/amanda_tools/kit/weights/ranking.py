"""A ranking of operators by `sensitivity`, for tools that treat the most sensitive ones otherwise.

Owns how it is read from a file, which operators are kept as they are, and how many bits each weight
gets within a budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from amanda_core import OpContext

__all__ = ["FORMAT", "Kept", "Ranked", "Ranking", "chosen"]

FORMAT = "amanda.sensitivity/1"
#: The fewest and the most bits that a weight gets.
_FEWEST, _MOST = 2, 8


class Ranked(NamedTuple):
    """An operator of the ranking.

    Attributes:
        id: Its op id.
        name: Its readable name.
        damage: The damage that changing it does; None if it was not measured.
        weights: Key of each parameter that it reads -> number of elements.
    """

    id: int
    name: str
    damage: float | None
    weights: Mapping[str, int]


@dataclass(frozen=True)
class Kept:
    """The operators that stay as they are.

    Attributes:
        count: How many were asked for.
        ids: Their op ids.
        weights: Keys of the parameters that they read.
        met: Op ids of those that have run.
    """

    count: int = 0
    ids: frozenset[int] = frozenset()
    weights: frozenset[str] = frozenset()
    met: set[int] = field(default_factory=set, compare=False)

    @property
    def reason(self) -> str:
        """Return why they are as they are."""
        return f"kept, as one of the {self.count} most sensitive"

    def has(self, context: OpContext) -> bool:
        """Return True for one of these operators, which then has run."""
        number = context.get_op_id()
        if number in self.ids:
            self.met.add(number)
        return number in self.ids

    def notes(self) -> list[str]:
        """Return a note if some did not run, as if the ranking is of another program."""
        left = len(self.ids - self.met)
        return [f"{left} of the {self.count} operators to be kept did not run here"] if left else []


@dataclass(frozen=True)
class Ranking:
    """Operators, the most sensitive first.

    Attributes:
        source: The file that it comes from.
        ops: The operators.
        format: Number format of the weights whose damage was measured; empty if they were pruned.
    """

    source: str
    ops: list[Ranked] = field(default_factory=list)
    format: str = ""

    @classmethod
    def read(cls, path: str | Path) -> Ranking:
        """Read the file of a result.

        Raises:
            ValueError: It cannot be read, or is not a result of `sensitivity`.
        """
        try:
            content: Any = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"from={path} cannot be read: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"from={path} is not a result of the tool sensitivity ({FORMAT})")
        ops = [Ranked(op["id"], op["name"], op["damage"], op["weights"]) for op in content["ops"]]
        return cls(str(path), ops, content["weights"])

    def most_sensitive(self, count: int) -> Kept:
        """Return so many operators from the begin of the ranking.

        Raises:
            ValueError: There are fewer.
        """
        if not 0 <= count <= len(self.ops):
            raise ValueError(f"keep must be from 0 to {len(self.ops)}, the operators in the file")
        first = self.ops[:count]
        owners = frozenset(owner for op in first for owner in op.weights)
        return Kept(count, frozenset(op.id for op in first), owners)

    def bits_within(self, budget: float, kept: Collection[str] = ()) -> dict[str, int]:
        """Return the bits of each weight, so that their mean over all elements is in a budget.

        Each bit less makes the damage of a weight four times as large, as it doubles the steps of
        its grid. Bits are taken, one by one, where that does the least damage for each bit that is
        saved. A weight whose damage is not known keeps the most bits.

        Args:
            budget: The mean number of bits.
            kept: Keys of the weights that are not quantized, and do not count.

        Raises:
            ValueError: The budget cannot be met, or the ranking is not of integers.
        """
        if not self.format.startswith("int"):
            raise ValueError("bits needs a ranking of integers: sensitivity:weights=int4")
        if not _FEWEST <= budget <= _MOST:
            raise ValueError(f"bits must be from {_FEWEST} to {_MOST}, but is {budget}")
        sizes: dict[str, int] = {}
        damage: dict[str, float] = {}
        for op in self.ops:
            for owner, size in op.weights.items():
                if owner not in kept:
                    sizes[owner] = size
                    known = math.inf if op.damage is None else op.damage
                    damage[owner] = damage.get(owner, 0.0) + known
        found = dict.fromkeys(sizes, _MOST)
        measured = int(self.format.removeprefix("int"))
        left = sum(sizes.values()) * (_MOST - budget)  # Bits to be saved.

        def price(owner: str) -> float:
            more = 4.0 ** (measured - found[owner] + 1) - 4.0 ** (measured - found[owner])
            return damage[owner] * more / sizes[owner]

        while left > 1e-9:
            free = [o for o in sizes if found[o] > _FEWEST and math.isfinite(damage[o])]
            if not free:
                raise ValueError(
                    f"bits={budget} cannot be met: too many weights have no known damage"
                )
            cheapest = min(free, key=price)
            found[cheapest] -= 1
            left -= sizes[cheapest]
        return found


def chosen(
    path: str | None, keep: int | None, bits: float | None = None
) -> tuple[Kept, dict[str, int]]:
    """Return the operators that are kept and the bits of weights, as a user's options say.

    Args:
        path: The option ``from``.
        keep: The option ``keep``.
        bits: The option ``bits``.

    Raises:
        ValueError: The options do not go together, or the file or a number does not fit.
    """
    if path is None:
        if keep is not None or bits is not None:
            raise ValueError("keep and bits need a ranking: from=sensitivity.json")
        return Kept(), {}
    if keep is None and bits is None:
        raise ValueError("from needs keep or bits: what becomes of the ranking")
    ranking = Ranking.read(path)
    kept = ranking.most_sensitive(keep or 0)
    return kept, {} if bits is None else ranking.bits_within(bits, kept.weights)
