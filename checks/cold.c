/* SPDX-License-Identifier: Apache-2.0
 *
 * check-cold: the cost of write-behind in a cold run. One process and one context of the real model run pairs of the
 * same prompt, a new one for each pair: once saving into a folder, once without a store, in random order. A run is a
 * prefill of two batches of one block each (the first is written while the second is computed) and the last token. With
 * the store it also includes the wait until the last block is written, which would not show with a longer prompt.
 *
 * The median of the pairs' ratios counts, and its interval decides. If all of it is at most 1.02 the check is ok. If
 * all of it is above, it is FAILED. If the limit is inside, it is "not resolved", which fails too: the machine was too
 * noisy. The number of pairs is fixed before the first one runs.
 *
 * The runs are short so that a pair ends soon: on a virtual machine whose neighbours come and go the same prefill takes
 * 3 to 5 s, and 21 pairs of processes of 4 s cannot tell 1.016 from 1.02. Beside the ratio stands a cost that noise
 * hardly affects: the time of the exports and the CPU time of the writers, as a share of the run.
 *
 * --series FILE keeps the pairs in FILE and continues them, so a series may be measured in portions. --control runs
 * both sides without a store, which shows the noise and must give 1. --check exits 1 unless the result is ok.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kvferry/llama.h"
#include "support/kit.h"
#include "support/median.h"

#define LIMIT        1.02
#define MAX_PAIRS    KVFT_MAX_SERIES
#define MAX_THREADS  64u
#define BLOCK_TOKENS 64u
#define BATCH        64u /* tokens of one llama_decode: a block is written while the next one is computed */

enum { PLAIN, STORING, NUM_SIDES };

static void die(const char *what) {
    fprintf(stderr, "check-cold: %s\n", what);
    exit(1);
}

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- threads: those that came after the model's are the writers ---- */

typedef struct threads {
    int known[MAX_THREADS]; /* of the model */
    size_t num_known;
} threads;

static bool is_known(const threads *t, int id) {
    for (size_t i = 0; i < t->num_known; i++) {
        if (t->known[i] == id) {
            return true;
        }
    }
    return false;
}

static double cpu_of(int id) {
    char path[80];
    unsigned long long ns = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", id);
    FILE *file = fopen(path, "r");
    if (file == NULL || fscanf(file, "%llu", &ns) != 1) {
        ns = 0; /* this kernel does not count it */
    }
    if (file != NULL) {
        fclose(file);
    }
    return (double)ns * 1e-9;
}

