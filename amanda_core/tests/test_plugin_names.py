"""Names of installed plugins: spellings, ambiguous names, and blocking."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import amanda
from amanda_core import hookimpl
from amanda_core.cli.blocking import block
from amanda_core.config import factories, from_environment, from_flags, load
from amanda_core.config.settings import Layer, Setting
from amanda_core.errors import BrokenToolError, ConfigError, MissingDriverError, UnknownToolError
from amanda_core.plugins import discovery
from amanda_core.plugins.installed import canonical
from amanda_core.plugins.preflight import preflight
from amanda_core.testing.toy.driver import ToyDriver

from .conftest import Installed
from .making import Point
from .site import Site, distribution, with_plugins
from .test_cli import call
from .test_discovery import broken


class Ours(amanda.Tool):
    pass


class Theirs(amanda.Tool):
    pass


class Others(amanda.Tool):
    pass


def of(distribution: str) -> Any:
    return SimpleNamespace(name=distribution, version="1.0")


def add(installed: Installed, name: str, made: Any, distribution: str) -> Point:
    point = Point(name, lambda: made, discovery.TOOL_GROUP, of(distribution))
    installed.points.append(point)
    return point


def made(text: str) -> amanda.Tool:
    (settings,) = from_flags([text]).tools.values()
    return factories.make(settings)


# Spellings. PEP 503 gives these three of one name.


@pytest.mark.parametrize("spelling", ["amanda_tools", "Amanda-Tools", "amanda.tools"])
def test_a_distribution_is_the_same_in_every_spelling(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    assert canonical(spelling) == "amanda-tools"
    add(installed, "trace", Ours, "amanda-tools")
    assert list(discovery.tools()) == ["trace"]
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", spelling)
    assert discovery.tools() == {}


def test_a_driver_is_the_same_in_every_spelling(installed: Installed) -> None:
    found = discovery.register(ToyDriver(), "my-toy_2")
    assert discovery.driver("My_Toy.2") is found


# Which tool.


@pytest.fixture
def three(installed: Installed) -> list[Point]:
    """Install three tools of one name, Amanda's own between the others."""
    return [
        add(installed, "trace", Theirs, "acme_tools"),
        add(installed, "trace", Ours, "amanda-tools"),
        add(installed, "trace", Others, "other-tools"),
    ]


def test_a_tool_named_like_a_shipped_one_does_not_disable_it(three: list[Point]) -> None:
    assert type(made("trace")) is Ours
    assert list(discovery.tools()) == ["acme_tools/trace", "trace", "other-tools/trace"]


@pytest.mark.parametrize(
    ("reference", "kind"),
    [
        ("acme_tools/trace", Theirs),
        ("acme-tools/trace", Theirs),
        ("amanda_tools/trace", Ours),
        ("other-tools/trace", Others),
    ],
)
def test_a_distribution_before_the_name_says_which(
    three: list[Point], reference: str, kind: type, tmp_path: Path
) -> None:
    assert type(made(reference)) is kind
    (settings,) = from_flags([reference]).tools.values()
    assert settings.name == "trace"  # What its results are filed under.
    path = tmp_path / "pyproject.toml"
    path.write_text(f"[tool.amanda.tools.mine]\ntool = '{reference}'\n")
    (settings,) = load(tmp_path, Layer(), environment={}).tools
    assert (settings.name, type(factories.make(settings))) == ("mine", kind)


def test_two_of_others_are_told_apart_by_their_distributions(installed: Installed) -> None:
    add(installed, "count", Theirs, "acme-tools")
    add(installed, "count", Others, "other-tools")
    with pytest.raises(
        BrokenToolError, match=r"in several distributions.*Say which one: acme-tools/count"
    ):
        made("count")
    assert type(made("other-tools/count")) is Others
    with pytest.raises(UnknownToolError, match=r"What is installed: acme-tools/count, other-"):
        made("no-tools/count")


