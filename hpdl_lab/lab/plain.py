"""Verbs that refuse in one sentence: a notebook shows no traceback through this package."""

import functools
import traceback

from ..engines.errors import without_traceback
from ..trace import is_the_attendees

REFUSALS = (ValueError, TypeError, LookupError, NotImplementedError)


def plainly(verb):
    """The verb, of whose own refusals a notebook shows the sentence alone.

    What a function of the attendee's raises keeps the traceback, which leads to its line; not so a stub, which says
    what is still to be written.
    """

    @functools.wraps(verb)
    def wrapped(*args, **kwargs):
        try:
            return verb(*args, **kwargs)
        except REFUSALS as error:
            raise (error if led_by_the_attendee(error) else without_traceback(error)) from None

    return wrapped


def led_by_the_attendee(error):
    """Whether the attendee's own code, and no stub, raised it or called what did."""
    if isinstance(error, NotImplementedError):
        return False
    return any(is_the_attendees(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))
