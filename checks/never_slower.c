/* SPDX-License-Identifier: Apache-2.0
 *
 * check-never-slower: the time to the first token of a prompt whose blocks are all stored, behind a link of many
 * bandwidths (the fault proxy), beside the same prompt on the same context without a store. The plan is fixed before
 * the first run: nine bandwidths, three of them around the crossover, where loading everything takes as long as
 * computing everything (from the median of five prefills without a store), and a number of rounds over all of them. A
 * round at a bandwidth is
 *
 *   plain    the prefill without a store,
 *   fresh    with a handle that was just attached: it knows neither the store nor how fast this context computes,
 *   known    with the handle of the rounds before; what it measured of the store is too old to be believed by then,
 *   loading  around the crossover: loading all, whatever it takes,
 *
 * the first three in a random order that is the same in every series. The median of the pairs' ratios counts: fresh and
 * known at most 1.05 of plain everywhere; around the crossover the better of loading and plain at least 1.5 times
 * known. All logits must be equal to the bit.
 *
 * --series FILE keeps the measurements and continues them, so the plan may run in portions. --svg FILE draws them.
 * --check exits 1 if the promise does not hold. --blocks N and --pairs N make it smaller.
 */
#include <time.h>

#define LAB_AS_STARTED
#include "llama/lab.h"
#include "never_slower_draw.h"
#include "support/proxy.h"
#include "support/server.h"

#define BLOCK       64u
#define BLOCKS      9u
#define PAIRS       7u
#define MAX_PAIRS   99u
#define MAX_RATIO   1.05
#define MIN_GAIN    1.5
#define PATIENCE_MS 600000u /* of loading alone */

enum { PLAIN, FRESH, KNOWN, LOADING, NUM_WAYS };
static const char *const way_names[] = {"plain", "fresh", "known", "loading"};

typedef struct way {
    kvf_store *store;
    kvf_llama *kv;
} way;

typedef struct point {
    double mb_per_s;     /* 0 = unlimited */
    double of_crossover; /* not 0: so many times the crossover */
    way known, loading;
    size_t num;
    size_t wrong; /* logits that were not the oracle's */
    double ms[NUM_WAYS][MAX_PAIRS];
} point;

typedef struct bench {
    struct llama_model *model;
    lab plain; /* its context is everyone's */
    kvft_server *server;
    kvft_proxy *proxy;
    llama_token *tokens;
    size_t num_tokens, blocks, pairs;
    double bytes;      /* of all blocks */
    double compute_ms; /* of all, without a store */
    float *oracle;
    size_t wrong; /* of the round at hand */
    FILE *series;
} bench;

static point points[] = {{.mb_per_s = 1},     {.mb_per_s = 2},        {.of_crossover = 0.8},
                         {.of_crossover = 1}, {.of_crossover = 1.25}, {.mb_per_s = 8},
                         {.mb_per_s = 20},    {.mb_per_s = 100},      {.mb_per_s = 0}};
#define NUM_POINTS (sizeof points / sizeof *points)

static void die(const char *what) {
    fprintf(stderr, "check-never-slower: %s\n", what);
    exit(1);
}

/* ---- numbers ---- */

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, size_t num) {
    double sorted[MAX_PAIRS];
    memcpy(sorted, values, num * sizeof *values);
    qsort(sorted, num, sizeof *sorted, by_size);
    return num % 2 == 1 ? sorted[num / 2] : (sorted[num / 2 - 1] + sorted[num / 2]) / 2;
}

/* The median of the pairs' ratios. */
static double ratio_of(const double *a, const double *b, size_t num) {
    double ratios[MAX_PAIRS];
    for (size_t i = 0; i < num; i++) {
        ratios[i] = a[i] / b[i];
    }
    return median(ratios, num);
}

static double gain_of(const point *p) {
    double best[MAX_PAIRS];
    for (size_t i = 0; i < p->num; i++) {
        best[i] = p->ms[LOADING][i] < p->ms[PLAIN][i] ? p->ms[LOADING][i] : p->ms[PLAIN][i];
    }
    return ratio_of(best, p->ms[KNOWN], p->num);
}

/* ---- one run ---- */

