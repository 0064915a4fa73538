/* scaled_quantize.cu: quantisation to e4m3 with a scale per group of values.
 *
 * Computes     amax = max(max |x|, 1e-12),  out = e4m3(x * (448 / amax)),  descale = amax / 448,
 *              for every group of group_rows x group_columns values
 * Shapes       x [M, Nc] bf16, fp16 or fp32, out [M, Nc] bytes: rows contiguous, any distance
 *              apart; descale [M / group_rows, Nc / group_columns] fp32, any strides
 * Shared mem   quantize_group: the maxima of up to 16 warps, 64 bytes; quantize_columns: the maxima
 *              of a block's columns, 8 x 256 fp32, 8 KiB
 * Roles        Units are 16 bytes of x, or single elements where rows are not aligned or groups do
 *              not hold whole units. Four kernels, by the group's form:
 *              quantize_lanes    rows of at most 32 units: some lanes of a warp have a group
 *              quantize_columns  single columns: a thread has a unit's columns of every eighth row
 *              quantize_group    other groups: a block has one
 *              find_amax, quantize_parts, finish_groups: groups that are large and few are cut into
 *                                parts. A part's maximum goes into descale by atomicMax.
 *              Barriers (__syncthreads): maxima or factors are written; they are read.
 * Roofline     memory: x once and out once, 3 bytes per element of bf16, because a block reads its
 *              group again from registers or caches; large groups are read twice.
 * Numerics     Every byte is what the CPU gives. NaN is left out of amax, and an infinity counts as
 *              FLT_MAX. A maximum does not depend on the order. The two divisions and the product
 *              are rounded to fp32, each once.
 * Source       The formula of vLLM's scaled_quantize, with amax / 448; the kernels are ours.
 */
#include "core/params_projection.h"
#include "cuda/host/cuda.h"
#include "cuda/projection/quant_units.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    MOST_THREADS = 512, /* threads of a block with a large group */
    MOST_WARPS = MOST_THREADS / SMLA_WARP_LANES,
    HELD = 4, /* units that a thread keeps in registers for the second pass */
    PART_UNITS = 8 * BLOCK_THREADS,
    LARGE_GROUP = 1 << 17, /* elements */
    COLUMN_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    COLUMN_BLOCKS = 4, /* per SM; without a number, ptxas aims at six of 40 registers and spills */
};

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

/* The kernels' argument. Units of a row are numbered from 0 on. */
typedef struct scaled_args {
    smla_scaled_quantize_params p;
    smla_divisor column_groups; /* number of groups in a row of groups */
    smla_divisor group_units;   /* units in a row of a group */
    smla_divisor row_units;     /* units in a row of x */
    smla_divisor parts;         /* parts of a large group */
    smla_divisor column_tiles;  /* quantize_columns: tiles in a row of x */
    int64_t row_step;           /* quantize_columns: rows of groups that a grid has at a time */
    int64_t num_groups;
    int64_t units_of_group;
} scaled_args;

/* ---- Units --------------------------------------------------------------------------------- */

template <int TYPE, int COUNT> struct unit_words {
    static constexpr int WORDS = TYPE == SMLA_FLOAT_FP32 ? COUNT : (COUNT + 1) / 2;
    uint32_t words[WORDS];
};

/* Loads the unit at column `column` of a row. */
template <int TYPE, int COUNT>
__device__ __forceinline__ unit_words<TYPE, COUNT>
load_at(const smla_scaled_quantize_params &p, int64_t row, int64_t column)
{
    unit_words<TYPE, COUNT> unit;
    load_unit<TYPE, COUNT>(p.x, row * p.x_stride_row + column, unit.words);
    return unit;
}

template <int TYPE, int COUNT>
__device__ __forceinline__ float
raise_amax(float amax, const unit_words<TYPE, COUNT> &unit)
{
    float values[COUNT < 4 ? 4 : COUNT];
    widen_unit<TYPE, COUNT>(unit.words, values);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        amax = fmaxf(amax, fabsf(values[i])); /* fmaxf ignores NaN */
    }
    return amax;
}

