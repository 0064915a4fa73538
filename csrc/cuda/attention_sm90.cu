/* attention_sm90.cu: sparse MLA attention over FP8 rows for Hopper, with wgmma.
 *
 * Computes     as attention_sm80.cu, transposed: S^T = K Q^T, P = 2^(scale S - ref),
 *              O^T = V^T P^T, with keys as A in registers and heads as N
 * Shapes       as attention_sm80.cu, caches of fp8_ds_mla alone
 * Shared mem   query   [9][HEADS][128 B]     f16 (RoPE: bf16) times powers of two; 64 dimensions a
 *                      tile, permuted (store_query), 128-byte swizzle
 *              probs   [2][64][HEADS] f16    a block of keys per warpgroup, swizzled (wgmma.cuh)
 *              ring    [GRANULES][16][656 B] rows as they are in the cache
 *              scales  [GRANULES][4][16] f16, is_key, mbarriers, sums, references, factors
 *              64 heads: 13 granules, 231,520 bytes of the 232,448 that an SM has
 * Roles        One CTA per SM; CTA i has works i, i + grid, ... (token, split, head tile).
 *              4 gather warps   24 registers. Indices -> rows: each has 4 rows of every granule,
 *                               one bulk copy per row. Runs ahead, into the next work too.
 *              2 warpgroups     240 registers. Blocks of 64 keys in turn. For each of its blocks:
 *                               scores, then values of the other's older block while its own
 *                               scores become weights, then values of its own. A warpgroup has
 *                               all heads and 256 of the 512 values.
 *              mbarriers        arrivals | waited for by
 *              full[granule]    128 gather threads and the bytes they announce | consumers
 *              empty[granule]   256 consumers, values converted | gather warps
 *              weighed[group]   128 threads of the group: weights and scales | the other group
 *              added[group]     128 threads of the other group | before new weights
 *              Every thread arrives for itself: it costs nothing, and racecheck can follow it.
 *              barriers         CONSUMERS 256 threads, GROUP + g 128 threads; 0 in rows done again
 *              A row whose numbers do not fit (below) is marked and done again at the end by the
 *              code of attention_sm80.cu, for which shared memory is then free.
 * Roofline     2 * H * 1088 FLOP and 656 bytes per key. 64 heads, per key and SM: 34 cycles of
 *              wgmma, 40 of HBM, 42 of shared memory. Measured on an H200, 64 heads, K 2048: 128
 *              tokens 88 us, 256 tokens 166 us (441 TFLOP/s), so about 62 cycles per key of a
 *              further row, its start and end included. No unit is saturated: latency binds, from
 *              shared memory to conversion to wgmma, with two warps per scheduler and no registers
 *              left to look further ahead.
 * Numerics     e4m3 is exact in f16; times its scale / E, rounded to f16, where E is a power of two
 *              for the work: all scales must lie in E * [2^-5, 2^7), so products are normal f16.
 *              Query: a power of two per work, so its f16 are exact in heads whose largest value
 *              is within 2^13 of the tile's. Weights are f16, relative to ref, fixed by the first
 *              128 keys: its maximum, rounded up, lies at 2^-HEADROOM; keys up to 2^(15 + HEADROOM)
 *              times as heavy fit. Sums are fp32 of unrounded weights. Masked rows are zeros and
 *              have weight 0. Whatever does not fit marks the row: scales outside (NaN, negative,
 *              0), scores too large, no key among the first 128. A head whose q is not finite has
 *              results of NaN, and no influence on others.
 *              A row's bits depend on its query, keys, num_splits, H and the device, not on T.
 * Source       keys as A from registers, the granule ring, the order of the two warpgroups: our own
 *              studies; online softmax (FlashAttention), warp roles (CUTLASS). The fixed reference
 *              with rows done again is ours, too.
 */
#include <stddef.h>

#include "attend.cuh"
#include "wgmma.cuh"

enum : uint32_t { NO_ROW = 0xFFFFFFFFu };

enum {
    GRANULE_KEYS = 16,
    GATHER_WARPS = 4,
    GATHER_KEYS = GRANULE_KEYS / GATHER_WARPS, /* of a warp */
    BLOCK_GRANULES = 4,                        /* keys of a warpgroup: 64 */
    STEP_GRANULES = 2 * BLOCK_GRANULES,        /* both blocks */
    STEP_KEYS = SMLA_SM90_KEYS,
    FP8_ROW_BYTES = 656,
    SCALE_OFFSET = 512,
    ROPE_OFFSET = 528,
    GRANULE_BYTES = GRANULE_KEYS * FP8_ROW_BYTES,
    CONSUMER_WARPS = CTA_WARPS,
    CONSUMER_THREADS = CTA_THREADS,
    GROUP_THREADS = 128,
    HOPPER_THREADS = CONSUMER_THREADS + GATHER_WARPS * SMLA_WARP_LANES,
    CONSUMER_REGISTERS = 240,
    GATHER_REGISTERS = 24,
    QUERY_TILES = SMLA_HEAD_DIM / 64,
    MAX_WORKS = 1024, /* of a CTA: bits of redo */
    /* named barriers */
    BARRIER_CONSUMERS = 1,
    BARRIER_GROUP = 2,
    /* exponents */
    SCALE_EXPONENT = 3, /* of the first keys' largest scale / E */
    WINDOW_LOW = 5,     /* scale / E >= 2^-5 */
    WINDOW_SIZE = 12,   /* and below 2^(12 - 5) */
    MAX_KEY_EXPONENT = 40,
    MAX_QUERY_EXPONENT = 80,
    QUERY_EXPONENT = 14, /* of the largest value of the query in f16 */
    MAX_HEAD_RATIO = 13, /* of head maxima, in powers of two */
};

static_assert((int)STEP_KEYS == STEP_GRANULES * GRANULE_KEYS, "kernels.h says so");
static_assert(HOPPER_THREADS == 384 && 2 * CONSUMER_REGISTERS + GATHER_REGISTERS == 3 * 168,
              "setmaxnreg shares out what the launch gave: 168 each");

template <int HEADS_, bool MAXIMA_> struct hopper {
    static constexpr int HEADS = HEADS_;
    static constexpr bool MAXIMA = MAXIMA_; /* max_logits are wanted */
    static constexpr int GRANULES = HEADS == 64 ? (MAXIMA ? 12 : 13) : HEADS == 32 ? 16 : 18;
    static constexpr int CHUNKS = HEADS / 16;
    static constexpr int PROB_BYTES = HEADS * 2; /* of a key */
    static constexpr int PROBS_SWIZZLE = HEADS == 64   ? WGMMA_SWIZZLE_128
                                         : HEADS == 32 ? WGMMA_SWIZZLE_64
                                                       : WGMMA_SWIZZLE_32;
    /* what redoes rows: tiles of 32 heads at most, for its registers */
    static constexpr int REDO_TILES = HEADS == 64 ? 2 : 1;
    typedef tile<HEADS_ / REDO_TILES, SMLA_ROWS_FP8> Portable;
};

template <typename Shape> struct hopper_memory {
    alignas(1024) uint8_t query[QUERY_TILES][Shape::HEADS][128];
    alignas(1024) uint8_t probs[2][64][Shape::PROB_BYTES];
    alignas(1024) uint8_t ring[Shape::GRANULES][GRANULE_BYTES];
    alignas(128) uint16_t scales[Shape::GRANULES][SMLA_NUM_SCALE_TILES][GRANULE_KEYS];
    alignas(16) float sums[CONSUMER_WARPS][Shape::HEADS]; /* first of maxima */
    alignas(16) float tops[Shape::MAXIMA ? CONSUMER_WARPS : 1][Shape::HEADS];
    alignas(16) float reference[Shape::HEADS];
    alignas(16) float factor[Shape::HEADS];
    int32_t work;      /* its number in the grid */
    float score_scale; /* of scores, in the log2 domain */
    float key_unit;    /* E */
    uint32_t window;   /* exponent of the smallest scale that fits */
    uint32_t query_max[CONSUMER_WARPS];
    uint32_t scale_max[CONSUMER_WARPS];
    alignas(8) uint64_t full[Shape::GRANULES];
    uint64_t empty[Shape::GRANULES];
    uint64_t weighed[2];
    uint64_t added[2];
    uint32_t is_key[Shape::GRANULES];  /* four bits in the byte of each gather warp */
    uint8_t is_lost[CONSUMER_THREADS]; /* some number of the row did not fit, by thread */
    uint32_t redo[MAX_WORKS / 32];
};

