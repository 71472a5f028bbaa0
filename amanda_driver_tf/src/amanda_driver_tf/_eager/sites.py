"""Op identity: from a call of an op to the site that it is a passing of.

Owns the identity rule (scope, call site, variable operands, occurrence) and the table from the
process-local form of a site (numbers) to its record. The id is the same in another process: it is
made of names and instruction offsets, never of addresses or file paths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from amanda_core import OpContext, Site
from amanda_core.identity import stable_id
from amanda_driver_tf._eager.frames import (
    STOP,
    UNWATCHED,
    USER,
    Code,
    Codes,
    is_swallowing,
    source_of,
    zone_of,
)
from amanda_driver_tf._eager.op_types import READ, OpType
from amanda_driver_tf._eager.scopes import Activation, Labels, Scope, Scopes
from amanda_driver_tf._eager.symbols import ops, resource_variable_ops
from amanda_driver_tf._namespaces import EAGER

__all__ = ["Record", "Sites", "backward_site"]

# Frames of the user's that make up a call site within a layer's activation. Helper functions that
# several lines call are told apart by it; three also bounds the walk.
_USER_FRAMES = 3
# Equal sites within one activation beyond this share an id, so that a layer whose call is an
# endless loop does not make endless ops.
_OCCURRENCES = 1024
_DEPTH = 48  # frames

_Found = list[tuple[Code, int]]


class Record:
    """What an attachment knows of one op, forward or backward.

    Attributes:
        site: The facts that the core is told.
        op_type: Its type.
        forward: Record of the forward op of a backward op, if it has one.
        backward: Whether this is a backward op.
        idle: Epoch in which there is nothing to do when it executes; 0 for none.
        settled: Epoch in which there is nothing to do when its gradient is computed ...
        settled_again: ... and when that is itself differentiated.
        planned: Epoch in which something was to be done.
        reads: Records of the variable reads that its arguments imply.
        children: Its backward ops, by call site in the gradient function.
    """

    __slots__ = (
        "backward",
        "children",
        "context",
        "forward",
        "idle",
        "marks",
        "names",
        "number",
        "op_type",
        "planned",
        "reads",
        "settled",
        "settled_again",
        "site",
        "skip",
        "swallows",
        "token",
        "watched",
    )

    def __init__(
        self,
        site: Site,
        op_type: OpType,
        *,
        forward: Record | None = None,
        backward: bool = False,
        watched: bool = True,
        marks: bool = False,
        swallows: bool = False,
    ) -> None:
        self.site, self.op_type = site, op_type
        self.forward, self.backward = forward, backward
        self.context: OpContext | None = None
        #: Tells it apart from all others, in every process.
        self.number = stable_id((forward.number if forward is not None else 0, site.key))
        self.idle = self.settled = self.settled_again = self.planned = 0
        self.reads: tuple[Record, ...] = ()
        #: For which inputs left out of account it was settled.
        self.skip: Any = None
        #: Of a read: the token of what is read.
        self.token = 0
        self.children: dict[Any, Record] = {}
        self.names: dict[str, int] = {}
        #: False for what is none of the user's model, such as reading a data set.
        self.watched = watched
        #: Whether its output is that of a function with a gradient of its own.
        self.marks = marks
        #: Whether TensorFlow tries something else where it raises TypeError or ValueError.
        self.swallows = swallows


class Sites:
    """The forward ops passed so far.

    Args:
        scopes: Scopes and their names; resume with the contexts.
        labels: Numbers of variables and watched tensors; likewise.
        names: Readable names given so far and how often; likewise.
        drop: Told of a record whose variable or layer is gone.
    """

    def __init__(
        self,
        scopes: Scopes,
        labels: Labels,
        names: dict[str, dict[Any, int]],
        drop: Callable[[Record], None],
    ) -> None:
        self.scopes, self.labels = scopes, labels
        self._names, self._drop = names, drop
        self.codes = Codes()
        self._records: dict[Any, Record] = {}
        #: Token -> keys of the records that have its tensor as operand; they go with it.
        self._by_token: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def clear(self) -> None:
        """Forget all records, though not the names."""
        self._records.clear()
        self._by_token.clear()

    def forget_paths(self, paths: Sequence[str]) -> None:
        """Forget the names of ops of layers that are gone, and their records."""
        gone = frozenset(paths)
        self.discard(lambda record: record.site.module_path in gone)
        for base in [base for base in self._names if base.rpartition("/")[0] in gone]:
            del self._names[base]

    def discard(self, gone: Callable[[Record], bool]) -> None:
        """Forget the records for which `gone` holds."""
        for key in [key for key, record in self._records.items() if gone(record)]:
            del self._records[key]

    def locate(
        self,
        activation: Activation,
        op_type: OpType,
        args: Sequence[Any],
        frame: FrameType | None,
        boundary: int = 0,
    ) -> Record:
        """The record of the op that is being called.

        Args:
            activation: Where.
            op_type: Its type.
            args: The call's arguments, inputs first.
            frame: The frame that called it.
            boundary: Id of a code at which the call site ends, too.
        """
        scope = activation.scope
        if op_type.kind == READ:
            # A read is told by what is read: walking to its line would cost more than reading.
            token = self._token(args[0])
            key: Any = (scope.number, op_type.name, token)
            record = self._records.get(key)
            if record is None:
                record = self._new(key, scope, op_type, frame, [], [(0, token)], 0)
                record.token = token
            return record
        # One flat list of numbers: this is built and hashed at every op.
        numbers: list[Any] = [scope.number, op_type.name]
        inside = bool(scope.root)
        self._walk(frame, inside, scope.call, numbers, None)
        operands = self._operands(op_type, args, inside, numbers)
        occurrence = 0
        if inside:
            counted = tuple(numbers)
            counts = activation.counts
            occurrence = counts.get(counted, 0)
            counts[counted] = occurrence + 1
            if occurrence:
                numbers.append(min(occurrence, _OCCURRENCES))
        key = tuple(numbers)
        record = self._records.get(key)
        if record is None:
            found: _Found = []
            self._walk(frame, inside, scope.call, [], found)
            record = self._new(
                key, scope, op_type, frame, found, operands, min(occurrence, _OCCURRENCES)
            )
        return record

    # Call sites.

    def _walk(
        self,
        frame: FrameType | None,
        inside: bool,
        call: CodeType | None,
        numbers: list[Any],
        found: _Found | None,
    ) -> None:
        """Add the numbers and offsets of a call site's frames, innermost first."""
        known = self.codes.known
        limit = _USER_FRAMES if inside else 1
        depth = _DEPTH
        while frame is not None:
            here = frame.f_code
            code = known.get(id(here)) or self.codes.add(frame)
            kind = code.kind
            if kind:  # SKIPPED is 0.
                if kind == STOP:
                    break
                offset = frame.f_lasti
                if offset in code.precalls:
                    offset += 4
                numbers.append(code.number)
                numbers.append(offset)
                if found is not None:
                    found.append((code, offset))
                if here is call:
                    break
                if kind == USER:
                    limit -= 1
                    if not limit:
                        break
                depth -= 1
                if not depth:
                    break
            frame = frame.f_back

    def call_site(self, frame: FrameType | None) -> _Found:
        """The frames of a call site up to a boundary or the user's first."""
        found: _Found = []
        self._walk(frame, False, None, [], found)
        return found

    # Operands.

    def _token(self, value: Any) -> int:
        held = getattr(value, "_handle", value)  # A variable, or its handle already.
        return self.labels.token(held)

    def _operands(
        self, op_type: OpType, args: Sequence[Any], inside: bool, numbers: list[Any]
    ) -> list[tuple[int, int]]:
        """The operands that tell ops apart, as (position, token); adds them."""
        found: list[tuple[int, int]] = []
        for position, value in zip(op_type.positions, args, strict=False):
            kind = type(value)
            if kind is ops.EagerTensor:
                token = value._amanda_source
                if token.__class__ is not int:
                    if position not in op_type.handles:
                        continue
                    token = self.labels.token(value)
                # Watched tensors count only where no activation counts occurrences, and not in
                # front: what flows stands there. Constants never do.
                elif not token or (token < 0 and (inside or not position)):
                    continue
            elif kind in _NO_VARIABLES or not isinstance(
                value, resource_variable_ops.BaseResourceVariable
            ):
                if kind not in _NO_VARIABLES:
                    held = getattr(getattr(value, "_value", None), "_handle", None)
                    if held is None:
                        continue
                    token = self.labels.token(held)
                else:
                    continue
            else:
                token = self.labels.token(value._handle)
            numbers.append(-1 - position)
            numbers.append(token)
            found.append((position, token))
        return found

    def _operand_label(self, scope: Scope, position: int, token: int) -> tuple[Any, ...]:
        tensor = self.labels.find(abs(token))
        if tensor is None:
            return (position,)  # Met in another session.
        name = self.scopes.variable_name(scope, tensor) if token > 0 else None
        return (position, name if name is not None else self.labels.number(tensor))

    # New sites.

    def _new(
        self,
        key: Any,
        scope: Scope,
        op_type: OpType,
        frame: FrameType | None,
        found: _Found,
        operands: list[tuple[int, int]],
        occurrence: int,
    ) -> Record:
        self._purge()
        labels = tuple((*code.label, offset) for code, offset in found)
        stable = (
            "op",
            scope.root,
            scope.path,
            scope.zone,
            op_type.name,
            labels,
            tuple(self._operand_label(scope, position, token) for position, token in operands),
            occurrence,
        )
        site = Site(
            key=stable,
            op_type=op_type.name,
            namespace=EAGER,
            name=self._name(scope, op_type.name, stable),
            module_path=scope.path,
            source=source_of(frame),
            zone=scope.zone or zone_of(frame),
        )
        kinds = [code.kind for code, _ in found] if found else list(self._kinds(frame))
        caller = found[0][0].label[0] if found else ""
        record = self._records[key] = Record(
            site,
            op_type,
            watched=UNWATCHED not in kinds,
            marks=caller == "tensorflow.python.ops.custom_gradient",
            swallows=is_swallowing(frame),
        )
        for _, token in operands:
            self._by_token.setdefault(abs(token), []).append(key)
        return record

    def _kinds(self, frame: FrameType | None) -> Iterator[int]:
        while frame is not None:
            kind = (self.codes.known.get(id(frame.f_code)) or self.codes.add(frame)).kind
            if kind in (USER, STOP):
                break
            yield kind
            frame = frame.f_back

    def _name(self, scope: Scope, op_type: str, key: Any) -> str:
        base = f"{scope.path}/{op_type}" if scope.path else op_type
        same = self._names.setdefault(base, {})
        number = same.setdefault(key, len(same) + 1)
        return base if number == 1 else f"{base}#{number}"

    def _purge(self) -> None:
        """Forget the ops of variables that are gone: their names are free for others."""
        if not self.labels.changed:
            return
        for token in self.labels.take_dead():
            for key in self._by_token.pop(token, ()):
                record = self._records.pop(key, None)
                if record is not None:
                    self._drop(record)


def backward_site(
    op_type: str, key: tuple[Any, ...], forward: Record | None, number: int, source: str | None
) -> Site:
    """The facts of a backward op; `number` tells apart those of one name."""
    base = f"{forward.site.name}:{op_type}" if forward is not None else op_type
    return Site(
        key=("backward", *key),
        op_type=op_type,
        namespace=EAGER,
        name=base if number == 1 else f"{base}#{number}",
        module_path=forward.site.module_path if forward is not None else "",
        source=forward.site.source if forward is not None else source,
        zone=forward.site.zone if forward is not None else "model",
    )


# A value that an operand is in most calls, and that is no variable.
_NO_VARIABLES: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, list, tuple, type(None)}
)
