/* apply_rope.c: RoPE of queries and keys, and of keys on their way into the cache, on any machine:
 * 128-bit vectors (SSE2, NEON).
 *
 * Computes     (a, b) -> (a cos - b sin, b cos + a sin) for the pairs of every head: neighbouring
 *              values, or value i of each half
 * Shapes       heads of R values of bf16 or fp32, tokens and heads any stride apart; a table's row
 *              of R / 2 cosines, then R / 2 sines, of fp32 or bf16
 * Roofline     Memory: a value is read once and written once.
 * Numerics     fp32, each product rounded, then the sum, once to the type of the heads: there is no
 *              FMA in this folder. A value that becomes NaN is the positive quiet NaN.
 */
#define SMLA_SIMD_WIDTH 4

#include "cpu/cache/cache.h"
#include "cpu/cache/slot_shares.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/quads.h"
#include "cpu/machine/threads.h"
#include "cpu/rope/rope.h"
#include "cpu/rope/rotate.h"

enum {
    CHUNK_PAIRS = 128, /* pairs whose angles are widened at a time */
    BLOCK_HEADS = 8,   /* heads of a token that one thread rotates by them */
    PARALLEL_BLOCKS = 8,
};

/* Pairs `first` to `first + count - 1` of a head and their angles, followed by zeros up to a whole
 * vector. */
typedef struct pair_chunk {
    int64_t first;
    int64_t count;
    float cos[CHUNK_PAIRS];
    float sin[CHUNK_PAIRS];
} pair_chunk;

/* ---- Angles -------------------------------------------------------------------------------- */

static float
read_angle(const smla_apply_rope_params *p, int64_t at)
{
    const void *const table = p->rope.cos_sin;
    return p->table_type == SMLA_FLOAT_BF16 ? smla_bf16_to_float(((const uint16_t *)table)[at])
                                            : ((const float *)table)[at];
}

static void
load_chunk(const smla_apply_rope_params *p, int64_t token, int64_t first, pair_chunk *chunk)
{
    const int64_t at = read_position(&p->rope, token) * p->rope.cos_sin_stride_pos + first;
    const int64_t left = p->num_pairs - first;
    chunk->first = first;
    chunk->count = left < CHUNK_PAIRS ? left : CHUNK_PAIRS;
    for (int64_t i = 0; i < chunk->count; i++) {
        const float sin = read_angle(p, at + p->num_pairs + i);
        chunk->cos[i] = read_angle(p, at + i);
        chunk->sin[i] = p->is_inverse ? -sin : sin;
    }
    for (int64_t i = chunk->count; i % DUO != 0; i++) {
        chunk->cos[i] = chunk->sin[i] = 0;
    }
}

/* ---- Heads --------------------------------------------------------------------------------- */

/* Loads a duo of which `count` values exist. */
SMLA_INLINE duo
load_values(const void *x, smla_float_type type, int64_t at, int64_t count)
{
    const uint8_t *const from = element_at(x, type, at);
    return count == DUO ? load_duo(from, type) : load_part_of_duo(from, type, count);
}

SMLA_INLINE void
store_values(duo x, smla_float_type type, void *out, int64_t at, int64_t count)
{
    uint8_t *const to = (uint8_t *)out + at * element_bytes(type);
    if (count == DUO) {
        store_duo(x, type, to);
    } else {
        store_part_of_duo(x, type, count, to);
    }
}

/* Pairs of neighbours from number i of the chunk on: `count` values. */
SMLA_INLINE void
rotate_neighbours_at(const void *x, void *out, smla_float_type type, const pair_chunk *chunk,
                     int64_t i, int64_t count)
{
    const int64_t at = 2 * (chunk->first + i);
    const duo rotated =
        rotate_pairs(load_values(x, type, at, count), (vfloat)load_words(chunk->cos + i, 0),
                     (vfloat)load_words(chunk->sin + i, 0));
    store_values(rotated, type, out, at, count);
}

/* Pairs of neighbours, in place or not. */
SMLA_INLINE void
rotate_neighbours(const void *x, void *out, smla_float_type type, const pair_chunk *chunk)
{
    int64_t i = 0;
    for (; i + WIDTH <= chunk->count; i += WIDTH) {
        rotate_neighbours_at(x, out, type, chunk, i, DUO);
    }
    if (i < chunk->count) {
        rotate_neighbours_at(x, out, type, chunk, i, 2 * (chunk->count - i));
    }
}

/* `count` pairs of a head's halves, from number i of the chunk on. */
SMLA_INLINE void
rotate_halves_at(const void *x, void *out, smla_float_type type, int64_t half,
                 const pair_chunk *chunk, int64_t i, int64_t count)
{
    const int64_t at = chunk->first + i;
    const duo cos = load_float_duo(chunk->cos + i);
    const duo sin = load_float_duo(chunk->sin + i);
    const duo a = load_values(x, type, at, count);
    const duo b = load_values(x, type, half + at, count);
    const duo even = rotate_pairs((duo){a.even, b.even}, cos.even, sin.even);
    const duo odd = rotate_pairs((duo){a.odd, b.odd}, cos.odd, sin.odd);
    store_values((duo){even.even, odd.even}, type, out, at, count);
    store_values((duo){even.odd, odd.odd}, type, out, half + at, count);
}

