"""Run a process for each function, a few at a time, and kill a process that takes too long."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from cute_kernels.chains import stages_of
from cute_kernels.specs import Spec, from_dict, to_dict
from ffi_bridge.manifest import Manifest

from .catalogue import trials_of
from .child import main

LIMIT_S, PATIENCE_S = 60.0, 10.0
PASSED, FAILED, UNREACHED = "passed", "failed", "unreached"


class Outcome(NamedTuple):
    """The outcome of a function's trials.

    Attributes:
        name: the function's name.
        state: PASSED, FAILED or UNREACHED.
        detail: the failure, or how the function was tried.
        called: names of the functions that the process called.
    """

    name: str
    state: str
    detail: str
    called: frozenset[str] = frozenset()


def outcome_of(name: str, target: Callable[..., None], arguments: Sequence[Any], limit_s: float = LIMIT_S) -> Outcome:
    """Run `target(*arguments, connection)` in a new process, and return the outcome that it sends through `connection`.

    The process is forked from a server that has imported Glulam but never used a GPU, so that it starts at once.

    Args:
        name: the function's name.
        target: e.g. `child.main`, whose messages it must send.
        limit_s: seconds after which the process is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__package__ + ".child"])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sending), daemon=True)
    process.start()
    sending.close()
    at, deadline = "its start", time.monotonic() + limit_s
    try:
        while receiving.poll(max(deadline - time.monotonic(), 0.0)):
            kind, what, *called = receiving.recv()
            if kind == PASSED:
                return Outcome(name, PASSED, f"{what} calls", *called)
            if kind == FAILED:
                return Outcome(name, FAILED, f"{what} ({at})")
            at = what
        return Outcome(name, FAILED, f"it took more than {limit_s:.0f} s ({at})")
    except EOFError:  # the process ended without a last word
        process.join(limit_s)
        return Outcome(name, FAILED, f"its process ended with {process.exitcode} ({at})")
    finally:
        process.kill()
        process.join(PATIENCE_S)  # the driver may hold it for as long as its kernel runs
        receiving.close()


def outcomes(
    manifest: Manifest, index: int, specs: Sequence[Spec], limit_s: float = LIMIT_S, jobs: int = 1
) -> Iterator[Outcome]:  # fmt: skip
    """Yield the outcomes of all functions in `specs`.

    First come the functions with trials. The others are only launched by functions with trials; they pass if such a
    function has launched them, else they are unreached.

    Args:
        manifest: the bundle's manifest.
        index: index of the GPU.
        specs: specs of the functions.
        limit_s: seconds after which a function's process is killed.
        jobs: processes at a time. A function that hangs costs the processes beside it time, and nothing else.
    """

    def attempt(spec: Spec) -> Outcome | None:
        if next(trials_of(spec), None) is None:
            return None
        return outcome_of(spec.name, main, (to_dict(spec), index), limit_s)

    called: set[str] = set()
    others = []
    pool = ThreadPoolExecutor(jobs)
    try:
        for spec, outcome in zip(specs, pool.map(attempt, specs), strict=True):
            if outcome is None:
                others.append(spec)
                continue
            if outcome.state == PASSED:
                chains = [from_dict(manifest.functions[name].spec) for name in outcome.called]
                called |= {stage.name for chain in chains for stage in (chain, *stages_of(chain))}
            yield outcome
    finally:
        pool.shutdown(cancel_futures=True)
    for spec in others:
        is_called = spec.name in called
        yield Outcome(spec.name, PASSED if is_called else UNREACHED, "by functions that launch it" if is_called else "")
