"""One MoE layer of a known model through Glulam's public API: `python -m glulam.demo`, or `make demo`.

The layer is `glulam.nn.MoE`, router included. Its tokens repeat like words of a text, so that some experts get several
times the rows of others, as in real use. The layer is compared with torch's own operators: by error against float64,
and by time. A layer whose experts are shipped in MXFP4 runs in MXFP4, and with the same weights in MXFP8 and in
bfloat16. Without a GPU that Glulam has kernels for, a shrunk layer runs through the CPU reference.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import glulam

from .activations import Activation, activate
from .command.terminal import printable
from .host import device as devices
from .layer import Routing
from .nn import MoE
from .tuner.timing import Sampler, device_us, interleave
from .validate.judge import ALLOWED, FLOOR, MOST_TOLERANCE

SEED = 0
VOCABULARY = 2**14
DTYPE = torch.bfloat16
ROUNDS = {"cuda": 30, "cpu": 5}
HOST_SAMPLES = 9
CALLS_PER_HOST_SAMPLE = 20  # few enough that the launch queue never fills and blocks the host
PIPE_WIDTH = 110  # columns where the output is not a terminal

Call = Callable[[], Tensor]


class Size(NamedTuple):
    """Sizes of a layer and its input: H, I, E, K and the number of tokens."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int


class Model(NamedTuple):
    """The MoE layer of a known model.

    Attributes:
        size: sizes on a GPU. shrunk: smaller sizes for a CPU.
        options: arguments of `nn.MoE`.
        recipes: recipes with which the layer is shown. The first is the recipe of the model's checkpoint, the last
            "bf16".
    """

    size: Size
    shrunk: Size
    options: Mapping[str, Any]
    recipes: tuple[str, ...]


QWEN3_30B_A3B = Size(hidden=2048, intermediate=768, experts=128, top_k=8, tokens=4096)
SHRUNK = Size(hidden=256, intermediate=96, experts=128, top_k=8, tokens=512)  # a second or two on two cores
IN_MXFP4 = ("mxfp4_weight_only", "mxfp8_weight_only", "bf16")
AS_GPT_OSS = {
    "score": "topk_softmax", "router_bias": True, "bias": True, "activation": "clamped_swiglu",
    "glu_layout": "interleaved",
}  # fmt: skip
QWEN3, GPT_OSS = "Qwen3-30B-A3B", "gpt-oss-120b"
MODELS = {
    QWEN3: Model(QWEN3_30B_A3B, SHRUNK, {}, ("bf16",)),
    GPT_OSS: Model(Size(2880, 2880, 128, 4, 128), Size(192, 192, 128, 4, 128), AS_GPT_OSS, IN_MXFP4),
    "gpt-oss-20b": Model(Size(2880, 2880, 32, 4, 128), Size(192, 192, 32, 4, 128), AS_GPT_OSS, IN_MXFP4),
}
"""Known layers by model name.

Layers whose checkpoints are in MXFP4 have the number of tokens of a decoding step, whose time is spent on reading
weights.
"""


class Error(NamedTuple):
    """The error of an output against float64.

    Attributes:
        largest: the largest absolute difference, divided by the reference's largest absolute value.
        norm: the Frobenius norm of the difference, divided by the reference's.
    """

    largest: float
    norm: float


def make_input(size: Size, device: str) -> Tensor:
    """Return tokens [tokens, hidden]: embeddings of random token ids, normalised as before an MoE layer.

    The ids are drawn by Zipf's law, so that some tokens occur often.
    """
    ids = (1 / torch.arange(1, VOCABULARY + 1, device=device)).multinomial(size.tokens, replacement=True)
    return F.rms_norm(torch.randn(VOCABULARY, size.hidden, device=device)[ids], (size.hidden,)).to(DTYPE)


