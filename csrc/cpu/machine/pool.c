/* pool.c: the threads behind GCC's OpenMP pragmas, see threads.h.
 *
 * A parallel loop takes idle workers of one pool, runs its body on them and on the calling thread,
 * and gives them back. The pool grows up to the largest number that one loop has asked for. A loop
 * that finds too few idle workers, because other calls have them, runs on fewer threads: no result
 * depends on the number. Loops are not nested, and a parallel region has at most one dynamic loop.
 *
 * On a busy host the scheduler may take many milliseconds to wake a worker. So a caller that has
 * done its own share recalls the workers that have not begun, and does their shares as well. It
 * waits only for workers that have begun.
 *
 * Workers take nothing over from the thread that happens to start them: they block all signals, may
 * run on all processors of the process, and have a stack of their own size. A loop lends them the
 * floating-point mode of its caller.
 */
#define _GNU_SOURCE /* sched_getaffinity */ // NOLINT(cert-dcl37-c,cert-dcl51-cpp)
#include "cpu/machine/threads.h"

#if defined(SMLA_HAVE_POOL)
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/fp_mode.h"

enum {
    /* A thread looks for work so many times before it sleeps, some milliseconds. On a busy machine
     * a woken thread waits for the processor of the thread that woke it: with 20000 looks, calls of
     * 0.3 ms took 1.5 ms on two busy processors. */
    NUM_LOOKS = 200000,
    NUM_CROWDED_LOOKS = 1000, /* if a loop has more threads than there are processors */
    LOOKS_PER_YIELD = 100,    /* a thread that looks for work must not keep others from theirs */
    MAX_THREADS = 4096,
    WORKER_STACK_BYTES = 1 << 20, /* frames are at most 16 KiB, those of sanitizers larger */
};

typedef struct team {
    void (*body)(void *data);
    void *data;
    int num_threads;
    smla_fp_mode fp_mode;
    atomic_long num_taken; /* iterations of the dynamic loop that threads have taken */
    sem_t finished;        /* counts workers */
} team;

/* A thread's part in a region; also the state of its dynamic loop. */
typedef struct member {
    team *team; /* NULL outside of parallel regions */
    int idx;
    bool is_worker; /* false on the thread that made the call, whatever share it is doing */
    long start, end, step, chunk;
} member;

/* `is_called` says that the task waits for somebody to do it: the worker, or the caller that
 * recalls the worker. Whoever sets it to false does the task. */
typedef struct worker {
    struct worker *next; /* in the list of idle workers, or in that of a region */
    member task;
    atomic_bool is_called;
    sem_t start; /* also counts calls that were recalled */
} worker;

static struct {
    pthread_mutex_t lock;
    worker *idle;
    int num_workers;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static atomic_int max_threads; /* 0: not read yet */
static struct {
    cpu_set_t set;
    bool is_known;
    int count;
} processors; /* the process's; never changes after the library was loaded */
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

/* Reads where the process may run: the processors of its main thread when the library is loaded.
 * Later, a thread that pins itself, and makes the first call, must not decide for all others. */
__attribute__((constructor)) static void
find_processors(void)
{
    processors.is_known = sched_getaffinity(getpid(), sizeof processors.set, &processors.set) == 0;
    processors.count = clamp_threads(processors.is_known ? CPU_COUNT(&processors.set)
                                                         : sysconf(_SC_NPROCESSORS_ONLN));
}

int
smla_max_threads(void)
{
    int count = atomic_load_explicit(&max_threads, memory_order_relaxed);
    if (count == 0) {
        const char *text = getenv("OMP_NUM_THREADS");
        const long wanted = text == NULL ? 0 : strtol(text, NULL, 10);
        count = wanted > 0 ? clamp_threads(wanted) : processors.count;
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

bool
smla_is_caller(void)
{
    return !self.is_worker;
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
    const int num_looks = num_threads > processors.count ? NUM_CROWDED_LOOKS : NUM_LOOKS;
    for (int i = 0; i < num_looks; i++) {
        if (sem_trywait(semaphore) == 0) {
            return;
        }
        if (i % LOOKS_PER_YIELD == LOOKS_PER_YIELD - 1) {
            sched_yield();
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

/* Whether the caller of this function is now the one that does the worker's task. */
static bool
claim_task(worker *of)
{
    return atomic_exchange_explicit(&of->is_called, false, memory_order_acq_rel);
}

static void *
work(void *argument)
{
    worker *const me = argument;
    int num_threads = 1;
    if (processors.is_known) {
        (void)sched_setaffinity(0, sizeof processors.set, &processors.set);
    }
    for (;;) {
        wait_for(&me->start, num_threads);
        if (!claim_task(me)) { /* recalled: the host is busy, so do not look for work for long */
            num_threads = MAX_THREADS + 1;
            continue;
        }
        team *const mine = me->task.team;
        (void)smla_fp_change(mine->fp_mode);
        run_member(&me->task);
        num_threads = mine->num_threads; /* a team ends when its workers have finished */
        sem_post(&mine->finished);
    }
    return NULL;
}

/* Starts a thread that blocks all signals: the process's own threads take those. */
static bool
start_thread(worker *added)
{
    sigset_t all, callers;
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0) {
        return false;
    }
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)pthread_attr_setstacksize(&attributes, WORKER_STACK_BYTES);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &callers);
    const bool is_started = pthread_create(&thread, &attributes, work, added) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &callers, NULL);
    (void)pthread_attr_destroy(&attributes);
    return is_started;
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
    if (!start_thread(added)) {
        free(added);
        return NULL;
    }
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

/* Calls the workers, does the caller's share and those of workers that have not begun by then, and
 * waits for the others. */
static void
run_team(team *run, worker *workers)
{
    int num_begun = 0;
    int idx = 1;
    sem_init(&run->finished, 0, 0);
    for (worker *each = workers; each != NULL; each = each->next) {
        each->task = (member){.team = run, .idx = idx++, .is_worker = true};
        atomic_store_explicit(&each->is_called, true, memory_order_release);
        sem_post(&each->start);
    }
    run_member(&(member){.team = run});
    for (worker *each = workers; each != NULL; each = each->next) {
        if (claim_task(each)) {
            run_member(&(member){.team = run, .idx = each->task.idx});
        } else {
            num_begun++;
        }
    }
    for (int i = 0; i < num_begun; i++) {
        wait_for(&run->finished, run->num_threads);
    }
    sem_destroy(&run->finished);
}

void
smla_pool_run(void (*body)(void *data), void *data, unsigned num_threads, unsigned flags)
{
    (void)flags;
    const int wanted = num_threads == 0 ? smla_max_threads() : clamp_threads((long)num_threads);
    worker *const workers = wanted > 1 && self.team == NULL ? take_workers(wanted - 1) : NULL;
    team run = {.body = body, .data = data, .num_threads = 1, .fp_mode = smla_fp_read()};
    for (const worker *each = workers; each != NULL; each = each->next) {
        run.num_threads++;
    }
    if (workers == NULL) {
        run_member(&(member){.team = &run});
        return;
    }
    run_team(&run, workers);
    give_back_workers(workers);
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