/* Quantises a unit; each of its values has a factor. */
template <int TYPE, int COUNT>
__device__ __forceinline__ void
store_at(const smla_scaled_quantize_params &p, int64_t row, int64_t column,
         const unit_words<TYPE, COUNT> &unit, const float (&factors)[COUNT])
{
    float values[COUNT < 4 ? 4 : COUNT];
    uint32_t bytes[COUNT < 4 ? 1 : COUNT / 4];
    widen_unit<TYPE, COUNT>(unit.words, values);
#pragma unroll
    for (int k = 0; k < (COUNT + 3) / 4; k++) {
        float *const x = values + 4 * k;
        const uint32_t signs = smla_signs_of_floats(x);
#pragma unroll
        for (int i = 0; i < 4 && 4 * k + i < COUNT; i++) {
            x[i] *= factors[4 * k + i];
        }
        bytes[k] = smla_floats_to_e4m3x4(x) & 0x7F7F7F7Fu | signs & 0x80808080u;
    }
    uint8_t *const to = p.out + row * p.out_stride_row + column;
    if constexpr (COUNT == 1) {
        *to = (uint8_t)bytes[0];
    } else {
        smla_store_words<COUNT, true>(to, bytes);
    }
}

template <int TYPE, int COUNT>
__device__ __forceinline__ void
store_by(const smla_scaled_quantize_params &p, int64_t row, int64_t column,
         const unit_words<TYPE, COUNT> &unit, float factor)
{
    float factors[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        factors[i] = factor;
    }
    store_at<TYPE, COUNT>(p, row, column, unit, factors);
}

/* ---- Scales -------------------------------------------------------------------------------- */

__device__ __forceinline__ float
used_amax(float amax)
{
    return fmaxf(fminf(amax, FLT_MAX), SMLA_SCALED_QUANTIZE_FLOOR);
}

/* Returns 448 / used_amax(amax), rounded as a division rounds, without the call that a division is.
 * The divisor's mantissa gives the quotient's, which was tried for each of them (2^23, with rcp off
 * by up to two units). No quotient is subnormal, so the exponents are subtracted. */
__device__ __forceinline__ float
factor_of(float amax)
{
    const uint32_t bits = smla_float_bits(used_amax(amax));
    const uint32_t exponent = (bits & 0x7F800000u) - 0x3F800000u;
    const smla_scale mantissa = smla_make_scale(smla_bits_float(bits - exponent));
    const float quotient = smla_divide_moderate(SMLA_E4M3_MAX, mantissa);
    return smla_bits_float(smla_float_bits(quotient) - exponent);
}

__device__ __forceinline__ float *
descale_of(const smla_scaled_quantize_params &p, int64_t row_group, int64_t column_group)
{
    return p.descale + row_group * p.descale_stride_row + column_group * p.descale_stride_column;
}

/* Writes used_amax(amax) / 448, rounded as a division rounds, which was tried in the same way. */
__device__ __forceinline__ void
store_descale(const smla_scaled_quantize_params &p, int64_t row_group, int64_t column_group,
              float amax)
{
    const float used = used_amax(amax);
    *descale_of(p, row_group, column_group) =
        smla_divide_moderate(used, smla_make_scale(SMLA_E4M3_MAX));
}

/* The larger amax of all lanes in `mask`. Floats >= 0 have the order of their bits. */
__device__ __forceinline__ float
max_of_lanes(uint32_t mask, float amax)
{
    return smla_bits_float(__reduce_max_sync(mask, smla_float_bits(amax)));
}

/* Where a group lies. */
struct group_place {
    int64_t row_group;
    int64_t column_group;
    int64_t row; /* its first row and column */
    int64_t column;
};

__device__ __forceinline__ group_place
find_group(const scaled_args &args, int64_t number)
{
    const int64_t row_group = smla_divide(number, args.column_groups);
    const int64_t column_group = number - row_group * args.column_groups.divisor;
    return group_place{row_group, column_group, row_group * args.p.group_rows,
                       column_group * args.p.group_columns};
}

