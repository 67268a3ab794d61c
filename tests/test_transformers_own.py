"""transformers' own tests of experts implementations, run with Glulam's in place of `grouped_mm`, on the CPU.

Only its source distribution has them, which `make test` unpacks beside its packages (Makefile). Their imports of test
modules that are not in it are needed by other tests only.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
import torch
from support.ranks import run_ranks
from support.transformers_models import MODELS, class_of, config_of

pytest.importorskip("transformers")
FOLDER = Path(sys.prefix) / "transformers" / "tests"
if not FOLDER.is_dir():
    pytest.skip(f"transformers' own tests are not in {FOLDER}; `make test` puts them there", allow_module_level=True)

PACKAGE = "tests_of_transformers"
ELSEWHERE = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
    "distributed_testing_utils": "run_distributed",
}
"""Test modules that the distribution lacks, and the name that its tests import from each."""
TOLERANCE = 1e-5
"""Tolerance for float32, as in transformers' model tests."""


@pytest.fixture(scope="module", autouse=True)
def markers(request: pytest.FixtureRequest) -> None:
    """Register transformers' pytest markers, which would be errors otherwise."""
    for file in (*FOLDER.glob("*.py"), Path(importlib.import_module("transformers.testing_utils").__file__ or "")):
        for name in set(re.findall(r"\bmark\.(\w+)", file.read_text())):
            request.config.addinivalue_line("markers", f"{name}: of transformers")


def own(name: str) -> Any:
    """Import a module of transformers' tests."""
    if PACKAGE not in sys.modules:
        package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
        package.__path__ = [str(FOLDER)]
        for module, attribute in ELSEWHERE.items():
            stand_in = sys.modules[f"{PACKAGE}.{module}"] = ModuleType(module)
            setattr(stand_in, attribute, type(attribute, (), {}))
    return importlib.import_module(f"{PACKAGE}.{name}")


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (3, 11))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_implementations_match_eager(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    common, integration = own("test_modeling_common"), importlib.import_module("glulam.integrations.transformers")
    calls = []

    def forward(experts: Any, *given: Any) -> Any:
        calls.append(experts)
        return integration.experts_forward(experts, *given)

    monkeypatch.setattr(common, "grouped_mm_experts_forward", forward)
    case: Any = TestCase()
    case.all_model_classes = (class_of(name),)
    case.model_tester = SimpleNamespace(prepare_config_and_inputs_for_common=lambda: (config_of(name), inputs()))
    case._prepare_for_class = lambda given, of: given
    common._test_eager_matches_batched_and_grouped_inference(case, dtype, dtype)
    assert calls


def compare_across_ranks(folder: str, name: str) -> None:
    """Run the per-process part of transformers' tests of expert parallelism."""
    importlib.import_module("glulam.integrations.transformers").register()
    rank, tests = torch.distributed.get_rank(), own("test_expert_parallel_mixin")
    for test in (tests._test_ep_forward_impl, tests._test_ep_backward_impl):
        test(rank, folder, class_of(name), TOLERANCE, TOLERANCE, "glulam")


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_experts_across_ranks(name: str, tmp_path: Path) -> None:
    torch.manual_seed(42)
    class_of(name)(config_of(name, num_key_value_heads=2)).save_pretrained(tmp_path, save_original_format=True)
    run_ranks(2, compare_across_ranks, str(tmp_path), name)
