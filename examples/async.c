/* SPDX-License-Identifier: Apache-2.0
 *
 * A scheduler that never waits for the store: while blocks of one prompt arrive, it computes another prompt.
 *
 *   async [STORE [PATIENCE_MS]]
 *
 * Each line of stdin is a prompt. "cancel N" drops the N-th prompt, as a server does when a client hangs up. One poll
 * waits for stdin and for the store. For each prompt kvf_decide says whether loading is worth it. A load that brings
 * nothing for too long is cancelled, and its blocks are computed.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <kvferry/kvferry.h>

enum {
    BLOCK_TOKENS = 16,
    TOKEN_FLOATS = 256,
    BLOCK_BYTES = BLOCK_TOKENS * TOKEN_FLOATS * sizeof(float),
    MAX_BLOCKS = 64,
    MAX_TOKENS = MAX_BLOCKS * BLOCK_TOKENS,
    MAX_REQUESTS = 4 /* at once; while all are taken, stdin waits */
};

typedef enum state { FREE, MATCHING, LOADING, COMPUTING } state;

typedef struct request {
    state state;
    bool cancelled;
    unsigned id;
    uint32_t tokens[MAX_TOKENS];
    size_t num_tokens, loaded_tokens, done_tokens;
    kvf_block blocks[MAX_BLOCKS];
    size_t num_blocks, num_asked;
    kvf_plan_kind plan;
    kvf_reason why; /* the first block that did not load */
    /* What the queue reads or writes until the completion. */
    uint64_t ticket;
    kvf_found found[MAX_BLOCKS];
    kvf_arrivals arrivals;
    uint8_t each[MAX_BLOCKS];
    int64_t patience_us, asked_us;
} request;

typedef struct scheduler {
    kvf_store *store;
    kvf_space *space;
    kvf_view *view;
    kvf_queue *queue;
    kvf_pace pace; /* how fast the model computes */
    int64_t patience_us;
    unsigned num_prompts;
    request requests[MAX_REQUESTS];
} scheduler;

/* Block i of request r is in slot r * MAX_BLOCKS + i. */
static float pool[MAX_REQUESTS][MAX_TOKENS][TOKEN_FLOATS];

static int fail(const char *what, const char *why) {
    fprintf(stderr, "async: %s: %s\n", what, why);
    return 1;
}

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* ---- the model: replace it by yours -------------------------------------------------------------------------------- */

static void compute(float (*kv)[TOKEN_FLOATS], const uint32_t *tokens, size_t first, size_t end) {
    const struct timespec work = {.tv_nsec = 2000000}; /* what a batch takes */
    nanosleep(&work, NULL);
    for (size_t t = first; t < end; t++) {
        for (size_t i = 0; i < TOKEN_FLOATS; i++) {
            float before = t > 0 ? kv[t - 1][(i + 1) % TOKEN_FLOATS] : 0;
            kv[t][i] = before / 2 + (float)(tokens[t] * (i + 1) % 97);
        }
    }
}

static float answer(float (*kv)[TOKEN_FLOATS], size_t num_tokens) {
    float sum = 0;
    for (size_t t = 0; t < num_tokens; t++) {
        sum += kv[t][t % TOKEN_FLOATS];
    }
    return sum;
}

/* ---- a prompt's way: match, load, compute, save -------------------------------------------------------------------- */

static void submit(scheduler *s, request *r, state next, kvf_batch *batch) {
    batch->struct_size = sizeof *batch;
    batch->space = s->space;
    batch->view = s->view;
    batch->blocks = r->blocks;
    batch->user = (uint64_t)(r - s->requests);
    /* A full queue, or a closed store, is handled as if nothing were stored. */
    r->state = kvf_submit(s->queue, &r->ticket, batch) == KVF_OK ? next : COMPUTING;
    r->asked_us = now_us();
}

static void start_match(scheduler *s, request *r) {
    kvf_batch batch = {.op = KVF_OP_MATCH, .num = r->num_blocks, .found = r->found, .budget_us = s->patience_us};
    submit(s, r, MATCHING, &batch);
}

