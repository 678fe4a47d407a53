"""Clusters of ipyparallel, each started as its user would, and an sshd of the test's own that one kind needs."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import ipyparallel
import psutil
import pytest
from traitlets.config import Config

from tests.slurm.nodes import end, held

SERVER = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
Subsystem sftp internal-sftp
SetEnv XDG_RUNTIME_DIR={folder} IPYTHONDIR={folder}/ipython
"""
CLIENT = """
Host n1 n2
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/user_key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


@contextlib.contextmanager
def sshd():
    """Hosts n1 and n2, both this machine: ssh and scp in the folder that is yielded, for PATH, know them alone."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or pytest.skip("no sshd: openssh-server")
    folder = tempfile.mkdtemp(prefix="hpdl-t-", dir="/tmp")
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", 0o755, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{key}"], check=True)
    for name, text in {"sshd_config": SERVER, "ssh_config": CLIENT}.items():
        with open(f"{folder}/{name}", "w") as file:
            file.write(text.format(port=port, folder=folder))
    for name in ("ssh", "scp"):
        with open(f"{folder}/{name}", "w", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
            file.write(f'#!/bin/sh\nexec {shutil.which(name)} -F {folder}/ssh_config "$@"\n')
    process = held([server, "-D", "-e", "-f", f"{folder}/sshd_config"], stderr=subprocess.DEVNULL)
    try:
        while subprocess.run([f"{folder}/ssh", "n1", "true"], capture_output=True).returncode:
            assert process.poll() is None
            time.sleep(0.1)
        yield folder
    finally:
        end(process)
        shutil.rmtree(folder)


@contextlib.contextmanager
def started(kind, n, folder, **how):
    """`n` engines of ipyparallel by its launcher `kind`, in a profile folder: (ipyparallel.Cluster, its Client)."""
    os.makedirs(folder)
    config = Config()
    config.SSHEngineSetLauncher.engines = {"n1": n - n // 2, "n2": n // 2}
    config.SSHLauncher.remote_python = sys.executable
    config.SlurmEngineSetLauncher.batch_template = (
        "#!/bin/sh\n#SBATCH --ntasks={n} --nodes=2 --output={output_file}\nsrun --kill-on-bad-exit=0 {program_and_args}"
    )
    cluster = ipyparallel.Cluster(
        n=n, engines=kind, profile_dir=folder, cluster_id="", config=config, delay=0, log_level=40, **how
    )
    try:
        with contextlib.chdir(folder):  # where it writes its job script, and engines work
            client = cluster.start_and_connect_sync(activate=False)
        with client:
            yield cluster, client
    finally:
        with contextlib.suppress(Exception):  # what a test has killed
            cluster.stop_cluster_sync()


def marked(mark):
    """The command lines of processes of this host, but for ipyparallel's own, with `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HPDL_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return [command for command in found if "hpdl_lab" in command]
