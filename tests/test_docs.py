"""Documentation: its Python runs, and every name, path, signature and command in it exists.

A code block is Python if it is fenced as `python`, or if it parses as Python; such a block runs. The blocks of a page
share their names, in order. `<!-- setup: CODE -->` gives the block after it what a reader has at hand, or checks the
block before it. A block fenced as `pycon` is a session: of each `>>> STATEMENT`, the lines after it are the error.
`tests/test_docs_pages.py` is about pages as wholes.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import functools
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import typer
from support.pages import DOCS, PAGES, README, REPOSITORY, blocks, each, spans
from torch._subclasses import FakeTensorMode

import glulam
import glulam.distributed
from cute_kernels.architectures import ARCHS
from cute_kernels.formulas import FORMULAS
from ffi_bridge import profiles
from glulam.command import cli
from perf import __main__ as perf

SOURCES = ("cute_kernels", "ffi_bridge", "python", "tests", "perf", "examples", "plugins")
OPERATORS, DESIGN = DOCS / "operators.md", DOCS / "design.md"
COMING_FROM = DOCS / "coming-from.md"
CONTRIBUTING, CHANGELOG = REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


each_page = each(PAGES)

NOT_RUN = {
    "torch.cuda.graph(": "needs a GPU; tests/test_readme.py runs it there",
    "ExpertParallel(": "needs ranks",
    "fully_shard(": "needs ranks; tests/test_sharding.py",
    "glulam.integrations.megatron": "Megatron-Core takes many seconds to import; tests/test_megatron.py",
    "glulam.compile(": "compiles",
    "glulam.tune(": "needs a GPU",
}
OPTIONAL = ("transformers",)
"""Packages that tests have on some Pythons alone; a block that names one runs where it is installed."""
ON_GPU = 'device="cuda"'
"""A block with this runs on fake tensors of the CPU: names, options, shapes and dtypes are checked, numbers are not."""


@functools.cache
def words() -> frozenset[str]:
    """Return every word of the sources except these tests, and the name of every file."""
    files = [file for top in SOURCES for file in (REPOSITORY / top).rglob("*.py") if file != Path(__file__)]
    files += [REPOSITORY / name for name in ("Makefile", "pyproject.toml")]
    in_files = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    return frozenset(in_files | {file.stem for file in files})


# Python


def check_session(text: str, names: dict[str, Any]) -> None:
    """Run each `>>> STATEMENT`, and compare its error with the lines after it; without such lines it must not raise."""
    for statement, told in re.findall(r"^>>> (.*)\n((?:(?!>>> ).+\n?)*)", text, re.MULTILINE):
        raised = ""
        try:
            exec(statement, names)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        assert raised == " ".join(told.split()), statement


@each([page for page in PAGES if any(block.is_python for block in blocks(page))])
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "glulam": glulam}
    not_run = [*NOT_RUN, *(package for package in OPTIONAL if importlib.util.find_spec(package) is None)]
    for block in blocks(page):
        if block.info == "pycon":
            check_session(block.text, names)
        if block.is_python and not any(mark in block.text for mark in not_run):
            is_fake = ON_GPU in block.text
            text = "\n" * (block.line - 1) + block.text.replace(ON_GPU, 'device="cpu"')
            with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext():
                exec(compile(text, str(page), "exec"), names)


def test_what_replaces_a_call_of_torch_gives_what_torch_gives() -> None:
    offs, x = torch.tensor([16, 16, 40, 64], dtype=torch.int32), torch.randn(64, 32)
    rows = re.findall(r"^\| \[(E,\w,\w)\] \| `(F\..*)` \| `(glulam\..*)` \|$", OPERATORS.read_text(), re.MULTILINE)
    assert len(rows) == 2
    for shape, theirs, ours in rows:
        sizes = {"E": 4, "N": 24, "K": 32}
        w = torch.randn([sizes[letter] for letter in shape.split(",")])
        names = {"F": F, "glulam": glulam, "x": x.bfloat16(), "w": w.bfloat16(), "offs": offs}
        torch.testing.assert_close(eval(ours, names), eval(theirs, names))


# Names


def exists(name: str) -> bool:
    """Return True if a dotted name is a module or a module's attribute. Integrations, which import other packages, are
    read as text.
    """
    if integration := re.fullmatch(r"glulam\.integrations\.(\w+)\.?(\w*)", name):
        path = REPOSITORY / "python/glulam/integrations" / integration[1]
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return file.exists() and bool(re.search(rf"\b{integration[2]}\b", file.read_text()))
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@each_page
def test_names_of_glulam_exist(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"(?<![\w./-])glulam(?:\.[A-Za-z_]\w*)+", text))
    imported = re.findall(r"^ *from (glulam[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    named |= {f"{module}.{name}" for module, several in imported for name in several.split(", ")}
    assert not [name for name in sorted(named) if not exists(name)]


@each_page
def test_names_of_submodules_exist(page: Path) -> None:
    pattern = r"(?<![\w./])(?:nn|mhc|distributed|mxfp4|mxfp8|recipes)\.(?!md\b|py\b)[A-Za-z]\w*"
    texts = [*spans(page), *(block.text for block in blocks(page))]
    named = {name for text in texts for name in re.findall(pattern, text)}
    assert not [name for name in sorted(named) if not exists(f"glulam.{name}") and not exists(f"torch.{name}")]


def identifiers(spans: list[str]) -> set[str]:
    """Names in inline code that look like ours: by an underscore, or by letters of both cases."""
    found = {word for span in spans for word in re.findall(r"(?<![\w/-])[A-Za-z]\w*\w(?![\w*{])", span)}
    return {word for word in found if re.search(r"[a-z]", word) and re.search(r"_|[a-z][A-Z]", word)}


def names_of_others() -> set[str]:
    """Return the names in tables of the page on other libraries, except in columns headed "Glulam"."""
    found: list[str] = []
    header: list[str] = []
    for line in COMING_FROM.read_text().splitlines():
        cells = line.strip("|").split(" | ") if line.startswith("|") else []
        header = header or cells if cells else []
        cells = [cell for title, cell in zip(header, cells, strict=False) if title.strip() != "Glulam"]
        found += (span for cell in cells for span in re.findall("`([^`]+)`", cell))
    return identifiers(found)


@each_page
def test_identifiers_exist(page: Path) -> None:
    known = words() | names_of_others() if page == COMING_FROM else words()
    assert not sorted(identifiers(spans(page)) - known)


@each_page
def test_environment_variables_exist(page: Path) -> None:
    assert not set(re.findall(r"\bGLULAM_\w+", page.read_text())) - words()


@each_page
def test_a_class_that_is_not_in_glulam_is_named_with_its_module(page: Path) -> None:
    text = page.read_text()
    formats = (f"glulam.formats.{name}" for name in ("mxfp8", "mxfp4", "nvfp4"))
    for module in (*formats, "glulam.distributed", "ffi_bridge"):
        elsewhere = set(importlib.import_module(module).__all__) - set(glulam.__all__)
        for name in sorted(elsewhere & set(spans(page))):
            is_class = isinstance(pkgutil.resolve_name(f"{module}:{name}"), type)
            assert not is_class or re.search(rf"{module}(\.| import .*\b){name}\b", text), f"{name} is in {module}"


# Paths


@functools.cache
def paths() -> tuple[str, ...]:
    found = [path for top in (*SOURCES, "docs", "requirements") for path in (REPOSITORY / top).rglob("*")]
    found += REPOSITORY.glob("*")
    return tuple(path.relative_to(REPOSITORY).as_posix() for path in found if "__pycache__" not in path.parts)


def is_path(span: str) -> bool:
    in_sources = any(span.startswith(f"{top}/") for top in SOURCES)
    ends_as_one = re.search(r"(\.(py|md|json|toml|txt|svg)|\w/)$", span)
    return bool(re.fullmatch(r"[\w.<>*/-]+", span) and (in_sources or ends_as_one))


@each_page
def test_paths_exist(page: Path) -> None:
    """A path begins at the root or at any folder. What a program writes need not exist, but the program names it."""
    for span in filter(is_path, spans(page)):
        pattern = re.sub(r"<\w+>|\b[A-Z]+\b", "*", span.rstrip("/"))
        is_there = any(fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"*/{pattern}") for path in paths())
        is_written = not span.endswith(".py") and Path(span).stem in words()
        assert is_there or is_written, span


# Signatures

MODULES = (glulam, glulam.mhc, glulam.nn, glulam.distributed)


class Shown(NamedTuple):
    """A parameter as shown on a page."""

    name: str
    is_keyword_only: bool
    default: str | None


def end_of_call(text: str) -> int:
    """Return the index of the bracket that closes the one opened just before `text`."""
    depths = itertools.accumulate((letter in "([{") - (letter in ")]}") for letter in text)
    return next(place for place, depth in enumerate(depths) if depth < 0)


def parameters(text: str) -> Iterator[Shown]:
    is_keyword_only = False
    without_shapes = re.sub(r"\[[^\]]*\]", "", text)
    for part in re.findall(r"(?:\([^)]*\)|[^,(])+", without_shapes):
        is_keyword_only |= part.strip().startswith("*")
        names, _, default = part.strip().partition("=")
        if match := re.match(r"\*{0,2}\w[\w|]*", names):
            for name in match[0].split("|"):
                yield Shown(name, is_keyword_only, default or None)


@functools.cache
def signatures() -> dict[str, list[tuple[str, list[Shown]]]]:
    """Return the page and parameters of each place that shows a function's signature, by the function's name.

    A signature begins a line in a block that is not Python and has no `...`, which stands for omitted arguments.
    """
    found: dict[str, list[tuple[str, list[Shown]]]] = {}
    shown = [(page.name, block) for page in PAGES for block in blocks(page) if not block.is_python]
    for page, block in shown:
        for start in re.finditer(r"^(?:nn\.|distributed\.)?([A-Za-z][\w.]*)\(", block.text, re.MULTILINE):
            rest = block.text[start.end() :]
            text = rest[: end_of_call(rest)]
            if "..." not in re.sub(r"\[[^\]]*\]", "", text):
                line = block.line + block.text.count("\n", 0, start.start())
                found.setdefault(start[1], []).append((f"{page}:{line}", list(parameters(text))))
    return found


def public() -> dict[str, Callable[..., Any]]:
    """Return the public functions, modules and ExpertParallel, by name."""
    named = {name: getattr(module, name) for module in MODULES for name in module.__all__}
    classes = (torch.nn.Module, glulam.distributed.ExpertParallel)
    return {
        name: value
        for name, value in named.items()
        if inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, classes))
    }


def own_parameters(name: str) -> dict[str, inspect.Parameter] | None:
    """Return a function's parameters by name, including * and **; None if there is no such function."""
    function = public().get(name)
    if function is None:
        method = re.sub(r"^ep\.", "distributed.ExpertParallel.", name)
        if not exists(f"glulam.{method}"):
            return None
        function = pkgutil.resolve_name(f"glulam.{method}")
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = {stars.get(p.kind, "") + p.name: p for p in inspect.signature(function).parameters.values()}
    found.pop("self", None)
    if name == "MoE" and found.pop("**experts", None):  # options of its GroupedMLP, but those that it chooses itself
        for option, p in inspect.signature(glulam.nn.GroupedMLP).parameters.items():
            if p.kind is p.KEYWORD_ONLY and option not in found:
                with contextlib.suppress(TypeError):
                    glulam.nn.MoE(32, 32, 2, 1, device="meta", **{option: p.default})
                    found[option] = p
    return found


