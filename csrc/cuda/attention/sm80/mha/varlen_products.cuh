/* varlen_products.cuh: what a warp does with a block of keys: scores, weights, and out. */
#pragma once

#include "cuda/attention/partials/softmax.cuh"
#include "cuda/attention/sm80/mha/varlen_rows.cuh"

constexpr float LOG2_E = 1.44269504f;

/* A reference moves when a logit exceeds it by more than 2^MOST_EXCESS as a weight. */
constexpr float MOST_EXCESS = 8.0f;

/* Weights of fp16 are multiplied by 2^7, so that weights down to 2^-21 of a row's largest keep all
 * bits, and none exceeds 2^15. */
template <bool HALF> constexpr float WEIGHT_SHIFT = HALF ? 7.0f : 0.0f;

/* Segments whose products are added in one accumulator; tensor cores truncate every sum. */
constexpr int CHAIN_SEGMENTS = 4;

/* What makes logits of scores, in the log2 domain: score * scale, or where `is_early`, before masks
 * are applied, the capped score * early_scale. Then scale is 1. */
struct varlen_rule {
    float scale;
    float early_scale;
    bool is_early;
};

/* A thread has rows lane / 4 + 8 i of each 16 rows. Weights are 2^(logit - reference). */
template <typename Shape> struct varlen_rows {
    float reference[Shape::M][2]; /* -inf: no logit so far */
    float sum[Shape::M][2];       /* sum of the lane's weights */
    float rest[Shape::M][2];      /* what roundings of the sum lost */
};

template <typename Shape>
__device__ __forceinline__ void
start_rows(varlen_rows<Shape> *rows)
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            rows->reference[m][i] = -INFINITY;
            rows->sum[m][i] = 0.0f;
            rows->rest[m][i] = 0.0f;
        }
    }
}

template <bool HALF>
__device__ __forceinline__ void
multiply(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    if constexpr (HALF) {
        ptx_mma_f16(d, a, b);
    } else {
        ptx_mma_bf16(d, a, b);
    }
}

/* Addresses in shared memory of the lane's chunks of a warp's operands. */
struct varlen_operands {
    uint32_t queries;
    uint32_t keys;
    uint32_t values;
};

template <typename Shape>
__device__ __forceinline__ varlen_operands
find_operands(const varlen_memory<Shape> &shared, int first_row, int first_value)
{
    const int lane = lane_idx();
    const int line = lane % 8; /* in one of the four matrices of ldmatrix */
    const int upper = lane / 16;
    const int middle = lane / 8 % 2;
    return varlen_operands{
        ptx_shared_address(shared.queries) + (first_row + middle * 8 + line) * SEGMENT_BYTES +
            (upper ^ line) * 16,
        ptx_shared_address(shared.keys) + (upper * 8 + line) * SEGMENT_BYTES + (middle ^ line) * 16,
        ptx_shared_address(shared.values) + first_value / SEGMENT * Shape::KEYS * SEGMENT_BYTES +
            (middle * 8 + line) * SEGMENT_BYTES + (upper ^ line) * 16,
    };
}

/* ---- Scores -------------------------------------------------------------------------------- */

/* scores += queries * keys of one segment. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
score_segment(uint32_t queries, uint32_t keys, float scores[Shape::M][Shape::N][4])
{
#pragma unroll
    for (int step = 0; step < SEGMENT / 16; step++) {
        uint32_t a[Shape::M][4];
#pragma unroll
        for (int m = 0; m < Shape::M; m++) {
            ptx_ldmatrix_x4((queries ^ step * 32) + m * 16 * SEGMENT_BYTES, a[m]);
        }
#pragma unroll
        for (int n = 0; n < Shape::N; n += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4((keys ^ step * 32) + n * 8 * SEGMENT_BYTES, b);
#pragma unroll
            for (int m = 0; m < Shape::M; m++) {
                multiply<HALF>(scores[m][n], a[m], b);
                multiply<HALF>(scores[m][n + 1], a[m], b + 2);
            }
        }
    }
}

template <typename Shape>
__device__ __forceinline__ void
add_scores(const float part[Shape::M][Shape::N][4], float scores[Shape::M][Shape::N][4])
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int n = 0; n < Shape::N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[m][n][i] += part[m][n][i];
            }
        }
    }
}

template <typename Shape>
__device__ __forceinline__ void
clear_scores(float scores[Shape::M][Shape::N][4])
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int n = 0; n < Shape::N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[m][n][i] = 0.0f;
            }
        }
    }
}

/* scores = queries * keys of a block. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
score_block(uint32_t queries, uint32_t keys, int num_segments, float scores[Shape::M][Shape::N][4])
{
    constexpr int SEGMENTS = Shape::D / SEGMENT;
    clear_scores<Shape>(scores);
    if constexpr (SEGMENTS <= CHAIN_SEGMENTS) {
#pragma unroll
        for (int segment = 0; segment < SEGMENTS; segment++) {
            score_segment<Shape, HALF>(queries + segment * Shape::ROWS * SEGMENT_BYTES,
                                       keys + segment * Shape::KEYS * SEGMENT_BYTES, scores);
        }
    } else {
#pragma unroll 1
        for (int first = 0; first < num_segments; first += CHAIN_SEGMENTS) {
            float part[Shape::M][Shape::N][4] = {};
            const int end = min(first + CHAIN_SEGMENTS, num_segments);
#pragma unroll 1
            for (int segment = first; segment < end; segment++) {
                score_segment<Shape, HALF>(queries + segment * Shape::ROWS * SEGMENT_BYTES,
                                           keys + segment * Shape::KEYS * SEGMENT_BYTES, part);
            }
            add_scores<Shape>(part, scores);
        }
    }
}

/* scores += factor * part, and part becomes 0. */
template <typename Shape>
__device__ __forceinline__ void
fold_part(float factor, float part[Shape::M][Shape::N][4], float scores[Shape::M][Shape::N][4])
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int n = 0; n < Shape::N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[m][n][i] = fmaf(factor, part[m][n][i], scores[m][n][i]);
            }
        }
    }
    clear_scores<Shape>(part);
}