/* Decides by the measured rates of the store and the model. This engine computes only after a load, hence
 * KVF_GAP_WHOLE. */
static void start_load(scheduler *s, request *r, size_t num_stored) {
    kvf_gap gap = {.struct_size = sizeof gap,
                   .flags = KVF_GAP_WHOLE,
                   .num_blocks = num_stored,
                   .block_bytes = BLOCK_BYTES,
                   .block_tokens = BLOCK_TOKENS,
                   .batch_tokens = BLOCK_TOKENS};
    kvf_plan plan = {.struct_size = sizeof plan};
    kvf_error err = {0};
    if (kvf_store_link(s->store, r->found[0].tier, &gap.link) != KVF_OK ||
        kvf_decide(&plan, &err, &gap, &s->pace) != KVF_OK) {
        plan.num_load = 0;
    }
    r->plan = plan.kind;
    r->num_asked = plan.num_load;
    r->patience_us = plan.patience_us > s->patience_us ? plan.patience_us : s->patience_us;
    r->arrivals = (kvf_arrivals){.each = r->each};
    memset(r->each, 0, sizeof r->each);
    kvf_batch batch = {.op = KVF_OP_LOAD, .num = plan.num_load, .arrivals = &r->arrivals, .budget_us = KVF_MS(10000)};
    if (plan.num_load > 0) {
        submit(s, r, LOADING, &batch);
    } else {
        r->state = COMPUTING;
    }
}

/* Only the leading run of a load can be used. */
static void end_load(request *r) {
    size_t loaded = 0;
    while (loaded < r->num_asked && r->blocks[loaded].status == KVF_OK) {
        loaded++;
    }
    r->why = loaded < r->num_asked ? r->blocks[loaded].why : KVF_WHY_NONE;
    r->loaded_tokens = r->done_tokens = loaded * BLOCK_TOKENS;
    r->state = COMPUTING;
}

static void finish(scheduler *s, request *r, float (*kv)[TOKEN_FLOATS]) {
    size_t loaded = r->loaded_tokens / BLOCK_TOKENS;
    size_t saved = kvf_save(s->space, r->blocks + loaded, r->num_blocks - loaded, s->view);
    printf("%u: %zu tokens: %zu loaded, %zu computed, %zu blocks saved, answer %.3f (plan: %s)\n", r->id, r->num_tokens,
           r->loaded_tokens, r->num_tokens - r->loaded_tokens, saved, (double)answer(kv, r->num_tokens),
           kvf_plan_name(r->plan));
    if (loaded < r->num_asked) {
        printf("%u: block %zu did not load: %s\n", r->id, loaded, kvf_reason_name(r->why));
    }
    r->state = FREE;
}

/* Computes one block, or the tokens after the last whole one, so that the store and stdin are checked in between. */
static void compute_some(scheduler *s, request *r) {
    float(*kv)[TOKEN_FLOATS] = pool[r - s->requests];
    size_t end = r->done_tokens + BLOCK_TOKENS < r->num_tokens ? r->done_tokens + BLOCK_TOKENS : r->num_tokens;
    if (end > r->done_tokens) {
        int64_t began = now_us();
        compute(kv, r->tokens, r->done_tokens, end);
        kvf_pace_note(&s->pace, end - r->done_tokens, now_us() - began);
        r->done_tokens = end;
    }
    if (r->done_tokens == r->num_tokens) {
        finish(s, r, kv);
    }
}

/* ---- giving up ----------------------------------------------------------------------------------------------------- */

static size_t num_arrived(const request *r) {
    size_t num = 0;
    for (size_t i = 0; i < r->num_asked; i++) {
        num += kvf_arrival_of(&r->arrivals, i) == KVF_HERE;
    }
    return num;
}

/* When the time of a load is over. Each block that has arrived adds its compute time (plan.h). */
static int64_t deadline_us(const scheduler *s, const request *r) {
    return r->asked_us + r->patience_us + kvf_pace_us(&s->pace, num_arrived(r) * BLOCK_TOKENS, BLOCK_TOKENS);
}

