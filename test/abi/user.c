/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that uses each struct that grows. checks/abi.sh compiles it, as C and as C++, with the oldest headers of
 * this minor version, and with FUTURE, with headers whose structs end with a field that the library does not know.
 */
#include <kvferry/kvferry.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#define BLOCKS 3

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "user.c:%d: not true: %s\n", __LINE__, #what); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

/* Zero, but for its size. */
#define SIZED(type, name)          \
    type name;                     \
    memset(&name, 0, sizeof name); \
    name.struct_size = sizeof name

#ifdef FUTURE
#define REFUSED(options, call)   \
    options.from_the_future = 1; \
    CHECK((call) == KVF_LIMIT);  \
    options.from_the_future = 0
#define FILL(out) out.from_the_future = 1
#define ZERO(out) CHECK(out.from_the_future == 0)
#else
#define REFUSED(options, call) (void)0
#define FILL(out)              (void)0
#define ZERO(out)              (void)0
#endif

static int see(void *ctx, const kvf_entry *entry) {
    *(int *)ctx += entry->kind == KVF_ENTRY_BLOCK;
    return 0;
}

int main(void) {
    const char *url = "mem:";
    const kvf_field fields[] = {{"engine", "user-1"}, {"model", "none"}, {"kv", "u8"}};
    char text[BLOCKS][16] = {"one", "two", "three"}, got[BLOCKS][16];
    struct iovec iov[BLOCKS];
    kvf_block blocks[BLOCKS];
    kvf_key keys[BLOCKS];
    kvf_found found[BLOCKS];
    uint32_t tokens[BLOCKS * 16];
    kvf_error err;
    kvf_store *store = NULL;
    kvf_space *space = NULL;
    size_t run = 0;
    int seen = 0;
    SIZED(kvf_options, options);
    SIZED(kvf_space_options, own);
    SIZED(kvf_stats, stats);
    SIZED(kvf_tier_info, info);
    SIZED(kvf_walk_options, walk);
    SIZED(kvf_session_options, session);
    memset(tokens, 1, sizeof tokens);
    memset(blocks, 0, sizeof blocks);
    options.backlog_bytes = 1 << 20;
    own.block_tokens = 16;
    REFUSED(options, kvf_store_open(&store, &err, &url, 1, &options));
    CHECK(kvf_store_open(&store, &err, &url, 1, &options) == KVF_OK);
    REFUSED(own, kvf_space_open(&space, &err, store, fields, 3, &own));
    CHECK(kvf_space_open(&space, &err, store, fields, 3, &own) == KVF_OK);
    CHECK(kvf_chain(space, keys, BLOCKS, tokens, BLOCKS * 16) == BLOCKS);
    for (size_t i = 0; i < BLOCKS; i++) {
        iov[i].iov_base = text[i];
        iov[i].iov_len = sizeof text[i];
        blocks[i].key = keys[i];
        blocks[i].iov = &iov[i];
        blocks[i].num_iov = 1;
    }
    CHECK(kvf_save(space, blocks, BLOCKS, NULL) == BLOCKS);
    while (kvf_store_stats(store, &stats) == KVF_OK && stats.saved < BLOCKS) {
        poll(NULL, 0, 1);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        iov[i].iov_base = got[i];
    }
    CHECK(kvf_match(space, &run, found, keys, BLOCKS, 0) == KVF_OK && run == BLOCKS);
    CHECK(found[2].payload_bytes == 16 && found[2].why == KVF_WHY_NONE);
    CHECK(kvf_load(space, blocks, BLOCKS, NULL, 0) == BLOCKS && memcmp(text, got, sizeof text) == 0);
    SIZED(kvf_load_options, each);
    each.flags = KVF_EACH;
    CHECK(kvf_load_with(space, blocks, BLOCKS, NULL, &each) == BLOCKS);

    FILL(stats);
    CHECK(kvf_store_stats(store, &stats) == KVF_OK && stats.load_hits == 2 * BLOCKS &&
          stats.struct_size == sizeof stats);
    ZERO(stats);
    FILL(info);
    CHECK(kvf_tier_info_get(store, &info, 0) == KVF_OK && info.num_records >= BLOCKS);
    ZERO(info);
    REFUSED(walk, kvf_walk(store, &err, see, &seen, &walk));
    CHECK(kvf_walk(store, &err, see, &seen, &walk) == KVF_OK && seen == BLOCKS);

    kvf_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.data = text;
    tensor.len = sizeof text;
    REFUSED(session, kvf_session_save(store, &err, "id", &tensor, &tensor, &session));
    CHECK(kvf_session_save(store, &err, "id", &tensor, &tensor, &session) == KVF_OK);

    SIZED(kvf_batch, batch);
    kvf_queue *queue = NULL;
    kvf_completion done;
    uint64_t ticket = 0;
    batch.op = KVF_OP_LOAD;
    batch.space = space;
    batch.blocks = blocks;
    batch.num = BLOCKS;
    batch.user = 7;
    CHECK(kvf_queue_open(&queue, &err, store, 1) == KVF_OK);
    REFUSED(batch, kvf_submit(queue, &ticket, &batch));
    CHECK(kvf_submit(queue, &ticket, &batch) == KVF_OK);
    while (kvf_reap(queue, &done, 1) == 0) {
        poll(NULL, 0, 1);
    }
    CHECK(done.ticket == ticket && done.user == 7 && done.num_ok == BLOCKS);
    kvf_queue_close(queue);
    kvf_space_close(space);
    kvf_store_close(store);
    return 0;
}
