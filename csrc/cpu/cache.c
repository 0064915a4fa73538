/* cache.c: writes tokens into the cache, gathers them back, and dequantises whole caches.
 *
 * Readable and exact: these bytes are the truth that every other backend must reproduce.
 */
#include <float.h>

#include "cpu.h"
#include "numeric.h"

/* ---- One row ----------------------------------------------------------------------------------- */

/* NoPE part of a row [512], values already rounded to bf16 -> cache bytes. */
static void
encode_nope(const smla_kv_format_info *format, const uint16_t *nope, uint8_t *row)
{
    if (format->nope_type == SMLA_NOPE_BF16) {
        memcpy(row, nope, SMLA_KV_LORA_RANK * sizeof *nope);
        return;
    }
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
        const uint16_t *values = nope + tile * SMLA_SCALE_TILE;
        uint8_t *bytes = row + tile * SMLA_SCALE_TILE;
        float amax = 0.0f;
        for (int i = 0; i < SMLA_SCALE_TILE; i++) {
            const float magnitude = smla_finite_abs(smla_bf16_to_float(values[i]));
            amax = magnitude > amax ? magnitude : amax;
        }
        float scale = amax / SMLA_E4M3_MAX;
        scale = scale < FLT_MIN ? FLT_MIN : scale;
        memcpy(row + format->scale_offset + tile * (int)sizeof scale, &scale, sizeof scale);
        for (int i = 0; i < SMLA_SCALE_TILE; i++) {
            bytes[i] = smla_float_to_e4m3(smla_bf16_to_float(values[i]) / scale);
        }
    }
}

/* NoPE part of a cache row -> fp32 [512], exactly the product of byte and scale in fp32. */
static void
decode_nope(const smla_kv_format_info *format, const uint8_t *row, float *nope)
{
    if (format->nope_type == SMLA_NOPE_BF16) {
        for (int i = 0; i < SMLA_KV_LORA_RANK; i++) {
            uint16_t value;
            memcpy(&value, row + i * (int)sizeof value, sizeof value);
            nope[i] = smla_bf16_to_float(value);
        }
        return;
    }
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
        float scale;
        memcpy(&scale, row + format->scale_offset + tile * (int)sizeof scale, sizeof scale);
        for (int i = tile * SMLA_SCALE_TILE; i < (tile + 1) * SMLA_SCALE_TILE; i++) {
            nope[i] = smla_e4m3_to_float(row[i]) * scale;
        }
    }
}

/* A cache row -> bf16 [576], one rounding; the bytes of bf16 parts are copied. */
static void
upconvert_row(const smla_kv_format_info *format, const uint8_t *row, uint16_t *out)
{
    if (format->nope_type == SMLA_NOPE_BF16) {
        memcpy(out, row, SMLA_HEAD_DIM * sizeof *out);
        return;
    }
    float nope[SMLA_KV_LORA_RANK];
    decode_nope(format, row, nope);
    for (int i = 0; i < SMLA_KV_LORA_RANK; i++) {
        out[i] = smla_float_to_bf16(nope[i]);
    }
    memcpy(out + SMLA_KV_LORA_RANK, row + format->rope_offset, SMLA_QK_ROPE_HEAD_DIM * sizeof *out);
}

/* ---- Write ------------------------------------------------------------------------------------- */

float
smla_cpu_load_float(const void *array, smla_float_type type, int64_t index)
{
    switch (type) {
    case SMLA_FLOAT_BF16: return smla_bf16_to_float(((const uint16_t *)array)[index]);
    case SMLA_FLOAT_FP16: return smla_half_to_float(((const uint16_t *)array)[index]);
    case SMLA_FLOAT_FP32: return ((const float *)array)[index];
    case SMLA_FLOAT_E4M3: return smla_e4m3_to_float(((const uint8_t *)array)[index]);
    }
    return 0.0f;
}

