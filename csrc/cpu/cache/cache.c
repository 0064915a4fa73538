/* cache.c: writes tokens into the cache, gathers them back, and dequantises whole caches; writes
 * keys and values of heads into their pages.
 *
 * This file checks slots and pages, and divides the rows among threads. cache_kernel.c converts one
 * row.
 */
#include "cpu/cache/cache.h"

#include <string.h>

#include "core/fp_mode.h"
#include "cpu/cache/slot_shares.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"

enum {
    CACHE_LINE = 64,
    FETCHED_TOKENS = 8,  /* how far ahead rows are fetched */
    LISTED_TOKENS = 512, /* tokens that a share looks at together */
};

/* ---- Write --------------------------------------------------------------------------------- */

smla_status
smla_cpu_check_cache_write(const smla_cache_write_params *p, smla_error *error)
{
    const int64_t num_slots = smla_kv_num_slots(&p->kv);
    for (int64_t token = 0; token < p->num_tokens; token++) {
        const int64_t slot = read_slot(p, token);
        if (slot >= num_slots) {
            return smla_fail_value(
                error, p->call.op,
                "`%s` must be below the %lld slots of `%s`, got %lld at token %lld", p->slots_name,
                (long long)num_slots, p->cache_name, (long long)slot, (long long)token);
        }
    }
    return SMLA_OK;
}

/* Lists the tokens from `first` to `end` - 1 that a share writes. Returns how many there are. Slots
 * are random to the processor, so it would foresee half of the branches of a loop that wrote. */
static int
list_tokens(const smla_cache_write_params *p, int64_t first, int64_t end, int share,
            slot_shares shares, int64_t *tokens)
{
    int count = 0;
    for (int64_t token = first; token < end; token++) {
        tokens[count] = token;
        count += is_in_share(read_slot(p, token), share, shares);
    }
    return count;
}

/* Starts to fetch the cache lines of `size` bytes. GCC 12 would remove a call of such a function as
 * one without effects. */
static inline __attribute__((always_inline)) void
fetch_values(const void *values, int64_t size)
{
    for (int64_t at = 0; at < size; at += CACHE_LINE) {
        __builtin_prefetch((const uint8_t *)values + at);
    }
}

/* Finds a token's row, and starts to fetch its cache lines. Rows lie anywhere, so that the
 * processor does not foresee them. A share of slots leaves tokens out, so that it does not foresee
 * the values, either. In ranges of tokens it does, but to fetch them gave fp4_v41 10 to 20 % on a
 * Sapphire Rapids, where it took 3 to 8 % on a Zen 4. */
static inline __attribute__((always_inline)) smla_kv_token
fetch_token(const smla_cache_write_params *p, int64_t token, slot_shares shares)
{
    const smla_kv_format_info *const format = p->kv.format;
    const smla_kv_token to = smla_kv_slot(&p->kv, read_slot(p, token));
    for (int64_t at = 0; at < format->data_bytes; at += CACHE_LINE) {
        __builtin_prefetch(to.row + at, 1);
    }
    if (format->scale_bytes != 0) {
        __builtin_prefetch(to.scales, 1);
    }
    if (shares.count > 1) {
        const int64_t size = p->input_type == SMLA_FLOAT_FP32 ? 4 : 2;
        fetch_values((const uint8_t *)p->kv_c + token * p->kv_c_stride_token * size,
                     format->nope_dim * size);
        fetch_values((const uint8_t *)p->k_pe + token * p->k_pe_stride_token * size,
                     format->rope_dim * size);
    }
    return to;
}

