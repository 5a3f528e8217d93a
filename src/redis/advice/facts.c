/* SPDX-License-Identifier: Apache-2.0
 *
 * Asks a server for its state (INFO) and settings (CONFIG GET), and parses the replies.
 */
#include "redis/advice/facts.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>

/* ---- fields and their destinations ---- */

typedef struct field {
    const char *name;
    size_t at;   /* in kvfi_facts */
    size_t size; /* of a text; 0: it is a number */
} field;

#define FIELD(text, member) \
    { text, offsetof(kvfi_facts, member), 0 }
#define TEXT(text, member) \
    { text, offsetof(kvfi_facts, member), sizeof((kvfi_facts *)0)->member }

static const field infos[] = {
    TEXT("redis_version", version),
    TEXT("server_name", name),
    TEXT("redis_mode", mode),
    TEXT("server_mode", mode), /* Valkey's name for it */
    TEXT("role", role),
    TEXT("maxmemory_policy", policy),
    TEXT("mem_allocator", allocator),
    TEXT("rdb_last_bgsave_status", bgsave),
    TEXT("aof_last_write_status", aof_write),
    FIELD("loading", loading),
    FIELD("aof_enabled", aof),
    FIELD("connected_slaves", replicas),
    FIELD("repl_backlog_size", backlog),
    FIELD("process_id", pid),
    FIELD("maxmemory", maxmemory),
    FIELD("used_memory", used),
    FIELD("used_memory_rss", resident),
};

static const field settings_of_us[] = {
    FIELD("proto-max-bulk-len", max_bulk),
    FIELD("io-threads", io_threads),
    FIELD("maxmemory-samples", samples),
    TEXT("save", save),
    TEXT("stop-writes-on-bgsave-error", stop_writes),
    FIELD("client-output-buffer-limit", output_limit),
    FIELD("maxmemory-clients", clients_limit),
};

#define NUM_INFOS    (sizeof infos / sizeof *infos)
#define NUM_SETTINGS (sizeof settings_of_us / sizeof *settings_of_us)

static uint64_t *number_of(kvfi_facts *facts, const field *f) {
    return (uint64_t *)(void *)((char *)facts + f->at);
}

static void take(kvfi_facts *facts, const field *f, const char *text, size_t len) {
    if (f->size > 0) {
        snprintf((char *)facts + f->at, f->size, "%.*s", (int)(len < f->size ? len : f->size - 1), text);
    } else if (!kvfi_parse_u64(number_of(facts, f), text, len)) {
        *number_of(facts, f) = KVFI_UNKNOWN;
    }
}

/* ---- INFO ---- */

static const char *line_end(const char *line, const char *end) {
    const char *stop = memchr(line, '\n', (size_t)(end - line));
    return stop == NULL ? end : stop;
}

/* name:value */
static void take_line(kvfi_facts *facts, const char *line, size_t len) {
    const char *colon = memchr(line, ':', len);
    if (colon == NULL) {
        return;
    }
    size_t name_len = (size_t)(colon - line);
    size_t value_len = len - name_len - 1;
    value_len -= value_len > 0 && line[len - 1] == '\r';
    for (size_t i = 0; i < NUM_INFOS; i++) {
        if (strlen(infos[i].name) == name_len && memcmp(infos[i].name, line, name_len) == 0) {
            take(facts, &infos[i], colon + 1, value_len);
        }
    }
}

static kvf_status hear_info(kvfi_talk *talk, kvfi_facts *facts) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_hear(talk, &reply));
    while (!reply.last) {
        KVFI_TRY(kvfi_talk_hear(talk, &reply)); /* an array is not an INFO, but must be read to its end */
    }
    facts->info = reply.kind == KVFI_RESP_BULK;
    const char *end = facts->info ? reply.text + reply.len : NULL;
    for (const char *line = facts->info ? reply.text : NULL; line < end; line = line_end(line, end) + 1) {
        take_line(facts, line, (size_t)(line_end(line, end) - line));
    }
    return KVF_OK;
}

/* ---- CONFIG GET ---- */

