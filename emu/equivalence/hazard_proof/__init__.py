"""The hazard proof: whether, in any interleaving, two uses of one memory could meet that the program does not order."""
