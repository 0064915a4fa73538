/* small_fetch.cuh: how a CTA of attention_small_sm90.cu begins: its shape, its shared memory, and
 * how rows and query come there.
 */
#pragma once

#include "cuda/attention/sm90_fp8/hopper.cuh"

enum {
    SMALL_KEYS = SMLA_SM90_SMALL_KEYS,
    SMALL_GRANULES = SMALL_KEYS / GRANULE_KEYS,
    SMALL_WARPS = SMALL_GRANULES,
    SMALL_THREADS = SMALL_WARPS * SMLA_WARP_LANES,
    SMALL_GROUPS = SMALL_THREADS / GROUP_THREADS,
    GROUP_GRANULES = SMALL_GRANULES / SMALL_GROUPS, /* granules that a warpgroup scores */
    QUERY_WARPS = SMALL_WARPS / 2,                  /* the others fetch rows */
    QUERY_THREADS = QUERY_WARPS * SMLA_WARP_LANES,
    HEAD_LANES = 8, /* lanes that share 128 values of a head, or its RoPE part */
    WARP_HEADS = SMLA_WARP_LANES / HEAD_LANES,                    /* per warp in a query part */
    PART_HEADS = WARP_HEADS * QUERY_WARPS / SMLA_NUM_SCALE_TILES, /* heads of a query part */
    FETCH_KEYS = GRANULE_KEYS * GROUP_GRANULES / (SMALL_WARPS - QUERY_WARPS), /* see find_fetch */
    WEIGHT_EXPONENT = 8, /* exponent of the largest weight */
    NO_EXPONENT = -1000, /* key_exponent of a keyless granule */
    ROPE_BYTES = SMLA_QK_ROPE_HEAD_DIM * 2,
};

static_assert(FETCH_KEYS * SMALL_GROUPS == SMLA_WARP_LANES, "all are fetched, a row per lane");
static_assert(FETCH_KEYS == 8, "a byte of is_key");
static_assert((int)SMALL_GROUPS == (int)SMLA_NUM_SCALE_TILES,
              "the values of a warpgroup have one scale, those of half a group if there are eight");

/* A row whose codes and scales alone lie together in shared memory (small_memory::ropes). */
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

template <int ROW, int HEADS_, int PARTNERS_> struct small {
    static constexpr int HEADS = HEADS_;
    static constexpr int PARTNERS = PARTNERS_; /* CTAs per cluster */
    /* With 64 heads, rows and query fill shared memory, so weights take the place of the query. If
     * RoPE parts are no values, half of them lie in `ropes`. The others go to the registers of the
     * warps that score these keys. */
    static constexpr bool IS_FULL = HEADS == 64;
    static constexpr bool HAS_SHORT_ROWS = IS_FULL && !ring_row<ROW>::ROPE_IS_VALUE;
    typedef typename small_row<HAS_SHORT_ROWS, ROW>::type Row;
    static constexpr int SCALE_BYTES = Row::NUM_SCALES * GRANULE_KEYS * 2; /* per granule, as f16 */
    static constexpr int HEAD_SETS = IS_FULL ? 2 : 1; /* a lane looks at a head of each set */
    static constexpr int QUERY_PARTS = HEADS / PART_HEADS;
    static constexpr int PROB_BYTES = HEADS * 2; /* per key */
    static constexpr int PROBS_SWIZZLE = HEADS == 64   ? WGMMA_SWIZZLE_128
                                         : HEADS == 32 ? WGMMA_SWIZZLE_64
                                                       : WGMMA_SWIZZLE_32;
    /* does works again, with 16 heads because of its registers */
    typedef tile<16, Row::ROPE_IS_VALUE ? SMLA_ROWS_512 : SMLA_ROWS_FP8> Portable;
    static constexpr int REDO_TILES = HEADS / Portable::HEADS;
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
    int32_t tops[Shape::HEADS]; /* maxima of the scores, as order_of_float */
    union {
        float sums[SMALL_GRANULES][Shape::HEADS];
        uint16_t query_max[SMLA_NUM_SCALE_TILES][Shape::HEADS]; /* until all keys have scores */
    };
    int32_t key_exponent[SMALL_GRANULES];
    uint16_t is_key[SMALL_GRANULES]; /* a bit for each row that is there */
    uint64_t arrived[SMALL_GRANULES];
    uint64_t maxima; /* mbarrier of query_max */
    uint64_t stored; /* mbarrier of the query */
};

