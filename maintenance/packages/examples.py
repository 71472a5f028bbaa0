"""Build the examples and test them as users would install them: `nox -s examples`.

They are examples of others' distributions: a driver without any of our frameworks installed, and a
tool with each of them. Creates everything that it needs in a temporary folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from .environments import ROOT, Environment, build

DRIVER, TOOL = ROOT / "examples" / "driver_numpy", ROOT / "examples" / "tool_activation_ranges"
NO_DRIVER = """
import activation_ranges, amanda
try:
    amanda.attach(activation_ranges.ActivationRanges())
except amanda.AmandaError as error:
    assert "[missing-driver]" in str(error), error
else:
    raise AssertionError("tools are applied without a driver")
"""
SEES_A_RELU = """
import amanda
seen, tool = [], amanda.Tool()
tool.add_inst_for_op(lambda context: seen.append(context["type"]))
with amanda.apply(tool):
    {program}
assert "relu" in seen, seen
"""
#: Framework -> folder of its driver, what is installed, a program that runs a relu.
FRAMEWORKS = {
    "torch": ("amanda_driver_torch", "torch", "import torch; torch.relu(torch.ones(1))"),
    "tensorflow": (
        "amanda_driver_tf",
        "tensorflow-cpu",
        "import tensorflow; tensorflow.nn.relu(tensorflow.ones(1))",
    ),
}


def main() -> None:
    """Build, then check each environment."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        wheels = root / "wheels"
        drivers = [ROOT / member for member, _, _ in FRAMEWORKS.values()]
        for source in (ROOT / "amanda_core", *drivers, DRIVER, TOOL):
            build(source, wheels)
        alone(Environment(root / "alone", wheels))
        for framework in FRAMEWORKS:
            beside(framework, Environment(root / framework, wheels))
    print("All well.")


def alone(environment: Environment) -> None:
    """Check the core with the example driver, without any framework that we have a driver for."""
    environment.install("amanda-core", "amanda-driver-tinytape[test]")
    environment.lacks("torch", "tensorflow", "amanda_driver_torch")
    report = environment.work / "conformance.json"
    environment.test(DRIVER, "-p", "amanda_core.testing.plugin", f"--amanda-report={report}")
    print(report.with_suffix(".md").read_text(encoding="utf-8"))
    # Two who know nothing of one another.
    environment.install("amanda-activation-ranges[test]")
    environment.test(TOOL)
    environment.uninstall("amanda-driver-tinytape")
    environment.python(NO_DRIVER)
    environment.install("amanda-driver-tinytape")
    environment.uninstall("amanda-activation-ranges")
    environment.test(DRIVER, "-k", "seen or gradients")


def beside(framework: str, environment: Environment) -> None:
    """Check the core with a framework, its driver and the example tool."""
    member, package, program = FRAMEWORKS[framework]
    own = member.replace("_", "-")
    environment.install("amanda-core[cli]", own, "amanda-activation-ranges[test]", package)
    environment.lacks("tinytape", *(FRAMEWORKS.keys() - {framework}))
    environment.test(TOOL)
    environment.uninstall("amanda-activation-ranges")
    environment.python(SEES_A_RELU.format(program=program))
    environment.install("amanda-activation-ranges")
    environment.uninstall(own)
    environment.python(f"{program}\n{NO_DRIVER}")


if __name__ == "__main__":
    main()
