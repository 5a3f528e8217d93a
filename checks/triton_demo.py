#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A real Triton with the backend kvferry and a redis-server: a prompt of 3,000 tokens, the server started anew, the
same prompt.

usage: checks/triton_demo.py [--check] [--tokens N]

Prints the time to the first streamed token of both, and what was loaded. With --check the exit status is 0 only if both
answers are the same tokens, at least 90 % of the prompt was loaded, and the first token came at least 100 times sooner.
With fewer tokens (N, for `make test`) 10 times sooner will do."""

import argparse
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "test/triton"))
import lab
import served

ROOT = pathlib.Path(__file__).resolve().parent.parent
ANSWER = 24


def first_token(triton, text):
    """(seconds to the first token, token ids, the last event)."""
    served.answer(triton, "smollm2", text_input="Hello", max_tokens=2)  # the threads of llama.cpp have started
    began, first, ids = time.monotonic(), None, []
    for event in served.Stream(triton, "smollm2", text_input=text, max_tokens=ANSWER):
        assert "error" not in event, event
        first = first or time.monotonic() - began
        ids += event["output_ids"] if isinstance(event["output_ids"], list) else [event["output_ids"]]
    return first, ids, event


def run(text):
    with (
        lab.folder("demo") as folder,
        lab.Redis(folder, "--maxmemory", "1gb") as redis,
        tempfile.TemporaryDirectory() as repository,
    ):
        served.add_model(repository, "smollm2", store=redis.url, context_size=4096)
        results = []
        for name in ("first server", "second server"):
            with served.start(folder, repository) as triton:
                results.append(first_token(triton, text))
                first, ids, end = results[-1]
                print(
                    f"{name}: prompt {end['prompt_tokens']} tokens, {end['loaded_tokens']} of them loaded, "
                    f"first token after {first:.3f} s",
                    flush=True,
                )
                assert triton.stop() == 0
        return results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tokens", type=int, default=3000)
    args = parser.parse_args()
    served.need_all()
    document = (ROOT / "checks/document.txt").read_text()
    cold, warm = run(document[: args.tokens * 33 // 8])
    ratio, prompt, loaded = cold[0] / warm[0], warm[2]["prompt_tokens"], warm[2]["loaded_tokens"]
    bound = 100 if args.tokens >= 3000 else 10
    same = cold[1] == warm[1]
    holds = same and loaded >= 0.9 * prompt and prompt >= args.tokens and ratio >= bound
    print(
        f"check-triton: {loaded} of {prompt} tokens loaded, first token {ratio:.0f} times sooner (at least {bound}), "
        f"answers are {'the same' if same else 'DIFFERENT'}"
    )
    sys.exit(0 if holds or not args.check else 1)


if __name__ == "__main__":
    main()
