"""Train a small mixture-of-experts language model on the sources of Python's standard library, and compare.

    python examples/train_moe.py            # on a GPU some 160 million parameters, on a CPU a tiny model

The same model is trained from the same weights on the same bytes in the same order: by torch's own operators, by
torch's in two other orders of the same products, and by Glulam. Training multiplies rounding errors, so that curves
part without any fault. Two things are judged instead: at the weights that Glulam's run passes through, its gradients
must be as close to torch's as torch's other orders are (gradient_check.py), and its loss of held-out text as low.

`--recipe mxfp8` also trains with the experts' data path in MXFP8. It rounds more, so only its held-out loss is judged.

    torchrun --nproc-per-node 4 examples/train_moe.py --expert-parallel 4

also trains with the experts spread over 4 ranks, each of which has a quarter of every batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script has only its own folder on the path

import glulam
from examples import expert_parallel, training_curves
from examples.gradient_check import GradientCheck
from examples.moe_model import LanguageModel, Layer, Size, glulam_layer, mixture, parallel_layer, torch_layer
from examples.stdlib_text import Text, read_text
from glulam.demo import choose_device, few_threads
from glulam.distributed import ExpertParallel
from glulam.names import RecipeName
from perf.stamp import make_stamp

BALANCE_WEIGHT = 0.01
MOST_NORM = 1.0  # norm that a step's gradients are clipped to
HELD_OUT_BATCHES = 8
EAGER_STEPS = 3  # before a capture: what is made at a first call is then there
REPORT_EVERY = 5  # steps; the host reads the loss so often, and waits for the GPU only then
PIPE_WIDTH = 120  # columns where the output is not a terminal


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings of training. batch: sequences of `size.context` bytes; learning_rate: the highest; dtype: of
    products.
    """

    size: Size
    batch: int
    steps: int
    learning_rate: float
    dtype: torch.dtype

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}


SETUPS = {
    "cuda": Setup(Size(8, 512, 8, 16, 2, 768, 512), batch=64, steps=300, learning_rate=1e-3, dtype=torch.bfloat16),
    "cpu": Setup(Size(2, 64, 2, 8, 2, 64, 64), batch=8, steps=200, learning_rate=1e-2, dtype=torch.float32),
}


class Run(NamedTuple):
    """A way to train: the function that computes a mixture of experts, whether a step is captured in a CUDA graph, the
    recipe, and whether all ranks train together.
    """

    name: str
    layer: Layer
    graph: bool = False
    recipe: RecipeName = "bf16"
    parallel: bool = False


TORCH = (
    Run("torch", torch_layer),
    Run("torch, scaled first", functools.partial(torch_layer, scaled="up")),
    Run("torch, scaled last", functools.partial(torch_layer, scaled="result")),
)
GLULAM = Run("glulam", glulam_layer)
GRAPH = Run("glulam, one CUDA graph", glulam_layer, graph=True)
PARALLEL = Run("glulam, experts across ranks", parallel_layer, parallel=True)
TRAINED = tuple(name for name, recipe in glulam.recipes.RECIPES.items() if recipe.trains and name != "bf16")


def by_recipe(run: Run, recipe: Any) -> Run:
    """Return the same run with another recipe."""
    return run._replace(name=run.name.replace("glulam", f"glulam {recipe}"), recipe=recipe)


def learning_rate(setup: Setup, step: int) -> float:
    """Return a step's learning rate: it rises over the first tenth of the steps, then falls along a cosine to a
    tenth.
    """
    rise = max(1, setup.steps // 10)
    if step < rise:
        return setup.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1, setup.steps - rise)
    return setup.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


