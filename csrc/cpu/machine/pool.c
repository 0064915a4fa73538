/* pool.c: the threads behind GCC's OpenMP pragmas, see threads.h.
 *
 * A parallel loop takes idle workers of one pool, runs its body on them and on the calling thread,
 * and gives them back. The pool grows up to the largest number that one loop has asked for. A loop
 * that finds too few idle workers, because other calls have them, runs on fewer threads: no result
 * depends on the number. Loops are not nested, and a parallel region has at most one dynamic loop.
 */
#define _GNU_SOURCE /* sched_getaffinity */ // NOLINT(cert-dcl37-c,cert-dcl51-cpp)
#include "cpu/machine/threads.h"

#if defined(SMLA_HAVE_POOL)
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    /* A thread looks for work so many times before it sleeps, some milliseconds. On a busy machine
     * a woken thread waits for the processor of the thread that woke it: with 20000 looks, calls of
     * 0.3 ms took 1.5 ms on two busy processors. */
    NUM_LOOKS = 200000,
    NUM_CROWDED_LOOKS = 1000, /* if a loop has more threads than there are processors */
    MAX_THREADS = 4096,
};

typedef struct team {
    void (*body)(void *data);
    void *data;
    int num_threads;
    atomic_long num_taken; /* iterations of the dynamic loop that threads have taken */
    sem_t finished;        /* counts workers */
} team;

/* A thread's part in a region; also the state of its dynamic loop. */
typedef struct member {
    team *team; /* NULL outside of parallel regions */
    int idx;
    long start, end, step, chunk;
} member;

typedef struct worker {
    struct worker *next; /* in the list of idle workers, or in that of a region */
    member task;
    sem_t start;
} worker;

