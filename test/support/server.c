/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts and stops a redis-server for a test.
 */
#include "support/server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/kit.h"

#define MAX_ARGS  64
#define ACL_LOGIN KVFT_ACL_USER ":" KVFT_ACL_PASSWORD "@"

static bool with_acl;

void kvft_server_use_acl(bool yes) {
    with_acl = yes;
}

static const kvft_certs *tls_certs;
static char tls_cert[128];

void kvft_server_use_tls(const kvft_certs *certs, const char *cert) {
    tls_certs = certs;
    snprintf(tls_cert, sizeof tls_cert, "%s", certs != NULL ? cert : "");
}

#define START_MS 15000

static void die(const char *what) {
    fprintf(stderr, "redis-server for the test: %s\n", what);
    abort();
}

static void sleep_ms(unsigned ms) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

/* ---- the binary ---- */

static const char *binary(void) {
    const char *name = getenv("KVFT_SERVER");
    return name != NULL && name[0] != '\0' ? name : "redis-server";
}

static bool is_installed(const char *name) {
    char path[4096];
    if (strchr(name, '/') != NULL) {
        return access(name, X_OK) == 0;
    }
    const char *dirs = getenv("PATH");
    for (dirs = dirs == NULL ? "" : dirs; dirs[0] != '\0';) {
        size_t len = strcspn(dirs, ":");
        snprintf(path, sizeof path, "%.*s/%s", (int)len, dirs, name);
        if (access(path, X_OK) == 0) {
            return true;
        }
        dirs += len + (dirs[len] == ':');
    }
    return false;
}

/* ---- talking to it ---- */

static int dial(const kvft_server *server) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = 10};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || strlen(server->socket) >= sizeof address.sun_path) {
        die("no socket");
    }
    strcpy(address.sun_path, server->socket);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void send_all(int fd, const char *text, size_t len) {
    while (len > 0) {
        ssize_t n = send(fd, text, len, MSG_NOSIGNAL);
        if (n <= 0 && errno != EINTR) {
            return;
        }
        if (n > 0) {
            text += n;
            len -= (size_t)n;
        }
    }
}

/* The first line of the reply to an inline command; "" without one. */
static void say(const kvft_server *server, char *out, size_t cap, const char *command) {
    size_t len = 0;
    out[0] = '\0';
    int fd = dial(server);
    if (fd < 0) {
        return;
    }
    send_all(fd, command, strlen(command));
    send_all(fd, "\r\n", 2);
    while (len + 1 < cap && read(fd, out + len, 1) == 1 && out[len] != '\n') {
        len += out[len] != '\r';
    }
    out[len] = '\0';
    close(fd);
}

const char *kvft_server_say(kvft_server *server, const char *command) {
    static char line[4096];
    say(server, line, sizeof line, command);
    return line;
}

/* A line of what comes, without its end; returns its length. */
static size_t read_line(FILE *in, char *line, size_t cap) {
    size_t len = 0;
    for (int c = fgetc(in); c != EOF && c != '\n'; c = fgetc(in)) {
        if (c != '\r' && len + 1 < cap) {
            line[len++] = (char)c;
        }
    }
    line[len] = '\0';
    return len;
}

/* One reply, however deep, as text. */
static void read_reply(FILE *in, FILE *out, bool nested) {
    char line[4096];
    if (read_line(in, line, sizeof line) == 0) {
        return;
    }
    long num = strtol(line + 1, NULL, 10);
    if (line[0] == '*') {
        for (long i = 0; i < num; i++) {
            read_reply(in, out, true);
        }
        return;
    }
    if (line[0] != '$') {
        fputs(line, out);
    }
    for (long i = 0; line[0] == '$' && i < num + 2; i++) {
        int c = fgetc(in);
        if (i < num && c != EOF) {
            fputc(c, out);
        }
    }
    if (nested) {
        fputc('\n', out);
    }
}

char *kvft_server_ask(kvft_server *server, const char *command) {
    char *text = NULL;
    size_t len = 0;
    FILE *out = open_memstream(&text, &len);
    int fd = dial(server);
    FILE *in = fd >= 0 ? fdopen(fd, "r") : NULL;
    if (out == NULL) {
        die("no memory");
    }
    if (in != NULL) {
        send_all(fd, command, strlen(command));
        send_all(fd, "\r\n", 2);
        read_reply(in, out, false);
        fclose(in);
    }
    fclose(out);
    return text;
}

/* ---- starting and ending ---- */

static bool is_free(int port) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bool yes = fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return yes;
}

/* The tests of one run go side by side, so each process has a block of ports that no other one tries. It is claimed by
 * a name among the abstract sockets, which the kernel drops when the process ends, however it ends. The blocks lie in
 * 10000 to 19999, so that no port is the Cluster bus of another one, 10000 above, and none is given out by connect().
 */
