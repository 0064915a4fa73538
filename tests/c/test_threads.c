/* test_threads.c: calls that are large enough for many threads, on any number of them, from several
 * callers at once, and ended by interrupts at any moment. ThreadSanitizer runs this file, too, and
 * sees here what threads share: rows of top-k, groups of a quantisation, parts of a token, the
 * pool's workers, and whether a call is ended.
 *
 * Threads run on a machine of any number of processors, because the pool starts as many as it is
 * asked for.
 */
#include <pthread.h>

#include "core/clock.h"
#include "core/interrupt.h"
#include "cpu/machine/threads.h"
#include "operators.h"

enum { MAX_JOBS = 16, MAX_OUTS = 2, NUM_CALLERS = 4, SHARED_COLUMNS = 3 << 17 };

/* A call, and its results. */
typedef struct job {
    const operator_case *op;
    any_args args;
    const array *outs[MAX_OUTS];
    bool can_end; /* its threads ask whether the call is ended */
} job;

/* Adds a call of the operator with this number, which has one result or two. */
static job *
add_job(job *jobs, int *num_jobs, int number, any_args args, const array *out, const array *second)
{
    if (*num_jobs == MAX_JOBS) {
        printf("out of jobs\n");
        exit(2);
    }
    job *const added = &jobs[(*num_jobs)++];
    *added = (job){.op = &operators[number], .args = args, .outs = {out, second}, .can_end = true};
    return added;
}

static const DLTensor *
normal(array *a)
{
    return &fill_normal(a, 1.0)->tensor;
}

/* ---- Jobs ---------------------------------------------------------------------------------- */

/* Groups that threads share, because they are few, or tiles that each thread has for itself. */
static void
add_scaled(job *jobs, int *num_jobs, int64_t rows, int64_t columns, int64_t group)
{
    array *const out = ARRAY(uint8, rows, columns);
    array *const descale = ARRAY(fp32, rows, columns / group);
    const any_args args = {.scaled = {.struct_size = sizeof(smla_scaled_quantize_args),
                                      .x = normal(ARRAY(bf16, rows, columns)),
                                      .out = &out->tensor,
                                      .descale = &descale->tensor,
                                      .group_rows = 1,
                                      .group_columns = group}};
    add_job(jobs, num_jobs, OP_scaled_quantize, args, out, descale);
}

/* One long row that threads share, or short rows. */
static void
add_top_k(job *jobs, int *num_jobs, int64_t rows, int64_t columns)
{
    array *const out = ARRAY(int32, rows, 100);
    array *const values = ARRAY(fp32, rows, 100);
    const any_args args = {.top_k = {.struct_size = sizeof(smla_top_k_args),
                                     .logits = normal(ARRAY(fp32, rows, columns)),
                                     .starts = ZEROS(int32, rows),
                                     .ends = &fill(ARRAY(int32, rows), (double)columns)->tensor,
                                     .k = 100,
                                     .out = &out->tensor,
                                     .values = &values->tensor}};
    add_job(jobs, num_jobs, OP_top_k_per_row, args, out, values);
}

/* Few tokens, whose parts run in parallel and are folded in parallel, or many. */
static void
add_attention(job *jobs, int *num_jobs, int64_t tokens, int64_t heads, int64_t topk)
{
    array *const out = ARRAY(bf16, tokens, heads, 512);
    array *const lse = ARRAY(fp32, tokens, heads);
    array *const indices = ARRAY(int32, tokens, topk);
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t i = 0; i < topk; i++) {
            SET(indices, (double)random_int(32), t, i);
        }
    }
    any_args args = {.attention = {.struct_size = sizeof(smla_sparse_attention_args),
                                   .q = normal(ARRAY(bf16, tokens, heads, 576)),
                                   .kv_cache = normal(ARRAY(bf16, 32, 576)),
                                   .indices = &indices->tensor,
                                   .out = &out->tensor,
                                   .lse = &lse->tensor,
                                   .workspace = ZEROS(uint8, 48 << 20),
                                   .softmax_scale = 0.1}};
    add_job(jobs, num_jobs, OP_sparse_attention, args, out, lse);
}

