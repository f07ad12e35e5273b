// The calls of the fuzzer (tests/fuzz/c_api.cpp) from the bytes of its corpus, on two threads at
// once: a program for LeakSanitizer, which sees what is still held when it ends. Status 0: all is
// well.
//
// With "leak" behind the folder of the corpus it loses an array, which has to be noticed.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "mlx_h2o/c/h2o.h"

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "driver: %s; last error: %s\n", what, mlx_h2o_last_error());
  std::exit(1);
}

void settings() {
  mlx_h2o_config config = mlx_h2o_config_new();
  expect(mlx_h2o_config_resolve(&config) == 0, "resolve");
  expect(mlx_h2o_config_preset(&config, "heavy", 64) == 0, "preset");
  int count = 0;
  expect(mlx_h2o_threads(&count) == 0 && mlx_h2o_set_threads(2) == 0, "threads");
  bool available = false;
  mlx_string reason = mlx_string_new();
  expect(mlx_h2o_backend_status("metal", &available, &reason) == 0, "status");
  mlx_string_free(reason);
}

// The call fails, and its thread can read what it said: `who` sets the two apart.
void failures(int who) {
  const std::string name = "thread " + std::to_string(who);
  for (int i = 0; i < 200; ++i) {
    expect(mlx_h2o_set_backend(name.c_str()) != 0, "an unknown back end");
    expect(mlx_h2o_last_error() == "[use_backend] unknown back end '" + name +
                                       "', expected one of metal, cuda, native, composed.",
           "the words of a thread");
  }
}

void everything(const std::vector<std::vector<uint8_t>>& corpus, int who) {
  for (const auto& bytes : corpus) LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  failures(who);
}

}  // namespace

int main(int count, char** arguments) {
  LLVMFuzzerInitialize(&count, &arguments);
  std::vector<std::vector<uint8_t>> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(arguments[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  settings();
  std::thread other([&] { everything(corpus, 2); });
  everything(corpus, 1);
  other.join();
  if (count > 2) {
    const float lost[] = {0};
    const int shape[] = {1};
    expect(mlx_array_new_data(lost, shape, 1, MLX_FLOAT32).ctx != nullptr, "an array");
  }
  std::puts("no errors");
  return 0;
}
