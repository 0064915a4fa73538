/* small_fetch.cuh: how a CTA of attention_small_sm90.cu begins: its shape and shared memory, and in
 * it the rows and the query.
 */
#ifndef SMLA_CUDA_SMALL_FETCH_CUH
#define SMLA_CUDA_SMALL_FETCH_CUH

#include "hopper.cuh"

enum {
    SMALL_KEYS = SMLA_SM90_SMALL_KEYS,
    SMALL_GRANULES = SMALL_KEYS / GRANULE_KEYS,
    SMALL_WARPS = SMALL_GRANULES,
    SMALL_THREADS = SMALL_WARPS * SMLA_WARP_LANES,
    SMALL_GROUPS = SMALL_THREADS / GROUP_THREADS,
    GROUP_GRANULES = SMALL_GRANULES / SMALL_GROUPS, /* that a warpgroup scores */
    QUERY_WARPS = SMALL_WARPS / 2,                  /* the others fetch rows */
    QUERY_THREADS = QUERY_WARPS * SMLA_WARP_LANES,
    FETCH_KEYS = GRANULE_KEYS * GROUP_GRANULES / (SMALL_WARPS - QUERY_WARPS), /* see find_fetch */
    ROW_VECTORS = FP8_ROW_BYTES / 16,
    SCALE_BYTES = SMLA_NUM_SCALE_TILES * GRANULE_KEYS * 2, /* of a granule, in f16 */
    TOP_SCALE_EXPONENT = 6, /* of the largest scale / E: 448 times it is below 2^16 */
    WEIGHT_EXPONENT = 8,    /* of the largest weight */
    NO_EXPONENT = -1000,    /* of a granule without keys */
};

static_assert(FETCH_KEYS * SMALL_GROUPS == SMLA_WARP_LANES, "all are fetched, a row per lane");
static_assert(FETCH_KEYS == 8, "a byte of is_key");
static_assert((int)SMALL_GROUPS == (int)SMLA_NUM_SCALE_TILES,
              "the values of a warpgroup have one scale");

template <int HEADS_, int PARTNERS_> struct small {
    static constexpr int HEADS = HEADS_;
    static constexpr int PARTNERS = PARTNERS_; /* CTAs of a cluster */
    static constexpr int QUERY_PARTS = HEADS * SMLA_NUM_SCALE_TILES / (8 * QUERY_WARPS);
    static constexpr int PROB_BYTES = HEADS * 2; /* of a key */
    static constexpr int PROBS_SWIZZLE = HEADS == 32 ? WGMMA_SWIZZLE_64 : WGMMA_SWIZZLE_32;
    /* what does rows again: 16 heads, for its registers */
    typedef tile<16, SMLA_ROWS_FP8> Portable;
    static constexpr int REDO_TILES = HEADS / Portable::HEADS;
};

template <typename Shape> struct small_memory {
    alignas(1024) uint8_t query[QUERY_TILES][Shape::HEADS][128];
    alignas(1024) uint8_t probs[SMALL_KEYS][Shape::PROB_BYTES];
    alignas(128) uint8_t rows[SMALL_GRANULES][GRANULE_ROW_BYTES];
    alignas(128) uint8_t scales[SMALL_GRANULES][SCALE_BYTES];
    float tops[SMALL_GRANULES][Shape::HEADS];
    float sums[SMALL_GRANULES][Shape::HEADS];
    uint32_t query_max[SMLA_NUM_SCALE_TILES][Shape::HEADS];
    int32_t key_exponent[SMALL_GRANULES];
    uint16_t is_key[SMALL_GRANULES]; /* a bit for each row that is there */
    uint64_t arrived[SMALL_GRANULES];
    uint64_t maxima; /* of the query's heads are there, */
    uint64_t stored; /* the query is */
};

/* What a thread finds out about the row, step by step. */
typedef struct small_state {
    key_masks is_key;   /* of rows row and row + 8 of the warp's granule */
    float scale[2];     /* of those rows, in scale tile `column` */
    float score_factor; /* of the scores, in the log2 domain */
    float top;          /* score of head `lane` */
    float reference;    /* that its weights are relative to */
    int query_exponent;
    int key_exponent; /* of the warp's keys, later of all */
    bool is_bad;      /* head `lane` has a query that is not finite */
    bool is_lost;
} small_state;

