# SPDX-License-Identifier: Apache-2.0
"""The backend kvferry in a real Triton: two servers on one store, faults of the store, loading, unloading, signals."""

import os
import subprocess
import sys
import tempfile
import threading

import lab
import served
from served import Stream, add_model, answer, ask, tokens

TEXT = "The capital of France is"


def two_servers():
    """What one server computed the other loads, and a conversation goes on there by its id alone."""
    prompt = tokens(3, 500)
    with lab.folder("two") as folder, lab.Redis(folder) as redis, tempfile.TemporaryDirectory() as repository:
        add_model(repository, "m", store=redis.url, slots=2)
        with served.start(folder, repository) as a:
            first = answer(a, "m", input_ids=prompt, max_tokens=8)
            tea = answer(a, "m", text_input="My name is Ada. Remember it.", session_id="tea", max_tokens=16)
            assert first["loaded_tokens"] == 0 and first["plan"] == "none" and tea["session_stored"], (first, tea)
            with served.start(folder, repository) as b:
                second = answer(b, "m", input_ids=prompt, max_tokens=8)
                assert second["loaded_tokens"] > 0 and second["output_ids"] == first["output_ids"], (first, second)
                more = answer(b, "m", text_input="What is my name?", session_id="tea", max_tokens=16)
                other = answer(b, "m", text_input="What is my name?", session_id="coffee", max_tokens=16)
                assert more["prompt_tokens"] > tea["prompt_tokens"] + 16 > other["prompt_tokens"], (tea, more, other)
                last = answer(a, "m", text_input="Again?", session_id="tea", max_tokens=4)
                assert last["prompt_tokens"] > more["prompt_tokens"] + 16, (more, last)
                run = subprocess.run(
                    [
                        f"{served.BUILD}/kvferry",
                        "run",
                        "-m",
                        served.MODEL,
                        "--store",
                        redis.url,
                        "--chat",
                        "tea",
                        "-p",
                        "And now?",
                        "-n",
                        "4",
                    ],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                assert 'chat "tea", turn 4' in run.stderr, run.stderr
                assert b.stop() == 0
            assert a.stop() == 0


def store_faults():
    """A store that is down, silent, killed or damaged costs nothing but hits."""
    prompt = tokens(4, 400)
    with lab.folder("faults") as folder, lab.Redis(folder) as redis, tempfile.TemporaryDirectory() as repository:
        add_model(repository, "m", store=redis.url, slots=2)
        redis.kill()
        with served.start(folder, repository) as t:
            cold = answer(t, "m", input_ids=prompt, max_tokens=8)["output_ids"]
            status, body = ask(t, "m", text_input=TEXT, session_id="s", max_tokens=4)
            assert status != 200 and "session" in body["error"], body
            redis.start()
            redis.pause()
            stream = iter(Stream(t, "m", text_input="Once upon a time", max_tokens=60))
            next(stream)
            assert answer(t, "m", input_ids=tokens(5, 400), max_tokens=4)["loaded_tokens"] == 0
            assert "finish_reason" in list(stream)[-1]
            redis.resume()
            for _ in range(2):
                assert answer(t, "m", input_ids=prompt, max_tokens=8)["output_ids"] == cold
            assert t.stop() == 0
        redis.command("FLUSHALL")
        with served.start(folder, repository) as t:  # computes and saves
            assert answer(t, "m", input_ids=prompt, max_tokens=8)["output_ids"] == cold
            assert t.stop() == 0
        for key in redis.names():
            if len(redis.value(key)) > 100000:
                redis.command("SETRANGE", key, "5000", "damaged")
        with served.start(folder, repository) as t:
            got = answer(t, "m", input_ids=prompt, max_tokens=8)
            assert got["output_ids"] == cold and got["loaded_tokens"] == 0, got
            killer = threading.Timer(0.05, redis.kill)
            killer.start()
            assert len(answer(t, "m", input_ids=tokens(6, 900), max_tokens=4)["output_ids"]) > 0
            killer.join()
            assert t.stop() == 0


HEAD_BYTES = 128  # of a record: has the time of the save


def records_of(redis, folder, repository, ask):
    """Keys and KV of what a new server has stored when it ends; and what `ask`, which is given the server, returned."""
    redis.command("FLUSHALL")
    with served.start(folder, repository) as t:
        got = ask(t)
        assert t.stop() == 0
    return {key: redis.value(key)[HEAD_BYTES:] for key in redis.names()}, got


def same_bits_whatever_runs():
    """Prompts that are computed while others decode, join and leave are stored with the bytes of one that was alone,
    and their first token is the same. In answers to random tokens the likeliest two are often close: last bits show
    there."""

    def said(t, prompt, max_tokens=8):
        ids = answer(t, "m", input_ids=prompt, max_tokens=max_tokens)["output_ids"]
        return ids if isinstance(ids, list) else [ids]  # as Triton shows a single element

    prompts = [tokens(seed, 330 + 70 * seed) for seed in range(3)]
    with lab.folder("bits") as folder, lab.Redis(folder) as redis, tempfile.TemporaryDirectory() as repository:
        add_model(repository, "m", store=redis.url, slots=4)

        def alone(prompt):
            return records_of(redis, folder, repository, lambda t: said(t, prompt))

        def together(t):
            streams = [Stream(t, "m", text_input=f"{i} Once upon a time", max_tokens=1900) for i in range(2)]
            for stream in streams:
                next(iter(stream))
            firsts = served.in_parallel([lambda p=p: said(t, p, 1) for p in prompts])
            assert t.metric("kvferry_busy_slots", 'model="m"') >= 1
            for stream in streams:
                stream.close()
            served.wait_idle(t, "m")
            # Now nobody else is here: hits, and what the server still holds, give the whole answers of before.
            return firsts, [said(t, p) for p in prompts]

        lone = [alone(prompt) for prompt in prompts]
        stored, (firsts, again) = records_of(redis, folder, repository, together)
        for (records, whole), first, answered in zip(lone, firsts, again, strict=True):
            blocks = {key: value for key, value in records.items() if len(value) > 100000}
            others = [key for key, value in blocks.items() if stored.get(key) != value]
            assert len(blocks) > 4 and not others, (len(blocks), others)
            assert first == whole[:1] and answered == whole, (first, answered, whole)


def unload_and_load():
    """Unloading under load: what runs ends with an answer or a clear error, and the model can be loaded again."""
    with lab.folder("unload") as folder, tempfile.TemporaryDirectory() as repository:
        add_model(repository, "m", "instance_group { kind: KIND_CPU count: 2 }", slots=2, queue=8)
        with served.start(folder, repository, "--model-control-mode=explicit", "--load-model=m") as t:
            for _ in range(2):
                ended = []

                def stream(ended=ended):
                    ended.append(list(Stream(t, "m", text_input="Once upon a time", max_tokens=80)))

                threads = [threading.Thread(target=stream) for _ in range(6)]
                for thread in threads:
                    thread.start()
                lab.wait_until("some run", lambda: t.metric("kvferry_busy_slots", 'model="m"') > 0)
                assert t.post("/v2/repository/models/m/unload", {})[0] == 200
                for thread in threads:
                    thread.join()
                assert len(ended) == 6 and all("finish_reason" in e[-1] or "error" in e[-1] for e in ended), ended
                lab.wait_until("it is unloaded", lambda: t.get("/v2/models/m/ready")[0] != 200)
                assert t.post("/v2/repository/models/m/load", {})[0] == 200
                assert answer(t, "m", text_input=TEXT, max_tokens=4)["text_output"]
            assert t.stop() == 0


def end_under_load():
    """SIGTERM: the server lets answers end, and exits with 0."""
    with lab.folder("term") as folder, lab.Redis(folder) as redis, tempfile.TemporaryDirectory() as repository:
        add_model(repository, "m", store=redis.url, slots=2)
        with served.start(folder, repository) as t:
            ended = []

            def stream(i):
                try:
                    ended.append(list(Stream(t, "m", text_input=f"{i} Once upon a time", max_tokens=100)))
                except (OSError, ValueError) as error:
                    ended.append(error)  # the server is gone

            threads = [threading.Thread(target=stream, args=(i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            lab.wait_until("two run", lambda: t.metric("kvferry_busy_slots", 'model="m"') == 2)
            assert t.stop() == 0, t.log()
            for thread in threads:
                thread.join()
            assert len(ended) == 4


def end_before_an_answer():
    """The exit timeout is over before an answer is: Triton exits with its own error, and no signal ends it."""
    with lab.folder("late") as folder, tempfile.TemporaryDirectory() as repository:
        add_model(repository, "m", context_size=8192, max_tokens=8000)
        with served.start(folder, repository, "--exit-timeout-secs=1") as t:
            busy = Stream(t, "m", text_input="x", stream=False)
            lab.wait_until("it computes", lambda: t.metric("kvferry_generated_tokens_total") > 8)
            assert t.stop() == 1
            assert "Signal (11)" not in t.log() and "Signal (6)" not in t.log(), t.log()[-2000:]
            busy.close()


def bad_configurations():
    """Each is refused at the start, by a message that says what to change."""
    cases = [
        ({"colour": "blue"}, "", 'no parameter "colour"'),
        ({"slots": "many"}, "", '"slots" is a number'),
        ({"slots": 0}, "", '"slots" is a number'),
        ({"kv_type": "f17"}, "", '"kv_type" is one of'),
        ({"portable": "yes"}, "", "true or false"),
        ({"model": "/nothing.gguf"}, "", "not a usable model"),
        ({"model": None}, "", "files *.gguf"),
        ({"model": "/etc/hostname"}, "", "not a usable model"),
        ({"store": "redis://host?nothing=1"}, "", "nothing"),
        ({"store": "ftp://host"}, "", '"store"'),
        ({"secret_file": "/nothing", "store": "mem:"}, "", "/nothing"),
        ({}, "max_batch_size: 4", "max_batch_size must be 0"),
        ({}, 'input [ { name: "image" data_type: TYPE_FP32 dims: [ 1 ] } ]', 'no input "image"'),
        ({}, 'output [ { name: "text_output" data_type: TYPE_FP32 dims: [ 1 ] } ]', "TYPE_STRING"),
    ]
    with lab.folder("config") as folder, tempfile.TemporaryDirectory() as repository:
        for i, (parameters, more, _) in enumerate(cases):
            add_model(repository, f"m{i}", more, **parameters)
        add_model(repository, "good")
        with served.start(folder, repository, "--exit-on-error=false", "--strict-readiness=false") as t:
            index = {e["name"]: e for e in t.post("/v2/repository/index", {})[1]}
            for i, (_, _, message) in enumerate(cases):
                assert index[f"m{i}"]["state"] != "READY" and message in index[f"m{i}"].get("reason", ""), (
                    i,
                    index[f"m{i}"],
                )
            assert answer(t, "good", text_input=TEXT, max_tokens=2)["text_output"]
            assert t.stop() == 0


def warm_up_and_versions():
    """A warm-up request of config.pbtxt runs before the model is ready; two versions serve side by side."""
    warm = """version_policy { all { } }
model_warmup [ { name: "one" inputs {
    key: "text_input" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "text" } } } ]"""
    with lab.folder("warm") as folder, tempfile.TemporaryDirectory() as repository:
        for version in (1, 2):
            add_model(repository, "m", warm, version=version, max_tokens=3)
        os.makedirs(f"{repository}/m/warmup")
        with open(f"{repository}/m/warmup/text", "wb") as f:
            f.write(len(TEXT).to_bytes(4, "little") + TEXT.encode())
        with served.start(folder, repository) as t:
            for version in (1, 2):
                status, body = t.post(f"/v2/models/m/versions/{version}/generate", {"text_input": TEXT})
                assert status == 200 and body["model_version"] == str(version), body
            lab.wait_until(
                "the warm-up is counted", lambda: t.metric("kvferry_prompt_tokens_total", 'version="2"') >= 5
            )
            assert t.stop() == 0


if __name__ == "__main__":
    served.main(
        [
            bad_configurations,
            two_servers,
            store_faults,
            same_bits_whatever_runs,
            unload_and_load,
            end_under_load,
            end_before_an_answer,
            warm_up_and_versions,
        ],
        sys.argv[1:],
    )
