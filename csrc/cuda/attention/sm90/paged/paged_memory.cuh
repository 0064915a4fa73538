/* paged_memory.cuh: the argument, the shared memory and the barriers of paged_attention_sm90.cu. */
#pragma once

#include "cuda/attention/kernel_params.cuh"
#include "cuda/attention/keys/kv_pages.cuh"
#include "cuda/attention/sm90/mha/consumer_groups.cuh"
#include "cuda/attention/table/kernels.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

enum {
    GATHER_WARPS = 4,
    GATHER_THREADS = GATHER_WARPS * SMLA_WARP_LANES,
    PAGED_THREADS = CONSUMER_THREADS + GATHER_THREADS,
    CONSUMER_REGISTERS = 208,
    GATHER_REGISTERS = 88,

    SEGMENT_CHUNKS = SEGMENT_BYTES / 16,

    ITEM_SLOTS = 4,     /* items that gather warps may have published and groups not left */
    MOST_BUFFERS = 13,  /* what 64 dims have */
    OTHER_BYTES = 3072, /* shared memory for what is no row of queries, keys or values */
};

enum { GATHER_BARRIER = 5 }; /* a named barrier: gather threads | the same */

/* D: dims of a query, a key and a value. */
template <int D> struct paged_shape {
    static constexpr int KEYS = D <= 128 ? 128 : 64; /* keys of a block */
    static constexpr int SEGMENTS = D / SEGMENT;
    static constexpr int SEGMENT_STEP = KEYS * SEGMENT_BYTES; /* bytes from a segment to the next */
    static constexpr int BUFFER_BYTES = KEYS * D * 2;
    static constexpr int QUERY_BYTES = GROUP_ROWS * D * 2; /* a group's */
    static constexpr int BUFFERS =
        (SMLA_SM90_SHARED_BYTES - GROUPS * QUERY_BYTES - OTHER_BYTES) / BUFFER_BYTES;
    static constexpr int WARP_KEYS = KEYS / GATHER_WARPS; /* keys that a gather warp copies */
    static constexpr int HIDDEN_WORDS = KEYS / 32;
    static_assert(BUFFERS <= MOST_BUFFERS, "barriers of each");
};

/* Where CTAs leave what they know of tiles that they share: each has two slots of rows. */
struct paged_partials {
    unsigned long long *arrivals; /* [CTAs], counters of claims.cuh; NULL: no tile is cut */
    float *states;                /* [slots][slot_rows][2]: max_log2, sum (softmax.cuh) */
    float *values;                /* [slots][slot_rows][D] */
    int32_t slot_rows;
    int32_t most_rows; /* a request with so many rows of a KV head, or less, is cut; 0: none */
};

struct paged_args {
    mha_params p;
    kv_pages pages;
    paged_partials partials;
    unsigned long long *counters; /* words of claims.cuh; NULL: no tile is claimed */
    smla_divisor group;           /* H / Hk */
    int64_t out_token_bytes;
    int64_t out_head_bytes;
    int32_t num_reqs;
    int32_t most_keys;  /* positions with an entry in a table; those behind them are hidden */
    int32_t left;       /* keys before its own that a query sees; -1: all of them */
    int32_t right;      /* keys behind its own that it sees; -1: all of them */
    bool has_shares;    /* the mask also has chunks, or gives each rank its share of the keys */
    float scale;        /* what makes logits in the log2 domain of scores, or of capped logits */
    float early_scale;  /* and where `is_early`, what makes logits of scores before that */
    float cap_log2;     /* 0: logits are not capped */
    float cap_exponent; /* early_scale * 2 log2(e) / cap_log2 */
    bool is_early;      /* masks need capped logits, or scores of another sign */
};

/* The keys begin...end - 1 of a request. */
struct paged_limits {
    int32_t begin;
    int32_t end;
};

