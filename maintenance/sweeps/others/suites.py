"""Suites of tests: their files, their frameworks, and where they come from."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from .running import TestFile


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of one framework or library.

    Attributes:
        files: Pattern of a file, relative to the root -> run only each n-th of its tests. A file
            that matches several patterns belongs to the first.
        package: Installed package whose version is that of the tests, or that contains them.
        folder: Path of the root in the folder given by `--from`.
        shipped: Whether the tests come with the installed package.
        variables: Environment variables that the tests need.
        alone: Whether to copy each file into a folder of its own; see `TestFile`.
        beside: Names of files that are copied with a file in their folder.
        left_out: Pattern of a file -> why it is not run.
        about: Which copy of the tests it is, if these are not the authors' own files.
    """

    files: Mapping[str, int]
    package: str
    folder: str = ""
    shipped: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alone: bool = False
    beside: tuple[str, ...] = ()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    about: str = ""

    def root(self, source: Path | None) -> Path:
        """Return the folder to which paths are relative."""
        if self.shipped:
            found = importlib.util.find_spec(self.package)
            if found is None or found.origin is None:
                raise SystemExit(f"{self.package} is not installed")
            return Path(found.origin).parents[1]
        if source is None:
            raise SystemExit("These tests are not in an installed package: give --from FOLDER")
        inside = source / self.folder
        return (inside if inside.is_dir() else source).resolve()

    def test_files(self, source: Path | None, only: str, every: int) -> Iterator[TestFile]:
        """Yield the files whose path contains `only`; `every` replaces the listed steps unless it
        is 0.
        """
        root = self.root(source)
        seen = set()
        for pattern, step in self.files.items():
            for path in sorted(root.glob(pattern)):
                name = path.relative_to(root).as_posix()
                if name in seen or only not in name or self._left_out(path.relative_to(root)):
                    continue
                seen.add(name)
                yield TestFile(
                    name,
                    root,
                    every or step,
                    self.alone,
                    self.variables,
                    self.beside,
                    compiles=self.package != "tensorflow",
                )

    def _left_out(self, path: Path) -> bool:
        return any(path.match(pattern) for pattern in self.left_out)


def commit(source: Path | None) -> str:
    """Return the commit of a folder of sources, or an empty string."""
    if source is None:
        return ""
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


