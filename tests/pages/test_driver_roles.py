"""Each driver has the file that docs/guides/writing-a-driver.md names for a role."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/writing-a-driver.md"
HEADING = "## Which file has which role\n"
#: Column of the table -> the driver's package.
PACKAGES = {
    "PyTorch": ROOT / "amanda_driver_torch/src/amanda_driver_torch",
    "TensorFlow": ROOT / "amanda_driver_tf/src/amanda_driver_tf",
    "JAX": ROOT / "amanda_driver_jax/src/amanda_driver_jax",
    "MXNet": ROOT / "amanda_driver_mxnet/src/amanda_driver_mxnet",
    "MindSpore": ROOT / "amanda_driver_mindspore/src/amanda_driver_mindspore",
    "ONNX Runtime": ROOT / "amanda_driver_onnxruntime/src/amanda_driver_onnxruntime",
    "NumPy": ROOT / "examples/driver_numpy/src/amanda_driver_tinytape",
}
#: The example has several roles in one file.
EXAMPLE = "NumPy"
#: What a framework does not need: the example is one, and inference has no gradients.
MISSING = {(EXAMPLE, "internals"), ("ONNX Runtime", "gradients")}

pytestmark = pytest.mark.one_interceptor


def roles() -> dict[str, dict[str, str]]:
    """Return the file of each role, by role and column."""
    section = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(head[2:], row[2:], strict=True)) for row in rows}


@pytest.mark.parametrize("driver", PACKAGES)
def test_each_role_has_its_file(driver: str) -> None:
    package = PACKAGES[driver]
    for role, files in roles().items():
        name = files[driver]
        if (driver, role) in MISSING:
            assert name == "none"
            continue
        if driver == EXAMPLE:
            assert (package / name).is_file(), role
            continue
        assert (package / name).is_dir() if name.endswith("/") else (package / name).is_file(), role
        stem = name.removesuffix("/").removesuffix(".py")
        assert stem.rpartition("_")[2] == role, name


@pytest.mark.parametrize("driver", [driver for driver in PACKAGES if driver != EXAMPLE])
def test_no_module_is_named_as_private(driver: str) -> None:
    """The package says what is public; a compiled extension has the name that setuptools gave."""
    package = PACKAGES[driver]
    found = [
        path.relative_to(package).as_posix()
        for path in package.rglob("_*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    folders = [path.name for path in package.rglob("_*") if path.is_dir()]
    assert found + [name for name in folders if name != "__pycache__"] == []


def test_all_roles_are_there() -> None:
    names = "plugin attachment facts vocabulary interception identity execution gradients internals"
    assert list(roles()) == names.split()
