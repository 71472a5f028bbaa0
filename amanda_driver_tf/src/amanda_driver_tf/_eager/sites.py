"""Op identity: from a call of an op to the site that it is a passing of.

Owns the identity rule (scope, call site, variable operands, occurrence) and the table from the
process-local form of a site (numbers) to its record. The id is the same in another process: it is
made of names and instruction offsets, never of addresses or file paths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from amanda_core import Site
from amanda_driver_tf._eager.call_sites import CallSite, Chain, call_site_class
from amanda_driver_tf._eager.frames import (
    SKIPPED,
    STOP,
    UNWATCHED,
    USER,
    Code,
    Codes,
    is_swallowing,
    source_of,
    zone_of,
)
from amanda_driver_tf._eager.op_types import OpType
from amanda_driver_tf._eager.records import Group, Operands, Record
from amanda_driver_tf._eager.scopes import TOKENS, Activation, Labels, Scope, Scopes
from amanda_driver_tf._shared.namespaces import EAGER
from amanda_driver_tf._tensorflow_internals.modules import ops
from amanda_driver_tf._tensorflow_internals.names import CUSTOM_GRADIENT
from amanda_driver_tf._tensorflow_internals.objects import variable_handle

__all__ = ["Sites", "operands_of"]

# Frames of the user's that make up a call site within a layer's activation. Helper functions that
# several lines call are told apart by it; three also bounds the walk.
_USER_FRAMES = 3
# Equal sites within one activation beyond this share an id, so that a layer whose call is an
# endless loop does not make endless ops.
_OCCURRENCES = 1024
_DEPTH = 48  # frames

_Found = list[tuple[Code, int]]
_EagerTensor = ops.EagerTensor


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
        self.records: dict[Any, Record] = {}
        #: Scope -> the record that its last activation began with; for a short cut only.
        self.firsts: dict[int, Record] = {}
        self._groups: dict[Any, Group] = {}
        self._call_site = call_site_class()
        self._call_sites: dict[Chain, CallSite] = {}
        #: Token -> keys of the groups that have its tensor as operand; they go with it.
        self._by_token: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self.records)

    def clear(self) -> None:
        """Forget all records, though not the names."""
        self.firsts.clear()
        self.records.clear()
        self._groups.clear()
        self._call_sites.clear()
        self._by_token.clear()

    def forget_paths(self, paths: Sequence[str]) -> None:
        """Forget the names of ops of layers that are gone, and their records."""
        gone = frozenset(paths)
        self.discard(lambda record: record.site.module_path in gone)
        for base in [base for base in self._names if base.rpartition("/")[0] in gone]:
            del self._names[base]

    def discard(self, gone: Callable[[Record], bool]) -> None:
        """Forget the records for which `gone` holds."""
        for key in [key for key, record in self.records.items() if gone(record)]:
            self._groups.pop(self.records.pop(key).group.key, None)
        self.firsts = {key: record for key, record in self.firsts.items() if not gone(record)}

    def read(self, activation: Activation, op_type: OpType, token: int) -> Record:
        """The record of a read of a variable, called by the caller of the caller of the caller."""
        # A read is told by what is read: walking to its line would cost more than reading.
        key: Any = (activation.scope.number, op_type.name, token)
        record = self.records.get(key)
        if record is None:
            operands, frame = ((0, token),), sys._getframe(3)
            record = self._new(Group(key), activation.scope, frame, [], op_type, operands, 0)
            record.token = token
            self.records[key] = record
        # It leads to no other: a variable may be read before this op and before that.
        return record

    def look_up(
        self,
        activation: Activation,
        op_type: OpType,
        operands: Operands,
        frame: FrameType | None,
    ) -> Record:
        """The record of an op, found by its call site.

        Args:
            activation: Where it is called.
            op_type: Its type.
            operands: What tells it apart from others at one site, from `operands_of`.
            frame: The frame that called it.
        """
        scope = activation.scope
        inside = bool(scope.root)
        found, chain = self._walk(frame, inside, scope.call)
        key = (
            scope.number,
            op_type.name,
            tuple((code.number, offset) for code, offset in found),
            operands,
        )
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key)
        occurrence = 0
        if inside:
            occurrence = activation.counts.get(group, 0)
            activation.counts[group] = occurrence + 1
            occurrence = min(occurrence, _OCCURRENCES)
        record = self.records.get((key, occurrence))
        if record is None:
            record = self._new(group, scope, frame, found, op_type, operands, occurrence)
            self.records[key, occurrence] = record
        # Layers of one kind share theirs: what is compared at every op should be in the cache.
        call_site = self._call_sites.get(chain)
        if call_site is None:
            call_site = self._call_sites[chain] = self._call_site(chain)
        record.call_site = call_site
        if activation.last is not None:
            activation.last.next = record
        else:
            self.firsts[scope.number] = record
        activation.last = record
        return record

    # Call sites.

    def ends_at(self, frame: FrameType | None, scope: Scope) -> tuple[bool, CodeType | None]:
        """Return whether a call site has frames that count, and the code at which it ends."""
        found, chain = self._walk(frame, bool(scope.root), scope.call)
        return bool(found), chain[-1][1] if chain else None

    def _walk(
        self, frame: FrameType | None, inside: bool, call: CodeType | None
    ) -> tuple[_Found, Chain]:
        """The frames of a call site that count, innermost first, and all of them in short."""
        known = self.codes.known
        limit = _USER_FRAMES if inside else 1
        depth = _DEPTH
        found: _Found = []
        chain: list[tuple[int, CodeType, int]] = []
        level = 0
        while frame is not None:
            here = frame.f_code
            code = known.get(id(here)) or self.codes.add(frame)
            kind = code.kind
            if kind != SKIPPED:
                offset = frame.f_lasti
                if kind == STOP:
                    chain.append((level, here, -1))
                    break
                chain.append((level, here, offset))
                found.append((code, code.offsets[offset >> 1]))
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
            level += 1
        return found, tuple(chain)

    def _operand_label(self, scope: Scope, position: int, token: int) -> tuple[Any, ...]:
        tensor = TOKENS.find(abs(token))
        if tensor is None:
            return (position,)
        name = self.scopes.variable_name(scope, tensor) if token > 0 else None
        return (position, name if name is not None else self.labels.number(tensor))

    # New sites.

    def _new(
        self,
        group: Group,
        scope: Scope,
        frame: FrameType | None,
        found: _Found,
        op_type: OpType,
        operands: Operands,
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
        caller = found[0][0].label[0] if found else ""
        record = Record(
            site,
            op_type,
            watched=not any(code.kind == UNWATCHED for code, _ in found or self._around(frame)),
            marks=caller == CUSTOM_GRADIENT,
            swallows=is_swallowing(frame),
        )
        record.group, record.occurrence, record.operands = group, occurrence, operands
        for _, token in operands:
            self._by_token.setdefault(abs(token), []).append(group.key)
        return record

    def _around(self, frame: FrameType | None) -> _Found:
        return self._walk(frame, False, None)[0]

    def _name(self, scope: Scope, op_type: str, key: Any) -> str:
        base = f"{scope.path}/{op_type}" if scope.path else op_type
        same = self._names.setdefault(base, {})
        number = same.setdefault(key, len(same) + 1)
        return base if number == 1 else f"{base}#{number}"

    def _purge(self) -> None:
        """Forget the ops of variables that are gone: their names are free for others."""
        if not self.labels.changed:
            return
        self.labels.take_dead()
        for token in [token for token in self._by_token if TOKENS.find(token) is None]:
            keys = set(self._by_token.pop(token))
            for key, record in tuple(self.records.items()):
                if record.group.key in keys:
                    del self.records[key]
                    if any(operand == token for _, operand in record.operands):
                        # Of a watched tensor the next one takes the place, of a variable not.
                        self._drop(record)
            for one in keys:
                self._groups.pop(one, None)


def operands_of(op_type: OpType, args: Sequence[Any], inside: bool) -> Operands:
    """The operands of a call that tell it apart; `inside` a layer or not."""
    found: Operands = ()
    for position, value in zip(op_type.positions, args, strict=False):
        kind = type(value)
        if kind is _EagerTensor:
            token = value._amanda_source
            if token.__class__ is not int:
                if position not in op_type.handles:
                    continue
                token = TOKENS.of(value)
            # Watched tensors count only where no activation counts occurrences, and not in front:
            # what flows stands there. Constants never do.
            elif not token or (token < 0 and (inside or not position)):
                continue
        elif kind in _NO_VARIABLES:
            continue
        else:
            handle = variable_handle(value)
            if handle is None:
                continue
            token = TOKENS.of(handle)
        found = (*found, (position, token))
    return found


# A value that an operand is in most calls, and that is no variable.
_NO_VARIABLES: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, list, tuple, type(None)}
)