class Trainer:
    """A model, an optimizer of `parameters`, and tensors that a step reads and writes at fixed addresses, so that a
    graph can hold the step.

    parallel: says which experts are on which rank; None: all are here.
    """

    def __init__(
        self, model: nn.Module, parameters: Iterable[Tensor], setup: Setup, device: str,
        parallel: ExpertParallel | None = None,
    ) -> None:  # fmt: skip
        self.model, self.parallel = model, parallel
        with torch.device(device):
            self.tokens = torch.zeros(setup.batch, setup.size.context + 1, dtype=torch.int64)
            self.loss, self.rate = torch.zeros(()), torch.zeros(())
        self.positions = torch.arange(setup.size.context + 1, device=device)
        self.optimizer = torch.optim.AdamW(
            parameters, self.rate, (0.9, 0.95), weight_decay=0.1, fused=True, capturable=device == "cuda"
        )

    def load(self, text: Tensor, starts: Tensor) -> None:
        """Load a batch: the bytes from each start on. Text and starts are on the device."""
        self.tokens.copy_(text[starts[:, None] + self.positions])

    def backward(self) -> Tensor:
        """Compute the gradients, clipped to norm `MOST_NORM`; return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        parallel = self.parallel
        tokens = self.tokens if parallel is None else expert_parallel.part_of(self.tokens, parallel)
        loss, balance = self.model(tokens)
        (loss + BALANCE_WEIGHT * balance).backward()
        if parallel is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MOST_NORM)
        else:
            expert_parallel.finish_gradients(self.model, parallel, MOST_NORM)
            loss = expert_parallel.mean(loss.detach(), parallel)
        return loss.detach()

    def step(self) -> None:
        loss = self.backward()
        self.optimizer.step()
        self.loss.copy_(loss)

    def captured_step(self) -> Callable[[], None]:
        """Return the step as one graph launch, captured on the stream that it ran on before. Capturing does not run
        it.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.step()
        return graph.replay

    @torch.no_grad()
    def held_out_loss(self, text: Tensor) -> float:
        """Return the mean loss over windows of held-out text at even distances."""
        last = len(text) - len(self.positions)
        starts = torch.linspace(0, last, HELD_OUT_BATCHES * len(self.tokens), device=text.device).long()
        losses = []
        for part in starts.chunk(HELD_OUT_BATCHES):
            self.load(text, part)
            losses.append(float(self.model(self.tokens)[0]))
        return statistics.mean(losses)


def new_trainer(run: Run, setup: Setup, seed: int, device: str) -> Trainer:
    torch.manual_seed(seed)
    parallel = expert_parallel.spread(setup.size, setup.batch, setup.dtype) if run.parallel else None
    make = functools.partial(mixture, setup.size, run.recipe, setup.dtype, parallel)
    with torch.device(device):
        model = LanguageModel(setup.size, run.layer, setup.dtype, make)
    return Trainer(model, model.parameters(), setup, device, parallel)


