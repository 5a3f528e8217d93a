/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters of a context: LoRAs and a control vector. The text that names them describes what libllama applies, not the
 * calls that led there.
 */
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama/shim/shim.h"

#define MAX_LORAS   64u  /* in memory at a time */
#define TEXT_BYTES  100u /* of one that is set */
#define NAME_FORMAT "lora=%s*%.9g "

typedef struct lora {
    const struct llama_adapter_lora *lora; /* NULL: a free place */
    char hash[65];
} lora;
static lora loras[MAX_LORAS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of it: any thread may load models */

static lora *find(const struct llama_adapter_lora *wanted) {
    for (size_t i = 0; i < MAX_LORAS; i++) {
        if (loras[i].lora == wanted) {
            return &loras[i];
        }
    }
    return NULL;
}

/* The file must be the same before and after llama.cpp reads it. */
static bool hash(char out[65], const kvfl_files *files) {
    return files != NULL && kvfl_files_are_in_place(files) && kvfl_files_hash(out, NULL, files, NULL) == KVF_OK;
}

void kvfl_shim_lora_loaded(const struct llama_adapter_lora *loaded, const kvfl_files *files) {
    lora named = {.lora = loaded};
    named.lora = hash(named.hash, files) ? loaded : NULL;
    pthread_mutex_lock(&lock);
    lora *l = find(loaded); /* one that was freed in another way, at the same address */
    l = l != NULL ? l : find(NULL);
    if (l != NULL) {
        *l = named;
    }
    pthread_mutex_unlock(&lock);
}

void kvfl_shim_lora_freed(const struct llama_adapter_lora *gone) {
    pthread_mutex_lock(&lock);
    lora *l = gone != NULL ? find(gone) : NULL;
    if (l != NULL) {
        l->lora = NULL;
    }
    pthread_mutex_unlock(&lock);
}

/* ---- the text ---- */

/* False if an adapter did not come from a file. */
static bool name_loras(const kvfl_shim_adapters *a, char *out) {
    size_t len = 0;
    out[0] = '\0';
    bool known = true;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < a->num_loras && known; i++) {
        const lora *l = find(a->loras[i]);
        known = l != NULL;
        len += known ? (size_t)snprintf(out + len, TEXT_BYTES, NAME_FORMAT, l->hash, (double)a->scales[i]) : 0;
    }
    pthread_mutex_unlock(&lock);
    return known;
}

/* The layers that the vector is added to, with what is added. */
static bool name_control(const kvfl_shim_adapters *a, char *out) {
    uint8_t digest[32];
    EVP_MD_CTX *sha = EVP_MD_CTX_new();
    bool any = false, ok = sha != NULL && EVP_DigestInit_ex(sha, EVP_sha256(), NULL) == 1;
    for (size_t i = 0; i < a->num_layers && ok; i++) {
        int32_t layer = (int32_t)i + 1;
        if (layer >= a->first_layer && layer <= a->last_layer) {
            ok = EVP_DigestUpdate(sha, &layer, sizeof layer) == 1 &&
                 EVP_DigestUpdate(sha, a->layers[i], sizeof a->layers[i]) == 1;
            any = true;
        }
    }
    ok = ok && EVP_DigestFinal_ex(sha, digest, NULL) == 1;
    EVP_MD_CTX_free(sha);
    if (any && ok) {
        size_t len = strlen(out);
        len += (size_t)snprintf(out + len, TEXT_BYTES, "control=");
        kvfl_hex(out + len, digest, sizeof digest);
    }
    return ok;
}

static void update(kvfl_shim_context *c) {
    kvfl_shim_adapters *a = &c->adapters;
    char *text = malloc((a->num_loras + 2) * TEXT_BYTES);
    bool known = text != NULL && !a->too_many && !a->lost && name_loras(a, text) && name_control(a, text);
    if (!known) {
        free(text);
        text = NULL;
    }
    const char *before = a->text != NULL ? a->text : "", *now = text != NULL ? text : "";
    a->changed = a->changed || known == a->unknown || strcmp(before, now) != 0;
    free(a->text);
    a->text = text;
    a->unknown = !known;
}

/* ---- what libllama applies ---- */

/* As libllama compares them: it changes nothing if the same ones are set in another order. */
static bool are_set(const kvfl_shim_adapters *a, struct llama_adapter_lora *const *set, const float *scales,
                    size_t num) {
    size_t used = 0;
    for (size_t i = 0; i < num; i++) {
        size_t k = 0;
        if (scales[i] == 0.0f) {
            continue;
        }
        while (k < a->num_loras && (a->loras[k] != set[i] || a->scales[k] != scales[i])) {
            k++;
        }
        if (k == a->num_loras) {
            return false;
        }
        used++;
    }
    return used == a->num_loras;
}

static bool is_among(const kvfl_shim_adapters *a, const struct llama_adapter_lora *wanted) {
    for (size_t i = 0; i < a->num_loras; i++) {
        if (a->loras[i] == wanted) {
            return true;
        }
    }
    return false;
}

void kvfl_shim_set_loras(kvfl_shim_context *c, struct llama_adapter_lora *const *set, size_t num, const float *scales) {
    kvfl_shim_adapters *a = &c->adapters;
    if (a->too_many || !are_set(a, set, scales, num)) {
        a->num_loras = 0;
        a->too_many = false;
        for (size_t i = 0; i < num; i++) {
            if (scales[i] == 0.0f || is_among(a, set[i])) {
                continue; /* the first scale of one counts */
            }
            if (a->num_loras == KVFL_SHIM_LORAS) {
                a->too_many = true;
                break;
            }
            a->loras[a->num_loras] = set[i];
            a->scales[a->num_loras++] = scales[i];
        }
    }
    update(c);
}

/* For layers that a shorter vector does not reach, libllama keeps an earlier vector. */
static bool keep_layers(kvfl_shim_adapters *a, const float *data, size_t len, size_t width) {
    size_t num = width > 0 ? len / width : 0;
    if (num > a->num_layers) {
        uint8_t(*more)[32] = realloc(a->layers, num * sizeof *more);
        if (more == NULL) {
            return false;
        }
        a->layers = more;
        a->num_layers = num;
    }
    bool ok = true;
    for (size_t i = 0; i < num && ok; i++) {
        ok = EVP_Digest(data + i * width, width * sizeof *data, a->layers[i], NULL, EVP_sha256(), NULL) == 1;
    }
    return ok;
}

void kvfl_shim_set_control(kvfl_shim_context *c, const float *data, size_t len, int32_t n_embd, int32_t first,
                           int32_t last) {
    kvfl_shim_adapters *a = &c->adapters;
    a->first_layer = data != NULL ? first : 0;
    a->last_layer = data != NULL ? last : -1;
    if (data != NULL && !keep_layers(a, data, len, n_embd > 0 ? (size_t)n_embd : 0)) {
        a->lost = true;
    }
    update(c);
}

void kvfl_shim_adapters_free(kvfl_shim_adapters *a) {
    free(a->layers);
    free(a->text);
    *a = (kvfl_shim_adapters){.num_loras = 0};
}
