/* logits.cu: the indexer's logits by fp16 or bf16 tensor cores, for every GPU and every format.
 * logits_sm90.cu serves FP8 queries of 32 and 64 heads on FP8 keys on Hopper.
 *
 * Computes     out[t,n] = sum_h weights[t,h] * relu(q[t,h] . key n) for n below the token's
 *              context, -inf from there on and for keys that do not exist
 * Shapes       q [T, H, 128] e4m3, or [T, H, 64] e2m1 with UE8M0 scales; weights [T, H] fp32; keys
 *              in pages or flat, e4m3 with an fp32 scale or e2m1 with UE8M0 scales; out [T, N] fp32
 *              or bf16. Rows may be at any byte
 * Shared mem   per token and group of eight heads: the group as fragments of 16 bits, 2 KiB, and
 *              its weights; up to 66 KiB. Heads that do not fit come in parts, one after the other
 * Roles        Warp w of four has 32 of 128 keys, as A of m16n8k16, straight from global memory to
 *              registers. Lanes take values of a key in another order than the key's: lane c of
 *              four has values 16 c to 16 c + 15 of each half, so that a vector is the lane's part
 *              of an operand for 64 values. While a tile is multiplied, the keys of the next tile
 *              are loaded, and the pages of the tile after that are looked up.
 * Roofline     A decode streams 132 bytes per key. A prefill runs 256 FLOP per key, head and token
 *              at the rate of mma.sync, about 60 % of the tensor cores'.
 * Numerics     e4m3 is exact in fp16 (or 2^-8 of it, see SMLA_E4M3_UNIT); where one operand is FP4,
 *              both are bf16, and e2m1 * 2^e is exact in it. A dot product is summed in fp32 by
 *              tensor cores, relu passes NaN on, and heads are summed in fp32, by lane first:
 *              errors are below 2^-18 of the sum of magnitudes. The key's fp32 scale multiplies the
 *              sum; its sign goes into the key. Powers of two go from large and small queries,
 *              weights and FP4 keys to logits (logit_powers.h). No order depends on T, N or other
 *              rows.
 * Source       DeepGEMM's fp8_mqa_logits, for the operator; the kernel is ours.
 */
#include "cuda/indexer/logits_rows.cuh"

namespace {

enum {
    BLOCK_THREADS = 128,
    BLOCK_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    WARP_KEYS = 32,
    TILE_KEYS = BLOCK_WARPS * WARP_KEYS,
    GROUP_HEADS = 8,
    MOST_GROUPS = 32, /* groups of heads in shared memory at a time */
    MOST_TOKENS = 8,
    LEAST_CHUNK = 2 * TILE_KEYS,
    MOST_CHUNK = 64 * TILE_KEYS,
    WORK_ITEMS_PER_SM = 12,
};

/* Eight heads as B of m16n8k16; 16 bytes of a lane are two k-steps. */
struct head_group {
    uint4 words[K_STEPS / 2][SMLA_WARP_LANES];
};

/* What a block has in shared memory. */
struct block_memory {
    int32_t powers[MOST_TOKENS]; /* smla_weight_power of each token */
    head_group groups[1];        /* the first one; then weights */
};

constexpr int
shared_bytes_of(int groups)
{
    return (int)offsetof(block_memory, groups) +
           groups * (int)(sizeof(head_group) + GROUP_HEADS * sizeof(float));
}

/* The weights of heads, group by group. */
__device__ __forceinline__ float *
weights_of(const logits_args &args, block_memory *memory)
{
    return (float *)(memory->groups + args.block_tokens * args.chunk_groups);
}

/* ---- Powers of two ------------------------------------------------------------------------- */

/* x * 2^power, rounded once. */
__device__ __forceinline__ float
multiply_by_power(double x, int power)
{
    return (float)(x * __hiloint2double((1023 + power) << 20, 0));
}

/* smla_key_power for four scales in a word. */
__device__ __forceinline__ int
key_power_of(uint32_t scales)
{
    uint8_t bytes[4];
    memcpy(bytes, &scales, sizeof bytes);
    return smla_key_power(smla_largest_exponent(bytes, 4));
}

/* The scales of a head's FP4 query. */
__device__ __forceinline__ const uint8_t *
query_scales_of(const smla_logits_params &p, int64_t token, int64_t head)
{
    return p.q_scale + token * p.q_scale_stride_token + head * p.q_scale_stride_head;
}

/* smla_query_power of a head. */
__device__ __forceinline__ int
query_power_of(const smla_logits_params &p, int64_t token, int64_t head)
{
    if (p.q_scale == NULL) {
        return 0;
    }
    uint8_t bytes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bytes[i] = __ldg(query_scales_of(p, token, head) + i);
    }
    return smla_query_power(bytes, 4);
}

