"""Predicted against measured: what emu says of published runs and collectives, and what they really took.

    emu validate                      # the cases that come with emu, on layouts that no constant was fitted to
    emu validate --cases mine.jsonl   # one's own, one JSON object a line

From Python: `emu.validate.report.examined(read_rows(path), [path], held_out=False).as_dict()`, with read_rows of
emu.validate.reading. A line becomes a row (rows), a row a case (cases, workloads, timing), a case an outcome (judge),
outcomes become figures (score), and those a report (report, show).
"""
