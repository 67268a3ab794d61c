"""Parsed pages of the documentation: their code blocks and their inline code."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
README, DOCS = REPOSITORY / "README.md", REPOSITORY / "docs"
PAGES = [page for pattern in ("*.md", "docs/**/*.md", "perf/README.md") for page in sorted(REPOSITORY.glob(pattern))]


def each(pages: list[Path]) -> Any:
    """Return a decorator that runs a test once for each of `pages`."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(REPOSITORY)))


class Block(NamedTuple):
    """A code block of a page, or setup code that the page hides in a comment.

    Attributes:
        line: line number at which its text begins.
        info: the word after the fence, such as "python" or "pycon"; empty: none.
    """

    text: str
    line: int
    is_python: bool
    info: str = ""


@functools.cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@functools.cache
def blocks(page: Path) -> list[Block]:
    found = []
    for token in tokens(page):
        if token.type == "html_block" and (setup := re.match(r"<!-- setup:(.*)-->", token.content, re.DOTALL)):
            found.append(Block(setup[1].strip(" "), token.map[0] + 1, True))
        if token.type in ("fence", "code_block"):
            is_python = token.info == "python" or (not token.info and parses(token.content))
            found.append(Block(token.content, token.map[0] + 1 + (token.type == "fence"), is_python, token.info))
    return found


@functools.cache
def spans(page: Path) -> list[str]:
    """Return the inline code of a page."""
    children = itertools.chain.from_iterable(token.children or () for token in tokens(page))
    return [token.content for token in children if token.type == "code_inline"]