/* The rows of a list. */
typedef struct row_span {
    const uint8_t *lowest;
    uint32_t bias; /* of the row of slot 0, in 16 bytes above the lowest */
} row_span;

/* The argument of the kernel. */
typedef struct hopper_launch {
    attention_launch base;
    row_span lists[2];
    int32_t num_works;
    float headroom;      /* exponent that the first keys' maximum is below the reference */
    bool out_is_aligned; /* every row to 16 bytes */
} hopper_launch;

/* ---- Works --------------------------------------------------------------------------------- */

/* Steps of a list: 128 columns, the last ones perhaps of nothing. */
static __device__ __forceinline__ int32_t
count_steps(column_range columns)
{
    return (columns.end - columns.begin + STEP_KEYS - 1) / STEP_KEYS;
}

/* Steps of a work: those of its columns of the main list, then those of the extra one. */
static __device__ __forceinline__ int32_t
count_all_steps(const attention_launch &launch, const cta_work &work)
{
    int32_t num_steps = count_steps(find_columns(launch, work, 0));
    if (launch.params.num_lists == 2) {
        num_steps += count_steps(find_columns(launch, work, 1));
    }
    return num_steps;
}

/* ---- Gather -------------------------------------------------------------------------------- */

/* Where the row that an index names begins, in 16 bytes from the lowest row of its cache; the first
 * one is `bias` above that. Arithmetic modulo 2^32: strides may be negative. */
static __device__ __forceinline__ uint32_t
find_row_offset(const attention_launch &launch, uint32_t bias, int list, int32_t token,
                int32_t index)
{
    const smla_key_list &keys = launch.params.lists[list];
    const list_facts &facts = launch.lists[list];
    if (index < 0) {
        return NO_ROW;
    }
    const int64_t slot =
        keys.map.block_table == NULL ? index : map_index(keys.map, facts.block_size, token, index);
    if (slot < 0 || slot >= facts.num_slots) {
        return NO_ROW;
    }
    const uint32_t page = smla_divide_uint32((uint32_t)slot, facts.block_size);
    const uint32_t offset = (uint32_t)slot - page * (uint32_t)facts.block_size.divisor;
    return page * (uint32_t)(keys.kv.page_stride_bytes >> 4) +
           offset * (uint32_t)(keys.kv.token_stride_bytes >> 4) + bias;
}

/* What a gather warp keeps: little, for it has 24 registers. */
typedef struct gather_state {
    uint32_t base;   /* of shared memory */
    uint32_t slot;   /* of the ring */
    uint32_t parity; /* of its empty barrier */
} gather_state;

static __device__ __forceinline__ int
find_gather_warp(void)
{
    return (int)((uint32_t)ptx_forget((int)threadIdx.x) / SMLA_WARP_LANES) - CONSUMER_WARPS;
}

/* Zeros in place of rows that are not there. `to` has the warp's four. */
static __device__ __forceinline__ void
clear_rows(uint32_t to, uint32_t is_key)
{
#pragma unroll 1
    for (int i = 0; i < GATHER_KEYS; i++) {
#pragma unroll 1
        for (uint32_t at = (ptx_forget((int)threadIdx.x) % SMLA_WARP_LANES) * 16;
             at < FP8_ROW_BYTES && !(is_key >> i & 1); at += SMLA_WARP_LANES * 16) {
            ptx_clear_shared_16(to + i * FP8_ROW_BYTES + at);
        }
    }
    ptx_fence_async_shared(); /* before a later bulk copy to the same place */
    __syncwarp();
}

/* The warp's four rows of a granule, from `from`; lanes first_lane to first_lane + 3 know where.
 * The addresses are the warp's, not a lane's: straight code for one thread, four copies. */
template <typename Shape>
static __device__ __forceinline__ void
copy_rows(const gather_state &state, const uint8_t *from, uint32_t offset, int first_lane,
          uint32_t is_key)
{
    typedef hopper_memory<Shape> memory;
    const uint32_t slot = __shfl_sync(0xFFFFFFFFu, state.slot, 0); /* known to be the warp's */
    const uint32_t warp = (uint32_t)find_gather_warp();
    const uint32_t full = state.base + (uint32_t)offsetof(memory, full) + 8 * slot;
    const uint32_t to = state.base + (uint32_t)offsetof(memory, ring) + slot * GRANULE_BYTES +
                        warp * (GATHER_KEYS * FP8_ROW_BYTES);
    uint32_t offsets[GATHER_KEYS];
#pragma unroll
    for (int i = 0; i < GATHER_KEYS; i++) {
        offsets[i] = __shfl_sync(0xFFFFFFFFu, offset, first_lane + i);
    }
    if (is_key != 15) {
        clear_rows(to, is_key);
    }
    const bool is_elected = ptx_elect();
    ptx_mbarrier_arrive(full, !is_elected);
    if (is_elected) {
        ptx_store_shared_1(state.base + (uint32_t)offsetof(memory, is_key) + 4 * slot + warp,
                           is_key);
        ptx_mbarrier_arrive_expect(full, FP8_ROW_BYTES * __popc(is_key));
        if (is_key == 15) {
#pragma unroll
            for (int i = 0; i < GATHER_KEYS; i++) {
                ptx_bulk_copy(to + i * FP8_ROW_BYTES, from + (uint64_t)offsets[i] * 16,
                              FP8_ROW_BYTES, full);
            }
        } else {
#pragma unroll
            for (int i = 0; i < GATHER_KEYS; i++) {
                if (is_key >> i & 1) {
                    ptx_bulk_copy(to + i * FP8_ROW_BYTES, from + (uint64_t)offsets[i] * 16,
                                  FP8_ROW_BYTES, full);
                }
            }
        }
    }
    __syncwarp();
}

/* A list of a work. Lane l has key l % 4 of the warp's four in granule l / 4 of a step. */
template <typename Shape>
static __device__ __forceinline__ void
gather_list(const hopper_launch &launch, const cta_work &work, int list, gather_state *state)
{
    typedef hopper_memory<Shape> memory;
    const smla_key_list &keys = launch.base.params.lists[list];
    const column_range columns = find_columns(launch.base, work, list);
    const int lane = (int)(threadIdx.x % SMLA_WARP_LANES);
    /* columns of the lane to go, after this step's */
    int32_t left = columns.end - columns.begin - lane / GATHER_KEYS * GRANULE_KEYS -
                   find_gather_warp() * GATHER_KEYS - lane % GATHER_KEYS;
    const int32_t *at = keys.indices + work.token * keys.indices_stride_token + columns.end - left;
    uint32_t index;
    ptx_load_4(at, left > 0, NO_ROW, &index);
#pragma unroll 1
    for (int32_t steps = count_steps(columns); steps > 0; steps--) {
        const uint32_t offset =
            find_row_offset(launch.base, launch.lists[list].bias, list, work.token, (int32_t)index);
        const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, offset != NO_ROW);
        left -= STEP_KEYS;
        at += STEP_KEYS;
        ptx_load_4(at, left > 0, NO_ROW, &index); /* of the next step */
#pragma unroll 1
        for (int i = 0; i < STEP_GRANULES; i++) {
            ptx_mbarrier_wait(state->base + (uint32_t)offsetof(memory, empty) + 8 * state->slot,
                              state->parity);
            copy_rows<Shape>(*state, launch.lists[list].lowest, offset, i * GATHER_KEYS,
                             is_key >> i * GATHER_KEYS & 15);
            state->slot++;
            if (state->slot == Shape::GRANULES) {
                state->slot = 0;
                state->parity ^= 1;
            }
        }
    }
}

template <typename Shape>
static __device__ __forceinline__ void
gather(const hopper_launch &launch, hopper_memory<Shape> *shared)
{
    gather_state state;
    /* through a shuffle: else the address is computed again and again */
    state.base = __shfl_sync(0xFFFFFFFFu, ptx_shared_address(shared), 0);
    state.slot = 0;
    state.parity = 1;
#pragma unroll 1
    for (int idx = (int)blockIdx.x; idx < launch.num_works; idx += (int)gridDim.x) {
        const cta_work work = find_work(launch.base, launch.base.num_head_tiles, idx, Shape::HEADS);
#pragma unroll 1
        for (int list = 0; list < launch.base.params.num_lists; list++) {
            gather_list<Shape>(launch, work, list, &state);
        }
    }
}

