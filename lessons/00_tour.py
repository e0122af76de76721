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
# # A tour: train a GPT on eight GPUs that do not exist
#
# In half an hour you will write a training program for eight GPUs, prove that it computes what one GPU computes,
# break it on purpose, and see what its memory and its time are spent on. You need no GPU.
#
# The numbers that the program computes are real: every *virtual* device runs real PyTorch. Only the hardware is
# simulated: its memory fills up, its kernels take time, its links have a bandwidth. So three questions have answers:
#
# 1. Is it **right**?
# 2. Does it **fit**?
# 3. How **long** does it take?
#
# The tour asks you to **predict** before you **run**. Write your guess down; being wrong is how you learn something.

# %%
import math
from dataclasses import replace

import torch
from IPython.display import Image, display

import emu
from emu.hardware import Workload
from emu.models import GPT, batches, config, text
from emu.trace.compare import equal
from emu.view import (
    comparison_table,
    loss_figure,
    memory_bars_figure,
    memory_figure,
    metrics_table,
    png_bytes,
    timeline_figure,
)
from emu.view.units import bytes_text, percent_text, time_text


def show(figure):
    display(Image(png_bytes(figure, dpi=90)))


# %% [markdown]
# ## 1. A cluster
#
# A cluster is a description: chips, the links between them, and the hosts that drive them. Every number in it has a
# source.

# %%
cluster = emu.cluster("h100-8")
print(cluster)

# %% [markdown]
# The two rates to remember are how fast the chip multiplies and how fast it reads its own memory. Links are slower
# still.
#
# **Predict:** a chip reads one float32 number (4 bytes) from its memory. How many multiplications could it have done
# in that time? And in the time that one number needs to cross the link to another chip?

# %%
chip, link = cluster.chip, cluster.node.scale_up
flops_per_s = chip.peak_flops["bfloat16"]
print(f"per number read from memory: {4 / chip.hbm_bytes_per_s * flops_per_s:,.0f} operations")
print(f"per number sent over a link: {4 / link.bandwidth_bytes_per_s * flops_per_s:,.0f} operations")

# %% [markdown]
# Computing is nearly free; **moving data is what costs**. All of distributed training is about that.
#
# A *mesh* says how the ranks of a program (one per device) are arranged. Ours has one axis, `dp`, for data
# parallelism.

# %%
mesh = emu.Mesh(dp=8, on=cluster)
display(mesh)

# %% [markdown]
# ## 2. A program that every rank runs
#
# In distributed training there is no conductor. All ranks run the **same function**, and talk in *collectives*:
# operations that a whole group enters together. `all_reduce` adds up everyone's tensor and gives everyone the sum.
#
# **Predict:** what does each of the eight ranks return?


# %%
def hello(rank):
    x = torch.tensor([float(rank)])  # rank is its number: 0, 1, ... 7
    rank.group("dp").all_reduce(x)
    return x.item()


print(emu.launch(hello, mesh).results)

# %% [markdown]
# Every rank has the sum of all rank numbers. Nobody sent it to anybody: they met in `all_reduce`.
#
# ## 3. A model, a text, and one device
#
# A small GPT that reads bytes, and a real English text (the help pages that come with Python).

# %%
model_config = config("gpt-tiny", layers=2)
data = [emu.Batch(x, y) for x, y in batches(seed=0, steps=20, batch=16, seq=64)]
n_params = model_config.n_params()
print(model_config)
print(f"{n_params:,} parameters; {len(data)} batches of {data[0].tokens} tokens each; the text begins:\n")
print(text()[:200].decode())


# %% [markdown]
# This is a training step on one device, in plain PyTorch. One habit is unusual: the loss is a **sum** over all
# tokens, and one division by their number comes **last**. You will see why in a moment.


# %%
def one_device(batch):
    model = GPT(model_config, seed=0)
    loss = model.loss_sum(batch.x, batch.y)
    loss.backward()
    for p in model.parameters():
        p.grad.div_(batch.tokens)
    return {"loss": loss.detach() / batch.tokens, "parameters": emu.grads(model)}


