/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry exec: starts a program that uses llama.cpp, with the shim before its libllama.
 */
#include "common/cli.h"
#include "common/llama.h"
#include "verbs/verbs.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHIM "libkvferry-llama-shim.so"

typedef struct request {
    const char *stats, *tenant;
    bool quiet, portable;
    uint32_t budget_ms, block_tokens; /* 0 = the shim's default */
    char **program;                   /* with its arguments */
} request;

/* ---- the program ---- */

/* Where execvp would find it. */
static bool find_program(char out[4096], const char *name) {
    const char *path = getenv("PATH");
    if (strchr(name, '/') != NULL || path == NULL) {
        return snprintf(out, 4096, "%s", name) < 4096 && access(out, X_OK) == 0;
    }
    for (size_t len; *path != '\0'; path += len + (path[len] == ':')) {
        len = strcspn(path, ":");
        int n = len > 0 ? snprintf(out, 4096, "%.*s/%s", (int)len, path, name) : snprintf(out, 4096, "%s", name);
        if (n < 4096 && access(out, X_OK) == 0) {
            return true;
        }
    }
    return false;
}

typedef enum { SCRIPT, STATIC, DYNAMIC, FOREIGN } kind;

static kind kind_of(const char *path) {
    Elf64_Ehdr head = {0};
    kind found = FOREIGN;
    FILE *in = fopen(path, "rb");
    size_t len = in != NULL ? fread(&head, 1, sizeof head, in) : 0;
    if (len > 2 && memcmp(&head, "#!", 2) == 0) {
        found = SCRIPT;
    } else if (len == sizeof head && memcmp(head.e_ident, ELFMAG, SELFMAG) == 0 &&
               head.e_ident[EI_CLASS] == ELFCLASS64) {
        found = STATIC;
        for (unsigned i = 0; i < head.e_phnum; i++) {
            Elf64_Phdr part;
            if (fseek(in, (long)(head.e_phoff + (uint64_t)i * head.e_phentsize), SEEK_SET) != 0 ||
                fread(&part, sizeof part, 1, in) != 1) {
                break;
            }
            found = part.p_type == PT_INTERP ? DYNAMIC : found;
        }
    }
    if (in != NULL) {
        fclose(in);
    }
    return found;
}