/* Where the weights are: [SMALL_KEYS][PROB_BYTES]. The query's place is free when all keys have
 * their scores. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
find_probs(const small_memory<Shape> *shared)
{
    static_assert(SMALL_KEYS * Shape::PROB_BYTES <=
                      (Shape::IS_FULL ? sizeof shared->query : sizeof shared->probs),
                  "weights of all keys");
    return Shape::IS_FULL ? ptx_shared_address(shared->query) : ptx_shared_address(shared->probs);
}

/* The head of set `set` that a lane looks at. With 16 heads, two lanes have the same. */
template <typename Shape>
static __device__ __forceinline__ int
head_of_lane(int lane, int set)
{
    return Shape::HEADS < SMLA_WARP_LANES ? lane % Shape::HEADS : lane + SMLA_WARP_LANES * set;
}

/* What a thread finds out about its work, step by step. */
template <typename Shape> struct small_state {
    key_masks is_key; /* rows `row` and row + 8 of the warp's granule: all bits or none */
    /* both rows' scales in tile `column`, and in rows of eight tiles in tile 4 + column */
    float scale[Shape::Row::NUM_SCALES / 4][2];
    uint32_t rope[2][Shape::HAS_SHORT_ROWS ? 8 : 1]; /* the lane's part of both rows (fetch_rope) */
    float score_factor;                              /* factor from scores to the log2 domain */
    float top[Shape::HEAD_SETS];       /* largest scores of the lane's heads (head_of_lane) */
    float reference[Shape::HEAD_SETS]; /* weights of these heads are relative to 2^reference */
    int query_exponent;
    int key_exponent;              /* first for the warp's keys, later for all keys */
    bool is_bad[Shape::HEAD_SETS]; /* these heads have a query that is not finite */
    bool is_lost;
};

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Where the index of a lane's row is. A split's columns of the main list come first, then those of
 * the extra one. This needs no memory access, so it is known before the grids in front are done. */
typedef struct key_place {
    int list;
    int32_t column;
    const int32_t *index;
    bool is_on;
} key_place;

static __device__ __forceinline__ int
count_granules(const attention_launch &launch)
{
    const int columns =
        launch.split_columns[0] + (launch.params.num_lists == 2 ? launch.split_columns[1] : 0);
    return columns / GRANULE_KEYS;
}

/* The row of a granule that a lane fetches. Rows come roughly in the order of the requests, so each
 * warp asks for some of the first warpgroup's keys, then of the second's, and so on. Scores begin
 * when a quarter of the rows is there. */
typedef struct fetch_place {
    int granule;
    int key; /* number in the granule */
} fetch_place;

static __device__ __forceinline__ fetch_place
find_fetch(int warp, int lane)
{
    const int first = (warp - QUERY_WARPS) * FETCH_KEYS; /* first one of each warpgroup's keys */
    fetch_place place;
    place.granule = lane / FETCH_KEYS * GROUP_GRANULES + first / GRANULE_KEYS;
    place.key = first % GRANULE_KEYS + lane % FETCH_KEYS;
    return place;
}

/* `key` is the number of a key among the split's. */
static __device__ __forceinline__ key_place
find_key(const attention_launch &launch, const cta_work &work, int key)
{
    const int num_main = launch.split_columns[0];
    key_place place;
    place.list = key < num_main ? 0 : 1;
    const smla_key_list &keys = launch.params.lists[place.list];
    place.column = work.split * launch.split_columns[place.list] + key - place.list * num_main;
    place.index = keys.indices + work.token * keys.indices_stride_token + place.column;
    place.is_on = key < count_granules(launch) * GRANULE_KEYS && place.column < keys.topk;
    return place;
}

static __device__ __forceinline__ uint32_t
load_index(const key_place &place)
{
    uint32_t index;
    ptx_load_4(place.index, place.is_on, NO_ROW, &index);
    return index;
}

/* The row of a key and its scales, by its index. The row is NULL if there is no key. */
static __device__ __forceinline__ smla_kv_token
find_key_row(const attention_launch &launch, const cta_work &work, const key_place &place,
             uint32_t index)
{
    const smla_key_list &keys = launch.params.lists[place.list];
    int32_t length = INT32_MAX;
    if (keys.end != NULL) {
        length = read_length(keys, work.token);
    }
    return place_of_slot(launch, place.list,
                         slot_of_index(launch, place.list, work.token,
                                       place.column < length ? (int32_t)index : -1));
}

