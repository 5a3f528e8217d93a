/* SPDX-License-Identifier: Apache-2.0
 *
 * check-hostile, folders: a folder that others write to has forged records, other things in place of files, wrong
 * names, times and usage files. Each costs at most a miss.
 */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "hostile/hostile.h"
#include "record/record.h"

#define PAYLOAD_BYTES 3000u
#define MAX_FILES     24u
#define SLACK_BYTES   ((size_t)3 << 19) /* more than in the calm run: names, a file of 1 MiB that is verified */

static char *dir;
static struct {
    char path[300];
    kvft_buffer bytes;
} files[MAX_FILES]; /* as they were */
static size_t num_files, calm_bytes;
static bool is_huge; /* this case has made a file that is */

/* ---- the folder as it was ---- */

static int take_file(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st;
    (void)at;
    if (kind == FTW_F && num_files < MAX_FILES) {
        snprintf(files[num_files].path, sizeof files[num_files].path, "%s", path);
        files[num_files++].bytes = kvft_file_read(path);
    }
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st;
    if (kind == FTW_DNR || kind == FTW_D) {
        (void)!chmod(path, 0700);
    }
    if (at->level > 0) {
        (void)!remove(path);
    }
    return 0;
}

static void make_folders(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
}

static void restore(void) {
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    for (size_t i = 0; i < num_files; i++) {
        make_folders(files[i].path);
        kvft_file_write(files[i].path, &files[i].bytes);
    }
}

/* ---- what is done to it; each returns whether a payload was forged ---- */

static size_t any_file(uint64_t *random) {
    return hostile_below(random, num_files);
}

static bool is_usage(size_t i) {
    return strstr(files[i].path, "/usage") != NULL;
}

/* May fail: a file above it may be a fifo now. */
static void write_there(const char *path, const kvft_buffer *b) {
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NONBLOCK, 0600);
    if (fd >= 0) {
        (void)!pwrite(fd, b->data, b->len, 0);
        close(fd);
    }
}

/* The usage file, its check valid again. */
static void write_usage(size_t i, uint64_t *random) {
    kvft_buffer b = kvft_buffer_of(files[i].bytes.data, files[i].bytes.len);
    kvft_mutate(&b, random);
    if (b.len >= 8 && hostile_below(random, 4) > 0) {
        kvfi_put32(b.data + 4, kvfi_xxh32(b.data + 8, b.len - 8));
    }
    write_there(files[i].path, &b);
    kvft_buffer_free(&b);
}

static bool forge(uint64_t *random) {
    size_t i = any_file(random), at = 0, len = 0;
    if (is_usage(i)) {
        write_usage(i, random);
        return false;
    }
    const kvft_buffer *whole = &files[i].bytes;
    kvft_buffer record = kvft_buffer_of(whole->data, whole->len);
    bool text = hostile_below(random, 4) == 0, payload = hostile_below(random, 2) == 0;
    if (payload && kvft_payload_of(&record, &at, &len)) {
        kvft_buffer p = kvft_buffer_of(record.data + at, len);
        (text ? kvft_mutate_text : kvft_mutate)(&p, random);
        kvft_forge_payload(&record, &p);
        kvft_buffer_free(&p);
    } else {
        kvft_mutate(&record, random);
        if (hostile_below(random, 3) > 0) {
            kvft_reseal(&record);
        }
    }
    write_there(files[i].path, &record);
    kvft_buffer_free(&record);
    return true;
}

static void make_socket(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && strlen(path) < sizeof address.sun_path) {
        strcpy(address.sun_path, path);
        (void)!bind(fd, (struct sockaddr *)&address, sizeof address);
    }
    close(fd);
}

