"""The README's first screen: it is short, its code runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ffi_bridge import __version__

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
MOST_LINES = 150
FIRST, LAYER, MODULE, GRAPH = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_installing_a_wheel_of_this_version_comes_before_building() -> None:
    assert README.index(f"pip install glulam-{__version__}-py3-none-manylinux") < README.index("make demo")


def test_the_first_lines_run() -> None:
    names: dict[str, object] = {}
    exec(FIRST, names)
    x, y = names["x"], names["y"]
    assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    assert y.shape == x.shape and 0 < float(y.float().norm()) < float("inf")


def test_the_layer_runs() -> None:
    names: dict[str, object] = {}
    exec(FIRST + LAYER, names)
    tokens, y = names["tokens"], names["y"]
    assert isinstance(tokens, torch.Tensor) and isinstance(y, torch.Tensor)
    assert y.shape == tokens.shape and 0 < float(y.float().norm()) < float("inf")


def test_the_module_learns() -> None:
    names: dict[str, object] = {}
    exec(FIRST + LAYER + MODULE, names)
    layer = names["layer"]
    assert isinstance(layer, torch.nn.Module)
    gradients = [parameter.grad for parameter in layer.parameters()]
    assert len(gradients) == 3 and all(gradient is not None and gradient.norm() > 0 for gradient in gradients)


def test_commands_of_an_installation_name_where_it_is() -> None:
    """A clone's programs are in .venv, and nothing puts them on the path; a wheel's are where pip installs them."""
    built = README[README.index("## From source") : README.index("## How it fits together")]
    for line in re.findall(r"^ {4}(.*)$", built, re.MULTILINE):
        assert not re.match(r"(glulam|python|torchrun|pip) ", line), line
    assert ".venv/bin/glulam doctor" in built and "source .venv/bin/activate" in built


def test_every_page_is_listed() -> None:
    listed = set(re.findall(r"^- \[(docs/\S+)\]", README, re.MULTILINE))
    assert listed == {f"docs/{page.name}" for page in (REPOSITORY / "docs").glob("*.md")}


@pytest.mark.gpu
def test_one_graph_serves_every_routing() -> None:
    names: dict[str, object] = {}
    exec(FIRST + GRAPH, names)
    out, splits = names["out"], names["splits"]
    assert isinstance(out, torch.Tensor) and isinstance(splits, torch.Tensor)
    exec("again = glulam.grouped_mlp(x, w1, w2, splits=splits, row_scale=probabilities)", names)
    again, rows = names["again"], int(splits.sum())
    assert isinstance(again, torch.Tensor) and torch.equal(out[:rows], again[:rows])


PAGES = [page for pattern in ("*.md", "docs/**/*.md", "perf/**/*.md") for page in sorted(REPOSITORY.glob(pattern))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        path, _, heading = link.partition("#")
        if "://" not in link:
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            if heading:
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in anchors, f"{page.name}: {link}"
