/* SPDX-License-Identifier: Apache-2.0
 *
 * Batches: the blocks of a call, made of what the caller says, with everything that they use.
 */
#include <string.h>

#include "ext.h"

static bool given(PyObject *argument) {
    return argument != NULL && argument != Py_None;
}

static kvf_space *space_of(const kvfp_batch *batch) {
    return batch->space->it;
}

static bool take_keys(kvfp_batch *batch, PyObject *keys) {
    Py_buffer buffer;
    if (!kvfp_take_buffer(&buffer, keys, "keys", false)) {
        return false;
    }
    size_t num = (size_t)buffer.len / sizeof(kvf_key);
    if ((size_t)buffer.len % sizeof(kvf_key) != 0 || num > KVF_MAX_BLOCKS) {
        kvfp_limit("keys: 32 bytes for each of at most %u blocks, not %zd bytes", KVF_MAX_BLOCKS, buffer.len);
    } else if ((batch->blocks = PyMem_Calloc(num + 1, sizeof *batch->blocks)) == NULL) {
        PyErr_NoMemory();
    } else {
        batch->num = num;
        for (size_t i = 0; i < num; i++) {
            memcpy(&batch->blocks[i].key, (const uint8_t *)buffer.buf + i * sizeof(kvf_key), sizeof(kvf_key));
        }
    }
    PyBuffer_Release(&buffer);
    return batch->blocks != NULL;
}

/* ---- tokens */
/* The last block may have fewer tokens, or there may be more than its own: the rest of a prompt, which fills no block. */
static bool share_tokens(kvfp_batch *batch, size_t num_tokens) {
    size_t per_block = kvf_space_block_tokens(space_of(batch)), num_whole = num_tokens / per_block;
    if (num_whole != batch->num && (num_tokens + per_block - 1) / per_block != batch->num) {
        kvfp_limit("tokens: %zu tokens for %zu blocks of %zu", num_tokens, batch->num, per_block);
        return false;
    }
    for (size_t i = 0; i < batch->num; i++) {
        size_t left = num_tokens - i * per_block;
        batch->blocks[i].tokens = batch->tokens + i * per_block;
        batch->blocks[i].num_tokens = (uint32_t)(left < per_block ? left : per_block);
    }
    return true;
}

static bool number_blocks(kvfp_batch *batch, size_t first_token) {
    size_t per_block = kvf_space_block_tokens(space_of(batch));
    if (batch->num > 0 && first_token + (batch->num - 1) * per_block > UINT32_MAX) {
        kvfp_limit("first_token: the positions of %zu blocks from %zu on do not fit 32 bits", batch->num, first_token);
        return false;
    }
    for (size_t i = 0; i < batch->num; i++) {
        batch->blocks[i].first_token = (uint32_t)(first_token + i * per_block);
    }
    return true;
}

/* Positions count where there are tokens, or where the caller says where they begin. */
static bool take_tokens(kvfp_batch *batch, PyObject *tokens, PyObject *first_token) {
    size_t num_tokens = 0, first = 0;
    if (given(tokens) && (!kvfp_take_tokens(&batch->tokens, &num_tokens, tokens) || !share_tokens(batch, num_tokens))) {
        return false;
    }
    if (given(first_token) && !kvfp_take_count(&first, first_token, "first_token", 0, UINT32_MAX)) {
        return false;
    }
    return (!given(tokens) && !given(first_token)) || number_blocks(batch, first);
}

/* ---- memory */
static bool copy_slots(kvfp_batch *batch, const int64_t *slots, size_t num, size_t num_slots) {
    if (num != batch->num) {
        kvfp_limit("slots: one for each of the %zu keys, not %zu", batch->num, num);
        return false;
    }
    for (size_t i = 0; i < num; i++) {
        if (slots[i] < 0 || (uint64_t)slots[i] >= num_slots) {
            kvfp_limit("slots: number %zu is %lld, and the view has slots 0 to %zu", i, (long long)slots[i],
                       num_slots - 1);
            return false;
        }
        batch->blocks[i].slot = slots[i];
    }
    return true;
}

static bool take_slots(kvfp_batch *batch, PyObject *view, PyObject *from) {
    int64_t *slots = NULL;
    size_t num = 0;
    if (!given(from)) {
        PyErr_SetString(PyExc_TypeError, "slots: a View needs slots=, one for each key");
        return false;
    }
    if (!kvfp_take_slots(&slots, &num, from)) {
        return false;
    }
    batch->view = kvfp_enter_object(view, kvfp_ViewType, "View");
    bool taken = batch->view != NULL && copy_slots(batch, slots, num, kvfp_view_num_slots(batch->view));
    PyMem_Free(slots);
    return taken;
}

