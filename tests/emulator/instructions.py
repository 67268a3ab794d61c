"""Instructions and kernels as the parser returns them."""

from __future__ import annotations

from dataclasses import dataclass, field


class Unsupported(Exception):
    """Raised for PTX that the emulator does not model; the message names it."""


@dataclass
class Reg:
    cls: str
    index: int


@dataclass
class Imm:
    value: int | float
    is_float: bool = False
    is_double: bool = False


@dataclass
class Special:
    name: str


@dataclass
class Address:
    base: object  # Reg, Imm, or str: a parameter or a variable in shared memory
    offset: int = 0
    coords: list = field(default_factory=list)


@dataclass
class Ins:
    op: str  # with all of its modifiers
    args: list
    pred: Reg | None = None
    negated: bool = False
    line: int = 0  # line of the PTX text, from 1 on
    text: str = ""

    @property
    def mods(self) -> list[str]:
        return self.op.split(".")


@dataclass
class Kernel:
    name: str
    target: str
    params: dict  # name -> (offset, size)
    param_bytes: int
    code: list
    labels: set  # indices into code that branches go to
    counts: dict  # registers by class
    shared: dict  # name -> (offset, size); dynamic: size 0
    shared_bytes: int
    threads: tuple | None
    cluster: tuple | None
    ctas_per_sm: int = 1  # CTAs that the registers must suffice for (.minnctapersm)
