"""Our top-level ``kernels`` shares its name with a package that transformers looks for."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import setuptools

ROOT = Path(__file__).parents[2]

IMPORT_ALONE = """
import sys
import kernels
print(hasattr(kernels, "__version__"), sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""

BUILD_LLAMA = """
import kernels, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, vocab_size=32)
logits = LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits
print(kernels.__file__, tuple(logits.shape))
"""


def run_python(code: str) -> str:
    """Run code in a fresh interpreter that finds our packages first, as one started in this folder does."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_kernels_does_no_work_and_shows_no_version() -> None:
    assert run_python(IMPORT_ALONE) == "False []"


def test_transformers_builds_and_runs_a_model_beside_our_kernels() -> None:
    assert run_python(BUILD_LLAMA) == f"{ROOT / 'kernels' / '__init__.py'} (1, 3, 32)"


def test_the_stand_ins_for_a_card_are_not_installed_and_no_code_of_ours_asks_for_them() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = setuptools.find_packages(str(ROOT), **settings["find"])
    assert {"kernels", "engine_core.model", "server.doctor"} <= set(found)
    assert not [name for name in found if name.startswith("kernels.testing")]
    folders = [ROOT / name for name in ("server", "engine_core", "kernels")]
    asking = [
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if "testing" not in path.parts and "kernels.testing" in path.read_text(encoding="utf-8")
    ]
    assert asking == []
