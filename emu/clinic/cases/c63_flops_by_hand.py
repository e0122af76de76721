"""One block with grouped heads, recomputed in backward: how much work of the model is a training step?"""

import torch

import emu
from emu.clinic.examined import Case, compared
from emu.models import Config, Decoder
from emu.parallel.checkpointing import checkpointed

S, D, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 6, 8, 4, 2, 2, 16, 5
HEAD = 2 * S * D * VOCAB  # the last map, to logits


def train(rank):
    """A step of one sequence; the block keeps its input, and runs forward again in backward."""
    model = Decoder(Config(1, D, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, S), seed=0)
    checkpointed(model, "full", rank)
    tokens = torch.arange(S)[None] % VOCAB
    model.loss_sum(tokens, tokens).backward()


def broken(rank):
    train(rank)
    maps = 2 * S * (2 * D * HEADS * HEAD_DIM + 2 * D * KV_HEADS * HEAD_DIM + 2 * D * FFN)
    attention = 4 * HEADS * HEAD_DIM * S * S  # the fault: a causal query sees S (S + 1) / 2 keys, not S S
    return 4 * (maps + attention) + 3 * HEAD  # the fault: 4 counts the recomputation, which is no work of the model


def mended(rank):
    train(rank)
    maps = 2 * S * (2 * D * HEADS * HEAD_DIM + 2 * D * KV_HEADS * HEAD_DIM + 2 * D * FFN)
    attention = 4 * HEADS * HEAD_DIM * S * (S + 1) // 2
    return 3 * (maps + attention) + 3 * HEAD


def flops(run):
    """What MFU counts: its rate times the time of the step."""
    metrics = run.metrics
    done = metrics.tflops_per_device * 1e12 * metrics.step_time_s
    return compared("work of the model in a step", run.results[0], done, "FLOP", "run.metrics")


CASE = Case(
    number=63,
    kind="model FLOPs",
    title="MFU of full attention, with recomputation",
    report="Causal attention was counted as full attention, which gave an MFU above 100 %; others counted grouped heads "
    "wrongly, or took recomputation for work of the model.",
    url="https://github.com/NVIDIA/Megatron-LM/issues/831",
    mesh=emu.Mesh(dp=1),
    broken=broken,
    mended=mended,
    question=flops,
    cure="State the convention. emu's: pairs that are attended to; three times forward for a step; recomputation in HFU "
    "alone. Fewer key and value heads make their projections cheaper, never the scores.",
)
