"""Calls of exported functions by argument names, without the operators' host code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.specs import Spec
from glulam.choose import kernels


def sm_count() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def launch(spec: Spec, **given: Any) -> None:
    """Call a spec's function with arguments by name.

    An address argument may be a tensor, whose address is passed, or None, for which 0 is passed. num_sms is the GPU's.
    """
    signature, named = signature_of(spec), dict(given)
    if "num_sms" in signature.names:
        named.setdefault("num_sms", sm_count())
    for argument in signature.arguments:
        value = named.get(argument.name)
        if argument.kind == "address" and (value is None or isinstance(value, Tensor)):
            named[argument.name] = 0 if value is None else value.data_ptr()
    kernels.find(spec).function(*signature.pack(**named))


def groups_of(sizes: Tensor, form: int = 0) -> dict[str, Any]:
    return {"groups": sizes, "group_form": form, "num_groups": sizes.numel()}
