# SPDX-License-Identifier: Apache-2.0
"""The backend kvferry in a real Triton: answers, streams, sessions, limits and bad input."""

import json
import queue
import socket
import sys
import tempfile
import threading

import lab
import numpy
import served
import tritonclient.grpc as grpc
from served import Stream, add_model, answer, ask, tokens

TEXT = "The capital of France is"


def plain_and_streamed(t):
    one = answer(t, "m", text_input=TEXT, max_tokens=24)
    assert one["finish_reason"] == "length" and one["prompt_tokens"] == 5 and len(one["output_ids"]) == 24, one
    events = list(Stream(t, "m", text_input=TEXT, max_tokens=24))
    assert "".join(e["text_output"] for e in events) == one["text_output"], events
    ids = [i for e in events for i in (e["output_ids"] if isinstance(e["output_ids"], list) else [e["output_ids"]])]
    assert ids == one["output_ids"]
    assert len(events) > 12 and [("finish_reason" in e) for e in events] == [False] * (len(events) - 1) + [True]
    assert answer(t, "plain", text_input=TEXT, max_tokens=24)["output_ids"] == one["output_ids"]
    assert answer(t, "m", text_input=TEXT, max_tokens=0)["text_output"] == ""
    again = answer(t, "m", text_input=TEXT, max_tokens=24)
    assert again["output_ids"] == one["output_ids"] and again["loaded_tokens"] == 0, again


def characters_and_stop_strings(t):
    whole = answer(t, "m", text_input="Emoji: 🙂🙃🙂🙃🙂🙃", max_tokens=30)["text_output"]
    events = list(Stream(t, "m", text_input="Emoji: 🙂🙃🙂🙃🙂🙃", max_tokens=30))
    assert "".join(e["text_output"] for e in events) == whole
    text = answer(t, "m", text_input=TEXT, max_tokens=24)["text_output"]
    for stop in (text[3:9], text[5:6], text[10:22]):
        cut = text[: text.index(stop)]
        got = answer(t, "m", text_input=TEXT, max_tokens=24, stop=["@@never@@", stop])
        assert got["text_output"] == cut and got["finish_reason"] == "stop", (stop, got, cut)
        pieces = [e["text_output"] for e in Stream(t, "m", text_input=TEXT, max_tokens=24, stop=[stop])]
        assert "".join(pieces) == cut, (stop, pieces)


def sampling(t):
    def said(**more):
        return answer(t, "m", text_input="Once upon a time", max_tokens=16, **more)["output_ids"]

    assert said(temperature=0.9, seed=7) == said(temperature=0.9, seed=7)
    assert len({tuple(said(temperature=1.5, seed=i)) for i in range(4)}) > 1
    assert said(temperature=1.0, top_k=1, seed=3) == said()
    assert said(temperature=1.0, top_p=0.000001, seed=3) == said()
    assert said(temperature=1.0, min_p=1.0, seed=3) == said()


