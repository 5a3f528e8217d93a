/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening a Redis store: what the operator must change is an error with a sentence; what passes by itself is not an
 * error. Also servers that are not Redis: one never answers, one speaks HTTP, one lies about lengths.
 */
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "redis/blocks/blocks.h"
#include "redis/cluster/talk.h"
#include "support/kit.h"
#include "support/server.h"
#include "support/tiers.h"

static kvft_server *server;
static kvf_error err;

/* KVF_CONFIG, with a sentence that has the word, and no password. */
static void refused(kvf_status status, const char *word) {
    assert_int_equal(status, KVF_CONFIG);
    assert_int_equal(err.status, KVF_CONFIG);
    if (strstr(err.what, word) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.what, word);
    }
    assert_null(strstr(err.what, "hunter2"));
}

static void opens(kvf_status status, kvfi_tier **tier) {
    if (status != KVF_OK) {
        fail_msg("%s", err.what);
    }
    (*tier)->ops->close(*tier);
}

/* ---- a server of our own making ---- */

typedef struct fake {
    char path[108];
    int fd;
    const char *answers[8]; /* one for each command that arrives; NULL: silence from then on */
    pthread_t thread;
    atomic_bool ending;
} fake;

/* The questions of a store that opens (admit.c) are all in one go. This server tells nothing of itself. */
static bool fake_admits(int fd, const char *asked) {
    static const char nothing[] = "-ERR\r\n";
    bool opens = strstr(asked, ":admission") != NULL;
    for (const char *c = asked; opens && (c = strchr(c, '*')) != NULL; c++) {
        (void)send(fd, nothing, sizeof nothing - 1, MSG_NOSIGNAL);
    }
    return opens;
}

/* Answers each command of a connection with the next answer. A command ends where no more bytes come for the moment. */
static void fake_serve(fake *f, int fd) {
    char buffer[4096];
    for (size_t i = 0; f->answers[i] != NULL && i < 8; i++) {
        ssize_t len = 0;
        do {
            len = read(fd, buffer, sizeof buffer - 1);
            if (len <= 0) {
                return;
            }
            buffer[len] = '\0';
        } while (fake_admits(fd, buffer));
        if (send(fd, f->answers[i], strlen(f->answers[i]), MSG_NOSIGNAL) < 0) {
            return;
        }
    }
    while (!f->ending && read(fd, buffer, sizeof buffer) > 0) {
    }
}

static void *fake_run(void *arg) {
    fake *f = arg;
    while (!f->ending) {
        int fd = accept(f->fd, NULL, NULL);
        if (fd >= 0) {
            struct timeval patience = {.tv_sec = 3};
            setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
            fake_serve(f, fd);
            close(fd);
        }
    }
    return NULL;
}

static void fake_start(fake *f) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(f->path, sizeof f->path, "%.80s/fake", server->dir);
    strcpy(address.sun_path, f->path);
    unlink(f->path);
    f->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(f->fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(f->fd, 8), 0);
    f->ending = false;
    assert_int_equal(pthread_create(&f->thread, NULL, fake_run, f), 0);
}

static void fake_stop(fake *f) {
    f->ending = true;
    shutdown(f->fd, SHUT_RDWR);
    pthread_join(f->thread, NULL);
    close(f->fd);
}

/* ---- the URL ---- */

static void bad_urls(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    refused(kvft_try_tier(&tier, &err, "redis://"), "host");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/abc"), "database");
    refused(kvft_try_tier(&tier, &err, "redis://localhost:99999"), "port");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?ttl=soon"), "ttl");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?conns=0"), "conns");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?conns=1000"), "conns");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?window=1"), "window");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?part=100"), "part");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?prefix=a*b"), "prefix");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?prefix="), "prefix");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?name=a%%20b"), "name");
    refused(kvft_try_tier(&tier, &err, "redis://localhost/0?color=red"), "color");
    refused(kvft_try_tier(&tier, &err, "redis+unix://"), "path");
    refused(kvft_try_tier(&tier, &err, "redis+unix://relative/path"), "path");
    refused(kvft_try_tier(&tier, &err, "redis+unix:///%0120d", 1), "107");
}

/* ---- who we are ---- */