/* What a CTA computes at a time: rows of a tile, and blocks of their keys. Consumers read this. */
struct paged_item {
    int32_t num_rows;    /* 0: there are no more items */
    int32_t first_row;   /* number in the request: token * group + head of the group */
    int32_t first_query; /* the first token of the request */
    int32_t kv_head;
    int32_t first_key;  /* where the first block begins, in the request */
    int32_t num_blocks; /* at least one */
    int32_t owners;     /* a bit for each group that computes rows of it */
    int32_t num_parts;  /* CTAs that have blocks of the tile's keys; 1: it is not cut */
    int32_t part;       /* the CTA's number among them */
    int32_t first_cta;  /* the first of them */
};

/* The slots of items: ITEM_SLOTS, or where an item may have more rows than a group, half as many,
 * because a slot has limits of rows. */
struct paged_slots {
    uint32_t count;

    __device__ __forceinline__ uint32_t slot_of(uint32_t number) const
    {
        return number & (count - 1);
    }

    /* The parity of the slot's use by an item. */
    __device__ __forceinline__ uint32_t turn_of(uint32_t number) const
    {
        return (number & count) != 0;
    }

    __device__ __forceinline__ uint32_t first_limit(uint32_t number) const
    {
        return slot_of(number) * (ITEM_SLOTS * GROUP_ROWS / count);
    }
};

/* A buffer holds the keys or the values of a block. Blocks take two buffers in turn, so that keys
 * and values may be in any of them. Row r of a segment has its 16-byte chunk c at c ^ r % 8. */
template <int D> struct paged_memory {
    using shape = paged_shape<D>;
    alignas(1024) uint16_t queries[GROUPS][shape::SEGMENTS][GROUP_ROWS][SEGMENT];
    alignas(1024) uint16_t buffers[shape::BUFFERS][shape::SEGMENTS][shape::KEYS][SEGMENT];
    paged_limits limits[ITEM_SLOTS * GROUP_ROWS];   /* those of each slot's rows */
    alignas(16) uint32_t hidden[shape::BUFFERS][4]; /* a bit per key, in HIDDEN_WORDS words */
    paged_item items[ITEM_SLOTS];
    paged_slots slots; /* visible with the first item */
    int32_t is_last[GROUPS];
    uint32_t claimed[2];                 /* even items in turn with odd ones */
    uint32_t plan_sums[GATHER_WARPS][2]; /* tiles and units that a warp has counted */
    /* mbarriers; paged_attention_sm90.cu lists who arrives and who waits */
    uint64_t q_full[GROUPS];
    uint64_t q_empty[GROUPS];
    uint64_t full[shape::BUFFERS];
    uint64_t empty[shape::BUFFERS];
    uint64_t item_full[ITEM_SLOTS];
    uint64_t item_empty[ITEM_SLOTS];
};

/* Called by one thread. */
template <int D>
__device__ __forceinline__ void
start_memory(paged_memory<D> *shared)
{
    start_barriers(shared->q_full, GATHER_THREADS);
    start_barriers(shared->q_empty, GROUP_WARPS);
    start_barriers(shared->full, GATHER_THREADS + GATHER_WARPS);
    start_barriers(shared->empty, CONSUMER_WARPS);
    start_barriers(shared->item_full, GATHER_THREADS);
    start_barriers(shared->item_empty, CONSUMER_THREADS);
    ptx_fence_mbarrier_init();
}

/* Waits until buffer number `count`, counted over all items, has been read. Its next contents may
 * be written then. A group that has left out blocks waits for this, too, before it waits for the
 * contents: a barrier tells phases apart only from the ones next to them. */
template <int D>
__device__ __forceinline__ void
await_empty(const paged_memory<D> *shared, uint32_t count)
{
    constexpr uint32_t BUFFERS = paged_shape<D>::BUFFERS;
    ptx_mbarrier_wait(at(shared->empty[count % BUFFERS]), (count / BUFFERS % 2) ^ 1);
}

/* A query row's place. */
struct paged_row {
    int32_t query; /* number in the request */
    int32_t head;
};

__device__ __forceinline__ paged_row
find_row(const paged_args &args, int32_t kv_head, int32_t row)
{
    const int32_t query = (int32_t)smla_divide_uint32((uint32_t)row, args.group);
    const int32_t group = (int32_t)args.group.divisor;
    return paged_row{query, kv_head * group + row - query * group};
}
