/* attend.cuh: what a CTA of attention_sm80.cu does for a work item, as code that other kernels can
 * run. attention_sm80.cu describes it, and its kernel contains nothing else. Hopper's kernels for
 * FP8 rows run it with eight warps as their fallback.
 */
#pragma once

#include "cuda/attention/keys/one_key.cuh"
#include "cuda/attention/partials/softmax.cuh"
#include "cuda/attention/sm80/mqa/shared_values.cuh"
#include "cuda/attention/tiles/work_items.cuh"
#include "cuda/ptx/numeric.cuh"

enum {
    CTA_THREADS = CTA_WARPS * SMLA_WARP_LANES,
    GROUPS = SMLA_SM80_GROUPS,
    ROW_BYTES = SMLA_HEAD_DIM * 2,
    SEGMENT_BYTES = 128,                         /* eight chunks, which the swizzle permutes */
    WARP_VALUES = SMLA_KV_LORA_RANK / CTA_WARPS, /* values of out per warp */
    PROB_ROW_BYTES = KEYS * 2,
};

static_assert((int)GROUPS == (int)SMLA_NUM_SCALE_TILES,
              "a group of dimensions has one scale per key");
static_assert(SMLA_SCALE_TILE % WARP_VALUES == 0, "a warp's values have one scale per key");

/* Everything that depends on the number of heads per CTA and on the formats. RANGED: lists may have
 * dense columns and a `begin`. IS_CALLED: attend_cta is part of a called function. It then calls no
 * other function, because a second call would need local memory. HAS_WHOLE: tokens in front may be
 * whole where others are split. TILED: the launch stands in for one whose items are tiles, token by
 * token. */
template <int HEADS_, int FORMATS_, bool RANGED_ = false, bool IS_CALLED_ = false,
          bool HAS_WHOLE_ = false, bool TILED_ = false>
struct tile {
    static constexpr bool TILED = TILED_;
    static constexpr bool RANGED = RANGED_;
    static constexpr bool HAS_WHOLE = HAS_WHOLE_;
    static constexpr bool IS_CALLED = IS_CALLED_;
    static constexpr int HEADS = HEADS_;
    static constexpr int FORMATS = FORMATS_;
    static constexpr bool CODED = key_types<FORMATS_>::CODED;
    static constexpr bool HAS_ROPE = smla_rows<FORMATS_>::HAVE_ROPE;
    static constexpr bool HAS_SCALES = smla_rows<FORMATS_>::HAVE_SCALES;
    static constexpr int ROW_CHUNKS = NOPE_CHUNKS + (HAS_ROPE ? ROPE_CHUNKS : 0);
    static constexpr int VERSIONS = SMLA_SM80_VERSIONS(FORMATS_); /* weights per key and head */
    /* for score_block: a warp's part of the HEADS x KEYS scores, and its counts of 16 x 8 pieces */
    static constexpr int WARP_HEADS = HEADS < 32 ? HEADS : 32;
    static constexpr int WARPS_ALONG_HEADS = HEADS / WARP_HEADS;
    static constexpr int WARP_COLUMNS = KEYS * WARPS_ALONG_HEADS / 2;
    static constexpr int SCORE_M = WARP_HEADS / 16;
    static constexpr int SCORE_N = WARP_COLUMNS / 8;
    /* for weigh_block: lanes per head, keys per lane */
    static constexpr int LANES = CTA_THREADS / HEADS;
    static constexpr int LANE_KEYS = KEYS / LANES;
    /* for add_block: counts of 16 x 8 pieces in a warp's part of out */
    static constexpr int OUT_M = HEADS / 16;
    static constexpr int OUT_N = WARP_VALUES / 8;
};

template <typename Tile> struct shared_memory {
    alignas(128) uint16_t query[Tile::HEADS][SMLA_HEAD_DIM];
    alignas(128) uint16_t keys[KEYS][SMLA_HEAD_DIM];
    alignas(128) uint16_t probs[Tile::VERSIONS][Tile::HEADS][KEYS];
    alignas(128) float scores[GROUPS][Tile::HEADS][KEYS];
    alignas(128) float scales[SMLA_NUM_SCALE_TILES][KEYS];
    alignas(128) int32_t is_key[KEYS];
    alignas(128) float factor[Tile::HEADS];
    alignas(128) softmax_row rows[Tile::HEADS];
};

