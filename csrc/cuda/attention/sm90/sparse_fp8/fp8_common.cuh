/* fp8_common.cuh: what all warp roles of attention_fp8_sm90.cu share: shared memory, kernel
 * argument, work items, consumer state. attention_fp8_sm90.cu explains them. */
#pragma once

#include <stddef.h>

#include "cuda/attention/sm90/sparse_fp8/fp8_shape.cuh"
#include "cuda/attention/tiles/cut_work_items.cuh"
#include "cuda/attention/tiles/work_order.cuh"

enum : uint32_t { NO_ROW = 0xFFFFFFFFu };

/* Limit of a score of FP8 rows, in the log2 domain. f16 rounds away 2^-12 of a score, and in larger
 * scores this error would decide which key is the heaviest. Those go to the fallback. */
#define MAX_SCORE 0x1p11f

/* Limits of the scale of a cache. Below, factors of out might be subnormal numbers. Above, what f16
 * rounds away of light keys' weights might be too much beside heavy keys with values of 0, as with
 * rows whose E is above 2^3. */
#define LEAST_CACHE_SCALE   0x1p-80f
#define LARGEST_CACHE_SCALE 0x1p10f

/* Halves of rows without scales are means of codes times this: at most 448 * 2^7, which fits f16,
 * while small means keep their bits. */
#define HALVES_PER_CODE 0x1p7f

enum {
    MAX_ITEMS = 512,    /* the most items per CTA: each has a bit of fallback_bits */
    CONSTANT_LINE = 64, /* bytes: kernel arguments arrive in such lines */
    /* named barriers */
    BARRIER_CONSUMERS = 1,
    BARRIER_GROUP = 2,
    BARRIER_GATHER = 4,
    /* exponents; E is the unit of an item's scales and values (find_key_exponent) */
    TOP_SCALE_EXPONENT = 6,   /* the largest scale / E that fits f16: 448 times 2^7 < 2^16 */
    LOW_SCALE_EXPONENT = -2,  /* the first keys' largest scale / E, if E may be that large */
    FINE_UNIT_EXPONENT = -2,  /* up to this E, a product's error of 2^-25 E is negligible */
    USUAL_UNIT_EXPONENT = -9, /* the E to take where the first keys' scales tell nothing */
    MAX_KEY_EXPONENT = 40,    /* the exponent of E is clamped to this and its negative */
    MAX_UNIT_EXPONENT = 3,    /* the largest E: 2^-25 E is then a quarter of 1e-6 */
    MAX_QUERY_EXPONENT = 80,
    QUERY_EXPONENT = 14, /* the query's largest value in f16 */
    QUERY_LANES = 8,     /* lanes that have parts of a head */
    MAX_HEAD_RATIO = 13, /* exponent of the largest ratio of two heads' largest values in a tile */
};

template <typename Shape> struct fp8_memory {
    alignas(1024) uint8_t query[Shape::Row::QUERY_TILES][Shape::HEADS][128];
    alignas(1024) uint8_t probs[2][64][Shape::PROB_BYTES];
    alignas(1024) typename Shape::Granule ring[Shape::GRANULES];
    alignas(16) float sums[CONSUMER_WARPS][Shape::SLOTS]; /* slots: slot_of_sum; at first, maxima */
    alignas(16) float maxima[Shape::MAXIMA ? CONSUMER_WARPS : 1][Shape::MAXIMA ? Shape::SLOTS : 1];
    alignas(16) float reference[Shape::HEADS];
    alignas(16) float factor[2][Shape::HEADS]; /* out's factors per group; at first, the sinks */
    int32_t item_idx;       /* number of the current item among the CTA's items */
    work_item current_item; /* without its columns; kept because divisions are slow */
    float score_scale;      /* multiplies a score, gives its logit in the log2 domain */
    float key_unit;         /* the unit of scales and values; of rows without scales: kv_scale */
    union {
        float inv_key_unit; /* 1 / E */
        float cache_scale;  /* rows without scales: score_scale for a query whose unit is 1 */
    };
    uint32_t query_max[CONSUMER_WARPS];
    uint32_t scale_max[CONSUMER_WARPS];
    alignas(8) uint64_t probs_ready[2];
    uint64_t values_added[2];
    uint64_t rescaled; /* as the next: see fp8_growth.cuh */
    uint64_t probs_ready_again;
    uint64_t query_full;
    uint64_t query_free;
    uint64_t counted;
    int32_t num_steps[2]; /* steps per item; items use elements 0 and 1 of these four in turn */
    alignas(16) uint32_t num_absent[2][GATHER_WARPS]; /* positions without a key (add_absent) */
    typename Shape::OnlyKey only[2][GATHER_WARPS];    /* a gather warp's key, if it has only one */
    union {
        alignas(16) key_counts num_keys[2]; /* calls over lists */
        typename Shape::Limits limits;      /* tiles */
    };
    alignas(8) float shift[Shape::HEADS];        /* amounts of the last raise of references */
    alignas(8) float shift_factor[Shape::HEADS]; /* 2^-shift */
    uint32_t has_grown[2]; /* per group: a byte for each warp whose weights exceed f16 */
    alignas(8) uint8_t needs_fallback[CONSUMER_WARPS]; /* a number of the item did not fit */
    uint32_t fallback_bits[MAX_ITEMS / 32];
    item_order order;
};

