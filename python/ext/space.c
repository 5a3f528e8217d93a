/* SPDX-License-Identifier: Apache-2.0
 *
 * Space: an identity, its keys, and the blocks under them.
 */
#include <string.h>

#include "ext.h"
#include "manual.h"

PyTypeObject *kvfp_SpaceType;

static void close_space(void *it) {
    kvf_space_close(it);
}

static const kvfp_kind space_kind = {"Space", sizeof(kvfp_handle), NULL, close_space, NULL};

static kvfp_handle *enter(PyObject *self) {
    return kvfp_enter_object(self, kvfp_SpaceType, "Space");
}

/* ---- opening */
/* The items of a mapping of the caller may be anything. */
static bool take_field(kvf_field *out, PyObject *item) {
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "the items of the fields of a space are tuples, not %R",
                     (PyObject *)Py_TYPE(item));
        return false;
    }
    return PyArg_ParseTuple(item, "ss;the fields of a space are str to str", &out->name, &out->value) != 0;
}

static kvf_field *take_fields(size_t *out_num, PyObject *items) {
    Py_ssize_t num = PyList_Size(items);
    kvf_field *fields = PyMem_Calloc((size_t)num + 1, sizeof *fields);
    if (fields == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < num; i++) {
        if (!take_field(&fields[i], PyList_GetItem(items, i))) {
            PyMem_Free(fields);
            return NULL;
        }
    }
    *out_num = (size_t)num;
    return fields;
}

static PyObject *open_with(PyTypeObject *type, PyObject *store, const kvf_field *fields, size_t num,
                           const kvf_space_options *options) {
    kvfp_handle *of = kvfp_enter_object(store, kvfp_StoreType, "Store");
    if (of == NULL) {
        return NULL;
    }
    kvf_space *space = NULL;
    kvf_error err = {0};
    PyObject *opened = NULL;
    kvf_status status = kvf_space_open(&space, &err, of->it, fields, num, options);
    if (status != KVF_OK) {
        kvfp_raise(status, &err, "the space can't be opened");
    } else {
        kvfp_handle *handle = kvfp_handle_new(&space_kind, space, of, NULL);
        opened = handle == NULL ? NULL : kvfp_object_new(type, handle, store);
    }
    kvfp_leave(of);
    return opened;
}

static PyObject *open_space(PyTypeObject *type, PyObject *store, PyObject *mapping, const kvf_space_options *options) {
    PyObject *items = PyMapping_Items(mapping), *opened = NULL;
    size_t num = 0;
    if (items == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "fields: a dict of str to str is needed, not %R",
                         (PyObject *)Py_TYPE(mapping));
        }
        return NULL;
    }
    kvf_field *fields = take_fields(&num, items);
    if (fields != NULL) {
        opened = open_with(type, store, fields, num, options);
    }
    PyMem_Free(fields);
    Py_DECREF(items);
    return opened;
}

static PyObject *space_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"store", "fields", "block_tokens", "secret", "previous_secret", NULL};
    PyObject *store = NULL, *fields = NULL, *block_tokens = NULL, *opened = NULL;
    Py_buffer secret = {0}, previous = {0};
    size_t per_block = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OO&O&:Space", names, &store, &fields, &block_tokens,
                                     kvfp_secret, &secret, kvfp_secret, &previous)) {
        return NULL;
    }
    if (block_tokens == NULL || kvfp_take_count(&per_block, block_tokens, "block_tokens", 1, 65536)) {
        kvf_space_options options = {
            .struct_size = sizeof options,
            .block_tokens = (uint32_t)per_block,
            .secret = secret.buf,
            .secret_len = (size_t)secret.len,
            .previous_secret = previous.buf,
            .previous_secret_len = (size_t)previous.len,
        };
        opened = open_space(type, store, fields, &options);
    }
    PyBuffer_Release(&secret);
    PyBuffer_Release(&previous);
    return opened;
}

/* ---- keys */
static PyObject *key_value(const kvf_key *key) {
    return PyBytes_FromStringAndSize((const char *)key->bytes, sizeof key->bytes);
}

/* Takes a parent or None. *out is NULL for None, or `room`. */
static bool take_parent(const kvf_key **out, kvf_key *room, PyObject *from) {
    *out = from == Py_None ? NULL : room;
    return from == Py_None || kvfp_take_32(room->bytes, from, "parent");
}

