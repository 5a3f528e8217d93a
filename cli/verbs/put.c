/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry put: writes one record, whose payload comes from a file or stdin.
 */
#include <poll.h>
#include <unistd.h>

#include "common/address.h"
#include "verbs/verbs.h"

#define BUDGET_MS 60000u

typedef struct request {
    kvfcli_address address;
    const char *file; /* NULL or "-": stdin */
    bool was_there;
    kvfcli_string payload;
} request;

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

/* A folder that has this very record takes it again, also if it can't be written to. */
static void look(request *r) {
    size_t run = 0;
    r->was_there = kvf_match(r->address.space, &run, NULL, &r->address.block.key, 1, KVF_DEFAULT) == KVF_OK && run == 1;
    kvf_forget(r->address.space, &r->address.block.key, 1); /* it is written all the same */
}

/* A queue writes straight from our memory and completes when every tier has the block. kvf_save would limit its size to
 * the backlog. */
static int write_record(request *r, kvf_store *store) {
    kvf_error err = {.status = KVF_OK};
    kvf_queue *queue = NULL;
    struct iovec iov = {r->payload.text, r->payload.len};
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
        return kvfcli_fail(status, &err);
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
        return kvfcli_print_json(json_pack("{s:o, s:o, s:I, s:b}", "space", kvfcli_json_hex(space.bytes), "block",
                                           kvfcli_json_hex(key.bytes), "payload_bytes", (json_int_t)r->payload.len,
                                           "was_there", r->was_there),
                                 KVFCLI_FINE);
    }
    kvfcli_hex(space_hex, space.bytes);
    kvfcli_hex(key_hex, key.bytes);
    printf("space %s\nblock %s\n%zu bytes stored%s\n", space_hex, key_hex, r->payload.len,
           r->was_there ? "; a block of this key was there before" : "");
    return KVFCLI_FINE;
}

static int put(request *r, kvf_store *store, const kvfcli_common *common) {
    int code = kvfcli_address_open(&r->address, store);
    if (code == KVFCLI_FINE) {
        code = kvfcli_read_file(&r->payload, r->file, SIZE_MAX);
    }
    if (code == KVFCLI_FINE) {
        look(r);
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
    (void)common;
    if (argc > 1) {
        return kvfcli_usage("one FILE at most");
    }
    r->file = argc == 1 ? argv[0] : NULL;
    if (r->file == NULL && isatty(STDIN_FILENO)) {
        return kvfcli_usage("no FILE, and stdin is a terminal");
    }
    return kvfcli_address_check(&r->address);
}

int kvfcli_put(int argc, char **argv) {
    static const kvfcli_option options[] = {KVFCLI_ADDRESS_OPTIONS, {.kind = KVFCLI_END}};
    static const kvfcli_verb verb = {
        .help = "usage: kvferry put --field NAME=VALUE... (--key HEX | --tokens FILE [--block I]) [FILE] [options]\n"
                "\n"
                "Writes one record to every tier of the store. Its payload is FILE or stdin. For experiments,\n"
                "tests, and moving records between stores.\n"
                "\n"
                "  seq 1 256 > tokens\n"
                "  kvferry put --field engine=mine-1 --field model=abc --field kv=f16 --tokens tokens payload.bin\n",
        .exits = "Exit codes: 0; 4 when the fields, the tokens or FILE can't be used; 5 when it was not stored.\n",
        .options = options,
        .creates = true,
        .check = check,
        .work = work};
    request r = {.address = {.index = KVFCLI_LAST_BLOCK}};
    int code = kvfcli_verb_main(&verb, &r, argc, argv);
    kvfcli_address_cleanup(&r.address);
    kvfcli_string_cleanup(&r.payload);
    return code;
}
