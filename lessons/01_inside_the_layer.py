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
# # Inside the layer
#
# Data parallelism cuts the batch. What if one layer is too large for a device, or one sequence is all you have? Then
# the layer itself is cut. The idea of this lesson fits in a sentence:
#
# > **Cut one matrix by its outputs and the next by its inputs, and the two talk once.**
#
# From it follow tensor parallelism, sequence parallelism, their traps and their price. Experts come last.
#
# As in the tour: **predict** first, then **run**.

# %%
from collections import Counter
from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F
from IPython.display import Image, display
from torch import nn

import emu
from emu.cost import moe
from emu.models import GPT, batches, config
from emu.parallel import shard_model
from emu.parallel.expert import keep_routing, routing_of
from emu.spmd import copy_to, reduce_from
from emu.trace.events import Collective
from emu.view import comparison_table, memory_bars_figure, png_bytes, routing_figure, timeline_figure
from emu.view.units import bytes_text


def show(figure):
    display(Image(png_bytes(figure, dpi=90)))


def said(run):
    """What rank 0 says to others, in order."""
    return [f"{e.kind} of {bytes_text(e.bytes)}" for _, e in run.trace.of(Collective, rank=0) if len(e.members) > 1]


# %% [markdown]
# ## 1. Two matrices
#
# The core of a transformer's MLP: a matrix, an activation function (`relu`), a matrix. Here are two small ones, on one
# device.

# %%
TOKENS, WIDTH, MIDDLE = 6, 8, 32


def tensors():
    """x [tokens, width], up [middle, width], down [width, middle]: the same on every rank."""
    g = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(*s, generator=g) for s in ((TOKENS, WIDTH), (MIDDLE, WIDTH), (WIDTH, MIDDLE)))
    return x, up, down


def alone():
    x, up, down = tensors()
    return F.linear(F.relu(F.linear(x, up)), down)


print(alone().shape)

# %% [markdown]
# Four ranks share the work. A matrix can be cut in two ways. By **outputs** (*column-parallel*, after the columns of
# the maths): every rank reads all of `x` and computes some outputs. By **inputs** (*row-parallel*): every rank reads
# some inputs and computes a **part of the sum** of every output.
#
# **Predict:** cut `up` by outputs and `down` by inputs. How often must the ranks talk to get the result, and what do
# they say?


# %%
def paired(rank):
    tp, (x, up, down) = rank.group("tp"), tensors()
    up, down = up.chunk(4, 0)[rank], down.chunk(4, 1)[rank]  # [middle / 4, width], [width, middle / 4]
    middle = F.relu(F.linear(x, up))  # this rank's quarter of it: [tokens, middle / 4]
    return tp.all_reduce(F.linear(middle, down))  # a part of every sum, then all of it


mesh = emu.Mesh(tp=4)
run = emu.launch(paired, mesh)
print(run.check(alone))
print(said(run))

# %% [markdown]
# Once, with as many numbers as come out:
#
# ```text
#           rank 0        rank 1         rank 2          rank 3
# x         all           all            all             all
# up        outputs 0-7   8-15           16-23           24-31          cut by outputs
# middle    0-7           8-15           16-23           24-31          stays where it is
# down      inputs 0-7    8-15           16-23           24-31          cut by inputs
# y         a part    +   a part    +    a part     +    a part         one all_reduce
# ```
#
# The quarter of the middle that a rank computes is just the quarter that its piece of `down` reads, so the wide middle
# never travels. The activation function in between does not mind: it works on each number by itself.
#
# **Predict:** now the other way around, `up` by inputs and `down` by outputs. Where must the ranks talk now? And if
# you sum only at the end, as above, is the result still right?


# %%
def other_way_around(rank):
    tp, (x, up, down) = rank.group("tp"), tensors()
    x, up, down = x.chunk(4, 1)[rank], up.chunk(4, 1)[rank], down.chunk(4, 0)[rank]
    middle = F.relu(tp.all_reduce(F.linear(x, up)))  # relu needs the whole sum
    return tp.all_gather(F.linear(middle, down), dim=1)


