"""A saved run from a stranger is a run, or an error that says what is wrong and where; never anything else, and at once."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import emu
from emu.export import chrome_json, perfetto_bytes, run_page, snapshot_bytes
from emu.hardware import HardwareError
from emu.runfiles.archive import MOST_TIMES, pack, unpack
from emu.runfiles.errors import Refused
from emu.spmd import EmuError
from emu.trace.events import Use, Wait
from emu.trace.trace import Trace

from . import hostile
from .hostile import HEAD, RESULTS, TRACE, packed, with_events


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, bytes]:
    return hostile.saved(tmp_path_factory.mktemp("good") / "run")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "run.emu"


def refused(path: Path, content: bytes | None, says: str, do: str = "save it again") -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EmuError) as caught:
        emu.Run.load(path)
    message, hint = caught.value.message, caught.value.hint
    assert says in message and do in hint, f"{message}\n{hint}"
    assert str(path) in message and message.isprintable() and len(message) < 1000


def looked_at(run: emu.Run) -> None:
    """All that is done with a run."""
    timeline, memory = run.timeline(), run.memory
    assert (
        repr(run)
        and repr(run.metrics)
        and repr(memory)
        and repr(run.trace)
        and timeline.spans.keys() == {*run.trace.ranks}
    )
    assert chrome_json(timeline) and perfetto_bytes(timeline, memory) and snapshot_bytes(memory, timeline)
    assert all(str(one) for one in run.advice())
    if any(True for _ in run.trace.of(Use)):
        assert repr(run.hazards())


# Properties: whatever is changed.


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_run_that_says_something_else_is_refused_or_a_run_like_any_other(good, place, data):
    place.write_bytes(data.draw(hostile.altered(good)))
    try:
        run = emu.Run.load(place)
    except EmuError as error:
        assert error.hint and error.message.isprintable()
        return
    try:
        looked_at(run)
    except (EmuError, HardwareError) as error:  # ranks that wait for ever, or a dtype that the chip does not have
        assert error.hint


def test_a_run_that_says_the_same_is_read(good, place):
    """The negative control: it is not the packing that is refused."""
    place.write_bytes(packed(good))
    looked_at(emu.Run.load(place))
    page = run_page(emu.Run.load(place))
    assert "</html>" in page


def test_cut_short_at_any_byte_it_is_refused(good, place):
    whole = pack(good)
    for end in range(0, len(whole), 3):
        refused(place, whole[:end], "cannot be read as a saved run")


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_with_other_bytes_it_is_refused_or_the_same_run(good, place, data):
    whole = bytearray(pack(good))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at : at + data.draw(st.integers(1, 8))] = data.draw(st.binary(min_size=1, max_size=8))
    place.write_bytes(bytes(whole))
    try:
        assert len(emu.Run.load(place).trace) > 0
    except EmuError as error:
        assert error.hint


# What is no file of ours at all.


@pytest.mark.parametrize("make", ["fifo", "device", "folder", "link to a fifo", "nothing", "empty"])
def test_what_is_no_ordinary_file_is_refused_and_never_waited_for(tmp_path, make):
    path = tmp_path / "it"
    if make == "fifo":
        os.mkfifo(path)
    elif make == "device":
        path.symlink_to("/dev/zero")
    elif make == "folder":
        path.mkdir()
    elif make == "link to a fifo":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    elif make == "empty":
        path.touch()
    says = {
        "fifo": "a pipe",
        "device": "a device",
        "folder": "a folder",
        "link to a fifo": "a pipe",
        "nothing": "No such file",
    }
    refused(path, None, says.get(make, "not a zip file"), "name a file" if make != "empty" else "save it")


@pytest.mark.parametrize("path", [None, 5, 2.5, ["run"]], ids=repr)
def test_what_is_no_path_is_told(path):
    with pytest.raises(EmuError, match=r"path of a saved run is a .*\n.*as a text or a Path"):
        emu.Run.load(path)


def test_a_link_to_a_saved_run_is_read(good, tmp_path):
    (tmp_path / "run").write_bytes(packed(good))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert len(emu.Run.load(tmp_path / "link").trace)


# Zips.


def test_a_part_that_unpacks_to_far_more_than_it_takes_is_not_unpacked(good, place):
    bomb = packed({**good, TRACE: b"0" * 50_000_000})
    assert len(bomb) < 60_000
    refused(place, bomb, f"more than {MOST_TIMES} times")


def test_what_compresses_that_well_is_written_so_that_it_can_be_read(good, place):
    place.write_bytes(pack({**good, TRACE: b"0" * 5_000_000}))
    assert unpack(place)[TRACE] == b"0" * 5_000_000


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_of_packing_are_refused(good, place, how):
    refused(place, packed(good, how), "packed in a way in which emu packs nothing")


def test_parts_that_are_missing_strange_or_there_twice(good, place):
    for part in good:
        refused(place, packed({name: good[name] for name in good if name != part}), f"it holds no {part}")
    refused(place, packed({**good, "../../evil.py": b"x"}), "more than a run has")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(place, "w") as archive:
        for name in (*good, HEAD):
            archive.writestr(name, good[name])
    refused(place, None, "run.json twice")


@pytest.mark.parametrize("at", ["compressed", "size"])
def test_sizes_that_the_file_does_not_have(good, place, at):
    """In the zip's directory, where sizes stand at 20 and 24 of an entry."""
    whole = bytearray(pack(good))
    entry = whole.index(b"PK\x01\x02")
    struct.pack_into("<I", whole, entry + (20 if at == "compressed" else 24), 0x7FFFFFFF)
    refused(place, bytes(whole), "cannot be read as a saved run")


