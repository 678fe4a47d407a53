"""The C++ border under fire: generated cases through every bound function, each ends in a result or a clear error.

    python tests/border/run.py                  a short slice, with the installed module
    python tests/border/run.py --sanitize       all of it, with a module built for it: `make sanitize`
    ... --sanitize --cases 1000                 a slice of that: part of `make test-all`

Parts: `alone` is one rank, who also writes to himself, without and with torch; `threads` are ranks that share memory;
`ranks` are processes under mpiexec. A part fails that crashes, hangs, or of which a sanitizer reports something; the
case that it was at is told then. Leaks are looked for in parts without torch, and counted where _core has allocated.
`make sanitize` also runs the threads, with the progress thread of each, under ThreadSanitizer.
"""

import argparse
import glob
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "sanitize"
FLAGS = {
    "libasan.so": "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=undefined",
    "libtsan.so": "-fsanitize=thread",
}
SECONDS = 600  # for one part
REPORT = re.compile(
    r"ERROR: (?:Address|Leak)Sanitizer|runtime error:|AddressSanitizer:DEADLYSIGNAL|WARNING: ThreadSanitizer"
)
LEAK = re.compile(r"(?:Direct|Indirect) leak of .*?(?=\n\n|\Z)", re.S)
OURS = re.compile(r"#\d+ \S+ in (?:hpdl|nanobind::detail::nb_inst)|/csrc/[\w.]+:\d")


class Part(NamedTuple):
    name: str
    cases: int
    arguments: tuple = ()
    ranks: int = 0  # processes under mpiexec; 0: no launcher
    leaks: bool = True
    sanitizer: str = "libasan.so"


def parts(cases, sanitize):
    """All parts, of `cases` cases together."""
    share = cases // 20
    races = [Part("threads", share, ("--size", str(size)), sanitizer="libtsan.so") for size in (2, 3)]
    return [
        *(races if sanitize else ()),
        Part("alone", 7 * share),
        Part("alone", 5 * share, ("--torch",), leaks=False),
        Part("threads", 2 * share, ("--size", "2")),
        Part("threads", 2 * share, ("--size", "3")),
        Part("threads", share, ("--size", "5")),
        Part("ranks", 2 * share, ranks=2),
        Part("ranks", share, ranks=3),
    ]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--sanitize", action="store_true")
    options.add_argument("--cases", type=int)
    options.add_argument("--seed", type=int, default=3)
    options = options.parse_args()
    cases = options.cases or (12_000 if options.sanitize else 1_000)
    modules = {name: build(name) for name in FLAGS} if options.sanitize else {}
    failed, begin = [], time.monotonic()
    for part in parts(cases, options.sanitize):
        with tempfile.TemporaryDirectory(prefix="hpdl-border-") as folder:
            fault = run(part, options.seed, modules.get(part.sanitizer), Path(folder))
        print(f"{part.name:<8} {' '.join(part.arguments):<10} {max(1, part.ranks)} x {part.cases:,} cases: "
              f"{'FAILED: ' + fault if fault else 'well'}", flush=True)  # fmt: skip
        failed += [part.name] if fault else []
    with_what = (
        "under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer" if modules else "without sanitizers"
    )
    done = sum(part.cases for part in parts(cases, options.sanitize))
    print(f"{done:,} cases {with_what} in {time.monotonic() - begin:.0f} s, {len(failed)} parts failed")
    return 1 if failed else 0


def build(sanitizer):
    """A module of its own, with the sanitizers of that library; returns its path."""
    folder, flags = BUILD / sanitizer, f"{FLAGS[sanitizer]} -fno-omit-frame-pointer"
    tools = Path(sys.executable).parent
    cmake = tools / "cmake"
    configure = [cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
                 "-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DPython_EXECUTABLE={sys.executable}",
                 f"-DCMAKE_CXX_FLAGS={flags}"]  # fmt: skip
    for step in (configure, [cmake, "--build", folder, "--target", "_core"]):
        done = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            needs = "the compiler must have libasan, libubsan and libtsan"
            sys.exit(f"{done.stdout}\ncannot build csrc/ with sanitizers: {needs}")
    return folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def run(part, seed, module, folder):
    """Run one part; returns what went wrong, or ""."""
    from hpdl_lab import features

    command = [sys.executable, HERE / "part.py", part.name, "--cases", part.cases, "--seed", seed, *part.arguments]
    command += ["--at", folder / "at", *(["--module", module] if module else [])]
    environment = os.environ | features.launch_environment() | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    if module:
        # Only for the Python processes: the launcher is not ours to judge.
        command = ["env", f"LD_PRELOAD={' '.join(map(library, (part.sanitizer, 'libstdc++.so')))}", *command]
        environment |= {
            "ASAN_OPTIONS": f"log_path={folder}/report:detect_leaks={int(part.leaks)}:allocator_may_return_null=1",
            "LSAN_OPTIONS": "exitcode=0",
            "TSAN_OPTIONS": f"log_path={folder}/report:exitcode=0",
            "UBSAN_OPTIONS": f"log_path={folder}/report:print_stacktrace=1",
        }
    if part.ranks:
        command = [features.mpiexec(), "-n", part.ranks, *command]
    with open(folder / "output", "w+") as output:
        try:
            done = subprocess.run([str(word) for word in command], env=environment, cwd=HERE, stdout=output,
                                  stderr=subprocess.STDOUT, timeout=SECONDS)  # fmt: skip
            ending = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            ending = f"it hangs for {SECONDS} s"
        output.seek(0)
        said = output.read()
    found = reports(folder)
    if not ending and not found:
        return ""
    at = "; ".join(Path(path).read_text() for path in sorted(glob.glob(f"{folder}/at*")))
    return "\n".join([ending or "a sanitizer reports", f"at {at}", *found, said[-6000:]])


def reports(folder):
    """What the sanitizers have written: all errors, and the leaks of memory that this module has allocated."""
    found = []
    for path in glob.glob(f"{folder}/report*"):
        text = Path(path).read_text(errors="replace")
        errors = [e for e in REPORT.findall(text) if "LeakSanitizer" not in e]
        leaks = [leak for leak in LEAK.findall(text) if OURS.search("\n".join(leak.splitlines()[1:6]))]
        found += [text[:4000]] if errors else [leak[:1500] for leak in leaks[:5]]
    return found


def library(name):
    """Path of a library of the compiler."""
    return subprocess.check_output([os.environ.get("CXX", "c++"), f"-print-file-name={name}"], text=True).strip()


if __name__ == "__main__":
    sys.exit(main())
