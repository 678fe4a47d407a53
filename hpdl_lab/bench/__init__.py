"""Benchmarks on real ranks: correct first, timed second, as tables with the columns of nccl-tests.

`all_reduce` races this package's all-reduces against MPI and gloo; `collectives` does the whole family; `ddp` and
`pipeline` race our data and pipeline parallelism against PyTorch's.
"""

from .ddp import ddp
from .family import collectives
from .pipeline import pipeline
from .race import all_reduce

__all__ = ["all_reduce", "collectives", "ddp", "pipeline"]
