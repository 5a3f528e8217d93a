# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/python run, in every kind of store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"


def run(name: str, *args: str) -> list[str]:
    words = [sys.executable, str(EXAMPLES / name), *args]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return done.stdout.splitlines()


PROGRAMS = [("engine.py", "array"), ("manager.py", "numpy"), ("prefix_cache.py", "torch")]


@pytest.mark.parametrize(("name", "needs"), PROGRAMS)
def test_help(name, needs):
    pytest.importorskip(needs)
    assert any(line.startswith(f"usage: {name} [URL") for line in run(name, "--help"))


def test_manager(any_url):
    pytest.importorskip("numpy")
    lines = run("manager.py", any_url)
    assert lines[0].endswith("s to live") and 0 < int(lines[0].split()[0]) <= 600
    assert lines[1:] == [
        "loaded (4, 2, 12, 8) float16; the same: True",
        "layer 2 in its place: True",
        "deleted: True",
    ]


def test_engine(any_url):
    (first, kv), (second, same) = run("engine.py", any_url), run("engine.py", any_url)
    assert first.startswith("0 of 1000 tokens loaded")
    assert second.startswith("0 of 1000" if any_url == "mem:" else "960 of 1000")
    assert kv == same
