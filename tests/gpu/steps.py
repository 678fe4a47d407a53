"""The steps of `make test-gpu`, in the environment that tests/gpu/run.py has made."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from hpdl_lab import features  # noqa: E402
from hpdl_lab.data import recorded  # noqa: E402
from tests import run_all  # noqa: E402

RANKS = 2
SECONDS = 600  # for one step


def steps(python):
    """The steps that can run here, and the names of others with the reason."""
    yield run_all.pytest("GPU", python, "tests/gpu", "-rs", "--ignore=tests/gpu/ranks"), ""
    ranks = f"GPU, tests on {RANKS} ranks"
    try:
        step = run_all.on_ranks(ranks, features.mpiexec(), python, "-rs", "tests/gpu/ranks", ranks=RANKS)
        yield step, ""
    except features.Missing as error:
        yield run_all.Step(ranks, [], ""), str(error)


def succeeds(command, environment):
    try:
        return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main(report):
    os.chdir(ROOT)
    folder = Path(report)
    folder.mkdir(parents=True, exist_ok=True)
    ended, lines, failed = [], [], 0
    with tempfile.TemporaryDirectory(prefix="hpdl-g-", dir="/tmp") as place:
        for step, why_not in steps(sys.executable):
            if why_not:
                lines.append(f"{step.name:<28} not run: {why_not}")
                continue
            ended += run_all.perform([step], Path(place), len(ended), "", time.monotonic() + SECONDS)
            for results in Path(place, str(len(ended) - 1)).glob("results-*"):
                shutil.copy(results, folder / f"step{len(ended) - 1}-{results.name}.jsonl")
        table = folder / "reduction.md"
        environment = {**os.environ, **features.launch_environment(), "XDG_RUNTIME_DIR": place, "OMP_NUM_THREADS": "4"}
        for name, arguments, written in (
            ("reduction ladder", ["bench", "reduction", "--markdown", table], table),
            ("recordings for lab.replay", ["record", "--device", "cuda"], recorded.FOLDER),
        ):
            print(f"\n== {name} ==", flush=True)
            command = [sys.executable, "-m", "hpdl_lab", *map(str, arguments)]
            done = succeeds(command, environment)
            failed += not done
            lines.append(f"{name:<28} {written if done else 'failed: see above'}")
    totals = run_all.tell_steps(ended)
    totals["failed"] += failed
    print("\n".join(lines) + "\n")
    print(run_all.summary(totals))
    return 1 if totals["failed"] or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
