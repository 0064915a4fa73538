/* varlen_scale.cuh: constants of logits and weights that the kernels of varlen_attention share. */
#pragma once

constexpr float LOG2_E = 1.44269504f;

/* Weights of fp16 are multiplied by 2^7, so that weights down to 2^-21 of a row's largest keep all
 * bits, and none exceeds 2^15. */
template <bool HALF> constexpr float WEIGHT_SHIFT = HALF ? 7.0f : 0.0f;