def train(
    trainer: Trainer, run: Run, setup: Setup, text: Text, seed: int, progress: Progress,
    check: GradientCheck | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train; return the record of the run: its loss at each step, the held-out loss at the end, the median time of a
    step, and what `check` found at the steps that it checked.
    """
    device = text.train.device.type
    starts = torch.randint(
        len(text.train) - setup.size.context, (setup.steps, setup.batch), generator=torch.Generator().manual_seed(seed)
    ).to(device)
    losses = torch.zeros(setup.steps, device=device)
    advance, times, last = trainer.step, [], time.perf_counter()
    task = progress.add_task(run.name, total=setup.steps, loss=math.nan)
    for number in range(setup.steps):
        if run.graph and number == EAGER_STEPS:
            advance = trainer.captured_step()
        trainer.load(text.train, starts[number])
        trainer.rate.fill_(learning_rate(setup, number))
        checked = check if check is not None and number % check.every == 0 else None
        if checked:
            last += seconds_of(checked.before, trainer)
        advance()
        losses[number] = trainer.loss
        if checked:
            last += seconds_of(checked.after, trainer)
        if (number + 1) % REPORT_EVERY == 0 or number + 1 == setup.steps:
            loss, now = float(trainer.loss), time.perf_counter()
            times.append((now - last) / (number + 1 - progress.tasks[task].completed))
            progress.update(task, completed=number + 1, loss=loss)
            last = now
    held_out = trainer.held_out_loss(text.held_out)
    record = {"run": run.name, "loss": losses.tolist(), "held_out": held_out, "step_ms": statistics.median(times) * 1e3}
    if check is not None:
        record["gradients"] = check.result()
    return record if run.recipe == "bf16" else {**record, "recipe": run.recipe}


def seconds_of(part: Callable[[Trainer], None], trainer: Trainer) -> float:
    """Return the seconds of work that does not belong to the training step."""
    on_gpu = trainer.loss.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    part(trainer)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def train_all(setup: Setup, runs: list[Run], seed: int, device: str, console: Console) -> list[dict[str, Any]]:
    """Train the runs in turn; return a record of each, and at the end one of the settings that they share."""
    text = Text(*(part.to(device) for part in read_text()))

    def trained(run: Run) -> dict[str, Any]:
        trainer, check = new_trainer(run, setup, seed, device), check_of(run, setup, seed, device)
        return train(trainer, run, setup, text, seed, bars, check)

    # The default stream cannot be captured.
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    with progress_bars(console) as bars, stream:
        records = [trained(run) for run in runs]
    return [*records, shared_record(setup, seed, text)]


def check_of(run: Run, setup: Setup, seed: int, device: str) -> GradientCheck | None:
    """Return the check of a run's gradients; None for torch's own runs, and for recipes that round more than torch
    does.
    """
    if run in TORCH or run.recipe != "bf16":
        return None
    return GradientCheck(new_trainer(TORCH[0], setup, seed, device), [peer.layer for peer in TORCH], setup.steps)


def progress_bars(console: Console) -> Progress:
    name, loss = TextColumn("{task.description:<22}"), TextColumn("loss {task.fields[loss]:.4f}")
    return Progress(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), loss, console=console)


def shared_record(setup: Setup, seed: int, text: Text) -> dict[str, Any]:
    """Return the record that all runs share: settings, seed and sizes of the text."""
    sizes = {"train_bytes": len(text.train), "held_out_bytes": len(text.held_out)}
    return {"setup": setup.as_json(), "seed": seed, **sizes}


def console_of_rank() -> Console:
    """Return a console that prints on the first rank and is quiet on the others."""
    quiet = os.environ.get("RANK", "0") != "0"
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH, quiet=quiet)


def command_line(**options: Any) -> str:
    """Return the command that repeats this training, without flags that only say where the result goes."""
    words = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in options.items() if value]
    return shlex.join(["python", "examples/train_moe.py", *(word for option in words for word in option)])


def main(
    steps: Annotated[int | None, typer.Option(min=1, help="Default: 300 on a GPU, 200 on a CPU.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: a GPU that has kernels.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.")] = 0,
    graph: Annotated[bool, typer.Option("--graph", help="Also train with each step in one CUDA graph.")] = False,
    recipe: Annotated[str | None, typer.Option(help=f"Also train by this recipe: {', '.join(TRAINED)}.")] = None,
    ranks: Annotated[
        int | None, typer.Option("--expert-parallel", min=1, help="Also train with experts across torchrun's ranks.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Result file; default: in build/.")] = None,
    commit: Annotated[str | None, typer.Option(help="To stamp, where there is no git checkout.")] = None,
) -> None:
    """Train a small MoE language model with torch and with Glulam, and lay the learning curves over each other."""
    console = console_of_rank()
    try:
        if device not in (None, *SETUPS):
            raise RuntimeError(f"--device {device}: give one of {', '.join(SETUPS)}")
        if recipe not in (None, *TRAINED):
            raise RuntimeError(f"--recipe {recipe}: give one of {', '.join(TRAINED)}")
        chosen, reason = choose_device(device)
        if graph and chosen == "cpu":
            raise RuntimeError(f"--graph: the device is a CPU ({reason}), and CUDA graphs need a GPU")
        if chosen == "cuda":
            glulam.preload()  # an unusable GPU or bundle shows now, not after three runs
        console.print(f"device  {chosen} ({reason})" + (": a shrunk model, in float32" if chosen == "cpu" else ""))
        if ranks:
            expert_parallel.join(ranks, chosen, f"examples/train_moe.py --expert-parallel {ranks}")
        options = {"steps": steps, "device": device, "seed": seed, "graph": graph, "recipe": recipe}
        stamp = make_stamp(command_line(**options, **{"expert-parallel": ranks}), commit, chosen)
        setup = dataclasses.replace(SETUPS[chosen], steps=steps or SETUPS[chosen].steps)
        ours = [GLULAM, *([GRAPH] if graph else [])]
        ours += [by_recipe(run, recipe) for run in ours] if recipe else []
        runs = [*TORCH, *ours] if expert_parallel.is_first() else []
        with few_threads(chosen):
            records = train_all(setup, [*runs, *([PARALLEL] if ranks else [])], seed, chosen, console)
        if not expert_parallel.is_first():
            return
        result = training_curves.make_result(stamp, records, peers=len(TORCH))
        training_curves.save(result, out or Path("build", training_curves.file_name(result)), console)
        within = training_curves.show(result, console)
    except RuntimeError as error:  # no usable bundle, an unsupported GPU, no sources: the message says what mends it
        typer.echo(f"train_moe: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(0 if within else 1)


if __name__ == "__main__":
    typer.run(main)
