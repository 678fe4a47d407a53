"""Notebook 03, messages: a ping-pong between two ranks, and the line through its times."""

import numpy as np

from ..collectives import cost
from ..comm import PerRank
from ..comm.buffers import to_numpy
from ..comm.network import Switch
from ..parallel import messages
from ..trace import seconds_text
from .ranks import ALONE, capital, case, count, in_company, number, on_engines, real, simulate, unlike
from .record import Broken, Exercise, Passed
from .traffic import check_waits

CASES = ((2, 1000), (4, 1000), (3, 1), (8, 1001), (5, 0))  # (ranks, elements)
ALPHA = Switch(alpha=1.0, beta=0.0)  # on which a message takes 1 s, whatever its size


def inputs(p, n):
    """(p, n) whole numbers that fit into a byte, different on every rank."""
    return np.random.default_rng([p, n]).integers(0, 256, (p, n)).astype(float)


def call(comm, fn, x):
    """fn(comm, x); returns (what it returned, what it left in x)."""
    return fn(comm, x), x


def check_ping_pong(fn, runner=None):
    import torch

    for p, n in CASES:
        values = inputs(p, n)
        arrays, tensors = list(values), list(torch.from_numpy(values).to(torch.uint8))
        for x, where in (
            (arrays, case(p, n)),
            (tensors, f"{case(p, n)} in a uint8 tensor (lab.ping_pong sends those)"),
        ):
            run = simulate(p, call, fn, PerRank(x), where=where, network=ALPHA)
            check_balls(run, values, capital(where))
            check_round(run, x, capital(where))
    facts = [f"one round is 2 messages one after another, in {len(CASES)} cases on 2, 3, 4, 5 and 8 simulated ranks"]
    if runner is not None:
        facts.append(check_on_engines(fn, runner))
    return Passed(tuple(facts), run.events)


def check_on_engines(fn, runner):
    """The same on real ranks. Returns a fact."""
    run = on_engines(runner, in_company, call_on_engine, fn)
    if run == [None]:
        return ALONE
    check_balls(run, inputs(len(run), 1001), f"On {count(len(run), 'engine')}")
    return f"engines: right on {count(len(run), 'MPI rank')}"


def call_on_engine(comm, fn):
    return call(comm, fn, inputs(comm.size, 1001)[comm.rank])


def check_balls(run, values, where):
    """Raise Broken unless ranks 0 and 1 hold x of rank 0, the others their own, and all return x."""
    for r, (out, held) in enumerate(run):
        expected = values[0] if r < 2 else values[r]
        if not np.array_equal(to_numpy(held), expected):
            if r == 0:
                why = "What comes back to rank 0 is not what it sent: rank 1 sends back what it got."
            elif r == 1:
                why = "Rank 1 does not hold what rank 0 sent: receive into x itself."
            else:
                why = f"x changed on rank {r}, which only looks on."
            i = int(np.argmax(to_numpy(held) != expected))
            message = f"{where}, x[{i}] on rank {r} should be {number(expected[i])} and is {number(held[i])}. {why}"
            raise Broken("ball", message)
        if unlike(out, held) or not np.array_equal(to_numpy(out), to_numpy(held)):
            what = unlike(out, held) or "other values"
            message = f"{where}, x is right on rank {r}, but your function returned {what}: return x, on every rank."
            raise Broken("returns", message)


