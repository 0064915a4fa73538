/* test_cuda_checked.c: what csrc/cuda/host/checked.c shows to the CPU's checks: every element that
 * an operator's arrays have on the device, where their strides say, and copies of no other byte.
 * The CPU's checks are replaced by functions that compare the copies with the arrays.
 */
#include <stdlib.h>

static void *test_malloc(size_t size);
static void test_free(void *memory);

#define smla_cpu_check_cache_write      see_cache_write
#define smla_cpu_check_gather           see_gather
#define smla_cpu_check_convert          see_convert
#define smla_cpu_check_positions        see_positions
#define smla_cpu_check_global_topk      see_global_topk
#define smla_cpu_check_combine_topk_swa see_combine_topk_swa
#define smla_cpu_check_logits           see_logits
#define smla_cpu_check_partial_states   see_partial_states
#define smla_cpu_check_compress         see_compress
#define smla_cpu_check_mixed_indices    see_mixed_indices
#define slots                           device_slots /* a local name here */
#include "cuda/host/device.c"                        // NOLINT(bugprone-suspicious-include)
#undef slots
#define free_arrays     free_copies /* both files have it */
#define malloc          test_malloc
#define free            test_free
#define cudaMemcpyAsync test_copy
static cudaError_t test_copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                             cudaStream_t stream);
#include "cuda/host/checked.c" // NOLINT(bugprone-suspicious-include)
#undef malloc
#undef free
#undef cudaMemcpyAsync
#undef free_arrays

#include "fake_cuda/runtime.h"

static int num_live; /* live copies */

/* The copy ends where it ends: behind it are bytes that no array has. */
static void *
test_malloc(size_t size)
{
    void *const memory = malloc(size + RED_ZONE);
    memset(memory, RED, size + RED_ZONE);
    num_live++;
    return memory;
}

static void
test_free(void *memory)
{
    num_live -= memory != NULL;
    free(memory);
}

/* ---- Arrays on the device ------------------------------------------------------------------ */

/* An array whose memory is the bytes that it spans, between red zones. */
typedef struct device_side {
    const uint8_t *pointer; /* to index 0; NULL: an optional array that is not given */
    int64_t counts[2];      /* zeros, where there are no elements */
    int64_t strides[2];
    int64_t element_bytes;
    const uint8_t *low; /* the first byte */
    size_t bytes;
} device_side;

enum { MAX_SIDES = 8 };

static device_side sides[MAX_SIDES];
static int num_sides;
static struct CUstream_st stream_of_test;
static bool is_seen;

static const smla_stream where = {.device_id = 0, .handle = &stream_of_test};

static const void *
lay_table(int64_t rows, int64_t columns, int64_t stride_row, int64_t stride_column,
          int64_t element_bytes)
{
    const int64_t reach_row = (rows - 1) * stride_row;
    const int64_t reach_column = (columns - 1) * stride_column;
    const int64_t below = (reach_row < 0 ? -reach_row : 0) + (reach_column < 0 ? -reach_column : 0);
    const int64_t above = (reach_row > 0 ? reach_row : 0) + (reach_column > 0 ? reach_column : 0);
    const array *const memory = ARRAY(uint8, (below + above + 1) * element_bytes);
    for (size_t i = 0; i < memory->bytes; i++) {
        memory->data[i] = (uint8_t)random_bits();
    }
    device_side *const side = &sides[num_sides++];
    *side = (device_side){.pointer = memory->data + below * element_bytes,
                          .counts = {rows, columns},
                          .strides = {stride_row, stride_column},
                          .element_bytes = element_bytes,
                          .low = memory->data,
                          .bytes = memory->bytes};
    return side->pointer;
}

/* Vectors of a call have strides of their own, so that none serves for another. */
static int64_t first_stride;

static int64_t
next_stride(void)
{
    return first_stride + (first_stride < 0 ? -num_sides : first_stride > 0 ? num_sides : 0);
}

static const void *
lay_vector(int64_t count, int64_t stride, int64_t element_bytes)
{
    return lay_table(count, 1, stride, 0, element_bytes);
}

