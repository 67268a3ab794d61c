"""Train a small MoE language model with Megatron-Core's MoELayer, its experts spread over two GPUs, and compare.

    torchrun --nproc-per-node 2 examples/train_megatron.py

By each of Megatron's dispatchers, allgather and alltoall, the same model is trained from the same weights on the same
bytes in the same order: with Megatron's SequentialMLP, with SequentialMLP in three other roundings, and with Glulam's
experts. Layers, dispatchers and gradients' buffers (`main_grad` in float32, of bfloat16 parameters) are Megatron's.
Training multiplies rounding errors; how far that alone drives curves apart, the runs of SequentialMLP say, and Glulam's
must lie as close as they do.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script has only its own folder on the path

try:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as error:
    sys.exit(f"train_megatron: {error}; pip install megatron-core==0.16.1")

import glulam
from examples import expert_parallel, training_curves
from examples.moe_model import LanguageModel
from examples.stdlib_text import Text, read_text
from examples.train_moe import (
    MOST_NORM,
    SETUPS,
    Run,
    Setup,
    Trainer,
    console_of_rank,
    progress_bars,
    shared_record,
    train,
)
from glulam.integrations.megatron import experts_spec
from perf.stamp import make_stamp

DISPATCHERS = ("allgather", "alltoall")
LARGE = SETUPS["cuda"]
SETUP = dataclasses.replace(LARGE, size=dataclasses.replace(LARGE.size, layers=4), batch=32, steps=50)
SEQUENTIAL = ModuleSpec(
    module=SequentialMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
)
Activation = Callable[[Tensor], Tensor]


def silu_in_two_steps(x: Tensor) -> Tensor:
    """Compute SiLU in two operations, so that the sigmoid is rounded as well."""
    return x * x.sigmoid()


class Experts(NamedTuple):
    """A module of experts and its activation.

    fused: Megatron fuses the activation by torch.compile, as its command line does by default. wide: the whole model is
    float32.
    """

    name: str
    spec: ModuleSpec
    activation: Activation = F.silu
    fused: bool = False
    wide: bool = False


PEERS = (
    Experts("sequential", SEQUENTIAL),
    Experts("sequential, fused activation", SEQUENTIAL, fused=True),
    Experts("sequential, silu in two steps", SEQUENTIAL, silu_in_two_steps),
    Experts("sequential, all in float32", SEQUENTIAL, wide=True),
)
OURS = Experts("glulam", experts_spec())


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router with logits in float32 by torch: Megatron 0.16's own need TransformerEngine."""

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float())


class Job(NamedTuple):
    """Settings that all runs with one dispatcher share. device: "cuda"; "cpu" only if Megatron is told that this is its
    GPU.
    """

    setup: Setup
    dispatcher: str
    seed: int
    device: str

    def dtype(self, experts: Experts) -> torch.dtype:
        return torch.float32 if experts.wide else self.setup.dtype

    def config(self, experts: Experts) -> Any:
        size, dtype = self.setup.size, self.dtype(experts)
        return TransformerConfig(
            num_layers=size.layers, hidden_size=size.width, num_attention_heads=size.heads,
            ffn_hidden_size=size.intermediate, moe_ffn_hidden_size=size.intermediate, num_moe_experts=size.experts,
            moe_router_topk=size.top_k, moe_router_load_balancing_type="none",
            moe_token_dispatcher_type=self.dispatcher, expert_model_parallel_size=dist.get_world_size(),
            add_bias_linear=False, gated_linear_unit=True, activation_func=experts.activation,
            bias_activation_fusion=experts.fused, params_dtype=dtype, bf16=dtype == torch.bfloat16,
            perform_initialization=False, use_cpu_initialization=self.device == "cpu",
        )  # fmt: skip

    def model(self, experts: Experts) -> LanguageModel:
        """Return a model. Its experts and routers are not initialised; its other parameters are the same on all
        ranks.
        """
        config, submodules = self.config(experts), MoESubmodules(experts=experts.spec, router=Router)
        torch.manual_seed(self.seed)
        make = functools.partial(MoELayer, config, submodules)
        model = LanguageModel(self.setup.size, megatron_layer, self.dtype(experts), make)
        return model.to(self.device, self.dtype(experts))

    def weights(self) -> dict[str, Any]:
        """Return the weights that every run starts from: a state dict with the names of SequentialMLP, whose experts
        differ between ranks.
        """
        model = self.model(PEERS[0])
        for own, seed in ((False, self.seed), (True, self.seed + 1 + dist.get_rank())):
            torch.manual_seed(seed)
            for name, parameter in model.mixture.named_parameters():
                if is_own(parameter) is own:
                    gain = (2 * self.setup.size.layers) ** -0.5 if "linear_fc2" in name else 1.0
                    nn.init.normal_(parameter, std=gain * parameter.shape[-1] ** -0.5)
        return model.state_dict()


