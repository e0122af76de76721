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
# # Hardware
#
# > *The new unit of compute is not the GPU, it's the entire data center.*
#
# A data centre is a computer whose memory is a ladder: registers, caches, device memory, other devices of the node, other
# nodes, other buildings. Every rung holds more and is slower. All that the other lessons cut and move, they cut and move
# because of this ladder. Here you climb it: what a device computes, what keeps it from doing so, how devices are wired,
# what that means for a collective, and how far all these prices are from what people measured.
#
# As always: **predict** first, then **run**.

# %%
import tempfile
from pathlib import Path

import torch
from IPython.display import Image, display

import emu
from emu.cost.collectives import choose, moving_s, place_evenly, steps
from emu.cost.prices import matmul_flops_per_s, matmul_s, memory_s
from emu.hardware import Cluster, HardwareError, Topology, chip, cluster
from emu.validate.reading import PACKAGED, packaged_rows
from emu.validate.report import examined
from emu.view import (
    algorithms_figure,
    flops_decade_figure,
    ladder_figure,
    png_bytes,
    roofline_figure,
    summaries_table,
    validated_figure,
    wiring_figure,
)
from emu.view.roofline import Work, ridge
from emu.view.units import bytes_text, rate_text, time_text
from emu.view.validated import Point


def show(figure):
    display(Image(png_bytes(figure, dpi=80)))


# %% [markdown]
# ## 1. A decade of FLOP/s
#
# In 2013 a K40 multiplied in float32, on the same units as graphics. Then came 16 bits, units that multiply whole
# matrices (*tensor cores*, systolic arrays), and 8 bits.
#
# **Predict:** the best peak of one device grew about a thousandfold in a decade. How much of that would be left if
# everybody had stayed with float32?

# %%
show(flops_decade_figure())

# %% [markdown]
# Most of it is two ideas: fewer bits a number, and units that do nothing but products of matrices. A program that forgets
# to cast to 16 bits falls off these units, ten years back.

# %%
h100 = chip("h100")
for unit, rates in h100.flops_by_unit().items():
    print(f"{unit:7}", ", ".join(f"{dtype} {rate_text(rate, 'FLOP/s')}" for dtype, rate in rates.items()))

# %% [markdown]
# ## 2. Memory on the chip
#
# Numbers must come to those units from somewhere. Nearest are registers; then the memory that the threads of one core
# (SM) share; then a cache for all cores (L2); then device memory (HBM), which is not on the chip itself.
#
# **Predict:** all registers of an H100 together: are they larger or smaller than its L2? And how many times does the L2
# fit into device memory?

# %%
for name, size in h100.memory_levels().items():
    print(f"{name:9} {bytes_text(size):>8}")
print(f"device memory is {h100.hbm_bytes / h100.l2_bytes:,.0f} times the L2")

# %% [markdown]
# What is used again must lie near. That is what tiles are for: of a product of two n by n matrices each number is used n
# times, and the tile that a core holds decides how often it is fetched.
#
# ## 3. The roofline
#
# A kernel computes, and it moves bytes. Whichever takes longer decides. So ask of a kernel how many FLOP it does for each
# byte, its *intensity*. A sum of two matrices does one FLOP for three numbers moved. A product of n by n does `2 n³` for
# `3 n²` numbers: the larger, the better.
#
# **Predict:** from how many FLOP a byte on is an H100 held up by arithmetic and not by memory? (Its data sheet: 989e12
# FLOP/s in bfloat16, 3.35e12 bytes a second.) Which n is that, with two bytes a number?

# %%
print(f"ridge of an H100: {ridge(h100):.0f} FLOP a byte, so n = {3 * ridge(h100):.0f}")
for name in ("k40", "p100", "v100", "a100", "h100", "b200"):
    one = chip(name)
    dtype = next(d for d in ("bfloat16", "float16", "float32") if d in one.peak_flops)
    print(f"{name:5} {one.year}: {ridge(one, dtype):4.0f} FLOP a byte in {dtype}")

# %% [markdown]
# In ten years arithmetic became faster much sooner than memory did. What was limited by arithmetic on a K40 is limited by
# memory on a B200.
#
# emu has a price for a product, `matmul_s`, and one for kernels that only move bytes, `memory_s`: the same ones with
# which it prices whole training steps. Let us run a series of products through it.
#
# **Predict:** the product of n = 256 is left of the ridge. Does it reach the roof there?


# %%
def product(n):
    return Work(str(n), 2 * n**3, 3 * 2 * n**2, matmul_s(h100, "bfloat16", n, n, n))


