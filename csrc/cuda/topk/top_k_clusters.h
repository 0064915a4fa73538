/* top_k_clusters.h: the launchers of top_k_sm90.cu and top_k_resident_sm90.cu, for top_k.cu. */
#pragma once

#include "core/params_topk.h"
#include "cuda/host/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SMLA_MAX_ROW_CTAS = 8 }; /* the largest cluster that every Hopper GPU can start */

/* Runs rows on clusters of 2, 4 or 8 CTAs. */
cudaError_t smla_cuda_launch_top_k_clusters(const smla_top_k_params *params, int ctas);

enum { SMLA_RESIDENT_KEYS = 32 }; /* keys that a thread has of one part of a row */

/* How a row is resident: in a cluster of 1, 2, 4 or 8 CTAs of 1024 threads, or in one CTA of 512,
 * in one or two parts. With three parts, two are resident in 8 CTAs, which read the third again and
 * again. */
typedef struct smla_resident_plan {
    int ctas;
    int threads;
    int parts;
} smla_resident_plan;

/* Runs rows of at most SMLA_RESIDENT_KEYS keys per thread and part, or rows of any length in three
 * parts. */
cudaError_t smla_cuda_launch_top_k_resident(const smla_top_k_params *params,
                                            smla_resident_plan plan);

#ifdef __cplusplus
}
#endif
