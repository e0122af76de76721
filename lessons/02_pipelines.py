# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Pipelines
#
# The third way to share a model out: by **layers**. Each rank holds a few that follow each other, a *stage*, and
# activations go from stage to stage. Little has to travel; but a stage without work waits. That waiting is the
# **bubble**, and the idea of this lesson is where it comes from:
#
# > **The last stage cannot begin before the first one has passed something on, nor the first one end before the last.**
#
# Nobody can do away with that. What a *schedule* can choose is what ranks do meanwhile.
#
# As always: **predict** first, then **run**.

# %%
import torch
from IPython.display import Image, display

import emu
from emu.models import Config, Decoder
from emu.parallel import Pipeline
from emu.parallel.pipeline import (
    Action,
    Schedule,
    Times,
    check,
    grid,
    layers_by_cost,
    make,
    peak_activations,
    timed,
)
from emu.spmd import EmuError
from emu.view import activations_figure, png_bytes, schedule_figure, side_by_side
from emu.view.units import bytes_text


def show(figure):
    display(Image(png_bytes(figure, dpi=90)))


P, M = 4, 8  # stages, microbatches

# %% [markdown]
# ## 1. The bubble
#
# A batch that goes through four stages at once keeps one of them busy. So it is cut into **microbatches**, and while
# the second stage works on the first microbatch, the first stage has the second. The simplest schedule, GPipe, does all
# forwards, then all backwards. A backward takes about twice as long as a forward: it computes gradients of the stage's
# input **and** of its weights.
#
# **Predict:** with 4 stages and 8 microbatches, which share of the time does a rank wait? With 16 microbatches?

# %%
gpipe = make("gpipe", P, M)
print(grid(gpipe))

# %% [markdown]
# A column is the time of a forward; `F3` is the forward of microbatch 3, `B3---` its backward, a dot is waiting. Row
# `rank 3` is the last stage. The same as a picture:

# %%
show(schedule_figure(gpipe))

# %% [markdown]
# Every rank has 8 x (1 + 2) to do, and every rank waits for the same 9: the first forward needs 3 to come to the last
# stage, and the last backward 6 to come back. In general `(p - 1)(F + B)` of waiting to `m (F + B)` of work, so the
# bubble is `(p - 1) / (m + p - 1)` of the time:

# %%
for m in (1, 4, 8, 16, 64):
    fraction = timed(make("gpipe", P, m)).bubble_fraction
    print(
        f"{m:2} microbatches: {fraction:.1%} of the time", "as the formula says" * (fraction == (P - 1) / (m + P - 1))
    )

# %% [markdown]
# More microbatches, a smaller bubble. Why not thousands? **Predict:** what grows with the number of microbatches?

# %%
show(activations_figure(gpipe))

# %% [markdown]
# Every forward leaves activations for its backward, and GPipe's first backward comes after the last forward.
#
# ## 2. 1F1B: the same bubble, less memory
#
# The last stage could do each backward at once. Then the stage before can, too, and so on: *one forward, one backward*.
#
# **Predict:** how many microbatches' activations does the first rank hold, and how many the last? And is the bubble
# smaller?

# %%
one = make("1f1b", P, M)
show(schedule_figure(one))
show(activations_figure(one))

# %%
print("makespan:", timed(gpipe).makespan, "and", timed(one).makespan)
for m in (8, 16, 64):
    print(
        f"{m} microbatches: gpipe holds {peak_activations(make('gpipe', P, m))}, 1f1b {peak_activations(make('1f1b', P, m))}"
    )

# %% [markdown]
# The bubble is the same to the last slot: the first microbatch still travels all the way down and back. But rank `r`
# (counted from 0) holds `p - r` microbatches, **however many there are**. So now there may be many.
#
# ## 3. Interleaved: shorter stages
#
# The bubble is `p - 1` stages long, forward and backward. What if stages were shorter? Each rank gets `v` of them,
# *chunks*: with `v = 2` rank 0 holds stages 0 and 4, rank 1 stages 1 and 5.
#
# **Predict:** by which factor does the bubble shrink? What is paid for it?