/* ---- Query --------------------------------------------------------------------------------- */

/* Starts to copy the tile's query. The copy is complete after ptx_cp_async_wait_all and a
 * barrier. */
template <typename Tile>
static __device__ __forceinline__ void
start_query(const attention_launch &launch, const work_item &item, int thread,
            shared_memory<Tile> *shared)
{
    const smla_queries &queries = launch.params.queries;
    const uint16_t *const nope = smla_row16(&queries.parts[SMLA_NOPE], item.token, item.first_head);
    const uint16_t *const rope = smla_row16(&queries.parts[SMLA_PE], item.token, item.first_head);
#pragma unroll 2
    for (int i = thread; i < Tile::HEADS * Tile::ROW_CHUNKS; i += CTA_THREADS) {
        const int head = i / Tile::ROW_CHUNKS;
        const int chunk = i % Tile::ROW_CHUNKS;
        const uint16_t *const from =
            chunk < NOPE_CHUNKS
                ? nope + head * queries.parts[SMLA_NOPE].stride_head + chunk * 8
                : rope + head * queries.parts[SMLA_PE].stride_head + (chunk - NOPE_CHUNKS) * 8;
        uint4 *const to = chunk_of(shared->query, head, chunk);
        if (head >= item.num_heads) {
            *to = make_uint4(0, 0, 0, 0);
        } else if (Tile::CODED && queries.type == SMLA_FLOAT_E4M3) {
            const bool is_rope = Tile::HAS_ROPE && chunk >= NOPE_CHUNKS;
            *to = load_e4m3_query(smla_row8(&queries.parts[is_rope ? SMLA_PE : SMLA_NOPE],
                                            item.token, item.first_head + head) +
                                  (is_rope ? chunk - NOPE_CHUNKS : chunk) * 8);
        } else if (launch.q_is_aligned) {
            ptx_cp_async_16(ptx_shared_address(to), from);
        } else {
            uint32_t words[4];
            smla_load_words<16, false>(from, words);
            *to = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

/* ---- Score --------------------------------------------------------------------------------- */

/* Lanes of eight heads write partial scores, two keys at a time, and lanes of one head read them.
 * XOR with this number puts both the writes and the reads on all banks. */
static __device__ __forceinline__ int
score_flip(int row)
{
    return (row & 3) << 3 ^ (row & 1) << 2;
}

/* Multiplies 16 dimensions: chunk flip_bytes / 16 of segment `segment`, and the next chunk. Both
 * addresses are those of chunk 0 or 1 of the lane's rows in segment 0. */
template <typename Tile>
static __device__ __forceinline__ void
score_step(uint32_t query_address, uint32_t key_address, int segment, int flip_bytes,
           float acc[Tile::SCORE_M][Tile::SCORE_N][4])
{
    uint32_t a[Tile::SCORE_M][4];
    uint32_t b[Tile::SCORE_N / 2][4];
#pragma unroll
    for (int m = 0; m < Tile::SCORE_M; m++) {
        ptx_ldmatrix_x4((query_address ^ flip_bytes) + segment * SEGMENT_BYTES + m * 16 * ROW_BYTES,
                        a[m]);
    }
#pragma unroll
    for (int n = 0; n < Tile::SCORE_N / 2; n++) {
        ptx_ldmatrix_x4((key_address ^ flip_bytes) + segment * SEGMENT_BYTES + n * 16 * ROW_BYTES,
                        b[n]);
    }
#pragma unroll
    for (int n = 0; n < Tile::SCORE_N; n++) {
#pragma unroll
        for (int m = 0; m < Tile::SCORE_M; m++) {
            ptx_mma_bf16(acc[m][n], a[m], b[n / 2] + n % 2 * 2);
        }
    }
}

/* Whether the RoPE values of a list's keys have the scale that their other values have. */
template <typename Tile>
static __device__ __forceinline__ bool
shares_scale(const attention_launch &launch, int list)
{
    if constexpr (Tile::FORMATS == SMLA_ROWS_ANY_576) {
        return has_rope_codes(launch.lists[list]);
    }
    return Tile::FORMATS == SMLA_ROWS_E4M3_576;
}

/* scores[group] = the group's share of q . k, for the warp's heads and keys. `scales_rope` is
 * shares_scale of the keys. */
template <typename Tile>
static __device__ __forceinline__ void
score_block(shared_memory<Tile> *shared, bool scales_rope, int thread)
{
    const int warp = thread / SMLA_WARP_LANES;
    const int lane = thread % SMLA_WARP_LANES;
    const int group = warp % GROUPS;
    const int half = warp / GROUPS;
    const int first_head = Tile::WARPS_ALONG_HEADS == 2 ? half * Tile::WARP_HEADS : 0;
    const int first_key = Tile::WARPS_ALONG_HEADS == 2 ? 0 : half * Tile::WARP_COLUMNS;
    /* ldmatrix reads of A rows 0-7 and 8-15 of chunk 0, then both of chunk 1. Of B it reads chunks
     * 0 and 1 of rows 0-7, then both of rows 8-15. */
    const int head = first_head + lane % 16;
    const int key = first_key + lane % 8 + lane / 16 * 8;
    const uint32_t query_address = ptx_shared_address(chunk_of(shared->query, head, lane / 16));
    const uint32_t key_address = ptx_shared_address(chunk_of(shared->keys, key, lane / 8 % 2));
    float acc[Tile::SCORE_M][Tile::SCORE_N][4] = {};
#pragma unroll
    for (int k = 0; k < SMLA_SCALE_TILE / 16; k++) {
        score_step<Tile>(query_address, key_address, 2 * group + k / 4, k % 4 * 32, acc);
    }
    if (scales_rope) {
        score_step<Tile>(query_address, key_address, NOPE_CHUNKS / 8, group * 32, acc);
    }
    const int row = lane / 4;
    const int column = first_key + lane % 4 * 2;
    if (Tile::HAS_SCALES) {
#pragma unroll
        for (int n = 0; n < Tile::SCORE_N; n++) {
            const float2 scale = *(const float2 *)&shared->scales[group][column + 8 * n];
#pragma unroll
            for (int m = 0; m < Tile::SCORE_M; m++) {
                acc[m][n][0] *= scale.x;
                acc[m][n][1] *= scale.y;
                acc[m][n][2] *= scale.x;
                acc[m][n][3] *= scale.y;
            }
        }
    }
    if (Tile::HAS_ROPE && !scales_rope) {
        score_step<Tile>(query_address, key_address, NOPE_CHUNKS / 8, group * 32, acc);
    }
#pragma unroll
    for (int m = 0; m < Tile::SCORE_M; m++) {
        float (*const scores)[KEYS] = &shared->scores[group][first_head + 16 * m + row];
        const int flip = score_flip(row); /* the same number for row + 8 */
#pragma unroll
        for (int n = 0; n < Tile::SCORE_N; n++) {
            const int at = (column + 8 * n) ^ flip;
            *(float2 *)&scores[0][at] = make_float2(acc[m][n][0], acc[m][n][1]);
            *(float2 *)&scores[8][at] = make_float2(acc[m][n][2], acc[m][n][3]);
        }
    }
}

/* ---- Weigh --------------------------------------------------------------------------------- */

/* Adds up the partial scores of a lane's keys, in pairs. */
template <typename Tile>
static __device__ __forceinline__ void
read_scores(const shared_memory<Tile> *shared, int head, int first_key,
            float scores[Tile::LANE_KEYS])
{
    constexpr int COUNT = Tile::LANE_KEYS;
    const int flip = score_flip(head);
#pragma unroll
    for (int group = 0; group < GROUPS; group += 2) {
        float parts[2][COUNT];
        read_values<COUNT>(shared->scores[group][head], first_key, flip, parts[0]);
        read_values<COUNT>(shared->scores[group + 1][head], first_key, flip, parts[1]);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float pair = parts[0][i] + parts[1][i];
            scores[i] = group == 0 ? pair : scores[i] + pair;
        }
    }
}

/* probs[version] = bf16(weight * scale), for the lane's keys of a head. */
template <typename Tile>
static __device__ __forceinline__ void
store_weights(shared_memory<Tile> *shared, int head, int first_key,
              const float weights[Tile::LANE_KEYS])
{
    const int at = first_key ^ (head / 2 % 4) * 8;
#pragma unroll
    for (int version = 0; version < Tile::VERSIONS; version++) {
        float scaled[Tile::LANE_KEYS];
        uint32_t words[Tile::LANE_KEYS / 2];
        if constexpr (Tile::HAS_SCALES) {
            read_values<Tile::LANE_KEYS>(shared->scales[version], first_key, 0, scaled);
        }
#pragma unroll
        for (int i = 0; i < Tile::LANE_KEYS; i++) {
            scaled[i] = Tile::HAS_SCALES ? weights[i] * scaled[i] : weights[i];
        }
#pragma unroll
        for (int i = 0; i < Tile::LANE_KEYS / 2; i++) {
            words[i] = smla_cvt_bf16x2(scaled[2 * i], scaled[2 * i + 1]);
        }
        store_shared<Tile::LANE_KEYS / 2>(&shared->probs[version][head][at], words);
    }
}

/* The thread that finishes a row also starts it, so the two need no barrier between them. */
template <typename Tile>
static __device__ __forceinline__ void
start_rows(int thread, shared_memory<Tile> *shared)
{
    if (thread % Tile::LANES == 0) {
        shared->rows[thread / Tile::LANES] = softmax_row{-INFINITY, 0.0f, 0.0f, 0.0f};
    }
}

template <typename Tile>
static __device__ __forceinline__ bool
is_only_block(const block_plan &plan)
{
    return Tile::RANGED && plan.num_blocks == 1;
}

/* Turns the scores of the lane's keys into weights. Updates the softmax row of the lane's head, and
 * stores the factor by which the head's older sums are multiplied. In an item's only block the
 * largest weight is 1, which no rounding to bf16 changes: of two or three keys, errors of that
 * rounding would not average out. */
template <typename Tile>
static __device__ __forceinline__ void
weigh_block(shared_memory<Tile> *shared, logit_rule rule, bool is_only, int thread)
{
    constexpr int COUNT = Tile::LANE_KEYS;
    const int head = thread / Tile::LANES;
    const int first_key = thread % Tile::LANES * COUNT;
    softmax_row row = shared->rows[head];
    float weights[COUNT];
    float max_log2 = row.max_log2;
    read_scores<Tile>(shared, head, first_key, weights);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float logit = find_logit<Tile::RANGED>(weights[i], rule);
        weights[i] = shared->is_key[first_key + i] ? logit : -INFINITY;
        max_log2 = fmaxf(max_log2, weights[i]);
    }
    max_log2 = smla_max_of_lanes<Tile::LANES>(max_log2);
    const float reference =
        is_only && max_log2 != -INFINITY ? max_log2 : softmax_reference(max_log2);
    const float shrink = softmax_rescale(row.max_log2, reference);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        weights[i] = ptx_exp2(weights[i] - reference);
    }
    const float sum = smla_sum_of_lanes<Tile::LANES>(sum_values<COUNT>(weights));
    store_weights<Tile>(shared, head, first_key, weights);
    add_to_sum(&row, shrink, sum);
    row.max_log2 = max_log2;
    __syncwarp(); /* every lane of the head has read the row */
    if (thread % Tile::LANES == 0) {
        shared->rows[head] = row;
        shared->factor[head] = shrink;
    }
}

