/* cache_transfer.cu: copies rows from a cache to another one of the same format.
 *
 * Computes     row dst_slots[i] of dst = row src_slots[i] of src, byte for byte
 * Shapes       src, dst: caches of any one format, each with pages of its own size, in memory of
 *              the device or in pinned host memory; src_slots, dst_slots [N] int32 or int64, any
 *              stride
 * Shared mem   none
 * Roles        A warp copies 1 to 4 rows, whose words follow each other over the lanes, so that no
 *              lane waits for the end of a row. A word is 16 bytes where all rows of both caches
 *              are aligned so, else 8, 4 or 2; scales of split pages have words of 4. A lane loads
 *              up to 5 words before it stores them, and a warp takes as many rows as these hold: 3
 *              of 656 bytes, 2 of 1152, so 2 KiB are in flight per warp, which hides the latency
 *              of the link to the host, too. Lane i finds the addresses of row i. No barriers.
 * Roofline     Memory, or the link. Bytes per row of fp8_ds_mla: 656 + 656 and two slots. An
 *              H200 copies 262,144 of them in 101 us if they are neighbours, in 107 by pages of 64,
 *              in 127 one by one; a plain copy of the same bytes takes 85. Warps that go on with
 *              other rows, and load their slots ahead, need more registers: 111 us.
 *              16,384 rows to and from pinned memory: 0.94 and 0.91 of a plain copy's rate.
 * Numerics     None. A row is skipped if either slot is outside its cache. Where two rows go to one
 *              slot, it may hold parts of both.
 * Source       swap_blocks and copy_blocks of vLLM, for the purpose.
 */
#include "cuda/cache/cache_slots.cuh"

