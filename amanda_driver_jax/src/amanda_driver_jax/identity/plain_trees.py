"""Parameters of programs without modules: the trees that their functions get.

JAX differentiates a function by its first argument, so by this convention it has the parameters. An
argument by which a function that runs is differentiated has them in any case.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import jax

from amanda_core.driver_kit import local_of
from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.arrays import is_differentiable
from amanda_driver_jax.identity.parameter_index import are_same, references

__all__ = ["arguments_of", "is_plain", "parameter_trees", "tree_of_call"]

#: Names of arguments that are data.
_DATA = frozenset(
    ["batch", "batches", "data", "example", "examples", "features", "inputs", "input", "x", "xs"]
)
#: Libraries with functions that get the arguments of others as one tree.
_WRAPPERS = frozenset({"equinox"})
#: The part of a state of training that the model reads, in Flax and Optax.
_PARAMS = "params"


def parameter_trees(
    frame: FrameType | None, counts: Callable[[CodeType], bool]
) -> Iterator[dict[str, Any]]:
    """Yield the trees that functions around a frame got, as name -> array, the likeliest first.

    Trees with weights that a function gets beside the parameters are parameters as well: frozen
    ones, to which it adds those that are trained.

    Args:
        frame: The frame.
        counts: Returns False for code that is not looked at, such as that of the framework.
    """
    functions: list[FrameType] = []
    differentiated: list[Any] = []
    frozen: list[FrameType] = []  # Functions that are differentiated, and may get others.
    while frame is not None:
        numbers = internals.differentiated_arguments(frame)
        if numbers is not None and functions:
            differentiated.append(_arguments(functions[-1], numbers))
            frozen.append(functions[-1])
        elif counts(frame.f_code) and not _is_wrapper(frame):
            functions.append(frame)
        frame = frame.f_back
    is_any = False
    for function, values in zip(reversed(frozen), reversed(differentiated), strict=True):
        if trees := [tree for tree in map(_arrays, values) if tree]:
            is_any = True
            yield _joined(trees, _frozen_trees(function, trees))
    for function in () if is_any else reversed(functions):
        if tree := _first_tree(function):
            yield _joined([tree], _frozen_trees(function, [tree]))


def _joined(trees: Sequence[_Tree], frozen: Mapping[str, _Tree]) -> dict[str, Any]:
    """Return trees as one, in which a name that others have begins with that of the argument."""
    found: dict[str, Any] = {}
    for tree in trees:
        found.update(tree)
    for argument, tree in frozen.items():
        is_new = found.keys().isdisjoint(tree)
        found.update({name if is_new else f"{argument}.{name}": v for name, v in tree.items()})
    return found


def _frozen_trees(function: FrameType, trees: Sequence[_Tree]) -> dict[str, _Tree]:
    """Return the other trees with weights that a function gets, or reads as a closure."""
    code = function.f_code
    if "locals" in code.co_names:  # Reading would write into the dictionary that it returned.
        return {}
    trained = {id(array) for tree in trees for array in tree.values()}
    layers = _common_size(trees)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = {}
    for name in (*names, *code.co_freevars):
        tree = _NONE if name in _DATA else _arrays(local_of(function, name))
        if not tree or not tree.all_real or not tree.has_matrix:
            continue
        # Those of a batch have as many examples, which stacked layers look like.
        is_batch = len(tree) > 1 and _common_size([tree]) not in (None, layers)
        if trained.isdisjoint(map(id, tree.values())) and not is_batch:
            found[name] = tree
    return found


def _common_size(trees: Sequence[_Tree]) -> int | None:
    """Return the size of the first axis, if that of all arrays is the same."""
    sizes: set[int] = set().union(*(tree.sizes for tree in trees))
    return int(next(iter(sizes))) if len(sizes) == 1 else None


def _is_wrapper(frame: FrameType) -> bool:
    """Return True for a function of a library that passes arguments on in a tree of its own."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _WRAPPERS


def arguments_of(function: FrameType) -> list[Any]:
    """Return the values of all arguments of a running function."""
    code = function.f_code
    if "locals" in code.co_names:  # Reading would write into the dictionary that it returned.
        return []
    count = code.co_argcount + code.co_kwonlyargcount
    count += sum(
        bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    )
    return [local_of(function, name) for name in code.co_varnames[:count]]


def _first_tree(function: FrameType) -> _Tree:
    """Return the arrays of the first argument of a running function that is a tree of arrays."""
    code = function.f_code
    if "locals" in code.co_names:  # As above.
        return _NONE
    for name in code.co_varnames[: code.co_argcount]:
        tree = _NONE if name in _DATA else _arrays(local_of(function, name))
        if tree:
            return tree
    return _NONE


