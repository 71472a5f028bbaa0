"""Choosing one of a driver's interceptors, and attaching with it."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest

from amanda_core.driver_kit.framework_versions import FrameworkVersions
from amanda_core.driver_kit.interceptors import NATIVE, Extension, Interceptors, load_extension
from amanda_core.errors import DriverError, UnsupportedError
from amanda_core.interface.driver import DriverStatus

from .making import PLUGGY

BUILT = Interceptors(PLUGGY, "python", lambda: Extension(None, "It is built"), "Operators")
NOT_BUILT = dataclasses.replace(BUILT, extension=lambda: Extension("no compiler", ""))
OLD = dataclasses.replace(BUILT, versions=dataclasses.replace(PLUGGY, oldest="98.0"))
NEW = dataclasses.replace(BUILT, versions=dataclasses.replace(PLUGGY, oldest="0.1", newest="0.2"))


class Attachment:
    """Counts its calls, and fails to attach if it is given an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._error = error

    def attach(self) -> None:
        self.calls.append("attach")
        if self._error is not None:
            raise self._error

    def detach(self) -> None:
        self.calls.append("detach")


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Request no interceptor, and forget the results of self-tests."""
    monkeypatch.delenv(PLUGGY.variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))


def test_the_native_one_is_used_where_it_is_built() -> None:
    assert BUILT.choice() == (NATIVE, "It is built")
    assert NOT_BUILT.choice() == ("python", "The native interceptor cannot be used: no compiler")


@pytest.mark.parametrize("interceptors", [BUILT, NOT_BUILT])
def test_the_environment_variable_decides(
    interceptors: Interceptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUGGY.variable, "python")
    assert interceptors.choice() == ("python", f"{PLUGGY.variable} asks for it")


@pytest.mark.parametrize(("asked", "said"), [("native", "no compiler"), ("x", "native, python")])
def test_one_that_is_not_there_is_refused(
    asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUGGY.variable, asked)
    with pytest.raises(UnsupportedError, match=said):
        NOT_BUILT.choice()
    assert said in NOT_BUILT.status().refused or "is not the name" in NOT_BUILT.status().refused
    assert [finding.severity for finding in NOT_BUILT.findings()] == ["error"]


def test_an_attachment_is_attached() -> None:
    attachment = Attachment()
    assert BUILT.attach(lambda: attachment) is attachment
    assert attachment.calls == ["attach"]


def test_one_that_fails_is_detached_and_raises_its_own_error() -> None:
    attachment = Attachment(KeyError("a name"))
    with pytest.raises(KeyError):
        BUILT.attach(lambda: attachment)
    assert attachment.calls == ["attach", "detach"]


def test_with_a_version_that_was_not_tried_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FrameworkVersions, "failure", lambda *_: "")
    attachment = Attachment(KeyError("a name"))
    with pytest.raises(DriverError, match=r"has not been tried.*KeyError: 'a name'"):
        NEW.attach(lambda: attachment)
    assert attachment.calls == ["attach", "detach"]


def test_an_old_version_is_refused_before_anything_is_made() -> None:
    with pytest.raises(DriverError, match=r"is older than 98\.0"):
        OLD.attach(Attachment)
    assert OLD.status().interceptor == ""
    assert "is older than 98.0" in OLD.status().refused
    assert [finding.severity for finding in OLD.findings()] == ["error"]


def test_a_version_with_which_neither_works_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameworkVersions, "failure", lambda _, name: f"{name} is broken")
    neither = dataclasses.replace(NEW, extension=lambda: Extension("native is broken", ""))
    with pytest.raises(DriverError, match=r"native is broken.*python is broken"):
        neither.attach(Attachment)
    assert "error" in [finding.severity for finding in neither.findings()]
    monkeypatch.setattr(FrameworkVersions, "kept_failure", FrameworkVersions.failure)
    assert "python is broken" in neither.status().refused
    monkeypatch.setenv(PLUGGY.variable, "python")
    assert not neither.status().refused


def test_status_and_findings_name_the_interceptor() -> None:
    status = BUILT.status()
    assert (status.version, status.interceptor) == (PLUGGY.installed(), NATIVE)
    (finding,) = BUILT.findings()
    assert finding.message == "Operators pass through the native interceptor. It is built"


def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameworkVersions, "installed", lambda _: None)
    assert BUILT.status() == DriverStatus(None, "", "Pluggy is not installed")
    (finding,) = BUILT.findings()
    assert (finding.severity, finding.fix) == ("error", "pip install pluggy")


def test_an_extension_is_imported_or_the_reason_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_extension("math") == (math, "")
    module, missing = load_extension("amanda_core._not_there")
    assert module is None
    assert "was not built" in missing
    # As such builds describe themselves: docs.python.org/3/howto/free-threading-python.html
    monkeypatch.setattr(sys, "version", "3.14.0 free-threading build (main) [GCC 13.3.0]")
    module, missing = load_extension("math")
    assert module is None
    assert "relies on the GIL" in missing