/* ---- Rows ---------------------------------------------------------------------------------- */

/* What a lane fetches: a row of the columns that a split may have, of the main list, then of the
 * extra one. Nothing of it needs memory, so it is known before the grids in front are done. */
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

/* Which row a lane of a warp fetches. Rows come about in the order in which they are asked for, so
 * each warp asks for some of the first warpgroup's keys, then of the second's: scores begin when a
 * quarter of the rows is there. */
typedef struct fetch_place {
    int granule;
    int key; /* of the granule */
} fetch_place;

static __device__ __forceinline__ fetch_place
find_fetch(int warp, int lane)
{
    const int first = (warp - QUERY_WARPS) * FETCH_KEYS; /* of a warpgroup's keys */
    fetch_place place;
    place.granule = lane / FETCH_KEYS * GROUP_GRANULES + first / GRANULE_KEYS;
    place.key = first % GRANULE_KEYS + lane % FETCH_KEYS;
    return place;
}

static __device__ __forceinline__ key_place
find_key(const attention_launch &launch, const cta_work &work, int warp, int lane)
{
    const int num_main = launch.split_columns[0];
    const fetch_place fetch = find_fetch(warp, lane);
    const int key = fetch.granule * GRANULE_KEYS + fetch.key;
    key_place place;
    place.list = key < num_main ? 0 : 1;
    const smla_key_list &keys = launch.params.lists[place.list];
    place.column = work.split * launch.split_columns[place.list] + key - place.list * num_main;
    place.index = keys.indices + work.token * keys.indices_stride_token + place.column;
    place.is_on = warp >= QUERY_WARPS && key < count_granules(launch) * GRANULE_KEYS &&
                  place.column < keys.topk;
    return place;
}

/* The row of the lane's key, NULL for none. */
static __device__ __forceinline__ const uint8_t *
find_key_row(const attention_launch &launch, const cta_work &work, const key_place &place)
{
    const smla_key_list &keys = launch.params.lists[place.list];
    int32_t length = INT32_MAX;
    uint32_t index;
    if (keys.topk_length != NULL) {
        length = keys.topk_length[work.token * keys.topk_length_stride];
    }
    ptx_load_4(place.index, place.is_on, NO_ROW, &index);
    return row_of_slot(launch, place.list,
                       slot_of_index(launch, place.list, work.token,
                                     place.column < length ? (int32_t)index : -1));
}

/* Starts the copies of a warp's rows, one per lane; of partners each asks for every other row, for
 * both. Zeros where there is no row. */
template <typename Shape>
static __device__ __forceinline__ void
copy_rows(const uint8_t *row, int num_granules, int warp, int lane, small_memory<Shape> *shared)
{
    const fetch_place at = find_fetch(warp, lane);
    const int number = lane % FETCH_KEYS; /* of the warp's lanes for this granule */
    const uint32_t rows =
        ptx_shared_address(shared->rows[at.granule]) + (at.key - number) * FP8_ROW_BYTES;
    const uint32_t arrived = ptx_shared_address(&shared->arrived[at.granule]);
    const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, row != NULL) >> (lane - number) & 0xFF;
    if (at.granule >= num_granules) {
        return;
    }
#pragma unroll 1
    for (uint32_t missing = ~is_key & 0xFF; missing != 0; missing &= missing - 1) {
        const uint32_t zeros = rows + (__ffs((int)missing) - 1) * FP8_ROW_BYTES;
#pragma unroll 1
        for (int i = number; i < ROW_VECTORS; i += FETCH_KEYS) {
            ptx_clear_shared_16(zeros + 16 * i);
        }
    }
    if (number == 0) {
        ((uint8_t *)&shared->is_key[at.granule])[at.key / FETCH_KEYS] = (uint8_t)is_key;
        ptx_mbarrier_arrive_expect(arrived, FP8_ROW_BYTES * __popc(is_key));
    }
    ptx_mbarrier_arrive(arrived, number != 0);
    if (row == NULL) {
        return;
    }
    if (Shape::PARTNERS == 1) {
        ptx_bulk_copy(rows + number * FP8_ROW_BYTES, row, FP8_ROW_BYTES, arrived);
    } else if (number % 2 == (int)ptx_cluster_rank()) {
        ptx_bulk_copy_to_all(rows + number * FP8_ROW_BYTES, row, FP8_ROW_BYTES, arrived, 3);
    }
}