static void credentials(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    assert_string_equal(kvft_server_say(server, "ACL SETUSER ann on >hunter2 ~* +@all"), "+OK");
    opens(kvft_try_tier(&tier, &err, "redis://ann:hunter2@127.0.0.1:%d", server->port), &tier);
    refused(kvft_try_tier(&tier, &err, "redis://ann:wrong@127.0.0.1:%d", server->port), "password");
    refused(kvft_try_tier(&tier, &err, "redis://nobody:hunter2@127.0.0.1:%d", server->port), "password");
    assert_string_equal(kvft_server_say(server, "CONFIG SET requirepass hunter2"), "+OK");
    refused(kvft_try_tier(&tier, &err, "redis://127.0.0.1:%d", server->port), "asks for a password");
    refused(kvft_try_tier(&tier, &err, "redis://127.0.0.1:%d/5", server->port), "asks for a password");
    refused(kvft_try_tier(&tier, &err, "redis://127.0.0.1:%d/0?name=", server->port), "asks for a password");
    refused(kvft_try_tier(&tier, &err, "redis://:wrong@127.0.0.1:%d", server->port), "password");
    kvf_status status = kvft_try_tier(&tier, &err, "redis://:hunter2@127.0.0.1:%d", server->port);
    assert_int_equal(status, KVF_OK);
    assert_int_equal(kvft_put(tier, 1, 1000), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 1000), KVF_WHY_NONE);
    assert_null(strstr(tier->url->text, "hunter2"));
    tier->ops->close(tier);
    opens(kvft_try_tier(&tier, &err, "redis+unix://:hunter2@%s", server->socket), &tier);
    kvft_server_restart(server); /* without requirepass */
    /* A password where none is wanted: Redis refuses that for the default user. */
    refused(kvft_try_tier(&tier, &err, "redis://:hunter2@127.0.0.1:%d", server->port), "password");
}

static void databases(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    opens(kvft_try_tier(&tier, &err, "redis://127.0.0.1:%d/15", server->port), &tier);
    opens(kvft_try_tier(&tier, &err, "redis+unix://%s?db=15", server->socket), &tier);
    refused(kvft_try_tier(&tier, &err, "redis://127.0.0.1:%d/16", server->port), "database 16");
    refused(kvft_try_tier(&tier, &err, "redis+unix://%s?db=99", server->socket), "database 99");
}

static void missing_rules(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    assert_string_equal(kvft_server_say(server, "ACL SETUSER bob on >pw ~kvf1:* -@all +get +set +getrange"), "+OK");
    refused(kvft_try_tier(&tier, &err, "redis://bob:pw@127.0.0.1:%d/2?name=", server->port), "+select");
    refused(kvft_try_tier(&tier, &err, "redis://bob:pw@127.0.0.1:%d/0?name=", server->port), "add +pexpire");
    assert_string_equal(kvft_server_say(server, "ACL SETUSER bob +pexpire -get"), "+OK");
    refused(kvft_try_tier(&tier, &err, "redis://bob:pw@127.0.0.1:%d/0?name=", server->port), "add +get to");
    assert_string_equal(kvft_server_say(server, "ACL SETUSER bob +get +unlink resetkeys ~other:*"), "+OK");
    refused(kvft_try_tier(&tier, &err, "redis://bob:pw@127.0.0.1:%d/0?name=", server->port), "add ~kvf1:*");
    opens(kvft_try_tier(&tier, &err, "redis://bob:pw@127.0.0.1:%d/0?name=&prefix=other", server->port), &tier);
    /* The least that the hot path needs. */
    assert_string_equal(
        kvft_server_say(server,
                        "ACL SETUSER bob reset on >pw ~kvf1:* -@all +ping +select +client|setname +get +getrange +set "
                        "+pexpire +unlink"),
        "+OK");
    kvf_status status = kvft_try_tier(&tier, &err, "redis://bob:pw@127.0.0.1:%d/0", server->port);
    assert_int_equal(status, KVF_OK);
    assert_int_equal(kvft_put(tier, 1, 5 << 20), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, 5 << 20), KVF_WHY_NONE);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_NONE);
    /* A session needs more, and says what. */
    char data[64] = {1};
    kvfi_part part = {.name = "keys", .data = {data, sizeof data}};
    refused(tier->ops->session_put(tier, &err, "s", &part, 1, NULL, 60, kvfi_deadline(5000000)),
            "add +type to its ACL");
    assert_string_equal(kvft_server_say(server, "ACL SETUSER bob +type"), "+OK");
    refused(tier->ops->session_put(tier, &err, "s", &part, 1, NULL, 60, kvfi_deadline(5000000)), "~* for sessions");
    tier->ops->close(tier);
}

