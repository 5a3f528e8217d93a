/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: what a hit is, which faults it survives, and that its bound holds.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "file/file.h"
#include "support/faults.h"
#include "support/kit.h"
#include "support/place.h"

/* ---- hits */

static void test_what_is_put_is_got(void **state) {
    (void)state;
    place p = open_place("");
    static const size_t sizes[] = {0, 1, 4095, 100000, 5000000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        assert_int_equal(kvft_get(p.tier, i, sizes[i]), KVF_WHY_ABSENT);
        assert_int_equal(kvft_peek(p.tier, i), KVF_WHY_ABSENT);
        assert_int_equal(kvft_borrow(p.tier, i, sizes[i]), KVF_WHY_ABSENT);
        assert_int_equal(kvft_put(p.tier, i, sizes[i]), KVF_WHY_NONE);
        assert_int_equal(kvft_get(p.tier, i, sizes[i]), KVF_WHY_NONE);
        assert_int_equal(kvft_peek(p.tier, i), KVF_WHY_NONE);
        assert_int_equal(kvft_borrow(p.tier, i, sizes[i]), KVF_WHY_NONE);
    }
    kvfi_tier *other = kvft_tier(p.url); /* as another process would */
    assert_int_equal(kvft_get(other, 3, 100000), KVF_WHY_NONE);
    other->ops->close(other);
    assert_int_equal(info_of(p.tier).num_records, 5);
    assert_int_equal(kvft_count(p.tier).records, 5);
    close_place(&p);
}

static void test_only_its_user_can_look_inside(void **state) {
    (void)state;
    place p = open_place("");
    mode_t before = umask(0);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    umask(before);
    struct stat st;
    assert_int_equal(stat(path_of(&p, 1), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(stat(below(&p, ""), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    close_place(&p);
}

/* A value in very many pieces, some empty: more than one system call takes. */
static void test_scattered_memory(void **state) {
    (void)state;
    enum { PIECES = 5000, EACH = 13 };
    place p = open_place("");
    kvft_value v;
    kvft_value_init(&v, 1, PIECES * EACH);
    struct iovec *iov = calloc(PIECES + 1, sizeof *iov);
    uint8_t *payload = v.bytes + v.iov[0].iov_len;
    iov[0] = v.iov[0];
    for (size_t i = 0, at = 0; i < PIECES; i++) {
        size_t len = i % 3 == 0 ? 0 : i % 3 == 1 ? EACH : 2 * EACH;
        iov[i + 1] = (struct iovec){payload + at, i + 1 == PIECES ? PIECES * EACH + KVFI_SUM_BYTES - at : len};
        at += len;
    }
    v.item.iov = iov;
    v.item.num_iov = PIECES + 1;
    kvfi_feed feed = {.items = &v.item, .num = 1, .limit = 1, .deadline_us = KVFI_NEVER};
    p.tier->ops->put(p.tier, &feed);
    assert_int_equal(v.item.status, KVF_OK);
    assert_int_equal(kvft_get(p.tier, 1, PIECES * EACH), KVF_WHY_NONE);
    uint8_t *expected = malloc(v.item.bytes);
    memcpy(expected, v.bytes, v.item.bytes);
    memset(v.bytes, 0, v.item.bytes);
    feed = (kvfi_feed){.items = &v.item, .num = 1, .limit = 1, .deadline_us = KVFI_NEVER};
    p.tier->ops->get(p.tier, &feed);
    assert_int_equal(v.item.status, KVF_OK);
    assert_memory_equal(v.bytes, expected, v.item.bytes);
    free(expected);
    free(iov);
    kvft_value_cleanup(&v);
    close_place(&p);
}

static void test_use_keeps_young(void **state) {
    (void)state;
    place p = open_place("");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    const char *path = path_of(&p, 1);
    struct stat before, after;
    assert_int_equal(stat(path, &before), 0);
    set_age(path, 1000);
    assert_int_equal(kvft_peek(p.tier, 1), KVF_WHY_NONE); /* to look is not to use */
    assert_true(age_of(path) > 900);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_true(age_of(path) < 900);
    set_age(path, 1000);
    assert_int_equal(kvft_borrow(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_true(age_of(path) < 900);
    set_age(path, 1000);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE); /* it is there already: not written again */
    assert_true(age_of(path) < 900);
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    set_age(path, -1000); /* from a clock that was wrong */
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_true(age_of(path) > -900);
    close_place(&p);
}

static void test_touch_keeps_young(void **state) {
    (void)state;
    place p = open_place("?ttl=2000");
    assert_int_equal(kvft_each(p.tier, KVFI_TOUCH, 1), KVF_WHY_ABSENT);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    const char *path = path_of(&p, 1);
    set_age(path, 1000);
    assert_int_equal(kvft_each(p.tier, KVFI_TOUCH, 1), KVF_WHY_NONE);
    assert_true(age_of(path) < 900);
    set_age(path, 2001);
    assert_int_equal(kvft_each(p.tier, KVFI_TOUCH, 1), KVF_WHY_ABSENT); /* too late */
    assert_false(exists(path));
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(truncate(path, SIZE / 2), 0);
    assert_int_equal(kvft_each(p.tier, KVFI_TOUCH, 1), KVF_WHY_TRUNCATED); /* what can't be loaded is not kept */
    assert_false(exists(path));
    close_place(&p);
}

static void flip_byte(const char *path) {
    write_at(path, SIZE / 2, "wrong", 5);
}

/* Whatever is found in the place of a value is closed again. */
static void test_nothing_is_left_open(void **state) {
    (void)state;
    place p = open_place("");
    kvfi_addr addr;
    kvft_addr(&addr, 1);
    int fds = kvft_num_fds();
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_ABSENT);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_num_fds(), fds);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE); /* the same */
    assert_int_equal(kvft_num_fds(), fds);
    assert_int_equal(kvft_put(p.tier, 1, SIZE + 1), KVF_WHY_NONE); /* another */
    assert_int_equal(kvft_num_fds(), fds);
    assert_int_equal(kvft_peek(p.tier, 1), KVF_WHY_NONE);
    assert_int_equal(kvft_get(p.tier, 1, SIZE + 1), KVF_WHY_NONE);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_num_fds(), fds);
    flip_byte(path_of(&p, 1));
    assert_int_equal(kvft_borrow(p.tier, 1, SIZE + 1), KVF_WHY_CHECKSUM);
    assert_int_equal(kvft_num_fds(), fds);
    assert_int_equal(kvft_count(p.tier).damaged, 1);
    assert_int_equal(kvft_num_fds(), fds);
    assert_int_equal(p.tier->ops->remove(p.tier, NULL, &addr, KVFI_NEVER), KVF_OK);
    assert_int_equal(kvft_num_fds(), fds);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_each(p.tier, KVFI_TOUCH, 1), KVF_WHY_NONE);
    assert_int_equal(kvft_each(p.tier, KVFI_REMOVE, 1), KVF_WHY_NONE);
    assert_int_equal(kvft_num_fds(), fds);
    (void)kvfi_file_sweep((kvfi_file *)p.tier, 1, KVFI_NEVER);
    (void)diagnose(p.tier);
    (void)info_of(p.tier);
    assert_int_equal(kvft_num_fds(), fds);
    close_place(&p);
}

/* Sessions are written again under their key. A reader of the old one is not disturbed. */
static void test_another_value_replaces(void **state) {
    (void)state;
    place p = open_place("");
    kvft_value old, new;
    kvft_value_init(&old, 1, SIZE);
    kvft_value_init(&new, 2, SIZE);
    new.item.addr = old.item.addr;
    kvft_value_seal(&new, 0);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    kvfi_loan before, after;
    assert_int_equal(p.tier->ops->borrow(p.tier, &before, &old.item.addr, 0, KVFI_NEVER), KVF_WHY_NONE);
    kvfi_feed feed = {.items = &new.item, .num = 1, .limit = 1, .deadline_us = KVFI_NEVER};
    p.tier->ops->put(p.tier, &feed);
    assert_int_equal(new.item.status, KVF_OK);
    assert_int_equal(p.tier->ops->borrow(p.tier, &after, &old.item.addr, 0, KVFI_NEVER), KVF_WHY_NONE);
    assert_memory_equal(before.data, old.bytes, old.item.bytes);
    assert_memory_equal(after.data, new.bytes, new.item.bytes);
    p.tier->ops->give_back(p.tier, &before);
    p.tier->ops->give_back(p.tier, &after);
    assert_int_equal(info_of(p.tier).num_records, 1);
    kvft_value_cleanup(&old);
    kvft_value_cleanup(&new);
    close_place(&p);
}

/* ---- what is not a hit */

typedef void (*damage_fn)(const char *path);

static void cut_short(const char *path) {
    assert_int_equal(truncate(path, SIZE / 2), 0);
}
static void cut_in_header(const char *path) {
    assert_int_equal(truncate(path, 100), 0);
}
static void cut_to_nothing(const char *path) {
    assert_int_equal(truncate(path, 0), 0);
}
static void make_longer(const char *path) {
    assert_int_equal(truncate(path, SIZE + 5000), 0);
}
static void make_huge(const char *path) {
    assert_int_equal(truncate(path, (off_t)1 << 40), 0);
}
static void flip_header(const char *path) {
    write_at(path, 50, "\xff\x11", 2);
}
static void flip_magic(const char *path) {
    write_at(path, 0, "no record", 9);
}
static void fill_with_zeros(const char *path) { /* what a power failure leaves */
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(path, 0), 0);
    assert_int_equal(truncate(path, st.st_size), 0);
}

