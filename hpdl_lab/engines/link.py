"""The speed of an emulated link, "1gbit" as `tc` spells it, and what shapes a link of that speed.

A token bucket lets a burst pass at once after a pause, and sends at the link's speed from then on. A small burst is the
truer link; but the timers of a busy machine come late, and what the bucket could not hold meanwhile is lost speed.
"""

import re
from typing import NamedTuple

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # bit/s
SLOWEST, FASTEST = 10**6, 10**11  # bit/s: slower, engines do not start in time; no processor moves more

LATE_S = 0.5e-3  # s: timers may come that late
LARGEST_PACKET, SMALLEST_PACKET = 65_536, 9_000  # bytes that TCP may hand over at once, to be cut by the interface
HEADERS = 2_500  # bytes, of the parts of the largest packet
WINDOW_S, SMALLEST_WINDOW = 2e-3, 256 << 10  # s, bytes: that may be under way between two hosts
QUEUE_NBYTES = 64 << 20  # room for the windows of all senders to one host: nothing is lost, as under flow control


class Link(NamedTuple):
    """A link of `bits` per second in each direction."""

    bits: int

    @property
    def bandwidth(self):
        """Bytes per second."""
        return self.bits / 8

    @property
    def packet(self):
        """Bytes of the largest packet that TCP hands over: a slow link would be one packet's for too long."""
        return min(max(int(self.bandwidth * LATE_S), SMALLEST_PACKET), LARGEST_PACKET)

    @property
    def burst(self):
        """Bytes that may pass at once after a pause."""
        return max(self.packet + HEADERS, int(self.bandwidth * LATE_S))

    def tbf(self):
        """Arguments of `tc qdisc`: the token bucket that shapes one direction."""
        return f"tbf rate {self.bits}bit burst {self.burst} limit {QUEUE_NBYTES}"

    def windows(self):
        """Files in /proc/sys/net and what they hold: how much TCP may have under way."""
        most = max(SMALLEST_WINDOW, int(self.bandwidth * WINDOW_S))
        return {"ipv4/tcp_rmem": f"4096 131072 {most}", "ipv4/tcp_wmem": f"4096 65536 {most}"}

    def __str__(self):
        unit = next(unit for unit in reversed(UNITS) if self.bits >= UNITS[unit])
        return f"{self.bits / UNITS[unit]:.12g}{unit}"


def parse(text):
    """ "1gbit" -> Link(1000000000). Raises ValueError with the spelling that is wanted."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)([kmg]bit)", text.strip().lower()) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f'link={text!r}: a speed as tc spells it is needed, such as "100mbit", "1gbit" or "10gbit"')
    link = Link(round(float(found[1]) * UNITS[found[2]]))
    if not SLOWEST <= link.bits <= FASTEST:
        raise ValueError(f"link={text!r}: from {Link(SLOWEST)} to {Link(FASTEST)} can be emulated")
    return link