def test_with_the_shipped_one_blocked_the_name_is_the_others(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(installed, "trace", Ours, "amanda-tools")
    add(installed, "trace", Theirs, "acme-tools")
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", "amanda-tools")
    assert type(made("trace")) is Theirs
    assert list(discovery.tools()) == ["trace"]


def test_the_list_shows_by_which_name_each_is_asked_for(
    three: list[Point], installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # Which nothing tells apart.
        add(installed, "twin", Theirs, "twins")
    assert call("tools", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(tool["reference"], tool["status"]) for tool in found] == [
        ("acme_tools/trace", "ok"),
        ("trace", "ok"),
        ("other-tools/trace", "ok"),
        ("", "duplicate"),
        ("", "duplicate"),
    ]
    for tool in found:
        assert call("tools", tool["reference"] or tool["name"]) == 2 * (not tool["reference"])
    capsys.readouterr()
    assert call("doctor", "--json") == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["of"], f["severity"]) for f in findings if "trace" in f["of"]] == [
        ("acme_tools/trace", "warning"),
        ("other-tools/trace", "warning"),
    ]


@pytest.mark.parametrize("text", ["tools/mine.py", "a/b/trace", "/trace", "acme/", "../x/trace"])
def test_a_path_is_no_name_of_an_installed_tool(text: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a tool"):
        from_flags([text])


# Blocking.


@pytest.fixture
def two_drivers(installed: Installed) -> list[Point]:
    """Install a driver, and one that must not be imported."""
    points = [
        Point("toy", ToyDriver, dist=of("amanda-driver-toy")),
        Point("worse", broken, dist=of("worse_driver")),
    ]
    installed.points += points
    return points


@pytest.mark.parametrize("names", ["worse", "worse-driver", "Worse.Driver", "x, worse_driver"])
def test_the_lists_take_a_flag_that_blocks(
    two_drivers: list[Point], capsys: pytest.CaptureFixture[str], names: str
) -> None:
    assert call("drivers", "--json", "--disable-plugins", names) == 0
    assert [d["status"] for d in json.loads(capsys.readouterr().out)] == ["ok", "blocked"]
    assert two_drivers[1].loads == 0


def test_the_lists_follow_the_configuration_of_the_current_folder(
    two_drivers: list[Point],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text("[tool.amanda]\ndisable_plugins = ['worse', 'wrose']\n")
    monkeypatch.chdir(tmp_path)
    assert call("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [d["status"] for d in found["drivers"]] == ["ok", "blocked"]
    assert two_drivers[1].loads == 0
    # Of Python it is said that coverage.py watches it, where that is so.
    warned = [f for f in found["findings"] if f["severity"] == "warning" and f["of"] != "python"]
    assert [(f["of"], f["message"]) for f in warned] == [(f"{path}:2", "'wrose' blocks nothing")]
    with pytest.raises(MissingDriverError, match=r"'worse' is blocked by .*pyproject\.toml:2"):
        discovery.driver("worse")


def test_a_malformed_configuration_is_left_aside_by_a_flag(
    two_drivers: list[Point],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.amanda]\ndisable_plugins = 3\n")
    monkeypatch.chdir(tmp_path)
    assert call("drivers") == 2
    assert "disable_plugins must be a text or a list of texts, not 3" in capsys.readouterr().err
    assert call("drivers", "--no-config") == 0


def test_what_is_blocked_later_is_not_called_any_more(installed: Installed) -> None:
    log: list[str] = []

    class Watching:
        @hookimpl(wrapper=True)
        def amanda_preflight(self) -> Any:
            log.append("preflight")
            return (yield)

    driver = ToyDriver()
    installed.points += [
        Point("watching", Watching, discovery.PLUGIN_GROUP, of("watching")),
        Point("toy", lambda: driver, dist=of("amanda-driver-toy")),
        Point("other", lambda: ToyDriver("other"), dist=of("amanda-driver-other")),
    ]
    assert [found.info.name for found in discovery.drivers()] == ["toy", "other"]
    block([Setting(["watching", "other"], "--disable-plugins")])
    assert [found.info.name for found in discovery.drivers()] == ["toy"]
    preflight(discovery.driver("toy"))
    assert log == []
    with pytest.raises(MissingDriverError, match="'other' is blocked by --disable-plugins"):
        discovery.driver("other")


def test_every_source_blocks_and_none_takes_back_what_another_says(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text("[tool.amanda]\ndisable_plugins = 'a'\n")
    flags = from_flags(disabled="c, d")
    config = load(tmp_path, flags, environment={"AMANDA_DISABLE_PLUGINS": "b"})
    assert [(setting.value, setting.where) for setting in config.disabled] == [
        (("a",), f"{path}:2"),
        (("b",), "AMANDA_DISABLE_PLUGINS"),
        (("c", "d"), "--disable-plugins"),
    ]
    assert from_environment({"AMANDA_DISABLE_PLUGINS": " , "}) == Layer()
    with pytest.raises(ConfigError, match="does not name a plugin"):
        from_flags(disabled=" ")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    made.write("train.py", "import toyframe\ntoyframe.relu(toyframe.Value(1.0))\nprint('trained')")
    made.write("plain/train.py", (made.work / "train.py").read_text())
    return made


@pytest.mark.parametrize("source", ["flag", "file", "variable"])
def test_a_run_uses_nothing_that_is_blocked(site: Site, source: str) -> None:
    flags, variables, where = ["--disable-plugins", "toy_tools"], {}, "--disable-plugins"
    if source == "file":
        flags, where = [], "pyproject.toml:2"
        site.write("pyproject.toml", "[tool.amanda]\ndisable_plugins = ['toy_tools']\n")
    elif source == "variable":
        flags, where = [], "AMANDA_DISABLE_PLUGINS"
        variables["AMANDA_DISABLE_PLUGINS"] = "toy_tools"
    try:
        done = site.amanda("run", *flags, "-t", "count", "train.py", **variables)
    finally:
        (site.work / "pyproject.toml").unlink(missing_ok=True)
    assert done.returncode == 2
    assert "The tool 'count' is blocked by" in done.stderr
    assert where in done.stderr
    assert "trained" not in done.stdout


#: A driver that says when it is imported, and when its framework is.
LOUD = """
from amanda_core import DriverInfo, hookimpl
print("loud is imported")

@hookimpl
def amanda_driver_info():
    return DriverInfo("loud", ("toyframe",), ("loud/*/eager",), api=3)

@hookimpl
def amanda_framework_imported():
    print("loud is told")
"""


def test_what_a_flag_blocks_is_not_imported(tmp_path: Path) -> None:
    # `python -m amanda` imports the package `amanda` before it reads its flags.
    site = Site(tmp_path)
    (site.path / "loud.py").write_text(LOUD)
    distribution(site.path, "loud", "1.0", "[amanda.drivers]\nloud = loud\n")
    site.write("train.py", "import toyframe\nprint('trained')")
    ran = ["loud is imported", "loud is told", "trained"]
    assert site.run("train.py").stdout.splitlines() == ran
    done = site.amanda("run", "-t", "count", "--disable-plugins", "loud", "train.py")
    assert done.stdout.splitlines() == ["trained"], done.stderr


def test_the_tests_use_nothing_that_is_installed_beside(tmp_path: Path) -> None:
    distribution(tmp_path, "acme-drivers", "1.0", "[amanda.drivers]\nacme = acme\n")
    distribution(tmp_path, "plain", "1.0", "[console_scripts]\nplain = plain:main\n")
    assert with_plugins([str(tmp_path)]) == "acme-drivers"


@pytest.mark.slow
def test_no_driver_attaches_where_a_file_names_none(site: Site) -> None:
    site.write("plain/pyproject.toml", "[tool.amanda]\ndrivers = []\n")
    done = site.amanda("run", "-t", "count", "-o", "none", "plain/train.py")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "count was given no operator: " in done.stderr
    assert "pyproject.toml:2 lets no driver attach" in done.stderr
    assert json.loads((site.work / "none/count.json").read_text())["calls"] == {}
    # A higher source says otherwise.
    done = site.amanda("run", "-t", "count", "--drivers", "toy", "-o", "toy", "plain/train.py")
    assert json.loads((site.work / "toy/count.json").read_text())["calls"] == {"relu": 1}
