"""The vocabulary cut over ranks: its embedding, and the cross-entropy of logits that no rank has all of.

Both are Megatron-LM's (arXiv 1909.08053, section 3). Every rank has a range of the vocabulary, in group order; ranges may
be uneven, and empty where there are more ranks than words, so nothing is padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from emu.spmd import EmuError, Group, reduce_from, reduce_to_shards, split_sizes

if TYPE_CHECKING:
    from emu.parallel.tensor.tokens import TokenCut

NARROW = (torch.bfloat16, torch.float16)  # a long sum in 8 or 11 bits would lose most of its terms


class OutsideVocabulary(EmuError, IndexError):
    """A token or label that no rank has a row for: torch's IndexError, but for the ranks that have rows. Fields: value, vocab."""


def own_words(vocab: int, group: Group) -> tuple[int, int]:
    """The range (start, stop) of the vocabulary that this rank of the group has."""
    sizes = split_sizes(vocab, group.size)
    start = sum(sizes[: group.rank])
    return start, start + sizes[group.rank]


# ------------------------------------------------------------------------------------------------------------- embedding
class VocabEmbedding(nn.Embedding):
    """An embedding of which this rank has some rows: weight [own words, width].

    Every rank looks up the tokens it has a row for and puts zeros for the others; the sum over ranks is the embedding,
    exactly, as all but one of its terms are 0.
    """

    words: tuple[int, int]
    group: Group
    tokens: TokenCut | None

    def forward(self, input: Tensor) -> Tensor:
        """Tokens [batch, seq] -> [batch, seq, width], whole on every rank, or under sp this rank's part of the sequence.

        Raises:
            OutsideVocabulary: a token that is in no rank's range (unseen on a GPU, where torch's own assertion fails).
        """
        _refuse_outside(input, self.num_embeddings, None, "token")
        start, stop = self.words
        if start == stop:  # nothing to look up; the weight's gradient is as empty as it is
            x = self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum(0)
        else:
            absent = (input < start) | (input >= stop)
            x = F.embedding((input - start).masked_fill_(absent, 0), self.weight, self._own_padding())
            x = x.masked_fill_(absent.unsqueeze(-1), 0.0)
        if self.tokens is None:
            return reduce_from(x, self.group, name="embedding", in_place=True)
        dim = self.tokens.dim
        if x.dim() <= dim:
            raise EmuError(
                f"under sp the embedding of tokens {tuple(input.shape)} has no dim {dim} for the sequence to be cut along",
                "look up tokens of shape [batch, seq]; one sequence is tokens[None]",
            )
        self.tokens.length = x.shape[dim]
        return reduce_to_shards(x, self.group, dim, self.tokens.sizes, name="embedding")

    def _own_padding(self) -> int | None:
        start, stop = self.words
        return self.padding_idx - start if self.padding_idx is not None and start <= self.padding_idx < stop else None

    def extra_repr(self) -> str:
        return f"words {self.words[0]} to {self.words[1]} of {super().extra_repr()}, group={self.group.label}"


def become_vocab_embedding(module: nn.Embedding, group: Group, tokens: TokenCut | None = None) -> None:
    """Makes an embedding one whose rows are cut over a group, in place: its weight keeps this rank's rows only.

    A weight that is shared with an output layer which was cut before is left as it is.

    Args:
        module: an nn.Embedding, the same on every rank; padding_idx is honoured.
        group: over which it is cut, e.g. rank.group("tp").
        tokens: how the sequence is cut under sp: then forward sets its length, and gives each rank its part of the
            sequence (a reduce-scatter in place of the all-reduce).

    Raises:
        EmuError: no embedding, or one with an option that is wrong, or not defined, when no rank sees all rows.
    """
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        raise EmuError(
            f"a {type(module).__name__} is no plain nn.Embedding, whose rows could be cut",
            "name an nn.Embedding in the sharding map",
        )
    for option, why in (
        ("max_norm", "renormalises rows in place whenever they are looked up"),
        ("scale_grad_by_freq", "divides gradients by counts of which every rank has a part"),
        ("sparse", "makes gradients that are lists of rows, which are not summed over ranks"),
    ):
        if getattr(module, option):
            raise EmuError(
                f"an embedding with {option}={getattr(module, option)} cannot be cut over {group.label!r}: it {why}",
                f"make it without {option}, or leave it whole on every rank",
            )
    start, stop = own_words(module.num_embeddings, group)
    rows = len(module.weight)
    if rows == module.num_embeddings:
        with torch.no_grad():
            module.weight.data = module.weight.data[start:stop].clone()  # a view would keep the other rows alive
    elif rows != stop - start:
        raise EmuError(
            f"the embedding has {rows} rows, which are neither all {module.num_embeddings} words nor this rank's "
            f"{stop - start} (words {start} to {stop})",
            "cut a weight that two layers share once, and the same way: Vocab() and Column() do",
        )
    made: Any = module
    made.__class__ = VocabEmbedding
    made.words, made.group, made.tokens = (start, stop), group, tokens


