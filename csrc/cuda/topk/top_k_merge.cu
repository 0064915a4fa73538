/* top_k_merge.cu: top_k_merge: the k best of N lists of positions with scores, in ascending order.
 *
 * Computes     out[t] = the positions of indices[:, t] with the k largest keys of values[:, t], of
 *              equal keys those with the smallest positions, in ascending order, then -1
 * Shapes       indices [N, T, K] int32, values [N, T, K] fp32 or bf16, out [T, k] int32, lists and
 *              rows any stride apart; N * K < 2^31
 * Shared mem   select_memory of top_k_digits.cuh, 25 KB; then merge_memory, 17 KB: the positions of
 *              a run of the result, list by list, and how many each list and each warp has
 * Roles        A CTA takes one token at a time, a warp a run of chunks of 32 entries of a list.
 *                keys       find_least finds the smallest key that is taken, digit by digit.
 *                positions  If only some of the keys equal to it are taken, find_least finds the
 *                           last position among them, the same way.
 *                result     In runs of 4096: each warp counts what it takes, and writes it to
 *                           shared memory behind earlier warps' entries, so that every list's part
 *                           ascends. The place of an entry in the run is the number of smaller
 *                           positions in the parts of all lists, found by bisection.
 *              Every step reads the lists again. Barriers (__syncthreads): counts are clear;
 *              find_digit's; entries are counted; places of warps and lists are known; the run is
 *              complete in shared memory; it is written.
 * Roofline     L2 or L1: 8 bytes per entry, five times, eight times where keys are equal. 8 lists
 *              of 2048: 128 KB per read and CTA.
 * Numerics     Integers, exact, and the result does not depend on the order of atomics, which only
 *              count. Entries below 0 are none. NaN is below -inf, and -0 equals 0.
 * Source       ours; keys, digits and their counts are top_k.cuh's.
 */
#include "cuda/topk/top_k_digits.cuh"
#include "sparse_mla/topk.h"

