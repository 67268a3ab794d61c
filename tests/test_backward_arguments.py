"""Bad arguments of the gradient operators: refused before anything runs, by messages that name the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu

import glulam

pytest_plugins = ["support.fixtures"]

T, H, I, E = 24, 32, 64, 4  # noqa: E741
BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, **options)


def good(op: str) -> dict[str, Any]:
    """Return arguments of a valid call of an operator."""
    arguments = {
        "grouped_wgrad": {"dy": empty(T, I), "x": empty(T, H), "out": torch.full((E, I, H), 7.0, dtype=BF16)},
        "grouped_dglu": {
            "dy": empty(T, H),
            "w2": empty(E, H, I),
            "preact": empty(T, 2 * I),
            "row_scale": torch.ones(T),
        },
        "grouped_bias_grad": {"dy": empty(T, H), "row_scale": torch.ones(T)},
    }[op]
    return {**arguments, "offs": torch.tensor([5, 5, 20, 22], dtype=torch.int32)}


def bad(op: str, error: type[Exception], *words: str, **changes: Any) -> Any:
    return pytest.param(op, changes, error, words, id=f"{op} {words[0]}")


WGRAD, DGLU, BIAS = "grouped_wgrad", "grouped_dglu", "grouped_bias_grad"
SHARED = empty(T + 8, H)
EACH = [empty(I, H) for _ in range(E)]
COMMON = [
    bad(WGRAD, TypeError, "x is a list", x=[1.0]),
    bad(WGRAD, TypeError, "dy is a NoneType", "[T, columns]", dy=None),
    bad(WGRAD, TypeError, "dy is torch.float16 but x is torch.bfloat16", dy=empty(T, I, dtype=torch.float16)),
    bad(WGRAD, ValueError, "dy has shape [23, 64]", "[24, columns]", dy=empty(T - 1, I)),
    bad(WGRAD, ValueError, "dy has stride", ".contiguous()", dy=empty(I, T).T),
    bad(WGRAD, ValueError, "dy has rows", "overlap", dy=empty(1, I).expand(T, I)),
    bad(WGRAD, ValueError, "dy has a dimension of 0", dy=empty(T, 0)),
    bad(WGRAD, ValueError, "out has shape [4, 32, 64]", "[4, 64, 32]", out=empty(E, H, I)),
    bad(WGRAD, ValueError, "out has shape [3, 64, 32]", out=EACH[:3]),
    bad(
        WGRAD,
        TypeError,
        "out is torch.float16",
        "torch.bfloat16 or torch.float32",
        out=empty(E, I, H, dtype=torch.half),
    ),
    bad(WGRAD, TypeError, "out is torch.float64", out=torch.zeros(E, I, H, dtype=torch.float64)),
    bad(WGRAD, TypeError, "out holds", "one dtype", out=[*EACH[:3], torch.zeros(I, H)]),
    bad(WGRAD, ValueError, "out is not contiguous", out=empty(E, H, I).mT),
    bad(WGRAD, ValueError, "out[0] is not contiguous", out=[empty(H, I).T] * E),
    bad(WGRAD, ValueError, "out[1] overlaps out[0]", "buffer of its own", out=[EACH[0]] * E),
    bad(WGRAD, ValueError, "out is on meta", "move it to cpu", out=empty(E, I, H, device="meta")),
    bad(WGRAD, ValueError, "both accumulate and mask", accumulate=True, mask=torch.ones(E, dtype=torch.bool)),
    bad(WGRAD, ValueError, "accumulate is given but out is not", out=None, accumulate=True),
    bad(WGRAD, ValueError, "mask is given but out is not", out=None, mask=torch.ones(E, dtype=torch.bool)),
    bad(WGRAD, TypeError, "accumulate is 1", "True or False", accumulate=1),
    bad(WGRAD, TypeError, "mask is torch.float32", "torch.bool", mask=torch.ones(E)),
    bad(WGRAD, TypeError, "mask is a list", mask=[True] * E),
    bad(WGRAD, ValueError, "mask has shape [3]", "[4]", mask=torch.ones(3, dtype=torch.bool)),
    bad(WGRAD, ValueError, "mask is not contiguous", mask=torch.ones(2 * E, dtype=torch.bool)[::2]),
    bad(WGRAD, ValueError, "mask is on meta", mask=torch.ones(E, dtype=torch.bool, device="meta")),
    bad(WGRAD, TypeError, "out_dtype is torch.float16", "torch.float32", out_dtype=torch.float16),
    bad(WGRAD, ValueError, "out_dtype is torch.float32 but out is torch.bfloat16", out_dtype=torch.float32),
    bad(WGRAD, ValueError, "neither offs nor splits", offs=None),
    bad(WGRAD, ValueError, "0 groups (E = 0)", offs=torch.zeros(0, dtype=torch.int32)),
    bad(WGRAD, ValueError, "0 groups (E = 0)", offs=None, splits=[]),
    bad(WGRAD, TypeError, "offs is a int", offs=3),
    bad(WGRAD, TypeError, "offs is torch.int64", offs=torch.zeros(E, dtype=torch.int64)),
    bad(WGRAD, ValueError, "offs has shape []", offs=torch.zeros((), dtype=torch.int32)),
    bad(WGRAD, ValueError, "splits sum to 36", "x has 24 rows", offs=None, splits=[9, 9, 9, 9]),
    bad(WGRAD, ValueError, "out overlaps x", x=SHARED[:T], dy=empty(T, 8), out=SHARED[: E * 8].view(E, 8, H)),
    bad(DGLU, TypeError, "dy is a float", dy=1.0),
    bad(DGLU, ValueError, "dy has shape [1, 24, 32]", "dy.flatten", dy=empty(1, T, H)),
    bad(DGLU, TypeError, "w2 is torch.float16 but dy is torch.bfloat16", w2=empty(E, H, I, dtype=torch.float16)),
    bad(DGLU, ValueError, "w2 has shape [4, 16, 64]", "dy has 32 columns", w2=empty(E, 16, I)),
    bad(DGLU, ValueError, "w2[1] has shape", w2=[empty(H, I), empty(I, H), empty(H, I), empty(H, I)]),
    bad(DGLU, ValueError, "preact has shape [24, 64]", "[24, 128]", "I = 64", preact=empty(T, I)),
    bad(DGLU, ValueError, "preact has shape [24, 128]", "[24, 64]", activation="silu"),
    bad(DGLU, ValueError, "preact has shape [23, 128]", preact=empty(T - 1, 2 * I)),
    bad(DGLU, TypeError, "preact is torch.float32 but dy", preact=torch.zeros(T, 2 * I)),
    bad(DGLU, ValueError, "preact is on meta but dy is on cpu", preact=empty(T, 2 * I, device="meta")),
    bad(DGLU, ValueError, "127", preact=empty(T, 2 * I - 1)),
    bad(DGLU, ValueError, "glu_layout", "no gate", activation="silu", glu_layout="interleaved", preact=empty(T, I)),
    bad(DGLU, ValueError, "I = 48", "32", glu_layout="interleaved32", preact=empty(T, 96), w2=empty(E, H, 48)),
    bad(DGLU, ValueError, "activation is 'swish'", activation="swish"),
    bad(DGLU, ValueError, "limit is -1", limit=-1),
    bad(DGLU, TypeError, "row_scale_grad is None", row_scale_grad=None),
    bad(DGLU, TypeError, "row_scale is torch.bfloat16", row_scale=empty(T)),
    bad(DGLU, ValueError, "row_scale has shape [23]", "each row of dy", row_scale=torch.ones(T - 1)),
    bad(DGLU, ValueError, "offs has shape [3]", "[4]", offs=torch.zeros(3, dtype=torch.int32)),
    bad(DGLU, ValueError, "splits sum to 36", "dy has 24 rows", offs=None, splits=[9, 9, 9, 9]),
    bad(BIAS, TypeError, "dy is a NoneType", dy=None),
    bad(BIAS, ValueError, "dy has shape [24]", dy=empty(T)),
    bad(BIAS, TypeError, "row_scale is a float", row_scale=0.5),
    bad(BIAS, TypeError, "row_scale is torch.bfloat16", row_scale=empty(T)),
    bad(BIAS, ValueError, "row_scale has shape [23]", row_scale=torch.ones(T - 1)),
    bad(BIAS, TypeError, "out_dtype is torch.float64", out_dtype=torch.float64),
    bad(BIAS, ValueError, "both offs and splits", splits=[1] * E),
    bad(BIAS, TypeError, "offs is torch.int64", offs=torch.zeros(E, dtype=torch.int64)),
]

# What only kernels ask for.
KERNEL = [
    bad(WGRAD, TypeError, "x is torch.float32", "torch.bfloat16", x=torch.zeros(T, H), dy=torch.zeros(T, I), out=None),
    bad(WGRAD, ValueError, "dy has a dimension of 36", "multiple of 8", dy=empty(T, 36), out=None),
    bad(WGRAD, ValueError, "dy has rows 68 elements apart", dy=empty(T, 68)[:, :I]),
    bad(WGRAD, ValueError, "dy starts 2 bytes after", dy=empty(T * I + 1)[1:].view(T, I)),
    bad(WGRAD, ValueError, "out starts 2 bytes after", out=empty(E * I * H + 1)[1:].view(E, I, H)),
    bad(WGRAD, ValueError, "out[3] starts 2 bytes after", out=[*EACH[:3], empty(I * H + 1)[1:].view(I, H)]),
    bad(DGLU, ValueError, "preact has rows 132 elements apart", preact=empty(T, 132)[:, :128]),
    bad(DGLU, ValueError, "preact starts 2 bytes after", preact=empty(T * 2 * I + 1)[1:].view(T, 2 * I)),
    bad(DGLU, ValueError, "w2 has strides [1920, 60, 1]", w2=empty(E, H, 60), preact=empty(T, 120)),
    bad(BIAS, ValueError, "dy has a dimension of 36", dy=empty(T, 36)),
]


def refuse(op: str, changes: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    arguments = {**good(op), **changes}
    out = arguments.get("out")
    before = out.clone() if isinstance(out, torch.Tensor) and not out.is_meta else None
    with pytest.raises(error) as caught:
        getattr(glulam, op)(**arguments)
    message = str(caught.value)
    prefixes = (f"{op}: ", "grouped_wgrad: ") if op == BIAS else (f"{op}: ",)
    assert message.startswith(prefixes)
    for word in words:
        assert word in message, message
    assert before is None or torch.equal(before, out), "something was computed"


@pytest.mark.parametrize(("op", "changes", "error", "words"), COMMON)
def test_refused_on_the_cpu(op: str, changes: Any, error: Any, words: Any) -> None:
    refuse(op, changes, error, words)


@pytest.mark.parametrize(("op", "changes", "error", "words"), COMMON + KERNEL)
def test_refused_before_a_launch_and_after_good_calls(
    op: str, changes: Any, error: Any, words: Any, fake_gpu: FakeGpu
) -> None:
    for _ in range(2):
        refuse(op, changes, error, words)
        assert not fake_gpu.launches
        for _ in range(2):
            getattr(glulam, op)(**good(op))
        fake_gpu.launches.clear()


@pytest.mark.parametrize("op", [WGRAD, DGLU, BIAS])
def test_gradients_of_gradients_are_refused(op: str) -> None:
    for name in good(op).keys() - {"offs"}:
        arguments = good(op)
        arguments[name].requires_grad_()
        with pytest.raises(glulam.GradientNotSupported, match=f"{op} has no gradient.*detach"):
            getattr(glulam, op)(**arguments)
        with torch.no_grad():
            getattr(glulam, op)(**arguments)


def test_checking_mode(monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu) -> None:
    monkeypatch.setenv("GLULAM_CHECK", "1")
    for op, name in ((WGRAD, "x"), (DGLU, "dy")):
        getattr(glulam, op)(**good(op))
        arguments = {**good(op), "offs": torch.tensor([5, 5, 20, 30], dtype=torch.int32)}
        with pytest.raises(ValueError, match=f"offs end at 30, but {name} has 24 rows"):
            getattr(glulam, op)(**arguments)
