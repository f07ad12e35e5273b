// Memory that runs out: loaded before Python (LD_PRELOAD), `malloc` and `aligned_alloc` find none
// once, at one of the arrays that the native code asks MLX for. MLX itself does not look whether it
// found any, so that its operations are left alone, and the arrays of one number that its headers
// make in ours.
#define _GNU_SOURCE
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <stddef.h>
#include <string.h>

void* __libc_malloc(size_t size);
void* __libc_memalign(size_t alignment, size_t size);

enum {
  frames = 7,  // up to who called MLX's allocator
  one_number = 32
};

// Where the code of libraries lies.
struct range {
  const char *first, *end;
};
static struct range mlx, ours;

static long left;  // arrays up to the one without memory; 0: all get some
static long asked;

static int look(struct dl_phdr_info* library, size_t size, void* unused) {
  (void)size, (void)unused;
  const char* name = library->dlpi_name;
  struct range* found = strstr(name, "libmlx.so") ? &mlx : NULL;
  if (strstr(name, "mlx_h2o/_core.") || strstr(name, "libmlxh2oc")) found = &ours;
  for (int i = 0; found && i < library->dlpi_phnum; ++i) {
    const ElfW(Phdr)* part = &library->dlpi_phdr[i];
    if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
    found->first = (const char*)library->dlpi_addr + part->p_vaddr;
    found->end = found->first + part->p_memsz;
  }
  return 0;
}

// The array of this number gets no memory; a large number only counts, and 0 ends it.
void fail_at(long number) {
  void* unused[1];
  backtrace(unused, 1);  // its first call takes memory
  dl_iterate_phdr(look, NULL);
  asked = 0;
  left = number;
}

long arrays_asked(void) { return asked; }

static int in(const struct range* code, const void* address) {
  return (const char*)address >= code->first && (const char*)address < code->end;
}

static int fails(size_t size, const void* caller) {
  if (left == 0 || size <= one_number || !in(&mlx, caller)) return 0;
  void* calls[frames];
  const int count = backtrace(calls, frames);
  int at = 0;
  while (at < count && !in(&mlx, calls[at])) ++at;  // this file
  while (at < count && in(&mlx, calls[at])) ++at;   // the allocator
  if (at == count || !in(&ours, calls[at])) return 0;
  ++asked;
  if (--left != 0) return 0;
  errno = ENOMEM;
  return 1;
}

void* malloc(size_t size) {
  return fails(size, __builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  return fails(size, __builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
}
