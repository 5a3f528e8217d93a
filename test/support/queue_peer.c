/* SPDX-License-Identifier: Apache-2.0
 *
 * The peer of checks/python_wire.py: the same loads and saves through a queue, in C.
 *
 *   kvf_queue_peer URL BYTES      16 blocks of BYTES in URL, from memory that has been touched
 *
 * reads lines "save PASSES" and "load PASSES", and answers each with the seconds that it took. A pass is one batch of
 * all blocks.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "kvferry/kvferry.h"

#define NUM_BLOCKS 16u

typedef struct peer {
    kvf_store *store;
    kvf_space *space;
    kvf_queue *queue;
    kvf_key keys[NUM_BLOCKS];
    kvf_block blocks[NUM_BLOCKS];
    struct iovec iov[NUM_BLOCKS];
} peer;

static void die(const char *what) {
    fprintf(stderr, "kvf_queue_peer: %s\n", what);
    exit(2);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void open_peer(peer *p, const char *url, size_t bytes) {
    const kvf_field fields[] = {{"engine", "wire-1"}, {"model", "c"}, {"kv", "bytes"}};
    uint32_t tokens[NUM_BLOCKS];
    kvf_space_options options = {.struct_size = sizeof options, .block_tokens = 1};
    uint8_t *memory = mmap(NULL, NUM_BLOCKS * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || kvf_store_open(&p->store, NULL, &url, 1, NULL) != KVF_OK ||
        kvf_space_open(&p->space, NULL, p->store, fields, 3, &options) != KVF_OK ||
        kvf_queue_open(&p->queue, NULL, p->store, 4) != KVF_OK) {
        die("no store");
    }
    for (uint32_t i = 0; i < NUM_BLOCKS; i++) {
        tokens[i] = i;
        memset(memory + i * bytes, (int)i + 1, bytes);
        p->iov[i] = (struct iovec){memory + i * bytes, bytes};
    }
    kvf_chain(p->space, p->keys, NUM_BLOCKS, tokens, NUM_BLOCKS);
}

static size_t run(peer *p, kvf_op op) {
    for (uint32_t i = 0; i < NUM_BLOCKS; i++) {
        p->blocks[i] = (kvf_block){.key = p->keys[i], .iov = &p->iov[i], .num_iov = 1};
    }
    kvf_batch batch = {
        .struct_size = sizeof batch, .op = op, .space = p->space, .blocks = p->blocks, .num = NUM_BLOCKS};
    uint64_t ticket = 0;
    kvf_completion done;
    if (kvf_submit(p->queue, &ticket, &batch) != KVF_OK) {
        die("no room in the queue");
    }
    while (kvf_reap(p->queue, &done, 1) == 0) {
        struct pollfd ready = {.fd = kvf_queue_fd(p->queue), .events = POLLIN};
        poll(&ready, 1, -1);
    }
    return done.num_ok;
}

/* What is stored already would not be written. Removing it is not timed. */
static double pass(peer *p, kvf_op op) {
    if (op == KVF_OP_SAVE) {
        (void)run(p, KVF_OP_REMOVE);
    }
    double start = now_s();
    if (run(p, op) != NUM_BLOCKS) {
        die("a block was lost");
    }
    return now_s() - start;
}

int main(int argc, char **argv) {
    static peer p;
    char word[8];
    unsigned passes = 0;
    if (argc != 3) {
        die("usage: kvf_queue_peer URL BYTES");
    }
    open_peer(&p, argv[1], strtoul(argv[2], NULL, 10));
    while (scanf("%7s %u", word, &passes) == 2) {
        double took = 0;
        for (unsigned i = 0; i < passes; i++) {
            took += pass(&p, strcmp(word, "save") == 0 ? KVF_OP_SAVE : KVF_OP_LOAD);
        }
        printf("%.6f\n", took);
        fflush(stdout);
    }
    kvf_queue_close(p.queue);
    kvf_space_close(p.space);
    kvf_store_close(p.store);
    return 0;
}
