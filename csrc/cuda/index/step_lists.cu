/* step_lists.cu: the lists of a DeepSeek V4 step that depend on block tables and on slot_mapping:
 * windows, slots of compressed rows and of states.
 *
 * Computes     A token t of request b at position p is valid if it belongs to a request and
 *              slot_mapping[t] >= 0. seen = p + 1 for a valid token, else 0.
 *              Windows: swa_lens[t] = min(seen, window); swa_indices[t] = the slots of the last
 *              swa_lens[t] positions, oldest first, then -1.
 *              For each group, which compresses `ratio` tokens into a row: slot_mapping[t] = the
 *              slot of row p / ratio if t is valid and seen % ratio == 0, else -1;
 *              state_slot_mapping[t] = the slot of p if t is valid, else -1; context_lens[t] =
 *              seen / ratio; lens[t] = min(context_lens[t], width); indices[t] = rows
 *              0...lens[t] - 1, as slots for a decode and as numbers for a prefill, then -1.
 *              Of several ranks, each counts its own rows of a group alone: a row has its number
 *              among these, context_lens[t] is how many of them t sees, and the slot of another
 *              rank's row is -1
 * Shapes       swa_indices [T, window], indices [T, width] with a stride, vectors [num_rows] int32,
 *              is_valid [num_rows] bytes; block tables [R, W] int32 and slot_mapping [T], any
 *              strides; req_id_per_token, positions [T] int32
 * Shared mem   none
 * Roles        A CTA takes one token at a time, and a thread one column in 256. Thread 0 writes the
 *              token's entries of the vectors. The last CTAs clear the rows behind the step's
 *              tokens: 256 rows at a time, one per thread.
 * Roofline     Memory: 4 bytes per column written, 4 / block size read. Latency binds a launch of
 *              few tokens. Not yet measured.
 * Numerics     Integers, exact, the values of the CPU backend. -1 where the table has no page or
 *              int32 cannot hold the slot.
 * Source       The metadata builders of vLLM's DeepSeek V4 backend, for their results; one launch
 *              for all lists of a step is ours.
 */
#include "core/params_step.h"
#include "cuda/index/slot.cuh"