static way attach(bench *b, const char *url, uint32_t budget_ms) {
    way w = {.store = kvft_store(url)};
    kvf_error err = {0};
    const struct llama_model_params model_params = llama_model_default_params();
    kvf_llama_options options = {.struct_size = sizeof options,
                                 .scratch_seq = (llama_seq_id)b->plain.params.n_seq_max - 1,
                                 .model_path = getenv("KVF_MODEL"),
                                 .context_params = &b->plain.params,
                                 .model_params = &model_params,
                                 .block_tokens = BLOCK,
                                 .budget_us = KVF_MS(budget_ms)};
    if (kvf_llama_attach(&w.kv, &err, w.store, b->plain.ctx, &options) != KVF_OK) {
        die(err.what);
    }
    return w;
}

static void detach(way *w) {
    kvf_llama_detach(w->kv);
    kvf_store_close(w->store);
    *w = (way){0};
}

static void clear(bench *b) {
    llama_memory_clear(llama_get_memory(b->plain.ctx), false);
}

static void compare(bench *b) {
    size_t bytes = lab_vocab(&b->plain) * sizeof(float);
    const float *logits = llama_get_logits_ith(b->plain.ctx, -1);
    if (b->oracle == NULL) {
        b->oracle = malloc(bytes);
        memcpy(b->oracle, logits, bytes);
    }
    b->wrong += memcmp(b->oracle, logits, bytes) != 0;
}

static double prefill(bench *b, kvf_llama *kv, kvf_llama_report *report) {
    kvf_error err = {0};
    clear(b);
    double begin = kvft_now_ms();
    if (kvf_llama_prefill(kv, report, &err, 0, b->tokens, b->num_tokens) != KVF_OK) {
        die(err.what);
    }
    (void)llama_get_logits_ith(b->plain.ctx, -1);
    double took = kvft_now_ms() - begin;
    compare(b);
    return took;
}

/* Loading all, and computing the last token. */
static double load_only(bench *b, kvf_llama *kv) {
    clear(b);
    double begin = kvft_now_ms();
    size_t have = kvf_llama_load(kv, NULL, 0, b->tokens, b->num_tokens);
    if (have != b->num_tokens - 1) {
        die("not all of the prompt could be loaded");
    }
    struct llama_batch batch = llama_batch_get_one(&b->tokens[have], 1);
    if (llama_decode(b->plain.ctx, batch) != 0) {
        die("the last token could not be computed");
    }
    (void)llama_get_logits_ith(b->plain.ctx, -1);
    double took = kvft_now_ms() - begin;
    compare(b);
    return took;
}

/* ---- a round at a bandwidth ---- */

static double rate_of(const bench *b, const point *p) {
    return p->of_crossover > 0 ? p->of_crossover * b->bytes / (b->compute_ms * 1e3) : p->mb_per_s;
}

static double run(bench *b, point *p, int which, kvf_llama_report *report) {
    const char *url = kvft_proxy_tcp_url(b->proxy);
    if (which == FRESH) {
        way fresh = attach(b, url, 0);
        double took = prefill(b, fresh.kv, report);
        detach(&fresh);
        return took;
    }
    if (which == KNOWN && p->known.kv == NULL) {
        p->known = attach(b, url, 0);
        (void)prefill(b, p->known.kv, report);
    }
    return prefill(b, which == KNOWN ? p->known.kv : b->plain.kv, report);
}

static void show(const point *p, int which, const kvf_llama_report *r) {
    fprintf(stderr, "; %s %.0f ms", way_names[which], p->ms[which][p->num]);
    if (which != PLAIN) {
        fprintf(stderr, " (%s: %u loaded, %u computed, waited %.0f ms)", kvf_llama_plan_name(r->plan), r->loaded_tokens,
                r->computed_tokens, (double)r->waited_us / 1e3);
    }
}

static void keep(const bench *b, const point *p) {
    if (b->series != NULL) {
        fprintf(b->series, "%zu", (size_t)(p - points));
        for (int which = 0; which < NUM_WAYS; which++) {
            fprintf(b->series, " %.3f", p->ms[which][p->num]);
        }
        fprintf(b->series, " %zu\n", b->wrong);
        fflush(b->series);
    }
}

