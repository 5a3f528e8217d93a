/* SPDX-License-Identifier: Apache-2.0
 *
 * The program's models and contexts. A context gets one more sequence than requested. It is attached at its first
 * decode, because many contexts are made only to measure memory.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llama/shim/shim.h"

#define MAX_MODELS 32u
#define MAX_SEQS   256u
/* At a decode. Hashing a large model for the first time takes longer, and the decode does not wait for it. */
#define IDENTIFY_WAIT_MS 2000
#define RETRY_US         1000000 /* between two tries of a set of adapters that failed */

typedef struct model {
    struct llama_model *model; /* NULL: a free place */
    kvfl_files *files;         /* as they were opened before the load; closed when they are hashed; NULL: none */
    char *path;
    kvfl_model_name name;
    kvf_error err;          /* of the hashing */
    atomic_bool identified; /* `name` and `err` are set */
    bool hashing;
    atomic_bool stop; /* the hashing is of no use any more */
    pthread_t hasher;
} model;

static kvfl_shim_context contexts[KVFL_SHIM_CONTEXTS];
static model models[MAX_MODELS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void *kvfl_shim_next(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

/* ---- models ---- */

static model *find_model(const struct llama_model *wanted) {
    for (size_t i = 0; i < MAX_MODELS; i++) {
        if (models[i].model == wanted) {
            return &models[i];
        }
    }
    return NULL;
}

static void *identify(void *arg) {
    model *m = arg;
    (void)kvfl_files_hash(m->name.weights, &m->err, m->files, &m->stop);
    kvfl_files_close(m->files);
    m->files = NULL;
    atomic_store(&m->identified, true);
    return NULL;
}

static void start_hashing(model *m) {
    if (!kvfl_files_are_in_place(m->files)) {
        kvfl_fail(&m->err, KVF_REFUSED, "the model's file changed while it was loaded: %s", m->path);
    } else if (pthread_create(&m->hasher, NULL, identify, m) == 0) {
        m->hashing = true;
        return;
    } else {
        kvfl_fail(&m->err, KVF_NOMEM, "no thread to identify the model");
    }
    atomic_store(&m->identified, true);
}

/* What the parameters point to lives only during the call that loads the model. */
static void note_params(model *m, const struct llama_model_params *params) {
    if (!kvfl_describe_params(&m->name, params)) {
        kvfl_fail(&m->err, KVF_NOMEM, "no memory to identify the model");
    }
}

void kvfl_shim_model_loaded(struct llama_model *loaded, kvfl_files *files, const struct llama_model_params *params) {
    bool wanted = loaded != NULL && files != NULL && !params->no_alloc && !params->vocab_only;
    pthread_mutex_lock(&lock);
    model *m = wanted ? find_model(NULL) : NULL;
    if (m != NULL) {
        *m = (model){.model = loaded, .files = files, .path = strdup(files->file[0].path)};
        note_params(m, params);
        start_hashing(m);
        files = NULL;
    }
    pthread_mutex_unlock(&lock);
    kvfl_files_close(files);
}

static void stop_hashing(model *m) {
    if (m->hashing) {
        atomic_store(&m->stop, true);
        pthread_join(m->hasher, NULL);
    }
    kvfl_files_close(m->files);
    free(m->path);
}

/* Its place stays taken until the hashing has ended. Other threads need the lock meanwhile. */
void kvfl_shim_model_freed(struct llama_model *gone) {
    pthread_mutex_lock(&lock);
    model *m = gone != NULL ? find_model(gone) : NULL;
    pthread_mutex_unlock(&lock);
    if (m == NULL) {
        return;
    }
    stop_hashing(m);
    pthread_mutex_lock(&lock);
    *m = (model){.model = NULL};
    pthread_mutex_unlock(&lock);
}

static bool is_identified(model *m, int64_t wait_ms) {
    for (int64_t waited = 0; !atomic_load(&m->identified); waited += 10) {
        if (waited >= wait_ms) {
            return false;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return true;
}

/* ---- contexts ---- */

kvfl_shim_context *kvfl_shim_known(const struct llama_context *ctx) {
    kvfl_shim_context *found = NULL;
    if (kvfl_shim_inside > 0 || ctx == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < KVFL_SHIM_CONTEXTS && found == NULL; i++) {
        found = contexts[i].ctx == ctx ? &contexts[i] : NULL;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

kvfl_shim_context *kvfl_shim_of(const struct llama_context *ctx) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    return c != NULL && c->state == KVFL_SERVED ? c : NULL;
}

kvfl_shim_context *kvfl_shim_of_memory(llama_memory_t mem) {
    kvfl_shim_context *found = NULL;
    if (kvfl_shim_inside > 0 || mem == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < KVFL_SHIM_CONTEXTS && found == NULL; i++) {
        found = contexts[i].ctx != NULL && contexts[i].mem == mem ? &contexts[i] : NULL;
    }
    pthread_mutex_unlock(&lock);
    return found != NULL && found->state == KVFL_SERVED ? found : NULL;
}

/* The program must run the llama.cpp that the shim was compiled against, because parameters are passed as structs. */
static bool is_known_llama(void) {
    static int known = -1;
    if (known < 0) {
        const char *(*version)(void) = NULL;
        *(void **)(void *)&version = kvfl_shim_next("llama_version");
        known = version != NULL && strcmp(version(), KVFL_LLAMA_VERSION) == 0;
        if (!known) {
            kvfl_shim_say(
                "nothing is loaded or stored: this program brings another llama.cpp (%s) than kvferry was built with "
                "(%s)",
                version != NULL ? version() : "of no known version", KVFL_LLAMA_VERSION);
        }
    }
    return known == 1;
}

/* NULL: a context to which a scratch sequence can be added. */
static const char *unfit(const struct llama_context_params *p) {
    if (p->embeddings || p->pooling_type > LLAMA_POOLING_TYPE_NONE) {
        return "it computes embeddings";
    }
    if (p->ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || p->ctx_other != NULL) {
        return "it drafts for another context";
    }
    if (p->n_seq_max > 1 && !p->kv_unified) {
        return "its KV cache is not unified: add --kv-unified (llama-server), or kv_unified = true";
    }
    if (p->n_seq_max >= MAX_SEQS) {
        return "it has all the sequences that llama.cpp allows";
    }
    return NULL;
}

static void register_context(struct llama_context *ctx, struct llama_model *m,
                             const struct llama_context_params *params, uint32_t num_seqs) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < KVFL_SHIM_CONTEXTS; i++) {
        if (contexts[i].ctx == NULL) {
            contexts[i] = (kvfl_shim_context){.ctx = ctx,
                                              .model = m,
                                              .mem = llama_get_memory(ctx),
                                              .params = *params,
                                              .num_seqs = num_seqs,
                                              .state = KVFL_UNTRIED};
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

struct llama_context *kvfl_shim_open(struct llama_model *m, struct llama_context_params p) {
    if (m == NULL || !is_known_llama() || kvfl_shim_store() == NULL) {
        return REAL(llama_init_from_model)(m, p);
    }
    const char *why = unfit(&p);
    if (why != NULL) {
        kvfl_shim_say("a context works without the store: %s", why);
        kvfl_shim_note_refused(why);
        return REAL(llama_init_from_model)(m, p);
    }
    struct llama_context_params more = p;
    more.n_seq_max = p.n_seq_max + 1 > 2 ? p.n_seq_max + 1 : 2;
    more.kv_unified = true; /* one sequence is one stream in either case */
    more.n_outputs_max = p.n_outputs_max != 0 && p.n_outputs_max < more.n_seq_max ? more.n_seq_max : p.n_outputs_max;
    struct llama_context *ctx = REAL(llama_init_from_model)(m, more);
    if (ctx == NULL) {
        return REAL(llama_init_from_model)(m, p);
    }
    register_context(ctx, m, &more, more.n_seq_max - 1);
    return ctx;
}

static void detach(kvfl_shim_context *c) {
    if (c->kv != NULL) {
        kvfl_shim_inside++;
        kvfl_shim_add_gone(c->kv);
        pthread_mutex_lock(&lock);
        kvf_llama *kv = c->kv;
        c->kv = NULL;
        c->state = KVFL_UNTRIED;
        pthread_mutex_unlock(&lock);
        kvf_llama_detach(kv);
        kvfl_shim_inside--;
    }
}

void kvfl_shim_close(struct llama_context *ctx) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    if (c != NULL) {
        detach(c);
        kvf_earlier_close(c->earlier);
        c->earlier = NULL;
        kvfl_shim_adapters_free(&c->adapters);
        pthread_mutex_lock(&lock);
        c->ctx = NULL;
        pthread_mutex_unlock(&lock);
    }
}

static void refuse(kvfl_shim_context *c, const char *why) {
    c->state = KVFL_REFUSED;
    kvfl_shim_say("nothing is loaded or stored for this context: %s", why);
    kvfl_shim_note_refused(why);
}

static void attach(kvfl_shim_context *c, const model *m) {
    const kvfl_shim_options *o = kvfl_shim_get_options();
    kvf_error err = {.status = KVF_OK};
    const kvf_llama_options options = {.struct_size = sizeof options,
                                       .scratch_seq = (llama_seq_id)c->num_seqs,
                                       .model_path = m->path,
                                       .context_params = &c->params,
                                       .adapters = c->adapters.text,
                                       .tenant = o->tenant,
                                       .block_tokens = o->block_tokens,
                                       .budget_us = KVF_MS(o->budget_ms),
                                       .portable = o->portable};
    kvf_llama *kv = NULL;
    int64_t begin = kvfl_now_us();
    kvfl_shim_inside++;
    kvf_status status = kvfl_attach(&kv, &err, kvfl_shim_store(), c->ctx, &options, &m->name);
    kvfl_shim_inside--;
    if (status != KVF_OK) {
        refuse(c, err.what[0] != '\0' ? err.what : kvf_status_name(status));
        return;
    }
    if (c->earlier == NULL && kvf_earlier_open(&c->earlier, &err) != KVF_OK) {
        kvfl_shim_say("why a prompt is not stored will not be explained: %s", err.what);
    }
    kvfl_shim_add_live(kv);
    kv->calls->on_prompt = kvfl_shim_on_prompt;
    kv->calls->on_prompt_ctx = c;
    c->adapters.changed = c->stale_graph = false; /* attaching makes a new graph */
    pthread_mutex_lock(&lock);
    c->kv = kv;
    c->state = KVFL_SERVED;
    pthread_mutex_unlock(&lock);
    kvfl_shim_set_mode(c);
    kvfl_shim_say("attached to %s in %lld ms: blocks of %u tokens", m->path,
                  (long long)((kvfl_now_us() - begin) / 1000), kv->block_tokens);
}

/* ---- adapters ---- */

/* Until the adapters change: the context is still followed, but neither loads nor stores. */
static void pause_for(kvfl_shim_context *c, const char *why) {
    if (c->adapters.changed) {
        kvfl_shim_say("nothing is loaded or stored under these adapters: %s", why);
        kvfl_shim_note_refused(why);
    }
    c->idle = true;
    c->adapters.changed = false;
}

static void tell_adapters(kvfl_shim_context *c) {
    kvf_error err = {.status = KVF_OK};
    c->last_try_us = kvfl_now_us();
    kvfl_shim_inside++;
    kvf_status status = kvf_llama_set_adapters(c->kv, &err, c->adapters.text);
    kvfl_shim_inside--;
    if (status == KVF_OK) {
        if (c->idle) {
            kvfl_shim_note_refused("");
        }
        c->adapters.changed = c->idle = false;
    } else if (status != KVF_LIMIT) { /* which is tried again at the next batch */
        pause_for(c, err.what[0] != '\0' ? err.what : kvf_status_name(status));
    }
}

static void take_adapters(kvfl_shim_context *c) {
    if (c->adapters.unknown) {
        if (c->kv != NULL) {
            kvfl_leave_identity(c->kv);
        }
        pause_for(c, "an adapter did not come from a file");
    } else if (c->kv != NULL) {
        tell_adapters(c);
    }
}

/* A probe may have failed for a temporary cause. */
static bool is_time_to_retry(const kvfl_shim_context *c) {
    return c->idle && !c->adapters.unknown && c->kv != NULL && kvfl_now_us() - c->last_try_us >= RETRY_US;
}

/* In a full context the probe is postponed: until then batches pass unchanged. */
static void rebuild_graph(kvfl_shim_context *c) {
    kvfl_shim_inside++;
    c->stale_graph = !kvfl_has_probe_cells(c->kv) || !kvfl_rebuild_graph(c->kv);
    kvfl_shim_inside--;
    kvfl_shim_set_mode(c);
}

kvfl_shim_context *kvfl_shim_to_decode(struct llama_context *ctx) {
    kvfl_shim_context *c = kvfl_shim_known(ctx);
    if (c == NULL || c->state == KVFL_REFUSED || (c->state == KVFL_UNTRIED && (c->warm_up || c->not_causal))) {
        return NULL; /* in such a mode it computes as another model would */
    }
    if (c->stale_graph && !c->warm_up && c->kv != NULL) {
        rebuild_graph(c);
    }
    if (c->adapters.changed || is_time_to_retry(c)) {
        take_adapters(c);
    }
    if (c->state == KVFL_UNTRIED && !c->adapters.unknown) {
        model *m = find_model(c->model);
        if (m == NULL || m->path == NULL) {
            refuse(c, "the model did not come from a file");
        } else if (!is_identified(m, c->last_try_us == 0 ? IDENTIFY_WAIT_MS : 0)) {
            /* at a later decode */
        } else if (m->err.status != KVF_OK) {
            refuse(c, m->err.what);
        } else {
            attach(c, m);
        }
        c->last_try_us = kvfl_now_us();
    }
    return c->state == KVFL_SERVED ? c : NULL;
}

void kvfl_shim_model_trained(const struct llama_model *m) {
    for (size_t i = 0; i < KVFL_SHIM_CONTEXTS; i++) {
        if (contexts[i].ctx != NULL && contexts[i].model == m) {
            detach(&contexts[i]);
            refuse(&contexts[i], "its model is being trained");
        }
    }
}

void kvfl_shim_set_mode(kvfl_shim_context *c) {
    if (c->kv != NULL) {
        bool other = c->not_causal || c->warm_up || c->stale_graph;
        c->kv->calls->paused = other                         ? KVF_ASIDE_ATTENTION
                               : c->outputs_all || c->hidden ? KVF_ASIDE_OUTPUT
                                                             : KVF_ASIDE_NONE;
    }
}
