/* attention_sm90_small.cu: sparse MLA attention over FP8 rows for Hopper, for small batches: all keys
 * of a split are in shared memory at once.
 *
 * Computes     as attention_sm90.cu, transposed: S^T = K Q^T, P = 2^(scale S - ref),
 *              O^T = V^T P^T, with keys as A in registers and heads as N
 * Shapes       as attention_sm90.cu; a split has SMLA_SM90_SMALL_KEYS columns of both lists at most
 * Shared mem   query   [9][HEADS][128 B]   f16 (RoPE: bf16) times a power of two; 64 dimensions a
 *                      tile, permuted (store_words), 128-byte swizzle
 *              probs   [256][HEADS] f16    swizzled (wgmma.cuh)
 *              rows    [16][16][656 B]     granules of rows as they are in the cache
 *              scales  [16][4][16] f16, maxima, sums, maxima of the query
 *              32 heads: 227,904 bytes of the 232,448 that an SM has
 * Roles        One CTA for a token, split and head tile; 16 warps, four warpgroups. A warp fetches
 *              the 16 rows of its granule and scores them, a warpgroup adds 128 of the 512 values.
 *              barriers         what is visible after it, to all 512 threads
 *              1 (__syncthreads) maxima of the query's heads
 *              2                 query
 *              3                 rows, maxima of the scores, exponents of the scales
 *              4 (and vote)      weights, their sums, scales; whether any thread lost the row
 *              Rows are waited for by the warp that fetched them, so scoring starts as they come.
 *              A lost row is done again by the code of attention_sm80.cu.
 * Roofline     One pass of latencies: index, row, scores, values. 32 heads, 256 keys: 2300 cycles of
 *              wgmma each for scores and values.
 * Numerics     as attention_sm90.cu, but the reference is that of all keys: weights are f16 up to
 *              2^WEIGHT_EXPONENT and no score is too large. Scores are relative to the largest scale
 *              of the warp's keys, values to that of all keys; scales that are smaller by more than
 *              2^WINDOW_SIZE mark the row, as do NaN, negative and zero scales.
 *              A row's bits depend on its query, keys, num_splits, H and the device, not on T.
 * Source       as attention_sm90.cu; split-KV decoding (Flash-Decoding)
 */
#include "hopper.cuh"

enum {
    SMALL_KEYS = SMLA_SM90_SMALL_KEYS,
    SMALL_GRANULES = SMALL_KEYS / GRANULE_KEYS,
    SMALL_WARPS = SMALL_GRANULES,
    SMALL_THREADS = SMALL_WARPS * SMLA_WARP_LANES,
    SMALL_GROUPS = SMALL_THREADS / GROUP_THREADS,
    ROW_VECTORS = FP8_ROW_BYTES / 16,
    TAIL_VECTORS = ROW_VECTORS - SMLA_WARP_LANES,          /* of a row: what 32 lanes leave */
    SCALE_BYTES = SMLA_NUM_SCALE_TILES * GRANULE_KEYS * 2, /* of a granule, in f16 */
    TOP_SCALE_EXPONENT = 6, /* of the largest scale / E: 448 times it is below 2^16 */
    WEIGHT_EXPONENT = 8,    /* of the largest weight */
    GROUP_GRANULES = SMALL_GRANULES / SMALL_GROUPS, /* that a warpgroup scores */
    NO_EXPONENT = -1000,                            /* of a granule without keys */
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
    alignas(128) uint8_t rows[SMALL_GRANULES][GRANULE_BYTES];
    alignas(128) uint8_t scales[SMALL_GRANULES][SCALE_BYTES];
    float tops[SMALL_WARPS][Shape::HEADS];
    float sums[SMALL_WARPS][Shape::HEADS];
    uint32_t query_max[SMLA_NUM_SCALE_TILES][Shape::HEADS];
    int32_t key_exponent[SMALL_WARPS];
};

