/* params_all.h: the params of all families, for files that go through the list of operators. */
#pragma once

#include "core/attention/params_attention.h"
#include "core/params_cache.h"
#include "core/params_compressor.h"
#include "core/params_index.h"
#include "core/params_indexer.h"
#include "core/params_merge.h"
#include "core/params_norm.h"
#include "core/params_paged_step.h"
#include "core/params_projection.h"
#include "core/params_rope.h"
#include "core/params_step.h"
#include "core/params_topk.h"
