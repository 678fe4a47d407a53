"""docs/simulation.md: its tables are what the code says."""

from pathlib import Path

from hpdl_lab.collectives.table import find_algorithm
from hpdl_lab.comm.network import PRESETS, FatTree, Islands, Switch
from hpdl_lab.predict.messages import predict_rounds

DOC = (Path(__file__).resolve().parent.parent / "docs/simulation.md").read_text()
NDR = "infiniband_ndr"
NETWORKS = (
    Switch.of(NDR),
    FatTree.of(NDR, hosts_per_leaf=32),
    FatTree.of(NDR, hosts_per_leaf=32, oversubscription=4),
    Islands(8, "nvlink_4", NDR, nics=8),
    Islands(8, "nvlink_4", NDR, nics=1),
)
NAMES = ("ring", "tree", "recursive_doubling", "halving_doubling", "double_tree", "hierarchical")


def presets():
    """The rows of the table of published figures."""
    return [f"| `{p.name}` | {p.alpha * 1e6:.3g} µs | {p.GBps:g} GB/s | {p.GBps_source} |" for p in PRESETS.values()]


def sharing():
    """The rows of the table of what sharing costs."""
    rows = []
    for name in NAMES:
        times = [
            predict_rounds(find_algorithm(name).steps(1024, 2**24), 1024, 4, network).seconds for network in NETWORKS
        ]
        rows.append(f"| {name} | {' | '.join(f'{seconds * 1e3:.3g}' for seconds in times)} |")
    return rows


def test_the_table_of_interconnects_is_the_codes():
    for row in presets():
        assert row in DOC


def test_the_table_of_shared_links_is_computed_again():
    for row in sharing():
        assert row in DOC
