# Builds the native test driver for AArch64 with Debian's cross compiler, to run under QEMU.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
# QEMU 7.2 stops at an assertion of its own where the child of a process with threads starts one.
set(CMAKE_CXX_FLAGS_INIT -DMLX_H2O_TEST_FORK=0)
