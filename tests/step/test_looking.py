"""What is shown equals what is: memory, streams, works, messages, tensors and layouts at every step; looking changes nothing."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step.stepped import MESH, full, passes_on, ring, stuck, to_end, training
from torch import nn

import emu
import emu.parallel
from emu import EmuError, testing
from emu.models import Decoder, config
from emu.stepping.tensors import held
from emu.trace.memory import Memory
from emu.trace.trace import Trace


@settings(max_examples=15)
@given(testing.programs(max_ranks=4), st.integers(1, 60))
def test_memory_is_what_the_devices_hold_and_what_the_trace_says(written, n):
    with emu.step(written.program, written.mesh) as s:
        s.next(n)
        if s.ended:
            s.back(1)
        devices = s._standing(s.index).devices
        situation = s.now.situation()
        for rank, device in devices.items():
            stands = situation.ranks[rank]
            assert stands.held == device.ledger.by_category == s.rank(rank).hbm
            assert stands.peak_bytes == device.ledger.peak_bytes
            memory = Memory(Trace({}, {rank: list(device.events)}))
            assert stands.peak_bytes == memory.peak_bytes(rank)


def test_control_a_count_that_is_off_by_one_event_is_noticed():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        s.until("all_reduce")
        device = s._standing(s.index).devices[0]
        device.events.append(device.events[0])  # as if something were allocated twice
        s.next()
        assert s.rank(0).hbm != device.ledger.by_category


def test_state_is_plain_data():
    with emu.step(training, MESH) as s:
        for goal in ("begin", "dp.all_reduce", "stepped"):
            s.until(goal)
            state = s.state()
            assert json.loads(json.dumps(state)) == state
            assert state["index"] == s.index and state["op"]["label"] == s.op.label
            assert [r["rank"] for r in state["ranks"]] == [0, 1, 2, 3]
            untimed = s.state(times=False)
            assert untimed["provisional_s"] is None and untimed["ranks"][0]["hbm"] == state["ranks"][0]["hbm"]
            assert state["provisional_s"] > 0 and state["capacity_bytes"] == MESH.on.chip.hbm_bytes


def test_the_step_that_is_next_is_the_one_that_is_taken():
    with emu.step(training, MESH) as s:
        told = []
        while not s.ended and s.index < 120:
            told.append(s.op)
            s.next()
        assert told == s.history.ops[: len(told)]
        assert all(op.line.startswith("stepped.py:") for op in told)


def test_works_under_way_are_told_until_they_are_waited_for():
    def overlaps(rank):
        x = torch.ones(4) * (rank + 1)
        work = rank.group("dp").all_reduce(x, async_op=True, name="sum")
        y = torch.ones(2) * 2
        work.wait()
        return x + 1, y

    with emu.step(overlaps, emu.Mesh(dp=2)) as s:
        s.until("all_reduce").next()
        (work,) = s.rank(0).works()
        assert work["what"] == "dp.all_reduce number 0" and work["waits_for"] == [1]
        assert (work["stream"], work["bytes"], work["name"]) == ("dp", 16, "sum")
        s.until("all_reduce").next()
        assert s.rank(0).works()[0]["waits_for"] == [] and "has not waited for dp.all_reduce number 0" in repr(s)
        s.until("mul")
        to_end(s)
        assert not s.rank(0).works() and not s.rank(1).works()


def test_messages_in_flight_and_who_waits():
    with emu.step(passes_on, emu.Mesh(pp=3)) as s:
        s.until("send").next()
        state = s.state()
        (message,) = state["messages"]
        assert (message["src"], message["dst"], message["posted"], message["bytes"]) == (0, 1, "send", 12)
        assert state["ranks"][0]["state"] == "waiting" and "pp.send number 0" in state["ranks"][0]["waits_in"]
        assert "message 0->1 in pp, 12 B: rank 1 has not posted its half" in repr(s)
        s.until(lambda op: op.name == "recv").next()
        assert not s.state()["messages"]


def test_collectives_that_wait_for_somebody():
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        s.until("all_reduce").next()
        (collective,) = s.state()["collectives"]
        assert (collective["come"], collective["waits_for"], collective["bytes"]) == ([0], [1, 2], 20)
        assert s.state()["ranks"][0]["waits_in"] == "dp.all_reduce number 0"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        for layer in self.layers:
            hidden = layer(x)
            x = hidden.relu()
        return x * self.scale


def learns(rank):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    batch = {"x": torch.ones(3, 2), "pieces": [torch.zeros(1), torch.ones(1) * rank]}
    loss = net(batch["x"]).sum()
    loss.backward()
    optimizer.step()
    rank.group("dp").barrier()
    rank.mark("end")
    return loss.detach() * 2


def test_tensors_have_the_names_that_the_program_has_for_them():
    with emu.step(learns, emu.Mesh(dp=2)) as s:
        s.until("relu")
        wanted = {"x", "hidden", "layers.0.weight", "layers.1.weight", "scale", "batch['pieces'][0]"}
        assert wanted <= set(s.rank(0).tensors())
        assert [line.partition(",")[0] for line in s.rank(0).stack()] == ["forward", "learns"]
        s.until("end")
        names = s.rank(0).tensors()
        assert {"layers.0.weight.grad", "layers.0.weight.exp_avg", "batch['pieces'][1]", "loss"} <= set(names)
        assert (
            names["layers.0.weight"].category == "parameters" and names["layers.0.weight.grad"].category == "gradients"
        )
        assert names["layers.0.weight.exp_avg"].category == "optimizer"
        assert names["scale"].shape == (1,) and names["loss"].dtype == "float32" and names["loss"].bytes == 4
        assert list(s.rank(0).tensors("*.grad")) == ["layers.0.weight.grad", "layers.1.weight.grad"]


def test_values_are_copies_of_what_the_rank_holds():
    with emu.step(learns, emu.Mesh(dp=2)) as s:
        s.until("end")
        value = s.rank(1).tensor("batch['pieces'][1]")
        assert value.tolist() == [1.0] and s.now.tensor("batch['pieces'][1]")[0].tolist() == [0.0]
        value.zero_()
        assert s.rank(1).tensor("batch['pieces'][1]").tolist() == [1.0]
        assert s.now.alike("layers.0.weight") == {"dp": True} and s.now.alike("batch['pieces'][1]") == {"dp": False}


def test_a_name_that_is_not_there_names_those_that_are_near():
    with emu.step(learns, emu.Mesh(dp=2)) as s:
        s.until("relu")
        with pytest.raises(EmuError, match=r"rank 0 holds no tensor 'layers.0.wight'") as caught:
            s.rank(0).tensor("layers.0.wight")
        assert "layers.0.weight" in caught.value.hint
        with pytest.raises(EmuError, match="holds no tensor 'nothing'"):
            s.now.tensor("nothing")
        with pytest.raises(EmuError, match="no rank 2"):
            s.rank(2)
        to_end(s)
        with pytest.raises(EmuError) as caught:
            s.rank(0).tensor("layers.0.weight")
        assert "step back first" in caught.value.hint


def test_layouts_are_told_where_a_wrapper_knows_them():
    def shards(rank):
        model = Decoder(config("gpt-tiny"), seed=0)
        sharding = emu.parallel.shard_model(model, rank)
        rank.mark("made")
        return sharding

    with emu.step(shards, emu.Mesh(tp=2)) as s:
        names = s.until("made").rank(0).tensors()
        cut = {name: about.layout for name, about in names.items() if about.layout}
        assert cut and all(layout.startswith(("tp: Slices(dim=", "tp: Shard(dim=")) for layout in cut.values())
        name = next(iter(cut))
        assert s.rank(0).tensor(name).shape == names[name].shape
        assert json.dumps(names[name].as_dict()) and cut[name] in str(names[name])


def test_looking_keeps_nothing_alive():
    def replaces(rank):
        x = torch.ones(1000)
        for _ in range(3):
            x = x * 2
        return x.sum()

    straight = emu.launch(replaces, emu.Mesh(dp=1))
    with emu.step(replaces, emu.Mesh(dp=1)) as s:
        while not s.ended:
            if s.index % 2:  # what a look keeps alive would die at the next one, unseen
                s.rank(0).tensors()
                s.rank(0).stack()
                repr(s)
            s.next()
        assert list(s.history.events[0]) == list(straight.trace[0])


def test_control_a_reference_that_is_kept_shows_in_the_record():
    def replaces(rank):
        x = torch.ones(1000)
        for _ in range(3):
            x = x * 2
        return x.sum()

    straight = emu.launch(replaces, emu.Mesh(dp=1))
    kept = []
    with emu.step(replaces, emu.Mesh(dp=1)) as s:
        while not s.ended:
            kept.append(held(s._standing(s.index), 0))
            s.next()
        assert list(s.history.events[0]) != list(straight.trace[0])


def test_what_cannot_go_on_is_shown():
    with emu.step(stuck, emu.Mesh(dp=2)) as s:
        with pytest.raises(emu.Deadlock):
            to_end(s)
        assert s.state()["ranks"][0]["state"] == "failed" and s.state()["ranks"][1]["state"] == "ended"
        assert s.rank(0).tensor("x").tolist() == [0.0, 0.0]  # it stands still where it failed


def test_rank_text_says_what_there_is():
    with emu.step(training, MESH) as s:
        s.until("stepped")
        text = repr(s.rank(s.op.rank))
        assert "stream default:" in text and "stream dp:" in text and "after mark 'begin'" in text
        assert "memory: parameters" in text and "next: mark stepped" in text


def test_many_ranks_are_cut_short_in_text():
    with emu.step(lambda rank: torch.ones(2), emu.Mesh(dp=40)) as s:
        assert "... and 8 more ranks" in repr(s) and len(repr(s).splitlines()) < 40


def test_memory_that_is_full():
    with emu.step(full, emu.Mesh(dp=2)) as s:
        with pytest.raises(emu.VirtualOutOfMemory):
            to_end(s)
        assert s.rank(0).hbm["activations"] == 4000 and "small" in s.rank(0).tensors()


def test_a_parameter_in_shards_is_told_and_has_values_only_while_its_unit_computes():
    def sharded(rank):
        dist = emu.DataParallel(Decoder(config("gpt-tiny"), seed=0), rank, "dp", zero=3)
        x = torch.zeros(1, 8, dtype=torch.long)
        dist.loss_sum(x, x).backward()

    name = "blocks.3.mlp.up.weight"
    with emu.step(sharded, emu.Mesh(dp=2)) as s:
        s.until("blocks.0")
        about = s.rank(0).tensors(name)[name]
        assert about.bytes == 0 and "not whole now" in str(about)
        with pytest.raises(EmuError, match="their memory is freed"):
            s.rank(0).tensor(name)
        s.until("blocks.3.mlp")
        rank = s.op.rank
        assert s.rank(rank).tensor(name).shape == about.shape and s.rank(rank).tensors(name)[name].bytes > 0
