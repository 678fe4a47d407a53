"""The report about a watched script: text, JSON, and a trace for Perfetto."""

import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

from ..trace import Event
from ..units import counted
from . import agree, speed, waits
from .finding import KINDS, Finding
from .records import WatchedRun, line_name
from .strategy import ObservedStrategy, nbytes

TITLES = {
    "hang": "It hangs or crashes",
    "wrong": "It computes something else than one rank would",
    "note": "To be looked at",
    "slow": "Time",
    "memory": "Memory",
}
NAMES = {"data": "input", "optimizer": "update", "exposed": "wait"}  # of phases, as in other traces
WIDTH = 120  # columns of a report, if the terminal has them
STRICT = ("hang", "wrong")


@dataclass
class WatchReport:
    """The findings about a run. findings: the most important ones first."""

    run: WatchedRun
    findings: list[Finding]

    @property
    def strict(self) -> bool:
        """True if something is wrong: a hang, a crash, or other results than one rank would have."""
        return any(finding.kind in STRICT for finding in self.findings)

    def of(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def heading(self) -> str:
        run = self.run
        most = max((rank.step_count for rank in run.ranks), default=0)
        rows = [rank.steps for rank in run.ranks if len(rank.steps) > 1]  # the first step starts up
        examples = sum(event["examples"] for steps in rows for event in steps[1:])
        spent = max((steps[-1]["till"] - steps[0]["till"] for steps in rows), default=0) / 1e9
        parts = [
            Path(run.script).name,
            counted(run.size, "rank"),
            run.backend,
            ObservedStrategy(run).name,
            f"{counted(most, 'step')} in {run.seconds:.1f} s",
            *([f"{examples / spent:,.0f} examples/s"] if spent and examples else []),
            "stuck, and ended" if run.stalled else "interrupted" if run.interrupted else f"exit code {run.exit_code}",
        ]
        return "hpdl watch: " + " | ".join(parts)

    def unseen(self) -> list[str]:
        """Return the parts of the run that were not observed."""
        trouble = {(e["hook"], e["error"]) for rank in self.run.ranks for e in rank.all("trouble")}
        found = [f"{hook} failed ({error})" for hook, error in sorted(trouble)]
        kinds = {kind for rank in self.run.ranks for event in rank.all("model") for kind in event["kinds"]}
        if "OptimizedModule" in kinds:
            found.append("what happens within compiled graphs")
        models = any(rank.all("model") for rank in self.run.ranks)
        if models and not any(rank.step_count for rank in self.run.ranks):
            found.append("any step of a torch optimizer")
        return found

    def __str__(self) -> str:
        return self.text(min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH))

    def text(self, width: int) -> str:
        """Return the report in lines of at most `width` columns, but for code."""
        lines = [self.heading()]
        for kind in KINDS:
            if self.of(kind):
                lines += ["", TITLES[kind]]
                lines += [_wrapped(str(finding), width) for finding in self.of(kind)]
        if not self.strict:
            unseen = f": no rank was seen, and the exit code is {self.run.exit_code}"
            lines += ["", f"Nothing found that is wrong{'' if self.run.ranks else unseen}."]
        if self.unseen():
            lines += ["", _wrapped("Not seen: " + "; ".join(self.unseen()) + ".", width)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Return it as plain data, for JSON."""
        run = self.run
        return {
            "script": run.script,
            "ranks": run.size,
            "backend": run.backend,
            "strategy": ObservedStrategy(run).name,
            "steps": max((rank.step_count for rank in run.ranks), default=0),
            "seconds": run.seconds,
            "exit_code": run.exit_code,
            "stalled": run.stalled,
            "interrupted": run.interrupted,
            "findings": [finding.as_dict() for finding in self.findings],
            "times": [{"rank": t.rank, "total": t.total, **t.parts} for t in speed.all_times(run)],
            "not_seen": self.unseen(),
        }

    def events(self) -> list[Event]:
        """Return the work and the collectives of each rank in its first steps.

        A collective is drawn until the phase ends in which it was begun: gloo does not say when it was over.
        """
        found = []
        for rank in self.run.ranks:
            spans = [(name, t0, t1, step["step"]) for step in rank.steps for name, t0, t1 in step["spans"]]
            found += [Event(rank.number, step, NAMES.get(name, name), t0, t1, line="") for name, t0, t1, step in spans]
            for entry in rank.entries:
                t0 = entry["time_ns"]
                t1, step = next(((end, n) for _, begin, end, n in spans if begin <= t0 <= end), (t0 + 1000, 0))
                size = nbytes(entry)
                found.append(
                    Event(rank.number, step, entry["op"], t0, t1, -1, size, line_name(entry["place"]), "messages")
                )
        return sorted(found, key=lambda event: event.t0_ns)


def _wrapped(text: str, width: int) -> str:
    first, *more = text.split("\n")
    body = textwrap.fill(first, width, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
    return "\n".join([body, *(f"  {line}" for line in more)])


def judge_run(run: WatchedRun) -> WatchReport:
    """Judge a run."""
    found = [*waits.findings(run), *agree.findings(run), *speed.findings(run)]
    return WatchReport(run, sorted(found, key=lambda finding: KINDS.index(finding.kind)))
