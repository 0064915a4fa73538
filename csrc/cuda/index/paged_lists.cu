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
 *              item per request and 1024 columns of the longest table, or fewer items if they are
 *              many: each goes through the columns that the request has. The first of a request
 *              writes its rows of slots, by a warp each, and its virtual requests. It sums the
 *              sizes of all requests before it, so no item waits for another. The last items map
 *              cache_loc. The grid follows from shapes alone, so a captured step has room for any
 *              lengths.
 * Roofline     Memory: 4 bytes written per page, and a sector of 32 read. Latency binds. On an H200
 *              (2026-11-30, bench --only paged_steps) 3.9 to 5.8 us in every mode: 4.9 for 256
 *              requests of 32,768 tokens, 5.7 for a tree of 8 in 64 of 4096.
 * Numerics     Integers, exact, the values of the CPU backend. Slots of the mapping out of range
 *              are -1. Lengths are cut to the config and to the width of req_to_token.
 * Source       SGLang's FlashAttentionBackend, for its results; one launch for all arrays is ours.
 */
#include "cuda/host/cuda.h"
#include "cuda/index/paged_rows.cuh"

namespace {

enum { FIRST_REQUEST_ITEM = 2, TILE_COLUMNS = 1024 };
enum { MOST_ITEMS = 4096 }; /* items of all requests, about: what keeps a GPU busy */

/* ---- Item 0: an entry per request ---------------------------------------------------------- */

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
