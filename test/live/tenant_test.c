/* SPDX-License-Identifier: Apache-2.0
 *
 * [T:tenant] An attacker reads and writes the store of a tenant, and knows everything except the secret: addresses,
 * lengths, even tokens and payloads of stored blocks. Each attack, on a folder and on a real Redis, costs at most a
 * miss: no byte that the owner did not store is ever loaded, and nothing is stored in the clear. Afterwards the owner
 * saves again, and everything is there.
 */
#include <ftw.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "redis/cluster/key.h"
#include "session/session.h"
#include "store/store.h"
#include "support/kit.h"
#include "support/server.h"
#include "support/tiers.h"

#define SECRET "the secret of this tenant"
#define OTHERS "the secret of another one"
#define BLOCKS 6u
#define VICTIM 3u
/* More than a part on a Redis with part=4K, and not the whole of any page. */
#define PAYLOAD      6001u
#define TOKENS       16u
#define BODY_AT      128u
#define PAYLOAD_AT   (BODY_AT + 4 * TOKENS)
#define RECORD_BYTES (PAYLOAD_AT + PAYLOAD + 16u)
#define TAG_AT       (RECORD_BYTES - 16u)
#define SEED         7u
#define SESSION      "conversation-4711"
#define SESSION_KEYS "what was said in the conversation, as keys"
#define SESSION_VALS "and the values of it"

typedef struct record {
    kvfi_addr addr;
    uint8_t bytes[RECORD_BYTES];
} record;

typedef struct scene {
    char url[512];
    char *dir;           /* the folder, or */
    kvft_server *server; /* the Redis */
    kvfi_tier *hands;    /* of the attacker: any bytes at any address */
    kvft_prompt *prompt; /* what the owner stores; the attacker may know it */
    kvf_key names[BLOCKS];
    record now[BLOCKS];    /* as stored */
    record before[BLOCKS]; /* the same blocks, as an earlier save had them */
    record others[BLOCKS]; /* the same tokens in another space of the same secret */
    uint8_t *session, *other_session;
    size_t session_bytes, other_session_bytes;
} scene;

/* ---- the owner ---- */

typedef struct owner {
    kvf_store *store;
    kvf_space *space;
} owner;

static owner open_owner(const scene *s, const char *model, const char *secret, const char *previous) {
    owner o = {0};
    const char *url = s->url;
    kvf_error err = {0};
    kvf_options options = {.struct_size = sizeof options,
                           .secret = secret,
                           .secret_len = secret != NULL ? strlen(secret) : 0,
                           .previous_secret = previous,
                           .previous_secret_len = previous != NULL ? strlen(previous) : 0,
                           .seal_sessions = secret != NULL};
    if (kvf_store_open(&o.store, &err, &url, 1, &options) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    o.space = kvft_sealed_space(o.store, model, TOKENS, NULL);
    return o;
}

static void close_owner(owner *o) {
    kvf_space_close(o->space);
    kvf_store_close(o->store);
}

static void save_all(const scene *s, const char *model, const char *secret) {
    owner o = open_owner(s, model, secret, NULL);
    kvft_prompt_fill(s->prompt, SEED);
    kvft_save_all(o.space, o.store, s->prompt);
    close_owner(&o);
}

static void save_session(const scene *s, const char *id, const char *keys) {
    owner o = open_owner(s, "m", SECRET, NULL);
    kvf_tensor k = {.data = keys, .len = strlen(keys)}, v = {.data = SESSION_VALS, .len = strlen(SESSION_VALS)};
    assert_int_equal(kvf_session_save(o.store, NULL, id, &k, &v, NULL), KVF_OK);
    close_owner(&o);
}

/* ---- the attacker's hands ---- */

/* On a busy machine a server may be given up, and spared for a moment: it is tried until it takes it. */
static kvf_status put_raw(scene *s, const kvfi_addr *addr, const void *bytes, size_t len) {
    kvfi_item item = {.status = KVF_AGAIN};
    for (int tries = 0; tries < 60 && item.status != KVF_OK; tries++) {
        struct iovec iov = {(void *)(uintptr_t)bytes, len};
        item = (kvfi_item){.addr = *addr, .iov = &iov, .num_iov = 1, .bytes = len, .status = KVF_AGAIN, .whole = true};
        kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(10000000)};
        /* A folder takes a record with the same header and tag for the same. */
        (void)!s->hands->ops->remove(s->hands, NULL, addr, kvfi_deadline(10000000));
        s->hands->ops->put(s->hands, &feed);
        kvft_nap_ms(item.status == KVF_OK ? 0 : 100);
    }
    if (item.status != KVF_OK) {
        fail_msg("%zu bytes can't be written: %s, %s", len, kvf_status_name(item.status), kvf_reason_name(item.why));
    }
    return item.status;
}

static size_t get_raw(scene *s, const kvfi_addr *addr, void *out, size_t cap) {
    kvfi_peek peek;
    kvfi_header header;
    uint64_t round_trips = 0;
    s->hands->ops->peek(s->hands, addr, 1, &peek, &round_trips, kvfi_deadline(10000000), 0);
    assert_int_equal(peek.why, KVF_WHY_NONE);
    assert_int_equal(kvfi_header_decode(&header, peek.header), KVF_WHY_NONE);
    assert_true(kvfi_record_bytes(&header) <= cap);
    struct iovec iov = {out, (size_t)kvfi_record_bytes(&header)};
    kvfi_item item = {
        .addr = *addr, .iov = &iov, .num_iov = 1, .bytes = iov.iov_len, .status = KVF_AGAIN, .whole = true};
    kvfi_feed feed = {.items = &item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(10000000)};
    s->hands->ops->get(s->hands, &feed);
    assert_int_equal(item.status, KVF_OK);
    return iov.iov_len;
}

