/* shared_values.cuh: a lane's few neighbouring values in shared memory, in pieces as large as the
 * machine moves at once.
 */
#pragma once

#include "cuda/ptx/launch.cuh"

/* Reads COUNT values from shared memory, at most 16 bytes at a time. `flip` changes the order of
 * these pieces. */
template <int COUNT>
static __device__ __forceinline__ void
read_values(const float *row, int first, int flip, float values[COUNT])
{
    if constexpr (COUNT == 2) {
        const float2 pair = *(const float2 *)&row[first ^ flip];
        values[0] = pair.x;
        values[1] = pair.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float4 four = *(const float4 *)&row[(first + i) ^ flip];
            values[i] = four.x;
            values[i + 1] = four.y;
            values[i + 2] = four.z;
            values[i + 3] = four.w;
        }
    }
}

template <int COUNT>
static __device__ __forceinline__ void
store_shared(void *to, const uint32_t words[COUNT])
{
    if constexpr (COUNT == 4) {
        *(uint4 *)to = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (COUNT == 2) {
        *(uint2 *)to = make_uint2(words[0], words[1]);
    } else {
        *(uint32_t *)to = words[0];
    }
}
