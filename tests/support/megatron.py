"""Helpers to run Megatron-Core without a GPU."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and tensor is not None else tensor


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the CUDA functions that Megatron calls by functions of the CPU.

    Also replaced is its dispatcher's conversion of row counts on a GPU to arrays.
    """
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    stream = MagicMock()
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", _on_the_host)
