"""Launches: generated Python that passes a call's arguments to a kernel's exported function.

A `LaunchShape` describes the code of a launch: which arguments are present, which are lists, which arguments the
function takes, and which results are made. From it a few lines of Python without loops are generated (`text_of`) and
compiled once. A `Plan` is this code together with constants (widths, the kernel's function, memory) for calls of one
signature. A signature is the metadata of all arguments.
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
from .memory import check_unseen, tensors_of

LINE = 116


class ResultTensor(NamedTuple):
    """A result tensor, which a launch allocates unless the caller gave a buffer for it.

    Attributes:
        name: name of the call's argument that may be the buffer; if there is none, name of the result.
        kernel: name of the tensor among the arguments of the kernel's function.
        shape: names of constants of the plan, one for each size (such as the names in `Problem.dims`); or the name of
            one constant that is the whole shape.
        like: the argument whose device and dtype the result gets. Empty: the leading argument.
        dtype: name of a constant with the result's dtype. Empty: the dtype of `like`.
        zeros: True: rows after the last group are zero; the kernel's function writes the zeros.
        returned: False: the kernel's function needs the tensor, but the call does not return it.
        when: the call's flag that must be set to make the tensor. Empty: it is always made.
        wanted: False: the result is None, and the kernel's function gets 0 for it.
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
    def torch_suffix(self) -> str:
        """Suffix of the name of a torch operator that makes this optional result, for example "_preact"."""
        return f"_{self.kernel.removeprefix('d_')}"


class Source(NamedTuple):
    """Origin of the value that a launch passes for one kernel argument.

    Attributes:
        kind: one of the constants below.
            GIVEN: an argument of `Plan.run`.
            TABLE: the address of a list's address table; 0 if the argument is no list.
            UP: the address of a GateUp's `up`; 0 if the argument is no GateUp.
            RESULT: a tensor that the call makes.
            MATRIX, BYTES: scratch memory, as a tensor or as an address.
            CONSTANT: a constant of the plan.
            TICKETS: counters from which a persistent kernel's CTAs draw tiles (`host.tickets`).
            TEXT: a Python expression.
            ABSENT: no value; the function gets 0.
        name: name of the argument of `run`, the result, the memory or the constant; for TEXT, the expression.
    """

    kind: str
    name: str = ""


GIVEN, TABLE, UP, RESULT, MATRIX, BYTES, CONSTANT, TICKETS, TEXT, ABSENT = (
    "given", "table", "up", "result", "matrix", "bytes", "constant", "tickets", "text", "absent",
)  # fmt: skip


class Line(NamedTuple):
    """A line of Python that a launch runs before it calls the kernel's function.

    Attributes:
        text: the line.
        addresses: names of arguments whose addresses the line uses, as `<name>_at`.
    """

    text: str
    addresses: tuple[str, ...] = ()


class LaunchShape(NamedTuple):
    """Everything that determines the generated code of a launch: the Python function `run`, which launches the kernel.

    Attributes:
        takes: names of the tensor arguments of `run`.
        present: the arguments of `run` that are not None.
        lists: the arguments that are ExpertLists.
        halves: the arguments that are GateUps.
        unpacked_lists: the arguments that are plain lists of tensors; the launch does not read their addresses.
        unpacks: the argument that is a list of buffers for all results. Empty: there is none.
        arguments: arguments of the kernel's function.
        values: the source of each argument of the kernel's function.
        result_tensors: tensors that the call makes.
        scratch: names of the parts of the plan's scratch memory.
        prologue: lines that run before the call of the kernel's function.
        checked: True: the code checks arguments at addresses that the plan has not seen.
        single_gpu: True: the process sees one GPU, so the code never switches devices.
        aligned: True: a matrix may have a single row. Torch leaves the stride of a single row arbitrary, so the code
            replaces it (`aligned_row`).
        result: name of a constant, a function that makes the return value from the results. Empty: results are returned
            as they are.
    """

    takes: tuple[str, ...]
    present: frozenset[str]
    lists: frozenset[str]
    halves: frozenset[str]
    unpacked_lists: frozenset[str]
    unpacks: str
    arguments: tuple[Argument, ...]
    values: tuple[Source, ...]
    result_tensors: tuple[ResultTensor, ...]
    scratch: tuple[str, ...]
    prologue: tuple[Line, ...]
    checked: bool
    single_gpu: bool
    aligned: bool
    result: str

    def text_of(self, argument: Argument, source: Source) -> str:
        """Return an argument's value as a Python expression."""
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
        """Return the names of `run`'s arguments whose addresses the prologue or the kernel's function uses."""
        pairs = zip(self.arguments, self.values, strict=True)
        used = {source.name for argument, source in pairs if source.kind == GIVEN and argument.kind == ADDRESS}
        return used.union(*[line.addresses for line in self.prologue])

    def returned(self, made: ResultTensor) -> str:
        """Return the Python expression that `run` returns for a result; for an ExpertList, its list of tensors."""
        return f"{made.name}.tensors" if made.name in self.lists else made.name

    def _tensor(self, name: str, argument: Argument) -> str:
        """Return the Python expression that passes an argument of `run` to the kernel's function as a tensor."""
        if name in self.lists:
            return f"{name}.lowest"
        has_any_stride = self.aligned and name in self.present and len(argument.shape) == 2
        return f"aligned_row({name})" if has_any_stride else name