/* What a thread finds out about the row, step by step. */
typedef struct small_state {
    key_masks is_key;   /* of rows row and row + 8 of the warp's granule */
    float scale[2];     /* of those rows, in scale tile `column` */
    float score_factor; /* of the scores, in the log2 domain */
    float reference;    /* of head `lane` */
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

/* The row that an index names, NULL for none. */
static __device__ __forceinline__ const uint8_t *
find_granule_row(const attention_launch &launch, int list, int32_t token, int32_t index)
{
    const smla_key_list &keys = launch.params.lists[list];
    const list_facts &facts = launch.lists[list];
    if (index < 0) {
        return NULL;
    }
    const int64_t slot =
        keys.map.block_table == NULL ? index : map_index(keys.map, facts.block_size, token, index);
    if (slot < 0 || slot >= facts.num_slots) {
        return NULL;
    }
    const int64_t page = smla_divide_uint32((uint32_t)slot, facts.block_size);
    const int64_t offset = slot - page * facts.block_size.divisor;
    return keys.kv.base + page * keys.kv.page_stride_bytes + offset * keys.kv.token_stride_bytes;
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
    if (lane < Shape::HEADS) {
#pragma unroll
        for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
            head_max = max(head_max, shared->query_max[tile][lane]);
        }
    }
    state->is_bad = head_max >= 0x7F80;
    head_max = state->is_bad ? 0 : head_max;
    const uint32_t query_max = __reduce_max_sync(0xFFFFFFFFu, head_max);
    const int exponent = query_max == 0 ? 0 : (int)(query_max >> 7) - 127 - QUERY_EXPONENT;
    state->query_exponent = min(max(exponent, -(int)MAX_QUERY_EXPONENT), (int)MAX_QUERY_EXPONENT);
    state->is_lost = exponent != state->query_exponent ||
                     (head_max != 0 && (head_max >> 7) + MAX_HEAD_RATIO < query_max >> 7);
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
        const float factor = power_of_two(-state->query_exponent);
        uint32_t words[8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t pair = part.nope[8 * half + i];
                words[i] =
                    ptx_cvt_f16x2(smla_low_bf16(pair) * factor, smla_high_bf16(pair) * factor);
            }
            store_words(shared, 2 * tile + half, head, me.column, words);
        }
        if (tile == 0) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                words[i] = ptx_mul_bf16x2(part.rope[i],
                                          (uint32_t)(127 - state->query_exponent) * 0x00800080u);
            }
            store_words(shared, QUERY_TILES - 1, head, me.column, words);
        }
    }
    ptx_fence_async_shared();
    __syncthreads();
}

/* ---- Scores -------------------------------------------------------------------------------- */

/* The scales of the warp's keys, and their power of two. */
static __device__ __forceinline__ void
find_key_exponent(uint32_t rows, const lane_place &me, uint32_t is_key, small_state *state)
{
    state->is_key.first = 0u - (is_key >> me.row & 1);
    state->is_key.second = 0u - (is_key >> (me.row + 8) & 1);
    const uint32_t from = rows + me.row * FP8_ROW_BYTES + SCALE_OFFSET + 4 * me.column;
    const uint32_t a = ptx_load_shared_4(from) & state->is_key.first;
    const uint32_t b = ptx_load_shared_4(from + 8 * FP8_ROW_BYTES) & state->is_key.second;
    state->scale[0] = smla_bits_float(a);
    state->scale[1] = smla_bits_float(b);
    const int largest =
        (int)(__reduce_max_sync(0xFFFFFFFFu, max(a & 0x7F800000u, b & 0x7F800000u)) >> 23);
    const int exponent = largest - 127 - TOP_SCALE_EXPONENT;
    state->key_exponent = min(max(exponent, -(int)MAX_KEY_EXPONENT), (int)MAX_KEY_EXPONENT);
}

/* f16 of the lane's two scales / 2^exponent; one that leaves f16's normal range marks the row. */
static __device__ __forceinline__ uint32_t
round_scales(int exponent, small_state *state)
{
    const uint32_t lowest = (uint32_t)(exponent + 127 - WINDOW_LOW);
    const bool a_fits = (smla_float_bits(state->scale[0]) >> 23) - lowest < WINDOW_SIZE;
    const bool b_fits = (smla_float_bits(state->scale[1]) >> 23) - lowest < WINDOW_SIZE;
    state->is_lost |=
        (!a_fits & (state->is_key.first != 0)) | (!b_fits & (state->is_key.second != 0));
    const float unit = power_of_two(-exponent);
    return ptx_cvt_f16x2(state->scale[0] * unit, state->scale[1] * unit);
}