static void expect_torn(const place *p, damage_fn damage, kvf_reason expected) {
    const char *path = path_of(p, 1);
    assert_int_equal(kvft_put(p->tier, 1, SIZE), KVF_WHY_NONE);
    damage(path);
    assert_int_equal(kvft_get(p->tier, 1, SIZE), expected);
    assert_false(exists(path)); /* removed */
    assert_int_equal(kvft_put(p->tier, 1, SIZE), KVF_WHY_NONE);
    damage(path);
    assert_int_equal(kvft_peek(p->tier, 1), KVF_WHY_TRUNCATED);
    assert_false(exists(path));
    assert_int_equal(kvft_put(p->tier, 1, SIZE), KVF_WHY_NONE);
    damage(path);
    assert_int_equal(kvft_borrow(p->tier, 1, SIZE), KVF_WHY_TRUNCATED);
    assert_false(exists(path));
    assert_int_equal(kvft_put(p->tier, 1, SIZE), KVF_WHY_NONE);
    damage(path);
    assert_int_equal(kvft_count(p->tier).damaged, 1);
    assert_int_equal(kvft_put(p->tier, 1, SIZE), KVF_WHY_NONE); /* replaced */
    assert_int_equal(kvft_get(p->tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_count(p->tier).damaged, 0);
}

static void test_torn_files_are_misses_and_go(void **state) {
    (void)state;
    place p = open_place("");
    expect_torn(&p, cut_short, KVF_WHY_TRUNCATED);
    expect_torn(&p, cut_in_header, KVF_WHY_TRUNCATED);
    expect_torn(&p, cut_to_nothing, KVF_WHY_TRUNCATED);
    expect_torn(&p, make_longer, KVF_WHY_TRUNCATED);
    expect_torn(&p, make_huge, KVF_WHY_TRUNCATED);
    expect_torn(&p, flip_header, KVF_WHY_CHECKSUM);
    expect_torn(&p, flip_magic, KVF_WHY_VERSION);
    expect_torn(&p, fill_with_zeros, KVF_WHY_VERSION);
    close_place(&p);
}

static void test_a_flipped_bit_is_a_miss_and_goes(void **state) {
    (void)state;
    place p = open_place("");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    write_at(path_of(&p, 1), SIZE / 2, "wrong", 5);
    assert_int_equal(kvft_borrow(p.tier, 1, SIZE), KVF_WHY_CHECKSUM);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_CHECKSUM);
    assert_false(exists(path_of(&p, 1)));
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);
    close_place(&p);
}

/* A whole record under another record's name, as a careless copy leaves it. */
static void test_a_record_under_a_wrong_name(void **state) {
    (void)state;
    place p = open_place("");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_put(p.tier, 2, SIZE), KVF_WHY_NONE);
    char *one = strdup(path_of(&p, 1));
    assert_int_equal(rename(one, path_of(&p, 2)), 0);
    free(one);
    kvf_reason why = kvft_get(p.tier, 2, SIZE);
    assert_true(why == KVF_WHY_OTHER_SPACE);
    assert_false(exists(path_of(&p, 2)));
    close_place(&p);
}

/* A record of another size than the one asked for, and one of a version to come, are misses that stay. */
static void test_whole_records_stay(void **state) {
    (void)state;
    place p = open_place("");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(p.tier, 1, SIZE - 1), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);

    kvft_value v;
    kvft_value_init(&v, 1, SIZE);
    v.bytes[8] = 9; /* a codec nobody knows */
    kvfi_put32(v.bytes + 124, kvfi_xxh32(v.bytes, 124));
    write_at(path_of(&p, 1), 0, v.bytes, 128);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_VERSION);
    assert_true(exists(path_of(&p, 1)));
    kvft_value_cleanup(&v);
    close_place(&p);
}

static void test_strange_things_in_the_way(void **state) {
    (void)state;
    place p = open_place("");
    char *path = strdup(path_of(&p, 1));
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(unlink(path), 0);

    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_VERSION);
    assert_int_equal(kvft_peek(p.tier, 1), KVF_WHY_VERSION);
    assert_int_equal(kvft_borrow(p.tier, 1, SIZE), KVF_WHY_VERSION);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_UNREACHABLE);
    assert_int_equal(kvft_count(p.tier).foreign, 1);
    assert_int_equal(rmdir(path), 0);

    assert_int_equal(mkfifo(path, 0600), 0); /* to open one must not hang */
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_VERSION);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(unlink(path), 0);

    assert_int_equal(kvft_put(p.tier, 2, SIZE), KVF_WHY_NONE);
    assert_int_equal(symlink(path_of(&p, 2), path), 0);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_VERSION);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(p.tier, 2, SIZE), KVF_WHY_NONE);
    free(path);
    close_place(&p);
}

static int populate_fails(void *memory, size_t bytes) {
    (void)memory;
    (void)bytes;
    errno = EFAULT;
    return -1;
}

static ssize_t preadv_fails(int fd, const struct iovec *iov, int num, off_t at) {
    (void)fd, (void)iov, (void)num, (void)at;
    errno = EIO;
    return -1;
}

static void test_an_unreadable_page_is_a_miss(void **state) {
    (void)state;
    place p = open_place("");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    replace()->populate = populate_fails;
    assert_int_equal(kvft_borrow(p.tier, 1, SIZE), KVF_WHY_UNREACHABLE);
    assert_int_equal(kvft_count(p.tier).damaged, 0); /* a walk reads it by a call instead */
    replace()->preadv = preadv_fails;
    assert_int_equal(kvft_count(p.tier).damaged, 1);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_UNREACHABLE);
    assert_int_equal(kvft_peek(p.tier, 1), KVF_WHY_UNREACHABLE);
    restore();
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE); /* not removed: it may be readable again */
    close_place(&p);
}

/* ---- what is lent: it must not change while it is */

static int of_another_user(int fd, struct stat *out) {
    int rc = kvfi_sys_real.fstat(fd, out);
    out->st_uid++;
    return rc;
}

static void expect_copied(const place *p) {
    assert_int_equal(kvft_borrow(p->tier, 1, SIZE), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(p->tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_count(p->tier).damaged, 0);
}

static void test_only_what_nobody_else_can_write_is_lent(void **state) {
    (void)state;
    static const mode_t open_modes[] = {0720, 0702, 0777};
    place p = open_place("");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    char *path = strdup(path_of(&p, 1));
    for (int level = 0; level < 4; level++) { /* the file, and the folders up to the root of the store */
        for (size_t i = 0; i < sizeof open_modes / sizeof *open_modes; i++) {
            assert_int_equal(kvft_borrow(p.tier, 1, SIZE), KVF_WHY_NONE);
            assert_int_equal(chmod(path, open_modes[i]), 0);
            expect_copied(&p);
            assert_int_equal(chmod(path, 0700), 0);
        }
        *strrchr(path, '/') = '\0';
    }
    free(path);
    replace()->fstat = of_another_user;
    expect_copied(&p);
    restore();
    assert_int_equal(kvft_borrow(p.tier, 1, SIZE), KVF_WHY_NONE);
    close_place(&p);
}

static size_t mapped_bytes;
static void *count_map(size_t bytes, int fd, off_t at) {
    mapped_bytes += fd >= 0 ? bytes : 0;
    return kvfi_sys_real.map(bytes, fd, at);
}

/* What a network takes away under a mapping would end the process. */
static void test_nothing_is_mapped_on_a_network(void **state) {
    (void)state;
    place p = open_place("");
    kvfi_file *file = (kvfi_file *)p.tier;
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    replace()->map = count_map;
    mapped_bytes = 0;
    file->remote = true;
    expect_copied(&p);
    assert_int_equal(mapped_bytes, 0);
    file->remote = false;
    assert_int_equal(kvft_borrow(p.tier, 1, SIZE), KVF_WHY_NONE);
    size_t lent = mapped_bytes;
    assert_true(lent > SIZE);
    assert_int_equal(kvft_count(p.tier).damaged, 0);
    assert_true(mapped_bytes > lent); /* so does a look into every record */
    mapped_bytes = 0;
    restore();
    close_place(&p);
}

/* A whole record as far as its length goes, which takes no disk and would take all of that length in memory. */
static void test_a_hollow_file_is_not_lent(void **state) {
    (void)state;
    enum { CLAIMED = 1 << 30 };
    place p = open_place("");
    kvfi_header header = {.payload_bytes = CLAIMED, .raw_bytes = CLAIMED};
    uint8_t head[KVFI_HEADER_BYTES];
    kvfi_loan loan;
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    kvft_addr(&header.addr, 1);
    kvfi_header_encode(head, &header);
    make_file(path_of(&p, 1), (size_t)kvfi_record_bytes(&header));
    write_at(path_of(&p, 1), 0, head, sizeof head);
    replace()->map = count_map;
    assert_int_equal(p.tier->ops->borrow(p.tier, &loan, &header.addr, 0, KVFI_NEVER), KVF_WHY_ABSENT);
    assert_int_equal(p.tier->ops->borrow(p.tier, &loan, &header.addr, SIZE, KVFI_NEVER), KVF_WHY_TRUNCATED);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_TRUNCATED);
    restore();
    assert_int_equal(mapped_bytes, 0);
    close_place(&p);
}

/* ---- numbers that no clock shows and no disk holds: whatever they are, they are only compared */

static int64_t odd_time, odd_size;
static int odd_fstat(int fd, struct stat *out) {
    int rc = kvfi_sys_real.fstat(fd, out);
    out->st_mtim.tv_sec = odd_time;
    return rc;
}
static int odd_fstatat(int dir, const char *path, struct stat *out, int flags) {
    int rc = kvfi_sys_real.fstatat(dir, path, out, flags);
    out->st_mtim.tv_sec = odd_time;
    out->st_size = odd_size != 0 && S_ISREG(out->st_mode) ? odd_size : out->st_size;
    return rc;
}

static void test_odd_times(void **state) {
    (void)state;
    static const int64_t times[] = {0, 1, 13569465600 /* 2400-01-01 */, INT64_MAX, INT64_MIN, INT64_MAX / 1000000000};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        place p = open_place("?max=1M&ttl=100");
        make_file((mkdir(below(&p, "tmp"), 0700), below(&p, "tmp/dead")), 1000);
        bool ahead = times[i] > time(NULL);
        assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
        kvfi_systable *table = replace();
        table->fstat = odd_fstat;
        table->fstatat = odd_fstatat;
        odd_time = times[i];
        assert_int_equal(kvft_count(p.tier).records, ahead);
        assert_int_equal(kvft_get(p.tier, 1, SIZE), ahead ? KVF_WHY_NONE : KVF_WHY_ABSENT);
        assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
        (void)kvfi_file_sweep((kvfi_file *)p.tier, 1, KVFI_NEVER);
        restore();
        assert_false(exists(below(&p, "tmp/dead")));
        close_place(&p);
    }
}

