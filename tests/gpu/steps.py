"""The steps of `make test-gpu`, in the environment that tests/gpu/run.py has made."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from hpdl_lab import features  # noqa: E402
from hpdl_lab.data import recorded  # noqa: E402
from tests import run_all  # noqa: E402

RANKS = 2
KEPT = 150  # s that the tests leave for what is measured after them
NEWS = 2.0  # s between two looks at what the tests have said


def steps(python):
    """The steps that can run here, and the names of others with the reason."""
    yield run_all.pytest("GPU", python, "tests/gpu", "-rs", "--ignore=tests/gpu/ranks"), ""
    ranks = f"GPU, tests on {RANKS} ranks"
    try:
        step = run_all.on_ranks(ranks, features.mpiexec(), python, "-rs", "tests/gpu/ranks", ranks=RANKS)
        yield step, ""
    except features.Missing as error:
        yield run_all.Step(ranks, [], ""), str(error)


def succeeds(command, environment, seconds):
    try:
        return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        print("stopped: the time for all steps was up", flush=True)
        return False


class Copies(threading.Thread):
    """Within it, the results that tests write below `place` are copied to `folder` while they come."""

    def __init__(self, place, folder):
        super().__init__(daemon=True)
        self.place, self.folder, self.over = place, folder, threading.Event()

    def copy(self):
        for results in self.place.glob("*/results-*"):
            shutil.copy(results, self.folder / f"step{results.parent.name}-{results.name}.jsonl")

    def run(self):
        while not self.over.wait(NEWS):
            self.copy()

    def __enter__(self):
        self.start()

    def __exit__(self, *exc):
        self.over.set()
        self.join()
        self.copy()


def main(report, until, rehearses=""):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    os.chdir(ROOT)
    end = time.monotonic() + float(until) - time.time()
    folder = Path(report)
    folder.mkdir(parents=True, exist_ok=True)
    ended, lines, failed = [], [], 0
    with tempfile.TemporaryDirectory(prefix="hpdl-g-", dir="/tmp") as place, Copies(Path(place), folder):
        for step, why_not in steps(sys.executable):
            if not why_not and time.monotonic() > end - KEPT:
                why_not = "the time for all tests was up"
                failed += 1
            if why_not:
                lines.append(f"{step.name:<28} not run: {why_not}")
                continue
            ended += run_all.perform([step], Path(place), len(ended), "", end - KEPT)
        table = folder / "reduction.md"
        environment = {**os.environ, **features.launch_environment(), "XDG_RUNTIME_DIR": place, "OMP_NUM_THREADS": "4"}
        for name, arguments, written in (
            ("reduction ladder", ["bench", "reduction", "--markdown", table], table),
            ("recordings for lab.replay", ["record", "--device", "cuda"], recorded.FOLDER),
        ):
            if rehearses:
                lines.append(f"{name:<28} not run: a rehearsal")
                continue
            if time.monotonic() > end:
                failed += 1
                lines.append(f"{name:<28} not run: the time for all steps was up")
                continue
            print(f"\n== {name} ==", flush=True)
            command = [sys.executable, "-m", "hpdl_lab", *map(str, arguments)]
            done = succeeds(command, environment, max(1.0, end - time.monotonic()))
            failed += not done
            lines.append(f"{name:<28} {written if done else 'failed: see above'}")
    totals = run_all.tell_steps(ended)
    totals["failed"] += failed
    print("\n".join(lines) + "\n")
    print(run_all.summary(totals))
    if rehearses:  # a step without a test that ran is no fault then
        return int(not totals["skipped"] or any("failed" in step.outcomes.values() for step in ended))
    return 1 if totals["failed"] or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
