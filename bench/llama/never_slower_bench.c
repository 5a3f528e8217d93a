/* SPDX-License-Identifier: Apache-2.0
 *
 * check-never-slower: the time to the first token of a prompt whose blocks are all stored, behind a cable of many
 * bandwidths (the fault proxy), beside the same prompt on the same context without a store. For each bandwidth a handle
 * of its own: its first prefill knows nothing of the store, the later ones know what they measured. Around the
 * crossover, where loading all takes as long as computing all, also loading alone.
 *
 *   never_slower_bench [--check] [--rounds N] [--blocks N] [--svg FILE] [MB/s ...]
 */
#include <time.h>

#include "llama/lab.h"
#include "support/proxy.h"
#include "support/server.h"

#define MAX_RATES  24u
#define MAX_ROUNDS 15u
#define BLOCK      64u
#define MAX_RATIO  1.05
#define MIN_GAIN   1.5

typedef struct point {
    double mb_per_s; /* 0 = unlimited */
    bool crossover;  /* loading alone is measured too */
    kvf_store *store;
    kvf_llama *kv;
    size_t num;
    double with[MAX_ROUNDS], without[MAX_ROUNDS], loading[MAX_ROUNDS];
    kvf_llama_report report; /* of the last one */
} point;

typedef struct bench {
    struct llama_model *model;
    lab plain; /* its context is everyone's */
    kvft_server *server;
    kvft_proxy *proxy;
    llama_token *tokens;
    size_t num_tokens;
    double bytes; /* of all blocks */
    size_t rounds, num_points;
    point points[MAX_RATES];
    float *oracle;
    size_t wrong;
} bench;

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, size_t num) {
    double sorted[MAX_ROUNDS];
    memcpy(sorted, values, num * sizeof *values);
    qsort(sorted, num, sizeof *sorted, by_size);
    return num % 2 == 1 ? sorted[num / 2] : (sorted[num / 2 - 1] + sorted[num / 2]) / 2;
}

/* The median of the pairs' ratios. */
static double ratio_of(const double *a, const double *b, size_t num) {
    double ratios[MAX_ROUNDS];
    for (size_t i = 0; i < num; i++) {
        ratios[i] = a[i] / b[i];
    }
    return median(ratios, num);
}

static kvf_llama *attach(bench *b, kvf_store *store) {
    kvf_llama *kv = NULL;
    kvf_error err = {0};
    kvf_llama_options options = {.struct_size = sizeof options,
                                 .scratch_seq = (llama_seq_id)b->plain.params.n_seq_max - 1,
                                 .model_path = store != NULL ? getenv("KVF_MODEL") : NULL,
                                 .context_params = &b->plain.params,
                                 .budget_ms = 120000,
                                 .block_tokens = BLOCK};
    if (kvf_llama_attach(&kv, &err, store, b->plain.ctx, &options) != KVF_OK) {
        fprintf(stderr, "attach: %s\n", err.what);
        exit(1);
    }
    return kv;
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
        fprintf(stderr, "prefill: %s\n", err.what);
        exit(1);
    }
    (void)llama_get_logits_ith(b->plain.ctx, -1);
    double took = kvft_now_ms() - begin;
    compare(b);
    return took;
}

/* Loading all, whatever it costs, and computing the last token. */
static double load_only(bench *b, kvf_llama *kv) {
    clear(b);
    double begin = kvft_now_ms();
    size_t have = kvf_llama_load(kv, NULL, 0, b->tokens, b->num_tokens);
    if (have != b->num_tokens - 1) {
        fprintf(stderr, "only %zu of %zu tokens could be loaded\n", have, b->num_tokens - 1);
        exit(1);
    }
    struct llama_batch batch = llama_batch_get_one(&b->tokens[have], 1);
    if (llama_decode(b->plain.ctx, batch) != 0) {
        exit(1);
    }
    (void)llama_get_logits_ith(b->plain.ctx, -1);
    double took = kvft_now_ms() - begin;
    compare(b);
    return took;
}