/* `count` values from element `start` on, rounded to bf16; bf16 input keeps its bits, NaN included. */
static void
load_bf16(const void *array, smla_float_type type, int64_t start, int count, uint16_t *out)
{
    if (type == SMLA_FLOAT_BF16) {
        memcpy(out, (const uint16_t *)array + start, (size_t)count * sizeof *out);
        return;
    }
    for (int i = 0; i < count; i++) {
        out[i] = smla_float_to_bf16(smla_cpu_load_float(array, type, start + i));
    }
}

static int64_t
read_slot(const smla_cache_write_params *p, int64_t token)
{
    const int64_t at = token * p->slot_stride;
    return p->slots_are_int64 ? ((const int64_t *)p->slot_mapping)[at]
                              : ((const int32_t *)p->slot_mapping)[at];
}

static void
write_token(const smla_cache_write_params *p, int64_t token, int64_t slot)
{
    uint16_t nope[SMLA_KV_LORA_RANK];
    uint16_t rope[SMLA_QK_ROPE_HEAD_DIM];
    uint8_t *row = smla_kv_row(&p->kv, slot);
    load_bf16(p->kv_c, p->input_type, token * p->kv_c_stride_token, SMLA_KV_LORA_RANK, nope);
    load_bf16(p->k_pe, p->input_type, token * p->k_pe_stride_token, SMLA_QK_ROPE_HEAD_DIM, rope);
    encode_nope(p->kv.format, nope, row);
    memcpy(row + p->kv.format->rope_offset, rope, sizeof rope);
}

smla_status
smla_cpu_concat_and_cache_mla(const smla_cache_write_params *p, smla_error *error)
{
    const int64_t num_slots = smla_kv_num_slots(&p->kv);
    for (int64_t token = 0; token < p->num_tokens; token++) {
        const int64_t slot = read_slot(p, token);
        if (slot >= num_slots) {
            return smla_fail(error, SMLA_ERROR_VALUE,
                             "concat_and_cache_mla: `slot_mapping` must be below the %lld slots of "
                             "`kv_cache`, got %lld at token %lld",
                             (long long)num_slots, (long long)slot, (long long)token);
        }
    }
    /* A slot belongs to one worker, which takes its tokens in order: where a slot is named twice the
     * last token wins, for any number of threads. */
    enum { NUM_SHARES = 64 };
#pragma omp parallel for schedule(static) if (p->num_tokens >= NUM_SHARES)
    for (int share = 0; share < NUM_SHARES; share++) {
        for (int64_t token = 0; token < p->num_tokens; token++) {
            const int64_t slot = read_slot(p, token);
            if (slot >= 0 && slot % NUM_SHARES == share) {
                write_token(p, token, slot);
            }
        }
    }
    return SMLA_OK;
}

/* ---- Gather ------------------------------------------------------------------------------------ */

typedef struct gather_request {
    int64_t seq_len;
    int64_t seq_start;
    int64_t workspace_start;
} gather_request;

static gather_request
read_request(const smla_gather_params *p, int64_t req)
{
    return (gather_request){
        .seq_len = p->seq_lens[req * p->seq_lens_stride],
        .seq_start = p->seq_starts == NULL ? 0 : p->seq_starts[req * p->seq_starts_stride],
        .workspace_start = p->workspace_starts[req * p->workspace_starts_stride],
    };
}

static int32_t
read_page(const smla_gather_params *p, int64_t req, int64_t block)
{
    return p->block_table[req * p->block_table_stride_req + block * p->block_table_stride_block];
}

