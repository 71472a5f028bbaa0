"""Versions of a framework: refused by name, tried, or tested by themselves once."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from amanda_core.driver_kit.framework_versions import FrameworkVersions, cache_folder
from amanda_core.errors import DriverError

from .making import PLUGGY

OLD = dataclasses.replace(PLUGGY, oldest="98.0")
NEW = dataclasses.replace(PLUGGY, oldest="0.1", newest="0.2")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the self-test; results are kept below `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "self_test_of_pluggy.py"


def test_a_version_between_the_oldest_and_the_newest_is_used_as_it_is(write: Path) -> None:
    write.write_text("raise SystemExit('it must not run')")
    assert PLUGGY.is_tried()
    assert PLUGGY.refusal() is None
    assert PLUGGY.failure("native") == ""
    assert PLUGGY.describe([("native", "")]) == []
    assert PLUGGY.note("native") == ""


@pytest.mark.parametrize("version", ["99.0.0", "99.0.1", "100.0", "99.0rc1", "1.2.dev3", "strange"])
def test_newer_and_unfinished_versions_are_not_tried(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrameworkVersions, "installed", lambda _: version)
    assert PLUGGY.is_tried() is (version == "99.0.0")
    assert PLUGGY.refusal() is None


@pytest.mark.parametrize("version", ["97.9", "98.0", "98.5", "99.0.0", "100.0"])
def test_supported_releases_before_the_first_that_was_tried_are_tested(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrameworkVersions, "installed", lambda _: version)
    supported = dataclasses.replace(OLD, first="98.5")
    assert supported.is_tried() is (version in ("98.5", "99.0.0"))
    assert (supported.refusal() is not None) is (version == "97.9")
    assert supported.install_tried.endswith(">=98.5,<=99.0'")


def test_an_older_version_is_refused_by_name(write: Path) -> None:
    write.write_text("raise SystemExit('it must not run')")
    refusal = OLD.refusal()
    assert refusal is not None
    assert f"Pluggy {OLD.installed()} is older than 98.0" in str(refusal)
    assert "pip install -U 'pluggy>=98.0'" in str(refusal)
    assert OLD.failure("native") == ""  # What is refused needs no test.


def test_a_self_test_that_passes_is_run_once(write: Path) -> None:
    write.write_text("")
    assert NEW.kept_failure("native") is None
    assert "it runs at the first `apply`" in NEW.note("native")
    assert NEW.failure("native") == ""
    write.write_text("raise SystemExit('it must not run again')")
    assert NEW.failure("native") == ""
    assert NEW.kept_failure("native") == ""
    (finding,) = NEW.describe([("native", "")])
    assert finding.severity == "warning"
    assert "has not been tried" in finding.message
    assert "native: passed" in finding.message


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("raise SystemExit('The self-test failed: relu')", "The self-test failed: relu"),
        ("import torch_of_2040", "ModuleNotFoundError: No module named 'torch_of_2040'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it was ended by SIGSEGV"),
    ],
)
def test_a_self_test_that_fails_says_why(write: Path, program: str, failure: str) -> None:
    if "SIGSEGV" in failure and sys.platform == "win32":
        pytest.skip("signals are POSIX's")
    write.write_text(program)
    assert NEW.failure("native") == failure
    assert NEW.kept_failure("native") == failure
    refusal = NEW.untried_refusal([("native", failure), ("python", failure)])
    assert f"Pluggy {NEW.installed()} has not been tried" in str(refusal)
    assert f"with the python interceptor: {failure}" in str(refusal)
    (finding,) = NEW.describe([("native", failure), ("python", failure)])
    assert finding.severity == "error"


def test_an_interceptor_that_is_asked_for_is_not_tested(
    write: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write.write_text("raise SystemExit('it must not run')")
    monkeypatch.setenv(NEW.variable, "native")
    assert NEW.failure("native") == ""


def test_nothing_fails_where_nothing_can_be_kept(
    write: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(taken))
    monkeypatch.setenv("LOCALAPPDATA", str(taken))
    write.write_text("")
    assert NEW.failure("native") == ""
    assert NEW.kept_failure("native") is None


def test_nothing_fails_where_no_process_can_be_started(
    write: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write.write_text("")
    monkeypatch.setattr(sys, "executable", str(write.parent / "nowhere"))
    assert "it could not be started" in NEW.failure("native")
    assert NEW.kept_failure("native") is None
    assert cache_folder().name == "amanda"


def test_the_status_of_a_driver_with_one_interceptor() -> None:
    assert PLUGGY.status("python", "It is the only one").interceptor == "python"
    missing = dataclasses.replace(PLUGGY, distributions=("not-there",), module="not_there")
    assert missing.status("python", "").version is None
    assert "not installed" in missing.status("python", "").why


@pytest.mark.parametrize("error", [AttributeError("x"), ImportError("x")])
def test_a_version_that_lacks_what_the_driver_imports_is_refused(error: Exception) -> None:
    with pytest.raises(DriverError, match="is not known: x"), PLUGGY.refusing_unknown():
        raise error
