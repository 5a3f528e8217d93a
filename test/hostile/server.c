/* SPDX-License-Identifier: Apache-2.0
 *
 * check-hostile, Redis: a real server holds what a hostile client wrote: records of one and of several parts, other
 * types under their keys, fields of sessions.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "hostile/hostile.h"
#include "record/record.h"
#include "support/server.h"

#define PAYLOAD_BYTES 9000u
#define OPTIONS       "?part=4096&ttl=3600"
#define MAX_VALUES    64u
#define SLACK_BYTES   ((size_t)1 << 20)

typedef struct value {
    char key[200], field[32]; /* field "": a string */
    kvft_buffer bytes;
} value;

static kvft_server *server;
static FILE *in;
static int fd = -1;
static value values[MAX_VALUES]; /* as they were */
static size_t num_values, calm_bytes;

static void die(const char *what) {
    perror(what);
    abort();
}

/* ---- a client of its own, for any bytes ---- */

static void dial(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", server->socket);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0 || (in = fdopen(fd, "r")) == NULL) {
        die("no connection to the server");
    }
}

typedef struct arg {
    const void *bytes;
    size_t len;
} arg;

static void send_all(const void *bytes, size_t len) {
    for (const char *at = bytes; len > 0;) {
        ssize_t n = send(fd, at, len, MSG_NOSIGNAL);
        if (n <= 0) {
            die("send");
        }
        at += n;
        len -= (size_t)n;
    }
}

/* The bulk of the reply; of any other reply (no array) nothing. */
static kvft_buffer command(const arg *args, size_t num) {
    char line[512];
    snprintf(line, sizeof line, "*%zu\r\n", num);
    send_all(line, strlen(line));
    for (size_t i = 0; i < num; i++) {
        snprintf(line, sizeof line, "$%zu\r\n", args[i].len);
        send_all(line, strlen(line));
        send_all(args[i].bytes, args[i].len);
        send_all("\r\n", 2);
    }
    if (fgets(line, sizeof line, in) == NULL) {
        die("the server is gone");
    }
    kvft_buffer b = kvft_buffer_of("", 0);
    if (line[0] == '$' && line[1] != '-') {
        size_t len = strtoul(line + 1, NULL, 10);
        kvft_buffer_free(&b);
        b = (kvft_buffer){malloc(len + 2), len};
        if (b.data == NULL || fread(b.data, 1, len + 2, in) != len + 2) {
            die("the server is gone");
        }
    }
    return b;
}

static arg text(const char *t) {
    return (arg){t, strlen(t)};
}

static void tell(const char *verb, const char *key, const char *third, const kvft_buffer *fourth) {
    arg args[4] = {text(verb), text(key)};
    size_t num = 2;
    if (third != NULL && *third != '\0') {
        args[num++] = text(third);
    }
    if (fourth != NULL) {
        args[num++] = (arg){fourth->data, fourth->len};
    }
    kvft_buffer reply = command(args, num);
    kvft_buffer_free(&reply);
}

static void put(const value *v, const kvft_buffer *bytes) {
    tell(v->field[0] != '\0' ? "HSET" : "SET", v->key, v->field, bytes);
}

/* ---- the server as it was ---- */

static void take(const char *key, const char *field) {
    value *v = &values[num_values++];
    if (num_values > MAX_VALUES) {
        abort();
    }
    snprintf(v->key, sizeof v->key, "%s", key);
    snprintf(v->field, sizeof v->field, "%s", field);
    arg args[3] = {text(*field != '\0' ? "HGET" : "GET"), text(key), text(field)};
    v->bytes = command(args, *field != '\0' ? 3 : 2);
}

static void take_all(void) {
    char *keys = kvft_server_ask(server, "KEYS *"), *next = keys;
    for (char *key = strsep(&next, "\n"); key != NULL; key = strsep(&next, "\n")) {
        if (strcmp(key, "hostile") == 0) {
            take(key, "meta");
            take(key, "keys");
            take(key, "values");
        } else if (*key != '\0') {
            take(key, "");
        }
    }
    free(keys);
}

static void restore(void) {
    arg flush = text("FLUSHALL");
    kvft_buffer reply = command(&flush, 1);
    kvft_buffer_free(&reply);
    for (size_t i = 0; i < num_values; i++) {
        put(&values[i], &values[i].bytes);
    }
}

/* ---- what is done to it ---- */

static hostile_use use;

static value *any(uint64_t *random) {
    return &values[hostile_below(random, num_values)];
}

static bool is_record(const value *v) {
    return v->bytes.len > KVFI_HEADER_BYTES && memcmp(v->bytes.data, "KVF", 3) == 0;
}

/* In a record of several parts the checksum is in another one; all of one block are made one value and cut again. */
static void forge_parts(const value *first, uint64_t *random) {
    kvft_buffer all = kvft_buffer_of("", 0), p;
    size_t at = 0, len = 0, used = 0;
    value *parts[MAX_VALUES];
    size_t num = 0;
    for (size_t i = 0; i < num_values; i++) { /* the others of that block have its key in their name, and a number */
        size_t prefix = strlen(first->key);
        if (strncmp(values[i].key, first->key, prefix) == 0) {
            parts[num++] = &values[i];
        }
    }
    for (size_t want = 0; want < num; want++) { /* shortest names first, then by number */
        for (size_t i = want + 1; i < num; i++) {
            if (strlen(parts[i]->key) < strlen(parts[want]->key) ||
                (strlen(parts[i]->key) == strlen(parts[want]->key) && strcmp(parts[i]->key, parts[want]->key) < 0)) {
                value *other = parts[i];
                parts[i] = parts[want];
                parts[want] = other;
            }
        }
        kvft_buffer_splice(&all, all.len, 0, parts[want]->bytes.data, parts[want]->bytes.len);
    }
    if (kvft_payload_of(&all, &at, &len)) {
        p = kvft_buffer_of(all.data + at, len);
        kvft_mutate(&p, random);
        kvft_forge_payload(&all, &p);
        kvft_buffer_free(&p);
    }
    for (size_t i = 0; i < num; i++) {
        size_t most = all.len - used;
        size_t here = i + 1 == num ? most : parts[i]->bytes.len < most ? parts[i]->bytes.len : most;
        kvft_buffer piece = kvft_buffer_of(all.data + used, here);
        put(parts[i], &piece);
        kvft_buffer_free(&piece);
        used += here;
    }
    kvft_buffer_free(&all);
    use.forged = true;
}

