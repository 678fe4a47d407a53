"""The race at the end of the course: a plan of a training and the time it will take, against what it takes."""
