#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check-triton-vllm: examples/triton-vllm in a real Triton, vLLM on the CPU, and a Redis; the server is started anew.

The first server computes a prompt of TOKENS (1000) tokens, and answers plain and streamed, to wrong input with an
error, and after a client that went away. The second one loads all whole blocks of the prompt from Redis, and its answer
has the same greedy tokens. Then it is killed, and vLLM ends with it.
Needs KVF_TRITON, KVF_ENGINES and KVF_HF_MODEL (make setup-engines setup-triton)."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test/triton"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python/test"))
import lab
import numpy
import served
import vllm_lab

ROOT = Path(__file__).resolve().parent.parent
TOKENS, BLOCK, ANSWER = int(os.environ.get("TOKENS", "1000")), 32, 12
NAME = "smollm2"
ENGINE = {"dtype": "float32", "block_size": BLOCK, "max_model_len": 2560, "enforce_eager": True, "max_num_seqs": 8}


def say(text):
    print(text, flush=True)


def make_environment(folder):
    """A virtual environment with the packages of KVF_ENGINES and the kvferry of the build, since Triton's stub
    does not read PYTHONPATH; and a NumPy 1, since it knows no other."""
    environment = Path(folder, "environment")
    engines = os.environ["KVF_ENGINES"]
    subprocess.run([engines, "-m", "venv", "--without-pip", environment], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        for python in (engines, environment / "bin/python")
    )
    Path(ours, "kvferry-of-the-build.pth").write_text(f"{theirs}\n{lab.BUILD}/python\n")
    assert numpy.__version__.startswith("1."), "Triton's stub needs NumPy 1 (make setup-triton)"
    for part in Path(numpy.__file__).parent.parent.glob("numpy*"):  # before vLLM's NumPy 2
        Path(ours, part.name).symlink_to(part)
    return environment


def make_repository(folder, store):
    """The example, with this machine's paths in its parameters."""
    repository = Path(folder, "models")
    shutil.copytree(ROOT / "examples/triton-vllm", repository)
    config = repository / NAME / "config.pbtxt"
    text = config.read_text()
    for name, value in {
        "EXECUTION_ENV_PATH": str(make_environment(folder)),
        "model": os.environ["KVF_HF_MODEL"],
        "store": store,
        "engine_args": json.dumps(ENGINE),
    }.items():
        literal = json.dumps(value)
        text, num = re.subn(
            rf'(key: "{name}" value {{ string_value: )"(?:[^"\\]|\\.)*"', lambda m, new=literal: m.group(1) + new, text
        )
        assert num == 1, f"{config}: {num} parameters {name}"
    config.write_text(text)
    return repository


@contextlib.contextmanager
def serve(folder, repository, *, killed=False):
    """A Triton whose vLLM has computed its first tokens: they are slow. killed: it has no orderly end."""
    began = time.monotonic()
    options = [f"--backend-directory={lab.TRITON}/backends", "--backend-config=python,stub-timeout-seconds=900"]
    with lab.Triton(folder, repository, options, env=vllm_lab.ENVIRONMENT, ready=False) as triton:
        lab.wait_until("Triton has started vLLM", triton.is_ready, seconds=served.PATIENCE_S)
        lab.wait_until("the metrics answer", lambda: served.has_metrics(triton))
        say(f"a Triton with vLLM: started in {time.monotonic() - began:.0f} s")
        for _ in range(2):
            served.answer(triton, NAME, text_input="Hello, who are you?", max_tokens=2)
        yield triton
        if killed:
            triton.process.kill()
        else:
            code = triton.stop()
            assert code == 0, f"tritonserver ended with {code}"
        lab.wait_until("vLLM has ended with Triton", lambda: not processes_of(folder))


def processes_of(folder):
    """Those of vLLM: their Python is that of the environment in the folder."""
    return [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if f"{folder}/environment" in read(path)
    ]


def read(path):
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return path.read_text(errors="replace")
    return ""