/* Whether the RoPE parts of a granule's rows are copied apart, to small_memory::ropes. */
template <typename Shape>
static __device__ __forceinline__ bool
has_rope_copies(int granule)
{
    return Shape::HAS_SHORT_ROWS && granule < QUERY_WARPS;
}

/* Starts the copy of a part of row `number` of a granule. Of two partners one does, for both. */
template <typename Shape>
static __device__ __forceinline__ void
copy_part(uint32_t to, const uint8_t *from, int bytes, int number, uint32_t arrived)
{
    if (Shape::PARTNERS == 1) {
        ptx_bulk_copy(to, from, bytes, arrived);
    } else if (number % 2 == (int)ptx_cluster_rank()) {
        ptx_bulk_copy_to_all(to, from, bytes, arrived, 3);
    }
}

/* Starts the copies of a warp's rows, one per lane. Of two partners, each asks for every other row,
 * for both; scales of split pages, each asks for itself. Zeros are stored where there is no row. */
template <typename Shape>
static __device__ __forceinline__ void
copy_rows(const smla_kv_token &key, int num_granules, int warp, int lane,
          small_memory<Shape> *shared)
{
    typedef typename Shape::Row Row;
    constexpr int VECTORS = Row::COPY_BYTES / 16;
    const fetch_place at = find_fetch(warp, lane);
    const int number = lane % FETCH_KEYS; /* the lane's place among its granule's lanes */
    const uint32_t rows =
        ptx_shared_address(shared->rows[at.granule]) + (at.key - number) * Row::PITCH;
    const uint32_t arrived = ptx_shared_address(&shared->arrived[at.granule]);
    const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, key.row != NULL) >> (lane - number) & 0xFF;
    if (at.granule >= num_granules) {
        return;
    }
#pragma unroll 1
    for (uint32_t missing = ~is_key & 0xFF; missing != 0; missing &= missing - 1) {
        const uint32_t zeros = rows + (__ffs((int)missing) - 1) * Row::PITCH;
#pragma unroll 1
        for (int i = number; i < VECTORS; i += FETCH_KEYS) {
            ptx_clear_shared_16(zeros + 16 * i);
        }
    }
    if (number == 0) {
        ((uint8_t *)&shared->is_key[at.granule])[at.key / FETCH_KEYS] = (uint8_t)is_key;
        const int rope_bytes = has_rope_copies<Shape>(at.granule) ? (int)ROPE_BYTES : 0;
        ptx_mbarrier_arrive_expect(arrived, (Row::COPY_BYTES + rope_bytes) * __popc(is_key));
    }
    ptx_mbarrier_arrive(arrived, number != 0);
    if constexpr (Row::IS_SPLIT) {
        ptx_cp_async_8_or_zero(rows + number * Row::PITCH + Row::SCALE_OFFSET, key.scales,
                               key.row != NULL);
        ptx_mbarrier_arrive_after_copies(arrived);
    }
    if (key.row == NULL) {
        return;
    }
    if (has_rope_copies<Shape>(at.granule)) { /* first, because these keys are scored first */
        copy_part<Shape>(ptx_shared_address(&shared->ropes[at.granule][at.key]),
                         key.row + Row::ROPE_OFFSET, ROPE_BYTES, number, arrived);
        copy_part<Shape>(rows + number * Row::PITCH, key.row, Row::COPY_BYTES, number, arrived);
    } else {
        copy_part<Shape>(rows + number * Row::PITCH, key.row, Row::COPY_BYTES, number, arrived);
    }
}

/* Asks for the RoPE parts of the warp's keys, if nobody copies them to shared memory. A lane gets
 * dimensions from 16 column on of rows `row` and row + 8. Other warps ask for these rows, so the
 * keys are looked up twice. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_rope(const attention_launch &launch, const cta_work &work, int warp,
           small_state<Shape> *state)
{
    const lane_place me = find_place();
    key_place place[2];
    uint32_t index[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        place[i] = find_key(launch, work, GRANULE_KEYS * warp + me.row + 8 * i);
        index[i] = load_index(place[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint8_t *const row = find_key_row(launch, work, place[i], index[i]).row;
        const uint8_t *const from = row + Shape::Row::ROPE_OFFSET + 32 * me.column;
        ptx_load_16(from, row != NULL, &state->rope[i][0]);
        ptx_load_16(from + 16, row != NULL, &state->rope[i][4]);
    }
}

/* Loads the RoPE parts of a warp whose keys have them in shared memory. Those of absent keys may be
 * anything, because the scores are masked. */