/* ---- Groups in the lanes of a warp --------------------------------------------------------- */

/* Groups of one row. Units of a group are in `group_units` lanes, a power of two, so that units
 * follow each other as they do in x. */
template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS) quantize_lanes(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    const smla_scaled_quantize_params &p = args.p;
    const int lanes = (int)args.group_units.divisor;
    const int64_t num_units = p.num_rows * args.row_units.divisor;
    const int64_t step = (int64_t)gridDim.x * BLOCK_THREADS;
    /* All lanes stay for the maximum. A lane behind the last unit has its own group. */
    const int64_t end = (num_units + SMLA_WARP_LANES - 1) / SMLA_WARP_LANES * SMLA_WARP_LANES;
    for (int64_t i = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x; i < end; i += step) {
        const bool exists = i < num_units;
        const int64_t row = smla_divide(exists ? i : 0, args.row_units);
        const int64_t unit = (exists ? i : 0) - row * args.row_units.divisor;
        const unit_words<TYPE, COUNT> words = load_at<TYPE, COUNT>(p, row, unit * COUNT);
        float amax = exists ? raise_amax<TYPE, COUNT>(0.0f, words) : 0.0f;
        for (int distance = 1; distance < lanes; distance *= 2) {
            amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, distance));
        }
        if (!exists) {
            continue;
        }
        store_by<TYPE, COUNT>(p, row, unit * COUNT, words, factor_of(amax));
        if (unit % lanes == 0) {
            store_descale(p, row, smla_divide(unit, args.group_units), amax);
        }
    }
}

/* ---- A group per block --------------------------------------------------------------------- */

/* The block's largest amax, for all of its threads. */
__device__ __forceinline__ float
max_of_block(float amax)
{
    __shared__ float warp_maxima[MOST_WARPS];
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES, lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int num_warps = (int)blockDim.x / SMLA_WARP_LANES;
    const float own = max_of_lanes(ALL_LANES, amax);
    __syncthreads(); /* the last group's maxima are read */
    if (lane == 0) {
        warp_maxima[warp] = own;
    }
    __syncthreads(); /* this group's maxima are written */
    return max_of_lanes(ALL_LANES, lane < num_warps ? warp_maxima[lane] : 0.0f);
}

/* Unit `i` of a group. */
template <int TYPE, int COUNT>
__device__ __forceinline__ unit_words<TYPE, COUNT>
load_of_group(const scaled_args &args, const group_place &group, int64_t i)
{
    const int64_t row = smla_divide(i, args.group_units);
    return load_at<TYPE, COUNT>(args.p, group.row + row,
                                group.column + (i - row * args.group_units.divisor) * COUNT);
}

template <int TYPE, int COUNT>
__device__ __forceinline__ void
store_of_group(const scaled_args &args, const group_place &group, int64_t i,
               const unit_words<TYPE, COUNT> &unit, float factor)
{
    const int64_t row = smla_divide(i, args.group_units);
    store_by<TYPE, COUNT>(args.p, group.row + row,
                          group.column + (i - row * args.group_units.divisor) * COUNT, unit,
                          factor);
}

template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(MOST_THREADS) quantize_group(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    const int step = (int)blockDim.x;
    for (int64_t number = blockIdx.x; number < args.num_groups; number += gridDim.x) {
        const group_place group = find_group(args, number);
        unit_words<TYPE, COUNT> held[HELD] = {};
        float amax = 0.0f;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const int64_t i = threadIdx.x + k * step;
            if (i < args.units_of_group) {
                held[k] = load_of_group<TYPE, COUNT>(args, group, i);
            }
        }
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            amax = raise_amax<TYPE, COUNT>(amax, held[k]);
        }
#pragma unroll 4
        for (int64_t i = threadIdx.x + HELD * step; i < args.units_of_group; i += step) {
            amax = raise_amax<TYPE, COUNT>(amax, load_of_group<TYPE, COUNT>(args, group, i));
        }
        amax = max_of_block(amax);
        const float factor = factor_of(amax);
        if (threadIdx.x == 0) {
            store_descale(args.p, group.row_group, group.column_group, amax);
        }
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const int64_t i = threadIdx.x + k * step;
            if (i < args.units_of_group) {
                store_of_group<TYPE, COUNT>(args, group, i, held[k], factor);
            }
        }
