# SPDX-License-Identifier: Apache-2.0
"""A store holds what a cold run computes, whatever the slot of a server did before: the same record bytes, the same answer."""
import os
import lab
from lab import check

ARGS = ["-np", "2", "--kv-unified", "-c", "4096"]


def records(store):
    """Path below the folder: bytes, but for when it was stored and the check of the header over that."""
    found = {}
    for folder, _, names in os.walk(store):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as f:
                data = f.read()
            if data[:4] == b"KVF2" and data[6] & 1 == 0:  # not the card of the space
                found[os.path.relpath(path, store)] = data[:100] + data[128:]
    return found


def answers(folder, name, prompts):
    """One server, one slot: the texts, and the records that are there afterwards."""
    store = f"{folder}/{name}"
    with lab.Server(folder, f"file:{store}", ARGS) as s:
        texts = [s.ask(p, 24, id_slot=0)["content"] for p in prompts]
        s.stop()
    return texts, records(store)


def test_another_question_before(folder):
    """Both go on from the middle of a block. What the second one makes of that is its answer, and nobody else's."""
    document = lab.document()[:3000]  # more than one batch of 512 tokens
    q0, q = document + "\nQ: What is kvferry?\nA:", document + "\nQ: Which stores?\nA:"
    (alone,), cold = answers(folder, "alone", [q])
    (alone0,), cold0 = answers(folder, "alone0", [q0])
    (first, second), hot = answers(folder, "hot", [q0, q])
    check("the first question's answer is a cold run's", first == alone0)
    strange = [name for name, data in hot.items() if data not in (cold.get(name), cold0.get(name))]
    check("every record of both is one of a cold run", not strange and len(hot) > 4, f"{len(strange)} of {len(hot)} are not; hot: {second!r}, alone: {alone!r}")
    (again,), after = answers(folder, "hot", [q])
    check("after a restart the answer is a cold run's", again == alone, repr(again))
    check("and so is what is stored then", cold.items() <= after.items() and after.items() <= {**cold, **cold0}.items())


def test_a_chat(folder):
    """Turns that follow an answer: whatever is stored of them is what the whole prompt computes."""
    document = lab.document()[:900]
    first = document + "\nQ: What is a river?\nA:"
    with lab.Server(folder, f"file:{folder}/chat", ARGS) as s:
        answer = s.ask(first, 70, id_slot=0, ignore_eos=True, return_tokens=True)
        turn = s.post("/tokenize", {"content": first, "add_special": True})[1]["tokens"] + answer["tokens"]
        turn += s.post("/tokenize", {"content": "\nQ: And a lake?\nA:", "add_special": False})[1]["tokens"]
        s.ask(turn, 24, id_slot=0)
        s.stop()
    chat = records(f"{folder}/chat")
    (alone,), cold = answers(folder, "turn", [turn])
    _, cold_first = answers(folder, "first", [first])
    check("every record of a chat is one of a cold run", chat.items() <= {**cold, **cold_first}.items() and len(chat) > 2, str(len(chat)))
    (again,), _ = answers(folder, "chat", [turn])
    check("the turn has a cold run's answer after a restart", again == alone, repr(again))


lab.main(globals())