template <typename Shape>
static __device__ __forceinline__ void
load_rope(const small_memory<Shape> *shared, int warp, const lane_place &me,
          small_state<Shape> *state)
{
    if constexpr (Shape::HAS_SHORT_ROWS) {
        if (warp < QUERY_WARPS) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t from =
                    ptx_shared_address(&shared->ropes[warp][me.row + 8 * i][32 * me.column]);
                ptx_load_shared_16(from, &state->rope[i][0]);
                ptx_load_shared_16(from + 16, &state->rope[i][4]);
            }
        }
    }
}

/* Waits for the rows of the warp's granule. Returns masks of all bits or none. */
template <typename Shape>
static __device__ __forceinline__ key_masks
wait_for_granule(const small_memory<Shape> *shared, int warp, const lane_place &me)
{
    ptx_mbarrier_wait(ptx_shared_address(&shared->arrived[warp]), 0);
    const uint32_t is_key = *(const volatile uint16_t *)&shared->is_key[warp];
    return key_masks{0u - (is_key >> me.row & 1), 0u - (is_key >> (me.row + 8) & 1)};
}

/* ---- Query --------------------------------------------------------------------------------- */

/* What a lane has of the query: a head in each query part, `head` in the first and PART_HEADS more
 * in each further one. Of these heads it has 8 dimensions of a scale tile from 32 column + 8 piece
 * on, and 8 from 16 further on; of rope_head 8 dimensions of the RoPE part from 16 column + 8 piece
 * on. So eight lanes ask for whole sectors, and a load takes 8 lines, which is what counts. */
typedef struct query_lane {
    int tile;
    int head;
    int rope_head;
    int column;
    int piece;
} query_lane;

static __device__ __forceinline__ query_lane
find_query_lane(int warp, int lane)
{
    query_lane at;
    at.tile = warp % SMLA_NUM_SCALE_TILES;
    at.head = WARP_HEADS * (warp / SMLA_NUM_SCALE_TILES) + lane / HEAD_LANES;
    at.rope_head = at.head + PART_HEADS * at.tile; /* the lane's head in part number `tile` */
    at.column = lane % HEAD_LANES / 2;
    at.piece = lane % 2;
    return at;
}

template <typename Shape> struct small_query {
    uint32_t nope[Shape::QUERY_PARTS][2][4]; /* includes a RoPE part that is a value */
    uint32_t rope[Shape::HEAD_SETS][4];
};

/* Where a lane's query is in memory; nope is that of its first head. */
typedef struct query_place {
    const uint16_t *nope;
    const uint16_t *rope;
} query_place;

static __device__ __forceinline__ query_place
find_query(const smla_attention_params &params, const cta_work &work, const query_lane &at)
{
    query_place place;
    place.nope = params.q_nope + work.token * params.q_nope_stride_token +
                 (int64_t)(work.first_head + at.head) * params.q_nope_stride_head +
                 SMLA_SCALE_TILE * at.tile + 32 * at.column + 8 * at.piece;
    place.rope = params.q_pe + work.token * params.q_pe_stride_token +
                 (int64_t)(work.first_head + at.rope_head) * params.q_pe_stride_head +
                 16 * at.column + 8 * at.piece;
    return place;
}

/* Asks for the query to be in L2, while the grids in front are running. The splits of a token need
 * the same query, so each asks for some parts. L2 will have what those grids still write. */
template <typename Shape>
static __device__ __forceinline__ void
prefetch_query(const smla_attention_params &params, const cta_work &work, const query_place &place,
               const query_lane &at)
{
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
        const int further = PART_HEADS * part;
        const uint16_t *const nope = place.nope + further * params.q_nope_stride_head;
        const bool is_on =
            work.split == part % params.num_splits && at.head + further < work.num_heads;
        ptx_prefetch_l2(nope, is_on);
        ptx_prefetch_l2(nope + 16, is_on);
    }
    if constexpr (!Shape::Row::ROPE_IS_VALUE) {
#pragma unroll
        for (int set = 0; set < Shape::HEAD_SETS; set++) {
            ptx_prefetch_l2(place.rope + SMLA_WARP_LANES * set * params.q_pe_stride_head,
                            work.split == 0 &&
                                at.rope_head + SMLA_WARP_LANES * set < work.num_heads);
        }
    }
}

