/* mqa_kernel.c: sparse MLA attention of one part, for one instruction set.
 *
 * Computes     s_j = softmax_scale * log2(e) * (q . k_j),  w_j = 2^(s_j - ref),
 *              out = sum_j w_j v_j,  sum = sum_j w_j   over the part's keys; then finish computes
 *              out / sum * sink factor, lse = (ref + log2(sum)) * ln 2
 * Shapes       q [H][576] bf16, rows of the cache by slot, out [H][512] bf16, lse [H] fp32
 * Scratch      q       [group][576 / step][group heads]   packed once per part
 *              keys    [BLOCK_KEYS][KEY_STRIDE]           every key dequantised once for all heads
 *              values  pairs of keys (bf16 unit), or the keys themselves (fp32 unit)
 *              scores  [BLOCK_KEYS][group heads] fp32, then the weights
 *              probs   [BLOCK_KEYS / step][group heads]   weights * scale of one value tile
 *              state   out [group][512][group heads] fp32, sum, max
 *              Lanes are heads. A group is one or two vectors of heads, which read the block in
 *              L2 together; their slices of q and probs stay in L1.
 * Roofline     2 * T * H * K * 1088 FLOP, T * K * 656 bytes (1152 for bf16 rows). The multiply unit
 *              binds, down to H = 16, where dequantising a key (once for all heads) and the loads
 *              that broadcast it cost a third. A step of R rows and V vectors has R V multiply-adds
 *              and R + V loads. GFLOP/s of one Zen 5 core (4.3 GHz; CPU time, one thread, T 8,
 *              K 2048, fp8_ds_mla, 2026-11-20) at H 16, 64, 128: bf16 products 316, 443, 467 of a
 *              peak of 521; fp32 with AVX-512 138, 199, 218 of 270, with AVX2 84, 111, 112 of 135,
 *              with SSE2 28, 34, 35.
 * Numerics     Products are exact, but subnormal operands and results are zero (SMLA_FP_FLUSH). An
 *              operand that is taken as zero is below 2^-126. A part with a query or a scale above
 *              2^64, with a subnormal query and bf16 rows above 2^64, or with a scale of logits
 *              above 2^16 is computed again on the fp32 unit with subnormal numbers kept, however
 *              slow. In others flushing costs a logit less than 2^-26, where the contract allows
 *              10^-6. That depends on the part's own query and rows alone, so batch invariance
 *              holds. Scales of caches count as multiples of choose_key_unit, which is a part of
 *              the scale of logits and of results.
 *              A dot product is summed in chunks of CHUNK_DIMS dimensions, then
 *              chunks inside a tile of 128, then tiles times the row's fp32 scales: about 28
 *              roundings deep at most, where one chain would have 576. A scale never multiplies a
 *              rounded key: it multiplies the fp32 tile sum of a score, and the weight of a value
 *              (which the bf16 unit rounds to bf16 once). ref is the running maximum rounded up to
 *              an integer, so rescaling by a power of two is exact however often the maximum grows.
 *              `sum` is fp32 inside a block and double across blocks. A part without keys, or whose
 *              logits are all -inf, gives sum 0: out 0, lse -inf. A NaN in a cache row reaches the
 *              results of the token.
 * Source       online softmax (FlashAttention), register blocking (GotoBLAS); the absorbed scales,
 *              the power-of-two reference and heads as lanes are ours.
 *
 * A unit decides the layout of the operands, and lanes or tiles compute the products.
 */
#define SMLA_SIMD_WIDTH SMLA_LANES

#if defined(SMLA_HAVE_BF16_PRODUCTS)
#include "cpu/attention/mqa_unit_bf16.h"
#else
#include "cpu/attention/mqa_unit_fp32.h"
#endif

#if defined(SMLA_HAVE_TILES)
#include "cpu/attention/attention_tiles.h"
#else
#include "cpu/attention/attention_lanes.h"
#endif

#include <math.h>

#include "cpu/attention/mqa.h"
#include "cpu/attention/softmax_lanes.h"
#include "cpu/machine/narrow.h"

