"""Requests that outlive the ranks that decode them: the queue belongs to whoever submits, and ranks may die.

queue = Queue(model)
numbers = [queue.submit(prompt, 20) for prompt in prompts]
queue.drain(lab.run)             tokens come while the ranks run; RequestsLost if one of them dies
lab.restart()
queue.drain(lab.run)             new ranks go on with those that had not begun
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..comm.base import Comm
from ..mesh import DeviceMesh
from ..units import counted, require_int
from .engine import Engine, tokens_of
from .stages import part_of


class RequestsLost(RuntimeError):
    """Ranks have failed while they decoded: who, which requests have ended with them, and how many still wait."""


class Queue:
    """prompts, tokens: of each request, the latter those generated so far; ended: {request: "" or why it is lost}."""

    def __init__(self, model: nn.Module, slots: int = 8) -> None:
        self.model, self.slots = model, require_int("slots", slots, 1)
        self.prompts: list[tuple[list[int], int]] = []
        self.tokens: list[list[int]] = []
        self.ended: dict[int, str] = {}

    def submit(self, prompt: Sequence[int], max_tokens: int = 16) -> int:
        """Returns the number of the request. Raises as Engine.submit does for a prompt that cannot be."""
        self.prompts.append((tokens_of(self.model, prompt, max_tokens), max_tokens))
        self.tokens.append([])
        return len(self.prompts) - 1

    def drain(self, run: Callable[..., Any]) -> None:
        """Decode all that wait, each rank with its heads of the model.

        Args:    run: f(fn, *args, on_row=f) as lab.run, or functools.partial(sim.run, 2).
        Raises:  RequestsLost with one sentence if a rank fails. What had a token by then ends; the others still wait.
        """
        waiting = {i: asked for i, asked in enumerate(self.prompts) if i not in self.ended}
        if not waiting:
            return
        for i in waiting:
            self.tokens[i].clear()  # of a run that was interrupted

        def on_row(row: dict[str, Any]) -> None:
            for i, token in row["tokens"]:
                self.tokens[i].append(token)
            self.ended |= dict.fromkeys(row["ended"], "")

        try:
            run(decode, self.model, waiting, self.slots, on_row=on_row)
        except RuntimeError as error:
            lost = [i for i in waiting if self.tokens[i] and i not in self.ended]
            left = len([i for i in waiting if i not in self.ended]) - len(lost)
            who = str(error).partition("\n")[0].rstrip(".")
            which = ", ".join(f"{i} after {counted(len(self.tokens[i]), 'token')}" for i in lost) or "none"
            sentence = f"{who}; requests that end with it: {which}; {left:,} wait for new ranks"
            self.ended |= dict.fromkeys(lost, sentence)
            raise RequestsLost(sentence) from error


def decode(comm: Comm, model: nn.Module, requests: dict[int, tuple[list[int], int]], slots: int) -> None:
    """Generate for all requests; rank 0 reports a row after each step: tokens [(request, token)], ended [request]."""
    part = part_of(DeviceMesh(comm, tp=comm.size), model)
    engine = Engine(part, slots, budget=max(256, slots), queue=len(requests))
    streams = {i: engine.submit(prompt, max_tokens) for i, (prompt, max_tokens) in requests.items()}
    while streams:
        before = {i: len(stream.request.tokens) for i, stream in streams.items()}
        engine.step()
        tokens = [(i, s.request.tokens[-1]) for i, s in streams.items() if len(s.request.tokens) > before[i]]
        ended = [i for i, stream in streams.items() if stream.request.ended]
        if comm.rank == 0:
            comm.report(tokens=tokens, ended=ended)
        for i in ended:
            del streams[i]
