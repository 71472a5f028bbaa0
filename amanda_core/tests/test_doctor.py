"""`amanda doctor`: what in an environment is broken or would make results wrong."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import amanda
from amanda_core import hookimpl
from amanda_core.interface.driver import DriverStatus, Finding
from amanda_core.plugins import discovery
from amanda_core.plugins.requirements import extra_command, missing
from amanda_core.testing.toy.driver import ToyDriver

from .conftest import Installed
from .making import DISTRIBUTION, Point
from .site import Site, distribution
from .test_cli import Noting, call, point, site
from .test_discovery import broken

__all__ = ["site"]  # The fixture.


class Worried(ToyDriver):
    @hookimpl
    def amanda_preflight(self) -> list[Finding]:
        return [Finding("error", "Another library replaced toy.relu\x1b[2J", "Import it later")]


class Unwell(ToyDriver):
    @hookimpl
    def amanda_preflight(self) -> list[Finding]:
        raise OSError("no such device")


class Refusing(ToyDriver):
    @hookimpl
    def amanda_driver_status(self) -> DriverStatus:
        return DriverStatus("9.0", "", "", "No interceptor works with toy 9.0")

    @hookimpl
    def amanda_preflight(self) -> list[Finding]:
        return [Finding("error", "Toy 9.0 is new: the self-test failed")]


def findings(capsys: pytest.CaptureFixture[str], status: int) -> list[tuple[str, str, str]]:
    assert call("doctor", "--json") == status
    found = json.loads(capsys.readouterr().out)["findings"]
    return [(finding["of"], finding["severity"], finding["message"]) for finding in found]


@pytest.mark.untraced
def test_a_healthy_installation(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    driver = ToyDriver()
    installed.points += [point("toy", driver, discovery.DRIVER_GROUP), point("noting", Noting)]
    assert findings(capsys, 0) == [("toy", "info", "The toy framework has one version")]
    assert call("doctor") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"amanda {amanda.__version__}, Python ")
    assert "drivers: 1, tools: 1" in out


@pytest.mark.untraced
def test_what_is_wrong_is_found(
    installed: Installed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = discovery.DRIVER_GROUP
    installed.points += [
        point("toy", Worried(), group),
        point("unwell", Unwell("unwell"), group),
        Point("worse", broken, group, DISTRIBUTION),
        Point("words", broken, discovery.PLUGIN_GROUP, DISTRIBUTION),
        point("quiet", 9, discovery.PLUGIN_GROUP),
        Point("missing", broken, discovery.TOOL_GROUP, DISTRIBUTION),
        point("seven", 7),
        point("off", 8),
    ]
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", "off,of,quiet")
    found = findings(capsys, 1)
    assert [(of, severity) for of, severity, _ in found] == [
        ("toy", "error"),
        ("unwell", "error"),
        ("worse", "error"),
        ("words", "error"),
        ("missing", "error"),
        ("seven", "error"),
        ("AMANDA_DISABLE_PLUGINS", "warning"),
    ]
    messages = [message for *_, message in found]
    assert messages[1] == "Its preflight failed: OSError: no such device"
    assert "libtoy.so" in messages[2]
    assert "Plugin 'words' of amanda-driver-toy 0.4 cannot be loaded" in messages[3]
    assert "'missing' of amanda-driver-toy 0.4 cannot be loaded" in messages[4]
    assert messages[6] == "'of' blocks nothing"
    assert call("doctor") == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "Import it later" in out


@pytest.mark.untraced
def test_nothing_installed(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    message = "No working driver: operators are not instrumented"
    assert findings(capsys, 1) == [("amanda", "error", message)]


@pytest.mark.untraced
def test_a_driver_that_refuses(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    installed.points.append(point("toy", Refusing(), discovery.DRIVER_GROUP))
    assert [message for *_, message in findings(capsys, 1)] == [
        "No working driver: operators are not instrumented",
        "Toy 9.0 is new: the self-test failed",
    ]
    assert call("drivers", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["status"], found["error"]) == ("refused", "No interceptor works with toy 9.0")
    assert found["framework_version"] == "9.0"


def test_doctor_over_distributions_on_the_path(site: Site) -> None:
    done = site.amanda("doctor", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert ("toy", "warning") in {(f["of"], f["severity"]) for f in found["findings"]}
    named = {f["of"]: f["severity"] for f in found["findings"]}
    assert named.items() >= {"absent": "error", "number": "error", "worse": "error"}.items()
    assert named["toy-tools/count"] == "warning"
    assert named["other-tools/count"] == "error"
    done = site.amanda("tools", "count")
    assert done.returncode == 2
    assert "in several distributions: " in done.stderr


def test_doctor_knows_the_other_project_of_this_name(site: Site) -> None:
    said = site.amanda("doctor").stdout
    assert "another project" not in said
    distribution(site.path, "amanda", "0.2", "")
    findings = json.loads(site.amanda("doctor", "--json").stdout)["findings"]
    (found,) = [finding for finding in findings if "another project" in finding["message"]]
    assert found["severity"] == "warning"
    assert "pip uninstall amanda" in found["fix"]


def test_doctor_looks_behind_what_is_imported_first(site: Site) -> None:
    site.write("watching.py", "import sys\nsys.setprofile(lambda *_: None)\n")
    site.write("failing.py", "1 / 0")
    program = "from amanda_core.cli import main; main()"
    arguments = ["-c", program, "doctor", "--json", "-i", "watching", "--import", "failing"]
    found = json.loads(site.python(*arguments).stdout)["findings"]
    messages = {(finding["of"], finding["severity"]): finding["message"] for finding in found}
    assert messages["failing", "error"] == (
        "It cannot be imported: ZeroDivisionError: division by zero"
    )
    assert messages["python", "warning"] == (
        "Python is watched by sys.setprofile: watching.<lambda>"
    )


@pytest.mark.untraced
def test_what_plugins_require_and_what_is_not_installed_is_found(
    installed: Installed,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "needy-1.0.dist-info"
    folder.mkdir()
    needs = [
        *("absent-thing>=1.23", "click", "other-absent; extra == 'cli'"),
        *("old-absent; python_version < '3.0'", "new-absent ; python_version >= '3.0'"),
    ]
    lines = ["Metadata-Version: 2.1", "Name: needy", "Version: 1.0"]
    (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {n}" for n in needs)]))
    monkeypatch.syspath_prepend(tmp_path)
    needy = SimpleNamespace(name="needy", version="1.0")
    installed.points += [
        point("toy", ToyDriver(), discovery.DRIVER_GROUP),
        Point("noting", lambda: Noting, discovery.TOOL_GROUP, needy),
    ]
    assert [of for of, severity, _ in findings(capsys, 1) if severity == "error"] == ["needy"] * 2
    assert call("doctor") == 1
    out = capsys.readouterr().out
    assert "It requires absent-thing, which is not installed" in out
    assert "pip install 'absent-thing>=1.23'" in out
    assert "pip install 'new-absent'" in out
    assert missing(["needy"]) == [
        ("needy", "absent-thing", "absent-thing>=1.23"),
        ("needy", "new-absent", "new-absent"),
    ]
    assert extra_command("needy", "cli") == "pip install 'other-absent'"
    assert extra_command("not-there", "cli") == "pip install 'not-there[cli]'"


def test_the_command_for_an_extra_names_what_it_requires() -> None:
    # What this project declares, as pip's own reader of requirements parses it.
    requirements = pytest.importorskip(
        "packaging.requirements", reason="packaging comes with pytest"
    )
    declared = [requirements.Requirement(line) for line in metadata.requires("amanda-core") or ()]
    named = [
        one.name
        for one in declared
        if one.marker and one.marker.evaluate({"extra": "cli"}) and not one.marker.evaluate()
    ]
    words = extra_command("amanda-core", "cli").split()
    assert words[:2] == ["pip", "install"]
    assert [requirements.Requirement(word.strip("'")).name for word in words[2:]] == named
    assert "click" in named