/* ---- Consumers: state ---------------------------------------------------------------------- */

/* Which part of everything a thread has. */
typedef struct lane_place {
    int group;  /* warpgroup */
    int warp;   /* of the group */
    int lane;   /* of the warp */
    int row;    /* lane / 4: of fragments */
    int column; /* lane % 4 */
} lane_place;

/* Computed anew where it is called: kept over everything it would cost the loop its registers. */
static __device__ __forceinline__ lane_place
find_place(void)
{
    const uint32_t thread = (uint32_t)ptx_forget((int)threadIdx.x); /* unsigned: shifts and masks */
    const uint32_t lane = thread % SMLA_WARP_LANES;
    return lane_place{(int)(thread / GROUP_THREADS), (int)(thread / SMLA_WARP_LANES % 4), (int)lane,
                      (int)(lane / 4), (int)(lane % 4)};
}

/* Where things are in shared memory. */
typedef struct hopper_addresses {
    uint32_t ring;
    uint32_t scales;
    uint32_t full;
    uint32_t empty;
    uint32_t is_key;
    uint32_t weighed;
    uint32_t added;
    uint32_t probs;            /* of the own group */
    uint64_t query_descriptor; /* of descriptors, wgmma.cuh */
    uint64_t probs_descriptor; /* of both groups */
} hopper_addresses;

template <typename Shape>
static __device__ __forceinline__ hopper_addresses
find_addresses(hopper_memory<Shape> *shared, int group)
{
    hopper_addresses at;
    at.ring = ptx_shared_address(shared->ring);
    at.scales = ptx_shared_address(shared->scales);
    at.full = ptx_shared_address(shared->full);
    at.empty = ptx_shared_address(shared->empty);
    at.is_key = ptx_shared_address(shared->is_key);
    at.weighed = ptx_shared_address(shared->weighed);
    at.added = ptx_shared_address(shared->added);
    at.probs = ptx_shared_address(shared->probs[group]);
    at.query_descriptor =
        wgmma_descriptor(ptx_shared_address(shared->query), 1024, WGMMA_SWIZZLE_128);
    at.probs_descriptor = wgmma_descriptor(ptx_shared_address(shared->probs), 8 * Shape::PROB_BYTES,
                                           Shape::PROBS_SWIZZLE);
    return at;
}

/* Whether the keys of rows row and row + 8 of the warp's granule are there: all bits or none. */
typedef struct key_masks {
    uint32_t first;
    uint32_t second;
} key_masks;

/* What a consumer thread keeps over a row. */
template <typename Shape> struct consumer {
    float out[4][Shape::HEADS / 2];
    float scores[Shape::HEADS / 2];
    uint32_t raw[2][8]; /* values of a granule */
    uint32_t scale[2][2];
    uint32_t a[2][16]; /* the same as A */
    int own;           /* ring slot of the group's block */
    uint32_t phase;    /* bit 0: parity of its full barriers, bit 1: of its number; steps to go */
};

enum { RING_PARITY = 1, BLOCK_PARITY = 2, ONE_STEP = 4 };

template <typename Shape>
static __device__ __forceinline__ int
wrap_slot(int slot)
{
    return slot >= Shape::GRANULES ? slot - Shape::GRANULES : slot;
}

/* Ring slot of the other group's older block. In group 0's first step there is none: any rows that
 * are there, for their weights are 0. */
template <typename Shape>
static __device__ __forceinline__ int
find_other(const consumer<Shape> &state, bool has_other)
{
    const int slot = state.own - (has_other ? (int)BLOCK_GRANULES : 0);
    return slot < 0 ? slot + Shape::GRANULES : slot;
}

/* Marks the row. */
template <typename Shape>
static __device__ __forceinline__ void
lose_row(hopper_memory<Shape> *shared, bool is_lost)
{
    ptx_store_shared_1_if(ptx_shared_address(&shared->is_lost[ptx_forget((int)threadIdx.x)]), 1,
                          is_lost);
}

static __device__ __forceinline__ key_masks
load_key_masks(const hopper_addresses &at, const lane_place &me, int slot)
{
    const uint32_t bits = ptx_load_shared_4(at.is_key + 4 * slot);
    const int bit = 8 * (me.row >> 2) + (me.row & 3);
    return key_masks{(uint32_t)((int32_t)(bits << (31 - bit)) >> 31),
                     (uint32_t)((int32_t)(bits << (15 - bit)) >> 31)};
}

static __device__ __forceinline__ float
power_of_two(int exponent)
{
    return smla_bits_float((uint32_t)(exponent + 127) << 23);
}

/* ---- Consumers: query ---------------------------------------------------------------------- */

/* A lane's part of the query of head 8 warp + row: of each scale tile the dimensions 32 column to
 * 32 column + 31, and 16 of the RoPE part. */
typedef struct query_part {
    uint32_t nope[SMLA_NUM_SCALE_TILES][16];
    uint32_t rope[8];
} query_part;

template <bool ALIGNED>
static __device__ __forceinline__ void
load_query_part(const smla_attention_params &params, const cta_work &work, int head, int column,
                query_part *part)
{
    const uint16_t *const nope = params.q_nope + work.token * params.q_nope_stride_token +
                                 (work.first_head + head) * params.q_nope_stride_head + 32 * column;
    const uint16_t *const rope = params.q_pe + work.token * params.q_pe_stride_token +
                                 (work.first_head + head) * params.q_pe_stride_head + 16 * column;
#pragma unroll
    for (int t = 0; t < SMLA_NUM_SCALE_TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            smla_load_words<16, ALIGNED>(nope + t * SMLA_SCALE_TILE + 8 * i, &part->nope[t][4 * i]);
        }
    }
    smla_load_words<16, ALIGNED>(rope, &part->rope[0]);
    smla_load_words<16, ALIGNED>(rope + 8, &part->rope[4]);
}

static __device__ __forceinline__ uint32_t
max_of_pairs(uint32_t pair_max, uint32_t pair)
{
    return __vmaxu2(pair_max, pair & 0x7FFF7FFFu);
}

