/* checked.c: checked mode, a debugging aid that SPARSE_MLA_CHECK=1 turns on. A call waits for its
 * stream and copies the arrays that hold slots, pages, lengths, request ids and positions to the
 * host. The CPU backend checks these copies, so that errors have the CPU's text. After its work the
 * call waits again, so that a faulty kernel is reported by the call that started it.
 *
 * Attention has no values to check, because an index that names no key is masked everywhere.
 */
#include <stdlib.h>
#include <string.h>

#include "core/params_cache.h"
#include "core/params_compressor.h"
#include "core/params_indexer.h"
#include "cpu/cpu.h"
#include "cuda/host/cuda.h"

smla_status
smla_cuda_begin_checked(const char *op, smla_stream stream, smla_error *error)
{
    bool is_capturing = false;
    SMLA_TRY(smla_cuda_is_capturing(op, stream, &is_capturing, error));
    if (is_capturing) {
        return smla_fail(
            error, SMLA_ERROR_RUNTIME,
            "%s: SPARSE_MLA_CHECK must be unset while a CUDA graph is captured, got it "
            "set: nothing runs during a capture, so there are no values to look at",
            op);
    }
    return smla_cuda_status(op, "cudaStreamSynchronize, before the call,",
                            cudaStreamSynchronize((cudaStream_t)stream.handle), error);
}

smla_status
smla_cuda_end_checked(const char *op, smla_stream stream, smla_error *error)
{
    return smla_cuda_status(op, "a kernel of this call",
                            cudaStreamSynchronize((cudaStream_t)stream.handle), error);
}

/* ---- Device arrays on the host ------------------------------------------------------------- */

/* An array of up to two dimensions, strides in elements. A stride may be zero or negative. */
typedef struct device_array {
    void *pointer; /* address of the array's pointer, which read_array points to the copy */
    int64_t element_bytes;
    int64_t counts[2];
    int64_t strides[2];
    void *memory; /* the copy on the host, which free_arrays frees */
} device_array;

/* An array of `count` elements. */
static device_array
vector_of(void *pointer, int64_t element_bytes, int64_t count, int64_t stride)
{
    return (device_array){.pointer = pointer,
                          .element_bytes = element_bytes,
                          .counts = {count, 1},
                          .strides = {stride, 0}};
}

static device_array
int32_vector(const int32_t **pointer, int64_t count, int64_t stride)
{
    return vector_of((void *)pointer, sizeof **pointer, count, stride);
}

static device_array
byte_vector(const uint8_t **pointer, int64_t count, int64_t stride)
{
    return vector_of((void *)pointer, 1, count, stride);
}

static device_array
int32_table(const int32_t **pointer, int64_t rows, int64_t columns, int64_t stride_row,
            int64_t stride_column)
{
    return (device_array){.pointer = (void *)pointer,
                          .element_bytes = sizeof **pointer,
                          .counts = {rows, columns},
                          .strides = {stride_row, stride_column}};
}

/* The slots of a write. */
static device_array
slot_vector(smla_cache_write_params *p)
{
    return vector_of((void *)&p->slot_mapping, p->slots_are_int64 ? 8 : 4, p->num_tokens,
                     p->slot_stride);
}

static device_array
position_vector(const void **pointer, bool are_int64, int64_t count, int64_t stride)
{
    return vector_of((void *)pointer, are_int64 ? 8 : 4, count, stride);
}

/* Copies an array to the host, from its lowest element to its highest, so that strides stay
 * valid. */
