/* small_shape.cuh: what attention_small_sm90.cu's files share: its shapes, its shared memory, and
 * what a thread knows about its item.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_common.cuh"

enum {
    SMALL_KEYS = SMLA_SM90_SMALL_KEYS,
    SMALL_GRANULES = SMALL_KEYS / GRANULE_KEYS,
    SMALL_WARPS = SMALL_GRANULES,
    SMALL_THREADS = SMALL_WARPS * SMLA_WARP_LANES,
    SMALL_GROUPS = SMALL_THREADS / GROUP_THREADS,
    GROUP_GRANULES = SMALL_GRANULES / SMALL_GROUPS, /* granules that a warpgroup scores */
    QUERY_WARPS = SMALL_WARPS / 2, /* warps that store the query; the others fetch rows */
    QUERY_THREADS = QUERY_WARPS * SMLA_WARP_LANES,
    HEAD_LANES = 8, /* lanes that share 128 values of a head, or its RoPE part */
    WARP_HEADS = SMLA_WARP_LANES / HEAD_LANES, /* heads per warp in a query part */
    PART_HEADS = WARP_HEADS * QUERY_WARPS / SMLA_NUM_SCALE_TILES, /* heads of a query part */
    FETCH_KEYS = GRANULE_KEYS * GROUP_GRANULES /
        (SMALL_WARPS - QUERY_WARPS), /* keys per fetching warp and group */
    WEIGHT_EXPONENT = 8,             /* exponent of the largest weight */
    NO_EXPONENT = -1000,             /* key_exponent of a keyless granule */
    ROPE_BYTES = SMLA_QK_ROPE_HEAD_DIM * 2,
};

static_assert(FETCH_KEYS * SMALL_GROUPS == SMLA_WARP_LANES, "all are fetched, a row per lane");
static_assert(FETCH_KEYS == 8, "a byte of is_key");
static_assert((int)SMALL_GROUPS == (int)SMLA_NUM_SCALE_TILES,
              "the values of a warpgroup have one scale, those of half a group if there are eight");

/* A row of which only codes and scales lie together in shared memory (small_memory::ropes has the
 * rest). */
template <int NUMBER> struct short_row : ring_row<NUMBER> {
    static constexpr int COPY_BYTES = ring_row<NUMBER>::ROPE_OFFSET;
    static constexpr int PITCH = (COPY_BYTES + 15) / 32 * 32 + 16;
    static_assert(ring_row<NUMBER>::ROPE_OFFSET + ROPE_BYTES == ring_row<NUMBER>::INFO.row_bytes,
                  "the RoPE part is the last one");
};

template <bool IS_SHORT, int NUMBER> struct small_row {
    typedef ring_row<NUMBER> type;
};
template <int NUMBER> struct small_row<true, NUMBER> {
    typedef short_row<NUMBER> type;
};

/* ALIGNED: all rows of the query begin at multiples of 16 bytes, as they usually do. Other queries
 * have kernels of their own, so that launches without them do not jump over their code. */
template <int ROW, int HEADS_, int PARTNERS_, bool ALIGNED_> struct small {
    static constexpr int HEADS = HEADS_;
    static constexpr int PARTNERS = PARTNERS_; /* CTAs per cluster */
    static constexpr bool ALIGNED = ALIGNED_;
    /* With 64 heads, rows and query fill shared memory, so weights replace the query there. If RoPE
     * parts are no values, half of them lie in `ropes`. The others are in registers of the warps
     * that score these keys. */
    static constexpr bool IS_FULL = HEADS == 64;
    static constexpr bool HAS_SHORT_ROWS = IS_FULL && !ring_row<ROW>::ROPE_IS_VALUE;
    typedef typename small_row<HAS_SHORT_ROWS, ROW>::type Row;
    static constexpr int SCALE_BYTES = Row::NUM_SCALES * GRANULE_KEYS * 2; /* per granule, as f16 */
    static constexpr int HEAD_SETS = IS_FULL ? 2 : 1; /* a lane looks at a head of each set */
    static constexpr int QUERY_PARTS = HEADS / PART_HEADS;
    static constexpr int PROB_BYTES = HEADS * 2; /* bytes of a key's weights */
    static constexpr int PROBS_SWIZZLE = HEADS == 64   ? WGMMA_SWIZZLE_128
                                         : HEADS == 32 ? WGMMA_SWIZZLE_64
                                                       : WGMMA_SWIZZLE_32;
    /* Whether code that hardly any launch needs is a called function, so that other launches do not
     * jump over it. Only one kernel lacks the registers for that. */
    static constexpr bool CALLS_RARE = ALIGNED && (HEADS != 32 || ring_row<ROW>::ROPE_IS_VALUE);
    /* Whether an item with one key leaves that key's value (leave_only_row). The other kernels have
     * no registers for it, and use their fallback. */
    static constexpr bool LEAVES_ONLY = ALIGNED;
    /* the fallback's tile, of 16 heads because of its registers */
    typedef tile<16, Row::ROPE_IS_VALUE ? SMLA_ROWS_512 : SMLA_ROWS_FP8, false, CALLS_RARE>
        Portable;
    static constexpr int FALLBACK_TILES = HEADS / Portable::HEADS;
};

