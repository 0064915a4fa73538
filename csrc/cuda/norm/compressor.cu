/* compressor.cu: DeepSeek V4's compressor: groups of states become rows of a compressed cache; the
 * states of the step are saved by the same launch, if asked for.
 *
 * Computes     x = sum(exp(score - largest) * kv) / sum(exp(score - largest)) per channel over the
 *              states of a group; row = bf16(RoPE(x * rsqrt(mean(x^2) + eps) * weight)), in the
 *              cache's format; row_encoder.cuh has the rules. partial_states.cu says what a
 *              state is.
 * Shapes       kv and score [T, c D] fp32 or bf16, ape [r, c D] fp32, state rows [2 c D] fp32, any
 *              strides; positions, slot mappings [T] int32 or int64; block_table [R, W], request
 *              ids [T] int32; rows as kv_format.h draws them. D is 512 or 128, c 2 for r 4, else 1.
 * Shared mem   three sums per slice and channel, and x: 26 KiB for D 512, 6.5 KiB for 128
 * Roles        A CTA takes up to r neighbouring tokens, because one of them closes a group.
 *              D / 4 threads are a slice, each with 4 channels; the slices divide the states of a
 *              group. Then each thread has channels, and warp 0 the finished row. A token of the
 *              step has its state in kv and score, because another CTA may not have saved it yet.
 *              The CTA that closes a group saves the states that it reads, if they are of that
 *              group and of this step. All others are saved by the CTA that has their token.
 *              Barriers: pooled | all threads | sums are in memory, and x may be written; joined |
 *              all threads | x is in memory, and the sums may be written.
 * Roofline     Memory. A launch that saves moves 16 c D bytes per token of fp32: T 8192, D 512:
 *              32 us for r 4, 16 us for r 128 at 4.3 TB/s. With r 4 half of each state is read once
 *              more, from L2. A group of 128 has one CTA, which must move 1 MiB.
 * Numerics     fp32, each operation rounded: the CPU's bytes; params_compressor.h has the order. A
 *              token with a bad slot, request or position is skipped, a bad page has no states. Of
 *              tokens with one slot any may win, and their row may hold parts of several.
 * Source       The compressor kernels of DeepSeek V4 in vLLM, for the operator. The split is ours.
 */
#include "cuda/cache/row_encoder.cuh"
#include "cuda/norm/partial_states.cuh"
#include "cuda/norm/rms_norm.cuh"
#include "cuda/norm/rope.cuh"
#include "cuda/norm/state_pool.cuh"

