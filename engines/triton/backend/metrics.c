/* SPDX-License-Identifier: Apache-2.0
 *
 * Triton's metrics endpoint: families of the process, and for each instance of a model one metric in each of them.
 */
#include <stdlib.h>
#include <string.h>

#include "triton/backend/backend.h"

typedef enum figure {
    PROMPT_TOKENS,
    LOADED_TOKENS,
    COMPUTED_TOKENS,
    RESIDENT_TOKENS,
    GENERATED_TOKENS,
    LOADED_BYTES,
    SAVED_BYTES,
    LOOKUP_SECONDS,
    LOAD_SECONDS,
    LOAD_RATE,
    HIT_RATIO,
    OPEN_BREAKERS,
    BACKLOG_BYTES,
    BUSY_SLOTS,
    QUEUED,
    NUM_FIGURES
} figure;

#define COUNTER TRITONSERVER_METRIC_KIND_COUNTER
#define GAUGE   TRITONSERVER_METRIC_KIND_GAUGE

static const struct {
    const char *name, *help;
    TRITONSERVER_MetricKind kind;
} kinds[NUM_FIGURES] = {
    [PROMPT_TOKENS] = {"kvferry_prompt_tokens_total", "Tokens of prompts", COUNTER},
    [LOADED_TOKENS] = {"kvferry_loaded_tokens_total", "Tokens of prompts that were loaded from the store", COUNTER},
    [COMPUTED_TOKENS] = {"kvferry_computed_tokens_total", "Tokens of prompts that were computed", COUNTER},
    [RESIDENT_TOKENS] = {"kvferry_resident_tokens_total", "Tokens of prompts that the instance still held", COUNTER},
    [GENERATED_TOKENS] = {"kvferry_generated_tokens_total", "Tokens of answers", COUNTER},
    [LOADED_BYTES] = {"kvferry_loaded_bytes_total", "Bytes of KV that were loaded from the store", COUNTER},
    [SAVED_BYTES] = {"kvferry_saved_bytes_total", "Bytes of KV that were written to the store, by all instances",
                     COUNTER},
    [LOOKUP_SECONDS] = {"kvferry_lookup_seconds_total", "Time in lookups", COUNTER},
    [LOAD_SECONDS] = {"kvferry_load_seconds_total", "Time in loads, with import", COUNTER},
    [LOAD_RATE] = {"kvferry_load_bytes_per_second", "Bytes loaded by the time in loads", GAUGE},
    [HIT_RATIO] = {"kvferry_hit_ratio", "Tokens of prompts that were not computed, of all", GAUGE},
    [OPEN_BREAKERS] = {"kvferry_open_breakers", "Servers of the store that are not tried for a moment after failures",
                       GAUGE},
    [BACKLOG_BYTES] = {"kvferry_backlog_bytes", "Bytes of KV that wait to be written, by all instances", GAUGE},
    [BUSY_SLOTS] = {"kvferry_busy_slots", "Slots with a request", GAUGE},
    [QUEUED] = {"kvferry_queued_requests", "Requests that wait for a slot", GAUGE},
};

struct kvfb_metrics {
    TRITONSERVER_Metric *metrics[NUM_FIGURES]; /* NULL: not reported */
    double last[NUM_FIGURES];
};

static TRITONSERVER_MetricFamily *families[NUM_FIGURES]; /* from Initialize to Finalize of the backend */

void kvfb_metrics_open(void) {
    for (size_t i = 0; i < NUM_FIGURES; i++) {
        if (!kvfb_drop(TRITONSERVER_MetricFamilyNew(&families[i], kinds[i].kind, kinds[i].name, kinds[i].help))) {
            families[i] = NULL;
        }
    }
}

void kvfb_metrics_close(void) {
    for (size_t i = 0; i < NUM_FIGURES; i++) {
        if (families[i] != NULL) {
            kvfb_drop(TRITONSERVER_MetricFamilyDelete(families[i]));
            families[i] = NULL;
        }
    }
}