static void forge(uint64_t *random) {
    const value *v = any(random);
    kvft_buffer b = kvft_buffer_of(v->bytes.data, v->bytes.len);
    if (is_record(v) && hostile_below(random, 2) == 0) {
        kvft_buffer_free(&b);
        forge_parts(v, random);
        return;
    }
    (v->field[0] != '\0' && strcmp(v->field, "meta") == 0 ? kvft_mutate_text : kvft_mutate)(&b, random);
    if (is_record(v) && hostile_below(random, 2) == 0) {
        kvft_reseal(&b);
    }
    put(v, &b);
    kvft_buffer_free(&b);
    use.forged = use.forged || is_record(v);
    use.forged_session = use.forged_session || v->field[0] != '\0'; /* without meta, bytes are not verified */
}

static void swap(uint64_t *random) {
    const value *a = any(random), *b = any(random);
    put(a, &b->bytes);
    use.forged_session = use.forged_session || a->field[0] != '\0';
}

static void lose(uint64_t *random) {
    const value *v = any(random);
    tell(v->field[0] != '\0' ? "HDEL" : "DEL", v->key, v->field, NULL);
    use.forged_session = use.forged_session || v->field[0] != '\0';
}

static void retype(uint64_t *random) {
    static const char *const types[][2] = {{"LPUSH", "x"}, {"SADD", "x"}, {"PFADD", "x"}, {"SETBIT", "3999999"}};
    const value *v = any(random);
    size_t type = hostile_below(random, sizeof types / sizeof *types);
    kvft_buffer one = kvft_buffer_of("1", 1);
    tell("DEL", v->key, NULL, NULL);
    if (hostile_below(random, 3) == 0) {
        tell("HSET", v->key, "keys", &one);
        one.len = 0;
    } else {
        tell(types[type][0], v->key, types[type][1], type == 3 ? &one : NULL);
    }
    kvft_buffer_free(&one);
    use.forged_session = use.forged_session || v->field[0] != '\0';
}

/* Keys that are nearly ours. */
static void add_key(uint64_t *random) {
    const value *v = any(random);
    kvft_buffer name = kvft_buffer_of(v->key, strlen(v->key));
    kvft_mutate_text(&name, random);
    kvft_buffer_splice(&name, name.len, 0, "", 1);
    if (memchr(name.data, 0, name.len - 1) == NULL && name.len > 1) {
        tell(hostile_below(random, 4) == 0 ? "LPUSH" : "SET", (const char *)name.data, "", &v->bytes);
    }
    kvft_buffer_free(&name);
}

static void expire(uint64_t *random) {
    static const char *const times[] = {"1", "0", "-1", "9223372036854775", "100000000000"};
    tell("PEXPIRE", any(random)->key, times[hostile_below(random, sizeof times / sizeof *times)], NULL);
}

/* ---- a case ---- */

static size_t use_server(uint64_t *random) {
    char url[300];
    snprintf(url, sizeof url, "%s" OPTIONS, server->unix_url);
    kvft_meter_begin();
    kvf_store *store = kvft_store(url);
    hostile_ask(store, &use, random);
    kvf_store_close(store);
    kvft_meter_end();
    return kvft_meter_peak();
}

static bool begin(void) {
    static const char *const args[] = {"--maxmemory", "256mb", NULL};
    char url[300];
    uint64_t random = 0;
    server = kvft_server_start(args);
    if (server == NULL) {
        puts("no redis-server is installed");
        return false;
    }
    snprintf(url, sizeof url, "%s" OPTIONS, server->unix_url);
    kvf_store *store = kvft_store(url);
    hostile_fill(store, PAYLOAD_BYTES);
    kvf_store_close(store);
    dial();
    num_values = 0;
    take_all();
    use = (hostile_use){.payload_bytes = PAYLOAD_BYTES, .budget_ms = 10000, .saves = true};
    for (size_t i = 0; i < 8; i++) {
        size_t held = use_server(&random);
        calm_bytes = held > calm_bytes ? held : calm_bytes;
        restore();
    }
    return true;
}

static void run(uint64_t *random) {
    static void (*const deeds[])(uint64_t *) = {forge, forge, forge, swap, lose, retype, add_key, expire};
    restore();
    use = (hostile_use){.payload_bytes = PAYLOAD_BYTES, .budget_ms = 10000, .saves = hostile_below(random, 3) == 0};
    for (size_t times = 1 + hostile_below(random, 3); times > 0; times--) {
        deeds[hostile_below(random, sizeof deeds / sizeof *deeds)](random);
    }
    hostile_memory(use_server(random), calm_bytes + SLACK_BYTES);
}

static void end(void) {
    fclose(in);
    for (size_t i = 0; i < num_values; i++) {
        kvft_buffer_free(&values[i].bytes);
    }
    kvft_server_stop(server);
}

const hostile_part hostile_server = {"server", 10, begin, run, end};
