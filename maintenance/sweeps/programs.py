"""One operator on one input, in one of the forms in which it is called, with its gradients.

A program does not distinguish between plain and instrumented runs. It gets new inputs, runs, and
keeps all results, which are inspected later, when no tool is applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

import amanda

from . import device
from .identity import movable
from .observations import OF_RESULTS, Facts, facts, kind, others, random_states, tensors

#: The forms in which an operator of torch's database is called.
FORMS = ("function", "method", "operator", "inplace", "out")


def fresh(tree: Any) -> Any:
    """Copy arguments with their strides, shared storages and `requires_grad`."""
    storages: dict[int, Any] = {}
    made: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = _copy(value, storages).requires_grad_(value.requires_grad)
        return made[id(value)]

    return tree_map(copy, tree)


def _copy(tensor: torch.Tensor, storages: dict[int, Any]) -> torch.Tensor:
    if not movable(tensor):
        return tensor.detach().clone()
    storage: Any = tensor.untyped_storage()
    copy = storages.get(storage._cdata)
    if copy is None:
        copy = storages[storage._cdata] = storage.clone()
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.detach().new_empty(0).set_(copy, *place)


@dataclasses.dataclass
class Ran:
    """Inputs and results of a run."""

    inputs: list[torch.Tensor]
    result: Any = None
    gradients: Any = ()
    seeds: Sequence[torch.Tensor] = ()
    twice: bool = False
    error: str = ""
    random: tuple[int, int] = (0, 0)

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors that accumulate gradients: inputs, and the gradients passed in."""
        return [tensor for tensor in (*self.inputs, *self.seeds) if tensor.is_leaf]

    def facts(self) -> Facts:
        """Return all facts that are compared."""
        found: Facts = {"error": self.error, "random state": self.random}
        known = [(f"input {number}", t) for number, t in enumerate(self.inputs)]
        for name, tensor in known:
            found.update(facts(name, tensor, known))
            if tensor.is_leaf and tensor.grad is not None:
                order = "second-order" if self.twice else "accumulated"
                found.update(_results(f"{order} {name}", tensor.grad))
        found["result: others"] = others(self.result)
        for number, tensor in enumerate(tensors(self.result)):
            found.update(facts(f"output {number}", tensor, known))
            known.append((f"output {number}", tensor))
        found["gradients: others"] = others(self.gradients)
        for number, tensor in enumerate(tensors(self.gradients)):
            found.update(_results(f"gradient {number}", tensor))
        for number, seed in enumerate(self.seeds):
            if seed.grad is not None:
                found.update(_results(f"second-order seed {number}", seed.grad))
        return found


def _results(name: str, tensor: torch.Tensor) -> Facts:
    """Return the facts of a gradient's value only; whether torch has copied it is irrelevant."""
    return {key: fact for key, fact in facts(name, tensor, ()) if kind(key) in OF_RESULTS}


@dataclasses.dataclass
class Program:
    """An operator of the database in one form, on one of its sample inputs.

    Attributes:
        op: The entry of the database.
        sample: The sample input.
        form: One of `FORMS`.
        gradients: Whether to run backward.
        twice: Whether to differentiate the gradients as well.
        destinations: For `out=`: tensors like the result.
        repeated: Number of plain runs done to see which facts vary.
        varying: Names of the facts that vary.
    """

    op: Any
    sample: Any
    form: str
    gradients: bool
    twice: bool
    destinations: Any = None
    repeated: int = 0
    varying: set[str] = dataclasses.field(default_factory=set)

    def inputs(self) -> Any:
        """Return new arguments for one run: the input, the others, those by name, and `out`."""
        given = (self.sample.input, list(self.sample.args), dict(self.sample.kwargs))
        return fresh((*given, self.destinations))

    def run(self, inputs: Any) -> Ran:
        """Run the operator on arguments from `inputs`."""
        for generator in device.generators():
            generator.manual_seed(3)
        ran = Ran(tensors(inputs), twice=self.twice)
        leaves = [t for t in ran.inputs if t.requires_grad]
        try:
            ran.result = result = self._call(ran, *inputs)
            if self.gradients and leaves:
                if self.sample.output_process_fn_grad is not None:
                    result = self.sample.output_process_fn_grad(result)
                self._backward(ran, tensors(result), leaves)
        except Exception as error:
            ran.error = f"{type(error).__name__}: {error}"
        ran.random = random_states()
        return ran

    def _call(self, ran: Ran, first: Any, args: Any, kwargs: Any, out: Any) -> Any:
        function: Callable[..., Any] = {
            "function": self.op.op,
            "method": self.op.method_variant,
            "operator": self.op.operator_variant,
            "inplace": self.op.inplace_variant,
            "out": self.op.op,
        }[self.form]
        if self.form == "inplace":
            # A leaf that requires gradients must not be written.
            first = first.clone()
            ran.inputs.append(first)
        if self.form != "out":
            return function(first, *args, **kwargs)
        with torch.no_grad():
            return function(first, *args, **kwargs, out=out)

    def _backward(self, ran: Ran, results: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        roots = [t for t in results if t.requires_grad]
        if not roots:
            return
        seeds = [_seed(t) for t in roots]
        if not self.twice:
            torch.autograd.backward(roots, seeds)
            return
        ran.seeds = seeds = [seed.requires_grad_() for seed in seeds]
        first = torch.autograd.grad(roots, leaves, seeds, create_graph=True, allow_unused=True)
        ran.gradients = first
        again = [t for t in first if t is not None and t.requires_grad]
        if again:
            torch.autograd.backward(again, [_seed(t) for t in again])


def _seed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a gradient for a result, created without being observed."""
    with amanda.disabled(), torch.no_grad():
        if tensor.layout == torch.strided and not tensor.is_nested:
            return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return torch.ones_like(tensor)


def programs(op: Any, sample: Any, dtype: torch.dtype) -> list[Program]:
    """Return the forms of an operator that its entry provides, for one sample."""
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes(device.name)
    twice = gradients and op.supports_gradgrad
    made = [Program(op, sample, "function", gradients, twice)]
    single = isinstance(sample.input, torch.Tensor)
    if single and op.method_variant not in (None, op.op):
        made.append(Program(op, sample, "method", gradients, twice))
    if single and op.operator_variant not in (None, op.op):
        made.append(Program(op, sample, "operator", gradients, twice))
    if single and op.inplace_variant is not None and not sample.broadcasts_input:
        gradients = gradients and op.supports_inplace_autograd
        made.append(Program(op, sample, "inplace", gradients, gradients and twice))
    if op.supports_out and "out" not in sample.kwargs:
        made.append(Program(op, sample, "out", False, False))
    return made