namespace {

enum {
    PASS_TOKENS = 32, /* tokens that are looked at at a time, one per lane */
    PASS_STATES = SMLA_POOL_SLICES * SMLA_WARP_LANES,
    SHORT_RATIO = 8, /* up to this ratio a CTA has half its threads: an SM holds more CTAs */
};

static_assert(PASS_STATES % SMLA_POOL_ROWS == 0, "a pass ends with whole pairs");

struct compress_args {
    smla_compress_params p;
    smla_divisor ratio;
    smla_divisor state_block_size;
    smla_divisor block_size;
    int64_t run_tokens; /* tokens that a CTA takes at a time */
    bool angles_are_aligned;
};

/* ---- Tokens -------------------------------------------------------------------------------- */

__device__ __forceinline__ int64_t
request_of(const smla_compress_params &p, int64_t token)
{
    return __ldg(p.req_id_per_token + token * p.req_id_stride);
}

/* The slot of a position that is not negative, by the block table; -1 if it has none. */
__device__ __forceinline__ int64_t
find_slot(const compress_args &args, int64_t req, int64_t position)
{
    const smla_page_table &table = args.p.table;
    const int64_t block = smla_divide(position, args.state_block_size);
    if (block >= table.num_blocks) {
        return -1;
    }
    const int64_t page =
        __ldg(table.block_table + req * table.stride_req + block * table.stride_block);
    const bool is_page = page >= 0 && page < args.p.states.rows.kv.num_pages;
    return is_page ? page * table.block_size + (position - block * table.block_size) : -1;
}

/* Whether a token closes a group that has a row in the cache. */
__device__ __forceinline__ bool
closes_group(const compress_args &args, int64_t token)
{
    const smla_compress_params &p = args.p;
    const int64_t position = position_of(p.states, token);
    const int64_t req = request_of(p, token);
    return position >= 0 && place_in_group(position, args.ratio) == args.ratio.divisor - 1 &&
           req >= 0 && req < p.num_reqs && valid_slot(p.states.rows, token) >= 0 &&
           valid_slot(p.insert, token) >= 0;
}

/* Whether a token of the step is that of a position of request `req`, and its state goes to `slot`.
 * `slot` is what the block table says for that position. */
__device__ __forceinline__ bool
is_token_of(const smla_compress_params &p, int64_t token, int64_t req, int64_t position,
            int64_t slot)
{
    return token >= 0 && position_of(p.states, token) == position && request_of(p, token) == req &&
           read_slot(p.states.rows, token) == slot;
}

/* Whether the CTA that closes the group of a token saves the state of that token: exactly if
 * find_state marks the state. The token has a slot, and its position is not negative. */
__device__ __forceinline__ bool
has_closer(const compress_args &args, int64_t token, int64_t position)
{
    const smla_compress_params &p = args.p;
    const int64_t left = args.ratio.divisor - 1 - place_in_group(position, args.ratio);
    const int64_t closer = token + left;
    if (closer >= p.insert.num_tokens || position_of(p.states, closer) != position + left ||
        !closes_group(args, closer)) {
        return false;
    }
    const int64_t req = request_of(p, closer);
    const int64_t slot = find_slot(args, req, position);
    return slot >= 0 && is_token_of(p, token, req, position, slot);
}

/* What a CTA has to do for up to 32 tokens: bit i is for token first + i. */
struct token_marks {
    uint32_t closing; /* close a group */
    uint32_t lonely;  /* save its state outside of a group */
};

template <bool SAVES>
__device__ __forceinline__ token_marks
mark_tokens(const compress_args &args, int64_t first, int num_tokens)
{
    const smla_compress_params &p = args.p;
    const int64_t token = first + lane_idx();
    const bool is_there = lane_idx() < num_tokens;
    const bool is_closing = is_there && closes_group(args, token);
    bool is_lonely = false;
    if (SAVES && is_there) {
        const int64_t position = position_of(p.states, token);
        is_lonely = position >= 0 && valid_slot(p.states.rows, token) >= 0 &&
                    !has_closer(args, token, position);
    }
    return {__ballot_sync(ALL_LANES, is_closing), __ballot_sync(ALL_LANES, is_lonely)};
}

/* Saves the marked tokens. The warps of the CTA divide their pieces. */
template <bool ALIGNED>
__device__ __forceinline__ void
save_lonely(const compress_args &args, int64_t first, uint32_t marks)
{
    const smla_partial_states_params &p = args.p.states;
    const int num_warps = (int)blockDim.x / SMLA_WARP_LANES;
    const int num_pieces = (int)p.width / PIECE;
    int piece = (int)threadIdx.x / SMLA_WARP_LANES; /* counted through all marked tokens */
    for (; marks != 0; marks &= marks - 1) {
        const int64_t token = first + __ffs((int)marks) - 1;
        for (; piece < num_pieces; piece += num_warps) {
            const int64_t place = place_in_group(position_of(p, token), args.ratio);
            float *const row =
                row_of_slot(p.rows.kv, read_slot(p.rows, token), args.state_block_size);
            save_channels<ALIGNED>(p, token, place, row, piece * PIECE + lane_idx() * CHANNELS);
        }
        piece -= num_pieces;
    }
}

/* ---- Pool ---------------------------------------------------------------------------------- */

/* A group that is being closed. */
struct group {
    int64_t token; /* its last one */
    int64_t position;
    int64_t req;
    int64_t num_states; /* c r, the states of the group before included */
};

/* Where state `j` of a group is: the address of its row, with bit 0 set if a token of this step has
 * it, which is then read from kv and score; 0 if it takes no part. */
template <bool SAVES>
__device__ __forceinline__ unsigned long long
find_state(const compress_args &args, const group &of, int64_t j)
{
    const int64_t back = of.num_states - 1 - j;
    const int64_t position = of.position - back;
    const int64_t slot =
        j < of.num_states && position >= 0 ? find_slot(args, of.req, position) : -1;
    if (slot < 0) {
        return 0;
    }
    const bool is_new = SAVES && is_token_of(args.p, of.token - back, of.req, position, slot);
    const float *const row = row_of_slot(args.p.states.rows.kv, slot, args.state_block_size);
    return (unsigned long long)row | (is_new ? 1 : 0);
}

/* Four channels of a state. */
struct state_part {
    float values[CHANNELS];
    float scores[CHANNELS]; /* a token of this step has them without ape */
    float ape[CHANNELS];
};

/* Loads four channels of state `j`, which `code` of find_state says where to find. */
template <bool SAVES, bool ALIGNED>
__device__ __forceinline__ void
load_state(const smla_partial_states_params &p, const group &of, int64_t j, unsigned long long code,
           int64_t channel, state_part &part)
{
    if (SAVES && (code & 1) != 0) {
        const int64_t token = of.token - (of.num_states - 1 - j);
        const bool are_bf16 = p.rows.input_type == SMLA_FLOAT_BF16;
        load_given<ALIGNED>(p.rows.kv_c, token * p.rows.kv_c_stride_token + channel, are_bf16,
                            part.values);
        load_given<ALIGNED>(p.rows.k_pe, token * p.rows.k_pe_stride_token + channel, are_bf16,
                            part.scores);
        load_ape<ALIGNED>(p, j < p.ratio ? j : j - p.ratio, channel, part.ape);
        return;
    }
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        part.values[i] = 0.0f;
        part.scores[i] = -INFINITY;
        part.ape[i] = 0.0f;
    }
    if (code != 0) {
        const float *const row = (const float *)code + channel;
        load_saved<ALIGNED>(row, part.values);
        load_saved<ALIGNED>(row + p.width, part.scores);
    }
}

