"""Transport by stores to the memory of the host's other GPUs, which CUDA graphs can capture (docs/distributed.md).

Kernels write rows to the other GPUs, then words that announce the rows, for which the receiving kernels wait. The host
waits for nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.specs import LayerSpec
from cute_kernels.windows import MAX_TOKENS, STATE, STATUSES, failure

from ..calls.checks import check_tensor
from ..choose import kernels
from ..choose.problem import dtype_name
from ..formats.scaled import E8M0_NAN
from ..host import device as gpus
from ..layer.routing import Routing
from .exchange import COMBINE, WHY, Exchange, PeerError
from .tokens import Tokens, status_of
from .turn import SHARED, Turn
from .window import Sizes, Window

__all__ = ["MAX_TOKENS", "Symmetric"]
TIMEOUT = 600.0


class _Kernels:
    """The kernels of the transport for one GPU and one dtype. `launch` runs a kernel by its name."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.index = gpus.cuda_index("ExpertParallel", device)
        gpu = gpus.gpu(self.index)
        self.num_sms = gpu.sm_count
        specs = [LayerSpec(name, dtype_name(dtype), arch=gpu.arch) for name in ("send_tokens", "send_sums", "combine")]
        specs.append(LayerSpec("row_weights_backward", arch=gpu.arch))
        self._found = {spec.kernel: (kernels.find(spec).function, signature_of(spec).pack) for spec in specs}

    def launch(self, name: str, **values: Any) -> None:
        function, pack = self._found[name]
        with gpus.on(self.index):
            function(*pack(**values, stream=gpus.raw_stream(self.index)))


