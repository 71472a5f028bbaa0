"""`Weight` and `Reads`: the parameters that one execution of an op reads.

Owns the value of `context.weights`: the part of a parameter that each input is, whether the op
computes with it, and the key that identifies it in every process.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from amanda_core.weights.geometry import extents_of, region_text
from amanda_core.weights.parameters import Found, Parameters

if TYPE_CHECKING:
    from amanda_core.context import OpContext

__all__ = ["Reads", "Weight", "reads_of"]

#: A driver whose tensors do not show parts of parameters finds the reads itself.
Finder = Callable[["OpContext"], "Reads"]
#: Context -> whether its op only makes views of its weights.
_views: weakref.WeakKeyDictionary[OpContext, bool] = weakref.WeakKeyDictionary()


class Weight:
    """A parameter, or a part of one, that an op reads at one input.

    Attributes:
        name: Qualified name of the parameter in its model; ``#`` and a number if it is not in a
            module.
        root: Name of the model: the class of the first outermost module called that holds it, with
            a number if several have been called. Empty for a parameter that is not in a module.
        shape: Dimensions of the whole parameter.
        region: Indices into the parameter that give the part; empty for all of it.
        exact: Whether the input shows all of the region and nothing else. If indices cannot express
            the part, it is False and the region is the whole parameter.
        axes: For each axis of the input the parameter's axis that it runs along, or None.
        role: Its role in the op, one of `INPUT_ROLES`; None if unknown.
        layout: Axes of the input as ``weight_layout`` of the context says, or None.
        varies: Whether the same op reads other weights in other executions. If so, a tool must look
            up its state in each execution, by ``context.weights`` in a routine.
        counted: Whether a write through this input changes `version`.
        memory: Where the whole parameter lies; None if unknown.
        seen: Where the part lies; None if unknown.
    """

    __slots__ = (
        "_get",
        "_parameters",
        "axes",
        "counted",
        "exact",
        "layout",
        "memory",
        "name",
        "region",
        "role",
        "root",
        "seen",
        "shape",
        "varies",
    )

    def __init__(
        self,
        found: Found,
        value: Any,
        parameters: Parameters,
        role: str | None,
        layout: str | None,
        varies: bool,
    ) -> None:
        self.name, self.root, self.shape = found.name, found.root, found.shape
        self.region, self.exact, self.axes = found.place
        self.role, self.layout, self.varies = role, layout, varies
        self.memory, self.seen, self._get = found.memory, parameters.memory(value), found.get
        self.counted = parameters.counts_writes(value, found.get())
        self._parameters = parameters

    def __repr__(self) -> str:
        return f"<Weight {self.key}>"

    @property
    def parameter(self) -> Any:
        """The current parameter of its module; None if it has died."""
        return self._get()

    def version(self, parameter: Any) -> tuple[object, ...] | None:
        """Return what changes with each write to the parameter that the framework counts.

        Args:
            parameter: The value of `parameter`.

        Returns:
            An object to compare, different in each session; None if writes are not counted.
        """
        return self._parameters.version(parameter)

    @property
    def owner(self) -> str:
        """The parameter's own key: the same for all parts of it, in every process."""
        return f"{self.root}:{self.name}"

    @property
    def key(self) -> str:
        """A name of this part of this parameter that is the same in every process."""
        return self.owner + region_text(self.region)

    @property
    def size(self) -> tuple[int, ...]:
        """How many indices the region has along each axis of the parameter."""
        return extents_of(self.region, self.shape)


class Reads(Mapping["int | tuple[int, int]", Weight]):
    """The weights that an op reads, by input position.

    A weight in a list of tensors has its position and its index in the list as a key.

    Attributes:
        shapes: Returns the shape of every parameter of the model that the op is in, by `owner`.
        consumed: Whether the op computes with the weights or copies them. An op that makes a view
            of a weight or runs the module that has it does not: another op reads the same weight.
        supported: Whether the driver reports where tensors lie. If not, there are no weights.
        root: Name of the model that the op is part of; empty outside of modules.
        written: Positions at which the op writes into a weight.
        uncounted: Owners of the weights that the op writes without changing a version.
    """

    def __init__(
        self,
        weights: dict[int | tuple[int, int], Weight],
        shapes: Callable[[], dict[str, tuple[int, ...]]],
        consumed: bool = False,
        supported: bool = True,
        written: frozenset[int] = frozenset(),
        destinations: Iterable[Weight] = (),
        root: str = "",
    ) -> None:
        self._weights, self.shapes, self.root = weights, shapes, root
        self.consumed, self.supported = consumed, supported
        self.written = frozenset(place for place in weights if _position(place) in written)
        # Fused optimizers write whole lists, and change no version.
        writes = [(weights[place], isinstance(place, int)) for place in self.written]
        writes += [(weight, True) for weight in destinations]
        self.uncounted = frozenset(w.owner for w, single in writes if not (single and w.counted))

    def __getitem__(self, place: int | tuple[int, int]) -> Weight:
        return self._weights[place]

    def __iter__(self) -> Iterator[int | tuple[int, int]]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def reads_of(context: OpContext, persistent: Mapping[str, Any]) -> Reads:
    """Return the weights that this execution of an op reads.

    Args:
        context: The op's context, during a call of a routine.
        persistent: The drivers' objects for the session, among them those that find parameters.
    """
    framework = context.namespace.partition("/")[0]
    parameters: Parameters | Finder | None = persistent.get(f"{framework}.parameters")
    if not isinstance(parameters, Parameters):
        return parameters(context) if parameters else Reads({}, dict, supported=False)
    holder = context.forward or context
    root, known = _operands_of(holder.site.key)
    shapes = functools.partial(parameters.shapes, root)
    facts, inputs = context.facts, context.get_inputs()
    if facts is None or inputs is None:
        return Reads({}, shapes, root=root)
    roles: tuple[str, ...] = context.get("input_roles", ())
    found: dict[int | tuple[int, int], Weight] = {}

    def part_of(value: Any, position: int) -> Found | None:
        return parameters.find(value, root, position > 0) if facts.is_tensor(value) else None

    def add(place: int | tuple[int, int], position: int, value: Any) -> None:
        part = part_of(value, position)
        if part is not None:
            role = roles[position] if position < len(roles) else None
            layout = context.get("weight_layout") if role == "weight" else None
            found[place] = Weight(part, value, parameters, role, layout, part.path not in known)

    for position, value in enumerate(inputs):
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                add((position, index), position, item)
        else:
            add(position, position, value)
    consumed = bool(found) and not _passes_on(holder)
    execution = context.execution
    destinations = [
        Weight(part, value, parameters, None, None, False)
        for value in execution.get("destinations") or ()
        if (part := part_of(value, 0)) is not None
    ]
    written = execution.get("writes") or frozenset()
    return Reads(found, shapes, consumed, True, written, destinations, root)


def _position(place: int | tuple[int, int]) -> int:
    return place if isinstance(place, int) else place[0]


def _operands_of(key: Hashable) -> tuple[str, set[str]]:
    """Return an op's root and the weights that distinguish it, from the key that `Sites` made."""
    if not isinstance(key, tuple) or key[:1] != ("op",):
        return "", set()
    return key[1], {name if isinstance(name, str) else f"#{name}" for _, name in key[5]}


def _passes_on(context: OpContext) -> bool:
    if (asked := context.execution.get("passes_weights_on")) is not None:
        _views[context] = asked()
    return _views.get(context, False)