namespace {

enum { BLOCK_THREADS = 256 };

/* A group's tables and divisors; the params have its other fields. */
struct group_tables {
    page_table pages;
    page_table state_pages;
    smla_divisor ratio;
};

struct step_lists_args {
    smla_step_lists_params p;
    page_table swa_pages;
    group_tables tables[SMLA_MAX_STEP_GROUPS];
};

__device__ __forceinline__ bool
has_slot(const smla_step_lists_params &p, int64_t token)
{
    return smla_read_integer(p.slot_mapping, p.slots_are_int64, token * p.slot_stride) >= 0;
}

/* The facts of a token that all threads of its CTA have. */
struct step_token {
    int64_t token;
    int64_t req;
    int32_t position;
    uint32_t seen;
    bool is_valid;
    bool is_decode;
};

__device__ __forceinline__ step_token
read_token(const smla_step_lists_params &p, int64_t token)
{
    const bool is_valid = token < p.num_query_tokens && has_slot(p, token);
    const int32_t position = __ldg(p.positions + token);
    return step_token{token,    __ldg(p.req_id_per_token + token),
                      position, is_valid ? (uint32_t)position + 1 : 0,
                      is_valid, token < p.num_decode_tokens};
}

__device__ __forceinline__ void
write_window(const step_lists_args &args, const step_token &t)
{
    const smla_step_lists_params &p = args.p;
    const int64_t len = t.seen < p.window ? t.seen : p.window;
    const int64_t first = t.seen - len;
    int32_t *const out = p.swa_indices + t.token * p.window;
    for (int64_t column = threadIdx.x; column < p.window; column += BLOCK_THREADS) {
        out[column] =
            column < len ? find_slot(args.swa_pages, t.req, (int32_t)(first + column)) : -1;
    }
    if (threadIdx.x == 0) {
        p.is_valid[t.token] = t.is_valid;
        p.swa_lens[t.token] = (int32_t)len;
    }
}

__device__ __forceinline__ void
write_group(const smla_rank_share &share, const smla_step_group &g, const group_tables &tables,
            const step_token &t)
{
    const uint32_t groups = smla_divide_uint32(t.seen, tables.ratio);
    const int64_t own_groups = smla_count_own(&share, groups);
    const int64_t len = own_groups < g.width ? own_groups : g.width;
    if (threadIdx.x == 0) {
        const bool ends_group = t.is_valid && groups * g.ratio == t.seen;
        const int64_t row = ends_group ? smla_find_own_row(&share, (int64_t)groups - 1) : -1;
        g.slot_mapping[t.token] = row >= 0 ? find_slot(tables.pages, t.req, (int32_t)row) : -1;
        g.context_lens[t.token] = (int32_t)own_groups;
        g.lens[t.token] = (int32_t)len;
        if (g.state_slot_mapping != nullptr) {
            g.state_slot_mapping[t.token] =
                t.is_valid ? find_slot(tables.state_pages, t.req, t.position) : -1;
        }
    }
    if (g.indices == nullptr) {
        return;
    }
    int32_t *const out = g.indices + t.token * g.indices_stride_token;
    for (int64_t column = threadIdx.x; column < g.width; column += BLOCK_THREADS) {
        int32_t index = -1;
        if (column < len) {
            index = t.is_decode ? find_slot(tables.pages, t.req, (int32_t)column) : (int32_t)column;
        }
        out[column] = index;
    }
}

/* Clears the vectors' entries of a row behind the step's tokens. */
__device__ __forceinline__ void
clear_row(const smla_step_lists_params &p, int64_t row)
{
    p.is_valid[row] = 0;
    p.swa_lens[row] = 0;
    for (int i = 0; i < p.num_groups; i++) {
        const smla_step_group &g = p.groups[i];
        g.slot_mapping[row] = -1;
        g.context_lens[row] = 0;
        g.lens[row] = 0;
        if (g.state_slot_mapping != nullptr) {
            g.state_slot_mapping[row] = -1;
        }
    }
}

/* The number of work items of the grid: one per token, then one per 256 rows behind the tokens. */
__host__ __device__ __forceinline__ int64_t
count_work_items(const smla_step_lists_params &p)
{
    return p.num_tokens + (p.num_rows - p.num_tokens + BLOCK_THREADS - 1) / BLOCK_THREADS;
}

__global__ void
__launch_bounds__(BLOCK_THREADS) step_lists_kernel(const __grid_constant__ step_lists_args args)
{
    ptx_wait_for_grids();
    const smla_step_lists_params &p = args.p;
    const int64_t num_work_items = count_work_items(p);
    for (int64_t work = blockIdx.x; work < num_work_items; work += gridDim.x) {
        if (work < p.num_tokens) {
            const step_token token = read_token(p, work);
            write_window(args, token);
            for (int i = 0; i < p.num_groups; i++) {
                write_group(p.share, p.groups[i], args.tables[i], token);
            }
        } else {
            const int64_t row = p.num_tokens + (work - p.num_tokens) * BLOCK_THREADS + threadIdx.x;
            if (row < p.num_rows) {
                clear_row(p, row);
            }
        }
    }
}

} /* namespace */

cudaError_t
smla_cuda_launch_fill_step_lists(const smla_step_lists_params *p, const smla_cuda_device *)
{
    step_lists_args args = {*p, page_table_of(p->swa_pages), {}};
    for (int i = 0; i < p->num_groups; i++) {
        const smla_step_group &g = p->groups[i];
        args.tables[i].pages = page_table_of(g.pages);
        args.tables[i].state_pages = page_table_of(g.state_pages);
        args.tables[i].ratio = smla_make_divisor(g.ratio);
    }
    return smla_launch(step_lists_kernel, args, count_work_items(*p), BLOCK_THREADS, 0,
                       p->call.stream);
}
