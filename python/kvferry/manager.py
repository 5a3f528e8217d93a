# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager: keys and values of a conversation by its id, as the well-known few lines of redis-py keep them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import quote, urlencode

from . import _arrays, _layers
from ._kvferry import ClosedError, ConfigError, LimitError, Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ._kvferry import Pieces, Session
    from ._layers import Layers


class KVCacheManager:
    """Keeps the keys and values of a conversation under its id, in Redis or any other store of kvferry.

    It has the form of the class that articles show with redis-py and numpy: the import is all that changes. On a Redis
    server a session is the same HASH, with the raw bytes in the fields ``keys`` and ``values`` and a time to live of
    3600 s, so both read what the other wrote. Beside it stands a field ``meta`` with dtype, shape and checksums.

        manager = kvferry.KVCacheManager(host="localhost", port=6379, db=0)
        manager.save_kv_cache("user:42", key_tensor, value_tensor)
        keys, values = manager.load_kv_cache("user:42")         # (None, None): there is no such session

    Where the session is stored, one of:

    - host, port, db, username, password, unix_socket_path, client_name, ssl and the other ssl_ parameters: as redis-py
      names them. ssl parameters that are given without ssl=True are a TypeError.
    - url: any store of kvferry ("redis+cluster://...", "file:/folder", "mem:"), or a sequence of them as tiers, fastest
      first. docs/stores.md has all.
    - store: a kvferry.Store that is in use already. close() leaves it open.

    How:

    - ttl: seconds that a session lives after a save.
    - socket_timeout: the longest time of one call, in seconds; None = 30. socket_connect_timeout: of connecting; None =
      1.
    - secret, previous_secret, secret_files: sessions are sealed under a secret (docs/security.md). Plain clients can't
      read them, and only sealed sessions are loaded.
    - arrays: what load_kv_cache returns: "numpy" (bfloat16 and fp8 by ml_dtypes), "torch", or "bytes".
    - plain_writers: True: plain clients may write over sessions of kvferry. A session that does not match its checksum
      is then taken for theirs, and loads as bytes. False: it is damaged, and there is no such session.

    Any number of threads may use a manager. A forked child needs one of its own. A server that is down is no error
    here; each call then raises StoreError.

    Raises TypeError (parameters that don't go together), ConfigError (a URL, a password, a certificate: the message
    says what to change), LimitError (a number out of range).
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        password: str | None = None,
        socket_timeout: float | None = None,
        socket_connect_timeout: float | None = None,
        *,
        username: str | None = None,
        unix_socket_path: str | None = None,
        client_name: str | None = None,
        ssl: bool = False,
        ssl_ca_certs: str | None = None,
        ssl_ca_path: str | None = None,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
        ssl_password: str | None = None,
        ssl_cert_reqs: str | None = None,
        ssl_check_hostname: bool | None = None,
        url: str | Sequence[str] | None = None,
        store: Store | None = None,
        ttl: int = 3600,
        secret: Buffer | None = None,
        previous_secret: Buffer | None = None,
        secret_files: str | None = None,
        arrays: _arrays.Kind = "numpy",
        plain_writers: bool = True,
    ) -> None:
        self._ttl = _checked_ttl(ttl)
        self._timeout = socket_timeout
        self._arrays = _checked_kind(arrays)
        self._raw = plain_writers
        self._closed = False
        self._owned = store is None
        tls: dict[str, str | int | None] = {
            "ssl_ca_certs": ssl_ca_certs,
            "ssl_ca_path": ssl_ca_path,
            "ssl_certfile": ssl_certfile,
            "ssl_keyfile": ssl_keyfile,
            "ssl_password": ssl_password,
            "ssl_cert_reqs": ssl_cert_reqs,
            "ssl_check_hostname": None if ssl_check_hostname is None else str(ssl_check_hostname).lower(),
        }
        secrets = {"secret": secret, "previous_secret": previous_secret, "secret_files": secret_files}
        server = _Server(
            host, port, db, username, password, unix_socket_path, client_name, socket_connect_timeout, ssl, tls
        )
        if store is not None:
            _refuse_beside("store", server.given() | secrets | {"url": url})
            self._store = store
            return
        if url is not None:
            _refuse_beside("url", server.given())
        self._store = Store(
            server.url() if url is None else url,
            secret=secret,
            previous_secret=previous_secret,
            secret_files=secret_files,
            seal_sessions=any(value is not None for value in secrets.values()),
        )

    @property
    def store(self) -> Store:
        """The store behind the manager."""
        return self._store

    @property
    def closed(self) -> bool:
        return self._closed or self._store.closed

    def close(self) -> None:
        """Closes the manager, and its store unless it was given one. Arrays that were loaded stay."""
        self._closed = True
        if self._owned:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def save_kv_cache(
        self,
        session_id: str,
        key_tensor: Any = None,
        value_tensor: Any = None,
        *,
        past_key_values: Layers | None = None,
        ttl: int | None = None,
        num_tokens: int | None = None,
        layout: str | None = None,
        space: Buffer | None = None,
    ) -> None:
        """Stores keys and values under an id, and replaces the session that had it: a reader sees the old or the new
        one.

        key_tensor, value_tensor: numpy arrays, torch tensors or buffers of any shape, or lists of them by layer. They
        are sent from their own memory. Only what is not contiguous, or not in the CPU's memory, is copied first.

        past_key_values, in their place: a whole cache. Its layers are sent one after the other, without stacking them.
        If all have one shape, the session has the shape (layers, *shape). A Cache of Transformers, a sequence of (keys,
        values), or a pair of arrays (keys, values) whose first axis is the layer. Layers whose tensors are not all
        there is to them (sliding windows, preallocated or quantised caches) are a TypeError: kvferry.hf.PrefixCache
        knows them.

        ttl: seconds, instead of the manager's. num_tokens: how many tokens the arrays cover (a Cache tells it). layout:
        a word for the order of the axes, such as "LBHTD". space: the digest of the Space that they belong to.

        Raises TypeError (no array), LimitError (the id has 1 to 512 bytes, at most 8 axes), StoreError (the server is
        down, full, or too slow: the previous session is still there), ConfigError, ClosedError.
        """
        if past_key_values is None:
            k, v = _memory(key_tensor, "key_tensor"), _memory(value_tensor, "value_tensor")
        elif key_tensor is None and value_tensor is None:
            keys, values = _layers.keys_and_values(past_key_values, "past_key_values")
            k, v = _memory(keys, "past_key_values: keys"), _memory(values, "past_key_values: values")
        else:
            raise TypeError("give key_tensor and value_tensor, or past_key_values, not both")
        if num_tokens is None:
            num_tokens = _layers.num_tokens(past_key_values)
        self._open().session_save(
            session_id,
            k.parts,
            v.parts,
            dtype=k.dtype,
            shape=k.shape,
            v_dtype=v.dtype,
            v_shape=v.shape,
            ttl=self._ttl if ttl is None else _checked_ttl(ttl),
            num_tokens=num_tokens,
            layout=layout,
            space=space,
            timeout=self._timeout,
            owner=(k.owners, v.owners),
        )

    def load_kv_cache(
        self, session_id: str, *, into: Layers | None = None, arrays: _arrays.Kind | None = None
    ) -> tuple[Any, Any]:
        """Loads a session: (keys, values), or (None, None) if there is none.

        The arrays have the dtype and the shape with which they were saved. Their memory is kvferry's, it is theirs
        alone, and it is freed with the last of them. What a plain redis-py client wrote is a memoryview of bytes, as
        nothing else is known: numpy.frombuffer(keys, dtype).

        into: arrays of the caller to read into, in any form that save_kv_cache takes: (keys, values), or a whole cache.
        They must be contiguous, writable, on the CPU, and together of exactly the session's length. Returns (keys,
        values) as given, or two lists by layer. After (None, None) and after an exception their contents are undefined.
        arrays: "numpy", "torch" or "bytes", instead of the manager's.

        Raises TypeError (the dtype needs ml_dtypes or torch, into has another dtype), LimitError (into has another
        length), StoreError (the server is down or too slow), ConfigError, ClosedError.
        """
        kind = self._arrays if arrays is None else _checked_kind(arrays)
        if into is not None:
            return self._load_into(session_id, into)
        session = self._open().session_load(session_id, raw=self._raw, timeout=self._timeout)
        if session is None:
            return None, None
        return _arrays_of(session, kind)

    def _load_into(self, session_id: str, into: Layers) -> tuple[Any, Any]:
        keys, values = _layers.keys_and_values(into, "into")
        k, v = _memory(keys, "into: keys", writable=True), _memory(values, "into: values", writable=True)
        session = self._open().session_load(
            session_id, into=(k.parts, v.parts), raw=self._raw, timeout=self._timeout, owner=(k.owners, v.owners)
        )
        if session is None:
            return None, None
        for given, stored, name in ((k, session.info.k_dtype, "keys"), (v, session.info.v_dtype, "values")):
            if given.dtype is not None and stored is not None and given.dtype != stored:
                raise TypeError(f"into: the {name} of the session are {stored}, not {given.dtype}")
        return keys, values

    def exists(self, session_id: str) -> bool:
        """Whether there is such a session. Its arrays are not read. Raises what load_kv_cache does."""
        return self._open().session_look(session_id, raw=self._raw, timeout=self._timeout) is not None

    def ttl(self, session_id: str) -> float | None:
        """How long the session still lives, in seconds. inf: it does not expire. None: there is no such session.

        Raises ConfigError where the server does not tell, and what load_kv_cache does.
        """
        info = self._open().session_look(session_id, raw=self._raw, timeout=self._timeout)
        if info is not None and info.ttl is None:
            raise ConfigError(f"the time to live of {session_id!r} is unknown: add +pttl to the user's ACL")
        return None if info is None else info.ttl

    def delete(self, session_id: str) -> bool:
        """Removes a session. False: there was none. Raises what load_kv_cache does."""
        return self._open().session_remove(session_id)

    def _open(self) -> Store:
        if self._closed:
            raise ClosedError("the manager was closed: make a new one")
        return self._store


class _Memory(NamedTuple):
    """One array of a session, in one or more parts."""

    parts: Pieces
    dtype: str | None
    shape: tuple[int, ...] | None
    owners: object


def _memory(x: Any, name: str, *, writable: bool = False) -> _Memory:
    """Of an array, or of a list of arrays by layer."""
    if not isinstance(x, list):
        memory = _arrays.memory_of(x, name, writable=writable)
        # A session has no arrays without an axis: that would mean that the shape is unknown.
        return _Memory(memory.part, memory.dtype, (1,) if memory.shape == () else memory.shape, memory.owner)
    if not x:
        raise TypeError(f"{name} has no layers")
    layers = [_arrays.memory_of(layer, f"{name} of layer {i}", writable=writable) for i, layer in enumerate(x)]
    dtypes = {layer.dtype for layer in layers}
    if len(dtypes) > 1:
        raise TypeError(f"{name}: all layers must have one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    shape = layers[0].shape
    same = shape is not None and all(layer.shape == shape for layer in layers)
    return _Memory(
        [layer.part for layer in layers],
        dtypes.pop(),
        (len(layers), *shape) if shape is not None and same else None,
        [layer.owner for layer in layers],
    )


def _arrays_of(session: Session, kind: _arrays.Kind) -> tuple[Any, Any]:
    k, v, info = session.k, session.v, session.info
    assert k is not None and v is not None
    return (
        _arrays.array_from(k, info.k_dtype, info.k_shape, kind),
        _arrays.array_from(v, info.v_dtype, info.v_shape, kind),
    )


class _Server(NamedTuple):
    """A Redis server, by redis-py's parameters."""

    host: str
    port: int
    db: int
    username: str | None
    password: str | None
    unix_socket_path: str | None
    client_name: str | None
    socket_connect_timeout: float | None
    ssl: bool
    tls: Mapping[str, str | int | None]

    def given(self) -> dict[str, object]:
        """What the caller has set: the defaults are None."""
        defaults = {"host": "localhost", "port": 6379, "db": 0, "ssl": False}
        named = {name: value for name, value in self._asdict().items() if name != "tls"}
        return {name: None if value == defaults.get(name) else value for name, value in named.items()} | dict(self.tls)

    def url(self) -> str:
        if not self.ssl and any(value is not None for value in self.tls.values()):
            raise TypeError("the ssl_ parameters have no effect without ssl=True")
        if "://" in self.host:
            raise ConfigError("host is a URL: pass it as url=")  # without the URL, which may hold a password
        if self.ssl and self.unix_socket_path is not None:
            raise TypeError("a unix socket needs no TLS: leave out ssl")
        parameters = {"name": self.client_name, **self.tls}
        if self.socket_connect_timeout is not None:
            parameters["connect_ms"] = max(1, math.ceil(self.socket_connect_timeout * 1000))
        if self.unix_socket_path is not None:
            base = f"redis+unix://{self._user()}{quote(self.unix_socket_path)}"
            parameters["db"] = self.db
        else:
            host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
            base = f"{'rediss' if self.ssl else 'redis'}://{self._user()}{host}:{self.port}/{self.db}"
        query = urlencode({name: value for name, value in parameters.items() if value is not None}, quote_via=quote)
        return f"{base}?{query}" if query else base

    def _user(self) -> str:
        if self.username is None and self.password is None:
            return ""
        user = quote(self.username or "", safe="")
        return f"{user}@" if self.password is None else f"{user}:{quote(self.password, safe='')}@"


def _refuse_beside(name: str, others: Mapping[str, object]) -> None:
    for other, value in others.items():
        if value is not None:
            raise TypeError(f"give {name} or {other}, not both: {name} already says where the sessions are")


def _checked_ttl(ttl: int) -> int:
    if isinstance(ttl, bool) or not isinstance(ttl, int):
        raise TypeError(f"ttl must be whole seconds, not {ttl!r}")
    if not 1 <= ttl <= 0xFFFFFFFF:
        raise LimitError(f"ttl must be 1 to {0xFFFFFFFF} seconds, not {ttl}")
    return ttl


def _checked_kind(arrays: _arrays.Kind) -> _arrays.Kind:
    if arrays not in _arrays.KINDS:
        raise TypeError(f"arrays must be one of {', '.join(_arrays.KINDS)}, not {arrays!r}")
    return arrays