# %% [markdown]
# **Predict:** the model is untrained, so it knows nothing. What is its loss, in nats, when a byte has 256 possible
# values?

# %%
print(f"loss {one_device(data[0])['loss']:.3f}; a blind guess costs ln 256 = {math.log(256):.3f}")

# %% [markdown]
# ## 4. The same step on eight devices
#
# **Data parallelism**: every rank has the whole model and works on its share of the batch. Gradients are added up
# over the ranks. Read the function line by line and mark what differs from the one above: the
# group, this rank's share, and the sums over ranks.


# %%
def dp_step(rank, batch):
    model = GPT(model_config, seed=0)  # the same seed: the same model on every rank
    dp = rank.group("dp")
    x, y = batch.shard(rank, "dp")  # this rank's rows
    loss = model.loss_sum(x, y)
    loss.backward()
    for p in model.parameters():
        dp.all_reduce(p.grad).div_(batch.tokens)  # sum over ranks, then divide by the tokens of the whole batch
    return {"loss": dp.all_reduce(loss.detach().clone()) / batch.tokens, "parameters": emu.grads(model)}


run = emu.launch(dp_step, mesh, args=(data[0],))
print([f"{result['loss']:.3f}" for result in run.results])

# %% [markdown]
# All ranks agree on the loss, and it is that of one device. But is **every gradient** right?
#
# **Predict:** computers round, so a sum depends on its order, and eight devices add in another order than one. Can
# the gradients be equal in every bit?

# %%
verdict = run.check(one_device, tier="exact")
print(verdict)

# %% [markdown]
# They can, in the tier *exact*: both programs run again in an arithmetic of float64 on a fixed grid in which sums do
# not round, so no order of adding changes a bit. If one bit differs, it is a mistake in the program and not rounding.
#
# And how do we know that the check would notice a mistake? The *mutants* are copies of your program with one
# collective broken on purpose: left out, slightly scaled, with a rank missing, and so on. A check that does not
# notice them is no check.
#
# In ordinary float32 the gradients differ by rounding, and the tier *float32* says by how much:

# %%
print(run.check(one_device, tier="float32", mutants="none"))


# %% [markdown]
# ## 5. Break it
#
# Two classic mistakes. The first: *averaging* gradients over the ranks, although the division by all tokens has
# already been done. The second: forgetting to communicate at all.
#
# **Predict:** both programs run without any error. By which factor are the gradients of the first one wrong? And what
# is the sign of the second mistake that a test could see?


# %%
def averages(rank, batch):
    model = GPT(model_config, seed=0)
    x, y = batch.shard(rank, "dp")
    model.loss_sum(x, y).backward()
    for p in model.parameters():
        rank.group("dp").all_reduce(p.grad, op="avg").div_(batch.tokens)
    return {"parameters": emu.grads(model)}


def gradients_of_one_device(batch):
    return {"parameters": one_device(batch)["parameters"]}


verdict = emu.launch(averages, mesh, args=(data[0],)).check(gradients_of_one_device, tier="float32")
print(verdict)
print(f"\nrelative error {verdict.max_rel_err:.3f}; of gradients that are 8 times too small: {1 - 1 / 8:.3f}")


# %%
def forgets(rank, batch):
    model = GPT(model_config, seed=0)
    x, y = batch.shard(rank, "dp")
    model.loss_sum(x, y).backward()
    for p in model.parameters():
        p.grad.div_(batch.tokens)
    return {"parameters": emu.grads(model)}


print(emu.launch(forgets, mesh, args=(data[0],)).check(gradients_of_one_device, tier="float32"))

# %% [markdown]
# Averaging is a factor, and the verdict gives its size. Forgetting leaves ranks with **different** gradients where
# all should hold the same, and the verdict names the ranks. Unnoticed, their models would drift apart step by step.
#
# ## 6. Train
#
# A whole training loop, with an optimizer. `rank.mark` names points of the program, so that we can find them again in
# its record.


