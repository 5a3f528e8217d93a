/* SPDX-License-Identifier: Apache-2.0
 *
 * Compares what a server says of itself with the settings that a cache needs.
 */
#include "redis/advice/rules.h"

#include <stdio.h>

#include "redis/advice/mend.h"

#define MIN_PART     (((uint64_t)64 << 10) - 4096)
#define MIN_WINDOW   ((uint64_t)64 << 10)
#define MIN_BACKLOG  ((uint64_t)256 << 20)
#define SWAP_MATTERS ((uint64_t)64 << 20) /* a smaller server: its resident part says little */
#define WHAT_BYTES   400u

typedef struct look {
    const kvfi_facts *facts;
    const kvfi_redis_conf *conf;
    kvfi_verdict *verdict;
    char *what; /* out: what was found, if anything */
} look;

#define SAY(l, ...) snprintf((l)->what, WHAT_BYTES, __VA_ARGS__)

static double mib(uint64_t bytes) {
    return (double)bytes / (1 << 20);
}

/* ---- what the user may see ---- */

static kvf_severity shows_info(look *l) {
    SAY(l, "the server does not show its state: its settings are unknown and not checked");
    return l->facts->info ? KVF_FINE : KVF_WARNING;
}

static kvf_severity shows_config(look *l) {
    SAY(l, "the server does not show its settings: some checks are left out");
    return l->facts->config ? KVF_FINE : KVF_NOTE;
}

/* ---- which server, in which state ---- */

static kvf_severity is_new(look *l) {
    unsigned major = 0;
    SAY(l, "the server is Redis %s: not tested with kvferry", l->facts->version);
    return sscanf(l->facts->version, "%u", &major) == 1 && major < 6 ? KVF_WARNING : KVF_FINE;
}

static kvf_severity is_primary(look *l) {
    SAY(l, "the server is a replica: it takes no saves");
    l->verdict->elsewhere = strcmp(l->facts->role, "slave") == 0;
    return l->verdict->elsewhere ? KVF_FATAL : KVF_FINE;
}

static kvf_severity is_loaded(look *l) {
    SAY(l, "the server is loading its data from disk and answers nothing until it is done");
    return l->facts->loading == 1 ? KVF_FATAL : KVF_FINE;
}

static kvf_severity is_no_node(look *l) {
    SAY(l, "the server is a node of a Cluster: keys of other slots are refused");
    return strcmp(l->facts->mode, "cluster") == 0 && l->conf->kind != KVFI_REDIS_CLUSTER ? KVF_WARNING : KVF_FINE;
}

/* ---- memory: does it have a bound, and is there room? ---- */

static bool has_bound(const look *l) {
    return l->facts->maxmemory != 0; /* or that is unknown */
}

static uint64_t budget_of(const look *l) {
    return l->conf->budget > 0 ? l->conf->budget : KVFI_DEFAULT_BUDGET;
}

static kvf_severity is_bounded(look *l) {
    SAY(l,
        "the server's memory has no bound (maxmemory 0), so it never evicts. Nothing more is stored there once it "
        "holds %.0f MiB (budget=%s)",
        mib(budget_of(l)), l->conf->budget > 0 ? "" : " was not said: 1G");
    return has_bound(l) ? KVF_FINE : l->conf->budget > 0 ? KVF_NOTE : KVF_WARNING;
}

/* A server without eviction is asked from time to time how much it holds. The steps are small, since others may store
 * there too. */
static kvf_severity has_room(look *l) {
    uint64_t budget = budget_of(l);
    if (has_bound(l) || l->facts->used == KVFI_UNKNOWN) {
        return KVF_FINE;
    }
    if (l->facts->used >= budget) {
        SAY(l, "nothing more is stored: the server has no bound, holds %.1f MiB, and the budget is %.1f MiB",
            mib(l->facts->used), mib(budget));
        l->verdict->room = 0;
        return KVF_FATAL;
    }
    uint64_t left = budget - l->facts->used;
    uint64_t least = left < (1 << 20) ? left : 1 << 20;
    l->verdict->room = left / 8 > least ? left / 8 : least;
    return KVF_FINE;
}