TORCH = Suite(
    {
        "test_sparse.py": 4,
        "test_autograd.py": 1,
        "test_functionalization.py": 1,
        "test_nn.py": 3,
        "test_modules.py": 5,
        "test_view_ops.py": 1,
        "test_optim.py": 4,
        "test_indexing.py": 1,
        "test_fake_tensor.py": 1,
        "test_sparse_csr.py": 12,
        "test_torch.py": 3,
        "test_transformers.py": 12,
        "test_jit.py": 4,
        "test_fx.py": 4,
        "test_dataloader.py": 1,
        "test_ops.py": 200,
        "test_namedtensor.py": 1,
        "test_nestedtensor.py": 8,
        "test_reductions.py": 20,
        "test_shape_ops.py": 4,
        "test_tensor_creation_ops.py": 4,
        "test_type_promotion.py": 4,
        "functorch/test_eager_transforms.py": 2,
        "functorch/*.py": 1,
        "autograd/*.py": 1,
        "nn/*.py": 1,
        "optim/*.py": 3,
        "test_functional_optim.py": 1,
        "dynamo/test_export.py": 4,
        "dynamo/test_misc.py": 6,
        "dynamo/*.py": 3,
        "_inductor/test_cpu_compile.py": 1,
        "fx/*.py": 2,
        "jit/*.py": 2,
        "distributed/test_local_tensor.py": 1,
        "distributed/test_device_mesh.py": 1,
        "distributed/test_functional_differentials.py": 1,
        "distributed/test_store_api.py": 1,
        "distributed/test_c10d_*.py": 1,
    },
    package="torch",
    folder="test",
    # Some files use the substitute for the other device without importing it.
    variables={"PYTORCH_PRINT_REPRO_ON_FAILURE": "0", "PYTEST_ADDOPTS": "-p torch_npu"},
    about="copies of PyTorch's tests, made for another device, in `Ascend/pytorch`; what in them "
    "needs that device or another release of PyTorch fails plain",
)
#: What the other copies lack. `distributed_test`, which `test_distributed_spawn` runs in several
#: processes, is that of the installed package.
TORCH_2_1 = Suite(
    {
        "distributed/test_distributed_spawn.py": 12,
        "distributed/test_c10d_gloo.py": 12,
        "distributed/test_c10d_spawn_gloo.py": 4,
        "distributed/test_functional_api.py": 2,
        "distributed/test_multi_threaded_pg.py": 2,
        "inductor/test_cpu_repro.py": 4,
        "inductor/test_torchinductor.py": 40,
        "inductor/test_pattern_matcher.py": 4,
        "inductor/test_fused_attention.py": 2,
        "inductor/*.py": 4,
        "jit/*.py": 12,
        "test_transformers.py": 200,
        "test_foreach.py": 100,
        "test_linalg.py": 40,
        "distributions/*.py": 8,
        "functorch/test_vmap.py": 120,
        "functorch/test_ops.py": 2000,
        "functorch/test_control_flow.py": 4,
        "functorch/test_functionalize.py": 40,
        "functorch/test_aotdispatch.py": 20,
        "export/test_export.py": 1,
        "dynamo/test_export.py": 12,
        "dynamo/test_repros.py": 20,
        "dynamo/test_functions.py": 40,
        "dynamo/test_modules.py": 20,
        "dynamo/test_ctx_manager.py": 4,
        "dynamo/*.py": 4,
    },
    package="torch",
    folder="test",
    variables={
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        "PYTEST_ADDOPTS": "--noconftest -p older_torch",
        "BACKEND": "gloo",
        "WORLD_SIZE": "2",
        "TEMP_DIR": tempfile.gettempdir(),
    },
    about="a copy of PyTorch's repository of April 2023, `yakov-helm/pytorch_exp`; what in it "
    "needs that release of PyTorch fails plain",
)
#: Further files, among them those of the compiler; what is for the other device is skipped.
TORCH_XPU = Suite(
    {
        "dynamo/test_misc_xpu.py": 20,
        "dynamo/test_recompiles_xpu.py": 1,
        "dynamo/test_regional_inductor_xpu.py": 6,
        "dynamo/test_wrap_inductor_compiled_regions_xpu.py": 4,
        "dynamo/*.py": 4,
        "higher_order_ops/*.py": 4,
        "export/test_export_xpu.py": 20,
        "export/test_serialize_xpu.py": 8,
        "export/test_experimental_xpu.py": 4,
        "export/test_passes_xpu.py": 4,
        "functorch/test_eager_transforms_xpu.py": 8,
        "functorch/test_control_flow_xpu.py": 40,
        "functorch/test_aotdispatch_xpu.py": 40,
        "functorch/test_aot_joint_with_descriptors_xpu.py": 2,
        "functorch/test_ac_xpu.py": 2,
        "functorch/test_memory_efficient_fusion_xpu.py": 2,
        "test_transformers_xpu.py": 400,
    },
    package="torch",
    folder="test/xpu",
    variables={"PYTORCH_PRINT_REPRO_ON_FAILURE": "0"},
    alone=True,
    beside=("testing_xpu.py",),
    about="copies of PyTorch's tests, made for one more device, in `intel/torch-xpu-ops`; what in "
    "them needs another release of PyTorch fails plain",
)
KERAS = Suite(
    {
        # Folders, whose tests run in one process, since to import Keras takes longer than most.
        **{f"keras/src/layers/{name}": 8 for name in ("attention", "convolutional", "rnn")},
        **{f"keras/src/layers/{name}": 12 for name in ("core", "normalization", "regularization")},
        **{f"keras/src/layers/{name}": 40 for name in ("merging", "pooling", "reshaping")},
        "keras/src/layers/activations": 4,
        "keras/src/layers/preprocessing": 60,
        "keras/src/layers/layer_test.py": 4,
        **{f"keras/src/{name}": 6 for name in ("callbacks", "models", "saving", "trainers")},
        **{f"keras/src/{name}": 12 for name in ("losses", "metrics", "optimizers", "utils")},
        "keras/src/ops": 200,
        "keras/src/backend/common": 12,
        "keras/src/backend/tensorflow": 4,
        "keras/src/initializers": 12,
    },
    package="keras",
    shipped=True,
    variables={"KERAS_BACKEND": "tensorflow"},
)
TENSORFLOW = Suite(
    {
        "eager/backprop_test.py": 1,
        "eager/*_test.py": 3,
        "eager/polymorphic_function/*_test.py": 6,
        "framework/function_test.py": 2,
        "framework/ops_test.py": 3,
        "framework/importer_test.py": 2,
        "ops/*_test.py": 4,
        "ops/parallel_for/*_test.py": 6,
        "kernel_tests/control_flow/*_test.py": 3,
        "kernel_tests/nn_ops/*_test.py": 6,
        "kernel_tests/variables/*_test.py": 4,
        "kernel_tests/array_ops/*_test.py": 16,
        "client/*_test.py": 3,
        "saved_model/*_test.py": 6,
        "training/*_test.py": 6,
        "data/kernel_tests/map_test.py": 10,
        "kernel_tests/data_structures/*_test.py": 8,
        "kernel_tests/math_ops/*_test.py": 10,
    },
    package="tensorflow",
    folder="tensorflow/python",
    alone=True,
)
#: The installed package has no tests, and its modules lie in `tf_keras.src`.
_TF_KERAS = {"attention": 8, "core": 6, "normalization": 12, "rnn": 24}
TF_KERAS = Suite(
    {
        **{f"layers/{name}/*_test.py": step for name, step in _TF_KERAS.items()},
        "mixed_precision/*_test.py": 10,
    },
    package="tf_keras",
    folder="tf_keras",
    variables={"TF_USE_LEGACY_KERAS": "1"},
    alone=True,
    about="the authors' repository of Keras 2, with `tf_keras.src` for `tf_keras` in its imports",
)
_MODELS = ("bert", "gpt2", "t5", "llama", "vit", "distilbert", "bart", "mixtral", "whisper", "clip")
TRANSFORMERS = Suite(
    {f"tests/models/{model}/test_modeling_{model}.py": 2 for model in _MODELS},
    package="transformers",
    about="a copy of the authors' repository, `zucchini-nlp/transformers`",
)
ACCELERATE = Suite(
    {"tests/test_*.py": 1},
    package="accelerate",
    left_out={"test_sagemaker.py": "needs an account", "test_tpu.py": "needs a TPU"},
)
PEFT = Suite(
    {"tests/test_custom_models.py": 40, "tests/test_*.py": 10},
    package="peft",
    left_out={"*gpu*": "needs a GPU"},
)
SUITES: dict[str, Suite] = {
    "torch": TORCH,
    "torch-xpu": TORCH_XPU,
    "torch-2.1": TORCH_2_1,
    "tensorflow": TENSORFLOW,
    "tf-keras": TF_KERAS,
    "transformers": TRANSFORMERS,
    "accelerate": ACCELERATE,
    "peft": PEFT,
    "keras": KERAS,
    "keras-on-torch": dataclasses.replace(
        KERAS,
        variables={"KERAS_BACKEND": "torch"},
        left_out={"keras/src/backend/tensorflow": "is of the other backend"},
    ),
}