def addition(n):
    return Work(f"{n} x {n}", n**2, 3 * 2 * n**2, memory_s(h100, 3 * 2 * n**2))


products = [product(2**power) for power in range(6, 15)]
show(roofline_figure(h100, {"product of n x n": products, "sum of n x n": [addition(n) for n in (256, 1024, 8192)]}))

# %% [markdown]
# Small kernels are far below both roofs: neither memory nor arithmetic holds them up, but that a kernel takes a few
# microseconds however little it does, and that a small product has too few tiles for all the cores. And the large ones
# stay below the dashed roof as well: a data sheet's peak is not kept up for hours, for heat.
#
# ### Tiles and waves
#
# A product is cut into tiles, and cores take tiles in *waves*: 132 at a time on an H100. One tile too many is another
# wave.
#
# **Predict:** n grows from 2048 to 2176, by a sixteenth. Does the rate rise, fall a little, or fall a lot?

# %%
for n in (1408, 1536, 2048, 2176, 2304, 4096, 4224):
    rate = matmul_flops_per_s(h100, "bfloat16", n, n, 4096)
    print(f"{n:5} x {n}: {rate_text(rate, 'FLOP/s'):>11} " + "#" * round(rate / 1e13))

# %% [markdown]
# That is why widths are multiples of large powers of two, and why cutting a matrix in three may cost more than a third.
#
# ### Launch-bound
#
# Somebody must ask for each kernel: the host. Here are 64 products one after the other, small and large, with kernels
# launched one by one from PyTorch (*eager*), from compiled code, and all at once (a CUDA *graph*).
#
# **Predict:** for which of the two sizes does the way of launching matter?


# %%
def chain(rank, n, times):
    x = torch.zeros(n, n, dtype=torch.bfloat16, device=rank.device)
    rank.mark("products")
    for _ in range(times):
        x = x @ x
    rank.mark("end")


one = emu.Mesh(dp=1)
for n in (256, 4096):
    for mode in ("eager", "compiled", "graph"):
        run = emu.launch(chain, one, backend="shape", launch_mode=mode, args=(n, 64)).window("products", "end")
        print(f"64 products of n = {n:4}, {mode:8}: {time_text(run.metrics.step_time_s)}")

# %% [markdown]
# A small product is done before the host has asked for the next. Then the device waits, and no faster chip would help.
# (Where a model is small, this is what its whole step looks like. See the tour.)
#
# ## 4. The ladder of bandwidths
#
# Now leave the device. This is the cluster that trained Llama 3: 8 H100s in a server, 2 servers in a rack, 192 racks in a
# pod, 8 pods.
#
# **Predict:** by which factor is each rung slower: from device memory to the other devices of the server; to other
# servers; to other pods, if all send at once?

# %%
llama = cluster("llama3-24576")
show(ladder_figure(llama.summary()))

# %% [markdown]
# From device memory to storage there are more than four powers of ten. So:
#
# * What is exchanged in every layer (tensor parallelism) stays on the server's links.
# * What is exchanged once a microbatch (pipelines) or once a step (data parallelism) may leave it.
# * What is written once an hour (checkpoints) may go to storage.
#
# **Predict:** a checkpoint of 405e9 parameters with optimizer states, 14 bytes each. How long does this storage take for
# it? And how long would one device alone take, over its own network card?

# %%
checkpoint_bytes = 405e9 * 14
print(f"a checkpoint of {bytes_text(checkpoint_bytes)}:")
print("  to storage, all together:", time_text(checkpoint_bytes / llama.storage.bytes_per_s))
print("  one device alone:", time_text(checkpoint_bytes / llama.scale_out.bytes_per_s))

# %% [markdown]
# ## 5. Wires
#
# Devices of a node are wired in different ways. A *switch* lets everybody talk to everybody at full speed. Without one,
# a device has several *lanes*, which go to different neighbours. What to ask of a topology: how many lanes has a device
# (they share its bandwidth), over how many wires goes the longest way, and how many lanes cross from one half to the
# other (the *bisection*)?
#
# **Predict:** 16 devices as a torus of 4 by 4, every row and column closed to a ring. How many wires is the longest way,
# and how many lanes are between two halves?

# %%
show(
    wiring_figure(
        {
            "NVSwitch": Topology("switch", (8,)),
            "MI300X": Topology("full mesh", (8,)),
            "DGX-1": Topology("hybrid cube mesh", (8,)),
            "TPU, 2D": Topology("torus", (4, 4)),
            "fat tree": Topology("fat tree", (2, 2, 4), oversubscription=(1, 4)),
            "rail-optimised": Topology("rails", (2, 2, 4)),
        }
    )
)

