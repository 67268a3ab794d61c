"""Launches: the text that passes a call's arguments to an exported function, written once for each way to call it.

A `Shape` of call says which arguments are there, which are lists, what the function takes and what is made; from it
comes a few lines of Python without a branch or a loop, compiled once. A `Plan` is that code over the constants of one
signature: widths, the function, memory. `text_of` shows the lines.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.arguments import ADDRESS, Argument

from ..host import device as gpus
from ..host import tickets, workspace
from ..host.experts import ExpertList
from .checks import ALIGNMENT_ELEMENTS
from .generated import compiled_one_of_many
from .memory import check_apart, tensors_of

LINE = 116


class Made(NamedTuple):
    """A tensor that a call makes, unless it is given.

    Attributes:
        name: of the argument that may give it; else of the result.
        kernel: what the function calls it.
        shape: names of constants, one of each size (`Problem.dims`), or of the sizes together.
        like: the argument that has its device, and its dtype; the leading one by default.
        dtype: the name of a constant, where it has another.
        zeros: whether rows behind the last group are zero, which the function writes.
        returned: False of what only the function needs.
        when: the flag of a call that must be set for it; empty: it is always made.
        wanted: False of a result that is None, for which the function gets 0.
    """

    name: str
    kernel: str
    shape: tuple[str, ...] | str
    like: str = ""
    dtype: str = ""
    zeros: bool = False
    returned: bool = True
    when: str = ""
    wanted: bool = True

    @property
    def form(self) -> str:
        """Suffix to the names of torch's operators that make this result, which an option leaves out."""
        return f"_{self.kernel.removeprefix('d_')}"


class Source(NamedTuple):
    """The source of a kernel argument's value.

    Attributes:
        kind: GIVEN: an argument of `run`. TABLE: the table of a list; 0 for other weights. UP: the second half of a
            GateUp; 0 for other weights. RESULT: what is made. MATRIX, BYTES: the plan's memory, as a tensor or as an
            address. CONSTANT: of the plan. TICKETS: counters. TEXT: Python. ABSENT: nothing; the function gets 0.
        name: of the argument of `run`, the result, the memory or the constant; the text.
    """

    kind: str
    name: str = ""


GIVEN, TABLE, UP, RESULT, MATRIX, BYTES, CONSTANT, TICKETS, TEXT, ABSENT = (
    "given", "table", "up", "result", "matrix", "bytes", "constant", "tickets", "text", "absent",
)  # fmt: skip


class Line(NamedTuple):
    """A line in front of a function's call. `addresses`: arguments whose addresses the text uses, as `<name>_at`."""

    text: str
    addresses: tuple[str, ...] = ()


class Shape(NamedTuple):
    """What the text of a launch depends on.

    Attributes:
        takes: the tensor arguments of `run`; `present`: those that are not None.
        lists: those that are ExpertLists; `halves`: GateUps; `loose`: lists of tensors, of which no address is taken.
        unpacks: the argument that is all that is made, as a list; empty where none is.
        arguments: of the function. values: the source of each.
        makes: see `Made`. scratch: names of the parts of the plan's memory.
        before: lines in front of the call.
        checked: whether new addresses are looked at.
        single_gpu: whether the process sees one GPU; `aligned`: whether a matrix may have one row, of any stride.
        result: the name of a constant that is called with the results.
    """

    takes: tuple[str, ...]
    present: frozenset[str]
    lists: frozenset[str]
    halves: frozenset[str]
    loose: frozenset[str]
    unpacks: str
    arguments: tuple[Argument, ...]
    values: tuple[Source, ...]
    makes: tuple[Made, ...]
    scratch: tuple[str, ...]
    before: tuple[Line, ...]
    checked: bool
    single_gpu: bool
    aligned: bool
    result: str

    def text_of(self, argument: Argument, source: Source) -> str:
        """An argument's value, as Python."""
        kind, name = source
        is_address = argument.kind == ADDRESS
        if kind == GIVEN and is_address:
            return "0" if name in self.lists else f"{name}_at"
        if kind == GIVEN:
            return f"{name}.gate" if name in self.halves else self._tensor(name, argument)
        if kind == RESULT:
            return f"{name}.data_ptr()" if is_address else self._tensor(name, argument)
        if kind == TABLE:
            return f"{name}.address" if name in self.lists else "0"
        if kind == UP:
            return f"{name}.up.data_ptr()" if name in self.halves else "0"
        if kind in (MATRIX, BYTES):
            return f"{name}_memory" + ".data_ptr()" * (is_address and kind == MATRIX)
        if kind == TICKETS:
            return "tickets.counters(device, index) if draws_tickets else 0"
        return str(argument.absent) if kind == ABSENT else name

    def addresses(self) -> set[str]:
        """Arguments of `run` whose addresses the function's call, or a line before it, uses."""
        pairs = zip(self.arguments, self.values, strict=True)
        used = {source.name for argument, source in pairs if source.kind == GIVEN and argument.kind == ADDRESS}
        return used.union(*[line.addresses for line in self.before])

    def returned(self, made: Made) -> str:
        return f"{made.name}.tensors" if made.name in self.lists else made.name

    def _tensor(self, name: str, argument: Argument) -> str:
        if name in self.lists:
            return f"{name}.lowest"
        has_any_stride = self.aligned and name in self.present and len(argument.shape) == 2
        return f"aligned_row({name})" if has_any_stride else name


