#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The ABI of both libraries beside the baseline of this minor version, test/abi/MINOR: programs that were compiled with
# its oldest headers must run with today's libraries.
# usage: checks/abi.sh [--renew]. --renew writes the dumps of the baseline anew, so that they hold what was added. It
# refuses where something was removed or changed, unless ABI_NEW=1 (a version that is not released yet) or there is no
# baseline of this minor version: then the headers are copied, too. KVF_BUILD and KVF_SOURCE are folders.
set -euo pipefail
: "${KVF_BUILD:?}" "${KVF_SOURCE:?}"
cd "$KVF_SOURCE"
if [[ $(uname -m) != x86_64 ]]; then
    echo "check-abi: skipped: the baseline is of x86-64"
    exit 77
fi
if ! command -v abidiff >/dev/null; then
    echo "check-abi: skipped: abidiff is missing: apt-get install abigail-tools"
    exit 77
fi

version=$(sed -n 's/^#define KVF_VERSION "\([0-9]*\.[0-9]*\).*/\1/p' include/kvferry/status.h)
readonly version base=test/abi/$version
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvf-abi-XXXXXX")
trap 'rm -rf "$dir"' EXIT
libraries=(libkvferry)
[[ ! -e $KVF_BUILD/libkvferry-llama.so ]] || libraries+=(libkvferry-llama)

fail() {
    echo "check-abi: FAILED: $*" >&2
    exit 1
}

# Types of llama.cpp are not ours. Structs that begin with struct_size may get fields at their end, and so may those that
# only the library allocates; an enum may get values at its end, before its count.
allow() {
    local name
    printf '[suppress_type]\nname_regexp = ^(llama|ggml)_\n'
    for name in $(structs include) kvf_entry kvf_finding kvf_session; do
        printf '[suppress_type]\ntype_kind = struct\nname = %s\nhas_data_member_inserted_at = end\n' "$name"
    done
    printf '[suppress_type]\ntype_kind = enum\nname_regexp = ^kvf_\n'
    printf 'changed_enumerators = KVF_NUM_REASONS, KVF_NUM_PLANS, KVF_NUM_ABSENCES, KVF_NUM_ASIDES, KVF_LLAMA_NUM_PLANS\n'
}

# The structs of the headers in a folder that begin with struct_size.
structs() {
    awk '/^typedef struct [a-z_]+ \{/ { name = $3 } /^    uint32_t struct_size;/ { print name }' "$1"/kvferry/*.h
}

dump() { # LIBRARY FILE
    abidw --headers-dir include/kvferry --drop-private-types --no-show-locs --no-corpus-path --no-comp-dir-path \
        --type-id-style hash --exported-interfaces-only --out-file "$2" "$KVF_BUILD/$1.so"
}

compatible() { # LIBRARY: nothing of the baseline was removed or changed
    abidiff --no-added-syms --suppressions "$dir/allowed" "$base/$1.abi" "$dir/$1.abi"
}

for library in "${libraries[@]}"; do
    dump "$library" "$dir/$library.abi"
    ! grep "<elf-symbol name='" "$dir/$library.abi" | grep -v "<elf-symbol name='kvf_" ||
        fail "$library exports names that are not kvf_*"
done
allow >"$dir/allowed"

if [[ ${1:-} == --renew ]]; then
    if [[ ! -d $base || ${ABI_NEW:-0} == 1 ]]; then
        rm -rf test/abi/[0-9]*
        mkdir -p "$base/include"
        cp -r include/kvferry "$base/include/"
    else
        for library in "${libraries[@]}"; do
            compatible "$library" || fail "$library broke programs of $version: undo that, or begin a minor version"
        done
    fi
    for library in "${libraries[@]}"; do
        cp "$dir/$library.abi" "$base/"
    done
    echo "check-abi: the baseline of $version is renewed"
    exit 0
fi

[[ -d $base ]] || fail "there is no baseline of $version: make abi-baseline"
for library in "${libraries[@]}"; do
    compatible "$library" || fail "$library broke programs of $version (above)"
    abidiff "$base/$library.abi" "$dir/$library.abi" || fail "$library has more than the baseline: make abi-baseline"
done

# Each header alone, in C11 and C++17.
flags=(-Wall -Wextra -Wpedantic -Werror -isystem "${KVF_LLAMA_DIR:-/nowhere}/include" -Iinclude -fsyntax-only)
for header in include/kvferry/*.h; do
    [[ $header != */llama.h || -e ${KVF_LLAMA_DIR:-}/include/llama.h ]] || continue
    for compiler in gcc clang; do
        ! command -v $compiler >/dev/null || $compiler -std=c11 "${flags[@]}" -x c - <<<"#include <${header#include/}>"
    done
    for compiler in g++ clang++; do
        ! command -v $compiler >/dev/null || $compiler -std=c++17 "${flags[@]}" -x c++ - <<<"#include <${header#include/}>"
    done
done

# A program of the oldest headers, and one of headers whose structs have a field that the library does not know. Both are
# of C and of C++, and run with today's library.
cp -r include "$dir/future"
for name in $(structs include); do
    sed -i "s/^} $name;/    uint64_t from_the_future;\n} $name;/" "$dir"/future/kvferry/*.h
done
programs=0
for headers in "$base/include" "$dir/future"; do
    defines=()
    [[ $headers == "$base/include" ]] || defines=(-DFUTURE)
    for compiler in "gcc -std=c11 -x c" "g++ -std=c++17 -x c++"; do
        # shellcheck disable=SC2086
        $compiler -Wall -Wextra -Werror -I"$headers" "${defines[@]}" test/abi/user.c -o "$dir/user" \
            -L"$KVF_BUILD" -lkvferry -Wl,-rpath,"$KVF_BUILD" || fail "test/abi/user.c with $headers does not compile"
        timeout 60 "$dir/user" || fail "a program of $headers ($compiler) fails with today's library"
        programs=$((programs + 1))
    done
done
echo "check-abi: ${#libraries[@]} libraries are what $version's programs expect; $programs programs of older and newer headers run"
