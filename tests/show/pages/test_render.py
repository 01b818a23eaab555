"""Templates: everything is escaped, nothing is left undefined, and all of them are in the package."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from jinja2 import UndefinedError

from foretrain.show.pages.render import (
    TEMPLATES,
    Cell,
    PageTable,
    as_data,
    macro,
    number,
    percent,
    sentence,
    settings_table,
)

NAMES = ("base.html", "comparison.html", "parts.html", "report.html", "report_sections.html", "sweep.html")
HOSTILE = '<b onclick="x">&\''


def test_all_templates_and_assets_are_in_the_package() -> None:
    folder = resources.files("foretrain.show.pages")
    assert sorted(TEMPLATES.list_templates()) == sorted(NAMES)
    assert all(folder.joinpath("templates", name).is_file() for name in NAMES)
    assert folder.joinpath("assets", "LICENSE-uPlot").is_file()


def test_only_the_packages_own_style_script_and_data_are_marked_safe() -> None:
    marked = {}
    for name in NAMES:
        text = resources.files("foretrain.show.pages").joinpath("templates", name).read_text(encoding="utf-8")
        marked[name] = re.findall(r"{{ *([^|{}]*?) *\| *safe", text)
        assert "autoescape" not in text
    assert marked.pop("base.html") == ["style", "data", "script"]
    assert not any(marked.values())


@pytest.mark.parametrize(
    "shown",
    [
        HOSTILE,
        Cell(HOSTILE),
        Cell(HOSTILE, HOSTILE),
        Cell(HOSTILE, code=True),
        Cell(HOSTILE, href=HOSTILE),
        Cell("x", unit=HOSTILE, small=[HOSTILE, Cell(HOSTILE)]),
    ],
)
def test_whatever_a_cell_holds_is_text(shown: Cell | str) -> None:
    made = macro("parts.html", "table", PageTable(HOSTILE, [HOSTILE], [[shown]]))
    assert "<b" not in made
    assert not re.search(r"=\"[^\"]*[<>]", made)
    assert "&lt;b onclick=&#34;x&#34;&gt;&amp;&#39;" in made


def test_what_a_template_asks_for_must_be_there() -> None:
    with pytest.raises(UndefinedError):
        TEMPLATES.get_template("base.html").render(title="x")


def test_a_number_is_shown_rounded_and_kept_whole() -> None:
    assert number(-1.23456789, "+.2f", " %") == Cell("−1.23 %", -1.23456789)
    assert number(2.5) == Cell("2.5000", 2.5)
    assert percent(0.1234) == Cell("12.3 %", 0.1234)
    assert [number(value) for value in (None, float("nan"), "2", True)] == [None] * 4
    assert macro("parts.html", "cell", number(1.5, ".1f")) == '<data value="1.5">1.5</data>'
    assert "unknown" in macro("parts.html", "cell", None)


def test_columns_of_numbers_stand_to_the_right() -> None:
    made = macro("parts.html", "table", PageTable("", ["a", "b", "c"], [["1", "2", "3"]], 1, 2))
    assert re.findall(r"<td([^>]*)>(\d)", made) == [("", "1"), (' class="number"', "2"), ("", "3")]


def test_settings_are_dotted_names() -> None:
    rows = settings_table({"optimizer": {"type": "muon"}, "data": None}).rows
    texts = [[cell.text for cell in row if isinstance(cell, Cell)] for row in rows]
    assert texts == [["optimizer.type", "muon"], ["data", "not set"]]


def test_a_sentence_has_true_minus_signs_and_units_that_stay_with_their_numbers() -> None:
    assert sentence("it cost -1.5 % of 3 s, not well-known") == "It cost −1.5\u00a0% of 3\u00a0s, not well-known"
    assert sentence(None) == ""


def test_data_cannot_end_its_element() -> None:
    assert as_data({"</script>": "<!--&"}) == '{"\\u003c/script\\u003e":"\\u003c!--\\u0026"}'