def wrapped(begin: str, items: list[str], end: str) -> list[str]:
    """Return the statement `begin` + items + `end` as lines: one line, or several if it is longer than LINE."""
    if len(begin) + len(", ".join(items)) + len(end) <= LINE:
        return [begin + ", ".join(items) + end]
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) + 2 > LINE - 4:
            lines.append("")
        lines[-1] += f"{' ' * bool(lines[-1])}{item},"
    return [begin, *(f"    {line}" for line in lines), end]


def indented(lines: list[str]) -> list[str]:
    """Return lines of Python indented by one level."""
    return [f"    {line}" for line in lines]


@functools.lru_cache(maxsize=4096)
def text_of(shape: LaunchShape) -> str:
    """Return the Python source of a plan's function `run`."""
    passed = list(map(shape.text_of, shape.arguments, shape.values))
    returned = ", ".join(shape.returned(made) for made in shape.result_tensors if made.returned)
    lines = [
        *_on_its_device(shape), *_address_lines(shape), *_memory_lines(shape), *[line.text for line in shape.prologue],
        *wrapped("function(", passed, ")"),
        f"return {shape.result}({returned})" if shape.result else f"return {returned}",
    ]  # fmt: skip
    takes = [f"{name}=None" for name in shape.takes]
    return "\n".join([*wrapped("def run(", takes, "):"), *indented(lines)])


def _on_its_device(shape: LaunchShape) -> list[str]:
    """Return lines that make the plan's GPU the current device; none if the process sees only one GPU."""
    if shape.single_gpu:
        return []
    return ["if gpus.current() != index:", "    with on(index):", f"        return run({', '.join(shape.takes)})"]


def _address_lines(shape: LaunchShape) -> list[str]:
    """Return lines that read addresses and, in a checked launch, check addresses that the plan has not seen."""
    outs = [made.name for made in shape.result_tensors if made.name in shape.present]
    read = [name for name in shape.takes if name in shape.present and name not in (*outs, shape.unpacks)]
    names = [name for name in read if name not in shape.unpacked_lists] + outs
    if not shape.checked:
        used = shape.addresses()
        names = [name for name in names if name in used]
    lines = [f"{', '.join(outs)} = {shape.unpacks}"] if shape.unpacks else []
    lines += [f"{name}_at = {name}.data_ptr()" for name in names]
    if shape.checked:
        looked_at = ["at", f"[{', '.join(outs)}]", *[f"{name}={name}" for name in read]]
        lines += wrapped("at = (", [f"{name}_at" for name in names], ")" if len(names) > 1 else ",)")
        lines += ["if at not in seen:", *indented(wrapped("check_unseen(", looked_at, ")"))]
    return lines


def _memory_lines(shape: LaunchShape) -> list[str]:
    """Return lines that allocate results and take scratch memory."""
    lines = []
    for made in shape.result_tensors:
        if not made.wanted:
            lines.append(f"{made.name} = None")
        elif made.name not in shape.present:
            dtype = f", dtype={made.dtype}" if made.dtype else ""
            sizes = made.shape if isinstance(made.shape, str) else ", ".join(made.shape)
            make = f"{made.name} = {made.like or shape.takes[0]}.new_empty({sizes}{dtype})"
            may_be_given = made.name in shape.takes and not shape.checked  # otherwise the plan's key tells
            lines += [f"if {made.name} is None:", f"    {make}"] if may_be_given else [make]
    if shape.scratch:
        lines.append("".join(f"{name}_memory, " for name in shape.scratch) + "= workspace.take(memory)")
    return lines


@functools.lru_cache(maxsize=4096)
def code_of(op: str, shape: LaunchShape) -> CodeType:
    """Compile the function `run` of a LaunchShape. `op`: the operator's name, for tracebacks."""
    return compiled_one_of_many(text_of(shape), f"glulam launch of {op}")


