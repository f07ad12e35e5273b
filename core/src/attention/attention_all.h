// The sweeps of attention, compiled for each SIMD target.
#include "attention/attention_stored.h"
//
#include "attention/attention_listed.h"
//
#include "attention/softmax_sweeps.h"
//
#include "attention/attention_tiles.h"
//
#include "attention/logit_masks.h"
//
#include "attention/attention_rows.h"
//
#include "attention/attention_sweeps.h"
//
#include "attention/attention_sparse.h"