#define FIRST_PORT  10000
#define BLOCK_PORTS 50
#define NUM_BLOCKS  200

static int claim_block(void) {
    unsigned first = (unsigned)getpid() * 7919u;
    for (unsigned i = 0; i < NUM_BLOCKS; i++) {
        unsigned block = (first + i) % NUM_BLOCKS;
        struct sockaddr_un name = {.sun_family = AF_UNIX};
        int len = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "kvferry-test-ports-%u", block);
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); /* open as long as the process */
        if (fd >= 0 && bind(fd, (struct sockaddr *)&name,
                            (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1) + (socklen_t)len) == 0) {
            return FIRST_PORT + (int)block * BLOCK_PORTS;
        }
        close(fd);
    }
    die("all blocks of ports are taken: do other tests of kvferry hang?");
    return 0;
}

/* A port of this process's block that was free a moment ago, and so was the one of its Cluster bus. */
static int free_port(void) {
    static int first, used;
    static pid_t owner;
    if (owner != getpid()) { /* a child shares no block with its parent */
        owner = getpid();
        first = claim_block();
    }
    for (int tries = 0; tries < BLOCK_PORTS; tries++) {
        int port = first + used++ % BLOCK_PORTS;
        if (is_free(port) && is_free(port + 10000)) {
            return port;
        }
    }
    die("no free port");
    return 0;
}

static void run_server(const kvft_server *server) {
    char port[16], log[192];
    const char *argv[MAX_ARGS];
    int n = 0;
    snprintf(port, sizeof port, "%d", server->port);
    snprintf(log, sizeof log, "%s/log", server->dir);
    const char *const own[] = {binary(),
                               "--port",
                               port,
                               "--unixsocket",
                               server->socket,
                               "--dir",
                               server->dir,
                               "--logfile",
                               log,
                               "--bind",
                               "127.0.0.1",
                               "-::1", /* so far for sentinels too */
                               "--save",
                               "",
                               "--appendonly",
                               "no",
                               "--enable-debug-command",
                               "local",
                               "--daemonize",
                               "no",
                               "--maxmemory-policy",
                               "allkeys-lru"};
    char file[192];
    snprintf(file, sizeof file, "%s/conf", server->dir);
    argv[n++] = own[0];
    if (server->conf) {
        argv[n++] = file;
    }
    for (size_t i = 1; i < (server->conf ? 12 : sizeof own / sizeof *own); i++) {
        argv[n++] = own[i];
    }
    const char *const tls[] = {"--port",
                               "0",
                               "--tls-port",
                               port,
                               "--tls-cert-file",
                               server->cert,
                               "--tls-key-file",
                               server->cert,
                               "--tls-ca-cert-file",
                               server->ca,
                               "--tls-auth-clients",
                               "no",
                               "--tls-replication",
                               "yes",
                               "--tls-cluster",
                               "yes"};
    size_t num_tls = server->cert[0] == '\0' ? 0 : sizeof tls / sizeof *tls - (server->conf ? 2 : 0);
    for (size_t i = 0; i < num_tls; i++) {
        argv[n++] = tls[i];
    }
    for (size_t i = 0; server->args != NULL && server->args[i] != NULL; i++) {
        if (n == MAX_ARGS - 1) {
            die("too many arguments");
        }
        argv[n++] = server->args[i];
    }
    argv[n] = NULL;
    if (server->clock != NULL) {
        setenv("LD_PRELOAD", getenv("KVFT_CLOCK_SHIM"), 1);
        setenv("KVFT_CLOCK", server->clock, 1);
    }
    signal(SIGXFSZ, SIG_IGN); /* a limit of its files is an error for it, as a full disk is, and not its death */
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that crashes leaves no server behind */
    execvp(argv[0], (char *const *)(uintptr_t)argv);
    _exit(127);
}

/* It answers, be it with an error: it may ask for a password, or load its data. */
static bool answers(const kvft_server *server) {
    char line[256];
    say(server, line, sizeof line, "PING");
    return line[0] == '+' || strncmp(line, "-NOAUTH", 7) == 0;
}

/* The server's log on stderr; whether it says that somebody else has its port. */
static bool show_log(const kvft_server *server) {
    char line[512];
    bool taken = false;
    snprintf(line, sizeof line, "%s/log", server->dir);
    FILE *log = fopen(line, "r");
    fprintf(stderr, "%s did not come up; its log:\n", binary());
    while (log != NULL && fgets(line, sizeof line, log) != NULL) {
        taken |= strstr(line, "in use") != NULL;
        fputs(line, stderr);
    }
    if (log != NULL) {
        fclose(log);
    }
    return taken;
}

