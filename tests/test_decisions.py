"""docs/decisions/: each page answers one question, is short, begins with its verdict, and is in the index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
INDEX = REPOSITORY / "docs/decisions/README.md"
PAGES = [page for page in sorted(INDEX.parent.glob("*.md")) if page != INDEX]
MOST_LINES, MOST_COLUMNS = 40, 120


def each(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


def title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


@each(PAGES)
def test_a_page_is_read_in_one_sitting(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MOST_LINES


@each([INDEX, *PAGES])
def test_lines_fit_the_screen(page: Path) -> None:
    assert not [line for line in page.read_text().splitlines() if len(line) > MOST_COLUMNS]


@each(PAGES)
def test_a_question_comes_first_and_then_the_verdict(page: Path) -> None:
    paragraphs = page.read_text().split("\n\n")
    assert re.fullmatch(r"# [^\n]+\?", paragraphs[0])
    assert re.match(r"\*\*Verdict\.\*\* \S", paragraphs[1])


@each(PAGES)
def test_figures_have_a_gpu_and_a_commit(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"\bH[12]00\b|\bno GPU\b", text)
    assert re.search(r"`[0-9a-f]{7}`", text)


def test_every_page_is_in_the_index_under_its_question() -> None:
    listed = re.findall(r"^  - \[(.+)\]\((.+)\)$", INDEX.read_text(), re.MULTILINE)
    assert set(listed) == {(title(page), page.name) for page in PAGES}


def test_kernels_that_the_index_names_exist() -> None:
    named = re.findall(r"^- `(.+)`$", INDEX.read_text(), re.MULTILINE)
    assert named and not [name for name in named if not (REPOSITORY / "cute_kernels" / name).exists()]