/* ---- Add ----------------------------------------------------------------------------------- */

/* out *= factor of its head. Usually all factors are 1: the integer reference seldom moves. */
template <typename Tile>
static __device__ __forceinline__ void
shrink_out(const shared_memory<Tile> *shared, int lane, float out[Tile::OUT_M][Tile::OUT_N][4])
{
    float factor[Tile::OUT_M][2];
    bool is_one = true;
#pragma unroll
    for (int m = 0; m < Tile::OUT_M; m++) {
        factor[m][0] = shared->factor[16 * m + lane / 4];
        factor[m][1] = shared->factor[16 * m + lane / 4 + 8];
        is_one = is_one && factor[m][0] == 1.0f && factor[m][1] == 1.0f;
    }
    if (__all_sync(0xFFFFFFFFu, is_one)) {
        return;
    }
#pragma unroll
    for (int m = 0; m < Tile::OUT_M; m++) {
#pragma unroll
        for (int n = 0; n < Tile::OUT_N; n++) {
            out[m][n][0] *= factor[m][0];
            out[m][n][1] *= factor[m][0];
            out[m][n][2] *= factor[m][1];
            out[m][n][3] *= factor[m][1];
        }
    }
}

/* out += weights * values, for all heads and the warp's values. */
template <typename Tile>
static __device__ __forceinline__ void
add_block(shared_memory<Tile> *shared, int thread, float out[Tile::OUT_M][Tile::OUT_N][4])
{
    const int warp = thread / SMLA_WARP_LANES;
    const int lane = thread % SMLA_WARP_LANES;
    shrink_out<Tile>(shared, lane, out);
    const int version =
        Tile::VERSIONS == 1 ? 0 : warp * WARP_VALUES / SMLA_SCALE_TILE; /* the values' scale tile */
    const int row = lane % 16;
    const uint32_t prob_address =
        ptx_shared_address(&shared->probs[version][row][(lane / 16 ^ row / 2 % 4) * 8]);
    const uint32_t value_address =
        ptx_shared_address(chunk_of(shared->keys, row, warp * (WARP_VALUES / 8) + lane / 16));
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        uint32_t a[Tile::OUT_M][4];
#pragma unroll
        for (int m = 0; m < Tile::OUT_M; m++) {
            ptx_ldmatrix_x4((prob_address ^ k * 32) + m * 16 * PROB_ROW_BYTES, a[m]);
        }
#pragma unroll
        for (int n = 0; n < Tile::OUT_N; n += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4_trans((value_address ^ n * 16) + k * 16 * ROW_BYTES, b);
#pragma unroll
            for (int m = 0; m < Tile::OUT_M; m++) {
                ptx_mma_bf16(out[m][n], a[m], b);
                ptx_mma_bf16(out[m][n + 1], a[m], b + 2);
            }
        }
    }
}

