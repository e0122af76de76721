"""The tables that README.md has on long sequences are what runs and policies say."""

import re
from pathlib import Path

import pytest
import torch

import emu
from emu.cost.collectives import sent_bytes
from emu.models import Config, Decoder
from emu.parallel import DataParallel
from emu.parallel.checkpointing import Policy, checkpointed
from emu.parallel.context import KINDS, make_cut
from emu.spmd import EmuError, PlanError
from emu.trace.events import Collective

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
NAMES = ("keys and values", "gradients of keys and values", "tokens for heads", "heads for tokens")
B, S, HEADS, KV_HEADS, HEAD_DIM, RANKS, LAYERS = 2, 32, 8, 4, 4, 4, 1


def table(first):
    """Rows of the table whose header begins with a word: name -> other cells."""
    block = README[README.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in re.split(r"\s*\|\s*", line)[1:-1]] for line in block]
    return {name.strip("`"): cells for name, *cells in rows}


def by_formula(text):
    """A formula of the table as a number, for these sizes: b, s, c, u, and the widths h and g."""
    sizes = {"b": B, "s": S, "h": HEADS * HEAD_DIM, "g": KV_HEADS * HEAD_DIM, "c": RANKS, "u": 2}
    spaced = re.sub(r"(?<=[\w)])(?=[bshgcu(])", "*", text.replace(" (", "("))
    return eval(spaced, {"__builtins__": {}}, sizes)  # the README's own words


def step(rank, kind):
    config = Config(layers=LAYERS, width=HEADS * HEAD_DIM, heads=HEADS, kv_heads=KV_HEADS, vocab=16, seq=S)
    x = torch.zeros(B, S, dtype=torch.long, device=rank.device)
    with torch.device(rank.device):
        dist = DataParallel(Decoder(config), rank, "cp", context=kind)
    rank.mark("step")
    dist.backward(emu.Batch(x, x, tokens=B * S))


def test_what_ranks_send_is_the_tables():
    rows = table("context")
    assert tuple(rows) == KINDS
    for kind, (_, formula, _) in rows.items():
        trace = emu.launch(step, emu.Mesh(cp=RANKS), args=(kind,), backend="shape").window("step").trace
        events = trace.events[0]
        first = next(i for i, event in enumerate(events) if getattr(event, "phase", "") == "backward")
        forward = [sent_bytes(e, 0) for e in events[:first] if type(e) is Collective and e.name != "loss"]
        backward = [sent_bytes(e, 0) for e in events[first:] if type(e) is Collective and e.name in NAMES]
        assert sum(forward) == 4 * LAYERS * by_formula(formula), kind
        # In float32 gradients are as wide: a ring sends twice as much backward, and exchanged heads travel back.
        times = {"ulysses": 1, "usp": sum(backward) / sum(forward)}.get(kind, 2)
        assert sum(backward) == times * sum(forward) and 1 <= times <= 2


def test_who_is_busiest_is_the_tables():
    for kind, (*_, busiest) in table("context").items():
        works = [make_cut(kind, 8192, RANKS).work(i) for i in range(RANKS)]
        assert f"{max(works) * RANKS / sum(works):.2f}" == busiest.split()[0]


def test_what_policies_cost_is_the_tables():
    rows = table("checkpoint")
    for name, (peak, added, example) in rows.items():
        if name == "selective":
            continue
        named = re.match(r"`(.*)`: ", example)
        policy = Policy.named(named[1] if named else name, 16)
        assert f"{policy.peak_bytes(1, 10)}, {policy.recomputed}" == example.removeprefix(named[0] if named else "")
        sizes = [int(n) for n in re.findall(r"\d+", policy.name)] or [4]
        values = {"n": 16, "k": 10, "C": sizes[0], "D": sizes[-1], "log2": 4}
        if "as" not in peak:
            for text, number in ((peak, policy.peak_bytes(1, 10)), (added, policy.recomputed)):
                spaced = text.replace("log2 n", "log2").replace("nk", "n*k").replace("Ck", "C*k").replace("Dk", "D*k")
                spaced = re.sub(r"(?<=[nC2]) (?=[(l])", "*", spaced)
                assert eval(spaced, {"__builtins__": {}}, values) == number, (name, text)
    assert len(rows) == 9


def test_what_is_refused_is_refused():
    small = {"layers": 2, "width": 8, "heads": 2, "vocab": 8, "seq": 8}
    with pytest.raises(PlanError, match="4 ranks exchange tokens for heads, but there are only 2"):
        emu.verify(Decoder(Config(**small)), emu.Plan("cp=4", context="ulysses", seq=8), mutants="none")
    dropping = Config(**small, fused=False, attention_dropout=0.1)
    with pytest.raises(EmuError, match="drops attention weights"):
        emu.launch(lambda rank: DataParallel(Decoder(dropping), rank, "cp"), emu.Mesh(cp=2))
    with pytest.raises(PlanError, match="capacity"):
        emu.Plan("cp=2", capacity=1.0)

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))

        def loss_sum(self, x, y):
            return (x * self.w - y).square().sum()

    with pytest.raises(PlanError, match="takes no 'positions'"):
        emu.launch(lambda rank: DataParallel(Plain(), rank, "cp"), emu.Mesh(cp=2))

    class Deaf(Plain):
        def loss_sum(self, x, y, positions=None, mask=None):
            return super().loss_sum(x, y)

    def program(rank):
        x = torch.ones(1, 4, 2)
        return DataParallel(Deaf(), rank, "cp").backward(emu.Batch(x, x, tokens=4))

    with pytest.raises(EmuError, match=r"never called mask\.attend"):
        emu.launch(program, emu.Mesh(cp=2))


def test_operators_may_keep_their_results():
    found = []
    for operators in (None, (), ("mm", "addmm")):
        model = Decoder(Config(layers=2, width=8, heads=2, vocab=8, seq=8), seed=0)
        if operators is not None:
            checkpointed(model, "full", operators=operators)
        x = torch.arange(8)[None]
        model.loss_sum(x, x).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