__device__ __forceinline__ uint32_t
shift_query(uint32_t scales)
{
    uint8_t bytes[4];
    memcpy(bytes, &scales, sizeof bytes);
    return shift_scales(scales, -smla_query_power(bytes, 4));
}

/* Whether a token's smla_weight_power may not be 0 because of one of its weights. */
__device__ __forceinline__ bool
may_be_extreme(float weight)
{
    const float size = fabsf(weight);
    return size >= 0x1p60f || (size < 0x1p-64f && size != 0.0f);
}

/* powers[n] = smla_weight_power of token first_token + n. A warp takes a token. */
__device__ __forceinline__ void
find_weight_powers(const smla_logits_params &p, int64_t first_token, int num_tokens,
                   int32_t *powers)
{
    for (int i = (int)threadIdx.x / SMLA_WARP_LANES; i < num_tokens; i += BLOCK_WARPS) {
        const int64_t token = first_token + i;
        int largest = INT_MIN;
        for (int64_t head = lane_idx(); head < p.num_heads; head += SMLA_WARP_LANES) {
            const float weight = __ldg(p.weights + token * p.weights_stride_token + head);
            largest = max(largest, smla_weight_exponent(weight, query_power_of(p, token, head)));
        }
        powers[i] = smla_weight_power(__reduce_max_sync(ALL_LANES, largest));
    }
}

/* Multiplies the weights of part `part` of the heads, which are in shared memory. */
__device__ __forceinline__ void
multiply_weights(const logits_args &args, int64_t first_token, int num_tokens, int part,
                 block_memory *memory)
{
    float *const weights = weights_of(args, memory);
    const int count = args.chunk_groups * GROUP_HEADS;
    for (int i = (int)threadIdx.x; i < num_tokens * count; i += BLOCK_THREADS) {
        const int64_t head = (int64_t)part * count + i % count;
        if (head < args.p.num_heads) {
            const int power = query_power_of(args.p, first_token + i / count, head);
            weights[i] = multiply_by_power((double)weights[i], power - memory->powers[i / count]);
        }
    }
}

/* ---- Queries ------------------------------------------------------------------------------- */

template <bool IS_HALF, bool IS_FP4>
__device__ __forceinline__ void
widen_head(const logits_args &args, int64_t token, int64_t head, row_fragment *fragment,
           bool *has_power)
{
    const smla_logits_params &p = args.p;
    const uint8_t *const row = p.q + token * p.q_stride_token + head * p.q_stride_head;
    const uint8_t *const scales = query_scales_of(p, token, head);
    raw_row<IS_FP4> raw;
    if (args.q_is_aligned) {
        load_row<IS_FP4, 16>(row, scales, &raw);
    } else {
        load_row<IS_FP4, 1>(row, scales, &raw);
    }
    if (IS_FP4 && may_have_power(raw.scales) != 0) {
        *has_power = true;
        raw.scales = shift_query(raw.scales);
    }
    widen_row<IS_HALF>(raw, 0, fragment);
}

/* Brings part `part` of the heads of some tokens to shared memory. Heads that do not exist become
 * zeros. Returns whether the thread has seen a query or a weight that may have a power. */
