"""Keys and values of all requests in pages, and the attention that reads them there, for a batch of any lengths.

    request A decodes, 1 token;  B decodes;  C reads 3 tokens of its prompt       one batch of T = 5 rows
    tokens      a9  b4  c0 c1 c2       (T, 1): each token is a sequence of length 1, at a position of its own
    attend      every layer writes k, v of all rows to their pages, then each row reads its own request's pages

All other layers treat rows alike, so that requests of different lengths share each product of matrices.
Bytes: 2 L n_kv d s b for L layers and b requests of s tokens; with DeepSeek's absorbed form 576 numbers instead of
2 n_kv d per token and layer.   Ref: Kwon et al. 2023, "PagedAttention", arXiv:2309.06180.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..models.attention import Attend, attentions_of, grouped_query_attention
from ..units import amount_text, counted
from .pages import Pages

if TYPE_CHECKING:
    from ..models.gpt import LanguageModel

GROUP_BYTES = 2**19  # of keys that are gathered for one call of attention: they stay in a core's cache


class Chunk(NamedTuple):
    """Tokens of one request, from position `start` on; `pages` hold all its tokens up to the last one."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


class _AttentionGroup(NamedTuple):
    """Rows that attend in one call: a token each of requests that decode, or (chunk) several tokens of one request.

    kv_slots: (requests t,): slots in memory of the first t tokens of each request; mask: True for slots that a row
    attends to, (requests, 1, 1, t) or (rows, t); None: all.
    """

    rows: slice
    requests: int
    chunk: bool
    kv_slots: Tensor
    mask: Tensor | None