static void client_name(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    kvfi_talk talk;
    kvfi_reply reply;
    char list[4096];
    assert_int_equal(kvft_try_tier(&tier, &err, "redis+unix://%s?name=engine-7", server->socket), KVF_OK);
    assert_int_equal(kvfi_talk_begin(&talk, kvfi_redis_of(tier), &err, 0, KVFI_LANE_LOOKUP, kvfi_deadline(5000000)),
                     KVF_OK);
    assert_int_equal(kvfi_talk_say(&talk, "CLIENT", "LIST", NULL), KVF_OK);
    assert_int_equal(kvfi_talk_hear(&talk, &reply), KVF_OK);
    snprintf(list, sizeof list, "%.*s", (int)reply.len, reply.text);
    assert_non_null(strstr(list, "name=engine-7"));
    kvfi_talk_end(&talk);
    tier->ops->close(tier);
}

/* ---- servers that are away: they open, and answer misses ---- */

static void unreachable(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    assert_int_equal(kvft_try_tier(&tier, &err, "redis://127.0.0.1:1"), KVF_OK);
    assert_int_equal(kvft_get(tier, 1, 100), KVF_WHY_BREAKER);
    assert_int_equal(kvft_put(tier, 1, 100), KVF_WHY_BREAKER);
    tier->ops->close(tier);
    assert_int_equal(kvft_try_tier(&tier, &err, "redis+unix:///nonexistent/socket"), KVF_OK);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_BREAKER);
    usleep(60000);
    assert_int_equal(kvft_peek(tier, 1), KVF_WHY_UNREACHABLE);
    tier->ops->close(tier);
    /* A name that nobody knows. */
    assert_int_equal(kvft_try_tier(&tier, &err, "redis://no-such-host.invalid:6379/0?connect_ms=300"), KVF_OK);
    assert_int_equal(tier->connects, 0);
    tier->ops->close(tier);
}

/* A server whose backlog is full, or that is stopped, or that never says a word. */
static void silence(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    fake f = {.answers = {NULL}};
    fake_start(&f);
    int64_t from = kvfi_sys->now_us();
    assert_int_equal(kvft_try_tier(&tier, &err, "redis+unix://%s?connect_ms=200&stall_ms=100", f.path), KVF_OK);
    assert_true(kvfi_sys->now_us() - from < KVFT_PATIENCE_MS * 1000);
    assert_int_equal(kvft_get(tier, 1, 100), KVF_WHY_BREAKER);
    usleep(60000);
    from = kvfi_sys->now_us();
    assert_int_equal(kvft_get(tier, 1, 100), KVF_WHY_STALLED);
    assert_true((kvfi_sys->now_us() - from) / 1000 >= 80);
    tier->ops->close(tier);
    fake_stop(&f);
}

static void nonsense(void **state) {
    (void)state;
    static const char *const babble[] = {"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
                                         "SSH-2.0-OpenSSH_9.2\r\n", "$5\r\nhello\r\n", ":1\r\n", "*0\r\n"};
    for (size_t i = 0; i < sizeof babble / sizeof *babble; i++) {
        kvfi_tier *tier = NULL;
        fake f = {.answers = {babble[i]}};
        fake_start(&f);
        refused(kvft_try_tier(&tier, &err, "redis+unix://%s", f.path), "not a Redis server");
        fake_stop(&f);
    }
}

/* A server that refuses by its own mood is not the operator's fault. */
static void refusals_that_pass(void **state) {
    (void)state;
    kvfi_tier *tier = NULL;
    fake f = {.answers = {"-ERR max number of clients reached\r\n"}};
    fake_start(&f);
    assert_int_equal(kvft_try_tier(&tier, &err, "redis+unix://%s", f.path), KVF_OK);
    tier->ops->close(tier);
    fake_stop(&f);
    fake denied = {.answers = {"-DENIED Redis is running in protected mode because protected mode is enabled\r\n"}};
    fake_start(&denied);
    refused(kvft_try_tier(&tier, &err, "redis+unix://%s", denied.path), "protected mode");
    fake_stop(&denied);
    fake loading = {.answers = {"-LOADING Redis is loading the dataset in memory\r\n+OK\r\n"}};
    fake_start(&loading);
    opens(kvft_try_tier(&tier, &err, "redis+unix://%s?name=", loading.path), &tier);
    fake_stop(&loading);
}

