"""The versions of torch that the driver accepts, and what it reports about the installed one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from amanda_core.errors import DriverError
from amanda_driver_torch import plugin
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS
from amanda_driver_torch.torch_internals.versions import VERSIONS


@pytest.mark.slow
@pytest.mark.parametrize("interceptor", INTERCEPTORS.names)
def test_self_test_of_a_version_that_was_not_tried_passes_here(
    interceptor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VERSIONS.variable, raising=False)
    untried = dataclasses.replace(VERSIONS, newest="2.10.0")
    if untried.is_tried():
        pytest.skip("the oldest torch is installed")
    assert untried.failure(interceptor) == ""
    assert untried.kept_failure(interceptor) == ""


#: Ends the self-test of the interceptors in BROKEN: the native one crashes, the other raises.
BREAKING = """
import os, sys

name = os.environ.get("AMANDA_TORCH_INTERCEPTOR")
if "amanda_driver_torch.self_test" in sys.orig_argv and name in os.environ["BROKEN"].split():
    if name == "native":
        os.abort()
    sys.exit("relu is not what it was")
"""
#: Applies a tool under a version that was not tried.
UNTRIED = """
from amanda_driver_torch.torch_internals.versions import VERSIONS

object.__setattr__(VERSIONS, "newest", "2.9")

import amanda, torch
from amanda_core.testing.kit.tools import around
from amanda_driver_torch import plugin
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS

counts, tool = around()
try:
    with amanda.apply(tool):
        torch.relu(torch.ones(2))
except Exception as error:
    print(type(error).__name__, error)
print(counts["relu", "before"], INTERCEPTORS.status().interceptor)
print(*(finding.message for finding in plugin.amanda_preflight()))
"""


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize("broken", ["native", "native function_mode"])
def test_a_version_whose_self_test_fails_never_ends_the_program(
    broken: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKING)
    environment = {name: value for name, value in os.environ.items() if "AMANDA" not in name}
    environment |= {"BROKEN": broken, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    found = []
    for _ in range(2):  # The second run reads the kept results.
        command = [sys.executable, "-c", UNTRIED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines())
    for *refusal, used, findings in found:
        assert "native: failed (it was ended by SIGABRT)" in findings
        if broken == "native":
            assert (refusal, used) == ([], "1 function_mode")
        else:
            assert refusal[0].startswith(f"DriverError PyTorch {version('torch')}")
            assert "with the function_mode interceptor: SystemExit: relu" in refusal[0]
            assert "relu is not what it was" in findings


def test_an_old_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old = dataclasses.replace(INTERCEPTORS, versions=dataclasses.replace(VERSIONS, oldest="99.0"))
    with pytest.raises(DriverError, match=r"PyTorch 2\.\S+ is older than 99.0"):
        old.require_supported()
    assert old.status().interceptor == ""
    monkeypatch.setattr(plugin, "INTERCEPTORS", old)
    assert [f.severity for f in plugin.amanda_preflight() if "older" in f.message] == ["error"]


def test_a_torch_with_which_no_interceptor_works_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VERSIONS.variable, "")
    new = dataclasses.replace(VERSIONS, newest="2.9")
    monkeypatch.setattr(type(new), "failure", lambda _, name: f"{name} is broken")
    monkeypatch.setattr("amanda_driver_torch.torch_internals.extension.native", None)
    monkeypatch.setattr("amanda_driver_torch.torch_internals.extension.missing", "native is broken")
    with pytest.raises(DriverError, match="has not been tried") as caught:
        dataclasses.replace(INTERCEPTORS, versions=new).require_supported()
    assert "with the function_mode interceptor: function_mode is broken" in str(caught.value)


def test_status_and_preflight_name_version_and_interceptor() -> None:
    now = INTERCEPTORS.status()
    assert now.version is not None
    assert torch.__version__.startswith(now.version)
    assert now.interceptor in INTERCEPTORS.names
    assert any(now.interceptor in finding.message for finding in plugin.amanda_preflight())
