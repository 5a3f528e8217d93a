/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages, exit codes and Ctrl-C of all verbs.
 */
#include "common/cli.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

static const char *verb_name = "";

/* ---- errors ---- */

void kvfcli_set_verb(const char *name) {
    verb_name = name;
}

void kvfcli_say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("kvferry: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

int kvfcli_usage(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("kvferry: ", stderr);
    vfprintf(stderr, format, args);
    fprintf(stderr, "; see kvferry %s --help\n", verb_name);
    va_end(args);
    return KVFCLI_USAGE;
}

int kvfcli_no_memory(void) {
    kvfcli_say("no memory");
    return KVFCLI_IO;
}

int kvfcli_exit_of(kvf_status status) {
    switch (status) {
    case KVF_OK:
        return KVFCLI_FINE;
    case KVF_MISS:
        return KVFCLI_FOUND;
    case KVF_CONFIG:
        return KVFCLI_CONFIG;
    case KVF_LIMIT:
    case KVF_REFUSED:
        return KVFCLI_INPUT;
    case KVF_AGAIN:
    case KVF_IO:
    case KVF_NOMEM:
    case KVF_CLOSED:
        return KVFCLI_IO;
    }
    return KVFCLI_IO;
}

int kvfcli_fail(kvf_status status, const kvf_error *err) {
    kvfcli_say("%s", err->what[0] != '\0' ? err->what : kvf_status_name(status));
    return kvfcli_exit_of(status);
}

int kvfcli_finish(int code) {
    bool lost = ferror(stdout) != 0;
    lost = fflush(stdout) != 0 || lost;
    if (lost && code != KVFCLI_INTERRUPTED) {
        kvfcli_say("the output could not be written: %s", strerror(errno));
        return KVFCLI_IO;
    }
    return code;
}

static void log_to_stderr(void *ctx, kvf_log_level level, const char *message) {
    static const char *const names[] = {"error", "warning", "info", "debug"};
    (void)ctx;
    fprintf(stderr, "kvferry: %s: %s\n", names[level], message);
}

void kvfcli_log(kvf_log_level level) {
    kvf_set_log(log_to_stderr, NULL, level);
}

/* ---- Ctrl-C ---- */

static volatile sig_atomic_t interrupts;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    if (interrupts++ > 0) {
        _exit(KVFCLI_INTERRUPTED);
    }
}

void kvfcli_catch_interrupt(void) {
    struct sigaction action = {.sa_handler = on_interrupt};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool kvfcli_interrupted(void) {
    return interrupts > 0;
}
