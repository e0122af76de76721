"""When what a rank has sent may go: without holding up the rank, and without keeping it longer than that.

A send is over once its receiver has asked for it and the transfer has taken place. When that is follows from the schedule: by
its own times, the receiver asks when it starts the action that stands after its receive. From then on one action of the
sender's is left for the transfer; before the next one it waits for the send, which by then is over, and what was sent goes.

Nobody waits for what comes later in those times, so such waits cannot close a circle. A receiver that has yet to hear what
shape comes asks when it uses what it receives, and no earlier; of such sends one may wait that much later.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from emu.parallel.pipeline.actions import RECV_B, RECV_F, SEND_B, SEND_F, Action, F
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.pipeline.timing import timed

OTHER_END = {RECV_F: (SEND_F, -1), RECV_B: (SEND_B, 1)}  # the send's kind, and its stage beyond the receive's


@lru_cache(maxsize=64)
def releases(schedule: Schedule, at_use: bool = False) -> tuple[dict[Action, int], ...]:
    """For every rank: send -> the position in its row before which it waits for that send; those at the end of all are left out.

    Args:
        schedule: with sends and receives.
        at_use: whether receivers may ask for outputs as late as at their use.
    """
    times = timed(schedule).rows
    asked: dict[Action, float] = {}  # send -> when its receiver asks for it
    places: list[list[int]] = []  # of every rank's compute actions in its row
    for row, when in zip(schedule.rows, times):
        mine: list[int] = []
        waiting: list[Action] = []
        for position, action in enumerate(row):
            if action.kind in OTHER_END:
                kind, beyond = OTHER_END[action.kind]
                waiting.append(Action(action.stage + beyond, kind, action.microbatch))
            elif action.kind not in (SEND_F, SEND_B) and (action.parts or action.kind in "FBIW"):
                start = when[len(mine)][0]
                asked.update((send, start) for send in waiting)
                waiting.clear()
                for part in action.each() if at_use else ():
                    if part.kind == F and (send := Action(part.stage - 1, SEND_F, part.microbatch)) in asked:
                        asked[send] = start
                mine.append(position)
        places.append(mine)
    out = []
    for row, when, mine in zip(schedule.rows, times, places):
        starts = [start for start, _, _ in when]
        due: dict[Action, int] = {}
        for position, action in enumerate(row):
            if action in asked:
                after = bisect_left(mine, position)  # the next action
                at = max(after, bisect_left(starts, asked[action])) + 1
                if at < len(mine):
                    due[action] = mine[at]
        out.append(due)
    return tuple(out)
