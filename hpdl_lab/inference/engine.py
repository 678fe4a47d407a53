"""An engine that generates tokens for many requests at once: continuous batching over a paged cache.

    engine = Engine(models.build("llama"), slots=16)
    for token in engine.submit([5, 3, 8], max_tokens=20):     a stream: its tokens while they come
        ...
    engine.generate(prompts, max_tokens=20)                   lists of tokens, of any number of prompts

    submit -> waiting -> running: schedule -> pages -> one forward for all -> one token each -> stream
                 ^                              |
                 +------- preempted: the youngest, if pages run out; reads its tokens again later

Tokens do not depend on other requests, on arrival, pages or chunks. Every rank of a tensor-parallel model can run the
same engine: given the same requests, all decide alike.
Ref: Yu et al. 2022, "Orca", OSDI; Kwon et al. 2023, "PagedAttention", arXiv:2309.06180.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Lock, get_ident
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..units import counted, require_int
from . import scheduler
from .cache import Chunk, PagedCache
from .sampling import GREEDY, Sampling, draw

if TYPE_CHECKING:
    from ..comm.base import OnRow, Row
    from ..models.gpt import LanguageModel


class QueueFull(RuntimeError):
    """The queue of an engine is full; try again when some requests have ended."""


@dataclass(eq=False)
class Request:
    """A prompt that is continued. tokens: of the prompt, then new ones.

    num_computed_tokens: how many have keys and values in the cache, on `pages`.
    times: seconds of the engine's clock at which it was submitted, then at which each token came.
    """

    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    generator: torch.Generator | None
    times: list[float]
    num_computed_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    finished: bool = False
    error: BaseException | None = None

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_new_tokens(self) -> int:
        """Tokens to read before the next one is chosen: 1 in a decode."""
        return len(self.tokens) - self.num_computed_tokens


class TokenStream(Iterator[int]):
    """The tokens of a request while they come; a wait for the next one lets the engine step.

    A consumer may be slow: others go on, and at most max_tokens are kept for it. To close the stream, or to drop it,
    frees the request's slot and pages.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request, self.num_taken = engine, request, 0

    def __next__(self) -> int:
        request = self.request
        while request.num_prompt_tokens + self.num_taken == len(request.tokens):
            if request.error is not None:
                raise request.error
            if request.finished:
                raise StopIteration
            self.engine.step()
        self.num_taken += 1
        return request.tokens[request.num_prompt_tokens + self.num_taken - 1]

    def close(self) -> None:
        self.engine.cancel(self.request)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Engine:
    """The generation of tokens for up to `slots` requests at once.

    Args:    model: GPT, LLaMA, DeepSeek, or a rank's shard of one (see PagedCache); two engines of one model cannot
             step in two threads at once. slots: requests that run at once.
             pages: of the cache; None: as many as `slots` requests of the model's whole context need.
             page_size: tokens per page. budget: tokens that a step reads at most, at least `slots`; longer prompts are
             read in chunks. queue: requests that may wait. schedule: chooses what runs, see scheduler.schedule.
             on_row: called with a row after each step: step, running, waiting, tokens (read in it), free (pages),
             preempted (so far), seconds (that it took). clock: seconds.
    Raises:  ValueError for numbers that are none, and for more pages than the machine has memory.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: int = 16,
        pages: int | None = None,
        page_size: int = 16,
        budget: int = 256,
        queue: int = 256,
        schedule: Callable[..., list[int]] = scheduler.schedule,
        on_row: OnRow | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        require_decoder(model)
        self.slots, self.context = require_int("slots", slots, 1), cast("LanguageModel", model).block
        self.budget = require_int("budget, tokens per step,", budget, slots)
        self.queue = require_int("queue, requests that may wait,", queue, 1)
        require_int("page_size", page_size, 1)
        pages = slots * -(-self.context // page_size) if pages is None else require_int("pages", pages, 1)
        self.cache = PagedCache(model, pages, page_size)
        self.pages = self.cache.pages
        self.vocabulary = self.cache.model.tokens.num_embeddings
        self.schedule, self.on_row, self.clock = schedule, on_row, clock
        self.running: list[Request] = []  # in order of admission
        self.waiting: deque[Request] = deque()  # in order of arrival
        self.cancelled: deque[Request] = deque()
        self.batch: list[tuple[Request, int]] = []  # under way
        self.steps = self.preempted = 0
        self.weights = _versions(model)
        self.step_thread = self.schedule_thread = 0  # the thread that steps, and while its scheduler runs
        self.lock, self.step_lock = Lock(), Lock()  # of these fields, and of steps: many threads may read streams

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 16, sampling: Sampling = GREEDY, stop: Sequence[int] = ()
    ) -> TokenStream:
        """Add a request to the waiting ones, and return the stream of its tokens, at most `max_tokens`.

        They come if this or another stream is read, or step is called.

        Args:    prompt: tokens, a list or a tensor of one dimension; stop: tokens after which it ends.
        Raises:  ValueError for a prompt that is empty, has tokens outside the vocabulary, or with its new tokens does
                 not fit into the model's context or all pages; QueueFull if too many wait.
        """
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling={sampling!r}: Sampling(temperature=0.8), for example, is needed")
        if self.schedule_thread == get_ident():
            raise RuntimeError("a scheduler chooses among requests, and cannot submit one")
        tokens = tokens_of(self.cache.model, prompt, max_tokens)
        room = self.pages.count * self.pages.size
        if len(tokens) + max_tokens - 1 > room:  # the last token is not read
            raise ValueError(
                f"a prompt of {counted(len(tokens), 'token')} with up to {max_tokens:,} new never fits into "
                f"{counted(self.pages.count, 'page')} of {counted(self.pages.size, 'token')}"
            )
        with self.lock:
            self.free_cancelled()
            if len(self.waiting) >= self.queue:
                raise QueueFull(
                    f"{counted(len(self.waiting), 'request')} wait, and the queue holds {self.queue:,}: "
                    "take tokens of others first"
                )
            generator = sampling.generator() if sampling.temperature else None
            ends = frozenset(map(int, stop))
            request = Request(tokens, len(tokens), max_tokens, sampling, ends, generator, times=[self.clock()])
            self.waiting.append(request)
        return TokenStream(self, request)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
    ) -> list[list[int]]:
        """Return the new tokens of each prompt; prompt i draws with sampling.seed + i. Any number of prompts."""
        streams: list[TokenStream] = []
        try:
            for i, prompt in enumerate(prompts):
                while len(self.waiting) >= self.queue:
                    self.step()
                streams.append(self.submit(prompt, max_tokens, replace(sampling, seed=sampling.seed + i), stop))
            return [[*stream] for stream in streams]
        except BaseException:
            for stream in streams:  # which the traceback keeps
                stream.close()
            raise

    def run(self) -> None:
        """Step until all requests have ended."""
        while self.step():
            pass

    def cancel(self, request: Request) -> None:
        """End a request, whatever it has; called by streams, also while the engine is in a step (garbage)."""
        if not request.finished:
            self.cancelled.append(request)
            if self.lock.acquire(blocking=False):
                try:
                    self.free_cancelled()
                finally:
                    self.lock.release()

    def free_cancelled(self) -> None:
        """Drop the requests that have been cancelled, unless a batch is under way."""
        while self.cancelled and not self.batch:
            request = self.cancelled.popleft()
            if not request.finished:
                (self.running if request in self.running else self.waiting).remove(request)
                self.finish_request(request)

    def finish_request(self, request: Request, error: BaseException | None = None) -> None:
        request.finished, request.error = True, error
        self.pages.release(request.pages)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Read one batch: a token of each request that decodes, and as many of prompts as the budget allows.

        Returns: True if requests are left. If the forward raises, as when a rank has died, the requests that run end
        with this error, and the waiting ones stay.
        """
        if self.step_thread == get_ident():
            raise RuntimeError("a step of this engine was asked for inside of a step, by on_row or by the scheduler")
        with self.step_lock:
            self.step_thread = get_ident()
            try:
                if self.start_step():
                    self.finish_step()
            finally:
                self.step_thread = 0
        return bool(self.running or self.waiting)

    def start_step(self) -> bool:
        """Send a batch through the model, the first half of a step. Return True if there is one, for `finish_step`."""
        with self.lock:
            self.step_start = self.clock()
            self.free_cancelled()
            if self.weights != (now := _versions(self.cache.model)):
                self.weights = now
                self.pages.cached.clear()  # keys and values of other weights
            self.batch = self.allocate_batch()
            if self.batch:
                chunks = [
                    Chunk(r.tokens[r.num_computed_tokens :][:n], r.num_computed_tokens, r.pages) for r, n in self.batch
                ]
                with self.failing_running():
                    self.logits = self.cache.forward(chunks)
        return bool(self.batch)

    def finish_step(self) -> None:
        """Choose a token for each request that has read all it had, the second half of a step."""
        with self.lock:
            with self.failing_running():
                self.update_from_logits(self.batch, self.logits)
            self.steps += 1
            row, self.batch = self.row(sum(n for _, n in self.batch), self.step_start), []
        if self.on_row is not None:
            self.on_row(row)

    @contextmanager
    def failing_running(self) -> Generator[None]:
        """Let an error inside end all requests that run."""
        try:
            yield
        except BaseException as error:
            for request in self.running:
                self.finish_request(request, error)
            self.running.clear()
            self.batch = []
            raise

    def allocate_batch(self) -> list[tuple[Request, int]]:
        """Return the requests that run in this step, with their numbers of tokens, all with the pages for them."""
        running, waiting = [*self.running], [*islice(self.waiting, self.slots - len(self.running))]
        new = [request.num_new_tokens for request in running]
        new += [len(r.tokens) - self.num_cached_tokens(self.pages.match(r.tokens), r) for r in waiting]
        self.schedule_thread = get_ident()
        try:
            counts = self.schedule(new[: len(running)], new[len(running) :], self.slots, self.budget)
        finally:
            self.schedule_thread = 0
        _require_counts(counts, new, len(running), self.budget)
        batch = []
        for request, count in zip(running, counts, strict=False):
            while count and request in self.running and not self.allocate(request, count):
                self.preempt(self.running[-1])
            if count and request in self.running:
                batch.append((request, count))
        if len(self.running) < len(running):
            return batch  # pages have run out
        for request, count in zip(waiting, counts[len(running) :], strict=False):
            request.pages = self.pages.share(self.pages.match(request.tokens))
            request.num_computed_tokens = self.num_cached_tokens(request.pages, request)
            if len(self.pages.free) * self.pages.size < request.num_new_tokens or not self.allocate(request, count):
                self.free(request)
                break
            self.running.append(self.waiting.popleft())
            batch.append((request, count))
        if self.running and not batch:
            raise ValueError(
                f"the scheduler gives nothing to {counted(len(running), 'running request')}, which hold the pages that "
                "the requests it admits need: no request can go on"
            )
        return batch

    def num_cached_tokens(self, pages: Sequence[int], request: Request) -> int:
        """Return how many tokens a request need not read with these pages of its prefix; the last it always reads."""
        return min(len(pages) * self.pages.size, len(request.tokens) - 1)

    def allocate(self, request: Request, count: int) -> bool:
        """Return True if a request has got the pages for its next `count` tokens."""
        copies = self.pages.allocate(request.pages, request.num_computed_tokens, request.num_computed_tokens + count)
        self.cache.copy(copies or ())
        return copies is not None

    def preempt(self, request: Request) -> None:
        """Take the pages of a request, which waits before all others and reads its tokens again later."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.free(request)
        self.preempted += 1

    def free(self, request: Request) -> None:
        self.pages.release(request.pages)
        request.num_computed_tokens = 0

    def update_from_logits(self, batch: Sequence[tuple[Request, int]], logits: Tensor) -> None:
        """Add a token to each request that has read all it had. logits: (len(batch), V), after its last token."""
        likeliest, now = logits.argmax(-1).tolist(), self.clock()
        for (request, count), row, token in zip(batch, logits, likeliest, strict=True):
            self.pages.cache_full_pages(
                request.pages, request.tokens, request.num_computed_tokens, request.num_computed_tokens + count
            )
            request.num_computed_tokens += count
            if request.num_new_tokens:
                continue
            if request.generator is not None:
                token = draw(request.sampling.probabilities(row), request.generator)
            request.tokens.append(token)
            request.times.append(now)
            if len(request.tokens) == request.num_prompt_tokens + request.max_tokens or token in request.stop:
                self.running.remove(request)
                self.finish_request(request)

    def row(self, tokens: int, begin: float) -> Row:
        return {
            "step": self.steps,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "tokens": tokens,
            "free": len(self.pages.free),
            "preempted": self.preempted,
            "seconds": self.clock() - begin,
        }


def require_decoder(model: object) -> None:
    """Raise TypeError unless an engine can run `model`: it reads tokens, and has logits of the next."""
    if not hasattr(model, "tokens"):
        kind = type(model).__name__
        raise TypeError(f"an engine runs a gpt, llama or deepseek of models/; got something of {kind}")


def _versions(model: nn.Module) -> int:
    """Return the number of writes into the parameters of a model."""
    return sum(0 if p.is_inference() else p._version for p in model.parameters())


def tokens_of(model: nn.Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the tokens of a prompt, which is a list or a tensor of one dimension.

    Raises:  TypeError if it is none; ValueError for a prompt that is empty, has tokens outside the vocabulary, or
             with `max_tokens` new ones does not fit into the model's context.
    """
    language_model = cast("LanguageModel", model)
    require_int("max_tokens", max_tokens, 1)
    try:
        tokens = [operator.index(token) for token in prompt]
    except TypeError:
        raise TypeError(f"a prompt is a list of whole numbers, its tokens; got {prompt!r:.60}") from None
    if not tokens:
        raise ValueError("a prompt has at least one token, this one has none")
    vocabulary = language_model.tokens.num_embeddings
    outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise ValueError(f"token {outside} of the prompt is outside the vocabulary, 0 to {vocabulary - 1}")
    if len(tokens) + max_tokens > language_model.block:
        raise ValueError(
            f"a prompt of {counted(len(tokens), 'token')} with up to {max_tokens:,} new is longer than the context of "
            f"this model, {counted(language_model.block, 'token')}"
        )
    return tokens


def _require_counts(counts: Sequence[int], num_new_tokens: Sequence[int], running: int, budget: int) -> None:
    """Raise ValueError unless the engine can go on with a scheduler's numbers of tokens."""
    fits = running <= len(counts) <= len(num_new_tokens) and all(
        (i >= running) <= n <= most for i, (n, most) in enumerate(zip(counts, num_new_tokens, strict=False))
    )
    if not fits or sum(counts) > budget or (num_new_tokens and not any(counts)):
        raise ValueError(
            f"the scheduler gives {[*counts]} to {counted(running, 'running request')} and the waiting ones, which "
            f"have {[*num_new_tokens]} tokens to read, with a budget of {budget}: it must give a number to each "
            "running one, at least 1 to each that it admits, and more than 0 to one of them"
        )