/* Writes the tokens of one share in order. */
static void
write_share(const smla_cache_isa *cache, const smla_cache_write_params *p, int share,
            slot_shares shares)
{
    const float kv_scale = smla_read_scale(&p->kv_scale);
    int64_t tokens[LISTED_TOKENS];
    smla_kv_token rows[FETCHED_TOKENS];
    const token_range range = range_of_share(p, share, shares);
    for (int64_t first = range.first; first < range.end; first += LISTED_TOKENS) {
        const int64_t left = range.end - first;
        const int64_t end = first + (left < LISTED_TOKENS ? left : LISTED_TOKENS);
        const int count = list_tokens(p, first, end, share, shares, tokens);
        for (int i = 0; i < count && i < FETCHED_TOKENS; i++) {
            rows[i] = fetch_token(p, tokens[i], shares);
        }
        for (int i = 0; i < count; i++) {
            smla_kv_token *const row = &rows[i % FETCHED_TOKENS];
            const smla_kv_token to = *row;
            if (i + FETCHED_TOKENS < count) {
                *row = fetch_token(p, tokens[i + FETCHED_TOKENS], shares);
            }
            cache->write_row(p->kv.format, p->input_type, p->kv_c, tokens[i] * p->kv_c_stride_token,
                             p->k_pe, tokens[i] * p->k_pe_stride_token, kv_scale, to);
        }
    }
}

static inline bool
is_moderate(float scale)
{
    return scale > 0x1p-60f && scale < 0x1p100f;
}

/* Rows are written with subnormal values as zero where no byte depends on them: where scales are at
 * least 2^-60, or where row_encoder.h looks after small tiles. mxfp4_index has scales down to
 * 2^-126, and a cache any scale. */
static smla_fp_mode
choose_fp_mode(const smla_cache_write_params *p)
{
    const smla_kv_format_info *const format = p->kv.format;
    if (format->scale_type == SMLA_SCALE_CACHE) {
        return is_moderate(smla_read_scale(&p->kv_scale)) ? SMLA_FP_FLUSH : SMLA_FP_EXACT;
    }
    return format->number == SMLA_ROW_MXFP4_INDEX ? SMLA_FP_EXACT : SMLA_FP_FLUSH;
}

static smla_status
write_tokens(const smla_cache_write_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    SMLA_TRY(smla_cpu_check_cache_write(p, error));
    const slot_shares shares = smla_cpu_divide_tokens(p);
    const smla_fp_mode before = smla_fp_change(choose_fp_mode(p));
    if (shares.count == 1) { /* a parallel region of one thread costs as much as a token */
        write_share(isa->cache, p, 0, shares);
        smla_fp_change(before);
        return SMLA_OK;
    }
#pragma omp parallel for schedule(static)
    for (int share = 0; share < shares.count; share++) {
        write_share(isa->cache, p, share, shares);
    }
    smla_fp_change(before);
    return SMLA_OK;
}

smla_status
smla_cpu_concat_and_cache_mla(const smla_cache_write_params *p, smla_error *error)
{
    return write_tokens(p, error);
}

smla_status
smla_cpu_quantize_and_insert_k_cache(const smla_cache_write_params *p, smla_error *error)
{
    return write_tokens(p, error);
}

smla_status
smla_cpu_indexer_k_quant_and_cache(const smla_cache_write_params *p, smla_error *error)
{
    return write_tokens(p, error);
}

/* ---- Write keys and values of heads -------------------------------------------------------- */

/* Heads that follow each other in rows and in the cache, with one scale, count as one. */
static int64_t
join_heads(smla_head_write *part, int64_t num_heads)
{
    if (part->stride_head != part->dim || part->cache_stride_head != part->dim ||
        part->scale_stride_head != 0) {
        return num_heads;
    }
    part->dim *= num_heads;
    return 1;
}

