"""Known troubles of machines like this one, each with the one line that mends it.

A symptom is a record (record.py): a look at this machine, the words of a log, or both. The tables are one file per
family; the one of engines is in `engines/doctor.py`, because a look at clusters needs them. `engines/doctor.py`
goes through all of them for `hpdl doctor`; `engines/launch.py` reads the log of a start that failed.
"""

from . import build, jupyter, machine, mpi, network
from .record import Diagnosis, Symptom, found, found_in

TABLE = (*build.SYMPTOMS, *mpi.SYMPTOMS, *machine.SYMPTOMS, *network.SYMPTOMS, *jupyter.SYMPTOMS)

__all__ = ["TABLE", "Diagnosis", "Symptom", "found", "found_in"]
