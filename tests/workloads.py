"""Workloads that tests of closed forms share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from emu.hardware import Cluster, cluster, smallest_cluster
from emu.planner.closed import Moe, Workload


@cache
def on(devices: int, chip: str = "h100") -> Cluster:
    return smallest_cluster(devices, chip)


def workload(chip: str = "h100", **changes) -> Workload:
    """GPT of 1.3B parameters on one device; with whatever is said otherwise, on as many nodes as it needs."""
    plain = {
        "layers": 24,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 128,
        "ffn": 8192,
        "gated": False,
        "vocab": 51200,
        "seq": 2048,
        "global_batch": 64,
        "micro_batch": 1,
        "stack": "megatron-2023",
    }
    devices = 1
    for axis in ("tp", "pp", "cp", "dp"):
        devices *= changes.get(axis, 1)
    return Workload(**{**plain, "cluster": on(devices, chip), **changes})


def llama(**changes) -> Workload:
    """Llama 3 8B by NeMo."""
    dims = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": True, "vocab": 128256}
    return workload(**{**dims, "seq": 8192, "stack": "nemo-2024", **changes})


def mixtral(**changes) -> Workload:
    """Mixtral 8x22B by NeMo."""
    dims = {"layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn": 0, "gated": True, "vocab": 32768}
    return workload(
        **{**dims, "seq": 4096, "stack": "nemo-2024", "moe": Moe(8, 2, 16384), "global_batch": 256, **changes}
    )


def ideal(w: Workload) -> Workload:
    """The same on links without latency, and so fast that nothing on them takes time."""
    fast = {"bandwidth_bytes_per_s": 1e18, "latency_s": 0.0, "base_s": 0.0, "tree_latency_s": 0.0, "protocols": ()}
    fast |= {"launch_s": 0.0, "fill_s": 0.0} if hasattr(w.cluster.scale_out, "launch_s") else {}
    node = replace(w.cluster.node, scale_up=replace(w.cluster.node.scale_up, **fast))
    return replace(w, cluster=replace(w.cluster, node=node, scale_out=replace(w.cluster.scale_out, **fast)))


SCHEDULES = ["1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"]
CHUNKS = {"zb-h2": [1], **{name: [1, 1, 2, 5] for name in ("1f1b", "interleaved", "gpipe", "zb-h1")}}  # else one or two


@st.composite
def odd_workloads(draw) -> Workload:
    """Whatever a row of a table may say: sizes that divide nothing, every stack, many chips."""
    from emu.planner.closed import stacks

    tp, pp, cp, dp = (
        draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3, 8, 16), (1, 2, 3, 7), (1, 2, 5), (1, 2, 6, 24))
    )
    schedule = draw(st.sampled_from(SCHEDULES))
    layers = draw(st.integers(pp, 40))
    moe = draw(st.none() | st.builds(Moe, st.just(60), st.integers(1, 8), st.integers(1, 3000), st.integers(0, 2)))
    heads = draw(st.integers(1, 40))
    name = draw(st.sampled_from([n for n in stacks() if n != "emu"]))
    chip = draw(st.sampled_from(["a100", "h100", "v100", "b200", "mi300x", "tpu-v5e", "gb200", "trainium2", "k40"]))
    return workload(
        chip=chip,
        layers=layers,
        hidden=draw(st.integers(1, 9000)),
        heads=heads,
        kv_heads=draw(st.integers(1, heads)),
        head_dim=draw(st.sampled_from([1, 64, 80, 128, 256])),
        ffn=draw(st.integers(1, 30000)),
        gated=draw(st.booleans()),
        vocab=draw(st.integers(1, 300_000)),
        seq=draw(st.sampled_from([1, 77, 2048, 131072])),
        global_batch=draw(st.integers(1, 3000)),
        micro_batch=draw(st.none() | st.integers(1, 9)),
        stack=name,
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        sp=draw(st.booleans()),
        vp=draw(st.sampled_from(CHUNKS.get(schedule, [1, 2]))),
        moe=moe,
        ep=draw(st.sampled_from([1, 2, 4])) if moe and tp * cp * dp >= 4 else 1,
        etp=1,
        zero=draw(st.integers(0, 3)),
        fsdp=draw(st.booleans()),
        hsdp=draw(st.none() | st.integers(1, 32)),
        schedule=schedule,
        recompute=draw(st.sampled_from(["none", "full", "selective", "every-other-layer", "per-op"])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp8"])),
        adapters=draw(st.booleans()),
    )


def h100_8() -> Cluster:
    return cluster("h100-8")