static void read_records(scene *s, record out[BLOCKS], const char *model) {
    owner o = open_owner(s, model, SECRET, NULL);
    for (size_t i = 0; i < BLOCKS; i++) {
        kvf_key key;
        kvf_space_digest(o.space, &out[i].addr.space);
        kvf_stored_key(o.space, &key, &s->names[i]);
        out[i].addr.key = key;
        assert_int_equal(get_raw(s, &out[i].addr, out[i].bytes, RECORD_BYTES), RECORD_BYTES);
    }
    close_owner(&o);
}

static void session_addr(kvfi_addr *out, const char *id) {
    kvfi_tenant tenant = {.len = 0};
    kvfi_secret_init(&tenant.secret, SECRET, strlen(SECRET));
    kvfi_session_addr(out, id, &tenant, 0);
}

static void put_record(scene *s, const uint8_t *bytes, size_t len) {
    assert_int_equal(put_raw(s, &s->now[VICTIM].addr, bytes, len), KVF_OK);
}

/* The check of a header that was changed is made right again: it is no secret how. */
static void mend(uint8_t *header) {
    kvfi_put32(header + 124, kvfi_xxh32(header, 124));
}

static void mend_sum(uint8_t *bytes) {
    struct iovec iov[2] = {{bytes, 100}, {bytes + BODY_AT, RECORD_BYTES - BODY_AT - 16}};
    kvfi_xxh3_iov(bytes + TAG_AT, iov, 2);
}

/* ---- attacks on a block: each writes something in the place of the victim ---- */

static void forge_plain(scene *s, const uint8_t *payload, uint16_t flags) {
    uint8_t bytes[RECORD_BYTES];
    kvf_block block = {
        .tokens = s->prompt->tokens + VICTIM * TOKENS, .num_tokens = TOKENS, .first_token = VICTIM * TOKENS};
    struct iovec iov = {(void *)(uintptr_t)payload, PAYLOAD};
    kvfi_record_seal(bytes, bytes + TAG_AT, &s->now[VICTIM].addr, &block, &iov, 1, flags, 1700000000);
    memcpy(bytes + PAYLOAD_AT, payload, PAYLOAD);
    put_record(s, bytes, sizeof bytes);
}

static void plain_forgery(scene *s) {
    uint8_t payload[PAYLOAD];
    kvft_bytes(payload, sizeof payload, 99);
    forge_plain(s, payload, 0);
}
static void plain_truth(scene *s) {
    kvft_prompt_fill(s->prompt, SEED);
    forge_plain(s, s->prompt->memory + VICTIM * PAYLOAD, 0);
}
static void plain_card(scene *s) {
    uint8_t payload[PAYLOAD] = {0};
    forge_plain(s, payload, KVFI_FLAG_CARD);
}

static void seal_under(scene *s, const void *secret, size_t len) {
    kvfi_secret named, seal;
    kvfi_record_key key;
    uint8_t bytes[RECORD_BYTES], payload[PAYLOAD], salt[16] = {1};
    kvf_block block = {
        .tokens = s->prompt->tokens + VICTIM * TOKENS, .num_tokens = TOKENS, .first_token = VICTIM * TOKENS};
    struct iovec iov = {payload, sizeof payload};
    kvft_bytes(payload, sizeof payload, 98);
    kvfi_secret_init(&named, secret, len);
    kvfi_seal_init(&seal, &named);
    kvfi_record_key_of(&key, &seal, &s->now[VICTIM].addr, salt);
    assert_true(kvfi_sealed_write(bytes, bytes + BODY_AT, bytes + TAG_AT, &key, &s->now[VICTIM].addr, &block, &iov, 1,
                                  0, 1700000000));
    put_record(s, bytes, sizeof bytes);
}
static void sealed_by_another(scene *s) {
    seal_under(s, OTHERS, strlen(OTHERS));
}
static void sealed_by_the_digest(scene *s) {
    seal_under(s, s->now[VICTIM].addr.space.bytes, 32);
}
static void sealed_by_the_key(scene *s) {
    seal_under(s, s->now[VICTIM].addr.key.bytes, 32);
}
static void sealed_by_nothing(scene *s) {
    seal_under(s, "", 0);
}