/* The largest absolute value, as the bits of a bf16, of the lane's head. */
static __device__ __forceinline__ uint32_t
find_query_max(const query_part &part)
{
    uint32_t pair = 0;
#pragma unroll
    for (int t = 0; t < SMLA_NUM_SCALE_TILES; t++) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            pair = max_of_pairs(pair, part.nope[t][i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        pair = max_of_pairs(pair, part.rope[i]);
    }
    uint32_t value = max(pair & 0xFFFFu, pair >> 16);
    value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
    return max(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

/* One 64-dimension tile of the lane's head: word i of 16 dimensions goes to chunk i, of 8, and
 * there to word `column`: the order in which score_block has bytes of rows. */
template <typename Shape>
static __device__ __forceinline__ void
store_query_words(hopper_memory<Shape> *shared, int tile, int head, int column,
                  const uint32_t words[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        *(uint32_t *)&shared->query[tile][head][(i ^ (head & 7)) * 16 + 4 * column] = words[i];
    }
}

template <typename Shape>
static __device__ __forceinline__ void
store_query_nope(hopper_memory<Shape> *shared, int head, int column, const query_part &part,
                 float factor)
{
#pragma unroll
    for (int tile = 0; tile < 2 * SMLA_NUM_SCALE_TILES; tile++) {
        uint32_t words[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t pair = part.nope[tile / 2][tile % 2 * 8 + i];
            words[i] = ptx_cvt_f16x2(smla_low_bf16(pair) * factor, smla_high_bf16(pair) * factor);
        }
        store_query_words(shared, tile, head, column, words);
    }
}

/* The largest exponent of a scale among the warp's keys of the work's first 128, 0 for none. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
find_scale_max(const hopper_addresses &at, const lane_place &me, int slot, uint32_t parity)
{
    ptx_mbarrier_wait(at.full + 8 * slot, parity);
    const key_masks is_key = load_key_masks(at, me, slot);
    const uint32_t from =
        at.ring + slot * GRANULE_BYTES + me.row * FP8_ROW_BYTES + SCALE_OFFSET + 4 * me.column;
    const uint32_t a = ptx_load_shared_4(from) & is_key.first;
    const uint32_t b = ptx_load_shared_4(from + 8 * FP8_ROW_BYTES) & is_key.second;
    return __reduce_max_sync(0xFFFFFFFFu, max(a & 0x7F800000u, b & 0x7F800000u)) >> 23;
}

/* The query to shared memory, and from it and the scales of the first 128 keys the powers of two
 * of the work. After it everyone may multiply. */
template <typename Shape>
static __device__ __forceinline__ void
store_query(const hopper_launch &launch, const cta_work &work, const lane_place &me,
            hopper_memory<Shape> *shared, consumer<Shape> *state)
{
    const hopper_addresses at = find_addresses(shared, me.group);
    const smla_attention_params &params = launch.base.params;
    const int warp = 4 * me.group + me.warp;
    const int head = 8 * warp + me.row;
    query_part part = {};
    if (head < work.num_heads) {
        if (launch.base.q_is_aligned) {
            load_query_part<true>(params, work, head, me.column, &part);
        } else {
            load_query_part<false>(params, work, head, me.column, &part);
        }
    }
    uint32_t head_max = find_query_max(part);
    const bool is_finite =
        head_max < 0x7F80; /* else the head's results are NaN, whatever happens */
    head_max = is_finite ? head_max : 0;
    if (head < Shape::HEADS && me.column == 0) {
        shared->reference[head] = is_finite ? 0.0f : NAN;
    }
    const uint32_t warp_max = __reduce_max_sync(0xFFFFFFFFu, head_max);
    if (me.lane == 0) {
        shared->query_max[warp] = warp_max;
    }
    /* zeros in place of the block before group 1's first */
    if (me.group == 1) {
#pragma unroll
        for (int i = 0; i < 64 * Shape::PROB_BYTES / 16 / GROUP_THREADS; i++) {
            ((uint4 *)shared->probs[1])[i * GROUP_THREADS + 32 * me.warp + me.lane] =
                make_uint4(0, 0, 0, 0);
        }
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    uint32_t query_max = 0;
#pragma unroll
    for (int i = 0; i < (Shape::HEADS + 7) / 8; i++) {
        query_max = max(query_max, shared->query_max[i]);
    }
    int exponent = query_max == 0 ? 0 : (int)(query_max >> 7) - 127 - QUERY_EXPONENT;
    lose_row(shared, exponent > MAX_QUERY_EXPONENT || exponent < -MAX_QUERY_EXPONENT ||
                         (head_max != 0 && (head_max >> 7) + MAX_HEAD_RATIO < query_max >> 7));
    exponent = min(max(exponent, -(int)MAX_QUERY_EXPONENT), (int)MAX_QUERY_EXPONENT);
    if (head < Shape::HEADS) {
        store_query_nope(shared, head, me.column, part, power_of_two(-exponent));
    }
    int slot = state->own + me.warp;
    const uint32_t parity = (state->phase & RING_PARITY) ^ (slot >= Shape::GRANULES);
    slot = wrap_slot<Shape>(slot);
    const uint32_t warp_scale = find_scale_max<Shape>(at, me, slot, parity);
    if (me.lane == 0) {
        shared->scale_max[warp] = warp_scale;
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    uint32_t scale_max = 0;
#pragma unroll
    for (int i = 0; i < CONSUMER_WARPS; i++) {
        scale_max = max(scale_max, shared->scale_max[i]);
    }
    int key_exponent = scale_max == 0 ? 0 : (int)scale_max - 127 - SCALE_EXPONENT;
    key_exponent = min(max(key_exponent, -(int)MAX_KEY_EXPONENT), (int)MAX_KEY_EXPONENT);
    if (head < Shape::HEADS) {
        const uint32_t factor = (uint32_t)(127 - exponent - key_exponent) * 0x00800080u;
        uint32_t words[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            words[i] = ptx_mul_bf16x2(part.rope[i], factor);
        }
        store_query_words(shared, QUERY_TILES - 1, head, me.column, words);
    }
    const float score_scale =
        launch.base.scale_log2 * power_of_two(exponent) * power_of_two(key_exponent);
    lose_row(shared, !(fabsf(score_scale) <= 0x1p100f) ||
                         (fabsf(score_scale) < 0x1p-100f && launch.base.scale_log2 != 0.0f));
    if (warp == 0 && me.lane == 0) {
        shared->score_scale = score_scale;
        shared->key_unit = power_of_two(key_exponent);
        shared->window = (uint32_t)(key_exponent + 127 - WINDOW_LOW);
    }
    ptx_fence_async_shared();
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
}

/* ---- Consumers: scores --------------------------------------------------------------------- */

/* The scales of the warp's keys: f16 of scale / E, to the table that values are multiplied from,
 * and here (low half row, high half row + 8) of scale tile `column`. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
take_scales(hopper_memory<Shape> *shared, const hopper_addresses &at, const lane_place &me,
            int slot, uint32_t row, consumer<Shape> *state)
{
    const uint32_t window = *(const volatile uint32_t *)&shared->window;
    const float a = smla_bits_float(ptx_load_shared_4(row + SCALE_OFFSET + 4 * me.column));
    const float b =
        smla_bits_float(ptx_load_shared_4(row + SCALE_OFFSET + 4 * me.column + 8 * FP8_ROW_BYTES));
    const key_masks is_key = load_key_masks(at, me, slot);
    const bool a_fits = (smla_float_bits(a) >> 23) - window < WINDOW_SIZE;
    const bool b_fits = (smla_float_bits(b) >> 23) - window < WINDOW_SIZE;
    lose_row(shared, (!a_fits & (is_key.first != 0)) | (!b_fits & (is_key.second != 0)));
    const float unit = smla_bits_float((254 - WINDOW_LOW - window) << 23); /* 1 / E */
    const uint32_t pair = ptx_cvt_f16x2(a * unit, b * unit);
    const uint32_t to = at.scales + slot * (SMLA_NUM_SCALE_TILES * GRANULE_KEYS * 2) +
                        me.column * (GRANULE_KEYS * 2) + (4 * (me.row >> 1) + (me.row & 1)) * 2;
    asm volatile("{\n\t"
                 ".reg .b16 low, high;\n\t"
                 "mov.b32 {low, high}, %1;\n\t"
                 "st.shared.b16 [%0], low;\n\t"
                 "st.shared.b16 [%0 + 4], high;\n\t"
                 "}"
                 :
                 : "r"(to), "r"(pair)
                 : "memory");
    return pair;
}

/* Multiplies two steps of 16 dimensions: A in a, B from `tile` of the query at `step`. */
template <typename Shape, bool IS_ROPE>
static __device__ __forceinline__ void
multiply_scores(const hopper_addresses &at, int tile, int step, uint32_t a[16],
                float (&scores)[Shape::HEADS / 2])
{
    wgmma_fence();
#pragma unroll
    for (int j = step; j < step + 2; j++) {
        const uint64_t b =
            wgmma_advance(at.query_descriptor, ((tile * Shape::HEADS * 128 + j * 32) >> 4));
        if constexpr (IS_ROPE) {
            wgmma_bf16(scores, a + 4 * j, b, true);
        } else {
            wgmma_f16<false>(scores, a + 4 * j, b, (tile | j) != 0);
        }
    }
    wgmma_commit();
}

/* Bytes of rows row and row + 8 for a 64-dimension tile. */
static __device__ __forceinline__ void
load_nope_words(uint32_t nope, int tile, uint32_t words[8])
{
    const uint32_t from = nope + 128 * (tile / 2) + 16 * (tile % 2);
    ptx_load_shared_16(from, words);
    ptx_load_shared_16(from + 8 * FP8_ROW_BYTES, words + 4);
}

/* Starts scores = q . k / units for the group's block: 64 keys, a granule per warp. The last groups
 * of products are under way afterwards. */
template <typename Shape>
static __device__ __forceinline__ void
score_block(hopper_memory<Shape> *shared, const hopper_addresses &at, const lane_place &me,
            consumer<Shape> *state)
{
    int slot = state->own + me.warp;
    const uint32_t parity = (state->phase & RING_PARITY) ^ (slot >= Shape::GRANULES);
    slot = wrap_slot<Shape>(slot);
    const uint32_t row = at.ring + slot * GRANULE_BYTES + me.row * FP8_ROW_BYTES;
    const uint32_t nope = row + 32 * me.column;
    const uint32_t rope = nope + ROPE_OFFSET;
    uint32_t words[3][8];
    ptx_mbarrier_wait(at.full + 8 * slot, parity);
    const uint32_t scales = take_scales(shared, at, me, slot, row, state);
    load_nope_words(nope, 0, words[0]);
    load_nope_words(nope, 1, words[1]);
    uint32_t scale[2];
#pragma unroll
    for (int tile = 0; tile < QUERY_TILES - 1; tile++) {
        uint32_t a[16];
        uint32_t *const now = words[tile % 3];
        if (tile < QUERY_TILES - 3) {
            load_nope_words(nope, tile + 2, words[(tile + 2) % 3]);
        } else { /* RoPE of rows row and row + 8 */
            const uint32_t from = rope + (tile - (QUERY_TILES - 3)) * 8 * FP8_ROW_BYTES;
            ptx_load_shared_16(from, words[(tile + 2) % 3]);
            ptx_load_shared_16(from + 16, words[(tile + 2) % 3] + 4);
        }
        if (tile % 2 == 0) {
            const uint32_t pair = __shfl_sync(0xFFFFFFFFu, scales, (me.lane & 28) | tile / 2);
            scale[0] = __byte_perm(pair, pair, 0x1010);
            scale[1] = __byte_perm(pair, pair, 0x3232);
        }
#pragma unroll
        for (int step = 0; step < 4; step += 2) {
            wgmma_wait<1>();
#pragma unroll
            for (int j = step; j < step + 2; j++) {
                ptx_pin(&now[j]);
                ptx_pin(&now[4 + j]);
            }
#pragma unroll
            for (int j = step; j < step + 2; j++) {
                ptx_cvt_f16x4_e4m3x4(now[j], &a[4 * j], &a[4 * j + 2]);
                ptx_cvt_f16x4_e4m3x4(now[4 + j], &a[4 * j + 1], &a[4 * j + 3]);
                a[4 * j] = ptx_mul_f16x2(a[4 * j], scale[0]);
                a[4 * j + 1] = ptx_mul_f16x2(a[4 * j + 1], scale[1]);
                a[4 * j + 2] = ptx_mul_f16x2(a[4 * j + 2], scale[0]);
                a[4 * j + 3] = ptx_mul_f16x2(a[4 * j + 3], scale[1]);
            }
            multiply_scores<Shape, false>(at, tile, step, a, state->scores);
        }
    }
    wgmma_wait<1>();
    const uint32_t *const low = words[(QUERY_TILES - 1) % 3];
    const uint32_t *const high = words[QUERY_TILES % 3];
    uint32_t a[16];
#pragma unroll
    for (int step = 0; step < 4; step += 2) {
        wgmma_wait<1>();
#pragma unroll
        for (int j = step; j < step + 2; j++) {
            a[4 * j] = low[2 * j];
            a[4 * j + 1] = high[2 * j];
            a[4 * j + 2] = low[2 * j + 1];
            a[4 * j + 3] = high[2 * j + 1];
        }
        multiply_scores<Shape, true>(at, QUERY_TILES - 1, step, a, state->scores);
    }
}

/* ---- Consumers: weights -------------------------------------------------------------------- */

/* Heads of a thread's sums after reduce_rows: of chunk 0. */
static __device__ __forceinline__ int
head_of_sum(const lane_place &me)
{
    const int pick = (me.lane & 16 ? 2 : 0) + (me.lane & 8 ? 1 : 0);
    return 8 * (pick >> 1) + 2 * me.column + (pick & 1);
}

template <bool IS_MAX>
static __device__ __forceinline__ float
merge_pair(float a, float b)
{
    return IS_MAX ? fmaxf(a, b) : a + b;
}

/* Four heads' values over the eight rows of a warp: one head's whole (head_of_sum) per lane. */
template <bool IS_MAX>
static __device__ __forceinline__ float
reduce_rows(const float values[4], int lane)
{
    const bool upper = lane & 16;
    const float give_0 = upper ? values[0] : values[2];
    const float give_1 = upper ? values[1] : values[3];
    const float keep_0 = upper ? values[2] : values[0];
    const float keep_1 = upper ? values[3] : values[1];
    const float half_0 = merge_pair<IS_MAX>(keep_0, __shfl_xor_sync(0xFFFFFFFFu, give_0, 16));
    const float half_1 = merge_pair<IS_MAX>(keep_1, __shfl_xor_sync(0xFFFFFFFFu, give_1, 16));
    const bool odd = lane & 8;
    const float give = odd ? half_0 : half_1;
    const float quarter =
        merge_pair<IS_MAX>(odd ? half_1 : half_0, __shfl_xor_sync(0xFFFFFFFFu, give, 8));
    return merge_pair<IS_MAX>(quarter, __shfl_xor_sync(0xFFFFFFFFu, quarter, 4));
}

/* The larger of a score of rows row and row + 8, those without a key left out. */
static __device__ __forceinline__ float
max_of_keys(key_masks is_key, float a, float b)
{
    return fmaxf(is_key.first ? a : -INFINITY, is_key.second ? b : -INFINITY);
}

/* reference[head] from the scores of the first 128 keys. */
template <typename Shape>
static __device__ __forceinline__ void
find_references(const hopper_launch &launch, const hopper_addresses &at, const lane_place &me,
                hopper_memory<Shape> *shared, consumer<Shape> *state)
{
    const key_masks is_key = load_key_masks(at, me, wrap_slot<Shape>(state->own + me.warp));
    const int thread = GROUP_THREADS * me.group + SMLA_WARP_LANES * me.warp + me.lane;
#pragma unroll
    for (int chunk = 0; chunk < Shape::CHUNKS; chunk++) {
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int from = 8 * chunk + 4 * (i / 2) + i % 2;
            values[i] = max_of_keys(is_key, state->scores[from] * shared->score_scale,
                                    state->scores[from + 2] * shared->score_scale);
        }
        const float top = reduce_rows<true>(values, me.lane);
        if (!(me.lane & 4)) {
            shared->sums[4 * me.group + me.warp][16 * chunk + head_of_sum(me)] = top;
        }
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    if (thread < Shape::HEADS) {
        float top = shared->sums[0][thread];
#pragma unroll
        for (int warp = 1; warp < CONSUMER_WARPS; warp++) {
            top = fmaxf(top, shared->sums[warp][thread]);
        }
        const bool fits = fabsf(top) < 0x1p22f;            /* -INFINITY: no key */
        const float otherwise = shared->reference[thread]; /* NaN: of store_query */
        lose_row(shared, !fits && !isnan(otherwise));
        shared->reference[thread] = fits ? ceilf(top) + launch.headroom : otherwise;
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
}

/* scores -> exponents of weights; a score far above the reference marks the row. */
template <typename Shape>
static __device__ __forceinline__ void
find_exponents(hopper_memory<Shape> *shared, const lane_place &me, key_masks is_key,
               consumer<Shape> *state)
{
    float top[2] = {-INFINITY, -INFINITY};
    const float scale = *(const volatile float *)&shared->score_scale;
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
        const float2 reference = *(const float2 *)&shared->reference[8 * j + 2 * me.column];
        float *const x = &state->scores[4 * j];
        x[0] = fmaf(x[0], scale, -reference.x);
        x[1] = fmaf(x[1], scale, -reference.y);
        x[2] = fmaf(x[2], scale, -reference.x);
        x[3] = fmaf(x[3], scale, -reference.y);
        top[0] = fmaxf(top[0], fmaxf(x[0], x[1]));
        top[1] = fmaxf(top[1], fmaxf(x[2], x[3]));
    }
    /* f16 ends below 2^16; without a key the weight is masked, but must be finite */
    lose_row(shared, !(top[0] < (is_key.first ? 15.0f : 126.0f)) |
                         !(top[1] < (is_key.second ? 15.0f : 126.0f)));
}

/* Weights of 16 heads: to the group's slot of probs, and into the sums. */
template <typename Shape>
static __device__ __forceinline__ void
weigh_chunk(const hopper_addresses &at, const lane_place &me, key_masks is_key, int chunk,
            hopper_memory<Shape> *shared, consumer<Shape> *state)
{
    const float weight[2] = {smla_bits_float(is_key.first & 0x3F800000u),
                             smla_bits_float(is_key.second & 0x3F800000u)};
    float e[8], values[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        e[i] = ptx_exp2(state->scores[8 * chunk + i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int from = 4 * (i / 2) + i % 2;
        values[i] = fmaf(e[from + 2], weight[1], e[from] * weight[0]);
    }
    const int key = 16 * me.warp + (me.lane & 15);
    const int piece = 2 * chunk + (me.lane >> 4);
    const int flip = Shape::HEADS == 64   ? key & 7
                     : Shape::HEADS == 32 ? key >> 1 & 3
                                          : key >> 2 & 1;
    ptx_stmatrix_x4(at.probs + key * Shape::PROB_BYTES + (piece ^ flip) * 16,
                    ptx_cvt_f16x2(e[0], e[1]) & is_key.first,
                    ptx_cvt_f16x2(e[2], e[3]) & is_key.second,
                    ptx_cvt_f16x2(e[4], e[5]) & is_key.first,
                    ptx_cvt_f16x2(e[6], e[7]) & is_key.second);
    const float sum = reduce_rows<false>(values, me.lane);
    const int warp = 4 * me.group + me.warp;
    const int head = 16 * chunk + head_of_sum(me);
    if (!(me.lane & 4)) {
        shared->sums[warp][head] += sum;
    }
    if constexpr (Shape::MAXIMA) {
        const float *const x = &state->scores[8 * chunk];
        const float tops[4] = {max_of_keys(is_key, x[0], x[2]), max_of_keys(is_key, x[1], x[3]),
                               max_of_keys(is_key, x[4], x[6]), max_of_keys(is_key, x[5], x[7])};
        const float top = reduce_rows<true>(tops, me.lane);
        if (!(me.lane & 4)) {
            shared->tops[warp][head] = fmaxf(shared->tops[warp][head], top);
        }
    }
}

/* ---- Consumers: values --------------------------------------------------------------------- */

/* The lane's values of a granule: 8 dimensions of keys 2 column, 2 column + 1 and 8 further. */
template <typename Shape>
static __device__ __forceinline__ void
load_values(const hopper_addresses &at, const lane_place &me, int slot, int buffer,
            consumer<Shape> *state)
{
    const uint32_t from = at.ring + slot * GRANULE_BYTES + 2 * me.column * FP8_ROW_BYTES +
                          256 * me.group + 64 * me.warp + 8 * me.row;
    const int tile = 2 * me.group + (me.warp >> 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ptx_load_shared_8(from + (i % 2 + 8 * (i / 2)) * FP8_ROW_BYTES, &state->raw[buffer][2 * i]);
    }
    ptx_load_shared_8(at.scales + slot * (SMLA_NUM_SCALE_TILES * GRANULE_KEYS * 2) +
                          tile * (GRANULE_KEYS * 2) + me.column * 8,
                      state->scale[buffer]);
}

/* raw -> A of the four products of a granule: rows of product b are dimensions 2b and 2b + 1 of
 * every eight. */
template <typename Shape>
static __device__ __forceinline__ void
convert_values(int buffer, consumer<Shape> *state)
{
    const uint32_t *const raw = state->raw[buffer];
#pragma unroll
    for (int b = 0; b < 4; b++) {
        uint32_t *const a = &state->a[buffer][4 * b];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t bytes =
                __byte_perm(raw[4 * i + b / 2], raw[4 * i + 2 + b / 2], b % 2 ? 0x7362 : 0x5140);
            ptx_cvt_f16x4_e4m3x4(bytes, &a[2 * i], &a[2 * i + 1]);
            a[2 * i] = ptx_mul_f16x2(a[2 * i], state->scale[buffer][i]);
            a[2 * i + 1] = ptx_mul_f16x2(a[2 * i + 1], state->scale[buffer][i]);
        }
    }
}

/* out += values of a granule * the weights of `keys`: 64 times the slot plus the first key. */
template <typename Shape>
static __device__ __forceinline__ void
add_values(const hopper_addresses &at, int keys, int buffer, consumer<Shape> *state)
{
    const uint64_t b = wgmma_advance(at.probs_descriptor, (keys * Shape::PROB_BYTES) >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_f16<true>(state->out[i], &state->a[buffer][4 * i], b, true);
    }
    wgmma_commit();
}

/* Waits for the weights of the other group's older block, and has its first values ready. */
template <typename Shape>
static __device__ __forceinline__ void
meet_other_block(const hopper_addresses &at, const lane_place &me, bool has_other,
                 consumer<Shape> *state)
{
    const int other = find_other<Shape>(*state, has_other);
    ptx_mbarrier_wait(at.weighed + 8 * (me.group ^ 1), (state->phase >> 1 ^ me.group ^ 1) & 1);
    load_values(at, me, other, 0, state);
    load_values(at, me, wrap_slot<Shape>(other + 1), 1, state);
    convert_values(0, state);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        ptx_pin(&state->a[0][i]);
    }
    wgmma_wait<0>(); /* the scores */
}

/* Makes the group's weights visible to wgmma of both. */
template <typename Shape>
static __device__ __forceinline__ void
publish_weights(const hopper_addresses &at, const lane_place &me)
{
    ptx_fence_async_shared();
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS);
    ptx_mbarrier_arrive(at.weighed + 8 * me.group, true);
}

/* The other group's older block and the own one, eight granules; meanwhile own scores become
 * weights. `has_other` is false in group 0's first block, where probs[1] is zero. */
template <typename Shape>
static __device__ __forceinline__ void
add_blocks(hopper_memory<Shape> *shared, const hopper_addresses &at, const lane_place &me,
           bool has_other, consumer<Shape> *state)
{
    const int other = find_other<Shape>(*state, has_other);
    const key_masks is_key = load_key_masks(at, me, wrap_slot<Shape>(state->own + me.warp));
#pragma unroll
    for (int batch = 0; batch < STEP_GRANULES; batch++) {
        const int slot =
            wrap_slot<Shape>((batch < BLOCK_GRANULES ? other : state->own) + batch % 4);
        if (batch > 0 && batch < STEP_GRANULES - 1 && batch != BLOCK_GRANULES - 1) {
            const int next =
                (batch + 1 < BLOCK_GRANULES ? other : state->own) + (batch + 1) % BLOCK_GRANULES;
            load_values(at, me, wrap_slot<Shape>(next), (batch + 1) & 1, state);
        }
        if (batch > 0) {
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < 8; i++) {
                ptx_pin(&state->raw[batch & 1][i]);
            }
            convert_values(batch & 1, state);
        }
        if (batch == BLOCK_GRANULES) {
            ptx_mbarrier_arrive(at.added + 8 * (me.group ^ 1), has_other);
        }
        const int group = batch < BLOCK_GRANULES ? me.group ^ 1 : me.group;
        add_values(at, 64 * group + 16 * (batch % BLOCK_GRANULES), batch & 1, state);
        ptx_mbarrier_arrive(at.empty + 8 * slot, batch >= BLOCK_GRANULES || has_other);
        if (batch == 0) {
            ptx_mbarrier_wait(at.added + 8 * me.group, (state->phase >> 1 ^ 1) & 1);
            find_exponents(shared, me, is_key, state);
        }
        if (batch == 1) {
            weigh_chunk(at, me, is_key, 0, shared, state);
        }
        if (batch == 2 && Shape::CHUNKS > 1) {
            weigh_chunk(at, me, is_key, 1, shared, state);
        }
        if (batch == 2 && Shape::CHUNKS > 2) {
            weigh_chunk(at, me, is_key, 2, shared, state);
        }
        if (batch == 3 && Shape::CHUNKS > 3) {
            weigh_chunk(at, me, is_key, 3, shared, state);
        }
        if (batch == 3) {
            publish_weights<Shape>(at, me);
            /* the first of the own granules: from here on all of them are known to have come */
            load_values(at, me, state->own, 0, state);
        }
    }
    state->own += STEP_GRANULES;
    state->phase ^= state->own >= Shape::GRANULES ? RING_PARITY : 0;
    state->own = wrap_slot<Shape>(state->own);
    wgmma_wait<0>();
}

/* Group 0 has still to add the values of group 1's last block. */
template <typename Shape>
static __device__ __forceinline__ void
add_last_block(const hopper_addresses &at, const lane_place &me, consumer<Shape> *state)
{
    ptx_mbarrier_wait(at.weighed + 8, state->phase >> 1 & 1);
#pragma unroll 1
    for (int batch = 0; batch < BLOCK_GRANULES; batch++) {
        const int slot = wrap_slot<Shape>(find_other<Shape>(*state, true) + batch);
        load_values(at, me, slot, 0, state);
        convert_values(0, state);
        ptx_mbarrier_arrive(at.empty + 8 * slot, true);
        add_values(at, 64 + 16 * batch, 0, state);
        wgmma_wait<0>();
    }
    ptx_mbarrier_arrive(at.added + 8, true);
}

/* ---- Consumers: results -------------------------------------------------------------------- */

/* Of a head: lse and max_logits, or the state of the partial row; leaves in factor what out is
 * multiplied with. */
template <typename Shape>
static __device__ __forceinline__ void
finish_head(const hopper_launch &launch, const cta_work &work, int head,
            hopper_memory<Shape> *shared)
{
    const float reference = shared->reference[head];
    float sum = 0.0f;
    float top = reference;
#pragma unroll
    for (int warp = 0; warp < CONSUMER_WARPS; warp++) {
        sum += shared->sums[warp][head];
    }
    if constexpr (Shape::MAXIMA) {
        top = shared->tops[0][head];
#pragma unroll
        for (int warp = 1; warp < CONSUMER_WARPS; warp++) {
            top = fmaxf(top, shared->tops[warp][head]);
        }
        top += reference;
    }
    top = sum == 0.0f ? -INFINITY : top;
    /* sums and out are multiples of 2^reference, and shall be of 2^(reference of the maximum) */
    const float shift = sum == 0.0f ? 1.0f : power_of_two((int)(reference - ceilf(top)));
    sum *= shift;
    float factor = shared->key_unit * shift;
    if (launch.base.params.num_splits == 1) {
        factor *=
            softmax_finish(launch.base.params, work.token, work.first_head + head, top, sum, true);
    } else {
        *(float2 *)(launch.base.partials.state + 2 * partial_row(launch.base, work, head)) =
            make_float2(top, sum);
    }
    shared->factor[head] = sum == 0.0f ? 0.0f : factor;
}

/* Where a row of `out`, or the partial row of it, begins. */
static __device__ __forceinline__ uint16_t *
find_out(const smla_attention_params &params, const cta_work &work, int head)
{
    return params.out + work.token * params.out_stride_token +
           (work.first_head + head) * params.out_stride_head;
}

template <typename Shape>
static __device__ __forceinline__ void
write_out_row(const hopper_launch &launch, const cta_work &work, const lane_place &me,
              hopper_memory<Shape> *shared, const consumer<Shape> &state)
{
    const smla_attention_params &params = launch.base.params;
    const int first_value = 256 * me.group + 64 * me.warp + 8 * me.row;
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
        const float2 factors = *(const float2 *)&shared->factor[8 * j + 2 * me.column];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int head = 8 * j + 2 * me.column + i;
            const float factor = i ? factors.y : factors.x;
            uint32_t words[4];
#pragma unroll
            for (int b = 0; b < 4; b++) {
                words[b] = smla_cvt_bf16x2(state.out[b][4 * j + i] * factor,
                                           state.out[b][4 * j + 2 + i] * factor);
            }
            if (!launch.out_is_aligned) {
                uint4 *const stage =
                    (uint4 *)((uint16_t *)shared->query + head * SMLA_KV_LORA_RANK);
                stage[first_value / 8] = make_uint4(words[0], words[1], words[2], words[3]);
            } else if (head < work.num_heads) {
                smla_store_vector_4(find_out(params, work, head) + first_value, words);
            }
        }
    }
    if (!launch.out_is_aligned) {
        ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
#pragma unroll 1
        for (int i = ptx_forget((int)threadIdx.x); i < work.num_heads * SMLA_KV_LORA_RANK;
             i += CONSUMER_THREADS) {
            find_out(params, work, i / SMLA_KV_LORA_RANK)[i % SMLA_KV_LORA_RANK] =
                ((const uint16_t *)shared->query)[i];
        }
    }
}