# The head.


def results(value: Any) -> dict[str, Any]:
    return {"results": {"dict": [[0, value]]}}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"list": [value]}
    return value


HEADS = [
    ({"axes": {"dp": 10**12}}, "1,000,000,000,000 ranks or more"),
    ({"axes": {f"a{i}": 2 for i in range(5000)}}, "ranks or more"),
    ({"axes": {"dp": 16}}, "has 16 ranks, but h100-8 has 8 devices"),
    ({"axes": {"on": 2}}, "axes names 'on'"),
    ({"axes": {"self": 2}}, "axes names 'self'"),
    ({"axes": {"dp": True}}, "axes['dp'] is True, not a whole number"),
    ({"axes": {"dp": -2}}, "axes['dp'] is -2"),
    ({"axes": {"dp": 2.0}}, "axes['dp'] is 2.0"),
    ({"axes": {"tp": 2}}, "its mesh is not the tp=2 of run.json"),
    ({"folds": {"pp": 2}}, "folds names 'pp'"),
    ({"folds": {"ep": 3}}, "does not divide"),
    ({"cluster": "../../../etc/passwd"}, "is not a chip or cluster that emu knows"),
    ({"cluster": "h100-8" * 100}, "not a text of up to 200 characters"),
    ({"nodes": 10**12}, "nodes is 1000000000000"),
    ({"nodes": True}, "nodes is True"),
    ({"launch_mode": ["eager"]}, "launch_mode is a list, not one of eager"),
    ({"no_memory": {}}, "no_memory is a table"),
    ({"cluster_digest": 5}, "cluster_digest is 5"),
    ({"held": {"0": {"parameters": 2**63}}}, "held of rank 0['parameters'] is 9223372036854775808"),
    ({"held": {"0": {"parameters": float("nan")}}}, "NaN is no number"),
    ({"held": {"00": {}}}, "held names '00'"),
    ({"held": {"7": {}}}, "held names '7'"),
    ({"held_by_host": {"0": -1}}, "held_by_host[0] is -1"),
    ({"standing": {"counts": {"0": 1, "1": 1}}}, "standing is a table, not a table of counts and levels"),
    ({"standing": {"counts": {"0": 1, "1": 9}, "levels": [8]}}, "its ranks do not stand for the 2 of its mesh"),
    ({"more": 1}, "it says 'more', which no run has"),
    ({"results": {"list": [1]}}, "results: it does not hold 2 results"),
    ({"results": {"dict": [[9, 1]]}}, "results: it does not hold 2 results"),
    (results([1]), "results[0] is a list, which is no value"),
    (results({"pickle": "x"}), "results[0] is of unknown kind 'pickle'"),
    (results({"meta": ["load", [1]]}), "results[0] has the dtype 'load', which there is not"),
    (results({"meta": ["float32", [2**62, 2**62]]}), "results[0] has the shape"),
    (results({"float": "one"}), "results[0] is 'one', which is no number"),
    (results({"dict": [[{"list": []}, 1]]}), "has a key that is a list"),
    (results({"dict": [[1, 1], [1, 2]]}), "has the key 1 twice"),
    (results({"layout": [["dp", 5]]}), "places axis 'dp' by a int"),
    (results({"partial": "eval"}), "there is no Partial('eval')"),
    (results({"tensor": ["float32", [9, 9]]}), "results[0] is said to be a torch.float32[9, 9], but its values are"),
    (results(deep(200)), "is nested more than 100 levels deep"),
    (results(1), "it has tensors that are no results"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "says"), HEADS, ids=[says[:40] for _, says in HEADS])