extern const smla_mqa_isa SMLA_OF_FP32_ISA(smla_mqa);

enum { GROUP_HEADS = GROUP_LANES };

_Static_assert(SMLA_HEAD_ALIGN % WIDTH == 0, "a state must hold whole vectors of heads");
_Static_assert(SMLA_FOLD_HEADS % GROUP_HEADS == 0, "a fold task must hold whole groups");
_Static_assert((int)BLOCK_KEYS <= (int)MAX_BLOCK_KEYS, "a block must fit its row table");
_Static_assert(BLOCK_KEYS % KEY_ROWS_1 == 0 && BLOCK_KEYS % KEY_ROWS_2 == 0, "whole steps of keys");
_Static_assert(BLOCK_KEYS / UNIT_STEP % VALUE_DEPTH == 0, "whole steps of value sums");

/* A state takes this many blocks at most; then it is folded into the sum of those before it. So a
 * sum of a million terms is a few thousand roundings deep, and then a hundred. */
enum { STATE_BLOCKS = 16384 / BLOCK_KEYS };

typedef struct thread_scratch {
    unit_scalar *q;
    unit_scalar *keys;
    unit_scalar *values;
    unit_scalar *probs;
    float *scores;
    float *scales;        /* [NUM_TILES][BLOCK_KEYS] */
    smla_mqa_state older; /* the sum of STATE_BLOCKS blocks, and so on, before the latest */
} thread_scratch;

/* Consecutive heads that are processed together. */
typedef struct head_group {
    int64_t head; /* first head */
    int vectors;  /* 1 or 2 */
} head_group;

enum {
    KEY_BYTES = BLOCK_KEYS * KEY_STRIDE * 4,
    VALUE_BYTES = VALUE_ELEMENTS * 4,
    PROB_BYTES = BLOCK_KEYS / UNIT_STEP * GROUP_HEADS * 4,
    SCORE_BYTES = BLOCK_KEYS * GROUP_HEADS * 4,
    SCALE_BYTES = NUM_TILES * BLOCK_KEYS * 4,
    BLOCK_BYTES = KEY_BYTES + VALUE_BYTES + PROB_BYTES + SCORE_BYTES + SCALE_BYTES,
    QUERY_BYTES_PER_HEAD = SMLA_HEAD_DIM / UNIT_STEP * 4,
};

static thread_scratch
carve_scratch(uint8_t *memory, int64_t num_heads)
{
    thread_scratch scratch;
    scratch.older = smla_mqa_state_at(memory, num_heads);
    memory += smla_mqa_state_bytes(num_heads);
    scratch.keys = (unit_scalar *)memory;
    memory += KEY_BYTES;
    scratch.values = VALUE_BYTES == 0 ? scratch.keys : (unit_scalar *)memory;
    memory += VALUE_BYTES;
    scratch.probs = (unit_scalar *)memory;
    memory += PROB_BYTES;
    scratch.scores = (float *)memory;
    memory += SCORE_BYTES;
    scratch.scales = (float *)memory;
    memory += SCALE_BYTES;
    scratch.q = (unit_scalar *)memory;
    return scratch;
}

static head_group
group_at(int64_t head, int64_t num_heads)
{
    return (head_group){.head = head, .vectors = num_heads - head > WIDTH ? GROUP_VECTORS : 1};
}

/* ---- Query --------------------------------------------------------------------------------- */

/* Transposes `count` values of WIDTH query rows. A row of `packed` is one step of values for the
 * `lanes` heads of the group. */
SMLA_INLINE void
pack_heads(const uint16_t *const rows[WIDTH], int count, int lanes, vuint noted[2],
           unit_scalar *packed)
{
    for (int k = 0; k < count; k += 2 * WIDTH) {
        vuint square[WIDTH];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) {
            square[i] = load_words(rows[i] + k, 0);
            noted[0] = note_huge_number(noted[0], square[i]);
            noted[1] = note_subnormal(noted[1], square[i]);
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) {
            store_pairs(square[i], packed + (k + 2 * i) / UNIT_STEP * lanes, lanes);
        }
    }
}

