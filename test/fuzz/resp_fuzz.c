/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzzes the decoder: whatever a server sends, in any pieces, no byte is written to a wrong place, nothing hangs, and
 * the meaning does not depend on the pieces. The first three bytes of the input choose the size of the place (0: none),
 * of the pieces, and of the scratch.
 */
#include <stdlib.h>
#include <string.h>

#include "resp/decode.h"

#define MAX_PLACE 256u

static void check(int ok) {
    if (!ok) {
        abort();
    }
}

static uint64_t mix(uint64_t h, const void *bytes, size_t len) {
    const uint8_t *p = bytes;
    for (size_t i = 0; i < len; i++) {
        h = (h ^ p[i]) * 1099511628211u;
    }
    return h;
}

static uint64_t mix_reply(uint64_t h, const kvfi_reply *reply, const uint8_t *place) {
    const uint64_t numbers[] = {(uint64_t)reply->kind, reply->last, (uint64_t)reply->num};
    h = mix(h, numbers, sizeof numbers);
    if (reply->text != NULL) {
        h = mix(h, reply->text, reply->len);
    } else if (reply->kind == KVFI_RESP_BULK) {
        h = mix(h, place, (size_t)reply->num);
    }
    return h;
}

static size_t read_piece(kvfi_resp *resp, const uint8_t *data, size_t len, size_t piece) {
    struct iovec iov[5];
    size_t num = kvfi_resp_want(resp, iov, 5);
    size_t put = 0;
    check(num >= 1 && num <= 5);
    for (size_t i = 0; i < num && put < len && put < piece; i++) {
        size_t n = iov[i].iov_len;
        check(n > 0);
        n = n < len - put ? n : len - put;
        n = n < piece - put ? n : piece - put;
        memcpy(iov[i].iov_base, data + put, n);
        put += n;
    }
    kvfi_resp_got(resp, put);
    return put;
}

/* A hash of all that was decoded. Memory comes from malloc, so that the sanitizer sees every byte beyond it. */
static uint64_t decode(const uint8_t *data, size_t len, size_t place_bytes, size_t piece, size_t cap) {
    char *scratch = malloc(cap);
    uint8_t *place = malloc(place_bytes + 1);
    check(scratch != NULL && place != NULL);
    struct iovec iov[3] = {
        {place, place_bytes / 2}, {place, 0}, {place + place_bytes / 2, place_bytes - place_bytes / 2}};
    kvfi_resp resp;
    kvfi_resp_event event = KVFI_RESP_MORE;
    uint64_t h = 14695981039346656037u;
    size_t at = 0;
    kvfi_resp_init(&resp, scratch, cap);
    for (;;) {
        kvfi_reply reply;
        if (event == KVFI_RESP_REPLY || at == 0) {
            if (place_bytes > 0 && event != KVFI_RESP_BAD) {
                kvfi_resp_into(&resp, (kvfi_place){.iov = iov, .bytes = place_bytes});
            }
        }
        event = kvfi_resp_next(&resp, &reply);
        if (event == KVFI_RESP_BAD) {
            h = mix(h, "bad", 3);
            break;
        }
        if (event == KVFI_RESP_REPLY) {
            check(reply.kind != KVFI_RESP_BULK || (uint64_t)reply.num <= (place_bytes > 0 ? place_bytes : cap));
            h = mix_reply(h, &reply, place);
        } else if (at == len) {
            break;
        } else {
            at += read_piece(&resp, data + at, len - at, piece);
        }
    }
    free(scratch);
    free(place);
    return h;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    if (len < 3) {
        return 0;
    }
    size_t place = data[0] % MAX_PLACE, piece = 1 + data[1] % 64u, cap = KVFI_RESP_MIN_SCRATCH + data[2];
    uint64_t whole = decode(data + 3, len - 3, place, SIZE_MAX, cap);
    check(whole == decode(data + 3, len - 3, place, piece, cap));
    check(whole == decode(data + 3, len - 3, place, 1, cap));
    return 0;
}
