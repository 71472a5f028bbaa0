"""Op identity: finding the site to which a call of an operator belongs.

Owns the identity rule (scope, call site, weight operands, occurrence) and the table from the
process-local form of a site (numbers) to its record. The id is the same in another process: it is
made of names and instruction offsets, never of addresses or file paths. The driver describes its
framework to this rule by `Rules`. Over 400 lines: it is one class, with documentation.
"""

from __future__ import annotations

import os
import sys
import threading
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Generic, Protocol, TypeVar

from amanda_core.identity.identity import call_offset
from amanda_core.interface.driver import Site
from amanda_core.modules.scopes import OUTSIDE, Activation, Labels, Scope, Scopes
from amanda_core.runtime.threads import THREAD
from amanda_core.weights.parameters import Found, Parameters
from amanda_core.weights.regions import Regions

__all__ = [
    "FRAMES",
    "FRAMEWORK",
    "OCCURRENCES",
    "OWN",
    "QUIET",
    "STOP",
    "USER",
    "Code",
    "Frames",
    "Group",
    "Level",
    "Operands",
    "Origin",
    "Rules",
    "Sites",
    "ThreadPlace",
    "distinguishes",
]

R = TypeVar("R")

#: How many of the user's frames make up a call site within a module activation. More than one
#: distinguishes the calls of helper functions; three bounds the walk.
FRAMES = 3
#: Beyond this number, equal sites within one activation share an id, so that a module whose forward
#: is an endless loop does not make endless ops.
OCCURRENCES = 1024
# exec() makes new code objects each time, so the table is rebuilt when it gets this large.
_CODES = 16384

#: Kinds of frames in a call site: the user's; the framework's; of Amanda; at which a call site
#: ends, since what lies further out may differ from run to run; and those whose operators are none
#: of the model's. Native code knows them by their numbers (`include/amanda_identity.h`).
USER, FRAMEWORK, OWN, STOP, QUIET = range(5)

#: A frame that is part of a call site or ends it: its distance, its code, and `f_lasti` (-1 matches
#: any).
Level = tuple[int, CodeType, int]

_CORE = os.path.dirname(os.path.dirname(__file__)) + os.sep

#: The position from which on a value that may be a weight counts as one. The first operand is
#: usually an activation, which may be a leaf.
UNMARKED_FROM = 1

# Used if no module runs.
_NOWHERE = Activation(OUTSIDE)


def distinguishes(mark: int, position: int, inside: bool) -> bool:
    """Return True if an operand distinguishes the ops of one call site.

    Weights that the framework marks always do. Values that may be weights do only outside of any
    module, because occurrences are numbered inside.

    Args:
        mark: Above 0 for a marked weight, below 0 for a value that may be a weight, else 0.
        position: Its position among the operands.
        inside: Whether a module runs.
    """
    return mark > 0 or (mark < 0 and not inside and position >= UNMARKED_FROM)


_NAMING = threading.Lock()


class ThreadPlace(Protocol):
    """The position of a thread in the calls of modules.

    Attributes:
        activations: The calls of modules that are running, outermost first.
    """

    activations: list[Activation]


@dataclass(frozen=True)
class Rules:
    """A driver's description of its framework.

    Attributes:
        kind_of: Returns the kind of a frame by the code that it runs and its globals. It is not
            called for the core's own frames.
        zone_of: Returns which part of the program runs, by the frames of its caller's callers.
        weight_types: Types of values that are always weights, with their subclasses.
        tensor_types: Types of values that may be weights; subclasses are if `is_marked` says so.
        is_weight: Returns True if a value of `tensor_types` is a weight. It is called only outside
            of any module and not for the first operand, which is usually an activation.
        is_marked: Returns True if a value of a subclass of `tensor_types` is always a weight; None
            if no such value is.
        is_layered: Whether all frames of the framework count, and not only the innermost one. It is
            True for frameworks that have layers of Python over one wrapper for each type of
            operator, where the innermost frame is the same for all calls.
    """

    kind_of: Callable[[CodeType, Mapping[str, Any]], int]
    zone_of: Callable[[], str]
    weight_types: tuple[type, ...] = ()
    tensor_types: frozenset[type] = frozenset()
    is_weight: Callable[[Any], bool] = bool
    is_marked: Callable[[Any], bool] | None = None
    is_layered: bool = False