/* Without a bound nothing is evicted by any policy: the rule above covers that. */
static kvf_severity forbidden(const look *l) {
    return has_bound(l) && !l->conf->allow_noeviction ? KVF_FATAL : KVF_WARNING;
}

static kvf_severity evicts(look *l) {
    SAY(l, "the server evicts nothing (noeviction): once it is full, every save fails%s",
        forbidden(l) == KVF_FATAL ? ". Nothing is stored there" : "");
    return has_bound(l) && strcmp(l->facts->policy, "noeviction") == 0 ? forbidden(l) : KVF_FINE;
}

static kvf_severity evicts_ours(look *l) {
    SAY(l, "the policy %s evicts only keys with a time to live, and ttl=0 gives them none%s", l->facts->policy,
        forbidden(l) == KVF_FATAL ? ". Nothing is stored there" : "");
    return strncmp(l->facts->policy, "volatile-", 9) == 0 && l->conf->ttl_s == 0 ? forbidden(l) : KVF_FINE;
}

static kvf_severity counts_reads(look *l) {
    SAY(l, "the policy %s does not count reads: the most used records are evicted like the rest", l->facts->policy);
    return strstr(l->facts->policy, "-lrm") != NULL ? KVF_WARNING : KVF_FINE;
}

static kvf_severity compares_enough(look *l) {
    SAY(l, "the server evicts the oldest of %llu candidates: with ten, more prefixes stay whole",
        (unsigned long long)l->facts->samples);
    return strstr(l->facts->policy, "-lru") != NULL && l->facts->samples < 10 ? KVF_NOTE : KVF_FINE;
}

static kvf_severity has_jemalloc(look *l) {
    SAY(l, "the server's allocator is %s, not jemalloc: memory may fragment", l->facts->allocator);
    return l->facts->allocator[0] != '\0' && strncmp(l->facts->allocator, "jemalloc", 8) != 0 ? KVF_NOTE : KVF_FINE;
}

/* Of a server on another host only the resident part is visible, and memory that was never touched is not resident
 * either. A value is charged a quarter more than it touches (docs/stores-redis.md), so half is significant. */
static kvf_severity is_in_memory(look *l) {
    const kvfi_facts *f = l->facts;
    if (f->swapped != KVFI_UNKNOWN) {
        SAY(l, "%.1f MiB of the server's memory are in swap: using them waits for the disk", mib(f->swapped));
        return f->swapped > 0 ? KVF_WARNING : KVF_FINE;
    }
    SAY(l, "of the server's %.0f MiB only %.0f are resident: it looks swapped out", mib(f->used), mib(f->resident));
    return f->used != KVFI_UNKNOWN && f->used >= SWAP_MATTERS && f->resident < f->used / 2 ? KVF_WARNING : KVF_FINE;
}

/* ---- limits that we can keep to by putting less on the server at once ---- */

typedef uint64_t cost_fn(const kvfi_fit *);

/* The part of a value that may lie in the server's buffers is charged up to a quarter more, separately for each
 * client. */
static uint64_t charged(uint64_t bytes) {
    return bytes / 4 * 5 + (64 << 10);
}

/* Replies to one loading connection (load.c): within the window, or one part after the tail of another. A partly sent
 * reply is still charged as a whole: it lies in one block, which is freed with its last byte (redis/src/networking.c,
 * _writeToClient). */
static uint64_t answers_cost(const kvfi_fit *fit) {
    return charged(fit->part + (fit->part > fit->window ? fit->part : fit->window));
}

/* A saving connection has one part in progress, and the server makes room for another (redis#11830). */
static uint64_t clients_cost(const kvfi_fit *fit) {
    return fit->conns * answers_cost(fit) + fit->save_conns * charged(2 * fit->part);
}

static uint64_t memory_cost(const kvfi_fit *fit) {
    return 32 * fit->part * fit->conns;
}

static uint64_t part_cost(const kvfi_fit *fit) {
    return fit->part;
}

