"""How a cluster shows itself: which rank runs where, and what can be done with it."""

from html import escape

from ..comm.errors import name_ranks

COLUMNS = ("rank", "host", "cores", "GPU", "pid")

CHEAT_SHEET = (
    ("lab.run(fn, x)", "calls fn(comm, x) on every rank; results come in rank order"),
    ("%%px", "runs the cell on every engine; mpi_rank and mpi_size are there"),
    ("stop button", "ends a stuck cell and says who waits for whom"),
    ("lab.restart()", "new engines when one has died; your variables stay"),
    ("lab.stop()", "ends the engines; so does closing the notebook's kernel"),
)


def rows(infos):
    """One row of strings per engine."""
    return [
        (str(i["rank"]), i["host"], name_ranks(i["cores"]).partition(" ")[2], i["gpu"], str(i["pid"])) for i in infos
    ]


def notes(infos, reasons):
    """Sentences below the table: too few cores; `reasons`, such as a session directory in the second-best place."""
    cores = {(i["machine"], c) for i in infos for c in i["cores"]}  # emulated hosts share those of the machine
    found = [f"Note: {reason}." for reason in reasons]
    if len(infos) > len(cores):
        found.append(
            f"{len(infos)} engines take turns on {len(cores)} cores: results are right, timings show no scaling."
        )
    return found


def text(infos, reasons=()):
    """The table for a terminal."""
    if not infos:
        return "no engines are running: lab.start(4)"
    cells = [COLUMNS, *rows(infos)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines += ["", *notes(infos, reasons)]
    lines += [f"{command:<16}{what}" for command, what in CHEAT_SHEET]
    return "\n".join(lines)


def html(infos, reasons=()):
    """The table for a notebook."""
    if not infos:
        return "<p>no engines are running: <code>lab.start(4)</code></p>"
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows(infos))
    below = "".join(f"<p>{escape(note)}</p>" for note in notes(infos, reasons))
    sheet = "".join(f"<tr><td><code>{escape(c)}</code></td><td>{escape(what)}</td></tr>" for c, what in CHEAT_SHEET)
    return f"<table><tr>{head}</tr>{body}</table>{below}<table>{sheet}</table>"
