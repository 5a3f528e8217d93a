# SPDX-License-Identifier: Apache-2.0
"""check-vllm-serve: vLLM's OpenAI server with kvferry, as docs/vllm.md starts it, 16 clients at once, and faults.

Round 1, then round 2 with the same beginnings and other ends, out of the store. In the middle of round 2 Redis is
killed, and a new one, empty, takes its place. Then the server is started anew and round 2 is asked again: it must load.

No request may be lost, and every answer must be that of the same server without kvferry and under the same load: the
same greedy tokens, each with the same log-probability. What is computed beside other requests differs in the last
bits: vllm_lab.differs says what counts as the same. CLIENTS (16), TOKENS (12), SCRATCH, TRACE (a file). Needs
KVF_ENGINES and KVF_HF_MODEL (make setup-engines)."""

import contextlib
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python/test"))
import vllm_lab
from conftest import RedisServer, free_port, until

CLIENTS, ANSWER = int(os.environ.get("CLIENTS", "16")), int(os.environ.get("TOKENS", "12"))
PREFIXES, PREFIX, TAIL = 4, 256, 40  # four texts, a quarter of the clients each
DOCS = Path(__file__).resolve().parent.parent / "docs" / "vllm.md"
# What the command of the docs leaves open: a small engine that starts soon, and few requests at a time, so that a fault
# in the middle of a round meets requests of all kinds.
MORE = ["--host", "127.0.0.1", "--served-model-name", "model", "--max-model-len", "512", "--max-num-seqs", "4",
        "--enforce-eager", "--num-gpu-blocks-override", "200", "--enable-prompt-tokens-details"]  # fmt: skip


def say(text):
    print(text, flush=True)


def documented_command():
    """The command of docs/vllm.md that starts the server."""
    blocks = DOCS.read_text().split("```")[1::2]
    block = next(b for b in blocks if "vllm.entrypoints.openai.api_server" in b)
    command = block[block.index("python -m vllm.entrypoints") :]
    return shlex.split(command.replace("\\\n", " "))


def command_for(url, port):
    """That command, with our model, port and store. Without kvferry if there is no store."""
    words = documented_command()
    words[0] = os.environ["KVF_ENGINES"]
    words[words.index("--model") + 1] = os.environ["KVF_HF_MODEL"]
    at = words.index("--kv-transfer-config")
    config = json.loads(words[at + 1])
    config["kv_connector_extra_config"]["store"] = [url]
    if "TRACE" in os.environ:
        config["kv_connector_extra_config"]["trace"] = os.environ["TRACE"]
    words[at : at + 2] = [words[at], json.dumps(config)] if url else []
    return [*words, *MORE, "--port", str(port)]


class Server:
    """A server in a process group of its own. Used by `with`; a failure shows the end of its log."""

    def __init__(self, folder, name, url):
        self.port, self.log = free_port(), folder / f"{name}.log"
        plugins = folder / "plugins"
        if not plugins.exists():
            vllm_lab.plugin_folder(plugins)
        path = os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **vllm_lab.ENVIRONMENT, "PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"}
        began = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command_for(url, self.port), stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            until(self._is_ready, "the server is ready", 600)
        except BaseException:
            self.__exit__(True)
            raise
        say(f"{name}: started in {time.monotonic() - began:.0f} s")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if error[0] is not None:
            say(self.log.read_text(errors="replace")[-8000:])
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _is_ready(self):
        assert self.process.poll() is None, f"the server has ended: {self.log.read_text(errors='replace')[-8000:]}"
        with contextlib.suppress(OSError):
            return self.request("GET", "/health")[0] == 200
        return False

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, prompt):
        """One answer: its tokens, their log-probabilities, how far each leads, and how much of the prompt was there."""
        status, body = self.request("POST", "/v1/completions", {
            "model": "model", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True,
            "logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True,
        })  # fmt: skip
        assert status == 200, body
        answer = json.loads(body)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length", choice
        best = [sorted(step.values(), reverse=True) for step in choice["logprobs"]["top_logprobs"]]
        return {
            "ids": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "leads": [first - second for first, second, *_ in best],
            "cached": (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        }

    def round(self, prompts, meanwhile=lambda: None):
        """All prompts at once. `meanwhile` is called when the first answer is there. Returns answers and seconds."""
        first = threading.Event()

        def one(prompt):
            try:
                return self.complete(prompt)
            finally:
                first.set()

        began = time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(one, prompt) for prompt in prompts]
            first.wait()
            meanwhile()
            return [answer.result() for answer in answers], time.monotonic() - began

    def reset(self):
        """Drops vLLM's own prefix cache, so that the next round asks the store."""
        assert self.request("POST", "/reset_prefix_cache")[0] == 200

    def counter(self, name):
        """A counter of kvferry on the Prometheus page."""
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:kvferry_{name}_total"))