def wrapped(begin: str, items: list[str], end: str) -> list[str]:
    """One statement, on a line or on several."""
    if len(begin) + len(", ".join(items)) + len(end) <= LINE:
        return [begin + ", ".join(items) + end]
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) + 2 > LINE - 4:
            lines.append("")
        lines[-1] += f"{' ' * bool(lines[-1])}{item},"
    return [begin, *(f"    {line}" for line in lines), end]


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@functools.lru_cache(maxsize=4096)
def text_of(shape: Shape) -> str:
    """The function `run`, as Python."""
    passed = list(map(shape.text_of, shape.arguments, shape.values))
    returned = ", ".join(shape.returned(made) for made in shape.makes if made.returned)
    lines = [
        *_on_its_device(shape), *_looks(shape), *_makes(shape), *[line.text for line in shape.before],
        *wrapped("function(", passed, ")"),
        f"return {shape.result}({returned})" if shape.result else f"return {returned}",
    ]  # fmt: skip
    takes = [f"{name}=None" for name in shape.takes]
    return "\n".join([*wrapped("def run(", takes, "):"), *indented(lines)])


def _on_its_device(shape: Shape) -> list[str]:
    if shape.single_gpu:
        return []
    return ["if gpus.current() != index:", "    with on(index):", f"        return run({', '.join(shape.takes)})"]


def _looks(shape: Shape) -> list[str]:
    """Takes addresses, of which new ones are looked at, unless nobody else could have given them."""
    outs = [made.name for made in shape.makes if made.name in shape.present]
    read = [name for name in shape.takes if name in shape.present and name not in (*outs, shape.unpacks)]
    names = [name for name in read if name not in shape.loose] + outs
    if not shape.checked:
        used = shape.addresses()
        names = [name for name in names if name in used]
    lines = [f"{', '.join(outs)} = {shape.unpacks}"] if shape.unpacks else []
    lines += [f"{name}_at = {name}.data_ptr()" for name in names]
    if shape.checked:
        looked_at = ["at", f"[{', '.join(outs)}]", *[f"{name}={name}" for name in read]]
        lines += wrapped("at = (", [f"{name}_at" for name in names], ")" if len(names) > 1 else ",)")
        lines += ["if at not in apart:", *indented(wrapped("check_apart(", looked_at, ")"))]
    return lines


def _makes(shape: Shape) -> list[str]:
    """Allocates results, and takes memory that the call needs besides."""
    lines = []
    for made in shape.makes:
        if not made.wanted:
            lines.append(f"{made.name} = None")
        elif made.name not in shape.present:
            dtype = f", dtype={made.dtype}" if made.dtype else ""
            sizes = made.shape if isinstance(made.shape, str) else ", ".join(made.shape)
            make = f"{made.name} = {made.like or shape.takes[0]}.new_empty({sizes}{dtype})"
            may_be_given = made.name in shape.takes and not shape.checked  # a plan by a key is for one or the other
            lines += [f"if {made.name} is None:", f"    {make}"] if may_be_given else [make]
    if shape.scratch:
        lines.append("".join(f"{name}_memory, " for name in shape.scratch) + "= workspace.take(memory)")
    return lines


@functools.lru_cache(maxsize=4096)
def code_of(op: str, shape: Shape) -> CodeType:
    """The function `run`, compiled."""
    return compiled_one_of_many(text_of(shape), f"glulam launch of {op}")