/* Four steps of 16 dimensions: bytes of rows row and row + 8 to A. */
static __device__ __forceinline__ void
convert_keys(const uint32_t words[8], const uint32_t scale[2], uint32_t a[16])
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        ptx_cvt_f16x4_e4m3x4(words[j], &a[4 * j], &a[4 * j + 2]);
        ptx_cvt_f16x4_e4m3x4(words[4 + j], &a[4 * j + 1], &a[4 * j + 3]);
        a[4 * j] = ptx_mul_f16x2(a[4 * j], scale[0]);
        a[4 * j + 1] = ptx_mul_f16x2(a[4 * j + 1], scale[1]);
        a[4 * j + 2] = ptx_mul_f16x2(a[4 * j + 2], scale[0]);
        a[4 * j + 3] = ptx_mul_f16x2(a[4 * j + 3], scale[1]);
    }
}

/* The RoPE part: bf16 as it is, times `factor`, a power of two. */
static __device__ __forceinline__ void
scale_rope(uint32_t from, uint32_t factor, uint32_t a[16])
{
    uint32_t words[2][8];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        ptx_load_shared_16(from + 8 * i * FP8_ROW_BYTES, &words[i][0]);
        ptx_load_shared_16(from + 8 * i * FP8_ROW_BYTES + 16, &words[i][4]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a[4 * j] = ptx_mul_bf16x2(words[0][2 * j], factor);
        a[4 * j + 1] = ptx_mul_bf16x2(words[1][2 * j], factor);
        a[4 * j + 2] = ptx_mul_bf16x2(words[0][2 * j + 1], factor);
        a[4 * j + 3] = ptx_mul_bf16x2(words[1][2 * j + 1], factor);
    }
}

/* scores += A * the query's `tile`. */
template <typename Shape, bool IS_ROPE>
static __device__ __forceinline__ void
multiply_keys(uint64_t query, int tile, const uint32_t a[16], float (&scores)[Shape::HEADS / 2])
{
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint64_t b = wgmma_advance(query, (tile * Shape::HEADS * 128 + j * 32) >> 4);
        if constexpr (IS_ROPE) {
            wgmma_bf16(scores, a + 4 * j, b, true);
        } else {
            wgmma_f16<false>(scores, a + 4 * j, b, true);
        }
    }
    wgmma_commit();
}

/* scores = q . k / (the query's power of two * that of the warp's keys). */
template <typename Shape>
static __device__ __forceinline__ void
score_keys(small_memory<Shape> *shared, uint32_t rows, const lane_place &me, small_state *state,
           float (&scores)[Shape::HEADS / 2])
{
    const uint64_t query =
        wgmma_descriptor(ptx_shared_address(shared->query), 1024, WGMMA_SWIZZLE_128);
    const uint32_t row = rows + me.row * FP8_ROW_BYTES + 32 * me.column;
    const uint32_t pairs = round_scales(state->key_exponent, state);
    uint32_t a[2][16], words[8], scale[2];
#pragma unroll
    for (int i = 0; i < Shape::HEADS / 2; i++) {
        scores[i] = 0.0f;
    }
    ptx_load_shared_16(row, words);
    ptx_load_shared_16(row + 8 * FP8_ROW_BYTES, words + 4);
#pragma unroll
    for (int tile = 0; tile < QUERY_TILES - 1; tile++) {
        if (tile % 2 == 0) {
            const uint32_t pair = __shfl_sync(0xFFFFFFFFu, pairs, (me.lane & 28) | tile / 2);
            scale[0] = __byte_perm(pair, pair, 0x1010);
            scale[1] = __byte_perm(pair, pair, 0x3232);
        }
        wgmma_wait<1>(); /* the products of this A */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            ptx_pin(&words[i]);
        }
        convert_keys(words, scale, a[tile % 2]);
        if (tile + 1 < QUERY_TILES - 1) {
            const uint32_t next = row + 128 * ((tile + 1) / 2) + 16 * ((tile + 1) % 2);
            ptx_load_shared_16(next, words);
            ptx_load_shared_16(next + 8 * FP8_ROW_BYTES, words + 4);
        }
        multiply_keys<Shape, false>(query, tile, a[tile % 2], scores);
    }
    wgmma_wait<1>();
    scale_rope(row + ROPE_OFFSET, (uint32_t)(127 - state->key_exponent) * 0x00800080u, a[0]);
    multiply_keys<Shape, true>(query, QUERY_TILES - 1, a[0], scores);
    wgmma_wait<0>();
}