template <typename Shape, bool ALIGNED>
static __device__ __forceinline__ void
load_query(const smla_attention_params &params, const query_place &place, const query_lane &at,
           int num_heads, small_query<Shape> *query)
{
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
        const int further = PART_HEADS * part;
        if (at.head + further < num_heads) {
            const uint16_t *const nope = place.nope + further * params.q_nope_stride_head;
            smla_load_words<16, ALIGNED>(nope, query->nope[part][0]);
            smla_load_words<16, ALIGNED>(nope + 16, query->nope[part][1]);
        }
    }
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        const int further = SMLA_WARP_LANES * set;
        if (!Shape::Row::ROPE_IS_VALUE && at.rope_head + further < num_heads) {
            smla_load_words<16, ALIGNED>(place.rope + further * params.q_pe_stride_head,
                                         query->rope[set]);
        }
    }
}

/* In both bf16, the largest absolute value of `pair` and some words, or a NaN if there is one.
 * Signs may be anything. */
template <int WORDS>
static __device__ __forceinline__ uint32_t
max_of_words(uint32_t pair, const uint32_t (&words)[WORDS])
{
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        pair = ptx_max_abs_bf16x2(pair, words[i]);
    }
    return pair;
}

/* Stores the largest absolute value that eight lanes have of each head, as the bits of a bf16,
 * where find_query_exponent looks for it. Two parts are reduced at once. */
template <typename Shape>
static __device__ __forceinline__ void
store_maxima(small_memory<Shape> *shared, const small_query<Shape> &query, const query_lane &at,
             int lane)
{
#pragma unroll
    for (int first = 0; first < Shape::QUERY_PARTS; first += 2) {
        uint32_t both = 0;
#pragma unroll
        for (int part = first; part < first + 2; part++) {
            const uint32_t rope = max_of_words(0, query.rope[part / SMLA_NUM_SCALE_TILES]);
            uint32_t pair = part % SMLA_NUM_SCALE_TILES == at.tile ? rope : 0;
            pair = max_of_words(max_of_words(pair, query.nope[part][0]), query.nope[part][1]);
            pair &= 0x7FFF7FFF;
            both = both >> 16 | max(pair & 0xFFFF, pair >> 16) << 16;
        }
#pragma unroll
        for (int step = 1; step < HEAD_LANES; step *= 2) {
            both = __vmaxu2(both, __shfl_xor_sync(0xFFFFFFFFu, both, step));
        }
        uint16_t *const to = &shared->query_max[at.tile][at.head + PART_HEADS * first];
        if (lane % HEAD_LANES == 0) {
            to[0] = (uint16_t)both;
            to[PART_HEADS] = (uint16_t)(both >> 16);
        }
    }
}

/* Stores 8 dimensions of a head in a 64-dimension tile. Word i of 16 dimensions goes to chunk i of
 * 8, and there to word `column`: the order in which score_keys has the bytes of rows. */
template <typename Shape>
static __device__ __forceinline__ void
store_words(small_memory<Shape> *shared, int tile, int head, int column, int piece,
            const uint32_t words[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int chunk = (4 * piece + i) ^ (head & 7);
        *(uint32_t *)&shared->query[tile][head][16 * chunk + 4 * column] = words[i];
    }
}

/* The query's power of two, from the maxima of all heads. */
template <typename Shape>
static __device__ __forceinline__ void
find_query_exponent(const small_memory<Shape> *shared, int lane, small_state<Shape> *state)
{
    uint32_t head_max[Shape::HEAD_SETS];
    uint32_t lane_max = 0;
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        const int head = head_of_lane<Shape>(lane, set);
        head_max[set] = 0;
#pragma unroll
        for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
            head_max[set] = max(head_max[set], (uint32_t)shared->query_max[tile][head]);
        }
        state->is_bad[set] = head_max[set] >= 0x7F80;
        head_max[set] = state->is_bad[set] ? 0 : head_max[set];
        lane_max = max(lane_max, head_max[set]);
    }
    const uint32_t query_max = __reduce_max_sync(0xFFFFFFFFu, lane_max);
    state->query_exponent = find_query_exponent(query_max, &state->is_lost);
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        state->is_lost |=
            head_max[set] != 0 && (head_max[set] >> 7) + MAX_HEAD_RATIO < query_max >> 7;
    }
}

