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
# # Long sequences
#
# A sequence twice as long has twice the activations, and attention has four times the scores. Parameters stay as they
# are: so on long sequences activations fill a device, and attention fills the time. There are three cures, and one idea
# is behind two of them:
#
# > **Attention to some keys and attention to the rest merge into attention to all, if each remembers one number a
# > query.**
#
# Merged over tiles within one chip that is *flash attention*. Merged over ranks it is *ring attention*. The third cure
# is not to keep activations at all: compute them again (*checkpointing*), or let them wait elsewhere (*offloading*).
#
# As always: **predict** first, then **run**.

# %%
import torch
import torch.nn.functional as F
from IPython.display import Image, display

import emu
from emu.cost.collectives import sent_bytes
from emu.models import Config, Decoder
from emu.parallel import parallelize
from emu.parallel.attention.flash import FlashForward, flash_attention
from emu.parallel.attention.tiles import Shape, Tiles, tiles_for
from emu.parallel.attention.traffic import forward_traffic, plain_traffic
from emu.parallel.checkpointing import Policy, Segment, checkpointed
from emu.parallel.context import make_cut
from emu.spmd import EmuError
from emu.trace.events import Collective, Kernel
from emu.view import attended_work_figure, png_bytes, ring_figure, timeline_figure
from emu.view.attention_traffic import attention_traffic_figure
from emu.view.checkpointing import frontier_figure
from emu.view.units import bytes_text


def show(figure):
    display(Image(png_bytes(figure, dpi=80)))


# %% [markdown]
# ## 1. One number a query
#
# A query's attention is a mean of values, weighted by `exp(score)`. Of some keys we get that mean, and the sum of the
# weights, or rather its logarithm, `lse` (log-sum-exp): sums of exponentials are too large or too small for any format.
# Two such results merge like means of unlike groups: by their weights.

# %%
torch.manual_seed(0)
q, k, v = (torch.randn(6, 4, dtype=torch.float64) for _ in range(3))  # 6 tokens, a head of 4


def attend(k, v):
    """Attention of all queries to some keys: the mean, and the log of the sum of weights."""
    scores = q @ k.T / 2  # 2 = sqrt(4)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def merged(a, b):
    out_a, lse_a = a
    out_b, lse_b = b
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp()[:, None] + out_b * (lse_b - lse).exp()[:, None], lse


whole = attend(k, v)
parts = merged(attend(k[:2], v[:2]), attend(k[2:], v[2:]))
print("largest difference:", float((whole[0] - parts[0]).abs().max()))

# %% [markdown]
# **Predict:** and if the two means are just averaged, weights forgotten?

# %%
averaged = (attend(k[:2], v[:2])[0] + attend(k[2:], v[2:])[0]) / 2
print("largest difference:", float((whole[0] - averaged).abs().max()))

# %% [markdown]
# Backward needs no more than `lse` either: a weight is `exp(score - lse)` of the *whole* row, so any block of scores
# can be computed again, by itself, and gives its share of the gradients.
#
# ## 2. Flash attention: a chip merges tiles
#
# Spelled out, attention writes all scores to memory (HBM), reads them for the softmax, writes weights, reads them. But
# a core has a small memory of its own, and scores are good for one thing only. So take a tile of queries, let keys and
# values pass by in tiles, and merge as you go: `m` is the largest score so far, `l` the sum of `exp(score - m)`. When
# `m` grows, what was summed before shrinks by `exp(old m - new m)`.
#
# Here are all steps of one tile of 4 queries, with 2 keys at a time.
#
# **Predict:** queries 4 to 7 may see keys 0 to 7. After which tiles is `m` of the first of them final? And which of
# them need a mask?

# %%
torch.manual_seed(3)
small = [torch.randn(1, 1, 8, 4) for _ in range(3)]
walk = FlashForward(*small, tiles=Tiles(4, 2, 2, 4))  # queries, keys; and of backward
for step in walk:
    if step.queries.start == 4:
        print(step)

# %% [markdown]
# `m` only grows, and each time it does "old sums x" says how much what came before shrinks. Keys 4 to 7 are masked in
# part, because query 4 may not see key 5; tiles of later keys would not be loaded at all. The output is divided by `l`
# once, at the end, and with it `m + log l` is stored: `lse`, one number a query.
#
# It is plain attention:

# %%
theirs = F.scaled_dot_product_attention(*small, is_causal=True)
print("largest difference:", float((walk.out - theirs).abs().max()))
print(f"this moved {walk.read_bytes + walk.written_bytes:,} bytes, and a core held {walk.most_held_bytes:,} at most")

# %% [markdown]
# What is it good for? Count bytes of HBM: every step says what it moves, and a closed form, written independently, says
# the same. For plain attention too there is one.
#
# **Predict:** with twice the tokens, plain attention moves four times as much. And flash attention: twice, or four
# times?

# %%
for n in (1024, 2048, 4096, 8192):
    shape = Shape(1, 1, 1, n, n, 64, 2, 4)  # one sequence, one head of 64, in two bytes; sums in four
    flash, plain = sum(forward_traffic(shape, tiles_for(shape, 64_000))), sum(plain_traffic(shape)[0])
    print(f"{n:5} tokens: plain {bytes_text(plain):>8}, flash {bytes_text(flash):>8}: {plain / flash:.1f} times less")

# %% [markdown]
# Nearly four times as well! Every tile of queries meets all earlier keys, so that is quadratic, too. But each load of
# keys and values serves all queries of a tile. So it is less by a factor, and what counts is how many queries fit:

# %%
shape = Shape(1, 1, 1, 8192, 8192, 64, 2, 4)
for sram_bytes in (16_000, 32_000, 64_000, 128_000, 227_000):
    tiles = tiles_for(shape, sram_bytes)
    print(
        f"{bytes_text(sram_bytes):>7} of SRAM: {tiles.queries:4} queries stay, {tiles.keys} keys pass:",
        bytes_text(sum(forward_traffic(shape, tiles))),
    )

# %% [markdown]
# A run knows it, too: within `rank.kernel` the trace's kernel carries these bytes, and the virtual chip takes its time
# by them. Beside it the same attention operator by operator, priced the same way:


# %%
def attention_two_ways(rank):
    x = [torch.randn(1, 4, 512, 64, device=rank.device) for _ in range(3)]
    rank.mark("spelled out")
    scores = (x[0] / 8) @ x[1].mT
    scores = scores.masked_fill(torch.ones(512, 512, device=rank.device).triu(1).bool(), float("-inf"))
    scores.softmax(-1) @ x[2]
    rank.mark("flash")
    flash_attention(*x, sram_bytes=64_000, kernel=rank.kernel)
    rank.mark("end")


run = emu.launch(attention_two_ways, emu.Mesh(dp=1), backend="shape")
for name, end in (("spelled out", "flash"), ("flash", "end")):
    kernels = [event for _, event in run.window(name, end).trace.of(Kernel, rank=0)]
    print(f"{name}: {bytes_text(sum(kernel.bytes for kernel in kernels))} of HBM; kernels: {len(kernels)}")
shape = Shape(1, 4, 4, 512, 512, 64, 4, 4)
print("the closed form of flash:", bytes_text(sum(forward_traffic(shape, tiles_for(shape, 64_000)))))

# %%
show(attention_traffic_figure(emu.cluster("h100").chip))

# %% [markdown]
# Left: both grow with the square, one some times less than the other; a single head's scores soon outgrow the L2 cache.
# Right: what larger tiles would save, if a core (SM) had more memory. Backward is counted here, too, and heads are wider
# than above: so the gain is less, for a wider head leaves room for fewer queries.
#
# ## 3. Ring attention: ranks merge blocks
#
# Now the sequence itself is too long for one device. Cut it: each of 4 ranks has a quarter of the tokens, of everything
# that works token by token. Only in attention queries need the keys and values of other ranks. So these go round: in
# every step a rank attends to those it has just now, merges, and passes them on to its neighbour.
#
# **Predict:** tokens are cut in order, rank 0 the first quarter. A query sees earlier keys only. Which rank has least
# to do, which most, and how many times the mean?

# %%
LENGTH, RANKS = 64, 4
contiguous = make_cut("ring", LENGTH, RANKS)
show(ring_figure(contiguous))

