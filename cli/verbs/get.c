/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry get: writes the verified payload of one record to a file or stdout.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/address.h"
#include "verbs/verbs.h"

typedef struct request {
    kvfcli_address address;
    const char *key, *space; /* or by their first digits */
    const char *output;
} request;

/* ---- the destination ---- */

static int write_to(const char *name, FILE *out, const void *payload, size_t len) {
    if (fwrite(payload, 1, len, out) != len || fflush(out) != 0) {
        kvfcli_say("%s: %s", name, strerror(errno));
        return KVFCLI_IO;
    }
    return KVFCLI_FINE;
}

static int write_payload(const request *r, const void *payload, size_t len) {
    if (kvfcli_is_std(r->output)) {
        return write_to("stdout", stdout, payload, len);
    }
    FILE *out = fopen(r->output, "wb");
    if (out == NULL) {
        kvfcli_say("%s: %s", r->output, strerror(errno));
        return KVFCLI_IO;
    }
    int code = write_to(r->output, out, payload, len);
    if (fclose(out) != 0 && code == KVFCLI_FINE) {
        kvfcli_say("%s: %s", r->output, strerror(errno));
        code = KVFCLI_IO;
    }
    return code;
}

static int finish(const request *r, const kvfcli_common *common, const kvf_digest *space, const kvf_key *key,
                  const void *payload, size_t len) {
    int code = write_payload(r, payload, len);
    if (code != KVFCLI_FINE || !common->json) {
        return code;
    }
    return kvfcli_print_json(json_pack("{s:o, s:o, s:I, s:s}", "space", kvfcli_json_hex(space->bytes), "block",
                                       kvfcli_json_hex(key->bytes), "payload_bytes", (json_int_t)len, "output",
                                       r->output),
                             KVFCLI_FINE);
}

/* ---- by the first digits of its key ---- */

typedef struct reading {
    const request *request;
    const kvfcli_common *common;
    kvf_reason damage;
    bool found, done, closed;
    int code;
} reading;

static int take_copy(void *ctx, const kvf_entry *entry) {
    reading *g = ctx;
    g->found = true;
    g->damage = entry->damage;
    g->closed = entry->seal == KVF_SEAL_CLOSED;
    if (entry->damage != KVF_WHY_NONE || g->closed) {
        return 0; /* another tier may have an undamaged one */
    }
    g->code = finish(g->request, g->common, &entry->space, &entry->key, entry->payload, (size_t)entry->payload_bytes);
    g->done = true;
    return 1;
}

static int get_by_digits(const request *r, kvf_store *store, const kvfcli_common *common) {
    kvfcli_named block;
    reading g = {.request = r, .common = common};
    int code = kvfcli_find(store, &block, KVFCLI_BLOCKS, r->key, r->space);
    if (code == KVFCLI_FINE && block.damage == KVF_WHY_NONE) {
        code = kvfcli_read_block(store, &block, take_copy, &g);
    }
    if (code != KVFCLI_FINE || g.done) {
        return g.done ? g.code : code;
    }
    if (g.closed) {
        kvfcli_say("the block is sealed: name the secret of its tenant by --secret-file");
    } else if (!g.found && block.damage == KVF_WHY_NONE) {
        kvfcli_say("the block went away while it was looked for");
    } else {
        kvfcli_say("the block is damaged: %s", kvf_reason_name(g.found ? g.damage : block.damage));
    }
    return KVFCLI_FOUND;
}

/* ---- by its fields and tokens ---- */

static int miss(kvf_reason why) {
    if (why == KVF_WHY_ABSENT) {
        kvfcli_say("no such block is stored: fields, tokens, --block-tokens and secret must be those of its put");
    } else {
        kvfcli_say("the block can't be loaded: %s", kvf_reason_name(why));
    }
    return KVFCLI_FOUND;
}