/* The dynamic linker lists what it would load, and runs no code of the program. */
static bool links_llama(const char *path) {
    int ends[2];
    char line[4352];
    bool found = false;
    if (pipe(ends) != 0) {
        return true; /* unknown: the program will report it */
    }
    pid_t pid = fork();
    if (pid == 0) {
        setenv("LD_TRACE_LOADED_OBJECTS", "1", 1);
        unsetenv("LD_PRELOAD");
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execl(path, path, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    FILE *in = fdopen(ends[0], "r");
    while (in != NULL && fgets(line, sizeof line, in) != NULL) {
        found = found || strstr(line, "libllama.so") != NULL;
    }
    if (in != NULL) {
        fclose(in);
    } else {
        close(ends[0]);
    }
    return pid < 0 || (waitpid(pid, NULL, 0) == pid && found);
}

static int check_program(char path[4096], const char *name) {
    if (!find_program(path, name)) {
        bool is_there = strchr(name, '/') != NULL && access(name, F_OK) == 0;
        kvfcli_say("%s%s", name, is_there ? " is not executable" : ": no such program");
        return KVFCLI_INPUT;
    }
    switch (kind_of(path)) {
    case SCRIPT: /* its child processes inherit the shim */
        return KVFCLI_FINE;
    case STATIC:
        kvfcli_say(
            "%s is statically linked, so its llama.cpp can't be replaced; build llama.cpp with -DBUILD_SHARED_LIBS=ON",
            path);
        return KVFCLI_INPUT;
    case DYNAMIC:
        if (links_llama(path)) {
            return KVFCLI_FINE;
        }
        kvfcli_say("%s does not link libllama.so: it does not use llama.cpp, has it built in, or loads it later; build "
                   "llama.cpp with -DBUILD_SHARED_LIBS=ON",
                   path);
        return KVFCLI_INPUT;
    case FOREIGN:
        break;
    }
    kvfcli_say("%s: not a program of this machine", path);
    return KVFCLI_INPUT;
}

/* ---- the shim ---- */

static bool set_preload(const char *shim) {
    const char *others = getenv("LD_PRELOAD");
    char *all = NULL;
    if (others == NULL || others[0] == '\0') {
        return setenv("LD_PRELOAD", shim, 1) == 0;
    }
    bool ok = asprintf(&all, "%s:%s", shim, others) > 0 && setenv("LD_PRELOAD", all, 1) == 0;
    free(all);
    return ok;
}

static bool set_stores(const kvfcli_common *common) {
    char *text = NULL;
    size_t len = 0;
    FILE *out = open_memstream(&text, &len);
    for (size_t i = 0; out != NULL && i < common->num_urls; i++) {
        fprintf(out, "%s%s", i > 0 ? " " : "", common->urls[i]);
    }
    bool ok = out != NULL && fclose(out) == 0 && setenv("KVFERRY_STORE", text, 1) == 0;
    free(text);
    return ok;
}

static bool set_text(const char *name, const char *value) {
    return value == NULL || setenv(name, value, 1) == 0;
}

static bool set_number(const char *name, uint32_t value) {
    char text[16];
    snprintf(text, sizeof text, "%u", value);
    return value == 0 || setenv(name, text, 1) == 0;
}

/* The shim reads its options from the environment. */
static bool set_environment(const request *r, const kvfcli_common *common, const char *shim) {
    return set_stores(common) && set_text("KVFERRY_SECRET_FILE", common->secret_files) &&
           set_text("KVFERRY_STATS", r->stats) && set_text("KVFERRY_TENANT", r->tenant) &&
           set_text("KVFERRY_QUIET", r->quiet ? "1" : NULL) && set_text("KVFERRY_PORTABLE", r->portable ? "1" : NULL) &&
           set_number("KVFERRY_BUDGET_MS", r->budget_ms) && set_number("KVFERRY_BLOCK_TOKENS", r->block_tokens) &&
           set_preload(shim);
}

static int check_stores(const kvfcli_common *common) {
    kvf_store *store = NULL;
    for (size_t i = 0; i < common->num_urls; i++) {
        if (strpbrk(common->urls[i], " \t\n") != NULL) {
            return kvfcli_usage("a store URL holds a blank: write it as %%20");
        }
    }
    int code = kvfcli_open(&store, common, NULL);
    kvf_store_close(store);
    return code;
}

static int work(void *ctx, kvf_store *none, const kvfcli_common *common) {
    const request *r = ctx;
    char path[4096], shim[4096];
    (void)none;
    int code = check_program(path, r->program[0]);
    code = code == KVFCLI_FINE ? check_stores(common) : code;
    if (code != KVFCLI_FINE) {
        return code;
    }
    if (!kvfcli_find_beside(shim, SHIM)) {
        kvfcli_say("%s is neither beside this program nor in its library folder: is kvferry installed with llama.cpp?",
                   SHIM);
        return KVFCLI_CONFIG;
    }
    if (!set_environment(r, common, shim)) {
        return kvfcli_no_memory();
    }
    signal(SIGPIPE, SIG_DFL); /* as the program would find it without kvferry */
    execv(path, r->program);
    kvfcli_say("%s: %s", path, strerror(errno));
    return KVFCLI_IO;
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    request *r = ctx;
    (void)common;
    if (argc == 0) {
        return kvfcli_usage("name a program after \"--\": kvferry exec -- llama-server -m model.gguf");
    }
    if (argc > 1 && strcmp(argv[-1], "--") != 0) {
        return kvfcli_usage("put -- before the program: kvferry exec -- %s ...", argv[0]);
    }
    if (r->block_tokens != 0 && (r->block_tokens & (r->block_tokens - 1)) != 0) {
        return kvfcli_usage("--block-tokens must be a power of two from 64 to 4096, not %u", r->block_tokens);
    }
    r->program = argv;
    return KVFCLI_FINE;
}

int kvfcli_exec(int argc, char **argv) {
    static const kvfcli_option options[] = {
        KVFCLI_OPT_TEXT(request, stats, 0, "stats", "FILE", "write counters to this file, as JSON"),
        KVFCLI_OPT_FLAG(request, quiet, 0, "quiet", "no lines on stderr"),
        KVFCLI_OPT_NUMBER(request, budget_ms, 0, "budget-ms", "N", 1, 3600000,
                          "longest time for the lookup and load of one batch (10000)"),
        KVFCLI_OPT_NUMBER(request, block_tokens, 0, "block-tokens", "N", 64, 4096,
                          "tokens of a block, a power of two from 64 on (default: near\n1 MiB a record)"),
        KVFCLI_OPT_TEXT(request, tenant, 0, "tenant", "NAME", "separate blocks for this name"),
        KVFCLI_OPT_FLAG(request, portable, 0, "portable",
                        "share blocks between kinds of CPU and GPU (last bits may differ)"),
        {.kind = KVFCLI_END}};
    static const kvfcli_verb verb = {
        .help =
            "usage: kvferry exec [options] -- PROGRAM [argument]...\n"
            "\n"
            "Starts a program that links llama.cpp's libllama dynamically, such as llama-server, with the\n"
            "store: what is stored of a prompt is loaded instead of computed, and new blocks are saved while\n"
            "the program continues. The program itself is not changed, and whatever kvferry can't follow\n"
            "(images, context shifts, embeddings) is computed as usual.\n"
            "\n"
            "  kvferry exec -- llama-server -m model.gguf                             # blocks in ~/.cache/kvferry/store\n"
            "  kvferry exec --store redis://localhost -- llama-server -m model.gguf   # shared by all servers of this model\n"
            "  kvferry exec --stats /run/kvferry.json -- llama-server -m model.gguf   # counters, as JSON\n"
            "\n"
            "The program's stderr gets a line for each prompt, such as\n"
            "  kvferry: sequence 0: 3968 of 3997 tokens loaded from file:/var/cache/kvf in 35 ms, 0 resident ...\n"
            "With several slots that are not unified, add --kv-unified to llama-server's own options.\n"
            "docs/llama-server.md has more.\n",
        .exits =
            "Exit codes: the program's own; 2 usage, 3 a store URL or secret file, 4 an unsuitable program, 5 I/O.\n",
        .options = options,
        .no_json = true,
        .program = true,
        .needs = KVFCLI_OWN,
        .check = check,
        .work = work};
    request r = {.stats = NULL};
    return kvfcli_verb_main(&verb, &r, argc, argv);
}
