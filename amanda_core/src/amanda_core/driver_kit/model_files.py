"""`ModelFile`: a model that stands in a file, as commands use it.

Owns what a driver answers about such a model. How files are written and read is the driver's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["ModelFile"]


class ModelFile:
    """A model in a file. A driver with the hook ``amanda_model_file`` makes a subclass.

    Attributes:
        model: The model, as `amanda.exported` takes it.
    """

    model: Any

    def example_inputs(self) -> Any:
        """Return inputs of one run, made of what the model says of them.

        Raises:
            ConfigError: It does not say enough.
        """
        raise NotImplementedError

    def read_inputs(self, path: str) -> Any:
        """Return the inputs of one run from a file.

        Raises:
            ConfigError: The file is not of this form, or does not fit the model.
        """
        raise NotImplementedError

    def run(self, inputs: Any) -> Any:
        """Return the outputs of the model."""
        raise NotImplementedError

    def write(self, program: Any, path: str, runs: Sequence[Any], outputs: Sequence[Any]) -> str:
        """Check a program that `amanda.exported` returned, and write it.

        Nothing is written, or left, if the program is wrong.

        Args:
            program: The program.
            path: The file, which is replaced.
            runs: The inputs of some runs, which `amanda.exported` got, too.
            outputs: What the model returned for each under the tools.

        Returns:
            What was checked, in a few words.

        Raises:
            ResultError: The program is wrong, or computes something else.
        """
        raise NotImplementedError
