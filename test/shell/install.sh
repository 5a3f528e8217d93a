#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# cmake --install into an empty prefix. Then a program compiles, links and runs with pkg-config alone, also after the tree
# was moved.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"
: "${KVF_BUILD:?}" "${KVF_LIB:?}"

symbols=$(nm -D "$KVF_LIB")
if grep -q -E '__(asan|tsan)_init' <<<"$symbols"; then
    echo "a library with sanitizers is not for installing"
    exit 77
fi
cmake --install "$KVF_BUILD" --prefix "$dir/first" >"$dir/out" 2>"$dir/err" || flunk "cmake --install failed"
mv "$dir/first" "$dir/prefix"

cat >"$dir/user.c" <<'END'
#include <kvferry/kvferry.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    const char *urls[] = {"mem:"};
    const kvf_field fields[] = {{"engine", "user-1"}, {"model", "none"}, {"kv", "u8"}};
    kvf_error err = {0};
    kvf_store *store = NULL;
    kvf_space *space = NULL;
    char text[16] = "hello", got[16];
    struct iovec from = {text, sizeof text}, to = {got, sizeof got};
    kvf_block block = {.iov = &from, .num_iov = 1};
    if (kvf_store_open(&store, &err, urls, 1, NULL) || kvf_space_open(&space, &err, store, fields, 3, NULL)) {
        return fprintf(stderr, "%s\n", err.what), 1;
    }
    if (kvf_save(space, &block, 1, NULL) != 1 || kvf_store_flush(store, NULL, KVF_MS(1000))) {
        return 2;
    }
    block.iov = &to;
    size_t loaded = kvf_load(space, &block, 1, NULL, KVF_DEFAULT);
    kvf_space_close(space);
    kvf_store_close(store);
    printf("kvferry %s: %s\n", kvf_version(), got);
    return loaded == 1 && strcmp(got, text) == 0 && strcmp(kvf_version(), KVF_VERSION) == 0 ? 0 : 3;
}
END

pc=$(find "$dir/prefix" -name kvferry.pc)
export PKG_CONFIG_PATH=${pc%/*}
[[ $(pkg-config --modversion kvferry) == "$("$KVFERRY" --version | cut -d' ' -f2)" ]] || flunk "versions differ"
read -r -a flags <<<"$(pkg-config --cflags --libs kvferry)"
for compiler in gcc clang; do
    command -v "$compiler" >/dev/null || continue
    "$compiler" -std=c11 -Wall -Wextra -Wpedantic -Werror "$dir/user.c" -o "$dir/user" "${flags[@]}"
    LD_LIBRARY_PATH=$(pkg-config --variable=libdir kvferry) "$dir/user"
done

# From C++ too, where there is a compiler for it.
if command -v g++ >/dev/null; then
    echo '#include <kvferry/kvferry.h>' >"$dir/user.cpp"
    echo 'int main() { return kvf_version()[0] == 0; }' >>"$dir/user.cpp"
    g++ -Wall -Wextra -Wpedantic -Werror "$dir/user.cpp" -o "$dir/user" "${flags[@]}"
    LD_LIBRARY_PATH=$(pkg-config --variable=libdir kvferry) "$dir/user"
fi

# The program finds its library by itself.
env -u LD_LIBRARY_PATH "$dir/prefix/bin/kvferry" --version
echo "what is installed can be used"