# %% [markdown]
# Read it by columns. Above is the score matrix, queries down, keys across: in step 0 all ranks attend to their own
# keys, in each later one to those of the rank so many places back. Below is what each rank's kernel gets. The coloured
# upper edge says whose keys and values lie there now, and how they go round.
#
# Rank 0 has nothing to do after step 0: all keys that come by are of later tokens. The last rank attends in every step.
# And all wait for it.
#
# **Predict:** you may give each rank two pieces of the sequence in place of one. Which two make all ranks do the same?

# %%
zigzag = make_cut("zigzag", LENGTH, RANKS)
for rank in range(RANKS):
    print(f"rank {rank} has tokens", ", ".join(f"{run.start} to {run.stop - 1}" for run in zigzag.tokens(rank).runs))
show(ring_figure(zigzag))

# %% [markdown]
# One from the front and one from the back: a *zigzag*. What is cheap at the front is dear at the back, and the two
# together are the same for all, in every step. Kernels stay simple, too: of an earlier rank's keys only the first half
# is seen, by all queries; of a later rank's all are, by the second half of them. No mask anywhere.
#
# Another way is to deal tokens out like cards, *striped*: every rank's block is nearly the whole triangle.

# %%
striped = make_cut("striped", LENGTH, RANKS)
show(attended_work_figure([contiguous, zigzag, striped]))

# %% [markdown]
# **Predict:** the striped cut is not quite even. Why, and does it matter for a sequence of 64 thousand tokens?

# %%
for length in (64, 1024, 65_536):
    cut = make_cut("striped", length, RANKS)
    works = [cut.work(rank) for rank in range(RANKS)]
    print(f"{length:6} tokens: the busiest rank has {max(works) * RANKS / sum(works):.4f} times the mean")

# %% [markdown]
# Its diagonal is seen or not, one token a row. That is soon nothing.
#
# ### Is it right?
#
# Every rank merges in another order, own keys first. `emu.verify` trains a step of a real model with its sequences cut,
# and compares loss and gradients with one device, bit for bit (tier `exact`, where sums do not round).
#
# **Predict:** the sequence has 13 tokens, and there are 4 ranks. Does it work at all? What else must be right besides
# attention? (Think of positions, of labels, and of the mean in the loss.)

# %%
model = Decoder(Config(layers=2, width=16, heads=4, kv_heads=2, vocab=32, seq=13, positions="rotary"), seed=0)
for kind in ("ring", "zigzag", "striped"):
    plan = emu.Plan("cp=4", context=kind, global_batch=2, seq=13)
    print(f"{kind:8}", emu.verify(model, plan, mutants="none"))

# %% [markdown]
# The axis is called `cp`, *context parallel*. Positions are told to each rank as they are in the whole sequence; labels
# are shifted before the cut, or the last token of each piece would lack its own; and losses are summed, with one
# division at the end, so it does not matter that one rank has a token more.
#
# ### How long does it take?
#
# We price a step of two layers with 65,536 tokens on four H100s, shapes only. Ranks attend while the next keys and
# values are on their way.
#
# **Predict:** attention takes most of the step. By how much is the zigzag faster, as a whole? And will there be any
# waiting for keys and values?

# %%
long = Config(
    layers=2,
    width=2048,
    heads=16,
    kv_heads=4,
    vocab=8192,
    seq=65_536,
    positions="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
)


def step(rank, config, plan):
    with torch.device(rank.device):
        model = Decoder(config)
        tokens = torch.zeros(plan.global_batch, plan.seq, dtype=torch.long)
    dist = parallelize(model, plan, rank)
    rank.mark("step")
    dist.backward(emu.Batch(tokens, tokens, tokens=tokens.numel()))
    rank.mark("end")


def launched(config, mesh, **options):
    plan = emu.Plan(mesh, seq=config.seq, **({"global_batch": 1} | options))
    run = emu.launch(step, emu.parallel.mesh_of(plan), backend="shape", launch_mode="graph", args=(config, plan))
    return run.window("step", "end")


def attention_s(timeline, rank):
    spans = timeline.spans[rank]
    return sum(span.end_s - span.start_s for span in spans if span.kind == "kernel" and "attention" in span.name)