/* ---- Weights ------------------------------------------------------------------------------- */

template <bool IS_MAX>
static __device__ __forceinline__ float
fold_pair(float a, float b)
{
    return IS_MAX ? fmaxf(a, b) : a + b;
}

/* Four heads' values over the eight lanes of a column, the rows of fragments: a lane gets that of
 * head number `lane / 8`. */
template <bool IS_MAX>
static __device__ __forceinline__ float
fold_rows(const float values[4], int lane)
{
    const bool upper = lane & 16;
    const bool odd = lane & 8;
    float half[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float give = upper ? values[i] : values[2 + i];
        const float keep = upper ? values[2 + i] : values[i];
        half[i] = fold_pair<IS_MAX>(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 16));
    }
    const float other = __shfl_xor_sync(0xFFFFFFFFu, odd ? half[0] : half[1], 8);
    const float quarter = fold_pair<IS_MAX>(odd ? half[1] : half[0], other);
    return fold_pair<IS_MAX>(quarter, __shfl_xor_sync(0xFFFFFFFFu, quarter, 4));
}

/* The head of the lane's value, of heads first to first + 15, after fold_rows of those that the
 * lane's column has: 8 (number / 2) + 2 column + number % 2. */
static __device__ __forceinline__ int
head_of_fold(const lane_place &me)
{
    return 8 * (me.lane >> 4) + 2 * me.column + (me.lane >> 3 & 1);
}

/* Barrier 3: from the maxima of all warps the reference of head `lane`, and the power of two of all
 * keys. */
template <typename Shape>
static __device__ __forceinline__ float
find_reference(small_memory<Shape> *shared, int warp, const lane_place &me, bool has_keys,
               small_state *state, const float (&scores)[Shape::HEADS / 2])
{
#pragma unroll
    for (int chunk = 0; chunk < Shape::HEADS / 16; chunk++) {
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int from = 8 * chunk + 4 * (i / 2) + i % 2;
            const float first = scores[from] * state->score_factor;
            const float second = scores[from + 2] * state->score_factor;
            values[i] = fmaxf(state->is_key.first ? first : -INFINITY,
                              state->is_key.second ? second : -INFINITY);
        }
        const float top = fold_rows<true>(values, me.lane);
        if (!(me.lane & 4)) {
            shared->tops[warp][16 * chunk + head_of_fold(me)] = top;
        }
    }
    if (me.lane == 0) {
        shared->key_exponent[warp] = has_keys ? state->key_exponent : (int)NO_EXPONENT;
    }
    __syncthreads();
    float top = -INFINITY;
    if (me.lane < Shape::HEADS) {
#pragma unroll
        for (int i = 0; i < SMALL_WARPS; i++) {
            top = fmaxf(top, shared->tops[i][me.lane]);
        }
    }
    const int exponent =
        __reduce_max_sync(0xFFFFFFFFu, shared->key_exponent[me.lane % SMALL_WARPS]);
    state->key_exponent = exponent;
    state->is_lost |= !state->is_bad && top != -INFINITY && !(fabsf(top) < 0x1p22f);
    state->reference = state->is_bad ? NAN : softmax_reference(top) - (float)WEIGHT_EXPONENT;
    return top;
}

/* Weights of the warp's keys and their sums, and the scales that their values are multiplied with.
 * Barrier 4: whether any thread lost the row. */
