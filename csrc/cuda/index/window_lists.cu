/* window_lists.cu: the lists of DeepSeek V4 that hold a window and compressed rows: workspace rows
 * of a prefill chunk, and slots of a mixed batch.
 *
 * Computes     A token at position p of request b sees tl = min((p + 1) / ratio, topk) compressed
 *              rows, and a window of sl = min(p + 1, window) tokens that begins at a = p + 1 - sl.
 *              combine: out[t] = topk_indices[t, :tl] + M * b, then M * b + N + a - (seq_len -
 *              gather_len) + j for j < sl, then -1; lens[t] = tl + sl
 *              mixed, a decode: out[t] = decode_swa_indices[t], then decode_indices[t] or the slots
 *              of these positions; lens[t] = window + the given length, or the number of positions
 *              mixed, a prefill: out[t] = the slots of positions a...p, -1 up to column `window`,
 *              the slots of prefill_indices[t, :tl]; lens[t] = window + tl; -1 in other columns
 * Shapes       index lists and out [T, columns] int32, rows any stride apart; block tables [R, W]
 *              int32, query_start_loc [R + 1], seq_lens, gather_lens [R], req_id_per_token, lens
 *              [T] int32, is_valid [T] bytes, any strides
 * Shared mem   mixed: 32 bytes, the number of positions that each warp counted
 * Roles        A team takes one token at a time: a CTA if there are few tokens, else a warp. A
 *              piece is one column of a thread, or four neighbours where all rows are aligned; a
 *              thread has two pieces per pass. All threads of a team look up the token's request,
 *              because such loads are broadcast. They load the entries of the first pass before.
 *              Barriers (__syncthreads) when a CTA counts a decode's positions: the counts of all
 *              warps are written | are read.
 * Roofline     Memory: 4 to 8 bytes per column; 32768 tokens of 128 + 512 columns, 512 of them
 *              read, take 36 us at 4.2 TB/s. A team waits for about eight loads one after another,
 *              4 us. So latency binds a launch of few tokens, and for 32768 tokens CTAs as teams, 8
 *              per SM, would need 120 us. With warps as teams, an SM runs 32 teams (mixed) or 40
 *              (combine).
 * Numerics     Integers, exact. -1 where an entry is negative, has no page, or int32 cannot hold
 *              the result. A token past the last request, or of a bad request, has no entries;
 *              combine gives it length 0, mixed length `window`. combine writes -1 for a window
 *              token that gather_lens leaves out, for one past the request's M rows, and for the
 *              whole window if gather_lens exceeds seq_lens. Values are those of the CPU for any
 *              input that it accepts; with any other input kernels still write only their arrays.
 * Source       combine_topk_swa_indices and build_flashinfer_mixed_sparse_indices of vLLM, for
 *              their results.
 */
#include "cuda/index/slot.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    NUM_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    SM_TOKENS = 16,  /* tokens per SM from which on a warp is a team */
    PASS_PIECES = 2, /* pieces of a row that a thread has per pass */
};

/* Returns the index if int32 can hold it, else -1. */
__device__ __forceinline__ int32_t
fit_index(int64_t index)
{
    return index < 0 || index > INT32_MAX ? -1 : (int32_t)index;
}

/* ---- Teams --------------------------------------------------------------------------------- */

/* The threads that take a token together: THREADS is a warp or a CTA. A piece has COLUMNS
 * columns. */
template <int THREADS_, int COLUMNS_> struct team {
    enum {
        THREADS = THREADS_,
        COLUMNS = COLUMNS_,
        BLOCK_TOKENS = BLOCK_THREADS / THREADS,
        PASS_COLUMNS = PASS_PIECES * THREADS * COLUMNS,
    };
    static_assert(COLUMNS == 1 || COLUMNS == 4, "a piece is one word or 16 bytes");

    int32_t pieces[PASS_PIECES][COLUMNS];

    static __device__ __forceinline__ int thread()
    {
        return (int)threadIdx.x % THREADS;
    }

    /* The first column of a piece in its pass. */
    static __device__ __forceinline__ int column_of(int piece)
    {
        return (piece * THREADS + thread()) * COLUMNS;
    }

    /* Loads the columns of a pass from column `first` on; columns from `count` on become -1. With
     * four columns per piece, `count` is a multiple of 4. */
    __device__ __forceinline__ void load(const int32_t *in, int64_t first, int64_t count)
    {
#pragma unroll
        for (int i = 0; i < PASS_PIECES; i++) {
            const int64_t column = first + column_of(i);
#pragma unroll
            for (int k = 0; k < COLUMNS; k++) {
                pieces[i][k] = -1;
            }
            if (column < count) {
                smla_load_words<4 * COLUMNS, true>(in + column, (uint32_t *)pieces[i]);
            }
        }
    }

    /* Stores the columns of a pass that are below `width`, a multiple of 4 like `count` above. */
    __device__ __forceinline__ void store(int32_t *out, int64_t first, int64_t width) const
    {
#pragma unroll
        for (int i = 0; i < PASS_PIECES; i++) {
            const int64_t column = first + column_of(i);
            if (column < width) {
                smla_store_words<4 * COLUMNS, true>(out + column, (const uint32_t *)pieces[i]);
            }
        }
    }
};

