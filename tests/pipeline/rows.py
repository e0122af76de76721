"""Schedules to test with: random ones of every kind, faults put into them, and a slow judge that shares no code with ours."""

from __future__ import annotations

import random
import re
from collections import Counter, deque

from hypothesis import strategies as st

from emu.parallel.pipeline import Action, Schedule
from emu.parallel.pipeline.actions import KINDS
from emu.parallel.pipeline.schedules import SCHEDULES, make
from emu.spmd import PlanError

NAMES = sorted(name for name in SCHEDULES if name != "auto")
WORD = re.compile(r"(\d+)([A-Z_]+?)(\d*)$")


def words(action) -> list[tuple[int, str, int]]:
    """(stage, kind, microbatch) of an action, or of both of a pair, read from its text."""
    return [
        (int(stage), kind, int(microbatch or -1))
        for word in str(action).removesuffix("OVERLAP_F_B").strip("()").split(";")
        for stage, kind, microbatch in WORD.findall(word)
    ]


@st.composite
def schedules(draw, most_ranks: int = 4, most_microbatches: int = 6) -> Schedule:
    """Any schedule that can be made, with few ranks."""
    name = draw(st.sampled_from(NAMES))
    ranks, microbatches = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_microbatches))
    for chunks in draw(st.permutations([1, 2])):
        try:
            return make(name, ranks, microbatches, chunks)
        except PlanError:
            continue
    return make("1f1b", ranks, microbatches)


def runs(schedule: Schedule, blocking: bool = False, explicit: bool | None = None) -> bool:
    """Whether a schedule can be run: tried step by step, with a queue between each two ranks. The judge."""
    rows = [[words(action) for action in row] for row in schedule.rows]
    flat = [(word, rank) for rank, row in enumerate(rows) for step in row for word in step]
    compute = [(word, rank) for word, rank in flat if word[1] in ("F", "B", "I", "W")]
    if not compute:
        return False
    rank_of = {}
    stages, microbatches = 1 + max(w[0] for w, _ in compute), 1 + max(w[2] for w, _ in compute)
    if stages * microbatches > len(compute):
        return False
    for stage in range(stages):
        for microbatch in range(microbatches):
            mine = sorted((w[1], rank) for w, rank in compute if (w[0], w[2]) == (stage, microbatch))
            kinds, ranks = [kind for kind, _ in mine], {rank for _, rank in mine}
            if kinds not in (["B", "F"], ["F", "I", "W"]) or len(ranks) != 1:
                return False
            rank_of[stage, microbatch] = ranks.pop()
    # What must be sent.
    sending = [(word, rank) for word, rank in flat if word[1].startswith(("SEND", "RECV"))]
    explicit = bool(sending) or blocking
    if explicit:
        needed = Counter()
        for (stage, microbatch), rank in rank_of.items():
            after = rank_of.get((stage + 1, microbatch), rank)
            if after != rank:
                needed[(stage, "SEND_F", microbatch), rank] += 1
                needed[(stage + 1, "RECV_F", microbatch), after] += 1
                needed[(stage + 1, "SEND_B", microbatch), after] += 1
                needed[(stage, "RECV_B", microbatch), rank] += 1
        if Counter(sending) != needed:
            return False
    # Gathers and frees.
    if any(word[1] in ("UNSHARD", "RESHARD") for word, _ in flat):
        for row in rows:
            held = set()
            mine = {w[0] for step in row for w in step if w[1] in ("F", "B", "I", "W")}
            for stage, kind, _ in (w for step in row for w in step):
                if kind == "UNSHARD":
                    if stage in held or stage not in mine:
                        return False
                    held.add(stage)
                elif kind == "RESHARD":
                    if stage not in held:
                        return False
                    held.remove(stage)
                elif kind in ("F", "B", "I", "W") and stage not in held:
                    return False
            if held:
                return False
    return _finishes(rows, rank_of, stages, explicit, blocking)