static int load(request *r, const kvfcli_common *common, uint64_t len) {
    kvf_digest space;
    void *payload = malloc(len > 0 ? (size_t)len : 1);
    struct iovec iov = {payload, (size_t)len};
    kvf_block *block = &r->address.block;
    if (payload == NULL) {
        kvfcli_say("no memory for a payload of %llu bytes", (unsigned long long)len);
        return KVFCLI_IO;
    }
    block->iov = &iov;
    block->num_iov = 1;
    kvf_key key;
    kvf_space_digest(r->address.space, &space);
    kvf_stored_key(r->address.space, &key, &block->key);
    int code = kvf_load(r->address.space, block, 1, NULL, KVF_DEFAULT) == 1
                   ? finish(r, common, &space, &key, payload, (size_t)len)
                   : miss(block->why);
    free(payload);
    return code;
}

static int get_by_address(request *r, kvf_store *store, const kvfcli_common *common) {
    size_t run = 0;
    kvf_found found;
    int code = kvfcli_address_open(&r->address, store);
    if (code != KVFCLI_FINE) {
        return code;
    }
    kvf_status status = kvf_match(r->address.space, &run, &found, &r->address.block.key, 1, KVF_MS(10000));
    if (status != KVF_OK) {
        kvfcli_say("not looked up: %s", kvf_status_name(status));
        return kvfcli_exit_of(status);
    }
    return run == 1 ? load(r, common, found.payload_bytes) : miss(KVF_WHY_ABSENT);
}

/* ---- */

static int work(void *ctx, kvf_store *store, const kvfcli_common *common) {
    request *r = ctx;
    int code = r->key != NULL ? get_by_digits(r, store, common) : get_by_address(r, store, common);
    kvfcli_address_cleanup(&r->address);
    return code;
}

static int check(void *ctx, const kvfcli_common *common, int argc, char **argv) {
    request *r = ctx;
    r->key = argc > 0 ? argv[0] : NULL;
    if (argc > 1 || (r->key != NULL) == kvfcli_address_given(&r->address)) {
        return kvfcli_usage("name the block by its KEY, or by --field and --tokens");
    }
    if (kvfcli_is_std(r->output) && common->json) {
        return kvfcli_usage("--json needs -o FILE for the payload");
    }
    if (r->output == NULL && isatty(STDOUT_FILENO)) {
        return kvfcli_usage("the payload is binary and stdout is a terminal: give -o FILE");
    }
    if (r->key == NULL) {
        return kvfcli_address_check(&r->address);
    }
    int code = kvfcli_check_hex(r->key);
    return code == KVFCLI_FINE ? kvfcli_check_hex(r->space) : code;
}

int kvfcli_get(int argc, char **argv) {
    static const kvfcli_option options[] = {
        KVFCLI_OPT_TEXT(request, output, 'o', "output", "FILE", "the destination of the payload"),
        KVFCLI_OPT_TEXT(request, space, 0, "space", "SPACE", "KEY is a block of this space"),
        KVFCLI_ADDRESS_OPTIONS,
        {.kind = KVFCLI_END}};
    static const kvfcli_verb verb = {
        .help = "usage: kvferry get KEY [--space SPACE] [-o FILE] [options]\n"
                "       kvferry get --field NAME=VALUE... (--key HEX | --tokens FILE [--block I]) [-o FILE] [options]\n"
                "\n"
                "Reads one record, verifies it, and writes its payload to FILE or stdout. Writes nothing if the\n"
                "record is not whole. KEY is what kvferry ls SPACE prints; the first digits are enough. With\n"
                "fields and tokens it looks the block up and loads it as an engine does.\n"
                "\n"
                "  kvferry get 1f0c5a -o payload.bin\n",
        .exits = "Exit codes: 0; 1 when it is not there or damaged; 5 when FILE can't be written.\n",
        .options = options,
        .check = check,
        .work = work};
    request r = {.address = {.index = KVFCLI_LAST_BLOCK}};
    int code = kvfcli_verb_main(&verb, &r, argc, argv);
    kvfcli_address_cleanup(&r.address);
    return code;
}
