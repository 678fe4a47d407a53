"""The race at the end of the course: a plan of a training and its expected time, against the time that it takes."""
