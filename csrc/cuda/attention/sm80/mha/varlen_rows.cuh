/* varlen_rows.cuh: how rows of queries, keys and values arrive in shared memory. Each thread copies
 * the same chunk of every segment, of the rows that are COPY_ROWS apart. Dims beyond the array's,
 * and rows beyond the request's, become zeros. Rows of e4m3 become bf16 or fp16, exactly.
 */
#pragma once

#include "cuda/attention/sm80/mha/varlen_tiles.cuh"
#include "cuda/ptx/numeric.cuh"

/* Two values as bf16, or as fp16 if HALF. */
template <bool HALF>
__device__ __forceinline__ uint32_t
pack_pair(float low, float high)
{
    return HALF ? ptx_cvt_f16x2(low, high) : smla_cvt_bf16x2(low, high);
}

/* ---- Chunks -------------------------------------------------------------------------------- */

/* Loads the chunk at `from` through registers. */
template <bool HALF>
__device__ __forceinline__ void
load_chunk(const uint8_t *from, varlen_copy copy, uint32_t words[CHUNK / 2])
{
    if (copy == COPY_ELEMENTS) {
        smla_load_words<CHUNK * 2, false>(from, words);
        return;
    }
    uint32_t bytes[CHUNK / 4] = {};
    if (copy == WIDEN_CHUNKS) {
        smla_load_words<CHUNK, true>(from, bytes);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            bytes[i / 4] |= (uint32_t)__ldg(from + i) << 8 * (i % 4);
        }
    }
#pragma unroll
    for (int i = 0; i < CHUNK / 4; i++) {
        uint32_t halves[2];
        smla_widen_e4m3x4(bytes[i], halves);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float low = smla_cvt_float((uint16_t)halves[k]) * SMLA_E4M3_UNIT;
            const float high = smla_cvt_float((uint16_t)(halves[k] >> 16)) * SMLA_E4M3_UNIT;
            words[2 * i + k] = pack_pair<HALF>(low, high);
        }
    }
}

/* Brings a chunk to shared memory, or zeros unless `is_on`. */
template <bool HALF>
__device__ __forceinline__ void
bring_chunk(uint32_t to, const uint8_t *from, varlen_copy copy, bool is_on)
{
    uint32_t words[CHUNK / 2] = {};
    if (is_on) {
        load_chunk<HALF>(from, copy, words);
    }
    ptx_store_shared_16(to, words);
}

/* The first dim of the thread's chunk of a segment. */
__device__ __forceinline__ int
find_dim(int segment)
{
    return segment * SEGMENT + (int)threadIdx.x % SEGMENT_CHUNKS * CHUNK;
}

/* The offset of the thread's chunk in the first row that it copies. Rows that are COPY_ROWS apart
 * have the same swizzle. */
__device__ __forceinline__ uint32_t
find_place(void)
{
    const uint32_t row = threadIdx.x / SEGMENT_CHUNKS;
    return row * SEGMENT_BYTES + ((threadIdx.x % SEGMENT_CHUNKS ^ row % 8) * CHUNK * 2);
}

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Brings a tile's query rows. */
template <typename Shape, bool HALF>
__device__ __forceinline__ void
bring_queries(const varlen_source &source, const varlen_args &args, const varlen_tile &tile,
              uint32_t to)
{
    to += find_place();
#pragma unroll 1
    for (int i = 0; i < Shape::ROWS / COPY_ROWS; i++) {
        const int row = i * COPY_ROWS + (int)threadIdx.x / SEGMENT_CHUNKS;
        const bool is_row = row < tile.num_rows;
        const varlen_row place = find_row(args, tile, is_row ? row : 0);
        const int64_t token = tile.request.first_query + place.query;
#pragma unroll
        for (int segment = 0; segment < Shape::D / SEGMENT; segment++) {
            const int dim = find_dim(segment);
            const int part = dim >= source.first_dim;
            const int part_dim = part == 0 ? dim : dim - source.first_dim;
            const bool is_on = is_row && dim < source.dim;
            const uint8_t *const from = source.data[part] + token * source.token_bytes[part] +
                                        place.head * source.head_bytes[part] +
                                        part_dim * source.element_bytes;
            const uint32_t chunk = to + (segment * Shape::ROWS + i * COPY_ROWS) * SEGMENT_BYTES;
            if (source.copy == COPY_CHUNKS) {
                ptx_cp_async_16_or_zero(chunk, from, is_on);
            } else {
                bring_chunk<HALF>(chunk, from, source.copy, is_on);
            }
        }
    }
}