static smla_indexer_logits_args
make_logits_args(int64_t tokens, int64_t keys)
{
    return (smla_indexer_logits_args){
        .struct_size = sizeof(smla_indexer_logits_args),
        .q = normal(ARRAY(e4m3, tokens, 4, 128)),
        .weights = normal(ARRAY(fp32, tokens, 4)),
        .k_cache = normal(ARRAY(e4m3, keys, 128)),
        .k_scale = normal(ARRAY(fp32, keys)),
        .context_lens = &fill(ARRAY(int32, tokens), (double)keys)->tensor,
        .starts = ZEROS(int32, tokens),
    };
}

static void
add_logits(job *jobs, int *num_jobs, int64_t tokens, int64_t keys)
{
    array *const out = ARRAY(fp32, tokens, keys);
    any_args args = {.logits = make_logits_args(tokens, keys)};
    args.logits.out = &out->tensor;
    add_job(jobs, num_jobs, OP_indexer_logits, args, out, NULL);
}

static void
add_lightning(job *jobs, int *num_jobs, int64_t tokens, int64_t keys)
{
    array *const out = ARRAY(int32, tokens, 60);
    const smla_indexer_logits_args scored = make_logits_args(tokens, keys);
    const any_args args = {.lightning = {.struct_size = sizeof(smla_lightning_indexer_args),
                                         .q = scored.q,
                                         .weights = scored.weights,
                                         .k_cache = scored.k_cache,
                                         .k_scale = scored.k_scale,
                                         .context_lens = scored.context_lens,
                                         .starts = scored.starts,
                                         .k = 60,
                                         .out = &out->tensor,
                                         .max_logits_bytes = 8 * 4 * keys,
                                         .workspace = ZEROS(uint8, 8 * 4 * keys + 128)}};
    add_job(jobs, num_jobs, OP_lightning_indexer, args, out, NULL);
}

static void
add_projection(job *jobs, int *num_jobs, int64_t tokens, int64_t heads)
{
    array *const out = ARRAY(bf16, tokens, heads, 512);
    const any_args args = {.k_up = {.struct_size = sizeof(smla_k_up_proj_args),
                                    .q_nope = normal(ARRAY(bf16, tokens, heads, 128)),
                                    .w_uk = normal(ARRAY(bf16, 512, heads, 128)),
                                    .out = &out->tensor}};
    add_job(jobs, num_jobs, OP_k_up_proj, args, out, NULL);
}

static void
add_varlen(job *jobs, int *num_jobs, int64_t tokens, int64_t heads)
{
    array *const out = ARRAY(bf16, tokens, heads, 32);
    array *const lse = ARRAY(fp32, tokens, heads);
    const DLTensor *const starts = &VECTOR(int32, 0, tokens / 3, tokens)->tensor;
    const any_args args = {.varlen = {.struct_size = sizeof(smla_varlen_attention_args),
                                      .q = normal(ARRAY(bf16, tokens, heads, 64)),
                                      .k = normal(ARRAY(bf16, tokens, heads, 64)),
                                      .v = normal(ARRAY(bf16, tokens, heads, 32)),
                                      .cu_seqlens_q = starts,
                                      .cu_seqlens_k = starts,
                                      .out = &out->tensor,
                                      .lse = &lse->tensor,
                                      .softmax_scale = 0.1,
                                      .is_causal = 1}};
    add_job(jobs, num_jobs, OP_varlen_attention, args, out, lse);
}

static void
add_paged(job *jobs, int *num_jobs, int64_t tokens, int64_t heads)
{
    array *const out = ARRAY(bf16, tokens, heads, 32);
    array *const lse = ARRAY(fp32, tokens, heads);
    array *const table = ARRAY(int32, 2, 3);
    memcpy(table->data, (int32_t[]){6, 0, 2, 5, -1, 3}, table->bytes);
    const any_args args = {.paged = {.struct_size = sizeof(smla_paged_attention_args),
                                     .q = normal(ARRAY(bf16, tokens, heads, 64)),
                                     .k_cache = normal(ARRAY(bf16, 7, 40, 1, 64)),
                                     .v_cache = normal(ARRAY(bf16, 7, 40, 1, 32)),
                                     .block_table = &table->tensor,
                                     .cache_seqlens = &VECTOR(int32, 90, 115)->tensor,
                                     .cu_seqlens_q = &VECTOR(int32, 0, tokens / 3, tokens)->tensor,
                                     .out = &out->tensor,
                                     .lse = &lse->tensor,
                                     .softmax_scale = 0.1}};
    add_job(jobs, num_jobs, OP_paged_attention, args, out, lse);
}

