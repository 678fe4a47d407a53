"""Answers to exercise 14.7 that the check must reject or accept; CI proves both."""

import re

import numpy as np

BAD = {
    "NCCL_IB_DISABLE set by environment to 1": "socket",
    "NCCL_P2P_DISABLE set by environment to 1": "shm",
    "NCCL_P2P_LEVEL set by environment to LOC": "shm",
    "NCCL_NET_GDR_LEVEL set by environment to LOC": "gdr",
    "NCCL_IB_HCA set to mlx5_": "gdr",
}
EFFECTS = {"socket": r"\] via NET/Socket", "shm": r"via SHM/", "gdr": r"via NET/IB/\d+$"}


def first(log, marks):
    found = ((n, mark) for n, line in enumerate(log.split("\n"), 1) for mark in marks if re.search(mark, line))
    return next(((n, BAD.get(mark, "gdr"), mark.split(" ")[0]) for n, mark in found), (0, "none", ""))


def by_settings(log):
    marks = [mark for mark, cause in BAD.items() if re.search(EFFECTS[cause], log, re.M)]
    return list(first(log, marks))


def by_the_last_line(log):
    """Names the last line that shows the effect, and writes NCCL_IB_DISABLE=0."""
    number, cause, variable = by_settings(log)
    shown = [n for n, line in enumerate(log.splitlines(), 1) if cause != "none" and re.search(EFFECTS[cause], line)]
    return np.int64(max(shown, default=0)), cause.upper(), variable and f"{variable}=0"


def by_channels(log):
    ways = [re.sub(r"\d", "", line.split(" via ")[1]) for line in log.splitlines() if " via " in line]
    slow = {"NET/Socket/": "socket", "SHM/direct/direct": "shm", "NET/IB/": "gdr"}
    cause = next((slow[way] for way in ways if way in slow), "none")
    return first(log, [mark for mark in BAD if BAD[mark] == cause])


WRONG = {
    "14.7": r"""
plugin: uses its own network code
    return first(log, ['Could not find'])
warning: Does a channel need it
    return first(log, ['WARN'])
value: has a harmless value
    return first(log, ['NCCL_IB_DISABLE'])
far: Does a channel use it
    return first(log, ['RDMA Disabled for'])
table: Small messages are slow in every job
    rows = [(line.split()[7], n) for n, line in enumerate(log.splitlines(), 1) if ' sum ' in line]
    return min(rows)[1], 'gdr', 'NCCL_ALGO'
effect: in any of them
    return first(log, BAD)
effect: in any of them
    'via NET/Socket' => 'Using network Socket'
ranks: the lines of all ranks
    return by_settings(re.sub(r'(?m)^(?!c301|gpu-a|x1|dl7).*$', '', log))
count: Which number has the first line
    start=1 => start=0
line: neither makes the setting
    (number, cause => (2, cause
line: The cause is right
    0, 'none' => 1, 'none'
order: Which network do the channels name
    return first(log, ['GDR 0']) if 'GDR 0' in log else diagnose_log(log)
cause: such as 'via SHM/direct/direct'
    'shm' => 'socket'
cause: such as 'via NET/IB/3'
    'gdr' => 'shm'
cause: such as 'via NET/Socket/0'
    'via NET/Socket' => 'via NET/TCP'
variable: chooses among Ethernet ports
    setting.split()[0] => setting.split()[0].replace('IB_DISABLE', 'SOCKET_IFNAME')
value: has a harmless value
    'NCCL_NET_GDR_LEVEL set by environment to LOC', 'NCCL_IB_HCA set to' => 'NCCL_IB_HCA set to'
variable: Its value does no harm
    setting.split()[0] => {'gdr': 'NCCL_IB_HCA'}.get(cause, setting.split()[0])
variable: The log does not set it
    setting.split()[0] => {'shm': 'NCCL_P2P_DISABLE'}.get(cause, setting.split()[0])
variable: return an empty text
    'none', '' => 'none', 'none'
returns: return one of none, socket
    'socket' => 'NET/Socket'
returns: returned None
    print(end='')
returns: return (line, cause, variable)
    return float('nan'), 'none', ''
returns: return (line, cause, variable)
    return 0, None, None
""",
}
RIGHT = {"14.7": (by_settings, by_the_last_line, by_channels)}
COMPLETED = {
    "14.7": ['"NCCL_P2P_DISABLE set by environment to 1"', '"NCCL_IB_HCA set to"'],
}
