"""`amanda run` of programs with several ranks, by the launchers that people use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

RANKS = """
import os, sys, time
import torch
import torch.distributed as dist

def train(rank, meet=None, hangs=False):
    if meet is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.ones(2 + rank, 4)).sum().backward()
    if hangs:
        open(f"{sys.argv[1]}.{rank}", "w").close()
        if rank == 1:
            time.sleep(100)
        dist.all_reduce(torch.ones(3))
    dist.barrier()
    dist.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
#: Variables of ours; programs import what lies beside them.
_OWN = ("AMANDA_", "RANK", "PYTHONSAFEPATH")
#: MACs of three forward passes with 2 and with 3 rows.
MACS = {"rank0": 3 * 2 * 4 * 4, "rank1": 3 * 3 * 4 * 4}
LIGHTNING = """
import torch
import lightning.pytorch as pl

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pl.Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(12, 4), batch_size=2))
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "ranks.py").write_text(RANKS)
    kept = {name: v for name, v in os.environ.items() if not name.startswith(_OWN)} | variables
    command = [sys.executable, "-m", "amanda", "run", "-q", "-t", "flops", "-o", "out", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def macs(folder: Path) -> dict[str, int]:
    found = {}
    for path in sorted((folder / "out").rglob("flops.json")):
        content = json.loads(path.read_text())
        found[path.parent.name] = sum(op["macs"] for op in content["ops"])
    return found


def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nfrom ranks import train\ntrain(int(os.environ['RANK']))\n"
    )
    with run(tmp_path, "--html", "page.html", *TORCHRUN, "29631", "train.py") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert macs(tmp_path) == MACS
    # The page has all ranks as one, and what each has.
    page = (tmp_path / "page.html").read_text()
    data = re.search(r'id="data-results">(.*?)</script>', page)
    assert data is not None
    found = json.loads(data[1])
    assert found["flops"]["total"]["macs"] == sum(MACS.values())
    assert [row["name"] for row in found["flops"]["ranks"]] == ["rank0", "rank1"]


def test_processes_that_torch_spawns(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch.multiprocessing\nfrom ranks import train\n"
        "if __name__ == '__main__':\n"
        f"    torch.multiprocessing.spawn(train, args=('file://{tmp_path}/store',), nprocs=2)\n"
    )
    with run(tmp_path, "train.py") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert macs(tmp_path) == {"process-1": MACS["rank0"], "process-2": MACS["rank1"]}


@pytest.mark.parametrize(("wrapped", "folders"), [(True, ["."]), (False, ["rank0", "rank1"])])
def test_processes_with_copies_of_a_model_save_it_once(
    wrapped: bool, folders: list[str], tmp_path: Path
) -> None:
    program = "import os\nfrom ranks import *\ntrain(int(os.environ['RANK']))\n"
    if not wrapped:  # It is not known that the processes have the same weights.
        program = program.replace(
            "train(", "torch.nn.parallel.DistributedDataParallel = id_\ntrain("
        )
        program = program.replace("train(", "train(", 1)
        program = program.replace(
            "from ranks import *\n", "from ranks import *\nid_ = lambda m: m\n"
        )
    (tmp_path / "train.py").write_text(program)
    save = ("-t", "prune:sparsity=0.5,save=pruned")
    with run(tmp_path, *save, *TORCHRUN, "29637", "train.py") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    written = sorted((tmp_path / "pruned").rglob("weights.json"))
    assert written == [tmp_path / "pruned" / folder / "weights.json" for folder in folders]
    for path in written:
        weights = load_file(path.with_name("weights.safetensors"))
        assert (weights["weight"] == 0).sum() == 4 * 4 / 2


#: Trains with Accelerate, whose launcher is torchrun's under its own command.
ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 4))
for _ in range(3):
    accelerator.backward(model(torch.ones(2 + accelerator.process_index, 4)).sum())
accelerator.wait_for_everyone()
accelerator.end_training()
"""


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    (tmp_path / "train.py").write_text(ACCELERATE)
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port"]
    options += ["29632", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch = ["-m", "accelerate.commands.launch", *options, "train.py"]
    with run(tmp_path, *launch) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert macs(tmp_path) == MACS


@pytest.mark.parametrize("launcher", ["mpirun", "mpich", "srun", "TF_CONFIG"])
def test_launchers_that_start_amanda_in_each_process(launcher: str, tmp_path: Path) -> None:
    """Each sets its own variables; here they are set without it."""
    (tmp_path / "train.py").write_text(
        f"import sys\nfrom ranks import train\ntrain(int(sys.argv[1]), 'file://{tmp_path}/store')\n"
    )
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    started = []
    for rank in range(2):
        variables = {
            "mpirun": {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"},
            "mpich": {"PMI_RANK": str(rank), "PMI_SIZE": "2"},
            "srun": {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2"},
            "TF_CONFIG": {
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": "worker", "index": rank}}
                )
            },
        }[launcher]
        started.append(run(tmp_path, "train.py", str(rank), **variables))
    for process in started:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    assert macs(tmp_path) == MACS


def test_lightning_starts_the_script_again_for_the_other_ranks(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    (tmp_path / "train.py").write_text(LIGHTNING)
    with run(tmp_path, "train.py") as process:
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    # Three batches of two rows for each rank.
    assert macs(tmp_path) == {"rank0": 3 * 2 * 4 * 4, "rank1": 3 * 2 * 4 * 4}


def test_ranks_that_wait_for_another_end_by_sigterm_and_say_where(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nfrom ranks import train\ntrain(int(os.environ['RANK']), hangs=True)\n"
    )
    with run(tmp_path, *TORCHRUN, "29632", "train.py", str(tmp_path / "at")) as process:
        end = time.monotonic() + 90
        while not all((tmp_path / f"at.{rank}").exists() for rank in (0, 1)):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(1)  # It is about to wait.
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert time.monotonic() - began < 25  # After 30 seconds it would kill them.
    assert macs(tmp_path) == MACS
    show = [sys.executable, "-m", "amanda", "show", str(tmp_path / "out")]
    lines = subprocess.run(show, capture_output=True, text=True, timeout=60).stdout.splitlines()
    line = RANKS.splitlines().index("        dist.all_reduce(torch.ones(3))") + 1
    said = [one for one in lines if one.startswith("rank0: ")]
    assert said[0].endswith(f"ended by SIGTERM in all_reduce (ranks.py:{line})"), lines
