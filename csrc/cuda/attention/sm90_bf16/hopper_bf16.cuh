/* hopper_bf16.cuh: what all roles of attention_bf16_sm90.cu share: shared memory, argument, and
 * what a consumer thread keeps. The kernel's file explains them.
 */
#ifndef SMLA_CUDA_HOPPER_BF16_CUH
#define SMLA_CUDA_HOPPER_BF16_CUH

#include "cuda/attention/sm90_fp8/hopper.cuh"

enum {
    TILE_HEADS = 64,
    BLOCK_KEYS = 64,
    TILE_BYTES = BLOCK_KEYS * 128, /* of 64 dimensions of a block or of the query */
    BLOCK_BYTES = QUERY_TILES * TILE_BYTES,
    HALF_VALUES = SMLA_KV_LORA_RANK / 2, /* of a warpgroup */
    HALF_TILES = HALF_VALUES / 64,
    ROPE_TILE = QUERY_TILES - 1,
    PIECES = 4,        /* of a block, that come on their own */
    KEY_PIECE = 2,     /* which of them in time brings is_key */
    WEIGHED_KEYS = 32, /* that weights are told of at once */
    BF16_CONSUMER_REGISTERS = 224,
    BF16_GATHER_REGISTERS = 56,
};

static_assert(2 * BF16_CONSUMER_REGISTERS + BF16_GATHER_REGISTERS == 3 * 168,
              "setmaxnreg shares out what the launch gave: 168 each");
static_assert((int)STEP_KEYS == 2 * BLOCK_KEYS, "a step is a block of each warpgroup");

/* First tile of a piece: of tiles 0-1, 2-3, 4-6, 7-8, or, without RoPE, 0-1, 2-3, 4-5, 6-7. */
template <bool ROPE>
static __device__ __forceinline__ constexpr int
first_tile(int piece)
{
    return !ROPE || piece < 3 ? 2 * piece : piece == 3 ? 7 : QUERY_TILES;
}

/* The piece that comes i-th. Halves of a block become free one after the other: first the one whose
 * values its own group adds. */
static __device__ __forceinline__ constexpr int
nth_piece(int block, int i)
{
    return block == 0 ? i : (i + PIECES / 2) % PIECES;
}

struct bf16_memory {
    alignas(1024) uint8_t query[QUERY_TILES][TILE_HEADS][128];
    alignas(1024) uint8_t keys[2][QUERY_TILES][BLOCK_KEYS][128];
    alignas(1024) uint8_t probs[TILE_HEADS][128]; /* of group 1; group 0's lie in its RoPE tile */
    alignas(16) float sums[2][2][TILE_HEADS];     /* of a group, of works in turn */
    alignas(16) float tops[2][2][TILE_HEADS];
    alignas(16) float reference[TILE_HEADS]; /* of the block that was weighed last */
    alignas(8) uint64_t full[2][PIECES];
    uint64_t empty[2][2]; /* of a block, the half that each group has values of */
    uint64_t weighed[2][BLOCK_KEYS / WEIGHED_KEYS];
    uint64_t scored;
    uint64_t query_full;
    uint64_t query_empty;
    alignas(16) uint32_t is_key[2][GATHER_WARPS];     /* 16 keys of each gather warp, and IS_LAST */
    alignas(16) key_counts num_keys[2];               /* of works in turn */
    alignas(16) uint32_t num_absent[2][GATHER_WARPS]; /* of works in turn: add_absent */
    int32_t num_steps[2];                             /* of works in turn */
    listed_key only[2][GATHER_WARPS]; /* of works in turn: a gather warp's key, if it has but one */
    work_order order;
};

/* A word of is_key. */
enum : uint32_t { ALL_KEYS = 0xFFFF, IS_LAST = 0x10000 };

/* The argument of the kernel. */
typedef struct bf16_launch {
    attention_launch base;
    int32_t num_works;
    bool out_is_aligned; /* every row to 16 bytes */
    bool is_ordered;     /* CTAs take works in the order of work_order.cuh */
} bf16_launch;

/* What a consumer thread keeps over a work: of heads row and row + 8 of its warp. */
typedef struct bf16_consumer {
    float out[HALF_VALUES / 2]; /* D of wgmma: 64 heads, 256 values */
    float scores[BLOCK_KEYS / 2];
    uint32_t probs[BLOCK_KEYS / 4]; /* A of wgmma */
    float sum[2];
    float excess[2];    /* how much too large sum is */
    float top[2];       /* the largest logit, minus the reference */
    float reference[2]; /* that out, the sums and top go with */
    int32_t is_late;    /* INT32_MAX while one of both heads has no reference, then 0 */
} bf16_consumer;

/* Parities of the barriers: those of a step, and those of a work. */
typedef struct bf16_phase {
    uint32_t step;
    uint32_t work;
} bf16_phase;

/* The largest over the four lanes of a head. */
static __device__ __forceinline__ float
max_of_lanes(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

/* Where a barrier or array of the CTA is: shared memory begins at a known address. */
#define BF16_AT(base, member) ((base) + (uint32_t)offsetof(bf16_memory, member))

#endif /* SMLA_CUDA_HOPPER_BF16_CUH */
