/* key_rows.cuh: how a CTA of attention_sm80.cu loads its keys: from columns (key_source.cuh) to
 * cache rows in registers, and from there to bf16 in shared memory.
 *
 * A block is SMLA_SM80_KEYS columns of one list, and each warp has 4 neighbouring columns of it. A
 * warp reads the indices of 8 blocks, a window, at once, and turns them into row addresses: lane l
 * has the warp's column l % 4 of the window's block l / 4. Indices are read one window ahead of the
 * cache rows, and rows are loaded into registers one block ahead of the products. A masked key (its
 * index is negative, past the last slot, outside the list's range or without a page) has no cache
 * row: nothing is read for it, zeros are stored as its row, and is_key tells the softmax.
 *
 * e4m3 goes to shared memory as bf16, exactly, without its scale. NaN stays NaN.
 */
#pragma once

#include "core/numeric.h"
#include "cuda/attention/keys/key_source.cuh"

enum {
    KEYS = SMLA_SM80_KEYS,
    CHUNK_BLOCKS = CHUNK_COLUMNS / KEYS,
    CTA_WARPS = 8,
    WARP_KEYS = KEYS / CTA_WARPS,
    WINDOW = SMLA_WARP_LANES / WARP_KEYS, /* blocks whose indices a warp reads at once */
    NOPE_CHUNKS = SMLA_KV_LORA_RANK / 8,  /* 16-byte chunks of a bf16 row's NoPE part */
    ROPE_CHUNKS = SMLA_QK_ROPE_HEAD_DIM / 8,
};

static_assert(NOPE_CHUNKS == 2 * SMLA_WARP_LANES, "a warp reads a row's NoPE part in two halves");
static_assert(WARP_KEYS * ROPE_CHUNKS == SMLA_WARP_LANES, "one RoPE chunk per lane");
static_assert(WARP_KEYS * SMLA_NUM_SCALE_TILES + WARP_KEYS <= SMLA_WARP_LANES,
              "one scale or mask per lane");

/* ---- Swizzle ------------------------------------------------------------------------------- */

/* The address of a chunk of a bf16 row in shared memory. Rows are 1152 bytes apart, a multiple of
 * 128, so chunk c of all rows would fall on the same banks. Therefore it lies at c ^ row % 8. Then
 * chunk c of eight rows is on all 32 banks, and so are eight neighbouring chunks of a row. */
static __device__ __forceinline__ uint4 *
chunk_of(uint16_t (*rows)[SMLA_HEAD_DIM], int row, int chunk)
{
    return (uint4 *)rows[row] + (chunk ^ (row & 7));
}

/* ---- Indices ------------------------------------------------------------------------------- */

/* The blocks of an item: first those of the main list, then those of the extra list. */
typedef struct block_plan {
    int32_t num_main;
    int32_t num_blocks;
} block_plan;

