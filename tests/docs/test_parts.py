"""What pages of the site are made of: docstrings as text, tables that leave nothing out, outputs that are compared."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from importlib import import_module
from importlib.resources import files

import pytest
from building import (
    PARTS,
    api,
    commands,
    compared,
    constants,
    docstrings,
    expanded,
    hardware,
    readme,
    refusals,
    sentences,
    stacks,
)
from building.markdown import plain, table
from docutils import nodes
from docutils.core import publish_doctree
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.clinic import show
from emu.cost import Metrics
from emu.equivalence import Verdict
from emu.hardware.packaged import parse_toml
from emu.hardware.presets import preset_tables

# What says where a number is from: a place to read it, how it was got, or that it was not.
FROM = re.compile(
    r"https?://|arxiv|doi |NVIDIA/|NCCL|DeepSpeed|forums\.|docs\.|stas00|DistributedDataParallel|emu[./]|tuning\.cc"
    r"|assumed|unverified|from memory|chosen|counted|derived|by definition|measured|fitted|float\d\d|int64",
    re.I,
)
DOCSTRING = """One sentence.

    a ring   of * two |
      and a second line

* first, over
  two lines
* second

Args:
    x, *rest: what it takes, [batch, seq],
        and more of it.
    y: a `Mesh`.

Raises:
    EmuError: it cannot be."""
ROOT = readme.ROOT
WORDS = st.text(st.characters(categories=("L", "N", "P", "S", "Zs"), exclude_characters="`"), max_size=40)


def read(lines):
    """A docstring as it is read on a page, and what docutils complains of."""
    told = publish_doctree(
        "\n".join(docstrings.restructured(lines)), settings_overrides={"report_level": 5, "halt_level": 6}
    )
    complaints = [found.astext() for found in told.findall(nodes.system_message)]
    return told, complaints


# Docstrings.


@given(WORDS.map(lambda text: " ".join(text.split())), st.text("abc_*", min_size=1, max_size=8))
def test_a_docstring_is_read_as_it_is_written(words, name):
    """Nothing but backticks is markup."""
    sentence = f"It takes {words} and `{name}` and ends."
    told, complaints = read([sentence])
    assert not complaints and told.astext() == sentence.replace("`", "")
    assert [code.astext() for code in told.findall(nodes.literal)] == [name]


def test_sections_bullets_and_what_is_drawn_keep_their_form():
    lines = DOCSTRING.splitlines()
    told, complaints = read(lines)
    assert not complaints
    assert [block.astext() for block in told.findall(nodes.literal_block)] == [
        "a ring   of * two |\n  and a second line"
    ]
    items = [item.astext() for item in told.findall(nodes.list_item)]
    assert items == [
        "first, over\ntwo lines",
        "second",
        "x, *rest: what it takes, [batch, seq],\nand more of it.",
        "y: a Mesh.",
        "EmuError: it cannot be.",
    ]
    assert [strong.astext() for strong in told.findall(nodes.strong)] == ["Arguments", "Raises"]


def test_without_the_conversion_docstrings_would_not_be_read_as_they_are_written():
    """Negative control: as reStructuredText this is emphasis and an unknown role."""
    text = "2 * x* and *args, or `any words`"
    told = publish_doctree(text, settings_overrides={"report_level": 5})
    assert told.astext() != text.replace("`", "") and read([text])[0].astext() == text.replace("`", "")


def described():
    """Full names on the pages of the contract, as often as they are described there."""
    text = [PARTS["api"](package) for package in api.PACKAGES] + [PARTS["more"](page) for page in api.MORE]
    return Counter(re.findall(r"^\.\. auto(?:class|function):: (\S+)$", "\n".join(text), re.M))


def test_every_public_object_says_what_it_is_for_and_is_described_once():
    found = described()
    assert set(found.values()) == {1} and {f"emu.{name}" for name in emu.__all__ if name != "spmd"} <= set(found)
    for full in found:
        module, _, name = full.rpartition(".")
        assert inspect.getdoc(getattr(import_module(module), name)), full
    for package in api.PACKAGES:
        text = PARTS["api"](package)
        assert all(f"{package}.{name}" in text for name in import_module(package).__all__)
    folders = [path.parent for path in (ROOT / "emu").glob("*/__init__.py")]
    packages = {f"emu.{folder.name}" for folder in folders if hasattr(import_module(f"emu.{folder.name}"), "__all__")}
    assert packages - set(api.PACKAGES) <= {"emu.demo", "emu.runfiles"}  # `emu demo`, and the form of saved runs


def test_what_the_readme_and_lessons_use_is_described():
    found = described()
    blocks = re.findall(r"```python\n(.*?)```", readme.whole(), re.S)
    lessons = [path.read_text(encoding="utf-8") for path in (ROOT / "lessons").glob("*.py")]
    used = [node for text in (*blocks, *lessons) for node in ast.walk(ast.parse(text)) if type(node) is ast.ImportFrom]
    names = {(node.module, alias.name) for node in used if str(node.module).startswith("emu") for alias in node.names}
    assert len(names) > 60
    for module, name in names:
        value = getattr(import_module(module), name, None)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert api.home().get(id(value)) in found, (module, name)


def test_what_a_plan_and_a_group_offer_is_described():
    assert {"all_reduce", "ring_shift", "barrier", "exchange", "scatter"} <= set(api.members(emu.Group))
    assert {"next", "back", "until", "at", "close", "collective"} <= set(api.members(emu.stepping.Stepper))
    assert {"metrics", "timeline", "check", "without", "save", "load", "gather_results"} <= set(api.members(emu.Run))


# Commands.


def test_every_command_and_every_flag_has_a_row_and_says_what_it_is_for():
    text = PARTS["commands"]()
    assert list(commands.commands()) == re.findall(r"^## emu (\w+)$", text, re.M)
    for name, command in commands.commands().items():
        for option in command.params:
            assert option.help, (name, option.name)
            if option.param_type_name == "option":
                assert all(f"`{flag}`" in text for flag in (*option.opts, *option.secondary_opts)), (name, option.name)


def test_keys_of_json_are_those_that_commands_print():
    keys = commands.keys()
    verdict = Verdict(True, "exact", 0.0, "", 1, 0)
    assert set(keys["verify"]) == set(verdict.as_dict())
    metrics = inspect.signature(Metrics).parameters
    assert all(f"`{name}`" in keys["run"]["metrics"] for name in metrics)
    shown = emu.clinic.case(27)
    assert all(f"`{key}`" in keys["clinic"]["cases"] for key in show.as_dict(shown))
    for command, name in (("demo", "emu.demo.findings"), ("validate", "emu.validate.report")):
        source = inspect.getsource(import_module(name))
        body = source[source.index("def as_dict") :].partition("\n\n    def ")[0]
        printed = set(re.findall(r'^            "(\w+)":', body, re.M))
        assert printed <= set(keys[command]), printed - set(keys[command])
    with emu.step(lambda rank: None, emu.Mesh(dp=1)) as stepper:
        assert {*stepper.state(times=False), "refused"} == set(keys["step"])
        assert all(f"`{key}`" in keys["step"]["ranks"] for key in stepper.state(times=False)["ranks"][0])
    assert all(meaning for meanings in keys.values() for meaning in meanings.values())


# The cost model.


@pytest.mark.parametrize("file", ["chips", "links", "nodes", "clusters"])
def test_no_number_of_hardware_is_without_a_source(file):
    found = [(key, *number) for key, entry in preset_tables(file).items() for number in hardware.numbers(entry)]
    assert len(found) > 20 and [number for number in found if not number[-1]] == []
    text = PARTS[file]()
    assert text.count("\n| `") == len(found)  # a row each


def test_a_number_without_a_source_is_found():
    """Negative control."""
    entry = {"hbm_bytes": 1, "rates": {"a": 1.0, "b": 2.0}, "sources": {"hbm_bytes": "a page", "rates.a": "another"}}
    assert [name for name, _, source in hardware.numbers(entry) if not source] == ["rates.b"]
    assert all(source for *_, source in hardware.numbers({**entry, "sources": {"default": "a page"}}))


def test_every_fitted_constant_is_listed_with_its_prior():
    text = PARTS["fitted"]()
    names = [f"{family}.{name}" for family, inner in fitted_file().items() for name in inner]
    assert names and all(f"| `{name}` |" in text for name in names)
    assert all("prior:" in inner["source"] for family in fitted_file().values() for inner in family.values())


def fitted_file():
    return parse_toml((files("emu.hardware") / "data" / "fitted.toml").read_text(encoding="utf-8"))


def test_every_number_of_the_cost_model_in_code_says_where_it_is_from():
    found = list(constants.numbers())
    assert len(found) > 50 and {number.where for number in found} >= {
        "emu/cost/energy.py",
        "emu/planner/closed/host.py",
    }
    assert [f"{n.where}:{n.line} {n.name}: {n.said}" for n in found if not FROM.search(n.said)] == []
    assert all(f"`{number.name}`" in PARTS["constants"]() for number in found)


def test_a_number_in_code_without_a_word_is_found():
    """Negative control; and a comment above a block holds for all of it but for what has words of its own."""
    source = "# Assumed.\nA = 1\nB = (2.0, 'x')  # counted\n\nC = 3\nD = len('x')\ne = 4\n"
    assert [(n.name, n.said) for n in constants.numbers_of(source, "f.py")] == [
        ("A", "Assumed"),
        ("B", "counted"),
        ("C", ""),
    ]


def test_every_stack_says_where_its_facts_are_from():
    entries = stacks.entries()
    assert [(name, fact) for name, entry in entries.items() for fact in stacks.facts(entry) if not fact[-1]] == []
    assert all(f"## {name}\n" in PARTS["stacks"]() for name in entries)


# What is refused.


def test_every_row_of_the_readme_is_refused_with_the_reason_that_it_gives():
    rows = refusals.rows()
    assert len(rows) > 20
    for plan, model, why, _ in rows:
        assert why in refusals.refused(plan, model).message
    with pytest.raises(ValueError, match="it is not"):
        refusals.refused('mesh="dp=2"', "dense")


# Outputs that are stated.


def page(*blocks):
    """A page as myst-nb makes it: cells with what they put out, and blocks of text."""
    document = publish_doctree("")
    for kind, text in blocks:
        block = nodes.literal_block(text, text, language="text" if kind == "stated" else "python")
        if kind == "cell":
            printed = nodes.literal_block(text, text)
            inner = nodes.container("", printed, classes=["cell_output"])
            block = nodes.container("", inner, classes=["cell"])
        document.append(block)
    return document


def test_an_output_that_is_not_stated_or_not_what_is_stated_is_found():
    right = page(("cell", "1\n2 \n"), ("stated", "1\n2"), ("cell", ""), ("code", "x"), ("cell", "3"), ("stated", "3\n"))
    assert compared.differences(right) == [] and len(list(compared.cells(right))) == 3
    for wrong in (
        page(("cell", "1"), ("stated", "2")),
        page(("cell", "1"), ("code", "1")),
        page(("cell", "1")),
        page(("cell", ""), ("stated", "1")),
        page(("cell", "1"), ("cell", "1"), ("stated", "1")),
        page(("cell", "1\n2"), ("stated", "1")),
    ):
        assert len(compared.differences(wrong)) == 1, wrong.pformat()


@given(st.lists(st.text("ab \n", max_size=8), min_size=1, max_size=4), st.data())
def test_any_line_that_differs_is_found(outputs, data):
    same = [block for said in outputs for block in (("cell", said), ("stated", said))]
    assert compared.differences(page(*same)) == []
    changed = data.draw(st.integers(0, len(outputs) - 1))
    same[2 * changed + 1] = ("stated", f"{outputs[changed]}\nc")
    assert len(compared.differences(page(*same))) == 1


def test_long_sentences_wrap_and_columns_do_not():
    hint, row = "  hint: " + "let all ranks call it. " * 5, "rank 0  F0 F1  " + "B0--- " * 20
    for text, wraps in (hint, True), (row, False), (f"a  b\n{hint}", True), (f"{hint}\n{row}", False), ("a b", False):
        told = page(("cell", text), ("code", text))
        sentences.wrap(None, told)
        block, source = told.findall(nodes.literal_block)
        assert ("sentences" in block["classes"]) == wraps and "sentences" not in source["classes"], text
    style = (ROOT / readme.SITE / "static" / "site.css").read_text(encoding="utf-8")
    assert ".sentences pre {\n  white-space: pre-wrap;" in style


# Text.


@given(st.lists(WORDS, min_size=1, max_size=3))
def test_text_in_a_table_stays_text(cells):
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(table(["a"] * len(cells), [[plain(cell) for cell in cells]]))
    inline = [token for token in tokens if token.type == "inline"][len(cells) :]
    assert ["".join(c.content for c in token.children) for token in inline] == [" ".join(c.split()) for c in cells]


def test_links_of_the_readme_lead_somewhere_from_a_page():
    text = "![a](lessons/images/step.png) [b](lessons/00_tour.ipynb) [c](emu/run.py) [d](https://x.org/y) [e](#f)"
    assert readme.linked(text, "api/page") == (
        "![a](../../images/step.png) [b](../lessons/00_tour.lesson) c [d](https://x.org/y) [e](#f)"
    )
    assert readme.linked(text, "start").startswith("![a](../images/step.png) [b](lessons/00_tour.lesson)")


def test_a_section_of_the_readme_ends_where_the_next_one_begins():
    found = readme.section("How much a check would notice: mutants")
    assert "# step.py" in found and "Where a wrong program" not in found  # a comment in a block is no heading
    with pytest.raises(ValueError, match="no heading"):
        readme.section("How much")


def test_a_part_that_nobody_writes_is_an_error():
    assert expanded("% a comment\ntext") == "% a comment\ntext"
    with pytest.raises(KeyError):
        expanded("% from nowhere")


def test_the_site_stays_out_of_what_is_installed():
    project = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["emu"]
    assert {"sphinx", "myst-nb", "furo"} <= set(project["project"]["optional-dependencies"]["docs"])
