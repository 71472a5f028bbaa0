"""Selection of the contributions to an output, for effective paths: which terms of a sum are kept.

Works on NumPy arrays, many outputs at once. NumPy is imported only when needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["TERMS_AT_ONCE", "Kept", "chunks", "cumulative", "keep_terms", "maximal", "turned"]

#: Number of terms per chunk: enough that the calls cost less than the work, few enough for a cache.
TERMS_AT_ONCE = 1 << 18
#: Few terms of a long row are kept. Those of at least this share of its largest are sorted, then,
#: if they are not enough, those of the next share; 0 stands for all positive ones.
_SHARES = (0.5, 0.25, 0.0625, 0.0)
#: Of rows up to this length all positive terms are sorted at once.
_SHORT = 16


def chunks(rows: int, terms: int) -> Iterator[slice]:
    """Split this many rows of this many terms into parts that fit into memory."""
    size = max(1, TERMS_AT_ONCE // max(1, terms))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


@dataclass
class Kept:
    """Terms that are kept for some outputs, as NumPy arrays of one axis.

    Attributes:
        rows: Index of the output of each kept term, ascending.
        columns: Index of the term among those of its output, ascending within each output.
        signs: For each output, -1 if the signs of its inputs are to be flipped, otherwise 1.
        threshold: For each output, the least term that is kept; NaN if there is none.
    """

    rows: Any
    columns: Any
    signs: Any
    threshold: Any = None


def turned(outputs: Any, signs: Any) -> Any:
    """Return True for outputs whose negative terms are kept, so that all terms must be negated."""
    return outputs * signs < 0


def keep_terms(
    terms: Any, valid: Any, signs: Any, theta: float, phi: float | None, number: Any = None
) -> Kept:
    """Keep the terms that determine each output.

    Args:
        terms: Terms of shape (outputs, terms), negated where `turned` says so; 0 where they do not
            exist.
        valid: Which of them exist, of the same shape; None for all.
        signs: For each output, -1 if its sign is to be flipped, otherwise 1.
        theta: Share of the sum to keep.
        phi: Keep terms of at least this value instead; None to keep a share.
        number: For each output, how many terms exist, if it is known.
    """
    import numpy as np

    largest = _largest(terms, valid)
    if phi is None:
        places, least = cumulative(terms, valid, theta, largest, number)
    else:
        mask = terms >= phi if valid is None else (terms >= phi) & valid
        places, least = (
            np.flatnonzero(mask),
            np.where(mask, terms, np.inf).min(axis=1, initial=np.inf),
        )
    least[~np.isfinite(least)] = np.nan
    flipped = np.where((signs == -1) & (largest < 0), -1, 1).astype(np.int8)
    return Kept(*_rows_and_columns(places, terms.shape[1]), flipped, least)


def cumulative(
    terms: Any, valid: Any, theta: float, largest: Any = None, number: Any = None
) -> tuple[Any, Any]:
    """Keep the largest terms of each row that make up a share of its sum.

    Kept is the shortest prefix of the terms in descending order whose sum is at least `theta` of
    the whole; among equal terms the first. If the sum is not positive, or a single term is already
    a share of at least `theta` by count, only the largest term is kept.

    Args:
        terms: Terms of shape (rows, terms); 0 where they do not exist.
        valid: Which of them exist, of the same shape; None for all.
        theta: The share, above 0 and at most 1.
        largest: The largest term of each row, if it is known.
        number: How many terms of each row exist, if it is known.

    Returns:
        The indices of what is kept in the flattened terms, ascending, and the least term that is
        kept of each row.
    """
    import numpy as np

    width: Any = terms.shape[1]
    if number is None:
        number = width if valid is None else np.count_nonzero(valid, axis=1)
    total = terms.sum(axis=1)
    with np.errstate(divide="ignore"):
        alone = ~(total > 0) | (1 / np.asarray(number) >= theta)
    largest = _largest(terms, valid) if largest is None else largest
    rows = np.flatnonzero(alone)
    found = [_first_largest(terms, valid, rows)]
    least = largest.copy()
    # The others have a positive sum, so that only positive terms are kept, all of which exist.
    rows = np.flatnonzero(~alone)
    for share in _SHARES if width > _SHORT else (0.0,):
        if not len(rows):
            break
        own = terms if len(rows) == len(terms) else terms[rows]
        places, smallest, done = _prefixes(own, largest[rows], share, theta * total[rows])
        row, column = _rows_and_columns(places, width)
        found.append(rows[row] * width + column)
        least[rows[done]] = smallest[done]
        rows = rows[~done]
    return np.sort(np.concatenate(found)), least


def _largest(terms: Any, valid: Any) -> Any:
    """Return the largest term of each row that exists; minus infinity if there is none."""
    import numpy as np

    largest = terms.max(axis=1, initial=-np.inf)
    if valid is not None:
        rows = np.flatnonzero(~(largest > 0))
        shown = np.where(valid[rows], terms[rows], -np.inf)
        largest[rows] = shown.max(axis=1, initial=-np.inf)
    return largest


def _first_largest(terms: Any, valid: Any, rows: Any) -> Any:
    """Return the index of the first largest term of these rows in the flattened terms."""
    import numpy as np

    width: Any = terms.shape[1]
    if not len(rows) or not width:
        return np.empty(0, np.int64)
    places = rows * width + (terms if len(rows) == len(terms) else terms[rows]).argmax(axis=1)
    # NaN counts as the smallest, and terms that do not exist do not count.
    odd = np.flatnonzero(~(terms.reshape(-1)[places] > 0))
    shown = terms[rows[odd]]
    there = ~np.isnan(shown) if valid is None else valid[rows[odd]] & ~np.isnan(shown)
    places[odd] = rows[odd] * width + np.where(there, shown, -np.inf).argmax(axis=1)
    return places if valid is None else places[valid.reshape(-1)[places]]


def _prefixes(terms: Any, largest: Any, share: float, needed: Any) -> tuple[Any, Any, Any]:
    """Return the shortest prefix of each row in descending order whose sum is at least what is
    needed, if all its terms are at least `share` of the largest.

    Returns:
        The indices of what is kept, the least term that is kept of each row, and whether `share`
        was small enough for the row. Nothing is kept of other rows.
    """
    import numpy as np

    width = terms.shape[1]
    mask = terms >= (largest * share)[:, None] if share else terms > 0
    places = np.flatnonzero(mask)
    values, rows = terms.reshape(-1)[places], places // width
    sizes = np.bincount(rows, minlength=len(terms))
    starts = np.cumsum(sizes) - sizes
    ordered = np.zeros((len(terms), sizes.max()))
    ordered[rows, np.arange(len(rows)) - starts[rows]] = -values
    ordered.sort(axis=1)
    np.negative(ordered, out=ordered)
    # The sums rise, so the first that is large enough comes after all that are too small.
    count = np.count_nonzero(ordered.cumsum(axis=1) < needed[:, None], axis=1) + 1
    if not share:
        # Because of rounding, possibly no sum is large enough.
        count = np.minimum(count, sizes)
    done = count <= sizes
    least = ordered[np.arange(len(terms)), np.minimum(count, sizes) - 1]
    kept = np.flatnonzero((values >= least[rows]) & done[rows])
    if len(kept) != count[done].sum():
        kept = kept[_first_of_equals(values[kept], rows[kept], least, count)]
    return places[kept], least, done


def _first_of_equals(values: Any, rows: Any, least: Any, count: Any) -> Any:
    """Return which of these terms are kept if of those equal to the least only the first are."""
    import numpy as np

    equal = values == least[rows]
    greater = np.bincount(rows, weights=~equal, minlength=len(count))
    sizes = np.bincount(rows, weights=equal, minlength=len(count))
    number = equal.cumsum() - (np.cumsum(sizes) - sizes)[rows]
    return ~equal | (number <= (count - greater)[rows])


def _rows_and_columns(places: Any, width: int) -> tuple[Any, Any]:
    rows = places // max(1, width)
    return rows, places - rows * width


def maximal(terms: Any, valid: Any, positive: bool) -> Any:
    """Keep the terms of each row that equal its maximum, with `positive` only if that is
    positive.
    """
    import numpy as np

    shown = terms if valid is None else np.where(valid, terms, -np.inf)
    kept = shown == shown.max(axis=1, keepdims=True)
    if valid is not None:
        kept &= valid
    return kept & (terms > 0) if positive else kept
