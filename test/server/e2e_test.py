# SPDX-License-Identifier: Apache-2.0
"""llama-server through its HTTP interface, with and without the shim: everything works the same, and a hit changes no answer."""
import json, os, shutil, signal, socket, subprocess
import lab, lora, short_model
from lab import check

ARGS = ["-np", "4", "--kv-unified", "-c", "4096"]


def prompts(server, num, length):
    """Prompts with one head, and each its own end."""
    tokens = lab.prompt_of(server, length + 20 * num)
    return [tokens[:length] + tokens[length + 20 * i:length + 20 * i + 20] for i in range(num)]


def test_same_answers_cold_and_warm(folder):
    store, texts = f"file:{folder}/same", []
    for _ in range(2):
        with lab.Server(folder, store, ARGS) as s:
            all_prompts = prompts(s, 3, 300)
            texts.append([s.ask(p, 24, id_slot=i)["content"] for i, p in enumerate(all_prompts)])
            s.stop()
            stats = s.stats()
    check("same answers cold and warm", texts[0] == texts[1])
    check("warm prompts were loaded", stats["loaded_tokens"] + stats["copied_tokens"] > 850, str(stats["loaded_tokens"]))
    check("only last tokens were computed", stats["computed_tokens"] <= 30, str(stats["computed_tokens"]))


def explained(server):
    """What the log's last line of a prompt says behind its figures, in the server's whole life."""
    return [line.split("; plan: ")[1] for line in server.said() if "; plan: " in line][-1]


def test_what_was_decided_and_why_is_told(folder):
    store, args = f"file:{folder}/told", ["-np", "4", "--kv-unified", "-c", "4096", "--cache-ram", "0"]
    with lab.Server(folder, store, args) as s:
        p, other = lab.prompt_of(s, 300), lab.prompt_of(s, 700)[400:]
        s.ask(p, 4, id_slot=0)
        check("a first prompt is not in the store", explained(s) == "none; not in the store", explained(s))
        s.ask(p[:150] + other[:150], 4, id_slot=1)
        check("the first token that differs is told", "token 150 is the first that differs" in explained(s), explained(s))
        answer = s.ask(p + other[:10], 100, id_slot=0, ignore_eos=True, return_tokens=True)["tokens"]
        s.ask(p + other[:10] + answer[:70] + other[200:280], 4, id_slot=0)
        check("a turn that comes back as other tokens, too", "token 380 is the first that differs" in explained(s), explained(s))
        s.stop()
        stats = s.stats()
    check("and in the numbers", stats["last_prompt"]["explain"] == {"why": "differs", "differs_at": 380},
          str(stats["last_prompt"]))
    check("prompts are counted by plan and by why loading ended", stats["plans"] == {"none": stats["prompts"], "load": 0, "compute": 0, "both": 0}
          and stats["why"] == {"absent": 2}, str((stats["plans"], stats["why"])))
    with lab.Server(folder, store, args) as s:
        s.ask(p, 4, id_slot=0)
        how = explained(s).split()[0]
        check("a prompt that is loaded", how in ("load", "both"), explained(s)) # both: where this machine is so busy that the store is late
        s.stop()
        stats = s.stats()
    run = subprocess.run([lab.KVFERRY, "run", "-m", lab.MODEL, "--store", store, "--raw", "-n", "1", "--json", "-p", "A river"],
                         capture_output=True, text=True, check=True)
    names = set(json.loads(run.stdout))
    told = stats["last_prompt"]
    check("its report has the names of kvferry run --json", set(told) - names == {"sequence", "explain"}
          and set(told["plan"]) == set(json.loads(run.stdout)["plan"]), str(set(told) - names))
    check("and says what happened", (told["plan"]["what"], told["why"], told["explain"], told["plan"]["stored_tokens"]) == (how, "none", None, 299)
          and told["loaded_tokens"] + told["computed_tokens"] == 300, str(told))
    check("times are added up", all(stats[n] > 0 for n in ("lookup_us", "load_us", "import_us")) and stats["plans"][how] == 1, str(stats["plans"]))
    with lab.Server(folder, store, args) as s:
        s.ask(p, 4, id_slot=0)
        subprocess.run([lab.KVFERRY, "clear", "--store", store, "--all", "--yes"], check=True, stdout=subprocess.DEVNULL)
        s.ask(other, 4, id_slot=0)
        s.ask(p, 4, id_slot=0)
        check("what the store has dropped", "no longer in the store" in explained(s), explained(s))
        s.stop()
        check("and in the numbers: evicted", s.stats()["last_prompt"]["explain"] == {"why": "evicted", "differs_at": None})


