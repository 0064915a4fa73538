/* bf16_common.cuh: what all roles of attention_bf16_sm90.cu share: shared memory, the kernel's
 * argument, and what a consumer thread keeps. The kernel's file explains them.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_common.cuh"
#include "cuda/attention/tiles/requests.cuh"

enum {
    TILE_HEADS = 64,
    BLOCK_KEYS = 64,
    TILE_BYTES = BLOCK_KEYS * 128, /* 64 dimensions of a block or of the query */
    QUERY_TILES = SMLA_HEAD_DIM / 64,
    BLOCK_BYTES = QUERY_TILES * TILE_BYTES,
    HALF_VALUES = SMLA_KV_LORA_RANK / 2, /* values per warpgroup */
    HALF_TILES = HALF_VALUES / 64,
    ROPE_TILE = QUERY_TILES - 1,
    PIECES = 4,    /* pieces of a block, each with an mbarrier */
    KEY_PIECE = 2, /* is_key arrives with the piece that is copied as number 2 */
};

static_assert((int)STEP_KEYS == 2 * BLOCK_KEYS, "a step is a block of each warpgroup");

/* What the kernel's keys are. ROPE: they have a RoPE part behind their values. CODED: lists may
 * have rows of codes (coded_gather.cuh). TILED: the kernel is attention_dense_sm90.cu, where each
 * row of the tile sees its own range of keys. WIDE: the kernel is attention_wide_sm90.cu, where
 * values and weights are f16, and RoPE parts bf16. */
template <bool ROPE_, bool CODED_, bool TILED_ = false, bool WIDE_ = false> struct key_kind {
    static constexpr bool ROPE = ROPE_;
    static constexpr bool CODED = CODED_;
    static constexpr bool TILED = TILED_;
    static constexpr bool WIDE = WIDE_;
    /* If the exponent of a weight is above this, the reference of its head moves. f16 ends at
     * 2^16. */
    static constexpr float MAX_EXPONENT = WIDE ? 15.9f : 40.0f;
    /* The exponent of a head's heaviest weight when its reference moves. f16 is off by 2^-25 at its
     * lower end, so light keys need weights that are not small. */
    static constexpr float TOP_EXPONENT = WIDE ? 8.0f : 0.0f;
    /* A score is two sums of half the values. With codes there are no registers for two. */
    static constexpr bool HALVES_SCORES = !CODED;
    /* Gather warps that share a quarter of the keys: decoding takes two. */
    static constexpr int TWINS = CODED ? 2 : 1;
    static constexpr int GATHER_THREADS = TWINS * GATHER_WARPS * SMLA_WARP_LANES;
    static constexpr int THREADS = CONSUMER_THREADS + GATHER_THREADS;
    /* Gather warps of a TILED kernel go through no list, and one of its consumers makes items. */
    static constexpr int CONSUMER_REGISTERS = CODED ? 200 : TILED ? 232 : 224;
    static constexpr int GATHER_REGISTERS = TILED ? 40 : 56;
    static_assert(2 * CONSUMER_REGISTERS + TWINS * GATHER_REGISTERS ==
                      THREADS / GROUP_THREADS * (CODED ? 128 : 168),
                  "setmaxnreg shares out what the launch gave: 168 each, or 128");
};

/* The first tile of a piece. The pieces are tiles 0-1, 2-3, 4-6 and 7-8, or without RoPE 0-1, 2-3,
 * 4-5 and 6-7. */
template <bool ROPE>
static __device__ __forceinline__ constexpr int
first_tile(int piece)
{
    return !ROPE || piece < 3 ? 2 * piece : piece == 3 ? 7 : QUERY_TILES;
}

/* The piece that comes i-th. The halves of a block become free one after the other; the first is
 * the half whose values the block's own group adds. Codes come in the order of their tiles, which
 * needs less code. */
template <typename Keys>
static __device__ __forceinline__ constexpr int
nth_piece(int block, int i)
{
    return block == 0 || Keys::CODED ? i : (i + PIECES / 2) % PIECES;
}

/* The keys that a row of a tile sees: begin to end - 1. */
typedef struct row_limits {
    int32_t begin;
    int32_t end;
} row_limits;

/* What a CTA of attention_dense_sm90.cu takes at a time: a tile, which is up to 64 rows of a
 * request, and steps of its keys. Row token * H + head of a request is that head of its query token
 * number `token`. */
typedef struct dense_item {
    int32_t req;
    int32_t token;      /* the request's first query token in the batch */
    int32_t first_row;  /* the tile's first row */
    int32_t num_rows;   /* 0: the CTA has no further item */
    int32_t position;   /* where the request's first query token is among its keys */
    int32_t num_keys;   /* keys of the request */
    row_limits seen;    /* keys that some row sees */
    row_limits shared;  /* keys that all rows see */
    int32_t first_step; /* a step is the keys 128 n to 128 n + 127 */
    int32_t num_steps;
    int32_t slot; /* the slot of its partial rows (dense_items.cuh), or NOT_PARTIAL */
} dense_item;

/* Which items a CTA takes (dense_items.cuh). */
typedef struct dense_walk {
    int32_t at;   /* the next unit */
    int32_t past; /* the CTA's units end here */
    request_search<int32_t> requests;
    int32_t share; /* units of each team; the first `rest` teams have one more */
    int32_t rest;
    int32_t team;
    int32_t member;  /* the CTA's number in its team */
    bool is_cut;     /* at the borders of the teams' units */
    bool begins_cut; /* the CTA has begun a cut tile */
} dense_walk;

enum {
    ITEM_TURNS = 3, /* gather warps make an item while consumers end the last but one */
    LIMIT_TURNS = 2,
};