template <typename Shape>
static __device__ __forceinline__ bool
weigh_keys(small_memory<Shape> *shared, int warp, const lane_place &me, small_state *state,
           const float (&scores)[Shape::HEADS / 2])
{
#pragma unroll
    for (int chunk = 0; chunk < Shape::HEADS / 16; chunk++) {
        uint32_t pairs[4];
        float sums[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int head = 16 * chunk + 8 * j + 2 * me.column;
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float reference = __shfl_sync(0xFFFFFFFFu, state->reference, head + i % 2);
                const float x =
                    fmaf(scores[8 * chunk + 4 * j + i], state->score_factor, -reference);
                const uint32_t mask = i < 2 ? state->is_key.first : state->is_key.second;
                e[i] = smla_bits_float(smla_float_bits(ptx_exp2(x)) & mask);
            }
            pairs[2 * j] = ptx_cvt_f16x2(e[0], e[1]);
            pairs[2 * j + 1] = ptx_cvt_f16x2(e[2], e[3]);
            sums[2 * j] = e[0] + e[2];
            sums[2 * j + 1] = e[1] + e[3];
        }
        const float sum = fold_rows<false>(sums, me.lane);
        if (!(me.lane & 4)) {
            shared->sums[warp][16 * chunk + head_of_fold(me)] = sum;
        }
        const int key = GRANULE_KEYS * warp + (me.lane & 15);
        const int piece = 2 * chunk + (me.lane >> 4);
        const int flip = Shape::HEADS == 32 ? key >> 1 & 3 : key >> 2 & 1;
        ptx_stmatrix_x4(ptx_shared_address(&shared->probs[key][(piece ^ flip) * 16]), pairs[0],
                        pairs[1], pairs[2], pairs[3]);
    }
    const uint32_t scales = round_scales(max(state->key_exponent, -(int)MAX_KEY_EXPONENT), state);
    uint16_t *const to = (uint16_t *)&shared->scales[warp][me.column * GRANULE_KEYS * 2] +
                         4 * (me.row >> 1) + (me.row & 1);
    to[0] = (uint16_t)scales;
    to[2] = (uint16_t)(scales >> 16);
    ptx_fence_async_shared();
    return __syncthreads_or(state->is_lost);
}

/* ---- Values -------------------------------------------------------------------------------- */

/* A thread's values of a granule: 4 dimensions of keys 2 column, 2 column + 1 and 8 further. */
typedef struct small_values {
    uint32_t raw[4];
    uint32_t scale[2];
} small_values;

template <typename Shape>
static __device__ __forceinline__ void
load_small_values(const small_memory<Shape> *shared, int granule, const lane_place &me,
                  small_values *values)
{
    const uint32_t from = ptx_shared_address(shared->rows[granule]) +
                          2 * me.column * FP8_ROW_BYTES + 128 * me.group + 32 * me.warp +
                          4 * me.row;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values->raw[i] = ptx_load_shared_4(from + (i % 2 + 8 * (i / 2)) * FP8_ROW_BYTES);
    }
    ptx_load_shared_8(ptx_shared_address(shared->scales[granule]) + me.group * (GRANULE_KEYS * 2) +
                          8 * me.column,
                      values->scale);
}

/* Two e4m3, in bytes 1 and 3, to f16 / 2^8, exactly, but for NaN, which would be 480: its score is
 * NaN already. cvt has a quarter of the rate of what this takes. */
static __device__ __forceinline__ uint32_t
shift_e4m3x2(uint32_t bytes)
{
    return (bytes >> 1 & 0x3F803F80u) | (bytes & 0x80008000u);
}

/* -> A of two products: rows of product b are dimensions 2b and 2b + 1 of every four. One goes
 * through cvt, the other through the ALU, which work side by side. */
static __device__ __forceinline__ void
convert_small_values(const small_values &values, uint32_t a[8])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t first = values.raw[2 * i];
        const uint32_t second = values.raw[2 * i + 1];
        const uint32_t scale = values.scale[i];
        const uint32_t large_scale = ptx_mul_f16x2(scale, 0x5C005C00u); /* 2^8 */
        ptx_cvt_f16x4_e4m3x4(__byte_perm(first, second, 0x5140), &a[2 * i], &a[2 * i + 1]);
        a[2 * i] = ptx_mul_f16x2(a[2 * i], scale);
        a[2 * i + 1] = ptx_mul_f16x2(a[2 * i + 1], scale);
        a[4 + 2 * i] = ptx_mul_f16x2(shift_e4m3x2(__byte_perm(first, second, 0x6020)), large_scale);
        a[5 + 2 * i] = ptx_mul_f16x2(shift_e4m3x2(__byte_perm(first, second, 0x7030)), large_scale);
    }
}