# %% [markdown]
# In the fat tree above, racks of 4 hang on a switch each, two racks on a pod's switch, and what leads up from a pod is
# four times thinner than all below it: it is *oversubscribed*, 1 to 4. On rails, the first devices of all nodes share a
# leaf switch, the second ones another, and so on: a message to another place in another node first changes rails inside
# its own node.
#
# A TPU has no switch at all, and its lanes lead to neighbours. **Predict:** in a pod of 8960 TPU v5p, over how many wires
# goes the longest way? And what can all the chips of one half send to the other half at once, as a share of what they can
# send in all?

# %%
for name in ("h100", "mi300x", "dgx-1", "tpu-v5e-pod", "tpu-v5p-pod", "gb200-nvl72", "cloudmatrix-384"):
    node = cluster(name).node
    halves = node.shape.bisection_lanes * node.lane_bytes_per_s
    share = halves / (node.devices_per_node // 2 * node.scale_up.bandwidth_bytes_per_s)
    print(
        f"{name:15} {node.shape!s:18} {node.shape.diameter:3} wires at most;"
        f" of a half's {rate_text(node.scale_up.bandwidth_bytes_per_s * (node.devices_per_node // 2), 'B/s'):>9}"
        f" a share of {share:.2f} reaches the other half"
    )

# %% [markdown]
# A torus is cheap: it needs no switches, and grows for ever. It is fast if everybody talks to neighbours. But the more
# chips, the less of their bandwidth crosses the middle.
#
# ## 6. Collectives meet wires
#
# ### Ring or tree
#
# An all-reduce can go round a ring: every rank sends its chunks on, `2 (n - 1)` times. Here are all chunk steps of a small
# one.
#
# **Predict:** 4 ranks, 400 bytes. How many bytes does each rank send in all?

# %%
four = steps("all_reduce", 400, range(4), cluster("h100-4"), "ring")
for number in range(six := max(step.step for step in four) + 1):
    sent = [f"{s.src}→{s.dst} chunk {s.chunk}{' +' if s.adds else ''}" for s in sorted(four) if s.step == number]
    print(f"step {number}:", ",  ".join(sent))
print("rank 0 sends", sum(step.bytes for step in four if step.src == 0), "bytes in", six, "steps")

# %% [markdown]
# In the first half chunks are added up (+), in the second the sums go round. No way of summing sends less. But it takes
# `2 (n - 1)` steps, each with a latency of its own.
#
# **Predict:** 1024 H100s in 128 nodes. For which messages is a ring bad: small ones or large ones? And by how much?

# %%
thousand = cluster("h100", nodes=128)
show(algorithms_figure("all_reduce", place_evenly(1024, 8, thousand), thousand))

# %% [markdown]
# The steps of a tree grow with the logarithm of the nodes only. Nobody must choose by hand: the library (here as NCCL does
# it) takes the fastest of what it has, by the size of the message, and so does emu: the pale line. (Halving and doubling
# would be faster for small messages, but NCCL does not have it.) What you can do is to send few large messages in place
# of many small ones.

# %%
for size in (1e3, 1e5, 1e7, 1e9):
    inside = choose("all_reduce", size, place_evenly(8, 8, thousand), thousand)
    across = choose("all_reduce", size, place_evenly(1024, 8, thousand), thousand)
    print(
        f"{bytes_text(size):>7}: in one node by {inside.algorithm} ({inside.protocol}), {time_text(inside.seconds)};"
        f" in 128 nodes by {across.algorithm} ({across.protocol}), {time_text(across.seconds)}"
    )

# %% [markdown]
# ### Torus or switch
#
# Sums of gradients (all-reduce) can go round rings, and a torus is made of rings. In a mixture of experts every rank
# sends something to every other (all-to-all), and that must cross the middle.
#
# **Predict:** 64 devices, 256 MB each. For which of the two collectives is a torus worse off, compared to a switch of the
# same bandwidth a device?

# %%
MESSAGE = 256e6


def from_text(text):
    """A cluster from the text of a TOML file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(text)
        return Cluster.from_toml(path)


wired = {
    "switch of 64": 'kind = "switch"\nsizes = [64]',
    "torus 4 x 4 x 4": 'kind = "torus"\nsizes = [4, 4, 4]',
    "torus 8 x 8": 'kind = "torus"\nsizes = [8, 8]',
    "ring of 64": 'kind = "torus"\nsizes = [64]',
}
for name, shape in wired.items():
    mine = from_text(f'chip = "h100"\n[node]\ndevices_per_node = 64\n[node.shape]\n{shape}\n')
    all_64 = place_evenly(64, 64, mine)
    times = [moving_s(kind, MESSAGE, all_64, mine) for kind in ("all_reduce", "all_to_all")]
    print(f"{name:15} all-reduce {time_text(times[0]):>8}, all-to-all {time_text(times[1]):>8}")

# %% [markdown]
# The switch even sums by itself, and still the tori lose much less of the sum than of the exchange, and the more so the
# fewer axes they have. That is why TPUs suit dense models and, other things equal, mixtures of experts like switches.
# (These four do not exist: each is an H100 with other wires, by a file of six lines. More of that below.)
#
# ### A thin top
#
# Both networks below join 1024 H100s in pods of 256. One has a full spine above its rails; above the pods of the other
# everything is four times thinner.
#
# **Predict:** which of all-reduce and all-to-all suffers from the thin top, and how much?

# %%
for name in ("h100-rails-1024", "h100-oversubscribed-1024"):
    net = cluster(name)
    for devices in (256, 1024):
        there = place_evenly(devices, 8, net)
        times = [moving_s(kind, MESSAGE, there, net) for kind in ("all_reduce", "all_to_all")]
        print(f"{name:25} {devices:4} devices: all-reduce {time_text(times[0])}, all-to-all {time_text(times[1])}")

# %% [markdown]
# A sum passes the top once for each rail, however many devices there are below. In an all-to-all most of what everybody
# sends must go over the top. So experts are spread within a pod, and only data parallelism reaches across: this is what
# Llama 3 did, whose pods stand one to seven.
#
# ## 7. The data centre as one computer
#
# `cluster.summary()` adds it all up. Two answers to the same question:
#
# **Predict:** a rack of NVIDIA's has 72 devices. Huawei's CloudMatrix has 384, each with less than a third of the FLOP/s.
# Which computes more, and by how much more power?

# %%
names = ("gb200-nvl72", "cloudmatrix-384", "tpu-v5p-pod", "llama3-24576")
summaries = [cluster(name).summary() for name in names]
summaries_table(*summaries, title="Four computers")

# %%
for s in summaries:
    dtype_flops = s.peak_flops["bfloat16"]
    watts = f"{rate_text(s.power_w, 'W')}" if s.power_w else "power not known"
    print(
        f"{s.name:15} {s.n_devices:6,} devices, {rate_text(dtype_flops, 'FLOP/s')}, {watts}, racks: {s.racks or 'not known'}"
    )
nvidia, huawei = summaries[:2]
print(
    f"CloudMatrix to NVL72: {huawei.peak_flops['bfloat16'] / nvidia.peak_flops['bfloat16']:.1f} times the FLOP/s,"
    f" {huawei.power_w / nvidia.power_w:.1f} times the power"
)

# %% [markdown]
# Slower chips, more of them, more light in fibres, more power: it can be done by brute force, if power is there.
#
# Every number has its source, and where none was found it says so:

# %%
for field in ("chip.peak_flops.bfloat16", "node.power_w", "scale_out.bandwidth_bytes_per_s"):
    print(f"{field}: {cluster('cloudmatrix-384').sources[field][:96]}")

# %% [markdown]
# ## 8. Overlap is not free
#
# Communication can run beside computation, on a stream of its own. But whoever moves data takes cores and memory
# bandwidth from whoever computes.
#
# **Predict:** eight H100s multiply for some milliseconds and sum a gradient. In turn that takes the sum of both times.
# Side by side: the longer of the two?


# %%
def step(rank, beside):
    x = torch.zeros(4096, 4096, dtype=torch.bfloat16, device=rank.device)
    gradient = torch.zeros(2**28, dtype=torch.bfloat16, device=rank.device)
    rank.mark("start")
    work = rank.group("dp").all_reduce(gradient, async_op=True) if beside else None
    for _ in range(20):
        x = x @ x
    if work is None:
        rank.group("dp").all_reduce(gradient)
    else:
        work.wait()
    rank.mark("end")


took = {}
for beside in (False, True):
    run = emu.launch(step, emu.Mesh(dp=8), backend="shape", launch_mode="graph", args=(beside,)).window("start", "end")
    spans = run.timeline().spans[0]
    kernels = sum(span.end_s - span.start_s for span in spans if span.kind == "kernel")
    took[beside] = (run.metrics.step_time_s, kernels)
    print(
        f"{'side by side' if beside else 'in turn':12}: {time_text(took[beside][0])}, products alone {time_text(kernels)}"
    )
print(f"a product beside a collective takes {took[True][1] / took[False][1]:.2f} times as long")

# %% [markdown]
# It is a gain, but less than a picture with two streams promises.
#
# ## 9. How far off is all this?
#
# A price is worth what its error is. emu holds its prices against published training runs: models, layouts and step times
# that people wrote down. Constants were fitted to a fifth of the layouts; these are the others.
#
# **Predict:** the median error?

# %%
report = examined(packaged_rows(), list(PACKAGED), held_out=True)
figures = report.as_dict()
print(f"{figures['n']} runs: median error {figures['median_ape']:.3f}, mean {figures['mape']:.3f} of the step time")
print(f"of two runs the faster one is named in {figures['rank_accuracy']:.2f} of the pairs")
print(f"collectives of a megabyte and more: median error {figures['collectives']['large']['median_ape']:.3f}")
show(validated_figure([Point(pair.source, pair.measured, pair.predicted) for pair in report.times]))

# %% [markdown]
# The line is what was measured; the band is the error that emu promises in the median. Points far away are worth a look:
# often the source says too little of what it ran. `emu validate` prints the worst ones, and errors by source and by kind of
# parallelism. (An honest reader asks: did nobody look at these runs while the formulas were written? They did, though no
# number was fitted to them. On runs that nobody has seen expect somewhat more.)
#
# ## 10. Your own cluster
#
# A file of TOML describes a cluster: a preset and what differs from it, or everything. What cannot be is refused, with
# line and reason.
#
# **Predict:** what is wrong with this one?

# %%
WRONG = """
chip = "h100"
nodes = 4

[node]
devices_per_node = 8
shape = { kind = "torus", sizes = [2, 3] }

[scale_out]
bandwidth_bytes_per_s = 400
"""


def try_out(text):
    try:
        return from_text(text)
    except HardwareError as error:
        print(f"line {error.line}: {error.message} {error.hint}")
        return None


try_out(WRONG)
try_out(WRONG.replace("= 400", "= 50e9"))

# %% [markdown]
# **Exercise.** Change `mine` until `judge` is content: a cluster of at least 1e18 FLOP/s in bfloat16, from any chip that
# emu knows, that draws at most 1 megawatt (where only the devices' power is known, `judge` takes twice that), and sums a
# message of 1 GB over all devices in at most 5 milliseconds. Few chips do it.

# %%
mine = """
chip = "a100"
nodes = 400
"""


def judge(text, least_flops=1e18, most_w=1e6, most_s=5e-3):
    """Says what is wrong with a cluster, or what it reaches."""
    built = try_out(text)
    if built is None:
        return "it cannot be"
    s, per_node = built.summary(), built.node.devices_per_node
    flops, watts = s.peak_flops.get("bfloat16", 0.0), s.power_w or (s.device_power_w and 2 * s.device_power_w)
    seconds = moving_s("all_reduce", 1e9, place_evenly(s.n_devices, per_node, built), built)
    wrong = [f"computes {flops:.2e} FLOP/s, asked are {least_flops:.0e}"] * (flops < least_flops)
    wrong += ["its power is not known"] * (watts is None)
    wrong += [f"draws {watts or 0:.2e} W, at most {most_w:.0e} are there"] * ((watts or 0) > most_w)
    wrong += [f"takes {seconds:.4f} s for the sum, asked are {most_s}"] * (seconds > most_s)
    return "; ".join(wrong) or f"well done: {flops:.2e} FLOP/s, {watts:.2e} W, {seconds:.4f} s for the sum"


print(judge(mine))

# %% [markdown]
# ## What to remember
#
# * A device's peak grew by fewer bits and by matrix units. Memory did not keep up: kernels need ever more FLOP a byte.
# * Small kernels wait for the host, or for full waves; only large ones see the roof.
# * Each rung of the ladder is slower by a factor: inside a node, between nodes, between pods. Cut accordingly.
# * Rings move least, trees have fewest steps, switches that sum halve the traffic; the library chooses by size.
# * Neighbours are all a torus needs for sums; an all-to-all needs the middle, and suffers from a thin top.
# * Slower chips, more of them, more power: the sum may be the larger one.
# * Prices have errors, and these are known.
#
# ## Try it yourself
#
# 1. `print(cluster("h100-16384").summary())`: what does the whole cluster hold, level by level?
# 2. `emu.hardware.chip_names()` says which chips there are. Which has the highest ridge in bfloat16, which the lowest?
# 3. In section 6 take 64 KB in place of 256 MB. Does the torus still lose the all-to-all?
# 4. In section 3 price the products on a `v100`: where do its curves end?
