/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry: prefill once, anywhere. This header includes all of the core; engines add their own (kvferry/llama.h).
 *
 *   status.h   results, reasons, errors, and the conventions that hold everywhere
 *   store.h    where blocks live: memory, a folder, Redis, or several of them as tiers
 *   space.h    what a key names: identity of a model and its KV format; token ids to block keys
 *   block.h    match, load, save, borrow; blocking, or with a completion queue
 *   plan.h     load or compute: how much of a stored prefix is worth loading
 *   earlier.h  why a prompt is not in the store, told from earlier prompts
 *   session.h  K and V by session id
 *   admin.h    list, verify, clear, doctor
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
