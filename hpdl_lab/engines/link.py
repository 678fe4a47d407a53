"""The speed of an emulated link, "1gbit" as `tc` spells it, and how its queue is made."""

import re
from typing import NamedTuple

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # bit/s; tc knows more spellings, attendees need no other
SLOWEST, FASTEST = 10**6, 10**11  # bit/s: slower, an engine's start takes minutes; no processor moves more

LARGEST_PACKET = 68_000  # bytes: what TCP hands over at once, 64 KiB and the headers of its parts
BURST_S = 0.5e-3  # s of the link that may pass at once after a pause: timers of a busy machine come that late
QUEUE_NBYTES = 4 << 20  # bytes: nothing is lost, as on a network with flow control


class Link(NamedTuple):
    """A link of `bits` per second in each direction."""

    bits: int

    @property
    def bandwidth(self):
        """Bytes per second."""
        return self.bits / 8

    @property
    def burst(self):
        """Bytes that may pass at once after a pause."""
        return max(LARGEST_PACKET, int(self.bandwidth * BURST_S))

    def tbf(self):
        """Arguments of `tc qdisc`: the token bucket that shapes one direction."""
        return f"tbf rate {self.bits}bit burst {self.burst} limit {max(QUEUE_NBYTES, 2 * self.burst)}"

    def __str__(self):
        unit = next(u for u in reversed(UNITS) if self.bits % UNITS[u] == 0 or u == "kbit")
        return f"{self.bits / UNITS[unit]:g}{unit}"


def parse(text):
    """ "1gbit" -> Link(1000000000). Raises ValueError with the spelling that is wanted."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.strip().lower()) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f'link={text!r}: a speed as tc spells it is needed, such as "100mbit", "1gbit" or "10gbit"')
    link = Link(round(float(found[1]) * UNITS[found[2]]))
    if not SLOWEST <= link.bits <= FASTEST:
        raise ValueError(f"link={text!r}: from {Link(SLOWEST)} to {Link(FASTEST)} can be emulated")
    return link
