"""What collectives should leave, and that `sweep` refuses all others, on simulated ranks."""

import numpy as np
import pytest

from hpdl_lab.collectives import expected, sweep, table
from hpdl_lab.comm import sim

REFERENCE = {  # on (p, n) stacks of what the ranks bring, chunk by chunk: what the names mean
    "all_reduce": lambda xs, chunks, root: [xs.sum(0)] * len(xs),
    "reduce_scatter": lambda xs, chunks, root: [chunk.sum(0) for chunk in chunks],
    "all_gather": lambda xs, chunks, root: [np.concatenate([c[r] for r, c in enumerate(chunks)])] * len(xs),
    "broadcast": lambda xs, chunks, root: [xs[root]] * len(xs),
    "reduce": lambda xs, chunks, root: [xs.sum(0) if r == root else xs[0][:0] for r in range(len(xs))],
    "gather": lambda xs, chunks, root: [
        np.concatenate([c[r] for r, c in enumerate(chunks)]) if r == root else xs[0][:0] for r in range(len(xs))
    ],
    "scatter": lambda xs, chunks, root: [chunk[root] for chunk in chunks],
    "all_to_all": lambda xs, chunks, root: [np.concatenate(list(chunk)) for chunk in chunks],
}


@pytest.mark.parametrize("collective", expected.COLLECTIVES)
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_what_is_left_is_what_the_name_means(collective, p):
    for m in (1, 4, 30):
        for root in {0, p - 1}:
            xs = np.stack([expected.brought(collective, m * p, p, r, root) for r in range(p)])
            want = REFERENCE[collective](xs, np.split(xs, p, axis=1), root)
            for r in range(p):
                begin, values = expected.expected_result(collective, m * p, p, r, root)
                assert np.array_equal(values, want[r]), (m, root, r)
                assert begin == (m * r if collective in ("reduce_scatter", "scatter") else 0)


@pytest.mark.parametrize("collective", expected.COLLECTIVES)
def test_every_algorithm_is_timed_and_a_wrong_one_is_not(collective):
    right = {a.name: a.function for a in table.ALGORITHMS if a.collective == collective}
    results = sim.run(3, sweep.sweep_sizes, right, [4, 4000], "float32", 1, 0, 0.0, collective)
    assert [(row["name"], row["size"]) for row in results.rows] == [
        (name, size) for size in (sizes(collective)) for name in right
    ]
    for row in results.rows:
        assert row["collective"] == collective and row["wrong"] == 0
        assert (row["redop"], row["root"]) == (
            "sum" if "reduce" in collective else "none",
            0 if collective in ("broadcast", "reduce", "gather", "scatter") else -1,
        )

    def nothing(comm, x):
        return x

    with pytest.raises(sweep.WrongAnswer, match=r"its (sum|result) is wrong: on rank \d, .* of 1,000 elements|1,002"):
        sim.run(3, sweep.sweep_sizes, {"nothing": nothing}, [4000], "float32", 1, 0, 0.0, collective)


def sizes(collective):
    """4 and 4,000 bytes on three ranks, rounded up to equal chunks where ranks have chunks."""
    return (12, 4008) if collective in expected.CHUNKED else (4, 4000)
