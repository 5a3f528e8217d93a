/* SPDX-License-Identifier: Apache-2.0
 *
 * Error messages, names of statuses, the log, hex, numbers, and iovecs.
 */
#include "base/base.h"
#include "base/text.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

const char *kvf_version(void) {
    return KVF_VERSION;
}

/* ---- names: what metrics and programs see; they don't change within a major version */
static const char *const status_names[] = {
    [KVF_OK] = "ok",         [KVF_MISS] = "miss",       [KVF_AGAIN] = "again",
    [KVF_CONFIG] = "config", [KVF_REFUSED] = "refused", [KVF_LIMIT] = "limit",
    [KVF_IO] = "io",         [KVF_NOMEM] = "nomem",     [KVF_CLOSED] = "closed",
};
_Static_assert(sizeof status_names / sizeof *status_names == KVF_CLOSED + 1, "a name for each status");

static const char *const reason_names[] = {
    [KVF_WHY_NONE] = "none",
    [KVF_WHY_ABSENT] = "absent",
    [KVF_WHY_OTHER_TOKENS] = "other-tokens",
    [KVF_WHY_OTHER_SPACE] = "other-space",
    [KVF_WHY_CHECKSUM] = "checksum",
    [KVF_WHY_TRUNCATED] = "truncated",
    [KVF_WHY_VERSION] = "version",
    [KVF_WHY_BUDGET] = "budget",
    [KVF_WHY_UNREACHABLE] = "unreachable",
    [KVF_WHY_SERVER] = "server",
    [KVF_WHY_BREAKER] = "breaker",
    [KVF_WHY_FULL] = "full",
    [KVF_WHY_NOMEM] = "nomem",
    [KVF_WHY_AFTER_GAP] = "after-gap",
    [KVF_WHY_CLOSED] = "closed",
    [KVF_WHY_SLOW] = "slow",
    [KVF_WHY_SETTINGS] = "settings",
    [KVF_WHY_STALLED] = "stalled",
    [KVF_WHY_MISUSE] = "misuse",
};
_Static_assert(sizeof reason_names / sizeof *reason_names == KVF_NUM_REASONS, "a name for each reason");
_Static_assert((int)KVF_NUM_REASONS <= KVF_REASON_ROOM, "room for each reason in arrays that programs allocate");

const char *kvf_status_name(kvf_status status) {
    size_t i = (size_t)status;
    return i < sizeof status_names / sizeof *status_names ? status_names[i] : "unknown";
}

const char *kvf_reason_name(kvf_reason reason) {
    size_t i = (size_t)reason;
    return i < sizeof reason_names / sizeof *reason_names ? reason_names[i] : "unknown";
}

/* Messages may quote a server or a file: characters that must not be shown become question marks. */
static void clean(char *text) {
    size_t len = strlen(text);
    for (size_t i = 0; i < len;) {
        size_t shown = kvfi_shown_bytes(text + i, len - i);
        if (shown == 0) {
            text[i] = '?';
        }
        i += shown > 0 ? shown : 1;
    }
}

kvf_status kvfi_fail(kvf_error *err, kvf_status status, const char *format, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        err->status = status;
        vsnprintf(err->what, sizeof err->what, format, args);
        va_end(args);
        clean(err->what);
    }
    return status;
}

kvf_status kvfi_take_budget(int64_t *budget_us, kvf_error *err, int64_t default_us, bool polls) {
    int64_t us = *budget_us;
    if (us == KVF_POLL && !polls) {
        return kvfi_fail(err, KVF_LIMIT, "this call waits for the store: its time can't be 0 (KVF_POLL)");
    }
    if (us != KVF_POLL && (us < 0 || us > KVF_MAX_BUDGET_US)) {
        return kvfi_fail(err, KVF_LIMIT, "a budget of %lld us is out of range: use 0 to %lld (24 hours)", (long long)us,
                         (long long)KVF_MAX_BUDGET_US);
    }
    *budget_us = us == KVF_DEFAULT ? default_us : us;
    return KVF_OK;
}