template <typename Shape>
static __device__ __forceinline__ void
write_partial_row(const hopper_launch &launch, const cta_work &work, const lane_place &me,
                  const hopper_memory<Shape> *shared, const consumer<Shape> &state)
{
    float *const to = launch.base.partials.out +
                      partial_row(launch.base, work, 2 * me.column) * SMLA_KV_LORA_RANK +
                      256 * me.group + 64 * me.warp + 8 * me.row;
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
        const float2 factors = *(const float2 *)&shared->factor[8 * j + 2 * me.column];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float factor = i ? factors.y : factors.x;
            uint32_t words[8];
#pragma unroll
            for (int b = 0; b < 4; b++) {
                words[2 * b] = smla_float_bits(state.out[b][4 * j + i] * factor);
                words[2 * b + 1] = smla_float_bits(state.out[b][4 * j + 2 + i] * factor);
            }
            if (8 * j + 2 * me.column + i < work.num_heads && factor != 0.0f) {
                smla_store_vector_4(to + (8 * j + i) * SMLA_KV_LORA_RANK, words);
                smla_store_vector_4(to + (8 * j + i) * SMLA_KV_LORA_RANK + 4, words + 4);
            }
        }
    }
}

/* The row's results; or its mark, if a thread lost it. */
template <typename Shape>
static __device__ __forceinline__ void
finish_row(const hopper_launch &launch, hopper_memory<Shape> *shared, const consumer<Shape> &state)
{
    const int idx = shared->work;
    const cta_work work = find_work(launch.base, launch.base.num_head_tiles, idx, Shape::HEADS);
    const lane_place me = find_place();
    const int warp = 4 * me.group + me.warp;
    const int thread = SMLA_WARP_LANES * warp + me.lane;
    if (ptx_barrier_or(BARRIER_CONSUMERS, CONSUMER_THREADS, shared->is_lost[thread])) {
        if (thread == 0) {
            const int number = idx / (int)gridDim.x;
            shared->redo[number / 32] |= 1u << number % 32;
        }
        return;
    }
    if (thread < work.num_heads) {
        finish_head(launch, work, thread, shared);
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    if (launch.base.params.num_splits > 1) {
        write_partial_row(launch, work, me, shared, state);
    } else {
        write_out_row(launch, work, me, shared, state);
    }
}

/* ---- Consumers: a row ---------------------------------------------------------------------- */

template <typename Shape>
static __device__ __forceinline__ void
clear_sums(const lane_place &me, hopper_memory<Shape> *shared, consumer<Shape> *state)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < Shape::HEADS / 2; j++) {
            state->out[i][j] = 0.0f;
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < Shape::CHUNKS; chunk++) {
        const int head = 16 * chunk + head_of_sum(me);
        if (!(me.lane & 4)) {
            shared->sums[4 * me.group + me.warp][head] = 0.0f;
            if constexpr (Shape::MAXIMA) {
                shared->tops[4 * me.group + me.warp][head] = -INFINITY;
            }
        }
    }
}

