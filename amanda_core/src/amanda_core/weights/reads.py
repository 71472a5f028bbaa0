"""`Weight` and `Reads`: which parameters one execution of an op reads.

Owns what `context.weights` answers: which input is which part of which parameter, whether the op
computes with it, and by which key it is known everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from amanda_core.weights.geometry import extents_of, region_text
from amanda_core.weights.parameters import Found, Parameters

if TYPE_CHECKING:
    from amanda_core.context import OpContext

__all__ = ["Reads", "Weight", "reads_of"]

#: Context -> whether its op makes nothing but views of the weights it is given.
_views: weakref.WeakKeyDictionary[OpContext, bool] = weakref.WeakKeyDictionary()


class Weight:
    """A parameter, or a part of one, that an op reads at one input.

    Attributes:
        name: Qualified name of the parameter in its model; ``#`` and a number for one that no
            module holds.
        root: Name of the model: of the class of the outermost module called, numbered where
            several have been called. Empty for a parameter that no module holds.
        shape: Dimensions of the whole parameter.
        region: Indices into the parameter that give the part; empty for all of it.
        exact: Whether the input shows all of the region and nothing else. False where no indices
            say which part it is; the region is the whole parameter then.
        axes: For each axis of the input the parameter's axis that it runs along, or None.
        role: What the op uses it as, one of `INPUT_ROLES`; None where that is not known.
        layout: Axes of the input as ``weight_layout`` of the context says, or None.
        varies: Whether the same op reads other weights in other executions. What a tool knows by
            weight it then has to look up in each execution: ``context.weights`` answers in
            routines, too.
        counted: Whether a write through this input changes `version`.
        memory: Where the whole parameter lies; None where that cannot be told.
        seen: Where the part lies; likewise.
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
        """The parameter as its module holds it now; None if it is gone."""
        return self._get()

    def version(self, parameter: Any) -> tuple[object, ...] | None:
        """Return what changes with each write to the parameter that the framework counts.

        Args:
            parameter: What `parameter` gave.

        Returns:
            Something to compare, another one in each session; None where writes are not counted.
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
        consumed: Whether the op computes with the weights or copies them. An op that makes a view
            of a weight does not: what computes with the view reads the same weight.
        supported: Whether the driver tells where tensors lie. Where it does not, there are none.
        written: Places at which the op writes into a weight.
        uncounted: Owners of the weights that the op writes although no version says so.
    """

    def __init__(
        self,
        weights: dict[int | tuple[int, int], Weight],
        shapes: Callable[[], dict[str, tuple[int, ...]]],
        consumed: bool = False,
        supported: bool = True,
        written: frozenset[int] = frozenset(),
        destinations: Iterable[Weight] = (),
    ) -> None:
        self._weights, self._shapes = weights, shapes
        self.consumed, self.supported = consumed, supported
        self.written = frozenset(place for place in weights if _position(place) in written)
        # Fused optimizers write whole lists, and change no version.
        single = [weights[place] for place in self.written if isinstance(place, int)]
        self.uncounted = frozenset(
            [weight.owner for weight in (*single, *destinations) if not weight.counted]
            + [weights[place].owner for place in self.written if not isinstance(place, int)]
        )

    def __getitem__(self, place: int | tuple[int, int]) -> Weight:
        return self._weights[place]

    def __iter__(self) -> Iterator[int | tuple[int, int]]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of the model that the op is part of, by `owner`."""
        return self._shapes()


def reads_of(context: OpContext, persistent: Mapping[str, Any]) -> Reads:
    """Return the weights that the present execution of an op reads.

    Args:
        context: The op's context, during a call of a routine.
        persistent: What the drivers keep for the session, among it what finds parameters.
    """
    framework = context.namespace.partition("/")[0]
    parameters: Parameters | None = persistent.get(f"{framework}.parameters")
    if parameters is None:
        return Reads({}, dict, supported=False)
    holder = context.forward or context
    root, known = _operands_of(holder.site.key)

    def shapes() -> dict[str, tuple[int, ...]]:
        found = parameters.shapes(root) if root else {}
        return {f"{root}:{name}": shape for name, shape in found.items()}

    facts, inputs = context.facts, context.get_inputs()
    if facts is None or inputs is None:
        return Reads({}, shapes)
    roles: tuple[str, ...] = context.get("input_roles", ())
    found: dict[int | tuple[int, int], Weight] = {}

    def part_of(value: Any, position: int) -> Found | None:
        return parameters.find(value, root, position > 0) if facts.is_tensor(value) else None

    def add(place: int | tuple[int, int], position: int, value: Any) -> None:
        part = part_of(value, position)
        if part is not None:
            role = roles[position] if position < len(roles) else None
            layout = context.get("weight_layout") if role == "weight" else None
            varies = known.isdisjoint({part.label, f"{part.root}:{part.label}"})
            found[place] = Weight(part, value, parameters, role, layout, varies)

    for position, value in enumerate(inputs):
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                add((position, index), position, item)
        else:
            add(position, position, value)
    consumed = bool(found) and not _makes_views(holder)
    execution = context.execution
    destinations = [
        Weight(part, value, parameters, None, None, False)
        for value in execution.get("destinations") or ()
        if (part := part_of(value, 0)) is not None
    ]
    written = execution.get("writes") or frozenset()
    return Reads(found, shapes, consumed, True, written, destinations)


def _position(place: int | tuple[int, int]) -> int:
    return place if isinstance(place, int) else place[0]


def _operands_of(key: Hashable) -> tuple[str, set[str]]:
    """Return the root of an op and the weights that tell it apart, by the key that `Sites` made."""
    if not isinstance(key, tuple) or key[:1] != ("op",):
        return "", set()
    return key[1], {name if isinstance(name, str) else f"#{name}" for _, name in key[5]}


def _makes_views(context: OpContext) -> bool:
    asked: Callable[[], bool] | None = context.execution.get("makes_views")
    if asked is not None:
        _views[context] = asked()
    return _views.get(context, False)