# %%
show(schedule_figure(make("interleaved", P, M, 2), Times(0.5, 0.5, 0.5)))  # a chunk is half as long

# %%
for v in (1, 2, 4):
    half = Times(1 / v, 1 / v, 1 / v)
    schedule = make("interleaved", P, M, v)
    what = timed(schedule, half)
    idle = what.makespan - what.busy(0)
    hops = sum(a.kind == "F" and a.stage < P * v - 1 for row in schedule.rows for a in row) // M
    held = max(peak_activations(schedule)) / v
    print(f"v={v}: idle {idle:g} = {P - 1} x 3 / {v}, {held:g} microbatches held, each passed on {hops} times forward")

# %% [markdown]
# `(p - 1)(F + B) / v`. Each microbatch is handed on about `v` times as often, though. And the first rank runs further
# ahead than 1F1B's, by `p - 1` forwards, so it holds more: `p + (p - 1) / v` microbatches, 5.5 or 4.75 in place of 4. With
# shorter stages these forwards are shorter, too.
#
# ## 4. Zero bubble: move what nobody waits for
#
# Look at a backward again. The gradient of its **input** (`I`) is what the stage before waits for. The gradient of its
# **weights** (`W`) nobody waits for until the optimizer's step. Take them apart, and `W` can go where a hole was.
#
# **Predict:** F, I and W take 1 each. 1F1B idles `(p - 1) x 3`. If every hole can be filled but those where there is
# not yet any `W` to do, what is left?

# %%
h1 = make("zb-h1", P, M)
show(schedule_figure(h1))
idle = timed(h1).makespan - timed(h1).busy(0)
print(f"idle {idle:g}: (p-1)(F + I - W) = {(P - 1) * (1 + 1 - 1)}; holds {peak_activations(h1, weight_share=0.5)}")

# %% [markdown]
# A third of 1F1B's, and no rank holds more than 1F1B's first one, though later ranks hold more than they did: what
# waits for its `W` stays. (What `I` leaves for `W` is counted as half a microbatch.) With twice the memory, the first
# ranks can run ahead so far that no hole is left at all: ZB-H2.
#
# **Predict:** ranks still start one after the other. How can the bubble be zero?

# %%
h2 = make("zb-h2", P, M)
show(schedule_figure(h2))
what = timed(h2)
print(
    "from a rank's first start to its last stop:",
    [what.span(r) for r in range(P)],
    "busy:",
    [what.busy(r) for r in range(P)],
)
print("holds", peak_activations(h2))

# %% [markdown]
# No row has a hole. Ranks end one after the other, as they began, and the next step fits behind like a tile (if the
# optimizer does not make all wait for all: `emu.parallel.optimistic`).
#
# ## 5. ZB-V: the same without the memory
#
# The first rank holds much because its microbatches are longest under way; the last one holds little. Give each rank
# **two** chunks in the shape of a V: rank 0 the first **and the last** stage, rank 3 the two in the middle.
#
# **Predict:** which rank now holds most?

# %%
v = make("zb-v", P, M)
show(schedule_figure(v, Times(0.5, 0.5, 0.5)))
show(activations_figure(v))
print("holds, in microbatches of a rank's both stages:", [n / 2 for n in peak_activations(v)])
what = timed(v, Times(0.5, 0.5, 0.5))
print("holes:", [what.span(r) - what.busy(r) for r in range(P)])

# %% [markdown]
# All hold the same, as much as 1F1B's first rank, and no hole is left. There is no free lunch in it: that holds where
# F, I and W are equally long, and each microbatch is handed on twice as often.
#
# Here are all schedules beside each other, 16 microbatches, every rank with the same work. (The bubble counts a rank's
# waiting before its first action and after its last one, too; holes are only what lies between them.)

