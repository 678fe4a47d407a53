"""Symptoms of the network: what programs cannot say to each other, here or between hosts."""

from ..features import ports
from .record import Symptom

SYMPTOMS = (
    Symptom("blocked ports: this machine", look=ports.require_loopback),
    Symptom(
        "port in use",
        said=r"[Aa]ddress already in use|EADDRINUSE",
        fix="`hpdl doctor --port PORT` says which process holds it: end that, or choose another port",
    ),
    Symptom(
        "blocked ports: between hosts",
        said=r"cannot reach the (?:relay|notebook)|failed to TCP connect to a peer MPI process|No route to host",
        fix="`hpdl doctor --port HOST:PORT` on the other host says what is in the way: let the firewall pass TCP "
        "between these hosts, or name the network interface that joins them",
    ),
)
