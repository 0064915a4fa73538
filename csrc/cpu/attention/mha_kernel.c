/* mha_kernel.c: a tile of multi-head attention, for one instruction set.
 *
 * Computes     s_j = scale * log2(e) * (q . k_j), capped,  w_j = 2^(s_j - ref),
 *              out = sum_j w_j v_j / sum_j w_j * sink factor * v_descale,
 *              lse = (ref + log2(sum_j w_j)) * ln 2   over the keys j that a row sees
 * Shapes       q [tokens][H][D], k [keys][Hk][D] each in one or two parts, v [keys][Hk][Dv], of
 *              bf16, fp16 or e4m3; out [tokens][H][Dv] of bf16, fp16 or fp32; lse [tokens][H] fp32
 * Scratch      q       [group][D / step][group rows]   packed once per tile
 *              keys    [BLOCK_KEYS][KEY_STRIDE]        widened once for all rows of the tile
 *              values  [BLOCK_KEYS / step][Dv]         likewise
 *              scores  [BLOCK_KEYS][group rows] fp32, then the weights
 *              probs   [BLOCK_KEYS / step][group rows] weights as the unit multiplies them
 *              state   out [group][Dv][group rows] fp32, sum, max; twice
 *              Lanes are rows. A group is one or two vectors of rows; its slices of q and out stay
 *              in L1, and the block in L2.
 * Roofline     2 * pairs * (D + Dv) FLOP. The multiply unit binds; widening a block costs a
 *              fraction 3 / rows of it, and the softmax 1 / 10 at D + Dv = 320.
 * Numerics     Those of mqa_kernel.c, whose products these are (attention_lanes.h,
 *              attention_tiles.h), by the rules in softmax_lanes.h. Keys are cut into blocks from
 *              the request's first key on, whatever a tile sees, and a hidden key has weight 0. So
 *              a row's bits depend on its query and its request's keys alone. Requests that share a
 *              tile have one block, and what their rows do not see changes no bit, either. Every
 *              16384 keys the state is added to those before it.
 *              Products in SMLA_FP_FLUSH are right for values up to 2^50: logits of 576 of them
 *              stay below 2^127 with any scale up to 2^16. Larger ones, and NaN, count as zeros
 *              here; rows that have or see such a value are computed again by mha_exact.c, and
 *              rows with one key, whose out is its value to the bit, by mha_one_key.h.
 * Source       online softmax (FlashAttention), register blocking (GotoBLAS); rows as lanes and the
 *              power-of-two reference are ours.
 */
#define SMLA_SIMD_WIDTH SMLA_LANES

#if defined(SMLA_HAVE_BF16_PRODUCTS)
#include "cpu/attention/mha_unit_bf16.h"
#else
#include "cpu/attention/mha_unit_fp32.h"
#endif

#if defined(SMLA_HAVE_TILES)
#include "cpu/attention/attention_tiles.h"
#else
#include "cpu/attention/attention_lanes.h"
#endif

#include "core/fp_mode.h"
#include "cpu/attention/softmax_lanes.h"

extern const smla_mha_isa SMLA_OF_FP32_ISA(smla_mha);

enum {
    PRODUCT_DIMS = VALUE_DEPTH == 1 ? 128 : SMLA_HEAD_DIM, /* dimensions per product of scores */
    KEYS_AHEAD = 8,                                        /* how early keys are prefetched */
    STATE_KEYS = 16384,                                    /* a state takes so many keys at most */
    MAX_ROW_ELEMENTS = SMLA_HEAD_DIM,                      /* at most, in a row of q, k or v */
};

_Static_assert(STATE_KEYS % BLOCK_KEYS == 0, "a state takes whole blocks");
_Static_assert(SMLA_MHA_ROWS % GROUP_LANES == 0, "a tile has room for whole groups");
_Static_assert((int)SMLA_MHA_SHARED_KEYS <= (int)BLOCK_KEYS,
               "requests that share a tile have one block");
_Static_assert(SMLA_MHA_STEP_KEYS % (VALUE_DEPTH * UNIT_STEP) == 0, "whole steps of values");
_Static_assert(BLOCK_KEYS % KEY_ROWS_1 == 0 && BLOCK_KEYS % KEY_ROWS_2 == 0, "whole steps of keys");
_Static_assert(BLOCK_KEYS / UNIT_STEP % VALUE_DEPTH == 0, "whole steps of value sums");

