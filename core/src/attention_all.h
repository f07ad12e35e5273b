// What is compiled for each SIMD target.
#include "attention_stored.h"
//
#include "attention_listed.h"
//
#include "simd_exp.h"
//
#include "attention_tiles.h"
//
#include "logit_masks.h"
//
#include "attention_rows.h"
//
#include "attention_sweeps.h"
//
#include "attention_sparse.h"