/* part += queries * keys of 16 dims: of the first 8, of the last 8, or of all. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
score_step(uint32_t queries, uint32_t keys, bool has_first, bool has_last,
           float part[Shape::M][Shape::N][4])
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
        uint32_t a[4];
        ptx_ldmatrix_x4(queries + m * 16 * SEGMENT_BYTES, a);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = (i < 2 ? has_first : has_last) ? a[i] : 0;
        }
#pragma unroll
        for (int n = 0; n < Shape::N; n += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4(keys + n * 8 * SEGMENT_BYTES, b);
            multiply<HALF>(part[m][n], a, b);
            multiply<HALF>(part[m][n + 1], a, b + 2);
        }
    }
}

/* score_block, but dims in front of `cut`, a multiple of 8, have another factor than the others. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
score_parts(uint32_t queries, uint32_t keys, int num_dims, int cut, const float *factors,
            float scores[Shape::M][Shape::N][4])
{
    constexpr int STEP = 16, CHAIN = CHAIN_SEGMENTS * SEGMENT;
    float part[Shape::M][Shape::N][4] = {};
    clear_scores<Shape>(scores);
#pragma unroll 1
    for (int dim = 0; dim < num_dims; dim += STEP) {
        const uint32_t segment = dim / SEGMENT;
        const uint32_t step = dim % SEGMENT / STEP * 32;
        const uint32_t q = (queries ^ step) + segment * Shape::ROWS * SEGMENT_BYTES;
        const uint32_t k = (keys ^ step) + segment * Shape::KEYS * SEGMENT_BYTES;
        const bool is_cut = dim + STEP / 2 == cut;
        if (is_cut) {
            score_step<Shape, HALF>(q, k, true, false, part);
            fold_part<Shape>(factors[0], part, scores);
        }
        score_step<Shape, HALF>(q, k, !is_cut, true, part);
        const int next = dim + STEP;
        if (next == cut || next % CHAIN == 0 || next >= num_dims) {
            fold_part<Shape>(factors[next > cut], part, scores);
        }
    }
}

/* ---- Logits -------------------------------------------------------------------------------- */

/* Where the quotient is small, tanh changes nothing. */
static __device__ __noinline__ float
cap_logit(float logit, float cap_log2)
{
    const float x = logit / cap_log2;
    return fabsf(x) < 0x1p-13f ? logit : cap_log2 * tanhf(x);
}

/* Turns scores into capped logits, for rules that are early. */
template <typename Shape>
__device__ __forceinline__ void
cap_scores(float early_scale, float cap_log2, float scores[Shape::M][Shape::N][4])
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int n = 0; n < Shape::N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float logit = scores[m][n][i] * early_scale;
                scores[m][n][i] = cap_log2 == 0.0f ? logit : cap_logit(logit, cap_log2);
            }
        }
    }
}

/* Hides the keys of a block that a row does not see. `limits` are those of the warp's rows. */
template <typename Shape>
__device__ __forceinline__ void
mask_scores(const varlen_limits *limits, uint32_t first_key, float scores[Shape::M][Shape::N][4])
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const varlen_limits row = limits[16 * m + 8 * i + lane_idx() / 4];
            const uint32_t count = row.end - row.begin;
            const uint32_t key = first_key + lane_idx() % 4 * 2 - row.begin;
#pragma unroll
            for (int n = 0; n < Shape::N; n++) {
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    if (key + 8 * n + k >= count) {
                        scores[m][n][2 * i + k] = -INFINITY;
                    }
                }
            }
        }
    }
}

/* Hides the keys whose bits are set. */
template <typename Shape>
__device__ __forceinline__ void
hide_keys(uint64_t hidden, float scores[Shape::M][Shape::N][4])
{
    const uint64_t own = hidden >> lane_idx() % 4 * 2;
#pragma unroll
    for (int n = 0; n < Shape::N; n++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if ((own >> (8 * n + k) & 1) != 0) {
#pragma unroll
                for (int m = 0; m < Shape::M; m++) {
                    scores[m][n][k] = -INFINITY;
                    scores[m][n][2 + k] = -INFINITY;
                }
            }
        }
    }
}

