/* SPDX-License-Identifier: Apache-2.0
 *
 * The cost of sealing: GET and SET of the same blocks on one redis-server, in a space with a secret and in one without,
 * directly after each other and in changing order, by the public calls. Each figure is the median of the ratios within
 * a round.
 *
 *   check_tenant [--rounds N]
 *
 * Exit status 0 if the sealed ones have at least half of the speed of the plain ones everywhere.
 */
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/private.h"
#include "support/kit.h"
#include "support/median.h"
#include "support/server.h"

#define BLOCKS     16u
#define TOKENS     256u
#define BOUND      0.5
#define MAX_ROUNDS 99u

typedef enum op { SAVE, SAVE_BEHIND, LOAD, NUM_OPS } op;
static const char *const op_names[] = {"SET", "SET behind", "GET"};

typedef struct side {
    kvf_store *store;
    kvf_space *space;
    kvf_queue *queue;
    kvft_prompt *prompt;
} side;

static void die(const char *what) {
    fprintf(stderr, "check_tenant: %s\n", what);
    exit(2);
}

static side open_side(const char *url, const char *secret, size_t payload) {
    side s = {.store = kvft_store(url)};
    s.space = kvft_sealed_space(s.store, "bench", TOKENS, secret);
    s.prompt = kvft_prompt_new(s.space, 5, BLOCKS, payload);
    if (kvf_queue_open(&s.queue, NULL, s.store, 1) != KVF_OK) {
        die("no queue");
    }
    return s;
}

static void close_side(side *s) {
    kvf_queue_close(s->queue);
    kvft_prompt_free(s->prompt);
    kvf_space_close(s->space);
    kvf_store_close(s->store);
}

static void save(side *s) {
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_SAVE,
                       .space = s->space,
                       .blocks = s->prompt->blocks,
                       .num = BLOCKS,
                       .flags = KVF_MAY_LEND}; /* they are not written to while they may still be read */
    struct pollfd p = {.fd = kvf_queue_fd(s->queue), .events = POLLIN};
    kvf_completion done = {0};
    uint64_t ticket;
    if (kvf_submit(s->queue, &ticket, &batch) != KVF_OK) {
        die("a save was refused");
    }
    while (kvf_reap(s->queue, &done, 1) == 0) {
        poll(&p, 1, 1000);
    }
    if (done.num_ok != BLOCKS) {
        die("not all blocks were saved");
    }
}

static void load(side *s) {
    if (kvf_load(s->space, s->prompt->blocks, BLOCKS, NULL, KVF_MS(60000)) != BLOCKS) {
        die("not all blocks were loaded");
    }
}

/* What is known to be stored is not sent again, so that is forgotten before. */
static double time_of(side *s, op what) {
    kvfi_known_clear(&s->store->known);
    if (what == SAVE_BEHIND) {
        kvf_digest digest;
        uint64_t removed;
        kvf_space_digest(s->space, &digest);
        if (kvf_clear(s->store, &removed, NULL, &digest) != KVF_OK) {
            die("the space can't be cleared");
        }
    }
    double from = kvft_now_ms();
    switch (what) {
    case SAVE:
        save(s);
        break;
    case SAVE_BEHIND:
        kvft_save_all(s->space, s->store, s->prompt);
        break;
    default:
        load(s);
    }
    return kvft_now_ms() - from;
}

/* All three operations on values of one size; the least ratio. */
static double measure(const char *where, const char *url, size_t bytes, unsigned rounds) {
    side sides[2] = {open_side(url, NULL, bytes - 2048), open_side(url, "a secret of this bench", bytes - 2048)};
    double least = INFINITY;
    for (op what = SAVE; what < NUM_OPS; what++) {
        double ratios[MAX_ROUNDS], plain[MAX_ROUNDS], sealed[MAX_ROUNDS];
        for (unsigned r = 0; r < rounds + 1; r++) { /* the first one warms up */
            double ms[2];
            for (unsigned i = 0; i < 2; i++) {
                unsigned which = (r + i) % 2;
                ms[which] = time_of(&sides[which], what);
            }
            if (r > 0) {
                plain[r - 1] = ms[0];
                sealed[r - 1] = ms[1];
                ratios[r - 1] = ms[0] / ms[1];
            }
        }
        double ratio = kvft_median_of(ratios, rounds).value, mib = (double)BLOCKS * (double)bytes / (1 << 20);
        printf("%-5s %zu MiB  %-10s  plain %6.0f MiB/s  sealed %6.0f MiB/s  %.2f\n", where, bytes >> 20, op_names[what],
               mib / kvft_median_of(plain, rounds).value * 1000, mib / kvft_median_of(sealed, rounds).value * 1000,
               ratio);
        fflush(stdout);
        least = ratio < least ? ratio : least;
    }
    for (unsigned i = 0; i < 2; i++) {
        kvft_prompt_poison(sides[i].prompt);
        load(&sides[i]);
        if (kvft_prompt_wrong(sides[i].prompt, 5, BLOCKS) != 0) {
            die("what was loaded is not what was saved");
        }
        close_side(&sides[i]);
    }
    return least;
}

int main(int argc, char **argv) {
    unsigned rounds = argc == 3 && strcmp(argv[1], "--rounds") == 0 ? (unsigned)atoi(argv[2]) : 15;
    double least = INFINITY;
    if (rounds == 0 || rounds > MAX_ROUNDS) {
        die("usage: check_tenant [--rounds N], 1 to 99");
    }
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        printf("no redis-server is installed\n");
        return 77;
    }
    for (size_t mib = 1; mib <= 4; mib *= 4) {
        double one = measure("unix", server->unix_url, mib << 20, rounds);
        double two = measure("tcp", server->tcp_url, mib << 20, rounds);
        least = fmin(least, fmin(one, two));
    }
    kvft_server_stop(server);
    printf("sealed GET and SET have at least %.2f of the speed of plain ones (bound %.1f)\n", least, BOUND);
    return least >= BOUND ? 0 : 1;
}
