/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks what a sequence still holds of an earlier prefill. The program may have changed it since: other text, a
 * context shift, dropped cells. No getter tells, so the KV of some tokens is compared. In all layers but the first, a
 * token's KV depends on every token before it, so a change shows in all that follow.
 */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "llama/follow/follow.h"

#define MAX_WITNESSES 16u

/* The hash of the KV of up to MAX_WITNESSES tokens, evenly spread over the first `num` (whole blocks): always the last
 * of them. */
static bool take_witness(const kvf_llama *kv, llama_seq_id seq, size_t num, uint8_t out[KVFL_WITNESS_BYTES]) {
    size_t blocks = num / kv->block_tokens, apart = (blocks + MAX_WITNESSES - 1) / MAX_WITNESSES, count = 0;
    for (size_t left = blocks; left > 0; left = left > apart ? left - apart : 0) {
        llama_pos at = (llama_pos)(left * kv->block_tokens) - 1;
        llama_memory_seq_cp(kv->mem, seq, kv->scratch, at, at + 1);
        count++;
    }
    size_t bytes = count > 0 ? llama_state_seq_get_size(kv->ctx, kv->scratch) : 0;
    uint8_t *blob = bytes > 0 ? malloc(bytes) : NULL;
    bool ok = blob != NULL && llama_state_seq_get_data(kv->ctx, blob, bytes, kv->scratch) == bytes;
    llama_memory_seq_rm(kv->mem, kv->scratch, -1, -1);
    if (ok) {
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits(blob, bytes));
        memcpy(out, canonical.digest, KVFL_WITNESS_BYTES);
    }
    free(blob);
    return ok;
}

static bool is_intact(const kvf_llama *kv, llama_seq_id seq, const kvfl_resident *resident) {
    uint8_t witness[KVFL_WITNESS_BYTES];
    return llama_memory_seq_pos_min(kv->mem, seq) == 0 && take_witness(kv, seq, resident->num, witness) &&
           memcmp(witness, resident->witness, sizeof witness) == 0;
}

size_t kvfl_keep_resident(kvf_llama *kv, llama_seq_id seq, const llama_token *tokens, size_t cut) {
    kvfl_resident *resident = &kv->follow->residents[seq];
    size_t same = 0; /* remains so for models with states, which can't go back */
    bool ours = resident->identity == kv->identity && kv->identity != 0;
    while (ours && same < resident->num && same < cut && resident->tokens[same] == tokens[same]) {
        same++;
    }
    same = same / kv->block_tokens * kv->block_tokens;
    /* All of it is checked, even what this prompt does not use: its end tells about its beginning. */
    bool kept = same > 0 && is_intact(kv, seq, resident) && llama_memory_seq_rm(kv->mem, seq, (llama_pos)same, -1);
    resident->num = 0; /* until this prefill has succeeded */
    if (!kept) {
        llama_memory_seq_rm(kv->mem, seq, -1, -1);
        return 0;
    }
    return same;
}

void kvfl_note_resident(kvf_llama *kv, llama_seq_id seq, const llama_token *tokens, size_t cut) {
    kvfl_resident *resident = &kv->follow->residents[seq];
    if (resident->tokens == NULL) {
        resident->tokens = calloc(kv->n_ctx, sizeof *resident->tokens);
    }
    if (resident->tokens != NULL && cut > 0 && !kvfl_has_states(kv) && take_witness(kv, seq, cut, resident->witness)) {
        memcpy(resident->tokens, tokens, cut * sizeof *tokens);
        resident->num = cut;
        resident->identity = kv->identity;
    }
}