static void test_odd_counts(void **state) {
    (void)state;
    static const int64_t odd[] = {INT64_MIN, INT64_MAX, -1, INT64_MAX / 2, INT64_MAX - 4095};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        for (int field = 0; field < 4; field++) {
            place p = open_place("?max=1M");
            kvfi_usage usage = {.bytes = field == 0 ? (uint64_t)odd[i] : 100,
                                .records = field == 1 ? (uint64_t)odd[i] : 1,
                                .writers = field == 2 ? (uint64_t)odd[i] : 1,
                                .swept_s = field == 3 ? odd[i] : time(NULL)};
            int fd = kvfi_file_usage_lock((kvfi_file *)p.tier);
            kvfi_file_usage_set((kvfi_file *)p.tier, fd, &usage);
            close(fd);
            p.tier->ops->close(p.tier);
            p.tier = kvft_tier(p.url);
            for (uint64_t seed = 0; seed < 30; seed++) {
                assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
            }
            kvf_tier_info info = info_of(p.tier);
            assert_true(info.used_bytes >= 0 && info.used_bytes <= 1 << 20);
            assert_true(kvft_count(p.tier).records * CHARGE <= 1u << 20);
            close_place(&p);
        }
        place p = open_place("?max=1M"); /* files of such sizes, which are not ours */
        odd_size = odd[i];
        odd_time = time(NULL);
        assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
        replace()->fstatat = odd_fstatat;
        kvfi_addr addr;
        kvft_addr(&addr, 1);
        (void)kvfi_file_sweep((kvfi_file *)p.tier, 1, KVFI_NEVER);
        (void)kvft_put(p.tier, 1, SIZE);
        (void)p.tier->ops->remove(p.tier, NULL, &addr, KVFI_NEVER);
        restore();
        odd_size = 0;
        close_place(&p);
    }
}

/* What no folder can hold is read as no count at all, like a damaged one. */
static void test_which_counts_are_read(void **state) {
    (void)state;
    static const uint64_t most = (uint64_t)1 << 62;
    place p = open_place("");
    const kvfi_file *file = (const kvfi_file *)p.tier;
    for (int field = 0; field < 4; field++) {
        for (uint64_t beyond = 0; beyond < 2; beyond++) {
            kvfi_usage usage = {.bytes = field == 0 ? most + beyond : 1,
                                .records = field == 1 ? most + beyond : 2,
                                .writers = field == 2 ? most + beyond : 3,
                                .swept_s = field == 3 ? -(int64_t)beyond : 4};
            kvfi_usage expected = beyond == 0 ? usage : (kvfi_usage){0}, found = {.bytes = 7};
            int fd = kvfi_file_usage_lock(file);
            assert_true(fd >= 0);
            kvfi_file_usage_set((kvfi_file *)p.tier, fd, &usage);
            close(fd);
            assert_int_equal(kvfi_file_usage_read(file, &found), beyond == 0);
            assert_memory_equal(&found, &expected, sizeof found);
        }
    }
    static const off_t places[] = {0, 4, 20}; /* the magic, the checksum, a number */
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        kvfi_usage usage = {.bytes = 1}, found = {.bytes = 7};
        int fd = kvfi_file_usage_lock(file);
        kvfi_file_usage_set((kvfi_file *)p.tier, fd, &usage);
        close(fd);
        write_at(below(&p, "usage"), places[i], "x", 1);
        assert_false(kvfi_file_usage_read(file, &found));
        assert_int_equal(found.bytes, 0);
    }
    assert_int_equal(unlink(below(&p, "usage")), 0);
    assert_false(kvfi_file_usage_read(file, &(kvfi_usage){.bytes = 7}));
    close_place(&p);
}

/* A reader has a damaged file open while a writer puts a whole one in its place: that one stays. */
static const char *moved_from, *moved_to;
static ssize_t preadv_then_replaced(int fd, const struct iovec *iov, int num, off_t at) {
    ssize_t n = kvfi_sys_real.preadv(fd, iov, num, at);
    if (moved_from != NULL) {
        assert_int_equal(rename(moved_from, moved_to), 0);
        moved_from = NULL;
    }
    return n;
}

static void test_only_the_damaged_file_goes(void **state) {
    (void)state;
    place p = open_place("");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    char *path = strdup(path_of(&p, 1)), *whole = strdup(below(&p, "whole"));
    assert_int_equal(rename(path, whole), 0);
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    write_at(path, SIZE / 2, "wrong", 5);
    moved_from = whole;
    moved_to = path;
    replace()->preadv = preadv_then_replaced;
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_CHECKSUM);
    restore();
    assert_null(moved_from);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);
    free(whole);
    free(path);
    close_place(&p);
}

/* ---- deadlines */

static _Atomic int64_t slow_us;
static int64_t slow_now(void) {
    return kvfi_sys_real.now_us() + slow_us;
}
static ssize_t slow_preadv(int fd, const struct iovec *iov, int num, off_t at) {
    slow_us += 1000000;
    return kvfi_sys_real.preadv(fd, iov, num, at);
}
static ssize_t slow_pwritev(int fd, const struct iovec *iov, int num, off_t at) {
    slow_us += 1000000;
    return kvfi_sys_real.pwritev(fd, iov, num, at);
}

static int slow_populate(void *memory, size_t bytes) {
    slow_us += 1000000;
    return kvfi_sys_real.populate(memory, bytes);
}

static void test_a_slow_disk_costs_the_deadline(void **state) {
    (void)state;
    enum { BIG = 40 << 20, SLOW = 10 };
    place p = open_place("");
    kvft_value v;
    kvft_value_init(&v, 1, BIG);
    kvfi_systable *table = replace();
    table->now_us = slow_now;
    table->pwritev = slow_pwritev;
    kvfi_feed feed = {.items = &v.item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(3000000)};
    p.tier->ops->put(p.tier, &feed);
    assert_int_equal(v.item.status, KVF_MISS);
    assert_int_equal(v.item.why, KVF_WHY_BUDGET);
    restore();
    assert_int_equal(kvft_get(p.tier, 1, BIG), KVF_WHY_ABSENT);
    assert_int_equal(kvft_put(p.tier, 1, BIG), KVF_WHY_NONE);
    table = replace();
    table->now_us = slow_now;
    table->preadv = slow_preadv;
    feed = (kvfi_feed){.items = &v.item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(3000000)};
    p.tier->ops->get(p.tier, &feed);
    assert_int_equal(v.item.why, KVF_WHY_BUDGET);
    table->populate = slow_populate;
    table->preadv = kvfi_sys_real.preadv;
    kvfi_loan loan;
    assert_int_equal(p.tier->ops->borrow(p.tier, &loan, &v.item.addr, v.item.bytes, kvfi_deadline(3000000)),
                     KVF_WHY_BUDGET);
    restore();
    kvft_value_cleanup(&v);
    close_place(&p);
}

/* ---- the bound */

/* What this process thinks that the folder holds, without counting it again. */
static int64_t counted(const place *p) {
    kvfi_file *file = (kvfi_file *)p->tier;
    return (int64_t)file->shared_bytes + atomic_load(&file->pending_bytes);
}

/* Whatever adds a value or takes one away is counted as it happens. */
static void test_the_count_follows(void **state) {
    (void)state;
    place p = open_place("?max=1M&ttl=100");
    kvfi_addr addr;
    for (uint64_t seed = 0; seed < 5; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    assert_int_equal(counted(&p), 5 * CHARGE);
    assert_int_equal(kvft_put(p.tier, 0, SIZE + 4096), KVF_WHY_NONE); /* replaced */
    assert_int_equal(counted(&p), 5 * CHARGE + 4096);
    assert_int_equal(truncate(path_of(&p, 1), SIZE / 2), 0);
    p.tier->ops->close(p.tier);
    unlink(below(&p, "usage"));
    p.tier = kvft_tier(p.url);
    int64_t before = counted(&p), half = (SIZE / 2 + 4095) / 4096 * 4096;
    assert_int_equal(before, 4 * CHARGE + 4096 + half);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_TRUNCATED); /* dropped */
    assert_false(exists(path_of(&p, 1)));
    assert_int_equal(counted(&p), before - half);
    set_age(path_of(&p, 2), 1000);
    assert_int_equal(kvft_get(p.tier, 2, SIZE), KVF_WHY_ABSENT); /* expired */
    assert_false(exists(path_of(&p, 2)));
    assert_int_equal(counted(&p), before - half - CHARGE);
    kvft_addr(&addr, 3);
    assert_int_equal(p.tier->ops->remove(p.tier, NULL, &addr, KVFI_NEVER), KVF_OK);
    assert_int_equal(counted(&p), before - half - 2 * CHARGE);
    close_place(&p);
}

static void test_the_oldest_go_first(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    for (uint64_t seed = 0; seed < 16; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
        set_age(path_of(&p, seed), (int64_t)(1000 - seed));
    }
    assert_int_equal(kvft_get(p.tier, 0, SIZE), KVF_WHY_NONE);    /* used: young again */
    assert_int_equal(kvft_borrow(p.tier, 2, SIZE), KVF_WHY_NONE); /* also */
    for (uint64_t seed = 16; seed < 19; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    assert_true(exists(path_of(&p, 0)));
    assert_false(exists(path_of(&p, 1)));
    assert_true(exists(path_of(&p, 2)));
    bool gone = true;
    for (uint64_t seed = 3; seed < 19; seed++) { /* in order of age */
        assert_true(gone || exists(path_of(&p, seed)));
        gone = gone && !exists(path_of(&p, seed));
    }
    assert_false(gone);
    assert_true(info_of(p.tier).used_bytes <= 1 << 20);
    assert_int_equal(info_of(p.tier).used_bytes, (int64_t)kvft_count(p.tier).records * CHARGE);
    close_place(&p);
}

static void test_the_bound_holds_between_tiers(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    kvfi_tier *other = kvft_tier(p.url);
    for (uint64_t seed = 0; seed < 200; seed++) {
        assert_int_equal(kvft_put(seed % 2 == 0 ? p.tier : other, seed, SIZE), KVF_WHY_NONE);
        assert_true(kvft_count(p.tier).records * CHARGE <= (1u << 20) + CHARGE);
    }
    assert_true(kvft_count(p.tier).records > 10);
    other->ops->close(other);
    close_place(&p);
}

/* A process that looks at a folder with another bound, even to count it, evicts nothing; one that stores does. */
static void test_opening_does_not_evict(void **state) {
    (void)state;
    place p = open_place("?max=4M");
    for (uint64_t seed = 0; seed < 40; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    p.tier->ops->close(p.tier);
    char url[2 * PATH_MAX];
    snprintf(url, sizeof url, "file:%s/store?max=1M", p.dir);
    for (int counted = 0; counted < 2; counted++) {
        p.tier = kvft_tier(url);
        assert_int_equal(kvft_count(p.tier).records, 40);
        assert_int_equal(info_of(p.tier).num_records, 40);
        p.tier->ops->close(p.tier);
        unlink(below(&p, "usage"));
    }
    p.tier = kvft_tier(url);
    assert_int_equal(kvft_put(p.tier, 41, SIZE), KVF_WHY_NONE);
    assert_true(kvft_count(p.tier).records * CHARGE <= 1u << 20);
    close_place(&p);
}

static void test_too_large_for_the_bound(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_put(p.tier, 2, 1u << 20), KVF_WHY_FULL);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);
    close_place(&p);
}

