"""A unit: warps that step together, their registers, and the instructions of whole warps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .accesses import Accesses
from .engines.asynchronous import Copies
from .engines.mbarrier import Mbarriers
from .engines.mma import WarpMma
from .engines.tcgen05 import TensorCore
from .engines.tensor_memory import TensorMemory
from .engines.tma import BulkCopies
from .engines.wgmma import WarpgroupMma
from .faults import Fault

if TYPE_CHECKING:
    from .cta import Cta

LANES = np.arange(32)
NANOSECONDS = 64  # time of a basic block: kernels that wait by the clock wait for hundreds of blocks, not 20,000
# Without an effect here, where the generic proxy's accesses are in order.
FENCES = ("membar", "fence.acq_rel", "fence.sc", "fence.acquire", "fence.release", "fence.mbarrier_init",
          "fence.proxy.alias", "fence.proxy.tensormap", "fence.proxy.async.global")  # fmt: skip
PROXY_FENCES = ("fence.proxy.async", "fence.proxy.async.shared::cta", "fence.proxy.async.shared::cluster")
ENGINES = (Accesses, Copies, Mbarriers, BulkCopies, WarpMma, WarpgroupMma, TensorCore, TensorMemory)


class Registers:
    """Registers of a unit's lanes: one array [registers, lanes] for each width, and views of it for each type.

    Registers initially hold patterns that are NaN or far from any address, so that a missing write gives wrong results.
    The patterns are positive. With `negative` they are negative, and predicates are true.
    """

    def __init__(self, counts: dict[str, int], lanes: int, negative: bool = False):
        self.p = np.full((max(counts["p"], 1), lanes), negative)
        self.b16 = np.full((max(counts["b16"], 1), lanes), 0xFFAD if negative else 0x7FAD, np.uint16)
        self.b32 = np.full((max(counts["b32"], 1), lanes), 0xFFF0DEAD if negative else 0x7FF0DEAD, np.uint32)
        self.b64 = np.full(
            (max(counts["b64"], 1), lanes), (0xDEAD if negative else 0x7EAD) * 0x1000100010001, np.uint64
        )
        self.s16, self.f16 = self.b16.view(np.int16), self.b16.view(np.float16)
        self.s32, self.f32 = self.b32.view(np.int32), self.b32.view(np.float32)
        self.s64, self.f64 = self.b64.view(np.int64), self.b64.view(np.float64)


class Unit(Registers, *ENGINES):
    """`warps` warps from `first_warp` on; passed to generated functions as `u`, with `m`: True or the active lanes.

    `groups` contains [block, lanes] of lanes that can continue, `blocked` the reasons why others wait. `spun` is set by
    an instruction that waits in a loop of the kernel; the scheduler clears it.
    """

    def __init__(self, cta: Cta, first_warp: int, warps: int):
        super().__init__(cta.kernel.counts, warps * 32, cta.machine.has_negative_registers)
        self.cta, self.first_warp, self.warps = cta, first_warp, warps
        self.machine, self.observer = cta.machine, cta.machine.observer
        self.acting: object = True  # the lanes of what the observer hears of, as `m`
        self.n = n = warps * 32
        self.everyone = np.ones(n, bool)  # groups of all lanes have this very array
        self.groups: list[list] = [[0, self.everyone]]
        self.blocked: list[tuple] = []
        self.warp_waiting: list[list] = []  # at bar.warp.sync: block to go on at, lanes, mask
        self.priority = 0.0
        self.block = 0  # the one that runs, or ran last
        self.spun = False
        self.spun_at: set[int] = set()  # blocks that spun since anything else was done
        self.last_wait = -1
        self.waits_for: object = None  # the last wait that failed, for reports
        self.exited = np.zeros(n, bool)
        self.cluster_phase, self.cluster_waited = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.thread = np.arange(first_warp * 32, first_warp * 32 + n, dtype=np.uint32)
        self._fixed: dict[str, np.ndarray] = {}  # special registers that do not change
        for engine in ENGINES:
            engine.begin(self)

    def check_end(self) -> None:
        """Raise Fault for asynchronous work for which no thread of the unit waited."""
        for engine in ENGINES:
            engine.end(self)

    def special(self, name: str) -> np.ndarray:
        """Return a special register (PTX ISA, "Special Registers").

        %clock and %globaltimer do not measure time: they count executed basic blocks, each as NANOSECONDS ns or cycles.
        """
        if name == "clock":
            return np.full(self.n, self.machine.steps * NANOSECONDS & 0xFFFFFFFF, np.uint32)
        if name in ("clock64", "globaltimer"):
            return np.full(self.n, self.machine.steps * NANOSECONDS, np.uint64)
        if name not in self._fixed:
            self._fixed[name] = self._special(name)
        return self._fixed[name]

    def _special(self, name: str) -> np.ndarray:
        cta, machine, t = self.cta, self.machine, self.thread
        x, y, _ = machine.block
        lane = (t % 32).astype(np.uint64)
        below = (np.uint64(1) << lane) - np.uint64(1)
        triples = {"ntid": machine.block, "ctaid": cta.id, "nctaid": machine.grid, "cluster_ctaid": cta.in_cluster,
                   "cluster_nctaid": machine.cluster, "clusterid": cta.cluster_id,
                   "nclusterid": machine.clusters}  # fmt: skip
        values = {"tid.x": t % x, "tid.y": t // x % y, "tid.z": t // (x * y), "laneid": t % 32, "warpid": t // 32,
                  "nwarpid": cta.warps, "cluster_ctarank": cta.rank, "cluster_nctarank": len(cta.cluster.ctas),
                  "dynamic_smem_size": machine.dynamic, "total_smem_size": cta.size, "smid": cta.linear,
                  "is_explicit_cluster": int(machine.cluster != (1, 1, 1)),
                  "lanemask_lt": below, "lanemask_eq": np.uint64(1) << lane, "lanemask_le": below * 2 + 1,
                  "lanemask_gt": ~(below * 2 + 1), "lanemask_ge": ~below}  # fmt: skip
        for prefix, triple in triples.items():
            values |= {f"{prefix}.{axis}": triple["xyz".index(axis)] for axis in "xyz"}
        if name not in values:
            raise Fault(f"special register %{name} is not modelled")
        return np.broadcast_to(values[name], self.n).astype(np.uint32)

    # lanes that act
    def active(self, m, *arrays) -> list[np.ndarray]:
        """Return values of the active lanes."""
        self.acting = m
        if m is True:
            return [self.full(a) for a in arrays]
        return [self.full(a)[m] for a in arrays]

    def full(self, x) -> np.ndarray:
        """Broadcast a value to an array of all lanes.

        Arrays are returned as they are: np.broadcast_to on every call would take as long as an addition.
        """
        return x if isinstance(x, np.ndarray) and x.ndim else np.broadcast_to(x, self.n)

    def lanes(self, m) -> np.ndarray:
        """Return the numbers of the active lanes, counted in the unit."""
        self.acting = m
        return np.arange(self.n) if m is True else np.flatnonzero(m)

    def spread(self, values: list[np.ndarray], m) -> list[np.ndarray]:
        """Expand values of the active lanes to arrays of all lanes."""
        if m is True:
            return values
        out = []
        for value in values:
            full = np.zeros(self.n, value.dtype)
            full[m] = value
            out.append(full)
        return out

    def mask(self, m) -> np.ndarray:
        """Return `m` as an array [warps, 32]."""
        return (np.ones(self.n, bool) if m is True else m).reshape(self.warps, 32)

    def by_warp(self, x) -> np.ndarray:
        """Return values of all lanes as an array [warps, 32]."""
        return self.full(x).reshape(self.warps, 32)

    # warps
    def shfl(self, mode: str, a, b, c) -> tuple[np.ndarray, np.ndarray]:
        """Return shuffled values, and a mask of lanes whose source was in range (PTX ISA, "shfl.sync")."""
        a, b, c = self.by_warp(a), self.by_warp(b).astype(np.int64) & 31, self.by_warp(c).astype(np.int64)
        segment, clamp = c >> 8 & 31, c & 31
        low, high = LANES & segment, (LANES & segment) | (clamp & ~segment)
        source = {"up": LANES - b, "down": LANES + b, "bfly": LANES ^ b, "idx": low | (b & ~segment & 31)}[mode]
        there = source >= high if mode == "up" else source <= high
        source = np.where(there, source, LANES)
        return np.take_along_axis(a, source, 1).reshape(-1), there.reshape(-1)

    def vote(self, mode: str, p, m) -> np.ndarray:
        """Return ballot, any, all or uni of a predicate (PTX ISA, "vote.sync")."""
        acts = self.mask(m)
        x = self.by_warp(p) & acts
        if mode == "ballot":
            result = (x.astype(np.uint64) << LANES.astype(np.uint64)).sum(1).astype(np.uint32)
        elif mode == "any":
            result = x.any(1)
        elif mode == "all":
            result = (x | ~acts).all(1)
        elif mode == "uni":
            result = (x | ~acts).all(1) | ~x.any(1)
        else:
            raise Fault(f"vote.sync.{mode} is not modelled")
        return np.repeat(result, 32)

    def match_any(self, a, m) -> np.ndarray:
        """Return for each lane the mask of lanes that have the same value (PTX ISA, "match.sync")."""
        x = self.by_warp(a)
        same = (x[:, :, None] == x[:, None, :]) & self.mask(m)[:, None, :]
        return (same.astype(np.uint64) << LANES.astype(np.uint64)).sum(2).astype(np.uint32).reshape(-1)

    def redux(self, op: str, a, m) -> np.ndarray:
        """Reduce a value over the active lanes (PTX ISA, "redux.sync")."""
        functions = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and,
                     "xor": np.bitwise_xor}  # fmt: skip
        if op not in functions:
            raise Fault(f"redux.sync.{op} is not modelled")
        x, acts = self.by_warp(a), self.mask(m)
        out = np.empty_like(x)
        for warp in range(self.warps):
            if acts[warp].any():
                out[warp] = functions[op].reduce(x[warp][acts[warp]], dtype=x.dtype)
        return out.reshape(-1)

    def elect(self, m) -> np.ndarray:
        """Return the mask of elected lanes: the lowest active lane of each warp (PTX ISA, "elect.sync").

        guess: the ISA leaves the choice open; hardware was observed to choose the lowest lane.
        """
        acts = self.mask(m)
        out = np.zeros((self.warps, 32), bool)
        out[np.arange(self.warps), acts.argmax(1)] = acts.any(1)
        return out.reshape(-1)

    def elect_lane(self, m) -> np.ndarray:
        """Return the number of the elected lane."""
        return np.repeat(self.mask(m).argmax(1), 32).astype(np.uint32)

    def setmaxnreg(self, action: str, count: int) -> None:
        """Change the registers of the unit's warps (PTX ISA, "setmaxnreg").

        guess: the launch reserves as many registers as .reqntid and .minnctapersm leave a thread, that is 65536 /
        (threads * CTAs of an SM), rounded down to 8: ptxas gives kernels with setmaxnreg so many (168, 96 and 80).
        """
        if not 24 <= count <= 256 or count % 8:
            raise Fault(f"setmaxnreg of {count}: not a multiple of 8 in [24, 256]")
        for warp in range(self.first_warp, self.first_warp + self.warps):
            now = self.cta.registers.get(warp, self.cta.launch_registers)
            if (action == "dec" and count > now) or (action == "inc" and count < now):
                raise Fault(f"setmaxnreg.{action} of {count} in a warp that has {now} registers")
            self.cta.registers[warp] = count

    def griddepcontrol(self, action: str, m) -> None:
        """Wait for previous grids, or let the next one begin (PTX ISA, "griddepcontrol").

        Launches run one after the other here, so both only tell the observer.
        """
        self.acting = m
        if self.observer is not None and action == "wait":
            self.observer.acquire(self, ("grid", self.machine))
        elif self.observer is not None:
            self.observer.release(self, ("grid", self.machine))

    def fence(self, op: str, m) -> None:
        """Order accesses (PTX ISA, "membar/fence").

        Accesses of the generic proxy are in order here. A proxy fence of any thread makes all earlier writes of its CTA
        to shared memory visible to the async proxy. The race check finds out if the thread had synchronised with the
        writers, and checks global writes that the async proxy reads. fence.mbarrier_init has no effect: mbarriers are
        visible as soon as they are initialised.
        """
        if op in PROXY_FENCES:
            self.cta.unfenced[:] = False
        elif not op.startswith(FENCES):
            raise Fault(f"{op} is not modelled")
        self.acting = m
        if self.observer is not None:
            self.observer.fence(self, op)

    def mapa(self, address, rank) -> np.ndarray:
        """Return the address of the same shared variable in another CTA (PTX ISA, "mapa").

        guess: bits 24 and up are the rank; NVIDIA's two-CTA code masks bit 24, which only this arrangement explains.
        """
        return (address & np.uint32(0xFFFFFF)) | (rank << np.uint32(24))