/* As long as it says, and made of holes. */
static void make_sparse(const char *path, const kvft_buffer *head, uint64_t *random) {
    static const uint64_t lengths[] = {0, 1, 127, 128, 143, 144, 1 << 20, (uint64_t)1 << 31, (uint64_t)1 << 34};
    uint64_t len = lengths[hostile_below(random, sizeof lengths / sizeof *lengths)];
    is_huge = is_huge || len > 1 << 20;
    kvft_buffer b = kvft_buffer_of(head->data, head->len);
    if (b.len > KVFI_HEADER_BYTES && len > KVFI_HEADER_BYTES + KVFI_SUM_BYTES) { /* its header is of that length */
        uint64_t payload = len - KVFI_HEAD_BYTES(kvfi_get32(b.data + 80)) - KVFI_SUM_BYTES;
        kvfi_put64(b.data + 84, payload);
        kvfi_put64(b.data + 92, payload);
        kvft_reseal(&b);
    }
    write_there(path, &b);
    (void)!truncate(path, (off_t)len);
    kvft_buffer_free(&b);
}

static void link_to(const char *target, const char *path) {
    unlink(path);
    (void)!symlink(target, path);
}

/* Something else in place of a file, or of the folder that it lies in. */
static bool replace(uint64_t *random) {
    static const char *const targets[] = {"/dev/zero",      "/dev/null", "/dev/tty", "/", "/etc/passwd",
                                          "/proc/self/mem", "nowhere",   "..",       "",  "."};
    size_t i = any_file(random), other = any_file(random);
    char path[300], above[300];
    snprintf(path, sizeof path, "%s", files[i].path);
    if (hostile_below(random, 4) == 0) {
        *strrchr(path, '/') = '\0';
        snprintf(above, sizeof above, "%s.moved", path);
        rename(path, above);
    }
    unlink(path);
    switch (hostile_below(random, 10)) {
    case 0:
        link_to(targets[hostile_below(random, sizeof targets / sizeof *targets)], path);
        break;
    case 1:
        link_to(path, path);
        break;
    case 2:
        link_to(files[other].path, path);
        break;
    case 3:
        (void)!mkfifo(path, 0600);
        break;
    case 4:
        (void)!mkdir(path, 0700);
        break;
    case 5:
        make_socket(path);
        break;
    case 6:
        write_there(path, &files[other].bytes);
        break;
    case 7:
        (void)!link(files[other].path, path);
        break;
    case 8:
        make_sparse(path, &files[i].bytes, random);
        break;
    default:
        write_there(path, &files[i].bytes);
        (void)!chmod(path, (mode_t)hostile_below(random, 01000));
    }
    return false;
}

/* Names that are not ours; some nearly are. */
static bool add_name(uint64_t *random) {
    static const char *const names[] = {"\033[31mred\033[0m",
                                        "a\nb: fine",
                                        "\xff\xfe\x80",
                                        " ",
                                        "-rf",
                                        "%s%n%s",
                                        ".hidden",
                                        "0123456789abcdef",
                                        "0123456789ABCDEF",
                                        "ff",
                                        "fff",
                                        "tmp",
                                        "usage",
                                        "usage.lock",
                                        "kvf1",
                                        "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
                                        "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdeg"};
    char path[700], name[256];
    size_t i = any_file(random), up = hostile_below(random, 4);
    snprintf(path, sizeof path, "%s", files[i].path);
    for (; up > 0 && strrchr(path, '/') > path + strlen(dir); up--) {
        *strrchr(path, '/') = '\0';
    }
    if (strrchr(path, '/') < path + strlen(dir)) {
        return false;
    }
    snprintf(name, sizeof name, "%s", names[hostile_below(random, sizeof names / sizeof *names)]);
    if (hostile_below(random, 8) == 0) {
        memset(name, 'a', 255);
        name[255] = '\0';
    }
    snprintf(strrchr(path, '/') + 1, 300, "%s", name);
    switch (hostile_below(random, 5)) {
    case 0:
        (void)!mkdir(path, 0700);
        break;
    case 1:
        (void)!rename(files[i].path, path);
        break;
    case 2:
        (void)!mkfifo(path, 0600);
        break;
    case 3:
        link_to("/dev/zero", path);
        break;
    default: {
        struct stat st;
        if (lstat(path, &st) != 0 || S_ISREG(st.st_mode)) {
            write_there(path, &files[i].bytes);
        }
    }
    }
    return false;
}

