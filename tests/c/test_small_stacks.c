/* test_small_stacks.c: every operator from 16 threads at once whose stacks have 64 KiB, or the
 * least that the system allows. Results have the bytes of a call from the main thread, and the
 * memory in front of the stacks stays as it is.
 *
 * The first argument is the number of calls in all, 10,000 if there is none.
 */
#define _GNU_SOURCE /* pthread_attr_setstack */ // NOLINT(cert-dcl37-c,cert-dcl51-cpp)
#include <pthread.h>
#include <unistd.h>

#include "large_calls.h"

enum {
    NUM_THREADS = 16,
    NUM_SHARES = 4, /* a thread calls a share of the operators, and all large calls */
    MAX_CALLS = 24,
    STACK_BYTES = 64 << 10,
    FRONT_BYTES = 512 << 10, /* in front of a stack: more than any frame that there ever was */
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { FRAMES_ARE_LARGER = 16 };
#else
enum { FRAMES_ARE_LARGER = 1 };
#endif

typedef struct job {
    smla_status (*call)(const any_args *, smla_error *);
    any_args args;
    int first_array;
    int end_array;
} job;

typedef struct caller {
    job jobs[MAX_CALLS];
    int num_jobs;
    int num_rounds;
    int num_failed;
    uint8_t *front; /* then the stack */
    size_t stack_bytes;
    pthread_t thread;
} caller;

static int num_calls = 10000;

static void
add_job(caller *by, smla_status (*call)(const any_args *, smla_error *), any_args (*make)(void))
{
    random_state = 1; /* all threads have the same inputs */
    job *const added = &by->jobs[by->num_jobs++];
    added->call = call;
    added->first_array = num_arrays;
    added->args = make();
    added->end_array = num_arrays;
}

static void
make_jobs(caller *by, int share)
{
    for (int i = share; i < NUM_OPERATORS; i += NUM_SHARES) {
        add_job(by, operators[i].call, operators[i].make);
    }
    for (int i = 0; i < NUM_LARGE_CALLS; i++) {
        add_job(by, large_calls[i].call, large_calls[i].make);
    }
}

static void *
call_all(void *argument)
{
    caller *const me = argument;
    for (int round = 0; round < me->num_rounds; round++) {
        for (int i = 0; i < me->num_jobs; i++) {
            me->num_failed += me->jobs[i].call(&me->jobs[i].args, NULL) != SMLA_OK;
        }
    }
    return NULL;
}

static void
start(caller *by)
{
    const long least = sysconf(_SC_THREAD_STACK_MIN);
    by->stack_bytes =
        (size_t)FRAMES_ARE_LARGER *
        (size_t)(least > STACK_BYTES ? (least + PAGE - 1) / PAGE * PAGE : STACK_BYTES);
    by->front = mmap(NULL, FRONT_BYTES + by->stack_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (by->front == MAP_FAILED) {
        printf("out of memory\n");
        exit(2);
    }
    memset(by->front, RED, FRONT_BYTES);
    pthread_attr_t attributes;
    EXPECT_EQ(pthread_attr_init(&attributes), 0);
    EXPECT_EQ(pthread_attr_setstack(&attributes, by->front + FRONT_BYTES, by->stack_bytes), 0);
    EXPECT_EQ(pthread_create(&by->thread, &attributes, call_all, by), 0);
    EXPECT_EQ(pthread_attr_destroy(&attributes), 0);
}

static void
finish(caller *by)
{
    EXPECT_EQ(pthread_join(by->thread, NULL), 0);
    EXPECT_EQ(by->num_failed, 0);
    size_t num_red = 0;
    for (size_t i = 0; i < FRONT_BYTES; i++) {
        num_red += by->front[i] == RED;
    }
    EXPECT_EQ(num_red, FRONT_BYTES);
    (void)munmap(by->front, FRONT_BYTES + by->stack_bytes);
}

/* The arrays of two callers have the same bytes, except for workspaces. */
static void
expect_same_arrays(const caller *a, const caller *b)
{
    for (int i = 0; i < a->num_jobs; i++) {
        for (int n = 0; n < a->jobs[i].end_array - a->jobs[i].first_array; n++) {
            const array *const x = arrays[a->jobs[i].first_array + n];
            const array *const y = arrays[b->jobs[i].first_array + n];
            const any_args *const args = &a->jobs[i].args;
            const bool is_scratch = &x->tensor == args->attention.workspace ||
                                    &x->tensor == args->lightning.workspace ||
                                    &x->tensor == args->dsv4.workspace_buffer ||
                                    &x->tensor == args->mla.workspace;
            EXPECT(is_scratch || memcmp(x->data, y->data, x->bytes) == 0);
        }
    }
}

static void
test_small_stacks(void)
{
    static caller normal_callers[NUM_SHARES];
    static caller callers[NUM_THREADS];
    for (int share = 0; share < NUM_SHARES; share++) {
        make_jobs(&normal_callers[share], share);
        normal_callers[share].num_rounds = 1;
        call_all(&normal_callers[share]);
        EXPECT_EQ(normal_callers[share].num_failed, 0);
    }
    for (int i = 0; i < NUM_THREADS; i++) {
        make_jobs(&callers[i], i % NUM_SHARES);
        callers[i].num_rounds = 1 + num_calls / NUM_THREADS / callers[i].num_jobs;
    }
    for (int i = 0; i < NUM_THREADS; i++) {
        start(&callers[i]);
    }
    for (int i = 0; i < NUM_THREADS; i++) {
        finish(&callers[i]);
        expect_same_arrays(&normal_callers[i % NUM_SHARES], &callers[i]);
    }
}

int
main(int argc, char **argv)
{
    num_calls = argc > 1 ? (int)strtol(argv[1], NULL, 10) : num_calls;
    RUN(test_small_stacks);
    return report("test_small_stacks");
}
