/* A clock that jumps: adds a number of seconds, read from the file $CLOCK_OFFSET, to the wall clock of a process.

   cc -shared -fPIC -O1 -o clock.so clock.c -ldl;  CLOCK_OFFSET=file LD_PRELOAD=./clock.so program

   The monotonic clock and waits for a duration stay as they are, as they do when the system's clock is set. A deadline
   on the wall clock is converted to the true one, so that a wait which begins after a jump has its length. libfaketime
   0.9.10, Debian 12's, does the same in principle; there time.sleep of Python 3.11 fails with EINVAL. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define TRUE(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define IS_DATE(seconds) ((seconds) > 1000000000L) /* and no time since the machine was started */

static long offset(void) {
    char text[32] = {0};
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    return length > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = TRUE(clock_gettime)(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    int failed = TRUE(gettimeofday)(now, zone);
    if (!failed) now->tv_sec += offset();
    return failed;
}

time_t time(time_t *now) {
    time_t found = TRUE(time)(NULL) + offset();
    if (now) *now = found;
    return found;
}

static struct timespec real(const struct timespec *deadline) {
    struct timespec found = *deadline;
    if (IS_DATE(found.tv_sec)) found.tv_sec -= offset();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    struct timespec found = real(deadline);
    return TRUE(pthread_cond_timedwait)(condition, mutex, &found);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    struct timespec found = real(deadline);
    return TRUE(sem_timedwait)(semaphore, &found);
}
