"""Launch settings of others as data: rows in order, conditions, linear values, and files that are refused."""

from __future__ import annotations

import pytest

from ridgeline.errors import InputError
from ridgeline.resources import data_dir
from ridgeline.validation import publications
from ridgeline.validation.publications import Table

FILE = """
[sources]
paper = { what = "a paper", date = "2024-05" }
[facts]
engine = ["model", "tokens", "new"]
[tables]
engine = [
%s
]
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The table ``engine`` of a file with these rows."""
    (tmp_path / "publications").mkdir()
    monkeypatch.setattr(publications, "data_dir", lambda: tmp_path)

    def written(*rows: str) -> Table:
        (tmp_path / "publications" / "x.toml").write_text(FILE % ",\n".join(rows))
        return publications.publications.__wrapped__("x")["engine"]

    return written


@pytest.mark.parametrize("path", sorted((data_dir() / "publications").glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_is_read_and_every_source_is_used(path):
    tables = publications.publications(path.stem)
    used = {row.source for table in tables.values() for row in table.rows}
    text = path.read_text(encoding="utf-8")
    assert all(f"\n{name} = " in text.partition("[facts]")[0] for name in used)
    assert len(used) == text.partition("[facts]")[0].count("what = ")


def test_the_first_row_that_holds_decides_name_by_name(table):
    rows = table('{ when = { new = true }, set = { kv = "fp8" }, source = "paper" }',
                 '{ set = { kv = "bf16", chunk = 512 }, source = "paper" }')  # fmt: skip
    facts = {"model": "opt", "tokens": 8, "new": True}
    assert rows.choose(facts) == {"kv": "fp8", "chunk": 512}
    assert rows.choose(facts | {"new": False}) == {"kv": "bf16", "chunk": 512}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('model = "opt"', False), ('model = "opt-1b"', True), ('model = "!= opt"', True), ('model = "~ ^opt"', True),
        ('model = "!~ ^opt"', False), ('model = ["opt-1b", "gpt"]', True), ("tokens = 64", True),
        ("tokens = [4, 8]", False), ('tokens = "> 64"', False), ('tokens = ">= 64"', True), ("new = false", True),
        ('tokens = "< 6.5e1"', True), ('tokens = "!= 64"', False), ("new = true", False),
        ('new = false, tokens = "> 64"', False),
    ],
)  # fmt: skip
def test_conditions_compare_values(table, condition, holds):
    rows = table(f'{{ when = {{ {condition} }}, set = {{ found = true }}, source = "paper" }}')
    assert (rows.choose({"model": "opt-1b", "tokens": 64, "new": False}) == {"found": True}) == holds


def test_values_may_be_linear_in_facts_and_in_values_before(table):
    rows = table('{ set = { chunk = { tokens = 2, at_least = 100 } }, source = "paper" }',
                 '{ set = { batch = { tokens = 1, plus = 3, multiple_of = 16 } }, source = "paper" }')  # fmt: skip
    assert rows.choose({"model": "", "tokens": 30, "new": True}) == {"chunk": 100, "batch": 48}
    assert rows.choose({"model": "", "tokens": 61, "new": True}) == {"chunk": 122, "batch": 64}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{ set = { a = 1 } }', "a row has set and source"),
        ('{ when = { new = true }, source = "paper" }', "a row has set and source"),
        ('{ set = { a = 1 }, source = "papers" }', "names the source 'papers'; did you mean 'paper'"),
        ('{ when = { modle = "opt" }, set = { a = 1 }, source = "paper" }', "depends on 'modle'; did you mean 'model'"),
        ('{ set = { a = { token = 2 } }, source = "paper" }', "depends on 'token'"),
        ('{ when = { model = "~ (" }, set = { a = 1 }, source = "paper" }', "no regular expression"),
        ('{ when = { model = 1 ', "cannot be read"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_meant_are_refused_when_read(table, row, why):
    with pytest.raises(InputError) as refused:
        table(row)
    assert why in str(refused.value)
    assert "x.toml" in str(refused.value)