template <bool IS_HALF>
__device__ __forceinline__ bool
bring_heads(const logits_args &args, int64_t first_token, int num_tokens, int part,
            block_memory *memory)
{
    head_group *const groups = memory->groups;
    float *const weights = weights_of(args, memory);
    const smla_logits_params &p = args.p;
    const int count = args.chunk_groups;
    const int64_t first_head = (int64_t)part * count * GROUP_HEADS;
    const int lane = lane_idx();
    bool has_power = false;
    for (int i = (int)threadIdx.x / SMLA_WARP_LANES; i < num_tokens * count; i += BLOCK_WARPS) {
        const int64_t token = first_token + i / count;
        const int64_t head = first_head + i % count * GROUP_HEADS + lane / 4;
        row_fragment fragment = {};
        if (head < p.num_heads) {
            if (!IS_HALF && p.q_scale != NULL) {
                widen_head<IS_HALF, true>(args, token, head, &fragment, &has_power);
            } else {
                widen_head<IS_HALF, false>(args, token, head, &fragment, &has_power);
            }
        }
#pragma unroll
        for (int s = 0; s < K_STEPS; s += 2) {
            groups[i].words[s / 2][lane] =
                make_uint4(fragment.pairs[s][0], fragment.pairs[s][1], fragment.pairs[s + 1][0],
                           fragment.pairs[s + 1][1]);
        }
        if (lane < GROUP_HEADS) {
            const int64_t own = first_head + i % count * GROUP_HEADS + lane;
            const float weight =
                own < p.num_heads ? __ldg(p.weights + token * p.weights_stride_token + own) : 0.0f;
            weights[i * GROUP_HEADS + lane] = weight;
            has_power = has_power || may_be_extreme(weight);
        }
    }
    return has_power;
}

/* Brings a part of the heads, and multiplies weights that have a power. All threads of the block
 * call it. */
template <bool IS_HALF>
__device__ __forceinline__ void
bring_part(const logits_args &args, int64_t first_token, int num_tokens, int part,
           block_memory *memory)
{
    if (threadIdx.x < num_tokens) {
        memory->powers[threadIdx.x] = 0;
    }
    const bool may_have = bring_heads<IS_HALF>(args, first_token, num_tokens, part, memory);
    /* If the compiler did not know that the whole warp takes the branch, which has barriers, it
     * would align the warp again before every product. */
    const int is_rare = __syncthreads_or(may_have || args.head_chunks > 1);
    if (same_in_warp((uint32_t)is_rare) != 0) {
        find_weight_powers(args.p, first_token, num_tokens, memory->powers);
        __syncthreads(); /* all see the powers */
        multiply_weights(args, first_token, num_tokens, part, memory);
        __syncthreads();
    }
}

/* The same within the loop over keys, where calls have more heads than shared memory. Not inlined,
 * because the loop would be far longer. */
template <bool IS_HALF>
__device__ __noinline__ void
bring_next_part(const logits_args &args, int64_t first_token, int num_tokens, int part,
                block_memory *memory)
{
    __syncthreads(); /* no thread reads the part before */
    bring_part<IS_HALF>(args, first_token, num_tokens, part, memory);
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* The index of the lane's key among a warp's 32: lane (g, c) looks up key g + 8 c. */
__device__ __forceinline__ int
key_of_lane(void)
{
    return lane_idx() / 4 + 8 * (lane_idx() % 4);
}

__device__ __forceinline__ const uint8_t *
pointer_of_lane(const uint8_t *pointer, int lane)
{
    return (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)pointer, lane);
}

/* Loads the rows of keys g, g + 8, g + 16 and g + 24; rows that do not exist are zeros. */
template <bool IS_FP4, int ALIGNMENT>
__device__ __forceinline__ void
load_keys(const smla_kv_token &key, raw_row<IS_FP4> raw[4], float *scale)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int lane = (lane_idx() & ~3) + i;
        const uint8_t *const row = pointer_of_lane(key.row, lane);
        const uint8_t *const scales = IS_FP4 ? pointer_of_lane(key.scales, lane) : NULL;
        raw[i] = raw_row<IS_FP4>{};
        if (row != NULL) {
            load_row<IS_FP4, ALIGNMENT>(row, scales, &raw[i]);
        }
    }
    *scale = 1.0f;
    if (!IS_FP4 && key.row != NULL) {
        *scale = __ldg((const float *)key.scales);
    }
}

