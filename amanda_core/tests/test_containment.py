"""Broken plugins end neither `import amanda` nor a command, whatever they raise and where."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda_core import DRIVER_API, DriverInfo, Finding, OpContext, Session, hookimpl
from amanda_core.config import factories, from_flags
from amanda_core.errors import AmandaError, AmandaWarning, BrokenToolError, DriverError
from amanda_core.interface.driver import DriverStatus
from amanda_core.plugins import discovery
from amanda_core.plugins.framework_imports import announce
from amanda_core.plugins.installed import COMMAND_GROUP
from amanda_core.plugins.preflight import preflight
from amanda_core.runtime.containment import described
from amanda_core.runtime.warning_locations import warn
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyAttachment, ToyDriver

from .conftest import Installed
from .making import DISTRIBUTION, Point, tool
from .site import Site, distribution
from .test_cli import call


class Unheard(BaseException):
    """A BaseException that is not an `Exception`, like some of pytest and of asyncio."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(5)


def exits() -> Any:
    sys.exit("not on this machine")


def unheard() -> Any:
    raise Unheard("x")


def unspeakable() -> Any:
    raise Unspeakable


RAISING = [exits, unheard, unspeakable]
GROUPS = [discovery.DRIVER_GROUP, discovery.PLUGIN_GROUP, discovery.TOOL_GROUP, COMMAND_GROUP]
COMMANDS = ["tools", "drivers", "doctor"]


@pytest.mark.parametrize("raising", RAISING)
@pytest.mark.parametrize("group", GROUPS)
def test_whatever_is_raised_at_import_ends_no_command(
    installed: Installed,
    capsys: pytest.CaptureFixture[str],
    raising: Callable[[], Any],
    group: str,
) -> None:
    installed.points += [
        Point("bad", raising, group, DISTRIBUTION),
        Point("toy", ToyDriver, dist=DISTRIBUTION),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmandaWarning)
        for command in COMMANDS:
            assert call(command, "--json") == int(command == "doctor")
            found = json.loads(capsys.readouterr().out)
            if command == "doctor":
                assert [f["of"] for f in found["findings"] if f["severity"] == "error"] == ["bad"]
                assert [driver["status"] for driver in found["drivers"]][-1] == "ok"
            elif group == (discovery.TOOL_GROUP if command == "tools" else discovery.DRIVER_GROUP):
                (bad,) = (one for one in found if one["name"] == "bad")
                assert bad["status"] == "broken"
                assert "cannot be loaded" in bad["error"]


def test_ctrl_c_while_plugins_are_found_is_the_programs_and_the_next_call_starts_afresh(
    installed: Installed,
) -> None:
    interrupts: Iterator[Any] = iter([KeyboardInterrupt, None])

    def made() -> Any:
        raised = next(interrupts)
        if raised is not None:
            raise raised
        return object()

    installed.points += [
        Point("toy", ToyDriver, dist=DISTRIBUTION),
        Point("slow", made, dist=DISTRIBUTION),
        Point("slow", made, discovery.PLUGIN_GROUP),
    ]
    with pytest.raises(KeyboardInterrupt):
        discovery.drivers()
    with pytest.warns(AmandaWarning):
        assert [driver.info.name for driver in discovery.drivers()] == ["toy"]


def test_a_plugin_that_asks_for_the_plugins_when_it_is_imported_is_refused(
    installed: Installed,
) -> None:
    def asks() -> Any:
        return discovery.drivers()

    installed.points += [Point("curious", asks), Point("toy", ToyDriver)]
    with pytest.warns(AmandaWarning, match="while they are being imported"):
        assert [driver.info.name for driver in discovery.drivers()] == ["toy"]


class Hooks(ToyDriver):
    """A driver with one hook that raises."""

    def __init__(self, hook: str, raising: Callable[[], Any]) -> None:
        super().__init__()
        self.hook, self.raising = hook, raising

    def fail(self, hook: str) -> None:
        if hook == self.hook:
            self.raising()

    @hookimpl
    def amanda_driver_info(self) -> DriverInfo:
        self.fail("amanda_driver_info")
        return self.info

    @hookimpl
    def amanda_preflight(self) -> list[Finding]:
        self.fail("amanda_preflight")
        return []

    @hookimpl
    def amanda_driver_status(self) -> DriverStatus:
        self.fail("amanda_driver_status")
        return DriverStatus("1", "toy", "There is one")

    @hookimpl
    def amanda_framework_imported(self) -> None:
        self.fail("amanda_framework_imported")

    @hookimpl
    def amanda_prepare_context(self, context: OpContext) -> None:
        self.fail("amanda_prepare_context")

    @hookimpl
    def amanda_attach(self, session: Session) -> ToyAttachment | None:
        self.fail("amanda_attach")
        return super().amanda_attach(session)

    def release(self, attachment: ToyAttachment) -> None:
        super().release(attachment)
        self.fail("detach")