static smla_status
check_request(const smla_gather_params *p, int64_t req, smla_error *error)
{
    static const char op[] = "gather_kv_cache";
    const gather_request r = read_request(p, req);
    if (r.seq_len < 0) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `seq_lens` must be >= 0, got %lld at request %lld", op,
                         (long long)r.seq_len, (long long)req);
    }
    if (r.seq_len == 0) {
        return SMLA_OK;
    }
    if (r.seq_start < 0) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `seq_starts` must be >= 0, got %lld at request %lld", op,
                         (long long)r.seq_start, (long long)req);
    }
    if (r.workspace_start < 0 || r.workspace_start + r.seq_len > p->out_tokens) {
        return smla_fail(
            error, SMLA_ERROR_VALUE,
            "%s: `workspace_starts` must keep every row inside the %lld rows of `out`, got "
            "rows %lld to %lld for request %lld",
            op, (long long)p->out_tokens, (long long)r.workspace_start,
            (long long)(r.workspace_start + r.seq_len), (long long)req);
    }
    const int64_t first_block = r.seq_start / p->kv.block_size;
    const int64_t end_block = (r.seq_start + r.seq_len - 1) / p->kv.block_size + 1;
    if (end_block > p->num_blocks) {
        return smla_fail(
            error, SMLA_ERROR_VALUE,
            "%s: `block_table` must have at least %lld columns for request %lld, got %lld", op,
            (long long)end_block, (long long)req, (long long)p->num_blocks);
    }
    for (int64_t block = first_block; block < end_block; block++) {
        const int32_t page = read_page(p, req, block);
        if (page < 0 || page >= p->kv.num_pages) {
            return smla_fail(
                error, SMLA_ERROR_VALUE,
                "%s: `block_table` must name pages of the cache (0 to %lld), got %d for "
                "request %lld, block %lld",
                op, (long long)p->kv.num_pages - 1, page, (long long)req, (long long)block);
        }
    }
    return SMLA_OK;
}

smla_status
smla_cpu_check_gather(const smla_gather_params *p, smla_error *error)
{
    for (int64_t req = 0; req < p->num_reqs; req++) {
        SMLA_TRY(check_request(p, req, error));
    }
    return SMLA_OK;
}

smla_status
smla_cpu_gather_kv_cache(const smla_gather_params *p, smla_error *error)
{
    SMLA_TRY(smla_cpu_check_gather(p, error));
    /* Requests in order, rows of one request shared out: where two requests are given the same rows of
     * the workspace, the later request wins. */
    for (int64_t req = 0; req < p->num_reqs; req++) {
        const gather_request r = read_request(p, req);
#pragma omp parallel for schedule(static) if (r.seq_len >= 64)
        for (int64_t i = 0; i < r.seq_len; i++) {
            const int64_t position = r.seq_start + i;
            const int64_t page = read_page(p, req, position / p->kv.block_size);
            const uint8_t *row =
                smla_kv_row(&p->kv, page * p->kv.block_size + position % p->kv.block_size);
            upconvert_row(p->kv.format, row,
                          p->out + (r.workspace_start + i) * p->out_stride_token);
        }
    }
    return SMLA_OK;
}

/* ---- Dequantise -------------------------------------------------------------------------------- */

static void
dequantize_row(const smla_dequantize_params *p, int64_t slot)
{
    const uint8_t *row = smla_kv_row(&p->kv, slot);
    const int64_t at = slot / p->kv.block_size * p->out_stride_page +
                       slot % p->kv.block_size * p->out_stride_token;
    if (p->out_type == SMLA_FLOAT_BF16) {
        upconvert_row(p->kv.format, row, (uint16_t *)p->out + at);
        return;
    }
    float *out = (float *)p->out + at;
    uint16_t rope[SMLA_QK_ROPE_HEAD_DIM];
    decode_nope(p->kv.format, row, out);
    memcpy(rope, row + p->kv.format->rope_offset, sizeof rope);
    for (int i = 0; i < SMLA_QK_ROPE_HEAD_DIM; i++) {
        out[SMLA_KV_LORA_RANK + i] = smla_bf16_to_float(rope[i]);
    }
}

smla_status
smla_cpu_dequantize_kv_cache(const smla_dequantize_params *p, smla_error *error)
{
    (void)error;
    const int64_t num_slots = smla_kv_num_slots(&p->kv);
#pragma omp parallel for schedule(static) if (num_slots >= 64)
    for (int64_t slot = 0; slot < num_slots; slot++) {
        dequantize_row(p, slot);
    }
    return SMLA_OK;
}
