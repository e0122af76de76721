"""Models whose sequences are cut over ranks, trained by plans: losses, gradients and a step as on one device, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.models import Config, Decoder
from emu.parallel.context import KINDS
from emu.parallel.context.sequences import Sequences
from emu.spmd import EmuError, PlanError


@st.composite
def plans(draw):
    """(mesh, config, options of the plan): 2 to 8 ranks, with cp and at most two axes more, and sequences of any length."""
    cp = draw(st.integers(2, 4))
    more = draw(
        st.sampled_from([{}, {"dp": 2}, {"tp": 2}, {"pp": 2}, *([{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}] * (cp == 2))])
    )
    axes = {"pp": more.get("pp", 1), "dp": more.get("dp", 1), "cp": cp, "tp": more.get("tp", 1)}
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    seq = draw(st.integers(1, 17))
    experts = draw(st.sampled_from([0, 0, 4]))
    config = Config(
        layers=2,
        width=16,
        heads=8,
        kv_heads=kv_heads,
        ffn=8,
        vocab=draw(st.sampled_from([7, 11])),
        seq=17,
        positions=draw(st.sampled_from(["rotary", "learned"])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        tied=draw(st.booleans()),
        document_end=draw(st.sampled_from([None, 0])),
        label_smoothing=draw(st.sampled_from([0.0, 0.1])),
        experts=experts,
        balance=0.1 if experts else 0.0,
        balance_over=draw(st.sampled_from(["sequence", "batch"])) if not axes["pp"] > 1 else "sequence",
    )
    options = {
        "context": draw(st.sampled_from(KINDS)),
        "zero": draw(st.sampled_from([0, 0, 1, 2, 3])),
        "sp": axes["tp"] > 1 and draw(st.booleans()),
        "ep": cp if config.experts and draw(st.booleans()) and config.experts % cp == 0 else 1,
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])) if axes["pp"] > 1 else "1f1b",
        "checkpoint": draw(st.sampled_from(["none", "full", "selective"])),
        "offload": draw(st.booleans()),
        "microbatches": draw(st.integers(1, 2)) if config.balance_over == "sequence" else 1,
        "global_batch": draw(st.integers(1, 3)),
        "seq": seq,
        "seed": draw(st.integers(0, 99)),
    }
    return {axis: n for axis, n in axes.items() if n > 1}, config, options


def verified(axes, config, options, mutants="none", tier="exact"):
    plan = emu.Plan(",".join(f"{axis}={n}" for axis, n in axes.items()), **options)
    return emu.verify(lambda: Decoder(config), plan, tier=tier, mutants=mutants)


@given(plans())
@settings(max_examples=12)
def test_any_plan_that_cuts_sequences_computes_what_one_device_computes(plan):
    verdict = verified(*plan)
    assert verdict.equivalent, f"{plan}: {verdict}"


@pytest.mark.exhaustive
@given(plans())
@settings(max_examples=400)
def test_many_plans_that_cut_sequences_compute_what_one_device_computes(plan):
    verdict = verified(*plan)
    assert verdict.equivalent, f"{plan}: {verdict}"


SMALL = Config(1, 8, 4, 2, ffn=8, vocab=11, seq=9, positions="rotary", norm="rms")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", ["none", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_what_travels_to_the_host_and_back_stays_exact(kind, checkpoint):
    """Marks of the exact tier travel with what attention kept: without them it would be rounded on its way back in."""
    options = {"context": kind, "offload": True, "checkpoint": checkpoint, "global_batch": 2, "seq": 7}
    assert verified({"cp": 2}, SMALL, options).equivalent


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]])
def test_so_it_does_where_layers_are_computed_again(kind):
    test_what_travels_to_the_host_and_back_stays_exact(kind, "full")


@pytest.mark.parametrize(
    ("kind", "dp"),
    [
        *((kind, 1) for kind in KINDS),
        (KINDS[0], 2),  # what sums over both is no matter of the kind
        *(pytest.param(kind, 2, marks=pytest.mark.exhaustive) for kind in KINDS[1:]),
    ],
)
def test_every_wrong_collective_is_noticed(kind, dp):
    verdict = verified({"dp": dp, "cp": 2}, SMALL, {"context": kind, "global_batch": 3, "seq": 7}, mutants="all")
    assert verdict.equivalent and verdict.mutants
    assert verdict.mutants_killed == verdict.mutants - verdict.mutants_equivalent


class Forgets(Decoder):
    """A model that does not tell its layers where tokens stand, or which attention to use."""

    forgets = "positions"

    def loss_sum(self, tokens, labels, positions=None, mask=None):
        kept = {"positions": positions, "mask": mask} | {self.forgets: None}
        return super().loss_sum(tokens, labels, **kept)


def test_positions_that_start_anew_on_every_rank_are_noticed():
    plan = emu.Plan("cp=2", global_batch=2, seq=8)
    verdict = emu.verify(lambda: Forgets(SMALL), plan, tier="float64", mutants="none")
    assert not verdict.equivalent


def test_a_model_that_attends_to_its_own_rank_s_tokens_alone_is_refused():
    class Alone(Forgets):
        forgets = "mask"

    with pytest.raises(EmuError, match=r"never called mask\.attend"):
        emu.verify(lambda: Alone(SMALL), emu.Plan("cp=2", global_batch=2, seq=8), mutants="none")


@pytest.mark.parametrize("mesh", ["pp=2,cp=2", "pp=2,dp=2,cp=2"])
def test_stages_that_attend_to_their_own_tokens_alone_are_refused(mesh):
    class Alone(Forgets):
        forgets = "mask"

    config = Config(2, 8, 4, 2, ffn=8, vocab=11, seq=9, positions="rotary", norm="rms")
    with pytest.raises(EmuError, match=r"never called mask\.attend"):
        emu.verify(lambda: Alone(config), emu.Plan(mesh, global_batch=2, seq=8, microbatches=2), mutants="none")


class Half(torch.nn.Module):
    """A model that attends across ranks, and then to this rank's tokens alone."""

    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(4, 4)

    def loss_sum(self, x, y, positions=None, mask=None):
        q = self.q(x)[:, None]
        q = mask.attend(q, q, q, None)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()