def sums_too_late(rank):
    tp, (x, up, down) = rank.group("tp"), tensors()
    x, up = x.chunk(4, 1)[rank], up.chunk(4, 1)[rank]
    return tp.all_reduce(F.linear(F.relu(F.linear(x, up)), down))


run = emu.launch(other_way_around, mesh)
print(run.check(alone))
print(said(run), "\n")
print(emu.launch(sums_too_late, mesh).check(alone, mutants="none"))

# %% [markdown]
# Right, but it talks twice, and once about the wide middle. Summing late is wrong: `relu(a) + relu(b)` is not
# `relu(a + b)`. A part of a sum may pass through matrices and through nothing else. So a pair begins with outputs
# and ends with inputs, and everything between is computed apart. In a transformer there are two such pairs in every
# layer: the MLP, and attention, where queries, keys and values are cut by outputs, head by head, and the projection by
# inputs.
#
# ## 2. The way back
#
# What enters a pair is the same on every rank. Its gradient is not: every rank sees only what *its* outputs ask of it.
# So where forward says nothing, backward must sum. `copy_to` does just that, and `reduce_from` is its mirror image: a
# sum forward, nothing backward.
#
# **Predict:** we put a matrix `before` in front, and forget `copy_to`. Is the loss right? Which of the three
# gradients are?


# %%
def step(rank, remembers):
    tp, (x, up, down) = rank.group("tp"), tensors()
    before = nn.Parameter(torch.eye(WIDTH))  # whole on every rank
    up, down = nn.Parameter(up.chunk(4, 0)[rank].clone()), nn.Parameter(down.chunk(4, 1)[rank].clone())
    x = F.linear(x, before)
    if remembers:
        x = copy_to(x, tp)
    y = reduce_from(F.linear(F.relu(F.linear(x, up)), down), tp)
    loss = y.square().sum()
    loss.backward()
    return {
        "loss": loss.detach(),
        "before": before.grad,
        "up": tp.all_gather(up.grad),
        "down": tp.all_gather(down.grad, dim=1),
    }


def step_alone(remembers):
    x, up, down = tensors()
    before, up, down = (nn.Parameter(p) for p in (torch.eye(WIDTH), up, down))
    loss = F.linear(F.relu(F.linear(F.linear(x, before), up)), down).square().sum()
    loss.backward()
    return {"loss": loss.detach(), "before": before.grad, "up": up.grad, "down": down.grad}


for remembers in (True, False):
    print(emu.launch(step, mesh, args=(remembers,)).check(step_alone, mutants="none"), "\n")

# %% [markdown]
# The verdict stops at the first thing that is wrong. How far off is each of them, on rank 0?


# %%
def off(found, right):
    """How far found is from right, as a share of its size."""
    return float((found - right).norm() / right.norm())


found, right = emu.launch(step, mesh, args=(False,)).results[0], step_alone(False)
for name in right:
    print(f"{name:7} off by {off(found[name], right[name]):4.0%}")

# %% [markdown]
# The loss is right, and so are the gradients of the two matrices that were cut. Everything **before** the pair is
# wrong. In a deep model that is nearly everything, yet the loss of the first step does not show it: the worst kind of
# mistake. This is why emu compares gradients, and not losses.
#
# ## 3. A whole model
#
# `shard_model` does this to a whole transformer, in place: it cuts the pairs, and also embedding, head and loss, by
# vocabulary. `emu.verify` compares with one device, bit for bit.

# %%
plan = emu.Plan("tp=4", global_batch=2, seq=32)
print(emu.verify(lambda: GPT(config("gpt-tiny"), seed=0), plan))

# %% [markdown]
# **Predict:** how many all_reduces does one more *layer* cost in a step, and of how many bytes?