/* All steps of a row whose query is there. */
template <typename Shape>
static __device__ __forceinline__ void
consume_steps(const hopper_launch &launch, hopper_memory<Shape> *shared, consumer<Shape> *state)
{
    const lane_place me = find_place();
    const hopper_addresses at = find_addresses(shared, me.group);
    bool has_other = me.group == 1;
    score_block(shared, at, me, state);
    wgmma_wait<0>();
    find_references(launch, at, me, shared, state);
    clear_sums(me, shared, state);
    meet_other_block(at, me, has_other, state);
#pragma unroll 1
    for (;;) {
        add_blocks(shared, at, find_place(), has_other, state);
        state->phase -= ONE_STEP;
        if (state->phase < ONE_STEP) {
            break;
        }
        has_other = true;
        state->phase ^= BLOCK_PARITY;
        score_block(shared, at, find_place(), state);
        meet_other_block(at, find_place(), true, state);
    }
    if (me.group == 0) {
        add_last_block(at, me, state);
    }
    state->phase ^= BLOCK_PARITY;
}

template <typename Shape>
static __device__ __forceinline__ void
consume(const hopper_launch &launch, hopper_memory<Shape> *shared)
{
    consumer<Shape> state = {};
    state.own = BLOCK_GRANULES * find_place().group;
#pragma unroll 1
    for (int idx = (int)blockIdx.x; idx < launch.num_works; idx = shared->work + (int)gridDim.x) {
        const cta_work work = find_work(launch.base, launch.base.num_head_tiles, idx, Shape::HEADS);
        state.phase += ONE_STEP * count_all_steps(launch.base, work);
        ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS); /* nobody reads the last work's marks */
        if (threadIdx.x == 0) {
            shared->work = idx;
        }
        shared->is_lost[threadIdx.x] = 0;
        ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
        if (state.phase >= ONE_STEP) {
            store_query(launch, work, find_place(), shared, &state);
            consume_steps(launch, shared, &state);
        } else {
            clear_sums(find_place(), shared, &state);
        }
        finish_row(launch, shared, state);
    }
}

