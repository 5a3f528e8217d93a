/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder store: opening and closing. file.h has the layout.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "file/file.h"

#define DEFAULT_MAX_BYTES ((uint64_t)10 << 30)
#define MIN_MAX_BYTES     ((uint64_t)1 << 20)
#define MOST_MAX_BYTES    ((uint64_t)1 << 60)
#define MAX_TENANT_BYTES  64u
#define OPEN_SWEEP_US     ((int64_t)500000)

static void close_file(kvfi_tier *tier) {
    kvfi_file *file = (kvfi_file *)tier;
    if (file == NULL) {
        return;
    }
    kvfi_file_usage_end(file);
    kvfi_url_free(tier->url);
    kvfi_free(file->root);
    kvfi_free(file);
}

static void info(kvfi_tier *tier, kvf_tier_info *out) {
    kvfi_file *file = (kvfi_file *)tier;
    struct stat st;
    kvfi_usage usage;
    snprintf(out->url, sizeof out->url, "%s", tier->url->text);
    out->reachable = kvfi_sys->fstatat(AT_FDCWD, file->root, &st, 0) == 0;
    out->max_bytes = (int64_t)file->max_bytes;
    kvfi_file_usage_flush(file);
    if (kvfi_file_usage_read(file, &usage)) {
        out->num_records = (int64_t)usage.records;
        out->used_bytes = (int64_t)usage.bytes;
    }
}

static const kvfi_tier_ops ops = {
    .get = kvfi_file_get,
    .put = kvfi_file_put,
    .peek = kvfi_file_peek,
    .each = kvfi_file_each,
    .borrow = kvfi_file_borrow,
    .give_back = kvfi_file_give_back,
    .remove = kvfi_file_remove,
    .walk = kvfi_file_walk,
    .clear = kvfi_file_clear,
    .doctor = kvfi_file_doctor,
    .info = info,
    .close = close_file,
};

/* A tenant has a separate folder below the shared one, so no bound affects another tenant. */
static kvf_status take_tenant(kvfi_file *file, kvf_error *err, kvfi_url *url, const char **out_tenant) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyz0123456789._-";
    uint64_t max = 0;
    *out_tenant = NULL;
    KVFI_TRY(kvfi_url_take_text(url, err, "tenant", out_tenant));
    KVFI_TRY(kvfi_url_take_size(url, err, "tenant_max", &max, MIN_MAX_BYTES, MOST_MAX_BYTES));
    const char *tenant = *out_tenant;
    if (tenant != NULL) {
        size_t len = strlen(tenant);
        if (len == 0 || len > MAX_TENANT_BYTES || strspn(tenant, allowed) != len || tenant[0] == '.') {
            return kvfi_fail(err, KVF_CONFIG, "tenant=%.64s must be 1 to %u of a-z 0-9 . _ -, and not begin with a dot",
                             tenant, MAX_TENANT_BYTES);
        }
    }
    if (max > 0 && (tenant == NULL || file->max_bytes > 0)) {
        return kvfi_fail(err, KVF_CONFIG, "tenant_max is the bound of one tenant: %s",
                         tenant == NULL ? "say which, with tenant=NAME" : "it takes the place of max");
    }
    file->max_bytes = max > 0 ? max : file->max_bytes;
    return KVF_OK;
}

static kvf_status take_params(kvfi_file *file, kvf_error *err, kvfi_url *url, const char **out_tenant) {
    uint32_t ttl_s = 0;
    KVFI_TRY(kvfi_url_take_size(url, err, "max", &file->max_bytes, MIN_MAX_BYTES, MOST_MAX_BYTES));
    KVFI_TRY(take_tenant(file, err, url, out_tenant));
    KVFI_TRY(kvfi_url_take_u32(url, err, "ttl", &ttl_s, 0, UINT32_MAX));
    file->max_bytes = file->max_bytes > 0 ? file->max_bytes : DEFAULT_MAX_BYTES;
    file->ttl_s = ttl_s;
    return kvfi_url_all_taken(url, err);
}

