#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Compares engines/triton/abi with a real libtritonserver: the headers are clean C11 and C++17, it exports every function that
# they declare, and its names for the enums are theirs. KVF_TRITON is Triton's folder; without one the second part is skipped.
set -euo pipefail
cd "${KVF_SOURCE:-$(dirname "${BASH_SOURCE[0]}")/../..}/engines/triton/abi"
temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT

for header in *.h; do
    "${CC:-cc}" -std=c11 -Wall -Wextra -Wstrict-prototypes -pedantic -Werror -fsyntax-only -x c "$header"
    "${CXX:-c++}" -std=c++17 -Wall -Wextra -pedantic -Werror -fsyntax-only -x c++ "$header"
done

if [[ ! -x ${KVF_TRITON:-}/bin/tritonserver ]]; then
    echo "no Triton: make setup-triton"
    exit 77
fi
library=$(ldd "$KVF_TRITON/bin/tritonserver" | awk '/libtritonserver/ { print $3 }')
[[ -e $library ]] || { echo "$KVF_TRITON/bin/tritonserver does not find its libtritonserver" >&2; exit 1; }

# What a backend or a cache implements is marked so; all else is the server's.
cat -- *.h | tr '\n' ' ' | sed -E 's/[A-Z]+_EXPORT TRITON[^;]*;//g' | grep -oE '\bTRITON(SERVER|BACKEND|CACHE)_[A-Z][A-Za-z]+\(' | tr -d '(' | sort -u >"$temp/declared"
nm -D --defined-only "$library" | awk '{ print $3 }' | sort -u >"$temp/exported"
missing=$(comm -23 "$temp/declared" "$temp/exported")
if [[ -n $missing ]]; then
    printf 'declared, and not in %s:\n%s\n' "$library" "$missing" >&2
    exit 1
fi

cat >"$temp/values.c" <<'END'
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include "backend.h"
#include "cache.h"

static int wrong;

static void same(const char *what, const char *theirs, const char *ours) {
    if (strcmp(theirs, ours) != 0) {
        fprintf(stderr, "%s: the server says %s, the header %s\n", what, theirs, ours);
        wrong = 1;
    }
}

int main(void) {
#define DATATYPE(name) same("data type", TRITONSERVER_DataTypeString(TRITONSERVER_TYPE_##name), #name)
    DATATYPE(BOOL), DATATYPE(UINT8), DATATYPE(UINT16), DATATYPE(UINT32), DATATYPE(UINT64), DATATYPE(INT8), DATATYPE(INT16);
    DATATYPE(INT32), DATATYPE(INT64), DATATYPE(FP16), DATATYPE(FP32), DATATYPE(FP64), DATATYPE(BYTES), DATATYPE(BF16);
#define MEMORY(name) same("memory type", TRITONSERVER_MemoryTypeString(TRITONSERVER_MEMORY_##name), #name)
    MEMORY(CPU), MEMORY(CPU_PINNED), MEMORY(GPU);
#define PARAMETER(name) same("parameter type", TRITONSERVER_ParameterTypeString(TRITONSERVER_PARAMETER_##name), #name)
    PARAMETER(STRING), PARAMETER(INT), PARAMETER(BOOL), PARAMETER(DOUBLE), PARAMETER(BYTES);
#define KIND(name) same("instance group", TRITONSERVER_InstanceGroupKindString(TRITONSERVER_INSTANCEGROUPKIND_##name), #name)
    KIND(AUTO), KIND(CPU), KIND(GPU), KIND(MODEL);
#define ERROR(name, text) \
    do { \
        TRITONSERVER_Error *error = TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_##name, "x"); \
        same("error", TRITONSERVER_ErrorCodeString(error), text); \
        TRITONSERVER_ErrorDelete(error); \
    } while (0)
    ERROR(UNKNOWN, "Unknown");
    ERROR(INTERNAL, "Internal");
    ERROR(NOT_FOUND, "Not found");
    ERROR(INVALID_ARG, "Invalid argument");
    ERROR(UNAVAILABLE, "Unavailable");
    ERROR(UNSUPPORTED, "Unsupported");
    ERROR(ALREADY_EXISTS, "Already exists");
    /* Triton 2.51 has no text for ERROR_CANCELLED. */
    uint32_t major = 0, minor = 0;
    TRITONSERVER_ApiVersion(&major, &minor);
    if (major != TRITONSERVER_API_VERSION_MAJOR) {
        fprintf(stderr, "TRITONSERVER is version %u\n", major), wrong = 1;
    }
    TRITONBACKEND_ApiVersion(&major, &minor);
    if (major != TRITONBACKEND_API_VERSION_MAJOR || minor < TRITONBACKEND_API_VERSION_MINOR) {
        fprintf(stderr, "TRITONBACKEND is version %u.%u\n", major, minor), wrong = 1;
    }
    TRITONCACHE_ApiVersion(&major, &minor);
    if (major != TRITONCACHE_API_VERSION_MAJOR || minor < TRITONCACHE_API_VERSION_MINOR) {
        fprintf(stderr, "TRITONCACHE is version %u.%u\n", major, minor), wrong = 1;
    }
    return wrong;
}
END
"${CC:-cc}" -std=c11 -Wall -Wextra -Werror -I. -o "$temp/values" "$temp/values.c" "$library" -Wl,-rpath,"$(dirname "$library")" \
    -Wl,--disable-new-dtags -Wl,--allow-shlib-undefined # an rpath that also holds for the libraries of the library
"$temp/values"
echo "$(wc -l <"$temp/declared") functions are in $(basename "$library")"
