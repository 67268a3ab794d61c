"""A serving process that uses kernels compiled and tuned by an earlier process. Prints a JSON object of what it used.

usage: fresh_serving.py OUT_FEATURES IN_FEATURES
"""

from __future__ import annotations

import json
import random
import subprocess
import sys

import torch
import tvm_ffi  # noqa: F401 - as a serving process has it long since

import glulam


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError(f"a process was started: {arguments[1:]}")


def main(out_features: int, in_features: int) -> None:
    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign, assignment]
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x, weights = torch.randn(4096, in_features, **bf16), torch.randn(32, out_features, in_features, **bf16)
    rng, rows_seen = random.Random(0), 0

    def call(rows: int, experts: int) -> None:
        cuts = sorted(rng.randrange(rows + 1) for _ in range(experts - 1))
        offs = torch.tensor([*cuts, rows], dtype=torch.int32, device="cuda")
        glulam.grouped_mm(x[:rows], weights[:experts], offs=offs)
        torch.cuda.synchronize()

    with torch.no_grad():
        call(256, 16)
        shape = (256, in_features), (16, out_features, in_features)
        told = glulam.explain("grouped_mm", *shape)
        for _ in range(200):
            rows_seen += 1
            call(rng.randrange(1, 4097), rng.randrange(1, 33))
        glulam.preload()
    print(
        json.dumps(
            {
                "source": told.source,
                "name": told.spec.name if told.spec else "",
                "calls": rows_seen,
                "heavy": sorted({name.split(".")[0] for name in sys.modules} & {"cutlass", "rich", "typer"}),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