# %%
def train(rank):
    model, dp = GPT(model_config, seed=0), rank.group("dp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    losses = []
    for step, batch in enumerate(data):
        rank.mark(f"step {step}")
        loss = model.loss_sum(*batch.shard(rank, "dp"))
        loss.backward()
        for p in model.parameters():
            dp.all_reduce(p.grad).div_(batch.tokens)
        losses.append(dp.all_reduce(loss.detach().clone()) / batch.tokens)
        optimizer.step()
        optimizer.zero_grad()
    rank.mark("end")
    return torch.stack(losses)


# %% [markdown]
# **Predict:** the same batches, on one device and on eight. Will the two loss curves lie on each other? To how many
# digits?

# %%
single = emu.launch(train, emu.Mesh(dp=1, on=cluster))
eight = emu.launch(train, mesh)
show(loss_figure({"1 device": single.results[0].tolist(), "8 devices": eight.results[0].tolist()}, width=7))

# %% [markdown]
# The curves coincide. What is left (the lower picture) is the rounding of float32, in the last of its seven digits.
#
# ## 7. Does it fit? Memory
#
# **Predict:** call the bytes of the parameters P. How much do the gradients take? And Adam, which keeps two averages
# for every parameter? What else is there?

# %%
parameter_bytes = 4 * n_params
for category, size in eight.memory.at_peak(0).items():
    print(f"{category:14} {bytes_text(size):>8} = {size / parameter_bytes:4.1f} P")

# %%
show(memory_figure(eight.memory, rank=0, width=9))

# %% [markdown]
# Parameters (1 P) and optimizer (2 P) stay; gradients grow to 1 P during each backward pass, while activations, which
# the forward pass kept for it, are freed. Of this model the peak comes in between, before there is any gradient. All
# of the 4 P are on **every** rank: data parallelism does not divide them. Activations do shrink with the rank's share
# of the batch:

# %%
for name, each in {"1 device": single, "8 devices": eight}.items():
    print(f"{name}: activations at the peak {bytes_text(each.memory.at_peak(0)['activations'])}")

# %% [markdown]
# ## 8. How long does it take? Time
#
# One step of the training, priced on the cluster. Every rank has a *host*, which launches kernels one after another,
# and *streams*, which run them.
#
# **Predict:** eight devices do an eighth of the work each. Is the step eight times faster?

# %%
last = (f"step {len(data) - 1}", "end")
step_of_one, step_of_eight = single.window(*last), eight.window(*last)
comparison_table({"1 device": step_of_one.metrics, "8 devices": step_of_eight.metrics}, "The last training step")

# %%
show(timeline_figure(step_of_eight.timeline(), ranks=[0, 1], width=9))

# %% [markdown]
# It is not; it is even slower. Nearly all of the step is red: every parameter's gradient travels in a message of its
# own. In a ring of 8, a message makes 2 x 7 hops, and every hop has a latency, however little it carries.

# %%
reductions = [span for span in step_of_eight.timeline().spans[0] if span.kind == "collective"]
mean_s = sum(span.end_s - span.start_s for span in reductions) / len(reductions)
print(f"{len(reductions)} all_reduces of {time_text(mean_s)} each; 14 hops take {time_text(14 * link.latency_s)}")

# %% [markdown]
# Now zoom into the first 50 microseconds of the step, where it computes.
#
# **Predict:** is the device busy there?

# %%
show(timeline_figure(step_of_eight.timeline(), ranks=[0, 1], width=9, window=(0, 50e-6)))

# %% [markdown]
# Each kernel of so small a model is done long before the host has launched the next one: the GPU waits for its host.
# **A toy on a real GPU measures latencies and launches, not GPUs.**
#
# So we shrink the hardware with the model: chips, links and launches are scaled so that our toy meets the ratios that
# Llama 3 8B meets on real H100s. The record is the same; only its price changes. Nothing runs again.

# %%
toy = Workload(n_params=n_params, width=model_config.width, tokens=data[0].tokens // 8)
llama = Workload(n_params=8.03e9, width=4096, tokens=8192)
shrunk = cluster.similar(toy, to=llama)
show(timeline_figure(step_of_eight.timeline(on=shrunk), ranks=[0, 1], width=9))

# %% [markdown]
# Now kernels fill the time of their stream: this is how a step of a large model looks. First everyone computes, then
# everyone talks, and nobody computes while talking.
#
# ## 9. What if?
#
# Because the record can be priced again, we may ask what would help before buying it.
#
# **Predict:** which matters most: communication that costs nothing, the next generation of chips, or links between
# the chips that are only as fast as a network between machines?

# %%
network = emu.cluster("h100", nodes=2).scale_out
slower = network.bandwidth_bytes_per_s / link.bandwidth_bytes_per_s
slow_link = replace(shrunk.node.scale_up, bandwidth_bytes_per_s=shrunk.node.scale_up.bandwidth_bytes_per_s * slower)
slow = replace(shrunk, node=replace(shrunk.node, scale_up=slow_link))
b200 = emu.cluster("b200")
metrics = {
    "as it is": step_of_eight.timeline(on=shrunk).metrics(),
    "free all_reduce": step_of_eight.without("dp.*").timeline(on=shrunk).metrics(),
    "B200s, shrunk alike": step_of_eight.timeline(on=b200.similar(toy, to=llama)).metrics(),
    f"links {1 / slower:.0f}x slower": step_of_eight.timeline(on=slow).metrics(),
}
print(f"peak of a B200 over that of an H100 in float32: {b200.chip.peak('float32') / chip.peak('float32'):.2f}\n")
for name, m in metrics.items():
    print(
        f"{name:20} step {time_text(m.step_time_s):>7}, MFU {percent_text(m.mfu)}, "
        f"talking and not computing {percent_text(m.exposed_comm_fraction)}"
    )

# %% [markdown]
# (The toy computes in float32, where a B200 is not much faster than an H100; real training uses bfloat16.) MFU,
# *model flops utilisation*, is the share of the chips' peak that did useful work: the figure by which training runs
# are compared. Inside one node, links are fast enough that plain data parallelism loses little. At the speed of a
# network it loses much more.
#
# Communication cannot be free, but it can be *hidden*: the gradients of the last layer are ready long before those of
# the first, and can travel while the rest is computed. `emu.DataParallel` does what you wrote by hand, and this: it
# collects gradients in buckets, and sums a bucket over the ranks, on a stream of its own, as soon as it is full.


# %%
def train_hidden(rank, shape, options):
    dist = emu.DataParallel(GPT(shape, seed=0), rank, "dp", **options)
    optimizer = dist.optimizer(torch.optim.AdamW, lr=3e-3, foreach=True)
    for step, batch in enumerate(data[:2]):
        rank.mark(f"step {step}")
        dist.backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    rank.mark("end")


buckets = {"bucket_bytes": 200_000}
hidden = emu.launch(train_hidden, mesh, args=(model_config, buckets)).window("step 1", "end")
m = hidden.timeline(on=shrunk).metrics()
print(f"talking for {percent_text(m.comm_s / m.step_time_s)} of the step, ", end="")
print(f"talking and not computing {percent_text(m.exposed_comm_fraction)}")
show(timeline_figure(hidden.timeline(on=shrunk), ranks=[0, 1], width=9))

# %% [markdown]
# ## 10. What goes wrong, goes wrong clearly
#
# On a real cluster the following program would hang until somebody kills it. Each rank wants to send first, and a
# send waits for its receiver.
#
# **Predict:** what would you need to know to repair it?


# %%
def both_send_first(rank):
    dp, x = rank.group("dp"), torch.ones(4)
    other = rank ^ 1  # 0 and 1 are partners, 2 and 3, ...
    dp.send(x, other)
    dp.recv(x, other)


try:
    emu.launch(both_send_first, emu.Mesh(dp=2, on=cluster))
except emu.EmuError as error:
    print(error)

# %% [markdown]
# And memory that is not there. We give the chip exactly the peak that our training needed, then one byte less.
#
# **Predict:** in which part of a step does it fail?

# %%
peak_bytes = max(eight.memory.peak_bytes(rank) for rank in range(8))
for hbm_bytes in (peak_bytes, peak_bytes - 1):
    small = replace(cluster, name="small", chip=replace(cluster.chip, hbm_bytes=hbm_bytes))
    try:
        emu.launch(train, emu.Mesh(dp=8, on=small), backend="shape")
        print(f"{hbm_bytes:,} bytes: it fits\n")
    except emu.EmuError as error:
        print(f"{hbm_bytes:,} bytes: {error}")

# %% [markdown]
# It fails where the forward pass ends and backward begins: all activations are there, and something more comes on
# top. The message says who holds what, so that you know where to save.
#
# ## 11. Shapes only
#
# You may have noticed `backend="shape"` above. It runs the same program on tensors that have a shape and no values,
# so it can answer *does it fit* and *how long*, though not *is it right*. Its record is that of the real run, event
# by event:

# %%
print(equal(emu.launch(train, mesh, backend="shape").trace, eight.trace))

# %% [markdown]
# No number is computed, so the model may be large.
#
# **Predict:** Llama 3 8B has 8 billion parameters, an H100 80 GB. Does plain data parallelism in float32 fit? (You
# found the factor in section 7.)


# %%
def large_step(rank, name, seq):
    model = GPT(config(name), seed=0)
    ddp = emu.DataParallel(model, rank, "dp")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.zeros(8, seq, dtype=torch.long)  # one sequence for each of 8 ranks
    ddp.backward(emu.Batch(tokens, tokens, tokens=tokens.numel()))
    optimizer.step()


large = emu.launch(large_step, mesh, backend="shape", args=("gpt-small", 1024))
print(f"gpt-small: peak {bytes_text(large.memory.peak_bytes(0))}, a step takes {time_text(large.metrics.step_time_s)}")
try:
    emu.launch(large_step, mesh, backend="shape", args=("llama3-8b", 1024))
except emu.EmuError as error:
    print(f"\nllama3-8b: {error}")

# %%
metrics_table(large.metrics, "gpt-small, one step on eight H100s")

# %% [markdown]
# Eight devices hold eight copies of the same parameters, gradients and optimizer states. Why should they? ZeRO cuts
# them up in three stages: optimizer states, then gradients too, then parameters too.
#
# **Predict:** of a GPT of 8 blocks, how high will the four bars be, and which colours shrink from one to the next?

# %%
stages, deeper = {}, replace(model_config, layers=8)
for zero in range(4):
    run = emu.launch(train_hidden, mesh, args=(deeper, {"zero": zero, **(buckets if zero < 3 else {})}))
    stages[f"zero={zero}"] = run.window("step 1", "end").memory.at_peak(0)
show(memory_bars_figure(stages, width=9))

# %% [markdown]
# The gradients stay the same, bit for bit. The third stage gathers every block's parameters just before it needs them,
# and frees them after: what is left of the blue are shards, the embeddings and the head, and two blocks: the one that
# computes and the next. What that costs in time is for a later lesson.
#
# ## Try it yourself
#
# 1. Give the ranks unequal shares: `batch.shard(rank, "dp", sizes=[9, 1, 1, 1, 1, 1, 1, 1])`, or none at all to some.
#    Is `dp_step` still exact? And a version that divides by each rank's own tokens before it averages?
# 2. Reduce the gradients with `async_op=True` and wait for all of them at the end. What does the timeline say? And why
#    is less hidden than with `emu.DataParallel`?
# 3. How many sequences may a rank of `gpt-small` have before an H100 is full? Predict from the activations of one,
#    then run.
