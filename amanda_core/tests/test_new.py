"""`amanda new`: what it makes passes its own tests, and it overwrites and misnames nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import importlib_metadata
import pytest
from hypothesis import given, strategies as st

from amanda_core import DRIVER_API
from amanda_core.cli import app, new
from amanda_core.errors import ConfigError

from .site import OTHERS, Site, distribution

KINDS = ["tool", "driver"]


def call(*arguments: str) -> int:
    outcome = app.parse(["new", *arguments])
    assert isinstance(outcome, int)
    return outcome


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Made:
    """What `amanda new` makes, as if it were installed."""

    def __init__(self, site: Site, kind: str) -> None:
        self.site = site
        assert site.amanda("new", kind, "op-report").returncode == 0
        self.folder = site.work / f"amanda-{kind}-op-report"
        self.project = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        name, points = self.project["name"], self.project["entry-points"]
        assert name == self.folder.name
        (group,) = points
        (point,) = (f"{key} = {value}" for key, value in points[group].items())
        distribution(site.path, name, self.project["version"], f"[{group}]\n{point}\n")
        (self.package,) = (self.folder / "src").iterdir()
        (site.path / self.package.name).symlink_to(self.package)

    def test(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run its own tests."""
        pytest_ = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
        # Its tests have the toy framework's driver themselves.
        environment = self.site.environment(AMANDA_DISABLE_PLUGINS=f"{OTHERS},amanda-driver-toy")
        return subprocess.run(
            [*pytest_, "-W", "error", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def change(self, name: str, *changes: tuple[str, str]) -> None:
        """Replace texts in a file of its package, each of which is there."""
        path = self.package / name
        text = path.read_text()
        for old, new_ in changes:
            assert old in text
            text = text.replace(old, new_)
        path.write_text(text)


def test_what_is_made_passes_its_own_tests(kind: str, tmp_path: Path) -> None:
    site = Site(tmp_path)
    driver_or_tool = Made(site, kind)
    made, project = driver_or_tool.folder, driver_or_tool.project
    done = driver_or_tool.test()
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= (40 if kind == "driver" else 4)
    if kind == "driver":
        # It shows gradients; what it leaves out is named.
        assert "does not declare 'gradients'" not in done.stdout
        assert "does not declare 'aligned_gradients'" in done.stdout
        # The kit imports its framework under tools, in a process of its own.
        assert "is not installed" not in done.stdout
        sources = [*made.rglob("*.py"), *made.rglob("*.toml")]
        marked = [path.name for path in sources if "CHANGE" in path.read_text()]
        roles = ["attachment", "execution", "facts", "gradients", "identity", "plugin"]
        files = [f"{role}.py" for role in [*roles, "vocabulary", "backend"]]
        assert sorted(marked) == sorted(["driver.toml", *files])
        # An underscored name of Amanda's is found by the test that came with it.
        wrong = ("self.session = session", "self.session = session\n        session._step")
        driver_or_tool.change("attachment.py", wrong)
        again = driver_or_tool.test("-k", "public_names")
        assert "_step" in again.stdout
        assert again.returncode == 1
    listed = site.amanda(f"{kind}s")
    assert f"amanda-{kind}-op-report 0.1.0" in listed.stdout
    if kind == "tool":
        # The one that wants a framework says which.
        assert "1 skipped" in done.stdout
        assert "needs PyTorch and its driver" in done.stdout
        site.write("train.py", "import toyframe\ntoyframe.relu(toyframe.Value(1.0))\n")
        ran = site.amanda("run", "-t", "op-report", "-o", "out", "train.py")
        assert ran.returncode == 0, ran.stderr
        shown = site.amanda("show", "out/op-report.json")
        assert shown.stdout.splitlines()[0] == "op-report.json: op-report/1"
        assert shown.stdout.splitlines()[-1].split() == ["relu", "1"]
    # What its README says is installed is what the commands that it shows need.
    extras = project["optional-dependencies"]["test"]
    assert any(requirement.startswith("amanda-core[cli]") for requirement in extras)


def test_a_driver_passes_after_its_part_with_gradients_is_deleted(tmp_path: Path) -> None:
    """As the docstring of that part says."""
    made = Made(Site(tmp_path), "driver")
    part = made.package / "gradients.py"
    said = " ".join(part.read_text().split())
    assert "delete this module, its import and its call in `execution`, and `gradients`" in said
    part.unlink()
    lines = (made.package / "execution.py").read_text().splitlines()
    called = next(i for i, line in enumerate(lines) if "watch(self.session" in line)
    assert "if self.session.wants_backward" in lines[called - 1]
    del lines[called - 1 : called + 1]
    left = [line for line in lines if "gradients import watch" not in line]
    assert len(left) == len(lines) - 1
    (made.package / "execution.py").write_text("\n".join(left))
    made.change("driver.toml", ("facts gradients ", "facts "))
    done = made.test()
    assert done.returncode == 0, done.stdout
    assert "does not declare 'gradients'" in done.stdout


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("attachment.py", ("        self.route(", "        _ = ("), "Let the attachment replace"),
        (
            "driver.toml",
            ('mul = "multiply"', 'tan = "add"\nsin = "relu"'),
            "Seen were multiply (op_report/1.0/eager, in the zone model), add (op_report",
        ),
    ],
)
def test_a_driver_that_sees_no_operator_gets_one_message(
    file: str, change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    made = Made(Site(tmp_path), "driver")
    made.change(file, change)
    done = made.test()
    assert "No operator of the types add, mul, relu was seen" in done.stdout
    assert said in done.stdout
    assert "AssertionError" not in done.stdout
    assert re.search(r"\n2 passed, \d+ skipped, 1 error in", done.stdout), done.stdout[-200:]
    assert done.returncode == 1


def test_links_in_what_is_made_lead_to_pages_that_exist(kind: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    core = tomllib.loads((root / "amanda_core" / "pyproject.toml").read_text())["project"]
    pages = core["urls"]["Documentation"]
    assert call(kind, "mine", "-o", str(tmp_path)) == 0
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    links = [link.rstrip(".") for text in texts for link in re.findall(r"https?://[^\s)>]+", text)]
    assert len(links) >= 2
    for link in links:
        assert link.startswith(pages), link
        page = link.removeprefix(pages).rstrip("/") or "README"
        assert (root / "docs" / f"{page}.md").is_file(), link


@pytest.mark.slow
def test_what_is_made_is_typed_and_in_form(kind: str, tmp_path: Path) -> None:
    assert call(kind, "op-report", "-o", str(tmp_path)) == 0
    made = tmp_path / f"amanda-{kind}-op-report"
    (made / "ruff.toml").write_text(
        'line-length = 100\nsrc = ["src", "tests"]\n'
        'lint.select = ["B", "E", "F", "I", "RUF", "UP", "SIM", "PT"]\n'
    )
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."],
            cwd=made,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    config = made / "mypy.ini"
    config.write_text("[mypy]\nstrict = true\nmypy_path = src:tests\n")
    files = [str(path) for path in made.rglob("*.py")]
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(config)]
    done = subprocess.run(
        [*mypy, "--cache-dir", str(tmp_path / "cache"), *files],
        cwd=made,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_a_driver_writes_down_the_interface_that_it_is_made_for(tmp_path: Path) -> None:
    # Read from the installed core it would agree with every core.
    assert call("driver", "mine", "-o", str(tmp_path)) == 0
    package = tmp_path / "amanda-driver-mine/src/amanda_driver_mine"
    assert f"\napi = {DRIVER_API}  # " in (package / "driver.toml").read_text()
    assert not [path for path in package.glob("*.*") if "DRIVER_API" in path.read_text()]


def test_the_files_are_listed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(kind, "mine", "--output", str(tmp_path / "deep/er")) == 0
    out, err = capsys.readouterr()
    listed = [Path(line) for line in out.splitlines()]
    assert all(path.is_file() for path in listed)
    assert sorted(listed) == sorted(p for p in tmp_path.rglob("*") if p.is_file())
    assert not [path for path in listed if "$" in path.read_text()]
    assert 'pip install -e ".[test]" && pytest' in err


def test_nothing_is_overwritten(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"amanda-{kind}-mine"
    for is_link in (False, True):
        if is_link:
            folder.symlink_to(tmp_path / "absent")
        else:
            folder.mkdir()
        assert call(kind, "mine", "-o", str(tmp_path)) == 2
        assert f"{str(folder)!r} already exists. Remove it, or name another folder with -o" in (
            capsys.readouterr().err
        )
        if is_link:
            folder.unlink()
        else:
            folder.rmdir()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert call("tool", "mine", "-o", str(tmp_path / "file")) == 2
    assert "cannot be written: Not a directory. [bad-output]" in capsys.readouterr().err


def test_an_installed_name_is_not_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Metadata is spelt in many ways, and some of it cannot be read at all.
    mine = SimpleNamespace(name="Amanda_driver.mine")
    found = [SimpleNamespace(name=None), SimpleNamespace(), mine]
    monkeypatch.setattr(importlib_metadata, "distributions", lambda: found)
    assert call("driver", "mine", "-o", str(tmp_path)) == 2
    assert "'amanda-driver-mine' is already installed. Where: NAME." in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "/x", "a/b", "a.b", "a_b", "a b", "a;b", "a\n", "a\0b"),
        *("A", "ä", "1a", "-a", "a-", "a--b", "$package", "a" * 41),
    ],
)
def test_names_that_are_none(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(kind, "-o", str(tmp_path), "--", name) == 2
    said = capsys.readouterr().err
    assert f"is not a valid name for a {kind}. Where: NAME. Use lower-case" in said
    assert not list(tmp_path.iterdir())


@given(st.text(max_size=45))
def test_any_name_makes_names_of_python_or_an_error(name: str) -> None:
    try:
        words = new.words_of("tool", name)
    except ConfigError:
        return
    assert all(words[key].isidentifier() for key in ("package", "class_name", "stem"))
    assert re.fullmatch(r"[a-z0-9-]+", words["distribution"])