# %%
for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"):
    chunks = 2 if name in ("interleaved", "zb-v", "v-half", "v-min") else 1
    schedule = make(name, P, 16, chunks)
    what = timed(schedule, Times(1 / chunks, 1 / chunks, 1 / chunks))
    hole = max(what.span(rank) - what.busy(rank) for rank in range(P))
    print(
        f"{name:12} bubble {what.bubble_fraction:5.1%}, holes {hole:4g}, holds {max(peak_activations(schedule)) / chunks:4g}"
    )

# %% [markdown]
# ## 6. Is it right?
#
# A schedule says when; the gradients must not depend on it. `emu.verify` cuts a real model into stages, runs every
# action, sends every activation, and compares with one device, bit for bit.
#
# **Predict:** microbatches are added up in other orders. Can the gradients still be equal to the last bit? (Think of the
# tiers of the tour.)

# %%
small = Decoder(Config(layers=8, width=16, heads=2, vocab=32, seq=8), seed=0)
for name, chunks in (("1f1b", 1), ("zb-v", 2)):
    plan = emu.Plan("pp=4", schedule=name, chunks=chunks, microbatches=4, global_batch=4, seq=8)
    print(name, "-", emu.verify(small, plan, mutants="none"))

# %% [markdown]
# In tier `exact` sums have no rounding, so their order does not matter.
#
# ## 7. What it costs
#
# Real stages are not alike, and transfers take time. We price a step of a model of 8 layers on four H100s, shapes only, and draw
# what the run did (below) under what the schedule says for the times that its stages took (above).
#
# **Predict:** the last stage has the head and the loss besides its layers. Where will there be waiting that no formula
# above knows of?

# %%
large = Config(layers=8, width=2048, heads=16, vocab=32_768, seq=1024)


def step(rank, schedule, stages="even"):
    with torch.device(rank.device):
        model = Decoder(large)
        tokens = torch.zeros(M, 1024, dtype=torch.long)
    example = (tokens[:1], tokens[:1])  # one microbatch, to measure layers with, where they are cut by cost
    pipe = Pipeline(model, rank, schedule=schedule, microbatches=M, stages=stages, example=example)
    rank.mark("step")
    pipe.backward(emu.Batch(tokens, tokens, tokens=tokens.numel()))
    rank.mark("end")


def launched(*asked):
    run = emu.launch(step, emu.Mesh(pp=P), backend="shape", precision="bf16-mixed", launch_mode="graph", args=asked)
    return run.window("step", "end")


runs = {}
for name in ("1f1b", "zb-h1"):
    runs[name] = launched(name)
    show(side_by_side(make(name, P, M), runs[name].timeline()))

# %%
show(activations_figure(runs["1f1b"]))
for name, run in runs.items():
    peaks = [bytes_text(max(run.memory.series(rank)[1]["activations"])) for rank in range(P)]
    print(f"{name}: most activations of each rank {', '.join(peaks)}")
faster = runs["1f1b"].metrics.step_time_s / runs["zb-h1"].metrics.step_time_s
print(f"zb-h1 is {faster:.2f} times as fast as 1f1b")

# %% [markdown]
# The slowest stage sets the pace, and all others wait for it, every microbatch: that is imbalance, not the bubble, and
# no schedule mends it; zb-h1 shortens a microbatch's way back, so it helps even here. Transfers hardly show.
#
# Look at the last ranks' activations, too. Section 4 counted microbatches of stages that are alike, and there no rank of
# zb-h1 held more than 1F1B's first. But its last rank holds 2.5 of them where 1F1B's holds one, and here the head's large
# outputs come on top: so the last rank of zb-h1 needs the most of all. Where memory is short, count bytes.
#
# What does mend imbalance is another cut: a list of layers per stage, or `stages="cost"`, which chooses one so that the
# stage with the most flops has as few as possible. It measures a microbatch's shapes, so it needs an `example`.
#
# **Predict:** how many layers should the last stage give away, and to which stage? Which of the two cuts by hand is
# better: is an embedding free?

