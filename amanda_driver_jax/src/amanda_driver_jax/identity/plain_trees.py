"""Parameters of programs without modules: the trees that their functions get.

JAX differentiates a function by its first argument, so by this convention it has the parameters. An
argument by which a function that runs is differentiated has them in any case.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
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

    Args:
        frame: The frame.
        counts: Returns False for code that is not looked at, such as that of the framework.
    """
    functions: list[FrameType] = []
    differentiated: list[Any] = []
    while frame is not None:
        numbers = internals.differentiated_arguments(frame)
        if numbers is not None and functions:
            differentiated.append(_arguments(functions[-1], numbers))
        elif counts(frame.f_code) and not _is_wrapper(frame):
            functions.append(frame)
        frame = frame.f_back
    found = [tree for values in reversed(differentiated) for tree in map(_arrays, values) if tree]
    if not found:
        found = [tree for function in reversed(functions) if (tree := _first_tree(function))]
    yield from found


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


def _arrays(value: Any) -> dict[str, Any]:
    """Return the arrays of a tree by their names; empty for what is none, such as one array."""
    try:
        leaves = jax.tree_util.tree_leaves_with_path(value)
    except Exception:  # A user's container may raise anything.
        return {}
    paths = [(path, leaf) for path, leaf in leaves if path and isinstance(leaf, jax.Array)]
    paths = [(path, leaf) for path, leaf in paths if is_differentiable(leaf)]
    names = [([_name(key) for key in path], leaf) for path, leaf in paths]
    of_model = [(one[one.index(_PARAMS) + 1 :], leaf) for one, leaf in names if _PARAMS in one]
    return {".".join(name): leaf for name, leaf in of_model or names}


def _name(key: Any) -> str:
    return str(jax.tree_util.keystr((key,), simple=True))
