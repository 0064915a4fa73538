/* compressor.cuh: DeepSeek V4's compressor: groups of states become rows of a compressed cache; the
 * states of the step are saved by the same launch, if asked for.
 *
 * Computes     x = sum(exp(score - largest) * kv) / sum(exp(score - largest)) per channel over the
 *              states of a group; row = bf16(RoPE(x * rsqrt(mean(x^2) + eps) * weight)), in the
 *              cache's format; row_encoder.cuh has the rules. partial_states.cu says what a
 *              state is.
 * Shapes       kv and score [T, c D] fp32 or bf16, ape [r, c D] fp32, state rows [2 c D] fp32, any
 *              strides; positions, slot mappings [T] int32 or int64; block_table [R, W], request
 *              ids [T] int32; rows as kv_format.h draws them. D is 512 or 128, c 2 for r 4, else 1.
 * Shared mem   three sums per slice and channel of the CTA, and x: 26 KiB for 512 channels, 6.5 for
 *              128; the marks of a pass, 128 bytes
 * Roles        A CTA takes up to r neighbouring
 *              tokens, because one of them closes a group. Each warp looks at 32 of them. A thread
 *              has 4 channels of a slice; the slices divide the states of a group. Groups of up to
 *              8 states are short: all their loads are under way before the first is used, for one
 *              slice at a time. Longer groups have LONG_PAIRS pairs of states per thread under
 *              way. On Hopper kv and score of the tokens come into L2 while positions, slots and
 *              pages are read, which takes three loads that wait for each other. Then each thread
 *              has channels, and warp 0 the finished row. A token of the step has
 *              its state in kv and score, because another CTA may not have saved it yet. The CTA
 *              that closes a group saves the states that it reads, if they are of that group and
 *              of this step. All others are saved by the CTA that has their token.
 *              Barriers: marked | all threads | marks are in memory; read | all threads | marks may
 *              be written; pooled | all threads | sums are in memory, and x may be written; joined
 *              | all threads | x is in memory, and sums may be written.
 * Roofline     Memory. A launch that saves moves 16 c D bytes per token of fp32: T 8192, D 512:
 *              32 us for r 4, 16 us for r 128 at 4.3 TB/s, which takes 32 KiB on their way to each
 *              SM. With r 4 half of each state is read once more, from L2; an SM has 5 groups of 32
 *              KiB. A group of 128 reads 512 KiB: 64 groups leave half of the SMs idle, and
 *              clusters of 4 CTAs with a part of the channels each took longer (56 us for 42).
 *              Two states take three exps per channel, of 21 instructions each.
 * Numerics     fp32, each operation rounded: the CPU's bytes; params_compressor.h has the order. A
 *              token with a bad slot, request or position is skipped, a bad page has no states. Of
 *              tokens with one slot any may win, and their row may hold parts of several.
 * Source       The compressor kernels of DeepSeek V4 in vLLM, for the operator. The split is ours.
 */
#pragma once

#include "cuda/norm/compressor_row.cuh"
#include "cuda/norm/state_pool.cuh"
#include "cuda/ptx/prefetch.cuh"

