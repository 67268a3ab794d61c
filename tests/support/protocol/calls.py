"""Kernels that overlap by programmatic dependent launch (overlap.py), and the calls of shipped functions.

A table lists each kernel's steps; the calls are made from the table and from `cute_kernels.chains`.

Buffers are arguments of the kernel's stage; "dx:rest" is a part of dx, and ".sums" an array in the stage's workspace. A
kernel that reads an argument before and after its wait lists it on both sides. Kernels are left out if no chain
contains them and they neither are launched early nor let others begin early.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cute_kernels.architectures import ARCHS, capability
from cute_kernels.arguments import ADDRESS, TENSOR
from cute_kernels.chains import Of, Source, chain_of
from cute_kernels.chains import Step as ChainStep
from cute_kernels.signatures import stage_signature
from cute_kernels.specs import (
    BY_GROUP,
    BackwardCleanupSpec,
    DgluSpec,
    GroupedGluSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeFp8BlockSpec,
    QuantizeMxfp8Spec,
    Spec,
    WgradSpec,
)
from ffi_bridge.profiles import shipped_specs

from .overlap import LET, WAIT, WRITE, Kernel, Step, kernel

NEVER, ALWAYS, LATER = "never", "always", "later"
"""When a kernel is launched early; LATER: unless it is the first of its call."""


class Declared(NamedTuple):
    """A kernel of a stage.

    Attributes:
        source: its file and class in cute_kernels.
        early: NEVER, ALWAYS or LATER.
        ctas: steps of each kind of CTA, as `overlap.kernel` takes them.
        when: an address among the stage's arguments; the kernel is left out if it is 0. Empty: it always runs.
    """

    source: str
    early: str
    ctas: tuple[str, ...]
    when: str = ""

    @property
    def name(self) -> str:
        return self.source.split()[1]


def _declare(source: str, early: str, *ctas: str, when: str = "") -> Declared:
    return Declared(source, early, ctas, when)


_COPIED = "d_aggregate d_residual h_pre"
_OF_GATES = "d_pre d_post d_res stats alpha_pre alpha_post alpha_res bias"
_GATES = _declare(
    "mhc/gates_backward.py GatesBackward", ALWAYS,
    f"wait; let; read {_OF_GATES}; write .products .norms .sums",
)  # fmt: skip
_PROJECT_BACKWARD = [
    _GATES,
    _declare(
        "mhc/project_tiles.py TileGradients", ALWAYS,
        "wait; read .sums; write d_sums",
        f"read x {_COPIED} weight; wait; let; read .products .norms x {_COPIED}; write d_x .weights",
    ),
    _declare("mhc/tile_sums.py TileSums", ALWAYS, "wait; read .weights; write d_weight", when="d_weight"),
]  # fmt: skip
_PROJECT_BACKWARD_IN_FLOAT32 = [
    _GATES,
    _declare(
        "mhc/project_vectors.py VectorGradients", NEVER,
        f"read x {_COPIED} weight .products .norms; write d_x .weights",
    ),
    _declare("mhc/part_sums.py PartSums", ALWAYS, "wait; read .weights .sums; write d_weight d_sums"),
]  # fmt: skip
_TOKENS = "pre post comb x d_x d_new_pre d_new_post d_new_comb stats scale base"
_COLUMNS = "streams d_new_streams y d_x"
MHC: dict[str, list[Declared]] = {
    "project": [
        _declare("mhc/project.py Project", NEVER, "read x weight; write .sums"),
        _declare(
            "mhc/gates.py ProjectFinish", ALWAYS,
            "read alpha_pre alpha_post alpha_res bias; wait; read .sums; write h_pre h_post h_res stats",
        ),
    ],
    "sinkhorn": [_declare("mhc/sinkhorn.py Sinkhorn", NEVER, "read logits; write out")],
    "aggregate": [_declare("mhc/aggregate.py Aggregate", NEVER, "read x h_pre; write out")],
    "project_backward": _PROJECT_BACKWARD,
    "pre_backward": _PROJECT_BACKWARD,
    "boundary": [
        _declare(
            "mhc/boundary.py Boundary", NEVER,
            "read y streams pre post comb weight; let; read y streams pre post comb; write new_streams x .sums",
        ),
        _declare(
            "mhc/boundary_finish.py BoundaryFinish", ALWAYS,
            "wait; read .sums x scale base norm_weight; write new_pre new_post new_comb stats x x_data x_scale",
        ),
    ],
    "boundary_backward": [
        _declare("mhc/boundary_tokens.py BoundaryTokens", NEVER, f"let; read {_TOKENS}; write .blocks .rows"),
        _declare(
            "mhc/boundary_backward.py BoundaryBackward", ALWAYS,
            f"read {_COLUMNS} weight norm_weight; wait; let; read .blocks {_COLUMNS}; "
            "write .dots .weights .norms d_streams d_y",
        ),
        _declare(
            "mhc/boundary_backward_finish.py BoundaryBackwardFinish", ALWAYS,
            "wait; read .rows; write d_sums",
            "wait; read .dots .weights .norms; write d_pre d_post d_comb d_weight d_norm_weight",
        ),
    ],
}  # fmt: skip
_ROWS = "offs token_of_row row_of weight_of_row"
_SENT = "regions state handle sum_rows weight_places"
LAYER: dict[str, Declared] = {
    "logits": _declare("layer/logits.py Logits", NEVER, "let; read x weight weight_bias; write logits"),
    # With a workspace it writes no rows, but Place does.
    "choose": _declare(
        "layer/route.py Choose", LATER, f"let; wait; read logits bias num_tokens; write ids weights workspace {_ROWS}"
    ),
    "count": _declare("layer/route.py Count", NEVER, "let; read ids num_tokens expert_map; write workspace"),
    "place": _declare(
        "layer/route.py Place", LATER,
        f"let; wait; read ids weights num_tokens expert_map workspace; write {_ROWS}",
    ),
    "permute": _declare("layer/rows.py Permute", LATER, "wait; let; read x row_of; write out"),
    "combine": _declare("layer/rows.py Combine", LATER, "wait; read y row_of residual; write out"),
    "send_tokens": _declare(
        "ranks/send_tokens.py SendTokens", NEVER, f"wait; read x x_scale ids weights; write {_SENT}"
    ),
    "send_sums": _declare(
        "ranks/send_sums.py SendSums", NEVER, f"wait; read y row_of d_weights handle; write {_SENT}"
    ),
}  # fmt: skip
QUANTIZE = _declare(
    "quantize/mxfp8.py QuantizeMxfp8", NEVER,
    "let; read x offs; write row_data row_scale col_data col_scale",
)  # fmt: skip
ROUND = QUANTIZE._replace(ctas=("let; read x offs; write out",))
QUANTIZE_BLOCKS = QUANTIZE._replace(ctas=("let; read x offs; write data scale",))
QUANTIZE_GROUPS = _declare(
    "quantize/quantize_groups.py QuantizeGroups", NEVER, "let; read x rows groups; write data scale"
)
CLEANUP = _declare(
    "layer/finish_backward.py FinishBackward", ALWAYS,
    "read groups; write dx:rest d_scale:rest; wait; read partials; write d_scale",
)  # fmt: skip
GEMMS = GroupedMmSpec, GroupedGluSpec, DgluSpec, GroupedWgradSpec, WgradSpec
PERSISTENT = "sm90/persistent.py PersistentGemm"


def _gemm(stage: Any, waits: bool) -> Declared:
    """Return a GEMM.

    A persistent GEMM has a scheduler, and other warps that read weights before they wait. The other warps are one role
    here.

    waits: True: all roles wait before they read the group ends.
    """
    names = [one.name for one in stage_signature(stage).arguments if one.kind in (ADDRESS, TENSOR)]
    results = {"act", "act_scale", "dpreact", "partials", "y", "dw"}
    results |= {"preact"} if type(stage) is GroupedGluSpec else set()
    weights = {"w", "w_table", "w_up", "w_scale", "w_global_scale", "low_w", "dw_table", "mask"}
    made, fixed = (" ".join(name for name in names if name in some) for some in (results, weights))
    rows = " ".join(name for name in names if name not in results | weights | {"groups", "tickets"})
    if stage.tile.by_warps:
        return _declare("portable/persistent.py TileKernel", NEVER, f"read groups {fixed} {rows}; write {made}")
    begin = "wait; let" if waits else "let"
    return _declare(
        PERSISTENT, NEVER if isinstance(stage, (GroupedWgradSpec, WgradSpec)) else LATER,
        f"{begin}; read groups; write tickets | "
        f"{begin}; read groups {fixed}; wait; read {rows}; write {made}",
    )  # fmt: skip


def declared(stage: Spec, waits: bool = False) -> list[Declared]:
    """Return a stage's kernels; an empty list if the stage is left out of the table. waits: see `_gemm`."""
    if isinstance(stage, MhcSpec):
        in_float32 = MHC.get(stage.kernel) is _PROJECT_BACKWARD and stage.dtype == "float32"
        return _PROJECT_BACKWARD_IN_FLOAT32 if in_float32 else MHC.get(stage.kernel, [])
    if isinstance(stage, LayerSpec):
        return [LAYER[stage.kernel]] if stage.kernel in LAYER else []
    if isinstance(stage, QuantizeMxfp8Spec):
        return [QUANTIZE_GROUPS if stage.axis == BY_GROUP else ROUND if stage.rounded else QUANTIZE]
    if isinstance(stage, QuantizeFp8BlockSpec):
        return [QUANTIZE_BLOCKS]
    if isinstance(stage, BackwardCleanupSpec):
        return [CLEANUP]
    return [_gemm(stage, waits)] if type(stage) in GEMMS else []