/* The number of blocks of a list; the last ones may be empty. */
static __device__ __forceinline__ int32_t
count_blocks(const attention_launch &launch, column_range columns)
{
    const int32_t span = columns.end - columns.begin;
    if (launch.column_stride == CHUNK_COLUMNS) {
        return (span + KEYS - 1) / KEYS;
    }
    const uint32_t chunks = (uint32_t)(span + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
    return CHUNK_BLOCKS * (int32_t)smla_divide_uint32(chunks + launch.params.results.num_splits - 1,
                                                      launch.num_splits);
}

template <typename Tile>
static __device__ __forceinline__ block_plan
plan_blocks(const attention_launch &launch, const work_item &item)
{
    block_plan plan;
    plan.num_main =
        count_blocks(launch,
                     find_columns<Tile::RANGED, Tile::HAS_WHOLE, Tile::TILED>(launch, item, 0));
    plan.num_blocks = plan.num_main;
    if (launch.params.keys.num_lists == 2) {
        plan.num_blocks +=
            count_blocks(launch,
                         find_columns<Tile::RANGED, Tile::HAS_WHOLE, Tile::TILED>(launch, item, 1));
    }
    return plan;
}

static __device__ __forceinline__ int
list_of(const block_plan &plan, int32_t block)
{
    return block < plan.num_main ? 0 : 1;
}

/* The block that the lane's index in a window belongs to. */
static __device__ __forceinline__ int32_t
block_of_lane(int32_t window, int thread)
{
    return window * WINDOW + thread % SMLA_WARP_LANES / WARP_KEYS;
}

/* Reads the lane's index in a window. Returns -1 behind the last column of a list. */
template <typename Tile>
static __device__ __forceinline__ int32_t
read_index(const attention_launch &launch, const work_item &item, const block_plan &plan,
           int32_t window, int thread)
{
    const int32_t block = block_of_lane(window, thread);
    if (block >= plan.num_blocks) {
        return -1;
    }
    const int list = list_of(plan, block);
    const smla_key_list &keys = launch.params.keys.lists[list];
    const column_range columns =
        find_columns<Tile::RANGED, Tile::HAS_WHOLE, Tile::TILED>(launch, item, list);
    const int32_t number = block - list * plan.num_main;
    const int32_t column = columns.begin + number / CHUNK_BLOCKS * launch.column_stride +
                           number % CHUNK_BLOCKS * KEYS + thread / SMLA_WARP_LANES * WARP_KEYS +
                           thread % WARP_KEYS;
    return column < columns.end ? read_column<Tile::RANGED>(keys, item.token, column) : -1;
}

/* The slot that the lane's index in a window names; negative if it names none. */
template <bool RANGED>
static __device__ __forceinline__ int32_t
find_slot(const attention_launch &launch, const work_item &item, const block_plan &plan,
          int32_t window, int thread, int32_t index)
{
    const int list = list_of(plan, block_of_lane(window, thread));
    return RANGED && smla_is_table(&launch.params.keys)
               ? slot_of_position(launch, item.token, index)
               : slot_of_index(launch, list, item.token, index);
}

/* The cache row of the lane's slot in a window; NULL for a negative slot. */
static __device__ __forceinline__ const uint8_t *
find_row(const attention_launch &launch, const block_plan &plan, int32_t window, int thread,
         int32_t slot)
{
    return row_of_slot(launch, list_of(plan, block_of_lane(window, thread)), slot);
}

/* ---- Rows ---------------------------------------------------------------------------------- */

/* What a lane holds of its warp's four cache rows, as they are in memory. Of every key it has
 * chunks lane and 32 + lane of the NoPE part. Of key lane / 8 it has chunk lane % 8 of the RoPE
 * part. Lanes below 16 also have scale lane % 4 of key lane / 4; the others know whether key lane %
 * 4 exists. */
template <int FORMATS> struct raw_rows {
    uint32_t nope[WARP_KEYS][2][FORMATS == SMLA_ROWS_FP8 ? 2 : 4];
    uint32_t rope[4];
    uint32_t scale_or_mask;
};

static __device__ __forceinline__ const uint8_t *
row_of_lane(const uint8_t *row, int lane)
{
    return (const uint8_t *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)row, lane);
}

static __device__ __forceinline__ bool
has_scale(int lane)
{
    return lane < WARP_KEYS * SMLA_NUM_SCALE_TILES;
}

/* The cache row from which the lane takes a scale or a mask. */
static __device__ __forceinline__ const uint8_t *
row_of_scale(const uint8_t *row, int first_lane, int lane)
{
    const int key = has_scale(lane) ? lane / SMLA_NUM_SCALE_TILES : lane % WARP_KEYS;
    return row_of_lane(row, first_lane + key);
}

template <bool ALIGNED>
static __device__ __forceinline__ void
load_chunk(const uint8_t *from, bool is_on, uint32_t words[4])
{
    if constexpr (ALIGNED) {
        ptx_load_16(from, is_on, words);
        return;
    }
    words[0] = words[1] = words[2] = words[3] = 0;
    if (is_on) {
        smla_load_words<16, false>(from, words);
    }
}

/* Loads FP8 rows. Lanes first_lane to first_lane + 3 have the addresses of the warp's cache rows in
 * `row`. */
template <int FORMATS>
static __device__ __forceinline__ void
load_fp8_rows(const list_facts &facts, const uint8_t *row, int first_lane, int lane,
              raw_rows<FORMATS> *raw)
{
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i++) {
        const uint8_t *const from = row_of_lane(row, first_lane + i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int chunk = SMLA_WARP_LANES * half + lane;
            ptx_load_8(from + 8 * chunk, from != NULL, raw->nope[i][half]);
        }
    }
    const uint8_t *const rope = row_of_lane(row, first_lane + lane / ROPE_CHUNKS);
    ptx_load_16(rope + facts.rope_offset + 16 * (lane % ROPE_CHUNKS), rope != NULL, raw->rope);
    const uint8_t *const scale = row_of_scale(row, first_lane, lane);
    ptx_load_4(scale + facts.scale_offset + 4 * (lane % SMLA_NUM_SCALE_TILES),
               scale != NULL && has_scale(lane), !has_scale(lane) && scale != NULL,
               &raw->scale_or_mask);
}