def test_a_head_that_cannot_be_says_which_field_is_wrong(good, place, said, says):
    refused(place, packed({**good, HEAD: json.dumps(json.loads(good[HEAD]) | said).encode()}), says, "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"format": "emu run 1", "format": "emu run 1"}', "it says 'format' twice"),
        (b'{"nodes": ' + b"9" * 100_000 + b"}", "it is no JSON"),
        (b'{"nodes": "\xff"}', "it is no JSON"),
        (b"[" * 1_000_000, "nested too deeply"),
    ],
)
def test_a_head_that_is_no_strict_json(good, place, text, says):
    refused(place, packed({**good, HEAD: text}, zipfile.ZIP_STORED), says)


def test_tensors_that_are_not_those_of_the_results(good, place):
    refused(place, packed({**good, RESULTS: save({})}), "is a tensor, of which the values are missing")
    refused(place, packed({**good, RESULTS: (1 << 60).to_bytes(8, "little") + b"{}"}), "it is damaged: SafetensorError")


# Events.


def collective(kind: str = "all_reduce", **other: Any) -> list[Any]:
    said = {"group": "dp", "members": [0, 1], "seq": 0, "bytes": 8, "sizes": [], "dtype": "float32", "op": "sum"}
    said |= {"algorithm": "", "root": -1, "stream": "c", "after": "default", "work": 1, "name": ""}
    return ["C", kind, *(said | other).values()]


def kernel(**other: Any) -> list[Any]:
    said = {
        "name": "mm",
        "scope": "",
        "phase": "",
        "flops": 1,
        "bytes": 1,
        "dtype": "float32",
        "dims": [],
        "stream": "s",
    }
    return ["K", *(said | other).values()]


EVENTS = [
    ([kernel(phase="sideways")], "is of phase 'sideways'"),
    ([kernel(dtype="load")], "computes in 'load'"),
    ([kernel(dims=[1, 2])], "has the sizes (1, 2), which no matrix product"),
    ([kernel(dims=[1, 0, 1, 1])], "has the sizes (1, 0, 1, 1)"),
    ([kernel(stream="\0")], "has '\\x00' for a stream"),
    ([kernel(stream=str(i)) for i in range(200)], "uses more than 128 streams"),
    ([kernel(bytes=2**63)], "bytes of a Kernel is '9223372036854775808'"),
    ([kernel(bytes=True)], "bytes of a Kernel is 'True'"),
    ([kernel(bytes=1e3)], "bytes of a Kernel is '1000.0'"),
    ([collective("eval")], "is a 'eval' by algorithm ''"),
    ([collective(algorithm="magic")], "by algorithm 'magic'"),
    ([collective(members=[])], "are no group of the mesh's 2 ranks"),
    ([collective(members=[0, 0])], "are no group of the mesh's 2 ranks"),
    ([collective(members=[0, 2])], "are no group of the mesh's 2 ranks"),
    ([collective(members=[1])], "of which this rank is none"),
    ([collective(sizes=[1])], "has 1 sizes for 2 members"),
    ([collective(root=2)], "has the root 2, but 2 members"),
    ([collective(root=-5)], "has the root -5"),
    ([collective(), collective(seq=1)], "has the number 1, which another communication has"),
    ([["T", "send", "dp", 1, 0, 0, 8, "float32", "p", "default", 1, ""]], "is a 'send' from rank 1 to rank 0"),
    ([["T", "send", "dp", 0, 0, 0, 8, "float32", "p", "default", 1, ""]], "is a 'send' from rank 0 to rank 0"),
    ([["T", "send", "dp", 0, 7, 0, 8, "float32", "p", "default", 1, ""]], "is a 'send' from rank 0 to rank 7"),
    (
        [["T", "send", "dp", 0, 1, i, 8, "float32", "p", "default", i, ""] for i in range(2000)],
        "is one of more than 1024 that are posted at once",
    ),
    ([["P", "to_mars", 1, 8, "float32", "s", ""]], "is a 'to_mars', which is no copy"),
    ([["Q", 1, 8]], "gives back 8 bytes, which the host does not hold"),
    ([["W", 3, "s"]], "waits for work 3, which nothing before it started"),
    ([["E", 3, "s"]], "waits for event 3, which nothing before it recorded"),
    ([["H", "", "event " + "9" * 50]], "waits for 'event 999"),
    ([["A", 1, 8, "treasure", "s"]], "is of 'treasure', which is no kind of memory"),
    ([["A", 1, 8, "temporary", "s"]] * 2, "has the number 1, which another block has"),
    ([["A", i, 2**61, "temporary", "s"] for i in range(3)], "makes temporary larger than"),
    ([["F", 1, 8, "temporary"]], "is of block 1, which does not live"),
    ([["A", 1, 8, "temporary", "s"], ["F", 1, 9, "temporary"]], "is of block 1 with 9 bytes"),
    ([["A", 1, 8, "temporary", "s"], *[["F", 1, 8, "temporary"]] * 2], "is of block 1, which does not live"),
    ([["A", 1, 8, "temporary", "s"], ["G", 1, 8, "gradients", "temporary"]], "of 'gradients'; it has 8 of temporary"),
    ([["U", 1, 0, 8, "read", "s", 0, "", "", ""]], "is of block 1, which never lived"),
    ([["U", 1, 9, 8, "read", "s", 0, "", "", ""]], "is a 'read' of the bytes 9 to 8"),
    ([["O", "wait_any", [5], 0, ""]], "is a 'wait_any' among the communications (5,)"),
    ([["K", *[{}] * 8]], "name of a Kernel is '{}'"),
    ([["X"]], "no event starts like"),
    ([[]], "no event starts like"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "says"), EVENTS, ids=[f"{i} {says[:30]}" for i, (_, says) in enumerate(EVENTS)])