/* False when the server ended at once. */
static bool try_spawn(kvft_server *server) {
    unlink(server->socket);
    server->pid = fork();
    if (server->pid < 0) {
        die("fork failed");
    }
    if (server->pid == 0) {
        run_server(server);
    }
    for (int waited = 0; !answers(server); waited += 5) {
        if (waitpid(server->pid, NULL, WNOHANG) != 0) {
            server->pid = 0;
            return false;
        }
        if (waited > START_MS) {
            show_log(server);
            die("it does not answer");
        }
        sleep_ms(5);
    }
    return true;
}

static void set_port(kvft_server *server) {
    server->port = free_port();
    snprintf(server->tcp_url, sizeof server->tcp_url, "redis%s://%s127.0.0.1:%d", server->cert[0] != '\0' ? "s" : "",
             server->acl ? ACL_LOGIN : "", server->port);
}

/* `fresh`: nobody knows its port yet, so it may have another one where a foreign program was quicker. */
static void spawn(kvft_server *server, bool fresh) {
    for (int tries = 1; !try_spawn(server); tries++) {
        if (!show_log(server) || !fresh || tries == 5) {
            die("it did not come up");
        }
        set_port(server);
    }
    if (server->acl) {
        char command[512], line[256];
        snprintf(command, sizeof command, "ACL SETUSER " KVFT_ACL_USER " reset on >" KVFT_ACL_PASSWORD " %s",
                 server->conf ? KVFT_SENTINEL_RULES : KVFT_ACL_RULES);
        say(server, line, sizeof line, command);
        if (line[0] != '+') {
            die(line);
        }
    }
}

static kvft_server *prepare(const char *const *args, bool conf, const char *clock) {
    if (!is_installed(binary())) {
        return NULL;
    }
    kvft_server *server = calloc(1, sizeof *server);
    if (server == NULL) {
        die("no memory");
    }
    snprintf(server->dir, sizeof server->dir, "%s/kvft-XXXXXX", kvft_temp_root());
    if (mkdtemp(server->dir) == NULL) {
        die("no temporary folder");
    }
    server->args = args;
    server->clock = clock;
    snprintf(server->socket, sizeof server->socket, "%.100s/sock", server->dir);
    server->acl = with_acl;
    snprintf(server->unix_url, sizeof server->unix_url, "redis+unix://%s%s", with_acl ? ACL_LOGIN : "", server->socket);
    snprintf(server->cert, sizeof server->cert, "%s", tls_cert);
    snprintf(server->ca, sizeof server->ca, "%s", tls_certs != NULL ? tls_certs->ca : "");
    server->conf = conf;
    if (conf) {
        char file[192];
        snprintf(file, sizeof file, "%s/conf", server->dir);
        close(open(file, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    }
    set_port(server);
    return server;
}

static kvft_server *start(const char *const *args, bool conf, const char *clock) {
    kvft_server *server = prepare(args, conf, clock);
    if (server != NULL) {
        spawn(server, true);
    }
    return server;
}

bool kvft_server_starts(void) {
    kvft_server *server = prepare(NULL, false, NULL);
    bool yes = server != NULL && try_spawn(server);
    kvft_server_stop(server);
    return yes;
}

kvft_server *kvft_server_start(const char *const *args) {
    return start(args, false, NULL);
}

kvft_server *kvft_server_start_conf(const char *const *args) {
    return start(args, true, NULL);
}

kvft_server *kvft_server_start_clocked(const char *const *args, const char *clock) {
    return start(args, false, clock);
}

void kvft_server_signal(kvft_server *server, int sig) {
    if (server->pid > 0) {
        kill(server->pid, sig);
    }
}

static void reap(kvft_server *server) {
    if (server->pid > 0) {
        kill(server->pid, SIGKILL);
        kill(server->pid, SIGCONT);
        while (waitpid(server->pid, NULL, 0) < 0 && errno == EINTR) {
        }
        server->pid = 0;
    }
}

void kvft_server_kill(kvft_server *server) {
    reap(server);
}

void kvft_server_restart(kvft_server *server) {
    reap(server);
    spawn(server, false);
}

bool kvft_server_revive(kvft_server *server) {
    char snapshot[192];
    if (server->pid <= 0 || waitpid(server->pid, NULL, WNOHANG) == 0) {
        return false;
    }
    server->pid = 0;
    snprintf(snapshot, sizeof snapshot, "%s/dump.rdb", server->dir);
    unlink(snapshot);
    spawn(server, false);
    return true;
}

void kvft_server_stop(kvft_server *server) {
    char command[256];
    if (server == NULL) {
        return;
    }
    reap(server);
    snprintf(command, sizeof command, "rm -rf '%s'", server->dir);
    if (strstr(server->dir, "/kvft-") == NULL || system(command) != 0) {
        fprintf(stderr, "could not remove %s\n", server->dir);
    }
    free(server);
}
