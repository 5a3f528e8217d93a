# SPDX-License-Identifier: Apache-2.0
"""The second listing of the article: a loop that generates one token a call, with the cache in Redis between two calls.

usage: loop.py PORT SESSION NUM TOKEN...: prints NUM tokens that follow, and how many tokens were computed.
"""

import sys

import numpy as np
from listing import KVCacheManager


class Model:
    """A small decoder of two layers, whose answer depends on every token before."""

    LAYERS, HEADS, WIDTH, VOCABULARY = 2, 2, 8, 97

    def __init__(self):
        rng = np.random.default_rng(12)
        shape = (self.LAYERS, 3, self.HEADS, self.HEADS * self.WIDTH, self.WIDTH)
        self.embedding = rng.standard_normal((self.VOCABULARY, self.HEADS * self.WIDTH)).astype(np.float32)
        self.projections = rng.standard_normal(shape).astype(np.float32) / 4
        self.computed = 0
        self.load_into_memory(np.zeros((self.LAYERS, self.HEADS, 0, self.WIDTH), np.float16), None)

    def load_into_memory(self, keys, values):
        self.keys, self.values = keys, keys if values is None else values

    def forward(self, tokens):
        for token in tokens:
            hidden = self.embedding[token]
            new_keys, new_values = [], []
            for layer in range(self.LAYERS):
                q, k, v = np.einsum("i,phij->phj", hidden, self.projections[layer])
                new_keys.append(k)
                new_values.append(v)
                keys = np.concatenate([self.keys[layer], k[:, None].astype(np.float16)], axis=1).astype(np.float32)
                values = np.concatenate([self.values[layer], v[:, None].astype(np.float16)], axis=1).astype(np.float32)
                scores = np.einsum("hj,htj->ht", q, keys) / np.sqrt(self.WIDTH)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                hidden = np.tanh(hidden + np.einsum("ht,htj->hj", weights, values).reshape(-1))
            self.keys = np.concatenate([self.keys, np.array(new_keys, np.float16)[:, :, None]], axis=2)
            self.values = np.concatenate([self.values, np.array(new_values, np.float16)[:, :, None]], axis=2)
            self.computed += 1
        return int(np.argmax(self.embedding @ hidden))


manager = KVCacheManager(host="127.0.0.1", port=int(sys.argv[1]), db=0)


def generate_token(model, session_id, prompt):
    keys, values = manager.load_kv_cache(session_id)
    if keys is not None and values is not None:
        shape = (model.LAYERS, model.HEADS, -1, model.WIDTH)
        keys, values = (np.frombuffer(array, np.float16).reshape(shape) for array in (keys, values))
        model.load_into_memory(keys, values)
    token = model.forward(prompt[model.keys.shape[2] :])
    manager.save_kv_cache(session_id, model.keys, model.values)
    return token


def main():
    session_id, tokens = sys.argv[2], [int(word) for word in sys.argv[4:]]
    computed = 0
    for _ in range(int(sys.argv[3])):
        model = Model()  # as in a server that handles each request anew
        tokens.append(generate_token(model, session_id, tokens))
        computed += model.computed
    print(*tokens[-int(sys.argv[3]) :], "computed", computed)


main()
