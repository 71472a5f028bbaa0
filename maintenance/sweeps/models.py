"""Models of transformers with small configurations, plain and instrumented at every operator.

One rule makes all configurations small: `SMALL` applies to each setting that a configuration has.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import amanda

from . import device
from .coverage import READ, Inside, Operators, unaccounted
from .identity import ROUTINES, Identity, clones
from .model_list import MODELS
from .observations import Facts, different, random_states, tensors, value
from .operators import INTERCEPTORS, VARIABLE, quiet
from .results import Failure, Part, versions
from .shipped import WAYS, applied, differing

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 16),
    **dict.fromkeys(
        ("embedding_size", "encoder_hidden_size", "d_embed", "word_embed_proj_dim"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 24),
    **dict.fromkeys(("ffn_hidden_size", "d_inner", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_head_dim", "d_head", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_length"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_or_config_json_file"), 64),
    **dict.fromkeys(("image_size", "img_size"), 32),
    "patch_size": 8,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "cls_token_id"), 1),
}
#: Ops whose values are not copied in models, and why. Their other points are instrumented as usual.
LEFT_ALONE = dict.fromkeys(
    ("to", "contiguous", "type_as", "float", "reshape", "view_as", "expand_as", "dropout"),
    "may hand its input back, so that `y` is `x` and the users of both add up their gradients in "
    "one place; copied, `y` has a sum of its own, as after `y = y.clone()` in the program",
)
#: Op -> explanation of differences that vanish once this op is left alone.
EXPLAINED = {
    "__getitem__": "the program writes into `x[i]`, and a copied view is no longer a view of its "
    "base, as after `y = y.clone()` in the program; with `x[i]` left alone nothing differs",
}
#: Nodes in which operators may run outside all ops, and why this is accepted.
NODES = (
    (
        frozenset({"AsStridedBackward0"}),
        "a view whose base is written gets a new node when it is next looked at, which has no "
        "hooks: what runs in it does not belong to an instrumented op "
        "(docs/internals/pytorch.md, limits)",
    ),
    (frozenset({READ}), "`tolist` copies a tensor of a device to read it, and is no operator"),
)
#: Maximum number of parameters. Models that the rule does not make small are not in the list.
MOST = 3_000_000


def build(name: str) -> torch.nn.Module:
    """Return a model by the name of its class, with random weights."""
    # Nothing is downloaded.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    cls = getattr(transformers, name)
    known = cls.config_class()
    small = {key: setting for key, setting in SMALL.items() if hasattr(known, key)}
    config = cls.config_class(**small)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > MOST:
        raise ValueError(f"{name} has {size} parameters")
    model = cls(config).to(device.name)
    assert isinstance(model, torch.nn.Module)
    return model


def feed(task: str, model: Any) -> dict[str, Any]:
    """Return the arguments of one call."""
    if task == "image classification":
        side = getattr(model.config, "image_size", 32)
        labels = torch.randint(0, 2, (2,))
        return {"pixel_values": torch.randn(2, 3, side, side), "labels": labels}
    ids = torch.randint(2, 60, (2, 6))
    if task == "sequence classification":
        return {"input_ids": ids, "labels": torch.randint(0, 2, (2,))}
    return {"input_ids": ids, "labels": ids.roll(1, dims=1)}


def run(
    name: str,
    task: str,
    extent: AbstractContextManager[Any],
    watch: TorchDispatchMode | None = None,
) -> Facts:
    """Train for two steps, evaluate once without gradients, generate, and return all results.

    Args:
        name: Name of the class.
        task: Its task.
        extent: Context manager in which it runs, such as that of a tool.
        watch: A dispatch mode that sees the operators.
    """
    torch.manual_seed(5)
    model: Any = build(name)
    model.train()
    found: Facts = {}

    def note(part: str, things: Any) -> None:
        with unseen():
            for number, tensor in enumerate(tensors(things)):
                found[f"{part} {number}: value"] = value(tensor)

    with watch or nullcontext(), extent:
        for step in range(2):
            given = {key: t.to(device.name) for key, t in feed(task, model).items()}
            model.zero_grad()
            output = model(**given)
            output.loss.backward()
            note(f"step {step}, output", tuple(output.to_tuple()))
            note(f"step {step}, gradient", [p.grad for p in model.parameters()])
            with unseen(), torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
        model.eval()
        given = {key: t.to(device.name) for key, t in feed(task, model).items()}
        with torch.no_grad():
            note("evaluation", model(**given).logits)
        if task in ("causal language", "sequence to sequence"):
            note("generation", generate(model, given["input_ids"]))
    note("buffer", list(model.buffers()))
    found["random state"] = random_states()
    return found


@contextmanager
def unseen() -> Iterator[None]:
    """Hide operators from tools and modes."""
    with amanda.disabled(), _disable_current_modes():
        yield


def generate(model: Any, ids: torch.Tensor) -> Any:
    """Generate a few sampled tokens."""
    return model.generate(
        ids, max_new_tokens=3, min_new_tokens=3, do_sample=True, pad_token_id=0, eos_token_id=None
    )


def chosen(
    only: str | None, sample: int | None, seed: int, shard: tuple[int, int]
) -> list[tuple[str, str]]:
    """Return the models of one run, as (class, task)."""
    every = [(name, task) for task, names in MODELS.items() for name in names]
    every = [pair for pair in every if only is None or only in pair[0]]
    if sample is not None and sample < len(every):
        every = random.Random(seed).sample(every, sample)
    return every[shard[0] :: shard[1]]


def sweep(
    these: list[tuple[str, str]],
    *,
    routines: Collection[str] = tuple(ROUTINES),
    seconds: float | None = None,
    verbose: bool = False,
) -> Part:
    """Run the models; without `routines` under the shipped tools alone."""
    part = Part("models", versions=versions())
    start = time.monotonic()
    for op, reason in LEFT_ALONE.items() if routines else ():
        part.left_out[f"the values of `{op}` under copies"] = f"it {reason}"
    part.totals["classes in the list"] = len({n for names in MODELS.values() for n in names})
    with quiet():
        for number, (name, task) in enumerate(these):
            if seconds is not None and time.monotonic() - start > seconds:
                part.counts["classes not reached"] += len(these) - number
                break
            if verbose:
                sys.stderr.write(f"{number}/{len(these)} {name}\n")
            _model(part, name, task, routines)
            if routines:
                _coverage(part, name, task)
    return part


def _model(part: Part, name: str, task: str, routines: Collection[str]) -> None:
    plain = run(name, task, amanda.disabled())
    if different(plain, run(name, task, amanda.disabled()), results_only=False):
        part.left_out[name] = "two plain runs differ from one another"
        return
    for interceptor in INTERCEPTORS:
        os.environ[VARIABLE] = interceptor
        for routine in routines:
            function = ROUTINES[routine]
            tool = Identity(function, left_alone=LEFT_ALONE)
            part.cases[name] += 1
            names, why = _differences(plain, name, task, tool), ""
            for op_type in EXPLAINED if names and function is clones else ():
                kept = Identity(function, left_alone=[*LEFT_ALONE, op_type])
                if not _differences(plain, name, task, kept):
                    why = EXPLAINED[op_type]
                    break
            part.counts["values compared"] += len(plain)
            part.counts["routines called"] += tool.called
            if names:
                part.failures.append(Failure(name, f"{interceptor}, {routine}", names[:10], why))
        for way in WAYS:
            part.cases[name] += 1
            if names := differing(way, plain, lambda tools: run(name, task, applied(tools))):
                part.failures.append(Failure(name, f"{interceptor}, {way}", names[:10]))


def _coverage(part: Part, name: str, task: str) -> None:
    """Check that instrumented ops account for every operator that torch counts."""
    plain = Operators(None)
    try:
        run(name, task, amanda.disabled(), plain)
    except Exception as error:
        told = f"it raises under a dispatch mode, without Amanda: {error}"
        part.left_out[f"{name}, coverage"] = told
        return
    for interceptor in INTERCEPTORS:
        os.environ[VARIABLE] = interceptor
        tool = Inside()
        seen = Operators(tool)
        try:
            run(name, task, amanda.apply(tool), seen)
            missing, total, engine = unaccounted(plain, seen)
        except Exception as error:
            missing, total, engine = [f"raised {type(error).__name__}: {error}"], 0, 0
        part.cases[name] += 1
        part.counts["operators counted by torch"] += total
        part.counts["operators counted by torch: the engine's sums of gradients"] += engine
        if missing:
            why = next((why for known, why in NODES if seen.nodes and seen.nodes <= known), "")
            missing = [*missing[:8], f"in nodes {', '.join(sorted(seen.nodes))}"]
            part.failures.append(Failure(name, f"{interceptor}, coverage", missing, why))


def _differences(plain: Facts, name: str, task: str, tool: Identity) -> list[str]:
    try:
        return different(plain, run(name, task, amanda.apply(tool)), results_only=False)
    except Exception as error:
        return [f"raised {type(error).__name__}: {error}"]
