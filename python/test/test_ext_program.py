# SPDX-License-Identifier: Apache-2.0
"""The program `kvferry` inside the package: python -m kvferry."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

from conftest import FIELDS

import kvferry


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvferry", *arguments], capture_output=True, text=True)


def test_version_help_and_usage():
    assert program("--version").stdout == f"kvferry {kvferry.__version__}\n"
    shown = program("--help")
    assert (shown.returncode, shown.stdout.startswith("kvferry: prefill once")) == (0, True)
    verbs = shown.stdout.partition("Verbs:\n")[2]
    assert "\n  doctor " in verbs
    for verb in ("run", "exec", "explain"):  # they need llama.cpp, which the package does not have
        assert f"kvferry {verb} " not in shown.stdout
        assert f"\n  {verb} " not in f"\n{verbs}"
    assert "run, exec and explain need a kvferry that was built with llama.cpp" in verbs
    assert program("doctor", "--help").returncode == 0
    wrong = program("nonsense")
    assert (wrong.returncode, "no verb" in wrong.stderr) == (2, True)


def test_run_says_that_it_is_not_there():
    done = program("run", "-m", "x.gguf", "-p", "x")
    assert (done.returncode, "without llama.cpp" in done.stderr) == (3, True)


def test_it_sees_what_python_has_stored(redis):
    with kvferry.Store(redis.tcp_url) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        space.save(space.chain(range(8)), [b"x" * 100] * 2, tokens=range(8))
        digest = space.digest.hex()
    assert program("doctor", "--store", redis.tcp_url).returncode == 0
    assert digest in json.dumps(json.loads(program("ls", "--store", redis.tcp_url, "--json").stdout))
    assert program("verify", "--store", redis.tcp_url).returncode == 0


def test_interrupts_end_it(own_redis):
    own_redis.pause()
    process = subprocess.Popen([sys.executable, "-m", "kvferry", "ls", "--store", own_redis.tcp_url])
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert process.returncode != 0
    own_redis.resume()
