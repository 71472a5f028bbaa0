"""Facts about torch's tensors, for tools.

Owns the answers. It reads no attribute that torch computes, rebuilds or refuses for some tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from amanda_core.driver_kit import Keeper, Recorder, Ref, WeakGroup
from amanda_core.interface import (
    DENSE,
    Arithmetic,
    Contraction,
    Facts,
    Group,
    NotReadableError,
    Placement,
    Storage,
)
from amanda_driver_torch.contractions import contraction
from amanda_driver_torch.groups import (
    gathered,
    group_of,
    holders_of,
    master_of,
    processes,
    rank,
    shares_layers,
)
from amanda_driver_torch.placements import (
    distributed,
    is_simulated,
    largest,
    like,
    local,
    placement_of,
)
from amanda_driver_torch.repeating import REPEATER
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import (
    address_of,
    data_address,
    has_storage,
    read_base,
    stored_elements,
    users_of_storage,
    version_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["FACTS", "STEPPED"]

#: The optimizers that made a step under tools.
STEPPED: WeakGroup[torch.optim.Optimizer] = WeakGroup()

#: The granularity of torch's CUDA allocator, in bytes.
_CUDA_BLOCK = 512
#: dtypes that NumPy does not have -> integers of the same size.
_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


#: Returns a view of memory by its address and size.
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory.restype = ctypes.py_object
_READ = 0x100  # PyBUF_READ

#: The usual dtypes that NumPy has.
_SAME = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.bool})
#: A tensor by which the extension finds the parts of tensors.
_EXAMPLE = torch.zeros(1)
#: The usual classes of tensors.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _TorchArithmetic(Arithmetic):
    counts = True

    def astype(self, x: Any, dtype: str) -> Any:
        if not hasattr(torch, dtype):
            raise NotReadableError(f"no {dtype} in this framework")
        wanted = getattr(torch, dtype)
        return x if x.dtype is wanted else x.to(wanted)

    def clip(self, x: Any, low: float | None = None, high: float | None = None) -> Any:
        return x.clamp(low, high)

    def quantized(
        self, x: Any, scale: Any, inverse: Any, zero: Any, limits: tuple[float, float]
    ) -> Any:
        new = None
        if torch.compiler.is_exporting():
            from amanda_driver_torch.exported_numbers import quantized

            new = quantized(x, scale, zero, limits)
        return super().quantized(x, scale, inverse, zero, limits) if new is None else new

    def sum(self, x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        return x.sum() if axis is None else x.sum(axis, keepdim=keepdims)

    def largest(self, x: Any, axis: Sequence[int] | None) -> Any:
        if _is_distributed(x):
            axes = range(x.dim()) if axis is None else [one % x.dim() for one in axis]
            return largest(x, self.largest(local(x), axis), axes)
        magnitudes = x.detach().abs().nan_to_num(0.0, 0.0, 0.0)
        if not x.numel():
            return magnitudes.sum(axis or (), keepdim=True)
        return magnitudes.amax(axis or (), keepdim=True)

    def permute_dims(self, x: Any, axes: Sequence[int]) -> Any:
        return x.permute(tuple(axes))

    def pad(self, x: Any, after: Sequence[int]) -> Any:
        widths = [width for length in reversed(after) for width in (0, length)]
        return torch.nn.functional.pad(x, widths)

    def count_nonzero(self, x: Any, axis: Sequence[int] | None = None) -> Any:
        if axis is None:
            return x.count_nonzero()  # For masks this is several times faster than a sum.
        return (x if x.dtype is torch.bool else x != 0).sum(axis)


class _TorchFacts(Facts):
    follows_graphs = True
    channels_first = True
    records_marks = native is not None
    arithmetic = _TorchArithmetic(torch)
    repeater = REPEATER

    def __init__(self) -> None:
        if native is not None:
            # Without a frame of Python, as tools ask at every operator.
            storages = partial(native.storages, super().storages, Storage)
            self.storages = storages  # type: ignore[method-assign]
            self.unless_known = partial(native.unless_known, Storage)  # type: ignore[method-assign]
            self.zeros = native.count_zeros  # type: ignore[method-assign]

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def constant(self, value: Any) -> str | None:
        return str(value) if type(value).__module__.partition(".")[0] == "torch" else None

    def dtype(self, tensor: torch.Tensor) -> str:
        return _name(tensor.dtype)

    def shape(self, tensor: torch.Tensor) -> tuple[int | None, ...] | None:
        try:
            if type(tensor) in _PLAIN:
                return tuple(tensor.shape)
            return tuple(map(_length, self.local(tensor).shape))
        except (RuntimeError, TypeError, ValueError):
            return None  # Nested tensors and uninitialized parameters have no shape.

    def device(self, tensor: torch.Tensor) -> str:
        return "cpu" if tensor.is_cpu else str(tensor.device)

    def contraction(self, context: Any) -> Contraction | None:
        return contraction(context)

    def layout(self, tensor: torch.Tensor) -> str:
        if tensor.is_nested:
            return "nested"
        if tensor.is_quantized:
            return "quantized"
        if tensor.layout is not torch.strided:
            return "sparse" if "sparse" in str(tensor.layout) else str(tensor.layout)
        if tensor.is_meta:
            return "without data"
        if _is_distributed(tensor):
            return "distributed"
        if _is_wrapper(tensor):
            return "made of other tensors"
        if not has_storage(tensor):
            return "without a storage"
        # To read values whose memory was freed ends the process.
        is_freed = tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0
        return "without data" if is_freed else DENSE

    def processes(self) -> int:
        return processes()

    def holders(self, model: Any) -> Group:
        return holders_of(model)

    def shares_layers(self, model: Any) -> bool:
        return shares_layers(model)

    def rank(self) -> int:
        return rank()

    def group(self, model: Any) -> Group:
        return group_of(model)

    def master(self, parameter: torch.Tensor, model: Any) -> Any:
        return self.whole(master_of(parameter, model))

    def placement(self, tensor: torch.Tensor) -> Placement | None:
        return placement_of(tensor) if _is_distributed(tensor) else None

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor) if _is_distributed(tensor) else tensor

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return gathered(tensor) if _is_distributed(tensor) else tensor

    def stored(self, tensor: torch.Tensor) -> int | None:
        if tensor.layout is torch.strided or tensor.is_nested:
            return None
        if tensor.is_sparse:
            return stored_elements(tensor)
        return int(tensor.values().numel()) if "sparse" in str(tensor.layout) else None

    def nbytes(self, tensor: torch.Tensor) -> int | None:
        shape = self.shape(tensor)
        if shape is None or None in shape:
            return None
        return int(self.local(tensor).numel()) * tensor.dtype.itemsize

    def storage(self, tensor: torch.Tensor) -> Storage | None:
        if type(tensor) not in _PLAIN:
            tensor = self.local(tensor)
        # The name of a device is not read, which costs more than all else here.
        if tensor.is_meta:
            return None
        try:
            storage = tensor.untyped_storage()
            address, size = address_of(tensor, storage), storage.nbytes()
        except (NotImplementedError, RuntimeError) as error:
            kind = type(tensor).__name__
            raise NotReadableError(f"{kind}, {tensor.layout}: no storage") from error
        if not size:
            return None
        if tensor.is_cpu:
            return Storage(address, size, storage)
        device = tensor.device
        if device.type == "cuda":
            size = -size // _CUDA_BLOCK * -_CUDA_BLOCK
        return Storage((device, address), size, storage)

    def users(self, tensor: torch.Tensor) -> int | None:
        tensor = self.local(tensor)
        try:
            return users_of_storage(tensor.untyped_storage()) - 1  # Without the object that asks.
        except (NotImplementedError, RuntimeError):
            return None

    def tensor(self, values: Any, like: torch.Tensor) -> Any:
        return _placed(torch.as_tensor(values, device=like.device), like)

    def values(self, tensor: torch.Tensor) -> Any:
        tensor = self.local(tensor)
        layout = self.layout(tensor)
        if layout in ("nested", "quantized", "sparse"):
            raise NotReadableError(f"a {layout} tensor")
        if layout == "without data":
            raise NotReadableError("a tensor without values")
        plain_type = type(tensor) in _PLAIN and tensor.dtype in _SAME
        try:
            if layout == DENSE and plain_type and tensor.is_cpu:
                # Real numbers that NumPy has: the same with fewer steps.
                copy = tensor.detach().clone(memory_format=torch.contiguous_format)
                return copy.resolve_neg().numpy()
            with torch.no_grad():
                plain = tensor.detach()
                if plain.device.type == "cpu":
                    # A copy, since torch refuses to resize a storage shared with NumPy.
                    plain = plain.clone(memory_format=torch.contiguous_format)
                plain = plain.cpu().contiguous().resolve_conj().resolve_neg()
                if plain.dtype in _BITS:
                    plain = plain.view(_BITS[plain.dtype])
                elif plain.dtype is torch.complex32:
                    # An exact conversion, since NumPy has no complex type with 16-bit parts.
                    plain = plain.to(torch.complex64)
                return plain.numpy()
        except (RuntimeError, TypeError) as error:
            raise NotReadableError(f"dtype {self.dtype(tensor)}") from error
        except AssertionError as error:
            if not is_simulated(tensor):
                raise
            raise NotReadableError("the ranks of LocalTensorMode have different values") from error
        except ValueError as error:
            raise NotReadableError(f"{tensor.dim()} axes, more than NumPy has") from error

    def buffer(self, tensor: torch.Tensor) -> Any:
        # Not through NumPy, since torch refuses to resize a storage shared with it.
        plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is torch.strided
        if plain and has_storage(tensor):
            special = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
            if not special and tensor.is_contiguous():
                address, size = data_address(tensor), tensor.nbytes
                if address or not size:  # Otherwise its memory was freed.
                    return _memory(address, size, _READ) if size else b""
        return self.values(tensor)

    def recorder(self, keeper: Keeper, pending: bytearray) -> Recorder | None:
        if native is None or not native.can_record():
            return None
        try:
            made: Recorder = native.Recorder(keeper, pending, _EXAMPLE, torch.nn.Parameter, Ref)
        except RuntimeError:
            return None  # A mode such as LocalTensorMode answers for torch's tensors.
        return made

    def optimizer_states(self) -> Iterable[tuple[Any, str, Any]]:
        for optimizer in tuple(STEPPED):
            # Copied at once, since another thread may make a step meanwhile.
            for parameter, states in list(optimizer.state.items()):
                for name, value in list(states.items()) if isinstance(states, dict) else ():
                    yield parameter, name, value

    def random_states(self) -> Mapping[str, bytes]:
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for device in range(torch.cuda.device_count()):
                states[f"cuda:{device}"] = torch.cuda.get_rng_state(device)
        return {device: state.numpy().tobytes() for device, state in states.items()}

    def cast(self, values: Any, like: torch.Tensor) -> Any:
        return _placed(torch.as_tensor(values, dtype=like.dtype, device=like.device), like)

    def restore(self, values: Any, like: torch.Tensor) -> Any:
        if _is_distributed(like):
            return _placed(self.restore(values, local(like)), like)
        if is_simulated(like):
            raise NotReadableError("LocalTensorMode has one value for each rank")
        tensor = torch.from_numpy(values)
        if like.dtype in _BITS:
            tensor = tensor.view(like.dtype)
        tensor = tensor.to(device=like.device, dtype=like.dtype)
        if like.layout is not torch.strided or tensor.stride() == like.stride():
            return tensor
        # Kernels round differently in another layout.
        return torch.empty_like(like).copy_(tensor)

    def update(self, parameter: torch.Tensor, edit: Callable[[Any], Any]) -> None:
        with torch.no_grad():
            parameter.copy_(edit(parameter.detach()))

    def version(self, tensor: torch.Tensor) -> int | None:
        try:
            # To ask first is much cheaper than the error.
            return None if tensor.is_inference() else version_of(tensor)
        except RuntimeError:
            return None  # Inference tensors have no version.

    def base(self, tensor: torch.Tensor) -> Any:
        base = read_base(tensor)
        return tensor if base is None else base

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        return type(tensor).__name__ == "Parameter"

    def wants_gradient(self, tensor: torch.Tensor) -> bool:
        # `is_leaf` is not read for views, since torch would rebuild the view's node, or raise.
        return self.base(tensor) is tensor and tensor.requires_grad and tensor.is_leaf


def _is_distributed(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return type(tensor) not in _PLAIN and distributed(type(tensor))


def _placed(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return values in a form that operators combine with another tensor."""
    return like(values, other) if _is_distributed(other) else values


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _length(size: Any) -> int | None:
    try:
        return int(size)
    except AttributeError:
        return None  # Dimensions of jagged tensors have no single length.


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's class implements every operator, with values in other tensors."""
    if type(tensor) in _PLAIN:
        return False
    for kind in type(tensor).__mro__:
        if "__torch_dispatch__" in vars(kind):
            # torch's own base class has the attribute, too.
            return kind is not torch.Tensor
    return False


#: Shared by all sessions, as it has no state.
FACTS: Facts = _TorchFacts()