def test_short_prompts_are_left_as_they_are(folder):
    texts = []
    for store in (None, f"file:{folder}/short"):
        with lab.Server(folder, store, ARGS) as s:
            texts.append([s.ask("The three largest cities of Europe are", 24)["content"],
                          s.chat([{"role": "user", "content": "Name a colour."}])["content"],
                          s.ask("A list:", 12, grammar='root ::= ("- " [a-z]+ "\\n")+')["content"]])
            s.stop()
    check("short prompts, chat and grammar: same answers with the shim and without", texts[0] == texts[1], repr(texts[0][0][:40]))


def test_parallel_streams(folder):
    for store in (None, f"file:{folder}/streams"):
        with lab.Server(folder, store, ARGS) as s:
            jobs = [lambda p=p: s.stream(p, 20, ignore_eos=True) for p in prompts(s, 6, 200)]
            results = lab.parallel(jobs)
            check("6 streams over 4 slots, " + ("plain" if store is None else "with the shim"),
                  all(last["stop"] and last["tokens_predicted"] == 20 and text for _, text, last in results))
            s.stop()
    stats = s.stats()
    check("the head of all was computed about once", stats["computed_tokens"] <= 200 + 64 + 6 * 84, str(stats["computed_tokens"]))


def test_chat_of_several_turns(folder):
    questions = ["Tell me about rivers.", "And about lakes?", "Which of both are larger?", "Thank you. Goodbye?"]
    system = {"role": "system", "content": lab.document()[:700]}
    messages, store = [system], f"file:{folder}/chat"
    with lab.Server(folder, store, ARGS) as s:
        for q in questions:
            messages.append({"role": "user", "content": q})
            messages.append({"role": "assistant", "content": s.chat(messages, 40)["content"]})
        s.stop()
    messages.append({"role": "user", "content": "What was my first question?"})
    with lab.Server(folder, store, ARGS) as s:
        s.chat(messages, 8, id_slot=0)
        s.stop()
        before = s.stats()
    with lab.Server(folder, store, ARGS) as s:
        again = s.chat(messages[:2], 40, id_slot=0)["content"]
        long = s.chat(messages, 8, id_slot=1)["content"]
        s.stop()
        stats = s.stats()
    check("a chat's first answer is the same after a restart", again == messages[2]["content"], repr(again[:40]))
    check("after a restart the head of a long chat is loaded", before["loaded_tokens"] >= 128 and before["saved_blocks"] > 2, str(before["loaded_tokens"]))
    check("and then all of it", stats["loaded_tokens"] + stats["copied_tokens"] >= 400 and stats["computed_tokens"] <= 64 and long != "",
          f"{stats['loaded_tokens']} loaded, {stats['copied_tokens']} copied, {stats['computed_tokens']} computed")


def test_slots_are_saved_and_restored(folder):
    os.makedirs(f"{folder}/slots", exist_ok=True)
    seen = []
    for store in (None, f"file:{folder}/slotstore"):
        with lab.Server(folder, store, [*ARGS, "--slot-save-path", f"{folder}/slots"]) as s:
            p = prompts(s, 1, 150)[0]
            first = s.ask(p, 8, id_slot=1)
            saved = s.post("/slots/1?action=save", {"filename": "a.bin"})
            erased = s.post("/slots/1?action=erase", {})
            restored = s.post("/slots/2?action=restore", {"filename": "a.bin"})
            more = s.ask(p + first.get("tokens", []) + p[10:80], 8, id_slot=2)
            seen.append((saved[0], saved[1]["n_saved"], erased[0], restored[0], restored[1]["n_restored"], more["timings"]["cache_n"],
                         more["timings"]["prompt_n"]))
            s.stop()
    check("slot save, erase, restore as without the shim", seen[0] == seen[1], str(seen))
    check("a restored slot is known and stored from", s.stats()["aside_tokens"]["foreign"] == 0, str(s.stats()["aside_tokens"]))


