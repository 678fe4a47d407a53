"""The colors of all pictures, which color-blind people tell apart."""

# Okabe & Ito 2008, "Color universal design"
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW = "#CC79A7", "#56B4E9", "#F0E442"
INK, GRAY, FAINT = "#222222", "#8A8A8A", "#DDDDDD"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK)
YOURS = BLUE  # the attendee's own curve, always