def test_signatures_are_those_of_the_functions() -> None:
    wrong = []
    for name, (where, shown) in [(name, place) for name, places in signatures().items() for place in places]:
        own = own_parameters(name)
        if own is None:
            continue
        by_keyword = {p.name for p in own.values() if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}
        in_order = [key for key, p in own.items() if p.name not in by_keyword]
        if {parameter.name for parameter in shown} != set(own):
            wrong.append(f"{where}: {name} differs in {sorted({parameter.name for parameter in shown} ^ set(own))}")
        elif [parameter.name for parameter in shown if not parameter.is_keyword_only] != in_order:
            wrong.append(f"{where}: {name} takes {in_order} by position")
        else:
            for parameter in shown:
                default = own[parameter.name].default
                if parameter.default and ast.literal_eval(parameter.default.split("|")[0]) != default:
                    wrong.append(f"{where}: {name} has {parameter.name}={default!r}")
    assert not wrong


def test_every_public_function_has_its_signature_on_a_page() -> None:
    assert not sorted(set(public()) - set(signatures()))


# Commands


class Command(NamedTuple):
    """A command line in the docs. is_whole: it is in a code block, to be typed as it is."""

    program: str
    arguments: list[str]
    is_whole: bool


def command_of(line: str, is_whole: bool) -> Command | None:
    match = re.match(r"(?:\$ )?(?:\w+=\S+(?: -d\))? )*(?:\.venv/bin/)?(glulam|make|python|torchrun)(?: (.*))?$", line)
    if match is None:
        return None
    typed = re.split(r" {2,}| # ", match[2] or "")[0]
    try:
        return Command(match[1], shlex.split(typed), is_whole)
    except ValueError:  # the first line of a text in quotes
        return None


