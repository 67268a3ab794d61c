"""Bulk copies of bytes, and of boxes of tensors (TMA); st.async."""

from __future__ import annotations

import numpy as np

from ..faults import Fault
from ..formats import bf16, f16, to_bf16, to_f16
from ..lanes import SHARED_BASE
from . import PARAM_BASE
from .asynchronous import Operation, finish, post
from .tensor_maps import TensorMap, read_tensor_map

RANK_SHIFT = 24
TENSOR_MAP_BYTES = 128
CACHE_POLICIES = (0, 0x10F0000000000000, 0x12F0000000000000, 0x14F0000000000000)
"""guess: what createpolicy makes for L2::evict_normal, evict_first and evict_last, and the DSL's 0 for none."""
MODIFIERS_OF_NO_EFFECT = {"L2::cache_hint", "noftz", "sync", "aligned"}


def _reduce(op: str, kind: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Compute a reduction's result on raw words (PTX ISA, "cp.reduce.async.bulk")."""
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                 "xor": np.bitwise_xor}  # fmt: skip
    if op not in functions:
        raise Fault(f"bulk reduction .{op} is not modelled")
    function = functions[op]
    if kind in ("bf16", "f16"):
        of, to = (bf16, to_bf16) if kind == "bf16" else (f16, to_f16)
        return to(function(of(old), of(new)))
    dtype = {"f": np.float32 if kind == "f32" else np.float64, "s": f"i{old.itemsize}"}.get(kind[0], f"u{old.itemsize}")
    return function(old.view(dtype), new.view(dtype)).view(old.dtype)


