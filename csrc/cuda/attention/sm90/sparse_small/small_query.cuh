/* small_query.cuh: how a CTA of attention_small_sm90.cu brings its query to shared memory.
 */
#pragma once

#include "cuda/attention/sm90/sparse_small/small_shape.cuh"

/* What a lane has of the query: a head in each query part, `head` in the first part and PART_HEADS
 * more in each further one. Of these heads it has 8 dimensions of a scale tile from 32 column + 8
 * piece on, and 8 dimensions from 16 further on. Of rope_head it has 8 dimensions of the RoPE part
 * from 16 column + 8 piece on. So eight lanes ask for whole sectors, and a load takes 8 lines,
 * which is what counts. */
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

/* The addresses of a lane's query in memory; nope is that of its first head. */
typedef struct query_source {
    const uint16_t *nope;
    const uint16_t *rope;
} query_source;

static __device__ __forceinline__ query_source
find_query(const smla_queries &queries, const work_item &item, const query_lane &at)
{
    query_source source;
    source.nope = smla_row16(&queries.parts[SMLA_NOPE], item.token, item.first_head + at.head) +
                  SMLA_SCALE_TILE * at.tile + 32 * at.column + 8 * at.piece;
    source.rope = smla_row16(&queries.parts[SMLA_PE], item.token, item.first_head + at.rope_head) +
                  16 * at.column + 8 * at.piece;
    return source;
}

/* Asks for the query to be in L2, while the grids in front are running. The splits of a token need
 * the same query, so each asks for some parts. L2 will have what those grids still write. */
template <typename Shape>
static __device__ __forceinline__ void
prefetch_query(const attention_launch &launch, const work_item &item, const query_source &source,
               const query_lane &at)
{
    const smla_queries &queries = launch.params.queries;
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
        const int further = PART_HEADS * part;
        const uint16_t *const nope = source.nope + further * queries.parts[SMLA_NOPE].stride_head;
        const bool is_on = item.split == part % launch.params.results.num_splits &&
                           at.head + further < item.num_heads;
        ptx_prefetch_l2(nope, is_on);
        ptx_prefetch_l2(nope + 16, is_on);
    }
    if constexpr (!Shape::Row::ROPE_IS_VALUE) {
#pragma unroll
        for (int set = 0; set < Shape::HEAD_SETS; set++) {
            ptx_prefetch_l2(source.rope +
                                SMLA_WARP_LANES * set * queries.parts[SMLA_PE].stride_head,
                            item.split == 0 &&
                                at.rope_head + SMLA_WARP_LANES * set < item.num_heads);
        }
    }
}

template <typename Shape, bool ALIGNED>
static __device__ __forceinline__ void
load_query(const smla_queries &queries, const query_source &source, const query_lane &at,
           int num_heads, small_query<Shape> *query)
{
#pragma unroll
    for (int part = 0; part < Shape::QUERY_PARTS; part++) {
        const int further = PART_HEADS * part;
        if (at.head + further < num_heads) {
            const uint16_t *const nope =
                source.nope + further * queries.parts[SMLA_NOPE].stride_head;
            smla_load_words<16, ALIGNED>(nope, query->nope[part][0]);
            smla_load_words<16, ALIGNED>(nope + 16, query->nope[part][1]);
        }
    }
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        const int further = SMLA_WARP_LANES * set;
        if (!Shape::Row::ROPE_IS_VALUE && at.rope_head + further < num_heads) {
            smla_load_words<16, ALIGNED>(source.rope + further * queries.parts[SMLA_PE].stride_head,
                                         query->rope[set]);
        }
    }
}

/* The largest absolute values among `pair` and some words, one for each bf16 of a word, or NaN if
 * there is one. Signs may be anything. */
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
    state->query_exponent = find_query_exponent(query_max, &state->needs_fallback);
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        state->needs_fallback |=
            head_max[set] != 0 && (head_max[set] >> 7) + MAX_HEAD_RATIO < query_max >> 7;
    }
}

/* Stores the query times its power of two: the NoPE part as f16, the RoPE part as bf16. If the RoPE
 * part is a value, the last 128 dimensions are a NoPE tile and a RoPE tile: columns 0 and 1 have
 * the NoPE values. */
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
            store_query_words(shared, has_both ? Row::NOPE_TILES - 1 + is_rope : 2 * at.tile + half,
                              at.head + PART_HEADS * part, 4 * at.piece,
                              has_both ? 2 * (at.column % 2) + half : at.column, words);
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
            store_query_words(shared, Row::NOPE_TILES, head, 4 * at.piece, at.column, words);
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
