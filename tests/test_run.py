"""A run: the same every time, priced again elsewhere, asked what if, cut to one step, and kept in a file."""

import os
import subprocess
import sys
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.models import GPT, Config
from emu.trace.compare import equal, first_difference
from emu.trace.events import Collective, Kernel
from emu.trace.files import dumps

SMALL = Config(layers=1, width=8, heads=2, ffn=8, vocab=11, seq=4)
MESH = emu.Mesh(dp=3)


def train(rank, steps=2):
    """A few steps of data parallelism with an optimizer."""
    g = torch.Generator().manual_seed(3)
    batch = emu.Batch(*(torch.randint(0, SMALL.vocab, (5, SMALL.seq), generator=g) for _ in "xy"))
    ddp = emu.DataParallel(GPT(SMALL, seed=0), rank, "dp")
    optimizer = torch.optim.AdamW(ddp.model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        rank.mark(f"step {step}")
        losses.append(ddp.backward(batch))
        optimizer.step()
        optimizer.zero_grad()
    rank.mark("end")
    return torch.stack(losses)


@pytest.fixture(scope="module")
def run():
    return emu.launch(train, MESH)


# The same program is the same run.


def test_the_same_program_gives_the_same_bytes_twice(run):
    again = emu.launch(train, MESH)
    assert dumps(again.trace) == dumps(run.trace)
    assert all(torch.equal(a, b) for a, b in zip(again.results, run.results))
    assert dumps(emu.launch(train, MESH, args=(3,)).trace) != dumps(run.trace)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32))
def test_any_seed_of_the_scheduler_gives_the_same_results_and_the_same_record(seed):
    plain, fuzzed = emu.launch(train, MESH), emu.launch(train, MESH, order=seed)
    assert all(torch.equal(a, b) for a, b in zip(fuzzed.results, plain.results))
    assert equal(fuzzed.trace, plain.trace)


def test_a_program_that_depends_on_the_order_is_found_by_some_seed():
    """The control: what ranks share outside of collectives does depend on it."""
    arrived = []

    def racing(rank):
        for _ in range(20):
            torch.ones(1) + 1
        arrived.append(int(rank))
        return arrived.index(rank)

    seen = set()
    for seed in range(10):
        arrived.clear()
        seen.add(tuple(emu.launch(racing, emu.Mesh(dp=3), order=seed).results))
    assert len(seen) > 1


def unequal(rank, order):
    """Rank 0 has by far the most to do, rank 2 the least."""
    x = torch.ones(256, 256)
    for _ in range(10 * (3 - rank)):
        x = x @ x / 256
    order.append(int(rank))
    return rank.group("dp").all_reduce(x)


def test_in_order_of_time_the_rank_with_the_least_work_comes_first():
    runs, arrivals = {}, {}
    for order in ("program", "time"):
        arrivals[order] = []
        runs[order] = emu.launch(unequal, MESH, order=order, args=(arrivals[order],))
    assert arrivals == {"program": [0, 1, 2], "time": [2, 1, 0]}
    assert all(torch.equal(a, b) for a, b in zip(runs["time"].results, runs["program"].results))
    assert equal(runs["time"].trace, runs["program"].trace)


def test_after_a_collective_all_ranks_stand_at_the_time_of_the_last():
    """In order of time a rank that waited for others is not ahead of them afterwards."""
    order = []

    def program(rank):
        x = torch.ones(64, 64)
        for _ in range(20 * (rank == 0)):
            x = x @ x / 64
        rank.group("dp").all_reduce(x)
        for _ in range(5 if rank == 1 else 2):
            x = x @ x / 64
        order.append(int(rank))

    emu.launch(program, emu.Mesh(dp=2), order="time")
    assert order == [0, 1]  # rank 1 came early to the collective, and has more to do after it


def test_seeds_of_generators_are_per_rank_whatever_the_order():
    def program(rank):
        torch.manual_seed(int(rank))
        first = torch.rand(3)
        rank.group("dp").barrier()
        return first, torch.rand(3)

    for order in ("program", "time", 7):
        for rank, drawn in enumerate(emu.launch(program, MESH, order=order).results):
            g = torch.Generator().manual_seed(rank)
            assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(3, generator=g), torch.rand(3, generator=g)]))