/* out = values * weights, of 128 values per warpgroup. Granules come in fours, as a split's
 * columns do in 64. */
template <typename Shape>
static __device__ __forceinline__ void
add_small_values(small_memory<Shape> *shared, int num_granules, const lane_place &me,
                 float (&out)[2][Shape::HEADS / 2])
{
    const uint64_t probs = wgmma_descriptor(ptx_shared_address(shared->probs),
                                            8 * Shape::PROB_BYTES, Shape::PROBS_SWIZZLE);
    small_values values[2];
    uint32_t a[2][8];
#pragma unroll
    for (int i = 0; i < Shape::HEADS / 2; i++) {
        out[0][i] = 0.0f;
        out[1][i] = 0.0f;
    }
    load_small_values(shared, 0, me, &values[0]);
    load_small_values(shared, 1, me, &values[1]);
#pragma unroll 1
    for (int first = 0; first < num_granules; first += GROUP_GRANULES) {
#pragma unroll
        for (int i = 0; i < GROUP_GRANULES; i++) {
            wgmma_wait<1>(); /* the products of this A */
#pragma unroll
            for (int j = 0; j < 4; j++) {
                ptx_pin(&values[i % 2].raw[j]);
            }
            convert_small_values(values[i % 2], a[i % 2]);
            load_small_values(shared, min(first + i + 2, SMALL_GRANULES - 1), me, &values[i % 2]);
            const uint64_t b =
                wgmma_advance(probs, (first + i) * (GRANULE_KEYS * Shape::PROB_BYTES >> 4));
            wgmma_fence();
            wgmma_f16<true>(out[0], &a[i % 2][0], b, true);
            wgmma_f16<true>(out[1], &a[i % 2][4], b, true);
            wgmma_commit();
        }
        wgmma_wait<0>(); /* ptxas keeps none under way around a loop */
    }
}

/* ---- Results ------------------------------------------------------------------------------- */

/* The states of the partial row; thread `head` knows its maximum. */
template <typename Shape>
static __device__ __forceinline__ void
write_states(const attention_launch &launch, const cta_work &work, int head, float top,
             const small_memory<Shape> *shared)
{
    if (head < work.num_heads) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SMALL_WARPS; i++) {
            sum += shared->sums[i][head];
        }
        sum *= 1.0f / (1 << WEIGHT_EXPONENT);
        *(float2 *)(launch.partials.state + 2 * partial_row(launch, work, head)) =
            make_float2(sum == 0.0f ? -INFINITY : top, sum);
    }
}

template <typename Shape>
static __device__ __forceinline__ void
write_small_row(const attention_launch &launch, const cta_work &work, const lane_place &me,
                float unit, const float (&out)[2][Shape::HEADS / 2])
{
    float *const to = launch.partials.out +
                      partial_row(launch, work, 2 * me.column) * SMLA_KV_LORA_RANK +
                      128 * me.group + 32 * me.warp + 4 * me.row;
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = 4 * j + i;
            const uint32_t words[4] = {smla_float_bits(out[0][at] * unit),
                                       smla_float_bits(out[0][at + 2] * unit),
                                       smla_float_bits(out[1][at] * unit),
                                       smla_float_bits(out[1][at + 2] * unit)};
            if (8 * j + 2 * me.column + i < work.num_heads) {
                smla_store_vector_4(to + (8 * j + i) * SMLA_KV_LORA_RANK, words);
            }
        }
    }
}