/* The state of softmax, as in mqa.h; `out` is [group][value_dims][group rows]. */
typedef struct tile_state {
    double *sum;
    float *max_log2;
    float *out;
} tile_state;

/* What the functions of a tile share. */
typedef struct tile_work {
    const smla_attention_params *params;
    const smla_mha_tile *tile;
    int query_dims; /* padded */
    int value_dims; /* padded */
    int num_rows;   /* rows that have a lane, which are the first */
    int num_lanes;  /* rows, padded to whole vectors */
    logit_rule rule;
    unit_scalar *q;
    unit_scalar *keys;
    unit_scalar *values;
    unit_scalar *probs;
    unit_scalar *row; /* [MAX_ROW_ELEMENTS] */
    float *scores;
    tile_state state;
    tile_state older;           /* the sum of the states before the latest */
    smla_mha_row *rows;         /* [SMLA_MHA_ROWS] */
    smla_kv_place *shared_keys; /* [SMLA_MHA_SHARED_KEYS]: where the tile's first keys lie */
    /* Later keys are those of one request. first_key is where key 0 would lie if they followed it
     * without a gap. */
    int64_t req;
    int64_t first_key;
    int *hidden_keys; /* [BLOCK_KEYS]: numbers in the block of the keys that no lane sees */
    int32_t *begin;   /* keys that a lane sees, relative to the block */
    int32_t *end;
    uint8_t *is_exact; /* rows that mha_exact.c computes */
} tile_work;

/* The arrays of scratch whose sizes no call changes. */
typedef struct tile_arrays {
    _Alignas(64) unit_scalar keys[BLOCK_KEYS * KEY_STRIDE];
    _Alignas(64) unit_scalar values[VALUE_ELEMENTS];
    _Alignas(64) unit_scalar probs[PROB_ELEMENTS];
    _Alignas(64) unit_scalar row[WIDTH * MAX_ROW_ELEMENTS];
    _Alignas(64) float scores[BLOCK_KEYS * GROUP_LANES];
    _Alignas(64) double sum[2][SMLA_MHA_ROWS]; /* sums of `state` and of `older` */
    _Alignas(64) float max_log2[2][SMLA_MHA_ROWS];
    _Alignas(64) smla_mha_row rows[SMLA_MHA_ROWS];
    _Alignas(64) smla_kv_place shared_keys[SMLA_MHA_SHARED_KEYS];
    _Alignas(64) int hidden_keys[BLOCK_KEYS];
    _Alignas(64) int32_t begin[GROUP_LANES];
    _Alignas(64) int32_t end[GROUP_LANES];
    _Alignas(64) uint8_t is_exact[SMLA_MHA_ROWS];
} tile_arrays;

enum {
    Q_BYTES_PER_DIM = SMLA_MHA_ROWS / UNIT_STEP * 4,
    OUT_BYTES_PER_DIM = SMLA_MHA_ROWS * 4, /* bytes of each state */
};

/* Scratch memory: [arrays] [q] [out of `state`] [out of `older`] */
static void
carve(const smla_attention_params *params, uint8_t *memory, tile_work *work)
{
    tile_arrays *const arrays = (tile_arrays *)memory;
    work->query_dims = smla_pad_mha_dims(params->queries.dims[0] + params->queries.dims[1]);
    work->value_dims = smla_pad_mha_dims(params->kv.value_dim);
    work->q = (unit_scalar *)(memory + sizeof *arrays);
    work->keys = arrays->keys;
    work->values = arrays->values;
    work->probs = arrays->probs;
    work->row = arrays->row;
    work->scores = arrays->scores;
    uint8_t *const out = (uint8_t *)work->q + work->query_dims * Q_BYTES_PER_DIM;
    tile_state *const states[] = {&work->state, &work->older};
    for (int i = 0; i < 2; i++) {
        states[i]->sum = arrays->sum[i];
        states[i]->max_log2 = arrays->max_log2[i];
        states[i]->out = (float *)(out + i * work->value_dims * OUT_BYTES_PER_DIM);
    }
    work->rows = arrays->rows;
    work->shared_keys = arrays->shared_keys;
    work->hidden_keys = arrays->hidden_keys;
    work->begin = arrays->begin;
    work->end = arrays->end;
    work->is_exact = arrays->is_exact;
}

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Widens the two parts of a row, with zeros behind them. Returns whether all values are usual. */
static bool
load_row(const smla_row_part *parts, int num_parts, smla_float_type type, int padded_dims,
         unit_scalar *row)
{
    int64_t dim = 0;
    for (int i = 0; i < num_parts; i++) {
        widen_values(parts[i].data, type, parts[i].at, parts[i].dim, row + dim / UNIT_STEP);
        dim += parts[i].dim;
    }
    if (dim < padded_dims) {
        memset(row + dim / UNIT_STEP, 0, (size_t)(padded_dims - dim) / UNIT_STEP * sizeof *row);
    }
    return !has_huge_value(row, padded_dims / UNIT_STEP);
}