@pytest.mark.parametrize("raising", RAISING)
@pytest.mark.parametrize("hook", ["amanda_driver_info", "amanda_preflight", "amanda_driver_status"])
def test_whatever_a_hook_raises_ends_no_command(
    installed: Installed,
    capsys: pytest.CaptureFixture[str],
    raising: Callable[[], Any],
    hook: str,
) -> None:
    installed.points.append(Point("toy", lambda: Hooks(hook, raising), dist=DISTRIBUTION))
    for command in COMMANDS:
        assert call(command) in (0, 1)
        assert "Traceback" not in capsys.readouterr().err


def test_a_driver_that_exits_while_it_prepares_itself_is_warned_about(
    installed: Installed,
) -> None:
    driver = Hooks("amanda_framework_imported", exits)
    driver.info = DriverInfo("toy", ("json",), ("toy/*/eager",), api=DRIVER_API)
    discovery.register(driver, "toy")
    with pytest.warns(AmandaWarning, match="could not prepare itself: SystemExit: not on this"):
        announce()


@pytest.mark.parametrize("hook", ["amanda_attach", "amanda_prepare_context", "detach"])
def test_a_hook_that_exits_while_tools_are_applied_is_an_error_that_says_so(
    installed: Installed, hook: str
) -> None:
    discovery.register(Hooks(hook, exits), "toy")
    found = toy.dispatch
    with (
        pytest.raises(DriverError, match="SystemExit: not on this machine"),
        amanda.apply(tool(lambda c: None)),
    ):
        toy.relu(toy.Value(1.0))
    assert toy.dispatch is found


class StrangeAttributes:
    """A plugin with an attribute that pluggy cannot read."""

    @property
    def amanda_driver_info(self) -> Any:
        return exits()


def test_a_plugin_whose_attributes_cannot_be_read_is_skipped(installed: Installed) -> None:
    installed.points += [Point("odd", StrangeAttributes), Point("toy", ToyDriver)]
    with pytest.warns(AmandaWarning, match="'odd' does not fit the hooks: SystemExit"):
        assert [driver.info.name for driver in discovery.drivers()] == ["toy"]


def info(**changed: Any) -> Any:
    fields = {"name": "toy", "modules": ("toy",), "namespaces": ("toy/*/eager",)}
    return DriverInfo(**{**fields, "api": DRIVER_API, **changed})


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("toy", "by a str and not a DriverInfo"),
        (info(api=str(DRIVER_API)), "api='3', not a whole number"),
        (info(name="a/b"), "name='a/b'"),
        (info(modules="torch"), "modules='torch', not a tuple of texts"),
        (info(namespaces=(1,)), "namespaces=.*not a tuple"),
        (info(capabilities="eager"), "capabilities='eager'"),
        (info(capabilities={"eager": "gradients"}), "capabilities="),
        (info(vocabulary=["relu"]), "vocabulary="),
    ],
)
def test_a_description_of_another_form_is_refused_at_once(
    installed: Installed, capsys: pytest.CaptureFixture[str], answer: Any, told: str
) -> None:
    plugin = ToyDriver()
    plugin.info = answer
    installed.points.append(Point("odd", lambda: plugin, dist=DISTRIBUTION))
    for command in COMMANDS:
        assert call(command) in (0, 1)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        if command == "drivers":
            assert re.search(told, out)


def test_the_interface_is_compared_before_the_form(installed: Installed) -> None:
    class Other:
        api = DRIVER_API + 1

    plugin = ToyDriver()
    plugin.info = Other()  # type: ignore[assignment]
    with pytest.raises(DriverError, match=rf"has driver API {DRIVER_API + 1}, but this core has"):
        discovery.register(plugin, "toy")


@pytest.mark.parametrize("answer", [7, "all is well", [7], [Finding("bad", "x")]])  # type: ignore[arg-type]
def test_findings_of_another_form_are_a_finding(installed: Installed, answer: Any) -> None:
    class Odd(ToyDriver):
        @hookimpl
        def amanda_preflight(self) -> Any:
            return answer

    (found,) = preflight(discovery.register(Odd(), "toy"))
    assert (found.severity, found.fix.split(",")[0]) == ("error", "Correct its amanda_preflight")


# Tools.


class Exiting(amanda.Tool):
    def __init__(self, when: str = "") -> None:
        if when == "made":
            sys.exit(0)


class Unsigned:
    """A factory whose parameters cannot be inspected."""

    @property
    def __signature__(self) -> Any:
        return exits()

    def __call__(self) -> amanda.Tool:
        return amanda.Tool()


def test_a_tool_that_exits_is_broken_and_not_the_end(installed: Installed) -> None:
    group = discovery.TOOL_GROUP
    installed.points += [
        Point("early", exits, group, DISTRIBUTION),
        Point("late", lambda: Exiting, group, DISTRIBUTION),
    ]
    settings = from_flags(["early", "late:when=made"]).tools
    with pytest.raises(BrokenToolError, match="cannot be loaded: SystemExit: not on this"):
        factories.make(settings["early"])
    with pytest.raises(AmandaError, match="refuses its options: SystemExit: 0"):
        factories.make(settings["late"])


