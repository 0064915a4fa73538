/* varlen_rows.cuh: how rows of queries, keys and values arrive in shared memory. Each thread copies
 * the same chunk of every segment, of the rows that are COPY_ROWS apart. Dims beyond the array's,
 * and rows beyond the request's, become zeros. Rows of e4m3 become bf16 or fp16, exactly.
 */
#pragma once

#include "cuda/ptx/numeric.cuh"
#include "cuda/varlen/varlen_tiles.cuh"

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

/* A thread's chunk in a segment of an array, as far as it does not depend on the row. */
struct varlen_column {
    const uint8_t *from; /* the chunk in token 0 of head 0 */
    int64_t token_bytes;
    int64_t head_bytes;
    bool exists;
};

__device__ __forceinline__ varlen_column
find_column(const varlen_source &source, int segment)
{
    const int dim = segment * SEGMENT + (int)threadIdx.x % SEGMENT_CHUNKS * CHUNK;
    const bool is_second = dim >= source.first_dim;
    const int part_dim = is_second ? dim - source.first_dim : dim;
    return varlen_column{(is_second ? source.data[1] : source.data[0]) +
                             part_dim * source.element_bytes,
                         is_second ? source.token_bytes[1] : source.token_bytes[0],
                         is_second ? source.head_bytes[1] : source.head_bytes[0], dim < source.dim};
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
bring_queries(const varlen_args &args, const varlen_tile &tile, uint32_t to)
{
    const varlen_source &source = args.q;
    to += find_place();
#pragma unroll 1
    for (int i = 0; i < Shape::ROWS / COPY_ROWS; i++) {
        const int row = i * COPY_ROWS + (int)threadIdx.x / SEGMENT_CHUNKS;
        const bool is_row = row < tile.num_rows;
        const varlen_row place = find_row(args, tile, is_row ? row : 0);
        const int64_t token = tile.request.first_query + place.query;
#pragma unroll
        for (int segment = 0; segment < Shape::D / SEGMENT; segment++) {
            const varlen_column column = find_column(source, segment);
            const uint8_t *const from =
                column.from + token * column.token_bytes + place.head * column.head_bytes;
            const uint32_t chunk = to + (segment * Shape::ROWS + i * COPY_ROWS) * SEGMENT_BYTES;
            if (source.copy == COPY_CHUNKS) {
                ptx_cp_async_16_or_zero(chunk, from, is_row && column.exists);
            } else {
                bring_chunk<HALF>(chunk, from, source.copy, is_row && column.exists);
            }
        }
    }
}

/* Brings a block of keys or values whose first row belongs to `token`. The first num_rows rows
 * exist. */
template <int DIMS, int ROWS, bool HALF>
__device__ __forceinline__ void
bring_block(const varlen_source &source, int64_t token, int64_t kv_head, uint32_t num_rows,
            uint32_t to)
{
    const uint32_t first_row = threadIdx.x / SEGMENT_CHUNKS;
    to += find_place();
    if (__builtin_expect(source.copy == COPY_CHUNKS, true)) {
#pragma unroll
        for (int segment = 0; segment < DIMS / SEGMENT; segment++) {
            const varlen_column column = find_column(source, segment);
            const uint8_t *from = column.from + (token + first_row) * column.token_bytes +
                                  kv_head * column.head_bytes;
#pragma unroll
            for (int i = 0; i < ROWS / COPY_ROWS; i++) {
                const uint32_t row = i * COPY_ROWS + first_row;
                ptx_cp_async_16_or_zero(to + (segment * ROWS + i * COPY_ROWS) * SEGMENT_BYTES, from,
                                        row < num_rows && column.exists);
                from += COPY_ROWS * column.token_bytes;
            }
        }
        return;
    }
#pragma unroll 1
    for (int segment = 0; segment < DIMS / SEGMENT; segment++) {
        const varlen_column column = find_column(source, segment);
        const uint8_t *from =
            column.from + (token + first_row) * column.token_bytes + kv_head * column.head_bytes;
#pragma unroll 2
        for (int i = 0; i < ROWS / COPY_ROWS; i++) {
            const uint32_t row = i * COPY_ROWS + first_row;
            bring_chunk<HALF>(to + (segment * ROWS + i * COPY_ROWS) * SEGMENT_BYTES, from,
                              source.copy, row < num_rows && column.exists);
            from += COPY_ROWS * column.token_bytes;
        }
    }
}