static void test_borrowed_bytes_outlive_eviction(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    kvft_value v;
    kvft_value_init(&v, 0, SIZE);
    assert_int_equal(kvft_put(p.tier, 0, SIZE), KVF_WHY_NONE);
    kvfi_loan loan;
    assert_int_equal(p.tier->ops->borrow(p.tier, &loan, &v.item.addr, 0, KVFI_NEVER), KVF_WHY_NONE);
    for (uint64_t seed = 1; seed < 40; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    assert_int_equal(kvft_get(p.tier, 0, SIZE), KVF_WHY_ABSENT);
    assert_memory_equal(loan.data, v.bytes, v.item.bytes);
    p.tier->ops->give_back(p.tier, &loan);
    kvft_value_cleanup(&v);
    close_place(&p);
}

/* More of them than a sweep has room for at first. */
static void test_very_many_files_are_swept(void **state) {
    (void)state;
    enum { NUM = 1100, LEFT = 100 };
    place p = open_place("");
    for (uint64_t seed = 0; seed < NUM; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, 1), KVF_WHY_NONE);
    }
    ((kvfi_file *)p.tier)->max_bytes = LEFT * 4096;
    kvfi_file_sweep((kvfi_file *)p.tier, 0, KVFI_NEVER);
    assert_in_range(kvft_count(p.tier).records, 1, LEFT);
    assert_int_equal(counted(&p), (int64_t)kvft_count(p.tier).records * 4096);
    kvfi_usage usage = {.records = 0};
    assert_true(kvfi_file_usage_read((kvfi_file *)p.tier, &usage));
    assert_int_equal(usage.records, kvft_count(p.tier).records);
    close_place(&p);
}

/* The shared count is a hint: lost, damaged or wrong, it is counted again. */
static void test_a_wrong_count_is_corrected(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    for (uint64_t seed = 0; seed < 12; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    p.tier->ops->close(p.tier);
    assert_int_equal(unlink(below(&p, "usage")), 0);
    p.tier = kvft_tier(p.url);
    assert_int_equal(info_of(p.tier).num_records, 12);
    p.tier->ops->close(p.tier);
    write_at(below(&p, "usage"), 8, "\xff\xff\xff", 3); /* fails its checksum */
    p.tier = kvft_tier(p.url);
    assert_int_equal(info_of(p.tier).used_bytes, 12 * CHARGE);
    p.tier->ops->close(p.tier);
    assert_int_equal(truncate(below(&p, "usage"), 3), 0);
    p.tier = kvft_tier(p.url);
    assert_int_equal(info_of(p.tier).used_bytes, 12 * CHARGE);

    kvfi_usage usage = {.bytes = (uint64_t)1 << 40, .records = 5, .swept_s = time(NULL)}; /* far too much */
    int fd = kvfi_file_usage_lock((kvfi_file *)p.tier);
    assert_true(fd >= 0);
    kvfi_file_usage_set((kvfi_file *)p.tier, fd, &usage);
    close(fd);
    assert_int_equal(kvft_put(p.tier, 12, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_count(p.tier).records, 13); /* nothing was evicted for it */
    assert_int_equal(info_of(p.tier).used_bytes, 13 * CHARGE);

    usage = (kvfi_usage){.swept_s = time(NULL) - 4000}; /* too little, and old */
    fd = kvfi_file_usage_lock((kvfi_file *)p.tier);
    kvfi_file_usage_set((kvfi_file *)p.tier, fd, &usage);
    close(fd);
    assert_int_equal(kvft_put(p.tier, 13, SIZE), KVF_WHY_NONE);
    assert_int_equal(info_of(p.tier).used_bytes, 14 * CHARGE);

    usage = (kvfi_usage){.swept_s = time(NULL), .writers = 17}; /* too little: many were killed */
    fd = kvfi_file_usage_lock((kvfi_file *)p.tier);
    kvfi_file_usage_set((kvfi_file *)p.tier, fd, &usage);
    close(fd);
    assert_int_equal(kvft_put(p.tier, 14, SIZE), KVF_WHY_NONE);
    assert_int_equal(info_of(p.tier).used_bytes, 15 * CHARGE);
    close_place(&p);
}

/* A process that was stopped while it sweeps keeps the lock. The bound holds all the same, with an eighth more. */
static void test_a_stuck_sweeper_is_passed_by(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    int fd = kvfi_file_usage_lock((kvfi_file *)p.tier);
    assert_true(fd >= 0);
    for (uint64_t seed = 0; seed < 100; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
        assert_true(kvft_count(p.tier).records * CHARGE <= (1u << 20) * 9 / 8 + CHARGE);
    }
    assert_int_equal(kvft_get(p.tier, 99, SIZE), KVF_WHY_NONE);
    close(fd);
    assert_int_equal(kvft_put(p.tier, 100, SIZE), KVF_WHY_NONE);
    assert_true(info_of(p.tier).used_bytes <= 1 << 20);
    close_place(&p);
}

static int unlink_fails(int dir, const char *path, int flags) {
    (void)dir, (void)path, (void)flags;
    errno = EACCES;
    return -1;
}

/* Where nothing can be evicted, nothing more is stored, and nobody scans the folder for each value. */
static _Atomic int num_opens;
static int count_openat(int dir, const char *path, int flags, mode_t mode) {
    num_opens++;
    return kvfi_sys_real.openat(dir, path, flags, mode);
}
static void test_when_nothing_can_be_evicted(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    kvfi_systable *table = replace();
    table->unlinkat = unlink_fails;
    table->openat = count_openat;
    kvf_reason why = KVF_WHY_NONE;
    for (uint64_t seed = 0; seed < 100; seed++) {
        why = kvft_put(p.tier, seed, SIZE);
    }
    assert_int_equal(why, KVF_WHY_FULL);
    assert_true(kvft_count(p.tier).records * CHARGE <= (1u << 20) * 9 / 8 + CHARGE);
    assert_true(num_opens < 3 * 260);
    restore();
    close_place(&p);
}

/* A folder so large, or a disk so slow, that no scan ends in time: files that were seen are evicted, and not every save
 * pays for a scan. */
static int slow_fstatat(int dir, const char *path, struct stat *out, int flags) {
    slow_us += 1000;
    return kvfi_sys_real.fstatat(dir, path, out, flags);
}
static void test_scans_that_are_cut_short(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    for (uint64_t seed = 0; seed < 200; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, 100), KVF_WHY_NONE);
    }
    kvfi_systable *table = replace();
    table->now_us = slow_now;
    table->fstatat = slow_fstatat;
    table->openat = count_openat;
    num_opens = 0;
    for (uint64_t seed = 200; seed < 400; seed++) {
        kvft_value v;
        kvft_value_init(&v, seed, 100);
        kvfi_feed feed = {.items = &v.item, .num = 1, .limit = 1, .deadline_us = kvfi_deadline(60000)};
        p.tier->ops->put(p.tier, &feed);
        kvft_value_cleanup(&v);
    }
    restore();
    assert_true(num_opens < 20 * 260);
    kvft_census census = kvft_count(p.tier);
    assert_true(census.records >= 200 && census.records * 4096 <= (1u << 20) * 9 / 8);
    close_place(&p);
}

static void test_time_to_live(void **state) {
    (void)state;
    place p = open_place("?ttl=100");
    for (uint64_t seed = 0; seed < 4; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    set_age(path_of(&p, 0), 101);
    set_age(path_of(&p, 1), 101);
    set_age(path_of(&p, 2), 90);
    set_age(path_of(&p, 3), 101);
    assert_int_equal(kvft_get(p.tier, 0, SIZE), KVF_WHY_ABSENT);
    assert_int_equal(kvft_peek(p.tier, 1), KVF_WHY_ABSENT);
    assert_int_equal(kvft_get(p.tier, 2, SIZE), KVF_WHY_NONE);
    assert_false(exists(path_of(&p, 0)));
    assert_false(exists(path_of(&p, 1)));
    assert_true(age_of(path_of(&p, 2)) < 50);
    assert_int_equal(kvft_count(p.tier).records, 1);
    assert_true(exists(path_of(&p, 3)));
    kvfi_file_sweep((kvfi_file *)p.tier, 0, KVFI_NEVER);
    ((kvfi_file *)p.tier)->swept_s = 0;
    int fd = kvfi_file_usage_lock((kvfi_file *)p.tier);
    kvfi_file_usage_set((kvfi_file *)p.tier, fd, &(kvfi_usage){0});
    close(fd);
    kvfi_file_sweep((kvfi_file *)p.tier, 0, KVFI_NEVER);
    assert_false(exists(path_of(&p, 3)));
    assert_int_equal(info_of(p.tier).num_records, 1); /* what it has removed does not count */
    set_age(path_of(&p, 2), 101);
    ((kvfi_file *)p.tier)->swept_s = 0;
    replace()->unlinkat = unlink_fails;
    kvfi_file_sweep((kvfi_file *)p.tier, 0, KVFI_NEVER);
    restore();
    assert_int_equal(info_of(p.tier).num_records, 1); /* what it could not, does */
    close_place(&p);
}

/* ---- file systems that lack something */

static int no_tmpfile_open(const char *path, int flags, mode_t mode) {
    if ((flags & O_TMPFILE) == O_TMPFILE) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return kvfi_sys_real.open(path, flags, mode);
}

static int no_proc_linkat(int fromdir, const char *from, int todir, const char *to, int flags) {
    (void)fromdir, (void)from, (void)todir, (void)to, (void)flags;
    errno = ENOENT;
    return -1;
}

static void test_without_unnamed_files(void **state) {
    (void)state;
    for (int without_proc = 0; without_proc < 2; without_proc++) {
        place p = open_place("");
        kvfi_systable *table = replace();
        if (without_proc) {
            table->linkat = no_proc_linkat;
            table->fstatat = no_proc_fstatat;
        } else {
            table->open = no_tmpfile_open;
        }
        for (uint64_t seed = 0; seed < 5; seed++) {
            assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
            assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
            assert_int_equal(kvft_get(p.tier, seed, SIZE), KVF_WHY_NONE);
        }
        cut_short(path_of(&p, 1));
        assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
        assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_NONE);
        restore();
        assert_int_equal(num_temporaries(&p), 0);
        assert_true(((kvfi_file *)p.tier)->no_tmpfile);
        close_place(&p);
    }
}