int64_t kvfi_budget_deadline(int64_t budget_us) {
    return budget_us == KVF_POLL ? KVFI_AT_ONCE : kvfi_deadline(budget_us);
}

/* ---- log */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_log_fn log_fn;
static void *log_ctx;
static _Atomic int log_level = -1; /* the highest level that is written; -1 = none */

/* In a forked child the lock may belong to a thread that exists only in the parent. */
static void renew_log_lock(void) {
    pthread_mutex_init(&log_lock, NULL);
}

static void watch_forks(void) {
    (void)pthread_atfork(NULL, NULL, renew_log_lock);
}

void kvf_set_log(kvf_log_fn fn, void *ctx, kvf_log_level max_level) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, watch_forks);
    pthread_mutex_lock(&log_lock);
    log_fn = fn;
    log_ctx = ctx;
    atomic_store(&log_level, fn == NULL ? -1 : (int)max_level);
    pthread_mutex_unlock(&log_lock);
}

bool kvfi_log_on(kvf_log_level level) {
    return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed);
}

void kvfi_log(kvf_log_level level, const char *format, ...) {
    if (!kvfi_log_on(level)) {
        return;
    }
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    clean(message);
    pthread_mutex_lock(&log_lock);
    if (log_fn != NULL) {
        log_fn(log_ctx, level, message);
    }
    pthread_mutex_unlock(&log_lock);
}

/* ---- hex */
void kvfi_hex(char *out, const uint8_t *bytes, size_t num) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < num; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * num] = '\0';
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    if (c >= 'A' && c <= 'F') {
        return c - 'A' + 10;
    }
    return -1;
}

bool kvfi_unhex(uint8_t *out, const char *hex, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i++) {
        int high = hex_digit(hex[2 * i]);
        int low = high < 0 ? -1 : hex_digit(hex[2 * i + 1]);
        if (low < 0) {
            return false;
        }
        out[i] = (uint8_t)(high << 4 | low);
    }
    return hex[2 * num_bytes] == '\0';
}

/* ---- numbers */
bool kvfi_parse_u64(uint64_t *out, const char *text, size_t len) {
    uint64_t value = 0;
    for (size_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        if (__builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(text[i] - '0'), &value)) {
            return false;
        }
    }
    if (len == 0) {
        return false;
    }
    *out = value;
    return true;
}

bool kvfi_parse_size(uint64_t *out, const char *text, size_t len) {
    unsigned shift = 0;
    switch (len == 0 ? '\0' : text[len - 1]) {
    case 'K':
    case 'k':
        shift = 10;
        break;
    case 'M':
    case 'm':
        shift = 20;
        break;
    case 'G':
    case 'g':
        shift = 30;
        break;
    case 'T':
    case 't':
        shift = 40;
        break;
    default:
        break;
    }
    uint64_t value = 0;
    if (!kvfi_parse_u64(&value, text, shift == 0 ? len : len - 1)) {
        return false;
    }
    return !__builtin_mul_overflow(value, (uint64_t)1 << shift, out);
}

/* ---- iovecs */
size_t kvfi_iov_bytes(const struct iovec *iov, size_t num) {
    size_t bytes = 0;
    for (size_t i = 0; i < num; i++) {
        if (__builtin_add_overflow(bytes, iov[i].iov_len, &bytes)) {
            return SIZE_MAX;
        }
    }
    return bytes;
}

void kvfi_iov_skip(struct iovec **iov, size_t *num, size_t bytes) {
    while (*num > 0 && bytes >= (*iov)->iov_len) {
        bytes -= (*iov)->iov_len;
        ++*iov;
        --*num;
    }
    if (*num > 0) {
        (*iov)->iov_base = (char *)(*iov)->iov_base + bytes;
        (*iov)->iov_len -= bytes;
    }
}
