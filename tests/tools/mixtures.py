"""Tiny mixtures of experts of every architecture that transformers registers, and what masks do.

Owns how they are made without knowing any by name, which of their parameters products read, and the
reference: a copy whose parameters are masked matrix by matrix. It knows nothing of instrumentation.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

#: Ways to run experts: in a loop, as one product of gathered weights, as one grouped product.
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")

#: Names of numbers of experts in configurations.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_TOO = ("num_routed_experts", "num_moe_experts", "ffn_num_experts", "n_experts")
#: Attribute of a configuration -> what makes the model tiny.
_TINY: dict[str, Any] = {
    **dict.fromkeys(_EXPERTS + _EXPERTS_TOO, 4),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "d_ff", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "shared_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k"), 2),
    **dict.fromkeys(("moe_k", "moe_topk", "num_selected_experts", "experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "n_dense_layers"), 1),
    **dict.fromkeys(("decoder_sparse_step", "encoder_sparse_step", "moe_layer_freq"), 1),
    "qk_head_dim": 16,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "expert_capacity": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
}

#: What configurations leave open though their models need it.
_NEEDED = {
    **{name: _TINY[name] for name in _EXPERTS + _EXPERTS_TOO},
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts"), 2),
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "head_dim": 8,
    "sliding_window": 16,
    "clip_qkv": 8.0,
    "layer_types": ["full_attention"] * 2,
    "mlp_layer_types": ["sparse"] * 2,
}

#: Untyped in torch's stubs.
_Mode: Any = TorchDispatchMode


class CannotBuildError(Exception):
    """A tiny model of an architecture cannot be made; the message says why."""


def architectures() -> list[str]:
    """Names of the registered architectures whose configuration says how many experts there are."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = []
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:
            continue  # It is not the configuration of a model.
        attributes = [name for each in _configurations(config) for name in vars(each)]
        if any(attribute in attributes for attribute in _EXPERTS + _EXPERTS_TOO):
            found.append(name)
    return sorted(found)


def _configurations(config: Any, depth: int = 0) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if depth < 3 and hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configurations(value, depth + 1)


def _parts(config: Any) -> list[Any]:
    # Models of configurations that are parts of others are not registered.
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    models = [each for each in vars(module).values() if hasattr(each, "config_class")]
    mine = [each for each in models if each.config_class is type(config)]
    return [each for each in mine if each.__module__ == module.__name__][::-1]


def _model_of(config: Any) -> Any:
    from transformers.models.auto import modeling_auto as auto

    classes: list[Any] = []
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_MAPPING,
    ):
        if type(config) in mapping:
            found = mapping[type(config)]
            classes += list(found) if isinstance(found, tuple) else [found]
    if not classes:
        classes = _parts(config)
    if not classes:
        raise CannotBuildError("no class of models goes with its configuration")
    failures = []
    for each in dict.fromkeys(classes):
        try:
            torch.manual_seed(0)
            return each(config)
        except Exception as error:
            # Of a composite configuration the class of its text does not always take the whole.
            failures.append(error)
    raise failures[-1]


def _shrink(config: Any, depth: int = 0) -> None:
    for name, value in vars(config).copy().items():
        if depth < 3 and hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value, depth + 1)
        elif name in _TINY and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, name, _TINY[name])
        elif name in _NEEDED and value is None:
            setattr(config, name, _NEEDED[name])
        elif name == "layer_types" and isinstance(value, list):
            # The first and the last kind: hybrids alternate.
            setattr(config, name, [value[0], value[-1]])
        elif name in ("mlp_layer_types", "moe_layers") and isinstance(value, list) and value:
            setattr(config, name, [value[-1]] * 2)
        elif name == "mlp_only_layers":
            setattr(config, name, [])
    if vars(config).get("kv_lora_rank"):
        # Latent attention has as many heads of keys as of queries.
        config.num_key_value_heads = _TINY["num_attention_heads"]
    if depth and not hasattr(config, "rope_theta"):
        # A model may read it from a part of its configuration whose class does not declare it.
        config.rope_theta = 10_000.0
    for name in ("tie_word_embeddings", "output_router_logits", "use_cache"):
        if hasattr(config, name):
            setattr(config, name, False)