class Call(NamedTuple):
    """The kernels of a call of an exported function.

    name: the function's name, followed by the addresses that are 0.
    """

    name: str
    kernels: tuple[Kernel, ...]

    def changed(self, changes: Mapping[str, Callable[[Kernel], Kernel]]) -> Call:
        """Return the call with changed kernels, by name."""
        assert set(changes) <= {one.name for one in self.kernels}
        return self._replace(kernels=tuple(changes.get(one.name, lambda same: same)(one) for one in self.kernels))

    @property
    def form(self) -> tuple[Kernel, ...]:
        """The kernels, with one name for all memory that no kernel of the call writes.

        Calls of equal form need one search.
        """
        written = set().union(*(one.buffers(WRITE) for one in self.kernels))

        def nameless(step: Step) -> Step:
            return step._replace(buffers=tuple(sorted({one if one in written else "given" for one in step.buffers})))

        return tuple(one.changed(lambda role: map(nameless, role)) for one in self.kernels)


class _Arguments(NamedTuple):
    """Translation from the names of a stage's arguments to the call's names.

    Attributes:
        stage: the stage.
        sources: the sources of its arguments, by name; arguments without a source are 0.
        position: number of kernels that the call launches before the stage.
    """

    stage: Spec
    sources: Mapping[str, Source]
    position: int

    def buffer(self, named: str) -> str | None:
        """Return the call's name for a buffer of the stage; None: the call does not pass this buffer."""
        if named.startswith("."):
            return getattr(self.stage, "kernel", "") + named
        argument, colon, part = named.partition(":")
        assert argument in stage_signature(self.stage).names, f"{self.stage.name} has no argument {argument}"
        source = self.sources.get(argument)
        found = source.tensor if isinstance(source, Of) else source
        if not isinstance(found, str):
            return None
        # Each kernel of a call has its own counter of tickets (`schedule.tickets.counter`).
        return f"{found} {self.position}" if argument == "tickets" else found + colon + part

    def steps(self, role: Iterable[Step]) -> Iterator[Step]:
        for step in role:
            buffers = tuple(found for named in step.buffers if (found := self.buffer(named)))
            if buffers or not step.buffers:
                yield Step(step.action, buffers)

    def launch(self, one: Declared) -> Kernel:
        name = type(self.stage).__name__.removesuffix("Spec") if type(self.stage) in GEMMS else one.name
        is_early = one.early == ALWAYS or (one.early == LATER and self.position > 0)
        return kernel(name, *one.ctas, early=is_early).changed(self.steps)


