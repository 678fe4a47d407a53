"""The timeline of tensor fusion in Horovod's vocabulary: one row per gradient, in a file that Chrome and Perfetto open.

    layer4.weight   |-- NEGOTIATE_ALLREDUCE --|-------------------- ALLREDUCE ---------------------|
                      0    2  1                 MEMCPY_IN_FUSION_BUFFER | MPI_ALLREDUCE | MEMCPY_OUT_FUSION_BUFFER
                      the ranks, as they become ready

It is made from the one event log: events whose op is an activity and the name of a gradient, as fusion.py records
them with `timeline=True`. Ref: Horovod's docs/timeline.rst.
"""

import json

NEGOTIATE, ALLREDUCE, MPI_ALLREDUCE = "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MPI_ALLREDUCE"
MEMCPY_IN, MEMCPY_OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
RANK_READY = "RANK_READY"
DEPTH = {NEGOTIATE: 0, ALLREDUCE: 0, MEMCPY_IN: 1, MPI_ALLREDUCE: 1, MEMCPY_OUT: 1}  # what is drawn inside of what


def to_horovod(events, rank=0):
    """Events as Horovod's trace: list of dicts, begins and ends balanced for every gradient, times in microseconds.

    Args:    events: trace.Event of all ranks; rank: whose activities are shown, as Horovod shows the coordinator's.
    """
    activities = [e for e in events if is_activity(e)]
    origin = min((e.t0_ns for e in activities), default=0)
    by_tensor = {}
    for e in sorted(activities, key=lambda e: (e.t0_ns, e.step)):
        by_tensor.setdefault(tensor(e), []).append(e)
    rows = []
    for pid, (name, of_tensor) in enumerate(by_tensor.items(), 1):
        rows.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        rows.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        for e in of_tensor:
            if activity(e) == RANK_READY:
                rows.append({"ph": "X", "name": str(e.rank), "pid": pid, "ts": (e.t0_ns - origin) / 1e3, "dur": 0})
        rows += nested([e for e in of_tensor if e.rank == rank and activity(e) != RANK_READY], pid, origin)
    return rows


def nested(activities, pid, origin):
    """Begins and ends of one gradient's activities: those of depth 1 lie within the one of depth 0 that they ended in.

    An event is recorded when it ends, so what lies inside comes before what is around it.
    """
    inside = []
    for e in sorted(activities, key=lambda e: e.step):
        begin = {"ph": "B", "name": activity(e), "pid": pid, "ts": (e.t0_ns - origin) / 1e3}
        end = {"ph": "E", "pid": pid, "ts": (e.t1_ns - origin) / 1e3}
        if DEPTH[activity(e)]:
            inside += [begin, end]
        else:
            yield from [begin, *inside, end]
            inside = []


def is_activity(event):
    return event.op.partition(" ")[0] in (RANK_READY, *DEPTH)


def activity(event):
    return event.op.partition(" ")[0]


def tensor(event):
    return event.op.partition(" ")[2]


def save(events, path, rank=0):
    """Write `to_horovod(events)` to `path`. The file is whole JSON after every event, so it can be read meanwhile."""
    with open(path, "w") as file:
        file.write("[\n]\n")
        for i, row in enumerate(to_horovod(events, rank)):
            file.seek(file.tell() - len("]\n"))
            file.write(("," if i else "") + json.dumps(row) + "\n]\n")
            file.flush()