/* Stores the query times its power of two: the NoPE part as f16, the RoPE part as bf16. Of keys
 * whose RoPE part is a value, the last 128 dimensions are a tile of each part: columns 0 and 1 have
 * NoPE values. */
template <typename Shape>
static __device__ __forceinline__ void
store_values(small_memory<Shape> *shared, const small_query<Shape> &query, const query_lane &at,
             int exponent)
{
    typedef typename Shape::Row Row;
    const uint32_t factor = two_powers_of_two(-exponent);
    const bool has_both = Row::ROPE_IS_VALUE && at.tile == SMLA_NUM_SCALE_TILES - 1;
    const bool is_rope = has_both && at.column >= 2;
    uint32_t words[4];
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t pair = ptx_mul_bf16x2(query.nope[part][half][i], factor);
                words[i] = ptx_cvt_f16x2(smla_low_bf16(pair), smla_high_bf16(pair));
                words[i] = is_rope ? pair : words[i];
            }
            store_words(shared, has_both ? Row::NOPE_TILES - 1 + is_rope : 2 * at.tile + half,
                        at.head + PART_HEADS * part,
                        has_both ? 2 * (at.column % 2) + half : at.column, at.piece, words);
        }
    }
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        const int head = at.rope_head + SMLA_WARP_LANES * set;
        if (!Row::ROPE_IS_VALUE && head < Shape::HEADS) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                words[i] = ptx_mul_bf16x2(query.rope[set][i], factor);
            }
            store_words(shared, Row::NOPE_TILES, head, at.column, at.piece, words);
        }
    }
}

template <typename Shape>
static __device__ __forceinline__ void
store_query(small_memory<Shape> *shared, const small_query<Shape> &query, const query_lane &at,
            int lane, small_state<Shape> *state)
{
    store_maxima(shared, query, at, lane);
    ptx_mbarrier_arrive(ptx_shared_address(&shared->maxima), true);
    ptx_mbarrier_wait(ptx_shared_address(&shared->maxima), 0);
    find_query_exponent(shared, lane, state);
    store_values(shared, query, at, state->query_exponent);
    ptx_fence_async_shared();
    ptx_mbarrier_arrive(ptx_shared_address(&shared->stored), true);
}

/* ---- Both ---------------------------------------------------------------------------------- */

/* From here on the CTA may access memory of other grids, and the combine kernel may come. */
static __device__ __forceinline__ void
wait_for_others(void)
{
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
}

/* Half of the warps ask for rows, which takes as long as rows take to come. Meanwhile the others
 * ask for the query and store it. Afterwards the query is there, and rows are on their way. The two
 * halves ask for different parameters, so neither waits for those of the other. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_row(const attention_launch &launch, const cta_work &work, int num_granules,
          small_memory<Shape> *shared, small_state<Shape> *state)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    if (warp >= QUERY_WARPS) {
        const fetch_place fetch = find_fetch(warp, lane);
        const key_place at = find_key(launch, work, fetch.granule * GRANULE_KEYS + fetch.key);
        ptx_prefetch_l2(at.index, at.is_on);
        wait_for_others();
        const smla_kv_token key = find_key_row(launch, work, at, load_index(at));
        __syncwarp();
        ptx_cluster_wait();
        copy_rows(key, num_granules, warp, lane, shared);
        if constexpr (Shape::HAS_SHORT_ROWS) {
            fetch_rope(launch, work, warp, state);
        }
        ptx_mbarrier_wait(ptx_shared_address(&shared->stored), 0);
        find_query_exponent(shared, lane, state);
        return;
    }
    const query_lane at = find_query_lane(warp, lane);
    const query_place place = find_query(launch.params, work, at);
    if (Shape::HEADS > 16) { /* a shorter query is there before the rows are */
        prefetch_query<Shape>(launch.params, work, place, at);
    }
    wait_for_others();
    small_query<Shape> query = {};
    if (__builtin_expect(launch.q_is_aligned, true)) {
        load_query<Shape, true>(launch.params, place, at, work.num_heads, &query);
    } else {
        load_query<Shape, false>(launch.params, place, at, work.num_heads, &query);
    }
    __syncwarp();
    ptx_cluster_wait();
    store_query(shared, query, at, lane, state);
    ptx_mbarrier_wait(ptx_shared_address(&shared->stored), 0);
}
