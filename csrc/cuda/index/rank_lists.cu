/* rank_lists.cu: what of a request a rank of context parallelism has: positions become the rank's
 * own, lists of them without holes, and lengths their share.
 *
 * Computes     out = pos / (I * G) * I + pos % I where pos / I % G is the rank, of G ranks and an
 *              interleave of I; else -1. A list: the same, the entries >= 0 in their order, then
 *              -1, and lens[t] = their number. A length: how many of so many positions the rank has
 * Shapes       positions [N] or [T, K] int64 or int32, any strides; lists [T, K] int32, out alike,
 *              rows any stride apart; seq_lens [B], lens [T] int32, any strides, out [B]
 * Shared mem   lists: 256 bytes, the number of own positions that each warp found in each vector of
 *              a tile, for two tiles
 * Roles        Positions and lengths: a thread takes an element at a time. Lists: a CTA takes one
 *              row at a time, in tiles of 1024 columns, whose entries it loads while it writes the
 *              tile before. Barrier (__syncthreads): the counts of a tile are written.
 * Roofline     Memory: 8 bytes per int32 entry; 128 lists of 2048 take 0.5 us at 4.2 TB/s, so
 *              latency binds them: load, divide twice, vote, meet, store. On an H200, in a graph
 *              and with a cold cache: 6.3 us. Positions of as many entries, with nothing to vote
 *              on, take 5.3.
 * Numerics     Integers, exact. The rule is core/attention/visible.h's.
 * Source       ours; the compaction is that of slot_rows.cuh.
 */
#include "cuda/index/slot_rows.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    TILE_ENTRIES = SLOT_COUNTS * SMLA_WARP_LANES,
    LANE_ENTRIES = TILE_ENTRIES / BLOCK_THREADS, /* entries per thread of a tile */
};

struct rank_lists_args {
    smla_rank_lists_params p;
    smla_divisor interleave;
    smla_divisor size;
    smla_divisor num_columns;
};

/* What a thread makes of an element. */
enum map_kind { OWN_INT32, OWN_INT64, COUNT_OWN };

__device__ __forceinline__ int32_t
find_own_int32(const rank_lists_args &args, int32_t position)
{
    const uint32_t block = smla_divide_uint32((uint32_t)position, args.interleave);
    const uint32_t round = smla_divide_uint32(block, args.size);
    return position < 0 ? -1 : (int32_t)smla_own_position(&args.p.share, position, block, round);
}

__device__ __forceinline__ int64_t
find_own_int64(const rank_lists_args &args, int64_t position)
{
    if (position < 0) {
        return -1;
    }
    const int64_t block = smla_divide(position, args.interleave);
    return smla_own_position(&args.p.share, position, block, smla_divide(block, args.size));
}

template <map_kind KIND>
__global__ void
__launch_bounds__(BLOCK_THREADS) rank_map_kernel(const __grid_constant__ rank_lists_args args)
{
    const smla_rank_lists_params &p = args.p;
    const int64_t count = p.num_rows * p.num_columns;
    const int64_t step = (int64_t)gridDim.x * BLOCK_THREADS;
    ptx_wait_for_grids();
    for (int64_t i = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x; i < count; i += step) {
        const int64_t row = p.num_rows == 1 ? 0 : smla_divide(i, args.num_columns);
        const int64_t column = i - row * p.num_columns;
        const int64_t from = row * p.in_stride_row + column * p.in_stride_column;
        const int64_t to = row * p.out_stride_row + column;
        if constexpr (KIND == OWN_INT64) {
            ((int64_t *)p.out)[to] = find_own_int64(args, __ldg((const long long *)p.in + from));
        } else if constexpr (KIND == OWN_INT32) {
            ((int32_t *)p.out)[to] = find_own_int32(args, __ldg((const int32_t *)p.in + from));
        } else {
            const int32_t length = __ldg((const int32_t *)p.in + from);
            ((int32_t *)p.out)[to] = (int32_t)smla_count_own(&p.share, max(length, 0));
        }
    }
}

/* Loads a thread's entries of a tile; those beyond the last column are -1. */
__device__ __forceinline__ void
load_entries(const rank_lists_args &args, const int32_t *in, int64_t tile,
             int32_t entries[LANE_ENTRIES])
{
#pragma unroll
    for (int i = 0; i < LANE_ENTRIES; i++) {
        const int64_t column = tile + i * BLOCK_THREADS + threadIdx.x;
        entries[i] = column < args.p.num_columns ? __ldg(in + column) : -1;
    }
}

__global__ void
__launch_bounds__(BLOCK_THREADS, 4) rank_lists_kernel(const __grid_constant__ rank_lists_args args)
{
    __shared__ int32_t counts[2][SLOT_COUNTS];
    const smla_rank_lists_params &p = args.p;
    int half = 0;
    ptx_wait_for_grids();
    for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
        const int32_t *const in = (const int32_t *)p.in + row * p.in_stride_row;
        int32_t *const out = (int32_t *)p.out + row * p.out_stride_row;
        int32_t entries[LANE_ENTRIES];
        int64_t count = 0;
        load_entries(args, in, 0, entries);
        for (int64_t tile = 0; tile < p.num_columns; tile += TILE_ENTRIES) {
            int32_t own[LANE_ENTRIES];
#pragma unroll
            for (int i = 0; i < LANE_ENTRIES; i++) {
                own[i] = find_own_int32(args, entries[i]);
            }
            load_entries(args, in, tile + TILE_ENTRIES, entries);
            count += append_slots<BLOCK_THREADS>(own, counts[half], out + count);
            half ^= 1;
        }
        for (int64_t i = count + threadIdx.x; i < p.num_columns; i += BLOCK_THREADS) {
            out[i] = -1;
        }
        if (threadIdx.x == 0) {
            p.lens[row * p.lens_stride] = (int32_t)count;
        }
    }
}

rank_lists_args
make_args(const smla_rank_lists_params *p)
{
    const int64_t columns = p->num_columns > 0 ? p->num_columns : 1; /* lists may have none */
    return rank_lists_args{*p, smla_make_divisor(p->share.interleave),
                           smla_make_divisor(p->share.size), smla_make_divisor(columns)};
}

cudaError_t
launch_map(smla_kernel<rank_lists_args> kernel, const smla_rank_lists_params *p)
{
    return smla_launch(kernel, make_args(p),
                       smla_count_parts(p->num_rows * p->num_columns, BLOCK_THREADS), BLOCK_THREADS,
                       0, p->call.stream);
}

} /* namespace */

cudaError_t
smla_cuda_launch_cp_local_positions(const smla_rank_lists_params *p, const smla_cuda_device *)
{
    return launch_map(p->are_int64 ? rank_map_kernel<OWN_INT64> : rank_map_kernel<OWN_INT32>, p);
}

cudaError_t
smla_cuda_launch_cp_local_lengths(const smla_rank_lists_params *p, const smla_cuda_device *)
{
    return launch_map(rank_map_kernel<COUNT_OWN>, p);
}

cudaError_t
smla_cuda_launch_cp_local_topk(const smla_rank_lists_params *p, const smla_cuda_device *)
{
    return smla_launch(rank_lists_kernel, make_args(p), p->num_rows, BLOCK_THREADS, 0,
                       p->call.stream);
}