def messages(t):
    chat = json.dumps([{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say hi"}])
    got = answer(t, "m", messages=chat, max_tokens=40)
    assert got["prompt_tokens"] > 12 and got["text_output"], got


def tensor(name, array, kind):
    out = grpc.InferInput(name, array.shape, kind)
    out.set_data_from_numpy(array)
    return out


def text_tensor(text):
    return tensor("text_input", numpy.array([text], dtype=object), "BYTES")


def stream_by_grpc(t, model, inputs, **more):
    """The responses of a gRPC stream: the last has the final flag's outputs, or there is an error."""
    results = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{t.grpc}") as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer(model, inputs, **more)
        while True:
            result, error = results.get(timeout=600)
            if error is not None:
                raise error
            yield result
            if result.as_numpy("finish_reason") is not None:
                break
        client.stop_stream()


def grpc_stream(t):
    inputs = [
        text_tensor(TEXT.encode()),
        tensor("stream", numpy.array([True]), "BOOL"),
        tensor("max_tokens", numpy.array([12], numpy.int32), "INT32"),
    ]
    text = b"".join(r.as_numpy("text_output")[0] for r in stream_by_grpc(t, "m", inputs))
    assert text.decode() == answer(t, "m", text_input=TEXT, max_tokens=12)["text_output"]


def shared_prefix(t):
    """Eight clients at once: each is answered, and what they share is computed once."""
    shared = tokens(1, 600)
    answer(t, "m", input_ids=shared, max_tokens=1)
    computed = t.metric("kvferry_computed_tokens_total", 'model="m"')
    got = served.in_parallel(
        [lambda i=i: answer(t, "m", input_ids=shared + [50 + i] * 20, max_tokens=12) for i in range(8)]
    )
    assert all(len(g["output_ids"]) == 12 or g["finish_reason"] == "stop" for g in got)
    served.wait_idle(t, "m")
    lab.wait_until("the metrics have it", lambda: t.metric("kvferry_prompt_tokens_total", 'model="m"') >= 600 + 8 * 620)
    more = t.metric("kvferry_computed_tokens_total", 'model="m"') - computed
    assert more < 8 * (620 - 500), more


def cancelled(t):
    """A client that goes away frees its slot, also while its prompt is computed or it waits."""
    streams = []
    for i in range(6):
        streams.append(Stream(t, "m", text_input=f"{i} Once upon a time", max_tokens=1900))
        if i < 3:
            next(iter(streams[i]))
    lab.wait_until("three wait", lambda: t.metric("kvferry_queued_requests", 'model="m"') == 3)
    for s in streams:
        s.close()
    served.wait_idle(t, "m")
    with grpc.InferenceServerClient(f"127.0.0.1:{t.grpc}") as client:
        ids = tensor("input_ids", numpy.array(tokens(77, 1800), dtype=numpy.int32), "INT32")
        got = queue.Queue()
        call = client.async_infer("plain", [ids], lambda result, error: got.put(error))
        lab.wait_until("it runs", lambda: t.metric("kvferry_busy_slots", 'model="plain"') == 1)
        call.cancel()
        assert "ancel" in str(got.get(timeout=120))
    served.wait_idle(t, "plain")
    assert answer(t, "m", text_input=TEXT, max_tokens=4)["text_output"]


def full_queue(t):
    """One slot and one place: of six at once some are answered, the others refused clearly."""
    got = served.in_parallel([lambda i=i: ask(t, "small", text_input=f"{i} x", max_tokens=60) for i in range(6)])
    statuses = sorted(status for status, _ in got)
    assert statuses[0] == 200 and statuses[-1] != 200, statuses
    assert all("try again later" in body["error"] for status, body in got if status != 200), got
    patient = served.in_parallel([lambda i=i: ask(t, "patient", text_input=f"{i} x", max_tokens=20) for i in range(6)])
    assert [status for status, _ in patient] == [200] * 6, patient


def priorities(t):
    """Triton's own scheduler orders what waits: a request of the first level passes those of the second."""
    busy = Stream(t, "ranked", text_input="Once upon a time", max_tokens=150)
    next(iter(busy))
    ended, threads = [], []

    def client(name, priority):
        list(stream_by_grpc(t, "ranked", [text_tensor(name.encode())], priority=priority))
        ended.append(name)

    def pending():
        return t.metric("nv_inference_pending_request_count", 'model="ranked"')

    for i, (name, priority) in enumerate((("low 1", 2), ("low 2", 2), ("low 3", 2), ("high", 1))):
        threads.append(threading.Thread(target=client, args=(name, priority)))
        threads[-1].start()
        lab.wait_until("it waits", lambda i=i: pending() >= i)  # the first one is with the backend
    for thread in threads:
        thread.join()
    busy.close()
    assert ended.index("high") < ended.index("low 3"), ended


def timeout(t):
    busy = Stream(t, "small", text_input="Once upon a time", max_tokens=1000)
    next(iter(busy))
    try:
        list(stream_by_grpc(t, "small", [text_tensor(b"Once")], timeout=1000))
        raise AssertionError("it did not wait for the slot")
    except grpc.InferenceServerException as error:
        assert "longer than its timeout" in str(error), error
    busy.close()
    served.wait_idle(t, "small")


def bad_input(t):
    """Whatever a client sends ends in an error that names it, and the next request is answered."""
    cases = [
        ({}, "exactly one of"),
        ({"text_input": TEXT, "input_ids": [1]}, "exactly one of"),
        ({"text_input": ""}, "empty"),
        ({"messages": "["}, "not JSON"),
        ({"messages": "{}"}, "not an array"),
        ({"messages": "[]"}, "not an array"),
        ({"messages": '[{"role":"user"}]'}, "each message"),
        ({"messages": '[{"role":"user","content":1}]'}, "each message"),
        ({"input_ids": [1, -1]}, "element 1 is -1"),
        ({"input_ids": [1, 10**6]}, "the vocabulary"),
        ({"text_input": TEXT, "max_tokens": -1}, "0 or more"),
        ({"text_input": TEXT, "temperature": -0.1}, "at least 0"),
        ({"text_input": TEXT, "top_p": 0.0}, "above 0"),
        ({"text_input": TEXT, "top_p": 1.5}, "at most 1"),
        ({"text_input": TEXT, "min_p": 2.0}, "at most 1"),
        ({"text_input": TEXT, "top_k": -5}, "0 or more"),
        ({"text_input": TEXT, "stop": [""]}, "1 to 256"),
        ({"text_input": TEXT, "stop": ["x" * 300]}, "1 to 256"),
        ({"text_input": TEXT, "stop": ["x"] * 17}, "at most 16"),
        ({"text_input": TEXT, "session_id": "x" * 600}, "bytes"),
        ({"text_input": TEXT, "session_id": "a\0b"}, "zero"),
        ({"input_ids": [1], "session_id": "s"}, "text_input"),
        ({"text_input": TEXT, "tenant": "other"}, "no tenant"),
        ({"input_ids": tokens(5, 2048)}, "leaves no room"),
        ({"text_input": "word " * 3000}, "leaves no room"),
        ({"text_input": "x" * 10_000_000}, "can hold"),
        ({"text_input": 5}, ""),
        ({"text_input": [TEXT, TEXT]}, ""),
        ({"text_input": TEXT, "max_tokens": "x"}, ""),
        ({"text_input": TEXT, "max_tokens": [1, 2]}, ""),
        ({"text_input": TEXT, "temperature": [0.1, 0.2]}, ""),
    ]
    for inputs, message in cases:
        status, body = ask(t, "m", **inputs)
        assert 400 <= status <= 500 and message in body["error"], (str(inputs)[:100], status, body)
    assert ask(t, "plain", text_input=TEXT, stream=True)[0] == 400
    assert "store" in ask(t, "plain", text_input=TEXT, session_id="s")[1]["error"]
    with grpc.InferenceServerClient(f"127.0.0.1:{t.grpc}") as client:
        for bad in (b"abc\xff", b"\xed\xa0\x80", b"\xc3"):
            try:
                client.infer("plain", [text_tensor(bad)])
                raise AssertionError(bad)
            except grpc.InferenceServerException as error:
                assert "UTF-8" in str(error), error
        for name, array in (
            ("input_ids", numpy.zeros(0, numpy.int32)),
            ("input_ids", numpy.zeros(3, numpy.int64)),
            ("seed", numpy.zeros(1, numpy.int32)),
            ("nothing", numpy.zeros(1, numpy.int32)),
        ):
            try:
                client.infer("plain", [tensor(name, array, array.dtype.name.upper())])
                raise AssertionError(name)
            except grpc.InferenceServerException:
                pass
    assert answer(t, "m", text_input=TEXT, max_tokens=4)["text_output"]


def broken_http(t):
    """Requests that end in the middle."""
    for text in (
        b'POST /v2/models/m/generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"text',
        b"\0" * 100,
        b"POST /v2/models/m/infer HTTP/1.1\r\nInference-Header-Content-Length: 9999999\r\nContent-Length: 2\r\n\r\n{}",
    ):
        with socket.create_connection(("127.0.0.1", t.http)) as s:
            s.sendall(text)
    assert answer(t, "m", text_input=TEXT, max_tokens=4)["text_output"]


def metrics(t):
    got = answer(t, "m", input_ids=tokens(9, 200), max_tokens=3)
    assert got["prompt_tokens"] == 200
    lab.wait_until("tokens are counted", lambda: t.metric("kvferry_computed_tokens_total", 'model="m"') >= 199)
    lab.wait_until("and those of answers", lambda: t.metric("kvferry_generated_tokens_total", 'model="m"') > 0)
    assert 0 <= t.metric("kvferry_hit_ratio", 'model="m"') <= 1
    assert t.metric("nv_inference_request_success", 'model="m"') > 0


PARTS = (
    plain_and_streamed,
    characters_and_stop_strings,
    sampling,
    messages,
    grpc_stream,
    shared_prefix,
    cancelled,
    full_queue,
    priorities,
    timeout,
    bad_input,
    broken_http,
    metrics,
)


def all_on_one_server():
    with lab.folder("backend") as folder, lab.Redis(folder) as redis, tempfile.TemporaryDirectory() as repository:
        add_model(repository, "m", store=redis.url, slots=3)
        add_model(repository, "plain", "model_transaction_policy { decoupled: false }", slots=2)
        add_model(repository, "small", slots=1, queue=1)
        add_model(repository, "patient", slots=1, queue=0, when_full="wait")
        add_model(
            repository,
            "ranked",
            "dynamic_batching { priority_levels: 2 default_priority_level: 2 }",
            slots=1,
            queue=0,
            when_full="wait",
            max_tokens=8,
        )
        with served.start(folder, repository) as t:
            for part in PARTS:
                if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
                    part(t)
                    print("  ", part.__name__, flush=True)
            assert t.stop() == 0


if __name__ == "__main__":
    served.main([all_on_one_server])
