/* coded_rows.cuh: how a CTA of attention_sm80.cu loads keys of 512 or 576 values in any format,
 * which is known when the kernel runs: bf16, e4m3 and e2m1 codes, with scales of any kind.
 *
 * A chunk is eight values of a row. Codes whose scales are powers of two or e4m3 become bf16 with
 * their scales, which is exact unless values are subnormal. The other codes become bf16 without
 * their scales: one fp32 for 128 values, or one for the whole cache. Such a scale multiplies sums
 * of products and weights, as in rows of 656 bytes.
 */
#pragma once

#include "cuda/attention/keys/key_rows.cuh"

/* ---- A chunk ------------------------------------------------------------------------------- */

/* A chunk as it is in memory: 16, 8 or 4 bytes, and its scale where that is a byte. */
typedef struct coded_chunk {
    uint32_t words[4];
    uint32_t scale;
} coded_chunk;

/* Whether the chunk is bf16: in bf16 rows, and in the RoPE parts of fp8_v4 and fp8_ds_mla. */
static __device__ __forceinline__ bool
is_plain_chunk(const list_facts &facts, int chunk)
{
    return facts.nope_type == SMLA_NOPE_BF16 || chunk >= facts.nope_chunks;
}

/* Whether decode_chunk multiplies codes by their scales. */
static __device__ __forceinline__ bool
has_inner_scales(const list_facts &facts)
{
    return facts.scale_type == SMLA_SCALE_UE8M0 || facts.scale_type == SMLA_SCALE_E4M3;
}

/* Whether the RoPE values of a list are codes, which have the scale of their cache. */
static __device__ __forceinline__ bool
has_rope_codes(const list_facts &facts)
{
    return facts.scale_type == SMLA_SCALE_CACHE;
}

/* Loads a chunk without its scale. It is zeros if there is no row. */
static __device__ __forceinline__ coded_chunk
load_codes(const list_facts &facts, const uint8_t *row, int chunk)
{
    coded_chunk coded = {};
    if (row == NULL) {
        return coded;
    }
    if (is_plain_chunk(facts, chunk)) {
        const int first = facts.nope_type == SMLA_NOPE_BF16 ? 0 : facts.nope_chunks;
        const int offset = facts.nope_type == SMLA_NOPE_BF16 ? 0 : facts.rope_offset;
        const uint8_t *const from = row + offset + 16 * (chunk - first);
        if (facts.is_aligned) {
            smla_load_words<16, true>(from, coded.words);
        } else {
            smla_load_words<16, false>(from, coded.words);
        }
        return coded;
    }
    if (facts.nope_type == SMLA_NOPE_E4M3) {
        smla_load_words<8, true>(row + 8 * chunk, coded.words);
    } else {
        smla_load_words<4, true>(row + 4 * chunk, coded.words);
    }
    return coded;
}

static __device__ __forceinline__ coded_chunk
load_coded_chunk(const list_facts &facts, const smla_kv_token &key, int chunk)
{
    coded_chunk coded = load_codes(facts, key.row, chunk);
    if (key.row != NULL && has_inner_scales(facts) && !is_plain_chunk(facts, chunk)) {
        coded.scale = __ldg(key.scales + (chunk >> facts.scale_shift));
    }
    return coded;
}

/* Widens two e2m1, in bits 0 to 3 and 16 to 19, to bf16. A code's exponent and mantissa are put at
 * the border of bf16's exponent and mantissa. That is the value times 2^-126, subnormal or not, and
 * the product with 2^126 is exact. */
static __device__ __forceinline__ uint32_t
widen_e2m1x2(uint32_t codes)
{
    const uint32_t tiny = (codes & 0x00070007u) << 6 | (codes & 0x00080008u) << 12;
    return ptx_fma_bf16x2(tiny, 0x7E807E80u, 0x80008000u);
}

static __device__ __forceinline__ uint4
widen_e2m1x8(uint32_t codes)
{
    return make_uint4(widen_e2m1x2((codes & 0xFu) | (codes & 0xF0u) << 12),
                      widen_e2m1x2((codes >> 8 & 0xFu) | (codes >> 8 & 0xF0u) << 12),
                      widen_e2m1x2((codes >> 16 & 0xFu) | (codes >> 16 & 0xF0u) << 12),
                      widen_e2m1x2((codes >> 24 & 0xFu) | (codes >> 24 & 0xF0u) << 12));
}

/* The scale in both halves of a word, as bf16, which holds every UE8M0 and e4m3 value. */
static __device__ __forceinline__ uint32_t
widen_scale(const list_facts &facts, uint32_t scale)
{
    const float value = facts.scale_type == SMLA_SCALE_UE8M0 ? smla_ue8m0_to_float((uint8_t)scale)
                                                             : smla_e4m3_to_float((uint8_t)scale);
    const uint32_t half = smla_float_bits(value) >> 16;
    return half | half << 16;
}

