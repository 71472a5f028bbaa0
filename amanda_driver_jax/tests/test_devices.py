"""Programs on several devices, which a process has only if it asks for them at its start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, amanda
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("d",))
assert mesh.size == 4
calls = []

def double(value):
    calls.append(1)
    return value * 2

def analyse(context):
    if context["type"] == "sin":
        context.insert_before_op(ROUTINE, inputs=[0])

tool = amanda.Tool()
tool.add_inst_for_op(analyse)
x = jnp.arange(8.0)
f = lambda v: jnp.sin(v) * 2
mapped = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
sharded = jax.device_put(x, NamedSharding(mesh, P("d")))
# Calls on the host: one for each device, or one on the whole value.
for run, wanted, count in (
    (lambda: mapped(x), np.sin(2 * x) * 2, 4),
    (lambda: jax.jit(mapped)(x), np.sin(2 * x) * 2, 4),
    (lambda: jax.grad(lambda v: mapped(v).sum())(x), np.cos(2 * x) * 2, 4),
    (lambda: jax.jit(f)(sharded), np.sin(2 * x) * 2, 1),
    (lambda: f(sharded), np.sin(2 * x) * 2, 1),
):
    plain = np.asarray(run())
    calls.clear()
    with amanda.apply(tool):
        found = np.asarray(run())
    assert np.allclose(found, wanted, atol=1e-5), (found, wanted)
    assert len(calls) == (1 if STAGED else count), (count, calls)
    assert np.array_equal(run(), plain)
"""


@pytest.mark.slow
@pytest.mark.parametrize("routine", ["double", "amanda.staged(double)"])
def test_several_devices(routine: str) -> None:
    names = f"ROUTINE, STAGED = {routine}, {'staged' in routine}"
    program = PROGRAM.replace("def analyse", f"{names}\n\ndef analyse", 1)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, amanda
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from amanda_tools.flops import Flops
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

mesh = Mesh(np.array(jax.devices()), ("d",))
X, W = np.random.default_rng(0).normal(size=(2, 8, 8)).astype("float32")
PARAMETERS = {"w": W}

def product(w, x):
    return jnp.tanh(x @ w["w"])

def local(w, x):
    return product(w, x), jax.lax.psum(x.sum(), "d")

def shared(places, function=product):
    w, x = (
        jax.device_put(value, NamedSharding(mesh, place))
        for value, place in zip((W, X), places)
    )
    return [np.asarray(jax.jit(function)({"w": w}, x)) for _ in range(3)]

programs = {
    "one": lambda: [np.asarray(jax.jit(product)(PARAMETERS, X)) for _ in range(3)],
    "rows": lambda: shared((P(), P("d"))),
    "summed axis": lambda: shared((P("d", None), P(None, "d"))),
    "shard_map": lambda: [
        np.asarray(jax.jit(jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P("d"), P())
        ))(PARAMETERS, X)[0])
        for _ in range(3)
    ],
    "shard_map with other arguments": lambda: [
        np.asarray(jax.jit(lambda w, x: jax.shard_map(
            lambda bias, x, w: product(w, x) + bias,
            mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=P("d"),
        )(np.float32(0), x, w))(PARAMETERS, X))
        for _ in range(3)
    ],
    "pmap": lambda: [
        np.asarray(mapped(PARAMETERS, X.reshape(4, 2, 8))).reshape(8, 8)
        for mapped in [jax.pmap(product, in_axes=(None, 0))] * 3
    ],
}
found = {}
for name, program in programs.items():
    plain = program()
    with amanda.apply(count := Flops()):
        looked = program()
    assert all(np.array_equal(a, b) for a, b in zip(looked, plain)), name
    with amanda.apply(prune := Prune(0.5)):
        pruned = program()
    with amanda.apply(quantize := Quantize(activations="none")):
        program()
    found[name] = (
        count.result().macs,
        {key: np.asarray(mask) != 0 for key, mask in prune.masks.saved().items()},
        {key: np.asarray(scale) for key, scale in quantize.grids.saved().items()},
        pruned[-1],
    )
macs, masks, scales, pruned = found.pop("one")
assert macs == 3 * 8 * 8 * 8 and masks and scales, (macs, masks, scales)
for name, (own_macs, own_masks, own_scales, own) in found.items():
    assert own_macs == macs, (name, own_macs, macs)
    for one, other in ((own_masks, masks), (own_scales, scales)):
        assert [*one] == [*other], name
        assert all(np.allclose(one[key], other[key]) for key in one), name
    assert np.allclose(own, pruned, atol=1e-5), name