runs = {kind: launched(long, "cp=4", context=kind) for kind in ("ring", "zigzag", "striped")}
for kind, run in runs.items():
    timeline = run.timeline()
    busy = ", ".join(f"{1000 * attention_s(timeline, rank):.0f}" for rank in range(RANKS))
    exposed = 1000 * run.metrics.exposed_comm_s
    print(
        f"{kind:8} {1000 * timeline.step_time_s:.0f} ms a step; attention {busy} ms by rank; waiting {exposed:.1f} ms"
    )

# %%
for kind in ("ring", "zigzag"):
    show(timeline_figure(runs[kind].timeline(), ranks=range(RANKS), title=kind))

# %% [markdown]
# With the contiguous cut the first ranks wait (outlined in grey) for the last one, layer by layer. With the zigzag all
# compute all the time: keys and values travel on a stream of their own, and a block takes longer than its transfer. A
# block's time grows with the square of its tokens, the transfer only with their number: so the longer the sequence, the
# better it hides.
#
# What the kernels did is what the cut had said; the trace knows their FLOPs:

# %%
show(attended_work_figure(make_cut("ring", 65_536, RANKS), run=runs["ring"]))

# %% [markdown]
# ## 4. Documents
#
# Training packs many documents into one sequence, and a token may see its own document only. (In `emu.models.Config`
# say `document_end=`, the token that ends one.) Then work is not where tokens are.
#
# **Predict:** a long document, then many short ones. A zigzag over the whole sequence gives each rank equally many
# tokens. And equal work?

# %%
sizes = [28, *[4] * 9]
documents = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]  # [1 row, 64 tokens]
blind, aware = make_cut("zigzag", 64, RANKS), make_cut("zigzag", 64, RANKS, documents)


def attended(positions):
    """How many keys these tokens see, by definition."""
    return sum(int((documents[0, : place + 1] == documents[0, place]).sum()) for place in positions)


print("zigzag over all :", [attended(blind.tokens(rank).positions.tolist()) for rank in range(RANKS)], blind.sizes)
print("zigzag over each:", [aware.work(rank) for rank in range(RANKS)], aware.sizes)

# %% [markdown]
# Cut every document by itself, as a zigzag of its own, and deal out what does not divide so that all do equal work, and
# still have equally many tokens. Most blocks need masks now:

# %%
show(ring_figure(aware))

# %% [markdown]
# Equal, too, in what it computes: here is a model whose sequences end documents with token 7.

# %%
packed = Decoder(Config(layers=2, width=16, heads=4, vocab=32, seq=24, document_end=7), seed=0)
print(emu.verify(packed, emu.Plan("cp=4", context="zigzag", global_batch=3, seq=24), mutants="none"))

# %% [markdown]
# ## 5. Not a ring
#
# There are other ways to bring queries to keys:
#
# * **all-gather**: all ranks get all keys and values at once, then attend in one kernel. Simple, and that is what Llama
#   3 does; memory for them, one layer at a time, and nothing hides the gathering.
# * **Ulysses**: ranks exchange tokens for *heads*. After an all-to-all each has the whole sequence, for some of the
#   heads; then plain attention; and an all-to-all back.
# * **usp**: both: heads among neighbours, a ring over groups of these.
#
# **Predict:** with `p` ranks of `s/p` tokens each, a ring and an all-gather move the same: all keys and values but
# one's own, `2 (s - s/p)` times the width of the KV heads. What does Ulysses move, and which of them falls as there are
# more ranks?


# %%
def sent_in_attention(run, rank=0, phase="forward"):
    """What a rank sends of queries, keys, values and outputs before its first backward kernel, or from then on."""
    events = run.trace.events[rank]
    first = next(i for i, event in enumerate(events) if getattr(event, "phase", "") == "backward")
    some = events[:first] if phase == "forward" else events[first:]
    group = [e for e in some if type(e) is Collective and e.name in NAMES]
    return int(sum(sent_bytes(event, rank) for event in group))