# %%
def two_steps(rank, shape, rows, seq, sp=False):
    model = GPT(shape, seed=0)
    sharding = shard_model(model, rank, sp=sp)
    dist = emu.DataParallel(model, rank, *(axis for axis in rank.mesh.axes if axis == "dp"), sharding=sharding)
    optimizer = dist.optimizer(torch.optim.AdamW, foreach=True)
    tokens = torch.zeros(rows, seq, dtype=torch.long)
    for name in ("first step", "step"):  # the first one also makes the optimizer's states
        rank.mark(name)
        dist.backward(emu.Batch(tokens, tokens, tokens=tokens.numel()))
        optimizer.step()
        optimizer.zero_grad()
    rank.mark("end")


def talk(layers, sp):
    run = emu.launch(two_steps, mesh, backend="shape", args=(config("gpt-tiny", layers=layers), 2, 32, sp))
    said = run.window("step", "end").trace.of(Collective, rank=0)
    return Counter(f"{e.kind} of {bytes_text(e.bytes)}" for _, e in said if e.group == "tp" and "bucket" not in e.name)


shape = config("gpt-tiny")
for sp in (False, True):
    print("sequence parallel:" if sp else "tensor parallel:")
    for what, n in (talk(3, sp) - talk(2, sp)).items():
        print(f"  {n} x {what}")
print(f"activations between layers, [2, 32, {shape.width}] in float32: {bytes_text(4 * 2 * 32 * shape.width)}")

# %% [markdown]
# Four all_reduces of one activation: each of the two pairs sums once forward (at its end) and once backward (at its
# beginning). You also see what the next section is about.
#
# ## 4. Sequence parallel, and its trap
#
# Between the pairs there are norms, dropout and residuals. Under tensor parallelism every rank computes them all, on
# the same numbers, and keeps the same activations for backward. That is a waste: each could take a quarter of the
# **tokens**. An all_reduce is a reduce_scatter and an all_gather, so one may stop halfway, work on a quarter of the
# tokens, and gather before the next pair. Then as much is sent, in two pieces. (The two more gathers above
# fetch the input of each pair once more in backward: it is sent again so that it need not be kept.)
#
# **Predict:** a norm's weight is whole on every rank. Is its gradient the same on every rank? It was, in section 3.


# %%
def batch():
    return emu.Batch(*next(batches(seed=0, steps=1, batch=2, seq=32)))


def norms(rank, forgets):
    model = GPT(shape, seed=0)
    sharding = shard_model(model, rank, sp=True)
    if forgets:  # takes all parameters that are whole on every rank for ones that see all tokens there
        for name, held in sharding.held.items():
            if held.kind == "tokens":
                sharding.held[name] = replace(held, kind="dense")
    dist = emu.DataParallel(model, rank, sharding=sharding)
    return {"loss": dist.backward(batch()), "parameters": dist.gather_gradients()}


def norms_alone(forgets):
    model, data = GPT(shape, seed=0), batch()
    loss = model.loss_sum(data.x, data.y)
    loss.backward()
    for p in model.parameters():
        p.grad.div_(data.tokens)
    return {"loss": loss.detach() / data.tokens, "parameters": emu.grads(model)}


for forgets in (False, True):
    verdict = emu.launch(norms, mesh, args=(forgets,)).check(norms_alone, tier="float64", mutants="none")
    print(verdict, "\n")

# %% [markdown]
# A norm saw this rank's tokens only, so its gradient is a part of a sum, as under data parallelism: it must be added
# up over `tp`. The verdict names another that was forgotten. Which are there?

