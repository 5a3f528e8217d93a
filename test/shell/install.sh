#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# `make install` into an empty prefix, which is moved then. No file names a folder of this machine, and the program runs for
# another user while the llama.cpp that it was built with is gone. The examples compile, link and run with what is there, found
# by pkg-config and by find_package(kvferry), which refuses other versions and components that are not there. `make uninstall`
# leaves nothing.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"
: "${KVF_BUILD:?}" "${KVF_LIB:?}" "${KVF_SOURCE:?}"

symbols=$(nm -D "$KVF_LIB")
if grep -q -E '__(asan|tsan)_init' <<<"$symbols"; then
    echo "a library with sanitizers is not for installing"
    exit 77
fi
(umask 077 && make -C "$KVF_SOURCE" install release="$KVF_BUILD" PREFIX="$dir/first") >"$dir/out" 2>"$dir/err" ||
    flunk "make install failed"
mv "$dir/first" "$dir/prefix"
chmod 755 "$dir"

examples=$KVF_SOURCE/examples
llama_dir=$(sed -n 's/^KVF_LLAMA_DIR:PATH=//p' "$KVF_BUILD/CMakeCache.txt")
[[ -f $dir/prefix/include/kvferry/llama.h ]] || llama_dir=

# works PROGRAM: an example, as it was built; the second of its prompts is loaded.
works() {
    "$1" >"$dir/out" 2>"$dir/err" || flunk "$1 failed"
    says "149 tokens: 112 loaded, 37 computed"
}

# --- no folder of this machine: neither in a file, nor where the loader looks
mapfile -t files < <(find "$dir/prefix" -type f)
for file in "${files[@]}"; do
    # llama.cpp names the files of its source in messages; scripts/setup.sh builds it so that these are short.
    [[ $file == */libllama.so* || $file == */libggml*.so* ]] ||
        ! grep -qF -e "$KVF_SOURCE" -e "$KVF_BUILD" -e "$dir/first" ${llama_dir:+-e "$llama_dir"} "$file" ||
        flunk "$file names a folder of the machine that built it"
    ! readelf -d "$file" 2>/dev/null | sed -nE 's/.*R(UN)?PATH.*\[(.*)\]/\2/p' | tr : '\n' | grep -v "^\$ORIGIN" ||
        flunk "the run path of $file leaves the prefix"
done
found=$(find "$dir/prefix" ! -perm -044)
[[ -z $found ]] || flunk "not for every user: $found"

# --- for another user, while the llama.cpp of the build is gone
# elsewhere ARGUMENT...: the program, for a user who can read neither the build folder nor the cache.
elsewhere() {
    local hide='for d; do [[ $d != -- ]] || break; mount -t tmpfs tmpfs "$d"; shift; done; shift; exec "$@"'
    local user=(setpriv --reuid 65534 --regid 65534 --clear-groups)
    local clean=(env -i PATH=/usr/bin:/bin LANG=C HOME=/nonexistent ${LIBRARY_PATH_OF_TEST:+LD_LIBRARY_PATH=$LIBRARY_PATH_OF_TEST})
    if ((EUID != 0)); then # nobody else's rights then, only the environment
        timeout -k 5 300 "${clean[@]}" "$dir/prefix/bin/kvferry" "$@"
    elif unshare -m true 2>/dev/null; then
        timeout -k 5 300 unshare -m bash -c "$hide" hide ${llama_dir:+"$llama_dir"} "$KVF_BUILD" -- \
            "${user[@]}" "${clean[@]}" "$dir/prefix/bin/kvferry" "$@"
    else
        timeout -k 5 300 "${user[@]}" "${clean[@]}" "$dir/prefix/bin/kvferry" "$@"
    fi >"$dir/out" 2>"$dir/err" </dev/null
}
mkdir -m 777 "$dir/everyone"
elsewhere doctor --store "file:$dir/everyone/store" || (($? == 1)) || flunk "doctor does not run for every user"
says "$dir/everyone/store"
elsewhere --help || flunk "--help"
if [[ -n $llama_dir ]]; then
    says "kvferry run"
    elsewhere run --help || flunk "run does not start for every user"
    # A program that links libllama gets the shim.
    cat >"$dir/shimmed.c" <<'END'
