/* paged_lists.cu: the arrays of a paged step: lengths, running sums, tables of pages and of slots.
 *
 * Computes     For request b with seq_lens[b] > 0: cache_seqlens, cu_seqlens_k and cu_seqlens_q;
 *              page_table[b, c] = floor(req_to_token[pool[b], c * page_size] / page_size), the same
 *              of mapping[slot] in swa_page_table, and of an encoder's tokens in encoder_table.
 *              Rows of a tree: in `expand` the slots of the drafts that the mask admits, in their
 *              order, then the others; in `swa` the last left + 1 slots of the prefix, then those
 *              of the row of `expand`. Virtual requests of chunks. Padding has lengths of 0
 * Shapes       seq_lens, extend_lens, encoder_lens [B] int32; pool [B] and cache_loc int64 or
 *              int32; req_to_token [rows, width] int32, rows any stride apart; mask of bytes.
 *              Results as in params_paged_step.h
 * Shared mem   about 4 KiB: sums of warps, and the facts of 256 requests
 * Roles        A grid has one work item per CTA of 256 threads. Item 0 writes what has an entry per
 *              request, item 1 what has one per row of a tree, and the tokens' numbers. Then an
 *              item per request and 1024 columns of the longest table, or less of them if they are
 *              many: each goes through the columns that the request has. The first of a request
 *              writes its rows of slots, by a warp each, and its virtual requests. It sums the sizes
 *              of all requests before it, so no item waits for another. The last items map
 *              cache_loc. The grid follows from shapes alone, so a captured step has room for any
 *              lengths.
 * Roofline     Memory: 4 bytes written per page, and a sector of 32 read. Latency binds small
 *              batches. Not yet measured.
 * Numerics     Integers, exact, the values of the CPU backend. Slots of the mapping out of range
 *              are -1. Lengths are cut to the config and to the width of req_to_token.
 * Source       SGLang's FlashAttentionBackend, for its results; one launch for all arrays is ours.
 */
#include "core/params_paged_step.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"