static void set_rate(bench *b, double mb_per_s) {
    kvft_plan plan = {.bytes_per_s = (uint64_t)(mb_per_s * 1e6)};
    kvft_proxy_set(b->proxy, &plan);
}

static void open_bench(bench *b, size_t blocks) {
    lab_config config = {.kv_type = GGML_TYPE_F16, .flash = true, .n_ctx = 2048};
    b->model = lab_model();
    if (b->model == NULL) {
        fprintf(stderr, "no model: set KVF_MODEL (make setup)\n");
        exit(1);
    }
    b->plain = lab_open(b->model, &config, NULL, NULL);
    b->server = kvft_server_start(NULL);
    b->proxy = b->server != NULL ? kvft_proxy_start(b->server->socket) : NULL;
    if (b->proxy == NULL || b->plain.status != KVF_OK) {
        fprintf(stderr, "no redis-server, or %s\n", b->plain.err.what);
        exit(1);
    }
    b->num_tokens = blocks * BLOCK + 1;
    b->tokens = lab_prompt(b->num_tokens, 11);
    kvf_store *store = kvft_store(b->server->unix_url);
    kvf_llama *kv = attach(b, store);
    kvf_llama_report report;
    (void)prefill(b, kv, &report);
    if (kvf_store_flush(store, 10000) != KVF_OK || report.saved_blocks != blocks) {
        fprintf(stderr, "the prompt could not be stored\n");
        exit(1);
    }
    (void)prefill(b, kv, &report); /* has it all from the store */
    b->bytes = (double)report.loaded_bytes;
    kvf_llama_detach(kv);
    kvf_store_close(store);
}

static void open_point(bench *b, double mb_per_s, bool crossover) {
    point *p = &b->points[b->num_points++];
    *p = (point){.mb_per_s = mb_per_s, .crossover = crossover, .store = kvft_store(kvft_proxy_tcp_url(b->proxy))};
    p->kv = attach(b, p->store);
}

/* Two prefills, and in every other round in the other order. */
static void measure(bench *b, point *p, size_t round) {
    set_rate(b, p->mb_per_s);
    for (int half = 0; half < 2; half++) {
        if ((half == 0) == (round % 2 == 0)) {
            p->with[p->num] = prefill(b, p->kv, &p->report);
        } else {
            p->without[p->num] = prefill(b, b->plain.kv, NULL);
        }
    }
    if (p->crossover) {
        p->loading[p->num] = load_only(b, p->kv);
    }
    p->num++;
    fprintf(
        stderr,
        "round %zu, %7.1f MB/s: %6.0f ms, %6.0f without, %s (%u loaded, %u computed; waited %.0f ms; store %.1f MB/s, %.0f tokens/s)\n",
        round + 1, p->mb_per_s, p->with[p->num - 1], p->without[p->num - 1], kvf_llama_plan_name(p->report.plan),
        p->report.loaded_tokens, p->report.computed_tokens, (double)p->report.waited_us / 1e3,
        p->report.store_bytes_per_s / 1e6, p->report.compute_tokens_per_s);
}

/* ---- the picture: time to the first token by bandwidth, as a part of computing all ---- */

#define WIDTH  760.0
#define HEIGHT 420.0
#define LEFT   60.0
#define TOP    40.0
#define PLOT_W (WIDTH - LEFT - 20)
#define PLOT_H (HEIGHT - TOP - 70)
#define MAX_Y  1.4
#define MIN_X  0.0 /* log10 of 1 MB/s */
#define MAX_X  3.3

static double at_x(double mb_per_s) {
    double x = log10(mb_per_s > 0 ? mb_per_s : pow(10, MAX_X));
    return LEFT + (x - MIN_X) / (MAX_X - MIN_X) * PLOT_W;
}

static double at_y(double part) {
    return TOP + PLOT_H - (part < MAX_Y ? part : MAX_Y) / MAX_Y * PLOT_H;
}

