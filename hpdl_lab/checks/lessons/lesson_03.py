"""Notebook 03: a ping-pong and the line through its times, collectives, and programs with a fault."""

import re
from functools import partial

import numpy as np

from ... import zoo
from ...collectives import cost, jobs
from ...comm import CommError, PerRank, sim
from ...comm.buffers import to_numpy
from ...comm.network import Switch
from ...parallel import messages
from ...trace import seconds_text
from ...units import counted
from ..ranks import ALONE, alone, capital, case, in_company, number, on_engines, real, simulate, unlike
from ..record import Broken, Exercise, Passed
from ..traffic import additions, check_waits, messages_sent

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
    check_balls(run, inputs(len(run), 1001), f"On {counted(len(run), 'engine')}")
    return f"engines: right on {counted(len(run), 'MPI rank')}"


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
            f"{where}, rank 0 sent {counted(sent.count((0, 1)), 'message')} to rank 1, and rank 1 sent "
            f"{counted(sent.count((1, 0)), 'message')} back: one round is one each way."
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


RIGHT = jobs.which_collective()
LETTERS = {name.replace("_", ""): name for name in jobs.DOES} | {"bcast": "broadcast"}
TOO_MUCH = {  # (right, named): what the named one does beyond the job
    ("reduce", "all_reduce"): "all_reduce would do it, and send the sum to ranks that do not need it",
    ("gather", "all_gather"): "all_gather would do it, and send the lists to ranks that do not need them",
    ("scatter", "broadcast"): "broadcast would do it, but every rank would get the rows of all the others too",
    ("reduce_scatter", "all_reduce"): "all_reduce would do it, but every rank would get the other rows of the sum too",
    ("all_to_all", "all_gather"): "all_gather would do it, but every rank would get what is meant for others too",
    ("all_reduce", "all_gather"): "all_gather would do, if every rank then added: p vectors to receive, not two",
}


def check_which_collective(fn, runner=None):
    named = alone(fn, where="here")
    if named is None:
        raise Broken("returns", "Your function returned nothing: return a dict, letter to name.")
    if not isinstance(named, dict):
        raise Broken("returns", f"Your function returned a {type(named).__name__}: return a dict, letter to name.")
    named = {str(letter).upper(): said for letter, said in named.items()}
    for job in jobs.JOBS:
        check_job(job, named)
    unknown = [key for key in named if key not in RIGHT]
    if unknown:
        raise Broken("missing", f"There is no job {unknown[0]!r}: they are called A to H.")
    return Passed(("8 of 8 jobs, each with the collective that sends no more than is needed",))


def spelled(said):
    """The name of this lesson for what MPI, mpi4py, NCCL or torch call otherwise: "Allreduce" -> "all_reduce"."""
    letters = re.sub("[^a-z]", "", said.lower().rpartition(".")[2]) if isinstance(said, str) else ""
    letters = re.sub("^(mpi|nccl)|(block|intotensor|tensor|single)$", "", letters)
    return LETTERS.get(letters, str(said))


def check_job(job, named):
    """Raise Broken unless this job is done by the collective that is named for it, and not by a larger one."""
    right = RIGHT[job.letter]
    if job.letter not in named:
        raise Broken("missing", f"Job {job.letter} has no answer. {job.text}")
    said = spelled(named[job.letter])
    if said not in jobs.DOES:
        known = ", ".join(jobs.DOES)
        message = f"Job {job.letter}: no collective is called {named[job.letter]!r}. The eight are {known}."
        raise Broken("name", message)
    if said == right:
        return
    if (right, said) in TOO_MUCH:
        message = f"Job {job.letter}: {TOO_MUCH[right, said]}. Here {job.needs}."
        raise Broken("too much", message)
    message = f"Job {job.letter}: {said} {jobs.DOES[said]}. {capital(job.needs)}."
    raise Broken("job", message)


RIGHT_DIAGNOSIS = zoo.diagnose()
DEADLINE = 1.0  # s of real time for a patient on simulated ranks