static void test_temporaries_of_the_dead_go(void **state) {
    (void)state;
    place p = open_place("");
    assert_int_equal(mkdir(below(&p, "tmp"), 0700), 0);
    make_file(below(&p, "tmp/dead"), 1000);
    make_file(below(&p, "tmp/live"), 1000);
    make_file(below(&p, "tmp/young"), 1000);
    set_age(below(&p, "tmp/dead"), 1000);
    set_age(below(&p, "tmp/live"), 1000);
    int fd = open(below(&p, "tmp/live"), O_RDWR);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0); /* its writer is at it */
    p.tier->ops->close(p.tier);
    unlink(below(&p, "usage"));
    p.tier = kvft_tier(p.url);
    assert_false(exists(below(&p, "tmp/dead")));
    assert_true(exists(below(&p, "tmp/live")));
    assert_true(exists(below(&p, "tmp/young")));
    close(fd);
    close_place(&p);
}

/* A link in the place of their folder leads to what is not of the store. */
static void test_no_link_to_temporaries_is_followed(void **state) {
    (void)state;
    place p = open_place("");
    char other[PATH_MAX], file[2 * PATH_MAX];
    snprintf(other, sizeof other, "%s/other", p.dir);
    snprintf(file, sizeof file, "%s/old", other);
    assert_int_equal(mkdir(other, 0700), 0);
    make_file(file, 1000);
    set_age(file, 1000);
    p.tier->ops->close(p.tier);
    unlink(below(&p, "usage"));
    (void)rmdir(below(&p, "tmp"));
    assert_int_equal(symlink(other, below(&p, "tmp")), 0);
    p.tier = kvft_tier(p.url);
    kvfi_file_sweep((kvfi_file *)p.tier, 1, KVFI_NEVER);
    assert_true(exists(file));
    close_place(&p);
}

/* ---- remove, clear, walk */

