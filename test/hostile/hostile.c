/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs the cases of check-hostile in child processes under a watchdog, and counts what went wrong.
 */
#include "hostile/hostile.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_S 60 /* of one case: a bound for what hangs, not for what is slow */
#define HUNG       70
#define SKIPPED    77

/* What child and parent share. */
typedef struct tally {
    uint64_t at; /* the case that runs */
    bool begun;  /* the child has got so far */
    uint64_t done, hits, forged, wrong, over, faults, crashed, hung;
    size_t most; /* bytes that the library held */
} tally;

static tally *t;
static const hostile_part *part;
static uint64_t seed;

static void say_where(FILE *out) {
    fprintf(out, "SEED=%llu PART=%s CASE=%llu: ", (unsigned long long)seed, part->name, (unsigned long long)t->at);
}

void hostile_hit(bool right, bool forged) {
    t->hits++;
    t->forged += forged && !right;
    if (!right && !forged) {
        t->wrong++;
        say_where(stdout);
        puts("a wrong hit");
        fflush(stdout);
    }
}

void hostile_memory(size_t held, size_t allowed) {
    t->most = held > t->most ? held : t->most;
    if (held > allowed) {
        t->over++;
        say_where(stdout);
        printf("%zu bytes of memory, %zu are allowed\n", held, allowed);
        fflush(stdout);
    }
}

void hostile_fault(const char *what) {
    t->faults++;
    say_where(stdout);
    puts(what);
    fflush(stdout);
}

/* ---- one process ---- */

static void bark(int sig) {
    static const char text[] = "the watchdog: it hangs\n";
    (void)sig;
    (void)!write(STDOUT_FILENO, text, sizeof text - 1);
    _exit(HUNG);
}

static void quiet(void *ctx, kvf_log_level level, const char *text) {
    (void)ctx;
    (void)level;
    (void)text;
}

static int run_child(uint64_t first, uint64_t end) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGALRM, bark);
    kvf_set_log(quiet, NULL, KVF_LOG_ERROR);
    alarm(PATIENCE_S);
    if (!part->begin()) {
        return SKIPPED;
    }
    t->begun = true;
    for (t->at = first; t->at < end; t->at++) {
        uint64_t random = seed * 1000003u + t->at;
        for (const char *c = part->name; *c != '\0'; c++) {
            random = random * 31 + (uint8_t)*c;
        }
        alarm(PATIENCE_S);
        part->run(&random);
        t->done++;
    }
    alarm(PATIENCE_S);
    part->end();
    return 0;
}

/* ---- all of them ---- */

static void note_end(int status) {
    bool hung = WIFEXITED(status) && WEXITSTATUS(status) == HUNG;
    t->hung += hung;
    t->crashed += !hung;
    say_where(stdout);
    if (WIFSIGNALED(status)) {
        printf("ended by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    } else {
        printf("exit status %d\n", WEXITSTATUS(status));
    }
    t->done++;
}

/* A child that ends too soon has done a case too much; the next one goes on behind it. */
static bool run_part(uint64_t first, uint64_t end) {
    while (first < end) {
        int status = 0;
        fflush(stdout);
        t->at = first;
        t->begun = false;
        pid_t pid = fork();
        if (pid == 0) {
            int rc = run_child(first, end);
            fflush(stdout);
            exit(rc); /* with the look for leaks */
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid) {
            perror("fork");
            exit(1);
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED) {
            printf("%-8s skipped\n", part->name);
            return false;
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
            break;
        }
        note_end(status);
        if (!t->begun) {
            return true;
        }
        first = t->at + 1;
    }
    return true;
}

static uint64_t number_of(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtoull(text, NULL, 10) : otherwise;
}

static bool is_wanted(const hostile_part *p) {
    const char *only = getenv("PART");
    return only == NULL || *only == '\0' || strcmp(only, p->name) == 0;
}

static void tell(const char *name) {
    printf(
        "%-8s %llu cases, %llu crashed, %llu hung, %llu wrong hits, %llu over their memory, %llu other faults; %llu hits, %llu "
        "of them forged, %zu KiB at most\n",
        name, (unsigned long long)t->done, (unsigned long long)t->crashed, (unsigned long long)t->hung,
        (unsigned long long)t->wrong, (unsigned long long)t->over, (unsigned long long)t->faults,
        (unsigned long long)t->hits, (unsigned long long)t->forged, t->most / 1024);
    fflush(stdout);
}

static uint64_t num_bad(void) {
    return t->crashed + t->hung + t->wrong + t->over + t->faults;
}

int hostile_main(const hostile_part *const *parts, size_t num, unsigned cases) {
    uint64_t all = number_of("CASES", cases), shares = 0, bad = 0;
    const char *only = getenv("CASE");
    t = mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (t == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    seed = number_of("SEED", 1);
    for (size_t i = 0; i < num; i++) {
        shares += is_wanted(parts[i]) ? parts[i]->share : 0;
    }
    for (size_t i = 0; i < num; i++) {
        part = parts[i];
        if (!is_wanted(part)) {
            continue;
        }
        *t = (tally){0};
        uint64_t one = number_of("CASE", 0), end = only != NULL ? one + 1 : (all * part->share + shares - 1) / shares;
        if (run_part(only != NULL ? one : 0, end)) {
            tell(part->name);
        }
        bad += num_bad();
    }
    return bad == 0 ? 0 : 1;
}
