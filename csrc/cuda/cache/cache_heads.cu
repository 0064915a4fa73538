/* cache_heads.cu: writes keys and values of KV heads into pages, quantised on the way.
 *
 * Computes     copies, or e4m3(x / scale) with a scale for all heads or one per head
 * Shapes       k [T, Hk, D], v [T, Hk, Dv] bf16, fp16 or fp32; k_cache [P, ps, Hk, D], v_cache
 *              [P, ps, Hk, Dv] of the same type or bytes; all but the last dimension with any
 *              strides; D and Dv multiples of 8; slot_mapping [T] int32 or int64, any stride
 * Shared mem   none
 * Roles        A warp writes 128 units of a token's keys, or of its values: a lane has one in a row
 *              of 32, four times, so that four loads are in flight. A unit is 16 bytes of the rows.
 *              All lanes find the slot together. No barriers.
 * Roofline     Memory. Bytes per token of 8 heads, D = Dv = 128: 4096 + 4096 as bf16, 4096 + 2048
 *              as e4m3, and its slot; 8192 tokens take 15.6 and 11.7 us at 4.3 TB/s
 *              (`python -m sparse_mla bench --device cuda --only bytes` measures it).
 * Numerics     Every byte is that of the CPU's write, which divides. A token whose slot is outside
 *              the cache is skipped. A token yields to a token of the same slot among the 31 after
 *              it. If two such tokens are farther apart, their rows may hold parts of both.
 * Source       reshape_and_cache_flash of vLLM, for the arguments.
 */
#include "cuda/cache/cache_scale.cuh"
#include "cuda/cache/cache_slots.cuh"
#include "cuda/projection/quant_units.cuh"