template <typename Shape> struct small_memory {
    alignas(1024) uint8_t query[Shape::Row::QUERY_TILES][Shape::HEADS][128];
    alignas(Shape::IS_FULL ? 16 : 1024)
        uint8_t probs[Shape::IS_FULL ? 1 : SMALL_KEYS][Shape::IS_FULL ? 16 : Shape::PROB_BYTES];
    alignas(128) uint8_t rows[SMALL_GRANULES][GRANULE_KEYS * Shape::Row::PITCH];
    /* RoPE parts of the keys that the query's warps score */
    alignas(128) uint8_t ropes[Shape::HAS_SHORT_ROWS ? QUERY_WARPS : 1]
                              [Shape::HAS_SHORT_ROWS ? GRANULE_KEYS : 1][ROPE_BYTES];
    alignas(128) uint8_t scales[SMALL_GRANULES][Shape::SCALE_BYTES];
    int32_t row_maxima[Shape::HEADS]; /* maxima of the scores, as results of order_of_float */
    union {
        float sums[SMALL_GRANULES][Shape::HEADS];
        uint16_t query_max[SMLA_NUM_SCALE_TILES][Shape::HEADS]; /* until all keys have scores */
    };
    int32_t key_exponent[SMALL_GRANULES];
    uint16_t is_key[SMALL_GRANULES]; /* bits of the rows that are there */
    uint64_t arrived[SMALL_GRANULES];
    uint64_t maxima; /* mbarrier of query_max */
    uint64_t stored; /* mbarrier of the query */
};

/* The address of the weights, [SMALL_KEYS][PROB_BYTES]. They may replace the query when all keys
 * have their scores. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
find_probs(const small_memory<Shape> *shared)
{
    static_assert(SMALL_KEYS * Shape::PROB_BYTES <=
                      (Shape::IS_FULL ? sizeof shared->query : sizeof shared->probs),
                  "weights of all keys");
    return Shape::IS_FULL ? ptx_shared_address(shared->query) : ptx_shared_address(shared->probs);
}

/* The head of set `set` that a lane looks at. With 16 heads, two lanes have the same head. */
template <typename Shape>
static __device__ __forceinline__ int
head_of_lane(int lane, int set)
{
    return Shape::HEADS < SMLA_WARP_LANES ? lane % Shape::HEADS : lane + SMLA_WARP_LANES * set;
}

/* What a thread finds out about its item, step by step. */
template <typename Shape> struct small_state {
    key_masks is_key; /* rows `row` and row + 8 of the warp's granule: all bits or none */
    /* both rows' scales in tile `column`, and in rows of eight tiles in tile 4 + column */
    float scale[Shape::Row::NUM_SCALES / 4][2];
    uint32_t rope[2][Shape::HAS_SHORT_ROWS ? 8 : 1]; /* the lane's part of both rows (fetch_rope) */
    float score_factor;                              /* factor from scores to the log2 domain */
    float row_max[Shape::HEAD_SETS];   /* largest scores of the lane's heads (head_of_lane) */
    float reference[Shape::HEAD_SETS]; /* weights of these heads are relative to 2^reference */
    int query_exponent;
    int key_exponent;              /* exponent of the warp's keys, later of all keys */
    bool is_bad[Shape::HEAD_SETS]; /* marks heads with a query that is not finite */
    bool needs_fallback;
    bool has_only; /* the item has one key, whose value replaces the products */
};