# %%
results, expected = emu.launch(norms, mesh, args=(True,)).results, norms_alone(True)
print(f"the loss: off by {off(results[0]['loss'], expected['loss']):.0%}")
layouts, cut = results[0]["parameters"].layouts, {}
for name, right in expected["parameters"].items():
    if name.endswith("attention.k.bias"):
        continue  # its gradient is 0 but for rounding: attention sees differences of scores only
    if name in layouts:  # all ranks' pieces together are the whole
        pieces = {rank: result["parameters"][name] for rank, result in enumerate(results)}
        cut[name] = off(layouts[name].whole(pieces, mesh), right)
    elif not name.startswith(("blocks.1", "blocks.2", "blocks.3")):  # these are as blocks.0 is
        share = off(results[0]["parameters"][name], right)
        print(f"{name:25} {list(right.shape)!s:8} whole on every rank, off by {share:.0%} on rank 0")
print(f"the {len(cut)} that are cut: off by {max(cut.values()):.0%} at most")

# %% [markdown]
# The loss is right, and so is all that was cut. Wrong is what is whole on every rank, for it saw this rank's tokens
# only: norms, the biases that are added after a sum, and the positions. They drift apart, on every rank differently.
# Many have made this mistake. The rule to remember: **a gradient is summed over the ranks that hold the parameter and
# saw other tokens.** emu keeps, for every parameter, which ranks these are:


# %%
def who(rank):
    sharding = shard_model(GPT(shape, seed=0), rank, sp=True)
    groups = {}
    for name in sharding.held:
        if name.startswith(("blocks.0.", "head")):
            label = sharding.group_of(name, ("dp",)).label
            groups.setdefault(label, []).append(name.removeprefix("blocks.0."))
    return groups


for label, names in emu.launch(who, emu.Mesh(dp=2, tp=4)).results[0].items():
    print(f"summed over {label}: {', '.join(names)}")

# %% [markdown]
# ## 5. Who holds what
#
# The purpose of all that is memory. We take GPT-2's smallest model, two sequences of 1,024 tokens, shapes only.
#
# **Predict:** three bars: one device; four with `tp`; four with `tp` and `sp`. Parameters, gradients and optimizer
# states: by how much do they shrink, and does `sp` change them? And activations?

# %%
small = config("gpt-small", tied=False)
ways = {"one device": (emu.Mesh(tp=1), False), "tp=4": (mesh, False), "tp=4, sp": (mesh, True)}
bars = {
    name: emu.launch(two_steps, where, backend="shape", args=(small, 2, 1024, sp)).window("step", "end")
    for name, (where, sp) in ways.items()
}
show(memory_bars_figure({name: run.memory.at_peak(0) for name, run in bars.items()}, width=9))

# %%
STATES = ("parameters", "gradients", "optimizer")
for name, run in bars.items():
    peak = run.memory.at_peak(0)
    states = sum(peak.get(kind, 0) for kind in STATES)
    print(f"{name:10} states {bytes_text(states):>8}, all else {bytes_text(sum(peak.values()) - states):>8}")

# %% [markdown]
# The states are cut by about four (norms, positions and some biases stay whole), and `sp` leaves them alone. The rest,
# activations and what is passing through, shrinks under `tp` as far as it lies within pairs, and so do the logits,
# which are cut by vocabulary. `sp` cuts what lies around them, too.
#
# ## 6. What it costs in time
#
# Data parallelism talks once a step, and has a whole backward pass to hide it in. Tensor parallelism talks in every
# layer, and in forward everybody waits. We price two layers of Llama 3 70B in bfloat16, four sequences of 4,096
# tokens, with `sp`: on the eight H100s of one node with `tp=8`, and on the sixteen of two nodes with `tp=16`.
#
# **Predict:** with twice as many devices each has half of the matrix products. Does each also send half as much? Is the
# step twice as fast?

# %%
large = config("llama3-70b", layers=2, vocab=16_384, seq=4096)