/* normal 0 0 0 slave ...: the hard limit of a normal client. */
static void take_output_limit(kvfi_facts *facts, const char *text, size_t len) {
    static const char words[] = "normal ";
    bool fits = len > sizeof words && memcmp(text, words, sizeof words - 1) == 0;
    const char *number = text + sizeof words - 1;
    const char *stop = fits ? memchr(number, ' ', len - (sizeof words - 1)) : NULL;
    if (stop == NULL || !kvfi_parse_u64(&facts->output_limit, number, (size_t)(stop - number))) {
        facts->output_limit = KVFI_UNKNOWN;
    }
}

/* Bytes, or a share of maxmemory: "5%". */
static void take_clients_limit(kvfi_facts *facts, const char *text, size_t len) {
    bool share = len > 1 && text[len - 1] == '%';
    uint64_t number = 0;
    facts->clients_limit = KVFI_UNKNOWN;
    if (!kvfi_parse_u64(&number, text, share ? len - 1 : len)) {
        return;
    }
    if (!share) {
        facts->clients_limit = number;
    } else if (facts->maxmemory != KVFI_UNKNOWN) {
        facts->clients_limit = facts->maxmemory / 100 * number;
    }
}

static void take_setting(kvfi_facts *facts, const field *f, const char *text, size_t len) {
    if (f->at == offsetof(kvfi_facts, output_limit)) {
        take_output_limit(facts, text, len);
    } else if (f->at == offsetof(kvfi_facts, clients_limit)) {
        take_clients_limit(facts, text, len);
    } else {
        take(facts, f, text, len);
    }
}

/* Two bulks, name and value; none if the server does not know the name; or an error. */
static kvf_status hear_setting(kvfi_talk *talk, kvfi_facts *facts, const field *f) {
    kvfi_reply reply = {.last = false};
    for (unsigned num = 0; !reply.last;) {
        KVFI_TRY(kvfi_talk_hear(talk, &reply));
        facts->config = facts->config && reply.kind != KVFI_RESP_ERROR;
        if (reply.kind == KVFI_RESP_BULK && ++num == 2) {
            take_setting(facts, f, reply.text, reply.len);
        }
    }
    return KVF_OK;
}

/* ---- both ---- */

static kvf_status ask(kvfi_talk *talk, unsigned probes) {
    if ((probes & KVFI_PROBE_INFO) != 0) {
        KVFI_TRY(kvfi_talk_say(talk, "INFO", NULL));
    }
    for (size_t i = 0; (probes & KVFI_PROBE_CONFIG) != 0 && i < NUM_SETTINGS; i++) {
        KVFI_TRY(kvfi_talk_say(talk, "CONFIG", "GET", settings_of_us[i].name, NULL));
    }
    return KVF_OK;
}

static kvf_status hear(kvfi_talk *talk, kvfi_facts *out, unsigned probes) {
    if ((probes & KVFI_PROBE_INFO) != 0) {
        KVFI_TRY(hear_info(talk, out));
        kvfi_node_was_heard(talk->node, KVFI_PROBE_INFO);
    }
    if ((probes & KVFI_PROBE_CONFIG) == 0) {
        return KVF_OK;
    }
    kvf_status status = KVF_OK;
    out->config = true;
    for (size_t i = 0; status == KVF_OK && i < NUM_SETTINGS; i++) {
        status = hear_setting(talk, out, &settings_of_us[i]);
    }
    out->config = out->config && status == KVF_OK;
    if (status == KVF_OK) {
        kvfi_node_was_heard(talk->node, KVFI_PROBE_CONFIG);
    }
    return status;
}

/* One question on a separate connection. If that connection ends, and the server answers on another, the question was
 * the cause. Silence may also mean that the server was slow. */