def check_round(run, x, where):
    """Raise Broken unless the whole ball went from 0 to 1 and back, once, one way after the other, and that is all."""
    p, nbytes = len(x), x[0].nbytes
    check_waits(run.events, p)
    more = next((e for e in run.events if e.op not in ("send", "recv")), None)
    if more:
        message = (
            f"{where}, rank {more.rank} also calls {more.op}, which takes time of its own: one message each way is all "
            "that is to be timed."
        )
        raise Broken("round", message)
    sent = [(e.rank, e.peer) for e in run.events if e.op == "send"]
    strangers = [pair for pair in sent if set(pair) != {0, 1}]
    if strangers:
        a, b = strangers[0]
        message = f"{where}, rank {a} sends to rank {b}: only ranks 0 and 1 play, the others look on."
        raise Broken("peers", message)
    if sent.count((0, 1)) != 1 or sent.count((1, 0)) != 1:
        message = (
            f"{where}, rank 0 sent {count(sent.count((0, 1)), 'message')} to rank 1, and rank 1 sent "
            f"{count(sent.count((1, 0)), 'message')} back: one round is one each way."
        )
        raise Broken("round", message)
    small = [e.nbytes for e in run.events if e.op == "send" and e.nbytes != nbytes]
    if small:
        message = f"{where}, a message has {small[0]:,} bytes, but x has {nbytes:,}: the whole of x is the ball."
        raise Broken("bytes", message)
    if run.seconds < 1.5:
        message = (
            f"{where}, both messages are under way at the same time: rank 1 sends back what it got, so it can send "
            "only after it has received."
        )
        raise Broken("round", message)


LINES = ((1e-6, 1e-10), (2e-5, 8e-9), (5e-5, 1e-9), (3e-7, 2e-11))  # (alpha s, beta s/byte)
SIZES = (8, 64, 1024, 16 * 1024, 128 * 1024, 2**20, 2**23)
SLOWER = 1.3  # the first and the last message are, by bad luck: who trusts single messages is led astray
EXACT, WITHIN = 0.03, 0.05  # of the line: where the times are exact, where they are not


def check_fit(fn, runner=None):
    for k, (alpha, beta) in enumerate(LINES):
        exact = np.array([alpha + beta * n for n in SIZES])
        noise = np.random.default_rng(k).uniform(0.97, 1.03, len(SIZES))
        noise[[0, -1]] *= SLOWER
        check_line(fn, exact.tolist(), EXACT, "For exact times")
        check_line(fn, (exact * noise).tolist(), WITHIN, "For times with errors, as measured ones have them")
    facts = (
        f"within {EXACT:.0%} for exact times, and within {WITHIN:.0%} of the least squares for times with errors, on "
        f"{len(LINES)} networks",
    )
    return Passed(facts)


def check_line(fn, seconds, within, where):
    """Raise Broken unless fn(sizes, seconds) is the line of the docstring."""
    alpha, beta = cost.fit_alpha_beta(SIZES, seconds)
    ((out, given),) = simulate(
        1, lambda comm, n, t: (fn(n, t), (n, t)), list(SIZES), list(seconds), where=where.lower()
    )
    if given != (list(SIZES), list(seconds)):
        raise Broken("input", "Your function changed its arguments: work on copies.")
    if out is None:
        raise Broken("returns", "Your function returned nothing: return alpha, beta.")
    try:
        got_alpha, got_beta = (real(v) for v in out)
    except (TypeError, ValueError):
        raise Broken("returns", f"Your function returned {out!r}: return two numbers, alpha and beta.") from None
    off = {"alpha": abs(got_alpha / alpha - 1), "beta": abs(got_beta / beta - 1)}
    if not all(error <= within for error in off.values()):
        failed, why = explain_line(got_alpha, got_beta, alpha, beta, max(off, key=off.get), np.array(seconds))
        message = (
            f"{where}, the line of least squares has alpha = {alpha:.3g} s, beta = {beta:.3g} s/byte; you say alpha = "
            f"{got_alpha:.3g} s, beta = {got_beta:.3g} s/byte. {why}"
        )
        raise Broken(failed, message.rstrip())


