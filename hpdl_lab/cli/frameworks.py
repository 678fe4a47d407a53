"""Train one model by several frameworks on emulated hosts, and record seconds, losses and the bytes on the links.

    python -m hpdl_lab.cli.frameworks [FOLDER [WORD]]      or `make frameworks`

         switch                   links of 1 Gbit/s in each direction; the switch counts the bytes
    |       |       |
    host0   host1   host2
    worker  worker  a parameter server, if there is one

JAX, TensorFlow and gRPC are installed in exact versions into .venv-frameworks. Its Python finds PyTorch and the
laboratory in the environment of this one.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from ..bench.launch import about
from ..data import recorded
from ..engines import hosts, launch, layout
from ..engines.errors import EngineError
from ..engines.supervisor import die_with_parent
from ..performance.frameworks_run import net
from ..performance.recorded import lines
from ..system import until

PACKAGES = Path(net.__file__).with_name("frameworks.txt")
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-frameworks"
PYTHON = ENVIRONMENT / "bin" / "python"
LINK, DEADLINE = "1gbit", 300.0  # s, for a column: on a busy machine the import of TensorFlow takes a minute
VARIABLES = launch.BETWEEN_HOSTS | {
    **dict.fromkeys((*launch.THREAD_VARIABLES, "TF_NUM_INTRAOP_THREADS"), "1"),
    **dict(zip(("MASTER_ADDR", "MASTER_PORT"), net.HOSTS[0].split(":"), strict=True), WORLD_SIZE=str(net.WORKERS)),
    **{"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"},
}
BOTH = {"worker 0": 0, "worker 1": 1}
COLUMNS = {  # name: program and how it trains; {role and number: host}: those in the role of the first one report
    "one process": ("torch alone", {"worker 0": 0}),
    "PyTorch DDP": ("torch ddp", BOTH),
    "PyTorch compile + DDP": ("torch compiled", BOTH),
    "JAX jit + shard_map": ("jax shard_map", BOTH),
    "TensorFlow MultiWorkerMirrored": ("tensorflow mirrored", BOTH),
    "TensorFlow ParameterServer, async": ("tensorflow served", {"chief 0": 2, "ps 0": 2, **BOTH}),
    "parameter server over gRPC": ("grpc sync", {**BOTH, "server 0": 2}),
    "ring of this laboratory, by gloo": ("torch ring", BOTH),
}


def install() -> None:
    """Make .venv-frameworks, unless it is there with these packages."""
    finds = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    wanted, stamp = finds + PACKAGES.read_text(), ENVIRONMENT / "installed"  # written last
    if stamp.exists() and stamp.read_text() == wanted:
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(PYTHON), "install", "-q"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(ENVIRONMENT)], check=True)
    subprocess.run([*pip, "--no-deps", "-r", str(PACKAGES)], check=True)
    Path(sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT)}), "laboratory.pth").write_text(finds)
    stamp.write_text(wanted)


@contextmanager
def emulated(folder: str) -> Generator[int]:
    """Make the hosts; yields the id of the process that keeps them until the end. Raises EngineError."""
    wanted = layout.wanted(len(net.HOSTS), where="emulated", link=LINK)
    launch.check_layout(wanted)
    with subprocess.Popen(launch.hosts_argv(folder, wanted)) as keeps:
        try:
            if not until(lambda: os.path.exists(hosts.namespaces_file(folder)), launch.START_SECONDS):
                raise EngineError(f"there were no emulated hosts within {launch.START_SECONDS} s")
            yield keeps.pid
        finally:
            keeps.kill()


def _measured(name: str, folder: str, env: dict[str, str]) -> recorded.Recording:
    """Run all processes of a column. Raises RuntimeError with what they said if one fails, or takes too long."""
    (program, how), who, reporting = COLUMNS[name][0].split(), COLUMNS[name][1], []
    with ExitStack() as stack:
        for process, host in who.items():
            role, number = process.split()
            argv = [str(PYTHON), "-m", f"{net.__package__}.train_{program}", how, role, number]
            output = stack.enter_context(open(Path(folder, process), "w"))
            start = partial(subprocess.Popen, stdout=output, stderr=subprocess.STDOUT, env=env | {"RANK": number})
            started = start(argv, preexec_fn=partial(_enter, folder, host))
            stack.callback(started.wait)
            stack.callback(started.kill)
            reporting += [started] if role == next(iter(who)).split()[0] else []
        until(lambda: all(one.poll() is not None for one in reporting), DEADLINE, 0.1)
        texts = [Path(folder, process).read_text() for process in who]
        if any(one.poll() != 0 for one in reporting):
            raise RuntimeError("\n".join([f"{name} failed:", *(text[-2000:] for text in texts)]))
    reports = [json.loads(text.strip().rpartition("\n")[2]) for text in texts if '"links"' in text]
    package, *numbers = ([report[key] for report in reports] for key in ("package", "seconds", "loss", "links"))
    seconds, loss, links = (np.mean(values, axis=0).tolist() for values in numbers)
    return {"name": name, "package": package[0], "seconds": seconds, "loss": loss, "links": links}


def _enter(folder: str, host: int) -> None:
    """Make this process a process of an emulated host, which ends with its parent."""
    hosts.enter(folder, host)
    die_with_parent()


def _main(folder: str | Path = recorded.FOLDER, word: str = "") -> None:
    """Measure every column with `word` in its name, and record them."""
    rows = []
    with tempfile.TemporaryDirectory() as session, emulated(session) as switch:
        install()
        env = os.environ | VARIABLES | {"SWITCH": str(switch), "PYTHONPATH": str(ROOT), "TMPDIR": session}
        for name in COLUMNS:
            if word in name:
                rows.append(_measured(name, session, env))
                print(rows[-1], flush=True)
    what = f"one model trained by several frameworks on {net.WORKERS} emulated hosts, links of {LINK}"
    found = {"kind": "table", "what": what, **about(), "nbytes": net.NBYTES, "steps": net.STEPS, "rows": rows}
    print(recorded.save("frameworks", {**found, "lines": lines(found)}, Path(folder)))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except RuntimeError as error:
        sys.exit(str(error))
