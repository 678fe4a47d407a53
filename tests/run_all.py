"""Run the tests in steps, some side by side, and count: `make test`; what is slow or needs more: `make test-all`.

    --all          everything, not only what `make test` runs
    --only WORD    only tests in whose name, or whose file's, the word is: make test ONLY=ring
    --mpi intel    the rank tests alone, under that MPI: make test-mpi MPI=intel, or mpich, or openmpi

Each failure is printed when it happens. The last line is "N passed, N failed, N skipped". A step that ends badly, or
that runs no test, counts as one failure; a test on several ranks passes if it passes on all of them. At the end
build/tests/test.tsv, or test-all.tsv, says how long each file took, and the last step looks for what the others have
left behind.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

from hpdl_lab import features
from hpdl_lab.engines.supervisor import die_with_parent
from tests import installed, left_behind, warm

ROOT = Path(__file__).resolve().parent.parent
RANKS = 3  # odd: finds the off-by-one errors that 2 and 4 hide
WHOLE_SECONDS = 2500  # for all of it: a single test that hangs ends by its own limit
REPORT_SECONDS = 60  # for a step that has been interrupted
NEWS_SECONDS = 15  # between two lines that say how far the steps are
NO_CELLS = ("-p", "no:nbval")  # whose import takes each process 2 s
CELLS = ("--nbval-lax", "--nbval-cell-timeout=600", "--timeout=900")  # seconds for one cell
SOLUTIONS = "notebooks/solutions"
REPLACES_ENGINES = f"{SOLUTIONS}/04_ring_all_reduce.ipynb"  # by hosts, which it may while nobody else uses them
# Tests of a file share what they start, so they stay in one process, in their order.
WORKERS = ("-n2", "--dist=loadfile", "--no-loadscope-reorder", "--max-worker-restart=0")
# What another MPI may do otherwise; what stands on messages, or in shared memory, has been tested on the first one.
ABOUT_MPI = [
    *(f"tests/mpi/test_{name}.py" for name in ("messages", "communicators", "background")),
    *(
        f"tests/mpi/test_collectives.py::test_{name}"
        for name in (
            "all_reduce",
            "the_rivals_are_right_too",
            "mpi_does_not_know_16_bit_floats",
            "an_event_for_each",
            "the_compiled_ring_shows_what_it_sends",
            "another_count_on_one_rank",
        )
    ),
]
SIDE_BY_SIDE = 3  # steps, one of which runs its tests two at a time: all of them wait now and then
WORST = ("passed", "skipped", "failed")


class Step(NamedTuple):
    """`command` runs pytest on each of `ranks` ranks; `again` runs one of its tests alone, if its name is added.

    forks: "ranks" if torchrun's ranks are forks of one warm process, "all" if kernels and `python` are as well.
    """

    name: str
    command: list[str]
    again: str
    ranks: int = 1
    forks: str = ""


class Running:
    """A step that runs, and what its tests have said so far."""

    def __init__(self, step: Step, place: Path) -> None:
        self.step, self.results = step, place / "results"
        self.said = place / "said"
        self.seconds = 0.0
        self.fault = ""
        self.total = 0
        self.outcomes: dict[str, str] = {}
        self.times: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self.read_to = dict.fromkeys((Path(f"{self.results}-{rank}") for rank in range(step.ranks)), 0)

    def read(self) -> list[str]:
        """Take in what has been written since; return the tests that have failed since."""
        failed = []
        for path, position in self.read_to.items():
            if not path.exists():
                continue
            with open(path) as file:
                file.seek(position)
                lines = file.read()
            whole = lines.rpartition("\n")[0]
            self.read_to[path] = position + len((whole + "\n").encode()) if whole else position
            for line in filter(None, whole.split("\n")):
                failed += self.take(json.loads(line))
        return failed

    def take(self, facts: dict) -> list[str]:
        if "total" in facts:
            self.total = max(self.total, facts["total"])
            return []
        test, before = facts["test"], self.outcomes.get(facts["test"], "passed")
        self.outcomes[test] = max(before, facts["outcome"], key=WORST.index)
        self.times[test] += facts["seconds"] / self.step.ranks
        if facts["outcome"] != "failed" or before == "failed":
            return []
        self.texts[test] = facts["text"]
        return [test]

    def counts(self) -> Counter:
        return Counter(self.outcomes.values()) + Counter(failed=int(bool(self.fault)))

    def start(self, only: str, server: warm.Server | None) -> None:
        """Begin, in an environment in which the user's settings decide no test and nobody's engines are found."""
        place = self.said.parent
        private = {"HOME": place / "home", "XDG_RUNTIME_DIR": place / "run", "TMPDIR": place / "tmp"}
        for path in private.values():
            path.mkdir(mode=0o700)
        environment = os.environ | features.launch_environment() | {name: str(path) for name, path in private.items()}
        environment["PET_LOG_DIR"] = str(place)  # or each torchrun leaves a folder in TMPDIR
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")  # of torch, which makes it there as well
        environment["HPDL_TEST_RESULTS"] = str(self.results)
        environment["OMP_NUM_THREADS"] = "1"  # ranks and workers are as many as cores
        environment["HPDL_TORCH"] = "later"  # when something needs it: most engines of tests are stopped before
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles the package for itself
        if server:
            environment = {"": dict, "ranks": server.of_torchrun, "all": server.among}[self.step.forks](environment)
        command = [*self.step.command, *(["-k", only] if only else [])]
        if self.step.ranks == 1:  # each rank takes a folder below TMPDIR
            command.append(f"--basetemp={place / 't'}")  # short: a socket's path allows 104 bytes
        self.began = time.monotonic()
        with open(self.said, "w") as said:
            self.process = psutil.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, preexec_fn=die_with_parent
            )

    def stop(self) -> None:
        """Interrupt it, so that it can still report what it has found; else kill it with all that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(psutil.TimeoutExpired):
            self.process.wait(REPORT_SECONDS)
            return
        for victim in [*self.process.children(recursive=True), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        self.process.wait()

    def end(self, code: int | None, only: str) -> bool:
        """Say what went wrong with the step itself, if anything did; False if no test of it has the word `only`.

        code: of its exit, or None if it had to be stopped.
        """
        self.seconds = time.monotonic() - self.began
        counts = Counter(self.outcomes.values())
        if only and code == 5 and not counts:
            return False
        if code is None:
            self.fault = "stopped: the time for all steps was up"
        elif missing := sum(not path.exists() for path in self.read_to):
            self.fault = f"{missing} of {self.step.ranks} wrote no result, exit code {code}"
        elif not counts["passed"] + counts["failed"]:
            self.fault = f"ran no test, exit code {code}"
        elif code and not counts["failed"]:
            self.fault = f"exit code {code} although no test failed"
        if self.fault:
            said = self.said.read_text(errors="replace")
            print(f"\nFAILED {self.step.name}: {self.fault}\n{said}", flush=True)
        return True


def turns(everything: bool) -> list[list[Step]]:
    """One after the other; of the steps of one turn, three run at a time: most of them use one core, or wait.

    everything: what `make test-all` runs, which is what `make test` leaves out.
    """
    python = sys.executable
    unit = [*NO_CELLS, *WORKERS, "-m", f"{'' if everything else 'not '}slow and not quiet"]
    quiet = [
        str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/test_*.py")) if "mark.quiet" in path.read_text()
    ]
    if not everything:
        notebooks = [*CELLS, "-p", "tests.held_engines", SOLUTIONS, f"--ignore={REPLACES_ENGINES}"]
        return [
            [
                pytest("unit tests", python, *unit, "tests")._replace(forks="ranks"),
                pytest("notebooks", python, *notebooks)._replace(forks="all"),
                on_ranks("tests on 3 ranks", features.mpiexec(), python, "tests/mpi"),
            ],
        ]
    other = installed.environment_of("openmpi") / "bin" / "python"
    return [
        [
            pytest("slow unit tests", python, *unit, "tests"),
            pytest("browser", python, *NO_CELLS, "tests/browser"),
            pytest("Slurm", python, *NO_CELLS, "tests/slurm"),
            pytest("notebook 04", python, *CELLS, REPLACES_ENGINES),
            on_ranks("Open MPI: tests on 3 ranks", other.with_name("mpiexec"), other, *ABOUT_MPI),
            pytest("Open MPI: engines", other, *NO_CELLS, "tests/other_mpi"),
        ],
        [pytest("times, alone", python, *NO_CELLS, "-m", "quiet", *quiet)],
    ]


def turns_under(mpi: str) -> list[list[Step]]:
    """The rank tests under one MPI."""
    installed.other_mpi(mpi)
    programs = installed.environment_of(mpi) / "bin"
    mpiexec = features.mpiexec() if mpi == "mpich" else programs / "mpiexec"
    return [[on_ranks(f"{mpi}: tests on 3 ranks", mpiexec, programs / "python", "tests/mpi")]]


def pytest(name: str, python: str | Path, *arguments: str) -> Step:
    command = [str(python), "-m", "pytest"]
    again = " ".join([*command, *CELLS[:1]] if CELLS[0] in arguments else command)
    return Step(name, [*command, "-q", "-p", "tests.reporting", *arguments], again)


def on_ranks(name: str, mpiexec: str | Path, python: str | Path, *tests: str, ranks: int = RANKS) -> Step:
    launch = [str(mpiexec), "-n", str(ranks), str(python), "-m", "pytest"]
    return Step(name, [*launch, *NO_CELLS, "-q", "-p", "tests.reporting", *tests], " ".join(launch), ranks)


def main() -> int:
    os.chdir(ROOT)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="what is slow, or needs more than this environment")
    parser.add_argument("--only", default="", metavar="WORD", help="tests with this word in their name")
    parser.add_argument("--mpi", choices=("mpich", *installed.OTHER_MPIS), help="only the rank tests, under this MPI")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # by which steps end, too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ranks
    if options.all:
        installed.everything()
    steps = turns_under(options.mpi) if options.mpi else turns(options.all)
    began, ended = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="hpdl-", dir="/tmp") as folder:
        before = left_behind.Snapshot()
        with warm.Server(Path(folder, "warm")) as server:
            for number, turn in enumerate(steps):  # a step without a test of this name has a folder, too
                first = sum(map(len, steps[:number]))
                ended += perform(turn, Path(folder), first, options.only, began + WHOLE_SECONDS, server)
        found = before.left(*Path(folder).glob("*/tmp"))
    if not ended:
        sys.exit(f"no test, and no file of tests, has {options.only!r} in its name")
    write_seconds(ended, "test-all" if options.all else "test")
    return conclude(ended, found, time.monotonic() - began)