def priced(**axes):
    mesh = emu.Mesh(on=emu.cluster("h100", nodes=max(1, prod(axes.values()) // 8)), **axes)
    run = emu.launch(two_steps, mesh, backend="shape", precision="bf16-mixed", args=(large, 4, 4096, True))
    return run.window("step", "end")


eight, sixteen = priced(tp=8), priced(tp=16)
comparison_table({"tp=8": eight.metrics, "tp=16": sixteen.metrics}, "Two layers, 8 or 16 H100s")

# %%
faster = eight.metrics.step_time_s / sixteen.metrics.step_time_s
sends = sixteen.metrics.comm_bytes["tp"] / eight.metrics.comm_bytes["tp"]
print(
    f"on twice as many devices the step is {faster:.2f} times as fast, and each sends {sends:.2f} times as much over tp"
)
for run in (eight, sixteen):
    show(timeline_figure(run.timeline(), ranks=[0], width=11))

# %% [markdown]
# Neither. The products became half as long, the messages did not: a rank sends `(t-1)/t` of what the group's tokens
# make, however many share it. So the more ranks share a layer, the more of their time they talk. (The 8 heads of keys
# and values do not divide by 16, so pairs of ranks hold the same one, and sum its gradient: `tp.kv`.)
#
# Sixteen devices can also be two groups of eight: `dp=2, tp=8`. Then a rank's group has half the tokens, and sends
# half as much. The order of the axes says who is whose neighbour: the last one varies fastest, so with `dp=2, tp=8`
# every `tp` group lies within a node, and with `tp=8, dp=2` each of them is spread over both.
#
# **Predict:** both compute and send the same. Which of them is slower? Is either as slow as `tp=16`?

# %%
inside, across = priced(dp=2, tp=8), priced(tp=8, dp=2)
comparison_table(
    {"tp=16": sixteen.metrics, "dp=2, tp=8": inside.metrics, "tp=8, dp=2": across.metrics}, "Two layers, 16 H100s"
)

# %%
for name, run in {"dp=2, tp=8": inside, "tp=8, dp=2": across}.items():
    print(f"{name}: its step takes {run.metrics.step_time_s / sixteen.metrics.step_time_s:.0%} of that of tp=16")

# %% [markdown]
# Either sends half of what `tp=16` does. Spread over both nodes that hardly helps; within a node it does. What talks
# most must have the fastest links: **`tp` innermost, within a node; data parallelism across.** The gradients that then
# cross the network are many bytes, too, but they travel once a step, and behind backward.
#
# ## 7. Experts
#
# A mixture of experts has, in place of the MLP, many of them, and sends every token to a few. Now whole matrices can
# lie on different ranks, and **tokens travel** to them and back. `moe-tiny` has 8 experts, of which a token meets 2.
# Four ranks (`ep=4`) hold 2 each, and every rank has its own part of the batch.
#
# **Predict:** if experts were chosen evenly, which share of the tokens' choices would stay at home? And is it even?

# %%
STEPS = 8
text = [emu.Batch(x, y) for x, y in batches(seed=0, steps=STEPS, batch=8, seq=64)]


def train_experts(rank, balance):
    model = GPT(config("moe-tiny", layers=2, balance=balance), seed=0)
    dist = emu.DataParallel(model, rank, "dp", sharding=shard_model(model, rank))
    keep_routing(model)  # every forward then leaves what was sent to whom
    optimizer = dist.optimizer(torch.optim.AdamW, lr=3e-3, foreach=True)
    for data in text:
        dist.backward(data)
        optimizer.step()
        optimizer.zero_grad()
    return routing_of(model, rank.group("ep"))  # of each layer, by the name of its experts


layers = emu.launch(train_experts, emu.Mesh(dp=4, ep=4), args=(0.01,)).results[0]
first = layers["blocks.0.moe.experts"]
show(routing_figure(first, title=f"the first layer's experts, step {STEPS}"))
for name, layer in layers.items():
    at_home = sum(layer.sent[i][i] for i in range(4)) / sum(layer.loads)
    print(f"{name}: {at_home:.0%} stay at home, the busiest rank gets {layer.imbalance:.2f} times the mean")

# %% [markdown]
# A row is a sender, a column a receiver. With 2 of 8 experts on each rank, even choices would leave a quarter at home, and
# about as many do stay. But it is not even: rows add up to the same (every rank has as many tokens), columns do not.
# Text is uneven, and so is what a router makes of it. A step waits for the fullest column. This is what balance
# losses, and limits of capacity, are for.
#
# How large is the harm? We price a layer of Mixtral's size on 8 H100s. Shapes have no values to route by, so we
# declare how tokens fall: `"uniform"`, or `"zipf:0.4"`, where the n-th expert gets 1 / n^0.4 of the first one's share.
#
# **Predict:** the busiest rank gets about 1.6 times the mean. How much longer does the step take?


# %%
def mixture(routing):
    return config("mixtral-8x7b", layers=1, vocab=1024, seq=4096, routing=routing)


runs = {}
for how in ("uniform", "zipf:0.4"):
    run = emu.launch(
        two_steps, emu.Mesh(dp=8, ep=8), backend="shape", precision="bf16-mixed", args=(mixture(how), 8, 4096)
    )
    runs[how] = run.window("step", "end")
comparison_table({name: run.metrics for name, run in runs.items()}, "One layer of Mixtral, 8 H100s")

# %%
shares = [1 / n**0.4 for n in range(1, 9)]
longer = runs["zipf:0.4"].metrics.step_time_s / runs["uniform"].metrics.step_time_s
print(
    f"the busiest rank gets {8 * shares[0] / sum(shares):.2f} times the mean, and the step takes {longer:.2f} times as long"
)
show(timeline_figure(runs["zipf:0.4"].timeline(), ranks=[0, 7], width=11))

# %% [markdown]
# The experts' part of the step grows as the busiest rank's load does; attention, head and optimizer have as much to do
# as before. Rank 0 has the busiest expert. Rank 7 is done early each time, and waits (outlined in grey) until what it
# sent comes back.
#
# One could cut every expert over all ranks instead, as section 1 did with the MLP: then no rank is busier than others.
# Of equal memory, which sends less? Whole experts: a **copy** of a token for each of its k experts. Cut experts: each
# token once to **all n** ranks.
#
# **Predict:** for which k do whole experts send less on 8 ranks?

# %%
for k in (1, 2, 4, 7, 8, 16):
    layer = replace(moe.MIXTRAL_8X7B, experts=64, top_k=k)
    whole, cut = moe.expert_parallel_bytes(layer, 4096, 8), moe.tensor_parallel_bytes(layer, 4096, 8)
    print(f"k={k:2}: whole experts {bytes_text(float(whole)):>8}, cut experts {bytes_text(float(cut)):>8}")

# %% [markdown]
# As long as **k < n**. That is a statement about bytes and even routing. Time has exceptions: skew, of which you saw
# some; few tokens, because an exchange has a latency; and links across nodes, which each copy crosses by itself.
#
# ## What to remember
#
# * Outputs first, then inputs: a pair talks once forward and once backward, and the wide middle never travels.
# * What is entered alike must have its gradient summed; a loss shows nothing of that.
# * A gradient is summed over the ranks that hold the parameter and saw other tokens. Norms under `sp` are the trap.
# * `tp` divides states, `sp` the rest of the activations; both talk in every layer, so they stay within a node.
# * Experts lie still and tokens travel; the busiest rank sets the pace.
#
# ## Try it yourself
#
# 1. Put a bias into `down` of section 1, on every rank. What is wrong, by which factor, and where must it be added?
# 2. Cut `up` and `down` into uneven pieces (10, 10, 6 and 6 of the middle). What changes in what is sent?
# 3. Put dropout between the two matrices, and outside of them. Where must the ranks draw the same mask, and where must
#    they not? (`emu.parallel.tensor.own_randomness`)
# 4. Price section 6 on `b200` chips. Does `tp=16` come closer?
# 5. Train section 7's experts with `balance` 0 and with 1.0, both with `STEPS = 64`: 8 are too few to learn it.
#    How does the picture change? (The losses do not compare: what `backward` returns has the balance loss in it.)