class Symmetric:
    """One rank's side of the symmetric transport, through windows (`window.Window`: memory that all ranks can access).

    All ranks must make the same calls in the same order. If a call is on another stream than the previous call, its
    stream waits for the previous stream; during graph capture the caller must order the streams.

    Args:
        window: this rank's window.
        held: objects that keep the window's memory alive.
        rank: this rank.
        num_experts: E.
        sizes: the window's sizes.
    """

    name = "symmetric"
    poison = False
    """For tests: True overwrites received data with NaN as soon as no rank may need it."""

    def __init__(self, window: Window, held: Any, rank: int, num_experts: int, sizes: Sizes) -> None:
        self.window, self._held, self.sizes, self.turn = window, held, sizes, Turn()
        device = window.rows.device
        self.kernels = _Kernels(device, sizes.dtype)
        self._mirror = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._error = ctypes.c_int64.from_address(self._mirror.data_ptr())
        self._state = torch.zeros(len(STATE), dtype=torch.int64, device=device)
        self._state[STATE.index("mirror")] = self._mirror.data_ptr()
        self.timeout = TIMEOUT
        self._stream: Any = None
        self.common = {
            "k": sizes.top_k, "width": sizes.hidden_size, "most": sizes.max_tokens, "rank": rank,
            "world": sizes.world, "num_sms": self.kernels.num_sms, "regions": window.addresses.data_ptr(),
            "state": self._state.data_ptr(),
        }  # fmt: skip
        self.num_experts = num_experts

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for other ranks. A new value also applies to graphs that are captured already."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = float(seconds)
        self._state[STATE.index("timeout")] = int(seconds * 1e9)

    def check(self) -> None:
        """Raise the error of an earlier call.

        Raises:
            PeerError: kernels found an error.
            RuntimeError: two threads used this object at once.
        """
        if error := self._error.value:
            rank, reason, phase, number = failure(error)
            what = {
                "late": f"rank {rank} did not come within {self._timeout:g} s",
                "elsewhere": f"rank {rank} was in another operation, or its experts failed; all ranks must make the "
                "same calls in one order",
                **{name: text.format(rank) for name, text in WHY.items()},
            }[reason]
            raise PeerError(f"{phase}, operation {number}: {what}; results since then are NaN, so make a new object")
        if self.turn.was_shared:
            self.refuse()
            raise RuntimeError(SHARED)

    def begin(self, ids: Tensor, x: Tokens) -> _Slots:
        """Begin an exchange (a dispatch and its combine) of tokens x with choices ids [N, K]; nothing is sent yet."""
        self.check()
        (tokens, k), world = ids.shape, self.sizes.world
        empty = ids.new_empty
        handle = empty(1 + world, dtype=torch.int64)
        return _Slots(self, handle, empty(tokens, world), empty(tokens, k), keeps=torch.is_grad_enabled())

    def refuse(self) -> None:
        """Tell the other ranks that this rank refused its tokens, in place of an exchange.

        The object cannot be used afterwards.
        """
        if not self._error.value:
            self.send_tokens(tokens=0, status="refused")

    def send_tokens(self, status: str, **values: Any) -> None:
        self._follow()
        if self.poison:
            self.window.sums[:-1].fill_(math.nan)
            self.window.weight_gradients[:-1].fill_(math.nan)
        values["status"] = STATUSES.index(status)
        self.kernels.launch("send_tokens", experts=self.num_experts, **values, **self.common)

    def send_sums(self, **values: Any) -> None:
        self._follow()
        if self.poison:
            self.window.rows.fill_(math.nan)
            self.window.scales.fill_(E8M0_NAN)
            self.window.weights.fill_(math.nan)
            self.window.ids.fill_(0x7F7F7F7F)
        self.kernels.launch("send_sums", **values, **self.common)

    def _follow(self) -> None:
        """Make the current stream wait for the stream of the previous operation."""
        device = self._state.device
        if device.type != "cuda":
            return
        with gpus.on(self.kernels.index):
            capturing = gpus.is_capturing()
        if not capturing:
            stream = torch.cuda.current_stream(device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream


@dataclasses.dataclass
class _Slots(Exchange):
    """An exchange in fixed slots (rows) of the ranks' windows, memory that all ranks of the host can access.

    A token has the same slot, given by its rank and its number, in each window that it is sent to.

    Attributes:
        handle: int64 [1 + W], written by the kernel: the operation's number, and the number of tokens of each rank.
        sum_rows: [N, W], written by the kernel: for each token and rank, the row of `window.sums` where the rank's sum
            arrives; -1: the token does not go to this rank.
        weight_places: [N, K], written by the kernel: for each choice, the index in `window.weight_gradients` where the
            gradient of its weight arrives; -1: the choice has no expert.
        keeps: True: received tensors must outlive the next dispatch, so they are copied.
    """

    transport: Symmetric
    handle: Tensor
    sum_rows: Tensor
    weight_places: Tensor
    keeps: bool

    @property
    def tokens(self) -> int:
        return len(self.sum_rows)

    def fail(self) -> None:
        """Send a dispatch with status "refused", by which the other ranks, in combine, see that this rank failed."""
        self.transport.refuse()

    def dispatch(self, x: Tokens, weights: Tensor, ids: Tensor) -> tuple[Tokens, Tensor, Tensor]:
        """Send tokens, and return the received tokens, weights and ids.

        The results are views of this rank's window, which the next dispatch overwrites; if `keeps`, they are copies.
        """
        weights = weights.contiguous()
        self._send(x, ids=ids.data_ptr(), weights=weights.data_ptr())
        window = self.transport.window
        came = window.rows if isinstance(x, Tensor) else window.in_mxfp8, window.weights, window.ids
        return tuple(one.clone() for one in came) if self.keeps else came  # type: ignore[return-value]

    def forth(self, d_out: Tensor) -> Tensor:
        """Send gradients; return a copy of the received gradients, since weight gradients may be computed later."""
        self._send(d_out, ids=0, weights=0)
        return self.transport.window.rows.clone()

    def back(self, sums: Tensor, residual: Tensor | None) -> Tensor:
        self._check_back(sums, of_a_token=1)
        self._send_back(sums, is_summed=1)
        return self._add(residual)

    def back_rows(self, y: Tensor, here: Routing, residual: Tensor | None) -> Tensor:
        """Send expert rows y [T, H] back; the sending kernel sums them by token."""
        self._check_back(y, of_a_token=self.transport.sizes.top_k)
        self._send_back(y, is_summed=0)
        return self._add(residual)

    def gradients_back(self, d_x: Tensor, d_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self._send_back(d_x, is_summed=1, d_weights=d_weights)
        if d_weights is None:
            return self._add(None), None
        tokens, k = self.weight_places.shape
        made = d_weights.new_empty(tokens, k)
        self.transport.kernels.launch(
            "row_weights_backward", d_rows=self.transport.window.weight_gradients.data_ptr(),
            row_of=self.weight_places.data_ptr(), d_weights=made.data_ptr(), tokens=tokens, k=k,
            bound=self.transport.window.weight_gradients.numel(),
        )  # fmt: skip
        return self._add(None), made

    def _send(self, x: Tokens, **table: int) -> None:
        data, scale = (x.contiguous(), 0) if isinstance(x, Tensor) else (x.data, x.scale.data_ptr())
        rows = {"x": data.data_ptr(), "x_scale": scale, "tokens": len(data)}
        self.transport.send_tokens(status=status_of(x), **rows, **table, **self._back())

    def _back(self) -> dict[str, int]:
        """Return the addresses of `sum_rows`, `weight_places` and `handle` as kernel arguments, by name."""
        tensors = {"sum_rows": self.sum_rows, "weight_places": self.weight_places, "handle": self.handle}
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def _check_back(self, y: Tensor, of_a_token: int) -> None:
        """Raise ValueError or TypeError if y does not have the shape, dtype and device that the kernel reads.

        Args:
            y: the experts' results.
            of_a_token: number of rows of y for each token: 1 for sums, top_k for rows.
        """
        sizes = self.transport.sizes
        shape, why = (of_a_token * sizes.rows, sizes.hidden_size), f"hidden_size is {sizes.hidden_size}"
        like = self.transport.window.sums
        check_tensor(COMBINE, "y_here", y, "a tensor [T, H]", like, dtypes=(sizes.dtype,), shape=shape, why=why)

    def _send_back(self, y: Tensor, is_summed: int, d_weights: Tensor | None = None) -> None:
        assert self.row_of is not None
        self.transport.check()
        y = y.contiguous()
        d_weights = None if d_weights is None else d_weights.contiguous()
        self.transport.send_sums(
            y=y.data_ptr(), row_of=self.row_of.data_ptr(), d_weights=0 if d_weights is None else d_weights.data_ptr(),
            tokens=len(self.sum_rows), is_summed=is_summed, **self._back(),
        )  # fmt: skip

    def _add(self, residual: Tensor | None) -> Tensor:
        """Add the received sums of each token in the order of ranks, plus the residual unless None; return [N, H]."""
        sums = self.transport.window.sums
        tokens, world = self.sum_rows.shape
        out = sums.new_empty(tokens, sums.shape[1])
        self.transport.kernels.launch(
            "combine", y=sums.data_ptr(), row_of=self.sum_rows.data_ptr(), out=out.data_ptr(), tokens=tokens,
            residual=0 if residual is None else residual.data_ptr(), k=world, width=sums.shape[1], bound=len(sums),
        )  # fmt: skip
        return out