/* Rows of a head lie far apart, where the processor does not expect them. Inlined, because GCC
 * drops calls of a function that only prefetches. */
SMLA_INLINE void
prefetch_row(const smla_row_part *parts, int num_parts, smla_float_type type)
{
    const int64_t element = type == SMLA_FLOAT_E4M3 ? 1 : 2;
    for (int i = 0; i < num_parts; i++) {
        const uint8_t *const row = (const uint8_t *)parts[i].data + parts[i].at * element;
        for (int64_t at = 0; at < parts[i].dim * element; at += 64) {
            __builtin_prefetch(row + at);
        }
    }
}

static int
lanes_at(const tile_work *work, int lane)
{
    return work->num_lanes - lane > WIDTH ? GROUP_LANES : WIDTH;
}

/* Transposes the rows of queries. Lanes past the last row are zeros. */
static void
pack_queries(const tile_work *work)
{
    const smla_attention_params *const params = work->params;
    const int columns = work->query_dims / UNIT_STEP;
    for (int lane = 0; lane < work->num_lanes; lane += WIDTH) {
        const int first = lane / GROUP_LANES * GROUP_LANES; /* the group's first lane */
        const int lanes = lanes_at(work, first);
        unit_scalar *const to = work->q + first * columns + (lane - first);
        smla_row_part parts[2];
        for (int i = lane + WIDTH; i < lane + 2 * WIDTH && i < work->num_rows; i++) {
            smla_find_query(params, work->rows[i].token, work->rows[i].head, parts);
            prefetch_row(parts, 2, params->queries.type);
        }
        for (int i = 0; i < WIDTH; i++) {
            unit_scalar *const row = work->row + i * columns;
            if (lane + i >= work->num_rows) {
                memset(row, 0, (size_t)columns * sizeof *row);
                continue;
            }
            const smla_mha_row *const of = &work->rows[lane + i];
            smla_find_query(params, of->token, of->head, parts);
            work->is_exact[lane + i] |=
                !load_row(parts, 2, params->queries.type, work->query_dims, row);
            apply_part_factors(params, work->tile, row);
        }
        for (int k = 0; k < columns; k += WIDTH) {
            vuint square[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) {
                square[i] = *(const vuint *)(work->row + i * columns + k);
            }
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) {
                *(vuint *)(to + (k + i) * lanes) = square[i];
            }
        }
    }
}

/* Marks the rows that see a key. */
static void
mark_rows(const tile_work *work, int64_t key)
{
    for (int i = 0; i < work->num_rows; i++) {
        const smla_key_range *const keys = &work->rows[i].keys;
        work->is_exact[i] |= key >= keys->begin && key < keys->end;
    }
}

/* Where a key of the tile lies; page -1 where there is none between the keys of two requests. */
static smla_kv_place
find_key(const tile_work *work, int64_t key)
{
    return key < SMLA_MHA_SHARED_KEYS
               ? work->shared_keys[key]
               : smla_find_kv_place(work->params, work->req, work->first_key + key);
}

SMLA_INLINE void
prefetch_key(const tile_work *work, int64_t key)
{
    const smla_attention_params *const params = work->params;
    const smla_kv_place place = find_key(work, key);
    smla_row_part parts[SMLA_KV_ARRAYS];
    if (place.page >= 0) {
        smla_find_key(params, place, work->tile->kv_head, parts);
        prefetch_row(parts, SMLA_KV_ARRAYS, params->kv.type);
    }
}

/* The keys of a round: key, key + 1, ... of the tile. */
typedef struct key_block {
    int64_t key;
    int count;
    int num_hidden; /* entries of work->hidden_keys */
} key_block;

