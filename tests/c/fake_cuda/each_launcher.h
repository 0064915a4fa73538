/* each_launcher.h: the names of all launchers in kernels.c. EACH_LAUNCHER(LAUNCHER) defines them
 * for a machine without CUDA: LAUNCHER(name) expands to the function smla_attend_name.
 */
#pragma once

#define EACH_LAUNCHER(LAUNCHER)  \
    LAUNCHER(sm90_small_32)      \
    LAUNCHER(sm90_small_16)      \
    LAUNCHER(sm90_small_64)      \
    LAUNCHER(sm90_small_v4_32)   \
    LAUNCHER(sm90_small_v4_16)   \
    LAUNCHER(sm90_small_v4_64)   \
    LAUNCHER(sm90_fp8_64)        \
    LAUNCHER(sm90_fp8_32)        \
    LAUNCHER(sm90_fp8_16)        \
    LAUNCHER(sm90_v4_64)         \
    LAUNCHER(sm90_v4_32)         \
    LAUNCHER(sm90_v4_16)         \
    LAUNCHER(sm90_bf16_64)       \
    LAUNCHER(sm90_bf16_512_64)   \
    LAUNCHER(sm90_512_64)        \
    LAUNCHER(sm90_dense_64)      \
    LAUNCHER(sm90_dense_512_64)  \
    LAUNCHER(sm90_few_64)        \
    LAUNCHER(sm90_few_512_64)    \
    LAUNCHER(sm90_fp8_dense_64)  \
    LAUNCHER(sm90_fp8_dense_32)  \
    LAUNCHER(sm90_fp8_dense_16)  \
    LAUNCHER(sm90_e4m3_dense_64) \
    LAUNCHER(sm90_e4m3_dense_32) \
    LAUNCHER(sm90_e4m3_dense_16) \
    LAUNCHER(sm90_fp8_tiles_64)  \
    LAUNCHER(sm90_fp8_tiles_32)  \
    LAUNCHER(sm90_fp8_tiles_16)  \
    LAUNCHER(sm90_e4m3_tiles_64) \
    LAUNCHER(sm90_e4m3_tiles_32) \
    LAUNCHER(sm90_e4m3_tiles_16) \
    LAUNCHER(sm80_fp8_64)        \
    LAUNCHER(sm80_fp8_32)        \
    LAUNCHER(sm80_fp8_16)        \
    LAUNCHER(sm80_bf16_64)       \
    LAUNCHER(sm80_bf16_32)       \
    LAUNCHER(sm80_bf16_16)       \
    LAUNCHER(sm80_bf16_512_64)   \
    LAUNCHER(sm80_bf16_512_32)   \
    LAUNCHER(sm80_bf16_512_16)   \
    LAUNCHER(sm80_mixed_16)      \
    LAUNCHER(sm80_e4m3_576_64)   \
    LAUNCHER(sm80_e4m3_576_32)   \
    LAUNCHER(sm80_e4m3_576_16)   \
    LAUNCHER(sm80_any_576_16)    \
    LAUNCHER(sm80_512_64)        \
    LAUNCHER(sm80_512_32)        \
    LAUNCHER(sm80_512_16)
