"""Notebooks for attendees and students: given out, brought up to date without losing answers, and as a course.

`forms.py` reads what notebooks/build.py has built; `update.py` writes an attendee's folder, in which `merge.py` carries
what changed into notebooks that they have worked in, cell by cell; `course.py` writes the lessons for nbgrader.
"""