/* Where the cache rows of a list lie. */
typedef struct row_span {
    const uint8_t *lowest; /* the row at the lowest address */
    uint32_t bias;         /* distance from `lowest` to the row of slot 0, in units of 16 bytes */
    uint32_t pitch;        /* distance of rows by index where they are evenly spaced, else 0 */
} row_span;

/* The argument of the kernel. */
typedef struct fp8_launch {
    row_span lists[2];
    int32_t num_items;
    float headroom;      /* upper limit of find_row_headroom */
    float max_weight;    /* limit of a head's weights over a warp's 16 keys: below, each fits f16 */
    bool out_is_aligned; /* every row of out is aligned to 16 bytes */
    bool fetches_query;  /* gather warps fetch the query, because q and out are aligned */
    bool query_is_dense; /* a token's heads are contiguous, both parts of each head together */
    bool is_ordered;     /* CTAs take items in the order of work_order.cuh */
    attention_launch base;
} fp8_launch;

/* Whether the query is e4m3. Only queries for rows without scales may be. */
static __device__ __forceinline__ bool
is_query_coded(const fp8_launch &launch)
{
    return launch.base.params.queries.type == SMLA_FLOAT_E4M3;
}

/* ---- Work items ---------------------------------------------------------------------------- */

/* The CTA's next work item, whole even if the CTA has a part of it; no heads: there is none. */
template <typename Shape>
static __device__ __forceinline__ work_item
find_next(const fp8_launch &launch, const fp8_memory<Shape> *shared)
{
    const int idx =
        nth_item(launch.is_ordered, launch.num_items, &shared->order, shared->item_idx + 1);
    work_item next = {};
    if (idx >= 0) {
        next = find_numbered_item<true>(launch.base,
                                        launch.base.num_segments > 1 ? item_of_part(idx) : idx,
                                        Shape::HEADS);
    }
    return next;
}

/* Makes `next` the current item. Other threads see it after the next barrier. */
template <typename Shape>
static __device__ __forceinline__ void
begin_item(const fp8_launch &launch, const work_item &next, fp8_memory<Shape> *shared)
{
    const int thread = ptx_forget((int)threadIdx.x); /* recomputed: keeping it costs a register */
    if (thread == 0) {
        shared->item_idx++;
        shared->current_item.token = next.token;
        shared->current_item.first_head = next.first_head;
        shared->current_item.num_heads = next.num_heads;
        if constexpr (Shape::RANGED && !Shape::TILED) {
            /* nothing is written for a token without a request; all tokens of tiles have one */
            if (is_left_alone<true>(launch.base, next)) {
                shared->current_item.num_heads = 0;
            }
        }
        shared->current_item.first_row = next.first_row;
        if constexpr (Shape::TILED) { /* partial rows lie by token (find_row_item) */
            if (next.first_row != NOT_PARTIAL) {
                shared->current_item.first_row -=
                    next.split * (launch.base.tile_tokens - 1) * (int32_t)launch.base.token_heads;
            }
        }
        if (launch.base.num_segments > 1) {
            shared->current_item.first_row =
                find_first_row(launch.base, nth_item(true, 0, &shared->order, shared->item_idx),
                               next.first_head);
        }
    }
    if (thread % SMLA_WARP_LANES == 0) {
        shared->needs_fallback[thread / SMLA_WARP_LANES] = 0;
    }
    __syncwarp();
}

/* One thread tells the consumers how many steps an item has. They took the previous item's number
 * before they freed its query. */