/* Bytes of the record changed, and everything that needs no secret made right again. */
static void change(scene *s, void (*how)(uint8_t *)) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->now[VICTIM].bytes, sizeof bytes);
    how(bytes);
    mend(bytes);
    put_record(s, bytes, sizeof bytes);
}
#define CHANGE(name, what)               \
    static void how_##name(uint8_t *b) { \
        what;                            \
    }                                    \
    static void name(scene *s) {         \
        change(s, how_##name);           \
    }
CHANGE(first_bit_of_tokens, b[BODY_AT] ^= 1)
CHANGE(last_bit_of_tokens, b[PAYLOAD_AT - 1] ^= 0x80)
CHANGE(first_bit_of_payload, b[PAYLOAD_AT] ^= 1)
CHANGE(middle_of_payload, b[PAYLOAD_AT + PAYLOAD / 2] ^= 0x10)
CHANGE(last_bit_of_payload, b[TAG_AT - 1] ^= 0x80)
CHANGE(bit_of_tag, b[TAG_AT + 7] ^= 4)
CHANGE(tag_of_zeros, memset(b + TAG_AT, 0, 16))
CHANGE(checksum_for_a_tag, mend_sum(b))
CHANGE(bit_of_salt, b[108] ^= 1)
CHANGE(salt_of_zeros, memset(b + 108, 0, 16))
CHANGE(position_moved, b[76] ^= 1)
CHANGE(count_changed, b[80] ^= 1)
CHANGE(time_changed, b[100] ^= 1)
CHANGE(codec_plain, b[8] = 0)
CHANGE(codec_plain_whole, (b[8] = 0, memset(b + 108, 0, 16), memset(b + 76, 0, 8), mend_sum(b)))
CHANGE(codec_unknown, b[8] = 2)
CHANGE(flag_of_a_card, b[6] ^= 1)
CHANGE(flag_unknown, b[7] ^= 0x80)
CHANGE(space_changed, b[12 + 31] ^= 1)
CHANGE(key_changed, b[44 + 31] ^= 1)
CHANGE(another_magic, b[3] = '1')
CHANGE(another_header_length, b[4] = 127)
CHANGE(longer_than_it_is, (kvfi_put64(b + 84, 1u << 30), kvfi_put64(b + 92, 1u << 30)))
CHANGE(shorter_than_it_is, (kvfi_put64(b + 84, 100), kvfi_put64(b + 92, 100)))
CHANGE(lengths_at_odds, kvfi_put64(b + 92, 1))
CHANGE(body_of_zeros, memset(b + BODY_AT, 0, RECORD_BYTES - BODY_AT - 16))
CHANGE(
    body_reversed, for (size_t i = BODY_AT, j = TAG_AT - 1; i < j; i++, j--) {
        uint8_t t = b[i];
        b[i] = b[j];
        b[j] = t;
    })

/* An attacker who knows the payload can flip sealed bits so that they decrypt to bytes of his choice. The tag prevents
 * that. */
static void known_plaintext(scene *s) {
    uint8_t bytes[RECORD_BYTES], wanted[PAYLOAD];
    memcpy(bytes, s->now[VICTIM].bytes, sizeof bytes);
    kvft_prompt_fill(s->prompt, SEED);
    kvft_bytes(wanted, sizeof wanted, 97);
    for (size_t i = 0; i < PAYLOAD; i++) {
        bytes[PAYLOAD_AT + i] ^= s->prompt->memory[VICTIM * PAYLOAD + i] ^ wanted[i];
    }
    put_record(s, bytes, sizeof bytes);
}
static void known_plaintext_plain(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->now[VICTIM].bytes, sizeof bytes);
    kvft_prompt_fill(s->prompt, SEED);
    memcpy(bytes + BODY_AT, s->prompt->tokens + VICTIM * TOKENS, 4 * TOKENS);
    memcpy(bytes + PAYLOAD_AT, s->prompt->memory + VICTIM * PAYLOAD, PAYLOAD);
    put_record(s, bytes, sizeof bytes);
}

static void another_block(scene *s) {
    put_record(s, s->now[VICTIM + 1].bytes, RECORD_BYTES);
}
static void another_block_renamed(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->now[VICTIM + 1].bytes, sizeof bytes);
    memcpy(bytes + 44, s->now[VICTIM].bytes + 44, 32);
    mend(bytes);
    put_record(s, bytes, sizeof bytes);
}
static void another_body(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->now[VICTIM].bytes, sizeof bytes);
    memcpy(bytes + BODY_AT, s->now[VICTIM + 1].bytes + BODY_AT, RECORD_BYTES - BODY_AT);
    put_record(s, bytes, sizeof bytes);
}
static void another_tag(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->now[VICTIM].bytes, sizeof bytes);
    memcpy(bytes + TAG_AT, s->now[VICTIM + 1].bytes + TAG_AT, 16);
    put_record(s, bytes, sizeof bytes);
}
static void another_space(scene *s) {
    put_record(s, s->others[VICTIM].bytes, RECORD_BYTES);
}
static void another_space_renamed(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->others[VICTIM].bytes, sizeof bytes);
    memcpy(bytes + 12, s->now[VICTIM].bytes + 12, 64);
    mend(bytes);
    put_record(s, bytes, sizeof bytes);
}
static void earlier_header(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->now[VICTIM].bytes, sizeof bytes);
    memcpy(bytes, s->before[VICTIM].bytes, BODY_AT);
    put_record(s, bytes, sizeof bytes);
}
static void earlier_front(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->now[VICTIM].bytes, sizeof bytes);
    memcpy(bytes, s->before[VICTIM].bytes, RECORD_BYTES / 2);
    put_record(s, bytes, sizeof bytes);
}
static void earlier_salt(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    memcpy(bytes, s->now[VICTIM].bytes, sizeof bytes);
    memcpy(bytes + 108, s->before[VICTIM].bytes + 108, 16);
    mend(bytes);
    put_record(s, bytes, sizeof bytes);
}
static void put_back(scene *s) {
    put_record(s, s->before[VICTIM].bytes, RECORD_BYTES);
}
static void cut_at_the_end(scene *s) {
    put_record(s, s->now[VICTIM].bytes, RECORD_BYTES - 1);
}
static void cut_before_the_tag(scene *s) {
    put_record(s, s->now[VICTIM].bytes, TAG_AT);
}
static void one_byte_more(scene *s) {
    uint8_t bytes[RECORD_BYTES + 1] = {0};
    memcpy(bytes, s->now[VICTIM].bytes, RECORD_BYTES);
    put_record(s, bytes, sizeof bytes);
}
static void header_alone(scene *s) {
    put_record(s, s->now[VICTIM].bytes, BODY_AT);
}
static void half_a_header(scene *s) {
    put_record(s, s->now[VICTIM].bytes, 64);
}
static void nothing_at_all(scene *s) {
    char text[512];
    kvfi_name name;
    if (s->server == NULL) {
        put_record(s, (const uint8_t *)"", 0);
        return;
    }
    kvfi_name_of(&name, "kvf1", &s->now[VICTIM].addr, 0);
    snprintf(text, sizeof text, "SET %.*s \"\"", (int)name.len, name.text);
    const char *said = kvft_server_say(s->server, text);
    if (said[0] == '-') {
        fail_msg("%s: %s", text, said);
    }
}
static void noise(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    kvft_bytes(bytes, sizeof bytes, 96);
    put_record(s, bytes, sizeof bytes);
}
static void noise_behind_the_header(scene *s) {
    uint8_t bytes[RECORD_BYTES];
    kvft_bytes(bytes, sizeof bytes, 95);
    memcpy(bytes, s->now[VICTIM].bytes, BODY_AT);
    put_record(s, bytes, sizeof bytes);
}
static void removed(scene *s) {
    kvf_status status = s->hands->ops->remove(s->hands, NULL, &s->now[VICTIM].addr, kvfi_deadline(10000000));
    assert_true(status == KVF_OK || status == KVF_MISS);
}
static void a_session_in_its_place(scene *s) {
    put_record(s, s->session, s->session_bytes);
}