/* The marked rows, by the portable code, in the shared memory that nobody uses any more. */
template <typename Shape>
static __device__ __forceinline__ void
redo_rows(const hopper_launch &launch, hopper_memory<Shape> *shared)
{
    typedef shared_memory<typename Shape::Portable> portable_memory;
    static_assert(sizeof(portable_memory) <= offsetof(hopper_memory<Shape>, redo),
                  "marks outlive the rest");
    const uint32_t num_tiles =
        ((uint32_t)launch.base.params.num_heads + Shape::Portable::HEADS - 1) /
        Shape::Portable::HEADS;
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
#pragma unroll 1
    for (int number = 0; number * (int)gridDim.x + (int)blockIdx.x < launch.num_works; number++) {
        if (!(shared->redo[number / 32] >> number % 32 & 1)) {
            continue;
        }
        const uint32_t idx = (uint32_t)number * gridDim.x + blockIdx.x;
        const uint32_t part = idx / launch.base.num_head_tiles;
        const uint32_t first = idx % launch.base.num_head_tiles * Shape::REDO_TILES;
#pragma unroll 1
        for (uint32_t i = first; i < first + Shape::REDO_TILES && i < num_tiles; i++) {
            attend_cta<typename Shape::Portable>(launch.base, num_tiles,
                                                 (int)(part * num_tiles + i),
                                                 (portable_memory *)shared);
            ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
        }
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

template <typename Shape>
static __device__ __forceinline__ void
start(hopper_memory<Shape> *shared)
{
    const int thread = (int)threadIdx.x;
    if (thread == CONSUMER_THREADS) {
        for (int i = 0; i < Shape::GRANULES; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->full[i]), GATHER_WARPS * SMLA_WARP_LANES);
            ptx_mbarrier_init(ptx_shared_address(&shared->empty[i]), CONSUMER_THREADS);
        }
        for (int i = 0; i < 2; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->weighed[i]), GROUP_THREADS);
            ptx_mbarrier_init(ptx_shared_address(&shared->added[i]), GROUP_THREADS);
        }
        ptx_fence_mbarrier_init();
    }
    if (thread < MAX_WORKS / 32) {
        shared->redo[thread] = 0;
    }
    __syncthreads();
}

