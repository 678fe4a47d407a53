"""A process that has imported torch and forks the others: what notebooks start as `python`, `torchrun`, or a kernel.

    with warm.Server(folder) as server:
        subprocess.run(["python", "script.py"], env=server.among(os.environ))      script.py, in a fork

An import of torch costs a second of a core, and a notebook's files to take home make up to seven. What is imported here
comes with `import torch` anyway, but for torchrun itself and the kernel's own modules: a script that forgets an import
fails as it does elsewhere. Signals, exit status, and open files are handed on (warm_python.py).
"""

import ctypes
import gc
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ABOVE = 500  # where received files are put aside, above all numbers that they had
# In a kernel, whose configuration puts this environment's programs first. Nobody looks at a live plot while it grows,
# so only its last picture is drawn.
STARTUP = """
import os as _os
import hpdl_lab.plots.live as _live
_os.environ["PATH"] = {programs!r} + ":" + _os.environ["PATH"]
_live.Live.update = _live.Live.rest = lambda self, *args: None
"""


class Server:
    """The server, with its stand-ins for programs, in the new folder `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.programs, spec = place / "bin", place / "share" / "kernels" / "python3"
        self.programs.mkdir(parents=True)
        for name in ("python", "torchrun"):
            shim = self.programs / name
            shim.write_text(f"#!{sys.executable} -IS\n{(HERE / 'warm_python.py').read_text()}")
            shim.chmod(0o755)
        shutil.copytree(Path(sys.prefix, "share", "jupyter", "kernels", "python3"), spec)
        kernel = json.loads((spec / "kernel.json").read_text())
        kernel["argv"] = [str(self.programs / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps(kernel))
        startup = place / "ipython" / "profile_default" / "startup" / "live.py"
        startup.parent.mkdir(parents=True)
        startup.write_text(STARTUP.format(programs=str(self.programs)))

    def of_torchrun(self, environment: dict[str, str]) -> dict[str, str]:
        """`environment`, in which torchrun's ranks are forks."""
        return environment | {"HPDL_WARM": str(self.place / "socket"), "PYTHON_EXEC": str(self.programs / "python")}

    def among(self, environment: dict[str, str]) -> dict[str, str]:
        """`environment`, in which kernels, and the commands python and torchrun, are forks."""
        places = {"IPYTHONDIR": str(self.place / "ipython"), "JUPYTER_PATH": str(self.place / "share")}
        path = {"PATH": f"{self.programs}:{environment['PATH']}"}
        return self.of_torchrun(environment) | places | path

    def __enter__(self) -> "Server":
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(self.place / "socket")]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        if not self.process.stdout.readline():
            raise RuntimeError(f"the process that forks the others ended with {self.process.wait()}")
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def serve(path: str) -> dict:
    """Fork a process for each request; returns the request in that process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()
    import ipykernel.kernelapp  # noqa: F401
    import torch  # noqa: F401
    import torch.distributed.run  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return watch(client)
        client.close()


def watch(client: socket.socket) -> dict:
    """Fork the process of one request, in which the request is returned; hand it signals, and its end to the client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, received, _, _ = socket.recv_fds(client, 8, 100)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += client.recv(1 << 16)
    pid = os.fork()
    if pid == 0:
        client.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        request = json.loads(text)
        aside = [os.dup2(fd, ABOVE + i) for i, fd in enumerate(received)]
        for fd in received:
            os.close(fd)
        for fd, number in zip(aside, request["fds"], strict=True):
            os.dup2(fd, number, inheritable=True)
            os.close(fd)
        return request
    for fd in received:
        os.close(fd)
    process = os.pidfd_open(pid)
    while process not in (ready := select.select([client, process], [], [])[0]):
        signals = client.recv(64) if ready else b""
        if not signals:
            os.kill(pid, signal.SIGKILL)  # whoever asked has gone
            os._exit(0)
        for signum in signals:
            os.kill(pid, signum)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.sendall(status.to_bytes(8, "big", signed=True))
    os._exit(0)


def become(request: dict) -> None:
    """Run the arguments as a new Python does."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if "JPY_PARENT_PID" in os.environ:  # a kernel ends when its parent does
        os.environ["JPY_PARENT_PID"] = str(os.getppid())
    arguments = request["arguments"]
    unbuffered = arguments[0] == "-u" or "PYTHONUNBUFFERED" in os.environ
    arguments = arguments[arguments[0] == "-u" :]
    for name, fd in (("stdout", 1), ("stderr", 2)):
        binary = open(fd, "wb", closefd=False, buffering=0 if unbuffered else -1)
        lines = fd == 2 or os.isatty(fd)
        setattr(sys, name, io.TextIOWrapper(binary, "utf-8", line_buffering=lines, write_through=unbuffered))
    sys.stdin = open(0, closefd=False)
    gc.enable()
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], ""
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
        return
    sys.argv, sys.path[0], main.__file__ = arguments, os.path.dirname(os.path.abspath(arguments[0])), arguments[0]
    exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), vars(main))


if __name__ == "__main__":
    become(serve(sys.argv[1]))
