"""The ops of the forward program: finds the record of a call by the core's rule of op identity.

Owns what is specific to eager execution: reads of variables, and the prediction of an op by the op
that it followed last time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from amanda_core.driver_kit import (
    FRAMES,
    MODULE_INPUT,
    MODULE_OUTPUT,
    QUIET,
    Activation,
    Frames,
    Level,
    Origin,
    Scope,
    Scopes,
    Session,
    Sites as Known,
)
from amanda_core.interface import Site
from amanda_driver_tf.identity.call_sites import CallSite, Chain, call_site_class
from amanda_driver_tf.identity.frames import is_swallowing
from amanda_driver_tf.identity.namespaces import EAGER
from amanda_driver_tf.identity.records import Operands, Record
from amanda_driver_tf.identity.rules import RULES, new_labels, new_scopes
from amanda_driver_tf.identity.tokens import TOKENS
from amanda_driver_tf.operators.op_types import READ, OpType, op_type_of
from amanda_driver_tf.tensorflow_internals.names import CUSTOM_GRADIENT

__all__ = ["Sites"]


class Sites:
    """The forward ops seen so far.

    Args:
        session: The session, with whose contexts names and numbers resume.
        drop: Called with a record whose variable is gone.
    """

    def __init__(self, session: Session, drop: Callable[[Record], None]) -> None:
        self.scopes: Scopes = session.shared("tensorflow.eager.scopes", new_scopes)
        self._names: dict[str, dict[Any, int]] = session.shared("tensorflow.eager.names", dict)
        labels = session.shared("tensorflow.eager.labels", new_labels)
        self._drop = drop
        self._known: Known[Record] = Known(
            RULES, None, self.scopes, labels, self._names, EAGER, self._make, self._forget
        )
        #: Reads of variables, and values of layers: number of the scope, op type and token (0 for
        #: a layer) -> the record.
        self.reads: dict[tuple[int, str, int], Record] = {}
        #: Scope -> the first record of its last activation, as a prediction.
        self.firsts: dict[int, Record] = {}
        self._call_site = call_site_class()
        self._call_sites: dict[Chain, CallSite] = {}

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget all records, but not the names."""
        self._known.clear()
        self._call_sites.clear()
        self.reads.clear()
        self.firsts.clear()

    def forget_layers(self, paths: Iterable[str]) -> None:
        """Forget the ops of layers that are gone, and their names."""
        gone = frozenset(paths)
        self._known.discard(lambda record: record.site.module_path in gone)
        kept: dict[Any, Record]
        for kept in (self.reads, self.firsts):
            dead: list[Any] = [k for k, one in kept.items() if one.site.module_path in gone]
            for key in dead:
                del kept[key]
        for base in [base for base in self._names if base.rpartition("/")[0] in gone]:
            del self._names[base]

    def read(self, activation: Activation, op_type: OpType, token: int) -> Record:
        """Return the record of a read of a variable."""
        # A read is identified by its variable; finding its line would cost more than the read.
        key = (activation.scope.number, op_type.name, token)
        record = self.reads.get(key)
        if record is None:
            weights = ((0, token, TOKENS.find(token)),)
            # Different ops may follow a read, so it predicts none.
            origin = Origin(op_type.name, activation.scope, ())
            record = self._known.passed(origin, weights, {})[0]
            self.reads[key] = record
            record.token = token
        return record

    def of_layer(self, activation: Activation, op_type: OpType) -> Record:
        """Return the record of what the layer that is being called takes, or returns."""
        key = (activation.scope.number, op_type.name, 0)
        record = self.reads.get(key)
        if record is None:
            origin = Origin(op_type.name, activation.scope, ())
            record = self.reads[key] = self._known.passed(origin, (), {})[0]
        return record

    def look_up(
        self,
        activation: Activation,
        op_type: OpType,
        operands: Operands,
        frame: FrameType | None,
    ) -> Record:
        """Return the record of an op, found by its call site.

        Args:
            activation: Where it is called.
            op_type: Its type.
            operands: The operands that distinguish it at one site, from `operands_of`.
            frame: The frame that called it.
        """
        scope = activation.scope
        levels: list[Level] = []
        frames = self._known.walk(frame, FRAMES if scope.root else 1, levels)
        chain = tuple(levels)
        weights = []
        for position, token in operands:
            weight = TOKENS.find(token)
            # A variable that is gone distinguishes nothing, though its value may still exist.
            if weight is not None:
                weights.append((position, token, weight))
        origin = Origin(op_type.name, scope, frames)
        record, group, occurrence = self._known.passed(origin, weights, activation.counts)
        if record.group is not group:
            record.group, record.occurrence, record.operands = group, occurrence, operands
        # Layers of one kind share call sites, so that these stay in the CPU's cache.
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
        """Return whether a call site has relevant frames, and the code at which it ends."""
        levels: list[Level] = []
        found = self._known.walk(frame, FRAMES if scope.root else 1, levels)
        return bool(found), levels[-1][1] if levels else None

    def frames(self, frame: FrameType | None) -> Frames:
        """Return all relevant frames up to the call of a gradient function."""
        return self._known.walk(frame, -1)

    def source(self, frame: FrameType | None) -> str | None:
        """Return ``file:line`` of the user's innermost frame."""
        return self._known.source(frame)

    # New sites.

    def _make(self, site: Site, caller: str) -> Record:
        around = self._known.walk(sys._getframe(1), 1)
        return Record(
            site,
            op_type_of(site.op_type),
            watched=not any(code.kind == QUIET for code, _ in around),
            marks=caller == CUSTOM_GRADIENT,
            swallows=is_swallowing(),
        )

    def _forget(self, record: Record) -> None:
        if record.op_type.kind == READ or record.op_type.name in (MODULE_INPUT, MODULE_OUTPUT):
            for key in [key for key, read in self.reads.items() if read is record]:
                del self.reads[key]
        self._drop(record)
