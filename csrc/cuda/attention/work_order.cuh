/* work_order.cuh: which works a CTA of Hopper's kernels takes, one after the other.
 *
 * A row takes as long as it has keys, so where lists differ in length a CTA that takes every
 * gridDim.x-th work may meet two long rows, and all others wait for it at the end. Here every CTA
 * works out one order for the whole grid, and takes its own part of it. All CTAs read the same
 * lists and come to the same order, so they need no memory in common and no messages.
 *
 * Works are taken in rounds of gridDim.x. In the first round CTA c takes work c, so that nothing
 * waits for the order when a launch starts. In each further round the CTA with the least load so
 * far takes the longest work of the round, the next one the next longest, and so on. In a last
 * round that is not full the CTAs with the largest loads take none.
 *
 * Lengths are estimates from a few columns of each work's main list. A wrong estimate costs time.
 * It changes no result, because the bits of a row do not depend on what its CTA did before. Where
 * the last column of every list is a key, all of them are taken for full: there is nothing to
 * level, and the order is the fixed one.
 *
 * Launches of one work per CTA, of more than NUM_ROUNDS rounds or of several splits keep the fixed
 * order: work n * gridDim.x + c is the n-th of CTA c. Many rounds level the loads by themselves.
 */
#ifndef SMLA_CUDA_WORK_ORDER_CUH
#define SMLA_CUDA_WORK_ORDER_CUH

#include "cuda/attention/attend.cuh"

enum {
    NUM_ROUNDS = 4,      /* that are ordered at most */
    ORDER_THREADS = 256, /* all consumers; a grid has no more CTAs */
    ORDER_SAMPLES = 16,  /* columns of a work that are looked at */
    FULL_LENGTH = 240,   /* of a work with as many keys as its list has columns */
};

/* What the plan leaves in shared memory, where it stays until the CTA ends. */
typedef struct work_order {
    alignas(8) uint64_t planned;   /* `works` is there: one arrival, or all consumers' */
    int32_t works[1 + NUM_ROUNDS]; /* the CTA's, as nth_work gives them; the first by start_order */
    uint32_t
        seen; /* where works may be cut: a bit for each length; at the end, for what is folded */
} work_order;

/* Memory for the plan while it is made. */
typedef struct round_scratch {
    alignas(16) uint32_t cta_keys[ORDER_THREADS]; /* loads: see make_order_key */
    uint32_t work_keys[ORDER_THREADS];            /* lengths, the longest first */
    uint8_t ranked[ORDER_THREADS];                /* works of a round, the longest first */
} round_scratch;

typedef struct order_scratch {
    round_scratch round;
    uint8_t lengths[NUM_ROUNDS * ORDER_THREADS]; /* of all works */
} order_scratch;

enum : uint32_t { LAST_ORDER_KEY = 0xFFFFFFFFu }; /* of what is not there */

static_assert((int)ORDER_THREADS == CTA_THREADS, "a consumer thread for each CTA of the grid");

/* CTAs for a number of works: one per SM, and one that has none where an SM would be idle, or as
 * many as there are SMs where they may get a piece of a work. A CTA without a work waits for no
 * memory, so it is the first to execute every piece of the kernel's code, and fetches it for the
 * others, from memory to the L2 cache: behind other kernels 2 us of a small call. */
static inline int64_t
count_ctas(const attention_launch &launch, int64_t num_works)
{
    const int64_t num_sms = smla_cuda_find_device(launch.params.stream.device_id)->num_sms;
    return num_works < num_sms && launch.num_segments == 1 ? num_works + 1 : num_sms;
}

/* Whether a launch has an order of its own. */
static inline bool
has_order(const attention_launch &launch, int64_t num_works, int64_t num_ctas)
{
    return launch.num_segments > 1 || (launch.params.num_splits == 1 && num_ctas <= ORDER_THREADS &&
                                       num_works > num_ctas && num_works <= NUM_ROUNDS * num_ctas);
}

/* Before any other call, by one thread. A work that may be cut is whole as long as no plan says
 * otherwise, and the only one. */
static __device__ __forceinline__ void
start_order(const attention_launch &launch, work_order *order)
{
    ptx_mbarrier_init(ptx_shared_address(&order->planned),
                      launch.num_segments > 1 ? ORDER_THREADS : 1);
    order->works[0] = launch.num_segments == 1
                          ? (int32_t)blockIdx.x
                          : make_part((int)blockIdx.x, 0, NUM_SEGMENTS, 0, 1, 0);
    order->works[1] = -1;
    order->works[2] = -1;
    order->seen = 0;
}

