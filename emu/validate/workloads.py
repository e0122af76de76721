"""From a row of published runs to the workload that is priced, with what was assumed on the way.

A row states what its source prints. What it leaves out is taken from data/assumed.toml, and every such guess is noted.
Where a guess would only make a number up (no dimensions, no batch, a chip that nobody knows), there is no workload.
"""

from __future__ import annotations

from typing import Any

from emu.planner.closed import Moe, Workload

from .contradictions import refuse_batch, refuse_cut, refuse_size
from .fitting import fitting
from .hardware import machine
from .rows import Experts, RunRow
from .software import stack_of
from .words import Unclear, assumed, meaning, required

MOST_STAGES = 256  # of a pipeline: some schedules are walked step by step, and no published run has half as many


class Notes:
    """Gathers what is assumed about one row."""

    def __init__(self, row: RunRow):
        self._row = row
        self.told: list[str] = []
        self.usual: set[str] = set()  # fields that have the value that most runs have, and no source says so

    def take(self, field: str):
        """The value that assumed.toml gives for a field that must have one."""
        found = assumed(field, self._row.source.title, self._row.model.name)
        assert found is not None
        self.say(f"{field}={found.value}: {found.why}")
        if found.usual:
            self.usual.add(field)
        return found.value

    def say(self, text: str) -> None:
        self.told.append(text)


def workload_of(row: RunRow, notes: Notes) -> Workload:
    """What a row runs.

    Args:
        row: as it was read.
        notes: gets what is assumed.

    Raises:
        Unclear: the row does not say enough, or contradicts itself. EmuError, HardwareError: it says what cannot be.
    """
    dimensions = _dimensions(row, notes)
    tp, pp, cp, dp, n = _devices(row, notes)
    seq = _stated(row.seq, "the sequence length")
    sequences = _batch(row, dp, seq)
    refuse_batch(row, dp, sequences)
    refuse_cut(row, pp, dp)
    on = machine(row.hardware, n, row.source.title)
    for told in on.assumed:
        notes.say(told)
    stack, told = stack_of(row, on.cluster.chip)
    if told:
        notes.say(told)
    schedule, chunks = _schedule(row, pp, notes)
    fsdp = bool(row.fsdp)
    zero = row.zero_stage if row.zero_stage is not None else 3 if fsdp else notes.take("zero")
    if tp > 1 and row.sp is None:
        notes.say("sp=False: not stated")
    notes_and_section = f"{row.source.section or ''} {row.notes or ''}"
    workload = Workload(
        **dimensions,
        seq=seq,
        global_batch=sequences,
        cluster=on.cluster,
        stack=stack,
        micro_batch=_micro_batch(row, tp, notes),
        moe=_moe(row.model.moe, meaning("dropped_tokens", row.notes) != "yes"),
        tp=tp,
        sp=bool(row.sp) and tp > 1,
        pp=pp,
        vp=chunks,
        dp=dp,
        cp=cp,
        ep=row.ep or 1,
        etp=row.etp,
        zero=zero,
        fsdp=fsdp,
        hsdp=row.hsdp_group,
        schedule=schedule,
        optimizer_sync=meaning("optimizer_sync", row.schedule) == "yes",
        recompute=_word(row.recompute, "recompute", notes),
        precision=_word(row.precision, "precision", notes),
        adapters=meaning("adapters", notes_and_section) == "yes",
        power_w=on.power_w,
        n=n,
    )
    refuse_size(row, workload)
    if row.measured.oom:
        return workload
    workload, told = fitting(workload, zero="zero" in notes.usual, recompute="recompute" in notes.usual)
    if told:
        notes.say(told)
    return workload


def _dimensions(row: RunRow, notes: Notes) -> dict:
    model = row.model
    layers, hidden = (
        _stated(model.layers, "the model's number of layers"),
        _stated(model.hidden, "the model's hidden size"),
    )
    heads = _stated(model.heads, "the model's number of heads")
    gated = _word(model.mlp, "mlp", notes) == "gated"
    head_dim = model.head_dim
    if head_dim is None:
        known = assumed("head_dim", row.source.title, model.name)
        if not known and hidden % heads:
            raise Unclear(f"{heads} heads do not divide hidden {hidden}, and head_dim is not stated")
        head_dim = known.value if known else hidden // heads
        if known and known.value * heads != hidden:
            notes.say(f"head_dim={known.value}: {known.why}")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": model.kv_heads or heads,
        "head_dim": head_dim,
        "ffn": _ffn(row, hidden, gated, notes),
        "gated": gated,
        "vocab": model.vocab or notes.take("vocab"),
    }


