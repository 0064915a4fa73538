/* compressor.cuh: DeepSeek V4's compressor: groups of states become rows of a compressed cache. The
 * same launch saves the states of the step, if asked for.
 *
 * Computes     x = sum(exp(score - largest) * kv) / sum(exp(score - largest)) per channel over the
 *              states of a group; row = bf16(RoPE(x * rsqrt(mean(x^2) + eps) * weight)), in the
 *              cache's format; row_encoder.cuh has the rules. partial_states.cu says what a
 *              state is.
 * Shapes       kv and score [T, c D] fp32 or bf16, ape [r, c D] fp32, state rows [2 c D] fp32, any
 *              strides; positions, slot mappings [T] int32 or int64; block_table [R, W], request
 *              ids [T] int32; rows as kv_format.h draws them. D is 512 or 128, c 2 for r 4, else 1.
 * Shared mem   three sums per slice and channel of the CTA, and x: 26 KiB for 512 channels, 14 for
 *              half of them, 6.5 for 128; the marks of a pass, 128 bytes
 * Roles        A CTA takes up to r neighbouring tokens, because one of them closes a group. Each
 *              warp marks 32 tokens: those that close a group, and those whose state is saved
 *              apart. The slices divide the states of a group, and a thread has 4 channels of a
 *              slice. Groups of up to 8 states are short: for one slice at a time, all loads are
 *              under way before the first is used. In longer groups a thread has loads of
 *              LONG_PAIRS pairs of states under way.
 *              On Hopper, kv and score of the tokens are brought to L2 while positions, slots and
 *              pages are read, which takes three loads one after another. The two CTAs of a cluster
 *              divide the 512 channels of a long group: each pools and saves its half, and the
 *              first one finishes the row. To join the slices each thread has channels, and warp 0
 *              finishes the row.
 *              The state of a token of this step is read from kv and score, because another CTA may
 *              not have saved it yet. The CTA that closes a group saves the states that it reads,
 *              if they are of that group and of this step. All others are saved by the CTA that has
 *              their token.
 *              Barriers: marked | all threads | marks are in memory; read | all threads | marks may
 *              be written; pooled | all threads of the cluster | sums are in memory, and x may be
 *              written; joined | the same | x is in memory, and sums may be written.
 * Roofline     Memory. A launch that saves moves 16 c D bytes per token of fp32: T 8192, D 512:
 *              32 us for r 4, 16 us for r 128 at 4.3 TB/s, which needs 32 KiB under way to each SM.
 *              With r 4 half of each state is read once more, from L2; an SM has 5 groups of 32
 *              KiB. Instructions bind, 2700 per warp and group. More loads ahead (2 or 4 slices at
 *              a time) leave fewer warps, and took 66 and 77 us instead of 57. A group of 128 reads
 *              512 KiB: 64 groups alone would leave half of the SMs idle. Quarters of the channels
 *              took longer than halves (45 us instead of 34). Two states take two exps per channel,
 *              of 21 instructions each.
 * Numerics     fp32, each operation rounded: the CPU's bytes; params_compressor.h has the order. A
 *              token with a bad slot, request or position is skipped; a bad page has no states. Of
 *              tokens with one slot any may win, and their row may hold parts of several.
 * Source       The compressor kernels of DeepSeek V4 in vLLM, for the operator. The split is ours.
 */
#pragma once

#include "cuda/compressor/compressor_tokens.cuh"
#include "cuda/compressor/state_pool.cuh"

/* compressor_sm90.cu: compresses long groups of 512 channels, each by two CTAs. */
extern "C" cudaError_t smla_cuda_launch_compress_in_parts(const smla_compress_params *params,
                                                          const smla_cuda_device *device,
                                                          bool is_aligned);

namespace {

enum {
    SHORT_STATES = SMLA_POOL_ROWS, /* states of the longest short group */
    SHORT_SM_THREADS = 640,        /* threads per SM for short groups, 96 registers each */
    LONG_PAIRS = 4,                /* pairs of states that a thread of a long group loads ahead */
    PASS_STATES = SMLA_POOL_SLICES * SMLA_WARP_LANES,
    MAX_WARPS = 16,
    EARLY_TOKENS = 64, /* tokens of a pass that are brought to L2 before their facts are read */
};

static_assert(SHORT_STATES == SMLA_POOL_SLICES * SLICE_STATES, "a slice has one pair of a group");
static_assert(SMLA_OVERLAP_RATIO == SMLA_POOL_SLICES, "of a pair the second state is the group's");

/* ---- Pool ---------------------------------------------------------------------------------- */

/* The number of states of a group, c r; where groups overlap, that includes the group before. */
__device__ __forceinline__ int64_t
count_states(const smla_compress_params &p)
{
    return p.states.width == p.dim ? p.states.ratio : 2 * p.states.ratio;
}

/* Returns where state `j` of a group is: the address of its row, or 0 if the state takes no part.
 * Bit 0 is set if a token of this step has the state, which is then read from kv and score. */
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
    const smla_kv_token row = row_of_slot(args.p.states.rows.kv, args.state_block_size, slot);
    return (unsigned long long)row.row | (is_new ? 1 : 0);
}

