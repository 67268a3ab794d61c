"""A problem: everything that determines one call, stored as a line of JSON that reproduces it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of a public function.

    Attributes:
        call: the function's name, a key of `declared.FUNCTIONS`.
        sizes: rows of each expert; for a layer, about how often each expert is chosen.
        tail: rows after the last group, or tokens without an expert.
        hidden, inter: widths, H and I (or K and N).
        dtype: dtype of rows.
        groups: how group sizes are passed, one of `declared.GROUPS`.
        form: how weights are passed, one of `declared.forms_of`.
        given: names of optional tensors that are passed.
        options: non-tensor arguments, by name.
        train: True: gradients are computed and compared.
        padded: True: matrices have padding between rows, filled with NaN.
        seed: seed of the tensors' values.
    """

    call: str
    sizes: tuple[int, ...] = (1,)
    tail: int = 0
    hidden: int = 32
    inter: int = 32
    dtype: str = "bfloat16"
    groups: str = "offs"
    form: str = "packed"
    given: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: bool = False
    padded: bool = False
    seed: int = 0

    @property
    def experts(self) -> int:
        return len(self.sizes)

    @property
    def rows(self) -> int:
        """The number of rows in all groups."""
        return sum(self.sizes)

    @property
    def total(self) -> int:
        """T: rows in all groups, plus the rows after them."""
        return self.rows + self.tail

    @property
    def recipe(self) -> str:
        recipe: str = self.options.get("recipe", "bf16")
        return recipe

    def text(self) -> str:
        """Return the problem as JSON, without fields that have their default values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = Problem(self.call)
        return json.dumps({n: v for n, v in fields.items() if n == "call" or v != getattr(plain, n)})

    def command(self, device: str) -> str:
        """Return a shell command, for the repository's root, that runs only this problem."""
        return f"PYTHONPATH=tests .venv/bin/python -m fuzz --device {device} --problem {shlex.quote(self.text())}"


def parse(text: str) -> Problem:
    """Parse a problem. Raises ValueError if the text is not a problem."""
    try:
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("sizes", "given") if name in fields}
        return Problem(**{**fields, **lists})
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{text!r} is no problem: {error}; give a line that fuzz printed") from None