#include <llama.h>
#include <stdio.h>
#include <string.h>
int main(void) {
    char line[4096];
    FILE *maps = fopen("/proc/self/maps", "r");
    llama_backend_init();
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        if (strstr(line, "/libkvferry-llama-shim.so") != NULL || strstr(line, "/libllama.so") != NULL) {
            fputs(strchr(line, '/'), stdout);
        }
    }
    return 0;
}
END
    gcc "$dir/shimmed.c" -o "$dir/everyone/shimmed" -isystem "$llama_dir/include" -L"$dir/prefix/lib/kvferry" -lllama \
        -Wl,-rpath,"$dir/prefix/lib/kvferry" -Wl,--allow-shlib-undefined
    elsewhere exec --store "file:$dir/everyone/store" -- "$dir/everyone/shimmed" || flunk "exec does not run for every user"
    says "$dir/prefix/lib/kvferry/libkvferry-llama-shim.so"
    says "$dir/prefix/lib/kvferry/libllama.so"
    if [[ -n ${KVF_MODEL:-} ]]; then
        install -m 644 "$KVF_MODEL" "$dir/everyone/model.gguf"
        words=$(seq -s " " 1 200)
        for ((i = 0; i < 2; i++)); do
            elsewhere run --store "file:$dir/everyone/store" -m "$dir/everyone/model.gguf" -p "$words" -n 4 --json ||
                flunk "run does not answer for every user"
        done
        json 'd["loaded_tokens"] >= 256'
        elsewhere explain --store "file:$dir/everyone/store" -m "$dir/everyone/model.gguf" -p "$words" || flunk "explain"
        rm "$dir/everyone/model.gguf"
    fi

    # Without a libllama: what needs none works, the rest says what is missing.
    library=$(find "$dir/prefix" -name 'libllama.so.*.*')
    mv "$library" "$dir/libllama"
    elsewhere stat --store "file:$dir/everyone/store" || flunk "stat needs a libllama"
    rc=0
    elsewhere run -m model -p x || rc=$?
    ((rc == 3)) || flunk "run without a libllama: exit status $rc"
    complains "libllama"
    complains "LD_LIBRARY_PATH"
    # Another place for it; and there another version, which is refused.
    mkdir "$dir/other" "$dir/wrong"
    cp "$dir/libllama" "$dir/other/$(readelf -d "$dir/libllama" | sed -nE 's/.*soname: \[(.*)\]/\1/p')"
    chmod -R a+rX "$dir/other" "$dir/wrong"
    LIBRARY_PATH_OF_TEST=$dir/other:$dir/prefix/lib/kvferry elsewhere run --help || flunk "LD_LIBRARY_PATH is not searched"
    {
        nm -D --undefined-only "$dir/prefix"/lib/kvferry/libkvferry-run.so "$dir/prefix"/lib/libkvferry-llama.so |
            sed -nE 's/^ +U (llama_[a-z0-9_]+).*/\1/p' | sort -u | grep -vx llama_version | sed 's/.*/void &(void); void &(void) {}/'
        echo 'const char *llama_version(void); const char *llama_version(void) { return "0.0-other"; }'
    } >"$dir/wrong.c"
    gcc -shared -fPIC "$dir/wrong.c" -Wl,-soname,"$(ls "$dir/other")" -o "$dir/wrong/$(ls "$dir/other")"
    rc=0
    LIBRARY_PATH_OF_TEST=$dir/wrong elsewhere run --help || rc=$?
    ((rc == 3)) || flunk "run with another libllama: exit status $rc"
    complains "0.0-other"
    mv "$dir/libllama" "$library"

    # Without the module.
    mv "$dir/prefix/lib/kvferry/libkvferry-run.so" "$dir/module"
    elsewhere --help || flunk "--help without the module"
    says "need a kvferry that was built with llama.cpp"
    says_not "kvferry run"
    rc=0
    elsewhere explain -m model -p x || rc=$?
    ((rc == 3)) || flunk "explain without the module: exit status $rc"
    complains "libkvferry-run.so"
    mv "$dir/module" "$dir/prefix/lib/kvferry/libkvferry-run.so"
fi

