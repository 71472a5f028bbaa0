"""Programs on several devices, which a process has only if it asks for them at its start."""

from __future__ import annotations

import os
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