class BulkCopies:
    """cp.async.bulk, cp.async.bulk.tensor, their reductions and prefetches, and st.async, a copy for each lane.

    PTX ISA, "Data Movement and Conversion Instructions: Bulk copy" and "Tensor copy": "cp.async.bulk",
    "cp.reduce.async.bulk", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group"; "st.async". Tiled mode only; im2col, gather4 and scatter4 are Faults.
    guess: elements outside of a tensor are filled with zeros, addresses wrap at 2^64: the project's ragged rows need
    the latter, and the kernels that ran on Hopper come out right with both.
    """

    def begin(self) -> None:
        """Start without copies. Groups belong to threads."""
        self.bulk_open: dict[int, list] = {}  # lane -> (read, write) operations since its last commit
        self.bulk_groups: dict[int, list[list]] = {}

    def end(self) -> None:
        """Raise Fault if a copy may still read shared memory after the CTA ended."""
        groups = [group for of_lane in self.bulk_groups.values() for group in of_lane] + list(self.bulk_open.values())
        for group in groups:
            for read, _ in group:
                if not read.done:
                    raise Fault(f"{read.what} was not waited for: it may read shared memory of a CTA that has ended")

    def bulk(self, op: str, m, *args) -> None:
        """Issue a copy for each active lane; an address operand is (address, coordinates).

        Equal stores in all lanes, as the DSL emits them, count as one store, for which each lane waits.
        """
        lanes = self.lanes(m)
        together = len(lanes) > 1 and ".bulk_group" in op and "reduce" not in op and self._are_equal(args, lanes)
        for of in [lanes] if together else np.split(lanes, len(lanes)):
            self._bulk(op, [int(lane) for lane in of], [self._pick(x, of[0]) for x in args])

    def _are_equal(self, x, lanes: np.ndarray) -> bool:
        if isinstance(x, (list, tuple)):
            return all(self._are_equal(y, lanes) for y in x)
        return not isinstance(x, np.ndarray) or not x.ndim or bool((x[lanes] == x[lanes[0]]).all())

    def _pick(self, x, lane: int):
        if isinstance(x, (list, tuple)):
            return [self._pick(y, lane) for y in x]
        return int(x[lane] if isinstance(x, np.ndarray) and x.ndim else x)

    def _bulk(self, op: str, lanes: list[int], a: list) -> None:
        parts = op.split(".")
        if "L2::cache_hint" in parts and a[-1] not in CACHE_POLICIES:
            raise Fault(f"{op}: {a[-1]:#x} is no cache policy")
        if "prefetch" in parts:
            return self._prefetch(parts, a)
        for part in ("im2col", "im2col::w", "tile::gather4", "tile::scatter4", "cp_mask", "ignore_oob"):
            if part in parts:
                raise Fault(f"{op}: .{part} is not modelled")
        spaces = [p for p in parts if p in ("global", "shared::cta", "shared::cluster")]
        if len(spaces) != 2:
            raise Fault(f"{op} is not modelled")
        to, source = spaces
        if "tensor" in parts:
            if to == "global":
                return self._store_box(op, parts, lanes, a)
            return self._load_box(op, parts, a)
        if a[2] % 16 or a[0][0] % 16 or a[1][0] % 16:
            raise Fault(f"{op}: addresses {a[0][0]:#x}, {a[1][0]:#x} or size {a[2]} are not multiples of 16")
        if to == "global":
            return self._store_bytes(op, parts, lanes, a)
        if source == "global":
            return self._load_bytes(op, parts, a)
        return self._send_bytes(op, parts, a)

    # shared memory by the async proxy
    def read_shared(self, cta, at: np.ndarray, size: int, agent, what: str) -> None:
        """Check that the async proxy may read `size` bytes, at most 16, at each of the offsets `at`."""
        if at.size and (at.min() < 0 or at.max() + size > cta.size):
            raise Fault(f"{what} reads beyond shared memory: up to {int(at.max()) + SHARED_BASE + size:#x}")
        if cta.unfenced[at >> 4].any():
            bad = int(at.flat[np.flatnonzero(cta.unfenced[at >> 4])[0]]) + SHARED_BASE
            raise Fault(f"{what} reads {bad:#x}, which the generic proxy wrote, and no proxy fence followed")
        if self.observer is not None:
            self.observer.read("shared", cta, at, size, agent)

    def write_shared(self, cta, at: np.ndarray, size: int, agent, what: str) -> None:
        """Check that the async proxy may write there, and mark the bytes as no longer written by the generic proxy."""
        if at.size and (at.min() < 0 or at.max() + size > cta.size):
            raise Fault(f"{what} writes beyond shared memory: up to {int(at.max()) + SHARED_BASE + size:#x}")
        if not cta.threads:
            raise Fault(f"{what} writes to the shared memory of a CTA that has ended")
        cta.unfenced[at >> 4] = False
        if self.observer is not None:
            self.observer.write("shared", cta, at, size, agent)

    def _read_global(self, addresses: np.ndarray, size: int, agent, what: str) -> np.ndarray:
        view, at = self.machine.memory.place(addresses, size, what)
        if self.observer is not None:
            self.observer.read("global", None, addresses, size, agent)
        return view[at]

    def _write_global(self, addresses, values, agent, what: str, op: str = "", kind: str = "") -> None:
        view, at = self.machine.memory.place(addresses, values.itemsize, what, write=True)
        if self.observer is not None:
            change = self.observer.atomic if op else self.observer.write
            change("global", None, addresses, values.itemsize, agent)
        view[at] = _reduce(op, kind, view[at], values) if op else values

    # boxes
    def tensor_map(self, address: int, what: str) -> TensorMap:
        """Read a tensor map from a parameter or from global memory (PTX ISA, "Tensors: Tensor-map")."""
        if address % 64:
            raise Fault(f"{what}: a tensor map at {address:#x}, which is not a multiple of 64")
        at = address - PARAM_BASE
        if 0 <= at <= len(self.machine.params) - 64:
            return read_tensor_map(bytes(self.machine.params[at : at + 64]))
        words = address + np.arange(TENSOR_MAP_BYTES // 8, dtype=np.uint64) * np.uint64(8)
        view, index = self.machine.memory.place(words, 8, f"{what}: tensor map")
        return read_tensor_map(view[index].tobytes())

    def _load_box(self, op: str, parts: list[str], a: list) -> None:
        (to, _), (descriptor, coords), (barrier, _) = a[:3]
        box = self.tensor_map(descriptor, op)
        pair = "cta_group::2" in parts
        if "multicast::cluster" in parts:
            ranks = [cta.rank for cta in self.cta.cluster.ctas if a[3] >> cta.rank & 1]
            if a[3] >> len(self.cta.cluster.ctas):
                raise Fault(f"{op}: mask {a[3]:#x} names more CTAs than the cluster's {len(self.cta.cluster.ctas)}")
        else:
            ranks = [to >> RANK_SHIFT]
            if barrier >> RANK_SHIFT != ranks[0] and not pair:
                raise Fault(f"{op}: destination and mbarrier lie in different CTAs")
        places = box.places(to & 0xFFFFFF) - SHARED_BASE
        offset = barrier & 0xFFFFFF
        even = pair and not barrier >> RANK_SHIFT & 1  # the signal goes to the even CTA of the pair

        def run(operation: Operation) -> None:
            address, inside = box.addresses(coords)
            values = np.zeros(box.count, f"u{box.size}")
            if inside.any():
                values[inside] = self._read_global(address[inside], box.size, operation, op)
            for rank in ranks:
                cta = self.cta.peer(rank)
                self.write_shared(cta, places, box.size, operation, op)
                cta.words[box.size][places // box.size] = values
                self.mbarrier((rank & ~1 if even else rank) << RANK_SHIFT | offset).complete(operation, box.bytes)

        post(self, op, run)

    def _store_box(self, op: str, parts: list[str], lanes: list[int], a: list) -> None:
        (descriptor, coords), (source, _) = a[:2]
        box = self.tensor_map(descriptor, op)
        places = box.places(source & 0xFFFFFF) - SHARED_BASE
        address, inside = box.addresses(coords)
        reduction = parts[parts.index("shared::cta") + 1] if parts[1] == "reduce" else ""

        def values(operation: Operation) -> np.ndarray:
            self.read_shared(self.cta, places, box.size, operation, op)
            return self.cta.words[box.size][places // box.size][inside]

        self._store(op, lanes, values, address[inside], reduction, box.element)

    def _store(self, op: str, lanes: list[int], values, addresses, reduction: str, kind: str) -> None:
        """Issue a store in two steps, a read and a write; wait_group.read waits only for the first."""
        held: list[np.ndarray] = []
        read = Operation(self, f"{op}, its read", lambda operation: held.append(values(operation)))

        def write(operation: Operation) -> None:
            read()
            if self.observer is not None:
                self.observer.acquire(operation, read)
            self._write_global(addresses, held[0], operation, op, reduction, kind)

        written = post(self, op, write)
        for lane in lanes:
            self.bulk_open.setdefault(lane, []).append((read, written))

    # bytes
    def _load_bytes(self, op: str, parts: list[str], a: list) -> None:
        (to, _), (source, _), size, (barrier, _) = a[:4]
        multicast = "multicast::cluster" in parts
        ranks = [c.rank for c in self.cta.cluster.ctas if a[4] >> c.rank & 1] if multicast else [to >> RANK_SHIFT]
        step = np.arange(0, size, 8)

        def run(operation: Operation) -> None:
            values = self._read_global(np.uint64(source) + step.astype(np.uint64), 8, operation, op)
            for rank in ranks:
                self._deliver(rank, to, step, values, barrier if not multicast else None, operation, op, barrier)

        post(self, op, run)

    def _deliver(self, rank: int, to: int, step, values, exact: int | None, operation, op: str, barrier: int) -> None:
        cta = self.cta.peer(rank)
        at = (to & 0xFFFFFF) - SHARED_BASE + step
        self.write_shared(cta, at, 8, operation, op)
        cta.words[8][at // 8] = values
        signal = exact if exact is not None else rank << RANK_SHIFT | barrier & 0xFFFFFF
        self.mbarrier(signal).complete(operation, values.nbytes)

    def _send_bytes(self, op: str, parts: list[str], a: list) -> None:
        (to, _), (source, _), size, (barrier, _) = a[:4]
        if parts[1] == "reduce":
            raise Fault(f"{op} is not modelled")
        if to >> RANK_SHIFT != barrier >> RANK_SHIFT:
            raise Fault(f"{op}: destination and mbarrier lie in different CTAs")
        step = np.arange(0, size, 8)

        def run(operation: Operation) -> None:
            cta, at = self.cta.owner(source)
            self.read_shared(cta, at + step, 8, operation, op)
            values = cta.words[8][(at + step) // 8].copy()
            self._deliver(to >> RANK_SHIFT, to, step, values, barrier, operation, op, barrier)

        post(self, op, run)

    def _store_bytes(self, op: str, parts: list[str], lanes: list[int], a: list) -> None:
        (to, _), (source, _), size = a[:3]
        reduction = parts[parts.index("bulk_group") + 1 :] if parts[1] == "reduce" else []
        reduction = [part for part in reduction if part not in MODIFIERS_OF_NO_EFFECT]
        kind = reduction[1] if reduction else "u64"
        width = 4 if reduction and kind.startswith("b") and kind != "bf16" else int(kind.lstrip("subf")) // 8
        step = np.arange(0, size, width)

        def values(operation: Operation) -> np.ndarray:
            cta, at = self.cta.owner(source)
            self.read_shared(cta, at + step, width, operation, op)
            return cta.words[width][(at + step) // width].copy()

        addresses = np.uint64(to) + step.astype(np.uint64)
        self._store(op, lanes, values, addresses, reduction[0] if reduction else "", kind)

    def _prefetch(self, parts: list[str], a: list) -> None:
        """Check the operands of a prefetch. A tensor map's box may lie outside the tensor; a range of bytes must be
        valid.
        """
        if "tensor" in parts:
            descriptor, coords = a[0]
            self.tensor_map(descriptor, ".".join(parts)).addresses(coords)
        else:
            self.machine.memory.place(np.array([a[0][0], a[0][0] + a[1] - 1], np.uint64), 1, ".".join(parts))

    def prefetch(self, op: str, address, m) -> None:
        """Prefetch (PTX ISA, "prefetch, prefetchu"): no effect, except that a tensor map is decoded and thereby
        checked.
        """
        if op.startswith("prefetch.tensormap") or op.startswith("prefetch.param.tensormap"):
            for (a,) in zip(*self.active(m, address), strict=True):
                self.tensor_map(int(a), op)

    def bulk_commit(self, m) -> None:
        """Close each lane's group."""
        for lane in self.lanes(m):
            if lane in self.bulk_open or lane in self.bulk_groups:
                self.bulk_groups.setdefault(int(lane), []).append(self.bulk_open.pop(int(lane), []))

    def bulk_wait(self, n: int, read: bool, m) -> None:
        """Wait until at most the last `n` groups of each lane are pending; with `read`, only for their reads."""
        for lane in self.lanes(m):
            groups = self.bulk_groups.get(int(lane), [])
            for group in groups[: max(len(groups) - n, 0)]:
                for reads, writes in group:
                    finish(reads if read else writes, self)
            if not read:
                del groups[: max(len(groups) - n, 0)]

    def st_async(self, address, value, barrier, size: int, m) -> None:
        """Store a word in the cluster and complete its bytes at an mbarrier there (PTX ISA, "st.async")."""
        for a, v, b in zip(*self.active(m, address, value, barrier), strict=True):

            def run(operation: Operation, a=int(a), v=v, b=int(b)) -> None:
                if a >> RANK_SHIFT != b >> RANK_SHIFT:
                    raise Fault(f"st.async to {a:#x} with an mbarrier of another CTA at {b:#x}")
                cta, at = self.cta.owner(a)
                if at % size:
                    raise Fault(f"st.async to {a:#x}: misaligned")
                self.write_shared(cta, np.array([at]), size, operation, "st.async")
                cta.words[size][at // size] = v
                self.mbarrier(b).complete(operation, size)

            post(self, "st.async", run)
