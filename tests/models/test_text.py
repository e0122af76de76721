"""Real English, the same batches for the same seed. Nothing here depends on which Python's text it is."""

import pytest
import torch

from emu.models import batches, text, tokens


def test_the_text_is_long_and_english():
    assert len(text()) > 200_000
    words = text().decode().lower().split()
    assert words.count("the") > len(words) / 50


def test_tokens_are_its_bytes():
    assert tokens().dtype == torch.uint8 and bytes(tokens()[:1000].tolist()) == text()[:1000]


def test_labels_are_the_tokens_that_follow():
    for x, y in batches(seed=0, steps=3, batch=4, seq=16):
        assert x.shape == y.shape == (4, 16) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        for row, last in zip(x.tolist(), y[:, -1].tolist(), strict=True):
            assert bytes([*row, last]) in text()


def test_batches_follow_their_seed_alone():
    def take(seed, steps):
        return torch.stack([x for x, _ in batches(seed, steps, batch=4, seq=16)])

    first = take(0, 5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(first, take(0, 5)) and torch.equal(first[:2], take(0, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, take(1, 5))


def test_a_batch_may_be_empty_and_a_sequence_may_not_outgrow_the_text():
    assert next(batches(seed=0, steps=1, batch=0, seq=16))[0].shape == (0, 16)
    with pytest.raises(ValueError, match="a sequence can have 1 to"):
        next(batches(seed=0, steps=1, batch=1, seq=len(text())))
