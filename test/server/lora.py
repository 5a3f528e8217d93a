# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of random numbers for the attention of a llama model: enough to change every answer."""
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
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, kind, value in fields:
        head += string(key) + struct.pack("<I", kind) + value
    for name, shape, offset in tensors:
        head += string(name) + struct.pack("<IQQIQ", 2, *shape, 0, offset)
    with open(path, "wb") as f:
        f.write(head + b"\0" * (-len(head) % 32) + data)
