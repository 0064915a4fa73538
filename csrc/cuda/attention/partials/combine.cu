/* combine.cu: the partial rows of attention's splits -> out, lse and max_logits.
 *
 * Computes     out = sum_s f_s out_s / sum_s f_s sum_s * sink factor, f_s = 2^(ref_s - ref)
 * Shapes       partial rows (kernels.h); out [T][H][512] bf16, lse and max_logits [T][H] fp32, any
 *              strides
 * Shared mem   none is used. A launch asks for some to keep its CTAs from crowding on the few SMs
 *              that the grid in front leaves first, or has left free, while other SMs are idle. It
 *              asks for none where its CTAs wait beside those of attention_small_sm90.cu.
 * Roles        One CTA per token and head, of 64 threads for up to 8 splits, 128 for up to 16, 256
 *              for more. A thread asks for 64 values at once: its own values of up to 32 splits.
 *              Every warp computes the factors of the splits by itself, from states that its lanes
 *              read. There are no barriers.
 * Roofline     Per row 2056 bytes in per split, or half of that (kernels.h), and 1024 out. Small
 *              batches wait for one read only, because values are asked for before the states are
 *              known. Where an SM has several rows, instructions bind.
 * Numerics     f_s is a power of two, so rescaling loses nothing. Values are summed in the order of
 *              the splits, sums along a fixed tree, so every run gives the same bits. A split
 *              without keys has f_s = 0; its out was never written and is not used. The value of a
 *              row with one key is right to 2^-22 before it is rounded.
 * Source       split-KV decoding (Flash-Decoding); the exact factors are ours.
 */
#include "cuda/attention/partials/fold.cuh"

enum {
    LOAD_WAVE_VALUES = 64, /* values that a thread reads at once */
    MAX_SHARE = 8,         /* CTAs per SM; where there are more, they need not be spread */
};

/* The part of attention's parameters that this kernel needs. Blank lines separate lines of 64
 * bytes; the first begins 16 bytes in front of the struct. No line is in a cache when a launch
 * begins, and one takes 280 cycles to come. find_row needs a field of the first line and one of the
 * second, so both lines are there before the grids in front are done. */
typedef struct combine_launch {
    smla_partial_rows partials;
    int64_t num_rows;
    int32_t num_splits;
    bool out_is_aligned; /* every row is aligned to 16 bytes */
    bool empty_lse_is_plus_inf;
    bool has_key_unit; /* smla_has_key_unit */
    uint16_t *out;
    float *lse;

    smla_divisor num_heads;
    int64_t out_stride_token;
    int64_t out_stride_head;
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    float *max_logits;
    smla_sinks sinks; /* their stride is in the next line */
    int64_t max_logits_stride_token;
    int64_t max_logits_stride_head;
    const int32_t *req_ids; /* DENSE: tokens with a negative one stay as they are */
    given_key_scales key_scales;
} combine_launch;

static_assert(offsetof(combine_launch, num_heads) == 48 && offsetof(combine_launch, sinks) == 104,
              "the lines are as they seem");

/* The shape of a kernel for up to SPLITS splits. Lane s % LOAD_WAVE handles split s, as that lane's
 * split number s / LOAD_WAVE. */
template <bool HALF_, int SPLITS> struct combination {
    static constexpr bool HALF = HALF_;
    static constexpr int LOAD_WAVE = SPLITS < SMLA_WARP_LANES ? SPLITS : SMLA_WARP_LANES;
    static constexpr int LANE_SPLITS = SPLITS / LOAD_WAVE;
    static constexpr int VALUES = LOAD_WAVE_VALUES / LOAD_WAVE; /* values per thread */
    static constexpr int THREADS = SMLA_KV_LORA_RANK / VALUES;
    static constexpr int WORDS = HALF ? VALUES / 2 : VALUES;
    /* for __launch_bounds__, which sets the registers of a thread */
    static constexpr int CTAS_PER_SM =
        HALF && LANE_SPLITS == 1 ? SMLA_COMBINE_CTAS(SMLA_SM_REGISTERS, SPLITS) : 1;
};

template <typename Shape> using folded_row = whole_row<Shape::LANE_SPLITS>;

template <typename Shape>
static __device__ __forceinline__ folded_row<Shape>
fold_splits(const row_parts &parts, int lane)
{
    part_state states[Shape::LANE_SPLITS];
#pragma unroll
    for (int i = 0; i < Shape::LANE_SPLITS; i++) {
        states[i] = load_state<Shape::HALF>(parts, Shape::LOAD_WAVE * i + lane % Shape::LOAD_WAVE);
    }
    return fold_states<Shape::HALF, Shape::LOAD_WAVE>(states);
}

/* A thread's values of a split, aligned for reads by vectors. */
template <int WORDS> struct alignas(WORDS < 4 ? 4 * WORDS : 16) split_values {
    uint32_t words[WORDS];
};

/* A thread's values of LOAD_WAVE splits. A thread loads them before it knows the states, so the
 * values of a split without keys may be anything. */
template <typename Shape> struct load_wave {
    split_values<Shape::WORDS> splits[Shape::LOAD_WAVE];
};