NAMES = ("keys and values", "gradients of keys and values", "tokens for heads", "heads for tokens")
WIDTH, KV = 2048, 4 * 128  # of all query heads, and of all key and value heads
for ranks in (2, 4, 8, 16):
    forms = {
        "ring": 2 * KV * 65_536 * (ranks - 1) // ranks,
        "all-gather": 2 * KV * 65_536 * (ranks - 1) // ranks,
        "ulysses": (2 * WIDTH + 2 * max(KV, 128 * ranks)) * (65_536 // ranks) * (ranks - 1) // ranks,
    }
    for kind, elements in forms.items():
        run = launched(long, f"cp={ranks}", context=kind)
        sent = sent_in_attention(run)
        agrees = "as the formula says" * (sent == 2 * elements * long.layers)  # two bytes an element
        print(f"{ranks:2} ranks, {kind:10} {bytes_text(sent):>8} forward, {agrees}")

# %% [markdown]
# A ring's traffic hardly depends on the number of ranks. Ulysses' falls with it, for each rank has fewer tokens to
# exchange; from 8 ranks on more slowly, because there are only 4 key and value heads, which are copied then. They are a
# quarter of the query heads here (grouped heads), and that favours the ring. Were they as many, Ulysses would send less
# than a ring from 3 ranks on, and half of it with 4.
#
# Backward a ring and an all-gather send three times as much: keys and values once more, and gradients in four bytes.
# Ulysses sends what it sent forward.
#
# **Predict:** what is the limit of Ulysses?

# %%
try:
    launched(long, "cp=32", context="ulysses")
except EmuError as error:
    print(error)

# %%
for kind in ("zigzag", "all-gather", "ulysses", "usp"):
    run = launched(long, "cp=4", context=kind)
    sent = [bytes_text(sent_in_attention(run, phase=phase)) for phase in ("forward", "backward")]
    took, waits = 1000 * run.metrics.step_time_s, 1000 * run.metrics.exposed_comm_s
    print(f"{kind:10} {took:.0f} ms a step, {waits:.1f} of these waiting; sends {sent[0]} forward, {sent[1]} backward")

# %% [markdown]
# All are even. What tells them apart is how much of what travels is waited for: a ring hides nearly all.
#
# ## 6. Compute it again
#
# Backward needs what forward computed, so all of it is kept, from every layer. Or is it? Keep each layer's *input*
# only, and when its backward comes, run its forward once more.
#
# **Predict:** the same loss and gradients? With dropout, too, which draws random numbers in forward?

# %%
noisy = Config(layers=4, width=16, heads=2, vocab=32, seq=16, dropout=0.2)
x = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(0))
found = {}
for name in ("none", "full", "every:2", "naive", "selective"):
    net = Decoder(noisy, seed=0)
    checkpointed(net, name)
    torch.manual_seed(1)
    loss = net.loss_sum(x, x.roll(-1, 1))
    loss.backward()
    found[name] = [loss.detach(), *(p.grad for p in net.parameters()), torch.get_rng_state()]
    same = all(torch.equal(a, b) for a, b in zip(found[name], found["none"]))
    print(f"{name:10} loss {float(loss.detach()):.6f},", "equal to none, bit for bit" if same else "DIFFERENT")

# %% [markdown]
# The state of the random numbers is kept with the input and set back, so the same numbers are drawn again; afterwards
# the stream stands where it would have stood.
#
# A **policy** says what is kept and what is computed again from what. It is data: segments of layers, and for each the
# layer whose input is kept.

# %%
for name in ("full", "every:4", "repeated:4"):
    policy = Policy.named(name, 12)
    segments = [f"{s.start}-{s.stop - 1} from {s.source}" for s in policy.segments]
    print(
        f"{name:10} keeps the input of {len(policy.kept):2} layers, runs {policy.recomputed} forwards again:",
        *segments[:3],
        "...",
    )

# %% [markdown]
# * `full`: each layer from its own input.
# * `every:C`: one level of segments of C layers. Inputs of `n/C` are kept, and in backward all of one segment.
# * `repeated:C`: the same segments, but only the very first input is kept, and each segment starts from there: `O(C)`
#   memory, `O(n^2/C)` work. `naive` is `repeated:1`.
#
# **Predict:** with `every:C`, memory is `n/C` inputs and `C` layers. Which C is best, if a layer keeps as much as `k`
# inputs? And with 64 layers and `k = 10`?

# %%
n, k_inputs = 64, 10
for c in (1, 2, 4, 8, 16):
    policy = Policy.named(f"every:{c}", n)
    print(f"every:{c:<2} {policy.peak_bytes(1, k_inputs):4} inputs at the peak, {policy.recomputed} forwards again")
