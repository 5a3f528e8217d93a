#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The test vectors of docs/record-format.md, computed from the document alone: hashlib, struct, and nothing of kvferry.

    vectors.py           checks vectors.txt, record-v2.bin and sealed-v2.bin beside it; XXH3 too where the package
                         xxhash is installed
    vectors.py --write   writes them anew (record-v2.bin needs xxhash); only a new version of the format may change them
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
SALT = bytes(range(0x50, 0x60))


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


def chain(root, tokens, step, salt=b""):
    link = h(b"kvf1 chain" + root, b"")
    if salt:
        link = h(b"kvf1 key" + root + b"salt" + link + salt, b"")
        yield link
    for at in range(0, len(tokens) - step + 1, step):
        link = h(link + le32(*tokens[at:at + step]), b"")
        yield link


def place(key, secret):
    return h(b"kvf1 place" + key, secret) if secret else key


# ---- AES-256-GCM (FIPS 197, SP 800-38D), slow and short

def xtime(a):
    return (a << 1 ^ (0x1b if a & 0x80 else 0)) & 0xff


def gf_mul(a, b):
    out = 0
    while b:
        out ^= a if b & 1 else 0
        a, b = xtime(a), b >> 1
    return out


def make_sbox():
    box = []
    for x in range(256):
        inverse = next((y for y in range(256) if gf_mul(x, y) == 1), 0)
        rot = lambda v, n: (v << n | v >> (8 - n)) & 0xff
        box.append(inverse ^ rot(inverse, 1) ^ rot(inverse, 2) ^ rot(inverse, 3) ^ rot(inverse, 4) ^ 0x63)
    return box


SBOX = make_sbox()


def aes_schedule(key):
    words = [list(key[i:i + 4]) for i in range(0, 32, 4)]
    rcon = 1
    for i in range(8, 60):
        word = list(words[i - 1])
        if i % 8 == 0:
            word = [SBOX[b] for b in word[1:] + word[:1]]
            word[0] ^= rcon
            rcon = xtime(rcon)
        elif i % 8 == 4:
            word = [SBOX[b] for b in word]
        words.append([a ^ b for a, b in zip(words[i - 8], word)])
    return [sum(words[i:i + 4], []) for i in range(0, 60, 4)]


def aes_block(rounds, block):
    state = [a ^ b for a, b in zip(block, rounds[0])]
    for number, key in enumerate(rounds[1:], 1):
        state = [SBOX[state[(i + 4 * (i % 4)) % 16]] for i in range(16)]  # SubBytes, ShiftRows
        if number < 14:
            columns = [state[i:i + 4] for i in range(0, 16, 4)]
            state = [xtime(c[i]) ^ xtime(c[(i + 1) % 4]) ^ c[(i + 1) % 4] ^ c[(i + 2) % 4] ^ c[(i + 3) % 4]
                     for c in columns for i in range(4)]
        state = [a ^ b for a, b in zip(state, key)]
    return bytes(state)


def ghash(subkey, data):
    y = 0
    for at in range(0, len(data), 16):
        x, v, z = y ^ int.from_bytes(data[at:at + 16], "big"), subkey, 0
        for bit in range(127, -1, -1):
            z ^= v if x >> bit & 1 else 0
            v = v >> 1 ^ (0xe1 << 120 if v & 1 else 0)
        y = z
    return y


