"""Batch invariance: restrict the choice to kernels that add in one order, so that no row's bits depend on other rows.

An accumulation order is the order in which a GEMM adds its products along K. Tiles may differ in it, and the number of
rows decides the tile. So for batch-invariant calls one order is fixed for all numbers of rows: the order of the
problem's widest tile (largest m) without a saved preactivation. Training uses the same order. Kernels with another
order are left out; the next wider tile with the right order serves instead.
"""

from __future__ import annotations

from cute_kernels.accumulation import Accumulation
from cute_kernels.arch import policy_of
from cute_kernels.specs import Spec
from cute_kernels.stages import accumulations_of
from cute_kernels.tiles import TileConfig

from .on_tile import spec_on
from .problem import Problem, changed

Orders = tuple[Accumulation, ...]
SWITCH = "glulam.batch_invariant(True)"
ROUNDED = "a forward that records a gradient, without `recompute`, rounds the preactivation before the activation"
"""Reason why an MLP with frozen weights is not batch-invariant: with a gradient, its forward becomes three calls
(`backward.frozen`), with a rounding between the calls.
"""
BY_SWITCH = f"{SWITCH} leaves out kernels that add in another order"


def orders_by_tile(problem: Problem, arch: str) -> dict[TileConfig, Orders]:
    """Return {tile: accumulation order of each of the problem's GEMMs} for the shipped tiles of a problem."""
    tiles = policy_of(arch).tiles(problem)
    return {tile: accumulations_of(spec_on(problem, arch, tile)) for tile in tiles}


def order_of(problem: Problem, arch: str) -> Orders:
    """Return the accumulation order that batch-invariant kernels for this problem must have.

    It is the widest tile's. Training and calls with adapters (LoRA) have the order of plain inference.
    """
    plain = changed(problem, save_preact=False, adapted=False) if problem.save_preact else problem
    tiles = orders_by_tile(plain, arch)
    return tiles[max(tiles, key=lambda tile: tile.m)]


def is_invariant(problem: Problem, arch: str) -> bool:
    """Return True if all tiles that ship for a problem have the same, right accumulation order (`order_of`)."""
    return set(orders_by_tile(problem, arch).values()) == {order_of(problem, arch)}


def tiles_in_order(problem: Problem, arch: str) -> tuple[TileConfig, ...]:
    """Return the shipped tiles that have the problem's accumulation order (`order_of`), smallest m first.

    Raises:
        NotImplementedError: no tile has this accumulation order.
    """
    order = order_of(problem, arch)
    found = sorted((t for t, own in orders_by_tile(problem, arch).items() if own == order), key=lambda tile: tile.m)
    if not found:
        raise NotImplementedError(
            f"{problem.op}: no kernel of operands {problem.operands!r} on {arch} adds in the order that inference of "
            f"many rows has ({', '.join(map(str, order))}), which {SWITCH} asks for; call it without the switch, or "
            "choose recipe 'bf16'"
        )
    return tuple(found)


def tile_in_order(problem: Problem, arch: str, tile: TileConfig) -> TileConfig:
    """Return `tile` if it has the problem's accumulation order, else the next wider tile that has it.

    If no wider tile has this order, the widest tile that has it is returned.

    Raises:
        NotImplementedError: no tile has this accumulation order.
    """
    usable = tiles_in_order(problem, arch)
    if tile in usable:
        return tile
    return next((one for one in usable if one.m >= tile.m), usable[-1])


def keeps_order(spec: Spec, problem: Problem, arch: str) -> bool:
    """Return True if a kernel has the problem's accumulation order, or if the problem need not be batch-invariant."""
    return not problem.invariant or accumulations_of(spec) == order_of(problem, arch)