for name in ("none", "sqrt", "halving", "repeated:4", "naive"):
    policy = Policy.named(name, n)
    print(f"{name:10} {policy.peak_bytes(1, k_inputs):4} inputs at the peak, {policy.recomputed} forwards again")

# %% [markdown]
# The smallest sum is where both are alike: `C = sqrt(n/k)`, not the `sqrt(n)` that is usually quoted; that counts
# layers as inputs.
#
# Now a real model: 16 layers, 8,192 tokens, in bfloat16, on one H100. The peak of all activations, what is computed
# again, as the trace counts it, and how long a step takes:

# %%
deep = Config(
    layers=16,
    width=2048,
    heads=16,
    kv_heads=4,
    vocab=2048,
    seq=8192,
    positions="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
)
POLICIES = ("none", "selective", "full", "every:2", "every:4", "halving", "repeated:4", "naive")


def spent(run, phase):
    return sum(event.flops for _, event in run.trace.of(Kernel, rank=0) if event.phase == phase)


held, again = {}, {}
for name in POLICIES:
    run = launched(deep, "dp=1", checkpoint=name)
    held[name] = max(run.memory.series(0)[1]["activations"])
    again[name] = spent(run, "recompute") / spent(run, "forward")
    said = f"{again[name]:.2f} forwards again (of layers: {Policy.named(name, 16).recomputed / 16:.2f})"
    print(
        f"{name:10} {bytes_text(held[name]):>7} at the peak, {said:42} {1000 * run.metrics.step_time_s:.0f} ms a step"
    )

# %% [markdown]
# `full` costs a third more, for forward is about a third of a step; and is enough for most. The forwards that are
# counted are a little fewer than those of layers, because embedding, head and loss are not run again.
#
# And `selective`? It computes attention's insides again, and nothing else: in 2022 the scores and weights that
# attention kept were most of a layer. Flash attention keeps none of that, so there is nothing left to gain from it (it
# costs time, though): fused kernels made it obsolete here.
#
# **Predict:** draw memory against time, a point a policy. Which points are on the edge, which are never worth it?

# %%
element_bytes = 2 * deep.seq * deep.width  # a layer's input, in bfloat16
layer_bytes = round((held["none"] - held["full"]) / (deep.layers - 1)) + element_bytes
show(frontier_figure(deep.layers, element_bytes, layer_bytes))

# %% [markdown]
# A layer keeps as much as some thirty inputs here, so `sqrt(n/k)` is less than one: of all `every:C`, `full` is best,
# and longer segments only hold more. That changes where layers are many. Of those that compute more, `halving` and
# `naive` are on the edge. `repeated:C` with longer segments is not: another holds less, and computes less.
#
# ## 7. Let it wait elsewhere
#
# The host has memory, too. What a layer keeps can travel there over the host link while later layers compute, and come
# back just before its backward. No FLOP more; but the link is slow, about fifty times slower than HBM.
#
# **Predict:** offload all that layers keep; or offload the inputs only, with `full`. Which of the two is hidden behind
# compute?

# %%
for name in ("none", "full"):
    for offload in (False, True):
        run = launched(deep, "dp=1", checkpoint=name, offload=offload)
        peak = bytes_text(max(run.memory.series(0)[1]["activations"]))
        what = f"checkpoint={name}" + ", offload" * offload
        print(f"{what:24} {peak:>7} at the peak, {1000 * run.metrics.step_time_s:.0f} ms a step")
        if offload:
            show(timeline_figure(run.timeline(), ranks=[0], title=what))

# %% [markdown]
# Two more streams: to the host in forward, and from it in backward. All that a layer keeps takes longer to travel than
# the layer to compute, so compute waits for the link. A layer's input alone is away before the next layer is done.
#
# **Predict:** layers take longer with longer sequences, what they keep grows, too. From which length on can
# *everything* be offloaded for almost nothing?

# %%
for length in (8192, 32_768, 131_072):
    config = Config(
        layers=6, width=2048, heads=16, kv_heads=4, vocab=2048, seq=length, positions="rotary", norm="rms",
        activation="swiglu", bias=False,
    )  # fmt: skip
    times = [launched(config, "cp=4", offload=offload).metrics.step_time_s for offload in (False, True)]
    print(f"{length:7} tokens over cp=4: offloading takes {times[1] / times[0]:.2f} times as long")