def commands(page: Path) -> Iterator[tuple[str, Command]]:
    lines = [(span, False) for span in spans(page)]
    lines += [(line, True) for block in blocks(page) if not block.is_python for line in block.text.splitlines()]
    for line, is_whole in lines:
        if command := command_of(line, is_whole):
            yield line, command


def options(parser: Any) -> set[str]:
    """Return the options of a click command or an argparse parser, including its subcommands'."""
    if hasattr(parser, "params"):
        own = {option for parameter in parser.params for option in (*parameter.opts, *parameter.secondary_opts)}
        return own.union(*map(options, getattr(parser, "commands", {}).values()))
    own = {option for action in parser._actions for option in action.option_strings}
    subcommands = [action.choices.values() for action in parser._actions if isinstance(action.choices, dict)]
    return own.union(*map(options, itertools.chain(*subcommands)))


def is_placeholder(argument: str) -> bool:
    return bool(re.fullmatch(r"[A-Z]+", argument))


def check_glulam(command: Command) -> None:
    found: Any = typer.main.get_command(cli.app)
    name, arguments = "glulam", list(command.arguments)
    while arguments and hasattr(found, "commands"):
        choices = arguments.pop(0).split("|")
        assert set(choices) <= {*found.commands, "--help", "--version"}, choices
        name, found = choices[0], found.commands.get(choices[0])
    assert {argument for argument in arguments if argument.startswith("-")} <= options(found)
    if command.is_whole and arguments:
        found.make_context(name, arguments)


