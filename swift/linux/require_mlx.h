// Included before every C and C++ source of the Linux build: a clean clone has no MLX to build on,
// and the compiler's own message would name a header that nobody has heard of.
#if defined(__cplusplus) && !__has_include("mlx/mlx.h")
#error \
    "MLX was not found. Run 'nox -s swift', which links .mlx to the installed mlx, or set MLX_ROOT to the mlx folder of a Python environment that has it."
#endif