def test_a_context_shift_hurts_nobody(folder):
    seen = []
    for store in (None, f"file:{folder}/shift"):
        with lab.Server(folder, store, ["-np", "2", "--kv-unified", "-c", "512", "--context-shift", "--keep", "16"]) as s:
            a, b = prompts(s, 2, 130)
            before = s.ask(b, 12, id_slot=1, cache_prompt=True)["content"]
            long = s.ask(a, 420, id_slot=0, ignore_eos=True)
            after = s.ask(b, 12, id_slot=1, cache_prompt=True)["content"]
            seen.append((long["tokens_predicted"], long["truncated"]))
            check("the other slot answers as before the shift", before == after, repr(after[:40]))
            s.stop()
    check("a context shift goes on as without the shim", seen[0] == seen[1] and seen[0][0] == 420, str(seen))


def test_cache_reuse(folder):
    with lab.Server(folder, f"file:{folder}/reuse", [*ARGS, "--cache-reuse", "32"]) as s:
        p = prompts(s, 1, 200)[0]
        s.ask(p, 4, id_slot=0)
        moved = s.ask(p[:20] + p[60:], 4, id_slot=0)
        other = s.ask(p, 4, id_slot=1)
        s.stop()
    check("chunks are moved by --cache-reuse", moved["timings"]["cache_n"] > 100, str(moved["timings"]["cache_n"]))
    check("what was moved is left alone", s.stats()["aside_tokens"]["moved"] > 0 and other["content"] != "")


def begin_stream(server, prompt):
    """A client that asks for a long answer."""
    c = socket.create_connection(("127.0.0.1", server.port))
    body = b'{"prompt": %s, "n_predict": 400, "ignore_eos": true, "stream": true}' % str(prompt).encode()
    c.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return c


def test_an_aborted_request(folder):
    with lab.Server(folder, f"file:{folder}/abort", ARGS) as s:
        p = prompts(s, 2, 300)
        for is_answered in (False, True):
            with begin_stream(s, p[0]) as c:
                if is_answered:
                    c.recv(1)
        check("an aborted request leaves the server well", s.ask(p[1], 8)["tokens_predicted"] == 8)
        check("and its prompt", s.ask(p[0], 8)["tokens_predicted"] == 8)
        s.stop()


def test_adapters(folder):
    """What is stored under one set of adapters is not loaded under another: each answers as it does alone."""
    path, texts, loaded = f"{folder}/lora.gguf", [], []
    lora.write(path, 30, 576)
    for scales in ((1.0, 1.0), (0.0, 1.0, 0.0, 0.5)):
        with lab.Server(folder, f"file:{folder}/lora{scales[0]}", [*ARGS, "--lora", path]) as s:
            p = prompts(s, 1, 200)[0]
            texts.append([s.ask(p, 16, cache_prompt=False, lora=[{"id": 0, "scale": x}])["content"] for x in scales])
            s.stop()
        loaded.append(s.stats()["loaded_tokens"])
    (one, again), (none, with_one, none_again, half) = texts
    check("an adapter changes the answer", none != one and half not in (none, one), repr((none[:20], one[:20], half[:20])))
    check("each set of adapters has blocks of its own", (again, with_one, none_again) == (one, one, none), str(texts))
    check("and they are loaded", all(n >= 200 for n in loaded), str(loaded))


def test_speculation(folder):
    draft = f"{folder}/draft.gguf"
    short_model.shorten(lab.MODEL, draft, 12)
    for name, more in (("a draft model", ["-md", draft, "--spec-type", "draft-simple"]), ("n-grams", ["--spec-type", "ngram-simple"])):
        texts, store = [], f"file:{folder}/draft-{name[:1]}{len(more)}"
        for _ in range(2):
            with lab.Server(folder, store, [*ARGS, *more]) as s:
                p = prompts(s, 1, 250)[0]
                answer = s.ask(p + p[20:120], 48, ignore_eos=True)
                texts.append(answer["content"])
                s.stop()
                stats = s.stats()
        check(f"speculation by {name}: same answer cold and warm", texts[0] == texts[1], repr(texts[0][:40]))
        check("the prompt was loaded", stats["loaded_tokens"] >= 340, f"{stats['loaded_tokens']} loaded; drafted {answer['timings'].get('draft_n', 0)}")
        check("nothing of it was left alone", sum(stats["aside_tokens"].values()) == 0, str(stats["aside_tokens"]))