static void draw_axes(FILE *f) {
    fprintf(
        f,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" font-size=\"13\">\n"
        "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
        WIDTH, HEIGHT);
    for (int i = 0; i <= 7; i++) {
        double y = at_y(0.2 * i);
        fprintf(
            f,
            "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#ddd\"/><text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.1f</text>\n",
            LEFT, y, LEFT + PLOT_W, LEFT - 8, y + 4, 0.2 * i);
    }
    for (int i = 0; i <= 3; i++) {
        double x = at_x(pow(10, i));
        fprintf(
            f,
            "<path d=\"M%.1f %.1fV%.1f\" stroke=\"#ddd\"/><text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%g MB/s</text>\n",
            x, TOP, TOP + PLOT_H, x, TOP + PLOT_H + 20, pow(10, i));
    }
    fprintf(
        f,
        "<text x=\"%.1f\" y=\"22\" font-weight=\"bold\">time to the first token, as a part of the time without a store</text>\n",
        LEFT);
}

static void draw_curves(FILE *f, bench *b, double compute_ms) {
    fprintf(f, "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#888\" stroke-width=\"2\"/>\n<path d=\"", LEFT, at_y(1),
            LEFT + PLOT_W);
    for (int i = 0; i <= 132; i++) {
        double rate = pow(10, MIN_X + i * (MAX_X - MIN_X) / 132), part = b->bytes / (rate * 1e3) / compute_ms;
        if (part <= MAX_Y) {
            fprintf(f, "%s%.1f %.1f", part > MAX_Y * 0.93 ? "M" : "L", at_x(rate), at_y(part));
        }
    }
    fprintf(f, "\" fill=\"none\" stroke=\"#c60\" stroke-width=\"2\" stroke-dasharray=\"6 4\"/>\n<path d=\"");
    for (size_t i = 0; i < b->num_points; i++) {
        const point *p = &b->points[i];
        fprintf(f, "%s%.1f %.1f", i == 0 ? "M" : "L", at_x(p->mb_per_s), at_y(ratio_of(p->with, p->without, p->num)));
    }
    fprintf(f, "\" fill=\"none\" stroke=\"#06c\" stroke-width=\"3\"/>\n");
    for (size_t i = 0; i < b->num_points; i++) {
        const point *p = &b->points[i];
        double part = ratio_of(p->with, p->without, p->num);
        fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"#06c\"><title>%g MB/s: %.2f</title></circle>\n",
                at_x(p->mb_per_s), at_y(part), p->mb_per_s, part);
    }
}

static void draw(bench *b, const char *path, double compute_ms) {
    FILE *f = fopen(path, "w");
    if (f == NULL) {
        fprintf(stderr, "%s can't be written\n", path);
        return;
    }
    draw_axes(f);
    draw_curves(f, b, compute_ms);
    double y = HEIGHT - 14;
    fprintf(
        f,
        "<g><path d=\"M%.0f %.0fh24\" stroke=\"#06c\" stroke-width=\"3\"/><text x=\"%.0f\" y=\"%.0f\">kvferry</text>"
        "<path d=\"M%.0f %.0fh24\" stroke=\"#c60\" stroke-width=\"2\" stroke-dasharray=\"6 4\"/><text x=\"%.0f\" y=\"%.0f\">bytes / bandwidth (loading alone)</text>"
        "<path d=\"M%.0f %.0fh24\" stroke=\"#888\" stroke-width=\"2\"/><text x=\"%.0f\" y=\"%.0f\">computing alone</text>"
        "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">rightmost: unlimited</text></g>\n</svg>\n",
        LEFT, y - 4, LEFT + 30, y, LEFT + 110, y - 4, LEFT + 140, y, LEFT + 370, y - 4, LEFT + 400, y, WIDTH - 20, y);
    fclose(f);
}

/* ---- the verdict ---- */

