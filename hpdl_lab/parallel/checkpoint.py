"""Checkpoints of a training run, which any number of ranks can go on from.

    rank 0   model, optimizer, step -> file.part -> file         replaced in one go: a run that dies leaves the old one
    resume   rank 0: file -> bytes --broadcast--> every rank     the file need not be where the other hosts can read it

What a step does depends on the seed and the number of the step, never on the number of ranks (data/sharding.py). So a
run that goes on with another number of ranks has the loss curve that it would have had without a break.
"""

import io
import os

import torch


def save(comm, path, model, optimizer, step, facts):
    """Let rank 0 write model, optimizer and `step`, the number of steps that have been taken, to `path`.

    Args:    facts: {name: number or string} that must be the same when training goes on, such as batch and seed.
    Raises:  OSError on rank 0 where the file cannot be written; the file that was there before stays whole.
    """
    if comm.rank != 0:
        return
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "facts": facts}
    part = f"{os.fspath(path)}.part"
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # else a crash of the machine could leave the new name with old or no bytes
    os.replace(part, path)


def restore(comm, path, model, optimizer, facts):
    """Take model and optimizer from the file that rank 0 finds at `path`; returns the number of steps in it.

    Raises:  on every rank alike: FileNotFoundError; ValueError where the file is damaged, is of another model, or of
    another course of training than `facts` say.
    Bytes:   the file, once to every rank.
    """
    state = received(comm, path)
    then = state["facts"]
    other = [f"{name} {then.get(name)!r}, now {now!r}" for name, now in facts.items() if then.get(name) != now]
    if other:
        raise ValueError(f"checkpoint {path} is of another course of training: {'; '.join(other)}")
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(f"checkpoint {path} is of another model or optimizer: {first}") from None
    return state["step"]


def received(comm, path):
    """What rank 0 reads at `path`, on every rank."""
    content = contents(path) if comm.rank == 0 else b""
    length = comm.broadcast(torch.tensor([len(content)]))
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if comm.rank == 0:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else buffer
    comm.broadcast(buffer)
    if not len(buffer):
        raise FileNotFoundError(f"no checkpoint at {path} on the host of rank 0: nothing to go on from")
    try:
        state = torch.load(io.BytesIO(buffer.numpy().tobytes()), weights_only=True)
        return {name: state[name] for name in ("model", "optimizer", "step", "facts")}
    except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
        why = f"{type(error).__name__}: it is damaged, or no checkpoint"
        raise ValueError(f"checkpoint {path} cannot be read, {why}") from None


def contents(path):
    """The bytes of the file; none where there is no file."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""