namespace {

enum {
    LANE_WORDS = 5, /* words that a lane loads before it stores them */
    MAX_WARP_ROWS = 4,
    MIN_WARPS = 1 << 12, /* warps that a grid has before a warp takes a second row */
    SCALE_BYTES = 4,     /* bytes of a word of scales that lie apart */
};

struct transfer_args {
    smla_cache_write_params sides[SMLA_TRANSFER_SIDES];
    smla_divisor page_sizes[SMLA_TRANSFER_SIDES];
    smla_divisor row_words;   /* words of a row, or of its data where its scales lie apart */
    smla_divisor scale_words; /* not used where `has_scales` is false */
    bool has_scales;          /* scales lie apart */
    int32_t warp_rows;
};

/* The slot of row i on one side, or -1 if it is outside the cache. */
__device__ __forceinline__ int64_t
find_slot(const smla_cache_write_params &side, int64_t i)
{
    const int64_t slot = read_slot(side, i);
    return slot >= 0 && slot < side.kv.num_pages * side.kv.block_size ? slot : -1;
}

template <int BYTES>
__device__ __forceinline__ void
load_word(const uint8_t *from, uint32_t *word)
{
    if constexpr (BYTES == 2) {
        *word = __ldg((const uint16_t *)from);
    } else {
        smla_load_words<BYTES, true>(from, word);
    }
}

template <int BYTES>
__device__ __forceinline__ void
store_word(uint8_t *to, const uint32_t *word)
{
    if constexpr (BYTES == 2) {
        *(uint16_t *)to = (uint16_t)*word;
    } else {
        smla_store_words<BYTES, true>(to, word);
    }
}

/* Copies a part of each row of a warp, in words of BYTES bytes. Lane i has the addresses of the
 * part of row i, which are null if the row is not copied. */
template <int BYTES>
__device__ __forceinline__ void
copy_parts(const uint8_t *from, const uint8_t *to, const smla_divisor &part_words, int num_rows)
{
    const uint32_t row_words = (uint32_t)part_words.divisor;
    const uint32_t num_words = (uint32_t)num_rows * row_words;
    for (uint32_t first = 0; first < num_words; first += LANE_WORDS * SMLA_WARP_LANES) {
        uint32_t words[LANE_WORDS][BYTES < 4 ? 1 : BYTES / 4];
        uint8_t *ends[LANE_WORDS];
#pragma unroll
        for (int i = 0; i < LANE_WORDS; i++) {
            const uint32_t number = first + i * SMLA_WARP_LANES + lane_idx();
            const uint32_t row = smla_divide_uint32(number, part_words);
            const uint32_t offset = (number - row * row_words) * BYTES;
            const uint8_t *const source = shuffle_pointer(from, (int)row);
            uint8_t *const end = shuffle_pointer(to, (int)row);
            const bool is_copied = number < num_words && end != nullptr;
            ends[i] = is_copied ? end + offset : nullptr;
            if (is_copied) {
                load_word<BYTES>(source + offset, words[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < LANE_WORDS; i++) {
            if (ends[i] != nullptr) {
                store_word<BYTES>(ends[i], words[i]);
            }
        }
    }
}

template <int BYTES>
__global__ void
__launch_bounds__(BLOCK_THREADS) transfer_rows_kernel(const __grid_constant__ transfer_args args)
{
    ptx_wait_for_grids();
    const smla_cache_write_params &src = args.sides[SMLA_TRANSFER_SRC];
    const smla_cache_write_params &dst = args.sides[SMLA_TRANSFER_DST];
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    const int64_t warp = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (int64_t first = warp * args.warp_rows; first < dst.num_tokens;
         first += num_warps * args.warp_rows) {
        const int64_t i = first + lane_idx();
        const bool is_row = lane_idx() < args.warp_rows && i < dst.num_tokens;
        const int64_t src_slot = is_row ? find_slot(src, i) : -1;
        const int64_t dst_slot = is_row ? find_slot(dst, i) : -1;
        const bool is_copied = src_slot >= 0 && dst_slot >= 0;
        const smla_kv_token from =
            find_slot_row(src.kv, args.page_sizes[SMLA_TRANSFER_SRC], is_copied ? src_slot : -1);
        const smla_kv_token to =
            find_slot_row(dst.kv, args.page_sizes[SMLA_TRANSFER_DST], is_copied ? dst_slot : -1);
        copy_parts<BYTES>(from.row, to.row, args.row_words, args.warp_rows);
        if (args.has_scales) {
            copy_parts<SCALE_BYTES>(from.scales, to.scales, args.scale_words, args.warp_rows);
        }
    }
}

/* ---- Table --------------------------------------------------------------------------------- */

struct transfer_row {
    int32_t word_bytes;
    smla_kernel<transfer_args> kernel;
};

/* The longest words first. */
const transfer_row transfer_table[] = {
    {16, transfer_rows_kernel<16>},
    {8, transfer_rows_kernel<8>},
    {4, transfer_rows_kernel<4>},
    {2, transfer_rows_kernel<2>},
};

/* The rows of a warp: those that its lanes load at once, but fewer where warps are few. */
int32_t
choose_warp_rows(int64_t num_rows, int32_t row_words)
{
    const int64_t held = LANE_WORDS * SMLA_WARP_LANES / row_words;
    const int64_t most = held < MAX_WARP_ROWS ? held : (int64_t)MAX_WARP_ROWS;
    const int64_t rows = num_rows / MIN_WARPS < most ? num_rows / MIN_WARPS : most;
    return rows < 1 ? 1 : (int32_t)rows;
}

/* Whether every row of a cache begins at a multiple of `bytes`. */
bool
is_aligned(const smla_kv_view &kv, int32_t bytes)
{
    return smla_is_multiple(kv.base, kv.page_stride_bytes, bytes) &&
           kv.token_stride_bytes % bytes == 0;
}

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_launch_transfer_kv_cache(const smla_transfer_params *p, const smla_cuda_device *)
{
    const smla_kv_format_info *const format = p->call.kv_format;
    const bool has_scales = format->layout == SMLA_PAGE_SPLIT;
    const int32_t row_bytes = has_scales ? format->data_bytes : format->row_bytes;
    const int64_t num_rows = p->sides[SMLA_TRANSFER_DST].num_tokens;
    transfer_args args = {};
    for (int i = 0; i < SMLA_TRANSFER_SIDES; i++) {
        args.sides[i] = p->sides[i];
        args.page_sizes[i] = smla_make_divisor(p->sides[i].kv.block_size);
    }
    args.has_scales = has_scales;
    args.scale_words = smla_make_divisor(has_scales ? format->scale_bytes / SCALE_BYTES : 1);
    for (const transfer_row &row : transfer_table) {
        if (row_bytes % row.word_bytes == 0 && is_aligned(args.sides[0].kv, row.word_bytes) &&
            is_aligned(args.sides[1].kv, row.word_bytes)) {
            const int32_t row_words = row_bytes / row.word_bytes;
            args.row_words = smla_make_divisor(row_words);
            args.warp_rows = choose_warp_rows(num_rows, row_words);
            return smla_launch(row.kernel, args,
                               smla_count_parts(num_rows, args.warp_rows * BLOCK_WARPS),
                               BLOCK_THREADS, 0, p->call.stream);
        }
    }
    return SMLA_NO_KERNEL;
}