/* Waits for the rows of the warp's granule. */
template <typename Shape>
static __device__ __forceinline__ key_masks
wait_for_granule(const small_memory<Shape> *shared, int warp, const lane_place &me)
{
    ptx_mbarrier_wait(ptx_shared_address(&shared->arrived[warp]), 0);
    const uint32_t is_key = *(const volatile uint16_t *)&shared->is_key[warp];
    return key_masks{0u - (is_key >> me.row & 1), 0u - (is_key >> (me.row + 8) & 1)};
}

/* ---- Query --------------------------------------------------------------------------------- */

/* A lane's part of the query of a head: of scale tile warp % 4 the dimensions 32 column to 32
 * column + 31, and with tile 0 of the RoPE part 16. */
typedef struct small_query {
    uint32_t nope[16];
    uint32_t rope[8];
} small_query;

/* Where it is in memory. */
typedef struct query_place {
    const uint16_t *nope;
    const uint16_t *rope;
    bool is_on; /* there is such a head */
} query_place;

static __device__ __forceinline__ int
head_of_part(int part, int warp, const lane_place &me)
{
    return 8 * (QUERY_WARPS / SMLA_NUM_SCALE_TILES * part + warp / SMLA_NUM_SCALE_TILES) + me.row;
}

static __device__ __forceinline__ query_place
find_query(const smla_attention_params &params, const cta_work &work, int part, int warp,
           const lane_place &me)
{
    const int head = head_of_part(part, warp, me);
    const int64_t row = work.first_head + head;
    query_place place;
    place.nope = params.q_nope + work.token * params.q_nope_stride_token +
                 row * params.q_nope_stride_head + warp % SMLA_NUM_SCALE_TILES * SMLA_SCALE_TILE +
                 32 * me.column;
    place.rope = params.q_pe + work.token * params.q_pe_stride_token +
                 row * params.q_pe_stride_head + 16 * me.column;
    place.is_on = head < work.num_heads;
    return place;
}

template <bool ALIGNED>
static __device__ __forceinline__ void
load_query(const query_place &place, int warp, small_query *part)
{
    if (!place.is_on) {
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        smla_load_words<16, ALIGNED>(place.nope + 8 * i, &part->nope[4 * i]);
    }
    if (warp % SMLA_NUM_SCALE_TILES == 0) {
        smla_load_words<16, ALIGNED>(place.rope, &part->rope[0]);
        smla_load_words<16, ALIGNED>(place.rope + 8, &part->rope[4]);
    }
}

/* The largest absolute value, as the bits of a bf16, of the four lanes' part of a head. */
static __device__ __forceinline__ uint32_t
find_part_max(const small_query &part)
{
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        pair = __vmaxu2(pair, part.nope[i] & 0x7FFF7FFFu);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        pair = __vmaxu2(pair, part.rope[i] & 0x7FFF7FFFu);
    }
    uint32_t value = max(pair & 0xFFFFu, pair >> 16);
    value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
    return max(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

/* One 64-dimension tile of a head: word i of 16 dimensions goes to chunk i, of 8, and there to word
 * `column`: the order in which score_keys has bytes of rows. */
template <typename Shape>
static __device__ __forceinline__ void
store_words(small_memory<Shape> *shared, int tile, int head, int column, const uint32_t words[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        *(uint32_t *)&shared->query[tile][head][(i ^ (head & 7)) * 16 + 4 * column] = words[i];
    }
}

/* The query's power of two, from the maxima of all heads; lane `head` looks at each of them. */
template <typename Shape>
static __device__ __forceinline__ void
find_query_exponent(const small_memory<Shape> *shared, int lane, small_state *state)
{
    uint32_t head_max = 0;
#pragma unroll
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
        head_max = max(head_max, shared->query_max[tile][lane % Shape::HEADS]);
    }
    state->is_bad = head_max >= 0x7F80;
    head_max = state->is_bad ? 0 : head_max;
    const uint32_t query_max = __reduce_max_sync(0xFFFFFFFFu, head_max);
    bool is_lost;
    state->query_exponent = find_query_exponent(query_max, &is_lost);
    state->is_lost =
        is_lost || (head_max != 0 && (head_max >> 7) + MAX_HEAD_RATIO < query_max >> 7);
}