def many(value):
    return value if isinstance(value, list) else [value]


def stream(triton, prompt):
    """(seconds to the first token, text, tokens, the last event, number of events)."""
    began, first, text, ids, num = time.monotonic(), None, "", [], 0
    for event in served.Stream(triton, NAME, text_input=prompt, max_tokens=ANSWER):
        assert "error" not in event, event
        first = first or time.monotonic() - began
        text, ids, num = text + event["text_output"], ids + many(event["output_ids"]), num + 1
    assert num > ANSWER // 2, f"a stream of {num} events"
    say(f"  first token after {first:.3f} s, {event['cached_tokens']} of {event['prompt_tokens']} tokens cached")
    return first, text, ids, event


def refuses(triton):
    """Wrong input has an error that says what is wrong, and the server goes on."""
    for inputs, reason in (
        ({}, "text_input and input_ids"),
        ({"text_input": "x", "input_ids": [1, 2]}, "text_input and input_ids"),
        ({"text_input": "x", "max_tokens": -1}, "max_tokens"),
        ({"text_input": "x", "top_p": 2.0}, "top_p"),
        ({"input_ids": [1] * 4000}, "2560"),
        ({"input_ids": [10**6]}, "vocab"),
    ):
        status, body = served.ask(triton, NAME, **inputs)
        assert status >= 400 and reason in body["error"], (inputs, status, body)


def goes_away(triton):
    """A client that leaves in the middle: its request ends, and the server goes on."""

    def ended():
        return triton.metric("nv_inference_request_success")  # Triton counts what is cancelled as a success, too

    before = ended()
    leaver = served.Stream(triton, NAME, text_input="Once upon a time", max_tokens=2400)
    next(iter(leaver))
    leaver.close()
    lab.wait_until("the request has ended", lambda: ended() > before, seconds=served.PATIENCE_S)
    served.answer(triton, NAME, text_input="Once upon a time", max_tokens=2)


def first_server(folder, repository, redis, prompt):
    with serve(folder, repository) as triton:
        cold = stream(triton, prompt)
        again = served.answer(triton, NAME, text_input=prompt, max_tokens=ANSWER)
        assert again["text_output"], again
        whole = (cold[3]["prompt_tokens"] - 1) // BLOCK
        lab.wait_until("the blocks are stored", lambda: int(redis.command("DBSIZE")[1:]) >= whole)
        refuses(triton)
        goes_away(triton)
    return cold, again, whole * BLOCK


def second_server(folder, repository, prompt):
    with serve(folder, repository, killed=True) as triton:
        warm = stream(triton, prompt)
        return warm, warm[3]["cached_tokens"]  # a fresh vLLM has nothing of the prompt in its own cache


def main():
    lab.need_all()
    missing = vllm_lab.missing()
    if missing is not None:
        say(f"check-triton-vllm: skipped: {missing}")
        return 77
    prompt = vllm_lab.TEXT.read_text()[: TOKENS * 33 // 8]
    with lab.folder("triton-vllm") as folder, lab.Redis(folder, "--maxmemory", "1gb") as redis:
        repository = make_repository(folder, redis.url)
        cold, again, whole = first_server(folder, repository, redis, prompt)
        warm, loaded = second_server(folder, repository, prompt)
    faults = [
        what
        for wrong, what in (
            (loaded != whole, f"{loaded} of {whole} tokens were loaded"),
            (warm[2] != again["output_ids"], "other tokens than from vLLM's own cache"),
            (warm[2] != cold[2] or warm[1] != cold[1], "other tokens than those of the first server"),
        )
        if wrong
    ]
    verdict = "FAILED: " + "; ".join(faults) if faults else "ok: the same tokens"
    say(
        f"check-triton-vllm: {verdict}: a restarted Triton loaded {loaded} of {cold[3]['prompt_tokens']} tokens, "
        f"first token {cold[0] / warm[0]:.1f} times sooner"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