def aligned_row(matrix: Tensor) -> Tensor:
    """Return the matrix; if its row stride is not a multiple of 8, a view of its single row with a valid stride.

    Torch leaves the stride of a single row arbitrary, and kernels do not accept every stride.
    """
    return matrix if matrix.stride(0) % ALIGNMENT_ELEMENTS == 0 else matrix.view(-1).view(1, -1)


def launch_nothing(*_: Any) -> None:
    """Do nothing. This takes the place of the kernel's function in plans for T = 0."""


_NAMES: dict[str, Any] = {
    "__builtins__": builtins,  # C code that imports a module, as dispatch modes do, looks for them in a frame's globals
    "aligned_row": aligned_row,
    "gpus": gpus,
    "on": torch.cuda.device,
    "tickets": tickets,
    "workspace": workspace,
}


OWN_NAMES = frozenset((*_NAMES, "seen", "check_unseen", "run"))
"""Names that a plan adds to the constants that it is given."""
OF_ROWS = frozenset(("num_rows", "tokens", "memory"))
"""Names of the constants that depend on the number of rows, of the plans that `Plan.serves` asks about."""


class Bare(NamedTuple):
    """A kernel's function with the values of all its arguments, to repeat a plan's launch without the plan's code.

    It serves measurements. Results, scratch memory and counters are in new memory, which no other launch uses.

    Attributes:
        function: the kernel's function.
        arguments: descriptions of the function's arguments.
        values: the arguments' values, in order.
        results: the call's results.
        memory: all other tensors that the values point to; they must be kept alive.
    """

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    values: tuple[Any, ...]
    results: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]


class Plan:
    """A launch for all calls of one signature (the metadata of all arguments), after one such call passed the checks.

    `run` is the generated function that launches.

    Attributes:
        op: the operator's name, for messages.
        shape: the LaunchShape from which the code was generated.
        constants: the objects that the code uses by name; `run` sees nothing else.
        serving: object whose `at(rows)` is the kernel's function for a number of rows.
        extents: the bytes that each argument that is read spans.
        out_extents: the bytes that each output that the caller gave spans.
        seen: the tuples of addresses that passed `check_unseen`.
        look: function that checks arguments at new addresses for properties that metadata does not show, such as
            alignment.
    """

    def __init__(
        self, op: str, shape: LaunchShape, constants: dict[str, Any], serving: Any, extents: tuple[int, ...],
        out_extents: tuple[int, ...], look: Callable[..., None], code: CodeType | None = None,
    ) -> None:  # fmt: skip
        """Make a plan.

        Args:
            op, shape, serving, extents, out_extents, look: the attributes of these names.
            constants: the attribute of this name; the plan adds names to this dict, and owns it from now on.
            code: compiled code for `shape`, from another plan. None: `code_of(op, shape)`.
        """
        self.op, self.shape, self.serving, self.look = op, shape, serving, look
        self.extents, self.out_extents = extents, out_extents
        self.seen: set[tuple[int, ...]] = set()
        self.constants = constants
        constants.update(_NAMES)
        self.run = FunctionType(code or code_of(op, shape), constants, "run", (None,) * len(shape.takes))
        if shape.checked:  # otherwise omitted: the reference cycle would need the garbage collector
            constants.update(seen=self.seen, check_unseen=self.check_unseen)
        if not shape.single_gpu:
            constants["run"] = self.run

    def serves(self, rows: int) -> bool:
        """Return True if this plan, of a GEMM of a backward, also serves `rows` rows: the kernel is the same, and no
        constant depends on the number of rows.
        """
        if self.shape.checked or not OF_ROWS.isdisjoint(self.run.__code__.co_names):
            return False
        return self.serving.at(rows).function is self.constants["function"]

    @property
    def text(self) -> str:
        """The Python source of `run`."""
        return text_of(self.shape)

    def bare(self, *given: Any) -> Bare:
        """Return the launch that `run(*given)` would make, without launching."""
        memory: list[Tensor] = [tensor for one in given for _, tensor in tensors_of("", one)]
        memory += [one.table.values for one in given if isinstance(one, ExpertList)]
        passed: list[tuple[Any, ...]] = []

        def kept(tensor: Tensor) -> Tensor:
            memory.append(tensor)
            return tensor

        def take(layouts: workspace.MatrixLayouts) -> workspace.Several:
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

    def check_unseen(self, at: tuple[int, ...], outs: list[Any], **read: Any) -> None:
        """Check arguments at addresses that this plan has not seen: alignment, freed storages, overlap with outputs.

        The operator's own checks (`look`) come first, then `memory.check_unseen`, which also describes the arguments.
        """
        self.look(self.op, outs, **read)
        check_unseen(self, at, outs, read)
