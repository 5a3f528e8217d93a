/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry put: writes one record, whose payload comes from a file or stdin.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/address.h"
#include "verbs/verbs.h"

static const char help[] =
    "usage: kvferry put --field NAME=VALUE... (--key HEX | --tokens FILE [--block I]) [FILE] [options]\n"
    "\n"
    "Writes one record to every tier of the store. Its payload is FILE or stdin. For experiments,\n"
    "tests, and moving records between stores.\n"
    "\n"
    "Options:\n" KVFCLI_ADDRESS_HELP KVFCLI_COMMON_HELP "\n"
    "Exit codes: 0; 4 when the fields, the tokens or FILE can't be used; 5 when it was not stored.\n";

#define BUDGET_MS 60000u

typedef struct request {
    kvfcli_address address;
    const char *file; /* NULL or "-": stdin */
    char *payload;
    size_t len;
} request;

static int read_all(request *r, FILE *in) {
    size_t cap = 0;
    do {
        if (r->len == cap) {
            cap = cap == 0 ? 1 << 20 : cap * 2;
            char *moved = realloc(r->payload, cap);
            if (moved == NULL) {
                kvfcli_say("no memory for a payload of more than %zu bytes", r->len);
                return KVFCLI_IO;
            }
            r->payload = moved;
        }
        r->len += fread(r->payload + r->len, 1, cap - r->len, in);
    } while (!feof(in) && !ferror(in));
    if (ferror(in)) {
        kvfcli_say("%s: %s", r->file != NULL ? r->file : "stdin", strerror(errno));
        return KVFCLI_INPUT;
    }
    return KVFCLI_FINE;
}

static int read_payload(request *r) {
    if (r->file == NULL || strcmp(r->file, "-") == 0) {
        return read_all(r, stdin);
    }
    FILE *in = fopen(r->file, "rb");
    if (in == NULL) {
        kvfcli_say("%s: %s", r->file, strerror(errno));
        return KVFCLI_INPUT;
    }
    int code = read_all(r, in);
    fclose(in);
    return code;
}

static kvf_status submit_and_wait(kvf_queue *queue, const kvf_batch *batch) {
    uint64_t ticket = 0;
    kvf_completion done;
    kvf_status status = kvf_submit(queue, &ticket, batch);
    while (status == KVF_OK && kvf_reap(queue, &done, 1) == 0) {
        struct pollfd wait = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        if (poll(&wait, 1, 1000) < 0 && kvfcli_interrupted()) {
            kvf_cancel(queue, ticket); /* its completion arrives anyway */
        }
    }
    return status;
}

/* A queue writes straight from our memory and completes when every tier has the block. kvf_save would limit its size to
 * the backlog. */
static int write_record(request *r, kvf_store *store) {
    kvf_error err = {.status = KVF_OK};
    kvf_queue *queue = NULL;
    struct iovec iov = {r->payload, r->len};
    kvf_block *block = &r->address.block;
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = r->address.space,
                       .blocks = block,
                       .num = 1,
                       .budget_us = KVF_MS(BUDGET_MS)};
    block->iov = &iov;
    block->num_iov = 1;
    kvf_status status = kvf_queue_open(&queue, &err, store, 1);
    if (status != KVF_OK) {
        err.status = status;
        return kvfcli_fail(&err);
    }
    status = submit_and_wait(queue, &batch);
    kvf_queue_close(queue);
    if (kvfcli_interrupted()) {
        return KVFCLI_INTERRUPTED;
    }
    if (status != KVF_OK) {
        kvfcli_say("not stored: %s", kvf_status_name(status));
        return kvfcli_exit_of(status);
    }
    if (block->status != KVF_OK) {
        kvfcli_say("not stored: %s; kvferry doctor may explain more", kvf_reason_name(block->why));
        return KVFCLI_IO;
    }
    return KVFCLI_FINE;
}

static int report(const request *r, const kvfcli_common *common) {
    kvf_digest space;
    char space_hex[KVFCLI_HEX32], key_hex[KVFCLI_HEX32];
    kvf_key key;
    kvf_space_digest(r->address.space, &space);
    kvf_stored_key(r->address.space, &key, &r->address.block.key);
    if (common->json) {
        return kvfcli_print_json(json_pack("{s:o, s:o, s:I}", "space", kvfcli_json_hex(space.bytes), "block",
                                           kvfcli_json_hex(key.bytes), "payload_bytes", (json_int_t)r->len),
                                 KVFCLI_FINE);
    }
    kvfcli_hex(space_hex, space.bytes);
    kvfcli_hex(key_hex, key.bytes);
    printf("space %s\nblock %s\n%zu bytes stored\n", space_hex, key_hex, r->len);
    return KVFCLI_FINE;
}

static int put(request *r, kvf_store *store, const kvfcli_common *common) {
    int code = kvfcli_address_open(&r->address, store);
    if (code == KVFCLI_FINE) {
        code = read_payload(r);
    }
    if (code == KVFCLI_FINE) {
        code = write_record(r, store);
    }
    return code == KVFCLI_FINE ? report(r, common) : code;
}

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    request *r = ctx;
    int code = put(r, store, common);
    kvfcli_address_cleanup(&r->address);
    return code;
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    request *r = ctx;
    if (argc > 1) {
        return kvfcli_usage(common, "one FILE at most");
    }
    r->file = argc == 1 ? argv[0] : NULL;
    if (r->file == NULL && isatty(STDIN_FILENO)) {
        return kvfcli_usage(common, "no FILE, and stdin is a terminal");
    }
    return kvfcli_address_check(&r->address, common);
}

static int take(void *ctx, int opt, const char *value) {
    request *r = ctx;
    return kvfcli_address_take(&r->address, opt, value);
}

int kvfcli_put(int argc, char **argv) {
    static const struct option options[] = {KVFCLI_COMMON_OPTIONS, KVFCLI_ADDRESS_OPTIONS, {0}};
    static const kvfcli_verb verb = {
        .help = help, .options = options, .letters = "", .take = take, .check = check, .work = work};
    request r = {.address = {.index = UINT64_MAX}};
    int code = kvfcli_verb_main(&verb, &r, argc, argv);
    kvfcli_address_cleanup(&r.address);
    free(r.payload);
    return code;
}