static TRITONSERVER_Metric *new_metric(TRITONSERVER_MetricFamily *family, const TRITONSERVER_Parameter **labels,
                                       uint64_t num) {
    TRITONSERVER_Metric *metric = NULL;
    bool good = family != NULL && kvfb_drop(TRITONSERVER_MetricNew(&metric, family, labels, num));
    return good ? metric : NULL;
}

kvfb_metrics *kvfb_metrics_new(const char *model, uint64_t version, const char *instance) {
    static const char *const names[] = {"model", "version", "instance"};
    char number[24];
    snprintf(number, sizeof number, "%llu", (unsigned long long)version);
    const char *const values[] = {model, number, instance};
    TRITONSERVER_Parameter *labels[3];
    kvfb_metrics *m = calloc(1, sizeof *m);
    for (size_t i = 0; i < 3; i++) {
        labels[i] = TRITONSERVER_ParameterNew(names[i], TRITONSERVER_PARAMETER_STRING, values[i]);
    }
    for (size_t i = 0; i < NUM_FIGURES && m != NULL; i++) {
        m->metrics[i] = new_metric(families[i], (const TRITONSERVER_Parameter **)labels, 3);
    }
    for (size_t i = 0; i < 3; i++) {
        TRITONSERVER_ParameterDelete(labels[i]);
    }
    return m;
}

void kvfb_metrics_free(kvfb_metrics *m) {
    for (size_t i = 0; i < NUM_FIGURES && m != NULL; i++) {
        if (m->metrics[i] != NULL) {
            kvfb_drop(TRITONSERVER_MetricDelete(m->metrics[i]));
        }
    }
    free(m);
}

static void from_engine(double now[NUM_FIGURES], const kvfb_figures *f) {
    const kvf_llama_counters *c = &f->engine;
    uint64_t spared = c->loaded_tokens + c->resident_tokens;
    now[PROMPT_TOKENS] = (double)c->prompt_tokens;
    now[LOADED_TOKENS] = (double)c->loaded_tokens;
    now[COMPUTED_TOKENS] = (double)c->computed_tokens;
    now[RESIDENT_TOKENS] = (double)c->resident_tokens;
    now[GENERATED_TOKENS] = (double)f->generated;
    now[LOADED_BYTES] = (double)c->loaded_bytes;
    now[LOOKUP_SECONDS] = (double)c->match_us / 1e6;
    now[LOAD_SECONDS] = (double)c->load_us / 1e6;
    now[LOAD_RATE] = c->load_us > 0 ? (double)c->loaded_bytes * 1e6 / (double)c->load_us : 0;
    now[HIT_RATIO] = c->prompt_tokens > 0 ? (double)spared / (double)c->prompt_tokens : 0;
    now[BUSY_SLOTS] = f->busy_slots;
    now[QUEUED] = f->queued;
}

static void from_store(double now[NUM_FIGURES], kvf_store *store) {
    kvf_stats stats = {.struct_size = sizeof stats};
    if (store == NULL || kvf_store_stats(store, &stats) != KVF_OK) {
        return;
    }
    now[SAVED_BYTES] = (double)stats.saved_bytes;
    now[BACKLOG_BYTES] = (double)stats.backlog_bytes;
    for (uint32_t i = 0; i < stats.num_tiers; i++) {
        kvf_tier_info info = {.struct_size = sizeof info};
        if (kvf_tier_info_get(store, &info, i) == KVF_OK) {
            now[OPEN_BREAKERS] += info.num_open;
        }
    }
}

void kvfb_metrics_update(kvfb_metrics *m, const kvfb_figures *figures, kvf_store *store) {
    double now[NUM_FIGURES] = {0};
    if (m == NULL) {
        return;
    }
    from_engine(now, figures);
    from_store(now, store);
    for (size_t i = 0; i < NUM_FIGURES; i++) {
        if (m->metrics[i] != NULL && kinds[i].kind == GAUGE) {
            kvfb_drop(TRITONSERVER_MetricSet(m->metrics[i], now[i]));
        } else if (m->metrics[i] != NULL && now[i] > m->last[i]) {
            kvfb_drop(TRITONSERVER_MetricIncrement(m->metrics[i], now[i] - m->last[i]));
            m->last[i] = now[i];
        }
    }
}