class Batch:
    """A step as every layer needs it, prepared once. Rows: decodes, the longest first, then chunks.

    token_bytes: of the keys of a token in one layer.
    """

    def __init__(self, chunks: Sequence[Chunk], page_size: int, token_bytes: int, device: torch.device) -> None:
        self.page_size, self.device = page_size, device
        order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].tokens) > 1, -chunks[i].start))
        tokens: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        self.last_rows = [0] * len(chunks)  # row of the last token of each chunk
        for i in order:
            chunk = chunks[i]
            for position, token in enumerate(chunk.tokens, chunk.start):
                tokens.append(token)
                positions.append(position)
                slot_mapping.append(chunk.pages[position // page_size] * page_size + position % page_size)
            self.last_rows[i] = len(tokens) - 1
        self.tokens, self.positions = self.tensor(tokens).unsqueeze(1), self.tensor(positions).unsqueeze(1)  # (T, 1)
        self.slot_mapping = self.tensor(slot_mapping)  # (T,): slots in memory of a token's key and value
        self.groups: list[_AttentionGroup] = []
        decodes = [chunks[i] for i in order if len(chunks[i].tokens) == 1]
        first = 0
        while first < len(decodes):
            t = decodes[first].start + 1
            some = decodes[first : first + max(1, GROUP_BYTES // (t * token_bytes))]
            rows = slice(first, first + len(some))
            mask = torch.arange(t, device=device) <= self.positions[rows, None, None] if len(some) > 1 else None
            self.groups.append(_AttentionGroup(rows, len(some), False, self.kv_slots(some, t), mask))
            first += len(some)
        for chunk in (chunks[i] for i in order[len(decodes) :]):
            rows, t = slice(first, first + len(chunk.tokens)), chunk.start + len(chunk.tokens)
            mask = torch.ones(len(chunk.tokens), t, dtype=torch.bool, device=device).tril(chunk.start)
            self.groups.append(_AttentionGroup(rows, 1, True, self.kv_slots([chunk], t), mask))
            first = rows.stop

    def tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def kv_slots(self, chunks: Sequence[Chunk], t: int) -> Tensor:
        """Return the slots of the first t tokens of each request, (requests t,), of missing ones on its first page."""
        most = -(-t // self.page_size)
        pages = self.tensor([[*row, *row[:1] * (most - len(row))] for row in (list(c.pages[:most]) for c in chunks)])
        within = torch.arange(self.page_size, device=self.device)
        return (pages.unsqueeze(2) * self.page_size + within).flatten(1)[:, :t].flatten()  # (requests, pages, size)


class _PagedAttend(Attend):
    """The attention of one layer over keys and values in pages. k: (pages, size, h_kv, d_k), v: the same with d_v."""

    def __init__(self, cache: PagedCache, k: Tensor, v: Tensor | None) -> None:
        self.cache, self.k, self.v = cache, k, v
        self.rows = [x.flatten(0, 1) for x in (k, v) if x is not None]  # (pages size, h_kv, d): the same memory

    def positions(self, s: int, device: torch.device) -> Tensor:
        return self.cache.batch.positions

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Keep k and v, (T, h_kv, 1, d), in their pages, and return the attention of q (T, h, 1, d): (T, h, 1, d_v)."""
        groups, d_v = self.cache.batch.groups, v.shape[-1]
        for rows, x in zip(self.rows, (k, v), strict=False):
            rows.index_copy_(0, self.cache.batch.slot_mapping, x.squeeze(2))
        if len(groups) == 1:
            return self.attend(q, groups[0], d_v, scale)
        return torch.cat([self.attend(q[group.rows], group, d_v, scale) for group in groups])

    def attend(self, q: Tensor, group: _AttentionGroup, d_v: int, scale: float | None) -> Tensor:
        """Return the attention, (rows, h, 1, d_v), of q (rows, h, 1, d)."""
        n, (groups, d) = group.requests, self.rows[0].shape[1:]
        # (requests, t, h_kv, d) -> (requests, h_kv, t, d)
        kept = [x.index_select(0, group.kv_slots).view(n, -1, groups, x.shape[2]).transpose(1, 2) for x in self.rows]
        k, v = kept if len(kept) == 2 else (kept[0], kept[0][..., :d_v])
        if not group.chunk:  # heads that share keys one below the other: no copy of the keys for each
            q = q.reshape(n, groups, -1, d)
            return scaled_dot_product_attention(q, k, v, group.mask, scale=scale).reshape(n, -1, 1, d_v)
        q = q.transpose(0, 2)  # (1, h, rows, d)
        if d == d_v:
            return scaled_dot_product_attention(q, k, v, group.mask, scale=scale, enable_gqa=True).transpose(0, 2)
        return grouped_query_attention(q, k, v, scale).transpose(0, 2)


class PagedCache:
    """The cache of a model in `pages` pages of `page_size` tokens, and the model's forward that uses it.

    model: GPT, LLaMA or DeepSeek, or a rank's shard of one: kept are keys and values of the heads that it has. Outside
    of `forward` the model is as it was.
    Raises:  ValueError if the machine does not have the memory.
    """

    batch: Batch

    def __init__(self, model: nn.Module, pages: int, page_size: int) -> None:
        self.model = cast("LanguageModel", model)
        self.attentions = attentions_of(model)
        weight = next(model.parameters())
        self.device = weight.device
        shapes = [attention.cache_shape for attention in self.attentions]
        self.token_bytes = sum(heads * (d_k + d_v) for heads, d_k, d_v in shapes) * weight.element_size()
        self.key_bytes = max((heads * d_k for heads, d_k, _ in shapes), default=1) * weight.element_size()
        self.nbytes = pages * page_size * self.token_bytes
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.nbytes > memory:
            raise ValueError(
                f"{counted(pages, 'page')} of {counted(page_size, 'token')} are {amount_text(self.nbytes)} of keys and "
                f"values, and this machine has {amount_text(memory)}"
            )
        self.pages = Pages(pages, page_size)

        def room(heads: int, d: int) -> Tensor:
            return torch.zeros(pages, page_size, heads, d, dtype=weight.dtype, device=weight.device)

        self.attends = [_PagedAttend(self, room(h, d_k), room(h, d_v) if d_v else None) for h, d_k, d_v in shapes]

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], every: bool = False) -> Tensor:
        """Write the keys and values of these tokens and return logits: (chunks, V) after the last token of each.

        every: return (T, V) after every token, chunk by chunk; then no chunk of one token may follow a longer one.
        """
        self.batch = batch = Batch(chunks, self.pages.size, self.key_bytes, self.device)
        before = [attention.attend for attention in self.attentions]
        for attention, attend in zip(self.attentions, self.attends, strict=True):
            attention.attend = attend
        try:
            x = self.model.blocks(self.model.embed(batch.tokens))  # (T, 1) -> (T, 1, d)
            return self.model.logits(x if every or len(x) == 1 else x[batch.last_rows]).squeeze(1)
        finally:
            for attention, attend in zip(self.attentions, before, strict=True):
                attention.attend = attend

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to) in all layers."""
        for source, to in pairs:
            for attend in self.attends:
                for x in (attend.k, attend.v):
                    if x is not None:
                        x[to] = x[source]
