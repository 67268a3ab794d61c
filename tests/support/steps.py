"""Arguments of a chain's steps."""

from __future__ import annotations

from typing import Any

from cute_kernels.chains import Of, Position, Step


def taken(step: Step, named: dict[str, Any], position: int) -> dict[str, Any]:
    """Return the arguments that a step passes to its stage, by name.

    Args:
        named: the chain's arguments.
        position: number of steps that ran before this one.
    """

    def value(source: Any) -> Any:
        if isinstance(source, Of):
            tensor = named[source.tensor]
            if source.what == "stream":
                return 0  # the only one of a CPU
            return tensor.data_ptr() if source.what == "address" else getattr(tensor, source.what)(source.dim)
        if isinstance(source, Position):
            return position
        return named[source] if isinstance(source, str) else source

    return {name: value(source) for name, source in step.sources}
