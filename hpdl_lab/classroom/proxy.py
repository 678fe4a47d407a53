"""Which proxy stands before the servers: JupyterHub's own, for Node, or its port to Python where there is no Node."""

import os
import shutil
import subprocess
import sys

NAME = "configurable-http-proxy"
NODE_MODULES = os.path.join(sys.prefix, "lib", "hpdl-hub")  # `make hub` has npm install it there
SECONDS = 20  # for a proxy to say its version


def find(path=None):
    """(argv, sentence): how to start the proxy, and which one it is. Raises RuntimeError where there is none.

    path: where to look for commands, as $PATH; this environment's own come first.
    """
    path = os.environ.get("PATH", "") if path is None else path
    candidates = [os.path.join(NODE_MODULES, "node_modules", ".bin", NAME)]
    candidates += [os.path.join(folder, NAME) for folder in path.split(os.pathsep)]
    node = shutil.which("node", path=path)
    for candidate in candidates:
        if node and is_for_node(candidate):
            version = says_version([node, os.path.realpath(candidate)])
            if version:
                return [node, os.path.realpath(candidate)], f"Proxy: {NAME} {version} on Node."
    python = [sys.executable, os.path.join(os.path.dirname(sys.executable), NAME)]
    if not says_version(python):
        raise RuntimeError(
            f"there is no {NAME}, neither npm's nor the one in Python: run `make hub`, which installs them"
        )
    why = f"npm's {NAME} is not installed (`make hub` does it)" if node else "there is no Node on this machine"
    return python, f"Proxy: the one in Python, as {why}; it does the same, but carries less traffic."


def is_for_node(candidate):
    """True for npm's script: the one that pip installs has the same name."""
    try:
        with open(candidate, "rb") as file:
            return b"node" in file.readline()
    except OSError:
        return False


def says_version(argv):
    """The version of the proxy, "" when it cannot even say that."""
    try:
        done = subprocess.run([*argv, "--version"], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split()[-1] if done.returncode == 0 and done.stdout.strip() else ""