/* ---- Results ------------------------------------------------------------------------------- */

/* Writes results: out * factor, rounded once. The item has all keys of its token. */
template <typename Tile>
static __device__ __forceinline__ void
write_out(const attention_launch &launch, const work_item &item, int head, int first_value,
          float factor, const float out[Tile::OUT_N][4], int piece)
{
    uint16_t *const to =
        smla_out16(&launch.params.results, item.token, item.first_head + head) + first_value;
#pragma unroll
    for (int n = 0; n < Tile::OUT_N; n++) {
        const uint32_t pair =
            smla_cvt_bf16x2(out[n][2 * piece] * factor, out[n][2 * piece + 1] * factor);
        if (launch.out_is_paired) {
            smla_store_words<4, true>(to + 8 * n, &pair);
        } else {
            smla_store_words<4, false>(to + 8 * n, &pair);
        }
    }
}

/* Writes a part of a partial row; the combine kernel or fold_item folds it. Where lists have no
 * ranges, the factor is 1. */
template <typename Tile>
static __device__ __forceinline__ void
write_partial(float *to, float factor, const float out[Tile::OUT_N][4], int piece)
{
#pragma unroll
    for (int n = 0; n < Tile::OUT_N; n++) {
        float2 pair = make_float2(out[n][2 * piece], out[n][2 * piece + 1]);
        if constexpr (Tile::RANGED) {
            pair = make_float2(pair.x * factor, pair.y * factor);
        }
        *(float2 *)(to + 8 * n) = pair;
    }
}