class _Calls(dict[int, int]):
    def __init__(self, opcodes: bytes) -> None:
        self._opcodes = opcodes

    def __missing__(self, offset: int) -> int:
        found = self[offset] = call_offset(self._opcodes, offset)
        return found


class Code:
    """A code object in call sites; `number` is unique in this process.

    Attributes:
        zoned: Whether it may decide the zone. A driver whose native code reads it sets it.
        calls: The `call_offset` of each ``f_lasti``.
    """

    __slots__ = (
        *("_known", "_lines", "calls", "code", "file", "kind", "label", "number", "opcodes"),
        "zoned",
    )

    def __init__(self, code: CodeType, kind: int, label: tuple[str, str, int], number: int) -> None:
        self.code, self.kind, self.label, self.number = code, kind, label, number
        self.zoned, self._known = True, dict[int, str]()
        self.opcodes, self.file = code.co_code, os.path.basename(code.co_filename)
        self.calls = _Calls(self.opcodes)
        self._lines = list(code.co_lines()) if kind == USER else []

    def source(self, offset: int) -> str:
        """Return ``file:line`` of an instruction."""
        if offset not in self._known:
            line = self._lines[bisect(self._lines, (offset, sys.maxsize)) - 1][2]
            self._known[offset] = f"{self.file}:{line}"
        return self._known[offset]


#: The frames of a call site, innermost first, each with the offset that it calls from.
Frames = Sequence[tuple[Code, int]]
#: The mark of types of which the framework marks those values that are weights.
_MARKED = 2
#: The weights among the operands of a call: position, token, weight.
Operands = Sequence[tuple[int, int, Any]]


class Origin:
    """Where an op is called: what is the same in all of its occurrences.

    Attributes:
        numbers: Scope, type and frames as numbers, which hold in this process only.
        caller: The user's innermost frame, if a driver has looked for it.

    Args:
        op_type: Its type.
        scope: That of the innermost activation.
        frames: Its call site, from `Sites.walk`.
        zone: The part of the program that runs, or an empty string if it is not known.
    """

    __slots__ = ("caller", "frames", "numbers", "op_type", "scope", "zone")

    def __init__(self, op_type: str, scope: Scope, frames: Frames, zone: str = "") -> None:
        self.op_type, self.scope, self.frames, self.zone = op_type, scope, frames, zone
        self.caller: tuple[Code, int] | None = None
        numbers: list[Any] = [scope.number, op_type]
        for code, offset in frames:
            numbers += (code.number, offset)
        self.numbers = tuple(numbers)


class Group(Generic[R]):
    """Ops that differ only in their occurrence in one activation; compared by identity.

    Attributes:
        records: Records by occurrence.
        tokens: Tokens of the operands. When one of them dies, the group is dropped.
    """

    __slots__ = ("records", "tokens")

    def __init__(self, tokens: Iterable[int]) -> None:
        self.records: dict[int, R] = {}
        self.tokens = frozenset(tokens)


