/* SPDX-License-Identifier: Apache-2.0
 *
 * K and V of a conversation by its id, as a few lines of redis-py and numpy keep them. A turn loads what is stored
 * under the id, continues from there, and saves all of it.
 *
 *   session [STORE [ID]]
 *
 * On Redis a session is a HASH that any client can read (docs/session-format.md):
 *
 *   numpy.frombuffer(redis.Redis().hget(ID, "keys"), "float32").reshape(-1, 2, 4, 8)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/kvferry.h>

enum { LAYERS = 2, HEADS = 4, WIDTH = 8, TOKEN_FLOATS = LAYERS * HEADS * WIDTH, TURN_TOKENS = 5 };

/* What an engine holds of a conversation: arrays of num_tokens x LAYERS x HEADS x WIDTH. */
typedef struct chat {
    float *k, *v;
    uint32_t num_tokens;
} chat;

static int fail(const char *what, const char *why) {
    fprintf(stderr, "session: %s: %s\n", what, why);
    return 1;
}

/* ---- the model: replace it by yours -------------------------------------------------------------------------------- */

/* Makes room for the tokens of one more turn. */
static int grow(chat *c, uint32_t num_tokens) {
    size_t bytes = num_tokens * TOKEN_FLOATS * sizeof(float);
    float *k = realloc(c->k, bytes);
    if (k != NULL) {
        c->k = k;
    }
    float *v = realloc(c->v, bytes);
    if (v != NULL) {
        c->v = v;
    }
    return k != NULL && v != NULL;
}

static int compute_turn(chat *c) {
    size_t first = (size_t)c->num_tokens * TOKEN_FLOATS, end = first + TURN_TOKENS * TOKEN_FLOATS;
    if (!grow(c, c->num_tokens + TURN_TOKENS)) {
        return fail("turn", "out of memory");
    }
    for (size_t i = first; i < end; i++) {
        c->k[i] = (float)(i % 31) / 31;
        c->v[i] = (float)(i % 37) / 37;
    }
    c->num_tokens += TURN_TOKENS;
    return 0;
}

/* ---- the session --------------------------------------------------------------------------------------------------- */

/* The arrays may come from another program, so their shape is checked before they are used. */
static int fits(const kvf_session *s) {
    const kvf_tensor *k = &s->k;
    return strcmp(k->dtype, "float32") == 0 && k->num_dims == 4 && k->dims[0] == s->num_tokens &&
           k->dims[1] == LAYERS && k->dims[2] == HEADS && k->dims[3] == WIDTH && s->v.len == k->len &&
           strcmp(s->layout, "TLHD") == 0;
}

static int load(kvf_store *store, chat *c, const char *id) {
    kvf_session *session = NULL;
    kvf_error err = {0};
    kvf_status status = kvf_session_load(store, &session, &err, id, KVF_DEFAULT);
    if (status == KVF_MISS) { /* none yet, or it expired */
        return 0;
    }
    if (status != KVF_OK) {
        return fail("load", err.what);
    }
    int rc = 0;
    if (!fits(session)) {
        rc = fail(id, "holds arrays of another shape; use another id");
    } else if (!grow(c, session->num_tokens)) {
        rc = fail(id, "out of memory");
    } else {
        memcpy(c->k, session->k.data, session->k.len);
        memcpy(c->v, session->v.data, session->v.len);
        c->num_tokens = session->num_tokens;
    }
    kvf_session_free(session);
    return rc;
}

static int save(kvf_store *store, const chat *c, const char *id) {
    kvf_tensor k = {.data = c->k,
                    .len = c->num_tokens * TOKEN_FLOATS * sizeof(float),
                    .dtype = "float32",
                    .num_dims = 4,
                    .dims = {c->num_tokens, LAYERS, HEADS, WIDTH}};
    kvf_tensor v = k;
    v.data = c->v;
    kvf_session_options options = {
        .struct_size = sizeof options, .num_tokens = c->num_tokens, .layout = "TLHD", .ttl_s = 3600};
    kvf_error err = {0};
    return kvf_session_save(store, &err, id, &k, &v, &options) == KVF_OK ? 0 : fail("save", err.what);
}

static int turn(kvf_store *store, const char *id) {
    chat c = {0};
    int rc = load(store, &c, id);
    uint32_t loaded = c.num_tokens;
    if (rc == 0) {
        rc = compute_turn(&c);
    }
    if (rc == 0) {
        rc = save(store, &c, id);
    }
    if (rc == 0) {
        printf("%s: %u tokens loaded, %u computed, last k %.4f\n", id, loaded, c.num_tokens - loaded,
               (double)c.k[c.num_tokens * TOKEN_FLOATS - 1]);
    }
    free(c.k);
    free(c.v);
    return rc;
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: session [STORE [ID]]\n"
        "Two turns of the conversation ID (\"user:1\"), each as a process of its own would do it.\n"
        "  STORE  mem: (as without it), file:/a/folder, redis://host:6379, redis+unix:///run/redis.sock, ...\n";
    const char *url = argc > 1 ? argv[1] : "mem:", *id = argc > 2 ? argv[2] : "user:1";
    kvf_store *store = NULL;
    kvf_error err = {0};

    if (strcmp(url, "--help") == 0) {
        return fputs(usage, stdout) < 0;
    }
    if (url[0] == '-' || argc > 3) {
        const char *unknown = url[0] == '-' ? url : argv[3];
        return fprintf(stderr, "session: unexpected argument %s; see session --help\n", unknown), 2;
    }
    if (kvf_store_open(&store, &err, &url, 1, NULL) != KVF_OK) {
        return fail(url, err.what);
    }
    int rc = turn(store, id);
    if (rc == 0) {
        rc = turn(store, id);
    }
    kvf_store_close(store);
    return rc;
}