/* Shifts scales of FP4 keys that are large or small. Returns whether the warp may have such. */
__device__ __forceinline__ bool
shift_keys(raw_row<true> raw[4])
{
    uint32_t may_have = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        may_have |= may_have_power(raw[i].scales);
    }
    const bool is_rare = __any_sync(ALL_LANES, may_have != 0);
    if (is_rare) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            raw[i].scales = shift_scales(raw[i].scales, key_power_of(raw[i].scales));
        }
    }
    return is_rare;
}

/* The power of an FP4 key, whose scales are loaded again, because holding the powers of all keys
 * would cost registers. */
__device__ __noinline__ int
find_key_power(const logits_args &args, int64_t source, int64_t column)
{
    const smla_kv_token key = find_key(args, source, column);
    uint32_t scales = 0;
    if (key.row != NULL) {
        smla_load_words<4, false, 1>(key.scales, &scales);
    }
    return key_power_of(scales);
}

/* sums[i] += weight * relu(q . key i) for the groups of a token. Lane (g, c) adds heads 2 c and
 * 2 c + 1 of every group, for keys g + 8 i. */
template <bool IS_HALF>
__device__ __forceinline__ void
add_groups(const row_fragment keys[4], const head_group *groups, const float *weights, int count,
           int64_t heads_left, float sums[4])
{
    const int lane = lane_idx();
#pragma unroll 1
    for (int j = 0; j < count; j++) {
        float dots[2][4] = {};
#pragma unroll
        for (int s = 0; s < K_STEPS; s += 2) {
            const uint4 words = groups[j].words[s / 2][lane];
            const uint32_t b[2][2] = {{words.x, words.y}, {words.z, words.w}};
#pragma unroll
            for (int step = 0; step < 2; step++) {
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const uint32_t a[4] = {keys[2 * m].pairs[s + step][0],
                                           keys[2 * m + 1].pairs[s + step][0],
                                           keys[2 * m].pairs[s + step][1],
                                           keys[2 * m + 1].pairs[s + step][1]};
                    if constexpr (IS_HALF) {
                        ptx_mma_f16(dots[m], a, b[step]);
                    } else {
                        ptx_mma_bf16(dots[m], a, b[step]);
                    }
                }
            }
        }
        const int head = j * GROUP_HEADS + lane % 4 * 2;
        const float2 weight = *(const float2 *)(weights + head);
        const bool exists[2] = {head < heads_left, head + 1 < heads_left};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float first = exists[0] ? relu(dots[i / 2][i % 2 * 2]) : 0.0f;
            const float second = exists[1] ? relu(dots[i / 2][i % 2 * 2 + 1]) : 0.0f;
            sums[i] = fmaf(weight.x, first, sums[i]);
            sums[i] = fmaf(weight.y, second, sums[i]);
        }
    }
}

/* Folds the lanes' sums, and stores the logit of the lane's key, times 2^power. */
__device__ __forceinline__ void
store_sums(const smla_logits_params &p, int64_t token, int64_t column, int64_t context, bool exists,
           float scale, int power, float sums[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], 1);
        sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], 2);
    }
    const int c = lane_idx() % 4;
    const float low = c == 0 ? sums[0] : sums[1];
    const float high = c == 2 ? sums[2] : sums[3];
    const float sum = c < 2 ? low : high;
    const float logit =
        power == 0 ? sum * scale : multiply_by_power((double)sum * (double)scale, power);
    if (column < context) {
        store_logit(p, token, column, exists ? logit : -INFINITY);
    }
}

/* ---- Work items ---------------------------------------------------------------------------- */

