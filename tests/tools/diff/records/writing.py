"""Write what other programs record of a small network, of which `network` has the weights.

``python writing.py KIND PATH EPSILON`` writes one of the files beside this one, with 1e-5, in an
environment with SGLang 0.5.23 (``sglang``), msProbe 26.2.0 (``tensor``, ``statistics``) or
ExecuTorch 1.5.1 (``executorch``). Nothing else of SGLang than its dumper has to be importable.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Network(nn.Module):
    """Two linear layers with a normalization between them."""

    def __init__(self, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 6), nn.LayerNorm(6, epsilon)
        self.down = nn.Sequential(nn.GELU(), nn.Linear(6, 4))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), 1):
                values = torch.arange(parameter.numel()) * number * 7 % 11
                parameter.copy_((values / 11 - 0.4).reshape(parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for rows of four numbers."""
        result: torch.Tensor = self.down(self.norm(self.up(x)))
        return result


def write_sglang(folder: Path, epsilon: float) -> None:
    """Record two steps by SGLang's dumper, of which only this module is imported."""
    absent: dict[str, dict[str, Any]] = {
        "zmq": {},
        "sglang.srt.managers.io_struct": dict.fromkeys(
            ("sock_recv", "sock_send", "wrap_as_pickle")
        ),
        "sglang.srt.runtime_context": dict.fromkeys(
            ("get_parallel", "get_server_args", "get_serving")
        ),
        "sglang.srt.utils": {"get_device": lambda: "cpu"},
    }
    for name, content in absent.items():
        # These need CUDA, and the dumper calls nothing of them here.
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules.setdefault(name, module)
    dumper: Any = importlib.import_module("sglang.srt.debug_utils.dumper").dumper
    dumper.reset()
    dumper.configure(enable=True, dir=str(folder), exp_name="run", non_intrusive_mode="all")
    network = Network(epsilon).eval()
    hooks = dumper.register_non_intrusive_dumper(network)
    for step in range(2):
        with torch.no_grad():
            out = network(X + step)
        dumper.dump("result", out, layer_id=3)
        dumper.step()
    hooks.remove()


def write_msprobe(folder: Path, task: str, level: str, epsilon: float) -> None:
    """Record a step of training by msProbe."""

    debugger_class: Any = importlib.import_module("msprobe.pytorch").PrecisionDebugger
    options: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"]}
    if task == "statistics":
        options["summary_mode"] = "statistics"
    config = folder.with_suffix(".json")
    config.write_text(
        json.dumps(
            {
                "dump_path": str(folder),
                "task": task,
                "level": level,
                "rank": [],
                "step": [],
                task: options,
            }
        )
    )
    debugger = debugger_class(config_path=str(config))
    network = Network(epsilon)
    debugger.start(model=network)
    network(X).square().mean().backward()
    debugger.stop()
    debugger.step()
    config.unlink()


def inspected(folder: Path, epsilon: float) -> Any:
    """Run the exported network by ExecuTorch, and return an `Inspector` of the run."""

    devtools: Any = importlib.import_module("executorch.devtools")
    to_edge: Any = importlib.import_module("executorch.exir").to_edge
    runtime: Any = importlib.import_module("executorch.extension.pybindings.portable_lib")
    folder.mkdir(exist_ok=True)
    edge = to_edge(torch.export.export(Network(epsilon).eval(), (X,)))
    program = edge.to_executorch()
    (folder / "network.pte").write_bytes(program.buffer)
    edge = to_edge(torch.export.export(Network(epsilon).eval(), (X,)))
    devtools.generate_etrecord(str(folder / "etrecord.bin"), edge, program)
    run = runtime._load_for_executorch(
        str(folder / "network.pte"), enable_etdump=True, debug_buffer_size=1 << 20
    )
    run.forward((X,))
    run.write_etdump_result_to_file(str(folder / "run.etdp"), str(folder / "buffer.bin"))
    return devtools.Inspector(
        etdump_path=str(folder / "run.etdp"),
        debug_buffer_path=str(folder / "buffer.bin"),
        etrecord=str(folder / "etrecord.bin"),
        enable_module_hierarchy=True,
    )


def as_json(inspector: Any) -> str:
    """Return what `save_inspected` reads of an inspector."""
    events = [
        {
            **{name: getattr(event, name) for name in ("name", "_instruction_id")},
            "delegate_debug_identifier": event.delegate_debug_identifier,
            "module_hierarchy": event.module_hierarchy,
            "debug_data": [tensor.tolist() for tensor in event.debug_data],
        }
        for block in inspector.event_blocks
        for event in block.events
    ]
    return json.dumps(events)


def main(kind: str, out: Path, epsilon: float) -> None:
    """Write the record of one kind, as a single file."""
    out = out.absolute()
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(kind)
        if kind == "executorch":
            out.with_suffix(".json").write_text(as_json(inspected(folder, epsilon)))
            return
        if kind == "sglang":
            write_sglang(folder, epsilon)
        else:
            write_msprobe(folder, kind, "mix" if kind == "tensor" else "L0", epsilon)
        with zipfile.ZipFile(out.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.rglob("*.*")):
                if path.is_file() and path.name not in ("stack.json", "construct.json"):
                    archive.write(path, path.relative_to(folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