/* The parts of all blocks are in one array, which moves while it grows: blocks point into it at the end. */
static void point_blocks(kvfp_batch *batch) {
    struct iovec *at = batch->parts.iov;
    for (size_t i = 0; i < batch->num; i++) {
        batch->blocks[i].iov = at;
        at += batch->blocks[i].num_iov;
    }
}

static bool take_parts(kvfp_batch *batch, PyObject *blocks, bool writable) {
    for (size_t i = 0; i < batch->num; i++) {
        size_t before = batch->parts.num;
        PyObject *block = PyTuple_GetItem(blocks, (Py_ssize_t)i);
        if (!kvfp_parts_add(&batch->parts, block, "memory of block", (Py_ssize_t)i, writable)) {
            return false;
        }
        if (batch->parts.num == before || batch->parts.num - before > UINT32_MAX) {
            kvfp_limit("memory of block %zu: at least one part", i);
            return false;
        }
        batch->blocks[i].num_iov = (uint32_t)(batch->parts.num - before);
    }
    point_blocks(batch);
    return true;
}

static bool take_sequence(kvfp_batch *batch, PyObject *memory, bool writable) {
    PyObject *blocks = kvfp_take_items(memory, "memory", "a View, or a sequence with the memory of each block,");
    if (blocks == NULL) {
        return false;
    }
    bool taken = false;
    if ((size_t)PyTuple_Size(blocks) != batch->num) {
        kvfp_limit("memory: one item for each of the %zu keys, not %zd", batch->num, PyTuple_Size(blocks));
    } else {
        taken = take_parts(batch, blocks, writable);
    }
    Py_DECREF(blocks);
    return taken;
}

static bool take_memory(kvfp_batch *batch, const kvfp_request *request) {
    if (PyObject_TypeCheck(request->memory, kvfp_ViewType)) {
        return take_slots(batch, request->memory, request->slots);
    }
    if (given(request->slots)) {
        PyErr_SetString(PyExc_TypeError, "slots: only for a View");
        return false;
    }
    return take_sequence(batch, request->memory, request->op == KVF_OP_LOAD);
}

/* ---- batches */
static bool fill(kvfp_batch *batch, const kvfp_request *request) {
    batch->space = kvfp_enter_object(request->space, kvfp_SpaceType, "Space");
    if (batch->space == NULL || !take_keys(batch, request->keys) ||
        !take_tokens(batch, request->tokens, request->first_token)) {
        return false;
    }
    return request->memory == NULL || take_memory(batch, request);
}

kvfp_batch *kvfp_batch_new(const kvfp_request *request) {
    kvfp_batch *batch = PyMem_Calloc(1, sizeof *batch);
    if (batch == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    batch->op = request->op;
    batch->owner = request->owner;
    Py_XINCREF(batch->owner);
    if (!fill(batch, request)) {
        kvfp_batch_free(batch);
        return NULL;
    }
    return batch;
}

void kvfp_batch_free(kvfp_batch *batch) {
    kvfp_parts_cleanup(&batch->parts);
    PyMem_Free(batch->blocks);
    PyMem_Free(batch->tokens);
    PyMem_Free(batch->found);
    PyMem_Free(batch->arrivals.each);
    kvfp_leave(batch->view);
    kvfp_leave(batch->space);
    Py_XDECREF(batch->owner);
    PyMem_Free(batch);
}

/* ---- results */
/* A block that is not fine has a reason, except where the whole call was refused before it. */
static kvf_reason why_of(const kvf_block *block) {
    if (block->status == KVF_OK) {
        return KVF_WHY_NONE;
    }
    return block->why == KVF_WHY_NONE ? KVF_WHY_MISUSE : block->why;
}

PyObject *kvfp_batch_reasons(const kvfp_batch *batch) {
    PyObject *reasons = PyTuple_New((Py_ssize_t)batch->num);
    for (size_t i = 0; reasons != NULL && i < batch->num; i++) {
        PyTuple_SetItem(reasons, (Py_ssize_t)i, kvfp_reason(why_of(&batch->blocks[i])));
    }
    return reasons;
}

PyObject *kvfp_batch_result(const kvfp_batch *batch, size_t num_ok) {
    for (size_t i = 0; i < batch->num; i++) {
        if (batch->blocks[i].status == KVF_LIMIT) {
            return kvfp_limit("block %zu: its memory has more bytes or parts than a payload may have", i);
        }
    }
    return KVFP_VALUE(kvfp_Result, PyLong_FromSize_t(num_ok), kvfp_batch_reasons(batch));
}
