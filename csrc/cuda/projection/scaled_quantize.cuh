/* scaled_quantize.cuh: what the kernels of scaled_quantize share: units of a row, factors and
 * scales of groups. */
#pragma once

#include <float.h>

#include "core/params_projection.h"
#include "cuda/host/cuda.h"
#include "cuda/projection/quant_units.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

enum {
    MOST_THREADS = 512, /* threads of a block with a large group */
    MOST_WARPS = MOST_THREADS / SMLA_WARP_LANES,
    HELD = 4, /* units that a thread keeps in registers for the second pass */
};

/* The kernels' argument. Units of a row are numbered from 0 on. */
typedef struct scaled_args {
    smla_scaled_quantize_params p;
    smla_divisor column_groups; /* number of groups in a row of groups */
    smla_divisor group_units;   /* units in a row of a group */
    smla_divisor row_units;     /* units in a row of x */
    smla_divisor parts;         /* parts of a large group */
    smla_divisor column_tiles;  /* quantize_columns: tiles in a row of x */
    smla_divisor slabs;         /* quantize_columns: slabs of a group's rows */
    int64_t row_step;           /* quantize_columns: slabs that a grid has at a time, in a column */
    int64_t num_groups;
    int64_t units_of_group;
} scaled_args;

/* ---- Units --------------------------------------------------------------------------------- */

/* Loads the unit at column `column` of a row. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ unit_words<TYPE, COUNT>
load_at(const smla_scaled_quantize_params &p, int64_t row, int64_t column)
{
    unit_words<TYPE, COUNT> unit;
    load_unit<TYPE, COUNT>(p.x, row * p.x_stride_row + column, unit.words);
    return unit;
}

/* Quantises a unit; each of its values has a factor. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ void
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
    store_codes<COUNT>(p.out + row * p.out_stride_row + column, bytes);
}

template <int TYPE, int COUNT>
static __device__ __forceinline__ void
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

static __device__ __forceinline__ float
used_amax(float amax)
{
    return fmaxf(fminf(amax, FLT_MAX), SMLA_SCALED_QUANTIZE_FLOOR);
}

/* Returns 448 / used_amax(amax), rounded as a division rounds, without the call that a division is.
 * It divides by the mantissa and subtracts the exponent, because no quotient is subnormal. That was
 * tried for all 2^23 mantissas, with reciprocals off by up to two units. */
static __device__ __forceinline__ float
factor_of(float amax)
{
    const uint32_t bits = smla_float_bits(used_amax(amax));
    const uint32_t exponent = (bits & 0x7F800000u) - 0x3F800000u;
    const smla_scale mantissa = smla_make_scale(smla_bits_float(bits - exponent));
    const float quotient = smla_divide_moderate(SMLA_E4M3_MAX, mantissa);
    return smla_bits_float(smla_float_bits(quotient) - exponent);
}

static __device__ __forceinline__ float *
descale_of(const smla_scaled_quantize_params &p, int64_t row_group, int64_t column_group)
{
    return p.descale + row_group * p.descale_stride_row + column_group * p.descale_stride_column;
}

/* Writes used_amax(amax) / 448, rounded as a division rounds, which was tried in the same way. */
static __device__ __forceinline__ void
store_descale(const smla_scaled_quantize_params &p, int64_t row_group, int64_t column_group,
              float amax)
{
    const float used = used_amax(amax);
    *descale_of(p, row_group, column_group) =
        smla_divide_moderate(used, smla_make_scale(SMLA_E4M3_MAX));
}

/* The larger amax of all lanes in `mask`. Floats >= 0 have the order of their bits. */
static __device__ __forceinline__ float
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

static __device__ __forceinline__ group_place
find_group(const scaled_args &args, int64_t number)
{
    const int64_t row_group = smla_divide(number, args.column_groups);
    const int64_t column_group = number - row_group * args.column_groups.divisor;
    return group_place{row_group, column_group, row_group * args.p.group_rows,
                       column_group * args.p.group_columns};
}

/* ---- Groups of a block -------------------------------------------------------------------- */

/* The block's largest amax, for all of its threads. */
static __device__ __forceinline__ float
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
static __device__ __forceinline__ unit_words<TYPE, COUNT>
load_of_group(const scaled_args &args, const group_place &group, int64_t i)
{
    const int64_t row = smla_divide(i, args.group_units);
    return load_at<TYPE, COUNT>(args.p, group.row + row,
                                group.column + (i - row * args.group_units.divisor) * COUNT);
}

template <int TYPE, int COUNT>
static __device__ __forceinline__ void
store_of_group(const scaled_args &args, const group_place &group, int64_t i,
               const unit_words<TYPE, COUNT> &unit, float factor)
{
    const int64_t row = smla_divide(i, args.group_units);
    store_by<TYPE, COUNT>(args.p, group.row + row,
                          group.column + (i - row * args.group_units.divisor) * COUNT, unit,
                          factor);
}

/* Loads a thread's units of a group, of which unit k has the number unit_of(k). Returns their
 * amax. */
template <int TYPE, int COUNT, typename Number>
static __device__ __forceinline__ float
load_held(const scaled_args &args, const group_place &group, const Number &unit_of,
          unit_words<TYPE, COUNT> (&held)[HELD])
{
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const int64_t i = unit_of(k);
        if (i < args.units_of_group) {
            held[k] = load_of_group<TYPE, COUNT>(args, group, i);
        }
    }
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        amax = raise_amax<TYPE, COUNT>(amax, held[k]);
    }
    return amax;
}

template <int TYPE, int COUNT, typename Number>
static __device__ __forceinline__ void
store_held(const scaled_args &args, const group_place &group, const Number &unit_of,
           const unit_words<TYPE, COUNT> (&held)[HELD], float factor)
{
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const int64_t i = unit_of(k);
        if (i < args.units_of_group) {
            store_of_group<TYPE, COUNT>(args, group, i, held[k], factor);
        }
    }
}

/* ---- scaled_quantize_sm90.cu --------------------------------------------------------------- */

enum {
    CLUSTER_BLOCKS = 8,
    CLUSTER_UNITS = CLUSTER_BLOCKS * MOST_THREADS * HELD, /* units that a cluster holds */
};

/* Launches the kernel of groups of at most CLUSTER_UNITS units of 16 bytes. */
extern "C" cudaError_t smla_cuda_launch_scaled_quantize_sm90(const scaled_args *args);