/* Writes the keys, or the values, of one share's tokens in order. */
static void
write_part(const smla_cache_isa *cache, const smla_reshape_params *p, smla_head_write part,
           int share, slot_shares shares)
{
    const int64_t num_heads = join_heads(&part, p->num_heads);
    const int64_t size = smla_float_bytes(p->input_type);
    const int64_t cache_size = p->quantizes ? 1 : size;
    const int64_t page_size = p->slots.kv.block_size;
    const token_range range = range_of_share(&p->slots, share, shares);
    for (int64_t token = range.first; token < range.end; token++) {
        const int64_t slot = read_slot(&p->slots, token);
        if (!is_in_share(slot, share, shares)) {
            continue;
        }
        const int64_t to =
            slot / page_size * part.cache_stride_page + slot % page_size * part.cache_stride_token;
        for (int64_t head = 0; head < num_heads; head++) {
            const int64_t from = token * part.stride_token + head * part.stride_head;
            uint8_t *const row =
                (uint8_t *)part.cache + (to + head * part.cache_stride_head) * cache_size;
            if (p->quantizes) {
                cache->quantize(part.rows, p->input_type, from, part.dim,
                                smla_read_head_scale(&part, head), row);
            } else {
                memcpy(row, (const uint8_t *)part.rows + from * size, (size_t)(part.dim * size));
            }
        }
    }
}

static void
write_heads(const smla_cache_isa *cache, const smla_reshape_params *p, int share,
            slot_shares shares)
{
    for (int i = 0; i < SMLA_WRITTEN_PARTS; i++) {
        write_part(cache, p, p->parts[i], share, shares);
    }
}

/* The mode for the scales of all heads, as in choose_fp_mode. */
static smla_fp_mode
choose_mode_of_heads(const smla_reshape_params *p)
{
    bool are_moderate = true;
    for (int i = 0; i < SMLA_WRITTEN_PARTS; i++) {
        for (int64_t head = 0; head < p->num_heads; head++) {
            are_moderate &= is_moderate(smla_read_head_scale(&p->parts[i], head));
        }
    }
    return are_moderate ? SMLA_FP_FLUSH : SMLA_FP_EXACT;
}

smla_status
smla_cpu_reshape_and_cache(const smla_reshape_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    SMLA_TRY(smla_cpu_check_cache_write(&p->slots, error));
    const slot_shares shares = smla_cpu_divide_tokens(&p->slots);
    const smla_fp_mode before = smla_fp_change(choose_mode_of_heads(p));
    if (shares.count == 1) { /* a parallel region of one thread costs as much as a token */
        write_heads(isa->cache, p, 0, shares);
        smla_fp_change(before);
        return SMLA_OK;
    }
#pragma omp parallel for schedule(static)
    for (int share = 0; share < shares.count; share++) {
        write_heads(isa->cache, p, share, shares);
    }
    smla_fp_change(before);
    return SMLA_OK;
}

/* ---- Transfer ------------------------------------------------------------------------------ */

/* The rows of a transfer that a share copies are those whose slots are both there, and go there. */
static inline bool
is_copied(const smla_transfer_params *p, int64_t i, int share, slot_shares shares)
{
    const int64_t src_slot = read_slot(&p->sides[SMLA_TRANSFER_SRC], i);
    const int64_t dst_slot = read_slot(&p->sides[SMLA_TRANSFER_DST], i);
    return (src_slot >= 0) & is_in_share(dst_slot, share, shares);
}

/* Starts to fetch the cache lines of row i on both sides, because rows lie anywhere. With that,
 * runs of 16 rows take 0.7 of the time, and single rows 0.6 (Xeon with AMX, one thread,
 * 2026-11-30). */
static inline __attribute__((always_inline)) void
fetch_row(const smla_transfer_params *p, int64_t i)
{
    const smla_cache_write_params *const src = &p->sides[SMLA_TRANSFER_SRC];
    const smla_cache_write_params *const dst = &p->sides[SMLA_TRANSFER_DST];
    const uint8_t *const from = smla_kv_slot(&src->kv, read_slot(src, i)).row;
    const uint8_t *const to = smla_kv_slot(&dst->kv, read_slot(dst, i)).row;
    for (int64_t at = 0; at < dst->kv.format->data_bytes; at += CACHE_LINE) {
        __builtin_prefetch(from + at);
        __builtin_prefetch(to + at, 1);
    }
}

