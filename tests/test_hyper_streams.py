"""HyperConnection(form="v4.1"): a chain of sublayers on the CPU, against the same chain in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from support.boundary import oracle
from support.criterion import same_bits
from torch import Tensor

from glulam import mhc
from glulam.nn import HyperConnection, HyperStreams

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
WIDTH = 16


def chain(count: int = 3, **how: Any) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": F64, **how}
    layers = [
        HyperConnection(4, WIDTH, torch.nn.Linear(WIDTH, WIDTH, dtype=options["dtype"]), form="v4.1", **options)
        for _ in range(count)
    ]
    for layer in layers:
        with torch.no_grad():
            layer.scale.copy_(torch.tensor([1.0, 0.5, 2.0]))
            layer.norm_weight.copy_(torch.randn(WIDTH))
    return torch.nn.ModuleList(layers)


def run(layers: torch.nn.ModuleList, x: Tensor, through: Callable[..., Any] = lambda layer, c: layer(c)) -> Tensor:
    carried = HyperStreams.begin(x, 4)
    for layer in layers:
        carried = through(layer, carried)
    return carried.end()


def by_torch(layers: torch.nn.ModuleList, x: Tensor) -> Tensor:
    streams = torch.stack([x] * 4, -2)
    pre = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype)
    pre[..., 0] = 1
    y = post = comb = None
    for layer in layers:
        parameters = (layer.fn, layer.scale, layer.base, layer.norm_weight)
        streams, entered, pre, post, comb = oracle(y, streams, pre, post, comb, *parameters)  # type: ignore[arg-type]
        y = layer.sublayer(entered)
    mixed = torch.einsum("...ij,...ic->...jc", comb, streams)
    return torch.einsum("...j,...jc->...c", pre, mixed + torch.einsum("...j,...c->...jc", post, y))


def gradients(layers: torch.nn.ModuleList, call: Callable[..., Tensor], **how: Any) -> list[Tensor]:
    x = torch.randn(2, 3, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layers.zero_grad()
    out = call(layers, x, **how)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in layers.parameters())]  # type: ignore[list-item, union-attr]


def test_a_chain_and_its_gradients() -> None:
    layers = chain()
    for one, other in zip(gradients(layers, run), gradients(layers, by_torch), strict=True):
        assert other.any() or other.numel() == layers[0].base.numel()
        torch.testing.assert_close(one, other)


def test_checkpointed_layers_have_the_same_gradients() -> None:
    def kept(layer: torch.nn.Module, carried: HyperStreams) -> Any:
        return torch.utils.checkpoint.checkpoint(layer, carried, use_reentrant=False)

    layers = chain()
    assert all(map(same_bits, gradients(layers, run), gradients(layers, run, through=kept)))


def test_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    layers = chain()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(layers, run), gradients(layers, compiled), strict=True):
        torch.testing.assert_close(one, other)


def test_the_first_layer_reads_the_embedding() -> None:
    layers, x = chain(1), torch.randn(5, WIDTH, dtype=F64)
    entered = layers[0].boundary(HyperStreams.begin(x, 4)).x
    torch.testing.assert_close(entered, torch.nn.functional.rms_norm(x, (WIDTH,), layers[0].norm_weight, 1e-6))


def test_streams_may_be_changed_between_update_and_mix() -> None:
    layers, x = chain(2), torch.randn(5, WIDTH, dtype=F64)
    carried = layers[0](HyperStreams.begin(x, 4))
    updated = carried.updated()
    assert updated.y is None and updated.updated() is updated
    for one, other in zip(layers[1].boundary(updated), layers[1].boundary(carried), strict=True):
        torch.testing.assert_close(one, other)
    changed = updated._replace(streams=updated.streams + 1)
    assert not torch.allclose(layers[1].boundary(changed).x, layers[1].boundary(updated).x)
    torch.testing.assert_close(changed.end(), mhc.aggregate(updated.streams + 1, updated.pre))


def test_autocast_changes_the_sublayer_alone() -> None:
    """Coefficients stay float32, parameters are not rounded, and y is cast to the streams' dtype."""
    layers, x = chain(2, dtype=F32), torch.randn(5, WIDTH)
    with torch.autocast("cpu", dtype=BF16):
        first = layers[0](HyperStreams.begin(x, 4))
        second = layers[1](first)
        out = second.end()
    assert first.y is not None and same_bits(first.y, first.y.to(BF16).float())
    assert [one.dtype for one in second if one is not None] == [F32] * 5
    plain = layers[1].boundary(first)
    assert same_bits(plain.streams, second.streams) and same_bits(plain.pre, second.pre)
    assert out.dtype is F32


