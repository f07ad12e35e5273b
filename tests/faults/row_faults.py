"""Faults in the Metal text of the operations on rows, by what shows them."""

from __future__ import annotations

from faults.metal import BARRIER
from faults.text import Edit

FAULTS = {
    "accumulate": {
        "a row too many is averaged": Edit(
            "accumulate_scores", "row >= row_count", "row > row_count"
        ),
        "a group's heads are taken for another's": Edit(
            "accumulate_scores", "kv_head * heads_of_group", "kv_head"
        ),
        "a row without a score is averaged": Edit(
            "accumulate_scores", "row < scores_shape[3] ? scores_shape[2] : 0", "scores_shape[2]"
        ),
        "the first score is averaged": Edit(
            "accumulate_scores", "average != average", "average == 0.0f"
        ),
    },
    "keep": {
        "one row too many is dropped": Edit(
            "keep_rows", "all_below <= dropped", "all_below < dropped"
        ),
        "the upper word does not count below a threshold": Edit(
            "keep_rows", "key.upper == upper && key.lower < candidate", "key.lower < candidate"
        ),
        "the row at the threshold goes": Edit(
            "keep_rows", "key.lower >= lower", "key.lower > lower"
        ),
        "all sequences have the window of the first": Edit(
            "keep_rows", "recent_starts[batch * recent_starts_strides[0]]", "recent_starts[0]"
        ),
        "recent rows may go": Edit("h2o_retention_key", "|| position >= recent_start", ""),
        "a row behind the last is counted": Edit(
            "keep_rows", "row < row_count; row += NS", "row <= row_count; row += NS"
        ),
        "rows found before are written over": Edit(
            "keep_rows", "before + found + so_far - 1", "before + so_far - 1"
        ),
        "a simdgroup counts itself among those before": Edit(
            "keep_rows", "lane < group ? counts[lane]", "lane <= group ? counts[lane]"
        ),
        "lanes add what no lane before them has": Edit(
            "keep_rows", "lane >= distance ? other : 0", "other"
        ),
        "all heads are written to the first": Edit(
            "keep_rows", "int64_t(...) * kept_count", "(kept_count - kept_count)"
        ),
        "minus zero is less than zero": Edit(
            "h2o_retention_key", "score == 0.0f ? 0.0f : score", "score"
        ),
        "negative scores in reverse": Edit("h2o_retention_key", "~bits : bits |", "bits : bits |"),
        "no row is a sink": Edit("h2o_retention_key", "position < sink_end ||", ""),
        "padding has no slot": Edit(
            "h2o_retention_key", "is_padding ? slot : position", "position"
        ),
        "of equals the lower position goes": Edit("h2o_retention_key", "0x3FFFFFFFu -", ""),
        "the last bits of a score are left out": Edit(
            "h2o_retention_key", "(ranked << 30) | place", "place"
        ),
    },
    "average": {
        "decay and its complement change places": Edit(
            "prefill_average",
            "params[2] * results[k] + params[3] * size",
            "params[3] * results[k] + params[2] * size",
        ),
        "the first score of a chunk is averaged": Edit(
            "prefill_average", "results[k] != results[k]", "results[k] == 0.0f"
        ),
        "a query does not see its own key": Edit(
            "prefill_average", "query_index + 1", "query_index"
        ),
        "a block of keys is seen by its first": Edit(
            "prefill_average", "first_key + k < visible_end", "first_key < visible_end"
        ),
        "negative scores do not count": Edit(
            "prefill_average", "score > H2O_NEGATIVE_INFINITY", "score > 0.0f"
        ),
        "heads of a chunk are taken for another group's": Edit(
            "prefill_average", "kv_head * heads_of_group", "kv_head"
        ),
        "keys behind the last are written": Edit(
            "prefill_average", "lane == 0 && k < own_keys", "lane == 0"
        ),
        "queries of a chunk are not scaled": Edit("prefill_average", "*= params[0]", "*= 1.0f"),
    },
    "mass": {
        "weights are not over their total": Edit("prefill_mass", "score - denominator", "score"),
        "a query that sees nothing has weights": Edit(
            "prefill_mass", "denominator == H2O_NEGATIVE_INFINITY", "denominator == 0.0f"
        ),
        "NaN of a mask is left to exp": Edit(
            "prefill_mass", "sums[k] += denominator - denominator;", ""
        ),
        "sequences have the denominators of the first": Edit(
            "prefill_mass", "(int64_t(batch) * heads + head) * query_count", "head * query_count"
        ),
        "the last query's weights alone": Edit("prefill_mass", "results[k] +=", "results[k] ="),
        "NaN of a mask is left out of the denominator": Edit("prefill_lse", "bias - bias", "0.0f"),
        "all simdgroups' parts are the first's": Edit(
            "prefill_lse", "lane * QUERIES + r", "r", every=True
        ),
        "denominators are merged before they are there": Edit("prefill_lse", BARRIER, ""),
        "rows behind the last have a denominator": Edit("prefill_lse", "row < row_count", "true"),
        "the last query's keys alone": Edit(
            "prefill_lse", "last_end = metal::max(...);", "last_end = ends[r];"
        ),
        "query rows are dealt to heads in turn": Edit(
            "prefill_lse", "row / query_count", "row / heads_of_group"
        ),
        "every simdgroup counts the sink": Edit("prefill_lse", "if (group == 0) {", "{"),
    },
    "encode": {
        "a norm is that of a lane's elements": Edit(
            "encode_rows",
            "length = metal::precise::sqrt(metal::simd_sum(h2o_dot<E>(...)))",
            "length = metal::precise::sqrt(h2o_dot<E>(...))",
        ),
        "a row of zeros is divided by its norm": Edit(
            "encode_rows", "metal::max(length, LEAST_NORM)", "metal::max(length, LEAST_NORM - 1.0f)"
        ),
        "a norm is that of the row": Edit("encode_rows", "length / coded", "length + 0.0f * coded"),
        "lanes have the signs of the first": Edit("encode_rows", "signs[lane * E + j]", "signs[j]"),
        "elements of a lane are not mixed": Edit(
            "encode_rows", "bit < E; bit *= 2", "bit < 1; bit *= 2"
        ),
        "the upper lanes are not mixed": Edit("encode_rows", "bit < LANES;", "bit < LANES / 2;"),
        "differences have the other sign": Edit(
            "encode_rows", "other - elements[j]", "elements[j] - other"
        ),
        "sums are not over the root of their number": Edit(
            "encode_rows", "metal::precise::sqrt(float(D))", "float(D)"
        ),
        "the highest level is not reached": Edit(
            "encode_rows", "k + 1 < (1 << BITS)", "k + 2 < (1 << BITS)"
        ),
        "codes are those of the levels below": Edit(
            "encode_rows", "(levels[k] + levels[k + 1]) / 2.0f", "levels[k]"
        ),
        "lanes do not wait for each other's codes": Edit("encode_rows", BARRIER, ""),
        "bits of a code in the next word are forgotten": Edit(
            "encode_rows", "code >> -shift", "0u"
        ),
        "all rows are read at the first": Edit(
            "encode_rows", "head, token, lane", "head, token - token, lane"
        ),
        "the words of all rows are the first's": Edit(
            "encode_rows", "words[row * WORDS + word]", "words[word]"
        ),
    },
}
