"""`Facts` and `Arithmetic`: how tools ask a driver about tensors, and compute with them.

Owns the methods and their defaults. Tools do not inspect values themselves. Neither a framework nor
NumPy is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from amanda_core.errors import UnsupportedError
from amanda_core.interface.groups import Group

__all__ = [
    "DENSE",
    "SYMBOLIC",
    "Arithmetic",
    "Contraction",
    "Facts",
    "NotReadableError",
    "Place",
    "Placement",
    "Storage",
]

#: The layout of a tensor with one shape, each element of which can be read.
DENSE = "dense"
#: The layout of a placeholder for a dense tensor, which has values only when the program runs.
SYMBOLIC = "symbolic"


class NotReadableError(Exception):
    """A fact about a tensor is not available; the message says why, in a few words."""


class Storage(NamedTuple):
    """The memory of a tensor.

    Attributes:
        key: Identifies it among the memory that is in use.
        nbytes: Its size in bytes, as it is allocated.
        holder: An object that lives as long as the memory does. If there are several, the memory
            is free when the last one is gone. It can be referred to weakly.
    """

    key: Hashable
    nbytes: int
    holder: Any


class Placement(NamedTuple):
    """The part of a value of many processes that this process holds.

    Attributes:
        shape: The shape of the whole value.
        parts: What of each axis is here; None if it is not one block.
        partial: How the values of the processes must be combined to get the whole, such as ``sum``;
            an empty string if each holds a part, or all of it.
        ranks: The processes that hold it, by their ranks.
    """

    shape: tuple[int, ...]
    parts: tuple[slice, ...] | None
    partial: str
    ranks: tuple[int, ...]


#: Position of an input, with the index of an item if the input is a list.
Place = int | tuple[int, int]


class Contraction(NamedTuple):
    """The axes of a product's operands and result, each named by one character.

    Axes with one name run together. A name that the result lacks is summed over.

    Attributes:
        places: The operands, by the input positions of the operator.
        terms: The names of each operand's axes, in their order.
        result: The names of the result's axes.
        groups: Names of axes of which each index is a product of its own, although not all
            operands have them, as in a product of groups of rows.
    """

    places: tuple[Place, ...]
    terms: tuple[str, ...]
    result: str
    groups: str = ""


class Arithmetic:
    """The arithmetic that tools do with tensors of a framework, where these are.

    Functions have the names and the meaning that they have in NumPy and in the array API standard.
    They take tensors with or without values, such as placeholders, and return new ones on the same
    device. Shapes broadcast. Besides these functions, tools use the operators ``+``, ``-``, ``*``,
    ``/``, ``<`` and ``abs`` of tensors, with one another and with Python's numbers, which take the
    dtype of the tensor.

    A driver creates it with a module whose functions have NumPy's names, such as ``jax.numpy``, and
    overrides what its framework calls or does otherwise.

    Args:
        module: The module.

    Attributes:
        counts: Whether `permute_dims`, `pad`, `any` and `count_nonzero` work, with integers of 64
            bits. Otherwise tools count elements in main memory.
    """

    counts = False

    def __init__(self, module: Any) -> None:
        self.module = module

    def call(self, name: str, *tensors: Any, **options: Any) -> Any:
        """Call a function of the module; override it where tensors need another form for this."""
        return getattr(self.module, name)(*tensors, **options)

    def astype(self, x: Any, dtype: str) -> Any:
        """Return the nearest numbers of a dtype, which is named as by `Facts.dtype`.

        Raises:
            NotReadableError: The framework does not have the dtype.
        """
        try:
            return x.astype(dtype)
        except TypeError as error:
            raise NotReadableError(f"no {dtype} in this framework") from error

    def round(self, x: Any) -> Any:
        """Return the nearest integers; of two equally near ones the even one."""
        return self.call("round", x)

    def clip(self, x: Any, low: float | None = None, high: float | None = None) -> Any:
        """Return the elements limited to an interval; a NaN stays one."""
        return self.call("clip", x, low, high)

    def quantized(
        self, x: Any, scale: Any, inverse: Any, zero: Any, limits: tuple[float, float]
    ) -> Any:
        """Return the values of the integers that stand for the elements: ``(n - zero) * scale``.

        A driver may use the operators for this of its framework in programs that it exports.

        Args:
            x: Floating-point numbers.
            scale: The scale, a number or a tensor that broadcasts to them.
            inverse: 1 / scale.
            zero: The number of the value 0; None if it is 0.
            limits: The smallest and the largest number.
        """
        numbers = self.round(x * inverse)
        if zero is None:
            return self.clip(numbers, *limits) * scale
        return (self.clip(numbers + zero, *limits) - zero) * scale

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Return the very bits of `x` where the condition holds, and of `y` elsewhere.

        The condition is what `Facts.tensor` returns for an array of booleans.
        """
        return self.call("where", condition, x, y)

    def zeros_like(self, x: Any) -> Any:
        """Return zeros of the same shape and dtype."""
        return self.call("zeros_like", x)

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """Return the elements in another shape, in which one length may be -1."""
        return self.call("reshape", x, shape)

    def sum(self, x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the sum over some axes, or over all of them."""
        return self.call("sum", x, axis=axis, keepdims=keepdims)

    def largest(self, x: Any, axis: Sequence[int] | None) -> Any:
        """Return the largest finite magnitude over some axes, or over all of them.

        These axes stay, with length 1. The result is 0 if there is no finite element, and has no
        gradient. Of a value that processes hold in parts it is that of the whole, so that they
        communicate if they have different indices of these axes.
        """
        finite = self.call("where", self.call("isfinite", x), abs(x), self.zeros_like(x))
        return self.call("max", finite, axis=axis, keepdims=True, initial=0)

    def permute_dims(self, x: Any, axes: Sequence[int]) -> Any:
        """Return a tensor with its axes in another order.

        Args:
            x: The tensor.
            axes: For each axis of the result, the one of `x`: (1, 0) transposes a matrix.
        """
        return self.call("transpose", x, axes)

    def pad(self, x: Any, after: Sequence[int]) -> Any:
        """Return a tensor with so many zeros, or False, added at the end of each axis."""
        return self.call("pad", x, [(0, length) for length in after])

    def any(self, x: Any, axis: Sequence[int]) -> Any:
        """Return whether any boolean is True over some axes, which are given in falling order."""
        return self.call("any", x, axis=tuple(axis))

    def count_nonzero(self, x: Any, axis: Sequence[int] | None = None) -> Any:
        """Return how many elements are not zero, or True, over some axes or over all of them."""
        return self.call("count_nonzero", x, axis=axis)


class Facts:
    """A driver's facts about the values at the positions of its operators.

    A driver makes a subclass and sets an instance of it as the attribute ``facts`` of its
    attachment. `is_tensor`, `dtype` and `shape` are required. Each other method serves some tools;
    if a driver keeps its default, these tools say so in their results.

    Tools keep the instance, so it must not refer to a session or a tensor. A method must not raise
    for a value that `is_tensor` accepted, unless it says so here, and must not compute anything
    that the program could notice. It may be called inside a routine, from any thread.

    Attributes:
        channels_first: Whether images have their channels on the second axis, where nothing else is
            known of the layout. Otherwise they are on the last axis.
        shares_memory: Whether `view` shares the memory of each dense tensor in main memory.
        follows_graphs: Whether analysis can follow values through a graph that does not run yet: a
            value that an op returned has the same `symbol` where another op takes it, or is the
            same object.
        runs_ahead: Whether operators return before what they return is computed; see `wait`.
        records_marks: Whether `driver_kit.Marks` of operators that run at once are recorded without
            Python.
        arithmetic: How tools compute with the tensors. Without it, those that change values by
            arithmetic say that they cannot, unless tensors are NumPy's arrays.
        repeater: A `driver_kit.Repeater`, which executes recorded operators again; None without.
        recorder: Takes a `driver_kit.Keeper` and a bytearray to which rows are appended. Returns a
            `driver_kit.Recorder`, or None if it cannot work now; None without.
    """

    channels_first = shares_memory = follows_graphs = runs_ahead = records_marks = False
    arithmetic: Arithmetic | None = None
    repeater: Any = None
    recorder: Any = None

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, and for a value that the framework accepts as one."""
        raise NotImplementedError

    def is_own(self, tensor: Any) -> bool:
        """Return True if an operator or the framework made a tensor, False for other values that
        the framework accepts as one, such as a NumPy array.
        """
        return True

    def constant(self, value: Any) -> str | None:
        """Return a constant of the framework, such as a dtype or a device, as text; else None."""
        return None

    def dtype(self, tensor: Any) -> str:
        """Return the name of its dtype, without that of the framework: ``float32``."""
        raise NotImplementedError

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        """Return its shape, with None for an unknown dimension; None if the rank is unknown."""
        raise NotImplementedError

    def symbol(self, tensor: Any) -> tuple[Any, Hashable] | None:
        """Return the graph that a symbolic tensor belongs to, and its name there.

        The default is None: it is known by its own identity.
        """
        return None

    def device(self, tensor: Any) -> str:
        """Return the device that it is on: ``cpu``, or another name such as ``cuda:0``."""
        return "cpu"

    def layout(self, tensor: Any) -> str:
        """Return `DENSE`, `SYMBOLIC`, or another layout in one or two words, such as ``sparse``."""
        return DENSE

    def batch_axes(self, tensor: Any) -> tuple[int, ...]:
        """Return the axes of a value that the operator does not know of, during a routine.

        They are those over which the program maps a function of single examples, such as those of
        `jax.vmap`, for an observer of a tool that is not `by_example`.
        """
        return ()

    def processes(self) -> int:
        """Return how many processes run the program together, each with data of its own."""
        return 1

    def rank(self) -> int:
        """Return the number of this process among those of `processes`."""
        return 0

    def placement(self, tensor: Any) -> Placement | None:
        """Return what of a value of many processes this one holds; None if the value is its own.

        `shape`, `nbytes`, `values` and `view` are of the part that is here, so that a tool which
        looks at a value communicates with no other process.
        """
        return None

    def local(self, tensor: Any) -> Any:
        """Return the part of a value of many processes that is here, or any other tensor itself."""
        return tensor

    def whole(self, tensor: Any) -> Any:
        """Return a value of many processes as a whole, or any other tensor itself.

        Unlike all other methods it communicates: each process that holds a part must call it, at
        the same operator. Tools use it where they decide something once for a weight. Routines that
        are inserted with ``logical=True`` get such values.

        Raises:
            UnsupportedError: Another process did not come, or the driver does not gather values.
        """
        if self.placement(tensor) is None:
            return tensor
        raise UnsupportedError("The driver does not gather values of many processes")

    def master(self, parameter: Any, model: Any) -> Any:
        """Return what the optimizer updates where operators read a copy of another dtype.

        For other parameters return `parameter` as a whole. Like `whole` it may communicate, at the
        same operator of each process.

        Args:
            parameter: The tensor that operators of the model read.
            model: The outermost module.

        Raises:
            NotReadableError: Operators read a copy, and its original cannot be found.
        """
        return parameter

    def group(self, model: Any) -> Group:
        """Return the processes that train a model together, each with data of its own.

        Args:
            model: The outermost module, or None for operators outside of modules.

        Raises:
            UnsupportedError: There are several processes, and it is not known which of them do.
        """
        return Group()

    def holders(self, model: Any) -> Group:
        """Return the processes among which weights of a model are divided, or this one alone.

        Each of them has the same data, and may hold a part of a value that operators compute.
        Processes of `group` are not among them, although these may hold parts of weights, too.

        Args:
            model: The outermost module, or None for operators outside of modules.
        """
        return Group()

    def shares_layers(self, model: Any) -> bool:
        """Return True if other processes may have layers of the model that this one does not have.

        Args:
            model: The outermost module, or None for operators outside of modules.
        """
        return False

    def stored(self, tensor: Any) -> int | None:
        """Return how many elements a sparse tensor stores; None if it stores all of its shape."""
        return None

    def nbytes(self, tensor: Any) -> int | None:
        """Return the total size of its elements in bytes; None if unknown."""
        return None

    def storage(self, tensor: Any) -> Storage | None:
        """Return the memory that it uses; None if it uses none.

        Raises:
            NotReadableError: The framework does not report it.
        """
        raise NotReadableError("its driver does not report where tensors lie in memory")

    def storages(
        self, values: Iterable[Any], known: dict[int, tuple[Hashable, int]]
    ) -> tuple[int, list[Storage], str]:
        """Return the sum of the sizes of `storage` of all tensors among values and in their lists.

        Values that are not tensors are left out. It also returns the memory that is not known, and
        why that of a tensor was not counted, or an empty string.

        Args:
            values: The values.
            known: ``id()`` of the holder of memory in use -> its key and size.
        """
        total, new, problem = 0, list[Storage](), ""
        for value in values:
            if self.is_tensor(value):
                try:
                    storage = self.storage(value)
                except NotReadableError as error:
                    problem = str(error)
                    continue
                if storage is None:
                    continue
                total += storage.nbytes
                if known.get(id(storage.holder)) != storage[:2]:
                    new.append(storage)
            elif isinstance(value, (list, tuple)):
                size, more, why = self.storages(value, known)
                total, new, problem = total + size, new + more, problem or why
        return total, new, problem

    def unless_known(
        self,
        routine: Callable[..., None],
        known: dict[int, tuple[Hashable, int]],
        sizes: set[int],
    ) -> Callable[..., None]:
        """Return a routine that need not be called for values of which it learns nothing.

        It calls `routine` unless the driver finds out faster that all memory of the values is in
        `known`, as for `storages`, and that the sum of its sizes is in `sizes`.

        Args:
            routine: The routine, which looks at values and reads no context.
            known: As for `storages`; it may change later.
            sizes: Sums of sizes; they may change later.
        """
        return routine

    def zeros(self, tensor: Any, limit: float) -> tuple[int, int] | None:
        """Return how many elements are zero, and how many have a magnitude below a limit.

        None where the driver does not count them at once, without arrays in between.
        """
        return None

    def users(self, tensor: Any) -> int | None:
        """Return how many objects, such as tensors, keep its memory alive; None if unknown."""
        return None

    def values(self, tensor: Any) -> Any:
        """Return a copy of its values in main memory, as a NumPy array or a form of one.

        If NumPy does not have the dtype (``bfloat16``, ``float8_e4m3fn``), the array holds the bits
        as unsigned integers.

        Raises:
            NotReadableError: It does not have values, or they do not fit into one array.
        """
        raise NotReadableError("its driver does not read values")

    def view(self, tensor: Any) -> Any:
        """Return the same as `values`, but share the memory where this is possible.

        The array must not be written, nor kept for longer than the routine runs.

        Raises:
            NotReadableError: As for `values`.
        """
        return self.values(tensor)

    def buffer(self, tensor: Any) -> Any:
        """Return the bytes of its elements in C order, as a `memoryview`, or the same as `view`.

        A driver overrides it where an array costs more than its bytes, or cannot share the memory.

        Raises:
            NotReadableError: As for `values`.
        """
        return self.view(tensor)

    def optimizer_states(self) -> Iterable[tuple[Any, str, Any]]:
        """Return what optimizers that made a step under tools keep of their parameters.

        Each is a parameter, the name of a state, such as ``exp_avg``, and its value.
        """
        return ()

    def random_states(self) -> Mapping[str, bytes]:
        """Return the states of the framework's own random generators, by the device of each."""
        return {}

    def tensor(self, values: Any, like: Any) -> Any:
        """Return a NumPy array in a form that operators of the framework combine with `like`.

        The default returns the array, which many frameworks accept.

        Args:
            values: The array, or a number.
            like: A tensor, or a gradient, with the device that the result must have.
        """
        return values

    def cast(self, values: Any, like: Any) -> Any:
        """Return a NumPy array as `tensor` does, with the dtype of `like`, which may be one that
        NumPy does not have.

        The default converts to the array's own dtype of that name.
        """
        return self.tensor(values.astype(self.dtype(like)), like)

    def restore(self, values: Any, like: Any) -> Any:
        """Return an array in the form of `values` as a tensor like another one.

        It has that one's dtype, device and layout. An array of bits becomes the numbers that they
        encode.
        """
        return self.cast(values, like)

    def update(self, parameter: Any, edit: Callable[[Any], Any]) -> None:
        """Write ``edit(values)`` into a parameter, in place and outside of all gradients.

        Args:
            parameter: What `Weight.parameter` returns.
            edit: Receives its values as a tensor, and returns their replacement.

        Raises:
            NotReadableError: Parameters of this framework cannot be written in place.
        """
        raise NotReadableError("its driver does not write parameters in place")

    def wait(self, tensors: Sequence[Any]) -> None:
        """Return when tensors have been computed, where operators run ahead (`runs_ahead`)."""

    def version(self, tensor: Any) -> int | None:
        """Return a number that grows with each write to it; None if writes are not counted."""
        return None

    def base(self, tensor: Any) -> Any:
        """Return the tensor of which it is a view, or itself."""
        return tensor

    def is_parameter(self, tensor: Any) -> bool:
        """Return True if the framework marks it as a parameter of a model."""
        return False

    def contraction(self, context: Any) -> Contraction | None:
        """Return which axes of its operands an operator sums over; None if it is not a product.

        Only products whose operands may have any number of axes need it. Those with a
        ``weight_layout``, such as convolutions, do not.

        Args:
            context: The operator's context, while its inputs are known.
        """
        return None

    def wants_gradient(self, tensor: Any) -> bool:
        """Return True if no operator made it and it gets a gradient."""
        return False