/* A part of a head's query in bf16. One of e4m3 is converted into `buffer`. */
SMLA_INLINE const uint16_t *
load_query(const smla_queries *queries, int part, int dim, int64_t token, int64_t head,
           uint16_t *buffer)
{
    if (queries->type != SMLA_FLOAT_E4M3) {
        return smla_row16(&queries->parts[part], token, head);
    }
    const uint8_t *const codes = smla_row8(&queries->parts[part], token, head);
    for (int d = 0; d < dim; d += QUAD) {
        store_bf16(load_e4m3(codes + d, 1.0f), (uint8_t *)(buffer + d));
    }
    return buffer;
}

/* Which values a query has for which products in SMLA_FP_FLUSH may be wrong. A NaN is none of them:
 * all of its products are NaN, and it reaches no other head. */
typedef struct query_values {
    bool has_huge;      /* matters beside any keys */
    bool has_subnormal; /* matters beside huge keys */
} query_values;

enum { CONVERTED_BYTES = WIDTH * SMLA_HEAD_DIM * 2 }; /* an e4m3 query's heads of a vector */

_Static_assert((int)CONVERTED_BYTES <= (int)KEY_BYTES, "they lie where the keys will");

/* Transposes a token's query into [group][k][group heads]; lanes past the last head are 0. Uses
 * CONVERTED_BYTES of `memory`. */
static query_values
pack_query(const smla_attention_params *params, int64_t token, void *memory, unit_scalar *packed)
{
    const int rope_dim = params->keys.lists[0].kv.format->head_dim - SMLA_KV_LORA_RANK;
    static const uint16_t zeros[SMLA_KV_LORA_RANK] = {0};
    vuint noted[2] = {{0}, {0}}; /* huge values, subnormal ones */
    const smla_queries *const queries = &params->queries;
    for (int64_t head = 0; head < queries->num_heads; head += WIDTH) {
        const int64_t first = head / GROUP_HEADS * GROUP_HEADS; /* first head of the group */
        const int lanes = group_at(first, queries->num_heads).vectors * WIDTH;
        unit_scalar *const to = packed + first * (SMLA_HEAD_DIM / UNIT_STEP) + (head - first);
        const uint16_t *nope_rows[WIDTH];
        const uint16_t *rope_rows[WIDTH];
        for (int i = 0; i < WIDTH; i++) {
            const bool exists = head + i < queries->num_heads;
            uint16_t *const converted = (uint16_t *)memory + i * SMLA_HEAD_DIM;
            nope_rows[i] = exists ? load_query(queries, SMLA_NOPE, SMLA_KV_LORA_RANK, token,
                                               head + i, converted)
                                  : zeros;
            rope_rows[i] = exists && rope_dim != 0
                               ? load_query(queries, SMLA_PE, SMLA_QK_ROPE_HEAD_DIM, token,
                                            head + i, converted + SMLA_KV_LORA_RANK)
                               : zeros;
        }
        pack_heads(nope_rows, SMLA_KV_LORA_RANK, lanes, noted, to);
        pack_heads(rope_rows, rope_dim, lanes, noted, to + SMLA_KV_LORA_RANK / UNIT_STEP * lanes);
    }
    return (query_values){has_noted(noted[0]), has_noted(noted[1])};
}

/* Whether a bf16 value of a block's rows is huge. */
static bool
has_huge_rows(const key_block *block)
{
    const smla_kv_format_info *const format = block->format;
    const int nope = format->nope_type == SMLA_NOPE_BF16 ? SMLA_KV_LORA_RANK : 0;
    const int rope = count_bf16_rope(format);
    vuint noted = {0};
    for (int key = 0; key < block->count; key++) {
        const uint8_t *const row = block->keys[key].row;
        for (int i = 0; i < nope; i += 2 * WIDTH) {
            noted = note_huge(noted, load_words(row + 2 * i, 0));
        }
        for (int i = 0; i < rope; i += 2 * WIDTH) {
            noted = note_huge(noted, load_words(row + format->rope_offset + 2 * i, 0));
        }
    }
    return has_noted(noted);
}