def test_16_bit_streams_and_a_bias_beside_the_output() -> None:
    layer, x = chain(1, dtype=F32)[0], torch.randn(5, WIDTH).to(BF16)
    bias = torch.ones(WIDTH, dtype=BF16)
    layer.sublayer = torch.nn.Identity()
    layer.sublayer.forward = lambda u: (u, bias)
    carried = layer(HyperStreams.begin(x, 4))
    assert carried.pre.dtype is F32 and carried.streams.dtype is BF16
    assert same_bits(carried.y, layer.boundary(HyperStreams.begin(x, 4)).x + bias)


def test_state_dict_meta_and_repr() -> None:
    layer = HyperConnection(4, WIDTH, form="v4.1", device="meta")
    assert {name: list(p.shape) for name, p in layer.state_dict().items()} == {
        "fn": [24, 4 * WIDTH], "scale": [3], "base": [24], "norm_weight": [WIDTH]
    }  # fmt: skip
    assert all(p.dtype is F32 for p in layer.parameters())
    assert (
        "form='v4.1'" in repr(layer) and "norm_weight" not in repr(layer) and "form" not in repr(HyperConnection(4, 8))
    )


def test_begins_as_residual_streams() -> None:
    layer = HyperConnection(4, WIDTH, form="v4.1", dtype=F64)
    made = layer.boundary(HyperStreams.begin(torch.randn(5, WIDTH, dtype=F64), 4))
    torch.testing.assert_close(made.comb, torch.eye(4, dtype=F64).expand(5, 4, 4), atol=0.02, rtol=0)
    torch.testing.assert_close(made.post, torch.ones(5, 4, dtype=F64), atol=0.1, rtol=0)
    torch.testing.assert_close(made.pre, torch.full((5, 4), 0.25, dtype=F64), atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: HyperConnection(4, 8, form="v4"), ValueError, "form is 'v4'; choose one of: 'mhc', 'v4.1'"),
        (lambda: HyperConnection(4, 8, form="v4.1", transpose_res=True), ValueError, "transpose_res is True"),
        (lambda: HyperConnection(4, 8, form="v4.1", norm_weight=True), ValueError, "norm_weight is True"),
        (lambda: HyperConnection(4, 8)(torch.zeros(5, 3, 8)), RuntimeError, "made without a sublayer"),
        (lambda: HyperConnection(4, 8, abs)(torch.zeros(5, 3, 8)), ValueError, r"shape \[5, 3, 8\]; give streams"),
        (lambda: HyperConnection(4, 8, form="v4.1", iters=0), ValueError, "iters is 0; form='v4.1' takes 1 to 100"),
        (lambda: HyperConnection(4, 8, norm_eps=1e-5), ValueError, "norm_eps is of form='v4.1'"),
        (lambda: HyperConnection(4, 8, form="v4.1", norm_eps=-1.0), ValueError, "norm_eps is -1.0"),
        (lambda: HyperConnection(4, 8, form="v4.1")(torch.zeros(4, 8)), RuntimeError, "call boundary yourself"),
        (lambda: HyperConnection(4, 8, torch.nn.Identity(), form="v4.1")(torch.zeros(4, 8)), TypeError, "HyperStreams"),
        (lambda: HyperConnection(4, 8, form="v4.1").pre(torch.zeros(4, 8)), RuntimeError, "pre is of form='mhc'"),
        (lambda: HyperConnection(4, 8).boundary(None), RuntimeError, "boundary is of form='v4.1'"),  # type: ignore[arg-type]
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
