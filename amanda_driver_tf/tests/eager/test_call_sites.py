"""Call sites in C and in Python: they agree on every stack, and keep nothing alive."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from amanda_driver_tf.identity.call_sites import Chain, PythonCallSite
from amanda_driver_tf.tensorflow_internals import extension

if extension.native is None:
    pytest.skip(f"no native interceptor: {extension.missing}", allow_module_level=True)
native = extension.native


def levels(first: int) -> Chain:
    """Return the stack above the frame `first` frames above the caller."""
    found: list[tuple[int, types.CodeType, int]] = []
    frame: types.FrameType | None = sys._getframe(first + 1)
    while frame is not None:
        found.append((len(found), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def chains(stack: Chain) -> Iterator[Chain]:
    """Return call sites that match a stack, and some that nearly do."""
    yield ()
    yield stack
    yield stack[::2]
    yield stack[-1:]
    for index, (depth, code, offset) in enumerate(stack):
        yield stack[index : index + 3]
        yield ((depth, code, -1),)
        yield ((depth, code, offset + 2),)
        yield ((depth, code, 0),)
        yield ((depth, code.replace(), offset),)
        yield ((depth + 1, code, offset),)
    yield ((len(stack), stack[-1][1], -1),)
    yield (*stack, (len(stack) + 100, stack[-1][1], -1))


LIKE: list[bool] = []


def intercept() -> None:
    # As deep as ops are when they are located.
    def locate() -> None:
        for chain in chains(levels(2)):
            here = native.CallSite(chain).here()
            assert here is PythonCallSite(chain).here()
            LIKE.append(here)

    locate()


def op() -> int:
    """Stand for an op, whose caller is the call site."""
    intercept()
    return 1


def generator() -> Iterator[int]:
    yield op()
    yield from (op() for _ in range(1))


def deep(count: int) -> int:
    return op() if not count else deep(count - 1)


class Sized:
    def __len__(self) -> int:
        return op()

    def __lt__(self, other: Any) -> bool:
        return bool(op())

    def __add__(self, other: Any) -> int:
        return op()

    def __radd__(self, other: Any) -> int:
        return op()

    @property
    def attribute(self) -> int:
        return op()

    def __del__(self) -> None:
        op()


def called_by_map(_: int) -> int:
    return op()


def closure() -> int:
    cell = 1

    def inner() -> int:
        return cell + op()

    return inner()


async def awaited() -> int:
    return op()


def coroutine() -> None:
    with pytest.raises(StopIteration):
        awaited().send(None)


def executed() -> None:
    for _ in range(2):
        exec("op()\n[op() for _ in range(2)]", {"op": op})


def class_body() -> None:
    exec("class A:\n op()", {"op": op})


def raising() -> None:
    try:
        raise ValueError
    except ValueError:
        op()
    finally:
        op()


STACKS: dict[str, Callable[[], Any]] = {
    "call": op,
    "lambda": lambda: op(),
    "generator": lambda: list(generator()),
    "comprehension": lambda: [op() for _ in range(3)],
    "nested comprehension": lambda: {a: [op() for _ in range(2)] for a in range(2)},
    "deep recursion": lambda: deep(150),
    "exec": executed,
    "eval": lambda: eval("op()", {"op": op}),
    "map": lambda: list(map(called_by_map, range(2))),
    "sorted": lambda: sorted([Sized(), Sized()]),
    "key": lambda: sorted([1, 2], key=lambda _: op()),
    "len": lambda: len(Sized()),
    "sum": lambda: sum([Sized()]),
    "property": lambda: Sized().attribute,
    "partial": lambda: functools.partial(op)(),
    "closure": closure,
    "coroutine": coroutine,
    "finalizer": lambda: Sized() and None,
    "handler": raising,
    "class body": class_body,
}


@pytest.mark.parametrize("stack", STACKS)
def test_c_and_python_agree_on_call_sites(stack: str) -> None:
    LIKE.clear()
    # Warm calls are specialised: 3.11 calls some builtins from the instruction before CALL.
    for _ in range(2 if stack == "deep recursion" else 12):
        STACKS[stack]()
    assert LIKE.count(True) > len(LIKE) // 10
    assert LIKE.count(False) > len(LIKE) // 10


def test_a_call_site_is_there_in_its_own_place_only() -> None:
    chain: Chain = ()
    site: Any = None

    def locate() -> bool:
        nonlocal chain
        chain = levels(2)[:1]
        return site is not None and site.here()

    def passing() -> bool:
        return locate()

    passing()
    first = chain
    for made in (native.CallSite, PythonCallSite):
        site = made(first)
        assert passing() is False
    for made in (native.CallSite, PythonCallSite):
        site, seen = None, []
        for step in range(6):
            seen.append(passing())
            if step == 0:
                site = made(chain)
        assert seen == [False] + [True] * 5


def test_call_sites_hold_their_codes_and_let_them_go() -> None:
    space: dict[str, Any] = {}
    exec("def made(): pass", space)
    code = space["made"].__code__
    before = sys.getrefcount(code)
    sites = [native.CallSite(((0, code, 2), (3, code, -1))) for _ in range(100)]
    assert sys.getrefcount(code) >= before + 200
    for _ in range(10000):
        sites[0].here()
    del sites
    assert sys.getrefcount(code) == before
    gone = weakref.ref(code)
    site = native.CallSite(((0, code, 2),))
    space.clear()
    del code
    gc.collect()
    assert gone() is not None
    del site
    assert gone() is None


@pytest.mark.parametrize(
    "chain",
    [
        [],
        (1,),
        ((0, None, 0),),
        ((0, op.__code__),),
        ((0, op.__code__, "0"),),
        ((-1, op.__code__, 0),),
        ((1, op.__code__, 0), (1, op.__code__, 0)),
    ],
)
def test_what_is_no_call_site_is_refused_and_kept_by_nobody(chain: Any) -> None:
    before = sys.getrefcount(op.__code__)
    for _ in range(50):
        with pytest.raises((TypeError, ValueError)):
            native.CallSite(chain)
    assert sys.getrefcount(op.__code__) < before + 10
