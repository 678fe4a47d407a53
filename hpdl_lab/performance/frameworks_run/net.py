"""The parts that all programs share: the model, its examples, the time of a step, and the bytes on the links."""

import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median

import numpy as np

WORKERS, HOSTS = 2, ["host0:5000", "host1:5000", "host2:5000"]  # two of workers, the last of a server
INPUTS, HIDDEN, OUTPUTS = 512, 1024, 512
NBYTES = 4 * ((INPUTS + 1) * HIDDEN + (HIDDEN + 1) * OUTPUTS)  # of the weights, and of their gradients
EXAMPLES = 64  # of all workers together, the same in each step
RATE = 5.0
STEPS, WARM_UP = int(os.environ.get("STEPS", "20")), 5


def weights() -> list[np.ndarray]:
    """Return w1, b1, w2, b2, the same on every host."""
    normal = np.random.default_rng(0).normal
    w1, w2 = normal(0, INPUTS**-0.5, (INPUTS, HIDDEN)), normal(0, HIDDEN**-0.5, (HIDDEN, OUTPUTS))
    return [array.astype(np.float32) for array in (w1, np.zeros(HIDDEN), w2, np.zeros(OUTPUTS))]


def examples(worker: int, workers: int = WORKERS) -> list[np.ndarray]:
    """Return x and y: the share of this worker, (EXAMPLES / workers, INPUTS) and (..., OUTPUTS)."""
    normal = np.random.default_rng(1).normal
    return [normal(size=(EXAMPLES, width)).astype(np.float32)[worker::workers] for width in (INPUTS, OUTPUTS)]


def train_and_print(package: str, step: Callable[[], object], loss: Callable[[], float], repeats: int = 1) -> None:
    """Train, then print the time and the bytes. `step` makes `repeats` steps, and returns when they are done."""
    for _ in range(0, WARM_UP, repeats):
        step()
    before, times = _link_bytes(), []
    for _ in range(0, STEPS, repeats):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) / repeats)
    links = (_link_bytes() - before) / (len(times) * repeats)
    found = {"package": f"{package} {version(package)}", "seconds": median(times), "loss": float(loss())}
    print(json.dumps(found | {"links": links.tolist()}), flush=True)


def _link_bytes() -> np.ndarray:
    """Return the counts of the ports of the switch: (host, 2), bytes that the host has sent, and received."""
    time.sleep(0.5)  # the last messages arrive
    with open(f"/proc/{os.environ['SWITCH']}/net/dev") as file:
        counts = {name.strip(): row.split() for name, row in (line.split(":") for line in file if ":" in line)}
    return np.array([[int(counts[f"port{host}"][column]) for column in (0, 8)] for host in range(len(HOSTS))])
