"""Notebook 15: the best checkpoint interval, judged by the goodput of simulated months that the text does not show."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ...resilience.interval import checkpoint_interval, goodput
from ...trace import number_text
from ..checkers import because
from ..ranks import alone, capital, real
from ..record import Answer, Broken, Exercise, Passed, Reason

PASSES = 0.01  # regret: share of the best goodput that is lost; right ways lose up to 0.6%, wrong ones 1.7% on some job
MONTHS = 20  # of failures, the same for all intervals
TRIED = [2 ** (k / 4) for k in range(-4, 5)]  # times Young's interval: one of them is the best


class _Job(NamedTuple):
    """The arguments of checkpoint_interval, and the seconds of a restart. All are made up."""

    write_s: float
    rank_mtbf_s: float
    ranks: int
    slowdown: float
    restart_s: float

    @property
    def where(self) -> str:
        slowdown = "" if self.slowdown == 1 else f", slowdown={self.slowdown:g}"
        return f"with write_s={self.write_s:g}, rank_mtbf_s={self.rank_mtbf_s:g}, ranks={self.ranks}{slowdown}"

    @property
    def mtbf_s(self) -> float:
        return self.rank_mtbf_s / self.ranks

    def young(self) -> float:
        """Return Young's interval, without the least interval in the background."""
        return math.sqrt(2 * self.slowdown * self.write_s * self.mtbf_s)

    def goodput(self, interval_s: float) -> float:
        """Return the mean goodput of MONTHS, or the goodput of no training if there is no interval."""
        return goodput(interval_s, *self, months=MONTHS) if interval_s > 0 else 0.0


JOBS = (
    _Job(60, 1.8e8, 16_384, 1, 300),
    _Job(300, 6e6, 1_000, 1, 60),
    _Job(400, 1.5e8, 25_000, 1, 0),
    _Job(5, 2e6, 512, 1, 60),
    _Job(200, 2e7, 2_000, 0.25, 300),
    _Job(100, 8e5, 100, 0.5, 100),
    _Job(600, 4.8e7, 8_000, 0.1, 120),
    _Job(600, 2e7, 5_000, 0.03, 100),
)
TWICE = JOBS[4]  # in the background, and never at the least interval, also with twice a value
FIT, TIMES = "Your intervals fit", "Your interval is in proportion to"
ON = "In the background, training goes on during a write."
# y is Young's interval, either as it is or at least write_s.
MISTAKES: tuple[tuple[Reason, Callable[[_Job, float], float]], ...] = (
    (f"ranks: {FIT} the MTBF of one rank. How often does any rank of the job fail?", lambda j, y: y * j.ranks**0.5),
    ("ranks: With more ranks, your interval is longer. Does a larger job fail less often?", lambda j, y: y * j.ranks),
    (f"ranks: {FIT} an MTBF that is divided by the ranks twice.", lambda j, y: y / j.ranks**0.5),
    (f"loss: {FIT} failures that lose a whole interval. When in an interval do they come?", lambda j, y: y / 2**0.5),
    (f"loss: {FIT} failures that lose a quarter of an interval. Why not more?", lambda j, y: y * 2**0.5),
    (f"loss: {FIT} failures that lose two intervals. How far does the job go back?", lambda j, y: y / 2),
    ("root: Those are seconds times seconds. What is the unit of an interval?", lambda j, y: y**2),
    (f"root: {TIMES} the MTBF. Does a longer interval lose nothing?", lambda j, y: y * j.mtbf_s**0.5),
    (f"root: {TIMES} the write time. Does a longer interval lose nothing?", lambda j, y: y * j.write_s**0.5),
    ("mtbf: You write once per failure. How much does each failure lose?", lambda j, y: j.mtbf_s),
    ("write: Your interval is the write time. What share of the time do the writes take?", lambda j, y: j.write_s),
    (
        f"slowdown: {FIT} training that stops during each write. Does training stop here?",
        lambda j, y: y / j.slowdown**0.5,
    ),
    (
        f"slowdown: {FIT} a share of the speed that is left. What does 1 mean?",
        lambda j, y: y * (1 / j.slowdown - 1) ** 0.5,
    ),
    (f"slowdown: {FIT} a slowdown that counts twice.", lambda j, y: y * j.slowdown**0.5),
    ("slowdown: The more a write slows the training, the more often you write. Why?", lambda j, y: y / j.slowdown),
    (f"period: {ON} Why do you add the write to the interval?", lambda j, y: y + j.write_s),
    (f"period: {ON} Why do you subtract the write?", lambda j, y: y - j.write_s),
    ("units: Those are minutes. Return seconds.", lambda j, y: y / 60),
    ("units: Those are hours. Return seconds.", lambda j, y: y / 3600),
    ("units: Those are milliseconds. Return seconds.", lambda j, y: y * 1000),
    ("rate: Those are checkpoints per second. How many seconds are between them?", lambda j, y: 1 / y),
)