/* Finishes rows. shared->factor becomes the factor of the row's out, or 0 for partial rows without
 * an out. */
template <typename Tile>
static __device__ __forceinline__ void
finish_rows(const attention_launch &launch, const work_item &item, bool is_only, int thread,
            shared_memory<Tile> *shared)
{
    const int head = thread / Tile::LANES;
    if (thread % Tile::LANES != 0 || head >= item.num_heads) {
        return;
    }
    const softmax_row row = shared->rows[head];
    /* From multiples of the largest weight to multiples of the reference, as all others have. */
    const float unit =
        is_only && row.sum != 0.0f ? exp2f(row.max_log2 - softmax_reference(row.max_log2)) : 1.0f;
    const float sum = row.sum * unit;
    if (item.first_row == NOT_PARTIAL) {
        const float sink = softmax_sink(launch.params.logits.sinks, item.first_head + head);
        const float key_unit = Tile::CODED ? find_key_unit(launch) : 1.0f;
        shared->factor[head] =
            unit * key_unit *
            softmax_finish(launch.params.results, launch.params.logits.sinks, item.token,
                           item.first_head + head, row.max_log2, sum, sink, true);
        return;
    }
    *(float2 *)(launch.partials.state + 2 * ((int64_t)item.first_row + head)) =
        make_float2(row.max_log2, sum);
    shared->factor[head] = sum == 0.0f ? 0.0f : unit;
}

