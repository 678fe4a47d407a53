"""Prefill and decode on different ranks: the keys and values of a prompt travel, once.

    rank 0      reads prompts       [ A's prompt ][ B's prompt ][ C's ]       many rows of x: bound by arithmetic
                                          | cache        | cache
    rank 1      decodes                   [a][a][a][a][a][ab][ab][ab]         one row each: bound by memory

No request that decodes waits for a prompt.
Bytes: 2 L n_kv d s b for a prompt of s tokens, and V logits, from which the other rank draws the first token.
Ref: Zhong et al. 2024, "DistServe", arXiv:2401.09670; Patel et al. 2024, "Splitwise", arXiv:2311.18677.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..comm.base import Comm, Work
from .cache import PagedCache
from .engine import GREEDY, Engine, Request, TokenStream, tokens_of
from .sampling import Sampling
from .speculative import CachedModel


def generate_disaggregated(
    comm: Comm, model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling = GREEDY
) -> dict[int, list[int]]:
    """Read all prompts on rank 0 and decode on the others, which take turns. Collective.

    Args:    model: the same on every rank; sampling: prompt i draws with sampling.seed + i, as in Engine.generate.
    Returns: {prompt: its new tokens} for prompts that this rank has decoded; none on rank 0.
    Raises:  ValueError for one rank, and for prompts that Engine.submit refuses.
    """
    if comm.size < 2:
        raise ValueError("prompts are read on rank 0 and decoded on others: at least 2 ranks are needed, got 1")
    prompts = [tokens_of(model, prompt, max_tokens) for prompt in prompts]
    if comm.rank == 0:
        reader, in_flight = CachedModel(model), deque[list[Work]]()
        for i, prompt in enumerate(prompts):
            if len(in_flight) == 2 * comm.size:  # prompts that have not been taken are kept: not without end
                _wait_all(in_flight.popleft())
            in_flight.append(_send_prompt(comm, reader, prompt, 1 + i % (comm.size - 1)))
        for works in in_flight:
            _wait_all(works)
        return {}
    return _decode(comm, Engine(model), prompts, max_tokens, sampling)


def _wait_all(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _send_prompt(comm: Comm, reader: CachedModel, prompt: Sequence[int], dst: int) -> list[Work]:
    """Read a prompt, and start to send `dst` the rows of its cache, and the logits after its last token."""
    s = len(prompt)
    reader.truncate(0)
    logits = reader([*prompt])[-1]
    slots = _slots_of(reader.pages, reader.cache.pages.size, s)
    rows = torch.cat([x[slots].flatten() for x in _kv_rows(reader.cache)])
    return [comm.isend(rows, dst), comm.isend(logits.clone(), dst)]


def _decode(
    comm: Comm, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling
) -> dict[int, list[int]]:
    """Take prompts as they come, while a slot is free, and step in between, on a rank other than 0."""
    streams = dict[int, TokenStream]()
    pending = list(range(comm.rank - 1, len(prompts), comm.size - 1))
    incoming: _IncomingCache | None = None
    while pending or incoming or engine.running or engine.waiting:
        if pending and incoming is None and len(engine.running) < engine.slots:
            incoming = _IncomingCache(comm, engine, len(prompts[pending[0]]))
        if incoming and (not engine.running or incoming.logits_work.test()):
            i = pending.pop(0)
            streams[i] = engine.submit(prompts[i], max_tokens, replace(sampling, seed=sampling.seed + i))
            incoming.start(streams[i].request)
            incoming = None
        engine.step()
    return {i: stream.request.output_tokens for i, stream in streams.items()}


class _IncomingCache:
    """A prompt of `s` tokens that rank 0 reads for `engine`."""

    def __init__(self, comm: Comm, engine: Engine, s: int) -> None:
        self.engine, self.s = engine, s
        self.sizes = [s * x[0].numel() for x in _kv_rows(engine.cache)]
        table = next(engine.cache.model.parameters())
        self.rows, self.logits = table.new_empty(sum(self.sizes)), table.new_empty(engine.vocabulary)
        self.rows_work, self.logits_work = comm.irecv(self.rows, 0), comm.irecv(self.logits, 0)

    def start(self, request: Request) -> None:
        """Let a new request run with the cache that has arrived; without free pages it waits, and is read here."""
        self.rows_work.wait()
        self.logits_work.wait()
        engine, s = self.engine, self.s
        if engine.pages.allocate(request.pages, 0, s) is None:
            return
        slots = _slots_of(request.pages, engine.pages.size, s)
        for x, part in zip(_kv_rows(engine.cache), self.rows.split(self.sizes), strict=True):
            x[slots] = part.view(s, *x.shape[1:])
        engine.waiting.remove(request)
        engine.running.append(request)
        engine.update_from_logits([(request, s)], self.logits.unsqueeze(0))


def _kv_rows(cache: PagedCache) -> list[Tensor]:
    """Return keys and values of each layer, without borders between pages: (tokens, h_kv, d) each."""
    return [x.flatten(0, 1) for attend in cache.attends for x in (attend.k, attend.v) if x is not None]


def _slots_of(pages: Sequence[int], size: int, s: int) -> Tensor:
    """Return the slots in `_kv_rows` of the first `s` tokens of a request with these pages, (s,) int64."""
    return torch.tensor([pages[i // size] * size + i % size for i in range(s)])
