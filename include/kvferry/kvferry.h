/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry: prefill once, anywhere. This header includes all of the core. Engines add their own (kvferry/llama.h).
 *
 * The simple way, for an engine of your own. Open a store and a space once:
 *
 *   kvf_store_open(&store, &err, urls, num_urls, NULL);                  where blocks are stored
 *   kvf_space_open(&space, &err, store, fields, num_fields, &options);   what computes them: engine, model, KV format
 *
 * Then, for every prompt, turn its tokens into keys and make three calls:
 *
 *   num = kvf_chain(space, keys, cap, tokens, num_tokens);               one key for each whole block
 *   kvf_match(space, &run, found, keys, num, KVF_DEFAULT);               how many leading blocks are stored?
 *   loaded = kvf_load(space, blocks, run, NULL, KVF_DEFAULT);            read them into memory, verified
 *   ... compute the rest ...
 *   kvf_save(space, blocks + loaded, num - loaded, NULL);                hand the new ones to the writers
 *
 * None of the three fails because of the store: a store that is down, slow or corrupt is a miss.
 *
 * The headers, in reading order:
 *
 *   status.h   results, reasons and errors, and the conventions of all calls
 *   store.h    where blocks are stored: memory, a folder, Redis, or several of them as tiers
 *   space.h    what a key names: the identity of a model and its KV format; tokens to block keys
 *   block.h    match, load, save; then borrow, reserve, views, and the same calls without waiting
 *   plan.h     load or compute: how much of a stored prefix is worth loading
 *   earlier.h  why a prompt is not stored, explained from earlier prompts
 *   session.h  K and V by session id
 *   admin.h    administration: list, verify, clear, doctor
 *
 * kvferry/sized.h is for authors of engines in C only.
 */
#ifndef KVFERRY_H
#define KVFERRY_H
#include "admin.h"
#include "block.h"
#include "earlier.h"
#include "plan.h"
#include "session.h"
#include "space.h"
#include "status.h"
#include "store.h"
#endif