/* Widens keys and values of a block. A key with an unusual value becomes zeros, and so does a
 * hidden one: those in front of `seen`, which no row sees, and those that lie nowhere. Few keys are
 * on their way at a time, because rows that are a power of two apart share sets of the cache. */
static void
load_block(const tile_work *work, smla_key_range seen, key_block *block)
{
    const smla_attention_params *const params = work->params;
    block->num_hidden = 0;
    for (int j = 0; j < block->count; j++) {
        const smla_kv_place nowhere = {-1, 0};
        const int64_t key = block->key + j;
        const smla_kv_place place = key < seen.begin ? nowhere : find_key(work, key);
        unit_scalar *const row = work->keys + j * KEY_STRIDE;
        bool is_usual = place.page >= 0;
        if (key + KEYS_AHEAD >= seen.begin && key + KEYS_AHEAD < seen.end) {
            prefetch_key(work, key + KEYS_AHEAD);
        }
        if (is_usual) {
            smla_row_part parts[SMLA_KV_ARRAYS];
            smla_find_key(params, place, work->tile->kv_head, parts);
            const bool is_usual_key = load_row(parts, 2, params->kv.type, work->query_dims, row);
            const bool is_usual_value =
                load_row(&parts[SMLA_VALUES], 1, params->kv.type, work->value_dims, work->row);
            is_usual = is_usual_key & is_usual_value;
            if (!is_usual) {
                mark_rows(work, key);
            }
        } else {
            work->hidden_keys[block->num_hidden++] = j;
        }
        if (!is_usual) {
            memset(row, 0, (size_t)work->query_dims / UNIT_STEP * sizeof *row);
            memset(work->row, 0, (size_t)work->value_dims / UNIT_STEP * sizeof *row);
        }
        place_values(work->row, j, work->value_dims, work->values);
    }
    finish_values(block->count, work->value_dims, work->values);
    arrange_values(work->values, work->value_dims, block->count);
}

/* ---- Masks --------------------------------------------------------------------------------- */

typedef enum block_view {
    SEES_NO_KEY = 0,
    SEES_SOME = 1, /* lanes see different keys, or not all */
    SEES_ALL = 2,
} block_view;

/* Tells how much of a block the lanes of a group see. Where the answer is SEES_SOME, sets `begin`
 * and `end` of every lane. Lanes past the last row see what that row sees. Neither limit falls from
 * row to row, so the first and the last row decide. */
static block_view
classify_block(const tile_work *work, int first, int lanes, const key_block *block)
{
    const int64_t key = block->key;
    const int count = block->count;
    const int last = work->num_rows - 1;
    const smla_key_range low = work->rows[first].keys;
    const smla_key_range high =
        work->rows[first + lanes - 1 < last ? first + lanes - 1 : last].keys;
    if (low.begin >= key + count || high.end <= key) {
        return SEES_NO_KEY;
    }
    if (high.begin <= key && low.end >= key + count && block->num_hidden == 0) {
        return SEES_ALL;
    }
    for (int i = 0; i < lanes; i++) {
        const smla_key_range *const keys = &work->rows[first + i < last ? first + i : last].keys;
        work->begin[i] = (int32_t)smla_clamp_int64(keys->begin - key, 0, count);
        work->end[i] = (int32_t)smla_clamp_int64(keys->end - key, 0, count);
    }
    return SEES_SOME;
}

/* Makes logits of scores, which are -inf for keys that a lane does not see. */
static void
mask_scores(float *scores, int count, float scale_log2, const int32_t *begin, const int32_t *end,
            int vectors)
{
    for (int j = 0; j < count; j++) {
        for (int v = 0; v < vectors; v++) {
            vfloat *const s = (vfloat *)(scores + (j * vectors + v) * WIDTH);
            const vint first = *(const vint *)(begin + v * WIDTH);
            const vint past = *(const vint *)(end + v * WIDTH);
            *s = select_lanes((first <= j) & (past > j), *s * scale_log2, splat(-INFINITY));
        }
    }
}

/* The logits of hidden keys. */
static void
hide_keys(const tile_work *work, const key_block *block, int vectors)
{
    for (int i = 0; i < block->num_hidden; i++) {
        for (int v = 0; v < vectors; v++) {
            vfloat *const s =
                (vfloat *)(work->scores + (work->hidden_keys[i] * vectors + v) * WIDTH);
            *s = splat(-INFINITY);
        }
    }
}