/* Until its completion has come, the queue still uses the memory of a request. So a request that waits for one is not
 * freed here. */
static void cancel(scheduler *s, unsigned long id) {
    for (request *r = s->requests; r < s->requests + MAX_REQUESTS; r++) {
        if (r->state != FREE && r->id == id) {
            printf("%lu: cancelled\n", id);
            r->cancelled = true;
            if (r->state == COMPUTING) {
                r->state = FREE;
            } else {
                kvf_cancel(s->queue, r->ticket);
            }
        }
    }
}

static void give_up_late_loads(scheduler *s) {
    for (request *r = s->requests; r < s->requests + MAX_REQUESTS; r++) {
        if (r->state == LOADING && !r->cancelled && now_us() > deadline_us(s, r)) {
            kvf_cancel(s->queue, r->ticket);
            r->patience_us = KVF_MAX_BUDGET_US; /* once is enough */
        }
    }
}

/* ---- the loop ------------------------------------------------------------------------------------------------------ */

/* The oldest request in that state, or NULL. */
static request *find(scheduler *s, state wanted) {
    request *oldest = NULL;
    for (request *r = s->requests; r < s->requests + MAX_REQUESTS; r++) {
        if (r->state == wanted && (oldest == NULL || r->id < oldest->id)) {
            oldest = r;
        }
    }
    return oldest;
}

static void take_prompt(scheduler *s, request *r, const char *text, size_t len) {
    memset(r, 0, sizeof *r);
    r->id = ++s->num_prompts;
    r->num_tokens = len;
    for (size_t i = 0; i < len; i++) {
        r->tokens[i] = (unsigned char)text[i];
    }
    kvf_key keys[MAX_BLOCKS];
    r->num_blocks = kvf_chain(s->space, keys, MAX_BLOCKS, r->tokens, r->num_tokens);
    for (size_t i = 0; i < r->num_blocks; i++) {
        r->blocks[i] = (kvf_block){.key = keys[i],
                                   .tokens = r->tokens + i * BLOCK_TOKENS,
                                   .num_tokens = BLOCK_TOKENS,
                                   .first_token = (uint32_t)(i * BLOCK_TOKENS),
                                   .slot = (r - s->requests) * MAX_BLOCKS + (int64_t)i};
    }
    start_match(s, r);
}

/* Reads a line of stdin. Returns false at its end. */
static bool take_line(scheduler *s) {
    char line[MAX_TOKENS + 2];
    if (fgets(line, sizeof line, stdin) == NULL) {
        return false;
    }
    size_t len = strcspn(line, "\n");
    if (len > MAX_TOKENS) {
        fprintf(stderr, "async: a prompt has at most %d bytes; this one is left out\n", MAX_TOKENS);
        while (strchr(line, '\n') == NULL && fgets(line, sizeof line, stdin) != NULL) {
        }
    } else if (strncmp(line, "cancel ", 7) == 0) {
        cancel(s, strtoul(line + 7, NULL, 10));
    } else if (len > 0) {
        take_prompt(s, find(s, FREE), line, len);
    }
    return true;
}

static void take_completions(scheduler *s) {
    kvf_completion done[MAX_REQUESTS];
    size_t num = kvf_reap(s->queue, done, MAX_REQUESTS);
    for (size_t i = 0; i < num; i++) {
        request *r = &s->requests[done[i].user];
        if (r->cancelled) {
            r->state = FREE;
        } else if (done[i].op == KVF_OP_MATCH) {
            start_load(s, r, done[i].num_ok);
        } else {
            end_load(r);
        }
    }
}