template <typename Shape>
static __device__ __forceinline__ void
publish_steps(const list_steps &steps, uint32_t turn, fp8_memory<Shape> *shared)
{
    shared->num_steps[turn] = steps.main + steps.extra;
    ptx_mbarrier_arrive(ptx_shared_address(&shared->counted), true);
}

/* ---- Consumers: state ---------------------------------------------------------------------- */

/* A consumer thread's indices, which decide on its parts of tiles and fragments. */
typedef struct thread_index {
    int group;  /* warpgroup */
    int warp;   /* number in its group */
    int lane;   /* number in its warp */
    int row;    /* lane / 4: fragment row */
    int column; /* lane % 4: fragment column */
} thread_index;

static __device__ __forceinline__ thread_index
index_of_thread(uint32_t thread)
{
    const uint32_t lane = thread % SMLA_WARP_LANES;
    return thread_index{(int)(thread / GROUP_THREADS), (int)(thread / SMLA_WARP_LANES % 4),
                        (int)lane, (int)(lane / 4), (int)(lane % 4)};
}

static __device__ __forceinline__ thread_index
find_thread_index(void)
{
    return index_of_thread(threadIdx.x);
}

/* find_thread_index, recomputed at each call: keeping its result live costs the loop registers. */
static __device__ __forceinline__ thread_index
find_thread_index_again(void)
{
    return index_of_thread((uint32_t)ptx_forget((int)threadIdx.x));
}

/* Addresses in shared memory; each call of find_addresses recomputes them. */
typedef struct fp8_addresses {
    uint32_t ring;
    uint32_t empty; /* barrier of the first granule */
    uint32_t probs_ready;
    uint32_t values_added;
    uint32_t probs; /* weights of the own group */
} fp8_addresses;

template <typename Shape>
static __device__ __forceinline__ fp8_addresses
find_addresses(fp8_memory<Shape> *shared, int group)
{
    fp8_addresses at;
    at.ring = (uint32_t)ptx_forget((int)ptx_shared_address(shared->ring));
    at.empty = at.ring + (uint32_t)offsetof(typename Shape::Granule, empty);
    at.probs_ready = ptx_shared_address(shared->probs_ready);
    at.values_added = ptx_shared_address(shared->values_added);
    at.probs = ptx_shared_address(shared->probs[group]);
    return at;
}

/* Whether rows `row` and row + 8 of the warp's granule have keys: 0 if not. If so, one bit is set
 * (find_key_masks) or all bits are (wait_for_granule). */
typedef struct key_masks {
    uint32_t first;
    uint32_t second;
} key_masks;

/* What a consumer thread keeps in registers during a work item. */
template <typename Shape> struct consumer {
    float out[4][Shape::HEADS / 2];
    float scores[Shape::HEADS / 2];
    float parts[Shape::SCORE_PARTS][Shape::HEADS / 2]; /* SCALES_SCORES: sums to be scaled */
    uint32_t row_scales[2][Shape::SCORE_PARTS];        /* their scales, of rows `row` and row + 8 */
    float even_sum; /* an even chunk's sum, until the odd chunk's sum is there */
    float even_max;
    bool has_grown[Shape::CHUNKS < 2 ? 1 : Shape::CHUNKS / 2]; /* the pair has too large weights */
    uint32_t raw[2][8];                                        /* bytes of a granule's values */
    uint32_t scale[2][2];
    uint32_t a[2][16]; /* the granule's values as operand A of wgmma */
    uint32_t key_bits; /* is_key of the warp's granule in the group's block */
    int own;           /* offset of the group's block in the ring, in bytes */
    uint32_t phase;    /* parities, as *_PARITY; above them, the steps left */
};

/* Bits of consumer.phase: the parities of `full` barriers; of `probs_ready` and `values_added`; of
 * barriers that are used once per item; of `rescaled` and `probs_ready_again`. */
enum { RING_PARITY = 1, BLOCK_PARITY = 2, QUERY_PARITY = 4, GROWTH_PARITY = 8, ONE_STEP = 16 };

template <typename Shape>
static __device__ __forceinline__ void
finish_step(consumer<Shape> *state)
{
    state->phase -= ONE_STEP;
}

/* Whether at least `count` steps of the work item are left. */
template <typename Shape>
static __device__ __forceinline__ bool
has_steps_left(const consumer<Shape> &state, uint32_t count = 1)
{
    return state.phase >= count * ONE_STEP;
}

