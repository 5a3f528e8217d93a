#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# cmake --install into an empty prefix, which is moved then. The examples compile, link and run with what is there, found by
# pkg-config and by find_package(kvferry), which refuses other versions and components that are not there.
# shellcheck source=common.bash disable=SC1091,SC2154
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"
: "${KVF_BUILD:?}" "${KVF_LIB:?}" "${KVF_SOURCE:?}"

symbols=$(nm -D "$KVF_LIB")
if grep -q -E '__(asan|tsan)_init' <<<"$symbols"; then
    echo "a library with sanitizers is not for installing"
    exit 77
fi
cmake --install "$KVF_BUILD" --prefix "$dir/first" >"$dir/out" 2>"$dir/err" || flunk "cmake --install failed"
mv "$dir/first" "$dir/prefix"

examples=$KVF_SOURCE/examples
llama_dir=$(sed -n 's/^KVF_LLAMA_DIR:PATH=//p' "$KVF_BUILD/CMakeCache.txt")
[[ -f $dir/prefix/include/kvferry/llama.h ]] || llama_dir=

# works PROGRAM: an example, as it was built; the second of its prompts is loaded.
works() {
    "$1" >"$dir/out" 2>"$dir/err" || flunk "$1 failed"
    says "149 tokens: 112 loaded, 37 computed"
}

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
echo "what is installed can be used"