static kvf_status take_root(kvfi_file *file, kvf_error *err, const kvfi_url *url, const char *tenant) {
    const char *below = tenant != NULL ? "/" KVFI_FILE_TENANTS "/" : "";
    tenant = tenant != NULL ? tenant : "";
    size_t len = strlen(url->path);
    while (len > 0 && url->path[len - 1] == '/') {
        len--;
    }
    if (url->hosts[0] != '\0' || url->path[0] != '/') {
        return kvfi_fail(err, KVF_CONFIG, "%.160s names no folder: write file:/path/of/the/folder", url->text);
    }
    size_t more = strlen(below) + strlen(tenant) + 1 + sizeof KVFI_FILE_DIR;
    if (len + more > KVFI_FILE_MAX_ROOT) {
        return kvfi_fail(err, KVF_CONFIG, "the path of the folder is longer than %d bytes: choose a shorter one",
                         KVFI_FILE_MAX_ROOT);
    }
    size_t room = len + more;
    file->root = kvfi_alloc(room);
    if (file->root == NULL) {
        return kvfi_fail(err, KVF_NOMEM, "no memory to open the store");
    }
    file->folder_len = len;
    file->shared = below[0] != '\0';
    file->root_len =
        (size_t)snprintf(file->root, room, "%.*s%s%s/%s", (int)len, url->path, below, tenant, KVFI_FILE_DIR);
    return KVF_OK;
}

/* For a reader, who creates nothing. */
static kvf_status find_store(const kvfi_file *file, kvf_error *err, const kvfi_url *url) {
    struct stat st;
    if (kvfi_sys->fstatat(AT_FDCWD, file->root, &st, 0) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
        return kvfi_fail(err, KVF_CONFIG, "%.160s: nothing was ever stored there, or its path is mistyped", url->text);
    }
    return KVF_OK;
}

/* A folder that can be read but not written opens too, since it can be loaded from. */
static kvf_status find_folder(kvfi_file *file, kvf_error *err, const char *folder) {
    struct stat st;
    if (kvfi_file_make_dirs(file->root) != 0) {
        int error = errno;
        if (kvfi_sys->fstatat(AT_FDCWD, folder, &st, 0) != 0) {
            return kvfi_fail(err, KVF_CONFIG,
                             "the folder %.120s can't be created (%s): create it for this user, or name another one",
                             folder, strerror(error));
        }
        if (!S_ISDIR(st.st_mode)) {
            return kvfi_fail(err, KVF_CONFIG, "%.160s is not a folder: name one in the URL", folder);
        }
    }
    int fd = kvfi_sys->open(file->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0 && errno == ENOTDIR) {
        return kvfi_fail(err, KVF_CONFIG, "%.160s is not a folder: remove it, or name another folder in the URL",
                         file->root);
    }
    if (fd < 0 && errno == EACCES) {
        kvfi_path path;
        snprintf(path.text, sizeof path.text, "%s", file->root);
        return kvfi_file_unreadable(file, err, &path, EACCES);
    }
    if (fd >= 0) {
        kvfi_sys->close(fd);
    }
    return KVF_OK;
}

kvf_status kvfi_file_open(kvfi_tier **out, kvf_error *err, kvfi_url *url) {
    kvfi_file *file = kvfi_alloc_zero(1, sizeof *file);
    if (file == NULL) {
        kvfi_url_free(url);
        return kvfi_fail(err, KVF_NOMEM, "no memory to open the store");
    }
    file->tier = (kvfi_tier){.ops = &ops, .url = url, .get_threads = 4, .put_threads = 2};
    const char *tenant = NULL;
    kvf_status status = take_params(file, err, url, &tenant);
    if (status == KVF_OK) {
        status = take_root(file, err, url, tenant);
    }
    if (status == KVF_OK) {
        status = url->must_exist ? find_store(file, err, url) : KVF_OK;
    }
    if (status == KVF_OK) {
        status = find_folder(file, err, url->path);
    }
    if (status != KVF_OK) {
        close_file(&file->tier);
        return status;
    }
    file->remote = kvfi_file_on_network(url->path);
    kvfi_file_usage_load(file);
    if (kvfi_file_sweep_due(file)) { /* only a process that stores evicts, never one that only reads */
        (void)kvfi_file_sweep(file, KVFI_FILE_COUNT_ONLY, kvfi_deadline(OPEN_SWEEP_US));
    }
    *out = &file->tier;
    return KVF_OK;
}