# --------------------------------------------------------------------------------------------------------- cross-entropy
class VocabCrossEntropy(nn.Module):
    """The sum of cross-entropies, in nats, of logits of which every rank has some words.

    Forward: two all-reduces over the group, of the largest logit of every token, and of the sum of exponentials, the
    label's logit and (label smoothing) the sum of logits together. Backward: no communication. The loss is the same on
    every rank. Only the logits themselves are kept for backward, in their own dtype.
    """

    words: tuple[int, int]
    vocab: int
    group: Group
    label_smoothing: float
    ignore_index: int

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of all labels that are not ignored, summed; 0 if all are.

        Args:
            logits: [..., own words].
            labels: [...], int64, over the whole vocabulary, the same on every rank.

        Returns:
            A scalar, in float32 at least.

        Raises:
            OutsideVocabulary: a label that is neither ignored nor in the vocabulary.
            EmuError: logits or labels of a wrong shape or dtype.
        """
        start, stop = self.words
        if logits.shape[-1:] != (stop - start,):
            raise EmuError(
                f"logits {tuple(logits.shape)} are not [..., {stop - start}]: this rank of {self.group.label!r} has words "
                f"{start} to {stop} of {self.vocab}",
                "cut the output layer along the vocabulary, without gathering its result: Column()",
            )
        if labels.shape != logits.shape[:-1] or labels.dtype != torch.int64:
            raise EmuError(
                f"labels are {tuple(labels.shape)} {labels.dtype}, logits {tuple(logits.shape)}",
                "give one int64 label for every position",
            )
        _refuse_outside(labels, self.vocab, self.ignore_index, "label")
        each: Any = _CrossEntropy.apply(
            logits.flatten(0, -2),
            labels.flatten(),
            self.group,
            start,
            self.vocab,
            self.ignore_index,
            self.label_smoothing,
        )
        if not self.label_smoothing:
            return each.sum()
        # Two sums, mixed afterwards, as torch's own does it.
        likelihood, smooth = (part.sum() for part in each.unbind(1))
        return likelihood * (1 - self.label_smoothing) + smooth * (self.label_smoothing / self.vocab)

    def extra_repr(self) -> str:
        return f"words {self.words[0]} to {self.words[1]} of {self.vocab}, group={self.group.label}"


def become_vocab_cross_entropy(module: nn.Module, group: Group, vocab: int) -> None:
    """Makes a cross-entropy one of logits that are cut over a group along the vocabulary, in place.

    Args:
        module: has label_smoothing and ignore_index, and as forward(logits, labels) the sum over labels.
        group: over which the vocabulary is cut, e.g. rank.group("tp").
        vocab: words in all.

    Raises:
        EmuError: the module has no such attributes, or an option that this loss would drop: reduction other than "sum",
            weight.
    """
    missing = [name for name in ("label_smoothing", "ignore_index") if not hasattr(module, name)]
    if missing:
        raise EmuError(
            f"a {type(module).__name__} without {' and '.join(missing)} is no cross-entropy that could be cut",
            "name a module with label_smoothing, ignore_index and forward(logits, labels), the sum over labels",
        )
    if (reduction := getattr(module, "reduction", "sum")) != "sum":
        raise EmuError(
            f"a {type(module).__name__} with reduction={reduction!r} cannot be cut over {group.label!r}: its ranks sum labels",
            'make it with reduction="sum"; the mean is what is divided by the number of labels of the whole batch, later',
        )
    if getattr(module, "weight", None) is not None:
        raise EmuError(
            f"a {type(module).__name__} with weight= cannot be cut over {group.label!r}: its ranks count all words alike",
            "make it without weight, or leave the loss and its logits whole on every rank",
        )
    made: Any = module
    made.__class__ = VocabCrossEntropy
    made.words, made.vocab, made.group = own_words(vocab, group), vocab, group


class _CrossEntropy(Function):
    """Forward: all_reduce (max), all_reduce (sum). Backward: this rank's words alone.

    With z = logits - max and log_p = z - log(sum(exp(z))), for every token
        loss [tokens]: -log_p[label]; with label smoothing [tokens, 2]: beside it -sum(log_p) over the vocabulary;
        gradient of logits: (g0 + g1 * vocab) * p - g0 * (1 at the label) - g1.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: Group, start: int, vocab: int, ignore: int, smoothing: float
    ) -> Tensor:
        words = logits.shape[1]  # of [tokens, own words]
        most = _wide(logits.amax(1) if words else logits.new_full((len(logits),), -torch.inf))
        group.all_reduce(most, op="max", name="loss max")
        z = _below(logits, most)
        at, absent = _own(labels, start, words)
        label = z.gather(1, at[:, None])[:, 0].masked_fill_(absent, 0.0) if words else torch.zeros_like(most)
        parts = [label, z.sum(1)] if smoothing else [label]
        sums = torch.stack([z.exp_().sum(1), *parts])
        group.all_reduce(sums, name="loss sums")
        total, label, *whole = sums.unbind()
        log = total.log()
        ignored = labels == ignore
        each = (log - label).masked_fill_(ignored, 0.0)
        ctx.save_for_backward(logits, labels, most, total)
        ctx.rest = start, vocab, ignore
        if not smoothing:
            return each
        return torch.stack([each, (log * vocab - whole[0]).masked_fill_(ignored, 0.0)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, labels, most, total = ctx.saved_tensors
        start, vocab, ignore = ctx.rest
        ignored = labels == ignore
        smooth = None
        if grad.dim() == 2:
            grad, smooth = (g.masked_fill(ignored, 0.0) for g in grad.unbind(1))
        else:
            grad = grad.masked_fill(ignored, 0.0)
        out = _below(logits, most).exp_()
        out.mul_(((grad if smooth is None else grad + smooth * vocab) / total)[:, None])
        if smooth is not None:
            out.sub_(smooth[:, None])
        if words := logits.shape[1]:
            at, absent = _own(labels, start, words)
            out.scatter_add_(1, at[:, None], grad.masked_fill(absent, 0.0).neg_()[:, None])
        return out.to(logits.dtype), None, None, None, None, None, None


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in NARROW else logits


def _below(logits: Tensor, most: Tensor) -> Tensor:
    """How far logits [tokens, words] are below the largest of their token, as a new tensor."""
    x = _wide(logits)
    return x - most[:, None] if x is logits else x.sub_(most[:, None])


def _own(labels: Tensor, start: int, words: int) -> tuple[Tensor, Tensor]:
    """Columns of the labels within this rank's words, and which labels have none there (column 0 stands for it)."""
    absent = (labels < start) | (labels >= start + words)
    return (labels - start).masked_fill_(absent, 0), absent


def _refuse_outside(indices: Tensor, vocab: int, ignored: int | None, what: str) -> None:
    """No rank alone would notice: each takes what it has no row for to be another's."""
    if indices.is_meta:
        return
    with torch.no_grad(), torch._C._DisableTorchDispatch():  # a check, not a part of the program: it leaves no record
        wrong = (indices < 0) | (indices >= vocab)
        if ignored is not None:
            wrong &= indices != ignored
        if indices.is_cuda:  # without waiting for the device, as torch does
            torch.ops.aten._assert_async(~wrong.any(), f"a {what} lies outside the vocabulary of {vocab} words")
        elif wrong.any():
            value = int(indices[wrong][0])
            raise OutsideVocabulary(
                f"{what} {value} lies outside the vocabulary of {vocab} words, 0 to {vocab - 1}",
                f"give {what}s of this vocabulary"
                + (f", or {ignored} where none counts" if ignored is not None else ""),
                value=value,
                vocab=vocab,
            )