def check_diagnose(fn, runner=None):
    named = alone(fn, where="here")
    if not isinstance(named, dict):
        what = "nothing" if named is None else f"a {type(named).__name__}"
        raise Broken("returns", f"Your function returned {what}: return a dict, letter to diagnosis.")
    named = {
        str(letter).upper(): said.strip().lower() if isinstance(said, str) else said for letter, said in named.items()
    }
    for letter, right in RIGHT_DIAGNOSIS.items():
        if letter not in named:
            raise Broken("missing", f"Program {letter} has no diagnosis.")
        said = named[letter]
        if str(said) not in zoo.DIAGNOSES:
            known = ", ".join(zoo.DIAGNOSES)
            raise Broken("name", f"Program {letter}: there is no diagnosis {said!r}. There are {known}.")
        if said != right:
            raise contradiction(letter, said, right)
    unknown = [letter for letter in named if letter not in RIGHT_DIAGNOSIS]
    if unknown:
        raise Broken("missing", f"There is no program {unknown[0]!r}: they are called {', '.join(RIGHT_DIAGNOSIS)}.")
    return Passed((f"{len(RIGHT_DIAGNOSIS)} of {len(RIGHT_DIAGNOSIS)} programs",))


AGAINST = {  # (diagnosis, the right one): what in the table speaks against it; "" serves all others
    ("circle", "absent"): "The table shows ranks that wait, but no circle: whom they wait for does not wait.",
    ("circle", "order"): "They wait in a circle, but not in the same call.",
    ("absent", "circle"): "Every rank is there, and waits.",
    ("absent", "order"): "Every rank makes all its calls in the end: look in which order.",
    ("absent", "error"): "A rank is absent, that is true: but why?",
    ("slow", "circle"): "However long you wait, nothing changes: nobody computes.",
    ("slow", "absent"): "However long you wait, nothing changes: who is missing has finished.",
    ("order", "circle"): "With these calls no other order helps, as long as both ranks have the same.",
    ("absent", "slow"): "It does come to the call, only late.",
    ("error", "mismatch"): "It is the laboratory that stops it, because two ranks contradict each other.",
}
QUESTION = {  # what to look at, by the right diagnosis
    "circle": "What is the first call of each rank, and what does it need to end?",
    "mismatch": "Compare the two ends of each message: how many elements, of which kind?",
    "absent": "Count, for every rank, how often it comes to the call in which the others wait.",
    "order": "Write the calls of two ranks side by side.",
    "error": "Does every rank get through its own lines?",
    "slow": "Is there a rank that waits for nothing?",
}


def contradiction(letter, said, right):
    """Broken for a wrong diagnosis, with the table of a run."""
    against = AGAINST.get((said, right), f"{said!r} means: {zoo.DIAGNOSES[said]}. Not so here.")
    message = f"Program {letter}: you say {said!r}. {against} {QUESTION[right]}"
    return Broken("diagnosis", message, evidence(zoo.find(zoo.LETTERS[letter])))


def evidence(program):
    """What the ranks were doing when the program had been stopped, without the reason."""
    try:
        sim.run(program.ranks, program.broken, deadline=DEADLINE)
    except CommError as error:
        return "\n".join(str(error).split("\n")[1:])
    except Exception as error:  # what the ranks themselves raised
        return f"It ends with {type(error).__name__}: {error}"
    return ""


RANKS = (4, 2, 3, 5, 8)


def check_repair(name, fn, runner=None, *, explain=None, also=None):
    """Every rank returns what the repaired program returns there, and the ranks have talked to each other.

    explain: explain(value) -> a sentence about a value that is wrong, or ""; also: also(fn, run, where), more to check.
    """
    repaired = zoo.find(name).repaired
    for p in RANKS:
        where = f"with {counted(p, 'rank')}"
        run = simulate(p, fn, where=where)
        check_values(run, simulate(p, repaired, evidence=False), capital(where), explain)
        if also:
            also(fn, run, capital(where))
        if not run.events:
            message = (
                f"The number is right, but with {p} ranks none of them sent or received anything: it is to come from "
                "all ranks, not out of a formula."
            )
            raise Broken("messages", message)
        check_waits(run.events, p)
    facts = [f"ends, and every rank returns what it should, with {', '.join(map(str, sorted(RANKS)))} simulated ranks"]
    if runner is not None:
        facts.append(check_on_engines_repair(repaired, fn, runner))
    return Passed(tuple(facts), run.events)


def check_on_engines_repair(repaired, fn, runner):
    """The same on real ranks. Returns a fact."""
    run = on_engines(runner, in_company, fn)
    if run == [None]:
        return ALONE
    check_values(run, simulate(len(run), repaired, evidence=False), f"on {counted(len(run), 'engine')}")
    return f"engines: right on {counted(len(run), 'MPI rank')}"