namespace {

enum {
    LANE_UNITS = 4,
    WARP_UNITS = LANE_UNITS * SMLA_WARP_LANES,
    UNIT_BYTES = 16,
    COPY_BLOCKS_PER_SM = 4,
};

/* How a lane walks through a token's keys, or its values: 32 units at a time, which are some heads
 * and some units of the next one. Where the units reach its end, the walk enters one head more. */
struct heads_walk {
    smla_divisor head_units; /* units of a head */
    uint32_t num_units;      /* units of all heads */
    uint32_t step_heads;
    uint32_t step_units;
    int64_t from_step; /* bytes of a step in the rows, and in the cache */
    int64_t to_step;
    int64_t from_wrap; /* bytes on top of them where it enters one head more */
    int64_t to_wrap;
};

struct heads_args {
    smla_reshape_params p;
    smla_divisor page_size;
    smla_divisor token_warps; /* warps that write a token: its keys first, then its values */
    uint32_t key_warps;
    heads_walk walks[SMLA_WRITTEN_PARTS];
};

/* Where a lane is. */
struct lane_unit {
    uint32_t head;
    uint32_t unit; /* its number in the head */
};

__device__ __forceinline__ lane_unit
find_unit(const heads_walk &walk, uint32_t number)
{
    const uint32_t head = smla_divide_uint32(number, walk.head_units);
    return {head, number - head * (uint32_t)walk.head_units.divisor};
}

/* Takes a step. Returns whether the walk enters one head more. */
__device__ __forceinline__ bool
advance(const heads_walk &walk, lane_unit *at)
{
    const uint32_t head_units = (uint32_t)walk.head_units.divisor;
    at->unit += walk.step_units;
    const bool wraps = at->unit >= head_units;
    at->unit -= wraps ? head_units : 0;
    at->head += walk.step_heads + wraps;
    return wraps;
}

__device__ __forceinline__ smla_scale
load_head_scale(const smla_head_write &part, uint32_t head)
{
    return make_cache_scale(part.scale.pointer == nullptr
                                ? part.scale.value
                                : __ldg(part.scale.pointer + head * part.scale_stride_head));
}

/* A unit of rows of TYPE, and what becomes of it. */
template <int TYPE, bool QUANTIZES> struct unit_kind {
    enum {
        ELEMENT_BYTES = TYPE == SMLA_FLOAT_FP32 ? 4 : 2,
        COUNT = UNIT_BYTES / ELEMENT_BYTES,
        CACHE_BYTES = QUANTIZES ? 1 : ELEMENT_BYTES, /* bytes of an element */
    };
};

/* Not inlined, because scales are hardly ever so small or so large. A NaN is not divided, because
 * its quotient would have no sign. */
template <int TYPE>
__device__ __noinline__ void
store_rare_unit(uint4 words, float scale, uint8_t *to)
{
    constexpr int COUNT = unit_kind<TYPE, true>::COUNT;
    const uint32_t given[] = {words.x, words.y, words.z, words.w};
    float x[COUNT];
    widen_unit<TYPE, COUNT>(given, x);
    for (int i = 0; i < COUNT; i++) {
        to[i] = smla_float_to_e4m3(isnan(x[i]) ? x[i] : x[i] / scale);
    }
}

/* Stores a unit as codes, by a moderate scale. */
template <int TYPE, bool ALIGNED>
__device__ __forceinline__ void
store_codes_of_unit(const uint32_t *words, const smla_scale &by, uint8_t *to)
{
    constexpr int COUNT = unit_kind<TYPE, true>::COUNT;
    float x[COUNT];
    uint32_t codes[COUNT / 4];
    widen_unit<TYPE, COUNT>(words, x);
#pragma unroll
    for (int k = 0; k < COUNT / 4; k++) {
        if constexpr (TYPE == SMLA_FLOAT_FP32) {
            codes[k] = smla_quantize_floats_x4(x + 4 * k, by);
        } else {
            codes[k] = smla_quantize_halves_x4(x + 4 * k, smla_signs_of_bf16(words + 2 * k), by);
        }
    }
    smla_store_words<COUNT, ALIGNED, 1>(to, codes);
}

/* A lane's units, from number `first` on, and the address of the first in the cache. */
struct lane_units {
    uint32_t first;
    lane_unit at;
    uint8_t *to;
};

template <typename Store>
__device__ __forceinline__ void
for_each_unit(const heads_walk &walk, lane_units units, const Store &store)
{
#pragma unroll
    for (int i = 0; i < LANE_UNITS; i++) {
        if (units.first + i * SMLA_WARP_LANES < walk.num_units) {
            store(i, units.at.head, units.to);
        }
        units.to += walk.to_step + (advance(walk, &units.at) ? walk.to_wrap : 0);
    }
}

/* Stores what a lane has loaded. Where one moderate scale serves all heads, no unit looks at it. */
template <int TYPE, bool QUANTIZES, bool ALIGNED>
__device__ __forceinline__ void
store_units(const smla_head_write &part, const heads_walk &walk, const lane_units &units,
            const uint32_t (*words)[UNIT_BYTES / 4])
{
    if constexpr (!QUANTIZES) {
        constexpr int UNIT = unit_kind<TYPE, false>::ELEMENT_BYTES;
        for_each_unit(walk, units, [&](int i, uint32_t, uint8_t *to) {
            smla_store_words<UNIT_BYTES, ALIGNED, UNIT>(to, words[i]);
        });
        return;
    }
    const smla_scale by = load_head_scale(part, 0);
    if (part.scale_stride_head == 0 && by.is_moderate) {
        for_each_unit(walk, units, [&](int i, uint32_t, uint8_t *to) {
            store_codes_of_unit<TYPE, ALIGNED>(words[i], by, to);
        });
        return;
    }
    for_each_unit(walk, units, [&](int i, uint32_t head, uint8_t *to) {
        const smla_scale own = load_head_scale(part, head);
        if (own.is_moderate) {
            store_codes_of_unit<TYPE, ALIGNED>(words[i], own, to);
        } else {
            const uint32_t *const x = words[i];
            store_rare_unit<TYPE>(make_uint4(x[0], x[1], x[2], x[3]), own.scale, to);
        }
    });
}

template <int TYPE, bool QUANTIZES, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, !QUANTIZES && ALIGNED ? COPY_BLOCKS_PER_SM : FEW_BLOCKS_PER_SM)
    write_heads_kernel(const __grid_constant__ heads_args args)
{
    ptx_wait_for_grids();
    using kind = unit_kind<TYPE, QUANTIZES>;
    const smla_reshape_params &p = args.p;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    const int64_t num_works = p.slots.num_tokens * args.token_warps.divisor;
    int64_t work = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; work < num_works; work += num_warps) {
        const int64_t token = smla_divide(work, args.token_warps);
        const uint32_t number = (uint32_t)(work - token * args.token_warps.divisor);
        const int idx = number >= args.key_warps;
        const smla_head_write &part = p.parts[idx];
        const heads_walk &walk = args.walks[idx];
        const uint32_t first = (number - (idx ? args.key_warps : 0)) * WARP_UNITS + lane_idx();
        const lane_unit start = find_unit(walk, first);
        /* Read every token, even one that is not written, so that its loads do not wait for the
         * slot. */
        uint32_t words[LANE_UNITS][UNIT_BYTES / 4];
        lane_unit at = start;
        const uint8_t *from =
            (const uint8_t *)part.rows +
            (token * part.stride_token + at.head * part.stride_head + at.unit * kind::COUNT) *
                kind::ELEMENT_BYTES;
#pragma unroll
        for (int i = 0; i < LANE_UNITS; i++) {
            if (first + i * SMLA_WARP_LANES < walk.num_units) {
                smla_load_words<UNIT_BYTES, ALIGNED, kind::ELEMENT_BYTES>(from, words[i]);
            }
            from += walk.from_step + (advance(walk, &at) ? walk.from_wrap : 0);
        }
        const int64_t slot = __shfl_sync(ALL_LANES, find_slots(p.slots, token, 1), 0);
        if (slot < 0) {
            continue;
        }
        const int64_t page = smla_divide(slot, args.page_size);
        const int64_t row = page * part.cache_stride_page +
                            (slot - page * args.page_size.divisor) * part.cache_stride_token +
                            start.head * part.cache_stride_head + start.unit * kind::COUNT;
        const lane_units units = {first, start, (uint8_t *)part.cache + row * kind::CACHE_BYTES};
        store_units<TYPE, QUANTIZES, ALIGNED>(part, walk, units, words);
    }
}