/* A lost row, by the portable code and half of the threads. */
template <typename Shape>
static __device__ __forceinline__ void
redo_small_row(const attention_launch &launch, const cta_work &work, void *memory)
{
    if (threadIdx.x >= CTA_THREADS) {
        return;
    }
    typedef typename Shape::Portable Portable;
    const int num_tiles = ((int)launch.params.num_heads + Portable::HEADS - 1) / Portable::HEADS;
    const int part = work.token * launch.params.num_splits + work.split;
    const int first = work.first_head / Portable::HEADS;
#pragma unroll 1
    for (int i = first; i < min(first + Shape::REDO_TILES, num_tiles); i++) {
        attend_cta<Portable>(launch, (uint32_t)num_tiles, part * num_tiles + i,
                             (shared_memory<Portable> *)memory);
        ptx_barrier(0, CTA_THREADS);
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

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

/* Everything up to the weights, which it gives to shared memory; whether the row is lost. */
template <typename Shape>
static __device__ __forceinline__ bool
score_row(const attention_launch &launch, const cta_work &work, const small_places &at,
          int num_granules, small_memory<Shape> *shared, float *top, int *key_exponent)
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
    const uint8_t *const row = find_granule_row(launch, at.granule.list, work.token, index);
    const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, row != NULL);
    const uint32_t rows = ptx_shared_address(shared->rows[warp]);
    if (warp < num_granules) {
        copy_granule(row, rows, me.lane);
    }
    small_state state = {};
    store_small_query(shared, part, warp, me, &state);
    ptx_cp_async_wait_all();
    __syncwarp(); /* the warp's rows are there */
    find_key_exponent(rows, me, is_key, &state);
    state.score_factor =
        launch.scale_log2 * power_of_two(state.query_exponent) * power_of_two(state.key_exponent);
    state.is_lost |= !(fabsf(state.score_factor) <= 0x1p100f) ||
                     (fabsf(state.score_factor) < 0x1p-100f && launch.scale_log2 != 0.0f);
    float scores[Shape::HEADS / 2] = {};
    if (me.group * GROUP_GRANULES < num_granules) {
        score_keys(shared, rows, me, &state, scores);
    }
    *top = find_reference(shared, warp, me, is_key != 0, &state, scores);
    const bool is_lost = weigh_keys(shared, warp, me, &state, scores);
    *key_exponent = state.key_exponent;
    return is_lost;
}

template <typename Shape>
__global__ void
__launch_bounds__(SMALL_THREADS, 1) attend_small(const __grid_constant__ attention_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    small_memory<Shape> *const shared = (small_memory<Shape> *)memory;
    const int thread = (int)threadIdx.x;
    const cta_work work = find_work(launch, launch.num_head_tiles, (int)blockIdx.x, Shape::HEADS);
    const small_places at = find_places(launch, work);
    const int num_granules = count_granules(launch);
    ptx_wait_for_grids(); /* from here on memory of others is read and written */
    ptx_let_next_grid_start();
    float top;
    int key_exponent;
    if (score_row(launch, work, at, num_granules, shared, &top, &key_exponent)) {
        redo_small_row<Shape>(launch, work, memory);
        return;
    }
    if (thread < SMLA_WARP_LANES) {
        write_states(launch, work, thread, top, shared);
    }
    if (key_exponent == NO_EXPONENT) {
        return; /* no key, no partial row */
    }
    const lane_place me = find_place();
    float out[2][Shape::HEADS / 2];
    add_small_values(shared, num_granules, me, out);
    write_small_row<Shape>(launch, work, me, power_of_two(key_exponent - WEIGHT_EXPONENT), out);
}

/* ---- Launchers ----------------------------------------------------------------------------- */

template <int HEADS>
static cudaError_t
launch_small(const smla_attention_params *params)
{
    typedef small<HEADS> Shape;
    constexpr int SHARED_BYTES = (int)sizeof(small_memory<Shape>);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    static_assert(sizeof(shared_memory<typename Shape::Portable>) <= SHARED_BYTES,
                  "rows are done again in it");
    static uint64_t allowed;
    const cudaError_t code = allow_shared_bytes((const void *)attend_small<Shape>, SHARED_BYTES,
                                                params->stream.device_id, &allowed);
    if (code != cudaSuccess) {
        return code;
    }
    if (!is_countable(params, HEADS)) {
        return cudaErrorInvalidValue;
    }
    const attention_launch launch = make_launch<HEADS>(params);
    const int64_t num_ctas = params->num_tokens * params->num_splits * launch.num_head_tiles;
    return smla_launch(attend_small<Shape>, launch, num_ctas, SMALL_THREADS, SHARED_BYTES,
                       params->stream.handle, true);
}

cudaError_t
smla_attend_sm90_small_32(const smla_attention_params *params)
{
    return launch_small<32>(params);
}

cudaError_t
smla_attend_sm90_small_16(const smla_attention_params *params)
{
    return launch_small<16>(params);
}
