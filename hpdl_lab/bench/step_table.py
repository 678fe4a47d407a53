"""The table of a race between steps of training: printed, and written into files."""

import json
from typing import NamedTuple

from .markdown import put, section


class StepTable(NamedTuple):
    """columns, units: of its head. form: how a line of it is printed, as str.format takes it.

    cells(row): the texts of a row; verdicts(rows): sentences below the table.
    """

    columns: tuple
    units: tuple
    form: str
    cells: object
    verdicts: object

    def tell(self, rows, title, about, command, json_path=None, markdown_path=None):
        """Print the rows; write them where a path is given, with the machine and the command that made them."""
        head = f"{self.form.format(*self.columns)}\n{self.form.format(*self.units)}"
        print(f"{title}; {about['mpi']}, {about['machine']}\n\n{head}")
        for row in rows:
            print(self.form.format(*self.cells(row)))
        print(*self.verdicts(rows), sep="\n")
        if json_path:
            with open(json_path, "w") as file:
                json.dump({"command": command, **about, "rows": rows}, file, indent=1)
        if markdown_path:
            one = [{**row, "collective": "one step"} for row in rows]
            text = section(title, command, about, self.columns, self.units, one, self.cells)
            put(markdown_path, title, "\n".join([text, "", *self.verdicts(rows)]))