/* Whether rows of `columns` columns divide into aligned pieces of four. An array that is not given
 * does. */
bool
has_pieces(const int32_t *rows, int64_t stride_token, int64_t columns)
{
    return rows == nullptr || (columns % 4 == 0 && smla_is_multiple(rows, stride_token * 4, 16));
}

/* Launches one of three kernels: for CTAs, for CTAs with pieces of four columns, and for warps with
 * such pieces. */
template <typename Args>
cudaError_t
launch_lists(const smla_kernel<Args> kernels[3], const Args &args, bool is_aligned)
{
    const int64_t num_tokens = args.p.num_tokens;
    const smla_stream stream = args.p.call.stream;
    const int64_t num_sms = smla_cuda_find_device(stream.device_id)->num_sms;
    const bool has_warps = is_aligned && num_tokens >= SM_TOKENS * num_sms;
    return smla_launch(kernels[has_warps ? 2 : is_aligned], args,
                       has_warps ? smla_count_parts(num_tokens, NUM_WARPS) : num_tokens,
                       BLOCK_THREADS, 0, stream);
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

/* The workspace rows that a token's columns are computed from. */
struct combined_row {
    int64_t topk_len;
    int64_t len;
    int64_t base;         /* the first workspace row of the request */
    int64_t window_start; /* the workspace row of the window's first token */
    /* The first workspace row of the request's tokens, and the end of their rows. */
    int64_t gathered[2];
};

__device__ __forceinline__ combined_row
find_combined_row(const combine_args &args, int64_t token)
{
    const smla_combine_topk_swa_params &p = args.p;
    const int64_t query = token + read_start(p.batch, 0);
    const int64_t req = search_request(p.batch, query);
    if (req < 0) {
        return combined_row{0, 0, 0, 0, {0, 0}};
    }
    const token_sight sight = find_sight(p.batch, req, query, p.window, args.ratio, p.topk);
    const int64_t seq_len = __ldg(p.batch.seq_lens + req * p.batch.seq_lens_stride);
    const int64_t gather_start = seq_len - __ldg(p.gather_lens + req * p.gather_lens_stride);
    const int64_t first = sight.position - sight.window_len + 1;
    const int64_t base = p.request_rows * req;
    const int64_t tokens = base + p.window_start;
    return combined_row{sight.topk_len,
                        sight.topk_len + sight.window_len,
                        base,
                        tokens + first - gather_start,
                        {tokens, gather_start < 0 ? tokens : base + p.request_rows}};
}

template <class Team>
__device__ __forceinline__ void
write_combined(const combine_args &args, int64_t token)
{
    const smla_combine_topk_swa_params &p = args.p;
    const int32_t *const in = p.topk_indices + token * p.topk_indices_stride_token;
    int32_t *const out = p.out + token * p.out_stride_token;
    Team columns;
    columns.load(in, 0, p.topk);
    const combined_row row = find_combined_row(args, token);
#pragma unroll 1
    for (int64_t first = 0; first < p.width; first += Team::PASS_COLUMNS) {
        if (first > 0) {
            columns.load(in, first, p.topk);
        }
#pragma unroll
        for (int i = 0; i < PASS_PIECES; i++) {
#pragma unroll
            for (int k = 0; k < Team::COLUMNS; k++) {
                const int64_t column = first + Team::column_of(i) + k;
                const int32_t entry = columns.pieces[i][k];
                int64_t index = -1;
                if (column < row.topk_len) {
                    index = entry < 0 ? -1 : row.base + entry;
                } else if (column < row.len) {
                    index = row.window_start + (column - row.topk_len);
                    index = index < row.gathered[0] || index >= row.gathered[1] ? -1 : index;
                }
                columns.pieces[i][k] = fit_index(index);
            }
        }
        columns.store(out, first, p.width);
    }
    if (Team::thread() == 0) {
        p.lens[token * p.lens_stride] = (int32_t)row.len;
    }
}

template <class Team>
__global__ void
__launch_bounds__(BLOCK_THREADS) combine_lists_kernel(const __grid_constant__ combine_args args)
{
    ptx_wait_for_grids();
    const int64_t step = (int64_t)gridDim.x * Team::BLOCK_TOKENS;
    int64_t token = (int64_t)blockIdx.x * Team::BLOCK_TOKENS + threadIdx.x / Team::THREADS;
    for (; token < args.p.num_tokens; token += step) {
        write_combined<Team>(args, token);
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

/* Adds a number over all threads of the team, which all call this. */
template <class Team>
__device__ __forceinline__ int32_t
add_over_threads(int32_t number, int32_t *counts)
{
    const int32_t sum = __reduce_add_sync(ALL_LANES, number);
    if constexpr (Team::THREADS == SMLA_WARP_LANES) {
        return sum;
    }
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

/* Copies `count` columns, and writes -1 to the others below `width`. */
template <class Team>
__device__ __forceinline__ void
copy_columns(const int32_t *in, int64_t count, int32_t *out, int64_t width)
{
#pragma unroll 1
    for (int64_t first = 0; first < width; first += Team::PASS_COLUMNS) {
        Team columns;
        columns.load(in, first, count);
        columns.store(out, first, width);
    }
}

/* Writes the slots of the first `count` positions of a pass, which is already loaded, and -1 in the
 * other columns below `width`. Returns how many positions this thread saw. */
template <class Team>
__device__ __forceinline__ int32_t
write_pass(const page_table &pages, int64_t req, Team &columns, int64_t first, int64_t count,
           int32_t *out, int64_t width)
{
    int32_t num_positions = 0;
#pragma unroll
    for (int i = 0; i < PASS_PIECES; i++) {
#pragma unroll
        for (int k = 0; k < Team::COLUMNS; k++) {
            const bool is_seen = first + Team::column_of(i) + k < count;
            const int32_t position = is_seen ? columns.pieces[i][k] : -1;
            num_positions += position >= 0;
            columns.pieces[i][k] = find_slot(pages, req, position);
        }
    }
    columns.store(out, first, width);
    return num_positions;
}

/* Writes the slots of a whole row, pass by pass. The row's entries are in columns below
 * num_given. */
template <class Team>
__device__ __forceinline__ int32_t
write_slots(const page_table &pages, int64_t req, Team &columns, const int32_t *in,
            int64_t num_given, int64_t count, int32_t *out, int64_t width)
{
    int32_t num_positions = 0;
#pragma unroll 1
    for (int64_t first = 0; first < width; first += Team::PASS_COLUMNS) {
        if (first > 0) {
            columns.load(in, first, num_given);
        }
        num_positions += write_pass(pages, req, columns, first, count, out, width);
    }
    return num_positions;
}

/* The given length of a decode's row, whose entries need not be counted because they are slots. */
__device__ __forceinline__ int64_t
read_decode_len(const smla_mixed_indices_params &p, int64_t token)
{
    if (p.decode_lens == nullptr) {
        return p.decode_topk;
    }
    const int64_t len = __ldg(p.decode_lens + token * p.decode_lens_stride);
    return len < 0 ? 0 : len < p.decode_topk ? len : p.decode_topk;
}

/* Writes the row of a decode, and returns its compressed length. All threads of the team call
 * this. */
template <class Team>
__device__ __forceinline__ int64_t
write_decode(const mixed_args &args, int64_t token, int32_t *out, int32_t *counts)
{
    const smla_mixed_indices_params &p = args.p;
    copy_columns<Team>(p.decode_swa_indices + token * p.decode_swa_stride_token, p.window, out,
                       p.window);
    const int32_t *const in = p.decode_indices + token * p.decode_indices_stride_token;
    if (!p.decode_indices_are_local) {
        copy_columns<Team>(in, p.decode_topk, out + p.window, p.width - p.window);
        return read_decode_len(p, token);
    }
    Team columns;
    columns.load(in, 0, p.decode_topk);
    const int64_t req = p.decode_topk > 0 && is_valid_token(p.is_valid, p.is_valid_stride, token)
                            ? read_request(p, token)
                            : -1;
    const int32_t num_positions =
        write_slots(args.compressed_pages, req, columns, in, p.decode_topk,
                    req < 0 ? 0 : p.decode_topk, out + p.window, p.width - p.window);
    return add_over_threads<Team>(num_positions, counts);
}

/* Writes the row of a prefill, and returns its compressed length. */
template <class Team>
__device__ __forceinline__ int64_t
write_prefill(const mixed_args &args, int64_t token, int32_t *out)
{
    const smla_mixed_indices_params &p = args.p;
    const int64_t row = token - p.num_decode_tokens;
    const int32_t *const in = p.prefill_indices + row * p.prefill_indices_stride_token;
    Team columns;
    columns.load(in, 0, p.topk);
    const int64_t end = read_start(p.batch, p.batch.num_reqs);
    const int64_t req = token < end ? read_request(p, token) : -1;
    token_sight sight = {};
    if (req >= 0) {
        sight = find_sight(p.batch, req, token, p.window, args.ratio, p.topk);
    }
    const int64_t start = sight.position - sight.window_len + 1;
#pragma unroll 1
    for (int64_t first = 0; first < p.window; first += Team::PASS_COLUMNS) {
        Team window;
#pragma unroll
        for (int i = 0; i < PASS_PIECES; i++) {
#pragma unroll
            for (int k = 0; k < Team::COLUMNS; k++) {
                window.pieces[i][k] = (int32_t)(start + first + Team::column_of(i) + k);
            }
        }
        write_pass(args.swa_pages, req, window, first, sight.window_len, out, p.window);
    }
    write_slots(args.compressed_pages, req, columns, in, p.topk, sight.topk_len, out + p.window,
                p.width - p.window);
    return sight.topk_len;
}

template <class Team>
__global__ void
__launch_bounds__(BLOCK_THREADS) mixed_lists_kernel(const __grid_constant__ mixed_args args)
{
    ptx_wait_for_grids();
    __shared__ int32_t counts[NUM_WARPS];
    const smla_mixed_indices_params &p = args.p;
    const int64_t step = (int64_t)gridDim.x * Team::BLOCK_TOKENS;
    int64_t token = (int64_t)blockIdx.x * Team::BLOCK_TOKENS + threadIdx.x / Team::THREADS;
    for (; token < p.num_tokens; token += step) {
        int32_t *const out = p.out + token * p.out_stride_token;
        const int64_t len = token < p.num_decode_tokens
                                ? write_decode<Team>(args, token, out, counts)
                                : write_prefill<Team>(args, token, out);
        if (Team::thread() == 0) {
            p.lens[token * p.lens_stride] = (int32_t)(p.window + len);
        }
    }
}

typedef team<BLOCK_THREADS, 1> cta;
typedef team<BLOCK_THREADS, 4> aligned_cta;
typedef team<SMLA_WARP_LANES, 4> aligned_warp;

} /* namespace */

cudaError_t
smla_cuda_launch_combine_topk_swa_indices(const smla_combine_topk_swa_params *p,
                                          const smla_cuda_device *)
{
    static const smla_kernel<combine_args> kernels[] = {combine_lists_kernel<cta>,
                                                        combine_lists_kernel<aligned_cta>,
                                                        combine_lists_kernel<aligned_warp>};
    const combine_args args = {*p, smla_make_divisor(p->ratio)};
    const bool is_aligned = has_pieces(p->topk_indices, p->topk_indices_stride_token, p->topk) &&
                            has_pieces(p->out, p->out_stride_token, p->width);
    return launch_lists(kernels, args, is_aligned);
}

cudaError_t
smla_cuda_launch_build_mixed_sparse_indices(const smla_mixed_indices_params *p,
                                            const smla_cuda_device *)
{
    static const smla_kernel<mixed_args> kernels[] = {mixed_lists_kernel<cta>,
                                                      mixed_lists_kernel<aligned_cta>,
                                                      mixed_lists_kernel<aligned_warp>};
    const mixed_args args = {*p, page_table_of(p->swa_pages), page_table_of(p->compressed_pages),
                             smla_make_divisor(p->ratio)};
    const bool is_aligned =
        p->window % 4 == 0 && has_pieces(p->out, p->out_stride_token, p->width) &&
        has_pieces(p->decode_swa_indices, p->decode_swa_stride_token, p->window) &&
        has_pieces(p->decode_indices, p->decode_indices_stride_token, p->decode_topk) &&
        has_pieces(p->prefill_indices, p->prefill_indices_stride_token, p->topk);
    return launch_lists(kernels, args, is_aligned);
}