template <typename Shape>
static __device__ __forceinline__ void
start_load_wave(const row_parts &parts, int first, load_wave<Shape> *values)
{
    const int64_t stride = parts.stride * SMLA_KV_LORA_RANK;
    const float *from = parts.values + first * stride + Shape::WORDS * threadIdx.x;
#pragma unroll
    for (int i = 0; i < Shape::LOAD_WAVE; i++) {
        if (first + i < parts.count) {
            values->splits[i] = *(const split_values<Shape::WORDS> *)from;
        }
        from += stride;
    }
}

/* total += factor * values, for the splits of a load wave. */
template <typename Shape>
static __device__ __forceinline__ void
fold_load_wave(const load_wave<Shape> &values, float factors, float total[Shape::VALUES])
{
#pragma unroll
    for (int i = 0; i < Shape::LOAD_WAVE; i++) {
        const float factor = __shfl_sync(0xFFFFFFFFu, factors, i);
#pragma unroll
        for (int j = 0; j < Shape::VALUES; j++) {
            ptx_fma_unless_zero(&total[j], unpack_value<Shape::HALF>(values.splits[i].words, j),
                                factor);
        }
    }
}

/* HALF: fold_load_wave for the fp32 partial rows that a fallback has left. */
template <typename Shape>
static __device__ __forceinline__ void
fold_floats(const row_parts &parts, const folded_row<Shape> &row, float total[Shape::VALUES])
{
#pragma unroll
    for (int i = 0; i < Shape::LANE_SPLITS; i++) {
#pragma unroll 1
        for (int lane = 0; lane < Shape::LOAD_WAVE; lane++) {
            const float factor = __shfl_sync(0xFFFFFFFFu, row.float_factor[i], lane);
            const float *const from =
                parts.values + (Shape::LOAD_WAVE * i + lane) * parts.stride * SMLA_KV_LORA_RANK +
                Shape::VALUES * threadIdx.x;
#pragma unroll
            for (int j = 0; j < Shape::VALUES && factor != 0.0f; j++) {
                total[j] += from[j] * factor;
            }
        }
    }
}

/* A row's token and head, and where its partial rows are. */
typedef struct row_index {
    int64_t token;
    int64_t head;
    row_parts parts;
} row_index;

static __device__ __forceinline__ row_index
find_row(const combine_launch &launch, int64_t row_idx)
{
    const int64_t num_heads = launch.num_heads.divisor;
    row_index index;
    index.token = smla_divide(row_idx, launch.num_heads);
    index.head = row_idx - index.token * num_heads;
    const int64_t first = index.token * launch.num_splits * num_heads + index.head;
    index.parts = find_parts(launch.partials, first, num_heads, launch.num_splits);
    return index;
}

template <typename Shape>
static __device__ __forceinline__ void
combine_row(const combine_launch &launch, const row_index &index)
{
    load_wave<Shape> values;
    float total[Shape::VALUES];
#pragma unroll
    for (int i = 0; i < Shape::VALUES; i++) {
        total[i] = -0.0f; /* -0 + x is x, so a single key's -0 keeps its sign */
    }
    const float sink = softmax_sink(launch.sinks, index.head);
    start_load_wave<Shape>(index.parts, 0, &values);
    const folded_row<Shape> row =
        fold_splits<Shape>(index.parts, (int)threadIdx.x % SMLA_WARP_LANES);
    float factor = softmax_finish(launch, launch.sinks, index.token, index.head, row.max_log2,
                                  row.sum, sink, threadIdx.x == 0);
    factor *= find_key_unit(launch);
    factor = row.sum == 0.0f ? -0.0f : factor; /* makes the results of a row without keys +0 */
#pragma unroll
    for (int i = 0; i < Shape::LANE_SPLITS; i++) {
        if (i > 0) {
            start_load_wave<Shape>(index.parts, i * Shape::LOAD_WAVE, &values);
        }
        fold_load_wave<Shape>(values, row.factor[i], total);
    }
    if (Shape::HALF && has_floats(row)) {
        fold_floats<Shape>(index.parts, row, total);
    }
    uint32_t words[Shape::VALUES / 2];
#pragma unroll
    for (int i = 0; i < Shape::VALUES / 2; i++) {
        words[i] = smla_cvt_bf16x2(total[2 * i] * factor, total[2 * i + 1] * factor);
    }
    uint16_t *const to = launch.out + index.token * launch.out_stride_token +
                         index.head * launch.out_stride_head + Shape::VALUES * threadIdx.x;
    if (launch.out_is_aligned) {
        smla_store_words<2 * Shape::VALUES, true>(to, words);
    } else {
        smla_store_words<2 * Shape::VALUES, false>(to, words);
    }
}

template <typename Shape, bool DENSE>
static __global__ void
__launch_bounds__(Shape::THREADS, Shape::CTAS_PER_SM)
    combine(const __grid_constant__ combine_launch launch)
{
    row_index index = find_row(launch, blockIdx.x);
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    for (int64_t row_idx = blockIdx.x;;) {
        if (!DENSE || launch.req_ids[index.token] >= 0) {
            combine_row<Shape>(launch, index);
        }
        row_idx += gridDim.x;
        if (row_idx >= launch.num_rows) {
            break;
        }
        index = find_row(launch, row_idx);
    }
}

