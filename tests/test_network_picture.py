"""The picture of a network: every rank, every cable, the shared ones in another color, and what they are."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Circle

from hpdl_lab.comm.network import FatTree, Islands, Ring, Switch
from hpdl_lab.plots import network as picture
from hpdl_lab.plots.style import VERMILION, look, new_figure

NETWORKS = [Switch(), Ring(), FatTree(4, 2), FatTree(16, 4), Islands(4, nics=2), Islands(8)]


def drawn(network, size):
    with look():
        figure = new_figure(height=picture.height(network, size))
        picture.draw(figure, network, size)
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("size", [1, 2, 9, 64])
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_every_rank_and_every_cable_is_there_and_nothing_sticks_out(network, size):
    figure = drawn(network, size)
    (ax,) = figure.axes
    assert sum(isinstance(patch, Circle) for patch in ax.patches) == size
    names = [(link.source, link.dest) for link in network.links(size)]
    cables = {frozenset(name.replace("router", "rank") for name in ends) for ends in names}
    assert len(ax.lines) == sum(len(ends) == 2 for ends in cables)
    box = figure.bbox
    for text in [*ax.texts, *figure.texts]:
        extent = text.get_window_extent()
        assert box.x0 <= extent.x0 and extent.x1 <= box.x1, text.get_text()
        assert box.y0 <= extent.y0 and extent.y1 <= box.y1, text.get_text()


@pytest.mark.parametrize(
    ("network", "shared", "text"),
    [
        (Switch(), 0, "rank - switch\n12.5 GB/s"),
        (Ring(), 8, "rank - rank\n12.5 GB/s\nshared by up to 4 messages"),
        (FatTree(4, 2), 4, "leaf - spine\n12.5 GB/s\nshared by up to 2 messages"),
        (Islands(4), 2, "NIC - switch\n50 GB/s\nshared by up to 4 messages"),
    ],
    ids=str,
)
def test_shared_cables_stand_out_and_say_what_they_carry(network, shared, text):
    figure = drawn(network, 8)
    (ax,) = figure.axes
    assert sum(to_hex(line.get_color()) == VERMILION.lower() for line in ax.lines) == shared
    assert text in [t.get_text() for t in ax.texts]
    foot = [t.get_text() for t in figure.texts if "orange" in t.get_text()]
    assert len(foot) == (shared > 0)


def test_of_a_large_network_the_first_ranks_are_drawn_and_the_picture_says_so():
    figure = drawn(FatTree(16, 4), 1024)
    assert sum(isinstance(patch, Circle) for patch in figure.axes[0].patches) == 64
    subtitle = next(t.get_text() for t in figure.texts if "ranks" in t.get_text())
    assert subtitle.startswith("the first 64 of 1,024 ranks; the farthest message takes 2.22 µs + bytes / 12.5 GB/s")
