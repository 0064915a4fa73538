/* test_interrupt.c: a call that the binding ends at its n-th question, for n = 1, 2, 3, ... until
 * the call is over: every operator that can be ended says so by its own name, and leaves neither
 * memory nor a floating-point mode behind. The next call gives the same bytes as ever.
 *
 * The files that allocate are compiled into this program with its allocator, and the interrupt with
 * a clock that lets a call ask before each of its work items.
 */
#include <stdint.h>
#include <stdlib.h>

static void *test_malloc(size_t size);
static void test_free(void *memory);
static int64_t test_clock(void);

#define malloc        test_malloc
#define free          test_free
#define smla_clock_ns test_clock
#include "core/interrupt.c"             // NOLINT(bugprone-suspicious-include)
#include "cpu/cache/slot_shares.c"      // NOLINT(bugprone-suspicious-include)
#include "cpu/machine/thread_scratch.c" // NOLINT(bugprone-suspicious-include)
#undef malloc
#undef free
#undef smla_clock_ns

#include "core/fp_mode.h"
#include "cpu/machine/threads.h"
#include "large_calls.h"

static int num_live;

static void *
test_malloc(size_t size)
{
    void *const memory = malloc(size);
    num_live += memory != NULL;
    return memory;
}

static void
test_free(void *memory)
{
    num_live -= memory != NULL;
    free(memory);
}

/* Each look at the clock is later than the time of the next question. */
static int64_t
test_clock(void)
{
    static int64_t now = 1;
    now += 2 * (int64_t)ASK_EVERY_NS;
    return now;
}

/* The binding: it ends a call at question `num_left`, or never where that is negative. */
static int num_left;
static int num_asked;

static bool
wants_end(void *context)
{
    EXPECT(context == (void *)&num_left);
    num_asked++;
    num_left -= num_left >= 0;
    return num_left == 0;
}

static smla_status
call_until(int question, smla_status (*call)(const any_args *, smla_error *), const any_args *args)
{
    smla_interrupt interrupt = {.wants_end = wants_end,
                                .context = (void *)&num_left,
                                .ask_at_ns = 1};
    num_left = question;
    num_asked = 0;
    EXPECT(smla_set_interrupt(&interrupt) == NULL);
    const smla_status status = call(args, &error);
    EXPECT(smla_set_interrupt(NULL) == &interrupt);
    EXPECT_EQ(atomic_load(&interrupt.is_ended), status != SMLA_OK);
    return status;
}

/* Operators whose calls may be long. */
static const bool may_end[NUM_OPERATORS] = {
    [OP_top_k_per_row] = true,     [OP_sparse_attention] = true,
    [OP_sparse_mla_dsv4] = true,   [OP_mla_attention] = true,
    [OP_varlen_attention] = true,  [OP_paged_attention] = true,
    [OP_absorb_q_proj] = true,     [OP_absorb_o_proj] = true,
    [OP_k_up_proj] = true,         [OP_v_up_proj] = true,
    [OP_kv_up_proj] = true,        [OP_scaled_quantize] = true,
    [OP_fp8_linear] = true,        [OP_indexer_logits] = true,
    [OP_lightning_indexer] = true, [OP_grouped_output_projection] = true,
    [OP_top_k_merge] = true,
};

/* Bytes of a call's arrays, one behind the other, but for vectors of bytes: a workspace is one. */
static uint8_t written[1 << 20];

static size_t
copy_arrays(const operator_case *op, any_args *args)
{
    size_t offsets[MAX_SLOTS];
    size_t bytes = 0;
    const int count = op == NULL ? 0 : find_arrays(args, op->args_bytes, offsets);
    for (int i = 0; i < count; i++) {
        const DLTensor *const tensor = *array_at(args, offsets[i]);
        if (tensor->ndim == 1 && tensor->dtype.bits == 8) {
            continue;
        }
        int64_t size = tensor->dtype.bits / 8;
        for (int dim = 0; dim < tensor->ndim; dim++) {
            size *= tensor->shape[dim];
        }
        EXPECT(bytes + (size_t)size <= sizeof written);
        memcpy(written + bytes, tensor->data, (size_t)size);
        bytes += (size_t)size;
    }
    return bytes;
}

static void
end_each(const char *name, smla_status (*call)(const any_args *, smla_error *), any_args *args,
         const operator_case *op, bool ends)
{
    static uint8_t want[sizeof written];
    char text[100];
    snprintf(text, sizeof text, "%s: the call was interrupted", name);
    EXPECT_OK(call_until(-1, call, args));
    /* Other threads may take every work item of a small call, and they do not ask. */
    EXPECT(ends ? num_asked > 0 || smla_max_threads() > 1 : num_asked == 0);
    const size_t bytes = copy_arrays(op, args);
    memcpy(want, written, bytes);
    smla_status status = SMLA_ERROR_RUNTIME;
    for (int question = 1; ends && status != SMLA_OK; question++) {
        status = call_until(question, call, args);
        EXPECT_EQ(num_live, 0);
        EXPECT_EQ((int)status, num_asked < question ? SMLA_OK : SMLA_ERROR_RUNTIME);
        EXPECT(num_asked <= question); /* an ended call asks no more, however slow the rest is */
        EXPECT(status == SMLA_OK || strncmp(error.text, text, strlen(text)) == 0);
        EXPECT_OK(call_until(-1, call, args));
        EXPECT_EQ(copy_arrays(op, args), bytes);
        EXPECT_EQ(memcmp(written, want, bytes), 0);
    }
}

/* The mode of the thread that calls is never the default one here. */
static void
test_operators(void)
{
    const smla_fp_mode callers = smla_fp_read();
    smla_fp_set(SMLA_FP_FLUSH);
    for (int i = 0; i < NUM_OPERATORS; i++) {
        const int before = failures;
        const operator_case *const op = &operators[i];
        any_args args = op->make();
        end_each(title_of(op), op->call, &args, op, may_end[i]);
        if (failures != before) {
            printf("    in %s\n", op->name);
        }
        free_arrays(op->name);
    }
    for (int i = 0; i < NUM_LARGE_CALLS; i++) {
        any_args args = large_calls[i].make();
        end_each(large_calls[i].name, large_calls[i].call, &args, NULL, true);
        free_arrays(large_calls[i].name);
    }
    const smla_fp_mode flags = 0x3F; /* exceptions that have been, where a mode has them */
    EXPECT((smla_fp_read() & ~flags) == (SMLA_FP_FLUSH & ~flags));
    smla_fp_set(callers);
}

int
main(void)
{
    RUN(test_operators);
    smla_set_max_threads(1);
    RUN(test_operators);
    return report("test_interrupt");
}