@cache
def _best(job: _Job) -> float:
    """Return the best goodput of the intervals that are tried."""
    return max(job.goodput(checkpoint_interval(*job[:4]) * times) for times in TRIED)


def _check_interval(fn: Answer) -> Passed:
    answers = {job: _answer(fn, job) for job in JOBS}
    regrets = {job: 1 - job.goodput(interval_s) / _best(job) for job, interval_s in answers.items()}
    worst = max(regrets, key=lambda job: regrets[job])
    if regrets[worst] > PASSES:
        yours = (
            f"your interval is {number_text(answers[worst])} s, with a goodput of {worst.goodput(answers[worst]):.1%}"
        )
        text = f"{capital(worst.where)}, {yours}. The best has {_best(worst):.1%}."
        raise because(_reason_of(fn, answers, worst), text)
    for job, interval_s in answers.items():
        if job.slowdown < 1 and interval_s < job.write_s * (1 - 1e-9):
            text = f"{capital(job.where)}, your interval is {number_text(interval_s)} s."
            raise because("overlap: When does the second write begin, and when does the first one end?", text)
    first = JOBS[0]
    restarts = [first._replace(restart_s=seconds).goodput(answers[first]) for seconds in (60, 600)]
    return Passed(
        f"regret: on {len(JOBS)} jobs, goodput is at most {max(0, regrets[worst]):.1%} below the best one",
        f"""{first.where}: every {number_text(answers[first])} s; goodput {restarts[0]:.1%} with restarts of 60 s,
        {restarts[1]:.1%} with 600 s""",
    )


def _answer(fn: Answer, job: _Job) -> float:
    """Return the number that fn returns."""
    more = () if job.slowdown == 1 else (job.slowdown,)
    got = alone(fn, *job[:3], *more, where=job.where)
    try:
        if math.isfinite(seconds := real(got)):
            return seconds
    except (TypeError, ValueError):
        pass
    raise Broken(f"returns: {capital(job.where)}, your function returned {got!r}: return a number of seconds.")


def _reason_of(fn: Answer, answers: dict[_Job, float], worst: _Job) -> Reason:
    """Return the mistake that explains the answers for all jobs, or else the argument that changes nothing."""

    def made(job: _Job, mistake: Callable[[_Job, float], float]) -> bool:
        """Return whether the answer has this mistake, with or without write_s as the least interval."""
        values = [mistake(job, y) for y in (job.young(), max(job.young(), job.write_s))]
        values += [max(value, job.write_s) for value in values]
        return any(math.isclose(answers[job], value, rel_tol=1e-4, abs_tol=1e-9) for value in values)

    for why, mistake in MISTAKES:
        if all(made(job, mistake) for job in JOBS):
            return why
    if len(set(answers.values())) == 1:
        return f"constant: You return the same for all {len(JOBS)} jobs. How do the jobs differ?"
    for failed, name in (("write", "write_s"), ("mtbf", "rank_mtbf_s"), ("ranks", "ranks"), ("slowdown", "slowdown")):
        if _answer(fn, TWICE._replace(**{name: 2 * getattr(TWICE, name)})) == answers[TWICE]:
            return f"{failed}: With twice the `{name}`, you return the same."
    if answers[worst] <= 0:
        return "returns: Return the seconds between two checkpoints, a number above 0."
    if answers[worst] < checkpoint_interval(*worst[:4]):
        return "short: Most of the loss is in the writes. How much training does one write cost?"
    return "long: Most of the loss is repeated training. How much does one failure lose?"


EXERCISES = (Exercise("15.1", "the best checkpoint interval", checkpoint_interval, 2, _check_interval),)