def new_layer(model: Model, size: Size, device: str, recipe: str) -> MoE:
    """Return the model's layer with these sizes. Its logits are float32, since 16-bit logits are often equal."""
    options = {**model.options, "router_dtype": torch.float32, "recipe": recipe}
    return MoE(*size[:4], **options, device=device, dtype=DTYPE).requires_grad_(False)


def make_layer(model: Model, size: Size, device: str) -> MoE:
    """Return the layer in bfloat16 with random weights, scaled so that activations and logits stay of order 1.

    If the model's experts are shipped in MXFP4, their weights are rounded to numbers of that format.
    """
    layer = new_layer(model, size, device, "bf16")
    for weight in layer.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    if model.recipes == IN_MXFP4:
        for weight in weights_of(layer):
            weight.copy_(glulam.quantize_mxfp4(weight).dequantize(DTYPE))
    return layer


def with_recipe(layer: MoE, model: Model, size: Size, recipe: str) -> MoE:
    """Return a layer with the same weights and another recipe; the layer itself if it has this recipe already."""
    if recipe == layer.experts.recipe.name:
        return layer
    other = new_layer(model, size, str(layer.router.weight.device), recipe)
    other.load_state_dict(layer.state_dict())
    return other


def weights_of(layer: MoE) -> tuple[Any, Any]:
    """Return the weights of the layer's experts: w1 [E, 2I, H] and w2 [E, H, I]."""
    return layer.experts.fc1.experts("weight"), layer.experts.fc2.experts("weight")


def biases_of(layer: MoE) -> tuple[Tensor, Tensor]:
    """Return the biases of the layer's experts: b1 [E, 2I] and b2 [E, H]; zeros if there are none."""
    made = (linear.experts("bias") for linear in (layer.experts.fc1, layer.experts.fc2))
    first, second = (
        weight.new_zeros(weight.shape[:2]) if bias is None else bias
        for weight, bias in zip(weights_of(layer), made, strict=True)
    )
    return first, second


def activated(layer: MoE, h: Tensor) -> Tensor:
    options = layer.experts.call_options
    return activate(h, *Activation.named(options["activation"], options["glu_layout"]))


