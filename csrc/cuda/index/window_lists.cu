/* window_lists.cu: the lists of DeepSeek V4 that hold a window and compressed rows: workspace rows
 * of a prefill chunk, and slots of a mixed batch.
 *
 * Computes     A token at position p of request b sees tl = min((p + 1) / ratio, topk) compressed
 *              rows and a window of sl = min(p + 1, window) tokens, from a = p + 1 - sl on.
 *              combine: out[t] = topk_indices[t, :tl] + M * b, then M * b + N + a - (seq_len -
 *              gather_len) + j for j < sl, then -1; lens[t] = tl + sl
 *              mixed, a decode: out[t] = decode_swa_indices[t], then decode_indices[t] or the slots
 *              of these positions; lens[t] = window + the given length, or the number of positions
 *              mixed, a prefill: out[t] = the slots of positions a...p, -1 up to column `window`,
 *              the slots of prefill_indices[t, :tl]; lens[t] = window + tl; -1 in other columns
 * Shapes       index lists and out [T, columns] int32, rows any stride apart; block tables [R, W]
 *              int32, query_start_loc [R + 1], seq_lens, gather_lens [R], req_id_per_token, lens
 *              [T] int32, is_valid [T] bytes, any strides
 * Shared mem   mixed: 32 bytes, the positions that each warp counted
 * Roles        A CTA takes one token at a time, a thread one column in 256. All threads of a CTA
 *              find the token's request, because the loads are broadcast. Barrier (__syncthreads)
 *              of a decode's positions: the counts of all warps are written | are read.
 * Roofline     Memory: 4 to 8 bytes per column. A row of 128 + 512 columns is 3 rounds, so that a
 *              launch of few tokens is latency. Measured on an H200, many tokens: 1.2 TB/s
 *              (combine) and 1.0 (mixed), a quarter of a copy.
 * Numerics     Integers, exact. -1 where an entry is negative, has no page, or int32 cannot hold
 *              the result. A token past the last request, and one of a bad request, has no entries;
 *              combine gives it length 0, mixed `window`. Values are those of the CPU for any input
 *              that it accepts; no other input makes a kernel leave its arrays.
 * Source       combine_topk_swa_indices and build_flashinfer_mixed_sparse_indices of vLLM, for
 *              their results.
 */
#include "cuda/index/slot.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    NUM_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
};

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

/* The index if int32 holds it, else -1. */
__device__ __forceinline__ int32_t
fit_index(int64_t index)
{
    return index < 0 || index > INT32_MAX ? -1 : (int32_t)index;
}

/* ---- Workspace rows of a prefill chunk ----------------------------------------------------- */

struct combine_args {
    smla_combine_topk_swa_params p;
    smla_divisor ratio;
};