def check_values(run, expected, where, explain=None):
    for r, (got, wanted) in enumerate(zip(run, expected, strict=True)):
        if got is None:
            message = f"{where}, rank {r} returned nothing: every rank returns a float, here {number(wanted)}."
            raise Broken("returns", message)
        try:
            value = real(got)
        except (TypeError, ValueError):
            message = f"{where}, rank {r} returned {got!r}: every rank returns a float, here {number(wanted)}."
            raise Broken("returns", message) from None
        if abs(value - wanted) > 1e-9 * max(1.0, abs(wanted)):
            why = (explain and explain(value)) or steps_off(run, expected) or whose(run, expected)
            message = (
                f"{where}, nobody is stuck any more, but rank {r} returned {number(value)} and should return "
                f"{number(wanted)}. {why}"
            )
            raise Broken("value", message.rstrip())


def whose(run, expected):
    """What the values of all ranks say together, or ""."""
    alike = len(set(expected)) == 1 and len(set(map(repr, run))) > 1
    return "The ranks do not even agree: what one returns is not of all." if alike else ""


def steps_off(run, expected):
    """What the messages say, where every rank sent one more or one less than in the repaired program, or ""."""
    sent, needed = (set(messages_sent(events, len(run))) for events in (run.events, expected.events))
    if len(sent) > 1 or len(needed) > 1 or sent == {0}:
        return ""
    off = sent.pop() - min(needed)
    many = {1: "many", -1: "few"}.get(off)
    return f"Every rank sent {counted(min(needed) + off, 'message')}: one step too {many}." if many else ""


LAST = 10  # of the numbers that sum_of_steps adds up


def which_numbers(total):
    """Say what is in a wrong sum, where it is that of other numbers in a row than 0 to LAST; or ""."""
    for last in range(3 * LAST):
        if total == sum(range(last + 1)) and last != LAST:
            if last > LAST:
                return f"That is the sum of 0 to {last}: one step too many, or numbers that are not to be added."
            return f"That is the sum of 0 to {last}: the last step is missing, or the last number."
    return ""


def check_steps(fn, run, where):
    """Raise Broken where ranks go through the loop more often than the longest of them needs to."""
    p = len(run)
    needed = -(-(LAST + 1) // p)
    made = simulate(p, additions, fn)
    if made[0] > needed:
        too_many = "one step" if made[0] == needed + 1 else f"{made[0] - needed} steps"
        message = (
            f"{where}, the sum is right, but every rank adds {made[0]} times together with the others, where {needed} "
            f"are enough: {too_many} too many."
        )
        raise Broken("steps", message)


def check_log(fn, run, where):
    """Raise Broken where the mean loss is printed more than once."""
    times = run.printed.count("mean loss")
    if times > 1:
        message = f"{where}, the number is right, but it is printed {times} times: rank 0 alone writes the log."
        raise Broken("log", message)


EXERCISES = (
    Exercise("3.1", "ping-pong", messages.ping_pong, 1, check_ping_pong),
    Exercise("3.2", "fit alpha and beta", cost.fit_alpha_beta, 1, check_fit, parallel=False),
    Exercise("3.3", "which collective is it", jobs.which_collective, 1, check_which_collective, parallel=False),
    Exercise("3.4", "diagnose seven programs", zoo.diagnose, 2, check_diagnose, parallel=False),
    Exercise(
        "3.5",
        "repair: a ring in which all are alike",
        zoo.find("ring_even_odd").repaired,
        2,
        partial(check_repair, "ring_even_odd"),
        scaffold=zoo.find("ring_even_odd").broken,
    ),
    Exercise(
        "3.6",
        "repair: a collective that only one rank calls",
        zoo.find("branch_around_collective").repaired,
        2,
        partial(check_repair, "branch_around_collective", also=check_log),
        scaffold=zoo.find("branch_around_collective").broken,
    ),
    Exercise(
        "3.7",
        "repair: loops of different length",
        zoo.find("unequal_loops").repaired,
        2,
        partial(check_repair, "unequal_loops", explain=which_numbers, also=check_steps),
        scaffold=zoo.find("unequal_loops").broken,
    ),
)
