# SPDX-License-Identifier: Apache-2.0
"""llama-server with and without the shim, for tests and checks: start, ask, stop. Standard library only."""
import http.client, json, os, signal, socket, subprocess, sys, tempfile, threading, time

HERE = os.path.dirname(os.path.abspath(__file__))
KVFERRY = os.environ.get("KVFERRY", "")
SERVER = os.environ.get("KVF_LLAMA_SERVER", "")
MODEL = os.environ.get("KVF_MODEL", "")


def need_all():
    for name in ("KVFERRY", "KVF_LLAMA_SERVER", "KVF_MODEL"):
        if not os.path.exists(os.environ.get(name, "")):
            print(f"{name} is not there: run this by make", file=sys.stderr)
            sys.exit(77)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def document():
    with open(os.path.join(HERE, "../../checks/document.txt")) as f:
        return f.read()


class Server:
    """One llama-server. store: a URL, or None for a plain one."""

    def __init__(self, folder, store=None, args=(), model=None, options=(), env=None):
        self.port, self.stats_path = free_port(), os.path.join(folder, f"stats-{time.monotonic_ns()}.json")
        self.log_path = os.path.join(folder, f"server-{time.monotonic_ns()}.log")
        command = [SERVER, "-m", model or MODEL, "--host", "127.0.0.1", "--port", str(self.port), "--no-webui", *args]
        if store is not None:
            command = [KVFERRY, "exec", "--store", store, "--stats", self.stats_path, *options, "--", *command]
        # Threads that spin while they wait for each other make every other process of the machine a disturbance many times its size.
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {}), "OMP_WAIT_POLICY": "passive"})
        for _ in range(1200):
            if self.process.poll() is not None:
                raise RuntimeError("llama-server ended:\n" + self.log()[-3000:])
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError("llama-server does not get ready:\n" + self.log()[-3000:])

    def log(self):
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def said(self):
        return [line for line in self.log().splitlines() if line.startswith("kvferry:")]

    def stats(self):
        """After stop(): the counters of the whole life of the server."""
        with open(self.stats_path) as f:
            return json.load(f)

    def connect(self, timeout=600):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def get(self, path):
        c = self.connect(5)
        c.request("GET", path)
        r = c.getresponse()
        body = r.read()
        c.close()
        return r.status, body

    def post(self, path, body, timeout=600):
        c = self.connect(timeout)
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        text = r.read()
        c.close()
        return r.status, json.loads(text) if text else None

    def ask(self, prompt, n=16, **more):
        status, answer = self.post("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, "seed": 1, **more})
        if status != 200:
            raise RuntimeError(f"{status}: {answer}")
        return answer

    def listens(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), 5).close()
            return True
        except OSError:
            return False

    def stream(self, prompt, n=16, on_first=lambda: None, **more):
        """(seconds to the first token, the text, the last event); on_first is called at the first token"""
        c, text, first, last = self.connect(), "", None, None
        begin = time.monotonic()
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "seed": 1, "stream": True, **more}
        c.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        if r.status != 200:
            raise RuntimeError(f"{r.status}: {r.read()}")
        for line in r:
            if line.startswith(b"data: "):
                last = json.loads(line[6:])
                if first is None and (last.get("tokens") or last.get("content") or last.get("stop")):
                    first = time.monotonic() - begin
                    on_first()
                text += last.get("content", "")
        c.close()
        return first, text, last

    def chat(self, messages, n=16, **more):
        status, answer = self.post("/v1/chat/completions",
                                   {"messages": messages, "max_tokens": n, "temperature": 0, "seed": 1, **more})
        if status != 200:
            raise RuntimeError(f"{status}: {answer}")
        return answer["choices"][0]["message"]

    def stop(self, sig=signal.SIGTERM, wait=60):
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(wait)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError("llama-server does not end:\n" + self.log()[-3000:])

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            sys.stderr.write(self.log()[-4000:])
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def parallel(jobs):
    """Runs them at once; their results in order; the first exception of any."""
    results, errors = [None] * len(jobs), []

    def run(i, job):
        try:
            results[i] = job()
        except Exception as e:  # handed to the caller
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i, job)) for i, job in enumerate(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


def folder():
    return tempfile.TemporaryDirectory(prefix="kvferry-server-")


def prompt_of(server, num_tokens):
    """The document's first tokens, exactly this many, as token ids."""
    tokens = server.post("/tokenize", {"content": document(), "add_special": True})[1]["tokens"]
    while len(tokens) < num_tokens:
        tokens += tokens
    return tokens[:num_tokens]


def check(what, condition, detail=""):
    print(f"{'ok  ' if condition else 'FAIL'} {what} {detail}", flush=True)
    if not condition:
        raise AssertionError(what)


def wait_until(what, condition, seconds=300):
    """Waits for a state. The bound is for a state that never comes, not for a slow machine."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for this: {what}")
        time.sleep(0.02)


def main(names):
    """Runs the functions test_... of a module (its globals()), or those whose names contain an argument. Ends the program."""
    need_all()
    wanted = sys.argv[1:]
    tests = [(n, f) for n, f in names.items() if n.startswith("test_") and (not wanted or any(w in n for w in wanted))]
    failed = 0
    with folder() as top:
        for name, test in tests:
            begin = time.monotonic()
            try:
                test(top)
            except Exception as e:
                failed += 1
                print(f"FAIL {name}: {type(e).__name__}: {e}")
            print(f"     {name}: {time.monotonic() - begin:.1f} s", flush=True)
    print(f"{len(tests) - failed} passed, {failed} failed")
    sys.exit(1 if failed or not tests else 0)
