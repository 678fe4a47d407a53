"""Logs of NCCL: one is read to find the setting that makes a job slow, others are written to practice on.

No GPU ran for the logs here: `write_log` makes them in the format of NCCL 2.26.2 with NCCL_DEBUG=INFO and
NCCL_DEBUG_SUBSYS=INIT,ENV,NET (source: github.com/NVIDIA/nccl, tag v2.26.2-1). Their tables have the format of
nccl-tests. Each node has H100 GPUs, an InfiniBand adapter of 400 Gbit/s per GPU, an adapter for storage, and Ethernet
of 25 Gbit/s.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass


def diagnose_log(log: str) -> tuple[int, str, str]:
    """Find in a log of NCCL the setting that makes a job slow.

        ... [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA

        Channel 00        ring 0
        1[1] -> 2[0]      from rank 1, which has GPU 1 of its node, to rank 2, GPU 0
        via NET/IB/...    how the data travel

    A setting is a fault only if the log shows its effect, and most settings are
    harmless. So find out how the data travel, and only then look for a setting. The
    value LOC forbids direct transfers between devices. A far adapter is too far from
    a GPU to read the GPU's memory.

        cause     effect: the data travel ...             setting
        "socket"  between nodes over Ethernet             NCCL_IB_DISABLE is 1
        "shm"     between GPUs of a node through the      NCCL_P2P_DISABLE is 1, or
                  node's main memory                      NCCL_P2P_LEVEL is LOC
        "gdr"     to a network adapter through the        NCCL_NET_GDR_LEVEL is LOC, or
                  node's main memory                      NCCL_IB_HCA is a far adapter
        "none"    in none of these ways

    With a far adapter, the log says "GPU Direct RDMA Disabled for GPU ... / HCA ...".
    Over Ethernet, data also pass through main memory, but the cause is "socket". A log
    has one cause at most.

    Args:    log: lines of all ranks, mixed; a setting may be made on one node only.
    Returns: (line, cause, variable). line: the number of a line, counted from 1, that sets the
             variable or shows its effect; the check accepts each such line. variable:
             the environment variable that has to change.
             (0, "none", "") if no setting does harm.
    Ref: NVIDIA, NCCL user guide, Environment Variables.
    """
    known = (
        ("via NET/Socket", "socket", ["NCCL_IB_DISABLE set by environment to 1"]),
        ("via SHM", "shm", ["NCCL_P2P_DISABLE set by environment to 1", "NCCL_P2P_LEVEL set by environment to LOC"]),
        ("GDR 0", "gdr", ["NCCL_NET_GDR_LEVEL set by environment to LOC", "NCCL_IB_HCA set to"]),
    )
    for effect, cause, settings in known:
        if effect in log:
            for setting in settings:
                for number, line in enumerate(log.splitlines(), start=1):
                    if setting in line:
                        return number, cause, setting.split()[0]
    return 0, "none", ""


FAULTS = {  # variable: (cause, what NCCL prints, GB/s of a large all-reduce, made up)
    "NCCL_IB_DISABLE": ("socket", "NCCL_IB_DISABLE set by environment to 1.", 2.8),
    "NCCL_P2P_DISABLE": ("shm", "NCCL_P2P_DISABLE set by environment to 1", 18),
    "NCCL_P2P_LEVEL": ("shm", "NCCL_P2P_LEVEL set by environment to LOC", 18),
    "NCCL_NET_GDR_LEVEL": ("gdr", "NCCL_NET_GDR_LEVEL set by environment to LOC", 17),
    "NCCL_IB_HCA": ("gdr", "NCCL_IB_HCA set to mlx5_{}", 9),  # the adapter for storage
}
PER_ADAPTER, NVLINK = 46, 360  # GB/s of a ring; nccl-tests, issues 290 (46 to 48; 2025) and 212 (370; 2024)


@dataclass(frozen=True)
class NcclJob:
    """A job on `hosts` with `gpus` each. The hosts with the numbers `on` make `setting`, a key of FAULTS or ""."""

    setting: str = ""
    gpus: int = 4
    hosts: tuple[str, ...] = ("node1", "node2")
    on: tuple[int, ...] = (0, 1)
    harmless: tuple[str, ...] = ("NCCL_SOCKET_IFNAME set by environment to eth0", "NCCL_IB_HCA set to mlx5")

    @property
    def cause(self) -> str:
        """Cause that `diagnose_log` has to find: no setting does harm to messages that the job does not send."""
        cause = FAULTS[self.setting][0] if self.setting else "none"
        return "none" if (self.gpus if cause == "shm" else len(self.hosts)) == 1 else cause


def write_log(job: NcclJob, seed: int = 0) -> str:
    """Write a job's log and its table, with the lines of all ranks mixed as the seed says."""
    rng, ranks = random.Random(seed), len(job.hosts) * job.gpus
    waiting = [[*_messages(job, rank)] for rank in range(ranks)]
    order = [rank for rank in range(ranks) for _ in waiting[rank]]
    rng.shuffle(order)
    process = [rng.randrange(10_000, 90_000) for _ in range(ranks)]
    lines = ["# written by hpdl_lab in the format of NCCL 2.26.2; no GPU ran", "NCCL version 2.26.2+cuda12.8"]
    for rank in order:
        where = f"{job.hosts[rank // job.gpus]}:{process[rank]}:{process[rank] + 40} [{rank % job.gpus}]"
        text = waiting[rank].pop(0)
        lines.append(f"[2026-03-02 10:11:12] {where} {text}" if "NCCL WARN" in text else f"{where} NCCL INFO {text}")
    return "\n".join([*lines, *_table(job)])


def _messages(job: NcclJob, rank: int) -> Iterator[str]:
    """Yield the lines that NCCL prints on a rank."""
    (host, gpu), ranks = divmod(rank, job.gpus), len(job.hosts) * job.gpus
    here = job.setting if host in job.on else ""
    ethernet, far, gdr = here == "NCCL_IB_DISABLE", here == "NCCL_IB_HCA", not here or FAULTS[here][0] != "gdr"
    port = f"eth0:10.0.0.{host + 1}<0>"
    yield f"Bootstrap: Using {port}"
    yield "NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin."
    yield from [FAULTS[here][1].format(job.gpus)] if here else []
    yield from (text for text in job.harmless if not here or here[5:7] not in text)
    if ethernet:
        yield f"NET/Socket : Using [0]{port}"
    else:
        names = [f"mlx5_{i}:1/IB" for i in range(0 if far else job.gpus)] + [f"mlx5_{job.gpus}:1/RoCE"]
        yield f"NET/IB : Using {' '.join(f'[{i}]{name}' for i, name in enumerate(names))} [RO]; OOB {port}"
        level = 0 if here == "NCCL_NET_GDR_LEVEL" else 5
        for adapter, distance in [(0, 8)] if far else [(gpu, 4), (job.gpus, 8)]:
            able, compared, end = (
                ("Enabled", "<=", ", read 0 mode Default") if distance <= level else ("Disabled", ">", "")
            )
            yield f"GPU Direct RDMA {able} for GPU {rank} / HCA {adapter} (distance {distance} {compared} {level}){end}"
    yield f"Using network {'Socket' if ethernet else 'IB'}"
    net = "Socket/0" if ethernet else f"IB/{0 if far else gpu}{'/GDRDMA' if gdr else ''}"
    for channel in range(2):
        ring = [h * job.gpus + (channel + i) % job.gpus for h in range(len(job.hosts)) for i in range(job.gpus)]
        yield from [] if rank else [f"Channel {channel:02}/02 : {' '.join(map(str, ring))}"]
        position = ring.index(rank)
        for way, a, b in (("receive", ring[position - 1], rank), ("send", rank, ring[(position + 1) % ranks])):
            pair = f": {a}[{a % job.gpus}] -> {b}[{b % job.gpus}]"
            if a // job.gpus != b // job.gpus:
                yield f"Channel {channel:02}/0 {pair} [{way}] via NET/{net}"
            elif way == "send" and "P2P" in here:
                yield f"Channel {channel:02} {pair} via SHM/direct/direct"
            elif way == "send":
                yield f"Channel {channel:02}/0 {pair} via P2P/CUMEM"
    yield f"Connected all rings, use ring PXN 0 GDR {0 if job.cause in ('socket', 'gdr') else 1}"
    device = f"cudaDev {gpu} nvmlDev {gpu} busId {0x18000 + 0x11000 * gpu:x} commId 0x7d2c6e1f9a0b4c55"
    yield f"ncclCommInitRank comm 0x55d0c0 rank {rank} nranks {ranks} {device} - Init COMPLETE"


def _table(job: NcclJob) -> Iterator[str]:
    """Yield the table of nccl-tests' all_reduce_perf, from a model: 40 µs, and then a constant bandwidth."""
    ranks, slow = len(job.hosts) * job.gpus, FAULTS[job.setting][2] if job.cause != "none" else NVLINK
    peak = min(slow, NVLINK if len(job.hosts) == 1 else PER_ADAPTER * job.gpus)
    form = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}" + 2 * "  {:>7}  {:>6}  {:>6}  {:>6}"
    yield form.format("#       size", "count", "type", "redop", "root", *2 * ("time", "algbw", "busbw", "#wrong"))
    yield form.format("#        (B)", "(elements)", "", "", "", *2 * ("(us)", "(GB/s)", "(GB/s)", ""))
    for size in (2**10, 2**15, 2**20, 2**25, 2**30):
        share = 2 * (ranks - 1) / ranks
        us = 40 + share * size / peak / 1e3
        speeds = f"{us:.2f}"[:7].rstrip("."), f"{size / us / 1e3:.2f}", f"{share * size / us / 1e3:.2f}", 0
        yield form.format(size, size // 4, "float", "sum", -1, *speeds, *speeds)


def busbw(log: str) -> float:
    """Return the GB/s in the last row of the table, out of place."""
    return float(log.splitlines()[-1].split()[7])


def excerpt(log: str, than: str = "") -> str:
    """Return rank 0's lines and the table, numbered, without host and process, and without the lines of `than`."""
    found = re.search(r"^\S+ \[0\](?=.* rank 0 nranks)", log, re.M)
    known = {line.partition("] ")[2] or line for line in than.splitlines()}
    rows = []
    for number, line in enumerate(log.splitlines(), start=1):
        text = line.partition("] ")[2] or line
        if found and line.startswith((found[0], "#", " ")) and text not in known:
            rows.append(f"{number:4} {text.removeprefix('NCCL INFO ') if text != line else line[:77]}")
    return "\n".join(rows)


LOGS = {
    cause: write_log(NcclJob(setting))
    for cause, setting in zip(("none", "socket", "shm", "gdr"), ("", *list(FAULTS)[:2], "NCCL_IB_HCA"), strict=True)
}
