/* varlen_attention.cu: multi-head attention over ragged, contiguous keys and values, for every GPU
 * from sm_80 on, with mma.sync.
 */
#include "cuda/varlen/varlen_results.cuh"

namespace {

enum { MIN_CTAS_PER_SM = 2 };

/* Attends to the keys of a tile. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
attend_tile(const varlen_args &args, const varlen_tile &tile, varlen_memory<Shape> *shared)
{
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const int first_row = warp / Shape::WARPS_ALONG_VALUES * Shape::WARP_ROWS;
    const int first_value = warp % Shape::WARPS_ALONG_VALUES * Shape::WARP_VALUES;
    const int lane = lane_idx();
    bring_queries<Shape, HALF>(args.q, args, tile, ptx_shared_address(shared->queries));
    store_limits<Shape>(args, tile, shared->limits);
    if (threadIdx.x == 0) {
        shared->tile = tile;
        shared->parts[PART_K0] = find_part(args.k, 0, tile);
        shared->parts[PART_K1] = find_part(args.k, 1, tile);
        shared->parts[PART_V] = find_part(args.v, 0, tile);
    }
    ptx_barrier(0, CTA_THREADS); /* the tile and its limits are visible */
    const varlen_limits all = merge_limits<Shape::ROWS>(shared->limits, tile.num_rows).any;
    const varlen_view own =
        merge_limits<Shape::WARP_ROWS>(shared->limits + first_row, tile.num_rows - first_row);
    const varlen_rule rule = find_rule(args.p, tile);

    const uint32_t keys = ptx_shared_address(shared->keys);
    const uint32_t values = ptx_shared_address(shared->values);
    const uint32_t query_chunk = ptx_shared_address(shared->queries) +
                                 (first_row + lane % 16) * SEGMENT_BYTES +
                                 (lane / 16 ^ lane % 8) * 16;
    const uint32_t key_chunk =
        keys + (lane / 16 * 8 + lane % 8) * SEGMENT_BYTES + (lane / 8 % 2 ^ lane % 8) * 16;
    const uint32_t value_chunk = values + first_value / SEGMENT * Shape::KEYS * SEGMENT_BYTES +
                                 lane % 16 * SEGMENT_BYTES + (lane / 16 ^ lane % 8) * 16;

    varlen_rows<Shape> rows;
    float out[Shape::M][Shape::V][4] = {};
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            rows.reference[m][i] = -INFINITY;
            rows.sum[m][i] = 0.0f;
            rows.rest[m][i] = 0.0f;
        }
    }
    uint32_t first_key = all.begin / Shape::KEYS * Shape::KEYS;
    if (first_key < all.end) {
        bring_block<Shape::D, Shape::KEYS, HALF>(args.k, shared->parts, first_key, all.end, keys);
    }
#pragma unroll 1
    for (; first_key < all.end; first_key += Shape::KEYS) {
        const bool is_seen = first_key < own.any.end && first_key + Shape::KEYS > own.any.begin;
        ptx_cp_async_wait_all();
        ptx_barrier(0, CTA_THREADS); /* the keys are visible; nobody reads the values any more */
        bring_block<Shape::DV, Shape::KEYS, HALF>(args.v, shared->parts + PART_V, first_key,
                                                  all.end, values);
        uint32_t weights[Shape::M][Shape::N / 2][4];
        if (is_seen) {
            float scores[Shape::M][Shape::N][4];
            score_block<Shape, HALF>(query_chunk, key_chunk, args.num_segments, scores);
            if (rule.is_early) {
                cap_scores<Shape>(rule.early_scale, args.p.softcap * 1.44269504f, scores);
            }
            if (first_key < own.each.begin || first_key + Shape::KEYS > own.each.end) {
                mask_scores<Shape>(shared->limits + first_row, first_key, scores);
            }
            update_references<Shape>(rule.scale, scores, &rows, out);
            weigh_scores<Shape, HALF>(rule.scale, scores, &rows, weights);
        }
        ptx_cp_async_wait_all();
        ptx_barrier(0, CTA_THREADS); /* the values are visible; nobody reads the keys any more */
        if (first_key + Shape::KEYS < all.end) {
            bring_block<Shape::D, Shape::KEYS, HALF>(args.k, shared->parts, first_key + Shape::KEYS,
                                                     all.end, keys);
        }
        if (is_seen) {
            add_block<Shape, HALF>(value_chunk, weights, out);
        }
    }
    ptx_cp_async_wait_all(); /* for queries that no key was multiplied with */
    write_results<Shape, HALF>(args, shared->tile, first_row, first_value, rows, out);
}

template <typename Shape, bool HALF>
__global__ void
__launch_bounds__(CTA_THREADS, MIN_CTAS_PER_SM)
    attend_varlen(const __grid_constant__ varlen_args args)
{
    extern __shared__ __align__(128) uint8_t memory[];
    ptx_wait_for_grids();
    varlen_tile tile;
    if (find_tile<Shape>(args, (int64_t)blockIdx.x, &tile)) {
        attend_tile<Shape, HALF>(args, tile, (varlen_memory<Shape> *)memory);
    }
}

/* ---- Launcher ------------------------------------------------------------------------------ */

/* Bytes of keys and values that tiles which run at the same time should share: half of an L2. */
constexpr int64_t SECTION_BYTES = 24 << 20;