/* As a server copies it. */
static void value_of_another(scene *s) {
    char text[512];
    kvfi_name a, b;
    kvfi_name_of(&a, "kvf1", &s->now[VICTIM + 1].addr, 0);
    kvfi_name_of(&b, "kvf1", &s->now[VICTIM].addr, 0);
    snprintf(text, sizeof text, "COPY %.*s %.*s REPLACE", (int)a.len, a.text, (int)b.len, b.text);
    if (s->server != NULL) {
        const char *said = kvft_server_say(s->server, text);
        if (strstr(said, "1") == NULL) {
            fail_msg("%s: %s", text, said);
        }
    } else {
        removed(s);
    }
}

typedef struct attack {
    const char *name;
    void (*run)(scene *);
    bool same_bytes; /* what it leaves there holds what the owner stored: exact, or a miss */
} attack;

#define ATTACK(name) \
    { #name, name, false }
static const attack attacks[] = {
    ATTACK(plain_forgery),
    {"plain_truth", plain_truth, false},
    ATTACK(plain_card),
    ATTACK(sealed_by_another),
    ATTACK(sealed_by_the_digest),
    ATTACK(sealed_by_the_key),
    ATTACK(sealed_by_nothing),
    ATTACK(first_bit_of_tokens),
    ATTACK(last_bit_of_tokens),
    ATTACK(first_bit_of_payload),
    ATTACK(middle_of_payload),
    ATTACK(last_bit_of_payload),
    ATTACK(bit_of_tag),
    ATTACK(tag_of_zeros),
    ATTACK(checksum_for_a_tag),
    ATTACK(bit_of_salt),
    ATTACK(salt_of_zeros),
    ATTACK(position_moved),
    ATTACK(count_changed),
    ATTACK(time_changed),
    ATTACK(codec_plain),
    ATTACK(codec_plain_whole),
    ATTACK(codec_unknown),
    ATTACK(flag_of_a_card),
    ATTACK(flag_unknown),
    ATTACK(space_changed),
    ATTACK(key_changed),
    ATTACK(another_magic),
    ATTACK(another_header_length),
    ATTACK(longer_than_it_is),
    ATTACK(shorter_than_it_is),
    ATTACK(lengths_at_odds),
    ATTACK(body_of_zeros),
    ATTACK(body_reversed),
    ATTACK(known_plaintext),
    ATTACK(known_plaintext_plain),
    ATTACK(another_block),
    ATTACK(another_block_renamed),
    ATTACK(another_body),
    ATTACK(another_tag),
    ATTACK(another_space),
    ATTACK(another_space_renamed),
    ATTACK(earlier_header),
    ATTACK(earlier_front),
    ATTACK(earlier_salt),
    {"put_back", put_back, true},
    ATTACK(cut_at_the_end),
    ATTACK(cut_before_the_tag),
    ATTACK(one_byte_more),
    ATTACK(header_alone),
    ATTACK(half_a_header),
    ATTACK(nothing_at_all),
    ATTACK(noise),
    ATTACK(noise_behind_the_header),
    ATTACK(removed),
    ATTACK(a_session_in_its_place),
    ATTACK(value_of_another),
};
#define NUM_ATTACKS (sizeof attacks / sizeof *attacks)

/* ---- what the owner gets ---- */

static void expect(const attack *a, const scene *s, const char *how, size_t run, size_t wrong) {
    if (wrong > 0 || run > (a->same_bytes ? BLOCKS : VICTIM)) {
        fail_msg("%s, %s on %s: %zu blocks loaded, %zu of them wrong", a->name, how, s->url, run, wrong);
    }
}

/* kvf_match and kvf_load; under two secrets, of which the second is the owner's, too. */
static void load_in_a_row(const attack *a, scene *s, const char *secret, const char *previous) {
    owner o = open_owner(s, "m", secret, previous);
    size_t run = 0;
    kvf_found found[BLOCKS];
    assert_int_equal(kvf_match(o.space, &run, found, s->prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
    kvft_prompt_poison(s->prompt);
    run = kvf_load(o.space, s->prompt->blocks, BLOCKS, NULL, KVF_MS(10000));
    expect(a, s, "in a row", run, kvft_prompt_wrong(s->prompt, SEED, run));
    close_owner(&o);
}

static void load_each(const attack *a, scene *s) {
    owner o = open_owner(s, "m", SECRET, NULL);
    uint8_t each[BLOCKS] = {0};
    kvf_arrivals arrivals = {.each = each};
    kvf_queue *queue = NULL;
    uint64_t ticket = 0;
    kvf_completion done;
    kvf_batch batch = {.struct_size = sizeof batch,
                       .op = KVF_OP_LOAD,
                       .space = o.space,
                       .blocks = s->prompt->blocks,
                       .num = BLOCKS,
                       .arrivals = &arrivals};
    kvft_prompt_poison(s->prompt);
    assert_int_equal(kvf_queue_open(&queue, NULL, o.store, 1), KVF_OK);
    assert_int_equal(kvf_submit(queue, &ticket, &batch), KVF_OK);
    while (kvf_reap(queue, &done, 1) == 0) {
        struct pollfd p = {.fd = kvf_queue_fd(queue), .events = POLLIN};
        poll(&p, 1, 1000);
    }
    kvft_prompt *all = s->prompt;
    uint8_t *whole = malloc(BLOCKS * PAYLOAD);
    memcpy(whole, all->memory, BLOCKS * PAYLOAD);
    kvft_prompt_fill(all, SEED);
    for (size_t i = 0; i < BLOCKS; i++) {
        bool here = kvf_arrival_of(&arrivals, i) == KVF_HERE;
        bool exact = memcmp(whole + i * PAYLOAD, all->memory + i * PAYLOAD, PAYLOAD) == 0;
        if (here != (a->same_bytes || i != VICTIM) || (here && !exact)) {
            fail_msg("%s, each by itself on %s: block %zu %s (%s)", a->name, s->url, i, here ? "came" : "did not come",
                     exact ? "exact" : "other bytes");
        }
    }
    free(whole);
    kvf_queue_close(queue);
    close_owner(&o);
}

static void borrow_all(const attack *a, scene *s) {
    owner o = open_owner(s, "m", SECRET, NULL);
    for (size_t i = 0; i < BLOCKS; i++) {
        kvf_borrowed lent;
        kvf_block block = s->prompt->blocks[i];
        if (kvf_borrow(o.space, &lent, &block) != KVF_MISS) {
            fail_msg("%s: block %zu of a sealed space was lent", a->name, i);
        }
    }
    close_owner(&o);
}

/* The attacker's own way in: the same fields, and no secret, or another one. */
static void load_without(const attack *a, scene *s, const char *secret) {
    owner o = open_owner(s, "m", secret, NULL);
    size_t run = 0;
    kvf_found found[BLOCKS];
    assert_int_equal(kvf_match(o.space, &run, found, s->prompt->keys, BLOCKS, KVF_MS(1000)), KVF_OK);
    kvft_prompt_poison(s->prompt);
    size_t loaded = kvf_load(o.space, s->prompt->blocks, BLOCKS, NULL, KVF_MS(10000));
    if (run != 0 || loaded != 0) {
        fail_msg("%s: %zu blocks found and %zu loaded without the secret", a->name, run, loaded);
    }
    close_owner(&o);
}

/* As an engine does: what does not load is computed and stored. */
static void mend_as_owner(scene *s) {
    owner o = open_owner(s, "m", SECRET, NULL);
    (void)!kvf_load(o.space, s->prompt->blocks, BLOCKS, NULL, KVF_MS(10000));
    kvft_prompt_fill(s->prompt, SEED);
    kvft_save_all(o.space, o.store, s->prompt);
    close_owner(&o);
}

static void run_attacks(scene *s) {
    for (size_t i = 0; i < NUM_ATTACKS; i++) {
        const attack *a = &attacks[i];
        char new[32]; /* what is loaded under two secrets is stored again under the first */
        snprintf(new, sizeof new, "a new secret, number %zu", i);
        for (int way = 0; way < 3; way++) { /* a load may remove a damaged record: each way finds it again */
            a->run(s);
            way == 0   ? load_in_a_row(a, s, SECRET, NULL)
            : way == 1 ? load_in_a_row(a, s, new, SECRET)
                       : load_each(a, s);
        }
        borrow_all(a, s);
        load_without(a, s, NULL);
        mend_as_owner(s);
        memcpy(s->before, s->now, sizeof s->before);
        owner o = open_owner(s, "m", SECRET, NULL);
        kvft_prompt_poison(s->prompt);
        size_t run = kvf_load(o.space, s->prompt->blocks, BLOCKS, NULL, KVF_MS(10000));
        if (run != BLOCKS || kvft_prompt_wrong(s->prompt, SEED, run) != 0) {
            fail_msg("%s on %s: after another save %zu of %u blocks are there (%s)", a->name, s->url, run, BLOCKS,
                     kvf_reason_name(s->prompt->blocks[run < BLOCKS ? run : 0].why));
        }
        close_owner(&o);
        /* An earlier writing that differs, whatever the attack has left. */
        assert_int_equal(s->hands->ops->remove(s->hands, NULL, &s->now[VICTIM].addr, kvfi_deadline(10000000)), KVF_OK);
        save_all(s, "m", SECRET);
        read_records(s, s->now, "m");
        assert_memory_not_equal(s->now[VICTIM].bytes + BODY_AT, s->before[VICTIM].bytes + BODY_AT, 64);
    }
}

/* ---- cards and sessions ---- */

static void attack_cards(scene *s) {
    static const char lie[] = "block_tokens=16\nengine=test\nkv=f16\nmodel=somebody else's\n";
    kvfi_addr addr = s->now[0].addr;
    uint8_t head[KVFI_HEADER_BYTES + sizeof lie + KVFI_SUM_BYTES], card[4096];
    kvf_block none = {0};
    struct iovec iov = {(void *)(uintptr_t)lie, sizeof lie - 1};
    kvfi_card_key(&addr.key, &addr.space);
    size_t len = get_raw(s, &addr, card, sizeof card);
    for (int way = 0; way < 4; way++) {
        char *text = NULL;
        size_t bytes = KVFI_HEADER_BYTES + sizeof lie - 1 + KVFI_SUM_BYTES;
        uint8_t *tag = head + bytes - KVFI_SUM_BYTES;
        if (way == 0) {
            kvfi_record_seal(head, tag, &addr, &none, &iov, 1, KVFI_FLAG_CARD, 1);
            memcpy(head + KVFI_HEADER_BYTES, lie, sizeof lie - 1);
        } else if (way == 1) {
            kvfi_secret named, seal;
            kvfi_record_key key;
            kvfi_secret_init(&named, OTHERS, strlen(OTHERS));
            kvfi_seal_init(&seal, &named);
            kvfi_record_key_of(&key, &seal, &addr, card + 108);
            assert_true(
                kvfi_sealed_write(head, head + KVFI_HEADER_BYTES, tag, &key, &addr, &none, &iov, 1, KVFI_FLAG_CARD, 1));
        } else {
            memcpy(head, card, len < sizeof head ? len : sizeof head);
            bytes = len < sizeof head ? len : sizeof head;
            head[way == 2 ? KVFI_HEADER_BYTES : bytes - 1] ^= 1;
        }
        assert_int_equal(put_raw(s, &addr, head, bytes), KVF_OK);
        owner o = open_owner(s, "m", SECRET, NULL);
        if (kvf_space_describe(o.store, &text, NULL, &addr.space) == KVF_OK) {
            fail_msg("a card that somebody made up says %s", text);
        }
        close_owner(&o);
        o = open_owner(s, "m", NULL, NULL);
        if (kvf_space_describe(o.store, &text, NULL, &addr.space) == KVF_OK) {
            fail_msg("without the secret a card says %s", text);
        }
        close_owner(&o);
    }
    assert_int_equal(put_raw(s, &addr, card, len), KVF_OK);
}

static void expect_no_session(scene *s, const char *what) {
    owner o = open_owner(s, "m", SECRET, NULL);
    kvf_error err = {0};
    kvf_session *session = NULL;
    kvf_status status = kvf_session_load(o.store, &session, &err, SESSION, KVF_DEFAULT);
    if (status != KVF_MISS) {
        fail_msg("%s on %s: a session loads (%s, %s)", what, s->url, kvf_status_name(status), err.what);
    }
    close_owner(&o);
}

static void attack_sessions(scene *s) {
    kvfi_addr addr;
    session_addr(&addr, SESSION);
    uint8_t *bytes = malloc(s->session_bytes + 1);
    for (size_t at = 0; at < s->session_bytes; at += at < 128 || at + 20 > s->session_bytes ? 1 : 13) {
        memcpy(bytes, s->session, s->session_bytes);
        bytes[at] ^= 0x40;
        if (at < 124) {
            mend(bytes);
        }
        assert_int_equal(put_raw(s, &addr, bytes, s->session_bytes), KVF_OK);
        expect_no_session(s, "a flipped bit");
    }
    assert_int_equal(put_raw(s, &addr, s->other_session, s->other_session_bytes), KVF_OK);
    expect_no_session(s, "the session of another id");
    assert_int_equal(put_raw(s, &addr, s->session, s->session_bytes - 1), KVF_OK);
    expect_no_session(s, "a session that was cut");
    (void)!s->hands->ops->remove(s->hands, NULL, &addr, kvfi_deadline(10000000));
    owner attacker = open_owner(s, "m", NULL, NULL);
    kvf_tensor k = {.data = "lies", .len = 4}, v = {.data = "more", .len = 4};
    assert_int_equal(kvf_session_save(attacker.store, NULL, SESSION, &k, &v, NULL), KVF_OK);
    close_owner(&attacker);
    expect_no_session(s, "a plain session of the same id");
    attacker = open_owner(s, "m", OTHERS, NULL);
    assert_int_equal(kvf_session_save(attacker.store, NULL, SESSION, &k, &v, NULL), KVF_OK);
    close_owner(&attacker);
    expect_no_session(s, "the session of another tenant");
    assert_int_equal(put_raw(s, &addr, s->session, s->session_bytes), KVF_OK);
    owner o = open_owner(s, "m", SECRET, NULL);
    kvf_session *session = NULL;
    assert_int_equal(kvf_session_load(o.store, &session, NULL, SESSION, KVF_DEFAULT), KVF_OK);
    assert_memory_equal(session->k.data, SESSION_KEYS, strlen(SESSION_KEYS));
    kvf_session_free(session);
    close_owner(&o);
    free(bytes);
}

/* ---- what stands in the clear ---- */

#define MAX_NEEDLES 256u
typedef struct needle {
    char what[48];
    uint8_t bytes[65];
    size_t len;
} needle;

static needle needles[MAX_NEEDLES];
static size_t num_needles, num_found, bytes_seen;

static void add_needle(const char *what, size_t number, const void *bytes, size_t len) {
    assert_true(num_needles < MAX_NEEDLES && len <= sizeof needles->bytes);
    needle *n = &needles[num_needles++];
    snprintf(n->what, sizeof n->what, "%s %zu", what, number);
    memcpy(n->bytes, bytes, len);
    n->len = len;
}

/* Short pieces of all that the owner stores: tokens, payloads, fields, names of blocks, sessions, the secret. */
static void make_needles(scene *s) {
    num_needles = 0;
    kvft_prompt_fill(s->prompt, SEED);
    for (size_t i = 0; i < BLOCKS; i++) {
        char hex[65];
        for (size_t at = 0; at + 3 <= TOKENS; at += 4) {
            add_needle("tokens", i * 100 + at, s->prompt->tokens + i * TOKENS + at, 12);
        }
        for (size_t at = 0; at + 12 <= PAYLOAD; at += 611) {
            add_needle("payload", i * 10000 + at, s->prompt->memory + i * PAYLOAD + at, 12);
        }
        add_needle("name", i, s->names[i].bytes, 32);
        kvfi_hex(hex, s->names[i].bytes, 32);
        add_needle("name in hex", i, hex, 64);
    }
    add_needle("field", 0, "engine=test", 11);
    add_needle("field", 1, "kv=f16", 6);
    add_needle("field", 2, "model=", 6);
    add_needle("session id", 0, SESSION, strlen(SESSION));
    add_needle("session", 0, SESSION_KEYS, 12);
    add_needle("session", 1, SESSION_VALS, 12);
    add_needle("meta", 0, "\"xxh3\"", 6);
    add_needle("secret", 0, SECRET, 12);
}

static void look_in(const char *where, const uint8_t *bytes, size_t len) {
    bytes_seen += len;
    for (size_t i = 0; i < num_needles; i++) {
        if (memmem(bytes, len, needles[i].bytes, needles[i].len) != NULL) {
            num_found++;
            if (getenv("KVFT_VERBOSE") != NULL) {
                printf("%s: %s\n", where, needles[i].what);
            }
        }
    }
}

static int look_in_file(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)ftw;
    look_in("a name", (const uint8_t *)path, strlen(path));
    if (type == FTW_F) {
        uint8_t *bytes = malloc((size_t)st->st_size + 1);
        FILE *file = fopen(path, "rb");
        size_t len = file != NULL ? fread(bytes, 1, (size_t)st->st_size, file) : 0;
        if (file != NULL) {
            fclose(file);
        }
        look_in(path, bytes, len);
        free(bytes);
    }
    return 0;
}

/* Everything that the store has, keys and values, as it lies on disk; of a Redis in its snapshot. */
static size_t find_in_the_clear(scene *s) {
    num_found = bytes_seen = 0;
    if (s->server != NULL) {
        char path[256];
        assert_non_null(strstr(kvft_server_say(s->server, "SAVE"), "OK"));
        snprintf(path, sizeof path, "%s/dump.rdb", s->server->dir);
        struct stat st;
        assert_int_equal(stat(path, &st), 0);
        look_in_file(path, &st, FTW_F, NULL);
    } else {
        nftw(s->dir, look_in_file, 16, FTW_PHYS);
    }
    return num_found;
}

static int see_nothing(void *ctx, const kvf_entry *entry) {
    ++*(size_t *)ctx;
    assert_int_equal(entry->damage, KVF_WHY_NONE);
    assert_int_equal(entry->seal, KVF_SEAL_CLOSED);
    assert_null(entry->tokens);
    assert_null(entry->payload);
    assert_int_equal(entry->num_tokens, 0);
    assert_int_equal(entry->first_token, 0);
    return 0;
}

static void look_for_plaintext(scene *s) {
    size_t entries = 0;
    kvf_digest digest;
    char *text = NULL;
    make_needles(s);
    size_t found = find_in_the_clear(s);
    if (found > 0) {
        fail_msg("%zu pieces of what a tenant stored stand in the clear in %s", found, s->url);
    }
    assert_true(bytes_seen > BLOCKS * PAYLOAD); /* it was looked at */
    owner o = open_owner(s, "m", NULL, NULL);
    kvf_walk_options options = {.struct_size = sizeof options, .whole = 1};
    assert_int_equal(kvf_walk(o.store, NULL, see_nothing, &entries, &options), KVF_OK);
    assert_true(entries > BLOCKS);
    digest = s->now[0].addr.space;
    assert_int_equal(kvf_space_describe(o.store, &text, NULL, &digest), KVF_REFUSED);
    /* Nothing that can be computed without the secret names a record, not even from the digest. */
    for (size_t i = 0; i < BLOCKS; i++) {
        kvfi_identity guess = {.block_tokens = TOKENS};
        kvf_key keys[BLOCKS];
        memcpy(guess.root, digest.bytes, sizeof guess.root);
        kvfi_chain(&guess, keys, BLOCKS, s->prompt->tokens, BLOCKS * TOKENS, NULL);
        for (size_t k = 0; k < BLOCKS; k++) {
            assert_memory_not_equal(&keys[k], &s->now[i].addr.key, sizeof keys[k]);
            assert_memory_not_equal(&s->names[k], &s->now[i].addr.key, sizeof keys[k]);
        }
    }
    close_owner(&o);
    /* The same block twice looks like two of them. */
    for (size_t at = BODY_AT; at + 16 <= RECORD_BYTES; at += 16) {
        assert_memory_not_equal(s->now[VICTIM].bytes + at, s->before[VICTIM].bytes + at, 16);
    }
    assert_memory_not_equal(s->now[VICTIM].bytes + 76, s->before[VICTIM].bytes + 76, 8);
    /* And without a secret all of it is found: the search can fail. */
    save_all(s, "m", NULL);
    o = open_owner(s, "m", NULL, NULL);
    kvf_tensor k = {.data = SESSION_KEYS, .len = strlen(SESSION_KEYS)}, v = {.data = SESSION_VALS, .len = 20};
    assert_int_equal(kvf_session_save(o.store, NULL, SESSION, &k, &v, NULL), KVF_OK);
    close_owner(&o);
    assert_true(find_in_the_clear(s) > num_needles / 2);
}

/* ---- the scenes ---- */

static void set_the_scene(scene *s) {
    kvf_error err;
    if (kvft_try_tier(&s->hands, &err, "%s", s->url) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    owner o = open_owner(s, "m", SECRET, NULL);
    s->prompt = kvft_prompt_new(o.space, SEED, BLOCKS, PAYLOAD);
    memcpy(s->names, s->prompt->keys, sizeof s->names);
    close_owner(&o);
    save_all(s, "m", SECRET);
    read_records(s, s->before, "m");
    for (size_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(s->hands->ops->remove(s->hands, NULL, &s->before[i].addr, kvfi_deadline(10000000)), KVF_OK);
    }
    save_all(s, "m", SECRET);
    read_records(s, s->now, "m");
    /* The same tokens under another model: names of its own, of which only the place in the row is the same. */
    o = open_owner(s, "another", SECRET, NULL);
    kvft_prompt *other = kvft_prompt_new(o.space, SEED, BLOCKS, PAYLOAD);
    kvft_save_all(o.space, o.store, other);
    for (size_t i = 0; i < BLOCKS; i++) {
        kvf_space_digest(o.space, &s->others[i].addr.space);
        kvf_stored_key(o.space, &s->others[i].addr.key, &other->keys[i]);
        assert_int_equal(get_raw(s, &s->others[i].addr, s->others[i].bytes, RECORD_BYTES), RECORD_BYTES);
    }
    kvft_prompt_free(other);
    close_owner(&o);
    kvfi_addr addr;
    s->session = malloc(1 << 16);
    s->other_session = malloc(1 << 16);
    save_session(s, SESSION, SESSION_KEYS);
    save_session(s, "another conversation", "something else that was said at that time");
    session_addr(&addr, SESSION);
    s->session_bytes = get_raw(s, &addr, s->session, 1 << 16);
    session_addr(&addr, "another conversation");
    s->other_session_bytes = get_raw(s, &addr, s->other_session, 1 << 16);
}

static void play(scene *s) {
    set_the_scene(s);
    run_attacks(s);
    attack_cards(s);
    look_for_plaintext(s);
    attack_sessions(s);
    load_without(&attacks[0], s, OTHERS);
    s->hands->ops->close(s->hands);
    kvft_prompt_free(s->prompt);
    free(s->session);
    free(s->other_session);
    printf("%zu kinds of attack on blocks, 4 on cards, 6 on sessions, %zu pieces of plaintext looked for: %s\n",
           NUM_ATTACKS, num_needles, s->server != NULL ? "Redis" : "a folder");
}

static void folder(void **state) {
    (void)state;
    scene *s = calloc(1, sizeof *s);
    s->dir = kvft_temp_dir();
    snprintf(s->url, sizeof s->url, "file:%s", s->dir);
    play(s);
    kvft_remove_dir(s->dir);
    free(s);
}

static void redis(void **state) {
    (void)state;
    const char *args[] = {"--rdbcompression", "no", NULL};
    kvft_server *server = kvft_server_start(args);
    if (server == NULL) {
        skip();
    }
    scene *s = calloc(1, sizeof *s);
    s->server = server;
    snprintf(s->url, sizeof s->url, "%s?part=4K", s->server->unix_url);
    play(s);
    kvft_server_stop(server);
    free(s);
}

/* ---- many owners at once: pieces of two writings of a sealed record never fit together ---- */

#define LARGE  (size_t)(1 << 20)
#define ROUNDS 20

typedef struct writer {
    const scene *scene;
    const char *keys;
    pthread_barrier_t *start;
} writer;

static void *save_large(void *arg) {
    const writer *w = arg;
    owner o = open_owner(w->scene, "large", SECRET, NULL);
    kvft_prompt *prompt = kvft_prompt_new(o.space, SEED, 2, LARGE);
    pthread_barrier_wait(w->start);
    kvft_save_all(o.space, o.store, prompt);
    kvft_prompt_free(prompt);
    close_owner(&o);
    return NULL;
}

static void saved_by_two(const scene *s) {
    pthread_barrier_t start;
    pthread_t threads[2];
    writer w = {.scene = s, .start = &start};
    pthread_barrier_init(&start, NULL, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, save_large, &w), 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&start);
    owner o = open_owner(s, "large", SECRET, NULL);
    kvft_prompt *prompt = kvft_prompt_new(o.space, SEED, 2, LARGE);
    kvft_prompt_poison(prompt);
    assert_int_equal(kvf_load(o.space, prompt->blocks, 2, NULL, KVF_MS(10000)), 2);
    assert_int_equal(kvft_prompt_wrong(prompt, SEED, 2), 0);
    kvft_prompt_free(prompt);
    close_owner(&o);
}

static atomic_bool replaced_enough;

static void *replace_session(void *arg) {
    const writer *w = arg;
    owner o = open_owner(w->scene, "m", SECRET, NULL);
    kvf_tensor t = {.data = w->keys, .len = LARGE};
    while (!atomic_load(&replaced_enough)) {
        assert_int_equal(kvf_session_save(o.store, NULL, SESSION, &t, &t, NULL), KVF_OK);
    }
    close_owner(&o);
    return NULL;
}

static bool all_alike(const uint8_t *bytes, size_t len) {
    return memcmp(bytes, bytes + 1, len - 1) == 0;
}

static void load_replaced(owner *o) {
    kvf_session *session = NULL;
    kvf_error err = {0};
    if (kvf_session_load(o->store, &session, &err, SESSION, KVF_DEFAULT) != KVF_OK) {
        fail_msg("%s", err.what);
    }
    assert_int_equal(session->k.len, LARGE);
    assert_true(all_alike(session->k.data, LARGE));
    assert_memory_equal(session->k.data, session->v.data, LARGE);
    kvf_session_free(session);
}

static void replaced_all_the_time(const scene *s) {
    char *keys[2] = {malloc(LARGE), malloc(LARGE)};
    pthread_t threads[2];
    writer w[2];
    owner o = open_owner(s, "m", SECRET, NULL);
    for (int i = 0; i < 2; i++) {
        memset(keys[i], 'a' + i, LARGE);
        w[i] = (writer){.scene = s, .keys = keys[i]};
    }
    kvf_tensor t = {.data = keys[0], .len = LARGE};
    assert_int_equal(kvf_session_save(o.store, NULL, SESSION, &t, &t, NULL), KVF_OK);
    atomic_store(&replaced_enough, false);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, replace_session, &w[i]), 0);
    }
    for (int i = 0; i < ROUNDS; i++) {
        load_replaced(&o);
    }
    atomic_store(&replaced_enough, true);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        free(keys[i]);
    }
    close_owner(&o);
}

static void at_once(void **state) {
    (void)state;
    kvft_server *server = kvft_server_start(NULL);
    if (server == NULL) {
        skip();
    }
    scene *s = calloc(1, sizeof *s);
    snprintf(s->url, sizeof s->url, "%s?part=64K", server->unix_url);
    saved_by_two(s);
    assert_string_equal(kvft_server_say(server, "DBSIZE"), ":3"); /* two blocks and the card, one key each */
    for (int i = 0; i < ROUNDS; i++) {
        (void)kvft_server_say(server, "FLUSHALL");
        saved_by_two(s);
    }
    replaced_all_the_time(s);
    kvft_server_stop(server);
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(at_once),
        cmocka_unit_test(folder),
        cmocka_unit_test(redis),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
