"""`ScoredPruning`: the base of rules that keep the elements with the highest scores.

Owns what is compared, and when masks are made: when a weight is first read, or, if a rule compares
several weights or gradients, after an execution that shows them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from amanda_core import OpContext
from amanda_core.engine.calls import Call
from amanda_core.errors import UnsupportedError
from amanda_core.interface.facts import Facts
from amanda_core.interface.groups import Group
from amanda_core.weights.reads import Weight
from amanda_tools.kit.tensors.values import facts_of, need_numpy
from amanda_tools.prune.order import Order, array_of, axes_of, inverse_of, numbers_of
from amanda_tools.prune.pruning import Pruning
from amanda_tools.prune.reads import value_at

__all__ = ["Score", "ScoredPruning", "check_choice"]

Score = Literal["magnitude", "taylor"]


def check_choice(name: str, value: str, choice: Any) -> None:
    """Raise a ValueError unless the value of an option is one of a `Literal`."""
    if value not in get_args(choice):
        raise ValueError(f"{name} must be of {', '.join(get_args(choice))}, not {value!r}")


class ScoredPruning(Pruning):
    """A tool that keeps the elements of weights with the highest scores.

    A score is the magnitude of an element. With ``taylor`` it is the square of its product with its
    gradient, about how much the loss would change without it (Molchanov et al., 2019).

    A subclass overrides `decide`, and `fraction` if it has a schedule.

    Args:
        sparsity: The fraction that the result reports as requested.
        together: Whether the rule compares several weights.
        scheduled: Whether masks change with the steps of the optimizer.
        score: `magnitude` or `taylor`.
        gradients: Whether to mask the gradients of the weights as well.
        embeddings: Whether to prune embedding tables where rows are picked from them.

    Attributes:
        waits: Whether masks are made after an execution, which is not pruned.
    """

    def __init__(
        self,
        sparsity: float,
        together: bool = False,
        scheduled: bool = False,
        score: Score = "magnitude",
        gradients: bool = True,
        embeddings: bool = False,
    ) -> None:
        check_choice("score", score, Score)
        super().__init__(sparsity, gradients, embeddings)
        self.score = score
        self.waits = together or score == "taylor"
        #: Whether weights of several layers are compared with each other.
        self.across_layers = False
        if self.waits or type(self).mask is ScoredPruning.mask:
            need_numpy()
        self._step = 0
        #: Weight -> its magnitudes in the last analysis, the order of their axes, and its shape.
        #: Its gradient since then, and the mask that was made.
        self._seen: dict[str, tuple[Any, Order, tuple[int, ...]]] = {}
        self._gradients: dict[str, Any] = {}
        self._ready: dict[str, Any] = {}
        #: Owners of weights that died before they had a mask.
        self._lost: set[str] = set()
        self._unsettled = False
        #: Where the last weight was analysed.
        self._namespace = ""
        #: Root -> the processes whose gradients decide.
        self._groups: dict[str, Group] = {}
        #: The outermost modules that were called.
        self._called: set[tuple[str, str]] = set()
        if self.waits:
            self.states.clear()
            self.arrays["ready"] = self._ready
            # Not when a call ends: its backward may still run parts of it again.
            self.add_inst_for_call(begin=self._begin_call)
        if self.waits or scheduled:
            self.add_inst_for_step(end=self._end_step)

    # The rule.

    def decide(self, scores: Mapping[str, Any], orders: Mapping[str, Order]) -> dict[str, Any]:
        """Return which elements of each weight are kept, at the fraction `present`.

        Args:
            scores: The scores by weight, with the axes in the order of `orders`.
            orders: The meaning of the axes.
        """
        raise NotImplementedError

    def fraction(self, step: int) -> float:
        """Return the fraction that is pruned after a number of steps of the optimizer."""
        return self.sparsity

    @property
    def present(self) -> float:
        """The fraction that is pruned now."""
        return self.fraction(self._step)

    # When masks are made.

    def mask(self, context: OpContext, tensor: Any, order: Order, key: str) -> tuple[Any, int]:
        """Return the mask of a tensor, and how many elements it sets to zero."""
        import numpy as np

        array = array_of(context, tensor)
        self._namespace = context.namespace
        if self.waits:
            ready = self._ready.get(key)
            kept = np.ones(array.shape, bool) if ready is None else ready
            self._seen[key] = order.arrange(np.abs(array * kept)), order, array.shape
            self._unsettled |= ready is None
        else:
            kept = self.decide({key: order.arrange(np.abs(array))}, {key: order})[key]
            kept = order.restore(kept, array.shape)
        return facts_of(context).cast(kept, tensor), int(kept.size - kept.sum())

    def forget(self, owner: str) -> None:
        """Drop what masks are made of, since the parameter has died."""
        super().forget(owner)
        self._seen.pop(owner, None)
        self._ready.pop(owner, None)
        self._gradients.pop(owner, None)

    def without_mask(self) -> Collection[str]:
        """Return the owners of weights that died first, and of what the program made after them."""
        return self._lost | (self._seen.keys() - self._ready.keys() if self._lost else set())

    def _refused(self, context: OpContext, weight: Weight) -> str:
        if self.score != "magnitude" and not self.sees_gradients(context, "not known"):
            return "its score needs gradients"
        return super()._refused(context, weight)

    def insert(
        self, context: OpContext, position: int, weights: Mapping[int | None, Weight]
    ) -> bool:
        """Look at the gradient of a weight, if scores depend on it."""
        facts, value = facts_of(context), value_at(context, position)
        if self.across_layers:
            for each in weights.values():
                model = context.weights.model(each.root)
                self._need_all_layers(model, facts, context.where)
        if self.score == "magnitude":
            return False
        weight, axes = weights.get(None), [None]  # type: Weight | None, list[int | None]
        # An op is known by the weights that it reads, unless other processes hold parts of them.
        placed = facts.is_tensor(value) and facts.placement(value) is not None
        if weight is not None and weight.exact and (placed or not weight.varies):
            whole = all(index == slice(None) for index in weight.region)
            axes = axes_of(weight) if whole else axes
        if weight is None or None in axes:
            for each in weights.values():
                self.unreach(each, "read in parts, so its gradient as a whole is not known")
            return True
        if weight.root not in self._groups:
            model = context.weights.model(weight.root)
            self._groups[weight.root] = facts.group(model)
        if placed and weight.varies:
            context.insert_before_op(
                self._check_weight,
                inputs=[position],
                observe=True,
                context=context,
                position=position,
                owner=weight.owner,
            )
        context.insert_after_backward_op(
            self.add_gradient,
            grad_inputs=[position],
            observe=True,
            facts=facts,
            key=weight.owner,
            axes=axes,
        )
        return False

    def check_stage(self, model: Any, facts: Facts) -> None:
        """Refuse a stage if masks depend on layers, or on data, of other processes.

        Raises:
            UnsupportedError: They do, and these processes are not known.
        """
        if self.across_layers:
            self._need_all_layers(model, facts, "a stage of a pipeline")
        if self.score != "magnitude":
            facts.group(model)

    def _need_all_layers(self, model: Any, facts: Facts, where: str) -> None:
        """Refuse to compare weights of all layers where other processes may have some of them."""
        if facts.shares_layers(model):
            raise UnsupportedError(
                f"Other processes may have layers of the model, whose weights {self.tool_name} "
                "would compare with those of this one",
                where=where,
                fix="Use prune with scope='layer' or 'weight'; or decide in one process, save what "
                "was decided and load that in all",
            )

    def add_gradient(self, gradient: Any, facts: Facts, key: str, axes: list[int]) -> None:
        """Add to the gradient of a weight, if masks are made in this step."""
        if gradient is not None and (self._unsettled or self._changes(self._step + 1)):
            array = numbers_of(facts, facts.whole(gradient)).transpose(inverse_of(axes))
            self._gradients[key] = self._gradients.get(key, 0) + array

    def _check_weight(self, value: Any, context: OpContext, position: int, owner: str) -> None:
        weight = context.weights.get(position)
        if weight is None or weight.owner != owner:
            raise UnsupportedError(
                "One operator reads several weights of which processes hold parts, so their "
                "gradients cannot be told apart",
                where=context.where,
                fix="Give each a module of its own, or use score='magnitude'",
            )

    def progress(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"step": self._step}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from the result of `progress`."""
        self._step = progress["step"]

    def _changes(self, step: int) -> bool:
        """Return True if masks are made again at the end of this step, counted from 1."""
        return self.fraction(step) != self.fraction(step - 1)

    def _begin_call(self, call: Call) -> None:
        # Another module may be the next part of the same execution.
        module = (call.namespace, call.module)
        # Processes may call a model in different numbers, but make the same steps.
        if module in self._called and all(group.size == 1 for group in self._groups.values()):
            self._settle()
        self._called.add(module)

    def _end_step(self, number: int) -> None:
        self._step += 1
        if self._changes(self._step):
            self._unsettled = self.waits
            if not self.waits:
                self.renew()
        self._settle()
        self._gradients.clear()
        if self.waits and self._changes(self._step + 1):
            self.renew()  # So that the next execution shows the weights.

    def _settle(self) -> None:
        """Make all masks, if new weights were found or the fraction has changed."""
        if not self._unsettled or (self.score == "taylor" and not self._gradients):
            return
        self._unsettled = False
        for owner in [key for key, one in self._weights.items() if one.parameter is None]:
            if owner in self._seen and owner not in self._ready:
                self._lost.add(owner)
            self.forget(owner)
        with self._clock:
            self._agree()
            orders = {key: order for key, (_, order, _) in self._seen.items()}
            scores = {key: self._scores(key) for key in self._seen}
            known = {key: values for key, values in scores.items() if values is not None}
            if not known:
                self._note(
                    f"not supported on {self._namespace}: the weights are gone when masks are "
                    "made, since the program makes them at each call"
                )
            for key, kept in (self.decide(known, orders) if known else {}).items():
                self._ready[key] = orders[key].restore(kept, self._seen[key][2]).copy()
        self.renew()

    def _agree(self) -> None:
        """Add up the gradients of the processes that train a model together."""
        import numpy as np

        for root, group in self._groups.items():
            keys = sorted(key for key in self._seen if key.partition(":")[0] == root)
            if group.size == 1 or not keys:
                continue
            own = self._gradients
            none = {key: np.zeros(self._seen[key][2], np.float32) for key in keys}
            known = np.array([key in own for key in keys], np.int32)
            what = f"masks of {self.tool_name} in step {self._step}"
            sums = group.agree(what, {key: own.get(key, none[key]) for key in keys}, "sum")
            some = group.agree(what, {"known": known}, "max")["known"]
            own.update({key: sums[key] for key, one in zip(keys, some, strict=True) if one})

    def _scores(self, key: str) -> Any:
        magnitudes, order, shape = self._seen[key]
        if self.score == "magnitude":
            return magnitudes
        gradient = self._gradients.get(key)
        if gradient is not None:
            return (magnitudes * order.arrange(gradient)) ** 2
        self._ready[key] = order.restore(magnitudes == magnitudes, shape)
        self._note(f"{key.partition(':')[2] or key} had no gradient, so it is not pruned")
        return None