varlen_source
make_source(const smla_varlen_rows parts[2], int count, smla_float_type type)
{
    const int32_t bytes = type == SMLA_FLOAT_E4M3 ? 1 : 2;
    varlen_source source = {};
    source.first_dim = (int32_t)parts[0].dim;
    source.element_bytes = bytes;
    bool is_aligned = true;
    for (int i = 0; i < count; i++) {
        const smla_varlen_rows &part = parts[i];
        source.data[i] = (const uint8_t *)part.data;
        source.token_bytes[i] = part.stride_token * bytes;
        source.head_bytes[i] = part.stride_head * bytes;
        source.dim += (int32_t)part.dim;
        is_aligned =
            is_aligned &&
            (part.dim == 0 || (smla_is_multiple(part.data, source.token_bytes[i], CHUNK * bytes) &&
                               source.head_bytes[i] % (CHUNK * bytes) == 0));
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
choose_section(const varlen_args &args)
{
    const int64_t row_bytes = args.k.dim * args.k.element_bytes + args.v.dim * args.v.element_bytes;
    const int64_t head_bytes = args.p.num_keys * row_bytes + 1;
    int64_t heads = args.p.num_kv_heads;
    while (heads > 1 && (args.p.num_kv_heads % heads != 0 || heads * head_bytes > SECTION_BYTES)) {
        heads--;
    }
    return heads;
}

template <typename Shape>
varlen_args
make_args(const smla_varlen_params &p)
{
    varlen_args args = {};
    args.p = p;
    args.q = make_source(p.q, 2, p.q_type);
    args.k = make_source(p.k, 2, p.kv_type);
    args.v = make_source(&p.v, 1, p.kv_type);
    const int64_t group = p.num_heads / p.num_kv_heads;
    /* Every request with queries may have one tile that is not full. */
    const int64_t num_reqs = p.num_reqs < p.num_tokens ? p.num_reqs : p.num_tokens;
    const int64_t slots = (p.num_tokens * group + num_reqs * (Shape::ROWS - 1)) / Shape::ROWS;
    args.group = smla_make_divisor(group);
    args.slots = smla_make_divisor(slots);
    args.section_heads = smla_make_divisor(choose_section(args));
    args.num_items = p.num_kv_heads * slots;
    args.num_segments = (int32_t)smla_count_parts(args.q.dim, SEGMENT);
    const int64_t pair_bytes = p.out_type == SMLA_FLOAT_FP32 ? 8 : 4;
    args.out_is_paired = smla_is_multiple(p.out, p.out_stride_token * pair_bytes / 2, pair_bytes) &&
                         p.out_stride_head % 2 == 0;
    return args;
}

template <typename Shape, bool HALF>
cudaError_t
launch_shape(const smla_varlen_params &p)
{
    static uint64_t allowed;
    const int shared_bytes = (int)sizeof(varlen_memory<Shape>);
    static_assert(sizeof(varlen_memory<Shape>) <= 99 << 10, "sm_86, 89 and 120 have 99 KiB");
    const cudaError_t code = allow_shared_bytes((const void *)attend_varlen<Shape, HALF>,
                                                shared_bytes, p.call.stream.device_id, &allowed);
    if (code != cudaSuccess) {
        return code;
    }
    const varlen_args args = make_args<Shape>(p);
    return smla_launch(attend_varlen<Shape, HALF>, args, args.num_items, CTA_THREADS, shared_bytes,
                       p.call.stream);
}

/* In order of size; the first one whose dims suffice. */
struct varlen_kernel {
    int32_t dim;
    int32_t value_dim;
    cudaError_t (*launch[2])(const smla_varlen_params &); /* bf16, fp16 */
};

#define KERNEL(shape)                                             \
    {                                                             \
        shape::D, shape::DV,                                      \
        {                                                         \
            launch_shape<shape, false>, launch_shape<shape, true> \
        }                                                         \
    }

typedef varlen_shape<64, 64, 32, 4, 64> shape_64;
typedef varlen_shape<128, 128, 32, 4, 64> shape_128;
typedef varlen_shape<192, 128, 32, 4, 64> shape_192;
typedef varlen_shape<256, 256, 16, 4, 64> shape_256;
typedef varlen_shape<576, 512, 16, 2, 16> shape_576;

const varlen_kernel varlen_kernels[] = {
    KERNEL(shape_64), KERNEL(shape_128), KERNEL(shape_192), KERNEL(shape_256), KERNEL(shape_576),
};

} /* namespace */

cudaError_t
smla_cuda_launch_varlen_attention(const smla_varlen_params *params, const smla_cuda_device *)
{
    const smla_varlen_params &p = *params;
    if (p.num_tokens == 0 || p.num_reqs == 0 || p.num_heads == 0) {
        return cudaSuccess;
    }
    /* e4m3 is exact in both types. */
    const bool is_half = p.q_type == SMLA_FLOAT_FP16 || p.kv_type == SMLA_FLOAT_FP16;
    const bool has_bf16 = p.q_type == SMLA_FLOAT_BF16 || p.kv_type == SMLA_FLOAT_BF16;
    for (const varlen_kernel &kernel : varlen_kernels) {
        if (p.q[0].dim + p.q[1].dim <= kernel.dim && p.value_dim <= kernel.value_dim &&
            !(is_half && has_bf16)) {
            return kernel.launch[is_half](p);
        }
    }
    return SMLA_NO_KERNEL;
}