/* ---- Table --------------------------------------------------------------------------------- */

struct heads_row {
    smla_float_type type;
    bool quantizes;
    void (*kernels[2])(heads_args); /* those for any rows, and for aligned ones */
};

template <int TYPE, bool QUANTIZES>
constexpr heads_row
serve(smla_float_type type)
{
    return {type,
            QUANTIZES,
            {write_heads_kernel<TYPE, QUANTIZES, false>,
             write_heads_kernel<TYPE, QUANTIZES, true>}};
}

const heads_row heads_table[] = {
    serve<SMLA_FLOAT_BF16, false>(SMLA_FLOAT_BF16), serve<SMLA_FLOAT_BF16, false>(SMLA_FLOAT_FP16),
    serve<SMLA_FLOAT_FP32, false>(SMLA_FLOAT_FP32), serve<SMLA_FLOAT_BF16, true>(SMLA_FLOAT_BF16),
    serve<SMLA_FLOAT_FP16, true>(SMLA_FLOAT_FP16),  serve<SMLA_FLOAT_FP32, true>(SMLA_FLOAT_FP32),
};

/* Whether every unit is a vector in both arrays. */
bool
is_aligned(const smla_head_write &part, int64_t element_bytes, bool quantizes)
{
    const int64_t cache_bytes = quantizes ? 1 : element_bytes;
    const int64_t unit_bytes = UNIT_BYTES / element_bytes * cache_bytes;
    return smla_are_rows_aligned(part.rows, part.stride_token, part.stride_head, UNIT_BYTES,
                                 element_bytes) &&
           smla_are_rows_aligned(part.cache, part.cache_stride_token, part.cache_stride_head,
                                 unit_bytes, cache_bytes) &&
           part.cache_stride_page * cache_bytes % unit_bytes == 0;
}

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

static heads_walk
plan_walk(const smla_head_write &part, int64_t num_heads, int64_t element_bytes, bool quantizes)
{
    const int64_t units = part.dim * element_bytes / UNIT_BYTES;
    const int64_t heads = SMLA_WARP_LANES / units, rest = SMLA_WARP_LANES % units;
    const int64_t cache_bytes = quantizes ? 1 : element_bytes;
    const int64_t unit_bytes = UNIT_BYTES / element_bytes * cache_bytes; /* in the cache */
    return {
        .head_units = smla_make_divisor(units),
        .num_units = (uint32_t)(num_heads * units),
        .step_heads = (uint32_t)heads,
        .step_units = (uint32_t)rest,
        .from_step = heads * part.stride_head * element_bytes + rest * UNIT_BYTES,
        .to_step = heads * part.cache_stride_head * cache_bytes + rest * unit_bytes,
        .from_wrap = part.stride_head * element_bytes - units * UNIT_BYTES,
        .to_wrap = part.cache_stride_head * cache_bytes - units * unit_bytes,
    };
}

cudaError_t
smla_cuda_launch_reshape_and_cache(const smla_reshape_params *p, const smla_cuda_device *)
{
    const int64_t element_bytes = smla_float_bytes(p->input_type);
    heads_args args = {};
    args.p = *p;
    args.page_size = smla_make_divisor(p->slots.kv.block_size);
    int64_t warps[SMLA_WRITTEN_PARTS];
    bool are_aligned = true;
    for (int i = 0; i < SMLA_WRITTEN_PARTS; i++) {
        args.walks[i] = plan_walk(p->parts[i], p->num_heads, element_bytes, p->quantizes);
        warps[i] = smla_count_parts(args.walks[i].num_units, WARP_UNITS);
        are_aligned = are_aligned && is_aligned(p->parts[i], element_bytes, p->quantizes);
    }
    args.key_warps = (uint32_t)warps[0];
    args.token_warps = smla_make_divisor(warps[0] + warps[1]);
    const int64_t num_works = p->slots.num_tokens * args.token_warps.divisor;
    for (const heads_row &row : heads_table) {
        if (row.type == p->input_type && row.quantizes == p->quantizes) {
            return smla_launch(row.kernels[are_aligned], args,
                               smla_count_parts(num_works, BLOCK_WARPS), BLOCK_THREADS, 0,
                               p->call.stream);
        }
    }
    return SMLA_NO_KERNEL;
}