def test_an_untracked_run_has_the_same_results_and_only_communication(run):
    bare = emu.launch(train, MESH, track=False)
    assert all(torch.equal(a, b) for a, b in zip(bare.results, run.results))
    assert not list(bare.trace.of(Kernel))
    assert [e for _, e in bare.trace.of(Collective)] == [e for _, e in run.trace.of(Collective)]


def test_a_precision_is_the_default_dtype_of_what_the_program_makes():
    def dtypes(rank):
        return [str(torch.ones(1).dtype), str(GPT(SMALL).head.weight.dtype)]

    before = torch.get_default_dtype()
    roles = emu.Precision(param="float64")
    assert emu.launch(dtypes, emu.Mesh(dp=1), precision=roles).results == [["torch.float64"] * 2]
    assert emu.launch(dtypes, emu.Mesh(dp=1)).results == [[str(before)] * 2]
    assert torch.get_default_dtype() == before


# Priced again, without running again.


def test_a_run_is_priced_again_on_other_hardware():
    def multiply(rank):
        x = torch.ones(8192, 8192, device=rank.device)  # large enough to outlast its launch
        return rank.group("dp").all_reduce(x @ x)

    run = emu.launch(multiply, MESH, backend="shape")
    before = dumps(run.trace)
    times = {name: run.timeline(on=name).step_time_s for name in ("h100-8", "v100")}
    assert run.timeline(on=emu.cluster("v100")).step_time_s == times["v100"] != times["h100-8"]
    assert run.timeline().step_time_s == run.metrics.step_time_s
    assert dumps(run.trace) == before
    with pytest.raises(ValueError, match="not a chip or cluster that emu knows"):
        run.timeline(on="abacus")


def test_what_if_communication_were_free(run):
    free = run.without("dp.*")
    assert free.metrics.step_time_s < run.metrics.step_time_s
    assert free.metrics.comm_bytes == {} and free.metrics.exposed_comm_s == 0
    assert run.metrics.comm_bytes["dp"] > 0  # the run itself is as it was
    by_name = run.without("loss")
    assert 0 < by_name.metrics.comm_bytes["dp"] < run.metrics.comm_bytes["dp"]
    assert equal(run.without("dp.all_reduce").without("dp.broadcast").trace, free.trace)


def test_what_if_lists_what_there_is_where_nothing_matches(run):
    with pytest.raises(
        emu.EmuError, match=r"no collective matches 'tp.*'; this run has dp.all_reduce, dp.broadcast\n.*hint: "
    ):
        run.without("tp.*")


def test_a_window_is_the_part_between_two_marks(run):
    first, second, both = run.window("step 0", "step 1"), run.window("step 1", "end"), run.window("step 0", "end")
    assert len(first.trace) + len(second.trace) == len(both.trace) < len(run.trace)
    assert first.trace.marks() == ["step 0"] and both.trace.marks() == ["step 0", "step 1"]
    assert first.metrics.comm_bytes["dp"] == second.metrics.comm_bytes["dp"]
    total = first.metrics.step_time_s + second.metrics.step_time_s
    assert both.metrics.step_time_s == pytest.approx(total, rel=0.05)  # hosts run ahead of streams at the seam


def test_a_windows_peak_counts_what_was_allocated_before_it(run):
    parameters = sum(p.numel() for p in GPT(SMALL).parameters()) * 4
    for part in (run.window("step 1", "end"), run.window("step 1", "end").without("dp.*")):
        assert part.metrics.peak_hbm_bytes == run.metrics.peak_hbm_bytes
        assert min(part.metrics.peak_hbm_bytes) > 4 * parameters  # with gradients and two moments


def test_a_window_lists_the_marks_there_are(run):
    with pytest.raises(emu.EmuError, match=r"no marks 'step 9' to 'end'; it marked step 0, step 1, end\n.*rank.mark"):
        run.window("step 9", "end")
    with pytest.raises(emu.EmuError, match="no marks"):
        run.window("end", "step 0")


def test_memory_and_metrics_agree_on_the_peak(run):
    assert run.metrics.peak_hbm_bytes == [run.memory.peak_bytes(rank) for rank in range(3)]
    for rank in range(3):
        assert sum(run.memory.at_peak(rank).values()) == run.memory.peak_bytes(rank)