static void
add_merge(job *jobs, int *num_jobs, int64_t tokens, int64_t heads)
{
    array *const out = ARRAY(bf16, tokens, heads, 512);
    array *const lse = ARRAY(fp32, tokens, heads);
    const any_args args = {.merge = {.struct_size = sizeof(smla_merge_attn_states_args),
                                     .out_a = normal(ARRAY(bf16, tokens, heads, 512)),
                                     .lse_a = normal(ARRAY(fp32, tokens, heads)),
                                     .out_b = normal(ARRAY(bf16, tokens, heads, 512)),
                                     .lse_b = normal(ARRAY(fp32, tokens, heads)),
                                     .out = &out->tensor,
                                     .lse = &lse->tensor,
                                     .tokens_without_context = 7}};
    add_job(jobs, num_jobs, OP_merge_attn_states, args, out, lse)->can_end = false;
}

static void
add_quant(job *jobs, int *num_jobs, int64_t rows, int64_t columns)
{
    array *const out = ARRAY(uint8, rows, columns);
    array *const scale = ARRAY(fp32, 1);
    const any_args args = {.quant = {.struct_size = sizeof(smla_dynamic_per_tensor_quant_args),
                                     .x = normal(ARRAY(bf16, rows, columns)),
                                     .out = &out->tensor,
                                     .scale = &scale->tensor}};
    add_job(jobs, num_jobs, OP_dynamic_per_tensor_quant, args, out, scale)->can_end = false;
}

/* The same inputs whenever it is called. */
static int
make_jobs(job *jobs)
{
    int num_jobs = 0;
    random_state = 1;
    add_scaled(jobs, &num_jobs, 2, 1 << 18, 1 << 17);
    add_scaled(jobs, &num_jobs, 4, 1 << 17, 128);
    add_scaled(jobs, &num_jobs, 9, 1 << 14, 16);
    add_top_k(jobs, &num_jobs, 1, SHARED_COLUMNS);
    add_top_k(jobs, &num_jobs, 48, 4096);
    add_attention(jobs, &num_jobs, 1, 40, 1500);
    add_attention(jobs, &num_jobs, 70, 4, 200);
    add_logits(jobs, &num_jobs, 24, 3000);
    add_lightning(jobs, &num_jobs, 24, 2000);
    add_projection(jobs, &num_jobs, 130, 6);
    add_varlen(jobs, &num_jobs, 1000, 3);
    add_paged(jobs, &num_jobs, 700, 4);
    add_merge(jobs, &num_jobs, 90, 3);
    add_quant(jobs, &num_jobs, 40, 5000);
    return num_jobs;
}

static void
poison_results(const job *of)
{
    for (int i = 0; i < MAX_OUTS && of->outs[i] != NULL; i++) {
        memset(of->outs[i]->data, POISON, of->outs[i]->bytes);
    }
}

/* Whether two jobs have the same results. */
static bool
are_same(const job *a, const job *b)
{
    for (int i = 0; i < MAX_OUTS && a->outs[i] != NULL; i++) {
        if (memcmp(a->outs[i]->data, b->outs[i]->data, a->outs[i]->bytes) != 0) {
            printf("    result %d of %s\n", i, a->op->name);
            return false;
        }
    }
    return true;
}

/* ---- Threads ------------------------------------------------------------------------------- */

static const int thread_counts[] = {1, 2, 7, 16};

enum { NUM_COUNTS = sizeof thread_counts / sizeof thread_counts[0] };

