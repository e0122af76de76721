"""Likely causes of ranks that do not meet, read from the source of the program once something is wrong.

Where a rank stands (stands), what decides that a line runs (branches), what its variables may hold and on which ranks
(taint, bindings, scopes, workings), what either side of a condition calls (sides), and which of all that kept a rank from
a call (weighing); likely says it. Nothing of the program is run, and nothing is kept while it runs well.
"""
