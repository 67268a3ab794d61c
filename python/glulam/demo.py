"""One MoE layer of Qwen3-30B-A3B through Glulam's public API: `python -m glulam.demo`, or `make demo`.

The tokens are words of real text, so that some experts get several times the rows of others, as in life. The layer is
`glulam.nn.MoE`, router included (softmax, top 8 of 128, probabilities renormalised). It is compared with torch's own
operators: error against float64, and time. Without a GPU that Glulam has kernels for, a shrunk layer runs through the
CPU reference.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import glulam

from . import device as devices
from ._demo_layer import QWEN3_30B_A3B, SHRUNK, Size, embed, exact_moe, make_layer, read_words, torch_moe, weights_of
from .layer import Routing
from .nn import MoE

SEED = 0
ROUNDS = {"cuda": 30, "cpu": 5}
HOST_SAMPLES = 9
CALLS_PER_HOST_SAMPLE = 20  # few enough that the launch queue never fills and blocks the host
PIPE_WIDTH = 110  # columns where the output is not a terminal

# The rule of correctness: a 16-bit result may err twice as much as torch's in the same dtype, and by 1e-5 of the
# reference's scale. It decides nothing unless that is far below the reference itself: zeros must fail.
TORCH_ERRORS_ALLOWED = 2.0
SCALE_ALLOWED = 1e-5
LARGEST_TOLERANCE = 0.1


class Error(NamedTuple):
    """Of an output against float64: the largest, relative to the reference's largest value, and in Frobenius norms."""

    largest: float
    norm: float


Call = Callable[[], Tensor]


def contestants(layer: MoE, x: Tensor) -> dict[str, Call]:
    """The layer by Glulam, and by torch."""
    return {
        "glulam: nn.MoE": lambda: layer(x),
        "torch: sort, gather, 2 grouped_mm, sum": lambda: torch_moe(layer, x),
    }


def error_of(got: Tensor, reference: Tensor) -> Error:
    difference = got.double() - reference
    largest, norm = difference.abs().max() / reference.abs().max(), difference.norm() / reference.norm()
    return Error(float(largest), float(norm))


def within_rule(ours: Error, torchs: Error) -> bool:
    """Whether both measures of our error are within the rule, and the rule means something. A NaN fails."""
    tolerances = [TORCH_ERRORS_ALLOWED * error + SCALE_ALLOWED for error in torchs]
    return all(o <= t <= LARGEST_TOLERANCE for o, t in zip(ours, tolerances, strict=True))