/* ---- Scores -------------------------------------------------------------------------------- */

/* scores[j][z] = q_z . k_j for the keys of the block. Keys past `count` in the last step are stale,
 * but nothing reads their scores. The rows of `next` are prefetched on the way. */
SMLA_INLINE void
score_block(const thread_scratch *scratch, const unit_scalar *q, int count, int head_dim,
            const key_block *next, const int rows, const int vectors)
{
    for (int begin = 0; begin < head_dim; begin += SMLA_SCALE_TILE) {
        const int tile = begin / SMLA_SCALE_TILE;
        const int end = begin + SMLA_SCALE_TILE < head_dim ? begin + SMLA_SCALE_TILE : head_dim;
        for (int j = 0; j < count; j += rows) {
            for (int i = j; i < j + rows && i < next->count; i++) {
                prefetch_key(next, i, tile * 256);
            }
            score_rows(scratch->keys + j * KEY_STRIDE + begin / UNIT_STEP,
                       q + begin / UNIT_STEP * vectors * WIDTH, end - begin,
                       scratch->scales + tile * BLOCK_KEYS + j, tile == 0,
                       scratch->scores + j * vectors * WIDTH, true, rows, vectors);
        }
    }
}

/* ---- Values -------------------------------------------------------------------------------- */

SMLA_INLINE void
add_values(const thread_scratch *scratch, int count, bool has_scales, const vfloat *alpha,
           float *out, const int rows, const int vectors)
{
    const int steps = (count + UNIT_STEP - 1) / UNIT_STEP;
    const int padded_steps = (steps + VALUE_DEPTH - 1) / VALUE_DEPTH * VALUE_DEPTH;
    unit_scalar *const padding = scratch->probs + steps * vectors * WIDTH;
    memset(padding, 0, (size_t)((padded_steps - steps) * vectors * WIDTH) * sizeof *padding);
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
        if (tile == 0 || has_scales) {
            pack_probs(scratch->scores, scratch->scales + tile * BLOCK_KEYS, count, vectors,
                       scratch->probs);
        }
        for (int d = tile * SMLA_SCALE_TILE; d < (tile + 1) * SMLA_SCALE_TILE; d += rows) {
            add_value_rows(scratch->values + d / 16 * VALUE_CHUNK + d % 16, scratch->probs,
                           padded_steps, alpha, out + d * vectors * WIDTH, rows, vectors);
        }
    }
}

/* ---- A part -------------------------------------------------------------------------------- */

SMLA_INLINE void
attend_group(const thread_scratch *scratch, const key_block *block, const key_block *next,
             logit_rule rule, head_group group, smla_mqa_state state, const int key_rows,
             const int value_rows, const int vectors)
{
    vfloat alpha[GROUP_VECTORS];
    const unit_scalar *const q = scratch->q + group.head * (SMLA_HEAD_DIM / UNIT_STEP);
    score_block(scratch, q, block->count, block->format->head_dim, next, key_rows, vectors);
    if (rule.cap_log2 != 0.0f) {
        cap_scores(scratch->scores, block->count * vectors * WIDTH, rule);
    }
    weigh_scores(scratch->scores, block->count, rule.cap_log2 != 0.0f ? 1.0f : rule.scale_log2,
                 state.max_log2 + group.head, state.sum + group.head, alpha, vectors);
    add_values(scratch, block->count, has_tile_scales(block->format), alpha,
               state.out + group.head * SMLA_KV_LORA_RANK, value_rows, vectors);
}

/* attend_group for groups of one vector and of two. Not inlined, so that the registers of their
 * loops are theirs alone. */
__attribute__((noinline)) static void
attend_one_vector(const thread_scratch *scratch, const key_block *block, const key_block *next,
                  logit_rule rule, head_group group, smla_mqa_state state)
{
    attend_group(scratch, block, next, rule, group, state, KEY_ROWS_1, VALUE_ROWS_1, 1);
}

