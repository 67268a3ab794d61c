"""Chains: exported functions that launch several kernels. A chain is described as a list of stages, with the sources of
each stage's arguments.

A stage is one kernel with its host launch, compiled once. A chain is data: the bridge links it from its stages
(`ffi_bridge.chains`) as one exported function. So a kernel is compiled once for all chains that contain it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from .arguments import ADDRESS, KINDS, NAMES_OF_PARAMS, TENSOR, Argument, Signature
from .formats import FP8_ROWS, MXFP8_WIDE, OPERANDS
from .signatures import stage_signature
from .specs import (
    BY_GROUP,
    BackwardCleanupSpec,
    DgluSpec,
    GroupedDgluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeFp8BlockSpec,
    QuantizeMxfp8Spec,
    Spec,
    WgradSpec,
)


@dataclasses.dataclass(frozen=True)
class Of:
    """Source of a stage's argument: a property of one of the chain's tensors.

    Attributes:
        tensor: the name of the chain's tensor argument.
        what: "address"; "size" or "stride" (in elements) of dimension `dim`; or "stream", the current stream of the
            tensor's device.
        dim: the dimension; used only for "size" and "stride".
    """

    tensor: str
    what: str
    dim: int = 0


@dataclasses.dataclass(frozen=True)
class Position:
    """Marks an argument of a stage (one kernel of a chain) whose value is the number of kernels that the same call
    launches before the stage. Stages that the call leaves out do not count."""


Source = str | int | Of | Position
"""Source of a stage's argument:

    str         the chain's argument of this name
    int         a constant
    Of          a property of one of the chain's tensors
    Position    the number of kernels before this stage
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """One launch of a chain: a stage, and the sources of its arguments.

    Attributes:
        stage: the stage's spec.
        sources: pairs (stage's argument, source). Optional arguments without a source are 0.
        when: the name of an address among the chain's arguments. If the address is 0, the step is left out. Empty: the
            step always runs.
    """

    stage: Spec
    sources: tuple[tuple[str, Source], ...]
    when: str = ""


@dataclasses.dataclass(frozen=True)
class Chain:
    """An exported function that launches several kernels, described by its steps in order."""

    steps: tuple[Step, ...]

    @functools.cached_property
    def signature(self) -> Signature:
        """The chain's signature. Arguments are grouped by kind, in the order of KINDS. Within a kind, they have the
        order in which steps first use them. An argument is required if a step that is never left out requires it."""
        found: dict[str, Argument] = {}
        for step in self.steps:
            stage = stage_signature(step.stage)
            for name, source in step.sources:
                if isinstance(source, Of):
                    found.setdefault(source.tensor, Argument(source.tensor, TENSOR))
                elif isinstance(source, str):
                    taken = stage[name]
                    spared = taken.optional or bool(step.when)
                    optional = spared and found.get(source, Argument(source, ADDRESS, True)).optional
                    found[source] = dataclasses.replace(taken, name=source, optional=optional)
            if step.when:
                found[step.when] = Argument(step.when, ADDRESS, True)
        return Signature(tuple(sorted(found.values(), key=lambda argument: KINDS.index(argument.kind))))


def _step(stage: Spec, same: str, *, when: str = "", **sources: Source) -> Step:
    """Make a step, a launch of one stage.

    Args:
        stage: the stage's spec.
        same: names of stage arguments, separated by spaces. Their source is the chain's argument of the same name.
        when: the name of an address. If the address is 0, a call leaves the step out. Empty: the step always runs.
        sources: the sources of further stage arguments, by name. `position` is added if the stage takes it.
    """
    signature = stage_signature(stage)
    position = {"position": Position()} if "position" in signature.names else {}
    taken = {**{name: name for name in same.split()}, **sources, **position}
    signature.pack(**taken)
    return Step(stage, tuple(taken.items()), when)


_GROUPS = "groups group_form num_groups tickets num_sms"
SORTED_EXPERTS = 256
"""The most experts with which a grouped_mlp itself sorts its tokens' choices of experts. One CTA sorts them. It keeps a
count of every expert for each of its warps, which takes 32 KiB of shared memory."""


