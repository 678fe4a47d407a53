"""Memory of the cache in pages: a free list, holders of each page, and prefixes that requests share.

    request A   "Call me Ishmael. Some"     pages 0 1 2      page 2 is its last, and not full
    request B   "Call me Ishmael. Who"      pages 0 1 5      the full pages 0 and 1 hold equal tokens: kept once
    free        3 4 6 7                     free + used = total, at every step

Ref: Kwon et al. 2023, "PagedAttention", arXiv:2309.06180.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def reserve(free: list[int], pages: list[int], tokens: int, page_size: int) -> bool:
    """Give a request the pages for `tokens` tokens, or none if too few pages are free.

        page_size = 4, tokens = 9         before            after
        pages of the request              [7]               [7, 2, 5]   4 + 4 + 1 tokens
        free                              [3, 0, 5, 2]      [3, 0]

    You may take any free page, because pages need not follow each other in memory. In
    the example the last free page is taken first. A request that has enough pages gets
    no more.

    Args:    free: pages that no request holds, changed in place; pages: the request's
             pages, in order of its tokens, extended in place; tokens: how many tokens
             they have to hold, at least 0; page_size: tokens per page.
    Returns: True if the request has room for `tokens` tokens now. False if too few
             pages are free; then nothing has changed.
    Waste: less than one page per request.
    Ref: Kwon et al. 2023, section 4.2.
    """
    ### BEGIN SOLUTION
    missing = -(-tokens // page_size) - len(pages)
    if missing > len(free):
        return False
    for _ in range(missing):
        pages.append(free.pop())
    return True
    ### END SOLUTION


class Pages:
    """The holders of `count` pages of `size` tokens; a full page is found again by the tokens up to its end.

    A page that its last holder releases goes to the far end of the free list and keeps its contents until it is taken:
    the least recently used prefix is lost first.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.free = [*range(count)][::-1]  # taken from the end: 0, 1, 2, ...
        self.ref_counts = [0] * count
        self.digests = [b""] * count  # of the tokens up to the end of a full page; b"" of a page that is not full
        self.cached: dict[bytes, int] = {}  # digest -> page

    @property
    def used(self) -> int:
        return self.count - len(self.free)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest prefix of `tokens` that is in memory, in full pages."""
        pages: list[int] = []
        digest = b""
        for start in range(0, len(tokens) - self.size + 1, self.size):
            digest = _chained(digest, tokens[start : start + self.size])
            if digest not in self.cached:
                break
            pages.append(self.cached[digest])
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """Let one more request hold these pages, which others hold or have released; returns them."""
        for page in pages:
            if not self.ref_counts[page]:
                self.free.remove(page)
            self.ref_counts[page] += 1
        return pages

    def allocate(self, pages: list[int], start: int, end: int) -> list[tuple[int, int]] | None:
        """Make the tokens from `start` to `end` of a request writable: new pages, and copies of shared ones.

        Args:    pages: of the request, changed in place.
        Returns: (from, to) of pages to copy before they are written (copy-on-write); None, and nothing has changed, if
                 there are too few free pages.
        """
        shared = [i for i in range(start // self.size, len(pages)) if self.ref_counts[pages[i]] > 1]
        before = len(pages)
        if len(self.free) < len(shared) + -(-end // self.size) - before:
            return None
        copies = list[int]()
        reserve(self.free, pages, end, self.size)
        reserve(self.free, copies, len(shared) * self.size, self.size)
        for page in pages[before:] + copies:
            self.ref_counts[page] = 1
            if self.cached.get(self.digests[page]) == page:
                del self.cached[self.digests[page]]  # its tokens are about to be overwritten
            self.digests[page] = b""
        pairs = [(pages[i], copy) for i, copy in zip(shared, copies, strict=True)]
        for i, (page, copy) in zip(shared, pairs, strict=True):
            self.ref_counts[page] -= 1
            pages[i] = copy
        return pairs

    def cache_full_pages(self, pages: list[int], tokens: Sequence[int], start: int, end: int) -> None:
        """Note that the tokens from `start` to `end` have been written: other requests can find pages that are full."""
        for i in range(start // self.size, end // self.size):
            before = self.digests[pages[i - 1]] if i else b""
            digest = _chained(before, tokens[i * self.size : (i + 1) * self.size])
            self.digests[pages[i]] = digest
            self.cached.setdefault(digest, pages[i])

    def release(self, pages: list[int]) -> None:
        """End a request's hold on its pages, and empty `pages`; pages without another holder are free."""
        for page in reversed(pages):  # so that the end of a prefix is lost before its beginning
            self.ref_counts[page] -= 1
            if not self.ref_counts[page]:
                self.free.insert(0, page)
        pages.clear()


def _chained(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a page of tokens that follows a page with the digest `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()
