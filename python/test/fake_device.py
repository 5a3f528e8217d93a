# SPDX-License-Identifier: Apache-2.0
"""A device whose streams run as late as they may: stands in for torch.cuda where there is no GPU.

What is called inside `with device.stream(s)` is not done but appended to the stream. A stream runs only when somebody
waits for one of its events, and then only up to that event, and of other streams only what it waits for. So a wait that
is missing shows as wrong bytes, at once and each time, and not once in a thousand runs on a real GPU.

Its memory is the CPU's. It knows the calls of torch that staging.py makes (LATE), and refuses others that write."""

import threading
from collections import deque
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

LATE = {"copy_", "index_select", "index_copy_"}
VIEWS = {"__get__", "__getitem__", "view", "unflatten", "dim", "numel", "element_size", "size", "stride", "flatten"}
MAKES = {"tensor", "empty", "__len__"}
PATIENCE = 3  # an event that is asked this often has happened


class Device:
    """Has the names of a module such as torch.cuda. Any thread may use it."""

    def __init__(self):
        self.lock = threading.RLock()
        self.faults = {}  # by call: how many more fail
        self.compute = self.Stream()
        self.current = threading.local()
        self.may_run = threading.Event()  # clear: whoever waits for an event waits on
        self.may_run.set()

    def Stream(self, device=None):
        return Stream(self)

    def Event(self, blocking=False):
        return Event(self)

    def current_stream(self):
        return getattr(self.current, "stream", self.compute)

    @contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self.current.stream = stream
        try:
            with Late(self, stream):
                yield
        finally:
            self.current.stream = before

    def fail(self, name, times=1):
        self.faults[name] = times

    def must_fail(self, name):
        if self.faults.get(name, 0) == 0:
            return False
        self.faults[name] -= 1
        return True


class Late(TorchFunctionMode):
    def __init__(self, device, stream):
        super().__init__()
        self.device, self.of = device, stream

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__, kwargs or {}
        if name in LATE:
            if self.of is not self.device.compute and self.device.must_fail(name):
                raise RuntimeError(f"fake device: {name} fails")
            if name == "index_select":
                assert "out" in kwargs, "memory of the device is not made on the way"
            with self.device.lock:
                self.of.work.append(Work(lambda: func(*args, **kwargs)))
            return kwargs.get("out", args[0])
        assert name in VIEWS | MAKES, f"the fake device does not know {name}"
        return func(*args, **kwargs)


class Work:
    def __init__(self, do):
        self.do, self.is_done = do, False


class Stream:
    def __init__(self, device):
        self.device, self.work = device, deque()

    def wait_event(self, event):
        """For what the event was recorded after so far; later records of it don't count."""
        mark = event.mark
        if mark is not None:
            self.work.append(Work(lambda: mark[0].run_to(mark[1])))

    def run_to(self, last):
        with self.device.lock, torch.inference_mode():
            while not last.is_done:
                work = self.work.popleft()
                work.do()
                work.is_done = True

    def synchronize(self):
        with self.device.lock:
            while self.work:
                self.run_to(self.work[0])


class Event:
    def __init__(self, device):
        self.device, self.mark, self.asked = device, None, 0

    def record(self, stream=None):
        stream, work = stream or self.device.current_stream(), Work(lambda: None)
        with self.device.lock:
            stream.work.append(work)
            self.mark = (stream, work)

    def synchronize(self):
        assert self.device.may_run.wait(60)
        if self.device.must_fail("synchronize"):
            raise RuntimeError("fake device: synchronize fails")
        if self.mark is not None:
            self.mark[0].run_to(self.mark[1])

    def query(self):
        if self.device.must_fail("query"):
            raise RuntimeError("fake device: query fails")
        with self.device.lock:
            self.asked += 1
            if self.asked >= PATIENCE and self.device.may_run.is_set():
                self.synchronize()
            return self.mark is None or self.mark[1].is_done