template <typename Tile>
static __device__ __forceinline__ void
write_results(const attention_launch &launch, const work_item &item, int thread,
              const shared_memory<Tile> *shared, const float out[Tile::OUT_M][Tile::OUT_N][4])
{
    const int warp = thread / SMLA_WARP_LANES;
    const int lane = thread % SMLA_WARP_LANES;
    const int first_value = warp * WARP_VALUES + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < Tile::OUT_M; m++) {
#pragma unroll
        for (int piece = 0; piece < 2; piece++) {
            const int head = 16 * m + 8 * piece + lane / 4;
            if (head >= item.num_heads) {
                continue;
            }
            const float factor = shared->factor[head];
            if (item.first_row == NOT_PARTIAL) {
                write_out<Tile>(launch, item, head, first_value, factor, out[m], piece);
            } else if (factor != 0.0f) {
                write_partial<Tile>(launch.partials.out +
                                        ((int64_t)item.first_row + head) * SMLA_KV_LORA_RANK +
                                        first_value,
                                    factor, out[m], piece);
            }
        }
    }
}

/* ---- One key ------------------------------------------------------------------------------- */

/* Whether the item has exactly one key. All threads then get it in `only`. `slot` is the thread's
 * slot of window 0. Usually this window has more than one key, and no other window is read. The key
 * goes through shared->is_key, which nobody reads yet. */
template <typename Tile>
static __device__ __forceinline__ bool
find_only_key(const attention_launch &launch, const work_item &item, const block_plan &plan,
              int thread, int32_t slot, shared_memory<Tile> *shared, listed_key *only)
{
    listed_key mine = {slot, list_of(plan, block_of_lane(0, thread))};
    int count = ptx_barrier_count(0, CTA_THREADS, slot >= 0);
#pragma unroll 1
    for (int32_t window = 1; count <= 1 && window * WINDOW < plan.num_blocks; window++) {
        const int32_t index = read_index<Tile>(launch, item, plan, window, thread);
        slot = find_slot<Tile::RANGED>(launch, item, plan, window, thread, index);
        if (slot >= 0) {
            mine = listed_key{slot, list_of(plan, block_of_lane(window, thread))};
        }
        count += ptx_barrier_count(0, CTA_THREADS, slot >= 0);
    }
    if (count != 1) {
        return false;
    }
    if (mine.slot >= 0) {
        *(listed_key *)shared->is_key = mine;
    }
    ptx_barrier(0, CTA_THREADS); /* the key is visible */
    *only = *(const listed_key *)shared->is_key;
    return true;
}

/* attend_one_key, not inlined, because inlined code would cost the loop registers. */
template <bool ROPE, bool CODED, bool RANGED>
static __device__ __noinline__ void
attend_only_key(const attention_launch &launch, work_item item, listed_key only, int thread)
{
    attend_one_key<ROPE, CODED, RANGED>(launch, item, only, thread, CTA_THREADS);
}

/* ---- All of it ----------------------------------------------------------------------------- */

/* Computes work item number `cta`, or a part of it. There are num_tiles items per token and split.
 * Threads 0 to 255 of a CTA call it, and only they use barrier 0. */