/* Scores a run of tokens. All warps take the same tiles, because they may share heads. */
template <bool IS_HALF, bool IS_FP4, int ALIGNMENT>
__device__ __forceinline__ void
score_run(const logits_args &args, const logits_work_item &work, int64_t first_token,
          int64_t end_token, block_memory *memory)
{
    const smla_logits_params &p = args.p;
    const int64_t source = source_of(p, first_token);
    int64_t longest = 0;
    for (int64_t token = first_token; token < end_token; token++) {
        const int64_t context = context_of(p, token);
        longest = context > longest ? context : longest;
    }
    longest = smaller_of(longest, work.end);
    if (work.first >= longest) {
        return;
    }
    int64_t own =
        /* Column of the lane's key. */
        work.first + threadIdx.x / SMLA_WARP_LANES * WARP_KEYS + key_of_lane();
    raw_row<IS_FP4> raw[4];
    float next_scale;
    smla_kv_token key = find_key(args, source, own);
    bool next_exists = key.row != NULL;
    load_keys<IS_FP4, ALIGNMENT>(key, raw, &next_scale);
    key = find_key(args, source, own + TILE_KEYS);
#pragma unroll 1
    for (int64_t tile = work.first; tile < longest; tile += TILE_KEYS, own += TILE_KEYS) {
        const float scale = next_scale;
        const bool exists = next_exists;
        bool is_rare = false;
        if constexpr (IS_FP4) {
            is_rare = shift_keys(raw);
        }
        row_fragment keys[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float other = __shfl_sync(ALL_LANES, scale, (lane_idx() & ~3) + i);
            widen_row<IS_HALF>(raw[i], other < 0.0f ? 0x80808080u : 0, &keys[i]);
        }
        next_exists = key.row != NULL;
        load_keys<IS_FP4, ALIGNMENT>(key, raw, &next_scale);
        key = find_key(args, source, own + 2 * TILE_KEYS);
        for (int64_t token = first_token; token < end_token; token++) {
            const int64_t context = context_of(p, token);
            if (tile >= context) {
                continue;
            }
            float sums[4] = {};
            for (int part = 0; part < args.head_chunks; part++) {
                if (args.head_chunks > 1) {
                    bring_next_part<IS_HALF>(args, work.first_token,
                                             (int)(work.end_token - work.first_token), part,
                                             memory);
                }
                const int first_group = (int)(token - work.first_token) * args.chunk_groups;
                const int64_t first_head = (int64_t)part * args.chunk_groups * GROUP_HEADS;
                add_groups<IS_HALF>(keys, memory->groups + first_group,
                                    weights_of(args, memory) + first_group * GROUP_HEADS,
                                    args.chunk_groups, p.num_heads - first_head, sums);
            }
            if constexpr (IS_HALF && SMLA_E4M3_UNIT != 1.0f) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[i] *= SMLA_E4M3_UNIT * SMLA_E4M3_UNIT;
                }
            }
            int power = (int)same_in_warp((uint32_t)memory->powers[token - work.first_token]);
            if (IS_FP4 && is_rare) {
                power -= find_key_power(args, source, own);
            }
            store_sums(p, token, own, context, exists, fabsf(scale), power, sums);
        }
    }
}

template <bool IS_HALF, bool IS_FP4, int ALIGNMENT>
__global__ void
__launch_bounds__(BLOCK_THREADS, 2) logits_kernel(const __grid_constant__ logits_args args)
{
    extern __shared__ __align__(16) uint8_t shared[];
    ptx_wait_for_grids();
    block_memory *const memory = (block_memory *)shared;
    for (int64_t number = blockIdx.x; number < args.num_work_items; number += gridDim.x) {
        const logits_work_item work = find_work_item(args, number, args.block_tokens);
        const int num_tokens = (int)(work.end_token - work.first_token);
        bring_part<IS_HALF>(args, work.first_token, num_tokens, 0, memory);
        fill_rest(args.p, work, (int)threadIdx.x, BLOCK_THREADS);
        int64_t token = work.first_token;
        while (token < work.end_token) {
            const int64_t next = end_of_run(args.p, token, work.end_token);
            score_run<IS_HALF, IS_FP4, ALIGNMENT>(args, work, token, next, memory);
            token = next;
        }
        __syncthreads(); /* all have used the heads, which the next work item overwrites */
    }
}

