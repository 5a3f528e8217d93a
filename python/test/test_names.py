# SPDX-License-Identifier: Apache-2.0
"""No program of this tree has the name of a package.

Python looks for modules beside the program first: a file triton.py there is what torch finds as `triton`."""

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = (
    "bench",
    "checks",
    "examples/python",
    "python/test",
    "scripts",
    "test/golden",
    "test/llama",
    "test/server",
    "test/triton",
)
# What engines look for without needing it, or what is installed under another name than it is imported by.
OPTIONAL = {"attr", "deepspeed", "flash_attn", "flashinfer", "kvferry", "llama_cpp", "mooncake", "ray", "tensorflow"}
OPTIONAL |= {"torchaudio", "torchvision", "triton", "vllm", "xformers", "yaml", "zmq"}


def programs() -> list[Path]:
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).iterdir())
        if path.suffix == ".py" or has_modules(path)
    ]


def has_modules(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.py"))


def pinned() -> set[str]:
    """The packages of all environments, by the names that setup.sh installs."""
    texts = [path.read_text() for path in (ROOT / "scripts").glob("requirements*.txt")]
    return {name.lower().replace("-", "_") for text in texts for name in re.findall(r"^([\w.-]+)==", text, re.M)}


def importable(python: str) -> set[str]:
    """What this Python can import, apart from what lies in the working directory."""
    code = (
        "import sys; from importlib.metadata import packages_distributions as p; print(*sys.stdlib_module_names, *p())"
    )
    return set(subprocess.run([python, "-I", "-c", code], check=True, capture_output=True, text=True).stdout.split())


def taken() -> set[str]:
    engines = os.environ.get("KVF_ENGINES", "")
    more = importable(engines) if os.access(engines, os.X_OK) else set()
    return pinned() | OPTIONAL | set(sys.stdlib_module_names) | set(packages_distributions()) | more


def test_no_program_is_named_as_a_package() -> None:
    names = taken()
    assert {"torch", "triton", "numpy", "json"} <= names
    found = programs()
    assert len(found) > 50
    clashes = [str(path.relative_to(ROOT)) for path in found if path.stem in names]
    assert not clashes, f"a program beside these imports them instead of the package: {clashes}"


@pytest.mark.parametrize("name", ["triton.py", "vllm.py", "queue.py"])
def test_such_a_name_would_be_found(name: str) -> None:
    assert Path(name).stem in taken()