def _quantized(spec: GroupedMlpSpec | GroupedDgluSpec, operands: str, x: str, data: str, scale: str) -> Step:
    """Return the step that quantises a matrix of T rows to the row format of `operands`. It also quantises rows after
    the last group, which are never read.

    x, data, scale: the chain's names of the matrix, of the quantised elements and of their scales.
    """
    dtype, arch = spec.dtype, spec.arch
    if OPERANDS[operands].x == FP8_ROWS:
        return _step(QuantizeFp8BlockSpec(dtype, arch), "", x=x, data=Of(data, "address"), scale=scale)
    return _step(
        QuantizeMxfp8Spec(dtype, "row", arch), "", x=x, row_data=Of(data, "address"), row_scale=scale,
        wide=int(OPERANDS[operands].x == MXFP8_WIDE),
    )  # fmt: skip


def _scales(operands: str, x: str, w: str) -> dict[str, str]:
    """Return the sources of a GEMM stage's scales. For weights without scales, return the source of its table of
    experts' weights instead.

    x, w: the chain's names of the operands. The names of scales and of the table are derived from them ("w1_scale").
    """
    formats = OPERANDS[operands]
    if not formats.w.scale:
        return {"w_table": f"{w}_table"}
    more = (
        ("global_scale", "global_count") if formats.w.has_global else ("global_scale",) if formats.w.row_binades else ()
    )
    found = {f"w_{name}": f"{w}_{name}" for name in ("scale", *more)}
    return found | ({"x_scale": f"{x}_scale"} if formats.x.scale else {})


def _combined(spec: Spec, rows: str, out: str, residual: Source = 0) -> Step:
    """Return the combine step: out[token] = residual[token] + the sum of the token's rows. It runs if a call gives
    `out`.

    Args:
        rows, out: the chain's names of the matrix of rows and of the matrix of the tokens' sums.
        residual: the chain's name of the residual's address; 0, the null address: no residual.
    """
    return _step(
        LayerSpec("combine", spec.dtype, arch=spec.arch), "row_of tokens k", when=out, y=Of(rows, "address"),
        residual=residual, width=Of(rows, "size", 1), bound=Of(rows, "size", 0), out=out, stream=Of(rows, "stream"),
    )  # fmt: skip


def _sorted(spec: Spec) -> Step:
    """Return the sorting step: one CTA sorts all choices (token, expert) by expert. It writes the group ends (offs),
    the token and the weight of each row, and the row of each choice. The step runs if a call gives `ids`."""
    place = LayerSpec("place", experts=SORTED_EXPERTS, arch=spec.arch)
    return _step(
        place, "ids expert_map row_of num_mapped tokens k weight_form", when="ids", weights="id_weights",
        num_tokens=0, offs="groups", token_of_row="rows", weight_of_row="scale", workspace=0, wide="wide_ids", first=0,
        experts="num_groups", chunk="tokens", stream=Of("x", "stream"),
    )  # fmt: skip


def _copied(spec: Spec) -> Step:
    """Return the copying step: x[row] = x_tokens[the row's token]. It runs if a call gives `x_tokens`."""
    return _step(
        LayerSpec("permute", spec.dtype, arch=spec.arch), "row_of tokens k", when="x_tokens", x="x_tokens",
        out=Of("x", "address"), width=Of("x", "size", 1), stream=Of("x", "stream"),
    )  # fmt: skip