/* ---- a server that lies ---- */

/* What one lookup gets to hear, on the connection that the opening has left in the lane. */
static kvf_reason hear(const char *answer) {
    kvfi_tier *tier = NULL;
    fake f = {.answers = {"+OK\r\n+PONG\r\n", answer}};
    fake_start(&f);
    assert_int_equal(kvft_try_tier(&tier, &err, "redis+unix://%s?stall_ms=100", f.path), KVF_OK);
    kvf_reason why = kvft_peek(tier, 1);
    tier->ops->close(tier);
    fake_stop(&f);
    return why;
}

static void lies(void **state) {
    (void)state;
    assert_int_equal(hear("$0\r\n\r\n"), KVF_WHY_ABSENT);
    assert_int_equal(hear("$9223372036854775807\r\nabc"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear("$129\r\n"), KVF_WHY_STALLED);
    assert_int_equal(hear("$99999999999999999999\r\n"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear("*1000000\r\n"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear("*-5\r\n"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear("+OK\r\n"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear(":1\r\n"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear("$-1\r\n"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear("$3\r\nabcdef\r\n"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear("nonsense\r\n"), KVF_WHY_UNREACHABLE);
    assert_int_equal(hear("-ERR what\r\n"), KVF_WHY_SERVER);
}

/* The same for loads: a huge length in a header, before any byte of the body: refused at once, and no memory is asked
 * for. */
static void lies_about_lengths(void **state) {
    (void)state;
    static const char *const answers[] = {"$9223372036854775807\r\n", "$1000000000000\r\n", "*3\r\n", "$-7\r\n"};
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        kvfi_tier *tier = NULL;
        /* One connection at a time: the first hears OK for the introduction and is closed by its silence. */
        fake f = {.answers = {"+OK\r\n+PONG\r\n", answers[i], answers[i]}};
        fake_start(&f);
        kvfi_redis_conf conf = {.conns = 1,
                                .connect_ms = 2 * KVFT_PATIENCE_MS,
                                .stall_ms = 2 * KVFT_PATIENCE_MS,
                                .window = 1 << 20,
                                .part = 4 << 20,
                                .prefix = "kvf1",
                                .name = "x",
                                .text = "fake",
                                .server = {.path = f.path}};
        kvfi_redis redis = {.conf = conf};
        tier = &redis.base;
        kvfi_node_init(&redis.node, &redis.conf, &redis.conf.server, NULL, &redis.base.connects,
                       &redis.base.disconnects);
        kvft_value v;
        kvft_value_init(&v, 1, 100000);
        kvfi_feed feed = {
            .items = &v.item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(4000 * KVFT_PATIENCE_MS)};
        int64_t from = kvfi_sys->now_us();
        kvfi_redis_get(tier, &feed);
        assert_int_equal(v.item.status, KVF_MISS);
        assert_true(v.item.why == KVF_WHY_TRUNCATED || v.item.why == KVF_WHY_UNREACHABLE);
        assert_true(kvfi_sys->now_us() - from < 1000 * KVFT_PATIENCE_MS); /* before any deadline */
        assert_int_equal(tier->disconnects, 1);
        kvfi_node_cleanup(&redis.node);
        kvft_value_cleanup(&v);
        fake_stop(&f);
    }
}

static int set_up(void **state) {
    (void)state;
    server = kvft_server_start(NULL);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    kvft_server_stop(server);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_urls),           cmocka_unit_test(databases),          cmocka_unit_test(missing_rules),
        cmocka_unit_test(client_name),        cmocka_unit_test(unreachable),        cmocka_unit_test(silence),
        cmocka_unit_test(nonsense),           cmocka_unit_test(refusals_that_pass), cmocka_unit_test(lies),
        cmocka_unit_test(lies_about_lengths), cmocka_unit_test(credentials),
    };
    if (set_up(NULL) != 0 || server == NULL) {
        fprintf(stderr, "no redis-server is installed: not run\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, tear_down);
}
