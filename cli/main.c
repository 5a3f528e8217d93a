/* SPDX-License-Identifier: Apache-2.0
 *
 * Entry point of the program kvferry: finds the verb and runs it.
 */
#include "common/cli.h"
#include "common/llama.h"
#include "verbs/verbs.h"

#include <signal.h>
#include <stdbool.h>
#include <string.h>

typedef struct verb {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
    bool needs_llama; /* it, or what it starts */
} verb;

/* The verbs of the module that needs llama.cpp. */
static int run(int argc, char **argv) {
    const kvfcli_llama *llama = kvfcli_load_llama();
    return llama != NULL ? llama->run(argc, argv) : KVFCLI_CONFIG;
}

static int explain(int argc, char **argv) {
    const kvfcli_llama *llama = kvfcli_load_llama();
    return llama != NULL ? llama->explain(argc, argv) : KVFCLI_CONFIG;
}

static const verb verbs[] = {
    {"run", run, "answer a prompt with a GGUF model, and load what is stored of it", true},
    {"exec", kvfcli_exec, "start llama-server, or another llama.cpp program, with the store", true},
    {"explain", explain, "say what of a prompt is stored, and why the rest is not", true},
    {"ls", kvfcli_ls, "list spaces, blocks and sessions", false},
    {"inspect", kvfcli_inspect, "show one space, block or session", false},
    {"get", kvfcli_get, "read one record, verified", false},
    {"put", kvfcli_put, "write one record", false},
    {"verify", kvfcli_verify, "verify every record of a store, byte by byte", false},
    {"clear", kvfcli_clear, "remove a space, a session or all", false},
    {"doctor", kvfcli_doctor, "what is wrong with a store, and how to fix it", false},
    {"stat", kvfcli_stat, "how much a store holds", false},
};
#define NUM_VERBS (sizeof verbs / sizeof *verbs)

static const char introduction[] =
    "kvferry: prefill once, anywhere. Keeps the KV cache of prompts in a store, so that a prefix is\n"
    "computed once.\n"
    "\n"
    "Quick start:\n";

static const char start_with_llama[] =
    "  kvferry run -m model.gguf -f document.txt -p \"What is it about?\"     # computes the prompt, and saves it\n"
    "  kvferry run -m model.gguf -f document.txt -p \"What is it about?\"     # loads it: the answer begins at once\n"
    "  kvferry exec -- llama-server -m model.gguf                           # the same for an unmodified llama-server\n";

static const char start[] =
    "  kvferry ls                                                           # what is stored\n"
    "  export KVFERRY_STORE=redis://localhost                               # the same for all machines\n"
    "  kvferry doctor                                                       # is that server configured well?\n"
    "\n"
    "Verbs:\n";

static const char conclusion[] =
    "\n"
    "kvferry VERB --help explains each. A store is named by a URL: file:/folder,\n"
    "redis://host:port/db, redis+unix:///path/of.sock, mem: ; without --store URL or $KVFERRY_STORE\n"
    "it is file:~/.cache/kvferry/store. --secret-file FILE seals what is stored, so that nobody\n"
    "without that file can read or forge it (docs/security.md).\n"
    "Exit codes: 0 fine, 1 damaged or not found, 2 usage, 3 store, 4 model or input, 5 I/O, 130 interrupted.\n";

static void print_help(FILE *out) {
    bool has_llama = kvfcli_has_llama();
    fputs(introduction, out);
    fputs(has_llama ? start_with_llama : "", out);
    fputs(start, out);
    for (size_t i = 0; i < NUM_VERBS; i++) {
        if (has_llama || !verbs[i].needs_llama) {
            fprintf(out, "  %-8s %s\n", verbs[i].name, verbs[i].summary);
        }
    }
    fputs(has_llama ? "" : "run, exec and explain need a kvferry that was built with llama.cpp, and installed whole.\n",
          out);
    fputs(conclusion, out);
}

static const verb *find_verb(const char *name) {
    for (size_t i = 0; i < NUM_VERBS; i++) {
        if (strcmp(verbs[i].name, name) == 0) {
            return &verbs[i];
        }
    }
    return NULL;
}

static int run_verb(int argc, char **argv) {
    const verb *v = find_verb(argv[0]);
    if (v == NULL) {
        kvfcli_say("there is no verb \"%s\"; see kvferry --help", argv[0]);
        return KVFCLI_USAGE;
    }
    return kvfcli_finish(v->run(argc, argv));
}

static int help(int argc, char **argv) {
    if (argc < 2) {
        print_help(stdout);
        return kvfcli_finish(KVFCLI_FINE);
    }
    char *help_argv[] = {argv[1], "--help", NULL};
    return run_verb(2, help_argv);
}

int main(int argc, char **argv) {
    /* A reader that ends early (`kvferry ls | head`) causes a write error, which is handled; sockets do not raise
     * SIGPIPE at all. */
    signal(SIGPIPE, SIG_IGN);
    if (argc < 2) {
        print_help(stderr);
        return KVFCLI_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        return help(argc - 1, argv + 1);
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("kvferry %s\n", kvf_version());
        return kvfcli_finish(KVFCLI_FINE);
    }
    return run_verb(argc - 1, argv + 1);
}
