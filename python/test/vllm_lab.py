# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for tests and checks, each in a process of its own (vllm_driver.py), and prompts for them.

KVF_ENGINES is a Python with vLLM, KVF_HF_MODEL a folder with SmolLM2-135M (make setup-engines)."""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",  # a step may take minutes on a machine that is very busy
    "OMP_WAIT_POLICY": "passive",  # threads that wait leave the core to others, on a busy machine too
}
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


def path_with(folder: str) -> str:
    """PYTHONPATH with this folder first."""
    return os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))


TIE = 1e-3


def differs(answer: dict[str, Any], reference: dict[str, Any]) -> str | None:
    """How an answer is another one than that of an engine without kvferry, or None.

    Both have "ids" and "logprobs" of their tokens, and the reference "leads": how far its tokens are before the second
    best. What is computed beside a request changes its last bits (1e-5), so log-probabilities may differ by TIE; and a
    token that leads by no more may be the other one: what follows is then not compared."""
    for i, (mine, its, lead) in enumerate(zip(answer["ids"], reference["ids"], reference["leads"], strict=True)):
        if mine != its:
            return None if lead < TIE else f"token {i} is {mine} and not {its}, which leads by {lead:.3f}"
        if abs(answer["logprobs"][i] - reference["logprobs"][i]) > TIE:
            return f"log-probability {i} is {answer['logprobs'][i]:.4f} and not {reference['logprobs'][i]:.4f}"
    return None


def plugin_folder(folder: Path) -> Path:
    """A folder for PYTHONPATH with what an installed kvferry tells vLLM: its entry points. vLLM then knows the short
    name of the connector."""
    project = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["vllm.general_plugins"].items()]
    info = folder / "kvferry-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]) + "\n")
    return folder


class EngineProcess:
    """An engine. Used by `with`; a failure shows the end of its log."""

    def __init__(self, kvferry: dict[str, Any] | None, *, vllm: str = "", **llm: Any) -> None:
        """vllm: a folder with another version of vLLM than the Python has."""
        more = {"max_model_len": 2560, "max_num_batched_tokens": 2560, "enable_prefix_caching": True, **llm}
        config = {"model": os.environ["KVF_HF_MODEL"], "llm": more, "kvferry": kvferry}
        self.block = more.get("block_size", 32)
        self.log = tempfile.NamedTemporaryFile("a+", prefix="vllm-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [os.environ["KVF_ENGINES"], str(HERE / "vllm_driver.py"), json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path_with(vllm)},
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

    def run(self, *prompts: list[int], num: int = 1, salt: str | None = None, lora: str | None = None) -> Any:
        """Generates `num` tokens for each prompt, all at once. One result for each; a single one is not a list."""
        results = self.do(do="run", prompts=prompts, max_tokens=num, salt=salt, lora=lora)
        return results[0] if len(prompts) == 1 else results

    def reset(self) -> None:
        """Drops vLLM's own prefix cache."""
        assert self.do(do="reset") is True


def events(trace: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a trace of one kind."""
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [e for e in map(json.loads, lines) if e["event"] == event]


class Events:
    """The KV events that an engine publishes: the hashes of stored blocks, by medium. Used by `with`."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._socket.connect(endpoint)  # zmq connects as soon as the engine is there
        self._stored: dict[str, list[Any]] = {}

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close(0)

    def until(self, is_enough: Callable[[dict[str, list[Any]]], bool]) -> dict[str, list[Any]]:
        """Waits for events until there are enough, at most two minutes for the next one."""
        from msgspec.msgpack import Decoder
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        while not is_enough(self._stored):
            assert self._socket.poll(120_000), f"no more events; so far {self._stored}"
            batch = Decoder(KVEventBatch).decode(self._socket.recv_multipart()[-1])
            for event in batch.events:
                if isinstance(event, BlockStored):
                    self._stored.setdefault(str(event.medium), []).extend(event.block_hashes)
        return self._stored