/* The kernel for the alignment of all keys: 0 for whole vectors (8 bytes of FP4), 1 for words, 2
 * for bytes. Pages have words at least. */
int
kernel_of_keys(const smla_kv_view &kv, bool is_fp4)
{
    const int64_t strides = kv.page_stride_bytes | kv.token_stride_bytes;
    const bool has_words = !is_fp4 || smla_is_multiple(kv.scales, kv.scale_token_stride_bytes, 4);
    const bool has_vectors = smla_is_multiple(kv.base, strides, is_fp4 ? 8 : 16);
    return !has_words || !smla_is_multiple(kv.base, strides, 4) ? 2 : has_vectors ? 0 : 1;
}

bool
are_queries_aligned(const smla_logits_params *p)
{
    const int64_t bytes = p->q_scale == NULL ? 16 : 8;
    return smla_is_multiple(p->q, p->q_stride_token | p->q_stride_head, bytes) &&
           smla_is_multiple(p->q_scale, p->q_scale_stride_token | p->q_scale_stride_head, 4);
}

} /* namespace */

cudaError_t
smla_cuda_launch_indexer_logits(const smla_logits_params *params, const smla_cuda_device *device)
{
    static uint64_t allowed[3][3];
    if (smla_cuda_serves_logits_sm90(params)) {
        return smla_cuda_launch_logits_sm90(params);
    }
    logits_args args = {};
    args.p = *params;
    args.page_keys = smla_make_divisor(params->has_pages ? params->pages.block_size : 1);
    const int64_t groups = smla_count_parts(params->num_heads, GROUP_HEADS);
    args.chunk_groups = (int32_t)(groups < MOST_GROUPS ? groups : (int64_t)MOST_GROUPS);
    args.head_chunks = (int32_t)smla_count_parts(groups, args.chunk_groups);
    args.block_tokens = MOST_GROUPS / args.chunk_groups;
    if (args.block_tokens > MOST_TOKENS) {
        args.block_tokens = MOST_TOKENS;
    }
    const int64_t token_blocks = smla_count_parts(params->num_tokens, args.block_tokens);
    args.token_blocks = smla_make_divisor(token_blocks);
    const int64_t num_sms = device->num_sms;
    args.chunk_columns = choose_chunk(params->num_columns, token_blocks,
                                      WORK_ITEMS_PER_SM * num_sms, LEAST_CHUNK, MOST_CHUNK);
    args.num_work_items = token_blocks * smla_count_parts(params->num_columns, args.chunk_columns);
    args.q_is_aligned = are_queries_aligned(params);
    const int bytes = shared_bytes_of(args.block_tokens * args.chunk_groups);
    const bool is_fp4 = params->kv.format->number == SMLA_ROW_MXFP4_INDEX;
    const int kind = is_fp4 ? 2 : params->q_scale != NULL ? 1 : 0;
    const int column = kernel_of_keys(params->kv, is_fp4);
    static const smla_kernel<logits_args> kernels[3][3] = {
        {logits_kernel<true, false, 16>, logits_kernel<true, false, 4>,
         logits_kernel<true, false, 1>},
        {logits_kernel<false, false, 16>, logits_kernel<false, false, 4>,
         logits_kernel<false, false, 1>},
        {logits_kernel<false, true, 16>, logits_kernel<false, true, 4>,
         logits_kernel<false, true, 1>},
    };
    return smla_launch_large(kernels[kind][column], args, args.num_work_items, BLOCK_THREADS, bytes,
                             shared_bytes_of(MOST_GROUPS), params->call.stream,
                             &allowed[kind][column]);
}