/* The CPU time of all threads that are not known; with `learn`, all there are become known. */
static double cpu_of_others(threads *t, bool learn) {
    double seconds = 0;
    DIR *dir = opendir("/proc/self/task");
    for (struct dirent *entry = dir != NULL ? readdir(dir) : NULL; entry != NULL; entry = readdir(dir)) {
        int id = atoi(entry->d_name);
        if (id > 0 && learn && t->num_known < MAX_THREADS) {
            t->known[t->num_known++] = id;
        } else if (id > 0 && !is_known(t, id)) {
            seconds += cpu_of(id);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return seconds;
}

/* ---- one run ---- */

typedef struct bench {
    struct llama_model *model;
    struct llama_context *ctx;
    kvf_store *store;
    kvf_llama *side[NUM_SIDES];
    size_t num_tokens;
    llama_token *tokens;
} bench;

typedef struct sample {
    double seconds, cpu, export_s;
} sample;

static sample run(bench *b, int side) {
    kvf_llama_report report = {.struct_size = sizeof report};
    kvf_error err = {0};
    bool stores = b->side[side] != b->side[PLAIN];
    llama_memory_clear(llama_get_memory(b->ctx), true);
    double began = now(CLOCK_MONOTONIC), used = now(CLOCK_PROCESS_CPUTIME_ID);
    if (kvf_llama_prefill(b->side[side], &report, &err, 0, b->tokens, b->num_tokens) != KVF_OK) {
        die(err.what);
    }
    if (report.saved_blocks > 0) {
        kvft_flush_all(b->store);
    }
    sample s = {.seconds = now(CLOCK_MONOTONIC) - began,
                .cpu = now(CLOCK_PROCESS_CPUTIME_ID) - used,
                .export_s = (double)report.export_us * 1e-6};
    size_t in_blocks = b->num_tokens - 1, expected = (in_blocks + BLOCK_TOKENS - 1) / BLOCK_TOKENS; /* with the tail */
    if (report.computed_tokens != b->num_tokens || report.saved_blocks != (stores ? expected : 0)) {
        die("a run was not cold, or did not store all of its blocks");
    }
    return s;
}

static void new_prompt(bench *b, uint64_t seed) {
    for (size_t i = 0; i < b->num_tokens; i++) {
        b->tokens[i] = (llama_token)(100 + kvft_random(&seed) % 40000);
    }
}

/* ---- the figures ---- */

typedef struct series {
    double time[MAX_PAIRS], cpu[MAX_PAIRS]; /* ratios */
    double seconds, export_s, writers_s;    /* sums over the runs that store */
    size_t num;
    FILE *kept;
} series;

typedef struct pair {
    sample side[NUM_SIDES];
    double writers_s;
} pair;

static void add_pair(series *all, const pair *p) {
    const sample *plain = &p->side[PLAIN], *storing = &p->side[STORING];
    all->time[all->num] = storing->seconds / plain->seconds;
    all->cpu[all->num] = storing->cpu / plain->cpu;
    all->seconds += storing->seconds;
    all->export_s += storing->export_s;
    all->writers_s += p->writers_s;
    all->num++;
}

static void show_pair(const series *all, const pair *p) {
    const sample *plain = &p->side[PLAIN], *storing = &p->side[STORING];
    printf("pair %zu: %.0f ms without, %.0f ms with all blocks stored: %.4f, CPU %.4f, export %.1f ms\n", all->num,
           plain->seconds * 1e3, storing->seconds * 1e3, storing->seconds / plain->seconds, storing->cpu / plain->cpu,
           storing->export_s * 1e3);
    fflush(stdout);
}

/* A series may be measured in portions: the file has the pairs of those before. */
static void go_on(series *all, const char *path) {
    pair p;
    all->kept = fopen(path, "a+");
    if (all->kept == NULL) {
        die("can't open the file of --series");
    }
    sample *a = &p.side[PLAIN], *b = &p.side[STORING];
    while (all->num < MAX_PAIRS && fscanf(all->kept, "%lf %lf %lf %lf %lf %lf", &a->seconds, &b->seconds, &a->cpu,
                                          &b->cpu, &b->export_s, &p.writers_s) == 6) {
        add_pair(all, &p);
    }
}

static void keep(const series *all, const pair *p) {
    const sample *a = &p->side[PLAIN], *b = &p->side[STORING];
    if (all->kept != NULL) {
        fprintf(all->kept, "%.6f %.6f %.6f %.6f %.6f %.6f\n", a->seconds, b->seconds, a->cpu, b->cpu, b->export_s,
                p->writers_s);
        fflush(all->kept);
    }
}

static pair run_pair(bench *b, threads *of_model, uint64_t seed) {
    pair p;
    double written = cpu_of_others(of_model, false);
    new_prompt(b, seed);
    /* Random, with the same seed in every series: a load that comes and goes in a rhythm favours no side. */
    int first = kvft_random(&seed) % 2 == 0 ? PLAIN : STORING;
    p.side[first] = run(b, first);
    p.side[1 - first] = run(b, 1 - first);
    p.writers_s = cpu_of_others(of_model, false) - written;
    return p;
}

static void measure(bench *b, series *all, size_t num_pairs) {
    threads of_model = {.num_known = 0};
    new_prompt(b, UINT64_MAX);
    run(b, PLAIN);
    cpu_of_others(&of_model, true);
    run(b, STORING); /* of no pair: the first one starts the writers and maps their memory */
    while (all->num < num_pairs) {
        pair p = run_pair(b, &of_model, all->num);
        keep(all, &p);
        add_pair(all, &p);
        show_pair(all, &p);
    }
}

static bool conclude(const series *all) {
    kvft_median time = kvft_median_of(all->time, all->num), cpu = kvft_median_of(all->cpu, all->num);
    const char *verdict = time.high <= LIMIT ? "ok"
                          : time.low > LIMIT ? "FAILED"
                                             : "FAILED: not resolved, too much noise for so few pairs";
    double runs = (double)all->num;
    printf("\nCPU time: median ratio %.4f, 95 %% interval %.4f to %.4f\n", cpu.value, cpu.low, cpu.high);
    printf("of a run that stores, %.0f ms: exports %.1f ms, CPU time of the writers %.1f ms, together %.2f %%\n",
           all->seconds / runs * 1e3, all->export_s / runs * 1e3, all->writers_s / runs * 1e3,
           100 * (all->export_s + all->writers_s) / all->seconds);
    printf(
        "check-cold: %s: a cold run that stores takes %.4f of one that does not (<= %.2f); median of %zu pairs, 95 %% interval "
        "%.4f to %.4f, all %.2f to %.2f\n",
        verdict, time.value, LIMIT, all->num, time.low, time.high, time.least, time.most);
    return time.high <= LIMIT;
}

/* ---- all of it ---- */

static void quiet(enum ggml_log_level level, const char *text, void *ctx) {
    (void)ctx;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static kvf_llama *attach(bench *b, const struct llama_context_params *params, kvf_store *store, int side) {
    kvf_error err = {0};
    kvf_llama *kv = NULL;
    const struct llama_model_params model_params = llama_model_default_params();
    const kvf_llama_options options = {.struct_size = sizeof options,
                                       .scratch_seq = 1 + side,
                                       .model_path = getenv("KVF_MODEL"),
                                       .context_params = params,
                                       .model_params = &model_params,
                                       .block_tokens = BLOCK_TOKENS};
    if (kvf_llama_attach(&kv, &err, store, b->ctx, &options) != KVF_OK) {
        die(err.what);
    }
    return kv;
}

static void open_bench(bench *b, const char *folder) {
    char url[300];
    struct llama_context_params params = llama_context_default_params();
    llama_log_set(quiet, NULL);
    b->model = getenv("KVF_MODEL") != NULL
                   ? llama_model_load_from_file(getenv("KVF_MODEL"), llama_model_default_params())
                   : NULL;
    if (b->model == NULL) {
        die("no model: run this by `make check-cold`");
    }
    params.n_ctx = (uint32_t)b->num_tokens + 256;
    params.n_ubatch = BATCH;
    params.n_seq_max = 1 + NUM_SIDES;
    params.kv_unified = true;
    params.n_threads = params.n_threads_batch = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    b->ctx = llama_init_from_model(b->model, params);
    if (b->ctx == NULL) {
        die("no context");
    }
    /* Room for all runs would fill a disk, so old records are evicted during the runs, as in any folder. */
    snprintf(url, sizeof url, "file:%s?max=256M", folder);
    b->store = kvft_store(url);
    b->side[PLAIN] = attach(b, &params, NULL, PLAIN);
    b->side[STORING] = attach(b, &params, b->store, STORING);
}

static void close_bench(bench *b) {
    for (int side = 0; side < NUM_SIDES; side++) {
        kvf_llama_detach(b->side[side]);
    }
    kvf_store_close(b->store);
    llama_free(b->ctx);
    llama_model_free(b->model);
    free(b->tokens);
}

static unsigned number(const char *text, unsigned max) {
    unsigned long value = text != NULL ? strtoul(text, NULL, 10) : 0;
    if (value < 1 || value > max) {
        die("usage: check_cold [--pairs N] [--tokens N] [--series FILE] [--control] [--check]");
    }
    return (unsigned)value;
}

int main(int argc, char **argv) {
    static series all;
    bench b = {.num_tokens = 2 * BATCH + 1};
    size_t num_pairs = 600;
    bool check = false, control = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--check") == 0) {
            check = true;
        } else if (strcmp(argv[i], "--control") == 0) {
            control = true;
        } else if (strcmp(argv[i], "--tokens") == 0) {
            b.num_tokens = number(argv[++i], 1u << 16);
        } else if (strcmp(argv[i], "--series") == 0 && argv[i + 1] != NULL) {
            go_on(&all, argv[++i]);
        } else {
            num_pairs = number(strcmp(argv[i], "--pairs") == 0 ? argv[++i] : NULL, MAX_PAIRS);
        }
    }
    char *folder = kvft_temp_dir();
    b.tokens = calloc(b.num_tokens, sizeof *b.tokens);
    if (b.tokens == NULL) {
        die("no memory");
    }
    open_bench(&b, folder);
    if (control) {
        kvf_llama_detach(b.side[STORING]);
        b.side[STORING] = b.side[PLAIN];
    }
    printf("%zu pairs of runs with %zu tokens; OMP_WAIT_POLICY %s\n", num_pairs, b.num_tokens,
           getenv("OMP_WAIT_POLICY") != NULL ? getenv("OMP_WAIT_POLICY") : "not set");
    measure(&b, &all, num_pairs);
    if (control) {
        b.side[STORING] = NULL;
    }
    close_bench(&b);
    kvft_remove_dir(folder);
    if (all.kept != NULL) {
        fclose(all.kept);
    }
    bool good = conclude(&all);
    return good || !check ? 0 : 1;
}