# %%
with torch.device("meta"):  # only shapes count
    tokens = torch.zeros(1, 1024, dtype=torch.long)
    print("by cost, layers per stage:", layers_by_cost(Decoder(large), P, (tokens, tokens)))
even = runs["1f1b"].metrics.step_time_s
for cut in ("even", "cost", [3, 2, 2, 1], [2, 3, 2, 1]):
    took = even if cut == "even" else launched("1f1b", cut).metrics.step_time_s
    print(f"1f1b, stages={cut!s:13} {1000 * took:.1f} ms, {even / took:.2f} times as fast as even")

# %% [markdown]
# More than half of that waiting goes; some is left because layers are whole, so that one stage still has more than the
# others. Nor do flops tell all: looking up an embedding and adding to its gradient, norms, softmax and the loss take
# bytes rather than products, and a product may fill a chip well or badly. So measure the cuts near to the one by cost, as
# here.
#
# ## 8. Your own schedule
#
# A schedule is a function: `(rank, ranks, microbatches, chunks)` in, that rank's actions out. This is all of GPipe.
#
# **Predict:** what is wrong with the second one? `judge` says so without running it.


# %%
def mine(rank, ranks, microbatches, chunks):
    for m in range(microbatches):
        yield Action(rank, "F", m)
    for m in range(microbatches):
        yield Action(rank, "B", m)


def judge(generator, idle, held, ranks=4, microbatches=8):
    """Says what is wrong with a schedule, or what it reaches: holes in the slowest row, and microbatches held."""
    try:
        schedule = Schedule.of(generator, ranks, microbatches)
        check(schedule)
    except EmuError as error:
        return f"it cannot run: {error}"
    what, most = timed(schedule), max(peak_activations(schedule))
    waits = max(what.makespan - what.busy(rank) for rank in range(ranks))
    wrong = [f"a rank waits for {waits:g}, at most {idle:g} is asked"] * (waits > idle)
    wrong += [f"a rank holds {most:g} microbatches, at most {held:g} is asked"] * (most > held)
    return "; ".join(wrong) or f"well done: waits {waits:g}, holds {most:g}"


print("1.", judge(mine, idle=9, held=4))


def hasty(rank, ranks, microbatches, chunks):
    for m in range(microbatches):
        yield Action(rank, "B", m)
        yield Action(rank, "F", m)


print("2.", judge(hasty, idle=9, held=4))

# %% [markdown]
# **Exercise.** Change `mine` until `judge` is content with `idle=9, held=4` (that is 1F1B: how many forwards must each
# rank have ahead?). Then with `idle=5, held=4`: less waiting than 1F1B at its memory. Write `I` and `W` in place of
# `B`, and look at what you did with `print(grid(Schedule.of(mine, 4, 8)))`.
#
# To compare with, when you are done: one of the schedules of section 5's list reaches both.

# %% [markdown]
# ## What to remember
#
# * The bubble is the way down and back: `(p - 1)(F + B)`, whatever the number of microbatches.
# * 1F1B keeps it, and holds `p` microbatches instead of all; chunks divide it by `v`; `W` fills it.
# * A V gives every rank early and late stages, so all hold the same.
# * What no schedule mends: stages that are not alike. Another cut does.
#
# ## Try it yourself
#
# 1. `Times(1, 1, 0.5)`: what becomes of zb-h2's and zb-v's holes, and why?
# 2. `Times(communication=0.5)`: which schedule suffers most?
# 3. `make("dualpipe", 4, 16)`: read its picture. Which ranks hold a stage twice, and what is it good for?
# 4. In section 7, cut zb-h1 by cost as well: `launched("zb-h1", "cost")`. (A Pipeline of your own needs
#    `stages="cost", example=(x[:1], y[:1])`: without an example there is nothing to measure.) What is left of its lead?
#    And what does `stages="memory"` cut for, what does it cost?