template <typename Tile>
static __device__ __forceinline__ void
attend_cta(const attention_launch &launch, uint32_t num_tiles, int cta, int part,
           shared_memory<Tile> *shared)
{
    const work_item item =
        find_part<Tile::HAS_WHOLE, Tile::TILED>(launch, num_tiles, cta, part, Tile::HEADS);
    if (is_left_alone<Tile::RANGED>(launch, item)) {
        return;
    }
    start_rows<Tile>((int)threadIdx.x, shared);
    start_query<Tile>(launch, item, (int)threadIdx.x, shared);
    const block_plan plan = plan_blocks<Tile>(launch, item);
    int32_t key = read_index<Tile>(launch, item, plan, 0, (int)threadIdx.x); /* index, later slot */
    key = find_slot<Tile::RANGED>(launch, item, plan, 0, (int)threadIdx.x, key);
    listed_key only;
    if (find_only_key<Tile>(launch, item, plan, ptx_forget((int)threadIdx.x), key, shared, &only)) {
        if constexpr (Tile::IS_CALLED) {
            attend_one_key<Tile::HAS_ROPE, Tile::CODED>(launch, item, only, (int)threadIdx.x,
                                                        CTA_THREADS);
        } else {
            attend_only_key<Tile::HAS_ROPE, Tile::CODED, Tile::RANGED>(launch, item, only,
                                                                       (int)threadIdx.x);
        }
        ptx_cp_async_wait_all();     /* waits for the query, which is not needed */
        ptx_barrier(0, CTA_THREADS); /* no thread copies or reads any more */
        return;
    }
    typename key_types<Tile::FORMATS>::address address =
        find_key<Tile::FORMATS>(launch, plan, 0, (int)threadIdx.x, key);
    typename key_types<Tile::FORMATS>::rows raw;
    load_keys<Tile::FORMATS>(launch, plan, 0, address, (int)threadIdx.x, &raw);
    const logit_rule rule = find_logit_rule<Tile::CODED, Tile::RANGED>(launch);

    float out[Tile::OUT_M][Tile::OUT_N][4] = {};
    ptx_cp_async_wait_all(); /* this thread's part of the query; all of it after a barrier */
    for (int32_t block = 0; block < plan.num_blocks; block++) {
        const int thread = ptx_forget((int)threadIdx.x);
        store_keys<Tile::FORMATS>(launch, list_of(plan, block), raw, thread, shared->keys,
                                  shared->scales, shared->is_key);
        const bool any = ptx_barrier_or(0, CTA_THREADS, sees_key(raw.scale_or_mask, thread));
        if (block % WINDOW == WINDOW - 1) {
            address = find_key<Tile::FORMATS>(launch, plan, block / WINDOW + 1, thread, key);
        }
        load_keys<Tile::FORMATS>(launch, plan, block + 1, address, thread, &raw);
        if (block % WINDOW == 1) {
            key = read_index<Tile>(launch, item, plan, block / WINDOW + 1, thread);
        }
        if (any) {
            score_block<Tile>(shared, shares_scale<Tile>(launch, list_of(plan, block)),
                              ptx_forget(thread));
        }
        if (block % WINDOW == 3) {
            key = find_slot<Tile::RANGED>(launch, item, plan, block / WINDOW + 1, thread, key);
        }
        if (any) {
            ptx_barrier(0, CTA_THREADS); /* scores are visible */
            weigh_block<Tile>(shared, rule, is_only_block<Tile>(plan), ptx_forget(thread));
            ptx_barrier(0, CTA_THREADS); /* probs and factor are visible */
            add_block<Tile>(shared, ptx_forget(thread), out);
            ptx_barrier(0, CTA_THREADS); /* nobody reads the keys, scales and masks any more */
        }
    }
    const work_item done =
        find_part<Tile::HAS_WHOLE, Tile::TILED>(launch, num_tiles, ptx_forget(cta), part,
                                                Tile::HEADS);
    finish_rows<Tile>(launch, done, is_only_block<Tile>(plan), (int)threadIdx.x, shared);
    ptx_barrier(0, CTA_THREADS); /* factor is visible */
    write_results<Tile>(launch, done, (int)threadIdx.x, shared, out);
}
