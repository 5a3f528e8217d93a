/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds and loads the part of the program that needs llama.cpp.
 *
 * Its run path names its own folder, where `make install` puts the libllama of the build. The dynamic linker looks into
 * LD_LIBRARY_PATH before, and into the folders of the system afterwards.
 */
#include "common/llama.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODULE "libkvferry-run.so"

bool kvfcli_find_beside(char out[4096], const char *name) {
    static const char *const places[] = {"", "/../" KVF_LIBDIR "/kvferry", "/../lib/kvferry"};
    char self[3800];
    ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
    if (len <= 0) {
        return false;
    }
    self[len] = '\0';
    *strrchr(self, '/') = '\0';
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(out, 4096, "%s%s/%s", self, places[i], name);
        if (access(out, R_OK) == 0) {
            return true;
        }
    }
    return false;
}

bool kvfcli_has_llama(void) {
    char path[4096];
    return kvfcli_find_beside(path, MODULE);
}

/* llama.cpp's threads synchronise after every operation, hundreds of times a token. By default libgomp lets an early
 * thread spin for milliseconds. If it shares its core with another program, it spends there the time that the late
 * thread needs, and a token can take a second. With GOMP_SPINCOUNT=100 it soon asks the kernel to wake it: an idle
 * machine is as fast, and a busy one several times faster (docs/llama.md has the figures). OMP_WAIT_POLICY=passive does
 * not spin at all, which is slower on an idle machine. libgomp reads both when it is loaded, which llama.cpp does. */
static void calm_threads(void) {
    if (getenv("GOMP_SPINCOUNT") == NULL && getenv("OMP_WAIT_POLICY") == NULL) {
        (void)setenv("GOMP_SPINCOUNT", "100", 1);
    }
}

const kvfcli_llama *kvfcli_load_llama(void) {
    char path[4096];
    if (!kvfcli_find_beside(path, MODULE)) {
        kvfcli_say("this kvferry was built or installed without llama.cpp, which this needs: %s is not there", MODULE);
        return NULL;
    }
    calm_threads();
    void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (module == NULL) {
        kvfcli_say("this needs llama.cpp, which can't be loaded: %s; install kvferry with its llama.cpp again, or name "
                   "the folder of libllama in LD_LIBRARY_PATH",
                   dlerror());
        return NULL;
    }
    const kvfcli_llama *llama = dlsym(module, KVFCLI_LLAMA_SYMBOL);
    if (llama == NULL || strcmp(llama->version, kvf_version()) != 0) {
        kvfcli_say("%s is of another version of kvferry (%s) than this program (%s): install both together", path,
                   llama != NULL ? llama->version : "unknown", kvf_version());
        return NULL;
    }
    if (strcmp(llama->llama_version(), llama->built_with) != 0) {
        kvfcli_say("the libllama that was found (%s) is another than kvferry was built with (%s): take it out of "
                   "LD_LIBRARY_PATH, or name the right one there",
                   llama->llama_version(), llama->built_with);
        return NULL;
    }
    return llama;
}