/* Starts the loads of four channels of a state; `code` is what find_state returned. A state that
 * takes no part has a score of -inf. */
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

/* Loads the ape of a state from this step, by the state's index in its group; for other states it
 * gives zeros. */
template <bool SAVES, bool ALIGNED>
__device__ __forceinline__ void
load_ape_if_new(const smla_partial_states_params &p, int64_t index, unsigned long long code,
                int64_t channel, uint32_t ape[CHANNELS])
{
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        ape[i] = 0;
    }
    if (SAVES && (code & 1) != 0) {
        load_ape<ALIGNED>(p, index, channel, ape);
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

/* The loads of four channels of a slice of a short group. Such a slice has one pair of states. */
struct slice_load {
    unsigned long long codes[SLICE_STATES];
    state_part parts[SLICE_STATES];
    state_part other; /* the second state's channels for the group after its own */
    bool has_other;
};

/* How a short group's states are counted. Where groups overlap, the first half belongs to the group
 * before. */
struct short_group {
    int num_before; /* number of states of the group before */
    int own;        /* first channel of the values that a state gives to its own group */
};

/* Starts the loads of a slice. Lane j of `found` has the code of state j. */
template <bool SAVES, bool ALIGNED>
__device__ __forceinline__ void
load_slice(const smla_partial_states_params &p, const group &of, const short_group &sizes,
           unsigned long long found, int slice, int channel, slice_load &load)
{
    const int64_t first_token = of.token - (sizes.num_before + p.ratio - 1 - slice);
#pragma unroll
    for (int k = 0; k < SLICE_STATES; k++) {
        const int state = slice + k * SMLA_POOL_SLICES;
        load.codes[k] = __shfl_sync(ALL_LANES, found, state);
        load_state<SAVES, ALIGNED>(p, first_token + k * SMLA_POOL_SLICES, load.codes[k],
                                   channel + (state < sizes.num_before ? 0 : sizes.own),
                                   load.parts[k]);
    }
    load.has_other = SAVES && sizes.num_before != 0 && (load.codes[1] & 1) != 0;
    if (load.has_other) {
        load_given<ALIGNED>(p, first_token + SMLA_POOL_SLICES, channel, load.other);
    }
}

/* Pools a thread's channels over a slice that load_slice has loaded, and saves its states of this
 * step. The loads of ape start after the others, because they need registers and hit L1. */
template <bool SAVES, bool ALIGNED, bool ARE_BF16>
__device__ __forceinline__ void
pool_slice(const smla_partial_states_params &p, const short_group &sizes, const slice_load &load,
           int slice, int channel, channel_sums sums[CHANNELS])
{
    float values[SLICE_STATES][CHANNELS];
    float scores[SLICE_STATES][CHANNELS];
    uint32_t ape[CHANNELS];
#pragma unroll
    for (int k = 0; k < SLICE_STATES; k++) {
        const int state = slice + k * SMLA_POOL_SLICES;
        const bool is_before = state < sizes.num_before;
        const bool is_new = SAVES && (load.codes[k] & 1) != 0;
        load_ape_if_new<SAVES, ALIGNED>(p, is_before ? state : state - sizes.num_before,
                                        load.codes[k], channel + (is_before ? 0 : sizes.own), ape);
        add_ape(load.parts[k], ape, ARE_BF16 && is_new, values[k], scores[k]);
        if (is_new && !is_before) {
            store_state<ALIGNED>(row_of_code(load.codes[k]) + sizes.own + channel, p.width,
                                 values[k], scores[k]);
        }
    }
    if (load.has_other) {
        float other_values[CHANNELS];
        float other_scores[CHANNELS];
        load_ape<ALIGNED>(p, slice, channel, ape);
        add_ape(load.other, ape, ARE_BF16, other_values, other_scores);
        store_state<ALIGNED>(row_of_code(load.codes[1]) + channel, p.width, other_values,
                             other_scores);
    }
    add_pair<true>(sums, values, scores);
}

/* Pools this thread's channels over PAIRS pairs of its slice of a long group, from state `first` of
 * slice 0 on, and saves their states of this step. Lane i + k has the code of the slice's state k.
 * Long groups do not overlap. */
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

/* The sums of a CTA's channels, and the pooled values of a whole row. */
template <int DIM, int PARTS> struct row_memory {
    pool_memory<DIM / PARTS> pool;
    alignas(16) float x[DIM];
};

template <int DIM>
__device__ __forceinline__ void
keep_sums(pool_memory<DIM> &memory, int slice, int channel, const channel_sums sums[CHANNELS])
{
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        memory.largest[slice][channel + i] = sums[i].largest;
        memory.weights[slice][channel + i] = sums[i].weights;
        memory.totals[slice][channel + i] = sums[i].totals;
    }
}

