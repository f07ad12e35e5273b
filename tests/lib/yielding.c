// Threads of MLX that wait for another process try again at once, which takes the processor from it
// where there are more processes than processors: they pause here.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

ssize_t recv(int file, void* data, size_t size, int flags) {
  ssize_t (*next)(int, void*, size_t, int) =
      (ssize_t(*)(int, void*, size_t, int))dlsym(RTLD_NEXT, "recv");
  ssize_t found = next(file, data, size, flags);
  if (found < 0) {
    int error = errno;
    usleep(50);
    errno = error;
  }
  return found;
}