static PyObject *chain_tokens(const kvf_space *space, const uint32_t *tokens, size_t num, const kvf_key *parent) {
    size_t num_keys = num / kvf_space_block_tokens(space);
    PyObject *keys = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(num_keys * sizeof(kvf_key)));
    if (keys != NULL) {
        void *out = PyBytes_AsString(keys);
        Py_BEGIN_ALLOW_THREADS kvf_chain_from(space, out, num_keys, tokens, num, parent);
        Py_END_ALLOW_THREADS
    }
    return keys;
}

static PyObject *space_chain(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tokens", "parent", NULL};
    PyObject *from = NULL, *parent_from = Py_None, *keys = NULL;
    kvf_key room;
    const kvf_key *parent = NULL;
    uint32_t *tokens = NULL;
    size_t num = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:chain", names, &from, &parent_from) ||
        !take_parent(&parent, &room, parent_from) || !kvfp_take_tokens(&tokens, &num, from)) {
        return NULL;
    }
    kvfp_handle *space = enter(self);
    if (space != NULL) {
        keys = chain_tokens(space->it, tokens, num, parent);
        kvfp_leave(space);
    }
    PyMem_Free(tokens);
    return keys;
}

static PyObject *space_salt_key(PyObject *self, PyObject *args) {
    PyObject *parent_from = NULL;
    kvf_key room, key;
    const kvf_key *parent = NULL;
    Py_buffer salt;
    if (!PyArg_ParseTuple(args, "Oy*:salt_key", &parent_from, &salt)) {
        return NULL;
    }
    kvfp_handle *space = take_parent(&parent, &room, parent_from) ? enter(self) : NULL;
    if (space != NULL) {
        kvf_salt_key(space->it, &key, parent, salt.buf, (size_t)salt.len);
        kvfp_leave(space);
    }
    PyBuffer_Release(&salt);
    return space == NULL ? NULL : key_value(&key);
}

static PyObject *space_key_of(PyObject *self, PyObject *from) {
    Py_buffer hash;
    kvf_key key;
    if (!kvfp_take_buffer(&hash, from, "engine_hash", false)) {
        return NULL;
    }
    kvfp_handle *space = enter(self);
    if (space != NULL) {
        kvf_key_of(space->it, &key, hash.buf, (size_t)hash.len);
        kvfp_leave(space);
    }
    PyBuffer_Release(&hash);
    return space == NULL ? NULL : key_value(&key);
}

/* The key of a hash and a suffix, joined in `room`, which grows. */
static bool key_of_joined(const kvf_space *space, kvf_key *out, PyObject *from, const Py_buffer *suffix, uint8_t **room,
                          size_t *room_bytes) {
    Py_buffer hash;
    if (!kvfp_take_buffer(&hash, from, "engine_hashes", false)) {
        return false;
    }
    size_t len = (size_t)hash.len + (size_t)suffix->len; /* each fits a Py_ssize_t */
    uint8_t *grown = len <= *room_bytes ? *room : PyMem_Realloc(*room, len);
    if (grown == NULL) {
        PyErr_NoMemory();
    } else {
        *room = grown;
        *room_bytes = len > *room_bytes ? len : *room_bytes;
        memcpy(grown, hash.buf, (size_t)hash.len);
        memcpy(grown + hash.len, suffix->buf, (size_t)suffix->len);
        kvf_key_of(space, out, grown, len);
    }
    PyBuffer_Release(&hash);
    return grown != NULL;
}

static PyObject *keys_of_all(const kvf_space *space, PyObject *hashes, const Py_buffer *suffix) {
    Py_ssize_t num = PyTuple_Size(hashes);
    PyObject *keys = PyBytes_FromStringAndSize(NULL, num * (Py_ssize_t)sizeof(kvf_key));
    size_t room_bytes = 64;
    uint8_t *room = PyMem_Malloc(room_bytes);
    if (room == NULL) {
        Py_CLEAR(keys);
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; keys != NULL && i < num; i++) {
        kvf_key *out = (kvf_key *)(void *)PyBytes_AsString(keys) + i;
        if (!key_of_joined(space, out, PyTuple_GetItem(hashes, i), suffix, &room, &room_bytes)) {
            Py_CLEAR(keys);
        }
    }
    PyMem_Free(room);
    return keys;
}