/* The shared memory to ask for where CTAs start while those of the grid in front leave. With so
 * much an SM takes no more than its share of the CTAs, or two if the share is less. */
static int
find_shared_bytes(const smla_attention_params *params, const smla_attention_kernel *kernel,
                  const smla_cuda_device *device)
{
    const int64_t num_rows = params->queries.num_tokens * params->queries.num_heads;
    const int64_t items = params->queries.num_tokens * params->results.num_splits *
                          smla_count_parts(params->queries.num_heads, kernel->heads_per_cta);
    const bool is_beside =
        kernel->leaves_room &&
        smla_fits_beside(items, num_rows, params->results.num_splits, device->num_sms);
    if (!can_start_early(device->compute_capability) || is_beside) {
        return 0;
    }
    const int64_t share = smla_count_parts(num_rows, device->num_sms);
    const int64_t num_ctas = share < 2 ? 2 : share;
    const int64_t bytes = device->max_shared_bytes / num_ctas - SMLA_RESERVED_SHARED_BYTES;
    return num_ctas > MAX_SHARE ? 0 : (int)(bytes / 1024 * 1024);
}

template <bool HALF, bool DENSE, int SPLITS>
static cudaError_t
launch_combine(const combine_launch &launch, int shared_bytes, smla_stream stream,
               smla_cuda_deferred *deferred)
{
    typedef combination<HALF, SPLITS> Shape;
    static_assert(!HALF || Shape::THREADS == SMLA_COMBINE_THREADS(SPLITS),
                  "what others count with");
    if (shared_bytes > 0) {
        static uint64_t allowed;
        const smla_cuda_device *const device = smla_cuda_find_device(stream.device_id);
        const cudaError_t code =
            allow_shared_bytes((const void *)combine<Shape, DENSE>, device->max_shared_bytes / 2,
                               stream.device_id, &allowed);
        if (code != cudaSuccess) {
            return code;
        }
    }
    return smla_launch(combine<Shape, DENSE>, launch, launch.num_rows, Shape::THREADS, shared_bytes,
                       stream, false, deferred);
}

template <bool HALF, bool DENSE>
static cudaError_t
launch_combine(const combine_launch &launch, int shared_bytes, smla_stream stream,
               smla_cuda_deferred *deferred)
{
    const int num_splits = launch.num_splits;
    return (num_splits <= 8    ? launch_combine<HALF, DENSE, 8>
            : num_splits <= 16 ? launch_combine<HALF, DENSE, 16>
            : num_splits <= 32 ? launch_combine<HALF, DENSE, 32>
                               : launch_combine<HALF, DENSE, SMLA_MAX_SPLITS>)(launch, shared_bytes,
                                                                               stream, deferred);
}

cudaError_t
smla_cuda_launch_combine(const smla_attention_params *params, const smla_attention_kernel *kernel,
                         smla_cuda_deferred *deferred)
{
    const smla_cuda_device *const device = smla_cuda_find_device(params->call.stream.device_id);
    const int shared_bytes = find_shared_bytes(params, kernel, device);
    const smla_results &results = params->results;
    combine_launch launch = {};
    launch.partials = smla_partials_of(params, 0);
    launch.num_rows = params->queries.num_tokens * params->queries.num_heads;
    launch.num_splits = results.num_splits;
    launch.out_is_aligned =
        smla_are_rows_aligned(results.out, results.out_stride_token, results.out_stride_head, 16);
    launch.num_heads = smla_make_divisor(params->queries.num_heads);
    launch.empty_lse_is_plus_inf = results.empty_lse_is_plus_inf;
    launch.out = (uint16_t *)results.out;
    launch.out_stride_token = results.out_stride_token;
    launch.out_stride_head = results.out_stride_head;
    launch.lse = results.lse;
    launch.lse_stride_token = results.lse_stride_token;
    launch.lse_stride_head = results.lse_stride_head;
    launch.sinks = params->logits.sinks;
    launch.max_logits = results.max_logits;
    launch.max_logits_stride_token = results.max_logits_stride_token;
    launch.max_logits_stride_head = results.max_logits_stride_head;
    launch.has_key_unit = smla_has_key_unit(&params->keys);
    launch.key_scales = key_scales_of(&params->logits);
    /* Attention that reads lengths itself tells which tokens have no request, if any may have none
     * and have to stay as they are. */
    const bool may_stay = params->visible.reqs.query_starts != NULL && !results.fills_padding;
    const bool is_dense = smla_is_table(&params->keys) && (!params->plan.reads_lengths || may_stay);
    launch.req_ids = is_dense ? params->keys.lists[0].map.req_id_per_token : NULL;
    return (kernel->leaves_halves
                ? is_dense ? launch_combine<true, true> : launch_combine<true, false>
            : is_dense ? launch_combine<false, true>
                       : launch_combine<false, false>)(launch, shared_bytes, params->call.stream,
                                                       deferred);
}
