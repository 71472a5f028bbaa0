"""`Weight` and `Reads`: the parameters that one execution of an op reads.

Owns the value of `context.weights`: the part of a parameter that each input is, whether the op
computes with it, and the key that identifies it in every process.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

from amanda_core.interface.driver import WatchedContext
from amanda_core.interface.facts import Contraction, Place
from amanda_core.weights.contractions import letters_in
from amanda_core.weights.geometry import extents_of, region_text
from amanda_core.weights.parameters import Found, Parameters

__all__ = ["Reads", "Weight", "letters_of", "reads_of"]

#: A driver whose tensors do not show parts of parameters finds the reads itself.
Finder = Callable[[WatchedContext], "Reads"]
#: Context -> whether its op only makes views of its weights.
_views: weakref.WeakKeyDictionary[WatchedContext, bool] = weakref.WeakKeyDictionary()
#: Context -> the contraction of its op.
_products: weakref.WeakKeyDictionary[WatchedContext, Contraction | None] = (
    weakref.WeakKeyDictionary()
)


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
        layout: The letter of each axis of the input, one of `AXES`; None if unknown. A letter may
            be there several times: a product may sum over two axes.
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
        varies: bool,
    ) -> None:
        self.name, self.root, self.shape = found.name, found.root, found.shape
        self.region, self.exact, self.axes = found.place
        self.role, self.varies = role, varies
        self.layout: str | None = None
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

    def is_counted(self, edited: Any) -> bool:
        """Return True if the framework counts writes to what was made of the parameter."""
        return self._parameters.is_counted(edited)

    @property
    def letters(self) -> str:
        """The letter of each axis of the parameter, one of `AXES`, or a dot if it is unknown.

        An axis along which the part has one index is a group.
        """
        inner = [isinstance(index, int) for index in self.region]
        found = ["G" if inside else "." for inside in inner] + ["."] * (
            len(self.shape) - len(inner)
        )
        layout = self.layout or ""
        if len(layout) != len(self.axes):
            return "".join(found)
        for axis, letter in zip(self.axes, layout, strict=True):
            if axis is not None:
                found[axis] = letter
        free = [axis for axis, letter in enumerate(found) if letter == "."]
        rest = [letter for axis, letter in zip(self.axes, layout, strict=True) if axis is None]
        if not self.exact:
            return "".join(found)
        if len(rest) != len(free) and self.seen is not None:
            # An axis of the input is several ones of the parameter, or the other way round.
            sizes = zip(self.axes, layout, self.seen.shape, strict=True)
            rest = [letter for axis, letter, size in sizes if axis is None and size > 1]
            rest = list(dict.fromkeys(rest)) * len(free) if len({*rest}) == 1 else []
        for axis, letter in zip(free, rest, strict=False):
            # Nothing in memory tells the axis of one element, but it is one of those left over.
            found[axis] = letter
        return "".join(found)

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
        classes: Returns the name of the class of each module of that model, by the module's path.
            Empty where the driver does not know the modules.
        class_at: Returns the name of the class of one module that no other one holds, else None.
        model: Returns the model of such a name; None if it has died or the driver cannot tell.
        written: Positions at which the op writes into a weight.
        uncounted: Owners of the weights that the op writes without changing a version.
        computed: Owners of weights from which alone an operand of this product was computed.
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
        classes: Callable[[], dict[str, str]] = dict,
        model: Callable[[str], Any] = lambda name: None,
        computed: Collection[str] = (),
        class_at: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        self.computed = computed
        self._weights, self.shapes, self.root = weights, shapes, root
        self.classes, self.class_at, self.model = classes, class_at, model
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


def reads_of(context: WatchedContext, persistent: Mapping[str, Any]) -> Reads:
    """Return the weights that this execution of an op reads.

    Args:
        context: The op's context, during a call of a routine.
        persistent: The drivers' objects for the session, among them those that find parameters.
    """
    framework = context.namespace.partition("/")[0]
    parameters: Parameters | Finder | None = persistent.get(f"{framework}.parameters")
    if isinstance(parameters, Parameters):
        reads = _found_in_memory(context, parameters)
    else:
        reads = parameters(context) if parameters else Reads({}, dict, supported=False)
    for place, weight in reads.items():
        weight.layout = letters_of(context, place, reads)
    return reads


def letters_of(
    context: WatchedContext, place: Place, weights: Collection[Place] = ()
) -> str | None:
    """Return the letter of each axis of an operand of a product, one of `AXES`.

    Args:
        context: The op's context, during a call of a routine.
        place: The operand: its input position, with its index in a list.
        weights: All operands of the op that are weights.

    Returns:
        The letters; None if they are not known.
    """
    if context not in _products:
        facts = context.facts
        _products[context] = None if facts is None else facts.contraction(context)
    product = _products[context]
    if product is not None and place in product.places:
        return letters_in(product, place, weights)
    roles: tuple[str, ...] = context.get("input_roles", ())
    role = roles[place] if isinstance(place, int) and place < len(roles) else None
    layout: str | None = context.get("weight_layout")
    return layout if role in ("weight", "right") else None


def _found_in_memory(context: WatchedContext, parameters: Parameters) -> Reads:
    holder = context.forward or context
    root, known = _operands_of(holder.site.key)
    shapes = functools.partial(parameters.shapes, root)
    classes = functools.partial(parameters.classes, root)
    facts, inputs = context.facts, context.get_inputs()
    if facts is None or inputs is None:
        return Reads({}, shapes, root=root, classes=classes, model=parameters.model)
    roles: tuple[str, ...] = context.get("input_roles", ())
    found: dict[int | tuple[int, int], Weight] = {}

    def part_of(value: Any, position: int) -> Found | None:
        return parameters.find(value, root, position > 0) if facts.is_tensor(value) else None

    def add(place: int | tuple[int, int], position: int, value: Any) -> None:
        part = part_of(value, position)
        if part is not None:
            role = roles[position] if position < len(roles) else None
            found[place] = Weight(part, value, parameters, role, part.path not in known)

    for position, value in enumerate(inputs):
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                add((position, index), position, item)
        else:
            add(position, position, value)
    consumed = bool(found) and not _passes_on(holder)
    execution = context.execution
    destinations = [
        Weight(part, value, parameters, None, False)
        for value in execution.get("destinations") or ()
        if (part := part_of(value, 0)) is not None
    ]
    written = execution.get("writes") or frozenset()
    return Reads(
        found,
        shapes,
        consumed,
        written=written,
        destinations=destinations,
        root=root,
        classes=classes,
        model=parameters.model,
        class_at=functools.partial(parameters.class_at, root),
    )


def _position(place: int | tuple[int, int]) -> int:
    return place if isinstance(place, int) else place[0]


def _operands_of(key: Hashable) -> tuple[str, set[str]]:
    """Return an op's root and the weights that distinguish it, from the key that `Sites` made."""
    if not isinstance(key, tuple) or key[:1] != ("op",):
        return "", set()
    return key[1], {name if isinstance(name, str) else f"#{name}" for _, name in key[5]}


def _passes_on(context: WatchedContext) -> bool:
    if (asked := context.execution.get("passes_weights_on")) is not None:
        _views[context] = asked()
    return _views.get(context, False)
