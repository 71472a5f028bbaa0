"""Op identity: from a call to the site that it is a passing of.

Owns the identity rule (scope, call site, parameter operands, occurrence) and the table from the
process-local form of a site (numbers) to its record. The id is the same in another process: it is
made of names and instruction offsets, never of addresses or file paths.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from amanda_core import Site
from amanda_core.identity import call_offsets
from amanda_core.weak import Known
from amanda_driver_torch._identity.frames import is_own, is_torchs, looks_away
from amanda_driver_torch._identity.scopes import Labels, Scopes
from amanda_driver_torch._thread.activations import OUTSIDE, Scope
from amanda_driver_torch._thread.state import STATE
from amanda_driver_torch._torch.reading import is_weight

__all__ = ["BOUNDARY", "Sites"]

R = TypeVar("R")

#: Codes at which a call site ends: what lies further out may differ between a first run and a
#: recomputation. Module calls and checkpointed functions add theirs.
BOUNDARY: set[CodeType] = set()

# Frames of the user's that make up a call site within a module activation. Helper functions that
# several lines call are told apart by it; three also bounds the walk.
_FRAMES = 3
# Equal sites within one activation beyond this share an id, so that a module whose forward is an
# endless loop does not make endless ops.
_OCCURRENCES = 1024
# Codes made by exec() are new objects each time; the table is rebuilt when it gets this large.
_CODES = 16384

# The native interceptor has these numbers, too.
_USER, _TORCH, _OWN, _STOP, _QUIET = range(5)


class _Code:
    __slots__ = ("code", "kind", "label", "number", "offsets")

    def __init__(self, code: CodeType, kind: int, label: tuple[str, str, int], number: int) -> None:
        self.code, self.kind, self.label, self.number = code, kind, label, number
        self.offsets = call_offsets(code)


class Sites(Generic[R]):
    """The sites passed so far, as records made by `make`.

    Args:
        scopes: Scopes and their names; resume with the contexts.
        labels: Numbers of parameters outside modules; likewise.
        names: Readable names given so far and how often; likewise.
        namespace: The namespace of all sites.
        make: Makes a record of a new site, given it and the name of the calling module.
        drop: Told of a record whose parameter is gone: the op by its name is another one now.
    """

    def __init__(
        self,
        scopes: Scopes,
        labels: Labels,
        names: dict[str, dict[Any, int]],
        namespace: str,
        make: Callable[[Site, str], R],
        drop: Callable[[R], None],
    ) -> None:
        self._scopes, self.labels, self._names = scopes, labels, names
        self._namespace, self._make, self._drop = namespace, make, drop
        self._records: dict[Any, R] = {}
        #: Key of a record -> tokens of its operands; with one of them the record goes.
        self._tokens: dict[Any, frozenset[int]] = {}
        self._codes: dict[int, _Code] = {}
        self._code_numbers: dict[tuple[int, tuple[str, str, int]], int] = {}
        #: Identity and readable name of leaves, as when they were last used.
        self._leaves: Known[tuple[Any, str]] = Known()
        self._parameter_types: dict[type, bool] = {nn.Parameter: True, torch.Tensor: False}

    def __len__(self) -> int:
        return len(self._records)

    def discard(self, gone: Callable[[R], bool]) -> None:
        """Forget the records for which `gone` holds."""
        for key in [key for key, record in self._records.items() if gone(record)]:
            del self._records[key], self._tokens[key]

    def clear(self) -> None:
        """Forget all records, though not the names."""
        self._records.clear()
        self._tokens.clear()

    def locate(self, op_type: str, args: Sequence[Any], kwargs: dict[str, Any]) -> R:
        """The record of the op that is being called; `args` are the call's, not yet edited."""
        activation = STATE.activations[-1] if STATE.activations else None
        scope = activation.scope if activation is not None else OUTSIDE
        inside = bool(scope.root)
        # One flat tuple of numbers: this is built and hashed at every operator.
        numbers: list[Any] = [scope.number, op_type]
        self._walk(sys._getframe(2), _FRAMES if inside else 1, numbers)
        operands = self._operands(args, kwargs, inside, numbers)
        occurrence = 0
        if activation is not None and inside:
            counted = tuple(numbers)
            counts = activation.counts
            occurrence = counts.get(counted, 0)
            counts[counted] = occurrence + 1
            numbers.append(min(occurrence, _OCCURRENCES))
        key = tuple(numbers)
        record = self._records.get(key)
        if record is None:
            frames = self._walk(sys._getframe(2), _FRAMES if inside else 1, [])
            occurrence = min(occurrence, _OCCURRENCES)
            record = self._add(key, op_type, scope, frames, operands, occurrence)
        return record

    def resolve(
        self,
        op_type: str,
        scope: Scope,
        frames: list[tuple[_Code, int]],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        occurrence: int,
    ) -> R:
        """The record of an op whose frames and occurrence in its activation are known.

        For the native interceptor, which does the lookup of `locate` itself and asks here for what
        it has not seen before.
        """
        numbers: list[Any] = [scope.number, op_type]
        for code, offset in frames:
            numbers += (code.number, offset)
        inside = bool(scope.root)
        operands = self._operands(args, kwargs, inside, numbers)
        if inside:
            numbers.append(occurrence)
        key = tuple(numbers)
        record = self._records.get(key)
        if record is None:
            record = self._add(key, op_type, scope, frames, operands, occurrence)
        return record

    def _add(
        self,
        key: Any,
        op_type: str,
        scope: Scope,
        frames: list[tuple[_Code, int]],
        operands: list[tuple[int, int, torch.Tensor]],
        occurrence: int,
    ) -> R:
        self._purge()
        site = self._site(op_type, scope, frames, operands, occurrence)
        record = self._make(site, frames[0][0].label[0] if frames else "")
        self._records[key] = record
        self._tokens[key] = frozenset(token for _, token, _ in operands)
        return record

    def parameter_key(self, tensor: torch.Tensor) -> tuple[Any, str]:
        """Identity and readable name of a leaf that is used now, for its gradient accumulation."""
        found = self._parameter_key(tensor)
        if self._leaves.get(tensor) != found:
            self._leaves.set(tensor, found)
        return found

    def remembered_key(self, tensor: torch.Tensor) -> tuple[Any, str]:
        """Return what a leaf was called when it was used: in a backward pass no module is open."""
        return self._leaves.get(tensor) or self._parameter_key(tensor)

    def _parameter_key(self, tensor: torch.Tensor) -> tuple[Any, str]:
        for scope in (a.scope for a in reversed(STATE.activations)):
            name = self._scopes.parameter_name(scope, tensor)
            if name is not None:
                return ("parameter", scope.root, name), name
        _, number = self.labels.look_up(tensor)
        return ("leaf", number), f"leaf{number}"

    # Call sites.

    def _walk(
        self, frame: FrameType | None, limit: int, numbers: list[Any]
    ) -> list[tuple[_Code, int]]:
        """The frames of a call site, innermost first; adds their numbers and offsets."""
        found: list[tuple[_Code, int]] = []
        codes = self._codes
        innermost = True
        while frame is not None:
            code = codes.get(id(frame.f_code)) or self.classify(frame.f_code, frame.f_globals)
            kind = code.kind
            if kind == _USER:
                offset = code.offsets[frame.f_lasti >> 1]
                numbers += (code.number, offset)
                found.append((code, offset))
                innermost = False
                limit -= 1
                if not limit:
                    break
            elif kind == _TORCH:
                # Of torch's frames only the innermost counts, if it is the caller: a wrapper of
                # torch's may call several operators from one line of the user's.
                if innermost:
                    offset = code.offsets[frame.f_lasti >> 1]
                    numbers += (code.number, offset)
                    found.append((code, offset))
                    innermost = False
            elif kind == _STOP:
                break
            frame = frame.f_back
        return found

    def classify(self, code: CodeType, namespace: dict[str, Any]) -> _Code:
        """Return what a frame that runs `code` is in a call site."""
        if len(self._codes) > _CODES:
            self._codes.clear()
        module = str(namespace.get("__name__", ""))
        kind = _USER
        if code in BOUNDARY:
            kind = _STOP
        elif looks_away(code, namespace):
            kind = _QUIET
        elif is_torchs(namespace):
            kind = _TORCH
        elif is_own(code):
            kind = _OWN
        # The first line tells apart what exec() and lambdas leave without a name of their own;
        # only there, so that an edit above a named function changes no id.
        name = getattr(code, "co_qualname", code.co_name)
        line = code.co_firstlineno if "<" in code.co_name or not hasattr(code, "co_qualname") else 0
        label = (module, name, line)
        number = self._code_numbers.setdefault((kind, label), len(self._code_numbers) + 1)
        known = _Code(code, kind, label, number)
        self._codes[id(code)] = known  # `known` keeps the code alive, so its id stays its own.
        return known

    # Parameter operands.

    def _operands(
        self, args: Sequence[Any], kwargs: dict[str, Any], inside: bool, numbers: list[Any]
    ) -> list[tuple[int, int, torch.Tensor]]:
        """The operands that tell ops apart, as (position, token, tensor); adds the tokens."""
        found: list[tuple[int, int, torch.Tensor]] = []
        types = self._parameter_types
        position = 0
        for values in (args, kwargs.values()) if kwargs else (args,):
            for value in values:
                parameter = types.get(type(value))
                if parameter is None:
                    kind = type(value)
                    parameter = types[kind] = issubclass(kind, nn.Parameter)
                if parameter or (
                    # Weights kept as plain tensors count only where no activation counts
                    # occurrences, and not in front: what flows stands there, and may be a leaf.
                    not inside and position and type(value) is torch.Tensor and is_weight(value)
                ):
                    token = self.labels.look_up(value)[0]
                    numbers.append((position, token))
                    found.append((position, token, value))
                position += 1
        return found

    def _operand_label(self, scope: Any, operand: tuple[int, int, torch.Tensor]) -> Any:
        position, _, tensor = operand
        name = self._scopes.parameter_name(scope, tensor)
        return (position, name if name is not None else self.labels.look_up(tensor)[1])

    # New sites.

    def _site(
        self,
        op_type: str,
        scope: Any,
        frames: list[tuple[_Code, int]],
        operands: list[tuple[int, int, torch.Tensor]],
        occurrence: int,
    ) -> Site:
        key = (
            "op",
            scope.root,
            scope.path,
            op_type,
            tuple((*code.label, offset) for code, offset in frames),
            tuple(self._operand_label(scope, operand) for operand in operands),
            occurrence,
        )
        return Site(
            key=key,
            op_type=op_type,
            namespace=self._namespace,
            name=self._name(scope, op_type, key),
            module_path=scope.path,
            source=_source(self),
            zone=_zone(),
        )

    def _name(self, scope: Any, op_type: str, key: Any) -> str:
        base = f"{scope.path}/{op_type}" if scope.path else op_type
        if "#" in scope.root:
            base = f"{scope.root}:{base}"
        same = self._names.setdefault(base, {})
        number = same.setdefault(key, len(same) + 1)
        return base if number == 1 else f"{base}#{number}"

    def _purge(self) -> None:
        dead = dict(self.labels.take_dead())
        if not dead:
            return
        for key in [key for key, tokens in self._tokens.items() if not tokens.isdisjoint(dead)]:
            parameter = any(dead.get(token) for token in self._tokens.pop(key))
            record = self._records.pop(key)
            if parameter:
                self._drop(record)


def _source(sites: Sites[Any]) -> str | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = sites._codes.get(id(frame.f_code)) or sites.classify(frame.f_code, frame.f_globals)
        if code.kind == _USER:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _zone() -> str:
    """Which part of a program runs, by the frames from the call up to the user's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in BOUNDARY:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.optim."):
            return "optimizer"
        if module == "torch.nn.init":
            return "init"
        if frame.f_code.co_name in ("__init__", "step"):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and frame.f_code.co_name == "__init__":
                return "init"
            if isinstance(owner, torch.optim.Optimizer):
                return "optimizer"
        if not (is_torchs(frame.f_globals) or is_own(frame.f_code)):
            break  # Further out it may be an optimizer that calls the user's closure.
        frame = frame.f_back
    return "model"
