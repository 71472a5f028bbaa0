"""Parameters of programs without modules: the trees that their functions get.

JAX differentiates a function by its first argument, so by this convention it has the parameters. An
argument by which a function that runs is differentiated has them in any case.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import jax

from amanda_core.driver_kit import local_of
from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.arrays import is_differentiable

__all__ = ["arguments_of", "parameter_trees", "tree_of_call"]

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


def _joined(
    trees: Sequence[dict[str, Any]], frozen: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return trees as one, in which a name that others have begins with that of the argument."""
    found: dict[str, Any] = {}
    for tree in trees:
        found.update(tree)
    for argument, tree in frozen.items():
        is_new = found.keys().isdisjoint(tree)
        found.update({name if is_new else f"{argument}.{name}": v for name, v in tree.items()})
    return found


def _frozen_trees(
    function: FrameType, trees: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the other trees with weights that a function gets, or reads as a closure."""
    code = function.f_code
    if "locals" in code.co_names:  # Reading would write into the dictionary that it returned.
        return {}
    trained = {id(array) for tree in trees for array in tree.values()}
    layers = _common_size([array for tree in trees for array in tree.values()])
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = {}
    for name in (*names, *code.co_freevars):
        tree = {} if name in _DATA else _arrays(local_of(function, name), all_real=True)
        arrays = [*tree.values()]
        # Those of a batch have as many examples, which stacked layers look like.
        is_batch = len(arrays) > 1 and _common_size(arrays) not in (None, layers)
        is_other = trained.isdisjoint(map(id, arrays)) and not is_batch
        if is_other and any(array.ndim > 1 for array in arrays):
            found[name] = tree
    return found


def _common_size(arrays: Sequence[Any]) -> int | None:
    """Return the size of the first axis, if that of all arrays is the same."""
    sizes = {array.shape[0] if array.ndim else 0 for array in arrays}
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


def _first_tree(function: FrameType) -> dict[str, Any]:
    """Return the arrays of the first argument of a running function that is a tree of arrays."""
    code = function.f_code
    if "locals" in code.co_names:  # As above.
        return {}
    for name in code.co_varnames[: code.co_argcount]:
        tree = {} if name in _DATA else _arrays(local_of(function, name))
        if tree:
            return tree
    return {}


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


def _arrays(value: Any, all_real: bool = False) -> dict[str, Any]:
    """Return the arrays of a tree by their names; empty for what is none, such as one array.

    Args:
        value: The tree.
        all_real: Return nothing if other arrays are in it, too, such as labels.
    """
    try:
        leaves = jax.tree_util.tree_leaves_with_path(value)
    except Exception:  # A user's container may raise anything.
        return {}
    arrays = [(path, leaf) for path, leaf in leaves if path and isinstance(leaf, jax.Array)]
    paths = [(path, leaf) for path, leaf in arrays if is_differentiable(leaf)]
    if all_real and len(paths) < len(arrays):
        return {}
    names = [([_name(key) for key in path], leaf) for path, leaf in paths]
    of_model = [(one[one.index(_PARAMS) + 1 :], leaf) for one, leaf in names if _PARAMS in one]
    return {".".join(name): leaf for name, leaf in of_model or names}


def _name(key: Any) -> str:
    return str(jax.tree_util.keystr((key,), simple=True))