/* The results of one thread, which all others must have. */
static void
make_wanted(job *wanted, int *num_jobs)
{
    *num_jobs = make_jobs(wanted);
    smla_set_max_threads(1);
    for (int i = 0; i < *num_jobs; i++) {
        EXPECT_OK(wanted[i].op->call(&wanted[i].args, &error));
    }
}

static void
test_any_number_of_threads(void)
{
    static job wanted[MAX_JOBS], jobs[MAX_JOBS];
    int num_jobs;
    make_wanted(wanted, &num_jobs);
    EXPECT_EQ(make_jobs(jobs), num_jobs);
    for (int i = 0; i < num_jobs; i++) {
        for (int n = 0; n < NUM_COUNTS; n++) {
            smla_set_max_threads(thread_counts[n]);
            poison_results(&jobs[i]);
            EXPECT_OK(jobs[i].op->call(&jobs[i].args, &error));
            EXPECT(are_same(&jobs[i], &wanted[i]));
        }
    }
}

/* ---- Interrupts ---------------------------------------------------------------------------- */

/* What a binding does when it is asked: it calls the library, as a signal's handler may, and then
 * says whether the call shall end. */
typedef struct binding {
    any_args inner;
    bool ends;
    int num_asked;
} binding;

static bool
answer(void *context)
{
    binding *const by = context;
    smla_interrupt *const own = smla_set_interrupt(NULL);
    by->num_asked += call_scaled_quantize(&by->inner, NULL) == SMLA_OK;
    (void)smla_set_interrupt(own);
    return by->ends;
}

/* Calls with an interrupt that is asked once so many nanoseconds have passed. */
static smla_status
call_interrupted(job *of, binding *by, int64_t after_ns)
{
    smla_interrupt interrupt = {.wants_end = answer,
                                .context = by,
                                .ask_at_ns = smla_clock_ns() + after_ns};
    (void)smla_set_interrupt(&interrupt);
    const smla_status status = of->op->call(&of->args, NULL);
    (void)smla_set_interrupt(NULL);
    return status;
}

/* A call fails if the binding was asked and wants it to end. It is not asked where the workers have
 * taken all tasks before the caller takes its first one. */
static void
test_calls_are_ended_at_any_moment(void)
{
    static const int64_t moments[] = {0, 20000, 300000};
    static job wanted[MAX_JOBS], jobs[MAX_JOBS];
    int num_jobs;
    int num_ended = 0;
    make_wanted(wanted, &num_jobs);
    (void)make_jobs(jobs);
    binding ending = {.inner = make_scaled_quantize(), .ends = true};
    binding going_on = {.inner = make_scaled_quantize()};
    for (int n = 0; n < NUM_COUNTS; n++) {
        smla_set_max_threads(thread_counts[n]);
        for (int i = 0; i < num_jobs; i++) {
            for (int m = 0; jobs[i].can_end && m < 3; m++) {
                ending.num_asked = 0;
                const smla_status status = call_interrupted(&jobs[i], &ending, moments[m]);
                EXPECT_EQ(status, ending.num_asked > 0 ? SMLA_ERROR_RUNTIME : SMLA_OK);
                EXPECT(ending.num_asked == 1 || m > 0 || thread_counts[n] > 1);
                num_ended += status != SMLA_OK;
                poison_results(&jobs[i]);
                EXPECT_EQ(call_interrupted(&jobs[i], &going_on, moments[m]), SMLA_OK);
                EXPECT(are_same(&jobs[i], &wanted[i]));
            }
        }
    }
    EXPECT(num_ended > num_jobs);
}

/* ---- Callers ------------------------------------------------------------------------------- */

typedef struct caller {
    job jobs[MAX_JOBS];
    int num_jobs;
    binding by; /* ends its caller's calls, or none */
    int num_ended;
    int num_failed;
    int num_wrong;
    pthread_t thread;
} caller;

static void *
call_all(void *argument)
{
    caller *const me = argument;
    for (int i = 0; i < me->num_jobs; i++) {
        const smla_status status = call_interrupted(&me->jobs[i], &me->by, 0);
        me->num_ended += status == SMLA_ERROR_RUNTIME;
        me->num_failed += status != SMLA_OK && status != SMLA_ERROR_RUNTIME;
    }
    return NULL;
}

