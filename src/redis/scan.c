/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists the keys of all servers of a tier, a page at a time (SCAN).
 */
#include "redis/scan.h"

#define MAX_NAME 1024u /* longer ones are not ours */

static bool add_name(kvfi_page *page, const char *text, size_t len) {
    if (len > MAX_NAME || memchr(text, '\0', len) != NULL) {
        return true;
    }
    if (page->cap - page->used < len + 1) {
        size_t cap = page->cap * 2 + 16384;
        char *bigger = kvfi_sys->resize(page->text, cap);
        if (bigger == NULL) {
            return false;
        }
        page->text = bigger;
        page->cap = cap;
    }
    memcpy(page->text + page->used, text, len);
    page->text[page->used + len] = '\0';
    page->used += len + 1;
    page->num++;
    return true;
}

static kvf_status ask(kvfi_scan *scan) {
    if (scan->hashes) {
        return kvfi_talk_say(scan->talk, "SCAN", scan->cursor, "COUNT", "256", "TYPE", "hash", NULL);
    }
    return kvfi_talk_say(scan->talk, "SCAN", scan->cursor, "COUNT", "256", "MATCH", scan->pattern, NULL);
}

/* [cursor, [name, name, ...]] */
static kvf_status read_page(kvfi_scan *scan) {
    kvfi_reply reply;
    KVFI_TRY(kvfi_talk_hear(scan->talk, &reply));
    if (reply.kind != KVFI_RESP_ARRAY || reply.num != 2) {
        return kvfi_talk_refused(scan->talk, &reply, "listing the keys");
    }
    KVFI_TRY(kvfi_talk_hear(scan->talk, &reply));
    if (reply.kind != KVFI_RESP_BULK || reply.len >= sizeof scan->cursor) {
        return kvfi_talk_refused(scan->talk, &reply, "listing the keys");
    }
    memcpy(scan->cursor, reply.text, reply.len);
    scan->cursor[reply.len] = '\0';
    KVFI_TRY(kvfi_talk_hear(scan->talk, &reply));
    if (reply.kind != KVFI_RESP_ARRAY) {
        return kvfi_talk_refused(scan->talk, &reply, "listing the keys");
    }
    while (!reply.last) {
        KVFI_TRY(kvfi_talk_hear(scan->talk, &reply));
        if (reply.kind == KVFI_RESP_BULK && !add_name(&scan->page, reply.text, reply.len)) {
            return kvfi_fail(scan->talk->err, KVF_NOMEM, "no memory for the names of keys");
        }
    }
    return KVF_OK;
}

kvf_status kvfi_scan_next(kvfi_scan *scan, bool *more) {
    if (!scan->begun) {
        strcpy(scan->cursor, "0");
        scan->begun = true;
    }
    scan->page.used = 0;
    scan->page.num = 0;
    KVFI_TRY(ask(scan));
    KVFI_TRY(read_page(scan));
    *more = strcmp(scan->cursor, "0") != 0;
    return KVF_OK;
}

void kvfi_scan_cleanup(kvfi_scan *scan) {
    kvfi_free(scan->page.text);
}

const char *kvfi_page_next(const kvfi_page *page, const char *name) {
    const char *next = name == NULL ? page->text : name + strlen(name) + 1;
    return page->num > 0 && next < page->text + page->used ? next : NULL;
}