def file_of(arguments: list[str]) -> Path | None:
    """Return the file of ours that a Python command line runs, a script or a module; None if it is not ours."""
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        package = arguments[1].partition(".")[0]
        top = REPOSITORY / "python" if package == "glulam" else REPOSITORY
        return top / f"{arguments[1].replace('.', '/')}.py" if (top / package).exists() else None
    return REPOSITORY / arguments[0] if arguments and arguments[0].endswith(".py") else None


def options_of(file: Path) -> set[str]:
    """Return the options that a script may take: its functions' parameters, named as typer does, and its string
    constants.
    """
    nodes = list(ast.walk(ast.parse(file.read_text())))
    named = {f"--{node.arg.replace('_', '-')}" for node in nodes if isinstance(node, ast.arg)}
    return named | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def check_python(command: Command) -> None:
    arguments = command.arguments
    if command.program == "torchrun":
        arguments = list(itertools.dropwhile(lambda argument: not argument.endswith(".py"), arguments))
    if arguments[:2] == ["-m", "perf"]:
        if len(arguments) > 2 and not is_placeholder(arguments[2]):
            perf.parser().parse_args(arguments[2:])
    elif file := file_of(arguments):
        assert {argument for argument in arguments if argument.startswith("--")} <= options_of(file)


def check_make(command: Command) -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for argument in command.arguments:
        name, is_setting, _ = argument.partition("=")
        assert name in (words() if is_setting else targets)


CHECKS = {"glulam": check_glulam, "make": check_make, "python": check_python, "torchrun": check_python}