def _mlp(spec: GroupedMlpSpec) -> tuple[Step, ...]:
    """Return the steps of a grouped_mlp. Steps in brackets are left out of some calls or specs:

    1. [sort choices into rows]
    2. [copy tokens to x, or quantise x to x8]
    3. FC1 to mid
    4. FC2 to y
    5. [add each token's rows of y]

    A kernel may start before its predecessor ends (programmatic dependent launch). But both GEMMs need complete offs.
    So FC1 lets FC2 start only once the rows are sorted (`schedule.groups.OFFS_OF_CALL`), and the copy of rows does the
    same with FC1.

    FC1 kernels that decode weights cannot read rows by index, so tokens are copied into the order of rows first.
    Reading by index would take registers from FC1's MMA warpgroups: FC1 would be 1 to 7 % slower on rows in order, and
    by index take up to 1.2 times as long as on a copy.
    """
    fc1, fc2 = spec.fc1, spec.fc2
    formats = OPERANDS[fc1.operands]
    quantizes = bool(formats.x.scale) and not spec.quantized
    x, mid = "x8" if quantizes else "x", "mid"
    first = (_quantized(spec, fc1.operands, "x", x, f"{x}_scale"),) if quantizes else ()
    copied = (_copied(spec),) if formats.decodes else ()
    optional = (" preact" if fc1.save_preact else "") + ("" if formats.decodes else " rows")
    own = {"act_scale": f"{mid}_scale"} if formats.act.scale else {} if formats.w.scale else {"w_up": "w1_up"}
    return (
        _sorted(spec),
        *copied,
        *first,
        _step(
            fc1, f"{_GROUPS} kind glu_layout {NAMES_OF_PARAMS} scale{optional}", x=x, w="w1", act=mid, bias="b1",
            bias_table="b1_table",
            **_scales(fc1.operands, x, "w1"), **own,
        ),
        _step(
            fc2, f"{_GROUPS} scale y", x=mid, w="w2", bias="b2", bias_table="b2_table",
            **_scales(fc2.operands, mid, "w2"),
        ),
        _combined(spec, "y", "out", "residual"),
    )  # fmt: skip


def _dglu(spec: GroupedDgluSpec) -> tuple[Step, ...]:
    """Return the steps of a grouped_dglu. Steps in brackets are left out of some calls or specs:

    1. [quantise dy to dy8]
    2. make dpreact, act and partial sums of d_scale
    3. [[quantise dpreact to dpreact8,] make dx]
    4. zero dx after the last group and add the partial sums of d_scale
    5. [add each token's rows of dx]
    """
    in_mxfp8 = OPERANDS[spec.operands].has_scaled_rows
    names = "dtype", "activation", "glu_layout", "tile", "arch", "operands", "transpose_w", "adapted"
    fields = {name: getattr(spec, name) for name in names}
    dy, low = "dy8" if in_mxfp8 else "dy", " low low_w" if spec.adapted else ""
    steps = [_quantized(spec, spec.operands, "dy", dy, f"{dy}_scale")] if in_mxfp8 else []
    steps.append(
        _step(
            DgluSpec(**fields), f"{_GROUPS} {NAMES_OF_PARAMS} rows preact dpreact act scale partials{low}", x=dy,
            w="w2", **_scales(spec.operands, dy, "w2"),
        )
    )  # fmt: skip
    dx: dict[str, Any] = {}
    if spec.dgrad:
        dpreact = "dpreact8" if in_mxfp8 else "dpreact"
        if in_mxfp8:
            steps.append(_quantized(spec, spec.operands, "dpreact", dpreact, f"{dpreact}_scale"))
        dgrad = GroupedMmSpec(spec.dtype, not in_mxfp8, spec.dgrad, spec.arch, spec.operands)
        steps.append(_step(dgrad, _GROUPS, x=dpreact, w="w1", y="dx", **_scales(spec.operands, dpreact, "w1")))
        dx = {"dx": Of("dx", "address"), "dx_columns": Of("dx", "size", 1), "dx_pitch": Of("dx", "stride", 0)}
        dx["dx_tokens"] = "dx_tokens"
    steps.append(
        _step(
            BackwardCleanupSpec(spec.dtype, spec.arch), "act groups group_form num_groups num_sms d_scale partials",
            **dx, part_columns=spec.tile.n, when="" if spec.dgrad else "d_scale",
        )
    )  # fmt: skip
    if spec.dgrad:
        steps.append(_combined(spec, "dx", "dx_tokens"))
    return tuple(steps)


def _wgrad(spec: GroupedWgradSpec) -> tuple[Step, ...]:
    """Return the steps of a weight gradient in MXFP8. First dy is quantised to dy8 and x to x8, with blocks of a
    group's rows (`BY_GROUP`); rows that are given by index are gathered here. Then dw is made."""
    quantiser = QuantizeMxfp8Spec(spec.dtype, BY_GROUP, spec.arch)
    quantised = tuple(
        _step(
            quantiser, "groups group_form num_groups", x=name, rows=f"{name}_rows", data=f"{name}8",
            scale=f"{name}8_scale",
        )
        for name in ("dy", "x")
    )  # fmt: skip
    wgrad = WgradSpec(spec.out_dtype, spec.tile, spec.arch, spec.operands)
    same = f"{_GROUPS} dw dw_table mask accumulate"
    scales = {"dy_scale": "dy8_scale", "x_scale": "x8_scale"}
    return *quantised, _step(wgrad, same, dy="dy8", x="x8", **scales)


