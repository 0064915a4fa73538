/* varlen_kernel.cuh: multi-head attention over keys and values of KV heads, ragged or in pages, for
 * every GPU from sm_80 on, with mma.sync. README.md tells why it is as it is.
 *
 * Computes     s_j = softmax_scale * q_descale * k_descale * log2(e) * (q . k_j), perhaps capped,
 *              w_j = 2^(s_j - ref) for the keys that the row sees (visible.h),
 *              out = v_descale * sum_j w_j v_j / sum_j w_j / (1 + e^(sink - lse)),
 *              lse = ref * ln 2 + ln(sum_j w_j)
 * Shapes       q [Tq][H][D], k [Tk][Hk][D], v [Tk][Hk][Dv] bf16, fp16 or e4m3, any strides; q and k
 *              may be two arrays, split at any multiple of 8; out [Tq][H][Dv] bf16, fp16 or fp32,
 *              lse [Tq][H] fp32, any strides. D and Dv are multiples of 8, padded with zeros in
 *              shared memory to the next instance. q, k and v of which every chunk of 8 elements is
 *              aligned are copied without registers (e4m3 is widened in them). Keys in pages are
 *              k [P][ps][Hk][D] and v [P][ps][Hk][Dv] (keys/kv_pages.cuh).
 * Shared mem   queries [D / 64][rows][64], keys [D / 64][block][64], values [Dv / 64][block][64],
 *              16 bits, 16-byte chunk c of row r at c ^ r % 8; limits of rows, parts, the tile.
 *                instance  rows  keys  a warp's rows x values  bytes   registers
 *                64/64     128   64    32 x 64                 33,904  228
 *                128/128   128   64    32 x 128                66,672  255
 *                192/128   128   64    32 x 128                91,248  255
 *                256/256   64    64    16 x 256                98,928  246
 *                MLA       32    16    16 x 256 (two parts)    72,048  240
 *              With pages, warps have 16 rows, so tiles of all but MLA have 64: 161, 197, 202, 250
 *              and 237 registers.
 *              99 KiB suffice (sm_86, 89, 120). Registers allow two CTAs per SM, and so does the
 *              memory of A100 and Hopper, except for 192/128 and 256/256 on A100.
 * Roles        A CTA of 4 warps takes a tile of query rows that share a KV head. All warps copy and
 *              multiply. A block of keys has two phases, each behind a barrier of all threads:
 *                keys     The block's keys are visible. Copies of its values start, and of the
 *                         table's entries for the next block; scores and weights are computed, in
 *                         registers.
 *                values   The block's values are visible. Copies of the next keys start; weights
 *                         are multiplied by values.
 *              The other CTA of the SM multiplies while this one waits or takes exponents.
 * Roofline     2 (D + Dv) FLOP per pair of row and key. mma.sync binds, about 62 % of the tensor
 *              cores' rate on Hopper. A warp of 32 rows reads 416 cycles of shared memory per block
 *              of 192/128 while tensor cores work 516. Measured on an H200, causal (2026-11-28,
 *              bench --only varlen): 1 x 4096, 128 heads of 192/128 1828 us, 376 TFLOP/s, 76 % of
 *              what mma.sync can do there; 8 x 1024 265, 1 x 8192 of 16 heads 397.
 * Numerics     e4m3 is exact in bf16 and fp16. Scores and out are sums of fp32 by tensor cores,
 *              over D at most 256 long, and fp32 beyond. Weights are rounded once, to the type of
 *              the operands; their sum is not rounded to it, and is compensated. So out is off by
 *              2^-8 of sum_j p_j |v_j| and of |out| at most, and lse does not know of 16 bits.
 *              ref is the largest logit of the row's first block with a key, and moves to a larger
 *              one only if that is 2^8 heavier. Keys past the last one that the tile sees are
 *              zeros, so no other request's NaN meets a product. A NaN value in a key that only a
 *              mask hides makes 0 * NaN. No key: out 0, lse -inf. A row's bits depend on its query,
 *              its request's keys and the dims alone: blocks begin at multiples of their size from
 *              the request's key 0, and a block that the row does not see changes none of its bits.
 *              Whatever page a key is in, it is the same row of its block, so no bit depends on
 *              pages. Where both parts of q . k have scales of their own, as e4m3 caches may have
 *              beside qv, each part is summed by itself.
 * Source       FlashAttention-2, for the loop and for registers as operands; the references that
 *              seldom move, tiles of several heads and the order of tiles are ours.
 */
