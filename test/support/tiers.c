/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens single tiers for tests, and puts, reads and checks records with seeded bytes.
 */
#include "support/tiers.h"
#include "file/file.h"
#include "mem/mem.h"
#include "redis/cluster/key.h"
#include "redis/redis.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "support/kit.h"

#define DEADLINE_US ((int64_t)60000000)

static void *must(void *memory) {
    if (memory == NULL) {
        fprintf(stderr, "no memory for the test\n");
        abort();
    }
    return memory;
}

kvf_status kvft_try_tier(kvfi_tier **out, kvf_error *err, const char *url, ...) {
    char text[1024];
    kvfi_url *parsed = NULL;
    va_list args;
    va_start(args, url);
    vsnprintf(text, sizeof text, url, args);
    va_end(args);
    *err = (kvf_error){.status = KVF_OK};
    kvf_status status = kvfi_url_parse(&parsed, err, text);
    if (status != KVF_OK) {
        return status;
    }
    bool redis = strncmp(parsed->scheme, "redis", 5) == 0;
    return strcmp(parsed->scheme, "mem") == 0 ? kvfi_mem_open(out, err, parsed)
           : redis                            ? kvfi_redis_open(out, err, parsed)
                                              : kvfi_file_open(out, err, parsed);
}

kvfi_tier *kvft_tier(const char *url) {
    kvfi_tier *tier = NULL;
    kvf_error err;
    if (kvft_try_tier(&tier, &err, "%s", url) != KVF_OK) {
        fprintf(stderr, "%s: %s\n", url, err.what);
        abort();
    }
    return tier;
}

void kvft_addr(kvfi_addr *out, uint64_t seed) {
    kvft_bytes(out->space.bytes, sizeof out->space, seed / 1000 + 77);
    kvft_bytes(out->key.bytes, sizeof out->key.bytes, seed * 31 + 5);
}

void kvft_value_init(kvft_value *v, uint64_t seed, size_t payload_bytes) {
    size_t head = KVFI_HEAD_BYTES(KVFT_VALUE_TOKENS);
    *v = (kvft_value){.base = must(aligned_alloc(64, (KVFT_VALUE_EXTRA + payload_bytes + 127) / 64 * 64))};
    v->bytes = (uint8_t *)v->base + (64 - head % 64) % 64;
    uint8_t *payload = v->bytes + head;
    kvft_bytes(payload, payload_bytes, seed);
    kvft_bytes((uint8_t *)v->tokens, sizeof v->tokens, seed ^ 0x5555);
    kvft_addr(&v->item.addr, seed);
    v->block =
        (kvf_block){.key = v->item.addr.key, .tokens = v->tokens, .num_tokens = KVFT_VALUE_TOKENS, .first_token = 8};
    size_t third = payload_bytes / 3 / 64 * 64;
    v->iov[0] = (struct iovec){v->bytes, head};
    v->iov[1] = (struct iovec){payload, third};
    v->iov[2] = (struct iovec){payload, 0};
    v->iov[3] = (struct iovec){payload + third, third};
    v->iov[4] = (struct iovec){payload + 2 * third, payload_bytes - 2 * third};
    v->iov[5] = (struct iovec){payload + payload_bytes, KVFI_SUM_BYTES};
    kvft_value_seal(v, 1700000000);
    v->item.iov = v->iov;
    v->item.num_iov = KVFT_VALUE_IOVS;
    v->item.bytes = KVFT_VALUE_EXTRA + payload_bytes;
    v->item.status = KVF_AGAIN;
    v->item.why = KVF_WHY_BUDGET;
    v->item.user = v;
}

void kvft_value_cleanup(kvft_value *v) {
    free(v->base);
}

void kvft_value_seal(kvft_value *v, int64_t stored_s) {
    kvfi_record_seal(v->bytes, v->iov[5].iov_base, &v->item.addr, &v->block, v->iov + 1, KVFT_VALUE_IOVS - 2, 0,
                     stored_s);
}

kvf_reason kvft_value_check(kvfi_item *item) {
    const kvft_value *v = item->user;
    return kvfi_record_check(v->bytes, v->iov[5].iov_base, &item->addr, &v->block, v->iov + 1, KVFT_VALUE_IOVS - 2);
}

static kvf_reason run(kvfi_tier *tier, kvft_value *v, void (*op)(kvfi_tier *, kvfi_feed *),
                      kvf_reason (*checks)(kvfi_item *)) {
    kvfi_feed feed = {.items = &v->item, .num = 1, .deadline_us = kvfi_deadline(DEADLINE_US), .check = checks};
    feed.limit = 1;
    op(tier, &feed);
    if ((v->item.status == KVF_OK) != (v->item.why == KVF_WHY_NONE)) {
        fprintf(stderr, "status %d and reason %d do not agree\n", (int)v->item.status, (int)v->item.why);
        abort();
    }
    return v->item.why;
}

