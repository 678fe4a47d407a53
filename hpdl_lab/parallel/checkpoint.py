"""Checkpoints of a training run, which any number of ranks can go on from.

    rank 0   model, optimizer, step -> file.part -> file         replaced in one go: a run that dies leaves the old one
    resume   rank 0: file -> bytes --broadcast--> every rank     the file need not be where the other hosts can read it

    [ MAGIC | SHA-256 of the rest, 32 bytes | what torch.save has written ]                                    the file

What a step does depends on the seed and the number of the step, never on the number of ranks (data/sharding.py). So a
run that goes on with another number of ranks has the loss curve that it would have had without a break.
"""

import hashlib
import io
import os
import zlib

import torch

MAGIC = b"hpdl-lab checkpoint 1\n"
HEAD = len(MAGIC) + hashlib.sha256().digest_size
SAMPLE = 64  # examples whose values are part of what a data set is known by
READ, MISSING, UNREADABLE = b"rmu"  # how rank 0's attempt to read has ended


def facts_of(data, model):
    """What a step depends on besides the recipe: {name: number or word} of the data set and of the parameters."""
    x, y = data.train_x, data.train_y
    some = x[:: max(1, len(x) // SAMPLE)]
    return {
        "examples": len(y),
        "shape of an example": " x ".join(map(str, x.shape[1:])),
        "checksum of the data": zlib.crc32(bytes_of(some), zlib.crc32(bytes_of(y))),
        "parameters": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        "frozen parameters": sum(not p.requires_grad for p in model.parameters()),
    }


def bytes_of(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def save(comm, path, model, optimizer, step, facts):
    """Let rank 0 write model, optimizer and `step`, the number of steps that have been taken, to `path`.

    Args:    facts: {name: number or word} that must be the same when training goes on, such as batch and seed.
    Raises:  OSError on rank 0 where the file cannot be written; the file that was there before stays whole.
    """
    if comm.rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "facts": facts}
        write(path, state)


def write(path, state):
    """Replace the file `path` by one that holds `state`, in one go."""
    content = io.BytesIO()
    torch.save(state, content)
    with open(part_of(path), "wb") as file:
        file.write(MAGIC + hashlib.sha256(content.getbuffer()).digest())
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())  # else a crash of the machine could leave the new name with old or no bytes
    os.replace(part_of(path), path)


def part_of(path):
    """The file that is written first, and then takes the name `path`."""
    return f"{os.fspath(path)}.part"


def require_writable(comm, path):
    """Raise OSError on every rank alike unless rank 0 can write to `path`, before steps are taken in vain. Collective.

    Bytes: one word or sentence, once to every rank.
    """
    why = from_rank_0(comm, why_not_writable(path).encode() if comm.rank == 0 else b"").decode()
    if why:
        raise OSError(f"checkpoint {path} cannot be written on the host of rank 0: {why}")


def why_not_writable(path):
    """In words; "" where it can be written."""
    if os.path.isdir(path):
        return "it is a directory"
    try:
        with open(part_of(path), "wb"):
            pass
        os.unlink(part_of(path))
    except OSError as error:
        return error.strerror
    return ""


def restore(comm, path, model, optimizer, facts):
    """Take model and optimizer from the file that rank 0 finds at `path`; returns the number of steps in it.

    Raises:  on every rank alike: FileNotFoundError; OSError where rank 0 cannot read it; ValueError where the file is
    damaged, is of another model, or of another course of training than `facts` say.
    Bytes:   the file, once to every rank.
    """
    state = received(comm, path)
    require_same_facts(path, state["facts"], facts)
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"checkpoint {path} is of another model or optimizer: {short(error)}") from None
    return state["step"]


def require_same_facts(path, then, now):
    """Raise ValueError where the facts in the file `path` are not those of this course of training."""
    names = [name for name in now | then if then.get(name) != now.get(name)]
    if names:
        other = "; ".join(f"{name} {then.get(name)!r}, now {now.get(name)!r}" for name in names)
        raise ValueError(f"checkpoint {path} is of another course of training: {other}")


def short(error):
    """What an error says, in one line that is not endless."""
    return " ".join(str(error).split())[:300]


def received(comm, path):
    """What rank 0 reads at `path`, on every rank."""
    content = from_rank_0(comm, contents(path) if comm.rank == 0 else b"")
    how, content = content[0], content[1:]
    if how == MISSING:
        raise FileNotFoundError(f"no checkpoint at {path} on the host of rank 0: nothing to go on from")
    if how == UNREADABLE:
        raise OSError(f"checkpoint {path} cannot be read on the host of rank 0: {content.decode()}")
    if not content.startswith(MAGIC):
        raise ValueError(f"{path} is no checkpoint of this package: its first bytes are others")
    if hashlib.sha256(content[HEAD:]).digest() != content[len(MAGIC) : HEAD]:
        raise ValueError(f"checkpoint {path} is damaged: its bytes are not those that were written")
    return torch.load(io.BytesIO(content[HEAD:]), weights_only=True)


def contents(path):
    """How reading `path` has ended, one byte, and the bytes of the file, or why there are none, in words."""
    try:
        with open(path, "rb") as file:
            return bytes([READ]) + file.read()
    except FileNotFoundError:
        return bytes([MISSING])
    except OSError as error:
        return bytes([UNREADABLE]) + error.strerror.encode()


def from_rank_0(comm, content):
    """The bytes that rank 0 has, on every rank. Collective.   Steps: two broadcasts."""
    length = int(comm.broadcast(torch.tensor([len(content)])))
    if not length:
        return b""
    buffer = bytearray(content) if comm.rank == 0 else bytearray(length)
    comm.broadcast(torch.frombuffer(buffer, dtype=torch.uint8))
    return bytes(buffer)