#pragma once

#include <type_traits>

#include "cuda/attention/sm80/mha/paged_parts.cuh"
#include "cuda/attention/sm80/mha/varlen_results.cuh"

namespace {

enum { MIN_CTAS_PER_SM = 2 };

template <typename Shape, typename Args>
using memory_of = std::conditional_t<IS_PAGED<Args>, paged_memory<Shape>, varlen_memory<Shape>>;

/* Starts the copies of queries, and leaves in shared memory what the loop reads. */
template <typename Shape, bool HALF, typename Args>
__device__ __forceinline__ void
start_tile(const Args &args, const varlen_tile &tile, memory_of<Shape, Args> *shared)
{
    bring_queries<Shape, HALF>(args.q, args, tile, ptx_shared_address(shared->queries));
    varlen_limits part = {0, UINT32_MAX};
    if constexpr (IS_PAGED<Args>) {
        part = find_part_keys(args, tile.request, tile.part);
    }
    store_limits<Shape>(args, tile, part, shared->limits);
    if (threadIdx.x == 0) {
        shared->tile = tile;
        shared->parts[PART_K0] = find_part<IS_PAGED<Args>>(args.k, 0, tile);
        shared->parts[PART_K1] = find_part<IS_PAGED<Args>>(args.k, 1, tile);
        shared->parts[PART_V] = find_part<IS_PAGED<Args>>(args.v, 0, tile);
        if constexpr (IS_PAGED<Args>) {
            const float first = load_first_scale(args.p, tile);
            const float second = load_scale(args.p.logits.k_descale, tile);
            shared->part_factors[0] = first / fmaxf(first, second);
            shared->part_factors[1] = second / fmaxf(first, second);
        }
    }
    ptx_barrier(0, CTA_THREADS); /* limits, parts and the tile are visible */
}

/* ---- A block's keys and values, by source --------------------------------------------------- */

/* The buffer of a block's entries. */
template <typename Shape, typename Memory>
__device__ __forceinline__ int32_t *
entries_of(Memory *shared, uint32_t first_key)
{
    return shared->entries[first_key / Shape::KEYS % 2];
}

/* The position in its request of a key of the tile. */
template <typename Memory>
__device__ __forceinline__ uint32_t
position_of(const Memory &shared, uint32_t key)
{
    return (uint32_t)shared.tile.request.first_key + key;
}

/* Starts the copy of what tells where a block's keys lie. */
template <typename Shape, typename Args>
__device__ __forceinline__ void
bring_table(const Args &args, uint32_t first_key, memory_of<Shape, Args> *shared)
{
    if constexpr (IS_PAGED<Args>) {
        bring_entries<Shape::KEYS>(args.pages, shared->tile.req, position_of(*shared, first_key),
                                   ptx_shared_address(entries_of<Shape>(shared, first_key)));
    }
}

/* Which keys of a block are hidden, as bits. */
template <typename Shape, typename Args>
__device__ __forceinline__ uint64_t
find_hidden_keys(const Args &args, uint32_t first_key, memory_of<Shape, Args> *shared)
{
    if constexpr (IS_PAGED<Args>) {
        return find_hidden<Shape::KEYS>(args.pages, entries_of<Shape>(shared, first_key),
                                        position_of(*shared, first_key));
    }
    return 0;
}

/* Starts the copy of a block's keys. */
template <typename Shape, bool HALF, typename Args>
__device__ __forceinline__ void
bring_keys(const Args &args, uint32_t first_key, const varlen_limits &seen,
           memory_of<Shape, Args> *shared)
{
    const uint32_t to = ptx_shared_address(shared->keys);
    if constexpr (IS_PAGED<Args>) {
        bring_pages<Shape::D, Shape::KEYS, HALF>(args.k, shared->parts, args.pages, PART_K0,
                                                 entries_of<Shape>(shared, first_key),
                                                 position_of(*shared, first_key), first_key, seen,
                                                 to);
    } else {
        bring_block<Shape::D, Shape::KEYS, HALF>(args.k, shared->parts, first_key, seen.end, to);
    }
}

/* Starts the copy of a block's values. */
template <typename Shape, bool HALF, typename Args>
__device__ __forceinline__ void
bring_values(const Args &args, uint32_t first_key, const varlen_limits &seen,
             memory_of<Shape, Args> *shared)
{
    const uint32_t to = ptx_shared_address(shared->values);
    const varlen_part *const parts = shared->parts + PART_V;
    if constexpr (IS_PAGED<Args>) {
        bring_pages<Shape::DV, Shape::KEYS, HALF>(args.v, parts, args.pages, PART_V,
                                                  entries_of<Shape>(shared, first_key),
                                                  position_of(*shared, first_key), first_key, seen,
                                                  to);
    } else {
        bring_block<Shape::DV, Shape::KEYS, HALF>(args.v, parts, first_key, seen.end, to);
    }
}

/* ---- A tile -------------------------------------------------------------------------------- */

/* scores = queries * keys of a block. */
template <typename Shape, bool HALF, typename Args>
__device__ __forceinline__ void
score_keys(const Args &args, const varlen_operands &operands, const memory_of<Shape, Args> &shared,
           float scores[Shape::M][Shape::N][4])
{
    if constexpr (IS_PAGED<Args>) {
        if (shared.part_factors[0] != shared.part_factors[1]) {
            score_parts<Shape, HALF>(operands.queries, operands.keys, args.k.dim, args.k.first_dim,
                                     shared.part_factors, scores);
            return;
        }
    }
    score_block<Shape, HALF>(operands.queries, operands.keys, args.num_segments, scores);
}

/* Computes a tile. */
template <typename Shape, bool HALF, typename Args>
__device__ __forceinline__ void
attend_tile(const Args &args, const varlen_tile &tile, memory_of<Shape, Args> *shared)
{
    constexpr uint32_t KEYS = Shape::KEYS;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const int first_row = warp / Shape::WARPS_ALONG_VALUES * Shape::WARP_ROWS;
    const int first_value = warp % Shape::WARPS_ALONG_VALUES * Shape::WARP_VALUES;
    start_tile<Shape, HALF>(args, tile, shared);
    const varlen_limits all = merge_limits<Shape::ROWS>(shared->limits, tile.num_rows).any;
    const varlen_view own =
        merge_limits<Shape::WARP_ROWS>(shared->limits + first_row, tile.num_rows - first_row);
    const varlen_rule rule = find_rule<IS_PAGED<Args>>(args.p, tile);
    const varlen_operands operands = find_operands<Shape>(*shared, first_row, first_value);

    varlen_rows<Shape> rows;
    start_rows<Shape>(&rows);
    float out[Shape::M][Shape::V][4] = {};
    uint32_t first_key = all.begin / KEYS * KEYS;
    if (first_key < all.end) {
        if constexpr (IS_PAGED<Args>) {
            bring_table<Shape>(args, first_key, shared);
            ptx_cp_async_wait_all();
            ptx_barrier(0, CTA_THREADS); /* the first entries are visible */
        }
        bring_keys<Shape, HALF>(args, first_key, all, shared);
    }
#pragma unroll 1
    for (; first_key < all.end; first_key += KEYS) {
        const uint32_t next = first_key + KEYS;
        const bool is_seen = first_key < own.any.end && next > own.any.begin;
        ptx_cp_async_wait_all();
        ptx_barrier(0, CTA_THREADS); /* the keys are visible; nobody reads the values any more */
        bring_values<Shape, HALF>(args, first_key, all, shared);
        if (next < all.end) {
            bring_table<Shape>(args, next, shared);
        }
        uint32_t weights[Shape::M][Shape::N / 2][4];
        if (is_seen) {
            float scores[Shape::M][Shape::N][4];
            score_keys<Shape, HALF>(args, operands, *shared, scores);
            weigh_block<Shape, HALF>(rule, args.p.logits.softcap * LOG2_E,
                                     shared->limits + first_row,
                                     first_key < own.each.begin || next > own.each.end, first_key,
                                     find_hidden_keys<Shape>(args, first_key, shared), scores,
                                     &rows, out, weights);
        }
        ptx_cp_async_wait_all();
        ptx_barrier(0, CTA_THREADS); /* the values are visible; nobody reads the keys any more */
        if (next < all.end) {
            bring_keys<Shape, HALF>(args, next, all, shared);
        }
        if (is_seen) {
            add_block<Shape, HALF>(operands.values, weights, out);
        }
    }
    ptx_cp_async_wait_all(); /* queries that no key was multiplied with are still under way */
    write_results<Shape, HALF>(args, shared->tile, first_row, first_value, rows, out);
}

template <typename Shape, bool HALF, typename Args>
__global__ void
__launch_bounds__(CTA_THREADS, MIN_CTAS_PER_SM) attend_varlen(const __grid_constant__ Args args)
{
    extern __shared__ __align__(128) uint8_t memory[];
    ptx_wait_for_grids();
    for (int64_t item = blockIdx.x; item < args.num_items; item += gridDim.x) {
        varlen_tile tile;
        int64_t number = item;
        if constexpr (IS_PAGED<Args>) {
            tile.part = take_part(args, &number);
        }
        if (find_tile<Shape>(args, number, &tile)) {
            attend_tile<Shape, HALF>(args, tile, (memory_of<Shape, Args> *)memory);
            ptx_barrier(0, CTA_THREADS); /* nobody reads the tile's memory any more */
        }
    }
    smla_fill_rows_of_none(&args.p.padding, &args.p.visible.reqs, blockIdx.x, gridDim.x,
                           (int)threadIdx.x, CTA_THREADS);
}

/* ---- Launcher ------------------------------------------------------------------------------ */

/* Bytes of keys and values that tiles which run at the same time should share: half of an L2. */
constexpr int64_t SECTION_BYTES = 24 << 20;

/* Ragged keys, and queries, have no pages: page_strides is NULL. */
varlen_source
make_source(const smla_head_rows *parts, const int16_t *dims, int count, smla_float_type type,
            const int64_t *page_strides)
{
    const int32_t bytes = type == SMLA_FLOAT_E4M3 ? 1 : 2;
    varlen_source source = {};
    source.first_dim = dims[0];
    source.element_bytes = bytes;
    bool is_aligned = true;
    for (int i = 0; i < count; i++) {
        const smla_head_rows &part = parts[i];
        source.data[i] = (const uint8_t *)part.data;
        source.token_bytes[i] = part.stride_token * bytes;
        source.head_bytes[i] = part.stride_head * bytes;
        source.dim += dims[i];
        is_aligned =
            is_aligned &&
            (dims[i] == 0 || (smla_is_multiple(part.data, source.token_bytes[i], CHUNK * bytes) &&
                              source.head_bytes[i] % (CHUNK * bytes) == 0 &&
                              (page_strides == NULL || page_strides[i] % CHUNK == 0)));
    }
    if (type == SMLA_FLOAT_E4M3) {
        source.copy = is_aligned ? WIDEN_CHUNKS : WIDEN_ELEMENTS;
    } else {
        source.copy = is_aligned ? COPY_CHUNKS : COPY_ELEMENTS;
    }
    return source;
}

/* The most KV heads whose keys and values fit in SECTION_BYTES; a divisor of their number, so that
 * the last section is as large as the others. */
int64_t
choose_section(const varlen_args &args, int64_t num_keys)
{
    const int64_t row_bytes = args.k.dim * args.k.element_bytes + args.v.dim * args.v.element_bytes;
    const int64_t head_bytes = num_keys * row_bytes + 1;
    int64_t heads = args.p.kv.num_kv_heads;
    while (heads > 1 &&
           (args.p.kv.num_kv_heads % heads != 0 || heads * head_bytes > SECTION_BYTES)) {
        heads--;
    }
    return heads;
}

/* As many keys as requests may have at most. */
int64_t
count_keys(const smla_attention_params &p)
{
    const smla_kv_pages &pages = p.pages;
    const int64_t entries = p.visible.reqs.num_reqs * pages.table.num_blocks;
    return p.source == SMLA_KEYS_PAGED && entries < p.kv.num_keys / pages.table.block_size
               ? entries * pages.table.block_size
               : p.kv.num_keys;
}

template <typename Shape, typename Args>
Args
make_args(const smla_attention_params &p)
{
    Args args = {};
    const int64_t *const page_strides = IS_PAGED<Args> ? p.pages.strides_page : NULL;
    const int64_t *const value_strides = IS_PAGED<Args> ? page_strides + SMLA_VALUES : NULL;
    args.p = mha_params_of(&p);
    args.q = make_source(p.queries.parts, p.queries.dims, 2, p.queries.type, NULL);
    args.k = make_source(p.kv.rows, p.queries.dims, 2, p.kv.type, page_strides);
    args.v = make_source(&p.kv.rows[SMLA_VALUES], &p.kv.value_dim, 1, p.kv.type, value_strides);
    if constexpr (IS_PAGED<Args>) {
        args.pages = kv_pages_of(p.pages, p.kv.type);
    }
    const int64_t group = p.queries.num_heads / p.kv.num_kv_heads;
    /* Every request with queries may have one tile that is not full. Without requests, CTAs fill
     * the rows of none. */
    const int64_t most_reqs = p.visible.reqs.num_reqs < p.queries.num_tokens
                                  ? p.visible.reqs.num_reqs
                                  : p.queries.num_tokens;
    const int64_t num_reqs = most_reqs > 0 ? most_reqs : 1;
    const int64_t head_tiles =
        (p.queries.num_tokens * group + num_reqs * (Shape::ROWS - 1)) / Shape::ROWS;
    args.group = smla_make_divisor(group);
    args.head_tiles = smla_make_divisor(head_tiles);
    args.section_heads = smla_make_divisor(choose_section(args, count_keys(p)));
    args.num_items = p.kv.num_kv_heads * head_tiles;
    args.num_segments = (int32_t)smla_count_parts(args.q.dim, SEGMENT);
    const int64_t pair_bytes = p.results.out_type == SMLA_FLOAT_FP32 ? 8 : 4;
    args.out_is_paired =
        smla_is_multiple(p.results.out, p.results.out_stride_token * pair_bytes / 2, pair_bytes) &&
        p.results.out_stride_head % 2 == 0;
    return args;
}

template <typename Shape, bool HALF, typename Args>
cudaError_t
launch_shape(const smla_attention_params &p)
{
    constexpr int bytes = (int)sizeof(memory_of<Shape, Args>);
    static_assert(bytes <= 99 << 10, "sm_86, 89 and 120 have 99 KiB");
    Args args = make_args<Shape, Args>(p);
    if constexpr (IS_PAGED<Args>) {
        const int64_t num_sms = smla_cuda_find_device(p.call.stream.device_id)->num_sms;
        cut_keys(p, count_parts(p, args.num_items, MIN_CTAS_PER_SM * num_sms), &args);
    }
    const cudaError_t code =
        smla_launch_large<attend_varlen<Shape, HALF, Args>>(args, args.num_items, CTA_THREADS,
                                                            bytes, p.call.stream);
    if constexpr (IS_PAGED<Args>) {
        return code == cudaSuccess && args.num_parts > 1 ? merge_parts(p, args) : code;
    }
    return code;
}

/* Kernels in order of size; the first one whose dims suffice. */
struct varlen_kernel {
    int32_t dim;
    int32_t value_dim;
    cudaError_t (*launch[2])(const smla_attention_params &); /* bf16, fp16 */
};

template <typename Args, int D, int DV, int WARP_ROWS, int WARPS_ALONG_ROWS, int KEYS>
constexpr varlen_kernel
make_kernel(void)
{
    typedef varlen_shape<D, DV, WARP_ROWS, WARPS_ALONG_ROWS, KEYS> shape;
    return varlen_kernel{D,
                         DV,
                         {launch_shape<shape, false, Args>, launch_shape<shape, true, Args>}};
}

/* Rows of a warp. Places of keys take the registers that 16 more rows would need. */
template <typename Args> constexpr int ROWS = IS_PAGED<Args> ? 16 : 32;

template <typename Args>
constexpr varlen_kernel varlen_kernels[] = {
    make_kernel<Args, 64, 64, ROWS<Args>, 4, 64>(),
    make_kernel<Args, 128, 128, ROWS<Args>, 4, 64>(),
    make_kernel<Args, 192, 128, ROWS<Args>, 4, 64>(),
    make_kernel<Args, 256, 256, 16, 4, 64>(),
    make_kernel<Args, SMLA_HEAD_DIM, SMLA_KV_LORA_RANK, 16, 2, 16>(),
};

template <typename Args>
cudaError_t
launch_kernel(const smla_attention_params &p)
{
    /* e4m3 is exact in both types. */
    const bool is_half = p.queries.type == SMLA_FLOAT_FP16 || p.kv.type == SMLA_FLOAT_FP16;
    const bool has_bf16 = p.queries.type == SMLA_FLOAT_BF16 || p.kv.type == SMLA_FLOAT_BF16;
    for (const varlen_kernel &kernel : varlen_kernels<Args>) {
        if (p.queries.dims[0] + p.queries.dims[1] <= kernel.dim &&
            p.kv.value_dim <= kernel.value_dim && !(is_half && has_bf16)) {
            return kernel.launch[is_half](p);
        }
    }
    return SMLA_NO_KERNEL;
}

} /* namespace */
