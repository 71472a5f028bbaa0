"""Op identity: from a call of an operator to the site that it is a passing of.

Owns the identity rule (scope, call site, weight operands, occurrence) and the table from the
process-local form of a site (numbers) to its record. The id is the same in another process: it is
made of names and instruction offsets, never of addresses or file paths. What the rule has to know
of a framework, the driver says in `Rules`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Generic, Protocol, TypeVar

from amanda_core.driver import Site
from amanda_core.identity import call_offsets
from amanda_core.scopes import OUTSIDE, Activation, Labels, Scope, Scopes

__all__ = ["FRAMEWORK", "OWN", "QUIET", "STOP", "USER", "Code", "Place", "Rules", "Sites"]

R = TypeVar("R")

# Frames of the user's that make up a call site within a module activation. Helper functions that
# several lines call are told apart by it; three also bounds the walk.
_FRAMES = 3
# Equal sites within one activation beyond this share an id, so that a module whose forward is an
# endless loop does not make endless ops.
_OCCURRENCES = 1024
# Codes made by exec() are new objects each time; the table is rebuilt when it gets this large.
_CODES = 16384

#: Kinds of frames in a call site: the user's; the framework's; of Amanda; at which a call site
#: ends, since what lies further out may differ from run to run; and those that do not count.
#: Native code knows them by their numbers.
USER, FRAMEWORK, OWN, STOP, QUIET = range(5)

_CORE = os.path.dirname(__file__) + os.sep

# Whether values of a type tell ops apart.
_NEVER, _ALWAYS, _ASKED = range(3)


class Place(Protocol):
    """Where a thread is.

    Attributes:
        activations: The calls of modules that it is inside, outermost first.
    """

    activations: list[Activation]


@dataclass(frozen=True)
class Rules:
    """What a driver says of its framework.

    Attributes:
        kind_of: Returns what a frame is in a call site, by the code that it runs and its globals.
            Not asked of the core's own frames.
        weight_types: Types of values that are always weights, with their subclasses.
        tensor_types: Types of values that may be weights; subclasses never are.
        is_weight: Returns True if a value of `tensor_types` is a weight. Only asked outside of any
            module and not of the first operand, where what flows stands.
        zone_of: Returns which part of the program runs, by the frames of its caller's callers.
    """

    kind_of: Callable[[CodeType, Mapping[str, Any]], int]
    weight_types: tuple[type, ...]
    tensor_types: frozenset[type]
    is_weight: Callable[[Any], bool]
    zone_of: Callable[[], str]


class Code:
    """A code object as it stands in call sites; `number` tells them apart in this process."""

    __slots__ = ("code", "kind", "label", "number", "offsets")

    def __init__(self, code: CodeType, kind: int, label: tuple[str, str, int], number: int) -> None:
        self.code, self.kind, self.label, self.number = code, kind, label, number
        self.offsets = call_offsets(code)


class Sites(Generic[R]):
    """The sites passed so far, as records made by `make`.

    Inside a module, a call site is the innermost frame of the framework and up to three frames of
    the user's, up to the call of the module. Passings of one site in one call of the module are
    told apart by their number. Outside of any module, as in a purely functional program, only the
    innermost frame of the user's counts, and passings are not numbered: a loop makes one op, unless
    its weights tell its passings apart.

    Args:
        rules: What the driver says of its framework.
        place: Where the calling thread is.
        scopes: Scopes and their names; resume with the contexts.
        labels: Numbers of weights outside modules; likewise.
        names: Readable names given so far and how often; likewise.
        namespace: The namespace of all sites.
        make: Makes a record of a new site, given it and the name of the calling module.
        drop: Told of a record whose weight is gone: the op by its name is another one now.
    """

    def __init__(
        self,
        rules: Rules,
        place: Place,
        scopes: Scopes,
        labels: Labels,
        names: dict[str, dict[Any, int]],
        namespace: str,
        make: Callable[[Site, str], R],
        drop: Callable[[R], None],
    ) -> None:
        self._rules, self._place, self._is_weight = rules, place, rules.is_weight
        self._scopes, self.labels, self._names = scopes, labels, names
        self._namespace, self._make, self._drop = namespace, make, drop
        self._records: dict[Any, R] = {}
        #: Key of a record -> tokens of its operands; with one of them the record goes.
        self._tokens: dict[Any, frozenset[int]] = {}
        self._codes: dict[int, Code] = {}
        self._code_numbers: dict[tuple[int, tuple[str, str, int]], int] = {}
        #: Type of a value -> whether such values tell ops apart.
        self._kinds: dict[type, int] = dict.fromkeys(rules.tensor_types, _ASKED)

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
        """Return the record of the op that is being called with these values, not yet edited."""
        activations = self._place.activations
        activation = activations[-1] if activations else None
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
        frames: list[tuple[Code, int]],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        occurrence: int,
    ) -> R:
        """Return the record of an op whose frames and occurrence in its activation are known.

        For native interceptors, which do the lookup of `locate` themselves and ask here for
        what they have not seen before.
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
        frames: list[tuple[Code, int]],
        operands: list[tuple[int, int, Any]],
        occurrence: int,
    ) -> R:
        self._purge()
        site = self._site(op_type, scope, frames, operands, occurrence)
        record = self._make(site, frames[0][0].label[0] if frames else "")
        self._records[key] = record
        self._tokens[key] = frozenset(token for _, token, _ in operands)
        return record

    # Call sites.

    def _walk(
        self, frame: FrameType | None, limit: int, numbers: list[Any]
    ) -> list[tuple[Code, int]]:
        """Return the frames of a call site, innermost first; adds their numbers and offsets."""
        found: list[tuple[Code, int]] = []
        codes = self._codes
        innermost = True
        while frame is not None:
            code = codes.get(id(frame.f_code)) or self.classify(frame.f_code, frame.f_globals)
            kind = code.kind
            if kind == USER:
                offset = code.offsets[frame.f_lasti >> 1]
                numbers += (code.number, offset)
                found.append((code, offset))
                innermost = False
                limit -= 1
                if not limit:
                    break
            elif kind == FRAMEWORK:
                # Of the framework's frames only the innermost counts, if it is the caller: its
                # wrappers may call several operators from one line of the user's.
                if innermost:
                    offset = code.offsets[frame.f_lasti >> 1]
                    numbers += (code.number, offset)
                    found.append((code, offset))
                    innermost = False
            elif kind == STOP:
                break
            frame = frame.f_back
        return found

    def classify(self, code: CodeType, namespace: Mapping[str, Any]) -> Code:
        """Return what a frame that runs `code` is in a call site."""
        if len(self._codes) > _CODES:
            self._codes.clear()
        module = str(namespace.get("__name__", ""))
        own = code.co_filename.startswith(_CORE)
        kind = OWN if own else self._rules.kind_of(code, namespace)
        # The first line tells apart what exec() and lambdas leave without a name of their own;
        # only there, so that an edit above a named function changes no id.
        name = getattr(code, "co_qualname", code.co_name)
        line = code.co_firstlineno if "<" in code.co_name or not hasattr(code, "co_qualname") else 0
        label = (module, name, line)
        number = self._code_numbers.setdefault((kind, label), len(self._code_numbers) + 1)
        known = Code(code, kind, label, number)
        self._codes[id(code)] = known  # `known` keeps the code alive, so its id stays its own.
        return known

    # Weight operands.

    def _operands(
        self, args: Sequence[Any], kwargs: dict[str, Any], inside: bool, numbers: list[Any]
    ) -> list[tuple[int, int, Any]]:
        """Return the operands that tell ops apart, as (position, token, value); adds the tokens."""
        found: list[tuple[int, int, Any]] = []
        kinds, is_weight = self._kinds, self._is_weight
        position = 0
        for values in (args, kwargs.values()) if kwargs else (args,):
            for value in values:
                kind = kinds.get(type(value))
                if kind is None:
                    always = issubclass(type(value), self._rules.weight_types)
                    kind = kinds[type(value)] = _ALWAYS if always else _NEVER
                if kind == _ALWAYS or (
                    # Weights kept as plain tensors count only where no activation counts
                    # occurrences, and not in front: what flows stands there, and may be a leaf.
                    kind and not inside and position and is_weight(value)
                ):
                    token = self.labels.look_up(value)[0]
                    numbers.append((position, token))
                    found.append((position, token, value))
                position += 1
        return found

    def _operand_label(self, scope: Any, operand: tuple[int, int, Any]) -> Any:
        position, _, tensor = operand
        name = self._scopes.weight_name(scope, tensor)
        return (position, name if name is not None else self.labels.look_up(tensor)[1])

    # New sites.

    def _site(
        self,
        op_type: str,
        scope: Any,
        frames: list[tuple[Code, int]],
        operands: list[tuple[int, int, Any]],
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
            zone=self._rules.zone_of(),
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
            weight = any(dead.get(token) for token in self._tokens.pop(key))
            record = self._records.pop(key)
            if weight:
                self._drop(record)


def _source(sites: Sites[Any]) -> str | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = sites._codes.get(id(frame.f_code)) or sites.classify(frame.f_code, frame.f_globals)
        if code.kind == USER:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None