static void test_remove_and_clear(void **state) {
    (void)state;
    place p = open_place("");
    kvfi_addr addr;
    for (uint64_t seed = 995; seed < 1010; seed++) { /* 5 in one space, 10 in the next */
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    kvft_addr(&addr, 995);
    assert_int_equal(p.tier->ops->remove(p.tier, NULL, &addr, KVFI_NEVER), KVF_OK);
    assert_int_equal(p.tier->ops->remove(p.tier, NULL, &addr, KVFI_NEVER), KVF_MISS);
    uint64_t removed = 0;
    assert_int_equal(p.tier->ops->clear(p.tier, &removed, NULL, &addr.space, KVF_MS(1000)), KVF_OK);
    assert_int_equal(removed, 4);
    char space[2 * PATH_MAX];
    snprintf(space, sizeof space, "%s", path_of(&p, 995));
    for (int i = 0; i < 2; i++) {
        *strrchr(space, '/') = '\0';
        assert_false(exists(space)); /* its folders are gone, too */
    }
    assert_int_equal(kvft_count(p.tier).records, 10);
    assert_int_equal(info_of(p.tier).num_records, 10);

    char *readme = strdup(below(&p, "README"));
    make_file(readme, 10);
    char foreign[PATH_MAX];
    snprintf(foreign, sizeof foreign, "%s.bak", path_of(&p, 1001));
    make_file(foreign, 10);
    assert_int_equal(kvft_count(p.tier).foreign, 2);
    assert_int_equal(p.tier->ops->clear(p.tier, &removed, NULL, NULL, KVF_MS(1000)), KVF_OK);
    assert_int_equal(removed, 10);
    assert_true(exists(readme)); /* what is not ours stays */
    assert_true(exists(foreign));
    assert_int_equal(info_of(p.tier).used_bytes, 0);
    assert_int_equal(kvft_put(p.tier, 995, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(p.tier, 995, SIZE), KVF_WHY_NONE);
    free(readme);
    close_place(&p);
}

static void test_remove_many(void **state) {
    (void)state;
    enum { NUM = 20 };
    place p = open_place("");
    kvfi_addr addrs[NUM];
    kvf_reason whys[NUM];
    for (uint64_t seed = 0; seed < NUM; seed++) {
        kvft_addr(&addrs[seed], seed);
        assert_int_equal(seed % 4 == 0 ? 0 : kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    p.tier->ops->each(p.tier, KVFI_REMOVE, addrs, NUM, whys, kvfi_sys->now_us(), 0);
    assert_int_equal(whys[0], KVF_WHY_BUDGET);
    assert_int_equal(whys[NUM - 1], KVF_WHY_BUDGET);
    assert_int_equal(info_of(p.tier).num_records, NUM * 3 / 4);
    replace()->unlinkat = unlink_fails;
    p.tier->ops->each(p.tier, KVFI_REMOVE, addrs, NUM, whys, KVFI_NEVER, 0);
    restore();
    for (size_t i = 0; i < NUM; i++) {
        assert_int_equal(whys[i], i % 4 == 0 ? KVF_WHY_ABSENT : KVF_WHY_UNREACHABLE);
    }
    p.tier->ops->each(p.tier, KVFI_REMOVE, addrs, NUM, whys, KVFI_NEVER, 0);
    for (size_t i = 0; i < NUM; i++) {
        assert_int_equal(whys[i], i % 4 == 0 ? KVF_WHY_ABSENT : KVF_WHY_NONE);
        assert_false(exists(path_of(&p, i)));
    }
    assert_int_equal(info_of(p.tier).num_records, 0);
    assert_int_equal(info_of(p.tier).used_bytes, 0);
    close_place(&p);
}

static int see_name(void *ctx, const kvfi_sight *sight) {
    char *path = ctx;
    assert_int_equal(sight->kind, KVF_ENTRY_BLOCK);
    assert_true(sight->head_len >= KVFI_HEADER_BYTES && sight->head_len <= KVFI_SIGHT_BYTES);
    assert_int_equal(sight->ttl_ms, -1);
    snprintf(path, PATH_MAX, "%s", sight->name);
    return 0;
}

static void test_the_walk_names_files(void **state) {
    (void)state;
    place p = open_place("");
    char name[PATH_MAX], path[2 * PATH_MAX];
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(p.tier->ops->walk(p.tier, NULL, NULL, false, see_name, name, KVF_MS(1000)), KVF_OK);
    snprintf(path, sizeof path, "%s/store/%s", p.dir, name);
    assert_string_equal(path, path_of(&p, 1));
    close_place(&p);
}

/* An operator empties the folder under running processes. */
static void test_the_folder_is_removed_under_it(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    for (uint64_t seed = 0; seed < 10; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    char *store = malloc(PATH_MAX);
    snprintf(store, PATH_MAX, "%s/store", p.dir);
    kvft_remove_dir(store);
    assert_int_equal(kvft_get(p.tier, 1, SIZE), KVF_WHY_ABSENT);
    assert_int_equal(kvft_count(p.tier).records, 0);
    for (uint64_t seed = 0; seed < 50; seed++) {
        assert_int_equal(kvft_put(p.tier, seed, SIZE), KVF_WHY_NONE);
        assert_int_equal(kvft_get(p.tier, seed, SIZE), KVF_WHY_NONE);
    }
    assert_true(kvft_count(p.tier).records * CHARGE <= 1u << 20);
    close_place(&p);
}

/* ---- tenants */

static kvfi_tier *tenant_of(const place *p, const char *params) {
    char url[2 * PATH_MAX];
    snprintf(url, sizeof url, "file:%s/store?%s", p->dir, params);
    return kvft_tier(url);
}

static size_t num_left(kvfi_tier *tier) {
    size_t left = 0;
    for (uint64_t seed = 0; seed < 10; seed++) {
        left += kvft_get(tier, seed, SIZE) == KVF_WHY_NONE;
    }
    return left;
}

/* A neighbour stores, clears and has bounds as it likes: nothing of ours goes. */
static void test_no_tenant_evicts_another(void **state) {
    (void)state;
    static const char *const neighbours[] = {"tenant=b&tenant_max=1M", "tenant=b&max=1M", "max=1M", "tenant=c&ttl=1"};
    place p = open_place("?max=1M");
    kvfi_tier *ours = tenant_of(&p, "tenant=a&tenant_max=1M");
    for (uint64_t seed = 0; seed < 10; seed++) {
        assert_int_equal(kvft_put(ours, seed, SIZE), KVF_WHY_NONE);
    }
    uint64_t removed = 0;
    for (size_t i = 0; i < sizeof neighbours / sizeof *neighbours; i++) {
        kvfi_tier *other = tenant_of(&p, neighbours[i]);
        assert_int_equal(num_left(other), 0); /* nor does it see them */
        for (uint64_t seed = 0; seed < 60; seed++) {
            assert_int_equal(kvft_put(other, 100 + seed, SIZE), KVF_WHY_NONE);
        }
        (void)kvfi_file_sweep((kvfi_file *)other, 100 << 20, KVFI_NEVER); /* as on a full disk */
        assert_int_equal(other->ops->clear(other, &removed, NULL, NULL, KVF_MS(1000)), KVF_OK);
        other->ops->close(other);
        assert_int_equal(num_left(ours), 10);
    }
    for (uint64_t seed = 200; seed < 260; seed++) { /* its own bound holds */
        assert_int_equal(kvft_put(ours, seed, SIZE), KVF_WHY_NONE);
    }
    assert_true(kvft_count(ours).records * CHARGE <= 1u << 20);
    assert_int_equal(info_of(ours).max_bytes, 1 << 20);
    ours->ops->close(ours);
    close_place(&p);
}

/* ---- opening */

static kvf_status try_open(const char *text, kvf_error *err) {
    kvfi_url *url = NULL;
    kvfi_tier *tier = NULL;
    *err = (kvf_error){0};
    kvf_status status = kvfi_url_parse(&url, err, text);
    if (status == KVF_OK) {
        status = kvfi_file_open(&tier, err, url);
    }
    if (status == KVF_OK) {
        tier->ops->close(tier);
    } else {
        assert_true(err->what[0] != '\0');
    }
    return status;
}

static void test_what_the_operator_must_mend(void **state) {
    (void)state;
    char *dir = kvft_temp_dir();
    char text[3 * PATH_MAX], path[PATH_MAX];
    kvf_error err;
    snprintf(path, sizeof path, "%s/a-file", dir);
    make_file(path, 10);
    snprintf(text, sizeof text, "file:%s", path);
    assert_int_equal(try_open(text, &err), KVF_CONFIG);
    assert_non_null(strstr(err.what, "is not a folder"));
    snprintf(text, sizeof text, "file:%s/below", path);
    assert_int_equal(try_open(text, &err), KVF_CONFIG);
    assert_non_null(strstr(err.what, "can't be created"));
    snprintf(path, sizeof path, "%s/kvf1", dir);
    make_file(path, 10);
    snprintf(text, sizeof text, "file:%s", dir);
    assert_int_equal(try_open(text, &err), KVF_CONFIG);
    assert_non_null(strstr(err.what, "is not a folder"));
    unlink(path);
    snprintf(text, sizeof text, "file:%s/x/y/z?max=1M&ttl=5", dir); /* made as far as they are missing */
    assert_int_equal(try_open(text, &err), KVF_OK);
    snprintf(text, sizeof text, "file:%s///", dir);
    assert_int_equal(try_open(text, &err), KVF_OK);
    assert_int_equal(try_open("file:", &err), KVF_CONFIG);
    assert_int_equal(try_open("file://host/path", &err), KVF_CONFIG);
    snprintf(text, sizeof text, "file:%s?size=1G", dir);
    assert_int_equal(try_open(text, &err), KVF_CONFIG);
    snprintf(text, sizeof text, "file:%s?max=10", dir);
    assert_int_equal(try_open(text, &err), KVF_CONFIG);
    static const char *const refused[] = {"tenant_max=1M",
                                          "tenant=a&tenant_max=1M&max=2M",
                                          "tenant=a&tenant_max=1K",
                                          "tenant=..",
                                          "tenant=",
                                          "tenant=a/b",
                                          "tenant=A",
                                          "tenant=a%20b"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        snprintf(text, sizeof text, "file:%s?%s", dir, refused[i]);
        assert_int_equal(try_open(text, &err), KVF_CONFIG);
    }
    for (int bytes = 64; bytes <= 65; bytes++) { /* the longest name of a tenant, and one byte more */
        snprintf(text, sizeof text, "file:%s?tenant=%0*d", dir, bytes, 7);
        assert_int_equal(try_open(text, &err), bytes == 64 ? KVF_OK : KVF_CONFIG);
    }
    assert_int_equal(try_open("file:/proc/kvferry", &err), KVF_CONFIG);
    snprintf(text, sizeof text, "file:/tmp/%0*d", PATH_MAX, 7);
    assert_int_equal(try_open(text, &err), KVF_CONFIG);
    kvft_remove_dir(dir);
}

static void test_opening_without_memory(void **state) {
    (void)state;
    char *dir = kvft_temp_dir();
    char text[PATH_MAX];
    kvf_error err;
    bool hit = true;
    snprintf(text, sizeof text, "file:%s/store?max=1M&tenant=a", dir);
    for (uint64_t nth = 1; hit; nth++) {
        kvft_faults_arm(KVFT_ALLOC, nth);
        kvf_status status = try_open(text, &err);
        uint64_t live = kvft_faults_live_allocs();
        hit = kvft_faults_disarm();
        assert_int_equal(status, hit ? KVF_NOMEM : KVF_OK);
        assert_int_equal(live, 0);
    }
    kvft_remove_dir(dir);
}

/* What may not be read or written is told, once for each; what is not there, or went wrong otherwise, is not. */
static int num_told;
static void count_told(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx, (void)level, (void)message;
    num_told++;
}

static void test_what_is_warned_of(void **state) {
    (void)state;
    static const struct {
        int error, told;
    } cases[] = {{EROFS, 1}, {EACCES, 1}, {EPERM, 1}, {ENOENT, 0}, {EIO, 0}, {ENOSPC, 0}, {EMFILE, 0}};
    kvf_set_log(count_told, NULL, KVF_LOG_WARN);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        place p = open_place("");
        kvfi_path path;
        kvfi_file_path_below((const kvfi_file *)p.tier, &path, "a");
        for (int writing = 0; writing < 2; writing++) {
            num_told = 0;
            for (int again = 0; again < 2; again++) {
                errno = cases[i].error;
                kvfi_file_warn((kvfi_file *)p.tier, &path, writing);
                assert_int_equal(errno, cases[i].error);
                assert_int_equal(num_told, cases[i].told);
            }
        }
        close_place(&p);
    }
    kvf_set_log(NULL, NULL, KVF_LOG_WARN);
}

/* ---- in a child: as another user, or with mounts of its own. Exit codes: 0 fine, 77 can't be tried here, else a line
 * number. */

#define EXPECT(cond)                                        \
    do {                                                    \
        if (!(cond)) {                                      \
            _exit(__LINE__ % 70 == 0 ? 71 : __LINE__ % 70); \
        }                                                   \
    } while (0)

static void expect_child(int (*run)(const char *dir), const char *what) {
    char *dir = kvft_temp_dir();
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        kvft_exit(run(dir));
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
        printf("not tried here: %s\n", what);
    } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        printf("%s: wait status %x (line %d modulo 70)\n", what, (unsigned)status, WEXITSTATUS(status));
        fail();
    }
    kvft_remove_dir(dir);
}

static int num_warnings;
static void count_warning(void *ctx, kvf_log_level level, const char *message) {
    (void)ctx;
    num_warnings += level == KVF_LOG_WARN && strstr(message, "can't be written") != NULL;
}

/* chmod and chown of all below a folder. */
static mode_t bits_to_set, bits_to_clear;
static int change_mode(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)kind, (void)at;
    return chmod(path, ((st->st_mode | bits_to_set) & ~bits_to_clear) & 07777);
}
static void change_modes(const char *path, mode_t set, mode_t clear) {
    bits_to_set = set;
    bits_to_clear = clear;
    EXPECT(nftw(path, change_mode, 16, FTW_PHYS) == 0);
}
static int change_owner(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st, (void)kind, (void)at;
    return lchown(path, 65534, 65534);
}

/* root is stopped by no mode. */
static bool become_nobody(const char *dir) {
    return geteuid() != 0 || (nftw(dir, change_owner, 16, FTW_PHYS) == 0 && setgid(65534) == 0 && setuid(65534) == 0);
}

static int live_read_only(const char *dir) {
    char url[PATH_MAX], store[PATH_MAX], records[2 * PATH_MAX];
    kvf_error err;
    uint64_t removed;
    snprintf(url, sizeof url, "file:%s/store", dir);
    snprintf(store, sizeof store, "%s/store", dir);
    snprintf(records, sizeof records, "%s/kvf1", store);
    kvfi_tier *tier = kvft_tier(url);
    EXPECT(kvft_put(tier, 1, SIZE) == KVF_WHY_NONE);
    set_age(path_of(&(place){.dir = (char *)(uintptr_t)dir}, 1), 1000);
    tier->ops->close(tier);
    if (!become_nobody(dir)) {
        return 77;
    }
    change_modes(store, 0, 0222);
    kvf_set_log(count_warning, NULL, KVF_LOG_WARN);
    tier = kvft_tier(url);
    EXPECT(kvft_get(tier, 1, SIZE) == KVF_WHY_NONE);
    EXPECT(kvft_borrow(tier, 1, SIZE) == KVF_WHY_NONE);
    for (uint64_t seed = 2; seed < 6; seed++) {
        EXPECT(kvft_put(tier, seed, SIZE) == KVF_WHY_UNREACHABLE);
    }
    EXPECT(num_warnings == 1);
    kvfi_addr addr;
    kvft_addr(&addr, 1);
    EXPECT(tier->ops->remove(tier, &err, &addr, KVFI_NEVER) == KVF_IO);
    EXPECT(tier->ops->clear(tier, &removed, &err, NULL, KVF_MS(1000)) == KVF_IO && removed == 0);
    EXPECT(kvft_count(tier).damaged == 0);
    tier->ops->close(tier);

    EXPECT(chmod(records, 0) == 0);
    EXPECT(try_open(url, &err) == KVF_CONFIG && strstr(err.what, "can't be read") != NULL);

    EXPECT(chmod(records, 0700) == 0);
    change_modes(store, 0200, 0);
    kvft_remove_dir(strdup(records));
    EXPECT(chmod(store, 0500) == 0);
    tier = kvft_tier(url); /* empty, and nothing can be put in it */
    EXPECT(kvft_get(tier, 1, SIZE) == KVF_WHY_ABSENT);
    EXPECT(kvft_put(tier, 1, SIZE) == KVF_WHY_UNREACHABLE);
    tier->ops->close(tier);
    EXPECT(chmod(store, 0700) == 0);
    return 0;
}

static void test_a_read_only_folder(void **state) {
    (void)state;
    expect_child(live_read_only, "a read-only folder");
}

static bool mount_small(const char *dir, const char *options) {
    return unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("tmpfs", dir, "tmpfs", 0, options) == 0;
}

static int live_on_full_disk(const char *dir) {
    char url[PATH_MAX], path[PATH_MAX];
    if (!mount_small(dir, "size=2m")) {
        return 77;
    }
    snprintf(url, sizeof url, "file:%s/store?max=1G", dir);
    kvfi_tier *tier = kvft_tier(url);
    for (uint64_t seed = 0; seed < 200; seed++) { /* more than fits: the oldest make room, though the bound is far */
        EXPECT(kvft_put(tier, seed, SIZE) == KVF_WHY_NONE);
        EXPECT(kvft_get(tier, seed, SIZE) == KVF_WHY_NONE);
    }
    EXPECT(kvft_count(tier).records > 15 && kvft_count(tier).damaged == 0);
    uint64_t removed;
    EXPECT(tier->ops->clear(tier, &removed, NULL, NULL, KVF_MS(1000)) == KVF_OK);
    snprintf(path, sizeof path, "%s/other", dir); /* somebody else fills it */
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    static char junk[4096];
    while (write(fd, junk, sizeof junk) > 0) {
    }
    EXPECT(kvft_put(tier, 1, SIZE) == KVF_WHY_FULL);
    EXPECT(kvft_get(tier, 1, SIZE) == KVF_WHY_ABSENT);
    EXPECT(ftruncate(fd, 0) == 0);
    EXPECT(kvft_put(tier, 1, SIZE) == KVF_WHY_NONE);
    EXPECT(kvft_get(tier, 1, SIZE) == KVF_WHY_NONE);
    close(fd);
    tier->ops->close(tier);
    return umount(dir) == 0 ? 0 : 70;
}

static void test_a_full_disk(void **state) {
    (void)state;
    expect_child(live_on_full_disk, "a full disk (needs the right to mount)");
}

static int live_without_inodes(const char *dir) {
    char url[PATH_MAX];
    if (!mount_small(dir, "size=20m,nr_inodes=60")) {
        return 77;
    }
    snprintf(url, sizeof url, "file:%s/store?max=1G", dir);
    kvfi_tier *tier = kvft_tier(url);
    for (uint64_t seed = 0; seed < 200; seed++) {
        kvf_reason why = kvft_put(tier, seed, SIZE);
        EXPECT(why == KVF_WHY_NONE || why == KVF_WHY_FULL);
        EXPECT(kvft_get(tier, seed, SIZE) == (why == KVF_WHY_NONE ? KVF_WHY_NONE : KVF_WHY_ABSENT));
    }
    tier->ops->close(tier);
    return umount(dir) == 0 ? 0 : 70;
}

static void test_a_disk_without_inodes(void **state) {
    (void)state;
    expect_child(live_without_inodes, "a disk without inodes (needs the right to mount)");
}

static int live_mounted_read_only(const char *dir) {
    char url[PATH_MAX];
    if (!mount_small(dir, "size=20m")) {
        return 77;
    }
    snprintf(url, sizeof url, "file:%s/store", dir);
    kvfi_tier *tier = kvft_tier(url);
    EXPECT(kvft_put(tier, 1, SIZE) == KVF_WHY_NONE);
    tier->ops->close(tier);
    EXPECT(mount(NULL, dir, NULL, MS_REMOUNT | MS_RDONLY, NULL) == 0);
    kvf_set_log(count_warning, NULL, KVF_LOG_WARN);
    tier = kvft_tier(url);
    EXPECT(kvft_get(tier, 1, SIZE) == KVF_WHY_NONE);
    EXPECT(kvft_put(tier, 2, SIZE) == KVF_WHY_UNREACHABLE);
    EXPECT(num_warnings == 1);
    tier->ops->close(tier);
    return umount(dir) == 0 ? 0 : 70;
}

static void test_a_read_only_mount(void **state) {
    (void)state;
    expect_child(live_mounted_read_only, "a read-only mount (needs the right to mount)");
}

/* ---- the doctor */

static void test_the_doctor(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    const char *found = diagnose(p.tier);
    assert_non_null(strstr(found, "folder: "));
    assert_null(strstr(found, "open-permissions"));
    assert_null(strstr(found, "max-over-free"));
    assert_int_equal(chmod(below(&p, ""), 0755), 0);
    replace()->open = no_tmpfile_open;
    found = diagnose(p.tier);
    restore();
    assert_non_null(strstr(found, "open-permissions"));
    assert_non_null(strstr(found, "named-temporaries"));
    p.tier->ops->close(p.tier);
    char url[2 * PATH_MAX];
    snprintf(url, sizeof url, "file:%s/store?max=900000G", p.dir);
    p.tier = kvft_tier(url);
    assert_non_null(strstr(diagnose(p.tier), "max-over-free"));
    close_place(&p);
}

static uint32_t fs_type; /* 0: nobody can tell */
static int typed_statfs(const char *path, struct statfs *out) {
    int rc = fs_type == 0 ? -1 : kvfi_sys_real.statfs(path, out);
    out->f_type = fs_type;
    return rc;
}

static void test_file_systems_are_told_apart(void **state) {
    (void)state;
    static const struct {
        uint32_t type;
        const char *finding;
    } systems[] = {
        {0x6969, "network-file-system"},
        {0x517b, "network-file-system"},
        {0xff534d42, "network-file-system"},
        {0xfe534d42, "network-file-system"},
        {0x00c36400, "network-file-system"},
        {0x0bd00bd0, "network-file-system"},
        {0x47504653, "network-file-system"},
        {0x01021997, "network-file-system"},
        {0x65735546, "network-file-system"},
        {0x5346414f, "network-file-system"},
        {0x7461636f, "network-file-system"},
        {0x01161970, "network-file-system"},
        {0x01021994, "in-memory"},
        {0x858458f6, "in-memory"},
        {0xef53, NULL},
        {0x9123683e, NULL},
        {0, NULL},
    };
    for (size_t i = 0; i < sizeof systems / sizeof *systems; i++) {
        fs_type = systems[i].type;
        replace()->statfs = typed_statfs;
        place p = open_place("");
        const char *found = diagnose(p.tier);
        const char *names[] = {"network-file-system", "in-memory"};
        for (size_t j = 0; j < 2; j++) {
            bool expected = systems[i].finding != NULL && strcmp(systems[i].finding, names[j]) == 0;
            if ((strstr(found, names[j]) != NULL) != expected) {
                fail_msg("%#x: %s", (unsigned)fs_type, found);
            }
        }
        restore();
        close_place(&p);
    }
}

static struct statvfs disk;
static int small_statvfs(const char *path, struct statvfs *out) {
    (void)path;
    *out = disk;
    return 0;
}

static void test_the_doctor_looks_at_the_disk(void **state) {
    (void)state;
    static const struct {
        uint64_t blocks, available, files, files_available;
        const char *finding;
    } disks[] = {
        {12800, 256, 0, 0, NULL},           {12850, 256, 0, 0, "disk-nearly-full"}, /* less than a fiftieth */
        {1000, 256, 1000, 10, NULL},        {1000, 255, 1000, 10, "max-over-free"},
        {1000, 256, 1000, 9, "few-inodes"}, {0, 256, 0, 0, NULL}, /* a file system that does not count */
    };
    place p = open_place("?max=1M"); /* 256 blocks */
    for (size_t i = 0; i < sizeof disks / sizeof *disks; i++) {
        disk = (struct statvfs){.f_frsize = 4096,
                                .f_blocks = disks[i].blocks,
                                .f_bavail = disks[i].available,
                                .f_files = disks[i].files,
                                .f_favail = disks[i].files_available};
        replace()->statvfs = small_statvfs;
        const char *found = diagnose(p.tier);
        restore();
        static const char *const names[] = {"disk-nearly-full", "max-over-free", "few-inodes"};
        for (size_t j = 0; j < sizeof names / sizeof *names; j++) {
            bool expected = disks[i].finding != NULL && strcmp(disks[i].finding, names[j]) == 0;
            if ((strstr(found, names[j]) != NULL) != expected) {
                fail_msg("disk %zu: %s", i, found);
            }
        }
    }
    close_place(&p);
}

static int deny_access(int dir, const char *path, int mode, int flags) {
    (void)dir, (void)path, (void)mode, (void)flags;
    errno = EACCES;
    return -1;
}

/* Its own folders, of spaces, of shards, and for temporaries; not what else lies there. */
static void test_the_doctor_counts_folders(void **state) {
    (void)state;
    place p = open_place("");
    assert_int_equal(kvft_put(p.tier, 1, SIZE), KVF_WHY_NONE);
    assert_null(strstr(diagnose(p.tier), "denied-folders"));
    assert_true(mkdir(below(&p, "tmp"), 0700) == 0 || errno == EEXIST);
    assert_int_equal(mkdir(below(&p, "lost+found"), 0700), 0);
    replace()->faccessat = deny_access;
    const char *found = diagnose(p.tier);
    restore();
    if (strstr(found, "3 of 3 folders") == NULL) {
        fail_msg("%s", found);
    }
    close_place(&p);
}

/* ---- many at once */

typedef struct crowd {
    kvfi_tier *tier;
    uint64_t seed;
    int rounds;
    uint64_t hits;
} crowd;

static void *mingle(void *arg) {
    crowd *c = arg;
    uint64_t random = c->seed;
    for (int i = 0; i < c->rounds; i++) {
        uint64_t seed = kvft_random(&random) % 60;
        size_t size = seed % 2 == 0 ? SIZE : 3000;
        switch (kvft_random(&random) % 10) {
        case 0:
        case 1:
        case 2:
        case 3:
            (void)kvft_put(c->tier, seed, size);
            break;
        case 4:
            c->hits += kvft_borrow(c->tier, seed, size) == KVF_WHY_NONE;
            break;
        case 5:
            (void)kvft_peek(c->tier, seed);
            break;
        case 6:
            if (i % 50 == 0) {
                uint64_t removed;
                (void)c->tier->ops->clear(c->tier, &removed, NULL, NULL, KVF_MS(1000));
            }
            break;
        default:
            c->hits += kvft_get(c->tier, seed, size) == KVF_WHY_NONE;
        }
    }
    return NULL;
}

static uint64_t mingle_in_threads(kvfi_tier *tier, uint64_t seed, int num, int rounds) {
    crowd crowds[8];
    pthread_t threads[8];
    uint64_t hits = 0;
    for (int i = 0; i < num; i++) {
        crowds[i] = (crowd){.tier = tier, .seed = seed * 100 + (uint64_t)i, .rounds = rounds};
        if (pthread_create(&threads[i], NULL, mingle, &crowds[i]) != 0) {
            abort();
        }
    }
    for (int i = 0; i < num; i++) {
        pthread_join(threads[i], NULL);
        hits += crowds[i].hits;
    }
    return hits;
}

static void test_threads(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    assert_true(mingle_in_threads(p.tier, 1, 4, 500) > 0);
    kvft_census census = kvft_count(p.tier);
    assert_int_equal(census.damaged, 0);
    assert_true(census.bytes <= (1u << 20) * 9 / 8);
    close_place(&p);
}

static void test_processes(void **state) {
    (void)state;
    enum { PROCESSES = 4 };
    place p = open_place("?max=1M");
    pid_t pids[PROCESSES];
    fflush(NULL);
    for (uint64_t i = 0; i < PROCESSES; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            kvfi_tier *tier = kvft_tier(p.url);
            uint64_t hits = mingle_in_threads(tier, i + 10, 2, 500);
            tier->ops->close(tier);
            kvft_exit(hits > 0 ? 0 : 1);
        }
    }
    for (int i = 0; i < 100; i++) {
        kvft_census census = kvft_count(p.tier);
        assert_int_equal(census.damaged, 0);
        assert_true(census.bytes <= 2u << 20); /* the bound is small here: 8 values on their way are half of it */
        usleep(5000);
    }
    for (size_t i = 0; i < PROCESSES; i++) {
        int status = -1;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(kvft_put(p.tier, 1000, SIZE), KVF_WHY_NONE); /* sees what they have added */
    assert_int_equal(kvft_put(p.tier, 1001, SIZE), KVF_WHY_NONE); /* acts on it */
    kvft_census census = kvft_count(p.tier);
    assert_int_equal(census.damaged, 0);
    assert_true(census.bytes <= 1u << 20);
    assert_int_equal(num_temporaries(&p), 0);
    close_place(&p);
}

/* kill -9 at any point: records that are there are whole, and leftovers of dead writers are soon removed. */
static void test_killed_writers(void **state) {
    (void)state;
    place p = open_place("?max=1M");
    uint64_t random = 9;
    for (uint64_t i = 0; i < 40; i++) {
        fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            if (i % 2 == 0) {
                replace()->open = no_tmpfile_open;
            }
            kvfi_tier *tier = kvft_tier(p.url);
            (void)mingle_in_threads(tier, i, 2, 100000);
            _exit(1);
        }
        usleep((useconds_t)(5000 + kvft_random(&random) % 20000));
        assert_int_equal(kill(pid, SIGKILL), 0);
        assert_int_equal(waitpid(pid, NULL, 0), pid);
        kvft_census census = kvft_count(p.tier);
        assert_int_equal(census.damaged, 0);
        assert_true(census.bytes <= 2u << 20);
    }
    DIR *dir = opendir(below(&p, "tmp"));
    for (const struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) {
        char name[PATH_MAX];
        snprintf(name, sizeof name, "tmp/%s", entry->d_name);
        set_age(below(&p, name), 100);
    }
    if (dir != NULL) {
        closedir(dir);
    }
    p.tier->ops->close(p.tier);
    unlink(below(&p, "usage"));
    p.tier = kvft_tier(p.url);
    assert_int_equal(num_temporaries(&p), 0);
    close_place(&p);
}