def _finishes(rows, rank_of, stages, explicit, blocking) -> bool:
    def peer(word):
        stage, kind, microbatch = word
        return rank_of[stage + {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[kind], microbatch]

    def content(word):  # what travels, named from its maker's side
        stage, kind, microbatch = word
        return (stage - (kind == "RECV_F") + (kind == "RECV_B"), kind[-1], microbatch)

    done: set[tuple[int, str, int]] = set()
    queues: dict[tuple[int, int, str], deque] = {}  # what was sent
    slots: dict[tuple[int, int, str], list] = {}  # what was posted to take it
    at = [0] * len(rows)

    def made(stage, kind, microbatch):
        return (stage, kind, microbatch) in done or (kind == "B" and (stage, "I", microbatch) in done)

    def arrived(rank, word):
        channel = (peer(word), rank, word[1][-1])
        mine = slots.get(channel, [])
        if word not in mine:
            return False
        n = mine.index(word)
        return n < len(queues.get(channel, ())) and queues[channel][n] == content(word)

    def can(rank, word):
        stage, kind, microbatch = word
        if kind == "F":
            if stage == 0:
                return True
            if explicit and rank_of[stage - 1, microbatch] != rank:
                return (
                    (stage, "RECV_F", microbatch) in done if blocking else arrived(rank, (stage, "RECV_F", microbatch))
                )
            return made(stage - 1, "F", microbatch)
        if kind in ("B", "I"):
            if not made(stage, "F", microbatch):
                return False
            if stage == stages - 1:
                return True
            if explicit and rank_of[stage + 1, microbatch] != rank:
                return (
                    (stage, "RECV_B", microbatch) in done if blocking else arrived(rank, (stage, "RECV_B", microbatch))
                )
            return made(stage + 1, "B", microbatch)
        if kind == "W":
            return (stage, "I", microbatch) in done
        if kind == "SEND_F":
            return made(stage, "F", microbatch)
        if kind == "SEND_B":
            return made(stage, "B", microbatch)
        return True

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            step = row[at[rank]]
            if not all(can(rank, word) for word in step):
                continue
            kind = step[0][1]
            if blocking and kind.startswith("SEND"):  # both move, or neither
                other = peer(step[0])
                theirs = rows[other][at[other]] if at[other] < len(rows[other]) else [(0, "", 0)]
                answer = theirs[0]
                if not (
                    answer[1] == "RECV" + kind[4:] and peer(answer) == rank and content(answer) == content(step[0])
                ):
                    continue
                done.update([step[0], answer])
                at[other] += 1
            elif blocking and kind.startswith("RECV"):
                continue  # its sender moves it
            elif kind.startswith("SEND"):
                queues.setdefault((rank, peer(step[0]), kind[-1]), deque()).append(content(step[0]))
            elif kind.startswith("RECV"):
                slots.setdefault((peer(step[0]), rank, kind[-1]), []).append(step[0])
            done.update(step)
            at[rank] += 1
            moved = True
    return all(position == len(row) for position, row in zip(at, rows))


def damaged(schedule: Schedule, seed: int) -> Schedule:
    """The same with one fault: an action dropped, doubled, swapped, moved, added, or with another stage, microbatch or kind."""
    chance = random.Random(seed)
    rows = [list(row) for row in schedule.rows]
    rank = chance.choice([r for r, row in enumerate(rows) if row])
    row = rows[rank]
    n = chance.randrange(len(row))
    what = chance.randrange(9)
    if what == 0:
        del row[n]
    elif what == 1:
        row.insert(chance.randrange(len(row) + 1), row[n])
    elif what == 2:
        other = chance.randrange(len(row))
        row[n], row[other] = row[other], row[n]
    elif what == 3 and n + 1 < len(row):
        row[n], row[n + 1] = row[n + 1], row[n]
    elif what == 4:
        target = chance.choice(rows)
        action = row.pop(n)
        target.insert(chance.randrange(len(target) + 1), action)
    elif what == 8:
        action = Action(chance.randrange(schedule.stages + 1), chance.choice(KINDS[:8]), chance.randrange(3))
        row.insert(n, action)
    elif not row[n].parts:
        action = row[n]
        if what == 5:
            row[n] = action._replace(stage=chance.choice([0, action.stage + 1, max(0, action.stage - 1), 10**9]))
        elif what == 6 and action.microbatch is not None:
            row[n] = action._replace(microbatch=chance.choice([0, action.microbatch + 1, 10**9]))
        elif what == 7 and action.microbatch is not None:
            row[n] = action._replace(kind=chance.choice(list(KINDS[:8])))
    return Schedule(tuple(map(tuple, rows)), f"{schedule.name}, damaged")
