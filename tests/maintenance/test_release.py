"""What a release depends on agrees: versions, Pythons, extras, recipes and hosted workflows."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `maintenance` lies in the root, which `-P` hides.

from maintenance.packages import release  # noqa: E402

pytestmark = pytest.mark.one_interceptor

EXTRA = re.compile(r"^([\w-]+)(?:\[([\w,-]+)\])?")


def minors(classifiers: list[str]) -> list[int]:
    found = (re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", c) for c in classifiers)
    return [int(match[1]) for match in found if match]


def workflow(name: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text("utf-8"))


def test_versions_are_in_lockstep_with_each_other_and_the_changelog() -> None:
    version = release.agreed_version()
    assert release.agreed_version(f"v{version}") == version
    with pytest.raises(SystemExit, match="The tag is v9"):
        release.agreed_version("v9")
    major, minor, _ = version.split(".")
    own = {member.replace("_", "-") for member in release.MEMBERS}
    for member in release.MEMBERS:
        project = release.project(member)
        extras = project.get("optional-dependencies", {}).values()
        for requirement in [*project.get("dependencies", ()), *(r for e in extras for r in e)]:
            name = EXTRA.match(requirement)
            assert name is not None
            if name[1] in own:
                assert requirement.endswith(f">={major}.{minor},<{major}.{int(minor) + 1}")


def test_all_members_say_the_same_of_python() -> None:
    # TensorFlow has no build for 3.14, MXNet's last one is for 3.11, MindSpore's for 3.12.
    newest = {"amanda_driver_tf": 13, "amanda_driver_mxnet": 11, "amanda_driver_mindspore": 12}
    for member in release.MEMBERS:
        project = release.project(member)
        assert project["requires-python"] == f">=3.{release.PYTHONS[0]}"
        last = newest.get(member, release.PYTHONS[-1])
        expected = [minor for minor in release.PYTHONS if minor <= last]
        assert minors(project["classifiers"]) == expected, member
    for member in release.NATIVE:
        config = tomllib.loads((ROOT / member / "pyproject.toml").read_text("utf-8"))
        braces = ",".join(str(minor - 10) for minor in release.PYTHONS)
        build = config["tool"]["cibuildwheel"]["build"]
        assert build == f"cp31{{{braces}}}-manylinux_x86_64"
    pythons = workflow("matrix")["jobs"]["python"]["strategy"]["matrix"]["python"]
    assert pythons == [f"3.{minor}" for minor in release.PYTHONS]


def test_the_extras_of_the_meta_distribution_exist() -> None:
    known = {member.replace("_", "-"): release.project(member) for member in release.MEMBERS}
    meta = known["amanda-dnn"]
    for requirements in [meta["dependencies"], *meta["optional-dependencies"].values()]:
        for requirement in requirements:
            found = EXTRA.match(requirement)
            assert found is not None
            extras = set(filter(None, (found[2] or "").split(",")))
            assert extras <= known[found[1]].get("optional-dependencies", {}).keys(), requirement


def test_recipes_require_what_the_distributions_do() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    #: Where a name on conda-forge is another one than on PyPI.
    renamed = {"python-xxhash": "xxhash", "pytorch": "torch"}
    recipes = sorted((ROOT / "packaging/conda").glob("*/recipe.yaml"))
    # All but MXNet and MindSpore, which conda-forge has not.
    assert len(recipes) == len(release.MEMBERS) - 2
    for path in recipes:
        recipe = yaml.safe_load(path.read_text("utf-8"))
        name = recipe["package"]["name"]
        project = release.project(name.replace("-", "_"))
        assert recipe["context"]["version"] == project["version"]
        given = [line.replace(" ", "", 1) for line in recipe["requirements"]["run"]]
        given = [line for line in given if not line.startswith("python>") and line != "python"]
        given = [renamed.get(m[0], m[0]) + line[m.end() :] for line in given for m in [match(line)]]
        extras = project.get("optional-dependencies", {})
        added = {"amanda-core": extras.get("cli"), "amanda-driver-tf": extras.get("tensorflow")}
        added["amanda-driver-jax"] = extras.get("jax")
        wanted = [*project["dependencies"], *(added.get(name) or ())]
        # The core's package has the command line.
        assert sorted(given) == sorted(line.replace("[cli]", "") for line in wanted), name


def match(requirement: str) -> re.Match[str]:
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return found


def test_workflows_run_sessions_that_exist_and_all_of_ci() -> None:
    sessions = set(
        re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    )
    texts = {path.stem: path.read_text("utf-8") for path in ROOT.glob(".github/workflows/*.yml")}
    assert {"tests", "nightly", "matrix", "canary", "release"} <= texts.keys()
    for name, text in texts.items():
        named = set(re.findall(r"nox -s (\w+)", text))
        assert named <= sessions, name
    matrix = workflow("nightly")["jobs"]["rest"]["strategy"]["matrix"]
    assert set(matrix["session"]) <= sessions
    first = (ROOT / ".ci/run").read_text("utf-8").splitlines()[-2]
    assert first in (ROOT / "README.md").read_text("utf-8")
    assert first in texts["tests"]
    assert ".ci/run" in texts["nightly"]


def test_pre_commit_checks_with_the_version_of_lint() -> None:
    found = re.search(
        r"ruff-pre-commit\n    rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text()
    )
    assert found is not None
    assert f"ruff=={found[1]}\n" in (ROOT / "constraints.txt").read_text("utf-8")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130