def call_of(spec: Spec, left_out: Iterable[str] = ()) -> Call:
    """Return a call of a spec's function. left_out: addresses that are 0."""
    chain, left_out = chain_of(spec), set(left_out)
    same = tuple((name, name) for name in stage_signature(spec).names) if chain is None else ()
    made: list[Kernel] = []
    for step in chain.steps if chain else (ChainStep(spec, same),):
        if step.when in left_out:
            continue
        given = {name: source for name, source in step.sources if source not in left_out}
        # Group ends that the call's first kernel writes: the second kernel waits (`PersistentGemm.start`).
        waits = len(made) == 1 and "groups" in made[0].buffers(WRITE)
        launched = [one for one in declared(step.stage, waits) if one.when not in left_out]
        made += [_Arguments(step.stage, given, len(made) + at).launch(one) for at, one in enumerate(launched)]
    without = f" without {', '.join(sorted(left_out))}" if left_out else ""
    return Call(spec.name + without, tuple(made))


def _may_be_left_out(spec: Spec) -> list[str]:
    chain = chain_of(spec)
    whens = {one.when for one in (chain.steps if chain else declared(spec))}
    return sorted(whens - {""})


@functools.cache
def calls() -> tuple[Call, ...]:
    """Return one call for each form of the calls of shipped functions, on GPUs that have early launches.

    Calls are left out if their kernels neither wait nor let the next kernel begin.
    """
    found: dict[tuple[Kernel, ...], Call] = {}
    for arch in (arch for arch in ARCHS if capability(arch) >= (9, 0)):
        for spec in shipped_specs(arch):
            names = _may_be_left_out(spec)
            for left_out in itertools.chain(*(itertools.combinations(names, count) for count in range(len(names) + 1))):
                made = call_of(spec, left_out)
                if any(one.has(WAIT) or one.has(LET) for one in made.kernels):
                    found.setdefault(made.form, made)
    return tuple(found.values())
