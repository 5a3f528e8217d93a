/* SPDX-License-Identifier: Apache-2.0
 *
 * Output for people and for programs: numbers, hex, JSON, tables.
 */
#include "common/cli.h"

#include "base/text.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- numbers for people ---- */

const char *kvfcli_size(char out[KVFCLI_TEXT], uint64_t bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1024;
        unit++;
    }
    snprintf(out, KVFCLI_TEXT, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return out;
}

const char *kvfcli_span(char out[KVFCLI_TEXT], int64_t milliseconds) {
    int64_t seconds = milliseconds / 1000;
    if (milliseconds < 0) {
        snprintf(out, KVFCLI_TEXT, "-");
    } else if (seconds < 120) {
        snprintf(out, KVFCLI_TEXT, "%lld s", (long long)seconds);
    } else if (seconds < 120 * 60) {
        snprintf(out, KVFCLI_TEXT, "%lld min", (long long)(seconds / 60));
    } else if (seconds < 48 * 3600) {
        snprintf(out, KVFCLI_TEXT, "%lld h", (long long)(seconds / 3600));
    } else {
        snprintf(out, KVFCLI_TEXT, "%lld d", (long long)(seconds / 86400));
    }
    return out;
}

const char *kvfcli_age(char out[KVFCLI_TEXT], int64_t stored_s) {
    int64_t now_s = (int64_t)time(NULL);
    if (stored_s == 0) {
        snprintf(out, KVFCLI_TEXT, "?");
        return out;
    }
    /* Another machine's clock may be slightly ahead; and a record may contain anything. */
    const int64_t longest_s = INT64_MAX / 1000;
    int64_t age_s = stored_s >= now_s ? 0 : stored_s < now_s - longest_s ? longest_s : now_s - stored_s;
    return kvfcli_span(out, age_s * 1000);
}

/* ---- text of a store ---- */

const char *kvfcli_shown_n(const char *text, size_t len) {
    static char buffers[8][16 * 1024];
    static size_t turn;
    char *out = buffers[turn++ % 8];
    size_t at = 0, cap = sizeof buffers[0];
    for (size_t i = 0; i < len && at + 8 < cap;) {
        size_t shown = text[i] == '\\' ? 0 : kvfi_shown_bytes(text + i, len - i);
        if (shown > 0) {
            memcpy(out + at, text + i, shown);
            at += shown;
            i += shown;
            continue;
        }
        const char *known = strchr("\\\\\nn\tt", text[i]);
        if (text[i] != '\0' && known != NULL) {
            at += (size_t)snprintf(out + at, cap - at, "\\%c", known[1]);
        } else {
            at += (size_t)snprintf(out + at, cap - at, "\\x%02x", (unsigned)(uint8_t)text[i]);
        }
        i++;
    }
    out[at] = '\0';
    return out;
}

const char *kvfcli_shown(const char *text) {
    return kvfcli_shown_n(text, strlen(text));
}

/* ---- hex ---- */

void kvfcli_hex(char out[KVFCLI_HEX32], const uint8_t bytes[32]) {
    for (size_t i = 0; i < 32; i++) {
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    }
}

bool kvfcli_is_hex(const char *text) {
    size_t len = strlen(text);
    return len >= 1 && len <= 64 && strspn(text, "0123456789abcdefABCDEF") == len;
}

bool kvfcli_has_prefix(const uint8_t bytes[32], const char *hex_prefix) {
    char hex[KVFCLI_HEX32];
    kvfcli_hex(hex, bytes);
    return strncasecmp(hex, hex_prefix, strlen(hex_prefix)) == 0;
}

static uint8_t digit(char c) {
    return (uint8_t)(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
}

bool kvfcli_unhex(uint8_t out[32], const char *hex) {
    if (!kvfcli_is_hex(hex) || strlen(hex) != 64) {
        return false;
    }
    for (size_t i = 0; i < 32; i++) {
        out[i] = (uint8_t)(digit(hex[2 * i]) << 4 | digit(hex[2 * i + 1]));
    }
    return true;
}

/* ---- JSON ---- */

int kvfcli_print_json(json_t *json, int code) {
    /* jansson passes NULL through its calls, so one check at the end detects every failed allocation. */
    bool bad =
        json == NULL || json_dumpf(json, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9) | JSON_ENSURE_ASCII) != 0;
    json_decref(json);
    if (bad) {
        kvfcli_say("the JSON could not be written");
        return KVFCLI_IO;
    }
    fputc('\n', stdout);
    return code;
}

json_t *kvfcli_json_text_n(const char *text, size_t len) {
    json_t *json = json_stringn(text, len);
    return json != NULL ? json : json_string(kvfcli_shown_n(text, len));
}

json_t *kvfcli_json_text(const char *text) {
    return kvfcli_json_text_n(text, strlen(text));
}

json_t *kvfcli_json_known(bool known, uint64_t number) {
    return known ? json_integer((json_int_t)number) : json_null();
}

json_t *kvfcli_json_hex(const uint8_t bytes[32]) {
    char hex[KVFCLI_HEX32];
    kvfcli_hex(hex, bytes);
    return json_string(hex);
}

json_t *kvfcli_json_fields(const char *description) {
    if (description == NULL) {
        return json_null();
    }
    json_t *fields = json_object();
    const char *line;
    size_t len;
    while (kvfcli_next_line(&description, &line, &len)) {
        const char *equals = memchr(line, '=', len);
        if (equals != NULL) {
            json_object_set_new(fields, kvfcli_shown_n(line, (size_t)(equals - line)),
                                kvfcli_json_text_n(equals + 1, len - (size_t)(equals + 1 - line)));
        }
    }
    return fields;
}

/* ---- tables ---- */

void kvfcli_row(const char *label, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("%-9s ", label);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
}

bool kvfcli_next_line(const char **rest, const char **line, size_t *len) {
    *line = *rest;
    *len = strcspn(*rest, "\n");
    *rest += *len + ((*rest)[*len] == '\n');
    return **line != '\0';
}

void kvfcli_print_lines(const char *label, int width, const char *text) {
    const char *line;
    size_t len;
    for (const char *rest = text; kvfcli_next_line(&rest, &line, &len); label = "") {
        printf("%-*s %s\n", width, label, kvfcli_shown_n(line, len));
    }
}