/* Part `part` of what a tile reads. */
template <bool PAGED>
__device__ __forceinline__ varlen_part
find_part(const varlen_source &source, int part, const varlen_tile &tile)
{
    const int64_t first = PAGED ? 0 : tile.request.first_key * source.token_bytes[part];
    return varlen_part{source.data[part] + first + tile.kv_head * source.head_bytes[part],
                       source.token_bytes[part]};
}

/* A thread's chunk of a segment, in row 0. */
struct varlen_column {
    const uint8_t *from;
    int64_t token_bytes;
    bool exists;
};

__device__ __forceinline__ varlen_column
find_column(const varlen_source &source, const varlen_part *parts, int segment)
{
    const int dim = find_dim(segment);
    const bool is_second = dim >= source.first_dim;
    const varlen_part part = parts[is_second];
    const int part_dim = is_second ? dim - source.first_dim : dim;
    return varlen_column{part.from + part_dim * source.element_bytes, part.token_bytes,
                         dim < source.dim};
}

/* Brings a block of keys or values, from key `first` of the request on. Keys from `end` on become
 * zeros. */
template <int DIMS, int KEYS, bool HALF>
__device__ __forceinline__ void
bring_block(const varlen_source &source, const varlen_part *parts, uint32_t first, uint32_t end,
            uint32_t to)
{
    const uint32_t own = first + threadIdx.x / SEGMENT_CHUNKS;
    to += find_place();
    if (__builtin_expect(source.copy == COPY_CHUNKS, true)) {
#pragma unroll
        for (int segment = 0; segment < DIMS / SEGMENT; segment++) {
            const varlen_column column = find_column(source, parts, segment);
            const uint8_t *from = column.from + own * column.token_bytes;
#pragma unroll
            for (int i = 0; i < KEYS / COPY_ROWS; i++) {
                ptx_cp_async_16_or_zero(to + (segment * KEYS + i * COPY_ROWS) * SEGMENT_BYTES, from,
                                        own + i * COPY_ROWS < end && column.exists);
                from += COPY_ROWS * column.token_bytes;
            }
        }
        return;
    }
#pragma unroll 1
    for (int segment = 0; segment < DIMS / SEGMENT; segment++) {
        const varlen_column column = find_column(source, parts, segment);
        const uint8_t *from = column.from + own * column.token_bytes;
#pragma unroll 2
        for (int i = 0; i < KEYS / COPY_ROWS; i++) {
            bring_chunk<HALF>(to + (segment * KEYS + i * COPY_ROWS) * SEGMENT_BYTES, from,
                              source.copy, own + i * COPY_ROWS < end && column.exists);
            from += COPY_ROWS * column.token_bytes;
        }
    }
}

/* ---- Rows in pages ------------------------------------------------------------------------- */

/* bring_block of keys that lie in pages: of those in `seen`, whose entries are in shared memory.
 * Key `first` is at `position` of the request. `array` is the first one of the source's arrays. */
template <int DIMS, int KEYS, bool HALF>
__device__ __forceinline__ void
bring_pages(const varlen_source &source, const varlen_part *parts, const kv_pages &pages, int array,
            const int32_t *entries, uint32_t position, uint32_t first, const varlen_limits &seen,
            uint32_t to)
{
    to += find_place();
#pragma unroll 1
    for (uint32_t i = 0; i < KEYS / COPY_ROWS; i++) {
        const uint32_t number = i * COPY_ROWS + threadIdx.x / SEGMENT_CHUNKS;
        const uint32_t key = first + number;
        const kv_place place = find_place(pages, entries[number], position + number);
        const bool is_on = key >= seen.begin && key < seen.end && place.page >= 0;
#pragma unroll
        for (int segment = 0; segment < DIMS / SEGMENT; segment++) {
            const varlen_column column = find_column(source, parts, segment);
            const int64_t page_bytes =
                pages.page_bytes[array + (find_dim(segment) >= source.first_dim)];
            const uint8_t *const from =
                column.from + place.page * page_bytes + place.token * column.token_bytes;
            const uint32_t chunk = to + (segment * KEYS + i * COPY_ROWS) * SEGMENT_BYTES;
            if (source.copy == COPY_CHUNKS) {
                ptx_cp_async_16_or_zero(chunk, from, is_on && column.exists);
            } else {
                bring_chunk<HALF>(chunk, from, source.copy, is_on && column.exists);
            }
        }
    }
}