/* The next shorter part that fills a size class of jemalloc. */
static uint64_t shorter(uint64_t part) {
    uint64_t best = part;
    for (uint64_t size = MIN_PART; size < part; size = 2 * (size + 4096) - 4096) {
        best = size;
    }
    return best;
}

/* One step down: fewer connections, a narrower window, shorter parts, whichever helps first. */
static bool step(kvfi_fit *fit, cost_fn *cost) {
    kvfi_fit less[3] = {*fit, *fit, *fit};
    less[0].conns -= fit->conns > 1;
    if (fit->save_conns > less[0].conns) {
        less[0].save_conns = less[0].conns;
    }
    less[1].window = fit->window / 2 > MIN_WINDOW ? fit->window / 2 : MIN_WINDOW;
    less[2].part = shorter(fit->part);
    for (size_t i = 0; i < 3; i++) {
        if (cost(&less[i]) < cost(fit)) {
            *fit = less[i];
            return true;
        }
    }
    return false;
}

/* Stays within the bound. Appends the result to the finding. */
static kvf_severity keep_to(look *l, uint64_t bound, cost_fn *cost) {
    kvfi_fit fit = l->verdict->fit;
    while (cost(&fit) > bound) {
        if (!step(&fit, cost)) {
            return KVF_FATAL;
        }
    }
    bool same = memcmp(&fit, &l->verdict->fit, sizeof fit) == 0;
    size_t len = strlen(l->what);
    l->verdict->fit = fit;
    if (same) {
        return KVF_WARNING;
    }
    snprintf(l->what + len, WHAT_BYTES - len, ". The store stays within it by conns=%u window=%llu part=%llu",
             fit.conns, (unsigned long long)fit.window, (unsigned long long)fit.part);
    return KVF_WARNING;
}

static bool is_limit(uint64_t number) {
    return number != KVFI_UNKNOWN && number > 0;
}

static kvf_severity takes_parts(look *l) {
    uint64_t max = l->facts->max_bulk;
    if (!is_limit(max) || part_cost(&l->verdict->fit) <= max) {
        return KVF_FINE;
    }
    SAY(l, "the server takes values up to %llu bytes; part= is %llu", (unsigned long long)max,
        (unsigned long long)l->conf->part);
    return keep_to(l, max, part_cost);
}

static kvf_severity lets_answers_wait(look *l) {
    uint64_t max = l->facts->output_limit;
    uint64_t cost = answers_cost(&l->verdict->fit);
    if (!is_limit(max) || cost <= max) {
        return KVF_FINE;
    }
    SAY(l, "the server cuts a client off at %.1f MiB of answers; a load may have %.1f MiB on the way", mib(max),
        mib(cost));
    return keep_to(l, max, answers_cost);
}

/* Other engines need their share, too: four times as much is fine. */
static kvf_severity lets_clients_have_buffers(look *l) {
    uint64_t max = l->facts->clients_limit;
    uint64_t cost = clients_cost(&l->verdict->fit);
    if (!is_limit(max) || 4 * cost <= max) {
        return KVF_FINE;
    }
    SAY(l, "all clients together get %.1f MiB of buffers; loads and saves of this store may need %.1f MiB", mib(max),
        mib(cost));
    return keep_to(l, max, clients_cost);
}

static kvf_severity has_memory(look *l) {
    uint64_t max = l->facts->maxmemory;
    uint64_t cost = memory_cost(&l->verdict->fit);
    if (!is_limit(max) || cost <= max) {
        return KVF_FINE;
    }
    SAY(l,
        "maxmemory is %.1f MiB: buffers of large values alone can reach that, and then the server refuses or evicts "
        "(redis#11830)",
        mib(max));
    return keep_to(l, max, memory_cost);
}

/* ---- disk and replicas ---- */

