"""Copies of quantised tensors by every way of storing them, compared bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch.utils import _pytree as pytree

from glulam.formats.scaled import Stored

WAYS = ("copy", "pickle", "torch", "pytree", "checkpoint")


def same(one: Stored, other: Stored) -> bool:
    """Return True if two tensors have equal parts."""
    pairs = zip(one.parts, other.parts, strict=True)
    return all(
        a is b is None or (a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
        for a, b in pairs
    )


def round_trip(q: Any, way: str) -> Any:
    """Return a copy of q, made in one of WAYS."""
    if way == "copy":
        return copy.deepcopy(q)
    if way == "pickle":
        return pickle.loads(pickle.dumps(q))
    if way == "torch":
        torch.save(q, buffer := io.BytesIO())
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    if way == "pytree":
        return pytree.tree_map(torch.clone, q)
    assert way == "checkpoint"
    tensors = {name: part.clone() for name, part in q.tensors("experts.w1_").items()}
    return type(q).from_tensors(tensors, q.metadata(), "experts.w1_")