__device__ __forceinline__ void
clear_sums(channel_sums sums[CHANNELS])
{
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        sums[i] = {-INFINITY, 0.0f, 0.0f};
    }
}

/* Pools a short group. Each thread takes its channels of one slice after another. */
template <int DIM, bool SAVES, bool ALIGNED, bool ARE_BF16>
__device__ __forceinline__ void
pool_short(const compress_args &args, const group &of, pool_memory<DIM> &memory)
{
    const smla_partial_states_params &p = args.p.states;
    const int channel = (int)threadIdx.x * CHANNELS;
    const int own = (int)p.width - DIM;
    const short_group sizes = {own == 0 ? 0 : (int)p.ratio, own};
    const unsigned long long found = find_state<SAVES>(args, of, lane_idx());
#pragma unroll 1
    for (int slice = 0; slice < SMLA_POOL_SLICES; slice++) {
        slice_load load;
        channel_sums sums[CHANNELS];
        load_slice<SAVES, ALIGNED>(p, of, sizes, found, slice, channel, load);
        clear_sums(sums);
        pool_slice<SAVES, ALIGNED, ARE_BF16>(p, sizes, load, slice, channel, sums);
        keep_sums(memory, slice, channel, sums);
    }
}

/* A barrier of all CTAs that divide a row's channels. */
template <int PARTS>
__device__ __forceinline__ void
wait_for_parts(void)
{
    if constexpr (PARTS > 1) {
        ptx_cluster_sync();
    } else {
        __syncthreads();
    }
}

/* Fetches the pooled values of the other CTAs. Only the first CTA of a cluster calls this. */
template <int DIM, int PARTS>
__device__ __forceinline__ void
fetch_parts(float x[DIM])
{
    constexpr int PART = DIM / PARTS;
    for (int i = PART + (int)threadIdx.x; i < DIM; i += (int)blockDim.x) {
        const uint32_t there = ptx_cluster_address(ptx_shared_address(&x[i]), i / PART);
        x[i] = smla_bits_float(ptx_load_cluster_4(there));
    }
    __syncthreads();
}

