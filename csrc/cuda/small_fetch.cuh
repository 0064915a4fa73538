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
    ROW_VECTORS = FP8_ROW_BYTES / 16,
    TAIL_VECTORS = ROW_VECTORS - SMLA_WARP_LANES,          /* of a row: what 32 lanes leave */
    SCALE_BYTES = SMLA_NUM_SCALE_TILES * GRANULE_KEYS * 2, /* of a granule, in f16 */
    TOP_SCALE_EXPONENT = 6, /* of the largest scale / E: 448 times it is below 2^16 */
    WEIGHT_EXPONENT = 8,    /* of the largest weight */
    MAX_HALF_EXPONENT = 3,  /* of all keys: half of 2^-24 of it is a quarter of 1e-6 */
    NO_EXPONENT = -1000,    /* of a granule without keys */
};

static_assert((int)SMALL_GROUPS == (int)SMLA_NUM_SCALE_TILES,
              "the values of a warpgroup have one scale");

template <int HEADS_> struct small {
    static constexpr int HEADS = HEADS_;
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

/* What a warp fetches: a granule of the columns that a split may have, of the main list, then of the
 * extra one. Nothing of it needs memory, so it is known before the grids in front are done. */
typedef struct granule_place {
    int list;
    int32_t column;       /* of the lane's key */
    const int32_t *index; /* of it */
    bool is_on;           /* the lane has a key */
} granule_place;

static __device__ __forceinline__ int
count_granules(const attention_launch &launch)
{
    const int columns = launch.lists[0].split_columns +
                        (launch.params.num_lists == 2 ? launch.lists[1].split_columns : 0);
    return columns / GRANULE_KEYS;
}

static __device__ __forceinline__ granule_place
find_granule(const attention_launch &launch, const cta_work &work, int warp, int lane)
{
    const int num_main = launch.lists[0].split_columns / GRANULE_KEYS;
    granule_place place;
    place.list = warp < num_main ? 0 : 1;
    const smla_key_list &keys = launch.params.lists[place.list];
    place.column = work.split * launch.lists[place.list].split_columns +
                   (warp - place.list * num_main) * GRANULE_KEYS + lane;
    place.index = keys.indices + work.token * keys.indices_stride_token + place.column;
    place.is_on = warp < count_granules(launch) && lane < GRANULE_KEYS && place.column < keys.topk;
    return place;
}

/* The index of the lane's key, negative for none. */
static __device__ __forceinline__ int32_t
read_granule_index(const attention_launch &launch, const cta_work &work, const granule_place &place)
{
    const smla_key_list &keys = launch.params.lists[place.list];
    int32_t length = INT32_MAX;
    uint32_t index;
    if (keys.topk_length != NULL) {
        length = keys.topk_length[work.token * keys.topk_length_stride];
    }
    ptx_load_4(place.index, place.is_on, NO_ROW, &index);
    return place.column < length ? (int32_t)index : -1;
}

/* Starts the copy of the warp's granule: row i is with lane i. Zeros where there is none. */
static __device__ __forceinline__ void
copy_granule(const uint8_t *row, uint32_t to, int lane)
{
#pragma unroll 4
    for (int i = 0; i < GRANULE_KEYS; i++) {
        const uint8_t *const from = row_of_lane(row, i);
        ptx_cp_async_16_or_zero(to + i * FP8_ROW_BYTES + 16 * lane, from + 16 * lane, from != NULL);
    }
#pragma unroll 1
    for (int i = lane; i < (GRANULE_KEYS * TAIL_VECTORS + 31) / 32 * 32; i += SMLA_WARP_LANES) {
        const int key = min(i / TAIL_VECTORS, GRANULE_KEYS - 1);
        const int at = 16 * (SMLA_WARP_LANES + i % TAIL_VECTORS);
        const uint8_t *const from = row_of_lane(row, key);
        if (i < GRANULE_KEYS * TAIL_VECTORS) {
            ptx_cp_async_16_or_zero(to + key * FP8_ROW_BYTES + at, from + at, from != NULL);
        }
    }
}

/* ---- Query --------------------------------------------------------------------------------- */

/* A lane's part of the query of head 8 (warp / 4) + row: of scale tile warp % 4 the dimensions 32
 * column to 32 column + 31, and with tile 0 of the RoPE part 16. */
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

static __device__ __forceinline__ query_place
find_query(const smla_attention_params &params, const cta_work &work, int warp,
           const lane_place &me)
{
    const int head = 8 * (warp / SMLA_NUM_SCALE_TILES) + me.row;
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
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES && lane < Shape::HEADS; tile++) {
        head_max = max(head_max, shared->query_max[tile][lane]);
    }
    state->is_bad = head_max >= 0x7F80;
    head_max = state->is_bad ? 0 : head_max;
    const uint32_t query_max = __reduce_max_sync(0xFFFFFFFFu, head_max);
    const int exponent = query_max == 0 ? 0 : (int)(query_max >> 7) - 127 - QUERY_EXPONENT;
    state->query_exponent = min(max(exponent, -(int)MAX_QUERY_EXPONENT), (int)MAX_QUERY_EXPONENT);
    state->is_lost = exponent != state->query_exponent ||
                     (head_max != 0 && (head_max >> 7) + MAX_HEAD_RATIO < query_max >> 7);
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

/* Barriers 1 and 2: the query is in shared memory. */
template <typename Shape>
static __device__ __forceinline__ void
store_small_query(small_memory<Shape> *shared, const small_query &part, int warp,
                  const lane_place &me, small_state *state)
{
    const int head = 8 * (warp / SMLA_NUM_SCALE_TILES) + me.row;
    const int tile = warp % SMLA_NUM_SCALE_TILES;
    const uint32_t part_max = find_part_max(part);
    if (head < Shape::HEADS && me.column == 0) {
        shared->query_max[tile][head] = part_max;
    }
    __syncthreads();
    find_query_exponent(shared, me.lane, state);
    if (head < Shape::HEADS) {
        store_part(shared, part, head, tile, me.column, state->query_exponent);
    }
    ptx_fence_async_shared();
    __syncthreads();
}

/* ---- Both ---------------------------------------------------------------------------------- */

/* All that can be known before the grids in front are done, and is: the compiler may not move it. */
typedef struct small_places {
    granule_place granule;
    query_place query;
} small_places;

static __device__ __forceinline__ small_places
find_places(const attention_launch &launch, const cta_work &work)
{
    const lane_place me = find_place();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    small_places at = {find_granule(launch, work, warp, me.lane),
                       find_query(launch.params, work, warp, me)};
    at.granule.index = ptx_forget_pointer(at.granule.index);
    at.query.nope = ptx_forget_pointer(at.query.nope);
    at.query.rope = ptx_forget_pointer(at.query.rope);
    return at;
}

/* Asks for rows and query, and waits for them. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_row(const attention_launch &launch, const cta_work &work, const small_places &at,
          int num_granules, small_memory<Shape> *shared, small_state *state)
{
    const lane_place me = find_place();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const int32_t index = read_granule_index(launch, work, at.granule);
    small_query part = {};
    if (launch.q_is_aligned) {
        load_query<true>(at.query, warp, &part);
    } else {
        load_query<false>(at.query, warp, &part);
    }
    const uint8_t *const row =
        row_of_slot(launch, at.granule.list,
                    slot_of_index(launch, at.granule.list, work.token, index));
    const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, row != NULL);
    if (warp < num_granules) {
        copy_granule(row, ptx_shared_address(shared->rows[warp]), me.lane);
    }
    state->is_key.first = 0u - (is_key >> me.row & 1);
    state->is_key.second = 0u - (is_key >> (me.row + 8) & 1);
    store_small_query(shared, part, warp, me, state);
    ptx_cp_async_wait_all();
    __syncwarp(); /* the warp's rows are there */
}

#endif /* SMLA_CUDA_SMALL_FETCH_CUH */