namespace {

enum {
    SHORT_STATES = SMLA_POOL_ROWS, /* states of the longest group that is short */
    SHORT_SLICES = 1,              /* slices of a short group that a CTA pools at a time */
    SHORT_SM_THREADS = 640,        /* threads of short groups per SM: 96 registers each */
    LONG_PAIRS = 4,                /* pairs of states that a thread of a long group loads ahead */
    PASS_STATES = SMLA_POOL_SLICES * SMLA_WARP_LANES,
    MAX_WARPS = 16,
    EARLY_TOKENS = 64, /* tokens of a pass that come into L2 before anything is known of them */
};

static_assert(SHORT_STATES == SMLA_POOL_SLICES * SLICE_STATES, "a slice has one pair of a group");
static_assert(SMLA_OVERLAP_RATIO == SMLA_POOL_SLICES, "of a pair the second state is the group's");

/* ---- Tokens -------------------------------------------------------------------------------- */

__device__ __forceinline__ int64_t
request_of(const smla_compress_params &p, int64_t token)
{
    return __ldg(p.req_id_per_token + token * p.req_id_stride);
}

/* What the arrays have for a token. */
struct token_facts {
    int64_t position;
    int64_t req;
    int64_t state_slot;
    int64_t row_slot;
};

/* The loads do not wait for each other. */
__device__ __forceinline__ token_facts
read_token(const smla_compress_params &p, int64_t token)
{
    return {position_of(p.states, token), request_of(p, token), read_slot(p.states.rows, token),
            read_slot(p.insert, token)};
}

__device__ __forceinline__ bool
is_slot(const smla_kv_view &kv, int64_t slot)
{
    return slot >= 0 && slot < kv.num_pages * kv.block_size;
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
closes_group(const compress_args &args, const token_facts &token)
{
    const smla_compress_params &p = args.p;
    return token.position >= 0 &&
           place_in_group(token.position, args.ratio) == args.ratio.divisor - 1 && token.req >= 0 &&
           token.req < p.num_reqs && is_slot(p.states.rows.kv, token.state_slot) &&
           is_slot(p.insert.kv, token.row_slot);
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
has_closer(const compress_args &args, int64_t token, const token_facts &facts)
{
    const smla_compress_params &p = args.p;
    const int64_t left = args.ratio.divisor - 1 - place_in_group(facts.position, args.ratio);
    if (token + left >= p.insert.num_tokens) {
        return false;
    }
    const token_facts closer = read_token(p, token + left);
    return closer.position == facts.position + left && closes_group(args, closer) &&
           closer.req == facts.req &&
           find_slot(args, closer.req, facts.position) == facts.state_slot;
}

/* What there is to do for up to 32 tokens: bit i is for token first + i. */
struct token_marks {
    uint32_t closing; /* close a group */
    uint32_t lonely;  /* save its state outside of a group */
};

template <bool SAVES>
__device__ __forceinline__ token_marks
mark_tokens(const compress_args &args, int64_t first, int num_tokens)
{
    const int64_t token = first + lane_idx();
    bool is_closing = false;
    bool is_lonely = false;
    if (lane_idx() < num_tokens) {
        const token_facts facts = read_token(args.p, token);
        is_closing = closes_group(args, facts);
        is_lonely = SAVES && facts.position >= 0 &&
                    is_slot(args.p.states.rows.kv, facts.state_slot) &&
                    !has_closer(args, token, facts);
    }
    return {__ballot_sync(ALL_LANES, is_closing), __ballot_sync(ALL_LANES, is_lonely)};
}

/* Brings kv and score of neighbouring tokens into L2. The warps of the CTA divide the rows,
 * because the lanes of a warp start one after another. A row that begins
 * between two units begins earlier, in its first unit, and lacks the end of its last. */
__device__ __forceinline__ void
prefetch_tokens(const smla_partial_states_params &p, int64_t first, int num_tokens)
{
    enum { UNIT = 16 };
    const int num_warps = (int)blockDim.x / SMLA_WARP_LANES;
    const int place = lane_idx() * num_warps + (int)threadIdx.x / SMLA_WARP_LANES;
    const int64_t size = p.rows.input_type == SMLA_FLOAT_BF16 ? 2 : 4;
    for (int i = place; i < 2 * num_tokens; i += (int)blockDim.x) {
        const int64_t token = first + i / 2;
        const uintptr_t from =
            i % 2 == 0 ? (uintptr_t)p.rows.kv_c + token * p.rows.kv_c_stride_token * size
                       : (uintptr_t)p.rows.k_pe + token * p.rows.k_pe_stride_token * size;
        ptx_bulk_prefetch_l2((const void *)(from / UNIT * UNIT), (uint32_t)(p.width * size));
    }
}

/* Saves the CTA's channels of the marked tokens. The warps divide the pieces. */
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

/* c r, the states of the group before included. */
__device__ __forceinline__ int64_t
count_states(const smla_compress_params &p)
{
    return p.states.width == p.dim ? p.states.ratio : 2 * p.states.ratio;
}

/* Where state `j` of a group is: the address of its row, with bit 0 set if a token of this step has
 * it, which is then read from kv and score; 0 if it takes no part. */
template <bool SAVES>
__device__ __forceinline__ unsigned long long
find_state(const compress_args &args, const group &of, int64_t j)
{
    const int64_t num_states = count_states(args.p);
    const int64_t back = num_states - 1 - j;
    const int64_t position = of.position - back;
    const int64_t slot = j < num_states && position >= 0 ? find_slot(args, of.req, position) : -1;
    if (slot < 0) {
        return 0;
    }
    const bool is_new = SAVES && is_token_of(args.p, of.token - back, of.req, position, slot);
    const float *const row = row_of_slot(args.p.states.rows.kv, slot, args.state_block_size);
    return (unsigned long long)row | (is_new ? 1 : 0);
}

/* Starts the loads of four channels of a state, which `code` of find_state says where to find. A
 * state that is not there has a score of -inf. */
template <bool SAVES, bool ALIGNED>
__device__ __forceinline__ void
load_state(const smla_partial_states_params &p, int64_t token, unsigned long long code,
           int64_t channel, state_part &part)
{
    if (SAVES && (code & 1) != 0) {
        load_given<ALIGNED>(p, token, channel, part);
        return;
    }
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        part.values[i] = 0;
        part.scores[i] = smla_float_bits(-INFINITY);
    }
    if (code != 0) {
        const float *const row = (const float *)code + channel;
        load_saved<ALIGNED>(row, part.values);
        load_saved<ALIGNED>(row + p.width, part.scores);
    }
}

/* The ape of a state's place in its group, where the state comes from this step; else zeros. */
template <bool SAVES, bool ALIGNED>
__device__ __forceinline__ void
load_ape_if_new(const smla_partial_states_params &p, int64_t place, unsigned long long code,
                int64_t channel, uint32_t ape[CHANNELS])
{
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        ape[i] = 0;
    }
    if (SAVES && (code & 1) != 0) {
        load_ape<ALIGNED>(p, place, channel, ape);
    }
}

__device__ __forceinline__ float *
row_of_code(unsigned long long code)
{
    return (float *)(code & ~1ull);
}

template <bool IS_FIRST>
__device__ __forceinline__ void
add_pair(channel_sums sums[CHANNELS], const float values[SLICE_STATES][CHANNELS],
         const float scores[SLICE_STATES][CHANNELS])
{
#pragma unroll
    for (int n = 0; n < CHANNELS; n++) {
        const float pair_scores[SLICE_STATES] = {scores[0][n], scores[1][n]};
        const float pair_values[SLICE_STATES] = {values[0][n], values[1][n]};
        add_states<IS_FIRST>(sums[n], pair_scores, pair_values);
    }
}

/* Pools this thread's channels over the only pair of its slice in a short group, and saves what is
 * of this step. Lane j has the code of state j. Where groups overlap, the first state is of the
 * group before. The loads of ape wait for the others, because they need registers and come from
 * L1. */
template <int DIM, bool SAVES, bool ALIGNED>
__device__ __forceinline__ void
pool_short(const compress_args &args, const group &of, unsigned long long found, int slice,
           int channel, channel_sums sums[CHANNELS])
{
    const smla_partial_states_params &p = args.p.states;
    const int num_states = (int)count_states(args.p);
    const int num_before = num_states - (int)p.ratio; /* states of the group before */
    const int own = (int)p.width - DIM + channel;     /* what a state is to its own group */
    const int64_t first_token = of.token - (num_states - 1 - slice);
    unsigned long long codes[SLICE_STATES];
    state_part parts[SLICE_STATES];
    state_part other; /* what the second state is to the group after its own */
#pragma unroll
    for (int k = 0; k < SLICE_STATES; k++) {
        const int state = slice + k * SMLA_POOL_SLICES;
        codes[k] = __shfl_sync(ALL_LANES, found, state);
        load_state<SAVES, ALIGNED>(p, first_token + k * SMLA_POOL_SLICES, codes[k],
                                   state < num_before ? channel : own, parts[k]);
    }
    const bool has_other = SAVES && num_before != 0 && (codes[1] & 1) != 0;
    if (has_other) {
        load_given<ALIGNED>(p, first_token + SMLA_POOL_SLICES, channel, other);
    }
    float values[SLICE_STATES][CHANNELS];
    float scores[SLICE_STATES][CHANNELS];
    uint32_t ape[CHANNELS];
#pragma unroll
    for (int k = 0; k < SLICE_STATES; k++) {
        const int state = slice + k * SMLA_POOL_SLICES;
        const bool is_before = state < num_before;
        const bool is_new = SAVES && (codes[k] & 1) != 0;
        load_ape_if_new<SAVES, ALIGNED>(p, is_before ? state : state - num_before, codes[k],
                                        is_before ? channel : own, ape);
        add_ape(parts[k], ape, is_new && p.rows.input_type == SMLA_FLOAT_BF16, values[k],
                scores[k]);
        if (is_new && !is_before) {
            store_state<ALIGNED>(row_of_code(codes[k]) + own, p.width, values[k], scores[k]);
        }
    }
    if (has_other) {
        load_ape<ALIGNED>(p, slice, channel, ape);
        save_given<ALIGNED>(p, other, ape, row_of_code(codes[1]), channel);
    }
    add_pair<true>(sums, values, scores);
}

/* Pools this thread's channels over PAIRS pairs of its slice of a long group, from state `first` of
 * slice 0 on, and saves those of this step. Lane i + k has the code of the slice's state k. Long
 * groups do not overlap. */
template <bool SAVES, bool ALIGNED, int PAIRS>
__device__ __forceinline__ void
pool_pairs(const compress_args &args, const group &of, int64_t first, int slice,
           unsigned long long found, int i, int64_t channel, channel_sums sums[CHANNELS])
{
    constexpr int STATES = PAIRS * SLICE_STATES;
    const smla_partial_states_params &p = args.p.states;
    unsigned long long codes[STATES];
    state_part parts[STATES];
    uint32_t ape[STATES][CHANNELS];
#pragma unroll
    for (int k = 0; k < STATES; k++) {
        const int64_t state = first + slice + k * SMLA_POOL_SLICES;
        codes[k] = __shfl_sync(ALL_LANES, found, i + k);
        load_state<SAVES, ALIGNED>(p, of.token - (p.ratio - 1 - state), codes[k], channel,
                                   parts[k]);
        load_ape_if_new<SAVES, ALIGNED>(p, state, codes[k], channel, ape[k]);
    }
#pragma unroll
    for (int pair = 0; pair < STATES; pair += SLICE_STATES) {
        if (first + pair * SMLA_POOL_SLICES >= p.ratio) {
            break;
        }
        float values[SLICE_STATES][CHANNELS];
        float scores[SLICE_STATES][CHANNELS];
#pragma unroll
        for (int k = 0; k < SLICE_STATES; k++) {
            const bool is_new = SAVES && (codes[pair + k] & 1) != 0;
            add_ape(parts[pair + k], ape[pair + k], is_new && p.rows.input_type == SMLA_FLOAT_BF16,
                    values[k], scores[k]);
            if (is_new) {
                store_state<ALIGNED>(row_of_code(codes[pair + k]) + channel, p.width, values[k],
                                     scores[k]);
            }
        }
        add_pair<false>(sums, values, scores);
    }
}

/* Pools this thread's channels over the states of its slice of a long group. */
template <bool SAVES, bool ALIGNED, int PAIRS>
__device__ __forceinline__ void
pool_long(const compress_args &args, const group &of, int slice, int64_t channel,
          channel_sums sums[CHANNELS])
{
    const int64_t ratio = args.p.states.ratio;
    for (int64_t pass = 0; pass < ratio; pass += PASS_STATES) {
        const unsigned long long found =
            find_state<SAVES>(args, of, pass + slice + lane_idx() * SMLA_POOL_SLICES);
        for (int i = 0; i < SMLA_WARP_LANES && pass + i * SMLA_POOL_SLICES < ratio;
             i += PAIRS * SLICE_STATES) {
            pool_pairs<SAVES, ALIGNED, PAIRS>(args, of, pass + i * SMLA_POOL_SLICES, slice, found,
                                              i, channel, sums);
        }
    }
}

/* ---- Groups -------------------------------------------------------------------------------- */

/* PAIRS is 0 for short groups. */
template <int ROW, bool SAVES, bool ALIGNED, int PAIRS>
__device__ __forceinline__ void
close_group(const compress_args &args, int64_t token,
            pool_memory<smla_row<ROW>::INFO.head_dim> &memory)
{
    constexpr int DIM = smla_row<ROW>::INFO.head_dim;
    constexpr int SLICE_THREADS = DIM / CHANNELS;
    const smla_compress_params &p = args.p;
    const group of = {token, position_of(p.states, token), (int32_t)request_of(p, token)};
    prefetch_factors(p, of.position + 1 - p.states.ratio, (int)threadIdx.x);
    const unsigned long long found = PAIRS == 0 ? find_state<SAVES>(args, of, lane_idx()) : 0;
    const int channel = (int)threadIdx.x % SLICE_THREADS * CHANNELS;
    int slice = (int)threadIdx.x / SLICE_THREADS;
#pragma unroll 1
    for (; slice < SMLA_POOL_SLICES; slice += (int)blockDim.x / SLICE_THREADS) {
        channel_sums sums[CHANNELS];
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            sums[i] = {-INFINITY, 0.0f, 0.0f};
        }
        if constexpr (PAIRS == 0) {
            pool_short<DIM, SAVES, ALIGNED>(args, of, found, slice, channel, sums);
        } else {
            pool_long<SAVES, ALIGNED, PAIRS>(args, of, slice, channel, sums);
        }
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            memory.largest[slice][channel + i] = sums[i].largest;
            memory.weights[slice][channel + i] = sums[i].weights;
            memory.totals[slice][channel + i] = sums[i].totals;
        }
    }
    /* Pooled: the sums of all slices are in memory, and warp 0 is done with the x of the group
     * before. */
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