/* What attention_dense_sm90.cu keeps in shared memory in addition. */
typedef struct dense_state {
    dense_walk walk;
    dense_item items[ITEM_TURNS];
    int32_t block_key[2]; /* a block's first key, and the turn of the item's row_limits */
} dense_state;

/* What attention_wide_sm90.cu keeps in shared memory in addition. */
typedef struct wide_state {
    float score_scale[TILE_HEADS];       /* multiplies a head's scores, gives log2 logits */
    alignas(4) uint8_t is_refused[2][4]; /* [turn][warp of group 0]: finish_wide_item */
    uint32_t fallback_bits[MAX_ITEMS / 32];
} wide_state;

struct bf16_memory {
    alignas(1024) uint8_t query[QUERY_TILES][TILE_HEADS][128];
    alignas(1024) uint8_t keys[2][QUERY_TILES][BLOCK_KEYS][128];
    alignas(1024) uint8_t probs[TILE_HEADS][128]; /* weights of group 1 (group 0: find_probs) */
    alignas(16) float sums[2][2][TILE_HEADS];     /* [turn][group]; an item's turn is 0 or 1 */
    union {
        alignas(16) float row_maxima[2][2][TILE_HEADS];
        row_limits limits[LIMIT_TURNS][TILE_HEADS]; /* TILED, which finds no maxima */
    };
    alignas(16) float reference[TILE_HEADS]; /* references of the block that published them last */
    alignas(8) uint64_t full[2][PIECES];
    uint64_t empty[2][2]; /* [block][group]: the half whose values the group adds */
    uint64_t begun;
    uint64_t references_ready[2]; /* [group] */
    uint64_t probs_ready[2];      /* [group] */
    uint64_t scored;
    uint64_t query_full;
    uint64_t query_empty;
    uint32_t has_moved; /* group 0's block has moved references, so that `out` must follow */
    alignas(16) uint32_t is_key[2][GATHER_WARPS];     /* bits: which of 16 rows are keys; IS_LAST */
    alignas(16) key_counts num_keys[2];               /* [turn] */
    alignas(16) uint32_t num_absent[2][GATHER_WARPS]; /* [turn][warp]: sums of add_absent */
    int32_t num_steps[2];                             /* [turn] */
    listed_key only[2][GATHER_WARPS]; /* [turn][warp]: the warp's key, if it has only one */
    item_order order;
    union {
        dense_state dense;
        wide_state wide;
    };
};

/* The bits of a word of is_key. ALL_ROWS: every row of a TILED kernel's tile sees the block. */
enum : uint32_t { ALL_KEYS = 0xFFFF, IS_LAST = 0x10000, ALL_ROWS = 0x20000 };

/* The bits that are set in every is_key word of a block in which no score is masked. */
template <typename Keys>
static __device__ __forceinline__ constexpr uint32_t
unmasked_bits(void)
{
    return ALL_KEYS | (Keys::TILED ? (uint32_t)ALL_ROWS : 0);
}

/* The argument of the kernel. */
typedef struct bf16_launch {
    attention_launch base;
    int32_t num_items;
    bool is_ordered; /* CTAs take items in the order of work_order.cuh */
} bf16_launch;

/* What a consumer thread keeps during an item, for heads `row` and row + 8 of its warp. */
typedef struct bf16_consumer {
    float out[HALF_VALUES / 2];        /* D of wgmma: 64 heads, 256 values */
    float scores[BLOCK_KEYS / 2];      /* at first sums over half of the values alone */
    float more_scores[BLOCK_KEYS / 2]; /* sums over the other half */
    uint32_t probs[BLOCK_KEYS / 4];    /* A of wgmma */
    float sum[2];
    float excess[2];      /* the amount by which sum is too large */
    float row_max[2];     /* the largest logit, minus the reference */
    float reference[2];   /* out, sum and row_max are relative to it */
    float score_scale[2]; /* WIDE: multiplies the heads' scores */
    int32_t is_late;      /* INT32_MAX while one of the two heads has no reference, then 0 */
} bf16_consumer;

/* Parities of mbarriers: of mbarriers that are used once per step, and of those used once per
 * item. */
typedef struct bf16_phase {
    uint32_t step;
    uint32_t item;
} bf16_phase;

/* The largest x of a head's lanes, for both heads of the lanes. The shuffles of one head do not
 * wait for those of the other. */
static __device__ __forceinline__ void
max_of_lanes(float (&x)[2])
{
#pragma unroll
    for (int distance = 1; distance < SMLA_QUAD_LANES; distance *= 2) {
        const float others[2] = {__shfl_xor_sync(0xFFFFFFFFu, x[0], distance),
                                 __shfl_xor_sync(0xFFFFFFFFu, x[1], distance)};
        x[0] = fmaxf(x[0], others[0]);
        x[1] = fmaxf(x[1], others[1]);
    }
}

/* The address of a member of bf16_memory, which begins at `base`. */
#define BF16_AT(base, member) ((base) + (uint32_t)offsetof(bf16_memory, member))

/* The addresses of mbarriers of which there are several; attention_bf16_sm90.cu says who arrives
 * and who waits. */
static __device__ __forceinline__ uint32_t
full_barrier(uint32_t base, int block, int piece)
{
    return BF16_AT(base, full) + 8 * (block * PIECES + piece);
}

static __device__ __forceinline__ uint32_t
empty_barrier(uint32_t base, int block, int group)
{
    return BF16_AT(base, empty) + 16 * block + 8 * group;
}

static __device__ __forceinline__ uint32_t
references_ready_barrier(uint32_t base, int group)
{
    return BF16_AT(base, references_ready) + 8 * group;
}

static __device__ __forceinline__ uint32_t
probs_ready_barrier(uint32_t base, int group)
{
    return BF16_AT(base, probs_ready) + 8 * group;
}