/* has_steps_left for branches around products. The vote tells ptxas that all lanes agree, so it
 * checks nowhere in the loop whether lanes have diverged. */
template <typename Shape>
static __device__ __forceinline__ bool
are_steps_left(const consumer<Shape> &state)
{
    return __any_sync(0xFFFFFFFFu, has_steps_left(state));
}

/* The offset in the ring of the other group's older block. Group 0's first step has no such block:
 * its own block stands in for it, with weights of 0 (clear_weights). */
template <typename Shape>
static __device__ __forceinline__ int
find_other(const consumer<Shape> &state, bool has_other)
{
    const int other = state.own - (has_other ? BLOCK_GRANULES * Shape::GRANULE_BYTES : 0);
    return other < 0 ? other + Shape::GRANULES * Shape::GRANULE_BYTES : other;
}

/* The offset in the ring of granule i of the block that begins at `first`, in bytes. */
template <typename Shape>
static __device__ __forceinline__ int
find_granule(int first, int i)
{
    const bool wraps = Shape::GRANULES % BLOCK_GRANULES != 0 &&
                       first >= (Shape::GRANULES - i) * Shape::GRANULE_BYTES;
    return first + i * Shape::GRANULE_BYTES - (wraps ? Shape::GRANULES * Shape::GRANULE_BYTES : 0);
}

/* Marks the current item for the fallback if `needs_fallback`. */
template <typename Shape>
static __device__ __forceinline__ void
mark_for_fallback(fp8_memory<Shape> *shared, bool needs_fallback)
{
    const uint32_t warp = (uint32_t)ptx_forget((int)threadIdx.x) / SMLA_WARP_LANES;
    ptx_store_shared_1_if(ptx_shared_address(&shared->needs_fallback[warp]), 1, needs_fallback);
}

template <typename Shape>
static __device__ __forceinline__ uint32_t
load_key_bits(uint32_t granule)
{
    return ptx_load_shared_4(granule + (uint32_t)offsetof(typename Shape::Granule, is_key));
}

static __device__ __forceinline__ key_masks
find_key_masks(const thread_index &me, uint32_t key_bits)
{
    const int bit = 8 * (me.row >> 2) + (me.row & 3);
    return key_masks{key_bits & 1u << bit, key_bits & 0x10000u << bit};
}

/* Waits for the rows of the warp's granule in the own block. Returns the granule's address. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
wait_for_rows(const fp8_addresses &at, const thread_index &me, const consumer<Shape> &state)
{
    const int granule = find_granule<Shape>(state.own, me.warp);
    ptx_mbarrier_wait(at.ring + granule + (uint32_t)offsetof(typename Shape::Granule, full),
                      (state.phase & RING_PARITY) ^ (granule < state.own));
    return at.ring + granule;
}

static __device__ __forceinline__ float
power_of_two(int exponent)
{
    return smla_bits_float((uint32_t)(exponent + 127) << 23);
}

/* 2^exponent twice, as two bf16. */
static __device__ __forceinline__ uint32_t
two_powers_of_two(int exponent)
{
    return (uint32_t)(127 + exponent) * 0x00800080u;
}

/* ---- Over rows of fragments ---------------------------------------------------------------- */

/* The head whose value reduce_half leaves in a lane; lanes l and l ^ 4 have the same head. */
static __device__ __forceinline__ int
head_of_sum(const thread_index &me)
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

/* Merges four heads' values over four of a warp's eight fragment rows. Each lane gets the result of
 * one head (head_of_sum), and lane ^ 4 gets the same head's result over the other four rows. */
template <bool IS_MAX>
static __device__ __forceinline__ float
reduce_half(const float values[4], int lane)
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
    return merge_pair<IS_MAX>(odd ? half_1 : half_0, __shfl_xor_sync(0xFFFFFFFFu, give, 8));
}

/* reduce_half over all eight rows: calls leave(head, value) for every head. It handles several
 * chunks at once, so that their shuffles need not wait for each other. */
