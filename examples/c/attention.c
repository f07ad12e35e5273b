/* Attention over 16 keys, and the 8 rows per head that a cache would keep by its scores.
 *
 * cc -std=c99 attention.c -I../../mlx-c/include -I../../mlx-c/h2o/include -L../../build/c -lmlxh2oc
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "mlx_h2o/c/h2o.h"

enum { HEADS = 2, ROWS = 16, SIZE = 32, KEEP = 8 };

/* The error has been printed by the library's handler. */
static void check(int status) {
  if (status != 0) exit(1);
}

static mlx_array wave(int rows, float phase) {
  const int shape[] = {1, HEADS, rows, SIZE};
  float data[HEADS * ROWS * SIZE];
  for (int i = 0; i < HEADS * rows * SIZE; ++i)
    data[i] = sinf(phase + 0.37f * (float)(i * i % 101));
  return mlx_array_new_data(data, shape, 4, MLX_FLOAT32);
}

int main(void) {
  const int per_head[] = {1, HEADS, ROWS};
  const mlx_array none = mlx_array_new();
  const mlx_array recent_start = mlx_array_new_int(ROWS - 4);
  mlx_stream s = mlx_default_cpu_stream_new();
  mlx_array queries = wave(1, 0), keys = wave(ROWS, 1), values = wave(ROWS, 2);
  mlx_array out = mlx_array_new(), scores = mlx_array_new(), importance = mlx_array_new();
  mlx_array positions = mlx_array_new(), kept = mlx_array_new();

  check(mlx_h2o_scaled_dot_product_attention_with_scores(&out, &scores, NULL, queries, keys, values,
                                                         1 / sqrtf(SIZE), "", none, none, none, s));
  check(mlx_abs(&importance, scores, s));
  check(mlx_reshape(&importance, importance, per_head, 3, s));
  check(mlx_arange(&positions, 0, ROWS, 1, MLX_INT32, s));
  check(mlx_broadcast_to(&positions, positions, per_head, 3, s));
  check(mlx_h2o_keep_indices(&kept, importance, positions, KEEP, 2, recent_start, s));
  check(mlx_array_eval(kept));

  const uint32_t* slots = mlx_array_data_uint32(kept);
  for (int head = 0; head < HEADS; ++head) {
    printf("head %d kept:", head);
    for (int i = 0; i < KEEP; ++i) printf(" %u", slots[head * KEEP + i]);
    printf("\n");
  }
  mlx_array owned[] = {queries,    keys,      values, out,         scores,
                       importance, positions, kept,   recent_start};
  for (size_t i = 0; i < sizeof owned / sizeof owned[0]; ++i) mlx_array_free(owned[i]);
  return mlx_stream_free(s);
}
