"""JAX: every host runs this program. XLA compiles the step with the average over hosts in it, which gloo computes."""

import sys
from functools import partial

import jax  # pyrefly: ignore[missing-import]
import jax.numpy as jnp  # pyrefly: ignore[missing-import]
from jax.sharding import NamedSharding, PartitionSpec  # pyrefly: ignore[missing-import]

from . import net


def _two_layers(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    w1, b1, w2, b2 = weights
    return jnp.square(jax.nn.relu(x @ w1 + b1) @ w2 + b2 - y).mean()


def _main(how: str, role: str, number: str) -> None:
    replicated, divided = PartitionSpec(), PartitionSpec("workers")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(net.HOSTS[0], net.WORKERS, int(number))
    mesh = jax.make_mesh((net.WORKERS,), ("workers",))  # a device for each worker
    to_global = partial(jax.make_array_from_process_local_data, NamedSharding(mesh, divided))
    x, y = map(to_global, net.examples(int(number)))
    weights = jax.device_put(net.weights(), NamedSharding(mesh, replicated))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(replicated, divided, divided), out_specs=replicated, check_vma=False)
    def descend(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> list[jax.Array]:
        gradients = jax.lax.pmean(jax.grad(_two_layers)(weights, x, y), "workers")
        return jax.tree.map(lambda weight, gradient: weight - net.RATE * gradient, weights, gradients)

    def step() -> None:
        nonlocal weights
        weights = jax.block_until_ready(descend(weights, x, y))

    net.train_and_print("jax", step, lambda: jax.jit(_two_layers)(weights, x, y))


if __name__ == "__main__":
    _main(*sys.argv[1:])