template <int FORMATS, bool ALIGNED>
static __device__ __forceinline__ void
load_bf16_rows(const list_facts &facts, const uint8_t *row, int first_lane, int lane,
               raw_rows<FORMATS> *raw)
{
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i++) {
        const uint8_t *const from = row_of_lane(row, first_lane + i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int chunk = SMLA_WARP_LANES * half + lane;
            load_chunk<ALIGNED>(from + 16 * chunk, from != NULL, raw->nope[i][half]);
        }
    }
    if constexpr (smla_rows<FORMATS>::HAVE_ROPE) {
        const uint8_t *const rope = row_of_lane(row, first_lane + lane / ROPE_CHUNKS);
        load_chunk<ALIGNED>(rope + facts.rope_offset + 16 * (lane % ROPE_CHUNKS), rope != NULL,
                            raw->rope);
    }
    const bool is_key = row_of_scale(row, first_lane, lane) != NULL;
    /* the scale is 1.0f, also for masked keys: their zeros stay zeros */
    raw->scale_or_mask = has_scale(lane) ? 0x3F800000u : is_key;
}

static __device__ __forceinline__ bool
is_fp8_list(const attention_launch &launch, int formats, int list)
{
    return formats == SMLA_ROWS_FP8 || (formats == SMLA_ROWS_MIXED && launch.lists[list].is_fp8);
}

/* Starts to load a block's cache rows. `row` is the lane's own cache row in the block's window. All
 * threads of the CTA take the same branches. */
template <int FORMATS>
static __device__ __forceinline__ void
load_rows(const attention_launch &launch, const block_plan &plan, int32_t block, const uint8_t *row,
          int thread, raw_rows<FORMATS> *raw)
{
    if (block >= plan.num_blocks) {
        return;
    }
    const int lane = thread % SMLA_WARP_LANES;
    const int first_lane = block % WINDOW * WARP_KEYS;
    const int list = FORMATS == SMLA_ROWS_MIXED ? list_of(plan, block) : 0;
    const list_facts &facts = launch.lists[list];
    if (is_fp8_list(launch, FORMATS, list)) {
        load_fp8_rows<FORMATS>(facts, row, first_lane, lane, raw);
    } else if constexpr (FORMATS != SMLA_ROWS_FP8) {
        if (launch.lists[list_of(plan, block)].is_aligned) {
            load_bf16_rows<FORMATS, true>(facts, row, first_lane, lane, raw);
        } else {
            load_bf16_rows<FORMATS, false>(facts, row, first_lane, lane, raw);
        }
    }
}

/* ---- e4m3 to bf16 -------------------------------------------------------------------------- */

/* Widens two e4m3, in bytes 0 and 2, to bf16. An e4m3's bits are put at the end of bf16's exponent
 * and the start of its mantissa, which makes the value 2^120 times too small, subnormal or not. The
 * product with 2^120 is exact; adding -0 keeps a zero's sign. NaN becomes 480, a number that e4m3
 * does not have. */
static __device__ __forceinline__ uint32_t
widen_e4m3x2(uint32_t bytes)
{
    const uint32_t signs = bytes & 0x00800080u;
    const uint32_t tiny = bytes * 16 + signs * 240; /* moves the sign on from bit 11 to bit 15 */
    return ptx_fma_bf16x2(tiny, 0x7B807B80u, 0x80008000u);
}

static __device__ __forceinline__ uint4
widen_e4m3x8(const uint32_t bytes[2])
{
    return make_uint4(widen_e4m3x2(__byte_perm(bytes[0], 0, 0x4140)),
                      widen_e4m3x2(__byte_perm(bytes[0], 0, 0x4342)),
                      widen_e4m3x2(__byte_perm(bytes[1], 0, 0x4140)),
                      widen_e4m3x2(__byte_perm(bytes[1], 0, 0x4342)));
}

/* Returns a number other than 0 if one of eight e4m3 is NaN: 0x7F or 0xFF. */
static __device__ __forceinline__ uint32_t
find_e4m3_nans(const uint32_t bytes[2])
{
    const uint32_t sum_0 = (bytes[0] & 0x7F7F7F7Fu) + 0x01010101u;
    const uint32_t sum_1 = (bytes[1] & 0x7F7F7F7Fu) + 0x01010101u;
    return (sum_0 | sum_1) & 0x80808080u;
}