@each_page
def test_commands_exist(page: Path) -> None:
    for line, command in commands(page):
        try:
            CHECKS[command.program](command)
        except (Exception, SystemExit) as error:
            message = getattr(error, "message", error)
            raise AssertionError(f"{page.name}: {line}: {message}") from error


@each_page
def test_options_exist(page: Path) -> None:
    """An option that stands alone is one of some command, or of an engine whose plugin names it."""
    known = options(typer.main.get_command(cli.app)) | options(perf.parser()) | {"--help"}
    for file in (REPOSITORY / "plugins").rglob("*.py"):
        known |= set(re.findall(r"(?<!\S)\W?(--[a-z][a-z0-9-]+)", file.read_text()))
    alone = {span.split()[0] for span in spans(page) if span.startswith("--")}
    assert alone <= known


def test_commands_for_builders_are_run_in_the_environment_that_make_installs() -> None:
    lines = [line for line, command in commands(CONTRIBUTING) if command.program != "make" and command.arguments]
    assert lines and not [line for line in lines if ".venv/bin/" not in line]


# Lists, numbers and versions


def test_activations_are_listed_and_counted() -> None:
    names = set(FORMULAS)
    table = OPERATORS.read_text().partition("## Activations")[2].partition("\n\n`glu_layout`")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed == names
    assert names <= set(re.findall(r'"(\w+)"', inspect.getdoc(glulam.grouped_glu) or ""))
    for page in (README, CHANGELOG):
        assert re.findall(r"(\w+) activations\b", page.read_text())[0] == NUMBERS[len(names)]


def test_recipes_are_listed() -> None:
    table = (DOCS / "recipes.md").read_text().partition("\n## ")[0]
    assert set(glulam.recipes.RECIPES) <= set(re.findall(r"^\| \[?(\w+)", table, re.MULTILINE))


def test_architectures_are_listed_with_their_gpus_and_what_is_known_of_them() -> None:
    table = (DOCS / "gpus.md").read_text().partition('"Emulated"')[0]
    rows = re.findall(r"^\| (sm_\w+) \| (.*?) \| .*? \| (tested|built, never run)\b", table, re.MULTILINE)
    known = {arch: (one.gpus, "tested" if one.tested_on else "built, never run") for arch, one in ARCHS.items()}
    assert {arch: told for arch, *told in rows} == {arch: list(told) for arch, told in known.items()}


def test_suites_are_listed() -> None:
    table = (REPOSITORY / "perf/README.md").read_text()
    assert set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"suite"} == set(perf.SUITES)


def test_functions_are_counted() -> None:
    specs = profiles.shipped_specs("sm_90a", "full")
    stages = profiles.all_stages(specs)
    functions = {spec.name for spec in (*specs, *stages)}
    counted = f"{len(functions)} functions, which are {len(stages)} stages and {len(functions) - len(stages)} chains"
    assert counted in " ".join((DOCS / "kernels-launches.md").read_text().split())


@each([README, CONTRIBUTING])
def test_kernels_of_the_demo_are_counted(page: Path) -> None:
    kernels = profiles.all_stages(profiles.shipped_specs("sm_90a", "demo"))
    assert f"{NUMBERS[len(kernels)]} kernels of" in " ".join(page.read_text().split())


def test_functions_that_a_page_places_are_there() -> None:
    """`Class.function` in `folder/file.py`."""
    placed = re.findall(r"`(?:\w+\.)?(\w+)` in\s+`(\w+/\w+\.py)`", DESIGN.read_text())
    assert len(placed) > 10
    for name, path in placed:
        tree = ast.parse((REPOSITORY / "python/glulam" / path).read_text())
        kinds = ast.FunctionDef, ast.ClassDef
        defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        made = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert name in defined | made, f"{name} is not in {path}"


def test_autograd_functions_are_listed() -> None:
    found = {
        (node.name, file.relative_to(REPOSITORY / "python/glulam").as_posix())
        for file in (REPOSITORY / "python").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases)
    }
    page = " ".join(DESIGN.read_text().split())
    listed = page[page.index("share one `torch.autograd.Function`") : page.index("which refuses second derivatives")]
    assert f"There are {NUMBERS[len(found) - 1]} more" in listed
    for name, path in found:
        assert f"`{name}`" in listed and f"`{path}`" in listed
