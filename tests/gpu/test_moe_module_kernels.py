"""nn.MoE on kernels against each model family's block in plain torch: its error to float64 is no larger than the
block's in 16 bits.
"""

from __future__ import annotations

import pytest
import torch
from support.criterion import assert_close, same_bits
from support.moe_blocks import EXPERTS, FAMILIES, HIDDEN, INTER, block, some_state
from torch import Tensor

import glulam
from glulam.nn import MoE, convert_state_dict

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("with_gradients")]

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
DEVICE = "cuda"


def loaded(name: str, dtype: torch.dtype = BF16, **options: object) -> MoE:
    module = MoE(HIDDEN, INTER, EXPERTS, **{**FAMILIES[name].options, "device": DEVICE, "dtype": dtype, **options})
    module.load_state_dict(some_state(name, dtype))
    return module


def batch(tokens: int, dtype: torch.dtype = BF16, seed: int = 3) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def by_torch(name: str, x: Tensor, module: MoE, dy: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the block's result and its gradients by the module's parameter names, for the experts that the module
    chose.
    """
    state = some_state(name, x.dtype, DEVICE)
    leaves = {key: value.to(dtype).requires_grad_("e_score" not in key) for key, value in state.items()}
    x = x.detach().to(dtype).requires_grad_()
    y = block(name, leaves, x, module.routing.ids.long())
    y.backward(dy.to(dtype))
    grads = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    return y.detach(), {**convert_state_dict(grads, module), "x": x.grad}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tokens", [40, 900])
@pytest.mark.parametrize("name", FAMILIES)
def test_forward_and_gradients(name: str, tokens: int, dtype: torch.dtype) -> None:
    module, x, dy = loaded(name, dtype), batch(tokens, dtype).requires_grad_(), batch(tokens, dtype, seed=4)
    y = module(x)
    y.backward(dy)
    (exact, wanted), (same, yardstick) = (by_torch(name, x, module, dy, kind) for kind in (F64, dtype))
    assert_close(y.detach(), exact, same, tokens)
    got = {**{key: parameter.grad for key, parameter in module.named_parameters()}, "x": x.grad}
    assert got.keys() == wanted.keys()
    for key, value in got.items():
        rows = [one.reshape(one.shape[0] if one.dim() > 1 else 1, -1) for one in (value, wanted[key], yardstick[key])]
        assert_close(*rows, rows=rows[0].shape[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_apart(name: str) -> None:
    """The bits of a module with packed weights, whose state dict it loads."""
    packed, apart = loaded(name), loaded(name, packed=False)
    apart.load_state_dict(packed.state_dict())
    x = batch(200)
    results = [module(x) for module in (packed, apart)]
    assert same_bits(*(y.detach() for y in results))
    for y in results:
        y.float().square().sum().backward()
    wanted = convert_state_dict({key: p.grad for key, p in packed.named_parameters()}, apart)
    for key, parameter in apart.named_parameters():
        assert same_bits(parameter.grad, wanted[key]), key


@pytest.mark.parametrize("name", FAMILIES)
def test_a_graph_follows_its_input(name: str) -> None:
    """With a float32 router, other tokens and another number of them."""
    module, x = loaded(name, router_dtype=F32), batch(300)
    limit = torch.tensor([300], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        module(x, num_tokens=limit)  # cuBLAS makes its workspace
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x, num_tokens=limit)
            loss = glulam.load_balancing_loss(module.routing) + glulam.router_z_loss(module.routing.logits, limit)
        for seed, count in ((5, 300), (6, 117)):
            x.copy_(batch(300, seed=seed))
            limit.fill_(count)
            graph.replay()
            assert same_bits(out, module(x, num_tokens=limit))
            wanted = glulam.load_balancing_loss(module.routing) + glulam.router_z_loss(module.routing.logits, limit)
            torch.testing.assert_close(loss, wanted)
            assert out[:count].abs().amax(1).min() > 0


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_few_tokens_without_gradients(name: str, tokens: int) -> None:
    """Whose logits are made with their choice: near float64, in one graph of torch.compile and in a CUDA graph."""
    module, x = loaded(name), batch(tokens)
    with torch.no_grad():
        y = module(x)
        with torch.enable_grad():
            exact, same = (by_torch(name, x, module, torch.zeros_like(x), kind)[0] for kind in (F64, BF16))
        assert_close(y, exact, same, tokens)
        torch.compiler.reset()
        assert same_bits(torch.compile(module, backend="aot_eager", fullgraph=True)(x), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x)
        x.copy_(batch(tokens, seed=8))
        graph.replay()
        assert same_bits(out, module(x)) and not same_bits(out, y)


@pytest.mark.parametrize("main_grads", [False, True])
def test_delayed_weight_gradients(main_grads: bool) -> None:
    plain, delayed = loaded("qwen2"), loaded("qwen2", delay_wgrad=True)
    weights = {key: p for key, p in delayed.named_parameters() if ".fc" in key}
    if main_grads:
        for parameter in weights.values():
            parameter.main_grad = torch.zeros_like(parameter, dtype=F32, requires_grad=False)
    for module in (plain, delayed):
        module(batch(200)).float().square().sum().backward()
    assert all(p.grad is None for p in weights.values())
    delayed.backward_dw()
    for (key, parameter), other in zip(delayed.named_parameters(), plain.parameters(), strict=True):
        got = parameter.main_grad if main_grads and key in weights else parameter.grad
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(got.to(BF16), other.grad, rtol=0.02, atol=0.01 * scale)
        assert scale > 0