kvf_reason kvft_put(kvfi_tier *tier, uint64_t seed, size_t payload_bytes) {
    kvft_value v;
    kvft_value_init(&v, seed, payload_bytes);
    kvf_reason why = run(tier, &v, tier->ops->put, NULL);
    kvft_value_cleanup(&v);
    return why;
}

static bool is_spared(kvf_reason why) {
    return why == KVF_WHY_BREAKER || why == KVF_WHY_SETTINGS || why == KVF_WHY_FULL;
}

kvf_reason kvft_put_again(kvfi_tier *tier, uint64_t seed, size_t payload_bytes) {
    int64_t deadline_us = kvfi_deadline(10000000);
    kvf_reason why = kvft_put(tier, seed, payload_bytes);
    while (is_spared(why) && kvfi_sys->now_us() < deadline_us) {
        (void)kvfi_sys->poll(NULL, 0, 10);
        why = kvft_put(tier, seed, payload_bytes);
    }
    return why;
}

static void must_equal(const void *got, const void *expected, size_t len, uint64_t seed) {
    if (memcmp(got, expected, len) != 0) {
        fprintf(stderr, "wrong bytes for seed %llu\n", (unsigned long long)seed);
        abort();
    }
}

kvf_reason kvft_get(kvfi_tier *tier, uint64_t seed, size_t payload_bytes) {
    kvft_value expected, v;
    kvft_value_init(&expected, seed, payload_bytes);
    kvft_value_init(&v, seed, payload_bytes);
    memset(v.bytes, 0xa5, v.item.bytes);
    kvf_reason why = run(tier, &v, tier->ops->get, kvft_value_check);
    if (why == KVF_WHY_NONE) {
        must_equal(v.bytes, expected.bytes, v.item.bytes, seed);
    }
    kvft_value_cleanup(&v);
    kvft_value_cleanup(&expected);
    return why;
}

kvf_reason kvft_peek(kvfi_tier *tier, uint64_t seed) {
    kvfi_addr addr;
    kvfi_peek peek = {.why = KVF_WHY_CLOSED};
    kvfi_header header;
    uint64_t round_trips = 0;
    kvft_addr(&addr, seed);
    tier->ops->peek(tier, &addr, 1, &peek, &round_trips, kvfi_deadline(DEADLINE_US), 0);
    if (peek.why == KVF_WHY_NONE && kvfi_header_decode(&header, peek.header) == KVF_WHY_NONE &&
        memcmp(&header.addr, &addr, sizeof addr) != 0) {
        fprintf(stderr, "a lookup shows another record\n");
        abort();
    }
    return peek.why;
}

kvf_reason kvft_each(kvfi_tier *tier, kvfi_deed deed, uint64_t seed) {
    kvfi_addr addr;
    kvf_reason why = KVF_WHY_CLOSED;
    kvft_addr(&addr, seed);
    tier->ops->each(tier, deed, &addr, 1, &why, kvfi_deadline(DEADLINE_US), 0);
    return why;
}

kvf_reason kvft_borrow(kvfi_tier *tier, uint64_t seed, size_t payload_bytes) {
    kvft_value expected;
    kvfi_loan loan;
    kvft_value_init(&expected, seed, payload_bytes);
    kvf_reason why = tier->ops->borrow(tier, &loan, &expected.item.addr, 0, KVFI_NEVER);
    if (why == KVF_WHY_NONE) {
        kvfi_header header;
        const uint8_t *tokens, *payload;
        why = kvfi_record_parse(&header, &tokens, &payload, loan.data, loan.len);
        if (why == KVF_WHY_NONE && loan.len == expected.item.bytes) {
            must_equal(loan.data, expected.bytes, loan.len, seed);
        }
        tier->ops->give_back(tier, &loan);
    }
    kvft_value_cleanup(&expected);
    return why;
}

static int count_one(void *ctx, const kvfi_sight *sight) {
    kvft_census *census = ctx;
    kvfi_header header;
    const uint8_t *tokens, *payload;
    if (sight->kind == KVF_ENTRY_FOREIGN) {
        census->foreign++;
        return 0;
    }
    census->records++;
    census->bytes += sight->stored_bytes;
    census->damaged += kvfi_record_parse(&header, &tokens, &payload, sight->head, sight->head_len) != KVF_WHY_NONE;
    return 0;
}

kvft_census kvft_count(kvfi_tier *tier) {
    kvft_census census = {0};
    kvf_error err = {0};
    if (tier->ops->walk(tier, &err, NULL, true, count_one, &census, KVF_MS(5000)) != KVF_OK) {
        fprintf(stderr, "walk: %s\n", err.what);
        abort();
    }
    return census;
}

const char *kvft_redis_key(uint64_t seed, uint64_t part) {
    static kvfi_name name;
    kvfi_addr addr;
    kvft_addr(&addr, seed);
    kvfi_name_of(&name, "kvf1", &addr, part);
    return name.text;
}
