"""`Gating`: the base of tools whose learned gates decide, for each input, what is computed.

Owns the gates: how they are made, trained, saved and loaded. Gates are modules of PyTorch. What a
gate computes, and where it acts, belongs to the subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from amanda_core import OpContext
from amanda_core.errors import ToolError
from amanda_core.interface.facts import Facts
from amanda_core.interface.namespace import matches
from amanda_tools.gating.result import GatedOp, GatingResult
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.kit.weights.learned_parameters import OptimizerJoin
from amanda_tools.kit.weights.tool import WeightTool

__all__ = ["Gating"]


class Gating(WeightTool):
    """A tool with learned gates.

    Args:
        layers: Globs, one of which must match the module path of an operator that gets a gate.
        seed: Seed of the first values of the gates.
        state: A file that `save` wrote, from which the gates are loaded.

    Attributes:
        training: Whether gates behave as in training; None for while gradients are recorded.
        gates: The gates by name.
        rows: What the result says of each operator.
    """

    #: Name of the tool in its results.
    name = ""

    works_on = ("pytorch/*/*",)

    def __init__(self, layers: Sequence[str], seed: int, state: str | None) -> None:
        super().__init__()
        self.layers, self.seed = list(layers), seed
        self.training: bool | None = None
        self.gates: dict[str, Any] = {}
        self.rows: dict[str, GatedOp] = {}
        #: Parts of the loss, by gate, since the last step.
        self.terms: dict[str, Any] = {}
        self.step = 0
        #: How many processes run the program together.
        self._processes = 1
        self._arrays: dict[str, Any] = {}
        self.arrays["gate"] = self._arrays
        self._optimizers = OptimizerJoin(self, self._learned, self._weights)
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_step(end=self._end_step)
        if state:
            self.load(state)

    def analyse(self, context: OpContext) -> None:
        """Insert what the tool does at an operator."""
        raise NotImplementedError

    # For subclasses.

    def meets(self, context: OpContext) -> bool:
        """Note the weights that an op reads; return False where there are no gates.

        Raises:
            ToolError: The tool does not work in the op's namespace, and the op would get a gate.
        """
        namespace = context.namespace
        if any(matches(pattern, namespace) for pattern in self.works_on):
            self._processes = facts_of(context).processes()
            return super().meets(context)
        if context["type"] in ("conv2d", "attention") and self.chosen(context):
            is_torch = namespace.startswith("pytorch/")
            raise ToolError(
                f"{self.name} is not supported on {namespace}: "
                + (
                    "it changes how many tokens a layer has, which a compiled graph cannot"
                    if is_torch
                    else "it needs gates that learn, which are PyTorch's"
                ),
                where=context.where,
                fix="Do not compile the model"
                if is_torch
                else "Apply the tool on PyTorch, or give other layers",
            )
        return False

    def check_stage(self, model: Any, facts: Facts) -> None:
        """Refuse a stage where gates are trained.

        Raises:
            ToolError: They are, and there are several processes.
        """
        self._check_processes(facts.processes())

    def _check_processes(self, count: int) -> None:
        if count > 1 and self.is_training():
            raise ToolError(
                f"Each of {count} processes would train gates of its own",
                where=self.tool_name,
                fix="Train them in one process, and give the others their `state`",
            )

    def chosen(self, context: OpContext) -> bool:
        """Return True if an operator may get a gate."""
        return any(fnmatchcase(context.module_path, pattern) for pattern in self.layers)

    def is_training(self) -> bool:
        """Return True if gates behave as in training."""
        import torch

        return torch.is_grad_enabled() if self.training is None else self.training

    def add_gate(self, key: str, make: Callable[[], Any], like: Any) -> Any:
        """Return the gate of a name, which is made and loaded at first.

        Args:
            key: Its name.
            make: Returns a new module.
            like: A tensor with the device and dtype of the gate.
        """
        import torch

        if key not in self.gates:
            self._check_processes(self._processes)
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
                torch.manual_seed(self.seed + len(self.gates))
                module = make().to(like.device, like.dtype)
                names = {name: f"{key}#{name}" for name in module.state_dict()}
                if loaded := {n: self._arrays[k] for n, k in names.items() if k in self._arrays}:
                    module.load_state_dict({n: torch.tensor(a) for n, a in loaded.items()})
            self.gates[key] = module
            self._optimizers.begin()
        return self.gates[key]

    def add_row(self, context: OpContext, key: str, macs: int = 0) -> None:
        """Add an operator to the result, with the multiply-accumulates of one execution."""
        if key not in self.rows:
            self.rows[key] = GatedOp(context.name, context.source, 0, 0, macs)

    def count(self, key: str, kept: Any, total: int) -> None:
        """Add one execution to the row of an operator: how much of it is computed."""
        row = self.rows[key]
        row.kept = row.kept + kept.detach()
        row.total += total

    # For users.

    def parameters(self) -> list[Any]:
        """Return the parameters of the gates, for an optimizer; they exist after the first call.

        Afterwards the tool does not add them to an optimizer itself.
        """
        self._optimizers.taken = True
        return self._learned()

    def bake(self, model: Any = None) -> list[str]:
        """Refuse: what the gates do depends on the input.

        Raises:
            ToolError: Always.
        """
        raise ToolError(
            f"{self.name} cannot be baked: what is pruned depends on the input",
            where=f"{self.tool_name}.bake",
            fix="Apply the tool wherever the model runs",
        )

    def result(self) -> GatingResult:
        """Return how much of each operator was computed so far."""
        for row in self.rows.values():
            row.kept = float(row.kept)
        return GatingResult(self.name, [row for row in self.rows.values() if row.total])

    # The base's questions.

    def options(self) -> dict[str, Any]:
        """Return the options that a resumed tool must have as well."""
        return {**super().options(), "layers": self.layers}

    def progress(self) -> dict[str, Any]:
        """Return the number of steps."""
        for key, gate in self.gates.items():
            for name, tensor in gate.state_dict().items():
                self._arrays[f"{key}#{name}"] = tensor.detach().cpu().numpy().copy()
        return {"step": self.step}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from the result of `progress`."""
        self.step = progress["step"]
        self.gates.clear()

    def remove(self) -> None:
        """Stop: from now on everything is computed."""
        super().remove()
        self.gates.clear()
        self.terms.clear()
        self._optimizers.end()

    def _end_step(self, number: int) -> None:
        self.step += 1
        self.terms.clear()

    def _learned(self) -> list[Any]:
        return [one for gate in self.gates.values() for one in gate.parameters()]

    def _weights(self) -> list[Any]:
        found = (weight.parameter for weight, _ in self._met.values())
        return [parameter for parameter in found if parameter is not None]
