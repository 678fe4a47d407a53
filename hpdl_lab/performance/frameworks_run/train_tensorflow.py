"""TensorFlow: mirrored, with the weights on every worker; or served, with the weights on a parameter server."""

import json
import os
import sys
from functools import partial

import tensorflow as tf  # pyrefly: ignore[missing-import]

from . import net

MIRRORED = {"worker": net.HOSTS[: net.WORKERS]}
SERVED = MIRRORED | {"ps": net.HOSTS[-1:], "chief": [net.HOSTS[-1].replace(":5000", ":5001")]}
BLOCK = 5  # steps of each worker, in which it waits for no other worker


def _two_layers(x: tf.Tensor, y: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    w1, b1, w2, b2 = weights
    return tf.reduce_mean(tf.square(tf.nn.relu(x @ w1 + b1) @ w2 + b2 - y))


def _descend(weights: list[tf.Variable], x: tf.Tensor, y: tf.Tensor, rate: float) -> None:
    with tf.GradientTape() as tape:
        loss = _two_layers(x, y, weights)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(rate * gradient)


def mirrored(number: int) -> None:
    """Train on every worker. An all-reduce over gRPC averages the values that the workers would assign."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = [tf.Variable(array, aggregation=tf.VariableAggregation.MEAN) for array in net.weights()]
    x, y = map(tf.constant, net.examples(number))
    step = tf.function(lambda: strategy.run(_descend, (weights, x, y, net.RATE)))
    net.train_and_print("tensorflow-cpu", step, lambda: _two_layers(x, y, weights))


def chief() -> None:
    """Hand out steps to whichever worker is free: it reads the weights on the server, and changes them there."""
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = [tf.Variable(array) for array in net.weights()]
    shares = [tuple(map(tf.constant, net.examples(number))) for number in range(net.WORKERS)]
    parts = [tf.function(partial(_descend, weights, x, y, net.RATE / net.WORKERS)) for x, y in shares]

    def block() -> None:
        for part in parts * BLOCK:
            coordinator.schedule(part)
        coordinator.join()

    net.train_and_print(
        "tensorflow-cpu", block, lambda: sum(_two_layers(x, y, weights) for x, y in shares) / net.WORKERS, BLOCK
    )


def _main(how: str, role: str, number: str) -> None:
    cluster, index = MIRRORED if how == "mirrored" else SERVED, int(number)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
    if role == "chief":
        chief()
    elif how == "mirrored":
        mirrored(index)
    else:
        tf.distribute.Server(cluster, job_name=role, task_index=index, protocol="grpc").join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