#pragma unroll 4
        for (int64_t i = threadIdx.x + HELD * step; i < args.units_of_group; i += step) {
            store_of_group<TYPE, COUNT>(args, group, i, load_of_group<TYPE, COUNT>(args, group, i),
                                        factor);
        }
    }
}

/* ---- Groups of one column ------------------------------------------------------------------ */

/* A tile is the rows of a row of groups, and 32 units of columns, one per lane. A warp has every
 * eighth row. The grid has whole rows of tiles, so a block keeps its columns. */
template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS, COLUMN_BLOCKS)
    quantize_columns(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    static_assert(COUNT <= COLUMN_WARPS, "a warp finds the factors of one column per lane");
    __shared__ float maxima[COLUMN_WARPS][COUNT][SMLA_WARP_LANES];
    const smla_scaled_quantize_params &p = args.p;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES, lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const uint32_t row = smla_divide_uint32(blockIdx.x, args.column_tiles);
    const uint32_t tile = blockIdx.x - row * (uint32_t)args.column_tiles.divisor;
    const int64_t unit = (int64_t)tile * SMLA_WARP_LANES + lane;
    const int64_t num_rows = unit < args.row_units.divisor ? p.group_rows : 0;
    for (int64_t row_group = row; row_group < p.num_row_groups; row_group += args.row_step) {
        const int64_t first = row_group * p.group_rows;
        float amax[COUNT] = {};
#pragma unroll 4
        for (int64_t i = warp; i < num_rows; i += COLUMN_WARPS) {
            const unit_words<TYPE, COUNT> words = load_at<TYPE, COUNT>(p, first + i, unit * COUNT);
            float values[COUNT < 4 ? 4 : COUNT];
            widen_unit<TYPE, COUNT>(words.words, values);
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                amax[k] = fmaxf(amax[k], fabsf(values[k]));
            }
        }
        __syncthreads(); /* the last tile's factors are read */
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            maxima[warp][i][lane] = amax[i];
        }
        __syncthreads(); /* this tile's maxima are written */
        if (warp < COUNT) {
            float largest = 0.0f;
#pragma unroll
            for (int k = 0; k < COLUMN_WARPS; k++) {
                largest = fmaxf(largest, maxima[k][warp][lane]);
            }
            maxima[0][warp][lane] = factor_of(largest); /* no other thread reads this column */
            if (num_rows > 0) {
                store_descale(p, row_group, unit * COUNT + warp, largest);
            }
        }
        __syncthreads(); /* this tile's factors are written */
        float factors[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            factors[i] = maxima[0][i][lane];
        }
#pragma unroll 4
        for (int64_t i = warp; i < num_rows; i += COLUMN_WARPS) {
            store_at<TYPE, COUNT>(p, first + i, unit * COUNT,
                                  load_at<TYPE, COUNT>(p, first + i, unit * COUNT), factors);
        }
    }
}

/* ---- Large groups, in parts ---------------------------------------------------------------- */

/* descale = 0, for the maxima. */
__global__ void
__launch_bounds__(BLOCK_THREADS) clear_groups(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    for (int64_t number = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x;
         number < args.num_groups; number += (int64_t)gridDim.x * BLOCK_THREADS) {
        const group_place group = find_group(args, number);
        *descale_of(args.p, group.row_group, group.column_group) = 0.0f;
    }
}

/* A part's group and its units. */
struct group_part {
    group_place group;
    int64_t first;
    int64_t end;
};

__device__ __forceinline__ group_part
find_part(const scaled_args &args, int64_t number)
{
    const int64_t group = smla_divide(number, args.parts);
    const int64_t first = (number - group * args.parts.divisor) * PART_UNITS;
    return group_part{find_group(args, group), first, min(first + PART_UNITS, args.units_of_group)};
}