def perform(
    steps: list[Step], folder: Path, first: int, only: str, give_up: float, server: warm.Server | None = None
) -> list[Running]:
    """Run the steps of one turn, and tell meanwhile how far they are and what fails. Returns those that ran a test."""
    waiting, under_way, ended = [], [], []
    for number, step in enumerate(steps, first):
        place = folder / str(number)
        place.mkdir()
        waiting.append(Running(step, place))
    news = began = time.monotonic()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < SIDE_BY_SIDE:
                under_way.append(waiting.pop(0))
                under_way[-1].start(only, server)
            time.sleep(0.2)
            for running in list(under_way):
                late = time.monotonic() > give_up
                if late:
                    running.stop()
                code = running.process.poll()
                tell_failures(running)
                if code is not None:
                    under_way.remove(running)
                    if running.end(None if late else code, only):
                        ended.append(running)
            if time.monotonic() > news + NEWS_SECONDS:
                news = time.monotonic()
                tell_progress(under_way, news - began)
    finally:
        for running in under_way:
            running.stop()
    return ended


# -- what is printed ---------------------------------------------------------------------------------------------------


def tell_failures(running: Running) -> None:
    for test in running.read():
        print(f"\nFAILED {running.step.name}: {test}\n{running.texts[test]}\n", flush=True)


