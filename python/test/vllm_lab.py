# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for tests and checks, each in a process of its own (vllm_driver.py), and prompts for them.

KVF_ENGINES is a Python with vLLM, KVF_HF_MODEL a folder with SmolLM2-135M (make setup-engines)."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TEXT = HERE.parent.parent / "checks" / "document.txt"


def missing() -> str | None:
    """What is not there, or None."""
    python, model = os.environ.get("KVF_ENGINES", ""), os.environ.get("KVF_HF_MODEL", "")
    if not os.path.exists(python) or not os.path.isdir(model):
        return "KVF_ENGINES and KVF_HF_MODEL name no engine and no model (make setup-engines)"
    if subprocess.run(
        [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"]
    ).returncode:
        return "there is no vLLM in the Python that KVF_ENGINES names (make setup-engines)"
    return None


def tokens() -> list[int]:
    """The tokens of a long text, as the model has them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(os.environ["KVF_HF_MODEL"], "tokenizer.json"))
    return list(tokenizer.encode(TEXT.read_text()).ids)


class EngineProcess:
    """An engine. Used by `with`; a failure shows the end of its log."""

    def __init__(self, kvferry: dict[str, Any] | None, **llm: Any) -> None:
        more = {"max_model_len": 2560, "max_num_batched_tokens": 2560, "enable_prefix_caching": True, **llm}
        config = {"model": os.environ["KVF_HF_MODEL"], "llm": more, "kvferry": kvferry}
        self.log = tempfile.NamedTemporaryFile("a+", prefix="vllm-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [os.environ["KVF_ENGINES"], str(HERE / "vllm_driver.py"), json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        self.seconds = self._read()["ready"]

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            print(self.text()[-8000:], file=sys.stderr)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)
        self.log.close()

    def text(self) -> str:
        """The log so far."""
        return Path(self.log.name).read_text(errors="replace")

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
            self.log.write(line)  # vLLM logs to stdout
            self.log.flush()
        raise RuntimeError(f"the engine has died:\n{self.text()[-8000:]}")

    def do(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()

    def run(self, *prompts: list[int], num: int = 1, salt: str | None = None) -> Any:
        """Generates `num` tokens for each prompt, all at once. One result for each; a single one is not a list."""
        results = self.do(do="run", prompts=prompts, max_tokens=num, salt=salt)
        return results[0] if len(prompts) == 1 else results

    def reset(self) -> None:
        """Drops vLLM's own prefix cache."""
        assert self.do(do="reset") is True


def events(trace: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a trace of one kind."""
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [e for e in map(json.loads, lines) if e["event"] == event]