enum { NUM_SHORT_CALLS = 1000 };

static void *
repeat_call(void *argument)
{
    caller *const me = argument;
    for (int i = 0; i < NUM_SHORT_CALLS; i++) {
        poison_results(&me->jobs[0]);
        me->num_failed += me->jobs[0].op->call(&me->jobs[0].args, NULL) != SMLA_OK;
        me->num_wrong += !are_same(&me->jobs[0], &me->jobs[1]);
    }
    return NULL;
}

enum { NUM_BUSY = 4 };

static atomic_bool is_busy;

static void *
keep_busy(void *argument)
{
    while (atomic_load_explicit(&is_busy, memory_order_relaxed)) {
    }
    return argument;
}

/* Calls so short, and a host so busy, that most workers wake too late: their callers do their
 * shares, and the workers are called again before they have seen that they were recalled. */
static void
test_short_calls_recall_workers(void)
{
    static caller callers[NUM_CALLERS];
    pthread_t busy[NUM_BUSY];
    atomic_store(&is_busy, true);
    for (int i = 0; i < NUM_BUSY; i++) {
        EXPECT_EQ(pthread_create(&busy[i], NULL, keep_busy, NULL), 0);
    }
    for (int i = 0; i < NUM_CALLERS; i++) {
        caller *const by = &callers[i];
        for (int copy = 0; copy < 2; copy++) {
            random_state = 1;
            add_merge(by->jobs, &by->num_jobs, 70, 1);
        }
        smla_set_max_threads(1);
        EXPECT_OK(by->jobs[1].op->call(&by->jobs[1].args, &error));
    }
    smla_set_max_threads(7);
    for (int i = 0; i < NUM_CALLERS; i++) {
        EXPECT_EQ(pthread_create(&callers[i].thread, NULL, repeat_call, &callers[i]), 0);
    }
    for (int i = 0; i < NUM_CALLERS; i++) {
        EXPECT_EQ(pthread_join(callers[i].thread, NULL), 0);
        EXPECT_EQ(callers[i].num_failed, 0);
        EXPECT_EQ(callers[i].num_wrong, 0);
    }
    atomic_store(&is_busy, false);
    for (int i = 0; i < NUM_BUSY; i++) {
        EXPECT_EQ(pthread_join(busy[i], NULL), 0);
    }
}

/* Callers compete for the pool's workers. Every second one has its calls ended. */
static void
test_callers_end_their_own_calls(void)
{
    static job wanted[MAX_JOBS];
    static caller callers[NUM_CALLERS];
    int num_jobs;
    make_wanted(wanted, &num_jobs);
    smla_set_max_threads(7);
    for (int i = 0; i < NUM_CALLERS; i++) {
        callers[i].num_jobs = make_jobs(callers[i].jobs);
        callers[i].by = (binding){.inner = make_scaled_quantize(), .ends = i % 2 == 1};
    }
    for (int i = 0; i < NUM_CALLERS; i++) {
        EXPECT_EQ(pthread_create(&callers[i].thread, NULL, call_all, &callers[i]), 0);
    }
    for (int i = 0; i < NUM_CALLERS; i++) {
        const caller *const by = &callers[i];
        EXPECT_EQ(pthread_join(by->thread, NULL), 0);
        EXPECT_EQ(by->num_failed, 0);
        EXPECT_EQ(by->num_ended, by->by.ends ? by->by.num_asked : 0);
        EXPECT(by->by.num_asked > 0);
        for (int j = 0; j < num_jobs; j++) {
            EXPECT(by->by.ends || are_same(&by->jobs[j], &wanted[j]));
        }
    }
}

int
main(void)
{
    RUN(test_any_number_of_threads);
#if defined(SMLA_HAVE_POOL) /* another OpenMP has no callers that ask in the middle of a loop */
    RUN(test_calls_are_ended_at_any_moment);
    RUN(test_callers_end_their_own_calls);
    RUN(test_short_calls_recall_workers);
#endif
    return report("test_threads");
}