def _pre(spec: MhcSpec) -> tuple[Step, ...]:
    """Return the steps of a hyper-connection's forward before the sublayer: h_pre, h_post, logits = project(x); h_res =
    sinkhorn(logits); out = aggregate(x, h_pre).

    The residual streams are read twice. All columns of a token are needed before its first column can be weighted, and
    the tokens in flight do not fit into L2. Tensors between the steps are float32, form 0 (`dtypes.PARAM_FORMS`).
    """
    stages = {
        kernel: MhcSpec(kernel, "float32" if kernel == "sinkhorn" else spec.dtype, spec.n, spec.arch)
        for kernel in ("project", "sinkhorn", "aggregate")
    }
    same = " ".join(name for name in stage_signature(stages["project"]).names if name != "h_res")
    return (
        _step(stages["project"], same, h_res="logits"),
        _step(stages["sinkhorn"], "logits iters stream", out="h_res", forms=0, matrices="tokens", eps="sinkhorn_eps"),
        _step(stages["aggregate"], "x h_pre out tokens width stream", forms=0),
    )


def _routing(spec: LayerSpec) -> tuple[Step, ...]:
    """Return the steps of routing, by `spec.kernel`:

        "route"     choose each token's experts from its logits, then place choices in the order of experts
        "router"    make logits of x, then as "route"
        "sort"      place choices whose ids are given, as "route" does

    With one chunk of tokens, a single launch chooses and places (workspace is 0). With several chunks, a launch that
    chooses or counts comes before the launch that places.
    """
    if spec.kernel == "router":
        names = "x weight weight_bias logits forms weight_form bias_form tokens width experts stream"
        logits = _step(LayerSpec("logits", spec.dtype, arch=spec.arch), names)
        return logits, *_routing(LayerSpec("route", experts=spec.experts, arch=spec.arch))
    stage = {kernel: dataclasses.replace(spec, kernel=kernel) for kernel in ("count", "choose", "place")}
    same = "ids num_tokens workspace tokens experts k chunk stream"
    rows = f"{same} weights offs token_of_row row_of weight_of_row"
    if spec.kernel == "sort":
        of_ids = "wide first expert_map num_mapped"
        count = _step(stage["count"], f"{same} {of_ids}", when="workspace")
        return count, _step(stage["place"], f"{rows} {of_ids} weight_form")
    choose = _step(stage["choose"], f"{rows} logits bias forms score normalize num_groups top_groups scale")
    ids = {"wide": 0, "first": 0, "expert_map": 0, "num_mapped": 0}
    return choose, _step(stage["place"], rows, weight_form=0, **ids, when="workspace")


def _steps(spec: Spec) -> tuple[Step, ...]:
    """Return the steps of a spec's chain; an empty tuple if the spec is a stage (one kernel)."""
    if isinstance(spec, GroupedMlpSpec):
        return _mlp(spec)
    if type(spec) is GroupedDgluSpec:
        return _dglu(spec)
    if isinstance(spec, GroupedWgradSpec) and OPERANDS[spec.operands].has_scaled_rows:
        return _wgrad(spec)
    if isinstance(spec, MhcSpec) and spec.kernel == "pre":
        return _pre(spec)
    if isinstance(spec, LayerSpec) and spec.kernel in ("route", "router", "sort"):
        return _routing(spec)
    return ()


@functools.lru_cache(maxsize=4096)
def chain_of(spec: Spec) -> Chain | None:
    """Return the chain of a spec, if the spec's function launches several kernels; None if the spec is one kernel (a
    stage)."""
    steps = _steps(spec)
    return Chain(steps) if steps else None


def signature_of(spec: Spec) -> Signature:
    """Return the signature of a spec's exported function."""
    chain = chain_of(spec)
    return chain.signature if chain else stage_signature(spec)


def stages_of(spec: Spec) -> tuple[Spec, ...]:
    """Return the stages that a spec's function launches, each once. If the spec is a stage, return the spec itself."""
    chain = chain_of(spec)
    return tuple(dict.fromkeys(step.stage for step in chain.steps)) if chain else (spec,)