/* descale = the group's amax. */
template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS) find_amax(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    const int64_t num_parts = args.num_groups * args.parts.divisor;
    for (int64_t number = blockIdx.x; number < num_parts; number += gridDim.x) {
        const group_part part = find_part(args, number);
        float amax = 0.0f;
#pragma unroll 4
        for (int64_t i = part.first + threadIdx.x; i < part.end; i += BLOCK_THREADS) {
            amax = raise_amax<TYPE, COUNT>(amax, load_of_group<TYPE, COUNT>(args, part.group, i));
        }
        amax = max_of_block(amax);
        if (threadIdx.x == 0) {
            atomicMax((int *)descale_of(args.p, part.group.row_group, part.group.column_group),
                      (int)smla_float_bits(amax));
        }
    }
}

template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS) quantize_parts(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    const int64_t num_parts = args.num_groups * args.parts.divisor;
    /* The last parts come first, because L2 still has what find_amax read last. */
    for (int64_t number = num_parts - 1 - blockIdx.x; number >= 0; number -= gridDim.x) {
        const group_part part = find_part(args, number);
        const float factor =
            factor_of(*descale_of(args.p, part.group.row_group, part.group.column_group));
#pragma unroll 4
        for (int64_t i = part.first + threadIdx.x; i < part.end; i += BLOCK_THREADS) {
            store_of_group<TYPE, COUNT>(args, part.group, i,
                                        load_of_group<TYPE, COUNT>(args, part.group, i), factor);
        }
    }
}

/* descale = amax / 448, once no part needs amax any more. */
__global__ void
__launch_bounds__(BLOCK_THREADS) finish_groups(const __grid_constant__ scaled_args args)
{
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    for (int64_t number = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x;
         number < args.num_groups; number += (int64_t)gridDim.x * BLOCK_THREADS) {
        const group_place group = find_group(args, number);
        store_descale(args.p, group.row_group, group.column_group,
                      *descale_of(args.p, group.row_group, group.column_group));
    }
}

/* ---- The table ----------------------------------------------------------------------------- */

typedef void (*scaled_kernel)(scaled_args);

struct scaled_row {
    smla_float_type type;
    int32_t count; /* elements per unit */
    scaled_kernel lanes;
    scaled_kernel columns;
    scaled_kernel group;
    scaled_kernel amax;
    scaled_kernel parts;
};

template <int TYPE, int COUNT>
constexpr scaled_row
make_row(void)
{
    return scaled_row{(smla_float_type)TYPE,       COUNT,
                      quantize_lanes<TYPE, COUNT>, quantize_columns<TYPE, COUNT>,
                      quantize_group<TYPE, COUNT>, find_amax<TYPE, COUNT>,
                      quantize_parts<TYPE, COUNT>};
}

const scaled_row scaled_rows[] = {
    make_row<SMLA_FLOAT_BF16, 8>(), make_row<SMLA_FLOAT_BF16, 1>(), make_row<SMLA_FLOAT_FP16, 8>(),
    make_row<SMLA_FLOAT_FP16, 1>(), make_row<SMLA_FLOAT_FP32, 4>(), make_row<SMLA_FLOAT_FP32, 1>(),
};

/* Whether units of `count` elements are aligned and fill the groups' rows. Groups of one column are
 * fine, too: their kernel has a scale per column. */
bool
has_units(const smla_scaled_quantize_params *p, int32_t count)
{
    const int64_t element_bytes = 16 / count;
    const int64_t columns = p->group_columns == 1 ? p->num_columns : p->group_columns;
    return columns % count == 0 && smla_is_multiple(p->x, p->x_stride_row * element_bytes, 16) &&
           smla_is_multiple(p->out, p->out_stride_row, count);
}

const scaled_row *
find_row(const smla_scaled_quantize_params *p)
{
    const int32_t vector = p->type == SMLA_FLOAT_FP32 ? 4 : 8;
    const int32_t count = has_units(p, vector) ? vector : 1;
    for (const scaled_row &row : scaled_rows) {
        if (row.type == p->type && row.count == count) {
            return &row;
        }
    }
    return NULL;
}

