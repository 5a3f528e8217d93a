/* SPDX-License-Identifier: Apache-2.0
 *
 * The named tuples that calls return, and the names of reasons.
 */
#include <string.h>

#include "ext.h"

PyTypeObject *kvfp_Result, *kvfp_Found, *kvfp_Completion, *kvfp_Flushed, *kvfp_Entry, *kvfp_Finding, *kvfp_Tier,
    *kvfp_SessionInfo, *kvfp_Link, *kvfp_Plan;

static PyStructSequence_Field result_fields[] = {
    {"num_ok", "Load: the leading blocks that are loaded; with each all that are. Save: those accepted."},
    {"reasons", "For each block None if it is fine, or why it is not."},
    {NULL, NULL},
};
static PyStructSequence_Field found_fields[] = {
    {"payload_bytes", "The room that a load needs."},
    {"stored", "When it was stored, in seconds since 1970."},
    {"num_tokens", NULL},
    {"tier", "The index of the fastest tier that has it."},
    {"why", "None: it is there. Otherwise why it is not; all other fields are then 0."},
    {NULL, NULL},
};
static PyStructSequence_Field completion_fields[] = {
    {"ticket", NULL},
    {"op", "\"load\", \"save\", \"match\", \"remove\" or \"touch\"."},
    {"num_ok", "Load and match: the leading run; with each or arrivals all that are there. Others: all that are done."},
    {"reasons", "For each block None if it is fine, or why it is not."},
    {"found", "Of a match: what was found of each key. Of others: None."},
    {NULL, NULL},
};
static PyStructSequence_Field flushed_fields[] = {
    {"done", "False: the time ended first."},
    {"unwritten", "Blocks that were accepted and could not be written after all."},
    {NULL, NULL},
};
static PyStructSequence_Field entry_fields[] = {
    {"kind", "\"block\", \"card\", \"session\" or \"foreign\"."},
    {"tier", NULL},
    {"name", "The store's own name of it. Bytes that are not UTF-8 are surrogate escapes."},
    {"space", "32 bytes: the digest of the space; zeros if it has none."},
    {"key", "32 bytes: the key as stored; zeros if it has none."},
    {"stored_bytes", "Header and payload, as stored."},
    {"payload_bytes", NULL},
    {"first_token", NULL},
    {"num_tokens", NULL},
    {"stored", "Seconds since 1970; 0 = unknown."},
    {"ttl", "Time to live in seconds; inf = it stays; None = unknown."},
    {"damage", "None, or what is wrong with it."},
    {"seal", "\"none\", \"closed\" or \"opened\"."},
    {"payload", "With whole=True and key=: the payload. Otherwise None."},
    {"tokens", "With whole=True and key=: the tokens, if the record has them. Otherwise None."},
    {NULL, NULL},
};
static PyStructSequence_Field finding_fields[] = {
    {"severity", "\"fine\", \"note\", \"warning\" or \"fatal\"."},
    {"tier", NULL},
    {"code", "A stable word, such as \"noeviction\"."},
    {"what", "What was found, with its values."},
    {"mend", "How to fix it, often a command to type. Empty if nothing is wrong."},
    {NULL, NULL},
};
static PyStructSequence_Field tier_fields[] = {
    {"url", "Without the password."},
    {"reachable", NULL},
    {"num_records", "None = unknown."},
    {"used_bytes", "None = unknown."},
    {"max_bytes", "None = unknown."},
    {"num_servers", NULL},
    {"num_open", "Servers that nobody tries for a moment, after failures."},
    {"num_half_open", NULL},
    {"num_refusing", "Servers that refused saves; saves to them pause for a while."},
    {NULL, NULL},
};
static PyStructSequence_Field link_fields[] = {
    {"bytes_per_s", "Of all loads together; 0 = unknown."},
    {"round_trip", "Seconds from a request to the first byte of the answer; 0 = unknown."},
    {"silent", "Loads are under way, and nothing arrives."},
    {NULL, NULL},
};
static PyStructSequence_Field plan_fields[] = {
    {"kind", "\"none\", \"load\", \"compute\", \"both\" or \"try\"."},
    {"num_compute", "Blocks of the front to compute."},
    {"num_load", "The blocks after them, to load."},
    {"load_seconds", "How long these are expected to take to arrive; 0 = unknown, or nothing is loaded."},
    {"compute_seconds", "How long it takes to compute all of the gap; 0 = unknown."},
    {"patience", "Seconds that a load may cost, for an engine that begins now."},
    {NULL, NULL},
};
static PyStructSequence_Field session_info_fields[] = {
    {"k_bytes", NULL},
    {"k_dtype", "numpy's name, such as \"float16\"; None = unknown."},
    {"k_shape", "None = unknown."},
    {"v_bytes", NULL},
    {"v_dtype", NULL},
    {"v_shape", NULL},
    {"num_tokens", "0 = unknown."},
    {"layout", "The order of the axes, such as \"LHTD\"; None = unknown."},
    {"space", "The digest of the space that the arrays belong to; None = unknown."},
    {"has_meta", "False: written by a plain Redis client; no checksum was verified."},
    {"ttl", "Of a look: seconds that the session still lives. inf: it does not expire. None: unknown."},
    {NULL, NULL},
};