def prompts_of(number):
    """A prompt for each client. All rounds have the same beginnings; the ends are of this round. Those with the same
    beginning come together, so that some beginnings are not asked for before the fault."""
    tokens = vllm_lab.tokens()
    return [
        tokens[i * PREFIXES // CLIENTS :][:PREFIX] + tokens[at : at + TAIL]
        for i in range(CLIENTS)
        for at in [1000 + (number * CLIENTS + i) * TAIL // 4]
    ]


def without(folder, rounds):
    with Server(folder, "a server without kvferry", None) as server:
        results = []
        for prompts in rounds:
            server.reset()
            results.append(server.round(prompts))
    return results


def kill_and_replace(server):
    server.stop()
    server.start()


def with_faults(folder, store, rounds):
    """Both rounds of the first server."""
    with Server(folder, "a server with kvferry", store.tcp_url) as server:
        first, _ = server.round(rounds[0])
        server.reset()
        second, _ = server.round(rounds[1], lambda: kill_and_replace(store))
        loaded = server.counter("loaded_blocks")
        until(lambda: store.command("DBSIZE") != b":0\r\n", "the new Redis is used")
    return [first, second], loaded


def after_restart(folder, store, prompts):
    with Server(folder, "the server again", store.tcp_url) as server:
        answers, seconds = server.round(prompts)
        return answers, seconds, server.counter("loaded_blocks")


def compare(answers, references):
    return [
        f"request {i}: {how}"
        for i, (answer, reference) in enumerate(zip(answers, references, strict=True))
        if (how := vllm_lab.differs(answer, reference)) is not None
    ]


def main():
    missing = vllm_lab.missing()
    if missing is not None:
        say(f"check-vllm-serve: skipped: {missing}")
        return 77
    rounds = [prompts_of(0), prompts_of(1)]
    with tempfile.TemporaryDirectory(prefix="check-vllm-serve-", dir=os.environ.get("SCRATCH")) as name:
        folder = Path(name)
        references = without(folder, rounds)
        store = RedisServer(folder)
        try:
            answers, loaded = with_faults(folder, store, rounds)
            again, seconds, loaded_again = after_restart(folder, store, rounds[1])
        finally:
            store.stop()
    faults = [
        f"{what}: {how}"
        for what, given, (reference, _) in (
            ("round 1", answers[0], references[0]),
            ("round 2, Redis killed in it", answers[1], references[1]),
            ("round 2 after the restart", again, references[1]),
        )
        for how in compare(given, reference)
    ]
    faults += [] if loaded > 0 else ["round 2 loaded nothing"]
    faults += [] if loaded_again > 0 else ["the round after the restart loaded nothing"]
    for fault in faults:
        say(f"  {fault}")
    cached, of = sum(answer["cached"] for answer in again), sum(map(len, rounds[1]))
    say(
        f"  before the restart {loaded:.0f} blocks were loaded; after it round 2 took {seconds:.1f} s and had {cached} "
        f"of its {of} prompt tokens from the store or a request beside it; {references[1][1]:.1f} s without kvferry"
    )
    say(
        f"check-vllm-serve: {'FAILED' if faults else 'ok'}: {CLIENTS} clients at once, Redis killed, server restarted: "
        f"{3 * CLIENTS - len(faults)} of {3 * CLIENTS} answers as without kvferry, none lost; after the restart "
        f"{loaded_again:.0f} blocks were loaded"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