static void measure(bench *b, point *p) {
    double rate = rate_of(b, p);
    uint64_t chance = p->num * NUM_POINTS + (size_t)(p - points);
    int first = (int)(kvft_random(&chance) % LOADING);
    kvft_proxy_set(b->proxy, &(kvft_plan){.bytes_per_s = (uint64_t)(rate * 1e6)});
    fprintf(stderr, "round %zu of %zu, %.1f MB/s", p->num + 1, b->pairs, rate);
    for (int i = 0; i < LOADING; i++) {
        int which = (first + i) % LOADING;
        kvf_llama_report report = {.struct_size = sizeof report};
        p->ms[which][p->num] = run(b, p, which, &report);
        show(p, which, &report);
    }
    if (p->of_crossover > 0) {
        if (p->loading.kv == NULL) {
            p->loading = attach(b, kvft_proxy_tcp_url(b->proxy), PATIENCE_MS);
        }
        p->ms[LOADING][p->num] = load_only(b, p->loading.kv);
        fprintf(stderr, "; loading alone %.0f ms", p->ms[LOADING][p->num]);
    }
    fprintf(stderr, "%s\n", b->wrong > 0 ? "; ANOTHER ANSWER" : "");
    keep(b, p);
    p->num++;
    p->wrong += b->wrong;
    b->wrong = 0;
}

/* ---- all of it ---- */

static void open_bench(bench *b) {
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = 2048};
    b->model = lab_model();
    if (b->model == NULL) {
        die("no model: set KVF_MODEL (make setup)");
    }
    b->plain = lab_open(b->model, &config, NULL, NULL);
    b->server = kvft_server_start(NULL);
    b->proxy = b->server != NULL ? kvft_proxy_start(b->server->socket) : NULL;
    if (b->proxy == NULL || b->plain.status != KVF_OK) {
        die(b->proxy == NULL ? "no redis-server" : b->plain.err.what);
    }
    b->num_tokens = b->blocks * BLOCK + 1;
    b->tokens = lab_prompt(b->num_tokens, 11);
    way w = attach(b, b->server->unix_url, 0);
    kvf_llama_report report = {.struct_size = sizeof report};
    (void)prefill(b, w.kv, &report);
    kvft_flush_all(w.store);
    if (report.saved_blocks != b->blocks) {
        die("the prompt could not be stored");
    }
    (void)prefill(b, w.kv, &report); /* has it all from the store */
    b->bytes = (double)report.loaded_bytes;
    detach(&w);
}

static void close_bench(bench *b) {
    for (size_t i = 0; i < NUM_POINTS; i++) {
        detach(&points[i].known);
        detach(&points[i].loading);
    }
    kvft_proxy_stop(b->proxy);
    kvft_server_stop(b->server);
    lab_close(&b->plain);
    llama_model_free(b->model);
    free(b->tokens);
    free(b->oracle);
}

static void find_crossover(bench *b) {
    double ms[5];
    (void)prefill(b, b->plain.kv, NULL);
    for (size_t i = 0; i < 5; i++) {
        ms[i] = prefill(b, b->plain.kv, NULL);
    }
    b->compute_ms = median(ms, 5);
}

/* What an earlier portion measured; false: nothing, and the crossover has to be found. */
static bool go_on(bench *b) {
    double bytes = 0, ms[NUM_WAYS];
    size_t blocks = 0, index = 0, wrong = 0;
    rewind(b->series);
    if (fscanf(b->series, "%zu blocks %lf bytes %lf ms", &blocks, &bytes, &b->compute_ms) != 3) {
        return false;
    }
    if (blocks != b->blocks) {
        die("the file of --series has another number of blocks");
    }
    b->bytes = bytes;
    while (fscanf(b->series, "%zu %lf %lf %lf %lf %zu", &index, &ms[PLAIN], &ms[FRESH], &ms[KNOWN], &ms[LOADING],
                  &wrong) == 6) {
        if (index >= NUM_POINTS || points[index].num == MAX_PAIRS) {
            die("the file of --series is not one of this program");
        }
        for (int which = 0; which < NUM_WAYS; which++) {
            points[index].ms[which][points[index].num] = ms[which];
        }
        points[index].num++;
        points[index].wrong += wrong;
    }
    return true;
}

/* The next of the plan, or NULL: it has been carried out. */
static point *next_point(const bench *b) {
    point *next = &points[0];
    for (size_t i = 1; i < NUM_POINTS; i++) {
        next = points[i].num < next->num ? &points[i] : next;
    }
    return next->num < b->pairs ? next : NULL;
}

static void carry_out(bench *b) {
    bool began = b->series != NULL && go_on(b);
    if (next_point(b) == NULL) {
        return;
    }
    open_bench(b);
    if (!began) {
        find_crossover(b);
        if (b->series != NULL) {
            fprintf(b->series, "%zu blocks %.0f bytes %.3f ms\n", b->blocks, b->bytes, b->compute_ms);
        }
    }
    fprintf(stderr, "%zu tokens, %.1f MB, computed in %.0f ms: loading takes as long at %.2f MB/s\n", b->num_tokens,
            b->bytes / 1e6, b->compute_ms, b->bytes / (b->compute_ms * 1e3));
    for (point *p = next_point(b); p != NULL; p = next_point(b)) {
        measure(b, p);
    }
    close_bench(b);
}