/* Makes and stores the row of the group that `token` closes. PAIRS is 0 for short groups. */
template <int ROW, bool SAVES, bool ALIGNED, int PAIRS, int PARTS>
__device__ __forceinline__ void
close_group(const compress_args &args, channel_range channels, int64_t token,
            row_memory<smla_row<ROW>::INFO.head_dim, PARTS> &memory)
{
    constexpr int DIM = smla_row<ROW>::INFO.head_dim;
    constexpr int SLICE_THREADS = DIM / PARTS / CHANNELS;
    const smla_compress_params &p = args.p;
    const group of = {token, position_of(p.states, token), (int32_t)request_of(p, token)};
    prefetch_factors(p, of.position + 1 - p.states.ratio, (int)threadIdx.x);
    if constexpr (PAIRS == 0) {
        if (p.states.rows.input_type == SMLA_FLOAT_BF16) {
            pool_short<DIM, SAVES, ALIGNED, true>(args, of, memory.pool);
        } else {
            pool_short<DIM, SAVES, ALIGNED, false>(args, of, memory.pool);
        }
    } else {
        const int channel = (int)threadIdx.x % SLICE_THREADS * CHANNELS;
        const int slice = (int)threadIdx.x / SLICE_THREADS;
        channel_sums sums[CHANNELS];
        clear_sums(sums);
        pool_long<SAVES, ALIGNED, PAIRS>(args, of, slice, channels.first + channel, sums);
        keep_sums(memory.pool, slice, channel, sums);
    }
    /* Pooled: the sums of all slices are in memory, and warp 0 has finished with the former group's
     * x. */
    wait_for_parts<PARTS>();
    for (int i = (int)threadIdx.x; i < DIM / PARTS; i += (int)blockDim.x) {
        memory.x[channels.first + i] = join_slices(memory.pool, i);
    }
    /* Joined: x is in memory, and no thread reads the sums any more. */
    wait_for_parts<PARTS>();
    if (channels.first != 0) {
        return;
    }
    if constexpr (PARTS > 1) {
        fetch_parts<DIM, PARTS>(memory.x);
    }
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

/* The body of the kernels. PARTS CTAs, a cluster, divide the channels of a long group. */
template <int ROW, bool SAVES, bool ALIGNED, int PAIRS, int PARTS = 1>
__device__ __forceinline__ void
compress_runs(const compress_args &args)
{
    constexpr int PART = smla_row<ROW>::INFO.head_dim / PARTS;
    __shared__ row_memory<smla_row<ROW>::INFO.head_dim, PARTS> memory;
    __shared__ token_marks marks[MAX_WARPS];
    const channel_range channels = {PARTS > 1 ? (int)blockIdx.x % PARTS * PART : 0,
                                    PARTS > 1 ? PART : (int)args.p.states.width};
    ptx_wait_for_grids();
    for (int64_t run = blockIdx.x / PARTS * args.run_tokens; run < args.p.insert.num_tokens;
         run += (int64_t)gridDim.x / PARTS * args.run_tokens) {
        const int64_t left = args.p.insert.num_tokens - run;
        const int num_tokens = (int)(left < args.run_tokens ? left : args.run_tokens);
        for (int pass = 0; pass < num_tokens; pass += (int)blockDim.x) {
            const int rest = num_tokens - pass;
            const int count = rest < (int)blockDim.x ? rest : (int)blockDim.x;
            const int early = count < EARLY_TOKENS ? count : EARLY_TOKENS;
            if (SAVES) {
                prefetch_tokens(args.p.states, channels, run + pass, early);
            }
            const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
            const int begin = pass + warp * SMLA_WARP_LANES;
            const token_marks mine = mark_tokens<SAVES>(args, run + begin, num_tokens - begin);
            if (lane_idx() == 0) {
                marks[warp] = mine;
            }
            __syncthreads(); /* marked: the marks of all warps are in memory */
            if (SAVES) {
                prefetch_tokens(args.p.states, channels, run + pass + early, count - early);
                for (int i = 0; i < count; i += SMLA_WARP_LANES) {
                    save_lonely<ALIGNED>(args, channels, run + pass + i,
                                         marks[i / SMLA_WARP_LANES].lonely);
                }
            }
            for (int i = find_closing(marks, 0, count); i >= 0;
                 i = find_closing(marks, i + 1, count)) {
                close_group<ROW, SAVES, ALIGNED, PAIRS, PARTS>(args, channels, run + pass + i,
                                                               memory);
            }
            __syncthreads(); /* read: the marks may be written */
        }
    }
    if constexpr (PARTS > 1) {
        ptx_cluster_sync(); /* no CTA reads the memory of this one any more */
    }
}

/* ---- Launch -------------------------------------------------------------------------------- */

/* Starts a kernel. A CTA takes at most a group of tokens at a time, and fewer where that would
 * leave multiprocessors idle. `parts` CTAs divide the channels. */
cudaError_t
launch_compress(void (*kernel)(compress_args), const smla_compress_params *params,
                const smla_cuda_device *device, int num_threads, int parts)
{
    const int64_t num_tokens = params->insert.num_tokens;
    const int64_t share = smla_count_parts(num_tokens, device->num_sms / parts);
    const int64_t ratio = params->states.ratio;
    compress_args args = {};
    args.p = *params;
    args.ratio = smla_make_divisor(ratio);
    args.state_block_size = smla_make_divisor(params->table.block_size);
    args.block_size = smla_make_divisor(params->insert.kv.block_size);
    args.run_tokens = share < ratio ? share : ratio;
    args.angles_are_aligned = rope_is_aligned(params->rope);
    const int64_t num_runs = smla_count_parts(num_tokens, args.run_tokens);
    const int64_t most_runs = INT32_MAX / parts;
    return smla_launch(kernel, args, (num_runs < most_runs ? num_runs : most_runs) * parts,
                       num_threads, 0, params->call.stream, parts > 1);
}

} /* namespace */