template <bool IS_MAX, int CHUNKS, typename Leave>
static __device__ __forceinline__ void
leave_rows(float (&values)[CHUNKS][4], const thread_index &me, Leave leave)
{
    const bool upper = me.lane & 16;
    const bool odd = me.lane & 8;
    float others[CHUNKS][2];
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
        const float give = upper ? values[i / 2][i % 2] : values[i / 2][2 + i % 2];
        others[i / 2][i % 2] = __shfl_xor_sync(0xFFFFFFFFu, give, 16);
    }
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
        const float keep = upper ? values[i / 2][2 + i % 2] : values[i / 2][i % 2];
        values[i / 2][i % 2] = merge_pair<IS_MAX>(keep, others[i / 2][i % 2]);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const float give = odd ? values[chunk][0] : values[chunk][1];
        others[chunk][0] = __shfl_xor_sync(0xFFFFFFFFu, give, 8);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const float keep = odd ? values[chunk][1] : values[chunk][0];
        values[chunk][0] = merge_pair<IS_MAX>(keep, others[chunk][0]);
        others[chunk][0] = __shfl_xor_sync(0xFFFFFFFFu, values[chunk][0], 4);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        values[chunk][0] = merge_pair<IS_MAX>(values[chunk][0], others[chunk][0]);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (!(me.lane & 4)) {
            leave(16 * chunk + head_of_sum(me), values[chunk][0]);
        }
    }
}

/* The larger of two scores, of rows `row` and row + 8. A row without a key does not count. */
static __device__ __forceinline__ float
max_of_keys(key_masks is_key, float a, float b)
{
    return fmaxf(is_key.first ? a : -INFINITY, is_key.second ? b : -INFINITY);
}

/* Calls leave_rows with the maxima of a warp's scores times `scale`, over rows with a key. */
template <int SCORES, typename Leave>
static __device__ __forceinline__ void
leave_row_maxima(const float (&scores)[SCORES], float scale, key_masks is_key,
                 const thread_index &me, Leave leave)
{
    float row_maxima[SCORES / 8][4];
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        const int from = 8 * (i / 4) + 4 * (i / 2 % 2) + i % 2;
        row_maxima[i / 4][i % 4] =
            max_of_keys(is_key, scores[from] * scale, scores[from + 2] * scale);
    }
    leave_rows<true>(row_maxima, me, leave);
}

/* The bits to flip in the number of a 16-byte piece of a key's weights for HEADS heads. The swizzle
 * that spans these weights asks for it. */
template <int HEADS>
static constexpr __device__ __forceinline__ int
flip_of_key(int key)
{
    return HEADS == 64 ? key & 7 : HEADS == 32 ? key >> 1 & 3 : key >> 2 & 1;
}

/* ---- The query ------------------------------------------------------------------------------ */

/* Stores four of the eight words (two dimensions each) of 16 neighbouring dimensions. Word i of the
 * eight becomes word `column` of chunk i of a tile's row: score_block has bytes in this order.
 * Column c of tile 2t + h has dimensions 128t + 32c + 16h + 0...15. Column c of RoPE's tile, and of
 * a tile without a twin before it, has dimensions 16c + 0...15. */
template <typename Memory>
static __device__ __forceinline__ void
store_query_words(Memory *shared, int tile, int head, int first, int column,
                  const uint32_t words[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        *(uint32_t *)&shared->query[tile][head][((first + i) ^ (head & 7)) * 16 + 4 * column] =
            words[i];
    }
}

/* The largest absolute value of a head, as bf16 bits, in all lanes that hold parts of the head. */
template <int TILES>
static __device__ __forceinline__ uint32_t
find_head_max(const uint32_t (&words)[TILES][4])
{
    uint32_t partial_maxima[4] = {words[0][0], words[0][1], words[0][2], words[0][3]};
#pragma unroll
    for (int i = 4; i < TILES * 4; i++) {
        partial_maxima[i % 4] = ptx_max_abs_bf16x2(partial_maxima[i % 4], words[i / 4][i % 4]);
    }
    const uint32_t pair =
        ptx_max_abs_bf16x2(ptx_max_abs_bf16x2(partial_maxima[0], partial_maxima[1]),
                           ptx_max_abs_bf16x2(partial_maxima[2], partial_maxima[3]));
    uint32_t value = max(pair & 0x7FFFu, pair >> 16 & 0x7FFFu);
#pragma unroll
    for (int step = 1; step < QUERY_LANES; step *= 2) {
        value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
    }
    return value;
}

/* The exponent of a query whose largest value has these bf16 bits. needs_fallback: none fits. */
static __device__ __forceinline__ int
find_query_exponent(uint32_t query_max, bool *needs_fallback)
{
    const int exponent = query_max == 0 ? 0 : (int)(query_max >> 7) - 127 - QUERY_EXPONENT;
    const int clamped = min(max(exponent, -(int)MAX_QUERY_EXPONENT), (int)MAX_QUERY_EXPONENT);
    *needs_fallback = exponent != clamped;
    return clamped;
}

