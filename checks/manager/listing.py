# SPDX-License-Identifier: Apache-2.0
"""The first listing of the article: the class that keeps keys and values in Redis by redis-py and numpy."""

import redis


class KVCacheManager:
    def __init__(self, host="localhost", port=6379, db=0, **place):
        self.client = redis.Redis(host=host, port=port, db=db, **place)

    def save_kv_cache(self, session_id, key_tensor, value_tensor):
        with self.client.pipeline() as pipeline:
            pipeline.hset(session_id, mapping={"keys": key_tensor.tobytes(), "values": value_tensor.tobytes()})
            pipeline.expire(session_id, 3600)
            pipeline.execute()

    def load_kv_cache(self, session_id):
        keys, values = self.client.hmget(session_id, "keys", "values")
        if keys is None or values is None:
            return None, None
        return keys, values