# %% [markdown]
# What travels grows with the tokens, attention with their square: once more long sequences hide what short ones cannot.
#
# ## 8. All together
#
# These are independent of each other, and of what earlier lessons had. Each of the plans below cuts a model in several
# ways at once, and is compared with one device.
#
# **Predict:** in `cp=2,tp=2` heads are cut over `tp` and tokens over `cp`. Does Ulysses still work, which cuts heads
# over `cp`?

# %%
wide = Decoder(Config(layers=4, width=16, heads=4, vocab=32, seq=16), seed=0)
for mesh, options in (
    ("dp=2,cp=2", {"zero": 3, "checkpoint": "full"}),
    ("cp=2,tp=2", {"sp": True, "context": "ulysses"}),
    ("cp=4", {"context": "usp", "checkpoint": "every:2", "offload": True}),
    ("pp=2,cp=2", {"schedule": "zb-h1", "microbatches": 2, "checkpoint": "full"}),
    ("pp=2,dp=2,cp=2,tp=2", {"schedule": "1f1b", "microbatches": 2, "context": "striped", "offload": True}),
):
    plan = emu.Plan(mesh, global_batch=4, seq=16, **options)
    print(f"{mesh}, {options}\n   ", emu.verify(wide, plan, mutants="none"))

# %% [markdown]
# Each rank of `tp` has 2 heads, and 2 ranks of `cp` exchange these. With `cp=4` it would be refused.
#
# ## 9. Your own policy
#
# A policy is a list of segments: `Segment(start, stop, source)`, layers `start <= i < stop`, computed again from the
# kept input of layer `source`. Layers that belong to no segment keep everything. This is `full` for 24 layers. A layer
# keeps as much as 10 inputs.
#
# **Predict:** what is wrong with the second one? `judge` says so without running it.


# %%
def mine(n):
    return [Segment(i, i + 1, i) for i in range(n)]


def judge(segments_of, memory, forwards, n=24, layer=10):
    """Says what is wrong with a policy, or what it reaches: inputs held at the peak, and forwards of a layer that are added."""
    try:
        policy = Policy("mine", n, tuple(segments_of(n)))
    except EmuError as error:
        return f"it cannot be: {error}"
    held, again = policy.peak_bytes(1, layer), policy.recomputed
    wrong = [f"holds {held} inputs, at most {memory} are asked"] * (held > memory)
    wrong += [f"runs {again} forwards again, at most {forwards} are asked"] * (again > forwards)
    return "; ".join(wrong) or f"well done: holds {held}, runs {again} again"


print("1.", judge(mine, memory=60, forwards=19))


def hasty(n):
    return [Segment(i, i + 4, i - 1) for i in range(1, n, 4)]


print("2.", judge(hasty, memory=60, forwards=19))

# %% [markdown]
# **Exercise.** `full` needs little more than half that memory, and uses none of the rest. Change `mine` until `judge`
# is content with `memory=60, forwards=19`: not every layer must be computed again, and the last ones are needed first.
# Then `memory=24, forwards=44`: less than any `every:C` needs. (There is a `keeps`, too; see
# `emu.parallel.checkpointing.Segment`.)

# %% [markdown]
# ## What to remember
#
# * Attention to blocks of keys merges by log-sum-exp: over tiles that is flash attention, over ranks ring attention.
# * Flash attention's traffic is still quadratic, divided by the queries that fit into a core.
# * Under a causal mask equal tokens are unequal work: a zigzag makes it equal. Documents: a zigzag each.
# * A ring hides what it sends, the better the longer the sequence. Ulysses sends less, and needs heads.
# * Checkpointing pays compute for memory, a third more for nearly all of it; offloading pays the host link, which long
#   sequences and kept inputs alone hide.
#
# ## Try it yourself
#
# 1. In section 3, `launched(long, "cp=8", context="ring")`: how far is the busiest rank of the contiguous cut from the mean?
# 2. `show(ring_figure(make_cut("usp", 64, 8)))`: who holds what? How many steps has the ring?
# 3. `sent_in_attention` with `kv_heads=16` in `long`: which kind sends least now, and from how many ranks on?
# 4. In section 2 walk through `FlashBackward`: why is `dQ` read and written again and again, and `dK` not?
