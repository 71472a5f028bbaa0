"""Contractions: how they are made from an equation or axes, and what they say of a weight.

Owns the names of axes and what they mean for one operand: groups, outputs, and inputs, which a
product sums over.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Collection, Sequence

from amanda_core.interface.facts import Contraction, Place

__all__ = [
    "contraction_of_axes",
    "contraction_of_equation",
    "contraction_of_matmul",
    "letters_in",
]

#: Names of the axes that an equation's ellipsis stands for, and those that broadcasting sets apart.
_DOTS, _APART = string.digits, string.ascii_uppercase


def contraction_of_equation(
    equation: str | bytes, places: Sequence[Place], ranks: Sequence[int]
) -> Contraction | None:
    """Return what an equation of einsum says; None if it does not fit the operands.

    >>> contraction_of_equation("...d,dnh->...nh", (1, 2), (3, 3))
    Contraction(places=(1, 2), terms=('10d', 'dnh'), result='10nh', groups='')
    """
    text = equation.decode() if isinstance(equation, bytes) else equation
    left, arrow, right = text.replace(" ", "").partition("->")
    given = left.split(",")
    if not len(given) == len(places) == len(ranks):
        return None
    named = [len(term.replace("...", "")) for term in given]
    dots = [max(0, rank - count) for rank, count in zip(ranks, named, strict=True)]
    terms = [_expanded(term, count) for term, count in zip(given, dots, strict=True)]
    if [*map(len, terms)] != [*ranks]:
        return None
    every = "".join(terms)
    longest = max((n for term, n in zip(given, dots, strict=True) if "." in term), default=0)
    result = _expanded(right if arrow else "...", longest)
    if not arrow:
        result += "".join(sorted(c for c in {*every} if every.count(c) == 1 and c.isalpha()))
    return Contraction(tuple(places), tuple(terms), result)


def contraction_of_axes(
    places: tuple[Place, Place],
    ranks: Sequence[int],
    summed: Sequence[Sequence[int]],
    batched: Sequence[Sequence[int]] = ((), ()),
) -> Contraction:
    """Return the contraction of two operands over pairs of axes, as `tensordot` has it.

    >>> contraction_of_axes((0, 1), (2, 3), ((1,), (0,))).terms
    ('Aa', 'aBC')
    """
    terms = []
    letters = iter(_APART + string.digits)
    for side, rank in enumerate(ranks):
        shared = [axis % rank for axis in (*summed[side], *batched[side])]
        own = dict(zip(shared, string.ascii_lowercase, strict=False))
        terms.append("".join(own.get(axis) or next(letters) for axis in range(rank)))
    pairs = string.ascii_lowercase[: len(summed[0])]
    kept = [name for name in "".join(terms) if name not in pairs]
    return Contraction(places, tuple(terms), "".join(dict.fromkeys(kept)))


def contraction_of_matmul(
    places: tuple[Place, Place],
    shapes: Sequence[Sequence[int | None]],
    transposed: tuple[bool, bool] = (False, False),
    summed: str = "",
) -> Contraction:
    """Return that of a product of matrices, or of a vector, which broadcasts leading axes.

    Args:
        places: The operands.
        shapes: Their shapes.
        transposed: Whether their last two axes are exchanged.
        summed: Names of leading axes, counted from the right, that are summed over as well.

    >>> contraction_of_matmul((0, 1), ((5, 1, 7, 4), (2, 4, 3)))
    Contraction(places=(0, 1), terms=('1Ank', '0km'), result='1A0nm', groups='')
    """
    apart, terms = iter(_APART), []
    for side, (shape, names) in enumerate(zip(shapes, ("nk", "km"), strict=True)):
        if len(shape) == 1:
            terms.append("k")
            continue
        lead = range(len(shape) - 2)[::-1]
        head = "".join(
            next(apart) if size == 1 else _DOTS[n] for n, size in zip(lead, shape[:-2], strict=True)
        )
        terms.append(head + (names[::-1] if transposed[side] else names))
    kept = dict.fromkeys(n for term in terms for n in term if n not in "knm" and n not in summed)
    ends = "".join(name for name in "nm" if any(name in term for term in terms))
    return Contraction(places, tuple(terms), "".join(kept) + ends)


def letters_in(product: Contraction, place: Place, weights: Collection[Place] = ()) -> str | None:
    """Return the letter of each axis of an operand: `G`, `O` or `I`, as in `AXES`.

    Operands are multiplied one after another, beginning with the data: of ``bd,dr,re->be`` the
    first weight sums over ``d`` and the second one over ``r``.

    Args:
        product: The product.
        place: The operand.
        weights: The operands that are weights.

    Returns:
        The letters; None if this is not an operand.
    """
    return _roles(product, place, frozenset(weights) | {place})


def _expanded(term: str, count: int) -> str:
    return term.replace("...", _DOTS[:count][::-1])


@functools.lru_cache(4096)
def _roles(product: Contraction, place: Place, weights: frozenset[Place]) -> str | None:
    if place not in product.places:
        return None
    wanted, left = product.places.index(place), list(range(len(product.places)))
    # Without data, the operand is multiplied by another weight.
    data = [index for index in left if product.places[index] not in weights]
    first = next((index for index in data or left if index != wanted), wanted)
    # All data that have the axis of samples come first, as in ``bi,oij,bj->bo``.
    samples = {*product.terms[first]} & {*product.result}
    begin = [n for n in left if n == first or (n in data and samples & {*product.terms[n]})]
    done: set[str] = set().union(*(product.terms[index] for index in begin))
    left = [index for index in left if index not in begin]
    while left:
        index = next((i for i in left if done & {*product.terms[i]}), left[0])
        left.remove(index)
        own = {*product.terms[index]}
        later = set(product.result).union(*(product.terms[other] for other in left))
        if index == wanted:
            return "".join(
                "G"
                if name in product.groups or (name in done and name in later)
                # An axis that no other operand has is summed over before the product.
                else "O"
                if name in later
                else "I"
                for name in product.terms[index]
            )
        done = (done | own) & later
    return None
