/* SPDX-License-Identifier: Apache-2.0
 *
 * The bare client of checks/manager.py: what a redis-server needs for a session at least. It sends ready commands from
 * ready memory over one blocking socket, reads replies into ready memory, and checks nothing.
 *
 *   kvf_session_peer PORT|PATH WAY
 *
 * reads lines "save MIB TURN" and "load MIB TURN", and answers each with the seconds and the CPU seconds that it took.
 * WAY of a save: `one` command for both arrays, as redis-py sends it; `apart`, one for each, and each value in a write
 * after the one of its length, so that it is alone in the server's buffer. (Two in a transaction are not faster.)
 */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MIB      ((size_t)1 << 20)
#define MOST_MIB 16u
#define LINE     256u
#define EXPIRE   "\r\n*3\r\n$6\r\nEXPIRE\r\n$4\r\nbare\r\n$4\r\n3600\r\n"

static int fd;
static char *memory; /* both arrays */

static void die(const char *what) {
    fprintf(stderr, "kvf_session_peer: %s\n", what);
    exit(2);
}

static double now_s(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int dial(const char *where) {
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int on = 1, is_path = where[0] == '/', s = socket(is_path ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    snprintf(un.sun_path, sizeof un.sun_path, "%s", where);
    in.sin_port = htons((uint16_t)strtoul(where, NULL, 10));
    if (connect(s, is_path ? (struct sockaddr *)&un : (struct sockaddr *)&in, is_path ? sizeof un : sizeof in) != 0) {
        die("no connection");
    }
    (void)setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return s;
}

static void send_all(struct iovec *iov, int num) {
    while (num > 0) {
        ssize_t n = writev(fd, iov, num);
        if (n <= 0) {
            die("could not write");
        }
        for (; num > 0 && (size_t)n >= iov->iov_len; iov++, num--) {
            n -= (ssize_t)iov->iov_len;
        }
        if (num > 0) {
            iov->iov_base = (char *)iov->iov_base + n;
            iov->iov_len -= (size_t)n;
        }
    }
}

/* One line of a reply, without its end. */
static void read_line(char out[LINE]) {
    for (size_t i = 0; i < LINE; i++) {
        if (read(fd, &out[i], 1) != 1) {
            die("could not read");
        }
        if (out[i] == '\n') {
            out[i] = '\0';
            return;
        }
    }
    die("a long line");
}

static void expect(const char *first, unsigned num) {
    char line[LINE];
    for (unsigned i = 0; i < num; i++) {
        read_line(line);
        if (strchr(first, line[0]) == NULL) {
            die(line);
        }
    }
}

static struct iovec text(const char *from) {
    return (struct iovec){(void *)(uintptr_t)from, strlen(from)};
}

#define HSET_ONE "*6\r\n$4\r\nHSET\r\n$4\r\nbare\r\n$4\r\nkeys\r\n"
#define HSET_K   "*4\r\n$4\r\nHSET\r\n$4\r\nbare\r\n$4\r\nkeys\r\n"
#define HSET_V   "*4\r\n$4\r\nHSET\r\n$4\r\nbare\r\n$6\r\nvalues\r\n"

static void save(int apart, size_t mib) {
    char length[32], first[128], second[128];
    size_t half = mib * MIB / 2;
    snprintf(length, sizeof length, "$%zu\r\n", half);
    snprintf(first, sizeof first, "%s%s", apart ? HSET_K : HSET_ONE, length);
    snprintf(second, sizeof second, "\r\n%s%s", apart ? HSET_V : "$6\r\nvalues\r\n", length);
    struct iovec iov[5] = {text(first), {memory, half}, text(second), {memory + half, half}, text(EXPIRE)};
    for (int i = 0; i < 5; i += apart ? 1 : 5) {
        send_all(&iov[i], apart ? 1 : 5);
    }
    expect(":", apart ? 3 : 2);
}

static void read_value(char *into, size_t bytes) {
    char end[2];
    expect("$", 1);
    for (size_t got = 0; got < bytes;) {
        ssize_t n = read(fd, into + got, bytes - got);
        if (n <= 0) {
            die("could not read");
        }
        got += (size_t)n;
    }
    if (read(fd, end, 2) != 2) {
        die("could not read");
    }
}

static void load(size_t mib) {
    size_t half = mib * MIB / 2;
    struct iovec ask = text("*4\r\n$5\r\nHMGET\r\n$4\r\nbare\r\n$4\r\nkeys\r\n$6\r\nvalues\r\n");
    send_all(&ask, 1);
    expect("*", 1);
    read_value(memory, half);
    read_value(memory + half, half);
}

int main(int argc, char **argv) {
    char line[LINE], what[LINE];
    size_t mib = 0;
    if (argc != 3) {
        die("usage: kvf_session_peer PORT|PATH WAY");
    }
    fd = dial(argv[1]);
    memory = mmap(NULL, MOST_MIB * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        die("no memory");
    }
    memset(memory, 7, MOST_MIB * MIB);
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (sscanf(line, "%s %zu", what, &mib) != 2 || mib == 0 || mib > MOST_MIB) {
            die("bad command");
        }
        double began = now_s(CLOCK_MONOTONIC), cpu = now_s(CLOCK_PROCESS_CPUTIME_ID);
        if (strcmp(what, "save") == 0) {
            save(strcmp(argv[2], "apart") == 0, mib);
        } else {
            load(mib);
        }
        printf("%.9f %.9f\n", now_s(CLOCK_MONOTONIC) - began, now_s(CLOCK_PROCESS_CPUTIME_ID) - cpu);
        fflush(stdout);
    }
    return 0;
}
