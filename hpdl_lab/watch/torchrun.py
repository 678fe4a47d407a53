"""torchrun, which notes in HPDL_WATCH/failures.json the ranks that failed: python -m hpdl_lab.watch.torchrun OPTIONS"""

import json
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def _run(arguments: list[str]) -> int:
    """Run torchrun, return its exit code, and print nothing about failed ranks."""
    try:
        main(arguments)
    except ChildFailedError as error:
        failures = [[rank, failure.pid, failure.exitcode] for rank, failure in error.failures.items()]
        (Path(os.environ["HPDL_WATCH"]) / "failures.json").write_text(json.dumps(failures))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
