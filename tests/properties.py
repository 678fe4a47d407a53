"""`given` of hypothesis, whose examples are the same in every run and as many as a second or two allow."""

from hypothesis import given, settings

settings.register_profile("repeatable", max_examples=40, deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")  # for what is decorated from now on

__all__ = ["given"]