/* An optional array that is not given. */
static const void *
lay_nothing(void)
{
    sides[num_sides++] = (device_side){.pointer = NULL};
    return NULL;
}

/* An array without elements, whose pointer names one byte that is not its own. */
static const void *
lay_empty(void)
{
    static const uint8_t byte;
    sides[num_sides++] = (device_side){.pointer = &byte};
    return &byte;
}

/* The copied bytes are those of one array, all of them and no other. */
static cudaError_t
test_copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    bool is_an_array = false;
    for (int i = 0; i < num_sides; i++) {
        is_an_array |= from == sides[i].low && bytes == sides[i].bytes;
    }
    EXPECT(is_an_array);
    EXPECT(kind == cudaMemcpyDeviceToHost && stream == &stream_of_test);
    return is_an_array ? cudaMemcpyAsync(to, from, bytes, kind, stream) : cudaErrorInvalidValue;
}

/* Expects that the host's pointer and strides show every element of array `i`. */
static void
see(int i, const void *host, int64_t stride_row, int64_t stride_column)
{
    const device_side *const side = &sides[i];
    EXPECT_EQ(host == NULL, side->pointer == NULL);
    EXPECT(side->counts[0] == 0 || host != side->pointer);
    for (int64_t row = 0; host != NULL && side->pointer != NULL && row < side->counts[0]; row++) {
        for (int64_t column = 0; column < side->counts[1]; column++) {
            const int64_t at = row * side->strides[0] + column * side->strides[1];
            const int64_t seen = row * stride_row + column * stride_column;
            EXPECT_EQ(memcmp((const uint8_t *)host + seen * side->element_bytes,
                             side->pointer + at * side->element_bytes, (size_t)side->element_bytes),
                      0);
        }
    }
    is_seen = true;
}

/* ---- What the checks see ------------------------------------------------------------------- */