/* Pools this thread's channels over the states of its slice, and saves those of this step. */
template <int DIM, bool SAVES, bool ALIGNED>
__device__ __forceinline__ void
pool_slice(const compress_args &args, const group &of, int slice, int64_t channel,
           channel_sums sums[CHANNELS])
{
    const smla_partial_states_params &p = args.p.states;
    const int64_t num_before = of.num_states - p.ratio; /* states of the group before */
    for (int64_t first = 0; first < of.num_states; first += PASS_STATES) {
        const unsigned long long mine =
            find_state<SAVES>(args, of, first + slice + lane_idx() * SMLA_POOL_SLICES);
        for (int i = 0; i < SMLA_WARP_LANES; i += SLICE_STATES) {
            if (first + i * SMLA_POOL_SLICES >= of.num_states) {
                break;
            }
            state_part parts[SLICE_STATES];
            unsigned long long codes[SLICE_STATES];
            const int64_t j = first + slice + i * SMLA_POOL_SLICES;
#pragma unroll
            for (int k = 0; k < SLICE_STATES; k++) {
                const int64_t state = j + k * SMLA_POOL_SLICES;
                const int64_t half = state < num_before ? 0 : p.width - DIM;
                codes[k] = __shfl_sync(ALL_LANES, mine, i + k);
                load_state<SAVES, ALIGNED>(p, of, state, codes[k], half + channel, parts[k]);
            }
            float scores[SLICE_STATES][CHANNELS];
#pragma unroll
            for (int k = 0; k < SLICE_STATES; k++) {
                const int64_t state = j + k * SMLA_POOL_SLICES;
#pragma unroll
                for (int n = 0; n < CHANNELS; n++) {
                    scores[k][n] = __fadd_rn(parts[k].scores[n], parts[k].ape[n]);
                }
                if (SAVES && (codes[k] & 1) != 0 && state >= num_before) {
                    float *const row = (float *)(codes[k] & ~1ull);
                    store_state<ALIGNED>(row + (p.width - DIM) + channel, p.width, parts[k].values,
                                         scores[k]);
                    if (num_before != 0) { /* the half that the next group pools */
                        save_channels<ALIGNED>(p, of.token - (of.num_states - 1 - state),
                                               state - num_before, row, channel);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                const float pair[SLICE_STATES] = {scores[0][n], scores[1][n]};
                const float values[SLICE_STATES] = {parts[0].values[n], parts[1].values[n]};
                add_states(sums[n], pair, values);
            }
        }
    }
}

/* ---- Rows ---------------------------------------------------------------------------------- */

/* The sum of a row's squares, for every lane. A lane of a row of 128 has half of a partial sum of
 * eight, and the other half of the 256 partial sums is 0. */
template <int COUNT, int STEPS>
__device__ __forceinline__ float
sum_squares(const float x[STEPS][COUNT])
{
    if constexpr (COUNT == NORM_VECTOR) {
        float sums[NORM_VECTOR] = {};
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            norm_add_squares(sums, x[s]);
        }
        return norm_fold_sums(sums);
    } else {
        float squares[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            squares[i] = __fmul_rn(x[0][i], x[0][i]);
        }
        float sum = __fadd_rn(__fadd_rn(squares[0], squares[1]), __fadd_rn(squares[2], squares[3]));
        sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
#pragma unroll
        for (int lanes = SMLA_WARP_LANES / 2; lanes > 1; lanes /= 2) {
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, lanes));
        }
        return sum;
    }
}

