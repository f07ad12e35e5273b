// The public functions on rows of a cache, including the one that selects the rows to keep.
#include "mlx_h2o/c/rows.h"

#include "backend.h"
#include "boundary.h"
#include "codes.h"
#include "mlx_h2o/c/selection.h"
#include "validate.h"

using namespace mlx_h2o_c;

int mlx_h2o_accumulate_scores(mlx_array* res, mlx_array importance, mlx_array scores, double decay,
                              bool masked, mlx_stream s) {
  return operation("accumulate_scores", {{"res", res}}, [&](const char* op) {
    Arguments given(op);
    given.array(found(importance));
    given.array(found(scores));
    given.number("decay", decay);
    give(res, serve(op, &Backend::accumulate_scores,
                    AccumulateRequest{importance, scores, decay, masked, s}));
  });
}

int mlx_h2o_key_diversity(mlx_array* res, mlx_array keys, mlx_stream s) {
  return operation("key_diversity", {{"res", res}}, [&](const char* op) {
    Arguments(op).array(found(keys));
    give(res, serve(op, &Backend::key_diversity, KeyDiversityRequest{keys, s}));
  });
}

int mlx_h2o_fold(mlx_array* into, mlx_array* new_keys, mlx_array* new_values, mlx_array* new_bias,
                 mlx_array* new_mass, mlx_array keys, mlx_array values, mlx_array bias,
                 mlx_array mass, mlx_array weights, mlx_array eligible, mlx_array kept,
                 double share, mlx_stream s) {
  const Places places = {{"into", into},
                         {"new_keys", new_keys},
                         {"new_values", new_values},
                         {"new_bias", new_bias},
                         {"new_mass", new_mass}};
  return operation("fold", places, [&](const char* op) {
    Arguments given(op);
    for (const mlx_array each : {keys, values, bias, mass, weights, eligible, kept}) {
      given.array(found(each));
    }
    given.number("share", share);
    const Folded made =
        serve(op, &Backend::fold,
              FoldRequest{keys, values, bias, mass, weights, eligible, kept, share, s});
    give(into, made.into);
    give(new_keys, made.keys);
    give(new_values, made.values);
    give(new_bias, made.bias);
    give(new_mass, made.mass);
  });
}

int mlx_h2o_quantize_append(mlx_vector_array* new_keys, mlx_vector_array* new_values,
                            mlx_vector_array keys, mlx_vector_array values, mlx_array key_rows,
                            mlx_array value_rows, mlx_array slots, int bits, int group_size,
                            mlx_optional_int v_bits, mlx_stream s) {
  const Places places = {{"new_keys", new_keys}, {"new_values", new_values}};
  return operation("quantize_append", places, [&](const char* op) {
    const Packing packing = {bits, group_size, v_bits};
    Arguments given(op);
    given.packing(bits, packing.of_values(), group_size);
    given.array(found(key_rows));
    given.array(found(value_rows));
    Rows k = checked_rows(given, parts_of(op, "keys", keys), bits, group_size, "D");
    Rows v =
        checked_rows(given, parts_of(op, "values", values), packing.of_values(), group_size, "Dv");
    given.array(found(slots));
    const Written result =
        serve(op, &Backend::quantize_append,
              AppendRequest{std::move(k), std::move(v), key_rows, value_rows, slots, s});
    give(new_keys, result.keys);
    give(new_values, result.values);
  });
}

int mlx_h2o_encode_rows(mlx_array* words, mlx_array* norms, mlx_array rows, int bits,
                        bool of_values, mlx_stream s) {
  return operation("encode_rows", {{"words", words}, {"norms", norms}}, [&](const char* op) {
    Arguments given(op);
    given.array(found(rows));
    given.one_of("bits", bits);
    expect(codes_fit(given["D"]), op, "rows have ", given["D"],
           " elements, expected a power of two from 32 to 1024.");
    const std::vector<Array> made =
        serve(op, &Backend::encode_rows, EncodeRequest{rows, bits, Side(of_values), s});
    give(words, made[0]);
    give(norms, made[1]);
  });
}

int mlx_h2o_decode_rows(mlx_array* res, mlx_array words, mlx_array norms, int bits, bool of_values,
                        mlx_stream s) {
  return operation("decode_rows", {{"res", res}}, [&](const char* op) {
    Arguments given(op);
    given.code_bits(bits);
    std::vector<Array> parts = parts_of(words, norms, {});
    expect(parts.size() == 2, op, "norms are an empty handle, expected an array [B, H, N, 1].");
    Rows rows = checked_rows(given, std::move(parts), bits, 0, "D");
    give(res, serve(op, &Backend::decode_rows, DecodeRequest{std::move(rows), Side(of_values), s}));
  });
}

int mlx_h2o_keep_indices(mlx_array* res, mlx_array scores, mlx_array positions, int keep,
                         int sink_size, mlx_array recent_start, mlx_stream s) {
  return operation("keep_indices", {{"res", res}}, [&](const char* op) {
    Arguments given(op);
    given.array(found(scores));
    given.array(found(positions));
    given.integer("keep", keep);
    given.integer("sink_size", sink_size);
    if (recent_start.ctx != nullptr) given.per_sequence("recent_start", found(recent_start));
    give(res, serve(op, &Backend::keep_indices,
                    RetentionRequest{scores, positions, given["B"], given["H"], given["N"],
                                     given["N"] - keep, sink_size, recent_start, s}));
  });
}
