"""What the PyTorch driver reads of PyTorch, and of CPython, that is private.

Owns the table from which docs/internals/torch-symbols.md is written (run this file), and from which
`test_torch_symbols.py` removes one thing after the other.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from amanda_driver_torch.torch_internals.entry_points import QUIET_FUNCTIONS, WRITERS
from amanda_driver_torch.torch_internals.wrapper_modules import WRAPPERS

PAGE = Path(__file__).parents[2] / "docs/internals/torch-symbols.md"


class Without(enum.Enum):
    """What happens without a symbol."""

    SAME = "Nothing changes: routines get the same values."
    REFUSED = "`apply` is refused by name. The program runs without tools."
    FAILS = (
        "The operator that needs it fails by name. With `on_driver_error='skip'` the program runs "
        "on, and the coverage lists the operator."
    )
    PARTLY = "The program runs on. The coverage lists what is not seen."
    EAGER = "Compiled callables run eagerly, with the reason."
    TORCH = "PyTorch itself does not run without it."


class Group(NamedTuple):
    """Private things with the same purpose.

    Attributes:
        what: What the driver uses them for.
        checked: What finds out that one is missing, or different.
        without: What happens then.
        instead: What the driver does instead; empty if that is all.
        names: The names, in the notation of `missing_symbols.py`.
        compiled: Whether compiled callables alone need them.
    """

    what: str
    checked: str
    without: Without
    instead: str
    names: tuple[str, ...]
    compiled: bool = False

    @property
    def consequence(self) -> str:
        """What happens without one of them."""
        return f"{self.instead} {self.without.value}".strip()


_IMPORT = "the first `apply`, which imports the driver"


def _in(module: str, names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names.split())


PYTHON = (
    Group(
        "Types of operators, schemas and tensors",
        _IMPORT,
        Without.REFUSED,
        "",
        (
            *_in("torch._C", "Argument FunctionSchema parse_schema TensorBase"),
            *_in("torch._C", "ScriptFunction ScriptMethod DisableTorchFunction"),
            *_in("torch._C", "DisableTorchFunctionSubclass"),
            *_in("torch._ops", "HigherOrderOperator OpOverload OpOverloadPacket"),
            *_in("torch.nn.modules._functions", "BackwardHookFunction"),
            *_in("torch.utils._pytree", "tree_map_only"),
        ),
    ),
    Group(
        "Modes of the program, which must not see what the driver calls",
        _IMPORT,
        Without.REFUSED,
        "",
        (
            *_in("torch._C", "_len_torch_function_stack _get_function_stack_at"),
            *_in("torch._C", "_pop_torch_function_stack _push_on_torch_function_stack"),
            *_in("torch._C", "_len_torch_dispatch_stack _get_dispatch_stack_at"),
            *_in("torch._C", "_is_torch_function_enabled _disabled_torch_function_impl"),
            *_in("torch._C", "_DisableTorchDispatch _is_any_autocast_enabled"),
            *_in("torch._C._autograd", "_profiler_enabled _enable_record_function"),
            *_in("torch.overrides", "_pop_mode_temporarily"),
        ),
    ),
    Group(
        "Lists of these modes, for messages",
        "each use",
        Without.SAME,
        "No mode is named.",
        (
            *_in("torch.overrides", "_get_current_function_mode_stack"),
            *_in("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"),
        ),
    ),
    Group(
        "State that PyTorch's own Python code reads, too",
        "`import torch`, or the first operator",
        Without.TORCH,
        "",
        (
            *_in("torch._C", "_set_grad_enabled _get_tracing_state"),
            *_in("torch._C", "_are_functorch_transforms_active"),
            *_in("torch.nn.modules.module", "_global_forward_pre_hooks _global_forward_hooks"),
            *_in("torch.nn.modules.module", "_global_backward_pre_hooks _global_backward_hooks"),
            *_in("torch.autograd.variable", "Variable._execution_engine"),
            *_in("torch.autograd", "_make_grads"),
            *_in("torch.autograd.graph", "_engine_run_backward"),
        ),
    ),
    Group(
        "The levels of the transforms of `torch.func`",
        "each operator inside one, under a tool with `sees_transforms`",
        Without.SAME,
        "Inside transforms, an error of the driver names what is missing.",
        (
            *_in("torch._C._functorch", "is_functorch_wrapped_tensor get_unwrapped"),
            *_in("torch._C._functorch", "is_batchedtensor maybe_get_bdim get_interpreter_stack"),
            *_in("torch._C._functorch", "peek_interpreter_stack pop_dynamic_layer_stack"),
            *_in("torch._C._functorch", "push_dynamic_layer_stack"),
        ),
    ),
    Group(
        "Process groups by their names",
        "each use, by functional collectives",
        Without.SAME,
        "Their contexts have no `group`.",
        _in("torch.distributed.distributed_c10d", "_resolve_process_group"),
    ),
    Group(
        "Reductions and broadcasts of `DistributedDataParallel`",
        "each use, by programs of several processes",
        Without.SAME,
        "Its reductions are listed as not seen. Broadcasts of buffers are not operators.",
        (
            *_in("torch._C", "_after_autograd_keyset"),
            *_in("torch.distributed", "_broadcast_coalesced Reducer._delay_all_reduce"),
        ),
    ),
    Group(
        "Views and their bases",
        _IMPORT,
        Without.REFUSED,
        "",
        (
            *_in("torch._C", "TensorBase._base TensorBase._is_view _has_storage"),
            *_in("torch._C._autograd", "_get_creation_meta CreationMeta"),
            *_in("torch", "_neg_view"),
        ),
    ),
    Group(
        "Writes to tensors, and the memory of weights",
        "each use, by weights and by routines whose results are kept",
        Without.SAME,
        "A tool that asks for the memory of a weight fails by name. A memoized routine is called "
        "each time.",
        (
            *_in("torch._C", "TensorBase._version TensorBase._nnz TensorBase._cdata"),
            *_in("torch._C", "_is_cow_tensor _data_address _storage_Use_Count"),
            *_in("torch._C._autograd", "_unsafe_set_version_counter"),
        ),
    ),
    Group(
        "The address of a storage, by which parts of one weight are found",
        "the first operator on a part of a parameter",
        Without.FAILS,
        "",
        _in("torch._C", "StorageBase._cdata"),
    ),
    Group(
        "The backward program",
        _IMPORT,
        Without.REFUSED,
        "",
        (
            *_in("torch._C._autograd", "_get_sequence_nr _saved_tensors_hooks_is_enabled"),
            *_in("torch._C._autograd", "_top_saved_tensors_default_hooks"),
            *_in("torch._C._autograd", "_push_saved_tensors_default_hooks"),
            *_in("torch._C._autograd", "_pop_saved_tensors_default_hooks"),
            *_in("torch._C", "_current_autograd_node _functions _FunctionBase _autograd"),
        ),
    ),
    Group(
        "The order of backward nodes, and the level of forward-mode differentiation",
        "the first operator whose gradients are analysed",
        Without.FAILS,
        "",
        ("node:_sequence_nr", "torch.autograd.forward_ad:_current_level"),
    ),
    Group(
        "What backward nodes have saved, and how they were made",
        "each use",
        Without.SAME,
        "Identities take the gradients of inputs. An edit adds a node to the graph.",
        (
            *_in("node", "_set_sequence_nr _input_metadata _saved_self_sym_sizes _saved_dims"),
            *_in("node", "_saved_dim _raw_saved_result _saved_result"),
            *_in("torch._C._autograd", "_make_saved_tensor"),
        ),
    ),
    Group(
        "Whether the engine runs a backward pass in this thread",
        "operators of threads without tools",
        Without.SAME,
        "Operators that the engine runs in threads of its own may be named as not seen.",
        _in("torch._C", "_current_graph_task_id"),
    ),
    Group(
        "Registration of hooks without handles",
        "each session",
        Without.SAME,
        "Hooks that Python registers for the extension have handles.",
        _in("torch.autograd", "Function._register_hook"),
    ),
    Group(
        "Registration of hooks on tensors",
        "the first hook: PyTorch's own function needs them",
        Without.FAILS,
        "",
        ("node:_register_hook_dict", "torch._C:TensorBase._backward_hooks"),
    ),
    Group(
        "Tables of operators",
        _IMPORT,
        Without.REFUSED,
        "",
        (
            *_in("torch._C", "_VariableFunctions _nested _jit_get_all_schemas"),
            *_in("torch._C", "_dispatch_get_all_op_names _dispatch_has_kernel_for_dispatch_key"),
        ),
    ),
    Group(
        "Namespaces of operators that a release may lack",
        "each session",
        Without.SAME,
        "Their operators are not seen.",
        _in("torch._C", "_fft _linalg _special _sparse"),
    ),
    Group(
        "The namespace of most operators of `torch.nn.functional`",
        "each session",
        Without.PARTLY,
        "",
        _in("torch._C", "_nn"),
    ),
    Group(
        "Names of operators of the dispatcher",
        "the first operator called through `torch.ops`",
        Without.SAME,
        "Such an operator fails by name.",
        _in("torch._ops", "OpOverload._schema OpOverloadPacket._qualified_op_name"),
    ),
    Group(
        "Entry points that are replaced while tools are applied",
        "the first `apply` after their module is imported",
        Without.REFUSED,
        "",
        (
            *_in("torch._tensor_str", "_str"),
            *_in("torch.jit._trace", "_trace_impl trace_module"),
            *_in("torch.fx._symbolic_trace", "Tracer"),
            *_in("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator"),
        ),
    ),
)

_COMPILED_CALL = (
    "the first call of a compiled callable, which imports the part of the driver for them"
)
COMPILED = (
    Group(
        "Dynamo and AOTAutograd, where compiled callables stay compiled",
        _COMPILED_CALL,
        Without.EAGER,
        "",
        (
            *_in("torch._C._dynamo.eval_frame", "_FrameAction _FrameExecStrategy"),
            *_in("torch._dynamo.exc", "FailOnRecompileLimitHit"),
            *_in("torch._dynamo.guards", "install_guard DeletedGuardManagerWrapper"),
            *_in("torch._dynamo.source", "GlobalStateSource SyntheticLocalSource"),
            *_in("torch._dynamo.variables.nn_module", "UnspecializedNNModuleVariable"),
            *_in("torch._dynamo.variables", "AutogradFunctionVariable"),
            *_in("torch._functorch.autograd_function", "autograd_function_apply"),
            *_in("torch._functorch._aot_autograd.runtime_wrappers", "_disable_saved_tensors_hooks"),
            *_in("torch._higher_order_ops.effects", "_EffectType"),
            *_in("torch._subclasses.fake_tensor", "unset_fake_temporarily"),
            *_in("torch.utils._pytree", "tree_leaves"),
            *_in("torch.amp.autocast_mode", "_enter_autocast _exit_autocast"),
            *_in("torch.library", "Library._register_effectful_op"),
            *_in("torch._dynamo.convert_frame", "ConvertFrame._clone_with_backend"),
            *_in("torch._functorch._aot_autograd.graph_compile", "collect_bw_donated_buffer_idxs"),
            *_in("torch._inductor.scheduler", "Scheduler"),
            *_in("torch._inductor.virtualized", "V"),
        ),
        compiled=True,
    ),
    Group(
        "Parts of Dynamo that every compiled callable needs",
        _COMPILED_CALL,
        Without.TORCH,
        "",
        (
            *_in("torch._dynamo.convert_frame", "CatchErrorsWrapper"),
            *_in("torch._dynamo.eval_frame", "innermost_fn _stance _callback_from_stance"),
            *_in("torch._dynamo.guards", "GuardBuilder"),
            *_in("torch._dynamo.source", "ConstantSource"),
            *_in("torch._dynamo.exc", "TorchDynamoException"),
            *_in("torch._dynamo.trace_rules", "check"),
            *_in("torch._dynamo.types", "ConvertFrameReturn"),
            *_in("torch._dynamo.output_graph", "SubgraphTracer"),
            *_in("torch._dynamo.variables", "TensorVariable"),
            *_in("torch._dynamo.variables.nn_module", "record_nn_module_stack"),
            *_in("torch._dynamo.variables.nn_module", "unpatched_nn_module_call"),
            *_in("torch._dispatch.python", "enable_python_dispatcher"),
            *_in("torch._guards", "Guard TracingContext"),
            *_in("torch._subclasses.fake_tensor", "FakeTensor"),
            *_in("torch._subclasses.functional_tensor", "FunctionalTensor"),
            *_in("torch.autograd.grad_mode", "_enter_inference_mode"),
            *_in("torch.utils._pytree", "tree_map tree_flatten tree_unflatten"),
        ),
        compiled=True,
    ),
    Group(
        "Dynamo's own export, during which tools are not woven",
        "the first `apply` after Dynamo is imported",
        Without.REFUSED,
        "",
        _in("torch._dynamo", "export"),
        compiled=True,
    ),
    Group(
        "How Dynamo traces losses that a program makes while it runs",
        "each compilation",
        Without.SAME,
        "Operators of such a loss have other names than in eager mode.",
        _in("torch._dynamo.variables", "UserDefinedClassVariable._call_cross_entropy_loss"),
        compiled=True,
    ),
    Group(
        "How Dynamo traces regions that are compiled once, and calls of an `autograd.Function`",
        "each compilation",
        Without.SAME,
        "Code with them runs eagerly, with the reason.",
        (
            *_in("torch._dynamo.variables", "AutogradFunctionVariable.call_apply"),
            *_in(
                "torch._dynamo.variables.higher_order_ops",
                "InvokeSubgraphHigherOrderVariable._call_function",
            ),
        ),
        compiled=True,
    ),
    Group(
        "Kernels of programs that Inductor compiles",
        "each compilation",
        Without.SAME,
        "`latency` times the operators of such a program as they were traced.",
        (
            *_in("torch._inductor.compile_fx", "compile_fx_inner"),
            *_in("torch", "_TorchCompileInductorWrapper"),
        ),
        compiled=True,
    ),
    Group(
        "Regions and counts of compiled frames, and the caches of compiled code",
        "each use",
        Without.SAME,
        "Code for tools counts for the program's limit of recompilations, and callables with "
        "`fullgraph=True` are not counted.",
        (
            *_in("torch._dynamo.eval_frame", "_next_isolate_recompiles_id"),
            *_in("torch._C._dynamo.eval_frame", "set_eval_frame_isolate_recompiles_id"),
            *_in("torch._C._dynamo.eval_frame", "set_fullgraph_compiled_frame_count"),
            *_in("torch._C._dynamo.eval_frame", "_debug_get_cache_entry_list"),
        ),
        compiled=True,
    ),
)

#: Symbols of PyTorch's libraries, which `native/torch_symbols.cpp` looks up.
SYMBOLS = (
    Group(
        "Whether gradients are recorded, and the number of the next node",
        "`dlsym` at the first `apply`",
        Without.SAME,
        "Python's functions are called, which is slower.",
        (
            *_in("symbol", "_ZN3c108GradMode10is_enabledEv _ZN3c108GradMode11set_enabledEb"),
            *_in("symbol", "_ZN2at15sequence_number4peekEv"),
        ),
    ),
    Group(
        "Modes, tracers, transforms and the profiler",
        "`dlsym` at the first `apply`",
        Without.SAME,
        "Python's functions are called, which is slower.",
        (
            *_in("symbol", "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv"),
            *_in("symbol", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"),
            *_in("symbol", "_ZN5torch8profiler4impl15profilerEnabledEv"),
            *_in("symbol", "_ZN5torch3jit6tracer15getTracingStateEv"),
            *_in("symbol", "_ZN2at9functorch20functorchTLSAccessorEv"),
            *_in("symbol", "_ZN2at9functorch20getDynamicLayerStackEv"),
        ),
    ),
    Group(
        "Whether two tensors have the same place",
        "`dlsym` at the first `apply`",
        Without.SAME,
        "`Tensor.is_set_to` is called.",
        _in("symbol", "_ZN2at6native9is_set_toERKNS_6TensorES3_"),
    ),
    Group(
        "Tensors, without Python objects",
        "`dlsym` at the first `apply`",
        Without.SAME,
        "Python registers all hooks.",
        (
            *_in("symbol", "_Z16THPVariable_WrapRKN2at10TensorBaseE"),
            *_in("symbol", "_ZNK2at10TensorBase7grad_fnEv _ZNK2at10TensorBase9output_nrEv"),
            *_in("symbol", "_ZNK3c1010TensorImpl13requires_gradEv"),
            *_in("symbol", "_ZN3c1019UndefinedTensorImpl10_singletonE"),
            *_in("symbol", "aoti_torch_get_dim aoti_torch_get_dtype aoti_torch_is_contiguous"),
            *_in("symbol", "aoti_torch_get_sizes"),
        ),
    ),
    Group(
        "The memory of tensors, without Python objects",
        "`dlsym` at the first `apply`",
        Without.SAME,
        "Tools that record digests read tensors of this dtype, or all of them, in Python.",
        (
            *_in("symbol", "aoti_torch_get_strides aoti_torch_get_device_type"),
            *_in("symbol", "_ZTVN3c1010TensorImplE _ZNK3c1010TensorImpl11has_storageEv"),
            *_in("symbol", "_ZN2at6native6is_negERKNS_6TensorE"),
            *_in("symbol", "_ZN2at6native7is_conjERKNS_6TensorE"),
            *_in("symbol", "_ZN2at6native12is_inferenceERKNS_6TensorE"),
            *_in("symbol", "_ZNK2at10TensorBase8_versionEv"),
            *(
                f"symbol:_ZNK2at10TensorBase14const_data_ptrIK{dtype}EEPKT_v"
                for dtype in (
                    *"hasilfdb",
                    *("N3c104HalfE", "N3c108BFloat16E", "N3c107complexIfEE", "N3c107complexIdEE"),
                )
            ),
        ),
    ),
    Group(
        "The memory of storages, without Python objects",
        "`dlsym` at the first `apply`",
        Without.SAME,
        "Tools that follow memory read each tensor in Python.",
        (*_in("symbol", "aoti_torch_get_storage_offset aoti_torch_get_storage_size"),),
    ),
    Group(
        "Results of nodes that routines have edited, put in place",
        "`dlsym` at the first `apply`",
        Without.SAME,
        "Python edits them.",
        (*_in("symbol", "aoti_torch_new_tensor_handle aoti_torch_delete_tensor_object"),),
    ),
    Group(
        "Changes of the layout of gradients",
        "`dlsym` at the first `apply`",
        Without.SAME,
        "Python changes them.",
        (
            *_in("symbol", "_Z16THPVariable_WrapON2at10TensorBaseE"),
            *_in("symbol", "_ZN2at4_ops1t4callERKNS_6TensorE"),
            *_in("symbol", "_ZN2at4_ops7reshape4callERKNS_6TensorEN3c108ArrayRefINS5_6SymIntEEE"),
            *_in("symbol", "_ZN2at4_ops7permute4callERKNS_6TensorEN3c108ArrayRefIlEE"),
        ),
    ),
)

_EXPERIMENT = (
    "an experiment at the first `apply` (`learn_graphs`), only with a tried release "
    "(`versions.HOOKS_TRIED`)"
)
#: Layouts in memory, which `native/gradients/graphs.cpp` finds.
LAYOUTS = (
    Group(
        "Graphs without Python objects: the tensor in its Python object; sequence number, edges "
        "and lists of hooks of a node (`std::vector`); the virtual functions of each kind of hook, "
        "whose classes are compared by name",
        _EXPERIMENT,
        Without.SAME,
        "Python registers all hooks.",
        (
            *_in("layout", "tensor number edges call"),
            *_in("layout", "N5torch8autograd23PyFunctionTensorPreHookE"),
            *_in("layout", "N5torch8autograd17PyFunctionPreHookE"),
            *_in("layout", "N5torch8autograd18PyFunctionPostHookE"),
        ),
    ),
    Group(
        "The node in its Python object; the leaf in the node that accumulates its gradient",
        _EXPERIMENT,
        Without.SAME,
        "Python registers hooks on the accumulation of gradients.",
        _in("layout", "node leaf"),
    ),
)

#: PyTorch's tables in CPython's layout, which `native/interception/redirect.cpp` writes.
DEFINITIONS = (
    Group(
        "`vectorcall` of functions; `ml_meth` in the `PyMethodDef` of methods; `get` in the "
        "`PyGetSetDef` of attributes; the mapping slots and their wrappers for indexing",
        "each definition: its code lies in PyTorch's library, its page can be written, its calling "
        "convention is known; `_native.check()` compares the pointers",
        Without.PARTLY,
        "Attributes of `torch` are replaced where there are such.",
        _in(
            "definition",
            "builtin_function_or_method method_descriptor getset_descriptor wrapper_descriptor",
        ),
    ),
)

GROUPS = (*PYTHON, *COMPILED, *SYMBOLS, *LAYOUTS, *DEFINITIONS)

#: Names that are compared with those of modules, classes and functions of the program: without them
#: nothing is equal.
COMPARED = (
    *("torch._subclasses", "torch._dynamo", "torch._functorch", "torch._library.autograd"),
    *("torch._dynamo.external_utils", "torch._dynamo.eval_frame", "torch._higher_order_ops"),
    *("torch._dynamo.compiled_autograd", "torch._C._functorch", "torch._tensor"),
    *("torch._dynamo.trace_rules", *WRAPPERS),
    *("_checkpoint_impl", "_checkpoint_without_reentrant_generator_impl", "_init_weights"),
    *("_reduce_ex_internal", "_typed_storage", "_as_tensor_fullprec", "_is_param", "_call_impl"),
    *("_save_to_state_dict", "_load_from_state_dict", "_frames_up"),
    *("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
    *("torch.distributed.fsdp._flat_param", "torch.distributed.fsdp._fully_shard"),
    *("torch.distributed.fsdp._runtime_utils", "_allgather_base", "_reduce_scatter_base"),
    "_py_warnings",
)
#: Attributes of modules, which are read from their dicts.
OF_MODULES = ("_modules", "_parameters", "_buffers")
#: Attributes of custom functions.
OF_FUNCTIONS = ("_backward_cls",)
#: Functions that write, read, export or trace a model, by their modules.
OF_WRITERS = tuple(
    f"{module}.{function}"
    for table in (QUIET_FUNCTIONS, WRITERS)
    for module, functions in table.items()
    for function in functions
)
#: What a running Dynamo has: read where compiled callables are compiled, and tried with the
#: releases in `versions.GRAPHS_TRIED` alone.
OF_DYNAMO = (
    *("_torchdynamo_orig_backend", "_export", "_param_name_to_source", "_stance.stance"),
    *("nn_module", "output_graph", "torch._functorch.config", "torch._inductor.config.patch"),
    *("torch._inductor.config.triton.cudagraphs", "_dynamo_source"),
)
#: What modules that wrap others for several processes have, and their parameters.
OF_DISTRIBUTED = (
    *("_get_fsdp_state", "_fsdp_param_groups", "_fsdp_param_group", "_inter_node_pg"),
    *("_join_config", "_unsharded_param", "_mp_shard", "_flat_param", "_param_infos"),
    *("FlatParamHandle", "_fully_sharded_module", "FSDPParamGroup", "_training_state"),
    *("_param_group_index", "_sync_gradients", "_handle", "_params", "_module_parameters"),
    *("_shapes", "_numels_with_padding", "_is_padding_mask", "_comm_hooks", "_shard_param_infos"),
)
#: The operator by which programs wait for functional collectives, too, and the method by which
#: modules for several processes are called at the end of a backward pass.
OF_COLLECTIVES = ("wait_tensor", "queue_callback")


def page() -> str:
    """Return the page that lists everything."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from (
        "# Private parts of PyTorch and CPython",
        "",
        "Everything private that the PyTorch driver reads, what checks it, and what happens if a",
        "build of PyTorch does not have it. `python amanda_driver_torch/tests/torch_symbols.py`",
        "writes this page; `test_torch_symbols.py` removes each name in a process of its own, and",
        "runs a program under a tool.",
        "",
        "- A release that was never tried is *self-tested* in a process of its own at the first",
        "  `apply` ([support.md](../support.md)).",
        "- Hooks are placed in PyTorch's graphs only with builds of the releases in",
        "  `versions.HOOKS_TRIED`, and not with `AMANDA_TORCH_NATIVE_HOOKS=0`. `amanda doctor`",
        "  says which way is used.",
        "- Compiled callables stay compiled only with the releases in `versions.GRAPHS_TRIED`.",
    )
    for title, groups in (
        ("Names in Python", PYTHON),
        ("Names of the compiler", COMPILED),
        ("Symbols of PyTorch's libraries", SYMBOLS),
        ("Layouts in memory", LAYOUTS),
        ("Tables that are written", DEFINITIONS),
    ):
        yield from ("", f"## {title}")
        for group in groups:
            yield from ("", f"**{group.what}.**", "")
            yield f"- checked by: {group.checked}"
            yield f"- without one: {group.consequence}"
            yield f"- {', '.join(f'`{_shown(name)}`' for name in group.names)}"
    yield from (
        "",
        "## Names that are only compared",
        "",
        "Modules, functions and attributes of the program that the driver recognizes by name.",
        "Without them, nothing has that name.",
        "",
        f"- {', '.join(f'`{name}`' for name in COMPARED)}",
        f"- of modules, read from their dicts: {', '.join(f'`{name}`' for name in OF_MODULES)}",
        f"- of custom functions: {', '.join(f'`{name}`' for name in OF_FUNCTIONS)}",
        "- of what writes, reads, exports or traces a model; without one, tools see its operators:",
        f"  {', '.join(f'`{name}`' for name in OF_WRITERS)}",
        "- while Dynamo compiles, with tried releases only; the driver's error names what is",
        f"  missing: {', '.join(f'`{name}`' for name in OF_DYNAMO)}",
        "- of modules for several processes; without one, decisions are those of one process:",
        f"  {', '.join(f'`{name}`' for name in OF_DISTRIBUTED)}",
        "- of functional collectives, whose programs call it, too: "
        f"{', '.join(f'`{name}`' for name in OF_COLLECTIVES)}",
        "",
        "## CPython",
        "",
        "| what | checked by | without |",
        "|---|---|---|",
        "| frames of the interpreter (`internal/pycore_frame.h`) | the minor version of Python, "
        "when the extension is built | frame objects of the public API (built with "
        "`AMANDA_PUBLIC_FRAMES`, or from Python 3.14 on) |",
        "| `ma_version_tag` of dicts | the minor version of Python, when the extension is built "
        "(not with `AMANDA_PUBLIC_FRAMES`) | two lookups for each call of a module |",
        "| `tp_weaklistoffset` | the type itself | the weak reference is read |",
        "| `d_member->offset` of the driver's own slots | the type itself | `apply` is refused by "
        "name |",
        "",
    )


def _shown(name: str) -> str:
    kind, _, dotted = name.partition(":")
    if kind in ("symbol", "layout", "definition"):
        return dotted
    return f"Node.{dotted}" if kind == "node" else f"{kind}.{dotted}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