/* ---- A block and a group ------------------------------------------------------------------- */

SMLA_INLINE void
score_keys(const tile_work *work, const unit_scalar *q, int count, const int rows,
           const int vectors)
{
    for (int begin = 0; begin < work->query_dims; begin += PRODUCT_DIMS) {
        const int left = work->query_dims - begin;
        for (int j = 0; j < count; j += rows) {
            score_rows(work->keys + j * KEY_STRIDE + begin / UNIT_STEP,
                       q + begin / UNIT_STEP * vectors * WIDTH,
                       left < PRODUCT_DIMS ? left : PRODUCT_DIMS, NULL, begin == 0,
                       work->scores + j * vectors * WIDTH, false, rows, vectors);
        }
    }
}

SMLA_INLINE void
attend_group(const tile_work *work, int first, const key_block *block, const int key_rows,
             const int value_rows, const int vectors)
{
    const int count = block->count;
    const block_view view = classify_block(work, first, vectors * WIDTH, block);
    if (view == SEES_NO_KEY) {
        return;
    }
    vfloat alpha[GROUP_VECTORS];
    float scale_log2 = work->rule.scale_log2;
    score_keys(work, work->q + first * (work->query_dims / UNIT_STEP), count, key_rows, vectors);
    if (work->rule.cap_log2 != 0.0f) {
        cap_scores(work->scores, count * vectors * WIDTH, work->rule);
        scale_log2 = 1.0f;
    }
    if (view == SEES_SOME) {
        mask_scores(work->scores, count, scale_log2, work->begin, work->end, vectors);
        hide_keys(work, block, vectors);
        scale_log2 = 1.0f;
    }
    weigh_scores(work->scores, count, scale_log2, work->state.max_log2 + first,
                 work->state.sum + first, alpha, vectors);
    const unit_scalar *const probs =
        pack_weights(work->scores, count, VALUE_DEPTH, vectors, work->probs);
    const int steps = (count + UNIT_STEP - 1) / UNIT_STEP;
    const int padded_steps = (steps + VALUE_DEPTH - 1) / VALUE_DEPTH * VALUE_DEPTH;
    float *const out = work->state.out + first * work->value_dims;
    for (int d = 0; d < work->value_dims; d += value_rows) {
        add_value_rows(work->values + d / 16 * VALUE_CHUNK + d % 16, probs, padded_steps, alpha,
                       out + d * vectors * WIDTH, value_rows, vectors);
    }
}

/* The group's two sizes. Not inlined, so that the registers of their loops are theirs alone. */
__attribute__((noinline)) static void
attend_one_vector(const tile_work *work, int first, const key_block *block)
{
    attend_group(work, first, block, KEY_ROWS_1, VALUE_ROWS_1, 1);
}

__attribute__((noinline)) static void
attend_two_vectors(const tile_work *work, int first, const key_block *block)
{
    attend_group(work, first, block, KEY_ROWS_2, VALUE_ROWS_2, 2);
}

/* ---- States -------------------------------------------------------------------------------- */

static void
clear(const tile_work *work, tile_state state)
{
    for (int lane = 0; lane < work->num_lanes; lane++) {
        state.sum[lane] = 0.0;
        state.max_log2[lane] = -INFINITY;
    }
    memset(state.out, 0, (size_t)work->num_lanes * (size_t)work->value_dims * sizeof *state.out);
}

/* older += state, for one vector of lanes. */
static void
fold_vector(const tile_work *work, int lane)
{
    const tile_state total = work->older, part = work->state;
    const int first = lane / GROUP_LANES * GROUP_LANES; /* the group's first lane */
    const int lanes = lanes_at(work, first);
    vfloat *const total_max = (vfloat *)(total.max_log2 + lane);
    const vfloat part_max = *as_vectors(part.max_log2 + lane);
    const vfloat new_max = max_lanes(*total_max, part_max);
    const vfloat reference = finite_reference_of(new_max);
    const vfloat total_factor = exp2_lanes(reference_of(*total_max) - reference);
    const vfloat part_factor = exp2_lanes(reference_of(part_max) - reference);
    *total_max = new_max;
    for (int i = 0; i < WIDTH; i++) {
        total.sum[lane + i] = total.sum[lane + i] * (double)total_factor[i] +
                              part.sum[lane + i] * (double)part_factor[i];
    }
    for (int d = 0; d < work->value_dims; d++) {
        const int at = first * work->value_dims + d * lanes + (lane - first);
        vfloat *const to = (vfloat *)(total.out + at);
        *to = *to * total_factor + *as_vectors(part.out + at) * part_factor;
    }
}