static smla_status
read_array(const char *op, smla_stream stream, device_array *a, smla_error *error)
{
    const uint8_t *data = NULL;
    memcpy((void *)&data, a->pointer, sizeof data);
    if (data == NULL || a->counts[0] == 0 || a->counts[1] == 0) {
        return SMLA_OK;
    }
    int64_t low = 0;
    int64_t high = 0;
    for (int i = 0; i < 2; i++) {
        const int64_t reach = (a->counts[i] - 1) * a->strides[i];
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    const size_t bytes = (size_t)((high - low + 1) * a->element_bytes);
    const uint8_t *first = data + low * a->element_bytes;
    a->memory = malloc(bytes);
    if (a->memory == NULL) {
        return smla_fail(
            error, SMLA_ERROR_MEMORY,
            "%s: SPARSE_MLA_CHECK must find %zu bytes for a copy of an array, got none", op, bytes);
    }
    data = (const uint8_t *)a->memory - low * a->element_bytes;
    memcpy(a->pointer, (const void *)&data, sizeof data);
    SMLA_TRY(smla_cuda_status(op, "cudaMemcpyAsync",
                              cudaMemcpyAsync(a->memory, first, bytes, cudaMemcpyDeviceToHost,
                                              (cudaStream_t)stream.handle),
                              error));
    return smla_cuda_status(op, "cudaStreamSynchronize",
                            cudaStreamSynchronize((cudaStream_t)stream.handle), error);
}

static smla_status
read_arrays(const char *op, smla_stream stream, device_array *arrays, int count, smla_error *error)
{
    for (int i = 0; i < count; i++) {
        SMLA_TRY(read_array(op, stream, &arrays[i], error));
    }
    return SMLA_OK;
}

static void
free_arrays(const device_array *arrays, int count)
{
    for (int i = 0; i < count; i++) {
        free(arrays[i].memory);
    }
}

/* ---- Operators ----------------------------------------------------------------------------- */

/* Defines smla_cuda_check_<name>, the CPU's check on copies of the arrays whose pointers in `host`
 * the list has. */
#define CHECK(name, params_type, ...)                                                       \
    smla_status smla_cuda_check_##name(const params_type *p, smla_error *error)             \
    {                                                                                       \
        params_type host = *p;                                                              \
        device_array arrays[] = {__VA_ARGS__};                                              \
        const int count = (int)(sizeof arrays / sizeof arrays[0]);                          \
        smla_status status = read_arrays(p->call.op, p->call.stream, arrays, count, error); \
        if (status == SMLA_OK) {                                                            \
            status = smla_cpu_check_##name(&host, error);                                   \
        }                                                                                   \
        free_arrays(arrays, count);                                                         \
        return status;                                                                      \
    }

CHECK(cache_write, smla_cache_write_params, slot_vector(&host))

CHECK(gather, smla_gather_params,
      int32_table(&host.block_table, p->num_reqs, p->num_blocks, p->block_table_stride_req,
                  p->block_table_stride_block),
      int32_vector(&host.seq_lens, p->num_reqs, p->seq_lens_stride),
      int32_vector(&host.workspace_starts, p->num_reqs, p->workspace_starts_stride),
      int32_vector(&host.seq_starts, p->num_reqs, p->seq_starts_stride),
      int32_vector(&host.gather_lens, p->num_reqs, p->gather_lens_stride))

CHECK(convert, smla_convert_params,
      int32_vector(&host.req_id_per_token, p->num_tokens, p->req_id_stride),
      int32_vector(&host.prefill_request_ids, p->num_tokens, p->prefill_request_ids_stride),
      int32_vector(&host.prefill_workspace_starts, p->num_prefills,
                   p->prefill_workspace_starts_stride))

CHECK(logits, smla_logits_params,
      int32_vector(&host.context_lens, p->num_tokens, p->context_lens_stride),
      int32_vector(&host.req_id_per_token, p->num_tokens, p->req_id_stride))

CHECK(partial_states, smla_partial_states_params, slot_vector(&host.rows),
      position_vector(&host.positions, p->positions_are_int64, p->rows.num_tokens,
                      p->positions_stride))

CHECK(compress, smla_compress_params, slot_vector(&host.states.rows), slot_vector(&host.insert),
      position_vector(&host.rope.positions, p->rope.positions_are_int64, p->insert.num_tokens,
                      p->rope.positions_stride),
      int32_vector(&host.req_id_per_token, p->insert.num_tokens, p->req_id_stride),
      int32_table(&host.table.block_table, p->num_reqs, p->table.num_blocks, p->table.stride_req,
                  p->table.stride_block))

CHECK(global_topk, smla_topk_slots_params,
      int32_vector(&host.req_id_per_token, p->num_tokens, p->req_id_stride),
      byte_vector(&host.is_valid, p->num_tokens, p->is_valid_stride))

CHECK(combine_topk_swa, smla_combine_topk_swa_params,
      int32_vector(&host.batch.query_start_loc, p->batch.num_reqs + 1,
                   p->batch.query_start_loc_stride),
      int32_vector(&host.batch.seq_lens, p->batch.num_reqs, p->batch.seq_lens_stride),
      int32_vector(&host.gather_lens, p->batch.num_reqs, p->gather_lens_stride))

CHECK(mixed_indices, smla_mixed_indices_params,
      int32_vector(&host.batch.query_start_loc, p->batch.num_reqs + 1,
                   p->batch.query_start_loc_stride),
      int32_vector(&host.req_id_per_token, p->num_tokens, p->req_id_stride),
      byte_vector(&host.is_valid, p->num_decode_tokens, p->is_valid_stride))

smla_status
smla_cuda_check_positions(const smla_call *call, const smla_rope *rope, int64_t num_tokens,
                          smla_error *error)
{
    smla_rope host = *rope;
    device_array positions = position_vector(&host.positions, rope->positions_are_int64, num_tokens,
                                             rope->positions_stride);
    smla_status status = read_array(call->op, call->stream, &positions, error);
    if (status == SMLA_OK) {
        status = smla_cpu_check_positions(call->op, &host, num_tokens, error);
    }
    free_arrays(&positions, 1);
    return status;
}