/* Every field but the end mark counts: none is hidden from the tuple. */
static bool add(PyObject *module, PyTypeObject **out, const char *name, PyStructSequence_Field *fields,
                const char *doc) {
    int num = 0;
    while (fields[num].name != NULL) {
        num++;
    }
    PyStructSequence_Desc desc = {name, doc, fields, num};
    *out = PyStructSequence_NewType(&desc);
    const char *short_name = strrchr(name, '.') + 1;
    return *out != NULL && PyModule_AddObjectRef(module, short_name, (PyObject *)(void *)*out) == 0;
}

static PyObject *reasons[KVF_REASON_ROOM];

static bool reasons_init(void) {
    for (int i = KVF_WHY_NONE + 1; i < KVF_NUM_REASONS; i++) {
        reasons[i] = PyUnicode_InternFromString(kvf_reason_name((kvf_reason)i));
        if (reasons[i] == NULL) {
            return false;
        }
    }
    return true;
}

bool kvfp_values_init(PyObject *module) {
    return reasons_init() &&
           add(module, &kvfp_Result, "kvferry.Result", result_fields, "What became of the blocks of a load or save.") &&
           add(module, &kvfp_Found, "kvferry.Found", found_fields, "What a lookup found of one key.") &&
           add(module, &kvfp_Completion, "kvferry.Completion", completion_fields, "The end of a batch of a Queue.") &&
           add(module, &kvfp_Flushed, "kvferry.Flushed", flushed_fields, "What a flush has reached.") &&
           add(module, &kvfp_Entry, "kvferry.Entry", entry_fields, "One thing in a store.") &&
           add(module, &kvfp_Finding, "kvferry.Finding", finding_fields, "One finding of the doctor.") &&
           add(module, &kvfp_Tier, "kvferry.Tier", tier_fields, "One tier of a store.") &&
           add(module, &kvfp_Link, "kvferry.Link", link_fields, "How fast a tier of a store is.") &&
           add(module, &kvfp_Plan, "kvferry.Plan", plan_fields,
               "How much of a gap to load, and how much to compute.") &&
           add(module, &kvfp_SessionInfo, "kvferry.SessionInfo", session_info_fields,
               "What is known of a session without its arrays.");
}

PyObject *kvfp_value(PyTypeObject *type, PyObject **fields, Py_ssize_t num) {
    bool whole = true;
    for (Py_ssize_t i = 0; i < num; i++) {
        whole = whole && fields[i] != NULL;
    }
    PyObject *value = whole ? PyStructSequence_New(type) : NULL;
    for (Py_ssize_t i = 0; i < num; i++) {
        if (value != NULL) {
            PyStructSequence_SetItem(value, i, fields[i]);
        } else {
            Py_XDECREF(fields[i]);
        }
    }
    return value;
}

PyObject *kvfp_none(void) {
    Py_RETURN_NONE;
}

PyObject *kvfp_reason(kvf_reason why) {
    PyObject *reason = (int)why >= 0 && why < KVF_NUM_REASONS ? reasons[why] : NULL;
    if (reason == NULL) {
        return kvfp_none();
    }
    Py_INCREF(reason);
    return reason;
}

PyObject *kvfp_found_value(const kvf_found *found) {
    return KVFP_VALUE(kvfp_Found, PyLong_FromUnsignedLongLong(found->payload_bytes),
                      PyFloat_FromDouble((double)found->stored_s), PyLong_FromUnsignedLong(found->num_tokens),
                      PyLong_FromUnsignedLong(found->tier), kvfp_reason(found->why));
}

static bool add_field(PyObject *fields, const char *line, const char *end) {
    const char *equals = memchr(line, '=', (size_t)(end - line));
    if (equals == NULL) {
        equals = end;
    }
    const char *from = equals < end ? equals + 1 : end;
    PyObject *name = PyUnicode_DecodeUTF8(line, equals - line, "surrogateescape");
    PyObject *value = PyUnicode_DecodeUTF8(from, end - from, "surrogateescape");
    bool added = name != NULL && value != NULL && PyDict_SetItem(fields, name, value) == 0;
    Py_XDECREF(name);
    Py_XDECREF(value);
    return added;
}

PyObject *kvfp_fields_dict(const char *text) {
    PyObject *fields = PyDict_New();
    for (const char *line = text; fields != NULL && *line != '\0';) {
        const char *end = strchr(line, '\n');
        if (end == NULL) {
            end = line + strlen(line);
        }
        if (!add_field(fields, line, end)) {
            Py_CLEAR(fields);
        }
        line = *end == '\n' ? end + 1 : end;
    }
    return fields;
}