/* ---- Weights ------------------------------------------------------------------------------- */

/* Moves the references of rows whose largest logit is too far above them. */
template <typename Shape>
__device__ __forceinline__ void
move_references(float scale, const float largest[Shape::M][2], varlen_rows<Shape> *rows,
                float out[Shape::M][Shape::V][4])
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float score = largest[m][i];
            score = fmaxf(score, __shfl_xor_sync(ALL_LANES, score, 1));
            score = fmaxf(score, __shfl_xor_sync(ALL_LANES, score, 2));
            const float older = rows->reference[m][i];
            if (fmaf(score, scale, -older) > MOST_EXCESS) {
                rows->reference[m][i] = __fmul_rn(score, scale); /* not a part of an FMA */
                const float factor = ptx_exp2(older - rows->reference[m][i]);
                rows->sum[m][i] *= factor;
                rows->rest[m][i] *= factor;
#pragma unroll
                for (int v = 0; v < Shape::V; v++) {
                    out[m][v][2 * i] *= factor;
                    out[m][v][2 * i + 1] *= factor;
                }
            }
        }
    }
}

/* Moves references where this is needed, which seldom happens after the first block. All lanes of a
 * row decide alike, and what they do does not depend on other rows. */
template <typename Shape>
__device__ __forceinline__ void
update_references(float scale, const float scores[Shape::M][Shape::N][4], varlen_rows<Shape> *rows,
                  float out[Shape::M][Shape::V][4])
{
    float largest[Shape::M][2];
    bool is_above = false;
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float score = fmaxf(scores[m][0][2 * i], scores[m][0][2 * i + 1]);
#pragma unroll
            for (int n = 1; n < Shape::N; n++) {
                score = fmaxf(score, fmaxf(scores[m][n][2 * i], scores[m][n][2 * i + 1]));
            }
            largest[m][i] = score;
            is_above |= fmaf(score, scale, -rows->reference[m][i]) > MOST_EXCESS;
        }
    }
    if (__any_sync(ALL_LANES, is_above)) {
        move_references<Shape>(scale, largest, rows, out);
    }
}

/* Turns scores into weights, and adds these to the rows' sums before they are rounded. A block
 * without a key of a row leaves the row's bits as they are. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
weigh_scores(float scale, float scores[Shape::M][Shape::N][4], varlen_rows<Shape> *rows,
             uint32_t weights[Shape::M][Shape::N / 2][4])
{
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float reference = rows->reference[m][i];
            const float shift = WEIGHT_SHIFT<HALF> - (reference == -INFINITY ? 0.0f : reference);
            float pairs[Shape::N];
#pragma unroll
            for (int n = 0; n < Shape::N; n++) {
                const float low = ptx_exp2(fmaf(scores[m][n][2 * i], scale, shift));
                const float high = ptx_exp2(fmaf(scores[m][n][2 * i + 1], scale, shift));
                weights[m][n / 2][n % 2 * 2 + i] = pack_pair<HALF>(low, high);
                pairs[n] = low + high;
            }
            const float term = sum_values<Shape::N>(pairs);
            const float older = rows->sum[m][i];
            rows->sum[m][i] = older + term;
            rows->rest[m][i] += term - (rows->sum[m][i] - older);
        }
    }
}

/* Turns the scores of a block into weights. `limits` are those of the warp's rows; `is_cut` tells
 * whether one of these rows does not see the whole block; `hidden` has the bits of hidden keys. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
weigh_block(const varlen_rule &rule, float cap_log2, const varlen_limits *limits, bool is_cut,
            uint32_t first_key, uint64_t hidden, float scores[Shape::M][Shape::N][4],
            varlen_rows<Shape> *rows, float out[Shape::M][Shape::V][4],
            uint32_t weights[Shape::M][Shape::N / 2][4])
{
    if (rule.is_early) {
        cap_scores<Shape>(rule.early_scale, cap_log2, scores);
    }
    if (is_cut) {
        mask_scores<Shape>(limits, first_key, scores);
    }
    if (hidden != 0) {
        hide_keys<Shape>(hidden, scores);
    }
    update_references<Shape>(rule.scale, scores, rows, out);
    weigh_scores<Shape, HALF>(rule.scale, scores, rows, weights);
}

/* ---- Out ----------------------------------------------------------------------------------- */

/* out += weights * values. `values` is the address of the lane's chunk of the warp's part. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
add_block(uint32_t values, const uint32_t weights[Shape::M][Shape::N / 2][4],
          float out[Shape::M][Shape::V][4])
{
#pragma unroll
    for (int k = 0; k < Shape::KEYS / 16; k++) {
#pragma unroll
        for (int v = 0; v < Shape::V; v += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4_trans((values ^ v % 8 * 16) +
                                      (v / 8 * Shape::KEYS + k * 16) * SEGMENT_BYTES,
                                  b);
#pragma unroll
            for (int m = 0; m < Shape::M; m++) {
                multiply<HALF>(out[m][v], weights[m][k], b);
                multiply<HALF>(out[m][v + 1], weights[m][k], b + 2);
            }
        }
    }
}
