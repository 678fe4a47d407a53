"""Tables in a file of documentation: made by a command, replaced by the next run of it."""

import contextlib
import os

BEGIN, END = "<!-- made by hpdl bench: {} -->", "<!-- end of {} -->"


def section(title, command, about, columns, units, rows, cells):
    """The text of one section: where, how and when, then a table for each collective.

    cells(row): the texts of one row, in the order of `columns`.
    """
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"## {title[0].upper()}{title[1:]}",
        "",
        f"`{command}`",
        "",
        f"{about['machine']}, {about['instructions']}, {about['system']}; {about['mpi']}; {versions}; {about['date']}.",
    ]
    heads = [f"{column} {unit}".strip() for column, unit in zip(columns, units, strict=True)]
    for collective in dict.fromkeys(row["collective"] for row in rows):
        lines += [
            "",
            f"### {collective}",
            "",
            line(heads),
            line(":---" if h in ("name", "place") else "---:" for h in heads),
        ]
        lines += [line(cells(row)) for row in rows if row["collective"] == collective]
    return "\n".join(lines)


def line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def put(path, title, text):
    """Write `text` into the file, in place of what an earlier run of this title has written there, or at its end.

    Raises: as `write`.
    """
    begin, end = BEGIN.format(title), END.format(title)
    old = ""
    if os.path.exists(path):
        with open(path) as file:
            old = file.read()
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2] if found else ""
    before = before if found or not before.strip() else before.rstrip("\n") + "\n\n"
    write(path, f"{before}{begin}\n\n{text}\n\n{end}{after if found else chr(10)}")


def write(path, text):
    """Write a file, whole or not at all. Raises: OSError with the path; then the file is as it was."""
    new = f"{path}.{os.getpid()}"
    try:
        with open(new, "w") as file:
            file.write(text)
        os.replace(new, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