scaled_args
make_args(const smla_scaled_quantize_params *p, int32_t count)
{
    /* An axis without values has a group without any. */
    const int64_t group_units = p->num_columns == 0 ? 0 : p->group_columns / count;
    const int64_t row_units = p->num_columns / count;
    const int64_t units = p->num_rows == 0 ? 0 : p->group_rows * group_units;
    const int64_t tiles = row_units > 0 ? smla_count_parts(row_units, SMLA_WARP_LANES) : 1;
    const int64_t most_rows = INT32_MAX / tiles; /* rows in a grid, which are whole */
    const auto divisor = [](int64_t size) { return smla_make_divisor(size > 0 ? size : 1); };
    return scaled_args{*p,
                       divisor(p->num_column_groups),
                       divisor(group_units),
                       divisor(row_units),
                       divisor(smla_count_parts(units, PART_UNITS)),
                       divisor(tiles),
                       p->num_row_groups < most_rows ? p->num_row_groups : most_rows,
                       p->num_row_groups * p->num_column_groups,
                       units};
}

/* ---- Launchers ----------------------------------------------------------------------------- */

cudaError_t
launch_parts(const scaled_row &row, const scaled_args &args)
{
    const smla_stream stream = args.p.call.stream;
    const int64_t blocks = smla_count_parts(args.num_groups, BLOCK_THREADS);
    const int64_t parts = args.num_groups * args.parts.divisor;
    cudaError_t code = smla_launch(clear_groups, args, blocks, BLOCK_THREADS, 0, stream);
    code =
        code != cudaSuccess ? code : smla_launch(row.amax, args, parts, BLOCK_THREADS, 0, stream);
    code =
        code != cudaSuccess ? code : smla_launch(row.parts, args, parts, BLOCK_THREADS, 0, stream);
    return code != cudaSuccess ? code
                               : smla_launch(finish_groups, args, blocks, BLOCK_THREADS, 0, stream);
}

/* Threads of a block that has a group: whole warps, with up to HELD units per thread if there are
 * more units than a usual block has threads. */
int
count_threads(int64_t units)
{
    const int64_t usual = BLOCK_THREADS, most = MOST_THREADS;
    const int64_t few = units < usual ? units : usual;
    const int64_t wanted = units / HELD > few ? units / HELD : few;
    const int64_t threads = smla_count_parts(wanted, SMLA_WARP_LANES) * SMLA_WARP_LANES;
    return threads < 1 ? (int)SMLA_WARP_LANES : (int)(threads < most ? threads : most);
}

bool
is_power_of_two(int64_t n)
{
    return n > 0 && (n & (n - 1)) == 0;
}

} /* namespace */

cudaError_t
smla_cuda_launch_scaled_quantize(const smla_scaled_quantize_params *p,
                                 const smla_cuda_device *device)
{
    const scaled_row *const row = find_row(p);
    const smla_stream stream = p->call.stream;
    if (row == NULL) {
        return SMLA_NO_KERNEL;
    }
    const scaled_args args = make_args(p, row->count);
    if (p->group_columns == 1 && p->num_columns > 0 && p->num_rows > 0) {
        return smla_launch(row->columns, args, args.row_step * args.column_tiles.divisor,
                           BLOCK_THREADS, 0, stream);
    }
    const int64_t lanes = args.group_units.divisor;
    if (p->group_rows == 1 && args.units_of_group > 0 && is_power_of_two(lanes) &&
        lanes <= SMLA_WARP_LANES) {
        return smla_launch(row->lanes, args,
                           smla_count_parts(p->num_rows * args.row_units.divisor, BLOCK_THREADS),
                           BLOCK_THREADS, 0, stream);
    }
    if (args.num_groups < device->num_sms && args.units_of_group * row->count >= LARGE_GROUP) {
        return launch_parts(*row, args);
    }
    return smla_launch(row->group, args, args.num_groups, count_threads(args.units_of_group), 0,
                       stream);
}