static kvf_severity takes_writes_without_snapshot(look *l) {
    bool failed = strcmp(l->facts->bgsave, "err") == 0;
    bool stops = l->facts->config && l->facts->save[0] != '\0' && strcmp(l->facts->stop_writes, "no") != 0;
    SAY(l, "the last snapshot failed, so the server %s writes (MISCONF)", stops ? "refuses" : "may refuse");
    return !failed || (l->facts->config && !stops) ? KVF_FINE : stops ? KVF_FATAL : KVF_WARNING;
}

static kvf_severity takes_writes_without_log(look *l) {
    SAY(l, "the server can't write its log (appendonly), so it refuses writes (MISCONF)");
    return l->facts->aof == 1 && strcmp(l->facts->aof_write, "err") == 0 ? KVF_FATAL : KVF_FINE;
}

static kvf_severity makes_no_snapshots(look *l) {
    SAY(l, "the server writes snapshots (save \"%s\"): a fork and its copies for data that can be computed again",
        l->facts->save);
    return l->facts->save[0] != '\0' ? KVF_WARNING : KVF_FINE;
}

static kvf_severity keeps_no_log(look *l) {
    SAY(l, "the server logs every value to disk (appendonly)");
    return l->facts->aof == 1 ? KVF_WARNING : KVF_FINE;
}

static kvf_severity feeds_no_replicas(look *l) {
    const kvfi_facts *f = l->facts;
    SAY(l, "%llu replicas with a backlog of %.1f MiB: a few seconds of saves start a full resynchronisation",
        (unsigned long long)f->replicas, mib(f->backlog));
    return f->replicas > 0 && f->replicas != KVFI_UNKNOWN && f->backlog < MIN_BACKLOG ? KVF_WARNING : KVF_FINE;
}

static kvf_severity has_threads(look *l) {
    SAY(l, "one thread serves all connections (io-threads 1)");
    return l->facts->io_threads == 1 && l->conf->server.path == NULL ? KVF_NOTE : KVF_FINE;
}

/* ---- the table ---- */

#define REPLICA_MEND                                                                                   \
    "no replicas for a cache, or {repl-backlog-size 512mb} and {client-output-buffer-limit \"replica " \
    "2gb 1gb 60\"}"
#define EVICT_MEND                                                                                              \
    "{maxmemory-policy allkeys-lru} (volatile-lru when the server holds other data); or allow_noeviction=true " \
    "in the URL"
#define BOUND_MEND \
    "{maxmemory 4gb} (or what its host can spare, at most 80 % of its RAM) and {maxmemory-policy allkeys-lru}"

typedef enum source { INFO, CONFIG, ANY } source;

