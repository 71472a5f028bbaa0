"""`OnnxFile`: a model in a file of ONNX, for `amanda export`.

Owns the inputs of one run in files, and how a new model is checked and written.
"""

from __future__ import annotations

import math
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import onnx
from onnx import external_data_helper
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

from amanda_core.driver_kit import ModelFile
from amanda_core.interface import ConfigError, OutputError, ResultError
from amanda_driver_onnxruntime.graphs import is_random
from amanda_driver_onnxruntime.onnxruntime_internals import sessions
from amanda_driver_onnxruntime.onnxruntime_internals.values import dtype_of, fits

__all__ = ["OnnxFile"]

#: How much an output may differ by rounding, relative to its largest value; of models with weights
#: of 16 bits, ONNX Runtime computes neighbours in 32 bits, and rounds after the last one.
_ROUNDING = (2.0**-14, 2.0**-5)
_HALVES = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
_SEED = 0


class OnnxFile(ModelFile):
    """A model in a file.

    Args:
        path: The file.

    Raises:
        ConfigError: ONNX Runtime cannot make a session of it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self.model = _session(path)
        except Exception as error:  # What ONNX Runtime raises has no class in common.
            raise ConfigError(
                f"ONNX Runtime cannot read {path!r}: {error}",
                where="amanda export",
                fix="Look whether onnx.checker.check_model accepts the file",
            ) from error
        self._inputs = {one.name: one for one in self.model.get_inputs()}

    def example_inputs(self) -> dict[str, Any]:
        """Return random numbers of the types of the inputs; lengths that vary are 1."""
        generator, found = numpy.random.default_rng(_SEED), {}
        for name, one in self._inputs.items():
            dtype = dtype_of(one.type)
            if dtype is None or dtype.kind not in "biuf":
                raise ConfigError(
                    f"There are no random values of the input {name!r}, {one.type}",
                    where="amanda export",
                    fix="Give inputs with --inputs FILE.npz",
                )
            shape = [size if isinstance(size, int) else 1 for size in one.shape]
            if dtype.kind == "f":
                found[name] = generator.standard_normal(shape).astype(dtype)
            else:  # Whole numbers are often indices, and any table has a first row.
                found[name] = numpy.full(shape, dtype.kind == "b", dtype)
        return found

    def read_inputs(self, path: str) -> dict[str, Any]:
        """Return the arrays of the model's inputs by name, from an ``.npz`` or ``.npy`` file."""
        names = list(self._inputs)
        try:
            with open(path, "rb") as file:  # NumPy leaves that of a broken archive open.
                loaded = numpy.load(file, allow_pickle=False)
                if not isinstance(loaded, numpy.ndarray):
                    loaded = {name: loaded[name] for name in loaded.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise _not_inputs(path, f"cannot be read: {error}") from error
        if isinstance(loaded, numpy.ndarray) and len(names) != 1:
            raise _not_inputs(path, f"has one array, and the model has {len(names)} inputs")
        found = {names[0]: loaded} if isinstance(loaded, numpy.ndarray) else loaded
        if found.keys() != self._inputs.keys():
            given = ", ".join(found) or "no arrays"
            raise _not_inputs(path, f"has {given}, and the model has {', '.join(names)}")
        for name, value in found.items():
            if not fits(value, self._inputs[name].type):
                kind = self._inputs[name].type
                raise _not_inputs(path, f"has {value.dtype} for the input {name!r}, {kind}")
        return found

    def run(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Return the outputs of the model."""
        try:
            return list(self.model.run(None, dict(inputs)))
        except Exception as error:
            if not type(error).__module__.startswith("onnxruntime"):
                raise  # It is a tool's.
            raise ConfigError(
                f"The model does not run: {error}",
                where="amanda export",
                fix="Give inputs for which it runs, with --inputs FILE.npz",
            ) from error

    def write(
        self,
        program: onnx.ModelProto,
        path: str,
        runs: Sequence[Mapping[str, Any]],
        outputs: Sequence[Sequence[Any]],
    ) -> str:
        """Write a model if it is right; its weights stand in ``PATH.data`` if the old ones did."""
        folder, name = os.path.split(os.path.abspath(path))
        external = _external_files(self._path)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            new = os.path.join(made, name)
            _save(program, new, bool(external))
            refused = _refusal(new)
            if refused and not _refusal(self._path):
                raise ResultError(f"The new model is not valid: {refused}", where=path)
            try:
                session = _session(new)
                found = [session.run(None, dict(inputs)) for inputs in runs]
            except Exception as error:  # What ONNX Runtime raises has no class in common.
                raise ResultError(f"The new model does not run: {error}", where=path) from error
            compared = not is_random(program.graph)
            differences = [
                self._difference(program, *pair, path)
                for pair in zip(found, outputs, strict=True)
                if compared
            ]
            written = [os.path.join(os.path.dirname(path), one) for one in os.listdir(made)]
            _check_written(written, path, external)
            for one in sorted(os.listdir(made), reverse=True):  # The model itself comes last.
                os.replace(os.path.join(made, one), os.path.join(folder, one))
        checked = "onnx.checker refuses both models" if refused else "checked"
        if not compared:
            return f"{checked}; it draws random numbers, so it was run and not compared"
        if largest := max(differences):
            return (
                f"{checked}; it differs from the model under tools by at most {largest:.1e} of the "
                "largest value, since ONNX Runtime rounds otherwise in one session"
            )
        return f"{checked}, and equal bit for bit to the model under tools"

    def _difference(
        self, program: onnx.ModelProto, found: Sequence[Any], wanted: Sequence[Any], path: str
    ) -> float:
        """Return the largest difference of outputs, relative to the largest value of each.

        Raises:
            ResultError: It is more than rounding makes.
        """
        kinds = {one.data_type for one in program.graph.initializer}
        allowed = _ROUNDING[bool(kinds & _HALVES)]
        largest = 0.0
        for output, one, other in zip(self.model.get_outputs(), found, wanted, strict=True):
            difference = _difference(one, other)
            if difference > allowed:
                of = f" by {difference:.1e} of the largest value" if difference < math.inf else ""
                raise ResultError(
                    f"The new model computes another {output.name!r} than the model under tools"
                    f"{of}, so it was not written",
                    where=path,
                    fix="Leave out tools whose routines give different values each time",
                )
            largest = max(largest, difference)
        return largest


def _refusal(path: str) -> str:
    """Return what is wrong with a model, or an empty string."""
    try:
        onnx.checker.check_model(path)
    except onnx.checker.ValidationError as error:
        return str(error).partition("\n")[0]
    return ""


def _difference(one: Any, other: Any) -> float:
    """Return the largest difference, relative to the largest value; infinity if it is another one.

    It is 0 for the same bits only.
    """
    if isinstance(one, (list, dict)):
        if len(one) != len(other) or (isinstance(one, dict) and one.keys() != other.keys()):
            return math.inf
        pairs = [
            (one[key], other[key]) for key in (one if isinstance(one, dict) else range(len(one)))
        ]
        return max((_difference(*pair) for pair in pairs), default=0.0)
    if not isinstance(one, numpy.ndarray) or one.dtype.hasobject:
        return 0.0 if numpy.array_equal(one, other) else math.inf
    if one.dtype != other.dtype or one.shape != other.shape:
        return math.inf
    if one.tobytes() == other.tobytes():
        return 0.0
    if not numpy.issubdtype(one.dtype, numpy.floating):
        return math.inf
    new, old = one.astype(float), other.astype(float)
    differs = ~((new == old) | (numpy.isnan(new) & numpy.isnan(old)))
    largest = abs(old[numpy.isfinite(old)]).max(initial=0.0)
    with numpy.errstate(all="ignore"):
        found = abs(new - old)[differs].max(initial=numpy.finfo(float).tiny) / largest
    return float(found) if numpy.isfinite(found) else math.inf


def _session(path: str) -> InferenceSession:
    options = SessionOptions()
    # Fusions would round otherwise, and differently for the old and the new model.
    options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _save(program: onnx.ModelProto, path: str, is_external: bool) -> None:
    """Write a model, with large weights in another file if those of its source are."""
    weights = program.graph.initializer
    if is_external or sum(len(one.raw_data) for one in weights) > sessions.LARGEST:
        # `onnx.save_model` would look for that file in the current folder.
        for one in weights:
            if len(one.raw_data) >= sessions.LARGE:
                data = f"{os.path.basename(path)}.data"
                external_data_helper.set_external_data(one, data)
    onnx.save_model(program, path)


def _check_written(files: Iterable[str], path: str, external: Iterable[str]) -> None:
    """Refuse to replace files that do not belong to the model that was at a path."""
    replaces_model = os.path.exists(path)
    for file in filter(os.path.exists, files):
        if any(os.path.samefile(file, one) for one in external):
            raise OutputError(
                f"{file!r} has the weights of the model", fix="Name another file with -o"
            )
        if not replaces_model:
            raise OutputError(
                f"{file!r}, the file for the weights, is there already",
                fix="Name another file with -o, or remove that one",
            )


def _external_files(path: str) -> set[str]:
    """Return the files that hold the weights of the model in a file."""
    model = onnx.load_model(path, load_external_data=False)
    folder = os.path.dirname(os.path.abspath(path))
    return {
        os.path.join(folder, external_data_helper.ExternalDataInfo(one).location)
        for one in model.graph.initializer
        if external_data_helper.uses_external_data(one)
    }


def _not_inputs(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{path!r} {why}",
        where="amanda export",
        fix="Write the arrays of one run by the names of the model's inputs: "
        "numpy.savez(path, **{name: array})",
    )
