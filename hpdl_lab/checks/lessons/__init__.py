"""The exercises: every module here has a table of them, EXERCISES, and what their checks are made of."""
