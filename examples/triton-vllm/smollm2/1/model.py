# SPDX-License-Identifier: Apache-2.0
"""vLLM in Triton's Python backend, with its KV blocks in a store (docs/triton.md, "vLLM through Triton").

Triton's stub is the process of vLLM's front end. The engine runs in a process of its own, which vLLM starts. All
requests are coroutines of one event loop in one thread, so they join vLLM's batch as they come."""

import asyncio
import json
import locale
import multiprocessing
import os
import subprocess
import threading
import uuid

import numpy
import triton_python_backend_utils as triton

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # Triton's stub has threads, and must not be forked

# Triton's stub leaves the locale at ASCII, and torch reads files in UTF-8 with the encoding of the locale.
locale.setlocale(locale.LC_CTYPE, "C.UTF-8")

TICK_S = 0.5
SAMPLING = ("temperature", "top_k", "top_p", "seed")
INPUTS = ("text_input", "input_ids", "stream", "max_tokens", *SAMPLING)


def engine_args(config):
    """vLLM's arguments from the parameters of config.pbtxt."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
    parameters.pop("EXECUTION_ENV_PATH", None)
    unknown = parameters.keys() - {"model", "store", "engine_args"}
    if unknown or "model" not in parameters:
        raise ValueError(f"the parameters are model, store, engine_args; unknown: {sorted(unknown)}")
    more = json.loads(parameters.get("engine_args", "{}"))
    if "store" in parameters:
        more["kv_transfer_config"] = {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "kvferry.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": parameters["store"].split()},
        }
    return AsyncEngineArgs(model=parameters["model"], **more)


def value(request, name):
    """The input as a Python value, or None. Several values are a list."""
    tensor = triton.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().reshape(-1).tolist()
    return values if name == "input_ids" else values[0]


def prompt_of(inputs):
    text, ids = inputs["text_input"], inputs["input_ids"]
    if (text is None) == (ids is None):
        raise ValueError("the prompt is one of text_input and input_ids")
    return text.decode() if ids is None else {"prompt_token_ids": ids}


def sampling_of(inputs):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    given = {"temperature": 0.0, **{name: inputs[name] for name in SAMPLING if inputs[name] is not None}}
    num = inputs["max_tokens"]
    return SamplingParams(max_tokens=256 if num is None else num, output_kind=RequestOutputKind.DELTA, **given)


def string(name, text):
    return triton.Tensor(name, numpy.array([text.encode()], object))


def numbers(name, values):
    return triton.Tensor(name, numpy.array(values, numpy.int32))


def response(text, ids, last):
    """last: vLLM's last output of the request, or None if there will be more."""
    tensors = [string("text_output", text), numbers("output_ids", ids)]
    if last is not None:
        tensors += [
            string("finish_reason", last.outputs[0].finish_reason),
            numbers("prompt_tokens", [len(last.prompt_token_ids)]),
            numbers("cached_tokens", [last.num_cached_tokens or 0]),
        ]
    return triton.InferenceResponse(tensors)


def failure(error, code):
    return triton.InferenceResponse(error=triton.TritonError(str(error), code))


def end_with_this_process():
    """Ends vLLM's processes when this one is killed: they would stay, with all their memory. Returns the process that
    waits for that."""
    engines = [str(process.pid) for process in multiprocessing.active_children()]
    return subprocess.Popen(["sh", "-c", 'read -r _; kill "$@"', "sh", *engines], stdin=subprocess.PIPE)


class TritonPythonModel:
    """What Triton calls: https://github.com/triton-inference-server/python_backend."""

    def initialize(self, args):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._running = {}  # the sender of each task
        config = json.loads(args["model_config"])
        self._engine = self._call(self._start(config))
        self._watch = end_with_this_process()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self, config):
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(engine_args(config))
        self._ticker = asyncio.create_task(self._tick())
        return engine

    async def _tick(self):
        """Ends the requests whose client has gone."""
        while True:
            for task, sender in list(self._running.items()):
                if sender.is_cancelled():
                    task.cancel()
                await asyncio.sleep(TICK_S)

    def execute(self, requests):
        for request in requests:
            # The memory of the inputs belongs to Triton again when this returns.
            inputs = {name: value(request, name) for name in INPUTS}
            self._loop.call_soon_threadsafe(self._begin, inputs, request.get_response_sender())

    def _begin(self, inputs, sender):
        task = self._loop.create_task(self._serve(inputs, sender))
        self._running[task] = sender
        task.add_done_callback(self._running.pop)

    async def _serve(self, inputs, sender):
        """Answers a request: always one final flag, whatever happens."""
        try:
            await self._answer(inputs, sender)
        except asyncio.CancelledError:
            sender.send(failure("cancelled", triton.TritonError.CANCELLED))
        except ValueError as error:  # vLLM says so of what it can't do, too
            sender.send(failure(error, triton.TritonError.INVALID_ARG))
        except Exception as error:
            sender.send(failure(repr(error), triton.TritonError.INTERNAL))
        finally:
            sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _answer(self, inputs, sender):
        text, ids = "", []
        outputs = self._engine.generate(prompt_of(inputs), sampling_of(inputs), uuid.uuid4().hex)
        async for output in outputs:
            text, ids = text + output.outputs[0].text, ids + list(output.outputs[0].token_ids)
            if output.finished or (inputs["stream"] and ids):
                sender.send(response(text, ids, output if output.finished else None))
                text, ids = "", []

    def finalize(self):
        self._watch.kill()
        self._watch.wait()
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self):
        self._ticker.cancel()
        for task in self._running:
            task.cancel()
        self._engine.shutdown()
