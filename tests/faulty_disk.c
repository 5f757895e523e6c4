/* A disk that fails when it is told to: loaded before libc (LD_PRELOAD), for the tests only.
 *
 * disk_fail(call, nth, count, error) makes the calls of that name on files below $FAULTY_DISK fail,
 * from the nth on, `count` times. An error of 0 makes a write take half of what it is given. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char failing[32];
static long countdown, left, fired;
static int error_number;

void disk_fail(const char *call, long nth, long count, int error) {
    pthread_mutex_lock(&lock);
    strncpy(failing, call, sizeof failing - 1);
    countdown = nth;
    left = count;
    error_number = error;
    fired = 0;
    pthread_mutex_unlock(&lock);
}

long disk_failed(void) { return fired; }

static int below(const char *path) {
    const char *root = getenv("FAULTY_DISK");
    return root && path && strncmp(path, root, strlen(root)) == 0;
}

/* 1 when this call has to fail; errno is set then. */
static int fails(const char *call, const char *path) {
    int result = 0;
    if (!failing[0] || strcmp(call, failing) || !below(path)) return 0;
    pthread_mutex_lock(&lock);
    if (failing[0] && !strcmp(call, failing) && --countdown <= 0 && left > 0) {
        left--;
        fired++;
        result = 1;
        errno = error_number;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static int fails_fd(const char *call, int fd) {
    char name[64], path[PATH_MAX];
    if (!failing[0] || strcmp(call, failing)) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define BY_PATH(name, call, path, parameters, arguments) \
    int name parameters { \
        NEXT(name); \
        return fails(call, path) ? -1 : next arguments; \
    }
#define BY_FD(type, name, call, parameters, arguments) \
    type name parameters { \
        NEXT(name); \
        return fails_fd(call, fd) ? -1 : next arguments; \
    }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        NEXT(name); \
        return fails("open", path) ? -1 : next(path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
BY_PATH(rename, "rename", to, (const char *from, const char *to), (from, to))
BY_PATH(link, "link", to, (const char *from, const char *to), (from, to))
BY_PATH(linkat, "link", to, (int a, const char *from, int b, const char *to, int flags),
        (a, from, b, to, flags))
BY_PATH(symlink, "symlink", path, (const char *target, const char *path), (target, path))
BY_PATH(unlink, "unlink", path, (const char *path), (path))
BY_PATH(mkdir, "mkdir", path, (const char *path, mode_t mode), (path, mode))
BY_FD(int, fsync, "fsync", (int fd), (fd))
BY_FD(int, flock, "flock", (int fd, int how), (fd, how))
BY_FD(int, ftruncate64, "ftruncate", (int fd, off64_t size), (fd, size))
BY_FD(ssize_t, read, "read", (int fd, void *data, size_t size), (fd, data, size))
BY_FD(ssize_t, pread64, "read", (int fd, void *data, size_t size, off64_t at),
      (fd, data, size, at))
BY_FD(off64_t, lseek64, "lseek", (int fd, off64_t at, int from), (fd, at, from))

/* These two return the error; the descriptor of a failing close is closed all the same. */
int posix_fadvise64(int fd, off64_t at, off64_t size, int advice) {
    NEXT(posix_fadvise64);
    return fails_fd("fadvise", fd) ? errno : next(fd, at, size, advice);
}

int close(int fd) {
    NEXT(close);
    int failed = fails_fd("close", fd), error = errno;
    int result = next(fd);
    if (failed) errno = error;
    return failed ? -1 : result;
}

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    if (!fails_fd("write", fd)) return next(fd, data, size);
    return error_number ? -1 : next(fd, data, size - size / 2);
}