static bool set_times(uint64_t *random) {
    static const int64_t times[] = {
        0,          -1,          -2208988800,   -62135596800,  13569465600,       253402300799,
        4294967296, 17179869183, INT64_MAX / 2, INT64_MIN / 2, INT64_MAX - 86400, INT64_MAX,
        INT64_MIN};
    int64_t s = times[hostile_below(random, sizeof times / sizeof *times)];
    struct timespec both[2] = {{.tv_sec = s, .tv_nsec = 999999999}, {.tv_sec = s, .tv_nsec = 999999999}};
    char path[300];
    snprintf(path, sizeof path, "%s", files[any_file(random)].path);
    for (size_t up = hostile_below(random, 3); up > 0 && strlen(path) > strlen(dir); up--) {
        *strrchr(path, '/') = '\0';
    }
    (void)!utimensat(AT_FDCWD, path, both, AT_SYMLINK_NOFOLLOW);
    return false;
}

static bool lose(uint64_t *random) {
    unlink(files[any_file(random)].path);
    return false;
}

/* ---- a case ---- */

static kvf_store *open_folder(uint64_t *random) {
    static const char *const options[] = {"", "", "?max=1M", "?max=1M", "?ttl=60", "?ttl=60&max=1M"};
    char url[300];
    const char *at = url;
    kvf_store *store = NULL;
    kvf_error err;
    snprintf(url, sizeof url, "file:%s%s", dir, options[hostile_below(random, sizeof options / sizeof *options)]);
    return kvf_store_open(&store, &err, &at, 1, NULL) == KVF_OK ? store : NULL;
}

static size_t use_folder(bool forged, uint64_t *random) {
    hostile_use use = {.payload_bytes = PAYLOAD_BYTES,
                       .forged = forged,
                       .forged_session = forged,
                       .saves = hostile_below(random, 3) == 0,
                       .huge = is_huge,
                       .budget_ms = 10000};
    kvft_meter_begin();
    kvf_store *store = open_folder(random);
    if (store != NULL) { /* else the operator has to see to it */
        hostile_ask(store, &use, random);
        kvf_store_close(store);
    }
    kvft_meter_end();
    return kvft_meter_peak();
}

static bool begin(void) {
    uint64_t random = 0;
    dir = kvft_temp_dir();
    char url[300];
    snprintf(url, sizeof url, "file:%s?max=1M", dir); /* with a bound, so that usage is counted */
    kvf_store *store = kvft_store(url);
    hostile_fill(store, PAYLOAD_BYTES);
    kvf_store_close(store);
    num_files = 0;
    nftw(dir, take_file, 16, FTW_PHYS);
    for (size_t i = 0; i < 8; i++) {
        size_t held = use_folder(false, &random);
        calm_bytes = held > calm_bytes ? held : calm_bytes;
        restore();
    }
    return true;
}

static void run(uint64_t *random) {
    static bool (*const deeds[])(uint64_t *) = {forge,    forge,     forge,     replace, replace,
                                                add_name, set_times, set_times, lose};
    bool forged = false;
    restore();
    is_huge = false;
    for (size_t times = 1 + hostile_below(random, 3); times > 0; times--) {
        forged = deeds[hostile_below(random, sizeof deeds / sizeof *deeds)](random) || forged;
    }
    hostile_memory(use_folder(forged, random), calm_bytes + SLACK_BYTES);
}

static void end(void) {
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    kvft_remove_dir(dir);
    for (size_t i = 0; i < num_files; i++) {
        kvft_buffer_free(&files[i].bytes);
    }
}

const hostile_part hostile_folder = {"folder", 35, begin, run, end};