/* Turns the values of a lane, where they are among the last 64. */
template <int COUNT>
__device__ __forceinline__ void
turn_lane(const compress_args &args, int64_t position, float x[COUNT])
{
    constexpr int FIRST_LANE = SMLA_WARP_LANES - SMLA_QK_ROPE_HEAD_DIM / COUNT;
    const int pair = (lane_idx() - FIRST_LANE) * (COUNT / 2);
    if (pair < 0) {
        return;
    }
    const int first = pair / ROPE_PAIRS * ROPE_PAIRS;
    rope_angles angles = rope_load_at(args.p.rope, position, first, args.angles_are_aligned);
    float turned[2 * ROPE_PAIRS] = {};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        turned[i] = x[i];
    }
    if (pair != first) { /* the second half of the angles */
        angles.cos[0] = angles.cos[2];
        angles.cos[1] = angles.cos[3];
        angles.sin[0] = angles.sin[2];
        angles.sin[1] = angles.sin[3];
    }
    rope_turn<false>(turned, angles);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = turned[i];
    }
}

__device__ __forceinline__ float
load_weight(const smla_compress_params &p, int i)
{
    return p.weight_type == SMLA_FLOAT_BF16
               ? smla_bf16_to_float(__ldg((const uint16_t *)p.norm_weight + i))
               : __ldg((const float *)p.norm_weight + i);
}

/* Normalises, turns and stores the pooled values of a group. A warp runs it. */
template <int ROW, bool ALIGNED>
__device__ __forceinline__ void
finish_row(const compress_args &args, const group &of, const float *pooled)
{
    using layout = key_part<ROW>;
    constexpr int COUNT = layout::COUNT;
    const smla_compress_params &p = args.p;
    const int at = lane_idx() * COUNT;
    float x[layout::STEPS][COUNT];
#pragma unroll
    for (int s = 0; s < layout::STEPS; s++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[s][i] = pooled[s * layout::STEP + at + i];
        }
    }
    const float factor = norm_factor(sum_squares<COUNT, layout::STEPS>(x), layout::VALUES, p.eps);
#pragma unroll
    for (int s = 0; s < layout::STEPS; s++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[s][i] =
                __fmul_rn(__fmul_rn(x[s][i], factor), load_weight(p, s * layout::STEP + at + i));
        }
    }
    turn_lane<COUNT>(args, of.position + 1 - p.states.ratio, x[layout::STEPS - 1]);
    layout key;
#pragma unroll
    for (int s = 0; s < layout::STEPS; s++) {
#pragma unroll
        for (int k = 0; k < COUNT / 2; k++) {
            key.pairs[s][k] = smla_floats_to_bf16x2(x[s][2 * k], x[s][2 * k + 1]);
        }
    }
    const int64_t slot = read_slot(p.insert, of.token);
    const int64_t page = smla_divide(slot, args.block_size);
    const int64_t offset = slot - page * p.insert.kv.block_size;
    const smla_kv_token to = smla_kv_token_at(&p.insert.kv, page, offset);
    uint8_t *const row = to.row;
    if constexpr (smla_row<ROW>::INFO.nope_type == SMLA_NOPE_BF16) {
#pragma unroll
        for (int s = 0; s < layout::STEPS; s++) {
            smla_store_words<16, ALIGNED>((uint16_t *)row + s * layout::STEP + at, key.pairs[s]);
        }
    } else {
        const float inverse = 1.0f / smla_load_given_scale(p.insert.kv_scale);
        encode_key<ROW>(key, inverse, row, to.scales);
    }
}

template <int ROW, bool SAVES, bool ALIGNED>
__device__ __forceinline__ void
close_group(const compress_args &args, int64_t token,
            pool_memory<smla_row<ROW>::INFO.head_dim> &memory)
{
    constexpr int DIM = smla_row<ROW>::INFO.head_dim;
    const smla_compress_params &p = args.p;
    const group of = {token, position_of(p.states, token), request_of(p, token),
                      p.states.width / DIM * p.states.ratio};
    const int channel = (int)threadIdx.x % (DIM / CHANNELS) * CHANNELS;
    int slice = (int)threadIdx.x / (DIM / CHANNELS);
    for (; slice < SMLA_POOL_SLICES; slice += (int)blockDim.x / (DIM / CHANNELS)) {
        channel_sums sums[CHANNELS];
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            sums[i] = {-INFINITY, 0.0f, 0.0f};
        }
        pool_slice<DIM, SAVES, ALIGNED>(args, of, slice, channel, sums);
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            memory.largest[slice][channel + i] = sums[i].largest;
            memory.weights[slice][channel + i] = sums[i].weights;
            memory.totals[slice][channel + i] = sums[i].totals;
        }
    }
    /* Pooled: the sums of all slices are in memory, and warp 0 is done with the x of the group that
     * this CTA closed before. */
    __syncthreads();
    for (int i = (int)threadIdx.x; i < DIM; i += (int)blockDim.x) {
        memory.x[i] = join_slices<DIM>(memory, i);
    }
    /* Joined: x is in memory, and no thread reads the sums any more. */
    __syncthreads();
    if (threadIdx.x < SMLA_WARP_LANES) {
        finish_row<ROW, ALIGNED>(args, of, memory.x);
    }
}

