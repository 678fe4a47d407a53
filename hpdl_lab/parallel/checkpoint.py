"""Checkpoints of a training run, which any number of ranks, and any mesh, can go on from.

    rank 0   model, optimizer, step -> file.part -> file         replaced in one go: a run that dies leaves the old one
    resume   rank 0: file -> bytes --broadcast--> every rank     the other hosts need not be able to read it

    [ MAGIC | SHA-256 of the rest, 32 bytes | what torch.save has written ]                                    the file

The file holds the whole model, in float32 if a strategy computes in 16 bits, and the whole optimizer. A
HybridParallel and its OptimizerState put their state together from all ranks when they are saved, and take their parts
when they are loaded.

With ZeRO every rank can write what it holds (`save_shards`), without a message; the file then names the ranks' files:

    rank r   its shards -> file.STEP.r-of-P      rank 0, when all are written: [names of these] -> file
    resume   rank 0 reads them all, puts them together, and goes on as above: on any number of ranks, in any stage

What a step does depends on the seed and the number of the step, never on the number of ranks (data/loading.py). So a
run that goes on with another number of ranks has the loss curve that it would have had without a break.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from ..comm.base import Comm
from ..comm.buffers import dtype_name
from ..data.dataset import Dataset
from ..system import write_file
from .consensus import bytes_of, together

MAGIC = b"hpdl-lab checkpoint 1\n"
HEAD = len(MAGIC) + hashlib.sha256().digest_size
SAMPLE = 64  # examples whose values are part of what a data set is known by
Facts: TypeAlias = dict[str, object]  # {name: number or word} of a course of training
StateDict: TypeAlias = dict[str, Any]  # what torch's state_dict() returns: nested, and saved as it is


class Stateful(Protocol):
    """A model or an optimizer, on one rank or over many: both methods are called on every rank."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict, /) -> object: ...


class Sharded(Stateful, Protocol):
    """A model or an optimizer in shards: every rank holds its own."""

    def shards(self) -> StateDict:
        """Return its state_dict() with TensorPieces in place of each tensor that is in shards."""
        ...


class TensorPieces(TypedDict):
    """The pieces of one tensor that a rank has: (begin, elements from there on) of each."""

    shape: tuple[int, ...]
    pieces: list[tuple[int, Tensor]]


def shard_of(shape: Sequence[int], pieces: Iterable[tuple[int, Tensor]]) -> TensorPieces:
    """Return what stands for a tensor of this shape, from a rank's flat pieces [(begin, elements from there on)]."""
    return {"shape": tuple(shape), "pieces": [(begin, piece.detach().clone()) for begin, piece in pieces]}


def _merged(parts: Sequence[Any]) -> Any:
    """Put together what `shards` has returned on the ranks, in order; what is not in shards is the first rank's."""
    if isinstance(parts[0], list):
        return [_merged(items) for items in zip(*parts, strict=True)]
    if not isinstance(parts[0], dict):
        return parts[0]
    if {*parts[0]} == {"shape", "pieces"}:
        pieces = sorted((piece for part in parts for piece in part["pieces"]), key=lambda piece: piece[0])
        shape = parts[0]["shape"]
        return torch.cat([elements for _, elements in pieces]).view(shape) if pieces else torch.zeros(shape)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _merged([part[name] for part in parts if name in part]) for name in names}


