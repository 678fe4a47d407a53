"""`lab.guess`: what you expect, typed before it is measured, and kept; `lab.reveal`: what it is, next to the guess."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from ..trace import number_text
from ..units import require_number
from .progress import progress, read_rows

Guess = TypeVar("Guess", float, dict)


def guess(about: str, value: Guess) -> Guess:
    """Commit a guess before the measurement: `lab.guess("ms of an empty call", 100)`.

    It is kept with your progress, and returned: hand it to the `prediction=` of a verb, which draws it.

    Args:    about: what is guessed, with its unit; value: a number, or several: {"8": 10, "1MiB": 1000}.
    Raises:  ValueError as long as a `...` stands in the place of a number, and for what is no number.
    """
    values = value.values() if isinstance(value, dict) else [value]
    if not values or ... in values:
        raise ValueError("write your guess in place of ...: a wrong one is worth more than none")
    for number in values:
        require_number(f"your guess ({about})", number)
    progress().add("guess", about=about, value=value)
    return value


def reveal(about: str, value: float | dict[str, float] | dict[int, float]) -> None:
    """Print the true value next to what was guessed: `lab.reveal("ms of an empty call", 1.2)`.

        ms of an empty call: 1.2; you guessed 100

    A dict has a line for each name. The value is kept with your progress, under the same words. A line ends after the
    value if nothing was guessed under these words, neither in this session nor in an earlier one.

    Args:    about: the words of the guess; value: a number, or several with the names of the guess: {"8": 12}.
    Raises:  ValueError for what is no number, and for other names than in the guess.
    """
    found = value if isinstance(value, dict) else {"": value}
    truth = {
        name: require_number(f"the true value ({about})", x.item() if hasattr(x, "item") else x)  # of numpy or torch
        for name, x in found.items()
    }
    names, guessed = [str(name) for name in truth], _last_guess(about)
    if not truth:
        raise ValueError(f"{about}: a true value is needed, got {value!r}")
    if guessed and guessed.keys() != set(names):
        was = ", ".join(filter(None, guessed)) or "one number"
        raise ValueError(f"{about}: {was} was guessed, so that as much has to be revealed, got {value!r}")
    progress().add("truth", about=about, value=truth if isinstance(value, dict) else truth[""])
    for name, number in zip(names, truth.values(), strict=True):
        yours = f"; you guessed {number_text(guessed[name])}" if guessed else ""
        print(f"{about}{f' ({name})' if name else ''}: {number_text(number)}{yours}")


def _last_guess(about: str) -> dict[str, float]:
    """Return the last guess under these words, by name, a single number as {"": number}; {} if nothing was guessed.

    Names are texts, as in the progress file, which is read if this session has no such guess.
    """
    values = _values_of(progress().rows, about)
    if not values:
        with suppress(OSError):  # nothing could be kept
            values = _values_of(read_rows(progress().path), about)
    last = values[-1] if values else {}
    return {str(name): number for name, number in (last if isinstance(last, dict) else {"": last}).items()}


def _values_of(rows: Sequence[object], about: str) -> list[float | dict[str, float]]:
    """Return what was guessed under these words, in order."""
    guesses = [row for row in rows if isinstance(row, dict) and row.get("kind") == "guess"]
    return [row["value"] for row in guesses if row.get("about") == about and "value" in row]
