"""The steps of `make test-gpu`, in the environment that tests/gpu/run.py has made."""

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import run_all

from hpdl_lab import features
from hpdl_lab.data import recorded

RANKS = 2


def steps(python):
    """The steps that can run here, and why the others cannot."""
    yield run_all.Step("GPU", run_all.pytest(python, "tests/gpu", "-rs", "--ignore=tests/gpu/ranks"), 300), ""
    ranks = "GPU, tests on 2 ranks"
    try:
        script = 'xml=$1; shift; exec "$@" --junitxml="$xml-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"'
        command = [features.mpiexec(), "-n", str(RANKS), "sh", "-c", script, "sh", "{xml}", python]
        yield run_all.Step(ranks, [*command, "-m", "pytest", "-q", "-rs", "tests/gpu/ranks"], 300, RANKS), ""
    except features.Missing as error:
        yield run_all.Step(ranks, [], 0), str(error)


def main(report):
    os.chdir(run_all.ROOT)
    folder = Path(report)
    folder.mkdir(parents=True, exist_ok=True)
    totals, lines = dict.fromkeys(run_all.WORST, 0), []
    with tempfile.TemporaryDirectory(prefix="hpdl-g-", dir="/tmp") as place:
        environment = {**os.environ, **features.launch_environment(), "XDG_RUNTIME_DIR": place, "OMP_NUM_THREADS": "4"}
        for number, (step, why_not) in enumerate(steps(sys.executable)):
            print(f"\n== {step.name} ==", flush=True)
            if why_not:
                print(f"not run: {why_not}")
                lines.append(f"{step.name:<28} not run: {why_not}")
                continue
            xml, t0 = folder / f"step{number}.xml", time.monotonic()
            command = [str(part).replace("{xml}", str(xml)) for part in step.command]
            counts, fault = run_all.count(xml, step.ranks, run_all.run(command, step.seconds, environment))
            for outcome in run_all.WORST:
                totals[outcome] += counts[outcome]
            lines.append(f"{step.name:<28} {run_all.summary(counts):<36} {time.monotonic() - t0:6.1f} s   {fault}")
        table = folder / "reduction.md"
        for name, arguments, written in (
            ("reduction ladder", ["bench", "reduction", "--markdown", table], table),
            ("recordings for lab.replay", ["record", "--device", "cuda"], recorded.FOLDER),
        ):
            print(f"\n== {name} ==", flush=True)
            command = [sys.executable, "-m", "hpdl_lab", *map(str, arguments)]
            done = run_all.run(command, 600, environment) == 0
            totals["failed"] += not done
            lines.append(f"{name:<28} {written if done else 'failed: see above'}")
    print("\n" + "\n".join(lines) + "\n")
    print(run_all.summary(totals))
    return 1 if totals["failed"] or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
