/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads tenants' secrets from memory or from files, and rejects files that others can read.
 */
#include "store/secret.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#define MAKE_ONE "make one: (umask 077; openssl rand -base64 32 > %.60s)"

static kvf_status add(kvfi_secrets *secrets, kvf_error *err, const void *bytes, size_t len) {
    KVFI_TRY(kvfi_secret_check(err, len));
    kvfi_tenant *tenant = &secrets->of[secrets->num];
    bool again = secrets->num > 0 && secrets->of[0].len == len && memcmp(secrets->of[0].bytes, bytes, len) == 0;
    if (again) {
        return KVF_OK;
    }
    memcpy(tenant->bytes, bytes, len);
    tenant->len = len;
    kvfi_secret_init(&tenant->secret, bytes, len);
    kvfi_seal_init(&tenant->seal, &tenant->secret);
    secrets->num++;
    return KVF_OK;
}

/* ---- files */

static kvf_status check_file(kvf_error *err, const char *path, const struct stat *st) {
    if (!S_ISREG(st->st_mode)) {
        return kvfi_fail(err, KVF_CONFIG, "the secret file %.150s is not a regular file", path);
    }
    if (st->st_uid != 0 && st->st_uid != geteuid()) {
        return kvfi_fail(err, KVF_CONFIG, "the secret file %.120s belongs to user %u: make it this user's or root's",
                         path, st->st_uid);
    }
    if ((st->st_mode & 077) != 0) {
        return kvfi_fail(err, KVF_CONFIG, "the secret file %.100s is open to others (mode %03o): chmod 600 it", path,
                         st->st_mode & 0777);
    }
    return KVF_OK;
}

/* Without the newline that editors add. */
static size_t without_newline(const uint8_t *bytes, size_t len) {
    if (len > 0 && bytes[len - 1] == '\n') {
        len--;
        len -= len > 0 && bytes[len - 1] == '\r';
    }
    return len;
}

/* As many bytes as are available, up to `cap`; -1 on an error. */
static ssize_t read_some(int fd, uint8_t *out, size_t cap) {
    size_t done = 0;
    while (done < cap) {
        struct iovec iov = {out + done, cap - done};
        ssize_t num = kvfi_sys->preadv(fd, &iov, 1, (off_t)done);
        if (num < 0 && errno == EINTR) {
            continue;
        }
        if (num < 0) {
            return -1;
        }
        if (num == 0) {
            break;
        }
        done += (size_t)num;
    }
    return (ssize_t)done;
}

static kvf_status add_open_file(kvfi_secrets *secrets, kvf_error *err, const char *path, int fd) {
    struct stat st;
    uint8_t bytes[KVFI_MAX_SECRET_BYTES + 3]; /* with a newline, and one byte too many */
    if (kvfi_sys->fstat(fd, &st) != 0) {
        return kvfi_fail(err, KVF_CONFIG, "the secret file %.150s: %s", path, strerror(errno));
    }
    KVFI_TRY(check_file(err, path, &st));
    ssize_t num = read_some(fd, bytes, sizeof bytes);
    if (num < 0) {
        return kvfi_fail(err, KVF_CONFIG, "the secret file %.150s: %s", path, strerror(errno));
    }
    size_t len = without_newline(bytes, (size_t)num);
    kvf_status status = KVF_OK;
    bool is_short = len < KVFI_MIN_SECRET_BYTES;
    if (is_short || len > KVFI_MAX_SECRET_BYTES) {
        status = kvfi_fail(err, KVF_CONFIG, "the secret in %.100s has %s than %u bytes: " MAKE_ONE, path,
                           is_short ? "fewer" : "more", is_short ? KVFI_MIN_SECRET_BYTES : KVFI_MAX_SECRET_BYTES, path);
    } else {
        status = add(secrets, err, bytes, len);
    }
    explicit_bzero(bytes, sizeof bytes);
    return status;
}

static kvf_status add_file(kvfi_secrets *secrets, kvf_error *err, const char *path) {
    /* Does not wait for a pipe in place of the file. */
    int fd = kvfi_sys->open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0) {
        if (errno == ENOENT) {
            return kvfi_fail(err, KVF_CONFIG, "there is no secret file %.80s; " MAKE_ONE, path, path);
        }
        return kvfi_fail(err, KVF_CONFIG, "the secret file %.150s can't be read: %s", path, strerror(errno));
    }
    kvf_status status = add_open_file(secrets, err, path, fd);
    kvfi_sys->close(fd);
    return status;
}

/* One path, or two with a colon between them. */
static kvf_status add_files(kvfi_secrets *secrets, kvf_error *err, const char *text) {
    char path[4096];
    size_t files = 0;
    for (const char *from = text;; files++) {
        size_t len = strcspn(from, ":");
        if (len == 0) {
            return kvfi_fail(err, KVF_CONFIG, "secret files \"%.100s\": write FILE, or NEW:OLD, without an empty part",
                             text);
        }
        if (len >= sizeof path) {
            return kvfi_fail(err, KVF_CONFIG, "the name of a secret file is too long: \"%.150s\"", text);
        }
        if (files == KVFI_MAX_SECRETS) {
            return kvfi_fail(err, KVF_CONFIG, "more than %u secret files: the new one, and the one before",
                             KVFI_MAX_SECRETS);
        }
        snprintf(path, sizeof path, "%.*s", (int)len, from);
        KVFI_TRY(add_file(secrets, err, path));
        if (from[len] == '\0') {
            return KVF_OK;
        }
        from += len + 1;
    }
}

static kvf_status init(kvfi_secrets *secrets, kvf_error *err, const kvf_options *options) {
    if (options->secret != NULL && options->secret_files != NULL) {
        return kvfi_fail(err, KVF_CONFIG, "both a secret and secret files are given: remove one of them");
    }
    if (options->secret == NULL && options->previous_secret != NULL) {
        return kvfi_fail(err, KVF_LIMIT, "a previous secret without a secret");
    }
    if (options->secret_files != NULL) {
        KVFI_TRY(add_files(secrets, err, options->secret_files));
    }
    if (options->secret != NULL) {
        KVFI_TRY(add(secrets, err, options->secret, options->secret_len));
    }
    if (options->previous_secret != NULL) {
        KVFI_TRY(add(secrets, err, options->previous_secret, options->previous_secret_len));
    }
    if (options->seal_sessions != 0 && secrets->num == 0) {
        return kvfi_fail(err, KVF_CONFIG, "sessions are to be sealed, and there is no secret to seal them under");
    }
    secrets->seal_sessions = options->seal_sessions != 0;
    return KVF_OK;
}

kvf_status kvfi_secrets_init(kvfi_secrets *secrets, kvf_error *err, const kvf_options *options) {
    memset(secrets, 0, sizeof *secrets);
    kvf_status status = init(secrets, err, options);
    if (status != KVF_OK) {
        kvfi_secrets_cleanup(secrets);
    }
    return status;
}

void kvfi_secrets_cleanup(kvfi_secrets *secrets) {
    explicit_bzero(secrets, sizeof *secrets);
}

const kvfi_tenant *kvfi_secrets_admit(const kvfi_secrets *secrets, kvfi_header *header) {
    for (size_t i = 0; i < secrets->num; i++) {
        kvfi_header unveiled = *header;
        if (kvfi_header_admit(&unveiled, &secrets->of[i].seal) == KVF_WHY_NONE) {
            *header = unveiled;
            return &secrets->of[i];
        }
    }
    return NULL;
}
