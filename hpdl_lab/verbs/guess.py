"""`lab.guess`: what you expect, typed before it is measured, and kept."""

from typing import TypeVar

from ..units import require_number
from .progress import progress

Guess = TypeVar("Guess", float, dict)


def guess(about: str, value: Guess) -> Guess:
    """Commit a guess before the measurement: `lab.guess("ms of an empty call", 100)`.

    It is kept with your progress, and returned: hand it to the `prediction=` of a verb, which draws it.

    Args:    about: what is guessed, with its unit; value: a number, or several: {"8": 10, "1MiB": 1000}.
    Raises:  ValueError as long as a `...` stands where a number should, and for what is no number.
    """
    values = value.values() if isinstance(value, dict) else [value]
    if not values or ... in values:
        raise ValueError("write your guess in place of ...: a wrong one is worth more than none")
    for number in values:
        require_number(f"your guess ({about})", number)
    progress().add("guess", about=about, value=value)
    return value
