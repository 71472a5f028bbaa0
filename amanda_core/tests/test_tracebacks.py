"""Which frames a traceback under `amanda run` has."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from amanda_core.cli import program
from amanda_core.plugins.driver_failures import DriverFailures
from amanda_core.plugins.tracebacks import VARIABLE, Folding, folded_modules

MODULES = ("amanda_core", "frame", "frame_driver.plugin")


def function(module: str, name: str, body: str, **names: Any) -> Callable[..., Any]:
    """Return a function of a module, whose frames are named after it."""
    scope: dict[str, Any] = {"__name__": module, **names}
    exec(f"def {name}(*given):\n    {body}", scope)
    found: Callable[..., Any] = scope[name]
    return found


def caught(call: Callable[..., Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
        return error
    raise AssertionError


def names(error: BaseException) -> list[str]:
    """Return the functions that a traceback shows, as Python's own formatter prints them."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return [line.rpartition(" in ")[2] for line in lines if line.startswith("  File")]


def test_frames_between_those_of_the_program_are_left_out() -> None:
    layer = function("model", "layer", "return 1 / 0")
    wrapper = function("frame.modules.base", "wrapper", "return layer()", layer=layer)
    core = function("amanda_core.engine.x", "core", "return wrapper()", wrapper=wrapper)
    other = function("frameworks", "other", "return core()", core=core)
    main = function("__main__", "main", "return other()", other=other)
    error = caught(main)
    folding = Folding(error, MODULES)
    with folding.applied():
        assert names(error) == ["main", "other", "layer"]
    assert folding.left_out == 2
    assert names(error) == ["main", "other", "core", "wrapper", "layer"]
    with Folding(error, ()).applied():
        assert len(names(error)) == 5


def test_a_frame_of_no_line_is_kept() -> None:
    """An asynchronous exception may arrive at an instruction that belongs to no line."""
    code = compile("try:\n    pass\nfinally:\n    1 / 0", "program", "exec")
    error = caught(lambda: exec(code.replace(co_linetable=b""), {"__name__": "__main__"}))

    def last() -> Any:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        return frame.f_code.co_filename, line

    assert last() == ("program", None)
    with Folding(error, MODULES).applied():
        assert last() == ("program", None)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("raise ValueError('ours')", ["main", "core"]),  # Amanda's own error.
        ("return len(5)", ["main"]),  # The error of what it calls in C.
        ("return 1 / 0", ["main"]),
    ],
)
def test_the_frame_that_raises_is_kept_if_it_is_its_own_error(body: str, shown: list[str]) -> None:
    core = function("amanda_core.engine", "core", body)
    error = caught(function("__main__", "main", "return core()", core=core))
    with Folding(error, MODULES).applied():
        assert names(error) == shown


def test_a_traceback_without_a_frame_of_the_program_is_whole() -> None:
    core = function("frame.a", "core", "return len(5)")
    error = caught(function("amanda_core.cli", "main", "return core()", core=core))
    folding = Folding(error, MODULES)
    with folding.applied():
        assert names(error) == ["main", "core"]
    assert folding.left_out == 0


def test_causes_contexts_and_groups_are_folded_too() -> None:
    inner = function("frame.b", "inner", "return len(5)")
    first = function("model", "first", "return inner()", inner=inner)
    again = function("frame.c", "again", "return first()", first=first)
    body = "try:\n        again()\n    except TypeError as e:\n        raise ValueError from e"
    error = caught(function("__main__", "main", body, again=again))
    cause: Any = error.__cause__
    cause.__cause__ = error  # A circle ends.
    folding = Folding(error, MODULES)
    with folding.applied():
        assert names(error) == ["main", "first", "main"]
    assert folding.left_out == 2
    group = BaseExceptionGroup("several", [caught(again)])
    folding = Folding(group, MODULES)
    with folding.applied():
        assert "inner" not in "".join(traceback.format_exception(group))
    assert folding.left_out == 2


def test_the_error_of_a_driver_keeps_its_frames() -> None:
    core = function("amanda_core.engine", "core", "return len(5)")
    error = caught(function("__main__", "main", "return core()", core=core))
    with pytest.raises(TypeError):
        DriverFailures().note(error, "toy", "'scale'")  # type: ignore[arg-type]
    Folding(error, MODULES).apply()
    assert "core" in names(error)


def test_the_variable_shows_all_frames(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = function("amanda_core.engine", "core", "return len(5)")
    error = caught(function("__main__", "main", "return core()", core=core))
    monkeypatch.setattr(sys, "last_exc", None, raising=False)
    for name in ("last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    program.report(error)
    said = capsys.readouterr().err
    assert said.startswith("amanda: frames of Amanda")
    assert f"left out below: 1 ({VARIABLE}=full shows them)" in said
    assert "in core" not in said
    assert said.endswith("TypeError: object of type 'int' has no len()\n")
    # A debugger afterwards has all of them.
    last: Any = sys.last_value
    assert names(last) == ["main", "core"]
    monkeypatch.setenv(VARIABLE, "full")
    assert folded_modules(wrappers=True) == ()
    program.report(error)
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert "in core" in said
