# SPDX-License-Identifier: Apache-2.0
"""Adapters of random numbers, enough to change every answer: a LoRA for the attention of a llama model, a control vector."""
import random, struct

STRING, UINT32, FLOAT32 = 8, 4, 6


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def write(path, layers, width, rank=4, seed=1):
    noise = random.Random(seed)
    fields = [("general.type", STRING, string("adapter")), ("general.architecture", STRING, string("llama")),
              ("adapter.type", STRING, string("lora")), ("adapter.lora.alpha", FLOAT32, struct.pack("<f", 16)),
              ("general.alignment", UINT32, struct.pack("<I", 32))]
    tensors, data = [], b""
    for i in range(layers):
        for part, shape in (("a", (width, rank)), ("b", (rank, width))):
            tensors.append((f"blk.{i}.attn_q.weight.lora_{part}", shape, len(data)))
            data += struct.pack(f"<{width * rank}f", *(noise.uniform(-0.3, 0.3) for _ in range(width * rank)))
            data += b"\0" * (-len(data) % 32)
    write_gguf(path, fields, tensors, data)


def write_gguf(path, fields, tensors, data):
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, kind, value in fields:
        head += string(key) + struct.pack("<I", kind) + value
    for name, shape, offset in tensors:
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
    with open(path, "wb") as f:
        f.write(head + b"\0" * (-len(head) % 32) + data)


def write_control(path, layers, width, strength=1.0, seed=1):
    """A control vector for all layers but the first."""
    noise = random.Random(seed)
    data = struct.pack(f"<{(layers - 1) * width}f", *(noise.uniform(-strength, strength) for _ in range((layers - 1) * width)))
    fields = [("general.architecture", STRING, string("controlvector")), ("general.alignment", UINT32, struct.pack("<I", 32))]
    write_gguf(path, fields, [(f"direction.{i + 1}", (width,), 4 * width * i) for i in range(layers - 1)], data)