def tree_of_call(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return the arrays of the first argument of a call that is a tree of arrays, and not data."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # It has none that Python knows.
        names = []
    for name, value in itertools.zip_longest(names[: len(args)], args, fillvalue=""):
        tree = {} if name in _DATA else _arrays(value)
        if tree:
            return tree
    return {}


def _arguments(function: FrameType, numbers: Sequence[int]) -> list[Any]:
    code = function.f_code
    if "locals" in code.co_names:
        return []
    names, count = code.co_varnames, code.co_argcount
    found = [local_of(function, names[number]) for number in numbers if number < count]
    if code.co_flags & inspect.CO_VARARGS:
        others = local_of(function, names[count + code.co_kwonlyargcount]) or ()
        found += [others[n - count] for n in numbers if count <= n < count + len(others)]
    return found


class _Tree(dict[str, Any]):
    """The arrays of a tree by their names; empty for what is none, such as one array.

    Attributes:
        all_real: Whether no other arrays are in it, such as labels.
        sizes: The sizes of their first axes.
        has_matrix: Whether one of them has more than one axis.
    """

    all_real = True
    sizes: frozenset[int] = frozenset()
    has_matrix = False


_NONE = _Tree()


class _Known:
    """The parameters in a tree, by place, while it has the same leaves. These are held weakly."""

    def __init__(self, structure: Any, leaves: Sequence[Any], value: Any) -> None:
        self.structure, self.leaves = structure, references(leaves)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
        arrays = [n for n, leaf in enumerate(leaves) if paths[n] and isinstance(leaf, jax.Array)]
        real = [n for n in arrays if is_differentiable(leaves[n])]
        names = {n: [_name(key) for key in paths[n]] for n in real}
        of_model = {n: o[o.index(_PARAMS) + 1 :] for n, o in names.items() if _PARAMS in o}
        self.names = {".".join(name): n for n, name in (of_model or names).items()}
        found = [leaves[n] for n in self.names.values()]
        self.all_real = len(real) == len(arrays)
        self.sizes = frozenset(array.shape[0] if array.ndim else 0 for array in found)
        self.has_matrix = any(array.ndim > 1 for array in found)
        self.is_plain = len(arrays) == len(leaves) and _nodes(structure) <= _CONTAINERS

    def is_of(self, leaves: Sequence[Any], structure: Any) -> bool:
        """Return True if the tree still has these leaves at the same places."""
        try:
            return self.structure == structure and are_same(self.leaves or (), leaves)
        except Exception:  # What a user's container tells of itself may not be comparable.
            return False

    def tree(self, leaves: Sequence[Any]) -> _Tree:
        """Return the arrays of the tree, which has these leaves."""
        found = _Tree({name: leaves[n] for name, n in self.names.items()})
        found.all_real, found.sizes, found.has_matrix = self.all_real, self.sizes, self.has_matrix
        return found


#: The id of a tree -> what is known of it, until its first leaf dies or there are many others.
_KNOWN: dict[int, _Known] = {}
_MOST_KNOWN = 64


#: What a tree without objects of libraries consists of.
_CONTAINERS = frozenset({dict, list, tuple, type(None)})


def _nodes(structure: Any) -> set[type]:
    """Return the types of the nodes of a tree, but for its leaves."""
    node = structure.node_data()
    below = [_nodes(child) for child in structure.children()]
    return set().union(*below) if node is None else {node[0]}.union(*below)


def _known_of(value: Any) -> tuple[_Known, Sequence[Any]] | None:
    """Return what is known of a tree, and its leaves; None for what is none."""
    if isinstance(value, jax.Array):
        return None
    try:
        leaves, structure = jax.tree_util.tree_flatten(value)
        known = _KNOWN.get(id(value))
        if known is None or not known.is_of(leaves, structure):
            known = _Known(structure, leaves, value)
            if known.leaves:
                if len(_KNOWN) >= _MOST_KNOWN:
                    _KNOWN.clear()
                key, pop = id(value), _KNOWN.pop
                known.leaves[0] = weakref.ref(leaves[0], lambda _: pop(key, None))
                _KNOWN[key] = known
    except Exception:  # A user's container may raise anything.
        return None
    return known, leaves


def _arrays(value: Any) -> _Tree:
    """Return the arrays of a tree by their names; empty for what is none, such as one array."""
    found = _known_of(value)
    return _NONE if found is None else found[0].tree(found[1])


def is_plain(value: Any) -> bool:
    """Return True for a tree of nothing but arrays, in dictionaries, lists and tuples."""
    found = _known_of(value)
    return found is not None and found[0].is_plain


def _name(key: Any) -> str:
    return str(jax.tree_util.keystr((key,), simple=True))
