"""Class `PlanMaker`: makes the plan of a checked call, a launch for all calls of equal metadata (see `launch`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import CodeType
from typing import Any, ClassVar

from cute_kernels.arguments import Argument, Signature

from ..choose import kernels
from ..choose.problem import Problem
from ..errors import ARGUMENT_ERRORS
from ..host import device as gpus
from ..host import groups, workspace
from ..host.experts import ExpertList, GateUp
from .arguments import Arguments
from .definition import Definition, PrologueStep, ScratchPart
from .launch import (
    ABSENT,
    BYTES,
    CONSTANT,
    GIVEN,
    MATRIX,
    RESULT,
    TABLE,
    TEXT,
    TICKETS,
    UP,
    Bare,
    LaunchShape,
    Plan,
    ResultTensor,
    Source,
    launch_nothing,
)
from .memory import check_alignment, tensors_of


class PlanMaker(Arguments):
    """A call's arguments, and methods that make the launch which passes these arguments to a kernel.

    In methods, `problem` is the call's `Problem`: the sizes, dtypes and options from which a kernel is chosen.

    Attributes:
        sources: {the kernel's name of an argument: the operator's name}, for names that differ.
        definition: the operator's results, and the values of its launch.
    """

    sources: ClassVar[dict[str, str]] = {}
    definition: ClassVar[Definition]

    def result_tensors(self) -> tuple[ResultTensor, ...]:
        """Return the result tensors of this call.

        A result is not made if its flag is unset, or if the tensor that it is like (`ResultTensor.like`) is absent.
        Such results are left out; but if the definition has a function `returns`, which takes all results, they are
        marked as not wanted.
        """
        results, is_none = self.definition.results, self.definition.returns is not None
        made = [one if self.makes_result(one) else one._replace(wanted=False) for one in results]
        return tuple([one for one in made if one.wanted or is_none])

    def makes_result(self, result: ResultTensor) -> bool:
        """Return True if this call makes `result`, one of its definition's results."""
        has_model = not result.like or getattr(self, result.like) is not None
        return has_model and (not result.when or bool(getattr(self, result.when)))

    def returned_results(self) -> list[tuple[str, bool]]:
        """Return (name, True if this call makes it) for each result that the call returns."""
        return [(result.name, result.wanted) for result in self.result_tensors() if result.returned]

    @property
    def gpu(self) -> gpus.Gpu:
        """The GPU of the leading argument."""
        return gpus.gpu(self.lead.get_device())

    def constants(self) -> dict[str, Any]:
        """Return the launch's constants, by name, that do not depend on the number of rows.

        The problem's dimensions (`Problem.dims`) are not among them.
        """
        return self._merged([part(self) for part in self.definition.constants])

    def of_rows(self) -> dict[str, Any]:
        """Return the launch's constants, by name, that may depend on the number of rows."""
        return self._merged([part(self) for part in self.definition.of_rows])

    def scratch(self, problem: Problem) -> dict[str, ScratchPart]:
        """Return the scratch memory that a launch takes from the workspace, by names of kernel arguments."""
        return self._merged([part(self, problem) for part in self.definition.scratch])

    def prologue(self, problem: Problem) -> list[PrologueStep]:
        """Return the steps that a launch runs before it calls the kernel's function."""
        return [one for part in self.definition.prologue if (one := part(self, problem)) is not None]

    def values(
        self, names: tuple[str, ...], constants: Collection[str], texts: Mapping[str, str],
        scratch: Mapping[str, ScratchPart],
    ) -> dict[str, Source]:  # fmt: skip
        """Find the `Source` of each kernel argument: where the launch takes its value from.

        Args:
            names: names of the kernel's arguments.
            constants: names of the plan's constants.
            texts: {kernel argument: Python expression}; they replace the call's arguments of the same names.
            scratch: {kernel argument: memory that the launch takes from the workspace}.

        Raises:
            TypeError: two sources give one argument.
        """
        made = [made for made in self.result_tensors() if made.kernel in names]
        renamed, results = {of: name for name, of in self.sources.items()}, {made.name for made in made}
        stated = [(name, Source(TEXT, text)) for name, text in texts.items()]
        stated += [(name, Source(BYTES if isinstance(part, int) else MATRIX, name)) for name, part in scratch.items()]
        stated += [(made.kernel, Source(RESULT, made.name) if made.wanted else Source(ABSENT)) for made in made]
        stated += [(name, Source(CONSTANT, name)) for name in constants]
        stated.append(("tickets", Source(TICKETS)))
        for of in self._present():
            name = renamed.get(of, of)
            if name not in texts and of not in results:  # a given buffer is the source of its result
                stated.append((name, Source(GIVEN, of)))
        for name, (kind, of) in list(stated):
            if kind in (GIVEN, RESULT):
                stated += [(f"{name}_table", Source(TABLE, of)), (f"{name}_up", Source(UP, of))]
        found: dict[str, Source] = {}
        for name, source in stated:
            if name in names and found.setdefault(name, source) is not source:
                raise TypeError(f"{self.op}: both {found[name]} and {source} give the kernel's argument {name!r}")
        return found

    @classmethod
    def check_new_addresses(cls, op: str, outs: list[Any], **read: Any) -> None:
        """Check arguments at new addresses: their alignment, as `check_addresses` does, and the definition's checks.

        This is needed because the kernel's exported function checks the alignment of tensors, but not of arguments that
        it takes by address. Lists were checked when their tables were made.

        Args:
            op: the operator's name, for errors.
            outs: the outputs that the caller gave.
            read: the arguments that are read, by name.
        """
        given = [(cls.labels.get(name, name), read.get(name)) for name in (*cls.matrices, *cls.weights)]
        given += [("out" if len(outs) == 1 else f"out[{place}]", out) for place, out in enumerate(outs)]
        for name, value in given:
            for label, tensor in () if value.__class__ is ExpertList else tensors_of(name, value):
                check_alignment(op, label, tensor)
        for check in cls.definition.address_checks:
            check(cls, outs, read)

    def _merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge dicts, with the definition's `overrides`; see the function `merged`."""
        return merged(self.op, parts, self.definition.overrides)

    def results(self, problem: Problem) -> Any:
        """Return the call's return value with uninitialised results: buffers that the caller gave, or new tensors."""
        return self.returned(self.new_results(problem))

    def new_results(self, problem: Problem) -> list[Any]:
        """Return a list of the uninitialised results that the call returns; None: the result is not wanted."""
        known = self._merged([problem.dims, self.of_rows(), self.constants()])
        return [self._result(one, known) for one in self.result_tensors() if one.returned]

    def returned(self, results: Sequence[Any]) -> Any:
        """Make the call's return value from its results: one alone, several as a tuple, or by `Definition.returns`."""
        if self.definition.returns is not None:
            return self.definition.returns(*results)
        return results[0] if len(results) == 1 else tuple(results)

    def _result(self, made: ResultTensor, known: dict[str, Any]) -> Any:
        if not made.wanted:
            return None
        if made.name in self.outputs and (given := getattr(self, made.name)) is not None:
            return given
        shape = known[made.shape] if isinstance(made.shape, str) else [known[name] for name in made.shape]
        like = getattr(self, made.like) if made.like else self.lead
        make = like.new_zeros if made.zeros else like.new_empty
        return make(shape, dtype=known[made.dtype] if made.dtype else like.dtype)

    def serving(self, problem: Problem, gpu: gpus.Gpu) -> Any:
        """Return the object whose `at(rows)` is the kernel function for this many rows (`kernels.ServingFunction`)."""
        return kernels.serving(problem, gpu)

    def plan(self, problem: Problem, checked: bool = True, serving: Any = None, gpu: gpus.Gpu | None = None) -> Plan:
        """Make the plan of this call.

        Args:
            problem: the call's problem.
            checked: True: whenever the plan runs, it checks each argument whose address it has not checked before.
            serving: a `kernels.Fixed`, to use a particular kernel. None: `choose` chooses the kernel.
            gpu: the GPU that the plan is for. None: the GPU of the leading argument.
        """
        index = self.lead.get_device()
        gpu = gpu or gpus.gpu(index)
        serving = serving or self.serving(problem, gpu)
        of_call: dict[str, Any] = {
            "index": index,
            "device": self.lead.device,
            "group_form": 0 if self.groups is None else groups.code_of(self.groups, is_offs=self.offs is not None),
            "num_sms": gpu.sm_count,
            **({} if self.definition.returns is None else {"result": self.definition.returns}),
        }
        dims = {name: size for name, size in problem.dims.items() if name != "num_rows"}  # which depends on rows
        parts = [of_call, dims, self._constants_of_rows(problem, serving), self.constants()]
        constants = self._merged(parts)
        shape = self._shape(problem, serving.at(problem.rows).signature, constants, checked)
        return self._plan(shape, constants, serving)

    def bare(self, problem: Problem, serving: Any = None, gpu: gpus.Gpu | None = None) -> Bare:
        """Return the kernel's function and the argument values that this call's launch would pass; launch nothing.

        Args:
            problem: the call's problem.
            serving: a `kernels.Fixed`, to use a particular kernel. None: `choose` chooses the kernel.
            gpu: the GPU that the launch is for. None: the GPU of the leading argument.
        """
        return self.plan(problem, False, serving, gpu).bare(*[getattr(self, name) for name in self.given])

    def resized_plan(self, like: Plan, problem: Problem) -> Plan:
        """Make this call's plan from the plan `like` of a call that differs only in its number of rows."""
        constants = {**like.constants, **self._constants_of_rows(problem, like.serving)}
        shape, code = self.resized_launch_shape(like, problem, constants)
        return self._plan(shape, constants, like.serving, code)

    def resized_launch_shape(
        self, like: Plan, problem: Problem, constants: dict[str, Any]
    ) -> tuple[LaunchShape, CodeType]:
        """Return (LaunchShape, its compiled code) for a copy of plan `like` with this call's number of rows.

        Here they are those of `like`. Subclasses override this method if the number of rows changes the launch's code.

        Args:
            like: the plan of a call that differs only in its number of rows.
            constants: the constants of the new plan.
        """
        return like.shape, like.run.__code__

    def run(self, plan: Any) -> Any:
        """Run a plan with this call's arguments. If that fails, check them again, and raise if one is wrong."""
        try:
            return plan.run(*[getattr(self, name) for name in self.given])
        except ARGUMENT_ERRORS:
            self.check_after_failure()
            raise

    def _plan(self, shape: LaunchShape, constants: dict[str, Any], serving: Any, code: CodeType | None = None) -> Plan:
        """Make a plan with this LaunchShape; a checked plan gets the bytes that this call's arguments span.

        Args:
            shape: the LaunchShape.
            constants: the objects that the launch's code uses, by name.
            serving: object whose `at(rows)` is the kernel's function for a number of rows.
            code: compiled code for `shape`. None: it is generated, or taken from an equal shape.
        """
        extents = (self._read_extents(), self._out_extents()) if shape.checked else ((), ())
        return Plan(self.op, shape, constants, serving, *extents, self.check_new_addresses, code)

    def _constants_of_rows(self, problem: Problem, serving: Any) -> dict[str, Any]:
        """Return the constants of a plan that may depend on the number of rows.

        serving: object whose `at(rows)` is the kernel's function for a number of rows.
        """
        served, memory = serving.at(problem.rows), self.scratch(problem).values()
        of_launch: dict[str, Any] = {
            "num_rows": problem.rows, "draws_tickets": served.draws_tickets,
            "function": served.function if problem.rows else launch_nothing,
            "memory": self._layouts(memory) if memory else None,
        }  # fmt: skip
        return self._merged([of_launch, self.of_rows(), *[one.names for one in self.prologue(problem)]])

    def _layouts(self, parts: Collection[ScratchPart]) -> workspace.MatrixLayouts:
        where = self.lead.device, self.lead.get_device()
        layouts: list[Any] = [one if isinstance(one, int) else workspace.MatrixLayout(*one, *where) for one in parts]
        return workspace.MatrixLayouts(*layouts)

    def _read_extents(self) -> tuple[int, ...]:
        unpacked_lists = self._unpacked_lists()
        return self.extents(tuple(n for n in self._present() if n not in self.outputs and n not in unpacked_lists))

    def _unpacked_lists(self) -> frozenset[str]:
        """Return the names of weights that are plain lists. A launch does not read them: they are prepared first."""
        plain = (list, tuple)
        return frozenset(name for name in self.weights if getattr(self, name).__class__ in plain)

    def _shape(self, problem: Problem, signature: Signature, constants: Collection[str], checked: bool) -> LaunchShape:
        """Describe this call's launch by a LaunchShape, from which the launch's code is generated.

        Args:
            problem: the call's problem.
            signature: the arguments of the kernel's function.
            constants: names of the plan's constants.
            checked: True: the launch checks arguments at addresses that the plan has not seen.
        """
        values = {name: getattr(self, name) for name in self._present()}
        results = tuple(one for one in self.result_tensors() if one.kernel in signature.names or not one.wanted)
        scratch, prologue = self.scratch(problem), self.prologue(problem)
        texts = self._merged([one.values for one in prologue])
        sources = self.values(signature.names, constants, texts, scratch)
        unpacks = "out" if values.get("out").__class__ is list else ""
        kinds = {
            kind: frozenset(name for name, v in values.items() if v.__class__ is kind) for kind in (ExpertList, GateUp)
        }
        return LaunchShape(
            takes=self.given,
            present=frozenset([*values, *[one.name for one in results if unpacks]]),
            lists=kinds[ExpertList],
            halves=kinds[GateUp],
            unpacked_lists=self._unpacked_lists(),
            unpacks=unpacks,
            arguments=signature.arguments,
            values=tuple(self._source(argument, sources) for argument in signature.arguments),
            result_tensors=results,
            scratch=tuple(scratch),
            prologue=tuple([one.line for one in prologue if one.line is not None]),
            checked=checked,
            single_gpu=gpus.has_single_gpu(),
            aligned=checked and (problem.rows == 1 or self.may_read_fewer),
            result="" if self.definition.returns is None else "result",
        )

    def _source(self, argument: Argument, sources: dict[str, Source]) -> Source:
        """Return the source of a kernel argument. Raises TypeError if a required argument has none.

        Args:
            argument: the kernel's argument.
            sources: {kernel argument: its source}.
        """
        if argument.name not in sources and not argument.optional:
            raise TypeError(f"{self.op}: nothing gives {argument.name}, which the function needs")
        return sources.get(argument.name, Source(ABSENT))


def merged(op: str, parts: Sequence[Mapping[str, Any]], overrides: Collection[str] = ()) -> dict[str, Any]:
    """Merge dicts; return one dict with the entries of all dicts in `parts`.

    Args:
        op: the operator's name, for errors.
        parts: dicts of values by name.
        overrides: names for which the value of a later dict replaces the value of an earlier dict
            (`Definition.overrides`).

    Raises:
        TypeError: two dicts have a name that is not in `overrides`, even if the values are equal.
    """
    found: dict[str, Any] = {}
    for part in parts:
        for name in part:
            if name in found and name not in overrides:
                raise TypeError(
                    f"{op}: two sources give the argument {name!r}: {found[name]!r} and {part[name]!r}. Leave one out, "
                    f"or add {name!r} to the definition's overrides."
                )
        found.update(part)
    return found