class Sites(Generic[R]):
    """The sites so far, as records made by `make`.

    Inside a module, a call site is the innermost frame of the framework and up to three frames of
    the user, up to the call of the module. The occurrences of one site in one call of the module
    are numbered. Outside of any module, as in a purely functional program, only the user's
    innermost frame counts, and occurrences are not numbered: a loop makes one op, unless its
    weights distinguish the iterations.

    Attributes:
        regions: The sites that read parts of parameters.

    Args:
        rules: The driver's description of its framework.
        place: The position of the calling thread; None if `locate` is not used.
        scopes: Scopes and their names, which resume with the contexts.
        labels: Numbers of weights outside modules; likewise.
        names: Readable names given so far and how often; likewise.
        namespace: The namespace of all sites.
        make: Makes a record of a new site, given it and the name of the calling module.
        drop: Called with a record whose weight has died: its name now belongs to another op.
        parameters: Finds the parameter that a value shows a part of; None if the driver cannot.
        inside: Returns the scope of a module that runs inside a scope although it was not called,
            and the code that runs it; None if there is none.
    """

    def __init__(
        self,
        rules: Rules,
        place: ThreadPlace | None,
        scopes: Scopes,
        labels: Labels,
        names: dict[str, dict[Any, int]],
        namespace: str,
        make: Callable[[Site, str], R],
        drop: Callable[[R], None],
        parameters: Parameters | None = None,
        inside: Callable[[Scope], tuple[Scope, CodeType] | None] = lambda scope: None,
    ) -> None:
        self._inside = inside
        self.regions = Regions(parameters, rules.tensor_types)
        self._rules, self._place, self._is_weight = rules, place, rules.is_weight
        self._scopes, self.labels, self._names = scopes, labels, names
        self._namespace, self._make, self._drop = namespace, make, drop
        self._groups: dict[Any, Group[R]] = {}
        #: Whether there were `QUIET` frames in the last walk.
        self._is_quiet = False
        self._codes: dict[int, Code] = {}
        self._code_numbers: dict[tuple[int, tuple[str, str, int]], int] = {}
        #: Type of a value -> its mark. If it is below 0, `is_weight` decides for each value.
        self._kinds: dict[type, int] = dict.fromkeys(rules.tensor_types, -1)

    def __len__(self) -> int:
        return sum(len(group.records) for group in self._groups.values())

    def __iter__(self) -> Iterator[R]:
        """Yield the records."""
        for group in tuple(self._groups.values()):
            yield from tuple(group.records.values())

    def discard(self, gone: Callable[[R], bool]) -> None:
        """Drop the records for which `gone` returns True."""
        for key, group in tuple(self._groups.items()):
            for occurrence in [n for n, record in group.records.items() if gone(record)]:
                del group.records[occurrence]
            if not group.records:
                del self._groups[key]

    def clear(self) -> None:
        """Drop all records, but not the names."""
        self._groups.clear()

    def locate(self, op_type: str, args: Sequence[Any], kwargs: dict[str, Any]) -> R | None:
        """Return the record of the op that is being called with these values, not yet edited.

        Returns:
            None if it is none of the model's: its call site is in `QUIET` frames.
        """
        assert self._place is not None
        activation = self._place.activations[-1] if self._place.activations else _NOWHERE
        frames = self.walk(sys._getframe(2), FRAMES if activation.scope.root else 1)
        if self._is_quiet:
            return None
        origin = Origin(op_type, activation.scope, frames)
        values = (*args, *kwargs.values()) if kwargs else args
        return self.passed(origin, self._weights(origin, values), activation.counts, values)[0]

    def passed(
        self, origin: Origin, weights: Operands, counts: dict[Any, int], values: Sequence[Any] = ()
    ) -> tuple[R, Group[R], int]:
        """Count an occurrence of an op; return its record, its group and its number.

        Args:
            origin: Where it is called.
            weights: The weights among its operands.
            counts: Those of the innermost activation.
            values: The operands of which some may be parts of weights.
        """
        group = self._group(origin, weights)
        before = counts.get(group, 0) if origin.scope.root else 0
        occurrence = min(before, OCCURRENCES)
        record = group.records.get(occurrence)
        if record is None and self.regions.note(origin.numbers, origin.scope.root, values):
            return self.passed(origin, self._weights(origin, values), counts)
        if origin.scope.root:
            counts[group] = before + 1
        if record is None:
            record = self._add(group, origin, weights, occurrence)
        return record, group, occurrence

    def resolve(
        self, origin: Origin, values: Sequence[Any], occurrence: int, known: Operands | None = None
    ) -> R | int:
        """Return the record of an op whose occurrence in its activation is known.

        This serves native interceptors, which do the lookup of `locate` themselves and call this
        for sites that they have not seen before.

        Args:
            origin: Where it is called.
            values: The operands.
            occurrence: Its number in the innermost activation.
            known: The operands that distinguish ops, if they have been found. A text may stand for
                one.

        Returns:
            The record, or the number of a site that turns out to read parts of parameters. From
            then on `regions` distinguishes its occurrences, so the lookup must start again.
        """
        weights = self._weights(origin, values) if known is None else known
        group = self._group(origin, weights)
        if occurrence in group.records:
            return group.records[occurrence]
        if self.regions.note(origin.numbers, origin.scope.root, values):
            return self.regions.number(origin.numbers)
        return self._add(group, origin, weights, occurrence)

    def _group(self, origin: Origin, weights: Operands) -> Group[R]:
        key, tokens = origin.numbers, []
        for position, token, weight in weights:
            key += ((position, token),)
            tokens.append(weight.token if type(weight) is Found else token)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(tokens)
        return group

    # Call sites.

    def walk(
        self,
        frame: FrameType | None,
        limit: int,
        levels: list[Level] | None = None,
        end: FrameType | None = None,
    ) -> list[tuple[Code, int]]:
        """Return the frames of a call site, innermost first.

        Args:
            frame: The frame that called the op.
            limit: How many of the user's frames count; all if negative.
            levels: Gets the frames that a fast path has to compare.
            end: A frame around it that does not count, nor do those around that one.
        """
        found: list[tuple[Code, int]] = []
        codes, is_layered, depth = self._codes, self._rules.is_layered, 0
        self._is_quiet = False
        while frame is not None and frame is not end:
            code = codes.get(id(frame.f_code)) or self.classify(frame.f_code, frame.f_globals)
            kind = code.kind
            if kind == OWN:  # First, since most frames are such.
                frame, depth = frame.f_back, depth + 1
                continue
            if kind == STOP:
                if levels is not None:
                    levels.append((depth, code.code, -1))
                break
            if kind == QUIET:
                self._is_quiet = True
            # Of the framework's frames only the innermost one counts, if it is the caller: its
            # wrappers may call several operators from one line of the user.
            if kind == USER or is_layered or (kind != QUIET and not found):
                offset = frame.f_lasti
                found.append((code, code.calls[offset]))
                if levels is not None:
                    levels.append((depth, code.code, offset))
                if kind == USER:
                    limit -= 1
                    if not limit:
                        break
            frame, depth = frame.f_back, depth + 1
        return found

    def classify(self, code: CodeType, namespace: Mapping[str, Any]) -> Code:
        """Return the kind of a frame that runs `code`."""
        if len(self._codes) > _CODES:
            self._codes.clear()
        module = str(namespace.get("__name__", ""))
        kind = OWN if code.co_filename.startswith(_CORE) else self._rules.kind_of(code, namespace)
        # The first line distinguishes lambdas and code of exec(), which have no names of their own.
        # Named functions do without it, so that an edit above them does not change ids.
        name = getattr(code, "co_qualname", code.co_name)
        line = code.co_firstlineno if "<" in code.co_name or not hasattr(code, "co_qualname") else 0
        label = (module, name, line)
        number = self._code_numbers.setdefault((kind, label), len(self._code_numbers) + 1)
        known = Code(code, kind, label, number)
        self._codes[id(code)] = known  # `known` keeps the code alive, so its id is not used again.
        return known

    # Weight operands.

    def _weights(self, origin: Origin, values: Sequence[Any]) -> Operands:
        """Return the operands that distinguish ops, with parts of weights if the site reads some.

        Parts are found only at sites that `regions` has noted.
        """
        found: list[tuple[int, int, Any]] = []
        kinds, inside, is_weight = self._kinds, bool(origin.scope.root), self._is_weight
        is_marked = self._rules.is_marked
        for position, value in enumerate(values):
            mark = kinds.get(type(value))
            if mark is None:
                mark = kinds[type(value)] = self._mark_of(type(value))
            if mark == _MARKED and is_marked is not None:
                mark = is_marked(value)
            if mark > 0 or (mark and distinguishes(mark, position, inside) and is_weight(value)):
                found.append((position, self.labels.look_up(value)[0], value))
        if self.regions:
            found += self.regions.operands(origin.numbers, values)
        return found

    def _mark_of(self, kind: type) -> int:
        if issubclass(kind, self._rules.weight_types):
            return 1
        subclass = issubclass(kind, tuple(self._rules.tensor_types))
        return _MARKED if subclass and self._rules.is_marked is not None else 0

    def _operand_label(self, scope: Scope, tensor: Any) -> Any:
        if type(tensor) is str:
            return tensor
        if type(tensor) is Found:
            return tensor.path
        name = self._scopes.weight_name(scope, tensor)
        return self.labels.look_up(tensor)[1] if name is None else name

    # New sites.

    def _add(self, group: Group[R], origin: Origin, weights: Operands, occurrence: int) -> R:
        if self.labels.dead:
            self._purge()
        op_type, scope, frames = origin.op_type, origin.scope, origin.frames
        if (found := self._inside(scope)) is not None:
            scope, running = found
            ends = [place for place, (one, _) in enumerate(frames, 1) if one.code is running]
            frames = frames[: ends[0]] if ends else frames
        path = scope.path
        caller = origin.caller or next((f for f in origin.frames if f[0].kind == USER), None)
        called: tuple[Any, ...] = ()
        for code, offset in frames:
            called += ((*code.label, offset),)
        source = caller[0].source(caller[1]) if caller else self.source(sys._getframe(1))
        read: tuple[Any, ...] = ()
        for position, _, weight in weights:
            read += ((position, self._operand_label(scope, weight)),)
        key: tuple[Any, ...] = ("op", scope.root, path, op_type, called, read)
        key = (*key, occurrence, scope.zone) if scope.zone else (*key, occurrence)
        marked = THREAD.zones[-1].name if THREAD.zones else ""
        zone = scope.zone or marked or origin.zone or self._rules.zone_of()
        name = self._name(scope, op_type, key)
        site = Site(key, op_type, self._namespace, name, path, source, zone)
        record = self._make(site, called[0][0] if called else "")
        if found is None:  # Where another module runs, the same numbers are another op.
            group.records[occurrence] = record
        return record

    def source(self, frame: FrameType | None) -> str | None:
        """Return ``file:line`` of the user's innermost frame, starting from this one outwards."""
        while frame is not None:
            code = self._codes.get(id(frame.f_code)) or self.classify(frame.f_code, frame.f_globals)
            if code.kind == USER:
                return code.source(frame.f_lasti)
            frame = frame.f_back
        return None

    def _name(self, scope: Scope, op_type: str, key: tuple[Any, ...]) -> str:
        base = f"{scope.path}/{op_type}" if scope.path else op_type
        if "#" in scope.root and not scope.path.startswith(scope.root):
            base = f"{scope.root}:{base}"
        with _NAMING:  # Threads share the names of a tool.
            same = self._names.setdefault(base, {})
            number = same.setdefault(key, len(same) + 1)
        return base if number == 1 else f"{base}#{number}"

    def _purge(self) -> None:
        # Values that may be weights, too: what a tool has computed of one is not that of the next.
        dead = self.labels.take_dead()
        for key, group in tuple(self._groups.items()):
            if not dead.isdisjoint(group.tokens):
                del self._groups[key]
                for record in group.records.values():
                    self._drop(record)