/* The first token of a pass, from token `i` on, that closes a group; -1 if none does. */
__device__ __forceinline__ int
find_closing(const token_marks *marks, int i, int num_tokens)
{
    while (i < num_tokens) {
        const uint32_t rest = marks[i / SMLA_WARP_LANES].closing >> (i % SMLA_WARP_LANES);
        if (rest != 0) {
            return i + __ffs((int)rest) - 1;
        }
        i = (i / SMLA_WARP_LANES + 1) * SMLA_WARP_LANES;
    }
    return -1;
}

/* What the kernels do. */
template <int ROW, bool SAVES, bool ALIGNED, int PAIRS>
__device__ __forceinline__ void
compress_runs(const compress_args &args)
{
    __shared__ pool_memory<smla_row<ROW>::INFO.head_dim> memory;
    __shared__ token_marks marks[MAX_WARPS];
    ptx_wait_for_grids();
    for (int64_t run = blockIdx.x * args.run_tokens; run < args.p.insert.num_tokens;
         run += (int64_t)gridDim.x * args.run_tokens) {
        const int64_t left = args.p.insert.num_tokens - run;
        const int num_tokens = (int)(left < args.run_tokens ? left : args.run_tokens);
        for (int pass = 0; pass < num_tokens; pass += (int)blockDim.x) {
            const int rest = num_tokens - pass;
            const int count = rest < (int)blockDim.x ? rest : (int)blockDim.x;
            const int early = count < EARLY_TOKENS ? count : EARLY_TOKENS;
            if (SAVES) {
                prefetch_tokens(args.p.states, run + pass, early);
            }
            const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
            const int begin = pass + warp * SMLA_WARP_LANES;
            const token_marks mine = mark_tokens<SAVES>(args, run + begin, num_tokens - begin);
            if (lane_idx() == 0) {
                marks[warp] = mine;
            }
            __syncthreads(); /* marked: the marks of all warps are in memory */
            if (SAVES) {
                prefetch_tokens(args.p.states, run + pass + early, count - early);
                for (int i = 0; i < count; i += SMLA_WARP_LANES) {
                    save_lonely<ALIGNED>(args, run + pass + i, marks[i / SMLA_WARP_LANES].lonely);
                }
            }
            for (int i = find_closing(marks, 0, count); i >= 0;
                 i = find_closing(marks, i + 1, count)) {
                close_group<ROW, SAVES, ALIGNED, PAIRS>(args, run + pass + i, memory);
            }
            __syncthreads(); /* read: the marks may be written */
        }
    }
}

/* ---- Launch -------------------------------------------------------------------------------- */

/* A CTA takes at most a group of tokens, and fewer where that leaves multiprocessors idle. */
cudaError_t
launch_compress(void (*kernel)(compress_args), const smla_compress_params *params,
                const smla_cuda_device *device, int num_threads)
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
    const int64_t num_runs = smla_count_parts(num_tokens, args.run_tokens);
    return smla_launch(kernel, args, num_runs < INT32_MAX ? num_runs : INT32_MAX, num_threads, 0,
                       params->insert.stream);
}

} /* namespace */