def explain_line(a, b, alpha, beta, name, seconds):
    """(invariant, sentence) for a line (a, b) that is not (alpha, beta), the one of these seconds."""

    def near(x, y):
        return abs(x - y) <= 0.2 * abs(y)

    if not np.isfinite([a, b]).all():
        return "value", "Is there a division by zero, or a logarithm of it?"
    if near(a, beta) and near(b, alpha):
        return "order", "You return beta first: alpha, beta is the order."
    if near(a, alpha) and near(b, 1 / beta):
        return "unit", "That is a bandwidth in bytes/s: beta is 1 / bandwidth, the seconds that one more byte costs."
    if near(a, alpha) and near(8 * b, beta):
        return "unit", "Those are seconds per bit: the sizes are in bytes."
    for factor, unit in ((1e3, "milliseconds"), (1e6, "microseconds"), (1e9, "nanoseconds")):
        if near(a, factor * alpha):
            return "unit", f"Those are {unit}: the times are in s, and so are alpha and beta."
    for factor, word in ((2, "twice"), (1 / 2, "half")):
        if near(a, factor * alpha) and near(b, factor * beta):
            return "factor", f"Both are {word} as large: the times are those of one way already."
    for (other_a, other_b), failed, why in other_lines(np.array(SIZES), seconds):
        if np.allclose([a, b], [other_a, other_b], rtol=1e-6, atol=0):
            return failed, why
    if np.isclose(a, seconds, rtol=1e-6, atol=0).any():
        return (
            "alpha",
            "That alpha is the time of one message, with whatever disturbed it. A fit listens to all of them.",
        )
    if a == 0:
        return "alpha", "Without alpha an empty message would cost nothing. What does the smallest message take?"
    if name == "alpha" and abs(a - alpha) > alpha:
        took = seconds_text(alpha + SIZES[0] * beta)
        return "alpha", f"The message of {SIZES[0]} bytes took {took}: nearly all alpha."
    if name == "alpha":
        return (
            "alpha",
            "Which messages know alpha? The small ones; weights of 1 / seconds let them count like the large ones.",
        )
    return "beta", "Which messages know what one more byte costs? The large ones, where alpha hardly counts."


ALIKE = (
    "Where all seconds count alike, a small error in the time of the largest message outweighs all that the small ones "
    "say, and they alone know alpha. Look at them, or give them weight: 1 / seconds."
)


def other_lines(n, t):
    """((alpha, beta), invariant, sentence) of lines that may be meant to be the one of sizes n and seconds t."""

    def fitted(part, weights):
        return np.polyfit(n[part], t[part], 1, w=weights[part])[::-1]

    whole, slope = slice(None), (t[-1] - t[0]) / (n[-1] - n[0])
    squares = "polyfit squares its weights together with the errors: relative errors want 1 / seconds, nothing else."
    return (
        (fitted(whole, t**0), "weights", ALIKE),
        (fitted(whole, t**-2), "weights", squares),
        (fitted(whole, t**-0.5), "weights", squares),
        (fitted(whole, 1.0 / n), "weights", "The weights are 1 / sizes: relative errors are errors / seconds."),
        (fitted(whole, n**-0.5), "weights", "The weights are 1 / sizes: relative errors are errors / seconds."),
        (fitted(slice(1, None), 1 / t), "loop", "The first message is not in it: begin at index 0."),
        (fitted(slice(-1), 1 / t), "loop", "The last message is not in it: the range ends one too early."),
        ((t[0] - slope * n[0], slope), "ends", "That is the line through two messages. A fit listens to all of them."),
    )


EXERCISES = (
    Exercise(
        id="3.1",
        title="ping-pong",
        reference=messages.ping_pong,
        stars=1,
        check=check_ping_pong,
        explanation=(
            "Two ranks, two opposite programs: what one sends the other receives, in the same order. Half the time of "
            "a round is the time of one message, and nobody needed two clocks that agree: both readings are rank 0's."
        ),
    ),
    Exercise(
        id="3.2",
        title="fit alpha and beta",
        reference=cost.fit_alpha_beta,
        stars=1,
        check=check_fit,
        parallel=False,
        explanation=(
            "Two numbers describe a link surprisingly well: alpha, what it costs to send anything, and beta, what one "
            "more byte costs. They cross at alpha / beta bytes: below that a message is all latency, above it all "
            "bandwidth. Every cost model of notebook 04 is made of these two."
        ),
    ),
)