/* Copies the rows of one share in order. A row may be copied to itself, so memcpy will not do. */
static void
transfer_share(const smla_transfer_params *p, int share, slot_shares shares)
{
    const smla_cache_write_params *const src = &p->sides[SMLA_TRANSFER_SRC];
    const smla_cache_write_params *const dst = &p->sides[SMLA_TRANSFER_DST];
    const smla_kv_format_info *const format = dst->kv.format;
    const bool is_split = format->layout == SMLA_PAGE_SPLIT;
    const size_t row_bytes = (size_t)(is_split ? format->data_bytes : format->row_bytes);
    const token_range range = range_of_share(dst, share, shares);
    for (int64_t i = range.first; i < range.end; i++) {
        const int64_t later = i + FETCHED_TOKENS;
        if (later < range.end && is_copied(p, later, share, shares)) {
            fetch_row(p, later);
        }
        if (!is_copied(p, i, share, shares)) {
            continue;
        }
        const smla_kv_token from = smla_kv_slot(&src->kv, read_slot(src, i));
        const smla_kv_token to = smla_kv_slot(&dst->kv, read_slot(dst, i));
        memmove(to.row, from.row, row_bytes);
        if (is_split) {
            memmove(to.scales, from.scales, (size_t)format->scale_bytes);
        }
    }
}

smla_status
smla_cpu_transfer_kv_cache(const smla_transfer_params *p, smla_error *error)
{
    for (int i = 0; i < SMLA_TRANSFER_SIDES; i++) {
        SMLA_TRY(smla_cpu_check_cache_write(&p->sides[i], error));
    }
    const slot_shares shares = smla_cpu_divide_tokens(&p->sides[SMLA_TRANSFER_DST]);
    if (shares.count == 1) { /* a parallel region of one thread costs as much as a row */
        transfer_share(p, 0, shares);
        return SMLA_OK;
    }
#pragma omp parallel for schedule(static)
    for (int share = 0; share < shares.count; share++) {
        transfer_share(p, share, shares);
    }
    return SMLA_OK;
}

/* ---- Gather -------------------------------------------------------------------------------- */

/* Positions seq_start ... seq_start + count - 1 of a request go to rows workspace_start ... */
typedef struct gather_request {
    int64_t count;
    int64_t seq_start;
    int64_t workspace_start;
} gather_request;

/* The names of arguments that mean the same in both operators, for errors. */
typedef struct gather_names {
    const char *count;
    const char *seq_start;
    const char *workspace_start;
} gather_names;

static gather_request
read_request(const smla_gather_params *p, int64_t req)
{
    gather_request r = {
        .count = p->seq_lens[req * p->seq_lens_stride],
        .seq_start = p->seq_starts == NULL ? 0 : p->seq_starts[req * p->seq_starts_stride],
        .workspace_start = p->workspace_starts == NULL
                               ? p->offset
                               : p->workspace_starts[req * p->workspace_starts_stride],
    };
    if (p->gather_lens != NULL) {
        const int64_t seq_len = r.count;
        r.count = p->gather_lens[req * p->gather_lens_stride];
        r.seq_start = seq_len - r.count;
    }
    return r;
}

static int32_t
read_page(const smla_gather_params *p, int64_t req, int64_t block)
{
    return p->block_table[req * p->block_table_stride_req + block * p->block_table_stride_block];
}