class Plain(torch.nn.Module):
    def loss_sum(self, x, y):
        return x.sum()


def loss(model, *axes, seq=8, **options):
    """A program that computes a loss."""
    x = torch.arange(2 * seq).view(2, seq) % 5

    def program(rank):
        dist = emu.DataParallel(model(), rank, *axes, **options)
        return dist.backward(emu.Batch(x, x, tokens=2 * seq))

    return program


MOE = {"experts": 4, "ffn": 8, "vocab": 11, "seq": 9}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda rank: Sequences(Plain(), rank, "zigzag"), "takes no 'positions'"),
        (lambda rank: Sequences(Decoder(SMALL), rank, "zig"), "context='zig'"),
        (
            lambda rank: Sequences(Decoder(Config(1, 8, 2, fused=False, attention_dropout=0.1)), rank, "ring"),
            "drops attention weights",
        ),
        (
            lambda rank: emu.parallel.DataParallel(Decoder(SMALL), rank, "cp").loss_sum(torch.zeros(3), torch.zeros(3)),
            "no sequences to cut over 'cp'",
        ),
        (
            lambda rank: emu.DataParallel(Half(), rank, "cp").backward(
                emu.Batch(torch.ones(2, 8, 4), torch.ones(2, 8, 4), 16)
            ),
            "calls scaled_dot_product_attention where it should call mask.attend",
        ),
        (loss(lambda: Decoder(Config(1, 8, 2, balance=0.1, **MOE)), "cp"), "balances experts over this rank's tokens"),
        (loss(lambda: Decoder(Config(1, 8, 2, capacity=1.0, **MOE)), "cp"), "parts out of order"),
        (loss(lambda: Decoder(SMALL), "cp", seq=10), "sequences of 10 tokens are longer than this model's 9"),
        (loss(lambda: Decoder(SMALL), context="zig"), "context='zig'"),
    ],
)
def test_what_cannot_be_cut_is_said(make, said):
    with pytest.raises(EmuError, match=said):
        emu.launch(make, emu.Mesh(cp=2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": "cp=2", "context": "round"}, "no context='round'"),
        ({"mesh": "dp=2", "context": "ring"}, "has no cp"),
        ({"mesh": "cp=2", "capacity": 1.0}, "out of order"),
    ],
)
def test_a_plan_says_what_cannot_be(options, said):
    with pytest.raises(PlanError, match=said) as error:
        emu.Plan(**options)
    assert error.value.hint


def test_ranks_that_exchange_heads_are_no_more_than_the_heads():
    with pytest.raises(PlanError, match=r"4.*8|8.*4"):
        verified({"cp": 8}, SMALL, {"context": "ulysses", "global_batch": 1, "seq": 8})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attn_implementation": "eager"}, "attention is 'eager'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depend on the length"),
    ],
)
def test_a_stock_llama_that_looks_at_its_own_tokens_alone_is_refused(fields, said):
    pytest.importorskip("transformers")
    from emu.models.huggingface import llama

    tiny = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    with pytest.raises(PlanError, match=said):
        emu.verify(lambda: llama(**tiny, **fields), emu.Plan("cp=2", global_batch=1, seq=8), mutants="none")


def test_packed_documents_need_tokens_with_values():
    program = loss(lambda: Decoder(Config(1, 8, 2, vocab=11, seq=9, document_end=0)), "cp")
    assert emu.launch(program, emu.Mesh(cp=2)).results
    with pytest.raises(EmuError, match="documents without values"):
        emu.launch(program, emu.Mesh(cp=2), backend="shape")


def test_noise_is_not_measured_on_parts_of_sequences():
    def program(rank):
        model = Decoder(SMALL)
        dist = emu.DataParallel(model, rank, "cp")
        return emu.parallel.GradientNoise(model, dist.group)

    with pytest.raises(EmuError, match="no small batches"):
        emu.launch(program, emu.Mesh(cp=2))


def test_a_stock_llama_s_sequences_are_cut():
    transformers = pytest.importorskip("transformers")
    from emu.models.huggingface import llama

    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=11,
        max_position_embeddings=16,
        eos_token_id=2,
    )
    for mesh, more in (
        ("dp=2,cp=2", {"zero": 3}),
        ("cp=2,tp=2", {"sp": True, "checkpoint": "full"}),
        ("pp=2,cp=2", {"microbatches": 2}),
    ):
        plan = emu.Plan(mesh, global_batch=3, seq=13, **more)
        assert emu.verify(lambda: llama(config), plan, mutants="none").equivalent, mesh


def test_attention_that_is_spelled_out_agrees_to_rounding():
    """Operator by operator, the exact tier rounds scores, which attention in blocks never shows: there it cannot agree."""
    config = Config(1, 8, 4, 2, ffn=8, vocab=11, seq=9, fused=False)
    verdict = verified({"cp": 3}, config, {"global_batch": 2, "seq": 8}, tier="float64")
    assert verdict.equivalent