/* Multiplies the values of a chunk with a scale of widen_scale's form. */
static __device__ __forceinline__ uint4
scale_chunk(const uint4 &values, uint32_t scale)
{
    return make_uint4(ptx_fma_bf16x2(values.x, scale, 0x80008000u),
                      ptx_fma_bf16x2(values.y, scale, 0x80008000u),
                      ptx_fma_bf16x2(values.z, scale, 0x80008000u),
                      ptx_fma_bf16x2(values.w, scale, 0x80008000u));
}

/* The values of a chunk in bf16, multiplied with their scale where has_inner_scales. */
static __device__ __forceinline__ uint4
decode_chunk(const list_facts &facts, int chunk, const coded_chunk &coded)
{
    if (is_plain_chunk(facts, chunk)) {
        return make_uint4(coded.words[0], coded.words[1], coded.words[2], coded.words[3]);
    }
    uint4 values;
    if (facts.nope_type == SMLA_NOPE_E4M3) {
        values = widen_e4m3x8(coded.words);
        if (find_e4m3_nans(coded.words) != 0) {
            values = restore_chunk(values);
        }
    } else {
        values = widen_e2m1x8(coded.words[0]);
    }
    if (has_inner_scales(facts)) {
        values = scale_chunk(values, widen_scale(facts, coded.scale));
    }
    return values;
}

/* The key's scale for scale tile `tile` of 128 values, divided by the unit of keys. It multiplies
 * the sums over that tile. */
static __device__ __forceinline__ float
load_tile_scale(const attention_launch &launch, const list_facts &facts, int list,
                const smla_kv_token &key, int tile)
{
    if (key.row == NULL) {
        return 1.0f;
    }
    const float scale = facts.scale_type == SMLA_SCALE_FP32
                            ? __ldg((const float *)key.scales + tile)
                        : facts.scale_type == SMLA_SCALE_CACHE
                            ? smla_load_given_scale(launch.key_scales.given[list])
                            : 1.0f;
    return launch.has_key_unit ? scale * smla_inverse_unit(find_key_unit(launch)) : scale;
}

/* ---- A block ------------------------------------------------------------------------------- */

/* What a lane holds of its warp's four keys: of every key chunks lane and 32 + lane. Its RoPE chunk
 * and its scale or mask are as in raw_rows. */
struct coded_rows {
    coded_chunk chunks[WARP_KEYS][2];
    coded_chunk rope;
    uint32_t scale_or_mask;
};

/* The chunk of the lane's RoPE values in a row. */
static __device__ __forceinline__ int
rope_chunk_of(int lane)
{
    return NOPE_CHUNKS + lane % ROPE_CHUNKS;
}

static __device__ __forceinline__ smla_kv_token
address_of_lane(const smla_kv_token &key, int lane)
{
    return smla_kv_token{(uint8_t *)row_of_lane(key.row, lane),
                         (uint8_t *)row_of_lane(key.scales, lane)};
}

/* The facts of a list. If a kernel serves one format, they are a copy that the compiler knows. */
template <int FORMATS>
static __device__ __forceinline__ decltype(auto)
find_facts(const attention_launch &launch, int list)
{
    if constexpr (FORMATS == SMLA_ROWS_E4M3_576) {
        list_facts facts = launch.lists[list];
        facts.nope_type = SMLA_NOPE_E4M3;
        facts.scale_type = SMLA_SCALE_CACHE;
        facts.nope_chunks = SMLA_HEAD_DIM / 8;
        return facts;
    } else {
        return (launch.lists[list]); /* the parentheses make it a reference */
    }
}

/* Starts to load a block's keys. `key` is the lane's own key in the block's window. */
template <int FORMATS>
static __device__ __forceinline__ void
load_coded_rows(const attention_launch &launch, int list, const smla_kv_token &key, int first_lane,
                int lane, coded_rows *rows)
{
    const list_facts &facts = find_facts<FORMATS>(launch, list);
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i++) {
        const smla_kv_token from = address_of_lane(key, first_lane + i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            rows->chunks[i][half] = load_coded_chunk(facts, from, SMLA_WARP_LANES * half + lane);
        }
    }
    if constexpr (smla_rows<FORMATS>::HAVE_ROPE) {
        rows->rope = load_coded_chunk(facts, address_of_lane(key, first_lane + lane / ROPE_CHUNKS),
                                      rope_chunk_of(lane));
    }
    const int scaled = has_scale(lane) ? lane / SMLA_NUM_SCALE_TILES : lane % WARP_KEYS;
    const smla_kv_token from = address_of_lane(key, first_lane + scaled);
    rows->scale_or_mask = has_scale(lane)
                              ? smla_float_bits(load_tile_scale(launch, facts, list, from,
                                                                lane % SMLA_NUM_SCALE_TILES))
                              : from.row != NULL;
}

/* The lane's RoPE chunk in bf16. Codes have the scale of their cache, as the key's other codes.
 * Other values have none, so they are divided here by the unit of keys, a power of two. */