/* Turns 480 into NaN, in two bf16. */
static __device__ __forceinline__ uint32_t
restore_nans(uint32_t pair)
{
    const uint32_t low = (pair & 0x00007FFFu) == 0x000043F0u ? 0x00007FC0u : 0;
    const uint32_t high = (pair & 0x7FFF0000u) == 0x43F00000u ? 0x7FC00000u : 0;
    return pair | low | high;
}

static __device__ __forceinline__ uint4
restore_chunk(uint4 chunk)
{
    return make_uint4(restore_nans(chunk.x), restore_nans(chunk.y), restore_nans(chunk.z),
                      restore_nans(chunk.w));
}

/* ---- Storing ------------------------------------------------------------------------------- */

/* Stores the NoPE parts of the warp's four FP8 rows. */
template <int FORMATS>
static __device__ __forceinline__ void
store_fp8_nope(const raw_rows<FORMATS> &raw, uint16_t (*keys)[SMLA_HEAD_DIM], int first_key,
               int lane)
{
    uint32_t nans = 0;
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            nans |= find_e4m3_nans(raw.nope[i][half]);
            *chunk_of(keys, first_key + i, SMLA_WARP_LANES * half + lane) =
                widen_e4m3x8(raw.nope[i][half]);
        }
    }
    if (nans != 0) { /* rare: corrects the chunks that this thread has just stored */
#pragma unroll 1
        for (int i = 0; i < 2 * WARP_KEYS; i++) {
            uint4 *const chunk =
                chunk_of(keys, first_key + i / 2, SMLA_WARP_LANES * (i % 2) + lane);
            *chunk = restore_chunk(*chunk);
        }
    }
}

/* Stores the lane's scale or mask in shared memory. */
template <bool HAVE_SCALES>
static __device__ __forceinline__ void
store_scale_or_mask(uint32_t scale_or_mask, int first_key, int lane, float (*scales)[KEYS],
                    int32_t *is_key)
{
    if (HAVE_SCALES && has_scale(lane)) {
        scales[lane % SMLA_NUM_SCALE_TILES][first_key + lane / SMLA_NUM_SCALE_TILES] =
            smla_bits_float(scale_or_mask);
    }
    if (lane >= SMLA_WARP_LANES - WARP_KEYS) { /* the last four of the lanes with masks */
        is_key[first_key + lane % WARP_KEYS] = (int32_t)scale_or_mask;
    }
}

/* Stores the warp's rows, scales and masks in shared memory, where the CTA multiplies them. */
template <int FORMATS>
static __device__ __forceinline__ void
store_rows(const attention_launch &launch, int list, const raw_rows<FORMATS> &raw, int thread,
           uint16_t (*keys)[SMLA_HEAD_DIM], float (*scales)[KEYS], int32_t *is_key)
{
    const int lane = thread % SMLA_WARP_LANES;
    const int first_key = thread / SMLA_WARP_LANES * WARP_KEYS;
    if (is_fp8_list(launch, FORMATS, list)) {
        store_fp8_nope<FORMATS>(raw, keys, first_key, lane);
    } else if constexpr (FORMATS != SMLA_ROWS_FP8) {
#pragma unroll
        for (int i = 0; i < 2 * WARP_KEYS; i++) {
            const uint32_t *const words = raw.nope[i / 2][i % 2];
            *chunk_of(keys, first_key + i / 2, SMLA_WARP_LANES * (i % 2) + lane) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    if constexpr (smla_rows<FORMATS>::HAVE_ROPE) {
        *chunk_of(keys, first_key + lane / ROPE_CHUNKS, NOPE_CHUNKS + lane % ROPE_CHUNKS) =
            make_uint4(raw.rope[0], raw.rope[1], raw.rope[2], raw.rope[3]);
    }
    store_scale_or_mask<smla_rows<FORMATS>::HAVE_SCALES>(raw.scale_or_mask, first_key, lane, scales,
                                                         is_key);
}

/* Whether the lane has the mask of a key that exists. Each key's mask is in some lane. */
static __device__ __forceinline__ bool
sees_key(uint32_t scale_or_mask, int thread)
{
    return !has_scale(thread % SMLA_WARP_LANES) && scale_or_mask != 0;
}