static kvf_status try_one(kvfi_talk *talk, kvfi_facts *out, kvfi_probe probe) {
    char said[sizeof talk->conn->said];
    if (ask(talk, probe) == KVF_OK && hear(talk, out, probe) == KVF_OK) {
        return KVF_OK;
    }
    bool stalled = talk->conn->stalled;
    memcpy(said, talk->conn->said, sizeof said);
    KVFI_TRY(kvfi_talk_renew(talk));
    if (stalled) {
        kvfi_node_is_silent(talk->node, probe, false);
    } else {
        kvfi_node_is_mute(talk->node, probe, said);
    }
    return KVF_OK;
}

/* After silence that only its batch calls a stall, a connection goes on without the answers. */
static kvf_status one_by_one(kvfi_talk *talk, kvfi_facts *out, unsigned probes) {
    bool brief = talk->conn->stalled && kvfi_conn_is_impatient(talk->conn);
    KVFI_TRY(kvfi_talk_renew(talk));
    if (brief) {
        kvfi_node_is_silent(talk->node, probes, true);
        return KVF_OK;
    }
    if ((probes & KVFI_PROBE_INFO) != 0) {
        KVFI_TRY(try_one(talk, out, KVFI_PROBE_INFO));
    }
    return (probes & KVFI_PROBE_CONFIG) != 0 ? try_one(talk, out, KVFI_PROBE_CONFIG) : KVF_OK;
}

static void forget(kvfi_facts *out) {
    *out = (kvfi_facts){.asked = out->asked, .swapped = KVFI_UNKNOWN};
    for (size_t i = 0; i < NUM_INFOS; i++) {
        if (infos[i].size == 0) {
            *number_of(out, &infos[i]) = KVFI_UNKNOWN;
        }
    }
    for (size_t i = 0; i < NUM_SETTINGS; i++) {
        if (settings_of_us[i].size == 0) {
            *number_of(out, &settings_of_us[i]) = KVFI_UNKNOWN;
        }
    }
}

kvf_status kvfi_facts_ask(kvfi_talk *talk, kvfi_facts *out, bool settings) {
    out->asked = kvfi_node_probes(talk->node, KVFI_PROBE_INFO | (settings ? KVFI_PROBE_CONFIG : 0));
    return ask(talk, out->asked);
}

kvf_status kvfi_facts_hear(kvfi_talk *talk, kvfi_facts *out) {
    unsigned probes = out->asked;
    uint32_t stall_ms = talk->conn->stall_ms;
    /* nothing is saved here, so the longer wait for saves does not apply */
    talk->conn->stall_ms = talk->tier->conf.stall_ms;
    forget(out);
    kvf_status status = hear(talk, out, probes);
    if (status != KVF_OK && (probes & ~atomic_load_explicit(&talk->node->heard, memory_order_relaxed)) != 0) {
        status = one_by_one(talk, out, probes);
    }
    talk->conn->stall_ms = stall_ms;
    return status;
}

/* ---- the host ---- */

static bool is_here(const kvfi_endpoint *server) {
    return server->path != NULL || strncmp(server->host, "127.", 4) == 0 || strcmp(server->host, "::1") == 0 ||
           strcmp(server->host, "localhost") == 0;
}

/* In a container the number may be that of another process: it must have the right name. */
static bool is_server(const char *status) {
    return strncmp(status, "Name:\tredis", 11) == 0 || strncmp(status, "Name:\tvalkey", 12) == 0;
}

void kvfi_facts_look_around(kvfi_facts *facts, const kvfi_endpoint *server) {
    char path[64], status[4096] = "";
    struct iovec iov = {status, sizeof status - 1};
    if (!is_here(server) || facts->pid == KVFI_UNKNOWN) {
        return;
    }
    snprintf(path, sizeof path, "/proc/%llu/status", (unsigned long long)facts->pid);
    int fd = kvfi_sys->open(path, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) {
        return;
    }
    (void)kvfi_sys->preadv(fd, &iov, 1, 0); /* fields that can't be read stay empty */
    (void)kvfi_sys->close(fd);
    const char *line = strstr(status, "\nVmSwap:");
    unsigned long long kib = 0;
    if (is_server(status) && line != NULL && sscanf(line + 8, "%llu", &kib) == 1) {
        facts->swapped = kib * 1024;
    }
}