# Files.


def everything(rank):
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2) * rank
    return {
        "tensor": torch.arange(3, dtype=torch.bfloat16),
        "empty": torch.ones(0, 4),
        "scalar": torch.tensor(float(rank)),
        "grads": emu.grads(model, {"weight": emu.Layout({"dp": emu.Partial("sum")})}),
        "plain": [1, 2.5, float("inf"), None, True, "text", ("a", {3: -1})],
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        layouts = getattr(a, "layouts", None) == getattr(b, "layouts", None)
        return layouts and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(("program", "mesh"), [(train, MESH), (everything, emu.Mesh(dp=2, tp=2, ep=2))])
def test_a_saved_run_comes_back_as_it_was(program, mesh, tmp_path):
    run = emu.launch(program, mesh, launch_mode="graph")
    run.save(tmp_path / "run.emu")
    back = emu.Run.load(tmp_path / "run.emu")
    assert same(back.results, run.results)
    assert dumps(back.trace) == dumps(run.trace) and back.launch_mode == "graph"
    assert (back.mesh.axes, back.mesh.folds) == (run.mesh.axes, run.mesh.folds)
    assert back.metrics == run.metrics and back.cluster == run.cluster
    assert list(tmp_path.iterdir()) == [tmp_path / "run.emu"]  # nothing is left beside it


def test_a_shape_run_is_saved_with_the_shapes_of_its_results(tmp_path):
    run = emu.launch(everything, emu.Mesh(dp=2), backend="shape")
    run.save(tmp_path / "run.emu")
    back = emu.Run.load(tmp_path / "run.emu")
    for a, b in zip(back.results, run.results):
        assert a["tensor"].is_meta and (a["tensor"].dtype, a["tensor"].shape) == (b["tensor"].dtype, b["tensor"].shape)
        assert a["grads"].layouts == b["grads"].layouts and a["plain"] == b["plain"]
    assert dumps(back.trace) == dumps(run.trace)


def test_a_cluster_that_emu_does_not_know_by_name_is_passed_again(tmp_path):
    from dataclasses import replace

    own = replace(emu.cluster("h100-8"), name="mine")
    run = emu.launch(train, emu.Mesh(dp=2, on=own))
    run.save(tmp_path / "run.emu")
    with pytest.raises(emu.EmuError, match=r"\"mine\".*\n.*Run.load\(path, on=cluster\)"):
        emu.Run.load(tmp_path / "run.emu")
    assert emu.Run.load(tmp_path / "run.emu", on=own).metrics == run.metrics


@pytest.mark.parametrize(("name", "nodes"), [("h100-8", None), ("h100", 2)])
def test_a_cluster_of_a_known_name_with_other_numbers_is_not_replaced(tmp_path, name, nodes):
    from dataclasses import replace

    known = emu.cluster(name, nodes)
    own = replace(known, chip=replace(known.chip, hbm_bytes_per_s=known.chip.hbm_bytes_per_s / 2))
    for on in (known, own):
        run = emu.launch(train, emu.Mesh(dp=2, on=on))
        run.save(tmp_path / "run.emu")
        if on is own:
            with pytest.raises(emu.EmuError, match=r"numbers are not those.*\n.*Run.load\(path, on=cluster\)"):
                emu.Run.load(tmp_path / "run.emu")
            assert emu.Run.load(tmp_path / "run.emu", on=own).metrics == run.metrics
        else:
            assert emu.Run.load(tmp_path / "run.emu").cluster == known


def test_a_saved_file_has_ordinary_permissions(run, tmp_path):
    run.save(tmp_path / "run.emu")
    (tmp_path / "other").write_text("")
    assert os.stat(tmp_path / "run.emu").st_mode == os.stat(tmp_path / "other").st_mode


def test_a_run_that_cannot_be_written_leaves_what_was_there(run, tmp_path, monkeypatch):
    target = tmp_path / "run.emu"
    target.write_text("before")
    wrong = emu.launch(lambda rank: torch.nn.Linear(1, 1), emu.Mesh(dp=1))
    with pytest.raises(emu.EmuError, match=r"result.*is a Linear.*\n.*return tensors"):
        wrong.save(target)

    def fails(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(emu.EmuError, match="no space left"):
        run.save(target)
    assert target.read_text() == "before" and list(tmp_path.iterdir()) == [target]


def test_a_folder_that_does_not_exist_is_an_error_that_says_so(run, tmp_path):
    with pytest.raises(emu.EmuError, match=r"cannot be written.*\n.*a folder that exists"):
        run.save(tmp_path / "no" / "run.emu")
    with pytest.raises(emu.EmuError, match="cannot be read as a saved run"):
        emu.Run.load(tmp_path / "run.emu")
    with pytest.raises(emu.EmuError, match="cannot be read as a saved run"):
        emu.Run.load(tmp_path)


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run.emu"
    run.save(path)
    return path.read_bytes()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_truncated_file_is_an_error_of_emus_and_no_other(saved, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "run.emu"
    path.write_bytes(saved[: data.draw(st.integers(0, len(saved) - 1))])
    with pytest.raises(emu.EmuError, match=r"run\.emu.*\n.*save it again"):
        emu.Run.load(path)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_file_with_a_wrong_byte_is_an_error_of_emus_or_still_the_same_run(saved, run, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "run.emu"
    at, bit = data.draw(st.integers(0, len(saved) - 1)), data.draw(st.integers(0, 7))
    path.write_bytes(saved[:at] + bytes([saved[at] ^ 1 << bit]) + saved[at + 1 :])
    try:
        back = emu.Run.load(path)
    except emu.EmuError:
        return
    assert same(back.results, run.results) and equal(back.trace, run.trace)  # the byte was one that nobody reads


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("run.json", b"{}"),
        ("run.json", b"[1, 2]"),
        ("run.json", b"\xff\xfe"),
        ("run.json", b"[" * 100_000),
        ("run.json", b'{"format": "emu run 2"}'),
        ("trace.jsonl", b""),
        ("trace.jsonl", b"not a trace"),
        ("results.safetensors", b"\0" * 8),
        ("results.safetensors", b"\xff" * 64),
        ("results.safetensors", None),
    ],
)
def test_a_file_whose_parts_are_wrong_is_an_error_of_emus(saved, tmp_path, part, content):
    (tmp_path / "good").write_bytes(saved)
    with zipfile.ZipFile(tmp_path / "good") as good, zipfile.ZipFile(tmp_path / "bad", "w") as bad:
        for name in good.namelist():
            if name != part:
                bad.writestr(name, good.read(name))
            elif content is not None:
                bad.writestr(name, content)
    emu.Run.load(tmp_path / "good")
    with pytest.raises(emu.EmuError, match="bad"):
        emu.Run.load(tmp_path / "bad")


@pytest.mark.parametrize(
    ("field", "value"),
    [("axes", {"dp": 0}), ("axes", {"dp": "3"}), ("axes", 3), ("folds", None), ("cluster", "abacus"), ("cluster", 7),
     ("nodes", -1), ("launch_mode", "warp"), ("launch_mode", 3), ("results", [["tensor"]]), ("results", 5)],
)  # fmt: skip
def test_a_file_whose_head_is_wrong_is_an_error_of_emus(saved, tmp_path, field, value):
    import json

    (tmp_path / "good").write_bytes(saved)
    with zipfile.ZipFile(tmp_path / "good") as good, zipfile.ZipFile(tmp_path / "bad", "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if name == "run.json":
                content = json.dumps(json.loads(content) | {field: value})
            bad.writestr(name, content)
    with pytest.raises(emu.EmuError, match="bad"):
        emu.Run.load(tmp_path / "bad")


def test_traces_that_differ_say_where():
    a, b = emu.launch(train, MESH, args=(1,)), emu.launch(train, MESH, args=(2,))
    found = first_difference(a.trace, b.trace)
    assert found is not None and "rank 0" in str(found)


def test_packages_are_there_after_import_emu():
    """In a process of its own: here others have imported them already."""
    found = subprocess.run(
        [sys.executable, "-c", "import emu; print(len(emu.hardware.chip_names()), emu.view.__name__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split()[1] == "emu.view"