def _ffn(row: RunRow, hidden: int, gated: bool, notes: Notes) -> int:
    if row.model.ffn is not None:
        return row.model.ffn
    if row.model.moe is not None and not row.model.moe.first_dense:
        return 0
    if gated:
        raise Unclear("the width of the MLP is not stated, and a gated one has no usual width")
    notes.say(f"ffn={4 * hidden}: four times hidden, as GPT's")
    return 4 * hidden


def _moe(said: Experts | None, dropless: bool) -> Moe | None:
    if said is None:
        return None
    return Moe(
        experts=said.experts,
        topk=said.topk,
        ffn=said.moe_ffn,
        shared=said.shared or 0,
        first_dense=said.first_dense or 0,
        mla=(said.attn or "").upper() == "MLA",
        dropless=dropless,
    )


def _devices(row: RunRow, notes: Notes) -> tuple[int, int, int, int, int]:
    """tp, pp, cp, dp and their product. What is not stated is 1, and dp is what is left of n_gpus."""
    tp, pp, cp = (_or_one(row, name, notes) for name in ("tp", "pp", "cp"))
    if pp > MOST_STAGES:
        raise Unclear(f"{pp} pipeline stages are more than emu prices, {MOST_STAGES}")
    n, cut = row.n_gpus, tp * pp * cp
    if n is None:
        dp = _stated(row.dp, "the number of devices")
        return tp, pp, cp, dp, cut * dp
    dp = row.dp
    if dp is None:
        if n % cut:
            raise Unclear(f"tp {tp} * pp {pp} * cp {cp} do not divide {n} devices")
        dp = n // cut
    if cut * dp != n:
        raise Unclear(f"tp {tp} * pp {pp} * cp {cp} * dp {dp} are {cut * dp} devices, and n_gpus says {n}")
    return tp, pp, cp, dp, n


def _or_one(row: RunRow, name: str, notes: Notes) -> int:
    value = getattr(row, name)
    if value is None and name != "cp":
        notes.say(f"{name}=1: not stated")
    return value or 1


def _batch(row: RunRow, dp: int, seq: int) -> int:
    """Sequences of a step."""
    tokens, sequences = row.global_batch_tokens, row.global_batch_seqs
    if sequences is None and tokens is not None:
        if tokens % seq:
            raise Unclear(f"a batch of {tokens} tokens is no whole number of sequences of {seq}")
        return tokens // seq
    if sequences is None and row.n_microbatches is not None and row.micro_batch is not None:
        return row.n_microbatches * row.micro_batch * dp
    sequences = _stated(sequences, "the global batch")
    if tokens is not None and tokens != sequences * seq:
        raise Unclear(
            f"{sequences} sequences of {seq} are {sequences * seq} tokens, and global_batch_tokens says {tokens}"
        )
    return sequences


def _micro_batch(row: RunRow, tp: int, notes: Notes) -> int | None:
    if row.micro_batch is not None:
        of = assumed("micro_batch_of", row.source.title, row.model.name)
        return row.micro_batch * tp if of and of.value == "device" else row.micro_batch
    if assumed("micro_batch", row.source.title, row.model.name):
        return notes.take("micro_batch")
    notes.say("micro_batch: the fastest of those that can be, because such runs are tuned")
    return None


def _schedule(row: RunRow, pp: int, notes: Notes) -> tuple:
    """The pipeline's schedule and its chunks a stage."""
    if pp == 1:
        return "1f1b", 1
    named = required("schedule", row.schedule) if row.schedule else "1f1b"
    chunks = row.vp
    if named == "interleaved" and chunks is None:
        choices = assumed("chunks", row.source.title, row.model.name)
        assert choices is not None
        chunks = _dividing(row.model.layers or 1, pp, choices.value)
        notes.say(f"vp={chunks}: {choices.why}")
    if named in ("1f1b", "interleaved"):
        named = "interleaved" if (chunks or 1) > 1 else "1f1b"
    return named, chunks or 1


def _dividing(layers: int, pp: int, choices: list[int]) -> int:
    """The first number of chunks that gives all chunks as many layers; the outermost two may lack one, as Llama 3's do."""
    for all_layers in (layers, layers + 2):
        for chunks in choices:
            if all_layers % (pp * chunks) == 0:
                return chunks
    return 1


def _word(text: str | None, field: str, notes: Notes) -> Any:
    """What a text means, or what is taken where there is none: one of the names that Workload knows."""
    return required(field, text) if text else notes.take(field)


def _stated(value: int | None, what: str) -> int:
    if value is None:
        raise Unclear(f"{what} is not stated")
    return value
