/* threads.c: GCC's OpenMP run-time library on pthreads, for builds with SANITIZE=thread.
 *
 * ThreadSanitizer does not see how libgomp's threads wait for each other, and would report every
 * result of a parallel loop as a race. Here a parallel region starts its threads and joins them,
 * which ThreadSanitizer understands. This file has what csrc/ needs of OpenMP: regions that are not
 * nested, static loops, and one dynamic loop per region that counts upwards.
 */
#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

enum { MAX_THREADS = 64, DEFAULT_THREADS = 4 };

typedef struct team {
    void (*work)(void *data);
    void *data;
    int num_threads;
    atomic_long taken; /* iterations of the dynamic loop that a thread has taken */
} team;

typedef struct member {
    team *team; /* NULL outside of parallel regions */
    int idx;
    long start, end, step, chunk; /* the dynamic loop */
} member;

static atomic_int wanted_threads;
static _Thread_local member self;

/* Functions that GCC's code calls; no header declares them. */
void GOMP_parallel(void (*work)(void *), void *data, unsigned num_threads, unsigned flags);
bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *first,
                                          long *stop);
bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *stop);
void GOMP_loop_end_nowait(void);

int
omp_get_max_threads(void)
{
    const int wanted = atomic_load(&wanted_threads);
    const char *usual = getenv("OMP_NUM_THREADS");
    const int count = wanted > 0 ? wanted : usual != NULL ? atoi(usual) : DEFAULT_THREADS;
    return count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count;
}

void
omp_set_num_threads(int count)
{
    atomic_store(&wanted_threads, count);
}

int
omp_get_num_threads(void)
{
    return self.team == NULL ? 1 : self.team->num_threads;
}

int
omp_get_thread_num(void)
{
    return self.idx;
}

int
omp_pause_resource_all(omp_pause_resource_t kind)
{
    (void)kind;
    return 0;
}

static void *
run_member(void *argument)
{
    self = *(const member *)argument;
    self.team->work(self.team->data);
    self = (member){0};
    return NULL;
}

void
GOMP_parallel(void (*work)(void *), void *data, unsigned num_threads, unsigned flags)
{
    const int most = num_threads == 0 || num_threads > MAX_THREADS ? MAX_THREADS : (int)num_threads;
    const int usual = omp_get_max_threads();
    team run = {.work = work, .data = data, .num_threads = num_threads == 0 ? usual : most};
    member members[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    (void)flags;
    for (int i = 0; i < run.num_threads; i++) {
        members[i] = (member){.team = &run, .idx = i};
    }
    for (int i = 1; i < run.num_threads; i++) {
        if (pthread_create(&threads[i], NULL, run_member, &members[i]) != 0) {
            abort();
        }
    }
    run_member(&members[0]);
    for (int i = 1; i < run.num_threads; i++) {
        pthread_join(threads[i], NULL);
    }
}

bool
GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *first,
                                     long *stop)
{
    self.start = start;
    self.end = end;
    self.step = step;
    self.chunk = chunk;
    return GOMP_loop_nonmonotonic_dynamic_next(first, stop);
}

bool
GOMP_loop_nonmonotonic_dynamic_next(long *first, long *stop)
{
    /* Relaxed, because this must not order the iterations, or their races would be hidden. */
    const long taken =
        atomic_fetch_add_explicit(&self.team->taken, self.chunk, memory_order_relaxed);
    const long last = self.start + (taken + self.chunk) * self.step;
    *first = self.start + taken * self.step;
    *stop = last < self.end ? last : self.end;
    return *first < self.end;
}

void
GOMP_loop_end_nowait(void)
{
}