static PyObject *space_keys_of(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"engine_hashes", "suffix", NULL};
    PyObject *from = NULL, *keys = NULL;
    Py_buffer suffix = {.buf = ""};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|y*:keys_of", names, &from, &suffix)) {
        return NULL;
    }
    PyObject *hashes = kvfp_take_items(from, "engine_hashes", "a sequence of buffers");
    kvfp_handle *space = hashes == NULL ? NULL : enter(self);
    if (space != NULL) {
        keys = keys_of_all(space->it, hashes, &suffix);
        kvfp_leave(space);
    }
    Py_XDECREF(hashes);
    PyBuffer_Release(&suffix);
    return keys;
}

static PyObject *space_tail_key(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"last_block", "tokens", NULL};
    PyObject *block_from = NULL, *from = NULL;
    kvf_key block, key;
    uint32_t *tokens = NULL;
    size_t num = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:tail_key", names, &block_from, &from) ||
        !kvfp_take_32(block.bytes, block_from, "last_block") || !kvfp_take_tokens(&tokens, &num, from)) {
        return NULL;
    }
    kvfp_handle *space = enter(self);
    if (space != NULL) {
        kvf_tail_key(space->it, &key, &block, tokens, num);
        kvfp_leave(space);
    }
    PyMem_Free(tokens);
    return space == NULL ? NULL : key_value(&key);
}

static PyObject *space_apart_key(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"key", "how", NULL};
    PyObject *from = NULL;
    kvf_key key, apart;
    Py_buffer how;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy*:apart_key", names, &from, &how)) {
        return NULL;
    }
    kvfp_handle *space = kvfp_take_32(key.bytes, from, "key") ? enter(self) : NULL;
    if (space != NULL) {
        kvf_apart_key(space->it, &apart, &key, how.buf, (size_t)how.len);
        kvfp_leave(space);
    }
    PyBuffer_Release(&how);
    return space == NULL ? NULL : key_value(&apart);
}

/* A key made of one key. */
static PyObject *key_from(PyObject *self, PyObject *from, void (*make)(const kvf_space *, kvf_key *, const kvf_key *)) {
    kvf_key key, made;
    kvfp_handle *space = kvfp_take_32(key.bytes, from, "key") ? enter(self) : NULL;
    if (space == NULL) {
        return NULL;
    }
    make(space->it, &made, &key);
    kvfp_leave(space);
    return key_value(&made);
}

static PyObject *space_state_key(PyObject *self, PyObject *from) {
    return key_from(self, from, kvf_state_key);
}

static PyObject *space_stored_key(PyObject *self, PyObject *from) {
    return key_from(self, from, kvf_stored_key);
}

/* ---- match */
typedef struct lookup {
    kvf_key *keys; /* a copy: whatever the buffer's owner does meanwhile */
    size_t num;
    kvf_found *found;
    size_t run;
} lookup;

static bool take_lookup(lookup *out, PyObject *keys, bool found) {
    Py_buffer buffer;
    if (!kvfp_take_buffer(&buffer, keys, "keys", false)) {
        return false;
    }
    *out = (lookup){.num = (size_t)buffer.len / sizeof(kvf_key)};
    bool taken = (size_t)buffer.len % sizeof(kvf_key) == 0 && out->num <= KVF_MAX_BLOCKS;
    if (!taken) {
        kvfp_limit("keys: 32 bytes for each of at most %u blocks, not %zd bytes", KVF_MAX_BLOCKS, buffer.len);
    } else {
        out->keys = PyMem_Malloc((size_t)buffer.len + 1);
        out->found = found ? PyMem_Calloc(out->num + 1, sizeof *out->found) : NULL;
        taken = out->keys != NULL && (out->found != NULL || !found);
        if (taken) {
            memcpy(out->keys, buffer.buf, (size_t)buffer.len);
        } else {
            PyErr_NoMemory();
            PyMem_Free(out->keys);
            PyMem_Free(out->found);
        }
    }
    PyBuffer_Release(&buffer);
    return taken;
}

static bool look_up(PyObject *self, lookup *of, int64_t budget_us) {
    kvf_status status = KVF_OK;
    kvfp_wait wait;
    kvfp_handle *space = enter(self);
    if (space == NULL) {
        return false;
    }
    kvfp_wait_begin(&wait);
    status = kvf_match(space->it, &of->run, of->found, of->keys, of->num, budget_us);
    bool ended = kvfp_wait_end(&wait);
    kvfp_leave(space);
    kvfp_log_tell();
    if (!ended) {
        return false;
    }
    return status == KVF_OK || kvfp_raise(status, NULL, "the keys can't be looked up") != NULL;
}