/* How long poll may wait: not at all if there is something to compute, else until a load is late. */
static int wait_ms(scheduler *s) {
    int64_t first = INT64_MAX;
    if (find(s, COMPUTING) != NULL) {
        return 0;
    }
    for (request *r = s->requests; r < s->requests + MAX_REQUESTS; r++) {
        if (r->state == LOADING && !r->cancelled && deadline_us(s, r) < first) {
            first = deadline_us(s, r);
        }
    }
    int64_t left = first == INT64_MAX ? -1 : (first - now_us()) / 1000 + 1;
    return left > INT_MAX ? INT_MAX : left < 0 && first != INT64_MAX ? 0 : (int)left;
}

static bool is_idle(scheduler *s) {
    return find(s, MATCHING) == NULL && find(s, LOADING) == NULL && find(s, COMPUTING) == NULL;
}

static int serve(scheduler *s) {
    bool more = true;
    setvbuf(stdout, NULL, _IOLBF, 0);
    setvbuf(stdin, NULL, _IONBF, 0); /* poll sees only what stdio has not read */
    while (more || !is_idle(s)) {
        struct pollfd fds[] = {{.fd = kvf_queue_fd(s->queue), .events = POLLIN},
                               {.fd = more && find(s, FREE) != NULL ? STDIN_FILENO : -1, .events = POLLIN}};
        if (poll(fds, 2, wait_ms(s)) < 0 && errno != EINTR) {
            return fail("poll", strerror(errno));
        }
        if (fds[1].revents != 0) {
            more = take_line(s);
        }
        take_completions(s);
        give_up_late_loads(s);
        request *next = find(s, COMPUTING);
        if (next != NULL) {
            compute_some(s, next);
        }
    }
    return 0;
}

static int run(scheduler *s) {
    const kvf_field fields[] = {{"engine", "example-1"}, {"model", "toy"}, {"kv", "f32 token 256"}};
    const kvf_space_options options = {.struct_size = sizeof options, .block_tokens = BLOCK_TOKENS};
    const kvf_region region = {.base = pool, .slot_stride = BLOCK_BYTES, .run_bytes = BLOCK_BYTES, .num_runs = 1};
    kvf_error err = {0};
    int rc = 1;
    if (kvf_space_open(&s->space, &err, s->store, fields, sizeof fields / sizeof fields[0], &options) != KVF_OK ||
        kvf_view_open(&s->view, &err, &region, 1, MAX_REQUESTS * MAX_BLOCKS) != KVF_OK ||
        kvf_queue_open(&s->queue, &err, s->store, MAX_REQUESTS) != KVF_OK) {
        fail("start", err.what);
    } else {
        rc = serve(s);
    }
    kvf_queue_close(s->queue);
    kvf_view_close(s->view);
    kvf_space_close(s->space);
    return rc;
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: async [STORE [PATIENCE_MS]] < PROMPTS\n"
        "Answers each line of stdin; \"cancel N\" drops the N-th prompt.\n"
        "  STORE        mem: (as without it), file:/a/folder, redis://host:6379, redis+unix:///run/redis.sock, ...\n"
        "  PATIENCE_MS  how long a prompt waits for a store that brings nothing; 1 to 60000, 40 without it\n";
    static scheduler s = {.patience_us = KVF_LOOKUP_US};
    const char *url = argc > 1 ? argv[1] : "mem:";
    kvf_error err = {0};

    if (strcmp(url, "--help") == 0) {
        return fputs(usage, stdout) < 0;
    }
    if (url[0] == '-' || argc > 3) {
        const char *unknown = url[0] == '-' ? url : argv[3];
        return fprintf(stderr, "async: unexpected argument %s; see async --help\n", unknown), 2;
    }
    if (argc > 2) {
        char *end = NULL;
        long ms = strtol(argv[2], &end, 10);
        if (end == argv[2] || *end != '\0' || ms < 1 || ms > 60000) {
            return fprintf(stderr, "async: PATIENCE_MS is a number from 1 to 60000, not %s\n", argv[2]), 2;
        }
        s.patience_us = KVF_MS(ms);
    }
    if (kvf_store_open(&s.store, &err, &url, 1, NULL) != KVF_OK) {
        return fail(url, err.what);
    }
    int rc = run(&s);
    kvf_store_close(s.store);
    return rc;
}
