"""Serve JupyterLab on notebooks/, for this machine only, until Ctrl-C: `make lab`."""

import argparse
import os
import secrets
import signal
import socket
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
FIRST_PORT, PORTS = 8888, 100
FIRST = "00_why.ipynb"  # the notebook that is open at first


def main():
    arguments = parse()
    use_writable_home()
    port = free_port(arguments.port)
    token = secrets.token_hex(16)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel "python3" is this environment's, not one in the home

    options = [
        f"--ServerApp.ip={HOST}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={ROOT / 'notebooks'}",
        f"--ServerApp.open_browser={arguments.browser != 'no' and has_display()}",
        "--ServerApp.allow_root=True",
        "--ServerApp.answer_yes=True",  # Ctrl-C stops at once, without a question
        "--Application.log_level=ERROR",
        f"--IdentityProvider.token={token}",
        "--KernelManager.transport=ipc",  # over TCP other accounts of this machine could read cells and results
        f"--LabApp.app_settings_dir={Path(__file__).parent / 'jupyterlab'}",
        "--LabApp.news_url=None",
        f"--LabApp.default_url=/lab/tree/{FIRST}",
        "--ContentsManager.hide_globs=['__pycache__', '*.pyc', 'build.py', 'slides.py', 'stubs.py', 'tracks.py', '.*']",
    ]
    try:
        serve(options, f"http://{HOST}:{port}/lab/tree/{FIRST}?token={token}")
    except SystemExit as ended:
        if not ended.code or arguments.port or why_not(port) is None:
            raise
        print(f"Somebody else was faster on port {port}: trying the next one.", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def serve(options, url):
    """Serve until a signal ends it. Raises SystemExit, not 0, where the port has been taken meanwhile."""
    from jupyter_core.paths import jupyter_runtime_dir

    from hpdl_lab.classroom.server import quick_imports
    from hpdl_lab.engines import session_dir

    with quick_imports():
        from jupyterlab.labapp import LabApp  # takes its time

    with session_dir.of_kernels(jupyter_runtime_dir()) as os.environ["JUPYTER_RUNTIME_DIR"]:
        server = LabApp.initialize_server(options)
        # A closed terminal must stop kernels and engines as Ctrl-C does.
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        server.io_loop.add_callback(announce, url)
        server.start()


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", default="", help=f"default: the first free port from {FIRST_PORT}")
    parser.add_argument("--browser", default="", help="no: do not open a browser")
    return parser.parse_args()


def announce(url):
    """Runs first in the server's event loop, so that the address is said when it answers."""
    print(f"\n  JupyterLab is ready:  {url}")
    print("  It opens with 00_why.ipynb.  Ctrl-C here stops it, its kernels and their engines.\n", flush=True)


def free_port(wanted):
    """The wanted port, or the first free one where none is wanted; ends with one sentence where that cannot be."""
    if not wanted:
        ports = range(FIRST_PORT, FIRST_PORT + PORTS)
        for port in ports:
            if why_not(port) is None:
                return port
        sys.exit(f"No free port from {ports[0]} to {ports[-1]}: stop a server, or name another: make lab PORT=9999")
    if not wanted.isdecimal() or not 1 <= int(wanted) <= 65535:
        sys.exit(f"PORT={wanted} is not a port: a number from 1024 to 65535 is needed, as in make lab PORT=8899")
    reason = why_not(int(wanted))
    if reason:
        sys.exit(f"Port {wanted} cannot be used ({reason}): make lab PORT=... another, or leave PORT out")
    return int(wanted)


def why_not(port):
    """Why this port cannot be served on, or None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror.lower()
    return None


def use_writable_home():
    """Jupyter, IPython and matplotlib keep files in the home: give them .venv/home where the home cannot be written."""
    home = os.path.expanduser("~")
    try:
        tempfile.TemporaryFile(dir=home).close()
    except OSError as error:
        instead = Path(sys.prefix) / "home"
        instead.mkdir(exist_ok=True)
        os.environ["HOME"] = str(instead)
        print(f"{home} cannot be written ({error.strerror}): settings and progress go to {instead}")


def has_display():
    """A browser in a text terminal would hide the address that is printed there."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


if __name__ == "__main__":
    main()