/* ---- faults */

static int visit(void *ctx, const kvfi_sight *sight) {
    (void)ctx;
    (void)sight;
    return 0;
}

/* A stored value is a hit, or a miss with a reason; which one depends on the call that failed. The third value makes
 * the folder evict. Returns how many calls were hits or done. */
static unsigned scenario(const char *text, uint64_t salt) {
    enum { BIG = 400000 };
    unsigned fine = 0;
    kvfi_url *url = NULL;
    kvfi_tier *tier = NULL;
    kvf_error err;
    if (kvfi_url_parse(&url, NULL, text) != KVF_OK || kvfi_file_open(&tier, NULL, url) != KVF_OK) {
        return 0;
    }
    for (uint64_t seed = 0; seed < 3; seed++) {
        fine += kvft_put(tier, salt + seed, BIG) == KVF_WHY_NONE;
        fine += kvft_get(tier, salt + seed, BIG) == KVF_WHY_NONE;
    }
    fine += kvft_borrow(tier, salt + 2, BIG) == KVF_WHY_NONE;
    fine += kvft_peek(tier, salt + 2) == KVF_WHY_NONE;
    fine += kvft_put(tier, salt + 2, BIG + 1) == KVF_WHY_NONE; /* replaces */
    fine += kvft_get(tier, salt + 2, BIG + 1) == KVF_WHY_NONE;
    fine += kvft_get(tier, salt + 2, BIG) == KVF_WHY_NONE;
    fine += tier->ops->walk(tier, &err, NULL, true, visit, NULL, KVF_MS(1000)) == KVF_OK;
    kvfi_addr addr;
    kvft_addr(&addr, salt + 2);
    fine += tier->ops->remove(tier, &err, &addr, KVFI_NEVER) == KVF_OK;
    (void)diagnose(tier);
    if (salt % 3 == 0) {
        uint64_t removed;
        fine += tier->ops->clear(tier, &removed, &err, NULL, KVF_MS(1000)) == KVF_OK;
    }
    tier->ops->close(tier);
    return fine;
}