def sample_ms(call: Call, device: str) -> float:
    """One call's time: between CUDA events on a GPU, on the clock on a CPU."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def median_ms(calls: Collection[Call], device: str) -> list[float]:
    """Median time of each call; they take turns."""
    rounds = [[sample_ms(call, device) for call in calls] for _ in range(ROUNDS[device])]
    return [statistics.median(samples) for samples in zip(*rounds, strict=True)]


def host_us(call: Call) -> float:
    """Median time until a call returns to the host, while the GPU works on."""

    def sample() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS_PER_HOST_SAMPLE):
            call()
        return (time.perf_counter() - start) / CALLS_PER_HOST_SAMPLE * 1e6

    return statistics.median(sample() for _ in range(HOST_SAMPLES))


def choose_device(wanted: str | None) -> tuple[str, str]:
    """The device and the reason. Raises RuntimeError where a GPU is asked for and there is none."""
    if wanted == "cpu":
        return "cpu", "as asked for"
    if not torch.cuda.is_available():
        if wanted:
            raise RuntimeError("--device cuda: torch finds no GPU; leave the option out to run on the CPU")
        return "cpu", "torch finds no GPU"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if wanted is None and capability not in devices.ARCHS:
        return "cpu", f"no kernels for {name}, compute capability {capability[0]}.{capability[1]}"
    return "cuda", name


def show_problem(console: Console, size: Size, sizes: list[int]) -> None:
    shrunk = "" if size == QWEN3_30B_A3B else " (shrunk for a CPU)"
    mean = sum(sizes) / len(sizes)
    console.print(f"layer    Qwen3-30B-A3B{shrunk}: " + ", ".join(f"{k} {v}" for k, v in size._asdict().items()))
    console.print(
        f"routing  {sum(sizes)} rows; an expert gets {mean:.0f} on average, {min(sizes)} to {max(sizes)}: "
        f"{max(sizes) / mean:.1f} times the mean at most; {sizes.count(0)} experts are empty"
    )


def show_kernels(console: Console, layer: MoE, x: Tensor, routing: Routing) -> None:
    """Which kernel serves the experts; without a GPU, also which one would serve the real sizes on a Hopper."""
    arguments = {"offs": routing.offs, "rows": routing.token_of_row, "row_scale": routing.weight_of_row}
    text = [str(glulam.explain("grouped_mlp", x, *weights_of(layer), **arguments))]
    if x.device.type == "cpu":
        size = QWEN3_30B_A3B
        rows, gates = (size.tokens * size.top_k, size.hidden), (size.experts, 2 * size.intermediate, size.hidden)
        downs = (size.experts, size.hidden, size.intermediate)
        text += ["at its real sizes on a Hopper GPU:", str(glulam.explain("grouped_mlp", rows, gates, downs))]
    console.print("\n".join(text), markup=False, soft_wrap=True)


@contextmanager
def few_threads(device: str) -> Iterator[None]:
    """On a CPU, one thread: an expert's matrices are too small to share, and beside other work two were seen to be
    ten times slower than one.
    """
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure(calls: Collection[Call], errors: list[Error], device: str) -> dict[str, list[str]]:
    """The result table's columns, one cell a contestant."""
    columns = {
        "largest error": [f"{error.largest:.2e}" for error in errors],
        "error's norm": [f"{error.norm:.2e}" for error in errors],
        "time ms": [f"{ms:.3f}" for ms in median_ms(calls, device)],
    }
    if device == "cuda":
        columns["host us a call"] = [f"{host_us(call):.1f}" for call in calls]
    return columns


def show_results(console: Console, names: Iterable[str], columns: dict[str, list[str]]) -> None:
    table = Table(pad_edge=False, box=None)
    table.add_column()
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in zip(names, *columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def show_verdict(console: Console, correct: bool, columns: dict[str, list[str]], device: str) -> None:
    rule = "at most twice torch's own error against float64, plus 1e-5 of the scale"
    console.print(f"error    {'[green]ok[/]' if correct else '[red]FAILED[/]'}: the rule is {rule}")
    if device == "cuda":
        ours, torchs = (float(ms) for ms in columns["time ms"])
        console.print(f"speed    torch's time over ours: {torchs / ours:.2f}")
    else:
        console.print("speed    this is the CPU reference, plain torch operators in float32: no claim about speed")


def run(console: Console, device: str, reason: str) -> bool:
    """The whole demonstration; whether the error is within the rule."""
    torch.manual_seed(SEED)
    size = QWEN3_30B_A3B if device == "cuda" else SHRUNK
    layer, x = make_layer(size, device), embed(read_words(size.tokens), size.hidden, device)
    routing, paths = layer.route(x), contestants(layer, x)
    console.print(f"device   {device} ({reason})")
    show_problem(console, size, routing.counts.tolist())
    show_kernels(console, layer, x, routing)

    reference = exact_moe(layer, x)
    errors = [error_of(call(), reference) for call in paths.values()]
    columns = measure(paths.values(), errors, device)
    correct = within_rule(*errors)
    show_results(console, paths, columns)
    show_verdict(console, correct, columns, device)
    return correct


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if the error is within the rule, else 1; 1 and one line where the layer cannot run at all."""
    parser = argparse.ArgumentParser(prog="python -m glulam.demo", description="Run one MoE layer through Glulam.")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU that has kernels, else the CPU")
    wanted = parser.parse_args(arguments).device
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    try:
        device, reason = choose_device(wanted)
        with few_threads(device):
            return 0 if run(console, device, reason) else 1
    except RuntimeError as error:  # no usable bundle, an unsupported GPU: the message says what mends it
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