static PyObject *found_list(const lookup *of) {
    PyObject *list = PyList_New((Py_ssize_t)of->num);
    for (size_t i = 0; list != NULL && i < of->num; i++) {
        PyObject *found = kvfp_found_value(&of->found[i]);
        if (found == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SetItem(list, (Py_ssize_t)i, found);
        }
    }
    return list;
}

static PyObject *lookup_of(PyObject *self, PyObject *args, PyObject *kwargs, bool each) {
    static char *names[] = {"keys", "timeout", NULL};
    PyObject *keys = NULL, *answer = NULL;
    int64_t budget_us = KVF_DEFAULT;
    lookup of;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O&", names, &keys, kvfp_timeout, &budget_us) ||
        !take_lookup(&of, keys, each)) {
        return NULL;
    }
    if (look_up(self, &of, budget_us)) {
        answer = each ? found_list(&of) : PyLong_FromSize_t(of.run);
    }
    PyMem_Free(of.keys);
    PyMem_Free(of.found);
    return answer;
}

static PyObject *space_match(PyObject *self, PyObject *args, PyObject *kwargs) {
    return lookup_of(self, args, kwargs, false);
}

static PyObject *space_find(PyObject *self, PyObject *args, PyObject *kwargs) {
    return lookup_of(self, args, kwargs, true);
}

/* ---- load, save */
static PyObject *load_batch(const kvfp_batch *batch, const kvf_load_options *options) {
    kvf_view *view = batch->view == NULL ? NULL : batch->view->it;
    kvfp_wait wait;
    kvfp_wait_begin(&wait);
    size_t num_ok = kvf_load_with(batch->space->it, batch->blocks, batch->num, view, options);
    return kvfp_wait_end(&wait) ? kvfp_batch_result(batch, num_ok) : NULL;
}

static PyObject *space_load(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"keys", "into",    "slots",    "tokens", "first_token",
                            "each", "timeout", "patience", "owner",  NULL};
    kvfp_request request = {.op = KVF_OP_LOAD, .space = self};
    kvf_load_options options = {.struct_size = sizeof options};
    int each = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOpO&O&O:load", names, &request.keys, &request.memory,
                                     &request.slots, &request.tokens, &request.first_token, &each, kvfp_timeout,
                                     &options.budget_us, kvfp_patience, &options.patience_us, &request.owner)) {
        return NULL;
    }
    options.flags = each ? KVF_EACH : 0;
    kvfp_batch *batch = kvfp_batch_new(&request);
    if (batch == NULL) {
        return NULL;
    }
    PyObject *result = load_batch(batch, &options);
    kvfp_batch_free(batch);
    kvfp_log_tell();
    return result;
}

static PyObject *space_save(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"keys", "source", "slots", "tokens", "first_token", "owner", NULL};
    kvfp_request request = {.op = KVF_OP_SAVE, .space = self};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOO:save", names, &request.keys, &request.memory,
                                     &request.slots, &request.tokens, &request.first_token, &request.owner)) {
        return NULL;
    }
    kvfp_batch *batch = kvfp_batch_new(&request);
    if (batch == NULL) {
        return NULL;
    }
    kvf_view *view = batch->view == NULL ? NULL : batch->view->it;
    size_t num_ok = 0;
    Py_BEGIN_ALLOW_THREADS num_ok = kvf_save(batch->space->it, batch->blocks, batch->num, view);
    Py_END_ALLOW_THREADS PyObject *result = kvfp_batch_result(batch, num_ok);
    kvfp_batch_free(batch);
    kvfp_log_tell();
    return result;
}

/* ---- what this process knows */
static PyObject *space_knows(PyObject *self, PyObject *from) {
    kvf_key key;
    kvfp_handle *space = kvfp_take_32(key.bytes, from, "key") ? enter(self) : NULL;
    if (space == NULL) {
        return NULL;
    }
    bool known = kvf_knows(space->it, &key) != 0;
    kvfp_leave(space);
    return PyBool_FromLong(known);
}

static PyObject *space_forget(PyObject *self, PyObject *keys) {
    lookup of;
    if (!take_lookup(&of, keys, false)) {
        return NULL;
    }
    kvfp_handle *space = enter(self);
    if (space != NULL) {
        kvf_forget(space->it, of.keys, of.num);
        kvfp_leave(space);
    }
    PyMem_Free(of.keys);
    return space == NULL ? NULL : kvfp_none();
}