template <typename Shape>
__global__ void
__launch_bounds__(HOPPER_THREADS, 1) attend_hopper(const __grid_constant__ hopper_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    hopper_memory<Shape> *const shared = (hopper_memory<Shape> *)memory;
    start(shared);
    if (threadIdx.x >= CONSUMER_THREADS) {
        ptx_release_registers<GATHER_REGISTERS>();
        gather(launch, shared);
    } else {
        ptx_claim_registers<CONSUMER_REGISTERS>();
        consume(launch, shared);
        redo_rows(launch, shared);
    }
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* The first keys' maximum lies at 2^-headroom in f16, and every other weight may be off by 2^-25:
 * together no more than 2^-10 of the sum. */
static float
find_headroom(const smla_attention_params *params)
{
    int64_t columns = 0;
    for (int i = 0; i < params->num_lists; i++) {
        columns += smla_split_columns(params->lists[i].topk, params->num_splits);
    }
    float headroom = 4.0f;
    while (headroom > -8.0f && (float)columns > ldexpf(1.0f, 15 - (int)headroom)) {
        headroom -= 1.0f;
    }
    return headroom;
}

/* Rows are found by 32 bits, which count 16 bytes. */
static bool
find_span(const smla_kv_view *kv, row_span *span)
{
    const int64_t pages = kv->num_pages == 0 ? 0 : kv->num_pages - 1;
    const int64_t ends[2] = {pages * (kv->page_stride_bytes >> 4),
                             (kv->block_size - 1) * (kv->token_stride_bytes >> 4)};
    int64_t below = 0;
    int64_t above = 0;
    for (int i = 0; i < 2; i++) {
        below += ends[i] < 0 ? -ends[i] : 0;
        above += ends[i] > 0 ? ends[i] : 0;
    }
    span->lowest = kv->base - below * 16;
    span->bias = (uint32_t)below;
    return below + above < (int64_t)NO_ROW;
}

template <int HEADS, bool MAXIMA>
static cudaError_t
launch_hopper(const smla_attention_params *params)
{
    typedef hopper<HEADS, MAXIMA> Shape;
    constexpr int SHARED_BYTES = (int)sizeof(hopper_memory<Shape>);
    static_assert(SHARED_BYTES <= 232448, "what an SM has");
    static uint64_t allowed;
    const cudaError_t code = allow_shared_bytes((const void *)attend_hopper<Shape>, SHARED_BYTES,
                                                params->stream.device_id, &allowed);
    if (code != cudaSuccess) {
        return code;
    }
    if (!is_countable(params, HEADS)) {
        return cudaErrorInvalidValue;
    }
    hopper_launch launch = {};
    launch.base = make_launch<HEADS>(params);
    launch.num_works =
        (int32_t)(params->num_tokens * params->num_splits * launch.base.num_head_tiles);
    for (int i = 0; i < params->num_lists; i++) {
        find_span(&params->lists[i].kv, &launch.lists[i]);
    }
    launch.headroom = find_headroom(params);
    launch.out_is_aligned = smla_is_multiple(params->out, params->out_stride_token * 2, 16) &&
                            params->out_stride_head % 8 == 0;
    const int64_t sms = smla_cuda_find_device(params->stream.device_id)->num_sms;
    int64_t num_ctas = launch.num_works < sms ? launch.num_works : sms;
    if (smla_count_parts(launch.num_works, num_ctas) > MAX_WORKS) {
        num_ctas = smla_count_parts(launch.num_works, MAX_WORKS);
    }
    return smla_launch(attend_hopper<Shape>, launch, num_ctas, HOPPER_THREADS, SHARED_BYTES,
                       params->stream.handle);
}

template <int HEADS>
static cudaError_t
launch_tile(const smla_attention_params *params)
{
    if constexpr (HEADS > 16) {
        if (smla_sm90_heads_per_cta(HEADS, params->num_splits) < HEADS) {
            return launch_tile<HEADS / 2>(params);
        }
    }
    row_span span;
    bool fits = true;
    for (int i = 0; i < params->num_lists; i++) {
        fits = fits && find_span(&params->lists[i].kv, &span);
    }
    if (!fits) { /* more than 64 GiB between rows */
        return HEADS == 64   ? smla_attend_sm80_fp8_64(params)
               : HEADS == 32 ? smla_attend_sm80_fp8_32(params)
                             : smla_attend_sm80_fp8_16(params);
    }
    return params->max_logits == NULL ? launch_hopper<HEADS, false>(params)
                                      : launch_hopper<HEADS, true>(params);
}

cudaError_t
smla_attend_sm90_fp8_64(const smla_attention_params *params)
{
    return launch_tile<64>(params);
}

cudaError_t
smla_attend_sm90_fp8_32(const smla_attention_params *params)
{
    return launch_tile<32>(params);
}

cudaError_t
smla_attend_sm90_fp8_16(const smla_attention_params *params)
{
    return launch_tile<16>(params);
}