/* Pairs of a head's halves, of which the second begins `half` values behind the first. */
SMLA_INLINE void
rotate_halves(const void *x, void *out, smla_float_type type, int64_t half, const pair_chunk *chunk)
{
    int64_t i = 0;
    for (; i + DUO <= chunk->count; i += DUO) {
        rotate_halves_at(x, out, type, half, chunk, i, DUO);
    }
    if (i < chunk->count) {
        rotate_halves_at(x, out, type, half, chunk, i, chunk->count - i);
    }
}

SMLA_INLINE void
rotate_chunk(const smla_apply_rope_params *p, smla_float_type type, const smla_rope_heads *heads,
             int64_t token, int64_t head, const pair_chunk *chunk)
{
    const int64_t at = token * heads->stride_token + head * heads->stride_head;
    const int64_t out_at = token * heads->out_stride_token + head * heads->out_stride_head;
    const void *const x = element_at(heads->x, type, at);
    void *const out = (uint8_t *)heads->out + out_at * element_bytes(type);
    if (p->is_neox) {
        rotate_halves(x, out, type, p->num_pairs, chunk);
    } else {
        rotate_neighbours(x, out, type, chunk);
    }
}

/* Rotates heads `begin` to `end` - 1 of a token. The key is the head behind the queries. */
static void
rotate_heads(const smla_apply_rope_params *p, int64_t token, int64_t begin, int64_t end)
{
    pair_chunk chunk;
    for (int64_t first = 0; first < p->num_pairs; first += CHUNK_PAIRS) {
        load_chunk(p, token, first, &chunk);
        for (int64_t h = begin; h < end; h++) {
            const smla_rope_heads *const heads = h < p->q.num_heads ? &p->q : &p->k;
            if (p->type == SMLA_FLOAT_BF16) {
                rotate_chunk(p, SMLA_FLOAT_BF16, heads, token, h, &chunk);
            } else {
                rotate_chunk(p, SMLA_FLOAT_FP32, heads, token, h, &chunk);
            }
        }
    }
}

static void
rotate_tokens(const smla_apply_rope_params *p)
{
    const int64_t num_heads = p->q.num_heads + p->k.num_heads;
    const int64_t token_blocks = (num_heads + BLOCK_HEADS - 1) / BLOCK_HEADS;
    const int64_t num_blocks = p->num_tokens * token_blocks;
#pragma omp parallel for schedule(static) if (num_blocks >= PARALLEL_BLOCKS)
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t begin = block % token_blocks * BLOCK_HEADS;
        const int64_t left = num_heads - begin;
        rotate_heads(p, block / token_blocks, begin,
                     begin + (left < BLOCK_HEADS ? left : BLOCK_HEADS));
    }
}

smla_status
smla_cpu_apply_rope(const smla_apply_rope_params *p, smla_error *error)
{
    SMLA_TRY(smla_cpu_check_positions("apply_rope", &p->rope, p->num_tokens, error));
    rotate_tokens(p);
    return SMLA_OK;
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* Rotates the keys of one share, and writes them in order. */
static void
insert_share(const smla_cache_isa *cache, const smla_rope_and_cache_params *p, int share,
             slot_shares shares)
{
    const smla_cache_write_params *const insert = &p->insert;
    float k_pe[SMLA_QK_ROPE_HEAD_DIM]; /* one key, of fp32 or of bf16 */
    smla_apply_rope_params rotate = p->queries;
    rotate.q.num_heads = 0;
    rotate.k = (smla_rope_heads){.x = insert->k_pe,
                                 .out = k_pe,
                                 .num_heads = 1,
                                 .stride_token = insert->k_pe_stride_token};
    const token_range range = range_of_share(insert, share, shares);
    for (int64_t token = range.first; token < range.end; token++) {
        const int64_t slot = read_slot(insert, token);
        if (is_in_share(slot, share, shares)) {
            rotate_heads(&rotate, token, 0, 1);
            cache->write_row(insert->kv.format, insert->input_type, insert->kv_c,
                             token * insert->kv_c_stride_token, k_pe, 0,
                             smla_read_scale(&insert->kv_scale), smla_kv_slot(&insert->kv, slot));
        }
    }
}

smla_status
smla_cpu_rope_and_cache_mla(const smla_rope_and_cache_params *p, smla_error *error)
{
    const smla_apply_rope_params *const queries = &p->queries;
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    SMLA_TRY(smla_cpu_check_positions(p->call.op, &queries->rope, queries->num_tokens, error));
    SMLA_TRY(smla_cpu_check_cache_write(&p->insert, error));
    rotate_tokens(queries);
    const slot_shares shares = smla_cpu_divide_tokens(&p->insert);
#pragma omp parallel for schedule(static) if (shares.count > 1)
    for (int share = 0; share < shares.count; share++) {
        insert_share(isa->cache, p, share, shares);
    }
    return SMLA_OK;
}