/* The n-th work of the CTA, counted from 0, or -1 behind the last one; number 0 may be a work
 * that is none (find_numbered_work). n may be one more than that of the last work. With an
 * order, wait_for_order comes before any n above 0, and where works may be cut before that, too:
 * then it is a part (attend.cuh). */
static __device__ __forceinline__ int
nth_work(bool is_ordered, int num_works, const work_order *order, int n)
{
    if (is_ordered) {
        return ((const volatile int32_t *)order->works)[n];
    }
    const int idx = n * (int)gridDim.x + (int)blockIdx.x;
    return n == 0 || idx < num_works ? idx : -1;
}

/* For the gather warps. Consumers meet at a barrier when they have made the plan. */
static __device__ __forceinline__ void
wait_for_order(bool is_ordered, uint32_t planned)
{
    if (is_ordered) {
        ptx_mbarrier_wait(planned, 0);
    }
}

/* ---- Lengths -------------------------------------------------------------------------------- */

/* The main lists of a launch without splits. A copy, made at once: a function that is called reads
 * its kernel's arguments as slowly as memory, each of them again behind every barrier. */
typedef struct main_lists {
    const int32_t *indices;
    const int32_t *topk_length;
    int64_t indices_stride;
    int64_t length_stride;
    uint32_t topk;
    uint32_t index_limit;
    smla_divisor head_tiles; /* works of a list */
} main_lists;

static __device__ __forceinline__ main_lists
find_main_lists(const attention_launch &launch)
{
    const smla_key_list &keys = launch.params.lists[0];
    return main_lists{keys.indices,
                      keys.topk_length,
                      keys.indices_stride_token,
                      keys.topk_length_stride,
                      (uint32_t)keys.topk,
                      launch.lists[0].index_limit,
                      launch.head_tiles};
}

/* The list of a work, and how long topk_length says that it is. */
typedef struct work_list {
    const int32_t *indices;
    uint32_t count; /* not above topk */
} work_list;

static __device__ __forceinline__ work_list
find_list(const main_lists &lists, int idx, bool is_on)
{
    const uint32_t token = smla_divide_uint32((uint32_t)idx, lists.head_tiles);
    uint32_t length;
    ptx_load_4(lists.topk_length + token * lists.length_stride, is_on & (lists.topk_length != NULL),
               lists.topk, &length);
    return work_list{lists.indices + token * lists.indices_stride,
                     (uint32_t)min(max((int32_t)length, 0), (int32_t)lists.topk)};
}

/* Whether the work's list has as many columns as it may, and the last one is a key. */
static __device__ __forceinline__ bool
seems_full(const main_lists &lists, int idx)
{
    const work_list list = find_list(lists, idx, true);
    uint32_t last;
    ptx_load_4(list.indices + (lists.topk - 1), lists.topk != 0, 0xFFFFFFFFu, &last);
    return list.count == lists.topk && last < lists.index_limit;
}

/* The length of a work, from 1 to FULL_LENGTH: the part of its list's columns that are keys, by
 * ORDER_SAMPLES of them. Every CTA comes to the same number. All reads are under way at once. */
static __device__ __forceinline__ uint32_t
estimate_length(const main_lists &lists, int idx)
{
    const work_list list = find_list(lists, idx, true);
    const uint32_t count = list.count;
    uint32_t samples[ORDER_SAMPLES];
#pragma unroll
    for (uint32_t i = 0; i < ORDER_SAMPLES; i++) {
        const uint32_t column =
            (uint32_t)((uint64_t)count * (2 * i + 1) / (2 * ORDER_SAMPLES)); /* below count */
        ptx_load_4(list.indices + column, count != 0, 0xFFFFFFFFu, &samples[i]);
    }
    uint32_t num_keys = 0;
#pragma unroll
    for (int i = 0; i < ORDER_SAMPLES; i++) {
        num_keys += samples[i] < lists.index_limit;
    }
    const float part = (float)count / (float)max((int)lists.topk, 1);
    const int length = (int)(part * (float)(num_keys * (FULL_LENGTH / ORDER_SAMPLES)));
    return (uint32_t)min(max(length, 1), (int)FULL_LENGTH);
}

/* ---- Plan ----------------------------------------------------------------------------------- */

/* Keys are sorted from the smallest on. The number makes them differ, and decides ties. */
static __device__ __forceinline__ uint32_t
make_order_key(uint32_t value, int number)
{
    return value << 8 | (uint32_t)number;
}

/* The places of two keys among the first gridDim.x of their kinds: how many are smaller. The arrays
 * are filled with LAST_ORDER_KEY behind those. */