def build(name: str, implementation: str) -> nn.Module:
    """Make the tiny model of an architecture, the same at each call.

    Raises:
        CannotBuildError: It cannot be made, or not with this implementation of its experts.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[name]()
        _shrink(config)
        model = _model_of(config).eval()
    except CannotBuildError:
        raise
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {error}"[:120]) from error
    if sum(p.numel() for p in model.parameters()) > 8_000_000:
        raise CannotBuildError("its configuration stays large")
    experts = [m for m in model.modules() if hasattr(m, "_apply_gate") and hasattr(m, "config")]
    if implementation != "eager" and not experts:
        raise CannotBuildError("its class has one implementation")
    for module in experts:
        module.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Also of what the library leaves empty or at zero.
            spread = 1 / math.sqrt(max(parameter.shape[-1] if parameter.ndim else 1, 1))
            noise = torch.randn(parameter.shape, generator=generator) * spread
            if parameter.ndim < 2:
                noise = 1 + noise / 8
            parameter.copy_(noise)
    found: nn.Module = model
    return found


def prompts(model: Any) -> list[dict[str, torch.Tensor]]:
    """Four inputs that route tokens differently."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for length in (3, 7, 5, 6):
        feed = {"input_ids": torch.randint(3, 64, (1, length), generator=generator)}
        if getattr(model.config, "is_encoder_decoder", False):
            feed["decoder_input_ids"] = torch.randint(3, 64, (1, 4), generator=generator)
        found.append(feed)
    return found


def output_of(model: nn.Module, feed: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run a model with the same random numbers each time; its logits, or last hidden state."""
    torch.manual_seed(3)
    result: Any = model(**feed)
    found = result.logits if hasattr(result, "logits") else result[0]
    assert isinstance(found, torch.Tensor)
    return found


# Which parameters products read, by what ATen is called with.

_PRODUCTS = {
    "mm": (0, 1),
    "mv": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "_grouped_mm": (0, 1),
    "grouped_mm_fallback": (0, 1),
    "convolution": (1,),
    "embedding": (0,),
}
_COPIES = {"index", "index_select", "_to_copy", "clone", "cat", "stack", "expand", "repeat"}


class Products(_Mode):  # type: ignore[misc]
    """Notes which parameters reach a product, through nothing but views and copies.

    Attributes:
        read: Names of the parameters -> whether it was a convolution's.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.read: dict[str, bool] = {}
        self._names = {_address(p): {name} for name, p in model.named_parameters()}
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _PRODUCTS:
            places = [p for p in _PRODUCTS[name] if self._of(args[p])]
            # Of two parameters the right one is the weight, the other what it is applied to.
            for place in places[-1:]:
                for parameter in self._of(args[place]):
                    self.read[parameter] = name == "convolution"
        elif name in _COPIES:
            names = set().union(*(self._of(value) for value in _tensors(args)))
            for output in _tensors([result]) if names else ():
                self._names.setdefault(_address(output), set()).update(names)
                self._alive.append(output)
        return result

    def _of(self, value: Any) -> set[str]:
        return self._names.get(_address(value), set()) if isinstance(value, torch.Tensor) else set()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclasses.dataclass
class Reference:
    """A copy of a model whose parameters are masked.

    Attributes:
        model: The copy.
        masks: Name -> mask.
    """

    model: nn.Module
    masks: dict[str, torch.Tensor]


def masked(model: nn.Module, sparsity: float) -> Reference:
    """Return the reference for pruning what the prompts read, matrix by matrix."""
    read: dict[str, bool] = {}
    for _ in range(9):
        reference, masks = copy.deepcopy(model), {}
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if parameter.ndim > 1 and name in read:
                    flat = parameter.abs().flatten(0 if read[name] else -2)
                    count = round(sparsity * flat.shape[-1])
                    smallest = flat.argsort(dim=-1, stable=True)[..., :count]
                    ones = torch.ones_like(flat)
                    masks[name] = ones.scatter(-1, smallest, 0).reshape(parameter.shape)
                    parameter.mul_(masks[name])
            # Storages are identified by address, so the copies must stay alive.
            with Products(reference) as products:
                for feed in prompts(reference):
                    output_of(reference, feed)
        # What is masked sends tokens to other experts, which then are read.
        if products.read == read:
            return Reference(reference, masks)
        read = products.read
    raise CannotBuildError("what it reads depends on its masks for ever")
