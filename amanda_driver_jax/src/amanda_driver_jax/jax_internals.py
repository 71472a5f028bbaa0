"""Private names of JAX, used in this module only; `driver.toml` names its files and functions.

Checked on JAX 0.10.2, 0.11.2 and 0.12.0.1.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call,unused-ignore"

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import (
    ad_checkpoint,
    api,
    array,
    callback as callbacks,
    config,
    core,
    debugging,
    dispatch,
    ffi,
    pjit,
    shard_map,
    source_info_util,
    tree_util,
)
from jax._src.interpreters import ad, batching, mlir, partial_eval as pe
from jax._src.lax import lax
from jax._src.lib import jax_jit
from jax._src.lib.mlir import ir
from jax._src.source_info_util import Scope
from jax.extend.core import Primitive

from amanda_core.driver_kit import local_of
from amanda_core.interface import UnsupportedError

#: The module, and its functions that run every jitted function that C++ has no program of.
INFER, RUN = (pjit, "_infer_params"), (pjit, "_run_python_pjit")
#: What traces a function that is computed again in the backward pass.
CHECKPOINT = (ad_checkpoint, "_trace_to_jaxpr")
#: What traces how a reduction or a scatter combines elements.
COMBINING = (lax, "_reduction_jaxpr"), (lax, "_variadic_reduction_jaxpr")

#: What maps a function for `jax.vmap`.
BATCH = (batching, "batch")
#: What holds the function that runs `jax.lax.scan`, under whichever name a program has that.
_FUNCTION = jax.lax.scan.__code__.co_freevars.index("fun")
SCAN: Any = (jax.lax.scan.__closure__ or ())[_FUNCTION]

#: The operator that runs a function on each device of a mesh.
SHARD_MAP = shard_map.shard_map_p

# What JAX keeps of a program names the lines that called its operators, and not this package's or
# those of the replacements that the core makes for it.
source_info_util.register_exclusion(os.path.dirname(__file__))
source_info_util.register_exclusion(
    os.path.dirname(sys.modules["amanda_core.driver_kit"].__file__ or "")
)

#: How many frames lie at most between an export and the trace of its function.
_EXPORT_DEPTH = 8

_context, _sources = core.trace_ctx, source_info_util._source_info_context


#: What interprets operators outside of all transformations.
EVALUATION = core.eval_trace


def current_trace() -> Any:
    """Return the transformation that interprets operators now."""
    return _context.trace


def trace_around(trace: Any) -> Any:
    """Return the transformation around one; None around what is executed now."""
    found = getattr(trace, "parent_trace", None)
    return None if found is core.eval_trace else found


def is_inside(trace: Any, outer: Any) -> bool:
    """Return True if a transformation is inside another one, or is that."""
    while trace is not None and trace is not outer:
        trace = getattr(trace, "parent_trace", None)
    return trace is outer


def is_top_level() -> bool:
    """Return True if operators are executed now, and neither traced nor transformed."""
    # As the method of JAX's context, with two calls less.
    is_evaluated = core.trace_state_strong_ref.value is core.eval_trace
    return is_evaluated and core.axis_env_state.value is core.top_axis_env


def call_evaluated(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`, whose operators are executed now, neither traced nor transformed."""
    # Not `jax.core.eval_context`, whose end an exception may skip.
    before = _context.trace
    try:
        _context.set_trace(core.eval_trace)
        result = function(*args)
        _context.set_trace(before)
        return result
    except BaseException:
        _context.set_trace(before)
        raise