static __device__ __forceinline__ uint4
decode_rope(const attention_launch &launch, const list_facts &facts, const coded_chunk &coded,
            int lane)
{
    uint4 values = decode_chunk(facts, rope_chunk_of(lane), coded);
    if (launch.has_key_unit && !has_rope_codes(facts)) {
        const uint32_t half = smla_float_bits(smla_inverse_unit(find_key_unit(launch))) >> 16;
        values = scale_chunk(values, half | half << 16);
    }
    return values;
}

/* Stores the values of the warp's keys in shared memory. */
template <int FORMATS>
static __device__ __forceinline__ void
store_coded_values(const attention_launch &launch, int list, const coded_rows &rows, int first_key,
                   int lane, uint16_t (*keys)[SMLA_HEAD_DIM])
{
    const list_facts &facts = find_facts<FORMATS>(launch, list);
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int chunk = SMLA_WARP_LANES * half + lane;
            *chunk_of(keys, first_key + i, chunk) =
                decode_chunk(facts, chunk, rows.chunks[i][half]);
        }
    }
    if constexpr (smla_rows<FORMATS>::HAVE_ROPE) {
        *chunk_of(keys, first_key + lane / ROPE_CHUNKS, rope_chunk_of(lane)) =
            decode_rope(launch, facts, rows.rope, lane);
    }
}

/* ---- Query --------------------------------------------------------------------------------- */

/* Eight e4m3 values at any address, in bf16. */
static __device__ __forceinline__ uint4
load_e4m3_query(const uint8_t *from)
{
    uint32_t bytes[2] = {};
    if ((uintptr_t)from % 8 == 0) {
        smla_load_words<8, true>(from, bytes);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            bytes[i / 4] |= (uint32_t)__ldg(from + i) << 8 * (i % 4);
        }
    }
    const uint4 values = widen_e4m3x8(bytes);
    return find_e4m3_nans(bytes) == 0 ? values : restore_chunk(values);
}

/* ---- Keys of any kernel -------------------------------------------------------------------- */

/* Whether a kernel for these formats loads its keys by this file. */
static constexpr bool
is_coded(int formats)
{
    return formats == SMLA_ROWS_512 || formats == SMLA_ROWS_ANY_576 ||
           formats == SMLA_ROWS_E4M3_576;
}

/* The types in which a kernel for these formats holds the address of a key and the rows of its
 * keys. */
template <int FORMATS, bool CODED_ = is_coded(FORMATS)> struct key_types {
    static constexpr bool CODED = false;
    typedef const uint8_t *address;
    typedef raw_rows<FORMATS> rows;
};

template <int FORMATS> struct key_types<FORMATS, true> {
    static constexpr bool CODED = true;
    typedef smla_kv_token address;
    typedef coded_rows rows;
};

/* The address of the key in the lane's slot in a window; there is no key for a negative slot. */
template <int FORMATS>
static __device__ __forceinline__ typename key_types<FORMATS>::address
find_key(const attention_launch &launch, const block_plan &plan, int32_t window, int thread,
         int32_t slot)
{
    if constexpr (key_types<FORMATS>::CODED) {
        return address_of_slot(launch, list_of(plan, block_of_lane(window, thread)), slot);
    } else {
        return find_row(launch, plan, window, thread, slot);
    }
}

/* Starts to load a block's keys. All threads of the CTA take the same branches. */
template <int FORMATS>
static __device__ __forceinline__ void
load_keys(const attention_launch &launch, const block_plan &plan, int32_t block,
          const typename key_types<FORMATS>::address &key, int thread,
          typename key_types<FORMATS>::rows *rows)
{
    if constexpr (key_types<FORMATS>::CODED) {
        if (block < plan.num_blocks) {
            load_coded_rows<FORMATS>(launch, list_of(plan, block), key, block % WINDOW * WARP_KEYS,
                                     thread % SMLA_WARP_LANES, rows);
        }
    } else {
        load_rows<FORMATS>(launch, plan, block, key, thread, rows);
    }
}

/* Stores the warp's keys, scales and masks in shared memory, where the CTA multiplies them. */
template <int FORMATS>
static __device__ __forceinline__ void
store_keys(const attention_launch &launch, int list, const typename key_types<FORMATS>::rows &rows,
           int thread, uint16_t (*keys)[SMLA_HEAD_DIM], float (*scales)[KEYS], int32_t *is_key)
{
    if constexpr (key_types<FORMATS>::CODED) {
        const int lane = thread % SMLA_WARP_LANES;
        const int first_key = thread / SMLA_WARP_LANES * WARP_KEYS;
        store_coded_values<FORMATS>(launch, list, rows, first_key, lane, keys);
        store_scale_or_mask<true>(rows.scale_or_mask, first_key, lane, scales, is_key);
    } else {
        store_rows<FORMATS>(launch, list, rows, thread, keys, scales, is_key);
    }
}
