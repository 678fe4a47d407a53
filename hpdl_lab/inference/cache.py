"""Keys and values of all requests in pages, and the attention that reads them there, for a batch of any lengths.

    request A decodes, 1 token;  B decodes;  C reads 3 tokens of its prompt       one batch of T = 5 rows
    tokens      a9  b4  c0 c1 c2       (T, 1): each token is a sequence of length 1, at a position of its own
    attend      every layer writes k, v of all rows to their pages, then each row hears its own request's pages

All that is not attention treats rows alike, so that requests of different lengths share each product of matrices.
Bytes: 2 L n_kv d s b for L layers and b requests of s tokens; with DeepSeek's absorbed form 576 numbers instead of
2 n_kv d per token and layer.   Ref: Kwon et al. 2023, "PagedAttention", arXiv:2309.06180.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..models.attention import Attend, attentions_of, grouped_query_attention
from ..units import amount_text, counted
from .pages import Pages


class Chunk(NamedTuple):
    """Tokens of one request, of which the first has position `start`; `pages` hold all up to the last of them."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


class Batch:
    """What every layer has to know of a step, prepared once: the rows of decodes come first, then those of chunks."""

    def __init__(self, chunks: Sequence[Chunk], size: int, device: torch.device) -> None:
        def tensor(values: list) -> Tensor:
            return torch.tensor(values, device=device)

        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].tokens) > 1)
        tokens, places, slots, last = [], [], [], [0] * len(chunks)
        for i in order:
            chunk = chunks[i]
            for place, token in enumerate(chunk.tokens, chunk.start):
                tokens.append(token)
                places.append(place)
                slots.append(chunk.pages[place // size] * size + place % size)
            last[i] = len(tokens) - 1
        self.tokens, self.places = tensor(tokens).unsqueeze(1), tensor(places).unsqueeze(1)  # (T, 1)
        self.slots = tensor(slots)  # (T,): where in memory a token's key and value are
        self.last = last  # row of the last token of each chunk
        decodes = [chunk for chunk in chunks if len(chunk.tokens) == 1]
        self.decodes = len(decodes)
        if decodes:
            used = [chunk.start // size + 1 for chunk in decodes]
            rows = [[*chunk.pages[:n], *[0] * (max(used) - n)] for chunk, n in zip(decodes, used, strict=True)]
            self.pages = tensor(rows).flatten()  # (D pages,), each row filled up to the longest
            there = torch.arange(max(used) * size, device=device)
            self.seen = (there <= self.places[: self.decodes])[:, None, None]  # (D, 1, 1, pages size)
        self.chunks = []  # (first row, end, pages, tokens up to the last)
        for i in order[self.decodes :]:
            chunk, end = chunks[i], last[i] + 1
            t = chunk.start + len(chunk.tokens)
            self.chunks.append((end - len(chunk.tokens), end, tensor([*chunk.pages[: -(-t // size)]]), t))


class PagedAttend(Attend):
    """The attention of one layer over keys and values in pages. k: (pages, size, h_kv, d_k), v: the same with d_v."""

    def __init__(self, cache: PagedCache, k: Tensor, v: Tensor | None) -> None:
        self.cache, self.k, self.v = cache, k, v

    def positions(self, s: int, device: torch.device) -> Tensor:
        return self.cache.batch.places

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """q: (T, h, 1, d), k and v: (T, h_kv, 1, d) -> (T, h, 1, d_v)."""
        batch = self.cache.batch
        self.k.flatten(0, 1).index_copy_(0, batch.slots, k.squeeze(2))
        if self.v is not None:
            self.v.flatten(0, 1).index_copy_(0, batch.slots, v.squeeze(2))
        heard, d_v = [], v.shape[-1]
        if batch.decodes:
            n, groups = batch.decodes, k.shape[1]
            # (D pages, size, h_kv, d) -> (D, h_kv, pages size, d)
            keys, values = (x.unflatten(0, (n, -1)).flatten(1, 2).transpose(1, 2) for x in self.read(batch.pages, d_v))
            rows = q[:n].reshape(n, groups, -1, q.shape[-1])  # heads that share keys one below the other
            heard.append(
                scaled_dot_product_attention(rows, keys, values, batch.seen, scale=scale).reshape(n, -1, 1, d_v)
            )
        for first, end, pages, t in batch.chunks:
            keys, values = (x.flatten(0, 1)[None, :t].transpose(1, 2) for x in self.read(pages, d_v))
            asked = q[first:end].transpose(0, 2)  # (s, h, 1, d) -> (1, h, s, d)
            heard.append(grouped_query_attention(asked, keys, values, scale).transpose(0, 2))
        return torch.cat(heard) if len(heard) > 1 else heard[0]

    def read(self, pages: Tensor, d_v: int) -> tuple[Tensor, Tensor]:
        """Keys and values of these pages, (pages, size, h_kv, d)."""
        k = self.k.index_select(0, pages)
        return k, k[..., :d_v] if self.v is None else self.v.index_select(0, pages)


class PagedCache:
    """The cache of a model in `pages.count` pages, and the model's forward that uses it.

    model: has `embed`, `blocks`, `logits` and `block` as GPT, LLaMA and DeepSeek, or is a rank's shard of one: what is
    kept is what its attention modules have here. Outside of `forward` the model is as it was.
    Raises:  ValueError if the machine does not have the memory.
    """

    batch: Batch

    def __init__(self, model: nn.Module, pages: Pages) -> None:
        self.model, self.pages = model, pages
        self.attentions = attentions_of(model)
        weight = next(model.parameters())
        self.device = weight.device
        shapes = [attention.cache_shape for attention in self.attentions]
        self.token_bytes = sum(heads * (d_k + d_v) for heads, d_k, d_v in shapes) * weight.element_size()
        self.nbytes = pages.count * pages.size * self.token_bytes
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.nbytes > memory:
            raise ValueError(
                f"{counted(pages.count, 'page')} of {pages.size} tokens are {amount_text(self.nbytes)} of keys and "
                f"values, and this machine has {amount_text(memory)}"
            )

        def room(heads: int, d: int) -> Tensor:
            return torch.zeros(pages.count, pages.size, heads, d, dtype=weight.dtype, device=weight.device)

        self.attends = [PagedAttend(self, room(h, d_k), room(h, d_v) if d_v else None) for h, d_k, d_v in shapes]

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], every: bool = False) -> Tensor:
        """Write the keys and values of these tokens and return logits: (chunks, V) after the last token of each.

        every: (T, V) after every token instead, chunk by chunk; then no chunk of one token may follow a longer one.
        """
        self.batch = batch = Batch(chunks, self.pages.size, self.device)
        before = [attention.attend for attention in self.attentions]
        for attention, attend in zip(self.attentions, self.attends, strict=True):
            attention.attend = attend
        try:
            x = self.model.blocks(self.model.embed(batch.tokens))  # (T, 1) -> (T, 1, d)
            return self.model.logits(x if every else x[batch.last]).squeeze(1)
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