def choose(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Route tokens x [N, H] by torch; return float32 weights and expert ids, [N, K] each."""
    router = layer.router
    bias = None if router.bias is None else router.bias.float()
    weights, experts = F.linear(x.float(), router.weight.float(), bias).softmax(-1).topk(layer.top_k)
    return weights / weights.sum(-1, keepdim=True), experts


def torch_moe(layer: MoE, x: Tensor) -> Tensor:
    """Compute the layer by torch's own operators.

    Sort rows by expert, run two grouped GEMMs, restore the order, scale and add.
    """
    weights, experts = choose(layer, x)
    ids, order = experts.flatten().sort(stable=True)
    offs = torch.searchsorted(ids, torch.arange(layer.num_experts, device=x.device), right=True, out_int32=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    (w1, w2), (b1, b2) = weights_of(layer), biases_of(layer)
    h = F.grouped_mm(x.index_select(0, order // layer.top_k), w1.mT, offs=offs) + b1[ids]
    rows = (F.grouped_mm(activated(layer, h), w2.mT, offs=offs) + b2[ids]).index_select(0, back)
    return (rows.view(*experts.shape, -1) * weights.to(x.dtype)[..., None]).sum(1)


def exact_moe(layer: MoE, x: Tensor) -> Tensor:
    """Compute the layer in float64, one expert after the other."""
    weights, experts = choose(layer, x)
    out = torch.zeros_like(x, dtype=torch.float64)
    parts = zip(*weights_of(layer), *biases_of(layer), strict=True)
    for expert, (w1, w2, b1, b2) in enumerate(parts):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        act = activated(layer, x[token].double() @ w1.double().T + b1.double())
        out.index_add_(0, token, weights[token, choice, None] * (act @ w2.double().T + b2.double()))
    return out


def contestants(layers: Sequence[MoE], x: Tensor) -> dict[str, Call]:
    """Return the calls to compare, by name: Glulam's layer for each entry of `layers`, and torch's layer in bfloat16.

    Args:
        layers: the same layer with different recipes. The last one's recipe is "bf16"; torch computes this one, too.
        x: tokens.
    """
    names = [f"glulam: nn.MoE, {layer.experts.recipe}" if len(layers) > 1 else "glulam: nn.MoE" for layer in layers]
    ours: dict[str, Call] = {name: partial(layer, x) for name, layer in zip(names, layers, strict=True)}
    return {**ours, "torch: sort, gather, 2 grouped_mm, sum": partial(torch_moe, layers[-1], x)}


def error_of(got: Tensor, reference: Tensor) -> Error:
    difference = got.double() - reference
    largest, norm = difference.abs().max() / reference.abs().max(), difference.norm() / reference.norm()
    return Error(float(largest), float(norm))


def within_rule(ours: Error, torchs: Error) -> bool:
    """Return True if our error is at most ALLOWED times torch's error plus FLOOR, in both measures.

    A NaN fails. The limit must be at most MOST_TOLERANCE, since a larger limit would prove nothing.
    """
    tolerances = [ALLOWED * error + FLOOR for error in torchs]
    return all(o <= t <= MOST_TOLERANCE for o, t in zip(ours, tolerances, strict=True))


def clock_us(call: Call, calls: int = 1) -> float:
    """Return the host's time in us for one call, as the mean of `calls` consecutive calls.

    Neither before nor after the calls does the host wait for the GPU.
    """
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e6 / calls


def host_us(call: Call) -> float:
    """Return the host's time in us to issue a call to an idle GPU: the median of HOST_SAMPLES samples.

    A sample is the mean of CALLS_PER_HOST_SAMPLE calls (`clock_us`), taken after all earlier work of the GPU has ended.
    """
    samples = []
    for _ in range(HOST_SAMPLES):
        torch.cuda.synchronize()
        samples.append(clock_us(call, CALLS_PER_HOST_SAMPLE))
    return statistics.median(samples)


def sampler(call: Call, device: str) -> Sampler:
    """Return a function that measures a call's time once: between CUDA events, or on a CPU by the clock."""
    return (lambda: device_us(lambda _: call(), 1, 0.0)) if device == "cuda" else (lambda: clock_us(call))


def median_ms(calls: Mapping[str, Call], device: str) -> list[float]:
    """Return the median time in ms of each call. Calls take turns, so that drifts of clocks affect all alike."""
    samplers, rounds = {name: sampler(call, device) for name, call in calls.items()}, ROUNDS[device]
    return [found.median_us / 1e3 for found in interleave(samplers, 0.0, rounds, rounds).values()]


def choose_device(wanted: str | None) -> tuple[str, str]:
    """Return (the device, the reason for it). wanted: "cuda", "cpu" or None for any.

    Raises RuntimeError if "cuda" is wanted and torch finds no GPU.
    """
    if wanted == "cpu":
        return "cpu", "as asked for"
    if not torch.cuda.is_available():
        if wanted:
            raise RuntimeError("--device cuda: torch finds no GPU; leave the option out to run on the CPU")
        return "cpu", "torch finds no GPU"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if wanted or devices.allows_unvalidated():
        return "cuda", name
    arch = devices.arch_of(capability, name)
    if arch is None:
        return "cpu", f"no kernels for {name}, compute capability {capability[0]}.{capability[1]}"
    if devices.state_of(arch, name) == devices.NEVER_RUN:
        return "cpu", f"the {arch} kernels were {devices.NEVER_RUN} on {name}: `glulam validate` tries them"
    return "cuda", name


@contextmanager
def few_threads(device: str) -> Iterator[None]:
    """Let torch use one thread on a CPU inside this context.

    An expert's matrices are too small for several threads, and beside other work two threads were seen to be ten times
    slower than one.
    """
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def problem_text(name: str, size: Size, sizes: list[int]) -> str:
    shrunk = "" if size == MODELS[name].size else " (shrunk for a CPU)"
    mean = sum(sizes) / len(sizes)
    return (
        f"layer    {name}{shrunk}: " + ", ".join(f"{k} {v}" for k, v in size._asdict().items()) + "\n"
        f"routing  {sum(sizes)} rows; an expert gets {mean:.0f} on average, {min(sizes)} to {max(sizes)}: "
        f"{max(sizes) / mean:.1f} times the mean at most; {sizes.count(0)} experts are empty"
    )


def kernels_text(layer: MoE, x: Tensor, routing: Routing, real: Size) -> str:
    """Return text that names the kernel which computes the experts.

    Without a GPU, the text also names the kernel that the layer's real sizes would get on a Hopper.
    """
    arguments: dict[str, Any] = {"offs": routing.offs, "rows": routing.token_of_row, "row_scale": routing.weight_of_row}
    form = {name: layer.experts.call_options[name] for name in ("activation", "glu_layout", "recipe")}
    text = str(glulam.explain("grouped_mlp", x, *weights_of(layer), **arguments, **form))
    if x.device.type == "cuda":
        return text
    hidden, inner, experts, k, tokens = real
    shapes = (tokens * k, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)
    return f"{text}\nat its real sizes on a Hopper GPU:\n{glulam.explain('grouped_mlp', *shapes, **form)}"


def run(console: Console, name: str, device: str, reason: str) -> bool:
    """Run and print the whole demonstration; return True if every error is within the rule. reason: why this device."""
    torch.manual_seed(SEED)
    model = MODELS[name]
    size = model.size if device == "cuda" else model.shrunk
    layer, x = make_layer(model, size, device), make_input(size, device)
    layers = [with_recipe(layer, model, size, recipe) for recipe in model.recipes]
    routing, paths = layer.route(x), contestants(layers, x)
    console.print(f"device   {device} ({reason})")
    console.print(problem_text(name, size, routing.counts.tolist()))
    console.print(kernels_text(layers[0], x, routing, model.size), markup=False, soft_wrap=True)

    reference = exact_moe(layer, x)
    errors = [error_of(call(), reference) for call in paths.values()]
    times = median_ms(paths, device)
    table = Table(pad_edge=False, box=None)
    table.add_column()
    for heading in ("largest error", "error's norm", "time ms", *["host us a call"] * (device == "cuda")):
        table.add_column(heading, justify="right")
    for (path, call), error, ms in zip(paths.items(), errors, times, strict=True):
        host = [f"{host_us(call):.1f}"] if device == "cuda" else []
        table.add_row(path, f"{error.largest:.2e}", f"{error.norm:.2e}", f"{ms:.3f}", *host)
    console.print(table)

    correct = all(within_rule(error, errors[-1]) for error in errors[:-1])
    rule = "at most twice torch's own error against float64, plus 1e-5 of the scale"
    console.print(f"error    {'[green]ok[/]' if correct else '[red]FAILED[/]'}: the rule is {rule}")
    speed = f"torch's time over ours: {', '.join(f'{times[-1] / ms:.2f}' for ms in times[:-1])}"
    if device == "cpu":
        speed = "this is the CPU reference, plain torch operators in float32: no claim about speed"
    console.print(f"speed    {speed}")
    return correct


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 if all errors are within the rule, else 1.

    If the layer cannot run at all, prints one line and returns 1.
    """
    parser = argparse.ArgumentParser(prog="python -m glulam.demo", description="Run one MoE layer through Glulam.")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU that has kernels, else the CPU")
    parser.add_argument("--model", choices=MODELS, default=QWEN3, help=f"whose layer: {QWEN3} by default")
    given = parser.parse_args(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    try:
        device, reason = choose_device(given.device)
        with few_threads(device):
            return 0 if run(console, given.model, device, reason) else 1
    except RuntimeError as error:  # no usable bundle, an unsupported GPU: the message says what mends it
        print(printable(f"demo: {error}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