/* Adds the state to `older`, the sum of those before it, and clears it. */
static void
fold_into_older(const tile_work *work)
{
    for (int lane = 0; lane < work->num_lanes; lane += WIDTH) {
        fold_vector(work, lane);
    }
    clear(work, work->state);
}

#include "cpu/attention/mha_finish.h"
#include "cpu/attention/mha_one_key.h"
#include "cpu/attention/mha_rows.h"

/* ---- A tile -------------------------------------------------------------------------------- */

/* Whether the scales let SMLA_FP_FLUSH take small products as zero. A small v_descale would become
 * 0 when it is divided by a row's sum. */
static bool
has_ordinary_scales(const tile_work *work)
{
    const float v_descale =
        smla_read_mha_scale(&work->params->logits.v_descale, work->tile->req, work->tile->kv_head);
    return is_ordinary_scale(smla_mha_logit_scale(work->params, work->tile)) &&
           is_ordinary_scale((double)v_descale) && v_descale >= 0x1p-90f;
}

/* Attends to the keys of a tile, block by block. Returns whether the sum is in `older`; else it is
 * in `state`. */
static bool
attend_keys(const tile_work *work, smla_key_range keys)
{
    const int64_t first_block = keys.begin / BLOCK_KEYS * BLOCK_KEYS;
    bool has_older = false;
    clear(work, work->state);
    for (int64_t key = first_block; key < keys.end; key += BLOCK_KEYS) {
        const int64_t left = keys.end - key;
        key_block block = {.key = key, .count = left < BLOCK_KEYS ? (int)left : BLOCK_KEYS};
        if (key % STATE_KEYS == 0 && key > first_block) {
            if (!has_older) {
                clear(work, work->older);
            }
            has_older = true;
            fold_into_older(work);
        }
        load_block(work, keys, &block);
        for (int lane = 0; lane < work->num_lanes; lane += GROUP_LANES) {
            (lanes_at(work, lane) == WIDTH ? attend_one_vector : attend_two_vectors)(work, lane,
                                                                                     &block);
        }
    }
    if (has_older) {
        fold_into_older(work);
    }
    return has_older;
}

/* Not inlined, because the caller changes the floating-point mode. */
__attribute__((noinline)) static void
run_usual_tile(tile_work *work, smla_key_range keys)
{
    work->num_lanes = (work->num_rows + WIDTH - 1) / WIDTH * WIDTH;
    begin_products();
    pack_queries(work);
    if (attend_keys(work, keys)) {
        work->state = work->older;
    }
    end_products();
    for (int lane = 0; lane < work->num_lanes; lane += WIDTH) {
        finish_vector(work, lane);
    }
}

static void
run_tile(const smla_attention_params *params, const smla_mha_tile *tile, uint8_t *scratch)
{
    if (!serves(params, tile)) {
        SMLA_OF_FP32_ISA(smla_mha).run_tile(params, tile, scratch);
        return;
    }
    tile_work work = {.params = params, .tile = tile};
    carve(params, scratch, &work);
    work.rule = logit_rule_of((float)smla_mha_logit_scale(params, tile), params->logits.softcap);
    find_rows(&work);
    memset(work.is_exact, !has_ordinary_scales(&work), (size_t)tile->num_rows);
    const int num_alone = choose_lanes(&work);
    if (work.num_rows > 0) {
        run_usual_tile(&work, find_seen_keys(work.rows, work.num_rows));
    }
    if (num_alone > 0) {
        const smla_fp_mode before = smla_fp_change(SMLA_FP_EXACT);
        attend_only_keys(&work);
        smla_fp_change(before);
    }
    for (int i = 0; i < tile->num_rows; i++) {
        if (work.is_exact[i]) {
            smla_attend_mha_exactly(params, tile, &work.rows[i]);
        }
    }
}

const smla_mha_isa SMLA_OF_ISA(smla_mha) = {
    .lanes = WIDTH,
    .scratch = {.bytes = sizeof(tile_arrays),
                .bytes_per = {Q_BYTES_PER_DIM, 2 * OUT_BYTES_PER_DIM}},
    .run_tile = run_tile,
};
