"""The attendee's verbs: a module for each of them, or for several that belong together. `lab` names them."""