static __device__ __forceinline__ void
find_ranks(const round_scratch *scratch, uint32_t cta_key, uint32_t work_key, uint32_t *cta_rank,
           uint32_t *work_rank)
{
    const uint32_t ctas = ptx_shared_address(scratch->cta_keys);
    const uint32_t works = ptx_shared_address(scratch->work_keys);
    *cta_rank = 0;
    *work_rank = 0;
#pragma unroll 2
    for (uint32_t i = 0; i < gridDim.x; i += 4) {
        uint32_t loads[4];
        uint32_t lengths[4];
        ptx_load_shared_16(ctas + 4 * i, loads);
        ptx_load_shared_16(works + 4 * i, lengths);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            *cta_rank += loads[j] < cta_key;
            *work_rank += lengths[j] < work_key;
        }
    }
}

/* Which of a round's `count` works CTA number `thread` takes, when its load is `load`, or -1. All
 * consumers take part. */
static __device__ __forceinline__ int
share_out_round(int thread, int count, const uint8_t *lengths, uint32_t load, int barrier,
                round_scratch *scratch)
{
    const bool is_cta = thread < (int)gridDim.x;
    const bool is_work = thread < count;
    uint32_t cta_key = LAST_ORDER_KEY;
    uint32_t work_key = LAST_ORDER_KEY;
    if (is_cta) {
        cta_key = make_order_key(load, thread);
    }
    if (is_work) {
        work_key = make_order_key(FULL_LENGTH - lengths[thread], thread);
    }
    scratch->cta_keys[thread] = cta_key;
    scratch->work_keys[thread] = work_key;
    ptx_barrier(barrier, ORDER_THREADS); /* all keys are there */
    uint32_t cta_rank = 0;
    uint32_t work_rank = 0;
    if (is_cta) {
        find_ranks(scratch, cta_key, work_key, &cta_rank, &work_rank);
    }
    if (is_work) {
        scratch->ranked[work_rank] = (uint8_t)thread;
    }
    ptx_barrier(barrier, ORDER_THREADS); /* nobody reads keys any more, `ranked` is there */
    return is_cta && (int)cta_rank < count ? scratch->ranked[cta_rank] : -1;
}

/* A call: most launches have no order, and what they would jump over costs them up to 2 us, for
 * code that lies behind a jump is not fetched ahead. */
template <typename Memory>
static __device__ __noinline__ void
plan_works(const attention_launch &launch, int num_works, int barrier, Memory *shared)
{
    static_assert(sizeof(order_scratch) <= sizeof shared->probs, "free until the first weights");
    order_scratch *const scratch = (order_scratch *)shared->probs;
    const main_lists lists = find_main_lists(launch);
    work_order *const order = &shared->order;
    const int thread = ptx_forget((int)threadIdx.x);
    bool is_ragged = false;
#pragma unroll 1
    for (int idx = thread; idx < num_works; idx += ORDER_THREADS) {
        is_ragged |= !seems_full(lists, idx);
    }
    const int to_order = ptx_barrier_or(barrier, ORDER_THREADS, is_ragged) ? num_works : 0;
#pragma unroll 1
    for (int idx = thread; idx < to_order; idx += ORDER_THREADS) {
        scratch->lengths[idx] = (uint8_t)estimate_length(lists, idx);
    }
    ptx_barrier(barrier, ORDER_THREADS);
    uint32_t load = thread < (int)gridDim.x ? scratch->lengths[thread] : 0;
    int first = 0;
#pragma unroll 1
    for (int round = 0; round < NUM_ROUNDS; round++) {
        first += (int)gridDim.x;
        int idx = first + thread < num_works ? first + thread : -1;
        if (first < to_order) {
            const int place =
                share_out_round(thread, min(num_works - first, (int)gridDim.x),
                                scratch->lengths + first, load, barrier, &scratch->round);
            idx = place < 0 ? -1 : first + place;
            load += idx < 0 ? 0 : scratch->lengths[idx];
        }
        if (thread == (int)blockIdx.x) {
            order->works[1 + round] = idx;
        }
    }
    ptx_mbarrier_arrive(ptx_shared_address(&order->planned), thread == (int)blockIdx.x);
    ptx_barrier(barrier, ORDER_THREADS); /* nobody reads the scratch any more */
}

/* Makes the plan of an ordered launch, by all consumers, who meet at `barrier`, when memory of
 * other grids may be read. It is made where weights will be, before there are any. */
template <typename Launch, typename Memory>
static __device__ __forceinline__ void
order_works(const Launch &launch, int barrier, Memory *shared)
{
    if (launch.is_ordered && launch.base.num_segments == 1) {
        plan_works(launch.base, launch.num_works, barrier, shared);
    }
}

#endif /* SMLA_CUDA_WORK_ORDER_CUH */