static struct {
    pthread_mutex_t lock;
    worker *idle;
    int num_workers;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static atomic_int max_threads, num_processors; /* 0: not read yet */
static _Thread_local member self;

/* Compiled loops call these; no other file does. */
void smla_pool_run(void (*body)(void *data), void *data, unsigned num_threads, unsigned flags);
bool smla_pool_start_loop(long start, long end, long step, long chunk, long *first, long *stop);
bool smla_pool_next_chunk(long *first, long *stop);
void smla_pool_end_loop(void);
int smla_pool_num_threads(void);

/* ---- How many ------------------------------------------------------------------------------ */

static int
clamp_threads(long count)
{
    return count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : (int)count;
}

static int
count_processors(void)
{
    int count = atomic_load_explicit(&num_processors, memory_order_relaxed);
    if (count == 0) {
        cpu_set_t set;
        const bool is_known = sched_getaffinity(0, sizeof set, &set) == 0;
        count = clamp_threads(is_known ? CPU_COUNT(&set) : sysconf(_SC_NPROCESSORS_ONLN));
        atomic_store_explicit(&num_processors, count, memory_order_relaxed);
    }
    return count;
}

int
smla_max_threads(void)
{
    int count = atomic_load_explicit(&max_threads, memory_order_relaxed);
    if (count == 0) {
        const char *text = getenv("OMP_NUM_THREADS");
        const long wanted = text == NULL ? 0 : strtol(text, NULL, 10);
        count = wanted > 0 ? clamp_threads(wanted) : count_processors();
        atomic_store_explicit(&max_threads, count, memory_order_relaxed);
    }
    return count;
}

void
smla_set_max_threads(int count)
{
    atomic_store_explicit(&max_threads, clamp_threads(count), memory_order_relaxed);
}

int
smla_thread_idx(void)
{
    return self.idx;
}

int
smla_pool_num_threads(void)
{
    return self.team == NULL ? 1 : self.team->num_threads;
}

/* ---- Workers --------------------------------------------------------------------------------- */

static inline void
pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` does nothing on most cores */
#endif
}

/* Waits after a loop of so many threads. */
static void
wait_for(sem_t *semaphore, int num_threads)
{
    const int num_looks = num_threads > count_processors() ? NUM_CROWDED_LOOKS : NUM_LOOKS;
    for (int i = 0; i < num_looks; i++) {
        if (sem_trywait(semaphore) == 0) {
            return;
        }
        pause_briefly();
    }
    while (sem_wait(semaphore) != 0) { /* a signal came */
    }
}

static void
run_member(const member *task)
{
    const member outer = self;
    self = *task;
    task->team->body(task->team->data);
    self = outer;
}

static void *
work(void *argument)
{
    worker *const me = argument;
    int num_threads = 1;
    for (;;) {
        wait_for(&me->start, num_threads);
        run_member(&me->task);
        num_threads = me->task.team->num_threads; /* a team ends when its workers have finished */
        sem_post(&me->task.team->finished);
    }
    return NULL;
}

/* Adds a worker to the pool, whose lock is held; returns NULL if the system gives no thread. */
static worker *
add_worker(void)
{
    worker *const added = calloc(1, sizeof *added);
    if (added == NULL) {
        return NULL;
    }
    sem_init(&added->start, 0, 0);
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, added) != 0) {
        free(added);
        return NULL;
    }
    pthread_detach(thread);
    pool.num_workers++;
    return added;
}

/* Takes up to `wanted` workers out of the pool. */
static worker *
take_workers(int wanted)
{
    worker *taken = NULL;
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; i < wanted; i++) {
        worker *next = pool.idle;
        if (next != NULL) {
            pool.idle = next->next;
        } else if (pool.num_workers >= wanted || (next = add_worker()) == NULL) {
            break;
        }
        next->next = taken;
        taken = next;
    }
    pthread_mutex_unlock(&pool.lock);
    return taken;
}

static void
give_back_workers(worker *first)
{
    pthread_mutex_lock(&pool.lock);
    while (first != NULL) {
        worker *const next = first->next;
        first->next = pool.idle;
        pool.idle = first;
        first = next;
    }
    pthread_mutex_unlock(&pool.lock);
}

/* ---- What compiled loops call -------------------------------------------------------------- */

void
smla_pool_run(void (*body)(void *data), void *data, unsigned num_threads, unsigned flags)
{
    (void)flags;
    const int wanted = num_threads == 0 ? smla_max_threads() : clamp_threads((long)num_threads);
    worker *const workers = wanted > 1 && self.team == NULL ? take_workers(wanted - 1) : NULL;
    team run = {.body = body, .data = data, .num_threads = 1};
    for (const worker *each = workers; each != NULL; each = each->next) {
        run.num_threads++;
    }
    if (workers != NULL) {
        sem_init(&run.finished, 0, 0);
    }
    int idx = 1;
    for (worker *each = workers; each != NULL; each = each->next) {
        each->task = (member){.team = &run, .idx = idx++};
        sem_post(&each->start);
    }
    run_member(&(member){.team = &run});
    if (workers != NULL) {
        for (int i = 1; i < run.num_threads; i++) {
            wait_for(&run.finished, run.num_threads);
        }
        sem_destroy(&run.finished);
        give_back_workers(workers);
    }
}

bool
smla_pool_start_loop(long start, long end, long step, long chunk, long *first, long *stop)
{
    self.start = start;
    self.end = end;
    self.step = step;
    self.chunk = chunk;
    return smla_pool_next_chunk(first, stop);
}

/* The loops count upwards. */
bool
smla_pool_next_chunk(long *first, long *stop)
{
    /* Relaxed, because nothing but the end of the region orders the iterations. */
    const long taken =
        atomic_fetch_add_explicit(&self.team->num_taken, self.chunk, memory_order_relaxed);
    const long last = self.start + (taken + self.chunk) * self.step;
    *first = self.start + taken * self.step;
    *stop = last < self.end ? last : self.end;
    return *first < self.end;
}

void
smla_pool_end_loop(void)
{
}

/* ---- Forks: a child has none of the workers, and starts its own ---------------------------- */

static void
lock_pool(void)
{
    pthread_mutex_lock(&pool.lock);
}

static void
unlock_pool(void)
{
    pthread_mutex_unlock(&pool.lock);
}

static void
empty_pool(void)
{
    pool.idle = NULL;
    pool.num_workers = 0;
    unlock_pool();
}

__attribute__((constructor)) static void
watch_forks(void)
{
    (void)pthread_atfork(lock_pool, unlock_pool, empty_pool);
}
#endif
