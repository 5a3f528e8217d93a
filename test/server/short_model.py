# SPDX-License-Identifier: Apache-2.0
"""A GGUF model cut down to its first layers: its words are noise, but it is fast, and it is a different model file."""
import struct

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self, code):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self):
        begin = self.at + 8
        self.at = begin + self.number("Q")
        return self.data[begin:self.at]

    def skip_value(self, kind):
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            inner, num = self.number("I"), self.number("Q")
            if inner in SIZES:
                self.at += num * SIZES[inner]
            else:
                for _ in range(num):
                    self.skip_value(inner)
        else:
            self.at += SIZES[kind]


def shorten(source, target, layers):
    with open(source, "rb") as f:
        r = Reader(f.read())
    magic, version, num_tensors, num_fields = r.number("I"), r.number("I"), r.number("Q"), r.number("Q")
    begin, alignment, edits = r.at, 32, bytearray(r.data)
    for _ in range(num_fields):
        key, kind, at = r.string(), r.number("I"), r.at
        r.skip_value(kind)
        if key.endswith(b".block_count"):
            struct.pack_into("<I", edits, at, layers)
        if key == b"general.alignment":
            (alignment,) = struct.unpack_from("<I", r.data, at)
    fields, tensors = edits[begin:r.at], []
    for _ in range(num_tensors):
        start, name = r.at, r.string()
        num_dimensions = r.number("I")
        r.at += 8 * num_dimensions + 4  # and the type
        tensors.append((name, bytes(r.data[start:r.at]), r.number("Q")))
    data = (r.at + alignment - 1) // alignment * alignment
    ends = sorted(offset for _, _, offset in tensors)[1:] + [len(r.data) - data]
    size = {offset: ends[i] - offset for i, offset in enumerate(sorted(o for _, _, o in tensors))}
    kept = [t for t in tensors if not t[0].startswith(b"blk.") or int(t[0].split(b".")[1]) < layers]
    out, at = bytearray(struct.pack("<IIQQ", magic, version, len(kept), num_fields)) + fields, 0
    for _, head, offset in kept:
        out += head + struct.pack("<Q", at)
        at += (size[offset] + alignment - 1) // alignment * alignment
    out += b"\0" * (-len(out) % alignment)
    with open(target, "wb") as f:
        f.write(out)
        for _, _, offset in kept:
            f.write(r.data[data + offset:data + offset + size[offset]])
            f.write(b"\0" * (-size[offset] % alignment))