def gcm(key, nonce, aad, text):
    """The sealed text and its tag."""
    pad = lambda data: data + bytes(-len(data) % 16)
    rounds = aes_schedule(key)
    subkey = int.from_bytes(aes_block(rounds, bytes(16)), "big")
    stream = b"".join(aes_block(rounds, nonce + (2 + i).to_bytes(4, "big")) for i in range(-(-len(text) // 16)))
    sealed = bytes(a ^ b for a, b in zip(text, stream))
    sizes = (8 * len(aad)).to_bytes(8, "big") + (8 * len(sealed)).to_bytes(8, "big")
    mask = int.from_bytes(aes_block(rounds, nonce + b"\0\0\0\1"), "big")
    return sealed, (ghash(subkey, pad(aad) + pad(sealed) + sizes) ^ mask).to_bytes(16, "big")


def record_key(secret, space, key, salt):
    """HKDF-Expand (RFC 5869): the key of one record, and the veil of two fields of its header."""
    seal = h(b"kvf1 seal", secret)
    first = h(space + key + salt + b"\1", seal)
    return first, h(first + space + key + salt + b"\2", seal)[:8]


def sealed_record(secret, space, key, first, tokens, payload):
    cipher_key, veil = record_key(secret, space, key, SALT)
    body = le32(*tokens) + payload
    veiled = bytes(a ^ b for a, b in zip(le32(first, len(tokens)), veil))
    head = b"KVF2" + struct.pack("<HHI", 128, 0, 1) + space + key + veiled
    head += struct.pack("<QQq", len(body), len(body), STORED) + SALT
    sealed, tag = gcm(cipher_key, bytes(12), head, body)
    return head + le32(xxh32(head)) + sealed + tag


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
    root = digest(FIELDS, b"")
    for kind, secret in (("plain", b""), ("keyed", SECRET)):
        space = digest(FIELDS, secret)
        out["digest " + kind] = space
        for i, key in enumerate(chain(root, TOKENS, 16)):
            out["chain %s %d" % (kind, i)] = place(key, secret)
        out["key_of " + kind] = place(h(b"kvf1 key" + root + b"an engine's own hash", b""), secret)
        last = list(chain(root, TOKENS, 16))[-1]
        tail = h(b"kvf1 key" + root + b"tail" + last + le32(*TOKENS[32:]), b"")
        out["tail " + kind] = place(tail, secret)
        out["state " + kind] = place(h(b"kvf1 key" + root + b"state" + tail, b""), secret)
        out["apart " + kind] = place(h(b"kvf1 key" + root + b"apart" + last + b"as it is\0", b""), secret)
        salted = chain(root, TOKENS, 16, b"cache salt")
        out["salt " + kind] = place(next(salted), secret)
        out["salted " + kind] = place(next(salted), secret)
    out["card_key plain"] = h(b"kvf1 card" + out["digest plain"], b"")
    out["session_space"] = h(b"kvf1 sessions", b"")
    out["session_key"] = h(b"kvf1 session" + b"user:42", b"")
    out["session_space keyed"] = h(b"kvf1 sessions", SECRET)
    out["session_key keyed"] = h(b"kvf1 session" + b"user:42", SECRET)
    out["record_key keyed 1"], out["veil keyed 1"] = record_key(SECRET, out["digest keyed"], out["chain keyed 1"], SALT)
    return out


def main():
    try:
        import xxhash
    except ImportError:
        xxhash = None
    key = bytes(range(32))  # FIPS 197, C.3, and the 14th test case of the GCM submission
    assert aes_block(aes_schedule(key), bytes.fromhex("00112233445566778899aabbccddeeff")).hex() == \
        "8ea2b7ca516745bfeafc49904b496089"
    assert gcm(bytes(32), bytes(12), b"", bytes(16))[1].hex() == "d0d1c8a799996bf0265b98b5d48ab919"
    new = vectors()
    sealed = sealed_record(SECRET, new["digest keyed"], new["chain keyed 1"], 16, TOKENS[16:32], PAYLOAD)
    text = "".join("%s = %s\n" % (name, value.hex()) for name, value in new.items())
    head = header(new["digest plain"], new["chain plain 1"], 16, 16, len(PAYLOAD))
    body = le32(*TOKENS[16:32]) + PAYLOAD
    xxh3 = xxhash.xxh3_128_digest(head[:100] + body) if xxhash else None
    if "--write" in sys.argv:
        (HERE / "vectors.txt").write_text(text)
        (HERE / "sealed-v2.bin").write_bytes(sealed)
        if xxh3:
            (HERE / "record-v2.bin").write_bytes(head + body + xxh3)
        return
    record = (HERE / "record-v2.bin").read_bytes()
    assert (HERE / "vectors.txt").read_text() == text, "vectors.txt differs"
    assert record[:128] == head, "the header of record-v2.bin differs"
    assert record[128:-16] == body, "the body of record-v2.bin differs"
    assert record[-16:] == (xxh3 or record[-16:]), "the checksum of record-v2.bin differs"
    assert (HERE / "sealed-v2.bin").read_bytes() == sealed, "sealed-v2.bin differs"
    print("%d vectors and records of %d and %d bytes agree%s"
          % (len(new), len(record), len(sealed), "" if xxhash else " (XXH3 not checked)"))


main()