static void test_faults(void **state) {
    (void)state;
    char *dir = kvft_temp_dir();
    char url[PATH_MAX];
    snprintf(url, sizeof url, "file:%s/store?max=1M", dir);
    int fds = kvft_num_fds();
    for (int kind = KVFT_ALLOC; kind <= KVFT_ZERO; kind++) {
        uint64_t points = 0;
        for (uint64_t nth = 1;; nth++) {
            uint64_t salt = nth % 100 * 10;
            kvft_faults_arm((kvft_fault_kind)kind, nth);
            unsigned fine = scenario(url, salt);
            if (kind >= KVFT_SHORT) {
                assert_int_equal(fine, salt % 3 == 0 ? 13 : 12);
            }
            uint64_t live = kvft_faults_live_allocs();
            bool hit = kvft_faults_disarm();
            assert_int_equal(live, 0);
            assert_int_equal(kvft_num_fds(), fds);
            if (!hit) {
                break;
            }
            points++;
        }
        printf("%llu points\n", (unsigned long long)points);
    }
    kvfi_tier *tier = kvft_tier(url);
    assert_int_equal(kvft_count(tier).damaged, 0);
    assert_int_equal(kvft_put(tier, 1, SIZE), KVF_WHY_NONE);
    assert_int_equal(kvft_get(tier, 1, SIZE), KVF_WHY_NONE);
    tier->ops->close(tier);
    kvft_remove_dir(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_put_is_got),
        cmocka_unit_test(test_only_its_user_can_look_inside),
        cmocka_unit_test(test_scattered_memory),
        cmocka_unit_test(test_use_keeps_young),
        cmocka_unit_test(test_touch_keeps_young),
        cmocka_unit_test(test_nothing_is_left_open),
        cmocka_unit_test(test_another_value_replaces),
        cmocka_unit_test(test_torn_files_are_misses_and_go),
        cmocka_unit_test(test_a_flipped_bit_is_a_miss_and_goes),
        cmocka_unit_test(test_a_record_under_a_wrong_name),
        cmocka_unit_test(test_whole_records_stay),
        cmocka_unit_test(test_strange_things_in_the_way),
        cmocka_unit_test(test_an_unreadable_page_is_a_miss),
        cmocka_unit_test(test_only_what_nobody_else_can_write_is_lent),
        cmocka_unit_test(test_nothing_is_mapped_on_a_network),
        cmocka_unit_test(test_a_hollow_file_is_not_lent),
        cmocka_unit_test(test_odd_times),
        cmocka_unit_test(test_odd_counts),
        cmocka_unit_test(test_which_counts_are_read),
        cmocka_unit_test(test_only_the_damaged_file_goes),
        cmocka_unit_test(test_a_slow_disk_costs_the_deadline),
        cmocka_unit_test(test_the_oldest_go_first),
        cmocka_unit_test(test_the_bound_holds_between_tiers),
        cmocka_unit_test(test_opening_does_not_evict),
        cmocka_unit_test(test_too_large_for_the_bound),
        cmocka_unit_test(test_borrowed_bytes_outlive_eviction),
        cmocka_unit_test(test_very_many_files_are_swept),
        cmocka_unit_test(test_a_wrong_count_is_corrected),
        cmocka_unit_test(test_a_stuck_sweeper_is_passed_by),
        cmocka_unit_test(test_when_nothing_can_be_evicted),
        cmocka_unit_test(test_scans_that_are_cut_short),
        cmocka_unit_test(test_time_to_live),
        cmocka_unit_test(test_without_unnamed_files),
        cmocka_unit_test(test_temporaries_of_the_dead_go),
        cmocka_unit_test(test_no_link_to_temporaries_is_followed),
        cmocka_unit_test(test_the_count_follows),
        cmocka_unit_test(test_remove_and_clear),
        cmocka_unit_test(test_remove_many),
        cmocka_unit_test(test_the_walk_names_files),
        cmocka_unit_test(test_the_folder_is_removed_under_it),
        cmocka_unit_test(test_no_tenant_evicts_another),
        cmocka_unit_test(test_what_the_operator_must_mend),
        cmocka_unit_test(test_opening_without_memory),
        cmocka_unit_test(test_what_is_warned_of),
        cmocka_unit_test(test_a_read_only_folder),
        cmocka_unit_test(test_a_full_disk),
        cmocka_unit_test(test_a_disk_without_inodes),
        cmocka_unit_test(test_a_read_only_mount),
        cmocka_unit_test(test_the_doctor),
        cmocka_unit_test(test_file_systems_are_told_apart),
        cmocka_unit_test(test_the_doctor_looks_at_the_disk),
        cmocka_unit_test(test_the_doctor_counts_folders),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_killed_writers),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