# --- with pkg-config
pc=$(find "$dir/prefix" -name kvferry.pc)
export PKG_CONFIG_PATH=${pc%/*}
[[ $(pkg-config --modversion kvferry) == "$("$KVFERRY" --version | cut -d' ' -f2)" ]] || flunk "versions differ"
read -r -a flags <<<"$(pkg-config --cflags --libs kvferry)"
libdir=$(pkg-config --variable=libdir kvferry)
for compiler in gcc clang; do
    command -v "$compiler" >/dev/null || continue
    for name in engine session async; do
        "$compiler" -std=c11 -Wall -Wextra -Wpedantic -Werror "$examples/$name.c" -o "$dir/$name" "${flags[@]}"
    done
    LD_LIBRARY_PATH=$libdir works "$dir/engine"
done
if [[ -n $llama_dir ]]; then
    [[ $(pkg-config --modversion kvferry-llama) == "$(pkg-config --modversion kvferry)" ]] || flunk "versions differ"
    read -r -a llama_flags <<<"$(pkg-config --cflags --libs kvferry-llama)"
    gcc -std=c11 -Wall -Werror "$examples/llama.c" -o "$dir/llama" "${llama_flags[@]}" -isystem "$llama_dir/include" \
        -L"$llama_dir/lib" -Wl,-rpath,"$llama_dir/lib" -lllama
    LD_LIBRARY_PATH=$libdir "$dir/llama" --help >/dev/null
else
    ! pkg-config --exists kvferry-llama || flunk "kvferry-llama.pc without its library"
fi

# --- with CMake: the folder of the examples is a project of its own
# configure DIRECTORY SOURCE OPTION...: with what is installed in the prefix, and llama.cpp where it was built with it.
configure() {
    local prefixes="$dir/prefix${llama_dir:+;$llama_dir}"
    cmake -G Ninja -S "$2" -B "$1" -DCMAKE_PREFIX_PATH="$prefixes" "${@:3}" >"$dir/out" 2>"$dir/err"
}
configure "$dir/cmake" "$examples" || flunk "the examples are not configured"
cmake --build "$dir/cmake" >"$dir/out" 2>"$dir/err" || flunk "the examples are not built"
works "$dir/cmake/engine"
[[ -z $llama_dir ]] || "$dir/cmake/llama-example" --help >/dev/null

# asks TEXT CALL OPTION...: a project with that find_package fails and says the text, or works if that is empty.
mkdir "$dir/asks"
asks() {
    printf 'cmake_minimum_required(VERSION 3.25)\nproject(asks LANGUAGES C)\n%s\n' "$2" >"$dir/asks/CMakeLists.txt"
    rm -rf "$dir/asks/build"
    if [[ -z $1 ]]; then
        configure "$dir/asks/build" "$dir/asks" "${@:3}" || flunk "$2 fails"
    else
        ! configure "$dir/asks/build" "$dir/asks" "${@:3}" || flunk "$2 is taken"
        grep -qF "$1" "$dir/err" || flunk "$2 does not say: $1"
    fi
}
version=$(pkg-config --modversion kvferry)
IFS=. read -r major minor patch <<<"$version"
asks "" "find_package(kvferry $version CONFIG REQUIRED)"
asks "compatible" "find_package(kvferry $major.$((minor + 1)) CONFIG REQUIRED)"
asks "compatible" "find_package(kvferry $major.$minor.$((patch + 1)) CONFIG REQUIRED)"
((major > 0)) || asks "compatible" "find_package(kvferry 0.$((minor - 1)) CONFIG REQUIRED)"
asks "no component gone" "find_package(kvferry CONFIG REQUIRED COMPONENTS gone)"
asks "no component llama" "find_package(kvferry CONFIG REQUIRED COMPONENTS llama)" -DCMAKE_DISABLE_FIND_PACKAGE_llama=ON
[[ -z $llama_dir ]] || asks "" "find_package(kvferry CONFIG REQUIRED COMPONENTS llama)"

# From C++ too, where there is a compiler for it.
if command -v g++ >/dev/null; then
    echo '#include <kvferry/kvferry.h>' >"$dir/user.cpp"
    echo 'int main() { return kvf_version()[0] == 0; }' >>"$dir/user.cpp"
    g++ -Wall -Wextra -Wpedantic -Werror "$dir/user.cpp" -o "$dir/user" "${flags[@]}"
    LD_LIBRARY_PATH=$libdir "$dir/user"
fi

# The program finds its library by itself.
env -u LD_LIBRARY_PATH "$dir/prefix/bin/kvferry" --version

# --- nothing is left, except what others put there
touch "$dir/prefix/lib/another"
make -C "$KVF_SOURCE" uninstall PREFIX="$dir/prefix" >"$dir/out" 2>"$dir/err" || flunk "make uninstall failed"
left=$(find "$dir/prefix" ! -type d)
[[ $left == "$dir/prefix/lib/another" ]] || flunk "make uninstall leaves: $left"
left=$(find "$dir/prefix" -name '*kvferry*')
[[ -z $left ]] || flunk "make uninstall leaves: $left"
! make -C "$KVF_SOURCE" uninstall PREFIX="$dir/prefix" >"$dir/out" 2>"$dir/err" || flunk "uninstalled twice"
echo "what is installed can be used"
