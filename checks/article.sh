#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-article: ten lines of redis-py and numpy load what the C API saved, and the other way round, byte for byte, on a
# private server, over TCP and over a unix socket. The last line is the number of bytes.
source "$(dirname "${BASH_SOURCE[0]}")/../test/shell/common.bash"
: "${KVF_BUILD:?the build folder}" "${KVF_SOURCE:?the source folder}"

"$python" -c 'import numpy, redis' 2>/dev/null || {
    echo "redis-py and numpy are not installed for $python: make setup"
    exit 77
}
# A port that was free a moment ago; only this test's own server listens on it, or none does and the test fails.
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
start_redis article --port "$port" --bind 127.0.0.1
mkdir "$dir/files"
for url in "redis://127.0.0.1:$port/0" "redis+unix://$dir/article.sock"; do
    echo "${url%%:*}:"
    "$python" "$KVF_SOURCE/checks/article.py" "$KVF_BUILD/test/session_tool" "$port" "$url" "$dir/files"
done