def call_named(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` inside a named scope."""
    before = _sources.context
    try:
        with jax.named_scope(name):
            return function(*args)
    except BaseException:
        _sources.context = before  # The scope may have been interrupted before it did so.
        raise


def is_compiled() -> bool:
    """Return True inside the trace of a function that JAX compiles."""
    trace: Any = _context.trace
    while trace is not None and type(trace) is not pe.DynamicJaxprTrace:
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def argument_of(tracer: Any, parent: Any, given: Sequence[Any]) -> int | None:
    """Return which argument a value is of the function that is being traced, or None.

    Args:
        tracer: The value.
        parent: The transformation around the trace.
        given: The function's arguments.
    """
    trace: Any = getattr(tracer, "_trace", None)
    if type(trace) is not pe.DynamicJaxprTrace or trace.parent_trace is not parent:
        return None
    invars = trace.frame.invars
    place = next((n for n, var in enumerate(invars) if var is tracer.val), None)
    # Another function may be traced there, such as the body of a loop.
    if place is None or len(invars) != len(given):
        return None
    aval = jax.typeof(given[place])
    return place if (aval.shape, aval.dtype) == (tracer.aval.shape, tracer.aval.dtype) else None


def is_whole(spec: Any) -> bool:
    """Return True if each device gets all of a value, given how `SHARD_MAP` divides it."""
    parts = (spec, getattr(spec, "unreduced", ()), getattr(spec, "reduced", ()))
    return isinstance(spec, jax.P) and not any(map(any, parts))


def mapped_value(value: Any) -> tuple[Any, int | None] | None:
    """Return the value that `jax.vmap` maps and its axis there; None for any other value."""
    return (value.val, value.batch_dim) if type(value) is batching.BatchTracer else None


def with_own_array(value: Any) -> Any:
    """Return a value with an array of JAX in the place of one of NumPy, also under `vmap`.

    From 0.12 on a `jax.custom_jvp` that is traced may not get any of NumPy.
    """
    if type(value) is batching.BatchTracer:
        new = with_own_array(value.val)
        return value if new is value.val else type(value)(value._trace, new, value.batch_dim)
    return call_evaluated(jax.numpy.asarray, value) if isinstance(value, np.ndarray) else value


def kind_of(value: Any) -> Any:
    """Return what tells apart values for which JAX infers different programs."""
    # `jax.typeof` would also hash the sharding, at each call.
    if type(value) is array.ArrayImpl:
        return value.aval, value.sharding
    return jax.typeof(value)


def convert(value: Any, dtype: Any, weak: bool) -> Any:
    """Return an array of a dtype, which is weak where it meets others if `weak` says so."""
    found = jax.numpy.asarray(value, dtype)
    # Else a later operator would compute in another dtype, or a carry have another type.
    return lax._convert_element_type(found, dtype, weak) if weak else found


def checkpointed(caller: FrameType) -> Sequence[Any]:
    """Return the arguments of a function, given the frame that calls `CHECKPOINT`."""
    found: Sequence[Any] = local_of(caller, "args_flat")
    return found


class JittedCall(NamedTuple):
    """A call of a jitted function.

    Attributes:
        function: What was jitted.
        info: What JAX keeps of it.
        args: Its arguments.
        kwargs: Those by keyword.
    """

    function: Callable[..., Any]
    info: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def parsed(self) -> tuple[Any, list[Any]]:
        """Return what tells the calls of a jitted function apart, and its arguments.

        Arguments that are constants of the program belong to the former.
        """
        info, given = self.info, (self.args, tuple(self.kwargs.values()), tuple(self.kwargs))
        names, registry = (info.static_argnums, info.static_argnames), tree_util.tracing_registry
        found: tuple[Any, list[Any]] = jax_jit.parse_arguments(*given, *names, registry)
        return found

    def replaced(self, values: Sequence[Any]) -> JittedCall:
        """Return the call with other values for the arguments that `parsed` returned."""
        count, info = len(self.args), self.info
        static = {number % count for number in info.static_argnums if -count <= number < count}
        args = {n: value for n, value in enumerate(self.args) if n not in static}
        kwargs = {n: value for n, value in self.kwargs.items() if n not in info.static_argnames}
        new_args, new_kwargs = jax.tree.structure((args, kwargs)).unflatten(values)
        found = tuple(new_args.get(n, value) for n, value in enumerate(self.args))
        return self._replace(args=found, kwargs={**self.kwargs, **new_kwargs})


def evaluate(program: Any, constants: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
    """Return what a traced program returns for other constants than its own."""
    found: Sequence[Any] = core.eval_jaxpr(program.jaxpr, constants, *values)
    return found


def callable_again(
    compute: Callable[..., Any], params: dict[str, Any], values: Sequence[Any]
) -> Callable[..., Any]:
    """Return what computes a `jax.custom_jvp`, which itself can be called once only."""
    program = jax.make_jaxpr(compute)(*values)
    rule = params["subfuns"][1]

    def again(*given: Any) -> tuple[Any, ...]:
        found = tuple(evaluate(program, program.consts, given))
        # JAX finds the tree of its results in one of both.
        for store in rule.stores:
            if store:
                store.reset()
        return found

    return again


def named_scopes() -> list[str]:
    """Return the named scopes around the running line, without the transformations there."""
    parts = _sources.context.name_stack.stack
    return [part.name for part in parts if isinstance(part, Scope)] if parts else []


def function_source(params: dict[str, Any]) -> str:
    """Return ``function at file:line`` of the jitted function that an equation calls."""
    return str(params["jaxpr"].jaxpr.debug_info.func_src_info or "")


def setter_of(context: Any) -> tuple[Callable[[Any], None], Any]:
    """Return what sets a user context (`jax.make_user_context`) of this thread, and its default.

    To enter and leave the context would be two calls more for each operator.
    """
    return context._obj.set_local, config.config_ext.unset


#: Returns ``function at file:line`` of a function that JAX has wrapped, such as those of a
#: `jax.custom_jvp`; None if that is not known.
source_of: Callable[[Any], str | None] = operator.attrgetter("debug_info.func_src_info")


def is_call(code_name: str) -> bool:
    """Return True if the caller of `_infer_params` calls a function instead of lowering it."""
    return code_name == "cache_miss"


def differentiated_arguments(frame: FrameType) -> Sequence[int] | None:
    """Return by which arguments a frame of JAX differentiates the function that it calls."""
    code = frame.f_code
    if code.co_name != "value_and_grad_f" or frame.f_globals.get("__name__") != api.__name__:
        return None
    numbers = local_of(frame, "argnums")
    return [numbers] if isinstance(numbers, int) else numbers


def is_tangent(value: Any) -> bool:
    """Return True for a value of a linear program, of which JAX keeps only what is used.

    What looked at it would keep it, and some rules cannot transpose what nothing depends on.
    """
    trace: Any = getattr(value, "_trace", None)
    is_linear = bool(getattr(getattr(trace, "frame", None), "auto_dce", False))
    return is_linear or type(trace) is pe.JaxprTrace


class MappedCall(NamedTuple):
    """A call of a function that `jax.vmap` has returned.

    Attributes:
        function: What is mapped.
        args: Its positional arguments.
        values: Those by keyword, too, as leaves.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    values: Sequence[Any]


def mapped_call(frame: FrameType, axis: Any) -> MappedCall | None:
    """Return the call of which one for each example computes the same; None for any other.

    Args:
        frame: The frame that calls `BATCH`.
        axis: What JAX keeps of the mapped axis.
    """
    is_vmap = frame.f_code.co_name == "vmap_f" and frame.f_globals.get("__name__") == api.__name__
    is_named = axis.name is not core.no_axis_name or axis.spmd_name or axis.explicit_mesh_axis
    # Others draw other random numbers for all examples at once than for each.
    if not is_vmap or is_named or jax.config.jax_default_prng_impl != "threefry2x32":
        return None
    return MappedCall(*(local_of(frame, name) for name in ("fun", "args", "args_flat")))


def is_export(frame: FrameType | None) -> bool:
    """Return True if a function is traced to be exported.

    Args:
        frame: That of the caller of `_infer_params`.
    """
    for _ in range(_EXPORT_DEPTH):
        if frame is None:
            break
        if frame.f_code.co_name == "do_export":
            return frame.f_globals.get("__name__") == "jax._src.export._export"
        frame = frame.f_back
    return False


def jitted(function: Callable[..., Any], info: Any) -> Callable[..., Any]:
    """Return another callable of a jitted function, which shares its compiled programs."""
    found: Callable[..., Any] = pjit._cpp_pjit(function, info)
    return found


def refuse_forward_mode(file: str, refuse: Callable[[], Any]) -> None:
    """Call `refuse` if JAX differentiates forward what it has traced as a `jax.custom_vjp`.

    Args:
        file: The source file of the backward programs for which this holds.
        refuse: Raises an error.
    """
    refuse_others = ad.raise_custom_vjp_error_on_jvp

    def refuse_any(*_: Any, bwd: Any, **__: Any) -> Any:
        return refuse() if file in (bwd.debug_info.func_src_info or "") else refuse_others()

    ad.custom_lin_p.def_impl(refuse_any)
    ad.primitive_jvps[ad.custom_lin_p] = refuse_any
    batching.primitive_batchers[ad.custom_lin_p] = refuse_any
    mlir.register_lowering(ad.custom_lin_p, refuse_any)


# A callback that XLA neither drops, repeats nor moves out of a loop, unlike `jax.pure_callback`,
# and that has no effect in the sense of JAX, which refuses effects in checkpoints.

_callback = Primitive("amanda_callback")
_callback.multiple_results = True
_callback.def_impl(functools.partial(dispatch.apply_primitive, _callback))
_callback.def_abstract_eval(lambda *_, result_avals, **__: result_avals)
batching.primitive_batchers[_callback] = functools.partial(ffi.ffi_batching_rule, _callback)


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        "A routine on the host is differentiated here a second time, or in forward mode",
        where="amanda-driver-jax",
        fix="Mark the routine with amanda.staged, so that JAX differentiates it",
    )


ad.primitive_jvps[_callback] = _refuse


def _lower(context: Any, *args: Any, **params: Any) -> Any:
    found = callbacks.pure_callback_lowering(context, *args, **params)
    for result in found[:1]:  # Of one operation, as all are.
        result.owner.attributes["has_side_effect"] = ir.BoolAttr.get(True)
    return found


mlir.register_lowering(_callback, _lower, cacheable=False)


def call_host(
    function: Callable[..., Any], shapes: Sequence[Any], values: Sequence[Any]
) -> Sequence[Any]:
    """Call a function of arrays on the host, once each time that the program comes by."""
    avals = tuple(core.ShapedArray(shape.shape, shape.dtype) for shape in shapes)
    params = {"callback": function, "result_avals": avals, "sharding": None}
    found: Sequence[Any] = _callback.bind(*values, **params, vmap_method="sequential")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or not is_compiled():
        return found
    # They are on one device, which a program for a mesh may not return.
    everywhere = jax.NamedSharding(mesh, jax.P())
    options = {"layout": None, "context_mesh": mesh, "unconstrained_dims": frozenset()}
    bind = pjit.sharding_constraint_p.bind
    return [bind(value, sharding=everywhere, **options) for value in found]


# A call of the host that only looks at values. It is a `jax.debug.callback`, which is in no
# derivative's way, but under `vmap` there may be one call with all examples.

_look = Primitive("amanda_look")
_look.multiple_results = True
_DEBUG: dict[str, Any] = {"effect": debugging.debug_effect, "partitioned": False}


def look_on_host(function: Callable[..., Any], values: Sequence[Any], together: bool) -> None:
    """Call `function` on the host, with the mapped axes of each array, and the arrays.

    Args:
        function: The function.
        values: The arrays.
        together: Whether there is one call for all examples of a mapped function.
    """
    _look.bind(*values, function=function, axes=((),) * len(values) if together else None)


def _called(function: Callable[..., Any], axes: Any) -> dict[str, Any]:
    return {"callback": functools.partial(function, axes), **_DEBUG}


def _batch_look(
    values: Sequence[Any], places: Sequence[Any], /, *, axes: Any, function: Any
) -> Any:
    if axes is None:
        params = {"function": function, "axes": axes}
        return debugging.debug_batching_rule(values, places, primitive=_look, **params)

    def added(known: tuple[int, ...], place: int | None) -> tuple[int, ...]:
        if place is None:
            return known
        return tuple(sorted((place, *(axis + (axis >= place) for axis in known))))

    _look.bind(*values, function=function, axes=tuple(map(added, axes, places)))
    return (), ()


_look.def_effectful_abstract_eval(lambda *_, **__: ([], {debugging.debug_effect}))
_look.def_impl(
    lambda *values, function, axes: debugging.debug_callback_impl(
        *values, **_called(function, axes)
    )
)
ad.primitive_jvps[_look] = lambda primals, _, **params: (_look.bind(*primals, **params), [])
ad.primitive_transposes[_look] = lambda _, *values, **params: [None] * len(values)
batching.primitive_batchers[_look] = _batch_look
pe.partial_eval_jaxpr_custom_rules[_look] = functools.partial(
    debugging._debug_partial_eval_custom, primitive=_look
)
mlir.register_lowering(
    _look,
    lambda context, *values, function, axes: debugging.debug_callback_lowering(
        context, *values, **_called(function, axes)
    ),
    cacheable=False,
)


#: What the dotted name of a function begins with -> the zone of all that it calls.
ZONES = {
    "jax._src.nn.initializers.": "init",
    "haiku._src.moving_averages.": "optimizer",
}

#: Module -> functions, also as ``Class.method``, whose operators are none of the program's.
QUIET_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "jax._src.array": ("ArrayImpl.__deepcopy__", "ArrayImpl.__copy__"),
    # Traces the body of a scan for what does not depend on the iteration, and runs only that.
    "flax.core.axes_scan": ("pe.trace_to_jaxpr_dynamic", "pe.trace_to_jaxpr_nounits"),
    "flax.serialization": ("from_bytes", "from_state_dict"),
    "equinox._serialisation": ("tree_deserialise_leaves",),
    "keras.src.models.model": ("Model.load_weights",),
    "keras.src.saving.saving_lib": ("load_model", "load_weights_only"),
}
#: Modules that call writers for themselves: Flax compares the attributes of modules so.
NO_WRITERS = ("flax.linen.",)
_ORBAX = "orbax.checkpoint._src.checkpointers"
#: Module -> such a function that writes the model for other programs -> what it is called there.
WRITERS = {
    "flax.serialization": {
        "to_state_dict": "flax.serialization",
        "msgpack_serialize": "flax.serialization",
    },
    "equinox._serialisation": {"tree_serialise_leaves": "equinox"},
    f"{_ORBAX}.checkpointer": {"Checkpointer.save": "orbax"},
    f"{_ORBAX}.async_checkpointer": {"AsyncCheckpointer.save": "orbax"},
    "safetensors.flax": {"save": "safetensors", "save_file": "safetensors"},
    "keras.src.models.model": {
        "Model.save": "model.save",
        "Model.save_weights": "model.save_weights",
        "Model.export": "model.export",
    },
    "keras.src.layers.layer": {"Layer.get_weights": "get_weights"},
}
