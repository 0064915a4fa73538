/* paged_parts.cuh: the keys of a request in parts. A tile computes its rows over each part as if
 * there were no other keys, into fp32 rows in the caller's workspace, and merge.cu merges them.
 *
 * If the caller gives num_splits, a request has so many parts, whatever else the batch holds.
 * Otherwise a launch has as many as keep the device busy, and a request no more than its keys are
 * worth. The size of pages and the width of the table count for nothing, so no bit depends on them.
 */
#pragma once

#include "core/attention/merge_rows.h"
#include "cuda/attention/partials/part_rows.h"
#include "cuda/attention/sm80/mha/varlen_tiles.cuh"

enum { PART_KEYS = 512 }; /* a part has so many keys at least, if the launch chooses */

/* ---- On the device -------------------------------------------------------------------------- */

/* Takes the part from an item's number, which tiles of all parts have in turn. */
__device__ __forceinline__ int32_t
take_part(const paged_args &args, int64_t *item)
{
    const int64_t part = smla_divide(*item, args.part_items);
    *item -= part * args.part_items.divisor;
    return (int32_t)part;
}

/* The keys of a part; none where the request has fewer parts. */
__device__ __forceinline__ varlen_limits
find_part_keys(const paged_args &args, const smla_kv_request &request, int32_t part)
{
    const int64_t keys = smla_count_own(&args.p.visible.rule.share, request.num_keys);
    const int64_t worth = smla_clamp_int64(keys / PART_KEYS, 1, args.num_parts);
    const int num_parts = args.p.results.num_splits == 0 ? (int)worth : args.num_parts;
    const int64_t share = smla_split_columns(keys, num_parts);
    const int64_t begin = min(part * share, keys);
    return varlen_limits{(uint32_t)begin, (uint32_t)min(begin + share, keys)};
}

/* ---- Launches ------------------------------------------------------------------------------- */

/* Where the parts' rows lie: [parts][T][H][Dv], and behind them each row's lse. */
static inline float *
part_rows_of(const smla_attention_params &p)
{
    uint8_t *const memory = (uint8_t *)p.workspace.memory;
    return (float *)(memory + smla_partial_padding(memory));
}

/* The parts of a launch that has `num_items` tiles. */
static inline int32_t
count_parts(const smla_attention_params &p, int64_t num_items, int64_t resident_ctas)
{
    if (p.results.num_splits != 0) {
        return p.results.num_splits;
    }
    const int64_t parts = smla_clamp_int64(resident_ctas / num_items, 1, SMLA_MAX_SPLITS);
    return smla_part_rows_bytes(&p, parts) <= p.workspace.bytes ? (int32_t)parts : 1;
}

/* Makes the launch one of so many parts. */
static inline void
cut_keys(const smla_attention_params &p, int32_t num_parts, paged_args *args)
{
    smla_results *const rows = &args->p.results;
    const int64_t num_heads = p.queries.num_heads;
    const int64_t value_dim = p.kv.value_dim;
    args->part_items = smla_make_divisor(args->num_items);
    args->num_parts = num_parts;
    if (num_parts == 1) {
        return;
    }
    args->num_items *= num_parts;
    args->part_tokens = p.queries.num_tokens;
    args->out_is_paired = true;
    args->p.logits.sinks.values = NULL; /* the merge has them */
    rows->out_type = SMLA_FLOAT_FP32;
    rows->out = part_rows_of(p);
    rows->out_stride_token = num_heads * value_dim;
    rows->out_stride_head = value_dim;
    rows->lse = part_rows_of(p) + num_parts * p.queries.num_tokens * num_heads * value_dim;
    rows->lse_stride_token = num_heads;
    rows->lse_stride_head = 1;
}

/* Merges the rows that a launch of `args` leaves. Tokens of no request stay as they are. */
static inline cudaError_t
merge_parts(const smla_attention_params &p, const paged_args &args)
{
    const smla_requests &reqs = p.visible.reqs;
    const smla_results &parts = args.p.results;
    const bool has_starts = reqs.query_starts != NULL;
    const int64_t most_tokens = has_starts ? reqs.num_tokens : reqs.num_reqs * reqs.query_len;
    smla_merge_partials_params merge = {};
    merge.call = p.call;
    merge.num_parts = args.num_parts;
    merge.rows = smla_merge_rows_of(&p);
    merge.rows.num_tokens = most_tokens < reqs.num_tokens ? most_tokens : reqs.num_tokens;
    for (int32_t i = 0; i < args.num_parts; i++) {
        const int64_t first = i * args.part_tokens;
        merge.parts[i].out = (float *)parts.out + first * parts.out_stride_token;
        merge.parts[i].out_stride_token = parts.out_stride_token;
        merge.parts[i].out_stride_head = parts.out_stride_head;
        merge.parts[i].lse = parts.lse + first * parts.lse_stride_token;
        merge.parts[i].lse_stride_token = parts.lse_stride_token;
        merge.parts[i].lse_stride_head = parts.lse_stride_head;
    }
    return smla_cuda_launch_merge_parts(
        &merge, has_starts ? reqs.query_starts + reqs.num_reqs * reqs.query_starts_stride : NULL);
}
