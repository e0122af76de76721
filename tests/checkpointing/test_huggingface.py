"""transformers' stock Llama under checkpointing: the same bits, whatever the policy and the strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emu
from emu.models.huggingface import llama
from emu.parallel import DataParallel, Pipeline, shard_model
from emu.parallel.checkpointing import checkpointed
from emu.spmd import EmuError

pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 7,
    "initializer_range": 0.3,
    "attention_dropout": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
POLICIES = ("full", "every:2", "repeated:2", "naive", "halving")


def tokens():
    return torch.randint(0, 13, (4, 7), generator=torch.Generator().manual_seed(0))


def made(policy, **more):
    model = llama(**TINY, **more)
    if policy is not None:
        checkpointed(model, policy)  # finds model.layers
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_alone(policy, attention):
    found = []
    for name in (None, policy):
        model = made(name, attn_implementation=attention)
        torch.manual_seed(3)
        loss = model.loss_sum(tokens(), tokens())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("policy", "axes", "how"),
    [
        ("every:2", {"dp": 2}, {"zero": 3}),
        ("naive", {"tp": 2}, {"sp": True}),
        ("full", {"pp": 2}, {"schedule": "1f1b", "microbatches": 2}),
        ("repeated:2", {"pp": 2}, {"schedule": "zb-h1", "microbatches": 2}),
    ],
)
def test_under_strategies(policy, axes, how):
    def program(rank, policy):
        model, options = made(policy, attn_implementation="eager"), dict(how)
        sharding = shard_model(model, rank, sp=options.pop("sp", False)) if "tp" in axes else None
        torch.manual_seed(3)
        strategy: Any = Pipeline if "pp" in axes else DataParallel
        dist = strategy(model, rank, *(a for a in axes if a == "dp"), sharding=sharding, **options)
        loss = dist.backward((tokens(), tokens()))
        return [loss, *dist.gather_gradients().values(), torch.get_rng_state()]

    right, found = (emu.launch(program, emu.Mesh(**axes), args=(name,)).results for name in (None, policy))
    assert all(torch.equal(u, v) for a, b in zip(right, found, strict=True) for u, v in zip(a, b, strict=True))


def test_a_cache_into_which_layers_write_is_refused():
    model = made("full")
    with pytest.raises(EmuError, match=r"model\.layers\.0 is given a DynamicCache.*\n.*use_cache=False"):
        model(input_ids=tokens(), use_cache=True)
