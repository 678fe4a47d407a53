"""What the attendee's verbs are made of: a module for one verb, or for some that belong together. `lab` names them."""