def test_a_tool_whose_options_cannot_be_read(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.points.append(Point("odd", Unsigned, discovery.TOOL_GROUP, DISTRIBUTION))
    assert call("tools", "odd") == 2
    assert "does not declare its options" in capsys.readouterr().err


# Programs.

BAD = {
    "drivers": "import sys\nprint('noise')\nsys.exit('no drivers today')\n",
    "plugins": "class Stop(BaseException): pass\nraise Stop('no plugins today')\n",
    "tools": "import sys\nprint('noise')\nsys.exit(0)\n",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    entries = ""
    for group, text in BAD.items():
        (made.path / f"bad_{group}.py").write_text(text)
        entries += f"[amanda.{group}]\nbad = bad_{group}:it\n"
    distribution(made.path, "bad", "1.0", entries)
    made.write("train.py", "import toyframe\ntoyframe.relu(toyframe.Value(1.0))\nprint('trained')")
    return made


@pytest.mark.parametrize("flags", [[], ["-W", "error"]])
def test_a_program_that_imports_amanda_goes_on(site: Site, flags: list[str]) -> None:
    retry = "import amanda_core.plugins.discovery as d\nprint([x.info.name for x in d.drivers()])"
    done = site.python(*flags, "-c", f"import amanda\nprint('imported')\n{retry}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["noise", "imported", "['toy']"]
    assert "'bad' of bad 1.0 cannot be loaded: SystemExit: no drivers today" in done.stderr
    assert "'bad' of bad 1.0 cannot be loaded: Stop: no plugins today" in done.stderr


def test_an_import_that_fails_under_warnings_as_errors_is_not_amandas(
    tmp_path: Path,
) -> None:
    # What a driver prepares fails while the program imports its framework.
    site = Site(tmp_path)
    plugin = site.path / "toyplugin.py"
    hook = "\n@hookimpl\ndef amanda_framework_imported():\n    raise OSError('no')\n"
    plugin.write_text(plugin.read_text() + hook)
    program = "import amanda\nimport toyframe\nprint(toyframe.relu)"
    done = site.python("-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert "could not prepare itself: OSError: no" in done.stderr


@pytest.mark.parametrize(
    "command", [["tools"], ["drivers"], pytest.param(["doctor"], marks=pytest.mark.slow)]
)
def test_what_plugins_print_is_not_in_what_programs_read(site: Site, command: list[str]) -> None:
    program = f"from amanda_core.cli import main; main({[*command, '--json']!r})"
    done = site.python("-c", program)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert "noise" in done.stderr or command == ["drivers"]
    if command == ["tools"]:
        assert [(t["name"], t["error"]) for t in found if t["distribution"] == "bad"] == [
            ("bad", "The tool 'bad' of bad 1.0 cannot be loaded: SystemExit: 0")
        ]


@pytest.mark.slow
def test_a_run_beside_them_goes_on_and_one_of_them_is_refused(site: Site) -> None:
    done = site.run("train.py")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "trained"), done.stderr
    done = site.amanda("run", "-t", "bad", "-o", "out2", "train.py")
    assert done.returncode == 2
    assert "trained" not in done.stdout
    assert "cannot be loaded: SystemExit: 0" in done.stderr


def test_a_tool_that_exits_when_it_is_asked_for_results_loses_those_of_no_other(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.write(
        "exiting.py",
        "import sys\nimport toytools\n\nclass Exiting(toytools.Counter):\n"
        "    def result(self):\n        sys.exit(0)\n",
    )
    site.write("train.py", "import toyframe\ntoyframe.relu(toyframe.Value(1.0))\n")
    done = site.amanda("run", "-t", "exiting.py:Exiting", "-t", "count", "-o", "out", "train.py")
    assert done.returncode == 1
    assert "the result of 'Exiting' is not written: SystemExit: 0" in done.stderr
    written = [path.name for path in (site.work / "out").iterdir() if path.name[0] != "."]
    assert written == ["count.json"]


def test_a_driver_that_cannot_say_what_it_does_not_see_loses_no_result(tmp_path: Path) -> None:
    site = Site(tmp_path)
    driver = site.path / "toyland/driver.py"
    driver.write_text(driver.read_text().replace("return DECLARATIONS.gaps()", "return [1 / 0]"))
    site.write("train.py", "import toyframe\ntoyframe.relu(toyframe.Value(1.0))\n")
    done = site.run("train.py")
    assert done.returncode == 0, done.stderr
    assert "what a driver did not see is not known: ZeroDivisionError" in done.stderr
    assert (site.work / "out/count.json").is_file()


def test_an_exception_without_a_message_is_described() -> None:
    assert described(Unspeakable()) == "Unspeakable (its message cannot be shown: SystemExit)"


def test_a_warning_that_is_an_error_is_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("mind the gap", importing=True)
        with pytest.raises(AmandaWarning, match="mind the gap"):
            warn("mind the gap")
    assert capsys.readouterr().err == "AmandaWarning: mind the gap\n"
    with pytest.warns(AmandaWarning, match="mind the gap"):
        warn("mind the gap", importing=True)