def aligned_row(matrix: Tensor) -> Tensor:
    """A matrix of which a single row has a stride that kernels accept: torch leaves that arbitrary."""
    return matrix if matrix.stride(0) % ALIGNMENT_ELEMENTS == 0 else matrix.view(-1).view(1, -1)


def launch_nothing(*_: Any) -> None:
    """The function of a plan for T = 0."""


_NAMES: dict[str, Any] = {
    "__builtins__": builtins,  # C code that imports a module, as dispatch modes do, looks for them in a frame's globals
    "aligned_row": aligned_row,
    "gpus": gpus,
    "on": torch.cuda.device,
    "tickets": tickets,
    "workspace": workspace,
}


OWN_NAMES = frozenset((*_NAMES, "apart", "check_apart", "run"))
"""Names that a plan adds to its constants."""
OF_ROWS = frozenset(("num_rows", "tokens", "memory"))
"""Constants that a number of rows tells."""


class Bare(NamedTuple):
    """What a plan passes its function, in memory of its own, so that a launch can be repeated without the host's share.

    Attributes:
        function: the plan's. arguments: what it takes; `values`: of these, in their order.
        results: of the call. memory: all else that the values point to.
    """

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    values: tuple[Any, ...]
    results: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]


class Plan:
    """What a call needs once its arguments were checked. `run` launches it.

    Attributes:
        op: the operator's name, for messages.
        shape: of its text; `constants`: what the text calls by name, which is all that `run` sees.
        serving: finds the function for another number of rows.
        extents, out_extents, apart: see `memory.check_apart`.
        look: checks what no metadata tells of arguments at addresses that were not seen before.
    """

    def __init__(
        self, op: str, shape: Shape, constants: dict[str, Any], serving: Any, extents: tuple[int, ...],
        out_extents: tuple[int, ...], look: Callable[..., None], code: CodeType | None = None,
    ) -> None:  # fmt: skip
        """`constants`: from now on the plan's. `code`: of a plan of this shape, else looked up."""
        self.op, self.shape, self.serving, self.look = op, shape, serving, look
        self.extents, self.out_extents = extents, out_extents
        self.apart: set[tuple[int, ...]] = set()
        self.constants = constants
        constants.update(_NAMES)
        self.run = FunctionType(code or code_of(op, shape), constants, "run", (None,) * len(shape.takes))
        if shape.checked:  # else no plan is part of a circle, which only the collector would free
            constants.update(apart=self.apart, check_apart=self.check_apart)
        if not shape.single_gpu:
            constants["run"] = self.run

    def serves(self, rows: int) -> bool:
        """Whether another number of rows changes nothing: the same function, and no constant that rows tell."""
        if self.shape.checked or not OF_ROWS.isdisjoint(self.run.__code__.co_names):
            return False
        return self.serving.at(rows).function is self.constants["function"]

    @property
    def text(self) -> str:
        """`run`, as Python."""
        return text_of(self.shape)

    def bare(self, *given: Any) -> Bare:
        """The launch that `run` would make of these."""
        memory: list[Tensor] = [tensor for one in given for _, tensor in tensors_of("", one)]
        memory += [one.table.values for one in given if isinstance(one, ExpertList)]
        passed: list[tuple[Any, ...]] = []

        def kept(tensor: Tensor) -> Tensor:
            memory.append(tensor)
            return tensor

        def take(layouts: workspace.Layouts) -> workspace.Several:
            return layouts.tensors(kept(torch.empty(layouts.num_bytes, dtype=torch.uint8, device=layouts.device)))

        names = {
            **self.run.__globals__,
            "function": lambda *values: passed.append(values),
            "workspace": SimpleNamespace(take=take),
            "tickets": SimpleNamespace(counters=lambda device, _: kept(tickets.new_counters(device)).data_ptr()),
            "draws_tickets": True,  # kernels that draw none ignore them
            "gpus": SimpleNamespace(current=lambda: self.constants["index"]),  # nothing is launched
        }
        made = FunctionType(self.run.__code__, names, "run", self.run.__defaults__)(*given)
        results = tuple(one for one in (made if isinstance(made, tuple) else (made,)) if one is not None)
        return Bare(self.constants["function"], self.shape.arguments, passed[0], results, tuple(memory))

    def check_apart(self, at: tuple[int, ...], outs: list[Any], **read: Any) -> None:
        """Check arguments at addresses that were not seen before; see `memory.check_apart`."""
        self.look(self.op, outs, **read)
        check_apart(self, at, outs, read)
