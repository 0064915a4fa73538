/* hopper.cuh: what all roles of attention_sm90.cu share: the shape of a kernel, its shared memory, its
 * argument, its works, and what a consumer thread keeps. The kernel's file explains them.
 */
#ifndef SMLA_CUDA_HOPPER_CUH
#define SMLA_CUDA_HOPPER_CUH

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
    cta_work place;    /* what it is: kept here, for divisions are slow */
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

#endif /* SMLA_CUDA_HOPPER_CUH */