/* ---- properties */
static PyObject *digest_value(const kvf_space *space) {
    kvf_digest digest;
    kvf_space_digest(space, &digest);
    return PyBytes_FromStringAndSize((const char *)digest.bytes, sizeof digest.bytes);
}

static PyObject *block_tokens_value(const kvf_space *space) {
    return PyLong_FromUnsignedLong(kvf_space_block_tokens(space));
}

static PyObject *fields_value(const kvf_space *space) {
    return kvfp_fields_dict(kvf_space_fields(space));
}

static PyObject *property(PyObject *self, void *read) {
    kvfp_handle *space = enter(self);
    if (space == NULL) {
        return NULL;
    }
    PyObject *value = (*(PyObject * (**)(const kvf_space *)) read)(space->it);
    kvfp_leave(space);
    return value;
}

/* Pointers to functions do not fit a void pointer in C: these do. */
static PyObject *(*read_digest)(const kvf_space *) = digest_value;
static PyObject *(*read_block_tokens)(const kvf_space *) = block_tokens_value;
static PyObject *(*read_fields)(const kvf_space *) = fields_value;

static PyMethodDef methods[] = {
    KVFP_COMMON_METHODS,
    {"chain", KVFP_KEYWORDS(space_chain), "chain($self, /, tokens, parent=None)\n--\n\n" KVFP_MANUAL_Space_chain},
    {"salt_key", space_salt_key, METH_VARARGS, "salt_key($self, parent, salt, /)\n--\n\n" KVFP_MANUAL_Space_salt_key},
    {"key_of", space_key_of, METH_O, "key_of($self, engine_hash, /)\n--\n\n" KVFP_MANUAL_Space_key_of},
    {"keys_of", KVFP_KEYWORDS(space_keys_of),
     "keys_of($self, /, engine_hashes, suffix=b\"\")\n--\n\n" KVFP_MANUAL_Space_keys_of},
    {"tail_key", KVFP_KEYWORDS(space_tail_key),
     "tail_key($self, /, last_block, tokens)\n--\n\n" KVFP_MANUAL_Space_tail_key},
    {"state_key", space_state_key, METH_O, "state_key($self, block, /)\n--\n\n" KVFP_MANUAL_Space_state_key},
    {"apart_key", KVFP_KEYWORDS(space_apart_key), "apart_key($self, /, key, how)\n--\n\n" KVFP_MANUAL_Space_apart_key},
    {"stored_key", space_stored_key, METH_O, "stored_key($self, key, /)\n--\n\n" KVFP_MANUAL_Space_stored_key},
    {"match", KVFP_KEYWORDS(space_match), "match($self, /, keys, timeout=None)\n--\n\n" KVFP_MANUAL_Space_match},
    {"find", KVFP_KEYWORDS(space_find), "find($self, /, keys, timeout=None)\n--\n\n" KVFP_MANUAL_Space_find},
    {"load", KVFP_KEYWORDS(space_load),
     "load($self, /, keys, into, *, slots=None, tokens=None, first_token=None, each=False, timeout=None, "
     "patience=None, owner=None)\n--\n\n" KVFP_MANUAL_Space_load},
    {"save", KVFP_KEYWORDS(space_save),
     "save($self, /, keys, source, *, slots=None, tokens=None, first_token=None, owner=None)\n--\n\n" KVFP_MANUAL_Space_save},
    {"knows", space_knows, METH_O, "knows($self, key, /)\n--\n\n" KVFP_MANUAL_Space_knows},
    {"forget", space_forget, METH_O, "forget($self, keys, /)\n--\n\n" KVFP_MANUAL_Space_forget},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef properties[] = {
    {"closed", kvfp_object_closed, NULL, "Whether it was closed, or belongs to the parent of this process.", NULL},
    {"store", kvfp_object_of, NULL, "The Store of the space.", NULL},
    {"digest", property, NULL, "32 bytes: the name of the space.", &read_digest},
    {"block_tokens", property, NULL, "Tokens of a block.", &read_block_tokens},
    {"fields", property, NULL, "All fields, with block_tokens.", &read_fields},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Space(store, fields, *, block_tokens=256, secret=None, previous_secret=None)\n--\n\n" KVFP_MANUAL_Space},
    {Py_tp_new, space_new},
    KVFP_COMMON_SLOTS,
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};
static PyType_Spec spec = {"kvferry.Space", sizeof(kvfp_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

bool kvfp_space_init(PyObject *module) {
    kvfp_SpaceType = kvfp_add_type(module, &spec);
    return kvfp_SpaceType != NULL;
}
