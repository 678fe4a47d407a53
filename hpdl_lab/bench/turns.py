"""Fair timing: all contenders take turns, sample by sample, so that whatever else the machine does meets all alike."""

import time

SAMPLES = 21  # per row; each lasts
SAMPLE_NS = 4_000_000  # or one call, where that takes longer
SLOW_NS = 50_000_000  # a call that takes longer is not called once more before each sample
SLOW_SAMPLES = 5
SLOW = 0  # instead of a number of calls


def times(comm, contenders, samples=SAMPLES, sample_ns=SAMPLE_NS):
    """{name: (samples,) ns per call of the slowest rank} of contenders {name: function of no arguments}. Collective."""
    import numpy as np

    calls = {name: calls_per_sample(comm, run, sample_ns) for name, run in contenders.items()}
    found = {name: [] for name in contenders}
    for i in range(samples):
        for name, run in contenders.items():
            if i < SLOW_SAMPLES or calls[name] != SLOW:
                found[name].append(sample(comm, run, calls[name]))
    return {name: np.asarray(comm.all_gather(np.array(t))).max(axis=0) for name, t in found.items()}


def calls_per_sample(comm, run, sample_ns):
    """As many as fit into `sample_ns` on the slowest rank, after a few that warm up; SLOW for a slow one."""
    import numpy as np

    calls = 1
    for _ in range(3):
        took = float(np.asarray(comm.all_gather(np.array([sample(comm, run, calls)]))).max())
        if took > SLOW_NS:
            return SLOW
        calls = max(1, min(100_000, int(sample_ns / max(took, 1.0))))
    return calls


def sample(comm, run, calls):
    """ns per call, of `calls` in a row; before them one that fetches the tensor into the cache."""
    if calls != SLOW:
        run()
    comm.barrier()
    begin = time.perf_counter_ns()
    for _ in range(max(1, calls)):
        run()
    return (time.perf_counter_ns() - begin) / max(1, calls)