/* ---- the verdict ---- */

typedef struct verdict {
    double worst_known, worst_fresh, gain;
    size_t wrong;
} verdict;

static verdict judge(const bench *b) {
    verdict v = {.gain = INFINITY};
    printf("\n%10s %8s %8s %8s %8s %8s %8s\n", "MB/s", "plain ms", "fresh ms", "known ms", "fresh", "known", "gain");
    for (size_t i = 0; i < NUM_POINTS; i++) {
        const point *p = &points[i];
        double fresh = ratio_of(p->ms[FRESH], p->ms[PLAIN], p->num),
               known = ratio_of(p->ms[KNOWN], p->ms[PLAIN], p->num);
        v.wrong += p->wrong;
        v.worst_fresh = fresh > v.worst_fresh ? fresh : v.worst_fresh;
        v.worst_known = known > v.worst_known ? known : v.worst_known;
        printf("%10.2f %8.0f %8.0f %8.0f %8.3f %8.3f", rate_of(b, p), median(p->ms[PLAIN], p->num),
               median(p->ms[FRESH], p->num), median(p->ms[KNOWN], p->num), fresh, known);
        if (p->of_crossover > 0) {
            double gain = gain_of(p);
            v.gain = gain < v.gain ? gain : v.gain;
            printf(" %8.2f   loading alone %.0f ms", gain, median(p->ms[LOADING], p->num));
        }
        printf("\n");
    }
    return v;
}

static bool draw(const bench *b, const char *path) {
    spot spots[NUM_POINTS];
    for (size_t i = 0; i < NUM_POINTS; i++) {
        const point *p = &points[i];
        spots[i] = (spot){.mb_per_s = rate_of(b, p),
                          .known = ratio_of(p->ms[KNOWN], p->ms[PLAIN], p->num),
                          .fresh = ratio_of(p->ms[FRESH], p->ms[PLAIN], p->num),
                          .loading = p->of_crossover > 0 ? ratio_of(p->ms[LOADING], p->ms[PLAIN], p->num) : 0};
    }
    qsort(spots, NUM_POINTS - 1, sizeof *spots, by_size); /* a spot begins with its bandwidth; the last is unlimited */
    return draw_never_slower(path, spots, NUM_POINTS, b->bytes / (b->compute_ms * 1e3));
}

static size_t number(const char *text, size_t max) {
    size_t value = text != NULL ? strtoul(text, NULL, 10) : 0;
    if (value < 1 || value > max) {
        die("usage: check_never_slower [--check] [--pairs N] [--blocks N] [--series FILE] [--svg FILE]");
    }
    return value;
}

int main(int argc, char **argv) {
    static bench b = {.blocks = BLOCKS, .pairs = PAIRS};
    const char *svg = NULL;
    bool check = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--check") == 0) {
            check = true;
        } else if (strcmp(argv[i], "--series") == 0 && i + 1 < argc) {
            b.series = fopen(argv[++i], "a+");
        } else if (strcmp(argv[i], "--svg") == 0 && i + 1 < argc) {
            svg = argv[++i];
        } else if (strcmp(argv[i], "--blocks") == 0) {
            b.blocks = number(argv[++i], 30);
        } else {
            b.pairs = number(strcmp(argv[i], "--pairs") == 0 ? argv[++i] : NULL, MAX_PAIRS);
        }
    }
    carry_out(&b);
    verdict v = judge(&b);
    bool drawn = svg == NULL || draw(&b, svg);
    bool ok = v.worst_known <= MAX_RATIO && v.worst_fresh <= MAX_RATIO && v.gain >= MIN_GAIN && v.wrong == 0;
    printf("check-never-slower: %s: at most %.3f times the time without a store, %.3f for a handle's first prompt "
           "(<= %.2f); around the crossover at least %.2f times better than the better of loading and computing alone "
           "(>= %.1f); %zu answers differ; medians of %zu pairs\n",
           ok ? "ok" : "FAILED", v.worst_known, v.worst_fresh, MAX_RATIO, v.gain, MIN_GAIN, v.wrong, b.pairs);
    if (b.series != NULL) {
        fclose(b.series);
    }
    return (ok || !check) && drawn ? 0 : 1;
}