def streamed(server, body):
    """The pieces of a streamed chat, put together: (content, arguments of the first tool call)"""
    c, content, arguments = server.connect(), "", ""
    c.request("POST", "/v1/chat/completions", json.dumps({"temperature": 0, "seed": 1, "stream": True, **body}),
              {"Content-Type": "application/json"})
    for line in c.getresponse():
        if line.startswith(b"data: {"):
            delta = (json.loads(line[6:]).get("choices") or [{}])[0].get("delta", {})
            content += delta.get("content") or ""
            arguments += "".join(call["function"].get("arguments", "") for call in delta.get("tool_calls", []))
    c.close()
    return content, arguments


def test_tools_and_grammars(folder):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": schema}}
    messages = [{"role": "system", "content": lab.document()[:900]}, {"role": "user", "content": "How is the weather in Paris?"}]
    bodies = [{"messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 80},
              {"messages": messages, "max_tokens": 80, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
              {"messages": messages, "max_tokens": 24, "grammar": 'root ::= "It is " [a-z ]+ "."'}]
    answers = []
    for store in (None, f"file:{folder}/tools", f"file:{folder}/tools"):
        with lab.Server(folder, store, [*ARGS, "--jinja"]) as s:
            answers.append([streamed(s, body) for body in bodies])
            s.stop()
    stats = s.stats()
    check("tools, schemas and grammars: same answers cold and warm", answers[1] == answers[2], str(answers[1:] if answers[1] != answers[2] else ""))
    for which, (call, by_schema, by_grammar) in zip(("plain", "cold", "warm"), answers):
        # The model's template knows no tools: it answers in words, if it likes.
        whole = any(call) and "city" in json.loads(by_schema[0]) and by_grammar[0].startswith("It is ")
        check(f"and they are what was asked for ({which})", whole, str((by_schema, by_grammar)))
    check("the prompt was loaded", stats["loaded_tokens"] >= 200, str(stats["loaded_tokens"]))


def test_slots_that_are_not_unified(folder):
    with lab.Server(folder, f"file:{folder}/split", ["-np", "2", "-c", "1024"]) as s:
        answer = s.ask(prompts(s, 1, 100)[0], 8)
        s.stop()
    check("slots that are not unified work as ever", answer["tokens_predicted"] == 8)
    check("and it is said what to do", any("add --kv-unified" in line for line in s.said()), str(s.said()))


def redis(folder):
    path = shutil.which("redis-server")
    if path is None:
        return None, None
    sock = f"{folder}/redis.sock"
    p = subprocess.Popen([path, "--port", "0", "--unixsocket", sock, "--save", "", "--dir", folder], stdout=subprocess.DEVNULL)
    lab.wait_until("the socket of redis-server", lambda: os.path.exists(sock))
    return p, f"redis+unix://{sock}"


def test_a_store_that_dies(folder):
    server, url = redis(folder)
    if server is None:
        print("skip: no redis-server")
        return
    try:
        with lab.Server(folder, url, ARGS) as s:
            p = prompts(s, 3, 260)
            texts = [s.ask(x, 12, id_slot=0, cache_prompt=False)["content"] for x in p]
            warm = s.ask(p[0], 12, id_slot=0, cache_prompt=False)["content"]
            stream = s.stream(p[1], 100, on_first=server.kill, ignore_eos=True)
            dead = [s.ask(x, 12, id_slot=0, cache_prompt=False)["content"] for x in p]
            check("answers from Redis, and without it, are the same", warm == texts[0] and dead == texts)
            check("a dead store is named", "does not answer" in explained(s), explained(s))
            check("a stream goes on while the store dies", stream[2]["tokens_predicted"] == 100)
            s.stop()
    finally:
        server.kill()
        server.wait()


def test_sigterm_under_load(folder):
    """A server that is asked to end waits for its clients, with the shim or without: they go away a little later."""
    codes, store = [], f"file:{folder}/term"
    for url in (None, store):
        with lab.Server(folder, url, ARGS) as s:
            clients = [begin_stream(s, p) for p in prompts(s, 4, 300)]
            for c in clients:
                c.recv(1)  # of the answer
            s.process.send_signal(signal.SIGTERM)
            lab.wait_until("llama-server takes no more clients", lambda: not s.listens())
            for c in clients:
                c.close()
            try:
                codes.append(s.process.wait(60))
            except subprocess.TimeoutExpired:
                codes.append("does not end")
    check("SIGTERM under load ends it as without the shim", codes[0] == codes[1] != "does not end", str(codes))
    whole = subprocess.run([lab.KVFERRY, "verify", "--store", store], capture_output=True, text=True)
    check("and leaves a store that is whole", whole.returncode == 0, whole.stdout[-200:].strip())


lab.main(globals())
