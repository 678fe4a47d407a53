"""What `lab.scaling` returns: points, agreement of measured and simulated ones, laws fitted to them, CSV and PNG."""

import csv
from dataclasses import dataclass, field

from ..parallel.scaling.laws import fit
from ..plots import live
from .picture import WithFigure

COLUMNS = (
    "source",
    "kind",
    "ranks",
    "cores",
    "rate",
    "p25",
    "p75",
    "speedup",
    "efficiency",
    "exposed",
    "overlap",
    "imbalance",
    "simulated",
    "how",
)


@dataclass(frozen=True)
class ScalingResult(WithFigure):
    """Points are dicts: kind, ranks, cores, rate (median, units of work per s), p25, p75, speedup, efficiency, exposed,
    overlap, imbalance (see parallel/scaling/accounting.py; None where the events do not tell).

    rows:      measured; "simulated" is the rate of simulated ranks that compute and talk as these engines did.
    simulated: on ranks with a core each; "how": "messages" where each was followed, "schedule" where it was evaluated.
    model:     of the alpha-beta-overlap model. fits: list of parallel.scaling.laws.Fit.
    """

    rows: list
    simulated: list
    model: list
    unit: str
    figure: object = field(repr=False)

    @property
    def fits(self):
        """Amdahl's law for strong and Gustafson's for weak scaling, of the measured and of the simulated points."""
        return fits_of(self.rows, self.simulated)

    def agreement(self):
        """{(kind, ranks): simulated over measured rate}, where ranks were measured and simulated alike."""
        return {(r["kind"], r["ranks"]): r["simulated"] / r["rate"] for r in self.rows if r.get("simulated")}

    def csv(self, path):
        """Write all points to a file, one per line, with the columns COLUMNS; returns the path."""
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
            writer.writeheader()
            for source, rows in (("measured", self.rows), ("simulated", self.simulated), ("model", self.model)):
                writer.writerows({"source": source, **row} for row in rows)
        return path

    def png(self, path):
        """Write the figure to a file; returns the path."""
        live.save(self.figure, path)
        return path

    savefig = png

    def __repr__(self):
        head = f"{'scaling':<10}{'ranks':>6}{'rate, ' + self.unit:>18}{'efficiency':>12}{'exposed':>9}{'overlap':>9}"
        lines = [f"{head}{'imbalance':>11}{'simulated':>11}"]
        for r in self.rows:
            crowded = f"  more ranks than the {r['cores']} cores" if r["ranks"] > r["cores"] else ""
            lines.append(line_of(r) + percent(r.get("simulated") and r["simulated"] / r["rate"], 11) + crowded)
        lines += [f"{line_of(r)}  simulated, {r['how']}" for r in self.simulated]
        return "\n".join([*lines, *map(str, self.fits)])


def line_of(r):
    """One point as text; a share that the events do not tell is left blank."""
    imbalance = f"{r['imbalance']:>11.2f}" if r["imbalance"] else " " * 11
    shares = percent(r["efficiency"], 12) + percent(r["exposed"], 9) + percent(r["overlap"], 9)
    return f"{r['kind']:<10}{r['ranks']:>6,}{r['rate']:>18,.0f}{shares}{imbalance}"


def percent(value, width):
    return " " * width if value is None else f"{value:>{width}.0%}"


def with_speedups(rows):
    """The rows in order, with speedup and efficiency against the row of their kind with the fewest ranks."""
    out = []
    for row in sorted(rows, key=lambda r: (r["kind"], r["ranks"])):
        first = min((r for r in rows if r["kind"] == row["kind"]), key=lambda r: r["ranks"])
        speedup = row["rate"] / first["rate"]
        out.append(row | {"speedup": speedup, "efficiency": speedup * first["ranks"] / row["ranks"]})
    return out


def fits_of(rows, simulated):
    """[Fit] for every kind of scaling, of measured points (where each rank had a core) and of simulated ones."""
    fits = []
    for kind in dict.fromkeys(r["kind"] for r in (*rows, *simulated)):
        for source, points in (("measured", rows), ("simulated", simulated)):
            curve = [r for r in points if r["kind"] == kind and r["ranks"] <= r["cores"]]
            if curve:
                fits.append(fit(kind, [r["ranks"] for r in curve], [r["speedup"] for r in curve], source))
    return fits
