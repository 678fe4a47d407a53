"""Frameworks as data, and one net as a static graph, in eager mode, and in torch.compile."""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self, TypeVar


class _Operand(Protocol):
    """Anything that a net computes with: a tensor, or a node of a static graph."""

    def __matmul__(self, other: Self, /) -> Self: ...
    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __gt__(self, other: float, /) -> Self: ...
    def relu(self) -> Self: ...
    def square(self) -> Self: ...
    def mean(self) -> Self: ...


Value = TypeVar("Value", bound=_Operand)


class _Framework(NamedTuple):
    """A framework. year: of the first public release; graph: when it is known; libraries: they compute."""

    name: str
    year: int
    graph: str
    distributes: str
    libraries: str


BEFORE, WHILE, TRACED, EITHER = "before the run", "while it runs", "traced", "while, or traced"
FRAMEWORKS = (
    _Framework("Theano", 2009, BEFORE, "MPI (Theano-MPI)", "BLAS, cuDNN"),
    _Framework("Caffe", 2013, BEFORE, "one node (NCCL); S-Caffe: MPI", "BLAS, cuDNN"),
    _Framework("CNTK", 2015, BEFORE, "1-bit SGD over MPI; later NCCL", "MKL, cuDNN"),
    _Framework("Chainer", 2015, WHILE, "ChainerMN over MPI and NCCL", "NumPy (BLAS), CuPy, cuDNN"),
    _Framework("MXNet", 2015, "before, or while", "kvstore: parameter servers", "BLAS, MKL-DNN, cuDNN"),
    _Framework("TensorFlow 1", 2015, BEFORE, "parameter servers over gRPC", "Eigen, MKL-DNN, cuDNN, XLA"),
    _Framework("Caffe2", 2017, BEFORE, "all-reduce by Gloo and NCCL", "BLAS, Eigen, cuDNN"),
    _Framework("PyTorch", 2017, EITHER, "DDP, FSDP: NCCL, Gloo, MPI", "BLAS, oneDNN, cuDNN"),
    _Framework("JAX", 2018, TRACED, "pjit, shard_map; NCCL on GPUs", "XLA, Eigen, cuDNN"),
    _Framework("TensorFlow 2", 2019, EITHER, "tf.distribute: gRPC, NCCL", "Eigen, oneDNN, cuDNN, XLA"),
)
SOURCES = {
    "Theano": "Theano, HISTORY.txt; 2011. Theano Team 2016, arXiv:1605.02688. Ma et al. 2016, arXiv:1605.08325",
    "Caffe": "Jia et al. 2014, arXiv:1408.5093. BVLC, Caffe 1.0, Makefile.config; 2017. Awan et al. 2017, PPoPP",
    "CNTK": "Microsoft, CNTK, README.md; 2017. Seide et al. 2014 (1-bit SGD), Interspeech",
    "Chainer": "Tokui et al. 2015, LearningSys; 2019, arXiv:1908.00213. Akiba et al. 2017, arXiv:1710.11351",
    "MXNet": "Chen et al. 2015, arXiv:1512.01274. Apache, MXNet documentation, Gluon and distributed training; 2019",
    "TensorFlow 1": "Google, Announcing TensorFlow 0.8; 2016. Abadi et al. 2016, arXiv:1605.08695",
    "Caffe2": "Facebook, Caffe2 documentation; 2017. Goyal et al. 2017, arXiv:1706.02677",
    "PyTorch": "PyTorch, A year in; 2018. Li et al. 2020, arXiv:2006.15704. Zhao et al. 2023, arXiv:2304.11277",
    "JAX": "Frostig et al. 2018, Compiling machine learning programs via high-level tracing. JAX documentation; 2024",
    "TensorFlow 2": "Agrawal et al. 2019, arXiv:1903.01855. TensorFlow, MultiWorkerMirroredStrategy; 2023",
}


def framework_history() -> str:
    """Return FRAMEWORKS as lines of text, by year."""
    rows = [("framework", "year", "graph known", "distributes by", "computes with"), *FRAMEWORKS]
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell!s:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def two_layers(x: Value, y: Value, w1: Value, b1: Value, w2: Value, b2: Value) -> Value:
    """Return the mean squared error of a net of two layers: computed if these are tensors, recorded if nodes."""
    return ((x @ w1 + b1).relu() @ w2 + b2 - y).square().mean()


def branching(x: Value, y: Value, w1: Value, b1: Value, w2: Value, b2: Value) -> Value:
    """Return the same, squared if it is more than 1: Python needs the value of the loss to decide its `if`."""
    loss = two_layers(x, y, w1, b1, w2, b2)
    return loss.square() if loss > 1 else loss