/* The request of a token; -1 for a token past the last request. */
__device__ __forceinline__ int64_t
search_request(const smla_query_batch &batch, int64_t token)
{
    int64_t low = 0;
    int64_t high = batch.num_reqs;
    if (token >= read_start(batch, high)) {
        return -1;
    }
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (read_start(batch, middle) <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* How the columns of a token are made. */
struct combined_row {
    int64_t topk_len;
    int64_t len;
    int64_t base;         /* the first workspace row of the request */
    int64_t window_start; /* the workspace row of the window's first token */
};

__device__ __forceinline__ combined_row
find_combined_row(const combine_args &args, int64_t token)
{
    const smla_combine_topk_swa_params &p = args.p;
    const int64_t query = token + read_start(p.batch, 0);
    const int64_t req = search_request(p.batch, query);
    if (req < 0) {
        return combined_row{0, 0, 0, 0};
    }
    const token_sight sight = find_sight(p.batch, req, query, p.window, args.ratio, p.topk);
    const int64_t seq_len = __ldg(p.batch.seq_lens + req * p.batch.seq_lens_stride);
    const int64_t gather_start = seq_len - __ldg(p.gather_lens + req * p.gather_lens_stride);
    const int64_t first = sight.position - sight.window_len + 1;
    const int64_t base = p.request_rows * req;
    return combined_row{sight.topk_len, sight.topk_len + sight.window_len, base,
                        base + p.window_start + first - gather_start};
}

__global__ void
__launch_bounds__(BLOCK_THREADS) combine_lists_kernel(const __grid_constant__ combine_args args)
{
    ptx_wait_for_grids();
    const smla_combine_topk_swa_params &p = args.p;
    for (int64_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
        const combined_row row = find_combined_row(args, token);
        const int32_t *const in = p.topk_indices + token * p.topk_indices_stride_token;
        int32_t *const out = p.out + token * p.out_stride_token;
        for (int64_t column = threadIdx.x; column < p.width; column += BLOCK_THREADS) {
            int32_t index = -1;
            if (column < row.topk_len) {
                const int32_t entry = __ldg(in + column);
                index = entry < 0 ? -1 : fit_index(row.base + entry);
            } else if (column < row.len) {
                index = fit_index(row.window_start + (column - row.topk_len));
            }
            out[column] = index;
        }
        if (threadIdx.x == 0) {
            p.lens[token * p.lens_stride] = (int32_t)row.len;
        }
    }
}

/* ---- Slots of a mixed batch ---------------------------------------------------------------- */

struct mixed_args {
    smla_mixed_indices_params p;
    page_table swa_pages;
    page_table compressed_pages;
    smla_divisor ratio;
};

/* The request of a token; -1 for a number that is no request. */
__device__ __forceinline__ int64_t
read_request(const smla_mixed_indices_params &p, int64_t token)
{
    const int64_t req = __ldg(p.req_id_per_token + token * p.req_id_stride);
    return req < p.batch.num_reqs ? req : -1;
}

/* The sum of a number over the threads of the CTA, which all call this. */
__device__ __forceinline__ int32_t
add_over_threads(int32_t number, int32_t *counts)
{
    const int32_t sum = __reduce_add_sync(ALL_LANES, number);
    if (threadIdx.x % SMLA_WARP_LANES == 0) {
        counts[threadIdx.x / SMLA_WARP_LANES] = sum;
    }
    __syncthreads(); /* the counts of all warps are written */
    int32_t total = 0;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; warp++) {
        total += counts[warp];
    }
    __syncthreads(); /* the counts are read */
    return total;
}

/* Writes the slots of the first `count` positions, and -1 in the other columns up to `width`. Each
 * thread returns how many positions it saw. */
__device__ __forceinline__ int32_t
write_slots(const page_table &pages, int64_t req, const int32_t *in, int64_t count, int32_t *out,
            int64_t width)
{
    int32_t num_positions = 0;
    for (int64_t column = threadIdx.x; column < width; column += BLOCK_THREADS) {
        const int32_t position = column < count ? __ldg(in + column) : -1;
        num_positions += position >= 0;
        out[column] = find_slot(pages, req, position);
    }
    return num_positions;
}

/* Writes a row of slots, whose length need not be found. */
__device__ __forceinline__ int64_t
copy_slots(const smla_mixed_indices_params &p, int64_t token, const int32_t *in, int32_t *out,
           int64_t width)
{
    for (int64_t column = threadIdx.x; column < width; column += BLOCK_THREADS) {
        out[column] = column < p.decode_topk ? __ldg(in + column) : -1;
    }
    if (p.decode_lens == nullptr) {
        return p.decode_topk;
    }
    const int64_t len = __ldg(p.decode_lens + token * p.decode_lens_stride);
    return len < 0 ? 0 : len < p.decode_topk ? len : p.decode_topk;
}

/* Writes the row of a decode, and returns its compressed length. All threads of the CTA call this.
 */
__device__ __forceinline__ int64_t
write_decode(const mixed_args &args, int64_t token, int32_t *out, int32_t *counts)
{
    const smla_mixed_indices_params &p = args.p;
    const int32_t *const swa = p.decode_swa_indices + token * p.decode_swa_stride_token;
    for (int64_t column = threadIdx.x; column < p.window; column += BLOCK_THREADS) {
        out[column] = __ldg(swa + column);
    }
    const int32_t *const in = p.decode_indices + token * p.decode_indices_stride_token;
    if (!p.decode_indices_are_local) {
        return copy_slots(p, token, in, out + p.window, p.width - p.window);
    }
    const int64_t req = p.decode_topk > 0 && is_valid_token(p.is_valid, p.is_valid_stride, token)
                            ? read_request(p, token)
                            : -1;
    const int64_t count = req < 0 ? 0 : p.decode_topk;
    const int32_t num_positions =
        write_slots(args.compressed_pages, req, in, count, out + p.window, p.width - p.window);
    return add_over_threads(num_positions, counts);
}

/* Writes the row of a prefill, and returns its compressed length. */
__device__ __forceinline__ int64_t
write_prefill(const mixed_args &args, int64_t token, int32_t *out)
{
    const smla_mixed_indices_params &p = args.p;
    const int64_t end = read_start(p.batch, p.batch.num_reqs);
    const int64_t req = token < end ? read_request(p, token) : -1;
    token_sight sight = {};
    if (req >= 0) {
        sight = find_sight(p.batch, req, token, p.window, args.ratio, p.topk);
    }
    const int64_t first = sight.position - sight.window_len + 1;
    for (int64_t column = threadIdx.x; column < p.window; column += BLOCK_THREADS) {
        const int64_t position = column < sight.window_len ? first + column : -1;
        out[column] = find_slot(args.swa_pages, req, (int32_t)position);
    }
    const int64_t row = token - p.num_decode_tokens;
    write_slots(args.compressed_pages, req,
                p.prefill_indices + row * p.prefill_indices_stride_token, sight.topk_len,
                out + p.window, p.width - p.window);
    return sight.topk_len;
}

__global__ void
__launch_bounds__(BLOCK_THREADS) mixed_lists_kernel(const __grid_constant__ mixed_args args)
{
    ptx_wait_for_grids();
    __shared__ int32_t counts[NUM_WARPS];
    const smla_mixed_indices_params &p = args.p;
    for (int64_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
        int32_t *const out = p.out + token * p.out_stride_token;
        const int64_t len = token < p.num_decode_tokens ? write_decode(args, token, out, counts)
                                                        : write_prefill(args, token, out);
        if (threadIdx.x == 0) {
            p.lens[token * p.lens_stride] = (int32_t)(p.window + len);
        }
    }
}

} /* namespace */

cudaError_t
smla_cuda_launch_combine_topk_swa_indices(const smla_combine_topk_swa_params *p)
{
    const combine_args args = {*p, smla_make_divisor(p->ratio)};
    return smla_launch(combine_lists_kernel, args, p->num_tokens, BLOCK_THREADS, 0, p->stream);
}

cudaError_t
smla_cuda_launch_build_mixed_sparse_indices(const smla_mixed_indices_params *p)
{
    const mixed_args args = {*p, page_table_of(p->swa_pages), page_table_of(p->compressed_pages),
                             smla_make_divisor(p->ratio)};
    return smla_launch(mixed_lists_kernel, args, p->num_tokens, BLOCK_THREADS, 0, p->stream);
}
