#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The test vectors of docs/record-format.md, computed from the document alone: hashlib, struct, and nothing of kvferry.

    vectors.py           checks vectors.txt and record-v2.bin beside it; XXH3 too where the package xxhash is installed
    vectors.py --write   writes them anew (needs xxhash); only a new version of the format may change them
"""
import hashlib
import hmac
import pathlib
import struct
import sys

HERE = pathlib.Path(__file__).parent
SECRET = b"a tenant's secret"
FIELDS = {"engine": "test 1", "model": "sha256:0123", "kv": "f16 LHTD", "tenant": "acme \u00e9", "block_tokens": "16"}
TOKENS = [(i * 2654435761 + 7) % 2**32 for i in range(40)]  # two whole blocks of 16, and a rest
PAYLOAD = bytes((i * 31 + 7) % 256 for i in range(1000))
STORED = 1700000000


def h(data, secret):
    return hmac.new(secret, data, hashlib.sha256).digest() if secret else hashlib.sha256(data).digest()


def le32(*numbers):
    return struct.pack("<%dI" % len(numbers), *numbers)


def digest(fields, secret):
    data = b"kvf1 space\0"
    for name in sorted(fields):
        for text in (name.encode(), fields[name].encode()):
            data += le32(len(text)) + text
    return h(data, secret)


def chain(space, tokens, step, secret):
    link = h(b"kvf1 chain" + space, secret)
    for at in range(0, len(tokens) - step + 1, step):
        link = h(link + le32(*tokens[at:at + step]), secret)
        yield link


def xxh32(data):
    """XXH32 with seed 0, in plain Python."""
    p1, p2, p3, p4, p5 = 2654435761, 2246822519, 3266489917, 668265263, 374761393
    mask = 2**32 - 1
    rot = lambda v, r: (v << r | v >> (32 - r)) & mask
    at = 0
    if len(data) >= 16:
        acc = [(p1 + p2) & mask, p2, 0, (-p1) & mask]
        while at + 16 <= len(data):
            for i, word in enumerate(struct.unpack_from("<4I", data, at)):
                acc[i] = rot((acc[i] + word * p2) & mask, 13) * p1 & mask
            at += 16
        v = (rot(acc[0], 1) + rot(acc[1], 7) + rot(acc[2], 12) + rot(acc[3], 18)) & mask
    else:
        v = p5
    v = (v + len(data)) & mask
    while at + 4 <= len(data):
        v = rot((v + struct.unpack_from("<I", data, at)[0] * p3) & mask, 17) * p4 & mask
        at += 4
    for byte in data[at:]:
        v = rot((v + byte * p5) & mask, 11) * p1 & mask
    v = (v ^ v >> 15) * p2 & mask
    v = (v ^ v >> 13) * p3 & mask
    return v ^ v >> 16


def header(space, key, first, num_tokens, payload_bytes):
    head = b"KVF2" + struct.pack("<HHI", 128, 0, 0) + space + key + le32(first, num_tokens)
    head += struct.pack("<QQq", payload_bytes, payload_bytes, STORED) + bytes(16)
    return head + le32(xxh32(head))


def vectors():
    out = {}
    for kind, secret in (("plain", b""), ("keyed", SECRET)):
        space = digest(FIELDS, secret)
        out["digest " + kind] = space
        for i, key in enumerate(chain(space, TOKENS, 16, secret)):
            out["chain %s %d" % (kind, i)] = key
        out["key_of " + kind] = h(b"kvf1 key" + space + b"an engine's own hash", secret)
    out["card_key plain"] = h(b"kvf1 card" + out["digest plain"], b"")
    out["session_space"] = h(b"kvf1 sessions", b"")
    out["session_key"] = h(b"kvf1 session" + b"user:42", b"")
    return out


def main():
    try:
        import xxhash
    except ImportError:
        xxhash = None
    new = vectors()
    text = "".join("%s = %s\n" % (name, value.hex()) for name, value in new.items())
    head = header(new["digest plain"], new["chain plain 1"], 16, 16, len(PAYLOAD))
    body = le32(*TOKENS[16:32]) + PAYLOAD
    xxh3 = xxhash.xxh3_128_digest(head[:100] + body) if xxhash else None
    if "--write" in sys.argv:
        (HERE / "vectors.txt").write_text(text)
        (HERE / "record-v2.bin").write_bytes(head + body + xxh3)
        return
    record = (HERE / "record-v2.bin").read_bytes()
    assert (HERE / "vectors.txt").read_text() == text, "vectors.txt differs"
    assert record[:128] == head, "the header of record-v2.bin differs"
    assert record[128:-16] == body, "the body of record-v2.bin differs"
    assert record[-16:] == (xxh3 or record[-16:]), "the checksum of record-v2.bin differs"
    print("%d vectors and a record of %d bytes agree%s" % (len(new), len(record), "" if xxhash else " (XXH3 not checked)"))


main()