template <int ROW, bool SAVES, bool ALIGNED>
__global__ void
__launch_bounds__(smla_row<ROW>::INFO.head_dim, 1)
    compress_kernel(const __grid_constant__ compress_args args)
{
    __shared__ pool_memory<smla_row<ROW>::INFO.head_dim> memory;
    ptx_wait_for_grids();
    const int64_t num_tokens = args.p.insert.num_tokens;
    const int64_t step = (int64_t)gridDim.x * args.run_tokens;
    for (int64_t run = blockIdx.x * args.run_tokens; run < num_tokens; run += step) {
        const int64_t left = num_tokens - run;
        const int64_t end = run + (left < args.run_tokens ? left : args.run_tokens);
        for (int64_t first = run; first < end; first += PASS_TOKENS) {
            const int64_t rest = end - first;
            const token_marks marks =
                mark_tokens<SAVES>(args, first, rest < PASS_TOKENS ? (int)rest : PASS_TOKENS);
            if (SAVES) {
                save_lonely<ALIGNED>(args, first, marks.lonely);
            }
            for (uint32_t closing = marks.closing; closing != 0; closing &= closing - 1) {
                close_group<ROW, SAVES, ALIGNED>(args, first + __ffs((int)closing) - 1, memory);
            }
        }
    }
}

/* ---- Table --------------------------------------------------------------------------------- */

struct compress_row {
    smla_kv_row_number format;
    void (*kernels[2][2])(compress_args); /* [saves][is aligned] */
};

template <int ROW>
constexpr compress_row
serve(smla_kv_row_number format = (smla_kv_row_number)ROW)
{
    return {format,
            {{compress_kernel<ROW, false, false>, compress_kernel<ROW, false, true>},
             {compress_kernel<ROW, true, false>, compress_kernel<ROW, true, true>}}};
}

const compress_row compress_rows[] = {
    serve<SMLA_ROW_FP8_V4>(),    serve<SMLA_ROW_BFLOAT16_512>(),
    serve<SMLA_ROW_FP8_E4M3>(),  serve<SMLA_ROW_FP8_V41>(),
    serve<SMLA_ROW_FP4_V41>(),   serve<SMLA_ROW_FP8_V41>(SMLA_ROW_FP8_V41_SPLIT),
    serve<SMLA_ROW_FP8_NOPE>(),  serve<SMLA_ROW_FP4_V41>(SMLA_ROW_FP4_V41_SPLIT),
    serve<SMLA_ROW_FP8_INDEX>(), serve<SMLA_ROW_MXFP4_INDEX>(),
};

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

/* A CTA takes at most a group of tokens, and fewer where that leaves multiprocessors idle. */
cudaError_t
smla_cuda_launch_compress_norm_rope_store(const smla_compress_params *params,
                                          const smla_cuda_device *device)
{
    const int64_t num_tokens = params->insert.num_tokens;
    const int64_t share = smla_count_parts(num_tokens, device->num_sms);
    const int64_t ratio = params->states.ratio;
    compress_args args = {};
    args.p = *params;
    args.ratio = smla_make_divisor(ratio);
    args.state_block_size = smla_make_divisor(params->table.block_size);
    args.block_size = smla_make_divisor(params->insert.kv.block_size);
    args.run_tokens = share < ratio ? share : ratio;
    args.angles_are_aligned = rope_is_aligned(params->rope);
    const bool is_bf16 = params->insert.kv.format->nope_type == SMLA_NOPE_BF16;
    const bool aligned =
        has_aligned_states(params->states) && (!is_bf16 || has_aligned_rows(params->insert.kv));
    const int num_threads = (int)(ratio <= SHORT_RATIO ? params->dim / 2 : params->dim);
    for (const compress_row &row : compress_rows) {
        if (row.format == params->insert.kv.format->number) {
            return smla_launch(row.kernels[params->states.ape != nullptr][aligned], args,
                               smla_count_parts(num_tokens, args.run_tokens), num_threads, 0,
                               params->insert.stream);
        }
    }
    return cudaErrorInvalidDeviceFunction;
}