def is_own(parameter: Tensor) -> bool:
    """Return whether a parameter is an expert's, and so differs between ranks: Megatron marks it."""
    return not getattr(parameter, "allreduce", True)


def megatron_layer(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Call Megatron's layer on tokens [N,H] as N positions of one sequence, since it has positions before sequences.
    The auxiliary loss is 0.
    """
    y, _ = layer(x[:, None])
    return y[:, 0], x.new_zeros(())


class MegatronTrainer(Trainer):
    """Trains with gradients in Megatron's buffers, and Adam on float32 masters of the parameters."""

    def __init__(self, experts: Experts, job: Job, weights: dict[str, Any]) -> None:
        model = job.model(experts)
        model.load_state_dict(weights)
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.gradients = DistributedDataParallel(job.config(experts), buffers, model)
        self.parameters: list[Tensor] = list(model.parameters())
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        pairs = list(zip(self.parameters, self.masters, strict=True))
        self.own, self.shared = ([m for p, m in pairs if is_own(p) is own] for own in (True, False))
        self.timed = job.device == "cuda"
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        super().__init__(self.gradients, self.masters, job.setup, job.device)

    def step(self) -> None:
        if not self.timed:
            self._step()
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._step()
        end.record()
        self.events.append((start, end))

    def _step(self) -> None:
        self.gradients.zero_grad_buffer()
        loss, _ = self.model(self.tokens.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        self.gradients.finish_grad_sync()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.main_grad  # type: ignore[attr-defined]
        expert_parallel.cut_to_norm(self.own, self.shared, MOST_NORM, None)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        self.loss.copy_(loss.detach())
        dist.all_reduce(self.loss)
        self.loss.div_(dist.get_world_size())

    def step_ms(self) -> float:
        """Return the median over steps of the slowest rank's time."""
        times = torch.tensor([start.elapsed_time(end) for start, end in self.events], device="cuda")
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return statistics.median(times.tolist())


def train_all(job: Job, runs: tuple[Experts, ...], console: Console) -> list[dict[str, Any]]:
    """Train the runs in turn; return a record of each, and at the end one of the settings that they share."""
    text = Text(*(part.to(job.device) for part in read_text()))
    weights, records = job.weights(), []
    with progress_bars(console) as bars:
        for experts in runs:
            trainer = MegatronTrainer(experts, job, weights)
            run = Run(experts.name, megatron_layer)
            record = train(trainer, run, job.setup, text, job.seed, bars)
            records.append({**record, "step_ms": trainer.step_ms()} if trainer.timed else record)
    return [*records, {**shared_record(job.setup, job.seed, text), "ranks": dist.get_world_size()}]


def main(
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = SETUP.steps,
    ranks: Annotated[int, typer.Option("--expert-parallel", min=2, help="GPUs, and ranks of torchrun.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the result files, one for each dispatcher.")] = Path("build"),
    commit: Annotated[str | None, typer.Option(help="To stamp, where there is no git checkout.")] = None,
) -> None:
    """Train a small MoE language model in Megatron-Core with its experts and with Glulam's, and lay the learning curves
    over each other.
    """
    console = console_of_rank()
    given = {"--steps": (steps, SETUP.steps), "--expert-parallel": (ranks, 2), "--seed": (seed, 0)}
    options = [f"{name}={value}" for name, (value, default) in given.items() if value != default]
    command = shlex.join(["examples/train_megatron.py", *options])
    try:
        if (found := torch.cuda.device_count()) < ranks:
            raise RuntimeError(f"torch finds {found or 'no'} GPUs, and Megatron-Core needs one a rank, {ranks}")
        expert_parallel.join(ranks, "cuda", command)
        glulam.preload()
    except RuntimeError as error:  # too few GPUs, no usable bundle, another number of ranks: it says what mends it
        typer.echo(f"train_megatron: {error}", err=True)
        raise typer.Exit(1) from error
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks, create_gloo_process_groups=False)
    stamp = make_stamp(f"torchrun --nproc-per-node {ranks} {command}", commit)
    within = []
    for dispatcher in DISPATCHERS:
        console.print(f"{dispatcher}, {ranks} x {torch.cuda.get_device_name()}")
        job = Job(dataclasses.replace(SETUP, steps=steps), dispatcher, seed, "cuda")
        records = train_all(job, (*PEERS, OURS), console)
        if expert_parallel.is_first():
            suite = f"megatron-{dispatcher}"
            result = training_curves.make_result(stamp, records, peers=len(PEERS), suite=suite)
            training_curves.save(result, out / training_curves.file_name(result), console)
            within.append(training_curves.show(result, console))
    dist.destroy_process_group()
    raise typer.Exit(0 if all(within) else 1)


if __name__ == "__main__":
    typer.run(main)