__attribute__((noinline)) static void
attend_two_vectors(const thread_scratch *scratch, const key_block *block, const key_block *next,
                   logit_rule rule, head_group group, smla_mqa_state state)
{
    attend_group(scratch, block, next, rule, group, state, KEY_ROWS_2, VALUE_ROWS_2, 2);
}

static void
clear(int64_t num_heads, smla_mqa_state state)
{
    const int64_t heads = smla_pad_heads(num_heads);
    for (int64_t head = 0; head < heads; head++) {
        state.sum[head] = 0.0;
        state.max_log2[head] = -INFINITY;
    }
    memset(state.out, 0, (size_t)heads * SMLA_KV_LORA_RANK * sizeof(float));
}

static void fold(smla_head_range heads, smla_mqa_state total, smla_mqa_state part);

static void
copy_state(int64_t num_heads, smla_mqa_state from, smla_mqa_state to)
{
    memcpy(to.sum, from.sum, (size_t)smla_mqa_state_bytes(num_heads));
}

/* Adds a state to `older`, the sum of those before it, and clears it. The first state becomes
 * `older`, which holds nothing yet. */
static void
fold_into_older(smla_head_range heads, bool is_first, smla_mqa_state older, smla_mqa_state state)
{
    if (is_first) {
        copy_state(heads.end, state, older);
    } else {
        fold(heads, older, state);
    }
    clear(heads.end, state);
}

/* Returns false if a value is huge, unless `takes_huge`; the state is then garbage. Not inlined,
 * because the caller changes the floating-point mode. */
__attribute__((noinline)) static bool
try_part(const smla_attention_params *params, int64_t token, int split, bool takes_huge,
         uint8_t *memory, smla_mqa_state state)
{
    const thread_scratch scratch = carve_scratch(memory, params->queries.num_heads);
    const smla_head_range all_heads = {.begin = 0, .end = params->queries.num_heads};
    int num_blocks = 0;
    const float unit = choose_key_unit(params);
    const logit_rule rule =
        logit_rule_of((float)params->logits.softmax_scale, params->logits.softcap);
    key_cursor cursor = start_cursor(params, token, split);
    key_block blocks[2];
    const key_block no_block = {.count = 0};
    int current = 0;
    clear(params->queries.num_heads, state);
    next_block(&cursor, BLOCK_KEYS, &blocks[current]);
    if (blocks[current].count == 0) {
        return true;
    }
    prefetch_block(&blocks[current]); /* arrives while the query is packed */
    const query_values query = pack_query(params, token, scratch.keys, scratch.q);
    if (query.has_huge && !takes_huge) {
        return false;
    }
    while (blocks[current].count > 0) {
        const key_block *const block = &blocks[current];
        const key_block *next = &blocks[1 - current];
        next_block(&cursor, BLOCK_KEYS, &blocks[1 - current]);
        const bool is_ordinary =
            load_block(block, unit, scratch.keys, scratch.values, scratch.scales) &&
            !(query.has_subnormal && has_huge_rows(block));
        if (!is_ordinary && !takes_huge) {
            return false;
        }
        arrange_values(scratch.values, SMLA_KV_LORA_RANK, block->count);
        for (int64_t head = 0; head < params->queries.num_heads; head += GROUP_HEADS) {
            const head_group group = group_at(head, params->queries.num_heads);
            (group.vectors == 1 ? attend_one_vector : attend_two_vectors)(&scratch, block, next,
                                                                          rule, group, state);
            next = &no_block; /* the first group has prefetched it */
        }
        current = 1 - current;
        if (++num_blocks % STATE_BLOCKS == 0 && blocks[current].count > 0) {
            fold_into_older(all_heads, num_blocks == STATE_BLOCKS, scratch.older, state);
        }
    }
    if (num_blocks > STATE_BLOCKS) {
        fold(all_heads, scratch.older, state);
        copy_state(params->queries.num_heads, scratch.older, state);
    }
    return true;
}

#include "cpu/attention/mqa_finish.h"