/* A lane's part, times the query's power of two. */
template <typename Shape>
static __device__ __forceinline__ void
store_part(small_memory<Shape> *shared, const small_query &part, int head, int tile, int column,
           int exponent)
{
    const float factor = power_of_two(-exponent);
    uint32_t words[8];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t pair = part.nope[8 * half + i];
            words[i] = ptx_cvt_f16x2(smla_low_bf16(pair) * factor, smla_high_bf16(pair) * factor);
        }
        store_words(shared, 2 * tile + half, head, column, words);
    }
    if (tile == 0) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            words[i] = ptx_mul_bf16x2(part.rope[i], (uint32_t)(127 - exponent) * 0x00800080u);
        }
        store_words(shared, QUERY_TILES - 1, head, column, words);
    }
}

/* The query to shared memory. */
template <typename Shape>
static __device__ __forceinline__ void
store_small_query(small_memory<Shape> *shared, const small_query (&parts)[Shape::QUERY_PARTS],
                  int warp, const lane_place &me, small_state *state)
{
    const int tile = warp % SMLA_NUM_SCALE_TILES;
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
        const uint32_t part_max = find_part_max(parts[part]);
        if (me.column == 0) {
            shared->query_max[tile][head_of_part(part, warp, me)] = part_max;
        }
    }
    ptx_mbarrier_arrive(ptx_shared_address(&shared->maxima), true);
    ptx_mbarrier_wait(ptx_shared_address(&shared->maxima), 0);
    find_query_exponent(shared, me.lane, state);
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
        store_part(shared, parts[part], head_of_part(part, warp, me), tile, me.column,
                   state->query_exponent);
    }
    ptx_fence_async_shared();
    ptx_mbarrier_arrive(ptx_shared_address(&shared->stored), true);
}

/* ---- Both ---------------------------------------------------------------------------------- */

/* All that can be known before the grids in front are done, and is: the compiler may not move
 * it. */
template <typename Shape> struct small_places {
    key_place key;
    query_place query[Shape::QUERY_PARTS];
};

template <typename Shape>
static __device__ __forceinline__ small_places<Shape>
find_places(const attention_launch &launch, const cta_work &work)
{
    const lane_place me = find_place();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    small_places<Shape> at;
    at.key = find_key(launch, work, warp, me.lane);
    at.key.index = ptx_forget_pointer(at.key.index);
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
        at.query[part] = find_query(launch.params, work, part, warp, me);
        at.query[part].nope = ptx_forget_pointer(at.query[part].nope);
        at.query[part].rope = ptx_forget_pointer(at.query[part].rope);
    }
    return at;
}

/* Half of the warps ask for rows, which takes as long as rows take to come; the others ask for the
 * query and store it meanwhile. After it the query is there, rows are on their way. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_row(const attention_launch &launch, const cta_work &work, const small_places<Shape> &at,
          int num_granules, small_memory<Shape> *shared, small_state *state)
{
    const lane_place me = find_place();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    if (warp >= QUERY_WARPS) {
        const uint8_t *const row = find_key_row(launch, work, at.key);
        copy_rows(row, num_granules, warp, me.lane, shared);
        ptx_mbarrier_wait(ptx_shared_address(&shared->stored), 0);
        find_query_exponent(shared, me.lane, state);
        return;
    }
    small_query parts[Shape::QUERY_PARTS] = {};
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
        if (launch.q_is_aligned) {
            load_query<true>(at.query[part], warp, &parts[part]);
        } else {
            load_query<false>(at.query[part], warp, &parts[part]);
        }
    }
    store_small_query(shared, parts, warp, me, state);
    ptx_mbarrier_wait(ptx_shared_address(&shared->stored), 0);
}

#endif /* SMLA_CUDA_SMALL_FETCH_CUH */