/* ---- Consumers: the end of an item --------------------------------------------------------- */

/* Ends a head: if `writes`, writes lse and max_logits, or the state of the partial row. sum and out
 * are multiples of 2^reference. row_max is a score that is not below the largest one rounded down.
 * Returns the factor of out, which is 0 where there are no keys. */
static __device__ __forceinline__ float
leave_head(const attention_launch &launch, const work_item &item, int head, float reference,
           float row_max, float sum, bool writes)
{
    row_max = sum == 0.0f ? -INFINITY : row_max;
    /* makes sum and out multiples of 2^ceil(row_max), the reference that softmax.cuh expects */
    const float shift = sum == 0.0f ? 1.0f : power_of_two((int)(reference - ceilf(row_max)));
    float factor = shift;
    sum *= shift;
    if (item.first_row == NOT_PARTIAL) {
        const float sink = softmax_sink(launch.params.logits.sinks, item.first_head + head);
        factor *= softmax_finish(launch.params.results, launch.params.logits.sinks, item.token,
                                 item.first_head + head, row_max, sum, sink, writes);
    } else if (writes) {
        *(float2 *)(launch.partials.state + 2 * ((int64_t)item.first_row + head)) =
            make_float2(row_max, sum);
    }
    return sum == 0.0f ? 0.0f : factor;
}

/* Where a head's partial row of halves (kernels.h) begins. */
static __device__ __forceinline__ uint16_t *
find_halves(const attention_launch &launch, const work_item &item, int head)
{
    return (uint16_t *)(launch.partials.out + ((int64_t)item.first_row + head) * SMLA_KV_LORA_RANK);
}

/* leave_head for a partial row of halves. The halves are means of the keys' values in units of
 * `unit`, so none is above the largest value. */
static __device__ __forceinline__ void
leave_halves(const attention_launch &launch, const work_item &item, int head, float reference,
             float row_max, float sum, float unit)
{
    const int64_t row = item.first_row + head;
    if (sum == 0.0f) {
        *(float2 *)(launch.partials.state + 2 * row) = make_float2(-INFINITY, 0.0f);
        return;
    }
    const float whole = sum * power_of_two((int)(reference - ceilf(row_max)));
    *(float2 *)(launch.partials.state + 2 * row) = make_float2(row_max, -whole);
    launch.partials.out[row * SMLA_KV_LORA_RANK + SMLA_HALF_UNIT] = whole * unit;
}

/* Sets the fallback bit of the CTA's item of this number. */
static __device__ __forceinline__ void
mark_item(int number, int thread, uint32_t fallback_bits[MAX_ITEMS / 32])
{
    if (thread == 0) {
        fallback_bits[number / 32] |= 1u << number % 32;
    }
}

/* Computes the marked items again with the portable code, in the shared memory in front of
 * fallback_bits, which is free. An item is `num_parts` head tiles of the portable code. Launch:
 * fp8_launch or bf16_launch. */
template <typename Portable, typename Launch>
static __device__ __forceinline__ void
run_fallback(const Launch &all, int num_parts, const uint32_t *fallback_bits,
             const item_order *order, shared_memory<Portable> *shared)
{
    const attention_launch &launch = all.base;
    const int num_tiles =
        ((int)launch.params.queries.num_heads + Portable::HEADS - 1) / Portable::HEADS;
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
#pragma unroll 1
    for (int number = 0;; number++) {
        const int found = nth_item(all.is_ordered, all.num_items, order, number);
        if (found < 0) {
            break;
        }
        const bool is_part = launch.num_segments > 1;
        const int idx = is_part ? item_of_part(found) : found;
        if (idx >= all.num_items || !(fallback_bits[number / 32] >> number % 32 & 1)) {
            continue;
        }
        const int part = (int)smla_divide_uint32((uint32_t)idx, launch.head_tiles);
        const int first = (idx - part * (int)launch.head_tiles.divisor) * num_parts;
#pragma unroll 1
        for (int i = first; i < min(first + num_parts, num_tiles); i++) {
            attend_cta<Portable>(launch, (uint32_t)num_tiles, part * num_tiles + i,
                                 is_part ? found : WHOLE_ITEM, shared);
            ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
        }
    }
}