static smla_status
check_request(const smla_gather_params *p, int64_t req, smla_error *error)
{
    const char *const op = p->call.op;
    const gather_names names =
        p->gather_lens != NULL
            ? (gather_names){"gather_lens", "gather_lens", "offset"}
            : (gather_names){"seq_lens", "seq_starts",
                             p->workspace_starts == NULL ? "offset" : "workspace_starts"};
    const gather_request r = read_request(p, req);
    if (r.count < 0) {
        return smla_fail_value(error, op, "`%s` must be >= 0, got %lld at request %lld",
                               names.count, (long long)r.count, (long long)req);
    }
    if (r.count == 0) {
        return SMLA_OK;
    }
    if (r.seq_start < 0) {
        return p->gather_lens != NULL
                   ? smla_fail_value(
                         error, op,
                         "`gather_lens` must be at most `seq_lens`, got %lld more at request %lld",
                         (long long)-r.seq_start, (long long)req)
                   : smla_fail_value(error, op,
                                     "`seq_starts` must be >= 0, got %lld at request %lld",
                                     (long long)r.seq_start, (long long)req);
    }
    if (r.workspace_start < 0 || r.workspace_start + r.count > p->out_tokens) {
        return smla_fail_value(error, op,
                               "`%s` must keep every row inside the %lld rows of `out`, got rows "
                               "%lld to %lld for request %lld",
                               names.workspace_start, (long long)p->out_tokens,
                               (long long)r.workspace_start,
                               (long long)(r.workspace_start + r.count), (long long)req);
    }
    const int64_t first_block = r.seq_start / p->kv.block_size;
    const int64_t last = r.seq_start + r.count - 1 - first_block * p->kv.block_size;
    /* Short requests often lie in one block, which needs no division. */
    const int64_t end_block =
        first_block + (last < p->kv.block_size ? 0 : last / p->kv.block_size) + 1;
    if (end_block > p->num_blocks) {
        return smla_fail_value(
            error, op, "`block_table` must have at least %lld columns for request %lld, got %lld",
            (long long)end_block, (long long)req, (long long)p->num_blocks);
    }
    for (int64_t block = first_block; block < end_block; block++) {
        const int32_t page = read_page(p, req, block);
        if (page < 0 || page >= p->kv.num_pages) {
            return smla_fail_value(error, op,
                                   "`block_table` must name pages of the cache (0 to %lld), got "
                                   "%d for request %lld, block %lld",
                                   (long long)p->kv.num_pages - 1, page, (long long)req,
                                   (long long)block);
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

static void
gather_row(const smla_cache_isa *cache, const smla_gather_params *p, int64_t req, gather_request r,
           int64_t i)
{
    const int64_t position = r.seq_start + i;
    const int64_t page = read_page(p, req, position / p->kv.block_size);
    const smla_kv_token key = smla_kv_token_at(&p->kv, page, position % p->kv.block_size);
    cache->read_row(p->kv.format, key, smla_read_scale(&p->kv_scale), SMLA_FLOAT_BF16, p->out,
                    req * p->out_stride_req + (r.workspace_start + i) * p->out_stride_token);
}

static smla_status
gather_requests(const smla_gather_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    SMLA_TRY(smla_cpu_check_gather(p, error));
    /* Requests run in order, and threads divide the rows of one request. So if two requests have
     * the same rows of the workspace, the later request wins. */
    for (int64_t req = 0; req < p->num_reqs; req++) {
        const gather_request r = read_request(p, req);
        if (r.count < 64) { /* a parallel region of one thread costs as much as some rows */
            for (int64_t i = 0; i < r.count; i++) {
                gather_row(isa->cache, p, req, r, i);
            }
            continue;
        }
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < r.count; i++) {
            gather_row(isa->cache, p, req, r, i);
        }
    }
    return SMLA_OK;
}

smla_status
smla_cpu_gather_kv_cache(const smla_gather_params *p, smla_error *error)
{
    return gather_requests(p, error);
}

smla_status
smla_cpu_dequantize_and_gather_k_cache(const smla_gather_params *p, smla_error *error)
{
    return gather_requests(p, error);
}

/* ---- Dequantise ---------------------------------------------------------------------------- */

smla_status
smla_cpu_dequantize_kv_cache(const smla_dequantize_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("dequantize_kv_cache", &isa, error));
    const int64_t num_slots = smla_kv_num_slots(&p->kv);
    const float kv_scale = smla_read_scale(&p->kv_scale);
#pragma omp parallel for schedule(static) if (num_slots >= 64)
    for (int64_t slot = 0; slot < num_slots; slot++) {
        const int64_t page = slot / p->kv.block_size;
        const int64_t offset = slot % p->kv.block_size;
        isa->cache->read_row(p->kv.format, smla_kv_token_at(&p->kv, page, offset), kv_scale,
                             p->out_type, p->out,
                             page * p->out_stride_page + offset * p->out_stride_token);
    }
    return SMLA_OK;
}