namespace {

enum { RUN_ENTRIES = 4096 }; /* results that are ordered together */

struct merge_memory {
    int32_t positions[RUN_ENTRIES];
    uint32_t list_counts[SMLA_MAX_MERGED_LISTS];
    uint32_t list_starts[SMLA_MAX_MERGED_LISTS + 1];
    uint32_t warp_counts[NUM_WARPS];
};

struct merge_args {
    smla_top_k_merge_params p;
    uint32_t list_chunks; /* chunks of 32 entries per list */
    uint32_t warp_chunks; /* chunks per warp */
};

/* A token's lists. */
struct token_lists {
    const int32_t *indices;
    const void *values;
    uint32_t first_chunk; /* this warp's chunks */
    uint32_t end_chunk;
};

/* A lane's entry. */
struct entry {
    uint32_t key;     /* 0: there is none */
    int32_t position; /* then -1 */
};

/* ---- Reading entries ----------------------------------------------------------------------- */

__device__ __forceinline__ token_lists
open_lists(const merge_args &args, int64_t token)
{
    const smla_top_k_merge_params &p = args.p;
    const uint32_t num_chunks = (uint32_t)p.num_lists * args.list_chunks;
    const uint32_t first = threadIdx.x / SMLA_WARP_LANES * args.warp_chunks;
    const int64_t value_bytes = p.is_bf16 ? 2 : 4;
    return {p.indices + token * p.indices_stride_token,
            (const uint8_t *)p.values + token * p.values_stride_token * value_bytes,
            min(first, num_chunks), min(first + args.warp_chunks, num_chunks)};
}

template <bool IS_BF16>
__device__ __forceinline__ entry
load_entry(const smla_top_k_merge_params &p, const token_lists &lists, uint32_t list,
           uint32_t column)
{
    if (column >= p.num_columns) {
        return {0, -1};
    }
    const int32_t position = __ldg(lists.indices + list * p.indices_stride_list + column);
    const uint32_t key =
        logit_vector<IS_BF16>::load(lists.values, list * p.values_stride_list + column);
    return position < 0 ? entry{0, -1} : entry{key, position};
}

/* Calls use(list, entry) for the lane's entries of the warp's chunks. All lanes call it for the
 * same chunk. The next chunks' entries are loaded before one is used. */
template <bool IS_BF16, typename Use>
__device__ __forceinline__ void
visit_entries(const merge_args &args, const token_lists &lists, const Use &use)
{
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
    uint32_t list = lists.first_chunk / args.list_chunks;
    uint32_t chunk = lists.first_chunk - list * args.list_chunks; /* in its list */
#pragma unroll 1
    for (uint32_t first = lists.first_chunk; first < lists.end_chunk; first += BATCH) {
        entry entries[BATCH];
        uint32_t list_of[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const bool is_chunk = first + i < lists.end_chunk;
            const uint32_t column = is_chunk ? chunk * SMLA_WARP_LANES + lane : UINT32_MAX;
            entries[i] = load_entry<IS_BF16>(args.p, lists, list, column);
            list_of[i] = list;
            chunk++;
            if (chunk == args.list_chunks) {
                chunk = 0;
                list++;
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            use(list_of[i], entries[i]);
        }
    }
}

/* ---- What is taken ------------------------------------------------------------------------- */

/* The smallest of the numbers that are taken. */
struct least_number {
    uint32_t least;
    uint32_t total;     /* how many numbers there are */
    uint32_t num_equal; /* how many of those equal to `least` are taken; 0: all */
};

__device__ __forceinline__ uint32_t
sum_warps(const merge_memory *memory)
{
    uint32_t sum = 0;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; warp++) {
        sum += memory->warp_counts[warp];
    }
    return sum;
}

/* Finds the smallest of the `count` largest numbers, of which number(entry) gives each entry one,
 * or 0 for none. The numbers have DIGITS digits, the others are 0. If there are at most `count`, it
 * is 1. All threads of the CTA call this. */
template <bool IS_BF16, int DIGITS, typename Number>
__device__ __forceinline__ least_number
find_least(const merge_args &args, const token_lists &lists, select_memory *select,
           merge_memory *memory, uint32_t count, const Number &number)
{
    uint32_t num_numbers = 0;
    clear_counts(select->counts[0]);
    __syncthreads(); /* the counts are clear */
    visit_entries<IS_BF16>(args, lists, [&](uint32_t, const entry &of) {
        const uint32_t x = number(of);
        if (x != 0) {
            atomicAdd(&select->counts[0][digit_of<0>(x)], 1u);
            num_numbers++;
        }
    });
    num_numbers = __reduce_add_sync(ALL_LANES, num_numbers);
    if (threadIdx.x % SMLA_WARP_LANES == 0) {
        memory->warp_counts[threadIdx.x / SMLA_WARP_LANES] = num_numbers;
    }
    __syncthreads(); /* the numbers are counted */
    const uint32_t total = sum_warps(memory);
    if (total <= count) {
        __syncthreads(); /* all threads have read the counts */
        return {1, total, 0};
    }
    find_digit<1>(select, 0, count);
    uint32_t prefix = select->digit;
    uint32_t num_left = select->num_left;
    if (select->digit_count == num_left) {
        return {prefix << 21, total, 0};
    }
    visit_entries<IS_BF16>(args, lists, [&](uint32_t, const entry &of) {
        count_digit<1>(number(of), prefix, select->counts[1]);
    });
    find_digit<1>(select, 1, num_left);
    prefix = prefix << 11 | select->digit;
    num_left = select->num_left;
    const bool are_all = select->digit_count == num_left;
    if (DIGITS == 2 || are_all) {
        return {prefix << 10, total, are_all ? 0 : num_left};
    }
    visit_entries<IS_BF16>(args, lists, [&](uint32_t, const entry &of) {
        count_digit<2>(number(of), prefix, select->counts[0]);
    });
    find_digit<1>(select, 0, num_left);
    const bool is_whole = select->digit_count == select->num_left;
    return {prefix << 10 | select->digit, total, is_whole ? 0 : select->num_left};
}

/* The token takes all keys above `key`, and those equal to it up to position `last`. */
struct merge_threshold {
    uint32_t key;
    int32_t last;
    uint32_t num_taken;
};

__device__ __forceinline__ bool
is_taken(const merge_threshold &threshold, const entry &of)
{
    return of.key > threshold.key || (of.key == threshold.key && of.position <= threshold.last);
}

/* Positions as numbers of which the first are the largest. */
__device__ __forceinline__ uint32_t
turn_position(int32_t position)
{
    return ~(uint32_t)position;
}

template <bool IS_BF16>
__device__ __forceinline__ merge_threshold
find_merge_threshold(const merge_args &args, const token_lists &lists, select_memory *select,
                     merge_memory *memory)
{
    const uint32_t k = (uint32_t)args.p.k;
    const least_number keys =
        find_least<IS_BF16, IS_BF16 ? 2 : 3>(args, lists, select, memory, k,
                                             [](const entry &of) { return of.key; });
    const uint32_t num_taken = min(keys.total, k);
    if (keys.num_equal == 0) {
        return {keys.least - 1, INT32_MIN, num_taken};
    }
    const uint32_t key = keys.least;
    const least_number turned =
        find_least<IS_BF16, 3>(args, lists, select, memory, keys.num_equal, [=](const entry &of) {
            return of.key == key ? turn_position(of.position) : 0;
        });
    return {key, (int32_t)min(turn_position((int32_t)turned.least), (uint32_t)INT32_MAX),
            num_taken};
}

/* ---- Results ------------------------------------------------------------------------------- */

/* Positions of the result: those above `after`, up to `last`. */
struct result_run {
    int32_t after;
    int32_t last;
};

__device__ __forceinline__ bool
is_of_run(const merge_threshold &threshold, const result_run &run, const entry &of)
{
    return is_taken(threshold, of) && of.position > run.after && of.position <= run.last;
}

/* Counts the run's entries per warp and per list, then lists_starts. */
template <bool IS_BF16>
__device__ __forceinline__ void
count_run(const merge_args &args, const token_lists &lists, const merge_threshold &threshold,
          const result_run &run, merge_memory *memory)
{
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
    const uint32_t warp = threadIdx.x / SMLA_WARP_LANES;
    uint32_t num_own = 0;
    if (threadIdx.x < SMLA_MAX_MERGED_LISTS) {
        memory->list_counts[threadIdx.x] = 0;
    }
    __syncthreads(); /* the counts are clear */
    visit_entries<IS_BF16>(args, lists, [&](uint32_t list, const entry &of) {
        const uint32_t count = __popc(__ballot_sync(ALL_LANES, is_of_run(threshold, run, of)));
        if (lane == 0 && count != 0) {
            atomicAdd(&memory->list_counts[list], count);
        }
        num_own += count;
    });
    if (lane == 0) {
        memory->warp_counts[warp] = num_own;
    }
    __syncthreads(); /* the entries are counted */
    if (warp == 0) {
        static_assert(SMLA_MAX_MERGED_LISTS == 2 * SMLA_WARP_LANES, "two lists per lane");
        const uint32_t first = memory->list_counts[2 * lane];
        const uint32_t both = first + memory->list_counts[2 * lane + 1];
        const uint32_t end = scan_lanes(both);
        memory->list_starts[2 * lane] = end - both;
        memory->list_starts[2 * lane + 1] = end - both + first;
        if (lane == SMLA_WARP_LANES - 1) {
            memory->list_starts[SMLA_MAX_MERGED_LISTS] = end;
        }
    }
    __syncthreads(); /* the lists' starts are known */
}

/* Writes the run's positions to shared memory, list by list. There are more of them than fit only
 * where lists share positions. */
template <bool IS_BF16>
__device__ __forceinline__ void
gather_run(const merge_args &args, const token_lists &lists, const merge_threshold &threshold,
           const result_run &run, merge_memory *memory)
{
    const uint32_t lanes_before = (1u << threadIdx.x % SMLA_WARP_LANES) - 1;
    uint32_t start = 0;
    for (uint32_t warp = 0; warp < threadIdx.x / SMLA_WARP_LANES; warp++) {
        start += memory->warp_counts[warp];
    }
    visit_entries<IS_BF16>(args, lists, [&](uint32_t, const entry &of) {
        const bool is_own = is_of_run(threshold, run, of);
        const uint32_t votes = __ballot_sync(ALL_LANES, is_own);
        const uint32_t place = start + __popc(votes & lanes_before);
        if (is_own && place < RUN_ENTRIES) {
            memory->positions[place] = of.position;
        }
        start += __popc(votes);
    });
}

/* The number of positions of a list's part that are below `position`. */
__device__ __forceinline__ uint32_t
count_below(const merge_memory *memory, uint32_t list, int32_t position)
{
    const uint32_t start = min(memory->list_starts[list], (uint32_t)RUN_ENTRIES);
    uint32_t low = start;
    uint32_t high = min(memory->list_starts[list + 1], (uint32_t)RUN_ENTRIES);
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (memory->positions[middle] < position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - start;
}

/* Writes the run's positions in ascending order to out[0...room - 1]. */
__device__ __forceinline__ void
write_run(const merge_args &args, const merge_memory *memory, int32_t *out, uint32_t room)
{
    const uint32_t count = min(memory->list_starts[SMLA_MAX_MERGED_LISTS], (uint32_t)RUN_ENTRIES);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count; i += BLOCK_THREADS) {
        const int32_t position = memory->positions[i];
        uint32_t place = 0;
#pragma unroll 1
        for (uint32_t list = 0; list < args.p.num_lists; list++) {
            place += count_below(memory, list, position);
        }
        if (place < room) {
            out[place] = position;
        }
    }
}

template <bool IS_BF16>
__device__ __forceinline__ void
merge_token(const merge_args &args, int64_t token, select_memory *select, merge_memory *memory)
{
    const token_lists lists = open_lists(args, token);
    int32_t *const out = args.p.out + token * args.p.out_stride_token;
    /* Lists that share positions leave places of the result unwritten: they are -1, too. */
    for (int64_t i = threadIdx.x; i < args.p.k; i += BLOCK_THREADS) {
        out[i] = -1;
    }
    const merge_threshold threshold = find_merge_threshold<IS_BF16>(args, lists, select, memory);
    result_run run = {-1, INT32_MAX};
#pragma unroll 1
    for (uint32_t done = 0; done < threshold.num_taken; done += RUN_ENTRIES) {
        run.last = INT32_MAX;
        if (threshold.num_taken - done > RUN_ENTRIES) {
            const least_number turned =
                find_least<IS_BF16, 3>(args, lists, select, memory, RUN_ENTRIES,
                                       [=](const entry &of) {
                                           return is_of_run(threshold, run, of)
                                                      ? turn_position(of.position)
                                                      : 0;
                                       });
            run.last = (int32_t)min(turn_position((int32_t)turned.least), (uint32_t)INT32_MAX);
        }
        count_run<IS_BF16>(args, lists, threshold, run, memory);
        gather_run<IS_BF16>(args, lists, threshold, run, memory);
        __syncthreads(); /* the run is complete in shared memory, and -1 in its places */
        write_run(args, memory, out + done, threshold.num_taken - done);
        __syncthreads(); /* the run is written */
        run.after = run.last;
    }
}

template <bool IS_BF16>
__global__ void
__launch_bounds__(BLOCK_THREADS, 2) top_k_merge_kernel(const __grid_constant__ merge_args args)
{
    extern __shared__ __align__(128) uint8_t bytes[];
    select_memory *const select = (select_memory *)bytes;
    merge_memory *const memory = (merge_memory *)(bytes + sizeof(select_memory));
    ptx_wait_for_grids();
    for (int64_t token = blockIdx.x; token < args.p.num_tokens; token += gridDim.x) {
        merge_token<IS_BF16>(args, token, select, memory);
        __syncthreads(); /* the next token may use the memory */
    }
}

} // namespace

cudaError_t
smla_cuda_launch_top_k_merge(const smla_top_k_merge_params *p, const smla_cuda_device *)
{
    enum { BYTES = sizeof(select_memory) + sizeof(merge_memory) };
    static_assert(BYTES <= 48 << 10, "what a kernel has without asking");
    const int64_t list_chunks = smla_count_parts(p->num_columns, SMLA_WARP_LANES);
    const int64_t warp_chunks = smla_count_parts(list_chunks * p->num_lists, NUM_WARPS);
    /* Lists without entries have a chunk, so that no division is by 0. */
    const merge_args args = {*p, (uint32_t)(list_chunks > 0 ? list_chunks : 1),
                             (uint32_t)(warp_chunks > 0 ? warp_chunks : 1)};
    return smla_launch(p->is_bf16 ? top_k_merge_kernel<true> : top_k_merge_kernel<false>, args,
                       p->num_tokens, BLOCK_THREADS, BYTES, p->call.stream);
}
