"""Check that a run's gradients equal the peers', computed from the same weights and the same bytes.

Curves cannot tell: once a rounding error sends a token to another expert, two right runs part by 1e-4 to 1e-2 nats, and
whether that happens within a run is chance. From the same weights nothing is amplified: gradients of right runs differ
by rounding alone, and so do the peers' gradients, which compute the same products in other orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from examples import expert_parallel
from examples.moe_model import LanguageModel, Layer

if TYPE_CHECKING:
    from examples.train_moe import Trainer

CHECKS = 40  # at least, in a run of as many steps: their median is steady where single tokens change experts
SMALLEST = 6e-8  # float32's unit roundoff: peers may be equal to the bit


def distances(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Return for each pair of tensors the norm of their difference, relative to the norm of the wanted one."""
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, wanted, strict=True)])


class GradientCheck:
    """Compares a run's gradients, after clipping, with the gradients of peers.

    Args:
        peer: a trainer of the whole model, into which the run's weights are copied.
        layers: the peers' implementations of a mixture of experts, which differ in rounding alone; the first is the
            reference.
        steps: number of steps of the run.
    """

    def __init__(self, peer: Trainer, layers: Sequence[Layer], steps: int) -> None:
        self.peer, self.layers = peer, layers
        self.every = max(1, steps // CHECKS)
        self.wanted: list[list[Tensor]] = []
        self.distances: list[Tensor] = []

    def before(self, trainer: Trainer) -> None:
        """Compute the peers' gradients of the run's next step."""
        model = cast(LanguageModel, self.peer.model)
        weights = expert_parallel.whole(trainer.model, trainer.parallel)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        self.peer.tokens.copy_(trainer.tokens)
        self.wanted = []
        for layer in self.layers:
            model.layer = layer
            self.peer.backward()
            self.wanted.append([cast(Tensor, parameter.grad) for parameter in model.parameters()])

    def after(self, trainer: Trainer) -> None:
        """Compare the gradients of the step that has been done."""
        gradients = expert_parallel.whole(trainer.model, trainer.parallel, of_gradients=True)
        found = [gradients[name] for name, _ in self.peer.model.named_parameters()]
        reference, *others = self.wanted
        self.distances.append(torch.stack([distances(one, reference) for one in (*others, found)]))

    def result(self) -> dict[str, Any]:
        """Return what was found for the parameter with the largest ratio of the run's distance to the peers' rounding.

        distance: of the run from the reference, the median over the steps checked. rounding: the largest such median of
        the other peers. times: their quotient.
        """
        *others, found = torch.stack(self.distances).median(dim=0).values
        rounding = torch.stack(others).amax(dim=0).clamp(min=SMALLEST)
        times = found / rounding
        worst = int(times.argmax())  # a NaN, if there is one
        names = [name for name, _ in self.peer.model.named_parameters()]
        values = {"distance": found, "rounding": rounding, "times": times}
        checked = {"parameter": names[worst], "steps": len(self.distances)}
        return {**checked, **{name: float(value[worst]) for name, value in values.items()}}
