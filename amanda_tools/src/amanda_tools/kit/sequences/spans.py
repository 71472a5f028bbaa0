"""`Span`: the rows and positions of a sequence that one call of the outermost module computes.

Owns how they are read from the arguments of the call, by the names that libraries of language
models use. The driver describes the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from amanda_core.engine.calls import Call
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_tools.kit.tensors.values import host

__all__ = ["Span", "span_of"]

#: Arguments that are the sequence itself. For a model with an encoder it is the decoder's.
_SEQUENCES = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
#: Arguments that hold the results of earlier calls.
_CACHES = ("past_key_values", "past_key_value", "cache_params", "past_states", "cache", "mems")


@dataclass(frozen=True)
class Span:
    """The positions that one call computes.

    Attributes:
        module: Name of the outermost module.
        call: Number of the call in the step.
        rows: Rows of the batch; None if not known.
        start: Absolute position of the first one in the sequence; None if not known.
        length: Positions in each row; None if not known.
        unknown: Why something is not known; empty if all is.
        ends: The last position of each row that is not padding, counted from the first one of the
            call; -1 for a row of padding. None if they were not read.
    """

    module: str
    call: int
    rows: int | None = None
    start: int | None = None
    length: int | None = None
    unknown: str = ""
    ends: tuple[int, ...] | None = None

    @property
    def is_known(self) -> bool:
        """True if rows and positions are known."""
        return not self.unknown


def span_of(call: Call, with_ends: bool = False) -> Span:
    """Return the positions that a call computes.

    Call it when the call begins, because the call fills its cache.

    Args:
        call: The call.
        with_ends: Whether to read which positions are padding.
    """
    facts = call.facts
    if facts is None:
        return Span(call.module, call.number, unknown="its driver does not tell what tensors are")
    size = _size(call, facts)
    if size is None:
        why = "the module was given no tensor with rows and positions"
        return Span(call.module, call.number, unknown=why)
    cache = next(_caches(call), None)
    start = 0 if cache is None else _length(cache)
    if start is None:
        why = f"the cache, a {type(cache).__name__}, does not tell how much it holds"
        return Span(call.module, call.number, *size, unknown=why)
    span = Span(call.module, call.number, size[0], start, size[1])
    return _with_ends(span, call, facts) if with_ends else span


def _with_ends(span: Span, call: Call, facts: Facts) -> Span:
    """Return a span with the last position of each row, by the mask that the call was given."""
    import numpy

    assert span.rows is not None
    assert span.start is not None
    assert span.length is not None
    named = "decoder_" if any(str(name).startswith("decoder_input") for name in call.kwargs) else ""
    mask = call.kwargs.get(f"{named}attention_mask")
    others = [facts.shape(value) for value in call.args[1:] if facts.is_tensor(value)]
    if mask is None and (span.rows, span.start + span.length) in others:
        return replace(span, unknown="its mask is not given by the name attention_mask")
    if mask is None:
        return replace(span, ends=(span.length - 1,) * span.rows)
    try:
        kept = host(facts, mask).array[..., span.start :] != 0
    except (NotReadableError, IndexError, TypeError) as error:
        return replace(span, unknown=f"the mask of the call cannot be read: {error}")
    if kept.shape != (span.rows, span.length):
        return replace(span, unknown=f"the mask of the call has the shape {facts.shape(mask)}")
    last = span.length - 1 - numpy.argmax(kept[:, ::-1], axis=1)
    ends = numpy.where(kept.any(axis=1), last, -1)
    return replace(span, ends=tuple(map(int, ends)))


def _size(call: Call, facts: Facts) -> tuple[int, int] | None:
    """Return the number of rows, and of positions in each row."""
    named = [call.kwargs.get(name) for name in _SEQUENCES]
    for value in (*named, *call.args, *call.kwargs.values()):
        if value is None or not facts.is_tensor(value):
            continue
        shape = facts.shape(value)
        if shape is not None and len(shape) >= 2 and shape[0] is not None and shape[1] is not None:
            return shape[0], shape[1]
    return None


def _caches(call: Call) -> Iterator[Any]:
    for name in _CACHES:
        if call.kwargs.get(name) is not None:
            yield call.kwargs[name]
    for value in call.args:
        if hasattr(value, "get_seq_length"):
            yield value


def _length(cache: Any) -> int | None:
    """Return how many positions a cache holds; None if unknown."""
    if hasattr(cache, "get_seq_length"):
        try:
            return int(cache.get_seq_length())
        except (NotImplementedError, TypeError, ValueError):
            return None  # This is a cache of states without positions.
    if isinstance(cache, (list, tuple, Mapping)) and not cache:
        return 0
    return None
