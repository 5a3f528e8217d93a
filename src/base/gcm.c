/* SPDX-License-Identifier: Apache-2.0
 *
 * AES-256-GCM by libcrypto. Contexts are reused: with its cipher already set, libcrypto allocates nothing for a new
 * key.
 */
#include "base/base.h"

#include <pthread.h>

#include <openssl/evp.h>

#define MAX_IDLE 64u
#define MAX_STEP ((size_t)1 << 30) /* libcrypto counts in int */

/* Unused contexts, and the cipher. They live as long as the process: libcrypto cleans up at exit before any destructor
 * of ours could run. */
static struct {
    pthread_mutex_t lock;
    EVP_CIPHER *cipher;
    EVP_CIPHER_CTX *idle[MAX_IDLE];
    size_t num_idle;
} contexts = {.lock = PTHREAD_MUTEX_INITIALIZER};

static EVP_CIPHER_CTX *new_context(const EVP_CIPHER *cipher) {
    EVP_CIPHER_CTX *ctx = cipher != NULL ? EVP_CIPHER_CTX_new() : NULL;
    if (ctx != NULL && EVP_CipherInit_ex2(ctx, cipher, NULL, NULL, 1, NULL) != 1) {
        EVP_CIPHER_CTX_free(ctx);
        return NULL;
    }
    return ctx;
}

/* Held across a fork. Otherwise a thread that does not exist in the child could hold the lock there for ever. */
static void lock_contexts(void) {
    pthread_mutex_lock(&contexts.lock);
}

static void unlock_contexts(void) {
    pthread_mutex_unlock(&contexts.lock);
}

static void mind_forks(void) {
    (void)pthread_atfork(lock_contexts, unlock_contexts, unlock_contexts);
}

static EVP_CIPHER_CTX *take_context(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, mind_forks);
    lock_contexts();
    if (contexts.cipher == NULL) {
        contexts.cipher = EVP_CIPHER_fetch(NULL, "AES-256-GCM", NULL);
    }
    const EVP_CIPHER *cipher = contexts.cipher;
    EVP_CIPHER_CTX *ctx = contexts.num_idle > 0 ? contexts.idle[--contexts.num_idle] : NULL;
    pthread_mutex_unlock(&contexts.lock);
    return ctx != NULL ? ctx : new_context(cipher);
}

static void give_context(EVP_CIPHER_CTX *ctx) {
    lock_contexts();
    if (contexts.num_idle < MAX_IDLE) {
        contexts.idle[contexts.num_idle++] = ctx;
        ctx = NULL;
    }
    unlock_contexts();
    EVP_CIPHER_CTX_free(ctx);
}

bool kvfi_gcm_begin(kvfi_gcm *gcm, bool opens, const uint8_t key[32], const void *aad, size_t aad_len) {
    static const uint8_t nonce[12]; /* zeros: each key encrypts one message only */
    int num = 0;
    EVP_CIPHER_CTX *ctx = take_context();
    gcm->ctx = ctx;
    gcm->opens = opens;
    gcm->failed = ctx == NULL || EVP_CipherInit_ex2(ctx, NULL, key, nonce, opens ? 0 : 1, NULL) != 1 ||
                  EVP_CipherUpdate(ctx, NULL, &num, aad, (int)aad_len) != 1;
    return !gcm->failed;
}

void kvfi_gcm_add(kvfi_gcm *gcm, void *out, const void *in, size_t len) {
    uint8_t *to = out;
    const uint8_t *from = in;
    while (len > 0 && !gcm->failed) {
        size_t step = len < MAX_STEP ? len : MAX_STEP;
        int num = 0;
        gcm->failed = EVP_CipherUpdate(gcm->ctx, to, &num, from, (int)step) != 1;
        to += step;
        from += step;
        len -= step;
    }
}

bool kvfi_gcm_end(kvfi_gcm *gcm, uint8_t tag[16]) {
    uint8_t none[16];
    int num = 0;
    EVP_CIPHER_CTX *ctx = gcm->ctx;
    if (ctx == NULL) {
        return false;
    }
    bool fine = !gcm->failed && (!gcm->opens || EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_AEAD_SET_TAG, 16, tag) == 1) &&
                EVP_CipherFinal_ex(ctx, none, &num) == 1 &&
                (gcm->opens || EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_AEAD_GET_TAG, 16, tag) == 1);
    give_context(ctx);
    gcm->ctx = NULL;
    return fine;
}