def tell_progress(steps: list[Running], seconds: float) -> None:
    """For example "   75 s   unit tests 1,204 of 6,100   notebooks 88 of 364"."""
    how_far = [
        f"{running.step.name} {len(running.outcomes):,} of {running.total:,}" for running in steps if running.total
    ]
    print(f"{seconds:5.0f} s   {'   '.join(how_far) or 'starting'}", flush=True)


def conclude(ended: list[Running], left: list[str], seconds: float) -> int:
    """Print the table of steps, how to repeat what has failed, and the last line; returns the exit code."""
    totals = tell_steps(ended)
    totals += Counter(failed=1) if left else Counter(passed=1)
    print(f"{'nothing is left behind':<28} {'1 failed: ' + '; '.join(left) if left else '1 passed'}")
    print(f"{'all':<28} {'':<36} {seconds:6.1f} s\n")
    again: dict[str, list[str]] = {}
    for running in ended:
        for test, text in running.texts.items():
            command = running.step.again + f" '{alone(running.step, test)}'"
            again.setdefault(command, []).append(f"        {reason(text)}")
    if again:
        lines = (line for command, reasons in again.items() for line in (f"    {command}", *reasons))
        print("To repeat what has failed:", *lines, "", sep="\n")
    print(summary(totals))
    return 1 if totals["failed"] or not totals["passed"] else 0


def alone(step: Step, test: str) -> str:
    """What pytest can run of this step without all the rest: a test, or the whole notebook of a cell."""
    return test.partition("::")[0] if CELLS[0] in step.command else test


def reason(text: str) -> str:
    """The last error line of what pytest says of a failed test: a shortened log ends with it."""
    lines = [line for line in text.splitlines() if line.strip()] or ["(no text)"]
    return next((line for line in reversed(lines) if line.startswith("E ")), lines[-1])[:300]


def tell_steps(ended: list[Running]) -> Counter:
    """Print a line for each step; returns the sums of their counts."""
    totals = Counter()
    print()
    for running in ended:
        counts = running.counts()
        totals += counts
        print(f"{running.step.name:<28} {summary(counts):<36} {running.seconds:6.1f} s   {running.fault}")
    return totals


def write_seconds(ended: list[Running], name: str) -> None:
    """Write build/tests/NAME.tsv: seconds, step, file, longest first."""
    took = Counter()
    for running in ended:
        for test, seconds in running.times.items():
            took[running.step.name, test.partition("::")[0]] += seconds
    table = ROOT / "build" / "tests" / f"{name}.tsv"
    table.parent.mkdir(parents=True, exist_ok=True)
    rows = (f"{seconds:.1f}\t{step}\t{file}\n" for (step, file), seconds in took.most_common())
    table.write_text("".join(rows))


def summary(counts: Counter) -> str:
    """The line that ends the run: "12 passed, 0 failed, 1 skipped"."""
    line = f"{counts['passed']} passed, {counts['failed']} failed"
    return f"{line}, {counts['skipped']} skipped" if counts["skipped"] else line


if __name__ == "__main__":
    sys.exit(main())
