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

from cute_kernels.signatures import ADDRESS, Argument

from ..host import device as gpus
from ..host import tickets, workspace
from ..host.experts import ExpertList
from .checks import ALIGNMENT_ELEMENTS
from .generated import compiled_one_of_many
from .memory import check_apart, tensors_of

LINE = 116
TICKETS = "tickets.counters(device, index) if draws_tickets else 0"


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
        wanted: False of a result that is None, for which the function gets 0.
    """

    name: str
    kernel: str
    shape: tuple[str, ...] | str
    like: str = ""
    dtype: str = ""
    zeros: bool = False
    returned: bool = True
    wanted: bool = True


class Shape(NamedTuple):
    """What the text of a launch depends on.

    Attributes:
        takes: the tensor arguments of `run`; `present`: those that are not None.
        lists: those that are ExpertLists; `halves`: GateUps; `loose`: lists of tensors, of which no address is taken.
        unpacks: the argument that is all that is made, as a list; empty where none is.
        arguments: of the function.
        sources: by the function's name of an argument, the operator's; `texts`: or the text of its value.
        makes: see `Made`. scratch: by the function's names, whether it is a "matrix" or "bytes" of the plan's memory.
        constants: names.
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
    sources: tuple[tuple[str, str], ...]
    texts: tuple[tuple[str, str], ...]
    makes: tuple[Made, ...]
    scratch: tuple[tuple[str, str], ...]
    constants: frozenset[str]
    before: tuple[str, ...]
    checked: bool
    single_gpu: bool
    aligned: bool
    result: str


class _Values:
    """Texts of the values that a function's arguments get."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.sources, self.texts, self.scratch = dict(shape.sources), dict(shape.texts), dict(shape.scratch)
        self.made = {made.kernel: made for made in shape.makes}
        self.results = {made.name for made in shape.makes}

    def of(self, argument: Argument) -> str:
        name = argument.name
        if name in self.texts:
            return self.texts[name]
        if name in self.scratch:
            return f"{name}_memory" + ".data_ptr()" * (argument.kind == ADDRESS and self.scratch[name] == "matrix")
        if name in self.made:
            return self._result(self.made[name], argument)
        if name in self.shape.constants:
            return name
        if name == "tickets":
            return TICKETS
        for end, kinds, part in (("_table", self.shape.lists, "address"), ("_up", self.shape.halves, "up.data_ptr()")):
            if name.endswith(end):
                source = self._source(name.removesuffix(end))
                return f"{source}.{part}" if source in kinds else "0"
        return self._given(argument)

    def _source(self, name: str) -> str:
        return self.made[name].name if name in self.made else self.sources.get(name, name)

    def _result(self, made: Made, argument: Argument) -> str:
        if not made.wanted:
            return "0"
        if argument.kind == ADDRESS:
            return f"{made.name}.data_ptr()"
        return self._tensor(made.name, argument)

    def _given(self, argument: Argument) -> str:
        name = self._source(argument.name)
        if name not in self.shape.present or name in self.results:  # a buffer is where what it is for is made
            if not argument.optional:
                raise TypeError(f"nothing gives {argument.name}, which the function needs")
            return str(argument.absent)
        if argument.kind == ADDRESS:
            return "0" if name in self.shape.lists else f"{name}_at"
        return f"{name}.gate" if name in self.shape.halves else self._tensor(name, argument)

    def returned(self, made: Made) -> str:
        return f"{made.name}.tensors" if made.name in self.shape.lists else made.name

    def _tensor(self, name: str, argument: Argument) -> str:
        if name in self.shape.lists:
            return f"{name}.lowest"
        has_any_stride = self.shape.aligned and name in self.shape.present and len(argument.shape) == 2
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
    values = _Values(shape)
    call = [*shape.before, *wrapped("function(", [values.of(argument) for argument in shape.arguments], ")")]
    returned = ", ".join(values.returned(made) for made in shape.makes if made.returned)
    lines = [
        *_on_its_device(shape), *_looks(shape, "\n".join(call)), *_makes(shape),
        *call, f"return {shape.result}({returned})" if shape.result else f"return {returned}",
    ]  # fmt: skip
    takes = [f"{name}=None" for name in shape.takes]
    return "\n".join([*wrapped("def run(", takes, "):"), *indented(lines)])


def _on_its_device(shape: Shape) -> list[str]:
    if shape.single_gpu:
        return []
    return ["if gpus.current() != index:", "    with on(index):", f"        return run({', '.join(shape.takes)})"]


def _looks(shape: Shape, call: str) -> list[str]:
    """Takes addresses, of which new ones are looked at, unless nobody else could have given them."""
    outs = [made.name for made in shape.makes if made.name in shape.present]
    read = [name for name in shape.takes if name in shape.present and name not in (*outs, shape.unpacks)]
    names = [name for name in read if name not in shape.loose] + outs
    if not shape.checked:
        names = [name for name in names if f"{name}_at" in call]
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
            lines.append(f"{made.name} = {made.like or shape.takes[0]}.new_empty({sizes}{dtype})")
    if shape.scratch:
        lines.append("".join(f"{name}_memory, " for name, _ in shape.scratch) + "= workspace.take(memory)")
    return lines


@functools.lru_cache(maxsize=4096)
def _code(op: str, shape: Shape) -> CodeType:
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
        self.run = FunctionType(code or _code(op, shape), constants, "run", (None,) * len(shape.takes))
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