/* A finding that is KVF_FATAL forbids saves, with that reason. */
static const struct rule {
    const char *code;
    source from; /* not checked if that is not shown */
    kvf_severity (*holds)(look *);
    kvf_reason why;
    const char *mend;
} rules[] = {
    {"no-info", ANY, shows_info, KVF_WHY_NONE, "[ACL SETUSER @ +info]"},
    {"no-config", ANY, shows_config, KVF_WHY_NONE, "[ACL SETUSER @ '+config|get']"},
    {"version", INFO, is_new, KVF_WHY_NONE, "use Redis 6 or later, or Valkey"},
    {"replica", INFO, is_primary, KVF_WHY_SETTINGS, "name the primary in the URL"},
    {"loading", INFO, is_loaded, KVF_WHY_SETTINGS, "wait until it is done"},
    {"cluster", INFO, is_no_node, KVF_WHY_NONE, "name the nodes as redis+cluster://, or use a single server"},
    {"maxmemory", INFO, is_bounded, KVF_WHY_NONE, BOUND_MEND ", and both in redis.conf; or budget= in the URL"},
    {"budget", INFO, has_room, KVF_WHY_FULL, BOUND_MEND "; or a larger budget= in the URL"},
    {"noeviction", INFO, evicts, KVF_WHY_SETTINGS, EVICT_MEND},
    {"volatile-without-ttl", INFO, evicts_ours, KVF_WHY_SETTINGS,
     "remove ttl=0 from the URL, or {maxmemory-policy allkeys-lru}; or allow_noeviction=true in the URL"},
    {"lrm", INFO, counts_reads, KVF_WHY_NONE, "{maxmemory-policy allkeys-lru}"},
    {"samples", CONFIG, compares_enough, KVF_WHY_NONE, "{maxmemory-samples 10}"},
    {"proto-max-bulk-len", CONFIG, takes_parts, KVF_WHY_SETTINGS,
     "{proto-max-bulk-len 512mb}, or a smaller part= in the URL"},
    {"output-buffer-limit", CONFIG, lets_answers_wait, KVF_WHY_SETTINGS,
     "{client-output-buffer-limit \"normal 0 0 0\"}"},
    {"maxmemory-clients", CONFIG, lets_clients_have_buffers, KVF_WHY_SETTINGS, "{maxmemory-clients 0}"},
    {"maxmemory-small", INFO, has_memory, KVF_WHY_SETTINGS, "raise maxmemory, or lower part= and conns= in the URL"},
    {"bgsave-failed", INFO, takes_writes_without_snapshot, KVF_WHY_SETTINGS,
     "{save \"\"} and {stop-writes-on-bgsave-error no}"},
    {"aof-failed", INFO, takes_writes_without_log, KVF_WHY_SETTINGS, "{appendonly no}, or make room on its disk"},
    {"snapshots", CONFIG, makes_no_snapshots, KVF_WHY_NONE, "{save \"\"}"},
    {"aof", INFO, keeps_no_log, KVF_WHY_NONE, "{appendonly no}"},
    {"replica-backlog", INFO, feeds_no_replicas, KVF_WHY_NONE, REPLICA_MEND},
    {"swap", INFO, is_in_memory, KVF_WHY_NONE,
     "lower maxmemory, or keep the server from being swapped out (swapoff -a)"},
    {"io-threads", CONFIG, has_threads, KVF_WHY_NONE, "in redis.conf: io-threads 4, on a host with cores to spare"},
    {"allocator", INFO, has_jemalloc, KVF_WHY_NONE, ""},
};

static uint64_t at_most(uint64_t value, uint64_t bound) {
    return value < bound ? value : bound;
}

/* The longest value that is saved whole, with one under way on each connection; see charged above. */
static uint64_t longest_value(const kvfi_facts *facts, const kvfi_fit *fit) {
    uint64_t longest = KVFI_MAX_WHOLE;
    if (is_limit(facts->max_bulk)) {
        longest = at_most(longest, facts->max_bulk);
    }
    if (is_limit(facts->output_limit)) {
        longest = at_most(longest, facts->output_limit / 5 * 2);
    }
    if (is_limit(facts->clients_limit)) {
        longest = at_most(longest, facts->clients_limit / (fit->conns + fit->save_conns) / 5 * 2);
    }
    return longest;
}

void kvfi_rules_judge(kvfi_verdict *out, const kvfi_facts *facts, const kvfi_redis_conf *conf, const kvfi_endpoint *at,
                      kvf_finding_fn found, void *ctx) {
    char what[WHAT_BYTES], mend[KVFI_MEND_BYTES];
    look l = {.facts = facts, .conf = conf, .verdict = out, .what = what};
    *out = (kvfi_verdict){.code = "", .room = KVFI_UNKNOWN};
    out->most = facts->maxmemory != KVFI_UNKNOWN ? facts->maxmemory : 0;
    out->fit = (kvfi_fit){conf->part, conf->window, conf->conns, conf->save_conns};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const struct rule *r = &rules[i];
        if ((r->from == INFO && !facts->info) || (r->from == CONFIG && !facts->config)) {
            continue;
        }
        kvf_severity severity = r->holds(&l);
        if (severity == KVF_FATAL && out->saves == KVF_WHY_NONE) {
            out->saves = r->why;
            out->code = r->code;
        }
        if (severity != KVF_FINE && found != NULL) {
            kvfi_mend_write(mend, r->mend, conf, at, facts->config);
            kvf_finding finding = {.severity = severity, .code = r->code, .what = what, .mend = mend};
            found(ctx, &finding);
        }
    }
    out->longest = longest_value(facts, &out->fit);
}