static bool judge(const bench *b) {
    double worst = 0, worst_new = 0, gain = 0;
    printf("\n%10s %12s %12s %10s %10s %12s\n", "MB/s", "with ms", "without ms", "ratio", "unknown", "loading ms");
    for (size_t i = 0; i < b->num_points; i++) {
        const point *p = &b->points[i];
        double ratio = ratio_of(p->with, p->without, p->num), first = p->with[0] / p->without[0];
        worst = ratio > worst ? ratio : worst;
        worst_new = first > worst_new ? first : worst_new;
        printf("%10.1f %12.0f %12.0f %10.3f %10.3f", p->mb_per_s, median(p->with, p->num), median(p->without, p->num),
               ratio, first);
        if (p->crossover) {
            double best[MAX_ROUNDS];
            for (size_t r = 0; r < p->num; r++) {
                best[r] = p->loading[r] < p->without[r] ? p->loading[r] : p->without[r];
            }
            double here = ratio_of(best, p->with, p->num);
            gain = here > gain ? here : gain;
            printf(" %12.0f   better of both alone / kvferry: %.2f", median(p->loading, p->num), here);
        }
        printf("\n");
    }
    bool ok = worst <= MAX_RATIO && gain >= MIN_GAIN && b->wrong == 0;
    printf(
        "%s: at most %.3f times the time without (bound %.2f; first prefill of a handle, which knows nothing: %.3f), "
        "at the crossover %.2f times better than the better of both (bound %.1f), %zu answers that differ\n",
        ok ? "ok" : "FAILED", worst, MAX_RATIO, worst_new, gain, MIN_GAIN, b->wrong);
    return ok;
}

int main(int argc, char **argv) {
    static bench b;
    static const double usual[] = {1, 2, 3, 5, 8, 16, 50, 200, 0};
    double rates[MAX_RATES];
    size_t num_rates = 0, blocks = 9;
    const char *svg = NULL;
    bool check = false;
    b.rounds = 3;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--check") == 0) {
            check = true;
        } else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
            b.rounds = strtoul(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--blocks") == 0 && i + 1 < argc) {
            blocks = strtoul(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--svg") == 0 && i + 1 < argc) {
            svg = argv[++i];
        } else if (num_rates + 2 < MAX_RATES) {
            rates[num_rates++] = strtod(argv[i], NULL);
        }
    }
    b.rounds = b.rounds < 1 ? 1 : b.rounds > MAX_ROUNDS ? MAX_ROUNDS : b.rounds;
    blocks = blocks < 1 ? 1 : blocks > 30 ? 30 : blocks;
    if (num_rates == 0) {
        num_rates = sizeof usual / sizeof *usual;
        memcpy(rates, usual, sizeof usual);
    }
    open_bench(&b, blocks);
    double compute_ms = prefill(&b, b.plain.kv, NULL), crossover = b.bytes / (compute_ms * 1e3);
    fprintf(stderr, "%zu tokens, %.1f MB, computed in %.0f ms: loading takes as long at %.1f MB/s\n", b.num_tokens,
            b.bytes / 1e6, compute_ms, crossover);
    bool placed = false;
    for (size_t i = 0; i < num_rates; i++) {
        if (!placed && (rates[i] > crossover || rates[i] == 0)) {
            open_point(&b, crossover, true);
            placed = true;
        }
        open_point(&b, rates[i], false);
    }
    for (size_t round = 0; round < b.rounds; round++) {
        for (size_t i = 0; i < b.num_points; i++) {
            measure(&b, &b.points[i], round);
        }
    }
    bool ok = judge(&b);
    if (svg != NULL) {
        draw(&b, svg, compute_ms);
    }
    for (size_t i = 0; i < b.num_points; i++) {
        kvf_llama_detach(b.points[i].kv);
        kvf_store_close(b.points[i].store);
    }
    kvft_proxy_stop(b.proxy);
    kvft_server_stop(b.server);
    free(b.tokens);
    free(b.oracle);
    lab_close(&b.plain);
    llama_model_free(b.model);
    return ok || !check ? 0 : 1;
}