smla_status
see_cache_write(const smla_cache_write_params *p, smla_error *e)
{
    see(0, p->slot_mapping, p->slot_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_gather(const smla_gather_params *p, smla_error *e)
{
    see(0, p->block_table, p->block_table_stride_req, p->block_table_stride_block);
    see(1, p->seq_lens, p->seq_lens_stride, 0);
    see(2, p->workspace_starts, p->workspace_starts_stride, 0);
    see(3, p->seq_starts, p->seq_starts_stride, 0);
    see(4, p->gather_lens, p->gather_lens_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_convert(const smla_convert_params *p, smla_error *e)
{
    see(0, p->req_id_per_token, p->req_id_stride, 0);
    see(1, p->prefill_request_ids, p->prefill_request_ids_stride, 0);
    see(2, p->prefill_workspace_starts, p->prefill_workspace_starts_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_positions(const char *op, const smla_rope *rope, int64_t num_tokens, smla_error *e)
{
    EXPECT(strcmp(op, "an operator") == 0);
    EXPECT_EQ(num_tokens, sides[0].counts[0]);
    see(0, rope->positions, rope->positions_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_global_topk(const smla_topk_slots_params *p, smla_error *e)
{
    see(0, p->req_id_per_token, p->req_id_stride, 0);
    see(1, p->is_valid, p->is_valid_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_combine_topk_swa(const smla_combine_topk_swa_params *p, smla_error *e)
{
    see(0, p->batch.query_start_loc, p->batch.query_start_loc_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_logits(const smla_logits_params *p, smla_error *e)
{
    see(0, p->context_lens, p->context_lens_stride, 0);
    see(1, p->req_id_per_token, p->req_id_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_partial_states(const smla_partial_states_params *p, smla_error *e)
{
    see(0, p->rows.slot_mapping, p->rows.slot_stride, 0);
    see(1, p->positions, p->positions_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_compress(const smla_compress_params *p, smla_error *e)
{
    see(0, p->states.rows.slot_mapping, p->states.rows.slot_stride, 0);
    see(1, p->insert.slot_mapping, p->insert.slot_stride, 0);
    see(2, p->rope.positions, p->rope.positions_stride, 0);
    see(3, p->req_id_per_token, p->req_id_stride, 0);
    see(4, p->table.block_table, p->table.stride_req, p->table.stride_block);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

smla_status
see_mixed_indices(const smla_mixed_indices_params *p, smla_error *e)
{
    see(0, p->batch.query_start_loc, p->batch.query_start_loc_stride, 0);
    see(1, p->req_id_per_token, p->req_id_stride, 0);
    see(2, p->is_valid, p->is_valid_stride, 0);
    return smla_fail(e, SMLA_ERROR_VALUE, "seen");
}

/* ---- Calls --------------------------------------------------------------------------------- */

static void
begin(int64_t stride)
{
    num_sides = 0;
    first_stride = stride;
    is_seen = false;
}

/* The check was asked, its answer is the call's, and no copy is left. */
#define EXPECT_SEEN(call)                            \
    do {                                             \
        EXPECT_FAIL(call, SMLA_ERROR_VALUE, "seen"); \
        EXPECT(is_seen);                             \
        EXPECT_EQ(num_live, 0);                      \
        free_arrays("test_cuda_checked");            \
    } while (0)

/* Fills in a vector's pointer and stride. */
#define LAY(field, stride_field, count, element_bytes)                                     \
    do {                                                                                   \
        (stride_field) = next_stride();                                                    \
        *(const void **)(void *)&(field) = lay_vector(count, stride_field, element_bytes); \
    } while (0)

/* More rows than columns, and more columns than rows. Strides of rows and columns: compact, padded,
 * transposed, gaps in both, backwards in either or in both, one row or one column for all. */
enum { FEW = 3, MANY = 5 };

static const struct {
    int64_t rows, columns, stride_row, stride_column;
} tables[] = {
    {FEW, MANY, MANY, 1},
    {MANY, FEW, FEW, 1},
    {FEW, MANY, MANY + 2, 1},
    {MANY, FEW, FEW + 4, 1},
    {FEW, MANY, 1, FEW},
    {MANY, FEW, 1, MANY},
    {FEW, MANY, 1, FEW + 2},
    {MANY, FEW, 2, 2 * MANY + 1},
    {FEW, MANY, 3 * MANY + 1, 3},
    {FEW, MANY, -MANY - 1, 1},
    {MANY, FEW, FEW, -1},
    {FEW, MANY, -2, -2 * FEW - 3},
    {FEW, MANY, 0, 2},
    {MANY, FEW, 2, 0},
    {1, MANY, 99, 2},
    {FEW, 1, 2, 99},
};

enum { NUM_TABLES = sizeof tables / sizeof tables[0] };

static const int64_t some_strides[] = {1, 2, -1, -3, 0};

enum { NUM_STRIDES = sizeof some_strides / sizeof some_strides[0] };

static void
test_gather(void)
{
    for (int i = 0; i < NUM_TABLES * NUM_STRIDES; i++) {
        const int64_t rows = tables[i % NUM_TABLES].rows;
        smla_gather_params p = {.call = {.op = "gather_kv_cache", .stream = where},
                                .num_reqs = rows,
                                .num_blocks = tables[i % NUM_TABLES].columns,
                                .block_table_stride_req = tables[i % NUM_TABLES].stride_row,
                                .block_table_stride_block = tables[i % NUM_TABLES].stride_column};
        begin(some_strides[i / NUM_TABLES]);
        p.block_table =
            lay_table(rows, p.num_blocks, p.block_table_stride_req, p.block_table_stride_block, 4);
        LAY(p.seq_lens, p.seq_lens_stride, rows, 4);
        if (i % 2 == 0) {
            LAY(p.workspace_starts, p.workspace_starts_stride, rows, 4);
            p.seq_starts = lay_nothing();
            LAY(p.gather_lens, p.gather_lens_stride, rows, 4);
        } else {
            p.workspace_starts = lay_nothing();
            LAY(p.seq_starts, p.seq_starts_stride, rows, 4);
            p.gather_lens = lay_nothing();
        }
        EXPECT_SEEN(smla_cuda_check_gather(&p, &error));
    }
}

static void
test_compress(void)
{
    for (int i = 0; i < NUM_TABLES * NUM_STRIDES; i++) {
        const int64_t num_tokens = 7;
        const bool is_int64 = i % 3 != 0;
        smla_compress_params p = {
            .call = {.op = "compress", .stream = where},
            .states = {.rows = {.call = {.op = "compress"}, .num_tokens = num_tokens - 2}},
            .table = {.stride_req = tables[i % NUM_TABLES].stride_row,
                      .stride_block = tables[i % NUM_TABLES].stride_column,
                      .num_blocks = tables[i % NUM_TABLES].columns},
            .num_reqs = tables[i % NUM_TABLES].rows,
            .rope = {.positions_are_int64 = i % 2 == 0},
            .insert = {.call = {.op = "compress"}, .num_tokens = num_tokens},
        };
        p.states.rows.slots_are_int64 = is_int64;
        p.insert.slots_are_int64 = !is_int64;
        begin(some_strides[i / NUM_TABLES]);
        LAY(p.states.rows.slot_mapping, p.states.rows.slot_stride, num_tokens - 2,
            is_int64 ? 8 : 4);
        LAY(p.insert.slot_mapping, p.insert.slot_stride, num_tokens, is_int64 ? 4 : 8);
        LAY(p.rope.positions, p.rope.positions_stride, num_tokens, i % 2 == 0 ? 8 : 4);
        LAY(p.req_id_per_token, p.req_id_stride, num_tokens, 4);
        p.table.block_table =
            lay_table(p.num_reqs, p.table.num_blocks, p.table.stride_req, p.table.stride_block, 4);
        EXPECT_SEEN(smla_cuda_check_compress(&p, &error));
    }
}

/* Operators whose arrays are all vectors. */
static void
test_vectors(void)
{
    for (int i = 0; i < 2 * NUM_STRIDES; i++) {
        const int64_t stride = some_strides[i % NUM_STRIDES];
        const bool is_int64 = i >= NUM_STRIDES;
        const int64_t width = is_int64 ? 8 : 4;
        const int64_t count = 6;
        begin(stride);
        smla_cache_write_params write = {.call = {.op = "write", .stream = where},
                                         .num_tokens = count};
        write.slots_are_int64 = is_int64;
        LAY(write.slot_mapping, write.slot_stride, count, width);
        EXPECT_SEEN(smla_cuda_check_cache_write(&write, &error));

        begin(stride);
        smla_rope rope = {.positions_are_int64 = is_int64};
        LAY(rope.positions, rope.positions_stride, count, width);
        const smla_call call = {.op = "an operator", .stream = where};
        EXPECT_SEEN(smla_cuda_check_positions(&call, &rope, count, &error));

        begin(stride);
        smla_partial_states_params states = {.call = write.call, .positions_are_int64 = is_int64};
        states.rows = write;
        states.rows.slots_are_int64 = !is_int64;
        LAY(states.rows.slot_mapping, states.rows.slot_stride, count, is_int64 ? 4 : 8);
        LAY(states.positions, states.positions_stride, count, width);
        EXPECT_SEEN(smla_cuda_check_partial_states(&states, &error));

        begin(stride);
        smla_convert_params convert = {.call = {.stream = where},
                                       .num_tokens = count,
                                       .num_prefills = 4};
        LAY(convert.req_id_per_token, convert.req_id_stride, count, 4);
        if (is_int64) {
            convert.prefill_request_ids = lay_nothing();
            convert.prefill_workspace_starts = lay_nothing();
        } else {
            LAY(convert.prefill_request_ids, convert.prefill_request_ids_stride, count, 4);
            LAY(convert.prefill_workspace_starts, convert.prefill_workspace_starts_stride, 4, 4);
        }
        EXPECT_SEEN(smla_cuda_check_convert(&convert, &error));

        begin(stride);
        smla_logits_params logits = {.call = {.op = "logits", .stream = where},
                                     .num_tokens = count};
        LAY(logits.context_lens, logits.context_lens_stride, count, 4);
        LAY(logits.req_id_per_token, logits.req_id_stride, count, 4);
        EXPECT_SEEN(smla_cuda_check_logits(&logits, &error));
    }
}

/* Lists of a batch. Validity is given per decode in the mixed lists, per token in the other. */
static void
test_lists(void)
{
    for (int i = 0; i < 2 * NUM_STRIDES; i++) {
        const int64_t stride = some_strides[i % NUM_STRIDES];
        const bool has_validity = i < NUM_STRIDES;
        const int64_t count = 6;
        begin(stride);
        smla_topk_slots_params slots = {.call = {.op = "slots", .stream = where},
                                        .num_tokens = count};
        LAY(slots.req_id_per_token, slots.req_id_stride, count, 4);
        if (has_validity) {
            LAY(slots.is_valid, slots.is_valid_stride, count, 1);
        } else {
            slots.is_valid = lay_nothing();
        }
        EXPECT_SEEN(smla_cuda_check_global_topk(&slots, &error));

        begin(stride);
        smla_combine_topk_swa_params combine = {.call = {.stream = where}, .num_tokens = count};
        combine.batch.num_reqs = 4;
        LAY(combine.batch.query_start_loc, combine.batch.query_start_loc_stride, 5, 4);
        LAY(combine.batch.seq_lens, combine.batch.seq_lens_stride, 4, 4);
        LAY(combine.gather_lens, combine.gather_lens_stride, 4, 4);
        EXPECT_SEEN(smla_cuda_check_combine_topk_swa(&combine, &error));

        begin(stride);
        smla_mixed_indices_params mixed = {.call = {.stream = where}, .num_tokens = count};
        mixed.num_decode_tokens = 2;
        mixed.batch.num_reqs = 4;
        LAY(mixed.batch.query_start_loc, mixed.batch.query_start_loc_stride, 5, 4);
        LAY(mixed.req_id_per_token, mixed.req_id_stride, count, 4);
        if (has_validity) {
            LAY(mixed.is_valid, mixed.is_valid_stride, mixed.num_decode_tokens, 1);
        } else {
            mixed.is_valid = lay_nothing();
        }
        EXPECT_SEEN(smla_cuda_check_mixed_indices(&mixed, &error));
    }
}

/* Where a dimension is empty, nothing is copied, and the pointer stays. */
static void
test_empty(void)
{
    for (int num_reqs = 0; num_reqs <= 3; num_reqs += 3) {
        smla_gather_params p = {.call = {.op = "gather_kv_cache", .stream = where},
                                .num_reqs = num_reqs,
                                .num_blocks = num_reqs == 0 ? 2 : 0,
                                .block_table_stride_req = -2,
                                .block_table_stride_block = 1};
        begin(1);
        p.block_table = lay_empty();
        if (num_reqs == 0) {
            p.seq_lens = lay_empty();
        } else {
            LAY(p.seq_lens, p.seq_lens_stride, num_reqs, 4);
        }
        p.workspace_starts = lay_nothing();
        p.seq_starts = lay_nothing();
        p.gather_lens = lay_nothing();
        forget_calls();
        EXPECT_SEEN(smla_cuda_check_gather(&p, &error));
        EXPECT_EQ(count_calls("copy to host"), num_reqs == 0 ? 0 : 1);
    }
}

/* A copy that fails is the call's error: nothing is looked at, and nothing is left. */
static void
test_failures(void)
{
    static const char *const calls[] = {"copy to host", "cudaStreamSynchronize"};
    for (int i = 0; i < 4; i++) {
        smla_gather_params p = {.call = {.op = "gather_kv_cache", .stream = where},
                                .num_reqs = 3,
                                .num_blocks = 2,
                                .block_table_stride_req = 4,
                                .block_table_stride_block = 2};
        begin(1);
        p.block_table = lay_table(3, 2, 4, 2, 4);
        LAY(p.seq_lens, p.seq_lens_stride, 3, 4);
        fail_call(calls[i / 2], i % 2, cudaErrorIllegalAddress);
        EXPECT_FAIL(smla_cuda_check_gather(&p, &error), SMLA_ERROR_RUNTIME, "gather_kv_cache: ");
        EXPECT(!is_seen);
        EXPECT_EQ(num_live, 0);
        free_arrays("test_failures");
    }
}

int
main(void)
{
    reset_fake();
    RUN(test_gather);
    RUN(test_compress);
    RUN(test_vectors);
    RUN(test_lists);
    RUN(test_empty);
    RUN(test_failures);
    return report("test_cuda_checked");
}
