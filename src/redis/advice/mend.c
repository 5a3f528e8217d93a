/* SPDX-License-Identifier: Apache-2.0
 *
 * Turns the fix of a setting into commands to type, or into lines of redis.conf.
 */
#include "redis/advice/mend.h"

#include <stdio.h>
#include <string.h>

typedef struct text {
    char *out;
    size_t len, cap;
    bool full; /* something did not fit, and is left out completely */
} text;

static void put(text *t, const char *bytes, size_t len) {
    if (len >= t->cap - t->len) {
        t->full = true;
        return;
    }
    memcpy(t->out + t->len, bytes, len);
    t->len += len;
    t->out[t->len] = '\0';
}

static void say(text *t, const char *word) {
    put(t, word, strlen(word));
}

/* Writes one word for a shell. */
static void say_word(text *t, const char *word) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:/@%+,";
    if (word[0] != '\0' && word[strspn(word, plain)] == '\0') {
        say(t, word);
        return;
    }
    say(t, "'");
    for (; *word != '\0'; word++) {
        if (*word == '\'') {
            say(t, "'\\''");
        } else {
            put(t, word, 1);
        }
    }
    say(t, "'");
}

static void say_option(text *t, const char *option, const char *value) {
    if (value != NULL) {
        say(t, option);
        say_word(t, value);
    }
}

static bool is_here(const char *host) {
    return strcmp(host, "127.0.0.1") == 0 || strcmp(host, "localhost") == 0;
}

/* redis-cli with everything needed to reach the server except the password, which it asks for. */
static void say_client(text *t, const kvfi_redis_conf *conf, const kvfi_endpoint *at) {
    char number[16];
    say(t, "redis-cli");
    if (at->path != NULL) {
        say_option(t, " -s ", at->path);
    } else {
        say_option(t, " -h ", is_here(at->host) ? NULL : at->host);
        snprintf(number, sizeof number, " -p %u", at->port);
        say(t, number);
    }
    if (conf->tls_conf.on) {
        say(t, " --tls");
        say_option(t, " --cacert ", conf->tls_conf.ca_file);
    }
    say_option(t, " --user ", conf->user);
    say(t, conf->password != NULL ? " --askpass" : "");
    if (conf->db != 0) {
        snprintf(number, sizeof number, " -n %u", conf->db);
        say(t, number);
    }
    say(t, " ");
}

/* In redis.conf the words of a value are separate; on the command line they are one argument. */
static void say_line(text *t, const char *setting, size_t len) {
    say(t, "in redis.conf: ");
    for (size_t i = 0; i < len; i++) {
        bool empty = setting[i] == '"' && ((i + 1 < len && setting[i + 1] == '"') || (i > 0 && setting[i - 1] == '"'));
        if (setting[i] != '"' || empty) {
            put(t, setting + i, 1);
        }
    }
}

static void say_command(text *t, const char *command, size_t len, const char *user) {
    const char *name = memchr(command, '@', len);
    size_t front = name != NULL ? (size_t)(name - command) : len;
    put(t, command, front);
    if (name != NULL) {
        say_word(t, user != NULL ? user : "default");
        put(t, name + 1, len - front - 1);
    }
}

static bool write_all(char *out, const char *mend, const kvfi_redis_conf *conf, const char *client, bool config) {
    text t = {.out = out, .cap = KVFI_MEND_BYTES};
    out[0] = '\0';
    while (*mend != '\0') {
        size_t plain = strcspn(mend, "{[");
        put(&t, mend, plain);
        mend += plain;
        if (*mend == '\0') {
            break;
        }
        size_t len = strcspn(mend, "}]");
        if (*mend == '{' && !config) {
            say_line(&t, mend + 1, len - 1);
        } else {
            say(&t, client);
            say(&t, *mend == '{' ? "CONFIG SET " : "");
            say_command(&t, mend + 1, len - 1, conf->user);
        }
        mend += len + 1;
    }
    return !t.full;
}

void kvfi_mend_write(char out[KVFI_MEND_BYTES], const char *mend, const kvfi_redis_conf *conf, const kvfi_endpoint *at,
                     bool config) {
    char client[KVFI_MEND_BYTES / 2];
    text t = {.out = client, .cap = sizeof client};
    say_client(&t, conf, at);
    if (t.full || !write_all(out, mend, conf, client, config)) {
        (void)write_all(out, mend, conf, "", config);
    }
}
