"""A vocabulary cut over ranks: embedding and cross-entropy are torch's, in value and gradient, however it is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import emu
import emu.parallel.tensor.vocabulary as vocabulary
from emu.equivalence import check
from emu.parallel.tensor.tokens import TokenCut
from emu.parallel.tensor.vocabulary import become_vocab_cross_entropy, become_vocab_embedding, own_words
from emu.spmd import EmuError, Layout, Mesh, Shard, copy_to, gather_shards
from emu.trace.events import Collective, HostWait
from emu.virtual.launch import run_virtual

IGNORED = -100


class CrossEntropy(nn.Module):
    """The loss of a plain model: what becomes vocabulary-parallel, and what it is measured against."""

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = IGNORED):
        super().__init__()
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index

    def forward(self, logits, labels):
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            reduction="sum",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )


class Model(nn.Module):
    """Embedding, a map that is not linear, output, loss: the least that has gradients of all kinds."""

    def __init__(self, vocab: int, width: int, smoothing: float, ignored: int, padding: int | None):
        super().__init__()
        g = torch.Generator().manual_seed(vocab)
        self.embedding = nn.Embedding(vocab, width, padding_idx=padding)
        self.head = nn.Linear(width, vocab)
        self.loss = CrossEntropy(smoothing, ignored)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g))

    def forward(self, tokens, labels):
        return self.loss(self.head(torch.tanh(self.embedding(tokens))), labels)


def data(vocab, batch, seq, ignored):
    """Tokens and labels, about a third of which are ignored."""
    g = torch.Generator().manual_seed(batch * 31 + seq)
    tokens, labels = (torch.randint(0, vocab, (batch, seq), generator=g) for _ in "xy")
    labels[torch.rand(batch, seq, generator=g) < 0.3] = ignored
    return tokens, labels


def results(model, loss, layouts=None):
    # One result is never zero: a batch without labels has nothing but zeros, of which a check would think nothing.
    return {"loss": loss.detach(), "grads": emu.grads(model, layouts), "one": torch.ones(1)}


def one_device(rank, shape, sizes, *_):
    model = Model(*shape)
    loss = model(*data(shape[0], *sizes, shape[3]))
    loss.backward()
    return results(model, loss)


def parallel(rank, shape, sizes, sp=False, recompute=False):
    model, vocab = Model(*shape), shape[0]
    group = rank.group("tp")
    tokens = TokenCut(group) if sp else None
    start, stop = own_words(vocab, group)
    become_vocab_embedding(model.embedding, group, tokens)
    become_vocab_cross_entropy(model.loss, group, vocab)
    model.head.weight.data = model.head.weight.data[start:stop].clone()
    model.head.bias.data = model.head.bias.data[start:stop].clone()
    x, labels = data(vocab, *sizes, shape[3])
    h = torch.tanh(model.embedding(x))
    h = gather_shards(h, group, 1, tokens.sizes) if tokens is not None else copy_to(h, group)
    logits = model.head(h)
    loss = checkpoint(model.loss, logits, labels, use_reentrant=False) if recompute else model.loss(logits, labels)
    loss.backward()
    return results(model, loss, dict.fromkeys(dict(model.named_parameters()), Layout({"tp": Shard(0)})))


def verdict(program, shape, sizes, tp, *rest, mutants="none"):
    return check(program, Mesh(tp=tp), one_device, args=(shape, sizes, *rest), mutants=mutants)


shapes = st.tuples(
    st.integers(1, 13),  # vocabulary
    st.integers(1, 6),  # width
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([IGNORED, -1, 0]),  # 0 is a word
    st.sampled_from([None, 0]),
)
sizes = st.tuples(st.integers(0, 3), st.integers(1, 5))  # batch, seq
SHAPE = (7, 4, 0.1, IGNORED, None)


@settings(max_examples=80)
@given(shapes, sizes, st.integers(1, 7), st.booleans(), st.booleans())
@example((3, 4, 0.1, IGNORED, None), (2, 3), 5, False, False)  # ranks without words
@example((1, 2, 0.1, 0, None), (2, 3), 2, True, False)  # all labels ignored
@example((7, 2, 0.0, IGNORED, 0), (2, 2), 3, True, True)  # ranks without tokens
def test_any_vocabulary_on_any_number_of_ranks_has_one_devices_bits(shape, size, tp, sp, recompute):
    found = verdict(parallel, shape, size, tp, sp, recompute)
    assert found.equivalent, str(found)
    assert found.max_rel_err == 0 and found.n_parameters == 4  # three parameters, and the one


@pytest.mark.parametrize("sp", [False, True])
def test_every_broken_communication_is_noticed(sp):
    found = verdict(parallel, SHAPE, (3, 4), 3, sp, mutants="all")
    assert found and found.mutants_killed > 10, str(found)


def smooths_over_own_words(monkeypatch):
    right = vocabulary.VocabCrossEntropy.forward

    def forward(self, logits, labels):
        whole, self.vocab = self.vocab, logits.shape[-1]
        try:
            return right(self, logits, labels)
        finally:
            self.vocab = whole

    monkeypatch.setattr(vocabulary, "_refuse_outside", lambda *args: None)
    monkeypatch.setattr(vocabulary.VocabCrossEntropy, "forward", forward)


def takes_a_neighbours_words(monkeypatch):
    right = vocabulary._own
    monkeypatch.setattr(vocabulary, "_own", lambda labels, start, words: right(labels, start + 1, words))


def ignores_nothing(monkeypatch):
    monkeypatch.setattr(vocabulary, "_refuse_outside", lambda *args: None)
    right = vocabulary._CrossEntropy.forward
    monkeypatch.setattr(
        vocabulary._CrossEntropy, "forward", staticmethod(lambda ctx, *args: right(ctx, *args[:5], -7, args[6]))
    )


BROKEN = [smooths_over_own_words, takes_a_neighbours_words, ignores_nothing]


@pytest.mark.parametrize("break_", BROKEN)
def test_control_what_is_nearly_right_is_noticed(break_, monkeypatch):
    assert verdict(parallel, SHAPE, (3, 4), 3).equivalent
    break_(monkeypatch)
    assert not verdict(parallel, SHAPE, (3, 4), 3).equivalent


# ---------------------------------------------------------------------------------------------- the loss against torch's
def losses(rank, logits, labels, smoothing, cut):
    module = CrossEntropy(smoothing)
    x = logits.clone()
    if cut:
        become_vocab_cross_entropy(module, rank.group("tp"), logits.shape[-1])
        start, stop = module.words
        x = x[..., start:stop].clone()
    x.requires_grad_()
    loss = module(x, labels) * 3
    loss.backward()
    return loss.detach(), x.grad


def compare(logits, labels, smoothing, tp):
    """Largest relative differences to torch on one device, of loss and gradient."""
    args = (logits, labels, smoothing)
    ((right, gradient),) = run_virtual(losses, Mesh(tp=1), args=(*args, False), track=False).results
    many = run_virtual(losses, Mesh(tp=tp), args=(*args, True), track=False).results
    assert all(torch.equal(loss, many[0][0]) for loss, _ in many), "every rank has the same loss"
    loss, ours = many[0][0], torch.cat([g for _, g in many], -1)
    assert loss.dtype == right.dtype and ours.dtype == gradient.dtype and not loss.dim()
    scale = right.abs().clamp(min=1)
    return float((loss - right).abs() / scale), float((ours.double() - gradient.double()).abs().max()) if len(
        ours
    ) else 0.0


@given(
    vocab=st.integers(1, 40),
    tokens=st.integers(0, 6),
    tp=st.integers(1, 8),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    size=st.sampled_from([1e-3, 1.0, 1e2, 1e4]),
    offset=st.sampled_from([0.0, 1e3, -1e5]),
    seed=st.integers(0, 99),
)
def test_the_loss_and_its_gradient_are_torchs_in_float64(vocab, tokens, tp, smoothing, size, offset, seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab, generator=g, dtype=torch.float64) * size + offset
    labels = torch.randint(-1, vocab, (tokens,), generator=g)
    labels[labels < 0] = IGNORED
    loss, gradient = compare(logits, labels, smoothing, tp)
    assert loss < 1e-12 and gradient < 1e-12


def test_a_word_that_cannot_be_costs_what_torch_says():
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [2.0, 0.0, -torch.inf]], dtype=torch.float64)
    labels = torch.tensor([2, 0])
    assert max(compare(logits, labels, 0.0, 3)) < 1e-12
    (right, _), (ours, _) = (
        run_virtual(losses, Mesh(tp=tp), args=(logits, labels - torch.tensor([1, 0]), 0.0, tp > 1)).results[0]
        for tp in (1, 3)
    )
    assert right == ours == torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_narrow_logits_are_summed_in_float32_and_have_gradients_of_their_own_dtype(dtype, smoothing):
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 50, generator=g).to(dtype)
    error, gradient = compare(logits, torch.randint(0, 50, (64,), generator=g), smoothing, 4)
    assert error < 1e-6  # float32 has 24 bits; sums of 64 tokens and 50 words in another order
    assert gradient < 3 * torch.finfo(dtype).eps  # rounded once to the dtype, times the factor of 3


# ------------------------------------------------------------------------------------------- what it costs: the record
def costs(rank, dtype, smoothing, batch, vocab):
    module = CrossEntropy(smoothing)
    become_vocab_cross_entropy(module, rank.group("tp"), vocab)
    start, stop = module.words
    logits = torch.zeros(batch, stop - start, dtype=dtype, device=rank.device).requires_grad_() * 1.0
    labels = torch.zeros(batch, dtype=torch.int64, device=rank.device)
    rank.mark("before")
    loss = module(logits, labels)
    rank.mark("after")
    loss.backward()
    rank.mark("end")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["virtual", "shape"])
def test_the_loss_costs_two_reductions_of_a_few_numbers_a_token_and_keeps_nothing_else(dtype, smoothing, backend):
    batch, vocab, tp = 64, 1024, 4
    run = emu.launch(costs, Mesh(tp=tp), args=(dtype, smoothing, batch, vocab), backend=backend)
    said = [e for e in run.trace.window("before", "after")[1] if isinstance(e, Collective)]
    assert [(e.kind, e.name, e.bytes) for e in said] == [
        ("all_reduce", "loss max", 4 * batch),
        ("all_reduce", "loss sums", 4 * batch * (3 if smoothing else 2)),
    ]
    assert not [e for e in run.trace.window("after", "end")[1] if isinstance(e, Collective)]
    assert not [e for e in run.trace[1] if isinstance(e, HostWait)]

    def alive(memory):
        return sum(line[-1] for line in memory.series(1)[1].values())

    whole = batch * vocab // tp
    before, after = (run.memory.window(mark) for mark in ("before", "after"))
    start = sum(line[0] for line in before.series(1)[1].values())
    kept = sum(line[0] for line in after.series(1)[1].values()) - start
    assert kept <= 8 * 4 * batch < 0.2 * whole, "a few numbers a token stay, beside the logits that were there"
    forward = run.memory.window("before", "after").peak_bytes(1) - start
    assert 4 * whole <= forward <= 4 * whole + 16 * 8 * batch, "one float32 tensor of the logits' size comes and goes"


def test_control_torchs_own_loss_keeps_the_logarithms_of_all_probabilities():
    def program(rank):
        logits = torch.zeros(64, 256).requires_grad_() * 1.0
        rank.mark("before")
        loss = CrossEntropy()(logits, torch.zeros(64, dtype=torch.int64))
        rank.mark("after")
        return loss

    memory = emu.launch(program, Mesh(tp=1)).memory
    start, end = (sum(line[0] for line in memory.window(m).series(0)[1].values()) for m in ("before", "after"))
    assert end - start >= 4 * 64 * 256


# ---------------------------------------------------------------------------------------------------------- the embedding
def looks_up(rank, vocab, width, padding, sp, batch, seq):
    torch.manual_seed(vocab)
    module = nn.Embedding(vocab, width, padding_idx=padding)
    whole = nn.Embedding(vocab, width, padding_idx=padding, _weight=module.weight.detach().clone())
    group = rank.group("tp")
    tokens = TokenCut(group) if sp else None
    become_vocab_embedding(module, group, tokens)
    g = torch.Generator().manual_seed(5)
    x = torch.randint(0, vocab, (batch, seq), generator=g)
    up = torch.randn(batch, seq, width, generator=g)
    ours, right = module(x), whole(x)
    (right * up).sum().backward()
    if tokens is not None:
        assert tokens.length == seq
        right, up = (t.split(tokens.sizes, 1)[group.rank] for t in (right, up))
    assert torch.equal(ours, right) and ours.is_contiguous()
    (ours * up).sum().backward()
    start, stop = module.words
    assert torch.equal(module.weight.grad, whole.weight.grad[start:stop])
    return stop - start


@given(
    vocab=st.integers(1, 20),
    width=st.integers(1, 5),
    tp=st.integers(1, 7),
    padding=st.sampled_from([None, 0, -1]),
    sp=st.booleans(),
    batch=st.integers(0, 3),
    seq=st.integers(1, 6),
)
def test_the_embedding_has_torchs_bits_in_float32_too(vocab, width, tp, padding, sp, batch, seq):
    """One term of each sum is not zero, and every rank adds up gradients in the order of the tokens, as one device does."""
    rows = run_virtual(looks_up, Mesh(tp=tp), args=(vocab, width, padding, sp, batch, seq)).results
    assert sum(rows) == vocab and max(rows) - min(rows) <= 1


def test_control_tokens_of_other_ranks_must_be_zero(monkeypatch):
    args = (9, 3, None, False, 2, 5)
    run_virtual(looks_up, Mesh(tp=3), args=args)
    right = torch.Tensor.masked_fill_
    monkeypatch.setattr(
        torch.Tensor, "masked_fill_", lambda x, mask, value: x if x.is_floating_point() else right(x, mask, value)
    )
    with pytest.raises(AssertionError):
        run_virtual(looks_up, Mesh(tp=3), args=args)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("backend", ["virtual", "shape"])
def test_the_embedding_says_one_thing_forward_and_under_sp_one_backward(sp, backend):
    batch, seq, width, tp = 2, 8, 16, 4

    def program(rank):
        module = nn.Embedding(32, width, device=rank.device)
        become_vocab_embedding(module, rank.group("tp"), TokenCut(rank.group("tp")) if sp else None)
        module(torch.zeros(batch, seq, dtype=torch.int64, device=rank.device)).sum().backward()
        return module.weight.untyped_storage().nbytes()

    run = emu.launch(program, Mesh(tp=tp), backend=backend)
    said = [(e.kind, e.name, e.bytes) for e in run.trace[2] if isinstance(e, Collective)]
    whole = 4 * batch * seq * width
    if sp:
        assert said == [("reduce_scatter", "embedding", whole), ("all_gather", "embedding", whole)]
    else:
        assert said == [("all_reduce", "embedding", whole)]
    assert not [e for e in run.trace[2] if isinstance(e, HostWait)]
    assert run.results == [4 * 32 // tp * width] * tp, "nobody keeps the rows of others alive"


def test_a_module_stays_the_one_it_was():
    def program(rank):
        model, seen = Model(*SHAPE), []
        embedding, loss, weight = model.embedding, model.loss, model.embedding.weight
        embedding.register_forward_hook(lambda *_: seen.append("embedding"))
        become_vocab_embedding(embedding, rank.group("tp"))
        become_vocab_cross_entropy(loss, rank.group("tp"), 7)
        embedding(torch.tensor([[0]]))
        assert model.embedding is embedding and model.loss is loss and embedding.weight is weight and seen
        assert isinstance(embedding, nn.Embedding) and next(iter(model.state_dict())) == "embedding.weight"
        return repr(embedding), repr(loss)

    for text, loss in run_virtual(program, Mesh(tp=2)).results[1:]:
        assert text == "VocabEmbedding(words 4 to 7 of 7, 4, group=tp)"
        assert loss == "VocabCrossEntropy(words 4 to 7 of 7, group=tp)"


def test_a_weight_shared_with_the_output_is_cut_once():
    def program(rank):
        embedding, head = nn.Embedding(7, 2), nn.Linear(2, 7, bias=False)
        head.weight = embedding.weight
        start, stop = own_words(7, rank.group("tp"))
        whole = embedding.weight.detach().clone()
        head.weight.data = head.weight.data[start:stop].clone()
        become_vocab_embedding(embedding, rank.group("tp"))
        assert head.weight is embedding.weight and torch.equal(embedding.weight, whole[start:stop])
        odd = nn.Embedding(4, 2)
        odd.weight.data = whole[:3]
        become_vocab_embedding(odd, rank.group("tp"))

    with pytest.raises(EmuError, match=r"has 3 rows, which are neither all 4 words nor this rank's 2"):
        run_virtual(program, Mesh(tp=2))


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("wrong", [7, -1, 99, -101])
@pytest.mark.parametrize("what", ["token", "label"])
def test_a_word_that_is_none_is_named_as_an_error_as_on_one_device(wrong, what):
    def program(rank):
        model = Model(*SHAPE)
        x = torch.tensor([[1, wrong, 2]])
        plain = (lambda: model.embedding(x)) if what == "token" else (lambda: model.loss(torch.zeros(1, 3, 7), x))
        with pytest.raises(IndexError):
            plain()
        become_vocab_embedding(model.embedding, rank.group("tp"))
        become_vocab_cross_entropy(model.loss, rank.group("tp"), 7)
        start, stop = model.loss.words
        return model.embedding(x) if what == "token" else model.loss(torch.zeros(1, 3, stop - start), x)

    with pytest.raises(IndexError, match=rf"{what} {wrong} lies outside the vocabulary of 7 words, 0 to 6") as caught:
        run_virtual(program, Mesh(tp=2))
    assert isinstance(caught.value, EmuError) and (caught.value.value, caught.value.vocab) == (wrong, 7)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: nn.Embedding(4, 2, max_norm=1.0), "max_norm=1.0 cannot be cut over 'tp'"),
        (lambda: nn.Embedding(4, 2, scale_grad_by_freq=True), "scale_grad_by_freq=True cannot be cut"),
        (lambda: nn.Embedding(4, 2, sparse=True), "sparse=True cannot be cut"),
        (lambda: nn.Linear(4, 2), "a Linear is no plain nn.Embedding"),
        (
            lambda: type("Odd", (nn.Embedding,), {"forward": lambda self, x: x})(4, 2),
            "an? Odd is no plain nn.Embedding",
        ),
    ],
)
def test_an_embedding_that_would_be_wrong_is_refused(make, words):
    with pytest.raises(EmuError, match=words) as caught:
        run_virtual(lambda rank: become_vocab_embedding(make(), rank.group("tp")), Mesh(tp=2))
    assert caught.value.hint


def test_what_the_loss_cannot_read_is_refused():
    def program(rank, logits, labels):
        module = CrossEntropy()
        become_vocab_cross_entropy(module, rank.group("tp"), 7)
        module(logits, labels)

    whole, own = torch.zeros(2, 7), torch.zeros(2, 4)
    labels = torch.zeros(2, dtype=torch.int64)
    for args, words in {
        (whole, labels): r"logits \(2, 7\) are not \[..., 4\]: this rank of 'tp' has words 0 to 4 of 7",
        (own, labels[:1]): r"labels are \(1,\) torch.int64, logits \(2, 4\)",
        (own, own): r"labels are \(2, 4\) torch.float32",
    }.items():
        with pytest.raises(EmuError, match=words):
            run_virtual(program, Mesh(tp=2), args=args)
    with pytest.raises(EmuError, match="a Linear without label_smoothing and ignore_index"):
        run_virtual(lambda rank: become_vocab_cross_entropy(nn.Linear(1, 1), rank.group("tp"), 7), Mesh(tp=2))


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({}, "reduction='mean'", 'reduction="sum"'),
        ({"reduction": "none"}, "reduction='none'", 'reduction="sum"'),
        ({"reduction": "sum", "weight": torch.ones(7)}, "weight=", "without weight"),
    ],
    ids=str,
)
def test_an_option_of_torchs_loss_that_would_be_dropped_is_refused(options, words, hint):
    def program(rank):
        become_vocab_cross_entropy(nn.CrossEntropyLoss(**options), rank.group("tp"), 7)

    with pytest.raises(EmuError, match=words) as caught:
        run_virtual(program, Mesh(tp=2))
    assert hint in caught.value.hint


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_torchs_own_loss_is_cut_where_it_is_a_sum(smoothing):
    g = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(5, 7, generator=g), torch.tensor([0, 6, -100, 3, 4])

    def loss():
        return nn.CrossEntropyLoss(reduction="sum", label_smoothing=smoothing)

    def program(rank):
        made, (start, stop) = loss(), own_words(7, rank.group("tp"))
        become_vocab_cross_entropy(made, rank.group("tp"), 7)
        return made(logits[:, start:stop], labels)

    for found in run_virtual(program, Mesh(tp=2)).results:
        torch.testing.assert_close(found, loss()(logits, labels))  # float32, sums in another order


def test_one_token_without_a_batch_cannot_be_cut_along_the_sequence():
    def program(rank):
        module = nn.Embedding(4, 2)
        become_vocab_embedding(module, rank.group("tp"), TokenCut(rank.group("tp")))
        module(torch.tensor(1))

    with pytest.raises(EmuError, match=r"tokens \(\) has no dim 1 for the sequence"):
        run_virtual(program, Mesh(tp=2))