namespace {

enum { BLOCK_THREADS = 256, NUM_WARPS = BLOCK_THREADS / SMLA_WARP_LANES, TILE_COLUMNS = 1024 };
enum { FIRST_REQUEST_ITEM = 2 };
enum { MOST_ITEMS = 4096 }; /* of all requests, about: what keeps a GPU busy */

struct paged_args {
    smla_paged_step_params p;
    smla_divisor page_size;
    smla_divisor shares; /* items of a request */
};

/* ---- Sums over a CTA ----------------------------------------------------------------------- */

struct cta_sums {
    int64_t warps[NUM_WARPS];
};

/* The sum of the values of this thread and of all lower ones; `total` is that of all threads. Every
 * thread of the CTA calls this. */
__device__ __forceinline__ int64_t
scan_cta(cta_sums &sums, int64_t value, int64_t *total)
{
    const int warp = threadIdx.x / SMLA_WARP_LANES, lane = threadIdx.x % SMLA_WARP_LANES;
    const int64_t in_warp = smla_scan_lanes(value, lane);
    __syncthreads(); /* the sums of the last call have been read */
    if (lane == SMLA_WARP_LANES - 1) {
        sums.warps[warp] = in_warp;
    }
    __syncthreads(); /* the sums of all warps are there */
    int64_t before = 0;
    *total = 0;
    for (int i = 0; i < NUM_WARPS; i++) {
        before += i < warp ? sums.warps[i] : 0;
        *total += sums.warps[i];
    }
    return before + in_warp;
}

/* ---- Slots --------------------------------------------------------------------------------- */

__device__ __forceinline__ int32_t
map_slot(const smla_paged_step_params &p, int64_t slot)
{
    return slot < 0 || slot >= p.num_mapped ? -1 : __ldg(p.mapping + slot * p.mapping_stride);
}

/* The slot of position `at` of a pool row, in the window pool if `is_mapped`; -1: none. */
__device__ __forceinline__ int32_t
read_slot(const smla_paged_step_params &p, int64_t pool_row, int64_t at, bool is_mapped)
{
    if (at >= p.pool_width) {
        return -1;
    }
    const int32_t slot = __ldg(p.req_to_token + pool_row * p.pool_stride + at);
    return is_mapped ? map_slot(p, slot) : slot;
}

/* The page of a slot, rounded down. */
__device__ __forceinline__ int32_t
page_of(const paged_args &args, int32_t slot)
{
    return slot >= 0 ? (int32_t)smla_divide_uint32((uint32_t)slot, args.page_size)
                     : ~(int32_t)smla_divide_uint32((uint32_t)~slot, args.page_size);
}

/* ---- Item 0: an entry per request ---------------------------------------------------------- */

/* A request, or nothing behind the last one. */
__device__ __forceinline__ smla_paged_request
read_request(const smla_paged_step_params &p, int64_t req)
{
    return req < p.num_reqs ? smla_read_paged_request(&p, req) : smla_paged_request{-1, 0, 0, 0, 0};
}

/* Extends a running sum by an entry per thread. The entry in front is in memory. */
__device__ __forceinline__ void
extend_sums(cta_sums &sums, int32_t *starts, int64_t at, int64_t count, int64_t value, int64_t most)
{
    int64_t total;
    const int64_t sum = scan_cta(sums, value, &total);
    const int64_t before = starts[at - threadIdx.x];
    if (at < count) {
        starts[at + 1] = (int32_t)smla_least_of(before + sum, most);
    }
    __syncthreads(); /* the next call reads the last entry */
}

__device__ __forceinline__ void
clear_first_sums(const smla_paged_step_params &p)
{
    if (threadIdx.x < p.num_steps) {
        p.cu_seqlens_k[threadIdx.x * p.starts_stride_step] = 0;
    }
    if (threadIdx.x == 0) {
        p.cu_seqlens_q[0] = 0;
        if (p.encoder_seqlens != nullptr) {
            p.encoder_starts[0] = 0;
        }
        if (p.num_local > 0) {
            p.local_starts[0] = 0;
        }
    }
    __syncthreads();
}

/* Virtual requests behind the last one have no tokens. */
__device__ __forceinline__ void
clear_last_virtual(const smla_paged_step_params &p, int64_t num_made, int64_t num_queries)
{
    for (int64_t i = num_made + threadIdx.x; i < p.num_local; i += BLOCK_THREADS) {
        p.local_starts[i + 1] = (int32_t)num_queries;
        for (int64_t step = 0; step < p.num_steps; step++) {
            p.local_seqlens[step * p.num_local + i] = 0;
        }
    }
}

__device__ __forceinline__ void
write_lengths(const smla_paged_step_params &p, cta_sums &sums)
{
    int64_t num_virtual = 0, num_queries = 0, total;
    clear_first_sums(p);
    for (int64_t base = 0; base < p.num_reqs; base += BLOCK_THREADS) {
        const int64_t req = base + threadIdx.x;
        const bool is_there = req < p.num_reqs;
        const smla_paged_request r = read_request(p, req);
        extend_sums(sums, p.cu_seqlens_q, req, p.num_reqs, r.query_len, p.max_tokens);
        for (int64_t step = 0; step < p.num_steps; step++) {
            const int64_t len = smla_paged_cache_len(&p, &r, step);
            if (is_there) {
                p.cache_seqlens[step * p.seqlens_stride_step + req] = (int32_t)len;
            }
            extend_sums(sums, p.cu_seqlens_k + step * p.starts_stride_step, req, p.num_reqs, len,
                        INT32_MAX);
        }
        if (is_there && p.leftpad != nullptr) {
            p.leftpad[req] = (int32_t)(p.prefix_len + smla_paged_leftpad(&p, &r));
        }
        if (is_there && p.rest_seqlens != nullptr) {
            p.rest_seqlens[req] =
                (int32_t)(smla_paged_cache_len(&p, &r, 0) - smla_paged_whole_prefix(&p));
        }
        if (p.encoder_seqlens != nullptr) {
            if (is_there) {
                p.encoder_seqlens[req] = (int32_t)r.encoder_len;
            }
            extend_sums(sums, p.encoder_starts, req, p.num_reqs, r.encoder_len, INT32_MAX);
        }
        if (p.num_local > 0) {
            scan_cta(sums, smla_count_virtual(&p, r.query_len, smla_paged_cache_len(&p, &r, 0)),
                     &total);
            num_virtual += total;
            scan_cta(sums, r.query_len, &total);
            num_queries += total;
        }
    }
    clear_last_virtual(p, num_virtual, num_queries);
    if (p.prefix != nullptr && threadIdx.x == 0) {
        p.prefix[SMLA_PREFIX_SEQLEN] = (int32_t)p.prefix_len;
        p.prefix[SMLA_PREFIX_PAGES_SEQLEN] = (int32_t)smla_paged_whole_prefix(&p);
        p.prefix[SMLA_PREFIX_KEY_STARTS] = 0;
        p.prefix[SMLA_PREFIX_KEY_STARTS + 1] = (int32_t)p.prefix_len;
        p.prefix[SMLA_PREFIX_STARTS] = 0;
        p.prefix[SMLA_PREFIX_STARTS + 1] = p.cu_seqlens_q[p.num_reqs];
    }
}

/* ---- Item 1: an entry per row of a tree ---------------------------------------------------- */

__device__ __forceinline__ bool
is_seen(const smla_paged_step_params &p, int64_t at)
{
    return at < p.mask_entries && __ldg(p.mask + at * p.mask_stride) != 0;
}

/* The drafts that a row sees in step 0, where `drafts` is the first entry of them in the mask. */
__device__ __forceinline__ int64_t
count_seen(const smla_paged_step_params &p, int64_t drafts)
{
    int64_t count = 0;
    for (int64_t i = 0; i < p.rows_per_req; i++) {
        count += is_seen(p, drafts + i);
    }
    return count;
}

/* Writes the lengths and the sums of a row per thread, of `len` slots; -1: padding. */
__device__ __forceinline__ void
extend_rows(const smla_paged_step_params &p, cta_sums &sums, const smla_paged_tree_rows &rows,
            int64_t row, int64_t count, int64_t len)
{
    for (int64_t step = 0; step < p.num_steps; step++) {
        const int64_t seen = row >= count || len < 0 ? 0 : len + step;
        if (row < count) {
            rows.seqlens[step * rows.seqlens_stride_step + row] = (int32_t)seen;
        }
        extend_sums(sums, rows.starts + step * rows.starts_stride_step, row, count, seen,
                    INT32_MAX);
    }
}

__device__ __forceinline__ void
clear_first_rows(const smla_paged_step_params &p, const smla_paged_tree_rows &rows)
{
    if (rows.seqlens != nullptr && threadIdx.x < p.num_steps) {
        rows.starts[threadIdx.x * rows.starts_stride_step] = 0;
    }
}

/* What the rows of 256 requests need of them. */
struct tree_facts {
    int64_t mask_start[BLOCK_THREADS];
    int64_t mask_row[BLOCK_THREADS];
    int32_t seq_len[BLOCK_THREADS];
    int32_t window_len[BLOCK_THREADS];
};

__device__ __forceinline__ void
write_row_lengths(const smla_paged_step_params &p, cta_sums &sums, tree_facts &facts)
{
    int64_t mask_before = 0;
    clear_first_rows(p, p.expand);
    clear_first_rows(p, p.swa);
    for (int64_t base = 0; base < p.num_reqs; base += BLOCK_THREADS) {
        const smla_paged_request r = read_request(p, base + threadIdx.x);
        int64_t total;
        const int64_t mask_len = p.rows_per_req * r.mask_row;
        facts.mask_start[threadIdx.x] = mask_before + scan_cta(sums, mask_len, &total) - mask_len;
        facts.mask_row[threadIdx.x] = r.mask_row;
        facts.seq_len[threadIdx.x] = (int32_t)r.seq_len;
        facts.window_len[threadIdx.x] = (int32_t)smla_paged_window_len(&p, &r);
        mask_before += total;
        __syncthreads(); /* the facts of all requests are there */
        const int64_t num_reqs = smla_least_of(BLOCK_THREADS, p.num_reqs - base);
        const int64_t first = base * p.rows_per_req, end = first + num_reqs * p.rows_per_req;
        for (int64_t row_base = first; row_base < end; row_base += BLOCK_THREADS) {
            const int64_t row = row_base + threadIdx.x;
            const int64_t in_block = row < end ? smla_divide_len(row - first, p.rows_per_req) : 0;
            const int64_t number = row - first - in_block * p.rows_per_req;
            int64_t len = -1;
            if (row < end && facts.seq_len[in_block] > 0) {
                len = p.mask == nullptr ? p.tree_slots
                                        : count_seen(p, facts.mask_start[in_block] +
                                                            number * facts.mask_row[in_block] +
                                                            facts.seq_len[in_block]);
            }
            extend_rows(p, sums, p.expand, row, end, len);
            if (p.swa.seqlens != nullptr) {
                extend_rows(p, sums, p.swa, row, end,
                            len < 0 ? -1 : len + facts.window_len[in_block]);
            }
        }
        __syncthreads(); /* the facts have been read */
    }
}

/* ---- Items of a request -------------------------------------------------------------------- */

/* Writes a share of the columns of the request's tables: 256, then those of the next round of all
 * items of the request. */
__device__ __forceinline__ void
write_tables(const paged_args &args, const smla_paged_request &r, int64_t req, int64_t share)
{
    const smla_paged_step_params &p = args.p;
    const int64_t row = req * p.table_stride;
    const int64_t first_column = share * BLOCK_THREADS + threadIdx.x;
    const int64_t distance = (int64_t)args.shares.divisor * BLOCK_THREADS;
    if (r.seq_len == 0) {
        if (first_column == 0 && p.table_stride > 0) {
            p.page_table[row] = 0;
            if (p.swa_page_table != nullptr) {
                p.swa_page_table[row] = 0;
            }
            if (p.encoder_table != nullptr) {
                p.encoder_table[row] = 0;
            }
        }
        return;
    }
    const int64_t keys = smla_paged_cache_len(&p, &r, p.num_steps - 1);
    const int64_t end = smla_paged_num_pages(&p, keys);
    const int64_t first = smla_paged_first_page(&p, &r);
    const int32_t *const slots = p.req_to_token + r.pool_row * p.pool_stride;
    for (int64_t column = first_column; column < end; column += distance) {
        const int32_t slot = __ldg(slots + (first + column) * p.page_size);
        p.page_table[row + column] = page_of(args, slot);
        if (p.swa_page_table != nullptr) {
            p.swa_page_table[row + column] = page_of(args, map_slot(p, slot));
        }
    }
    if (p.encoder_table != nullptr) {
        const int64_t columns = smla_paged_encoder_columns(&p, &r);
        for (int64_t column = first_column; column < columns; column += distance) {
            p.encoder_table[row + column] = page_of(args, __ldg(slots + column * p.page_size));
        }
    }
}

/* Writes the slots of a row of `expand`, by a warp. Returns how many the row has in the last step.
 * `drafts` is the first entry of the drafts in the mask. */
__device__ __forceinline__ int64_t
write_expand_row(const smla_paged_step_params &p, const smla_paged_request &r, int64_t row,
                 int64_t drafts, int lane, int32_t *out)
{
    if (p.mask == nullptr) {
        const int64_t count = p.tree_slots + p.num_steps - 1;
        for (int64_t i = lane; i < count; i += SMLA_WARP_LANES) {
            out[i] = (int32_t)smla_int_at(&p.cache_loc, row * p.row_loc + i);
        }
        return count;
    }
    int64_t num_seen = 0;
    for (int64_t base = 0; base < p.rows_per_req; base += SMLA_WARP_LANES) {
        const int64_t i = base + lane;
        num_seen += __popc(__ballot_sync(ALL_LANES, i < p.rows_per_req && is_seen(p, drafts + i)));
    }
    int64_t seen_before = 0, others_before = num_seen;
    for (int64_t base = 0; base < p.rows_per_req; base += SMLA_WARP_LANES) {
        const int64_t i = base + lane;
        const bool is_there = i < p.rows_per_req;
        const bool sees = is_there && is_seen(p, drafts + i);
        const unsigned seen = __ballot_sync(ALL_LANES, sees);
        const unsigned others = __ballot_sync(ALL_LANES, is_there && !sees);
        const unsigned lower = (1u << lane) - 1;
        if (is_there) {
            const int64_t at =
                sees ? seen_before + __popc(seen & lower) : others_before + __popc(others & lower);
            out[at] = read_slot(p, r.pool_row, r.seq_len + i, false);
        }
        seen_before += __popc(seen);
        others_before += __popc(others);
    }
    return num_seen;
}

/* Writes a row of `swa`, by the warp that has written the row of `expand`. */
__device__ __forceinline__ void
write_window_row(const smla_paged_step_params &p, const smla_paged_request &r,
                 const int32_t *expand, int64_t count, int lane, int32_t *out)
{
    const bool is_mapped = p.mapping != nullptr;
    const int64_t len = smla_paged_window_len(&p, &r);
    for (int64_t i = lane; i < len; i += SMLA_WARP_LANES) {
        out[i] = read_slot(p, r.pool_row, r.seq_len - len + i, is_mapped);
    }
    __syncwarp(); /* the row of `expand` is written */
    for (int64_t i = lane; i < count; i += SMLA_WARP_LANES) {
        out[len + i] = is_mapped ? map_slot(p, expand[i]) : expand[i];
    }
}

__device__ __forceinline__ void
write_tree(const smla_paged_step_params &p, const smla_paged_request &r, int64_t req,
           int64_t mask_start)
{
    const int warp = threadIdx.x / SMLA_WARP_LANES, lane = threadIdx.x % SMLA_WARP_LANES;
    for (int64_t i = warp; r.seq_len > 0 && i < p.rows_per_req; i += NUM_WARPS) {
        const int64_t row = req * p.rows_per_req + i;
        int32_t *const slots = p.expand.slots + row * p.expand.slots_stride;
        const int64_t drafts = mask_start + i * r.mask_row + r.seq_len;
        const int64_t count = write_expand_row(p, r, row, drafts, lane, slots);
        if (p.swa.seqlens != nullptr) {
            write_window_row(p, r, slots, count, lane, p.swa.slots + row * p.swa.slots_stride);
        }
    }
}

/* Writes the keys of virtual request `number` in a step. */
__device__ __forceinline__ void
write_virtual_keys(const paged_args &args, const smla_paged_request &r, const smla_paged_virtual &v,
                   int64_t step, int64_t number)
{
    const smla_paged_step_params &p = args.p;
    const int64_t columns = smla_divide_len(p.chunk, p.page_size);
    const int64_t at = step * p.num_local + number;
    const int64_t first = smla_paged_first_page(&p, &r);
    const int64_t start = smla_divide_len(v.start, p.page_size);
    if (threadIdx.x == 0) {
        p.local_seqlens[at] = (int32_t)v.seq_len;
    }
    for (int64_t i = threadIdx.x; i < columns; i += BLOCK_THREADS) {
        const int64_t column = smla_least_of(start + i, p.table_columns - 1);
        const int64_t position = (first + column) * p.page_size;
        p.local_table[at * columns + i] =
            v.seq_len == 0
                ? 0
                : page_of(args, read_slot(p, r.pool_row, position, p.mapping != nullptr));
    }
}

/* Writes the virtual requests of a request, from number `made` and query `queries` on. */
__device__ __forceinline__ void
write_virtual(const paged_args &args, const smla_paged_request &r, int64_t made, int64_t queries)
{
    const smla_paged_step_params &p = args.p;
    const int64_t count = smla_count_virtual(&p, r.query_len, smla_paged_cache_len(&p, &r, 0));
    for (int64_t i = 0; i < count && made + i < p.num_local; i++) {
        for (int64_t step = 0; step < p.num_steps; step++) {
            const smla_paged_virtual v =
                smla_virtual_at(&p, r.query_len, smla_paged_cache_len(&p, &r, step), i);
            queries += step == 0 ? v.query_len : 0;
            write_virtual_keys(args, r, v, step, made + i);
        }
        if (threadIdx.x == 0) {
            p.local_starts[made + i + 1] = (int32_t)queries;
        }
    }
}

/* Sums of the requests before this one. */
struct sums_before {
    int64_t mask;
    int64_t virtuals;
    int64_t queries;
};

__device__ __forceinline__ sums_before
sum_before(const smla_paged_step_params &p, cta_sums &sums, int64_t req)
{
    sums_before mine = {0, 0, 0}, all;
    for (int64_t i = threadIdx.x; i < req; i += BLOCK_THREADS) {
        const smla_paged_request r = smla_read_paged_request(&p, i);
        mine.mask += p.rows_per_req * r.mask_row;
        if (p.num_local > 0) {
            mine.virtuals += smla_count_virtual(&p, r.query_len, smla_paged_cache_len(&p, &r, 0));
        }
        mine.queries += r.query_len;
    }
    scan_cta(sums, mine.mask, &all.mask);
    scan_cta(sums, mine.virtuals, &all.virtuals);
    scan_cta(sums, mine.queries, &all.queries);
    return all;
}

__device__ __forceinline__ void
write_request(const paged_args &args, cta_sums &sums, int64_t req, int64_t share)
{
    const smla_paged_step_params &p = args.p;
    const smla_paged_request r = smla_read_paged_request(&p, req);
    write_tables(args, r, req, share);
    if (share > 0 || (p.rows_per_req == 0 && p.num_local == 0)) {
        return;
    }
    const sums_before before = sum_before(p, sums, req);
    if (p.rows_per_req > 0) {
        write_tree(p, r, req, before.mask);
    }
    if (p.num_local > 0) {
        write_virtual(args, r, before.virtuals, before.queries);
    }
}

/* ---- The grid ------------------------------------------------------------------------------ */

__device__ __forceinline__ void
map_cache_loc(const smla_paged_step_params &p, cta_sums &sums, int64_t begin)
{
    const int64_t end = smla_least_of(begin + TILE_COLUMNS, p.num_cache_loc);
    const int64_t num_queries = p.reads_tokens_alone ? sum_before(p, sums, p.num_reqs).queries : 0;
    for (int64_t i = begin + threadIdx.x; i < end; i += BLOCK_THREADS) {
        const int64_t slot =
            smla_is_padding_loc(&p, i, num_queries) ? -1 : smla_int_at(&p.cache_loc, i);
        p.swa_cache_loc[i] = slot < 0 ? (int32_t)slot : map_slot(p, slot);
    }
}

__host__ __device__ __forceinline__ int64_t
count_items(const paged_args &args)
{
    return FIRST_REQUEST_ITEM + args.p.num_reqs * args.shares.divisor +
           (args.p.num_cache_loc + TILE_COLUMNS - 1) / TILE_COLUMNS;
}

__global__ void
__launch_bounds__(BLOCK_THREADS, 2) paged_lists_kernel(const __grid_constant__ paged_args args)
{
    __shared__ cta_sums sums;
    __shared__ tree_facts facts;
    ptx_wait_for_grids();
    const smla_paged_step_params &p = args.p;
    const int64_t num_items = count_items(args);
    const int64_t first_loc = FIRST_REQUEST_ITEM + p.num_reqs * args.shares.divisor;
    for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
        if (item == 0) {
            write_lengths(p, sums);
        } else if (item < FIRST_REQUEST_ITEM) {
            if (p.rows_per_req > 0) {
                write_row_lengths(p, sums, facts);
            }
            for (int64_t i = threadIdx.x; i <= p.num_tokens; i += BLOCK_THREADS) {
                p.token_ids[i] = (int32_t)i;
            }
        } else if (item < first_loc) {
            /* There are fewer than 2^32 items, because max_bs is below 2^21. */
            const int64_t req =
                smla_divide_uint32((uint32_t)(item - FIRST_REQUEST_ITEM), args.shares);
            write_request(args, sums, req, item - FIRST_REQUEST_ITEM - req * args.shares.divisor);
        } else {
            map_cache_loc(p, sums, (item - first_loc) * TILE_COLUMNS);
        }
    }
}

} /* namespace */

cudaError_t
smla_cuda_launch_fill_paged_lists(const smla_paged_step_params *p, const smla_cuda_device *)
{
    const int64_t columns =
        p->table_columns > p->encoder_columns ? p->table_columns : p->encoder_columns;
    const int64_t tiles = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int64_t most = MOST_ITEMS / (p->num_reqs + 1) + 1;
    const int64_t shares = smla_least_of(tiles > 0 ? tiles : 1, most);
    paged_args args = {*p, smla_make_divisor(p->page_size), smla_make_divisor(shares)};
    if (p->swa_cache_loc == nullptr) {
        args.p.num_cache_loc = 0;
    }
    return smla_launch(paged_lists_kernel, args, count_items(args), BLOCK_THREADS, 0,
                       p->call.stream);
}