divided = jax.jit(jax.shard_map(
    product, mesh=mesh, in_specs=(P(None, "d"), P()), out_specs=P(None, "d")
))
plain = np.asarray(divided(PARAMETERS, X))
with amanda.apply(prune := Prune(0.5)):
    assert np.array_equal(divided(PARAMETERS, X), plain)
assert "not reached: w" in prune.result().table().title, prune.result().table().title
"""

PROCESSES = """
import sys, warnings
import jax, jax.numpy as jnp, numpy as np, amanda
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
mesh = Mesh(np.array(jax.devices()), ("d",))
X = np.arange(16.0, dtype="float32").reshape(4, 4)
x = jax.make_array_from_callback(X.shape, NamedSharding(mesh, P("d")), lambda place: X[place])
seen = []

def tool(routine):
    made = amanda.Tool()
    made.add_inst_for_op(
        lambda context: context.insert_before_op(routine, inputs=[0])
        if context["type"] == "sin" else None
    )
    return made

def look(value):
    seen.append(np.asarray(value))

def program(value):
    return jnp.sin(value).sum()

def mapped(value):
    return jax.lax.psum(jnp.sin(value).sum(), "d")

plain = float(jax.jit(program)(x))
try:
    with amanda.apply(tool(look)):
        jax.jit(program)(x)
except amanda.AmandaError as error:
    assert "program of 2 processes" in str(error), error
else:
    raise AssertionError("not refused")
looking = amanda.look("sin", look, inputs=[0])
with warnings.catch_warnings(record=True) as told, amanda.apply(looking):
    warnings.simplefilter("always")
    assert float(jax.jit(program)(x)) == plain
assert "does not look at operators in a program of 2 processes" in str(told[-1].message), told
assert "not seen in a program of 2 processes" in looking.not_seen()[0], looking.not_seen()
assert not seen
with amanda.apply(tool(amanda.staged(lambda value: value * 2))):
    assert np.isclose(float(jax.jit(program)(x)), np.sin(2 * X).sum(), atol=1e-4)
over = jax.shard_map(mapped, mesh=mesh, in_specs=P("d"), out_specs=P())
# Each process gets its own part, also where the other one has no tool.
for tools in ([tool(look)], [tool(look)] if jax.process_index() == 0 else []):
    seen.clear()
    with amanda.apply(*tools):
        assert np.isclose(float(jax.jit(over)(x)), np.sin(X).sum(), atol=1e-4)
    jax.effects_barrier()
    own = np.split(X, 2)[jax.process_index()]
    assert len(seen) == len(tools)
    assert all(np.array_equal(value, own) for value in seen), seen
assert float(jax.jit(program)(x)) == plain
print("ended")
"""


@pytest.mark.slow
def test_arrays_that_devices_share_are_decided_for_as_on_one_device() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", SHARDED], env=environment, check=True, timeout=400)


@pytest.mark.slow
def test_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", PROCESSES]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    started = [
        subprocess.Popen(
            [*command, str(rank), str(port)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            assert "ended" in process.communicate(timeout=300)[0]
    finally:
        for process in started:
            process.kill()


IN_A_MESH = """
import jax, jax.numpy as jnp, numpy as np, amanda
from jax.sharding import AxisType, PartitionSpec as P

X, W = np.random.default_rng(0).normal(size=(2, 8, 8)).astype("float32")
tool = amanda.Tool()
tool.add_inst_for_op(lambda context: context.insert_after_op(lambda value: None))
for kind in (AxisType.Auto, AxisType.Explicit):
    with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(kind,))):
        rows = jax.device_put(X, P("d"))
        loss = lambda w, x: jnp.tanh(x @ w).sum()
        for run in (
            lambda: jax.jit(lambda w, x: x @ w)(W, X),
            lambda: jax.jit(jax.value_and_grad(loss))(W, rows),
            lambda: jax.value_and_grad(loss)(W, rows),
        ):
            plain = run()
            with amanda.apply(tool):
                found = run()
            assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, plain)
            for one, other in zip(*map(jax.tree.leaves, (found, plain)), strict=True):
                assert np.allclose(one, other, atol=1e-4), (kind, one, other)
"""


@pytest.mark.slow
def test_programs_in_a_mesh_compute_the_same() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", IN_A_MESH], env=environment, check=True, timeout=300)