def test_an_event_that_cannot_be_is_named_with_its_line(good, place, lines, says):
    refused(place, with_events(good, *lines), says)
    place.write_bytes(with_events(good, *lines))
    with pytest.raises(EmuError, match=r"trace\.jsonl, line \d+: "):
        emu.Run.load(place)


def test_the_line_is_that_of_the_event(good, place):
    refused(place, with_events(good, kernel(), ["M", "here"], ["W", 3, "s"]), "trace.jsonl, line 4: Wait of rank 0")


def test_events_that_can_be_are_read(good, place):
    """The negative control of the table above."""
    lines = [
        kernel(),
        kernel(flops=0, dims=[1, 0, 6, 6]),
        kernel(name="flash_attention", flops=0, dims=[1, 5, 0, 0]),
        collective(),
        ["A", 1, 8, "temporary", "s"],
        ["W", 1, "s"],
        ["F", 1, 8, "temporary"],
    ]
    place.write_bytes(with_events(good, *lines))
    looked_at(emu.Run.load(place))


def test_a_record_of_a_rank_that_the_mesh_does_not_have(good, place):
    refused(place, with_events(good, kernel(), rank=2), "it has a record of rank 2, but the mesh has 2 ranks")


def test_ranks_that_wait_for_ever_are_told_when_they_are_priced(good, place):
    head = json.loads(good[HEAD]) | {"results": {"dict": []}}
    lines = [{"emu_trace": 1, "axes": [["dp", 2]], "ranks": [[0, 1], [1, 0]]}, collective()]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    place.write_bytes(packed({HEAD: json.dumps(head).encode(), TRACE: text.encode(), RESULTS: save({})}))
    with pytest.raises(EmuError, match=r"never ends.*\n(.*\n)*.*hint: "):
        _ = emu.Run.load(place).metrics


# Work: what grows faster than the file is counted here, not timed.


def test_equal_lines_make_one_event(good, place):
    place.write_bytes(with_events(good, *[kernel()] * 10_000))
    events = emu.Run.load(place).trace[0]
    assert len(events) == 10_000 and len({id(event) for event in events}) == 1


def test_an_uneven_all_to_all_of_many_is_priced_without_looking_at_every_pair(good, place):
    n = 4096  # 17 million pairs, each of which would be looked at several times
    event = collective("all_to_all", members=[*range(n)], sizes=[*range(1, n + 1)], op="")
    head = json.loads(good[HEAD]) | {"cluster": "h100", "nodes": n // 8, "cluster_digest": None}
    place.write_bytes(with_events({**good, HEAD: json.dumps(head).encode()}, event, axes={"dp": n}))
    assert emu.Run.load(place).metrics.step_time_s > 0


def test_what_cannot_be_read_is_not_saved(tmp_path):
    run = emu.launch(lambda rank: rank.mark("only"), emu.Mesh(dp=2))
    broken = emu.Run(None, run.mesh, run.cluster, run.results, Trace(run.trace.axes, {0: [Wait(3, "s")]}))
    with pytest.raises(EmuError, match=r"cannot be saved: Wait of rank 0 waits for work 3.*\n.*hint"):
        broken.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_results_that_could_not_be_read_are_not_saved(tmp_path):
    for result, says in ((10**5000, "is a int"), (_deep_list(150), "nested more than 100 levels deep")):
        run = emu.launch(lambda rank, result=result: result, emu.Mesh(dp=1))
        with pytest.raises(EmuError, match=says):
            run.save(tmp_path / "run")


def _deep_list(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_refusals_carry_their_place():
    assert str(Refused("trace.jsonl, line 7", "no")) == "trace.jsonl, line 7: no" and str(Refused("", "no")) == "no"