def facts_of(data: Dataset, model: nn.Module) -> Facts:
    """Return what a step depends on besides the recipe: {name: number or word} of data set and parameters."""
    x, y = data.train_x, data.train_y
    some = x[:: max(1, len(x) // SAMPLE)]
    return {
        "examples": len(y),
        "shape of an example": " x ".join(map(str, x.shape[1:])),
        "checksum of the data": zlib.crc32(bytes_of(some), zlib.crc32(bytes_of(y))),
        "parameters": ", ".join(sorted({dtype_name(p.dtype) for p in model.parameters()})),
        "frozen parameters": sum(not p.requires_grad for p in model.parameters()),
    }


def save(comm: Comm, path: str, model: Stateful, optimizer: Stateful, step: int, facts: Facts | None = None) -> None:
    """Let rank 0 write model, optimizer and `step`, the number of steps that have been taken, to `path`. Collective.

    Args:    facts: {name: number or word} that must be the same when training goes on, such as batch and seed.
    Raises:  OSError on every rank if the file cannot be written; the file that was there before stays whole.
    """
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "facts": facts or {}}
    with together(comm):
        if comm.rank == 0:
            write_file(path, _sealed(state), sync=True)


def save_shards(
    comm: Comm, path: str, model: Sharded, optimizer: Sharded, step: int, facts: Facts | None = None
) -> None:
    """Do what `save` does, but let every rank write its own shards, to files beside `path` that rank 0 can read.

    The files of the checkpoint before are removed once this one is whole.
    Raises:  OSError on every rank if one cannot write; the checkpoint that was there before stays whole.
    """
    names = [f"{path}.{step}.{rank}-of-{comm.size}" for rank in range(comm.size)]
    with together(comm):
        state = {"model": model.shards(), "optimizer": optimizer.shards()}
        write_file(names[comm.rank], _sealed(state), sync=True)
    with together(comm):
        if comm.rank == 0:
            before = _opened(_contents(path)).get("shards", []) if os.path.exists(path) else []
            files = [os.path.basename(name) for name in names]
            write_file(path, _sealed({"shards": files, "step": step, "facts": facts or {}}), sync=True)
            for name in {*before} - {*files}:
                with suppress(FileNotFoundError):
                    os.unlink(_shard_path(path, name))


def _shard_path(path: str, name: str) -> str:
    """Return the file called `name` in the folder of the file `path`."""
    return os.path.join(os.path.dirname(path), os.path.basename(name))


def _sealed(state: StateDict) -> bytes:
    """Return the contents of a file that holds `state`."""
    content = io.BytesIO()
    torch.save(state, content)
    return MAGIC + hashlib.sha256(content.getbuffer()).digest() + content.getvalue()


def _opened(content: bytes) -> StateDict:
    """Return the state in the contents of a file."""
    return torch.load(io.BytesIO(content[HEAD:]), weights_only=True)


def require_writable(comm: Comm, path: str) -> None:
    """Raise OSError on every rank unless rank 0 can write to `path`, before steps are taken in vain. Collective."""
    with together(comm):
        if comm.rank == 0:
            try:
                if os.path.isdir(path):
                    raise IsADirectoryError(0, "it is a directory")
                write_file(f"{path}.part", b"")
                os.unlink(f"{path}.part")
            except OSError as error:
                raise OSError(f"checkpoint {path} cannot be written on this host: {error.strerror}") from None


def restore(comm: Comm, path: str, model: Stateful, optimizer: Stateful, facts: Facts | None = None) -> int:
    """Take model and optimizer from the file that rank 0 finds at `path`; returns the number of steps in it.

    Raises:  on every rank alike: FileNotFoundError; OSError if rank 0 cannot read it; ValueError if the file
    is damaged, of another model, or of another course of training than `facts` say.
    Bytes:   the file, once to every rank.
    """
    state, now = received(comm, path), facts or {}
    then = state["facts"]
    names = [name for name in now | then if then.get(name) != now.get(name)]
    if names:
        other = "; ".join(f"{name} {then.get(name)!r}, now {now.get(name)!r}" for name in names)
        raise ValueError(f"checkpoint {path} is of a different training run: {other}")
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"checkpoint {path} is of another model or optimizer: {why}") from None
    return state["step"]


def received(comm: Comm, path: str) -> StateDict:
    """Return on every rank what rank 0 reads at `path`."""
    content = b""
    with together(comm):
        if comm.rank == 0:
            content = _contents(path)
            state = _opened(content)
            if "shards" in state:
                parts = [_opened(_contents(_shard_path(path, name))) for name in state.pop("shards")]
                content = _sealed(_merged(parts) | state)
    length = int(comm.broadcast(torch.tensor([len(content)])))
    buffer: Tensor = torch.frombuffer(bytearray(content) if comm.rank == 0 else bytearray(length), dtype=torch.uint8)
    return _opened(comm.broadcast(buffer).numpy().tobytes())


def _contents(path: str) -> bytes:
    """Read the file at `path`. Raises OSError if it cannot be read, ValueError if it is not whole."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise FileNotFoundError(f"no checkpoint at {path} on this host: nothing to resume from") from None
    except OSError as error:
        raise OSError(f"checkpoint {path} cannot be read on this host: {error.strerror}") from None
    if not content.startswith(MAGIC):
        raise ValueError(f"{path} is not a checkpoint of this package: its first bytes differ")
    if hashlib.sha256(content[HEAD:]).digest() != content[len(MAGIC) : HEAD]:
        raise ValueError(f"checkpoint {path} is damaged: its bytes have changed since it was written")
    return content
